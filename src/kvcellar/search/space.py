"""Search by points: what ends like a phrase lies near the phrase's own point in the space of a map code.

A walk of the code (`symbols/maps.py`) contracts by r with every symbol, so ends with the same last s symbols lie within
a cell of width r^s. Published (Gusev, arXiv 2607.07144): compare the point of every position with the phrase's, whose
walk starts at p_0, and take those within 2·r^s + ε. On `ring` and `grid` that never misses one; what else it takes in,
beyond the neighbour cells that a radius of 2·r^s reaches into, depends on the floats: cells smaller than their last bit
cannot be told apart. Ours: a walk from p_0 ends in the middle of the cell, so `spread` = 1 is enough for recall 1 and
leaves the neighbours out; and on `line` the cell is a range of integers, exact, continued m symbols further back by the
point that stands there, so recall and precision are 1 for any length.

What precedes a hit is decoded backwards from its point alone, as many symbols as the point holds (`context`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64, Integer, UInt
from numpy.typing import DTypeLike

from ..errors import InvalidInput
from ..symbols.maps import Grid, Ring, digits, map_code, points, suffix_cell
from . import kernels
from .suffix import Matches, as_symbols

PUBLISHED_SPREAD = 2.0
ROUNDING = 4.0  # units in the last place of 1: what ε allows for the rounding of two walks
_SPARE_BITS = 9  # of a float's, which the rounding of a decoding walk may use up: the published code leaves as many


@dataclass(frozen=True, eq=False)
class CodeSpace:
    """The points of a sequence: (T, 2) float32 or float64 of `ring` and `grid`, (T,) uint32 or uint64 of `line`."""

    code: str
    alphabet: int
    points: Float[np.ndarray, "T 2"] | UInt[np.ndarray, " T"]

    @classmethod
    def of(
        cls, symbols: Integer[np.ndarray, " T"], alphabet: int, code: str = "line", dtype: DTypeLike | None = None
    ) -> CodeSpace:
        """Raises InvalidInput for symbols outside 0 … alphabet − 1, an unknown code, or a dtype that is not its."""
        return cls(code, alphabet, points(as_symbols(symbols, "the sequence"), alphabet, code, dtype))

    @property
    def reach(self) -> int:
        """How many symbols one point holds: m digits of `line`, and what the floats of the others resolve."""
        if self.code == "line":
            return digits(self.alphabet, self.points.dtype)
        bits = np.finfo(self.points.dtype).nmant + 1 - _SPARE_BITS
        return max(1, int(bits / -math.log2(map_code(self.code, self.alphabet).ratio)))

    def near(self, phrase: Integer[np.ndarray, " s"], *, spread: float = PUBLISHED_SPREAD) -> Matches:
        """Ends, ascending, whose point lies within `spread`·r^s + ε of the phrase's; score = 1 − distance / that.

        On `line`: ends whose symbols are the phrase's, score 1, whatever the spread. ε is 4 units in the last place.
        Raises InvalidInput for an empty phrase or symbols outside the alphabet.
        """
        phrase = as_symbols(phrase, "the phrase")
        if not len(phrase):
            raise InvalidInput("the phrase is empty; expected at least one symbol")
        if self.code == "line":
            ends = self._in_cell(phrase)
            return Matches(ends, np.ones(len(ends)))
        kind = self.points.dtype
        center = points(phrase, self.alphabet, self.code, kind)[-1]
        rounding = ROUNDING * float(np.finfo(kind).eps)
        radius = spread * suffix_cell(self.code, self.alphabet, len(phrase)) + rounding
        out = np.empty(len(self.points), np.int64)
        ends = out[: kernels.within(self.points, center[0], center[1], kind.type(radius), len(phrase) - 1, out)].copy()
        distances = np.hypot(*(self.points[ends] - center).astype(np.float64).T)
        return Matches(ends, np.maximum(0.0, 1.0 - distances / radius))

    def _in_cell(self, phrase: np.ndarray) -> np.ndarray:
        """Ends of the phrase on `line`: its newest m symbols by one pass, older ones where those were found."""
        ends = np.empty(0, np.int64)
        for back in range(0, len(phrase), self.reach):
            piece = phrase[max(0, len(phrase) - back - self.reach) : len(phrase) - back]
            low = np.uint64(points(piece, self.alphabet, "line", self.points.dtype)[-1])
            width = np.uint64(self.alphabet ** (self.reach - len(piece)))
            if back:
                ends = ends[self.points[ends - back].astype(np.uint64) - low < width]
            else:
                out = np.empty(len(self.points), np.int64)
                ends = out[: kernels.in_cell(self.points, low, width, len(phrase) - 1, out)].copy()
        return ends

    def context(self, end: int, count: int | None = None) -> Int64[np.ndarray, " n"]:
        """The last `count` symbols up to `end`, oldest first, from the point there and nothing else.

        At most `reach` (the default), and no more than there are. On `ring` and `grid` a symbol may come out as its
        neighbour, and those before it at random, where what precedes it lies on the border that their cells share
        (one symbol over and over). Raises InvalidInput for an end or count outside.
        """
        if not 0 <= end < len(self.points) or (count is not None and not 0 <= count <= self.reach):
            raise InvalidInput(
                f"{count} symbols up to {end}; expected at most {self.reach} up to one of 0…{len(self.points) - 1}"
            )
        out = np.empty(min(self.reach if count is None else count, end + 1), np.int64)
        made = map_code(self.code, self.alphabet)
        if not isinstance(made, (Ring, Grid)):
            rest, unit = int(self.points[end]), self.alphabet ** (self.reach - 1)
            for i in reversed(range(len(out))):
                out[i], rest = rest // unit, rest % unit * self.alphabet
            return out
        point = self.points[end].astype(np.float64)
        centers = made.corners + made.ratio * made.origin
        for i in reversed(range(len(out))):
            out[i] = np.square(centers - point).sum(axis=1).argmin()
            point = (point - made.corners[out[i]]) / made.ratio
        return out
