"""Fewer tokens with log-weights, and what that risks. Called itself, the package is `kvcellar.reduce_cache`:

smaller = kvcellar.reduce(cache, budget=0.25, model=model, tokens=ids)
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, cache: Any, **settings: Any) -> Any:
        return sys.modules[__name__.rpartition(".")[0]].reduce_cache(cache, **settings)


sys.modules[__name__].__class__ = _Callable
