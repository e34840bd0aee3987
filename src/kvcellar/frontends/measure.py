"""Measuring a curve: what a few steps of recipe `cellar` cost on text that its profile was not made from.

The model reads a prefix and scores what follows, once with the cache as it is and once for each step with what a
restore would give: sinks and recent tokens fine, the others coarse. The bytes are those of sealed blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..cache import KVCache, LayerKV
from ..calibrate import Progress
from ..errors import InvalidInput
from ..evaluate.divergence import kl_divergence
from ..evaluate.texts import Document
from ..pipeline import Arrays, Pipeline
from ..profile import Profile
from ..recipe import Recipe
from ..stages import Grade
from ..tokens import Tokens, earlier_ids
from .calibration import Cut, cut
from .cli.models import LocalModel, empty_cache, held_in
from .curve import Curve, Point, with_step, without_step
from .transformers import take_cache

WINDOWS = 3
PREFIX, SCORED = 544, 96  # of the prefix one block of 256 tokens is sealed and coarse throughout
FACTORS = (1 / 8, 0.3, 1, 3, 8)
"""Of the base recipe's step: from below what anybody can tell to beyond what most would accept."""


def held_out(documents: Sequence[Document], profile: Profile, encode: Callable[[str], Sequence[int]]) -> list[Cut]:
    """Windows of prefix and scored tokens, one a document, from documents that the profile has not seen.

    Raises InvalidInput when none is left that is long enough.
    """
    seen = profile.metadata.get("texts")
    seen = set(seen) if isinstance(seen, list) else set()
    left = [d for d in documents if hashlib.sha256(d.text.encode()).hexdigest() not in seen]
    if not left:
        raise InvalidInput("the profile was made from all of this text: none is left to measure its curve on")
    return cut(left, encode, WINDOWS * (PREFIX + SCORED), PREFIX + SCORED, per_document=1)


def measure_curve(local: LocalModel, profile: Profile, base: Recipe, cuts: Sequence[Cut], progress: Progress) -> Curve:
    """The curve of `base` over `FACTORS` of its step, on windows of one length.

    Raises InvalidInput for windows that are too short to have coarse tokens, or that differ in length.
    """
    length = len(cuts[0].ids)
    scored = length * SCORED // (PREFIX + SCORED)
    prefix = length - scored
    if any(len(each.ids) != length for each in cuts) or not _sealed(base, prefix):
        raise InvalidInput(f"windows of {length} tokens, in which recipe {base.name!r} has no block of coarse tokens")
    steps = [float(f"{factor * float((base.quantize or {})['step']):.4g}") for factor in FACTORS]
    points = []
    with progress(f"curve over {len(cuts)} windows", len(cuts) * (len(steps) + 1)) as advance:
        windows = []
        for each in cuts:
            windows.append(_Window.read(local, each.ids, prefix))
            advance(1)
        for step in steps:
            pipeline = Pipeline(with_step(base, step, base.name), windows[0].held.geometry, profile)
            costs = []
            for window in windows:
                costs.append(window.cost(local, pipeline))
                advance(1)
            points.append(Point(step, *(float(mean) for mean in np.mean(costs, axis=0))))
    return Curve(profile.id, without_step(base), tuple(points), len(cuts), prefix, scored)


@dataclass(frozen=True)
class _Window:
    """A window's ids, the cache of its prefix, the logits (T, V) of what follows, and the cache as fine tokens."""

    ids: tuple[int, ...]
    held: KVCache
    reference: Tensor
    fine: dict[int, LayerKV] = field(default_factory=dict)

    @classmethod
    def read(cls, local: LocalModel, ids: tuple[int, ...], prefix: int) -> _Window:
        cache = empty_cache()
        local.prefill(list(ids[:prefix]), cache, quiet=True)
        held = take_cache(held_in(cache, getattr(local, "cache_dtype", local.model.dtype)))
        return cls(ids, held, _logits(local, held.layers, ids[prefix:]))

    def cost(self, local: LocalModel, pipeline: Pipeline) -> tuple[float, float]:
        """Mean divergence behind the restored prefix, and bytes per token of its sealed blocks."""
        recipe, prefix = pipeline.recipe, len(self.held)
        ids = np.array(self.ids[:prefix], np.int64)
        tokens = Tokens(ids, np.arange(prefix), earlier_ids(ids, block=recipe.block), range(prefix))
        if not self.fine:  # the same at every step
            self.fine.update(pipeline.quantize(self.held.layers, tokens, Grade.FINE, restore=True)[1])
        rows = _coarse(recipe, prefix)
        symbols, coarse = pipeline.quantize(
            {i: kv.tokens(rows.start, rows.stop) for i, kv in self.fine.items()},
            tokens.take(slice(rows.start, rows.stop)),
            Grade.COARSE,
            restore=True,
        )
        restored = [_between(self.fine[i], coarse[i], rows) for i in range(len(coarse))]
        logits = _logits(local, restored, self.ids[prefix:])
        blocks = list(_sealed(recipe, prefix))
        packed = sum(len(part) for block in blocks for part in pipeline.pack([_rows(symbols, block, rows.start)]))
        return float(kl_divergence(self.reference, logits).mean()), packed / sum(map(len, blocks))


def _between(fine: LayerKV, coarse: LayerKV, rows: range) -> LayerKV:
    """A layer whose tokens `rows` are coarse."""
    before, behind = slice(rows.start), slice(rows.stop, None)
    sides = ((fine.keys, coarse.keys), (fine.values, coarse.values))
    keys, values = (torch.cat([a[:, before], b, a[:, behind]], dim=1) for a, b in sides)
    return LayerKV(keys, values)


def _coarse(recipe: Recipe, prefix: int) -> range:
    window = recipe.window
    return range(window.sinks, prefix - window.recent) if window else range(prefix)


def _sealed(recipe: Recipe, prefix: int) -> list[range]:
    """The blocks of a prefix that hold coarse tokens alone."""
    coarse = _coarse(recipe, prefix)
    starts = range(0, prefix, recipe.block)
    return [range(a, a + recipe.block) for a in starts if coarse.start <= a and a + recipe.block <= coarse.stop]


def _rows(symbols: Sequence[Arrays], block: range, first: int) -> list[Arrays]:
    cut = slice(block.start - first, block.stop - first)
    return [[np.ascontiguousarray(array[cut]) for array in arrays] for arrays in symbols]


@torch.inference_mode()
def _logits(local: LocalModel, layers: Sequence[LayerKV], following: Sequence[int]) -> Tensor:
    """Logits (T, V) of the tokens that follow a cache."""
    cache, dtype = empty_cache(), local.model.dtype
    for i, kv in enumerate(layers):
        cache.update(kv.keys[None].to(dtype, copy=True), kv.values[None].to(dtype, copy=True), i)
    logits: Tensor = local.model(torch.tensor([list(following)]), cache=cache, use_cache=True).logits[0]
    return logits
