"""Keep an LLM's KV cache in a file about as small as its text is predictable.

`save` a cache, `open` it again, `find` the longest stored prefix of a prompt. Importing kvcellar loads neither
torch nor transformers; the first use of `save`, `open` or `find` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import KVCellarError
from .identity import Identity
from .recipe import Recipe, tokens_recipe

if TYPE_CHECKING:
    from .cache import KVCache, LayerKV, Restored
    from .frontends.archive import Archive
    from .frontends.batch import Batch, batch
    from .frontends.library import Found, find, open, save
    from .frontends.queries import collect_queries
    from .frontends.recompress import Recompressed, recompress
    from .frontends.reduce import prefill_reduced, reduce_cache
    from .frontends.repair import repair
    from .frontends.sessions import Nearest, Sessions, nearest
    from .frontends.tree import prefill_tree
    from .frontends.treestream import TreeStream
    from .frontends.weighted import WeightedCache, use_ragged_attention
    from .profile import Profile

__version__ = "0.1.0"
_LATER = {
    "save": "frontends.library",
    "open": "frontends.library",
    "find": "frontends.library",
    "Archive": "frontends.archive",
    "Batch": "frontends.batch",
    "batch": "frontends.batch",
    "Found": "frontends.library",
    "Hit": "frontends.search",
    "Nearest": "frontends.sessions",
    "Sessions": "frontends.sessions",
    "nearest": "frontends.sessions",
    "KVCache": "cache",
    "LayerKV": "cache",
    "Restored": "cache",
    "Profile": "profile",
    "Recompressed": "frontends.recompress",
    "recompress": "frontends.recompress",
    "WeightedCache": "frontends.weighted",
    "collect_queries": "frontends.queries",
    "prefill_reduced": "frontends.reduce",
    "prefill_tree": "frontends.tree",
    "TreeStream": "frontends.treestream",
    "reduce_cache": "frontends.reduce",
    "use_ragged_attention": "frontends.weighted",
    "repair": "frontends.repair",
    "spans_for": "frontends.search",
}
__all__ = [
    "Archive",
    "Batch",
    "Found",
    "Hit",
    "Identity",
    "KVCache",
    "KVCellarError",
    "LayerKV",
    "Nearest",
    "Profile",
    "Recipe",
    "Recompressed",
    "Restored",
    "Sessions",
    "TreeStream",
    "WeightedCache",
    "batch",
    "collect_queries",
    "find",
    "nearest",
    "open",
    "prefill_reduced",
    "prefill_tree",
    "recompress",
    "reduce_cache",
    "repair",
    "save",
    "spans_for",
    "tokens_recipe",
    "use_ragged_attention",
]


def __getattr__(name: str) -> Any:
    if name == "reduce":  # a package that can be called
        from importlib import import_module

        return import_module(".reduce", __name__)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER])
