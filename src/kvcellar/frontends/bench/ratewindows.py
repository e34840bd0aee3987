"""Held-out windows of tuning text for the rate study: a prefix's cache, and what the model says behind it.

The bytes are those of sealed blocks whose tokens are all coarse, without ids, as `frontends/measure.py` counts them;
the divergence is that of the whole restored prefix, sinks and recent tokens fine, over the scored continuation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from ...cache import KVCache, LayerKV
from ...errors import InvalidInput
from ...evaluate.divergence import kl_divergence
from ...evaluate.texts import Document, Window, windows
from ...pipeline import Arrays, Pipeline
from ...recipe import Recipe
from ...stages import Grade
from ...store.local import LocalStore
from ...tokens import Tokens, earlier_ids
from ..cli.models import LocalModel, empty_cache, held_in
from ..transformers import take_cache
from .reference import continuation_logits


@dataclass(frozen=True)
class HeldOut:
    """A window, its prefix's cache as the model would hold it, and the logits (n − 1, V) behind that."""

    window: Window
    cache: KVCache
    reference: Tensor

    @classmethod
    def read(cls, local: LocalModel, window: Window) -> HeldOut:
        held = cache_of(local, window.ids[: window.prefix])
        return cls(window, held, _logits(local, held.layers, window))

    def under(self, recipe: Recipe) -> Tokens:
        """The prefix's tokens, which know those before them within a block of `recipe`."""
        ids = np.array(self.window.ids[: self.window.prefix], np.int64)
        return Tokens(ids, np.arange(len(ids)), earlier_ids(ids, block=recipe.block), range(len(ids)))

    def fine(self, pipeline: Pipeline) -> dict[int, LayerKV]:
        """The prefix with every token fine, which is what coarse tokens are made from; the same at every step."""
        tokens = self.under(pipeline.recipe)
        return pipeline.quantize(self.cache.layers, tokens, Grade.FINE, restore=True)[1]

    def coarse(self, pipeline: Pipeline, fine: dict[int, LayerKV]) -> tuple[list[Arrays], dict[int, LayerKV]]:
        """Symbols by group of the prefix's coarse tokens, and these restored."""
        rows = coarse_rows(pipeline.recipe, len(self.cache))
        layers = {i: kv.tokens(rows.start, rows.stop) for i, kv in fine.items()}
        tokens = self.under(pipeline.recipe).take(slice(rows.start, rows.stop))
        return pipeline.quantize(layers, tokens, Grade.COARSE, restore=True)

    def divergence(
        self, local: LocalModel, recipe: Recipe, fine: dict[int, LayerKV], coarse: dict[int, LayerKV]
    ) -> float:
        """Nats per token behind the restored prefix."""
        rows = coarse_rows(recipe, len(self.cache))
        restored = [_between(fine[i], coarse[i], rows) for i in range(len(coarse))]
        return float(kl_divergence(self.reference, _logits(local, restored, self.window)).mean())

    def surprisal(self, local: LocalModel) -> Float64[np.ndarray, " tokens"]:
        """−log2 P of each token of the prefix under the model, in bits; NaN for the first."""
        ids = self.window.ids[: self.window.prefix]
        logits = continuation_logits(local.model, ids, empty_cache())
        wanted = torch.tensor(ids[1:])[:, None]
        logs = torch.log_softmax(logits.double(), dim=-1).gather(1, wanted)[:, 0]
        return np.concatenate([[np.nan], -logs.numpy() / np.log(2)])


def chosen(
    encode: Callable[[str], Sequence[int]],
    documents: Sequence[Document],
    seen: Collection[str],
    prefix: int,
    continuation: int,
    count: int,
) -> list[Window]:
    """Windows of tuning documents whose SHA-256 is not among those `seen`, one a document.

    Raises InvalidInput for a document that is not for tuning, and when none is left that is long enough.
    """
    if wrong := [document.name for document in documents if document.role != "tune"]:
        raise InvalidInput(f"{wrong[0]} is a test text: the rate study tunes, and reads text for tuning alone")
    left = [d for d in documents if hashlib.sha256(d.text.encode()).hexdigest() not in seen]
    found = windows(left, encode, prefix, continuation, count)
    if not found:
        raise InvalidInput(f"no tuning document that no profile has seen reaches {prefix + continuation:,} tokens")
    return list(found)


def cache_of(local: LocalModel, ids: Sequence[int], told: Float32[np.ndarray, " tokens"] | None = None) -> KVCache:
    """The cache of `ids` as the model would hold it; log2 of what it thought of each goes into `told`."""
    cache = empty_cache()
    said = local.prefill(list(ids), cache, quiet=True, probabilities=told is not None)
    if told is not None and said is not None:
        told[:] = said
    return take_cache(held_in(cache, getattr(local, "cache_dtype", local.model.dtype)))


def coarse_rows(recipe: Recipe, prefix: int) -> range:
    window = recipe.window
    return range(window.sinks, prefix - window.recent) if window else range(prefix)


def sealed(recipe: Recipe, prefix: int) -> list[range]:
    """Blocks of a prefix that hold coarse tokens alone. Raises InvalidInput when there is none."""
    coarse = coarse_rows(recipe, prefix)
    blocks = [range(a, a + recipe.block) for a in range(0, prefix, recipe.block)]
    blocks = [block for block in blocks if coarse.start <= block.start and block.stop <= coarse.stop]
    if not blocks:
        raise InvalidInput(f"of {prefix} tokens recipe {recipe.name!r} has no block of {recipe.block} coarse ones")
    return blocks


def of_block(symbols: Sequence[Arrays], block: range, first: int) -> list[Arrays]:
    """Rows of a block's tokens, where `first` is the token of the first row."""
    rows = slice(block.start - first, block.stop - first)
    return [[np.ascontiguousarray(array[rows]) for array in arrays] for arrays in symbols]


class Kept:
    """Results by name in a folder, so that an interrupted study goes on; a name says all that a result depends on."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """`make()`, a JSON value, or what it gave before."""
        file = f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
        try:
            return json.loads((self.folder / file).read_text())
        except (OSError, ValueError):
            made = make()
        with LocalStore(self.folder).replacing(file) as pending:
            pending.append(json.dumps(made).encode())
        return made


def sides(layers: dict[int, LayerKV], group: range) -> Iterator[Tensor]:
    for i in group:
        yield layers[i].keys
        yield layers[i].values


def _between(fine: LayerKV, coarse: LayerKV, rows: range) -> LayerKV:
    """A layer whose tokens `rows` are coarse."""
    pairs = ((fine.keys, coarse.keys), (fine.values, coarse.values))
    keys, values = (torch.cat([a[:, : rows.start], b, a[:, rows.stop :]], dim=1) for a, b in pairs)
    return LayerKV(keys, values)


def _logits(local: LocalModel, layers: Sequence[LayerKV], window: Window) -> Tensor:
    cache = empty_cache()
    for i, kv in enumerate(layers):
        cache.update(kv.keys[None].clone(), kv.values[None].clone(), i)
    return continuation_logits(local.model, window.ids[window.prefix :], cache)
