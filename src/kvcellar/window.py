"""The fine window: which tokens of an archive are fine, and how fine ones become coarse.

A recipe's window names how many first tokens (attention sinks) and how many recent ones stay fine. Every token is coded
fine first; once `recent` newer tokens exist, its fine reconstruction is coded coarse, in a bulk save too. So the same
tokens are coarse, with the same symbols, however the archive grew. Tokens appended in small steps lie in small blocks,
fine; until those are written anew as a sealed block, a restore makes the ones that are due coarse by the same rule.
What is stored coarse stays as symbols: it is never quantized a second time.

Without a window all tokens are coarse from the start, and with a bit-exact recipe the word means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cache import KVCache, LayerKV
from .pipeline import Arrays, Pipeline
from .recipe import Recipe
from .stages import Grade
from .tokens import Tokens


@dataclass(frozen=True)
class FineWindow:
    """The window of `recipe` in an archive of `tokens` tokens."""

    recipe: Recipe
    tokens: int

    def coarse(self, span: range) -> range:
        """Which of the tokens `span` are coarse, counted from its start."""
        window = self.recipe.window
        if window is None:
            return range(len(span))
        first = min(max(window.sinks - span.start, 0), len(span))
        return range(first, max(first, min(self.tokens - window.recent, span.stop) - span.start))

    def seals(self, span: range) -> bool:
        """Whether a block of the tokens `span` is full, and none of them will change its grade."""
        recent = self.recipe.tail - self.recipe.block
        return len(span) == self.recipe.block and span.stop <= self.tokens - recent

    def blocks(self, first: int) -> Iterator[range]:
        """The blocks that tokens from `first` on are cut into: sealed ones, and one with what is left."""
        while first < self.tokens:
            span = range(first, min(first + self.recipe.block, self.tokens))
            if not self.seals(span):
                span = range(first, self.tokens)
            yield span
            first = span.stop


@dataclass(frozen=True)
class Symbols:
    """Symbols of consecutive tokens: which are coarse, bool (T,), and per grade and layer group the arrays of those."""

    is_coarse: np.ndarray
    arrays: dict[Grade, list[Arrays]]

    @classmethod
    def none(cls, pipeline: Pipeline) -> Symbols:
        """Those of no tokens."""
        groups = range(len(pipeline.groups))
        arrays = {} if pipeline.lossless else {grade: pipeline.buffers(groups, 0, grade) for grade in Grade}
        return cls(np.empty(0, bool), arrays)

    @classmethod
    def of_block(cls, tokens: Tokens, arrays: dict[Grade, list[Arrays]]) -> Symbols:
        is_coarse = np.zeros(len(tokens.ids), bool)
        is_coarse[tokens.coarse.start : tokens.coarse.stop] = True
        return cls(is_coarse, arrays)

    def __len__(self) -> int:
        return len(self.is_coarse)

    def followed_by(self, other: Symbols) -> Symbols:
        joined = {
            grade: [
                [np.concatenate(pair) for pair in zip(*of_group, strict=True)]
                for of_group in zip(groups, other.arrays[grade], strict=True)
            ]
            for grade, groups in self.arrays.items()
        }
        return Symbols(np.concatenate([self.is_coarse, other.is_coarse]), joined)

    def split(self, count: int) -> tuple[Symbols, Symbols]:
        """Those of the first `count` tokens, or of all if there are fewer, and the rest."""
        coarse = int(np.count_nonzero(self.is_coarse[:count]))
        at = {Grade.COARSE: coarse, Grade.FINE: min(count, len(self)) - coarse}
        first, rest = (
            {grade: [[a[cut(at[grade])] for a in arrays] for arrays in groups] for grade, groups in self.arrays.items()}
            for cut in (lambda n: slice(0, n), lambda n: slice(n, None))
        )
        return Symbols(self.is_coarse[:count], first), Symbols(self.is_coarse[count:], rest)


def encode_graded(pipeline: Pipeline, new: KVCache, tokens: Tokens, stored: Symbols) -> list[bytes]:
    """Parts of a block of the tokens `stored` already and then the `new` ones; what is stored coarse stays coarse."""
    return pipeline.pack([each.symbols for each in _graded(pipeline, new, tokens, stored, restore=False)])


def restore_graded(pipeline: Pipeline, tokens: Tokens, stored: Symbols, out: dict[int, LayerKV]) -> None:
    """Fill `out`, all layers (H, T, D) by index, with what a block of the `stored` tokens would be restored to."""
    nothing = KVCache(tuple(kv.tokens(0, 0) for _, kv in sorted(out.items())), 0)
    for each in _graded(pipeline, nothing, tokens, stored, restore=True):
        for i, kv in each.restored.items():
            out[i].keys[:, each.rows], out[i].values[:, each.rows] = kv.keys, kv.values


class _Graded(NamedTuple):
    """Tokens of one grade: their rows, symbols by layer group, and if asked for what they are restored to."""

    rows: np.ndarray
    symbols: list[Arrays]
    restored: dict[int, LayerKV]


def _graded(pipeline: Pipeline, new: KVCache, tokens: Tokens, stored: Symbols, *, restore: bool) -> list[_Graded]:
    """The grades of a block, coarse before fine."""
    was_coarse = np.concatenate([stored.is_coarse, np.zeros(len(new), bool)])
    coarse = np.arange(tokens.coarse.start, tokens.coarse.stop)
    fine = np.flatnonzero(~was_coarse)
    kept = len(stored) - int(np.count_nonzero(stored.is_coarse))
    source = _behind_gap(new.layers, kept)
    grades = []
    if pipeline.recipe.window is not None:
        fine_symbols, restored = pipeline.quantize(
            source, tokens.take(fine), Grade.FINE, kept=_keep(stored, Grade.FINE, slice(kept)), restore=True
        )
        source = [restored[i] for i in range(len(restored))]
        if (
            told := pipeline.residual.surprisal(fine_symbols[0])
        ) is not None:  # that of stored tokens is in their symbols alone
            surprisal = np.full(len(tokens.ids), np.nan)
            surprisal[fine] = told
            tokens = tokens._replace(surprisal=surprisal)
        stays = np.isin(fine, coarse, invert=True)
        if stays.any():
            rows = torch.from_numpy(np.flatnonzero(stays))
            left = {i: LayerKV(kv.keys[:, rows], kv.values[:, rows]) for i, kv in restored.items()} if restore else {}
            symbols = [[array[stays] for array in arrays] for arrays in fine_symbols]
            grades.append(_Graded(fine[stays], symbols, left))
    if len(coarse):
        wanted = [_spread(kv, fine, coarse) for kv in source]
        keep = _keep(stored, Grade.COARSE, was_coarse[coarse])
        made = pipeline.quantize(wanted, tokens.take(coarse), Grade.COARSE, kept=keep, restore=restore)
        grades.insert(0, _Graded(coarse, *made))
    return grades


def _behind_gap(layers: Sequence[LayerKV], count: int) -> list[LayerKV]:
    """`layers` behind `count` tokens of zeros, in place of those whose symbols are known."""
    gap = [LayerKV(_zeros(kv.keys, count), _zeros(kv.values, count)) for kv in layers]
    pairs = zip(gap, layers, strict=True)
    return [LayerKV(torch.cat([a.keys, b.keys], dim=1), torch.cat([a.values, b.values], dim=1)) for a, b in pairs]


def _spread(kv: LayerKV, rows: np.ndarray, wanted: np.ndarray) -> LayerKV:
    """Tokens `wanted` of a layer that holds tokens `rows` (ascending); zeros for the others."""
    there = np.flatnonzero(np.isin(wanted, rows))
    at = np.searchsorted(rows, wanted[there])
    keys, values = _zeros(kv.keys, len(wanted)), _zeros(kv.values, len(wanted))
    keys[:, there], values[:, there] = kv.keys[:, at], kv.values[:, at]
    return LayerKV(keys, values)


def _zeros(like: Tensor, count: int) -> Tensor:
    return like.new_zeros(like.shape[0], count, like.shape[2])


def _keep(stored: Symbols, grade: Grade, rows: slice | np.ndarray) -> Callable[[int, Arrays], None]:
    """Puts the stored symbols of a grade into `rows` of a group's arrays."""

    def keep(group: int, arrays: Arrays) -> None:
        for array, old in zip(arrays, stored.arrays[grade][group], strict=True):
            array[rows] = old

    return keep
