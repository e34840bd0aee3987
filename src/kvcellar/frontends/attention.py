"""A model's attention function changed for a while. Importing this imports transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..errors import UnsupportedCache


@contextmanager
def attending(
    model: Any, name: str, function: Callable[..., Any], mask: Callable[..., Any], lost: str
) -> Iterator[None]:
    """While it lasts, `model` attends by `function`, with masks from `mask`, which transformers learns under `name`.

    Raises UnsupportedCache, naming what is `lost`, for a model that cannot take an attention function from outside.
    """
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise UnsupportedCache(f"{type(model).__name__} takes no attention function: {lost}")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
