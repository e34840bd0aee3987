"""The tokens of a block: their ids, positions and grades, and the ids before each that a prediction may look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .context import LOOKBACK, Context, Grade
from .replayed import Replayed


class Tokens(NamedTuple):
    """Ids and positions int64 (T,) of a block's tokens, and which of them are stored coarse, the others fine.

    `due` are stored fine but restored coarse: newer tokens came in other blocks. `earlier` int64 (T, LOOKBACK) are the
    ids of the tokens before each, as `Context` has them; `replayed` is what a recipe that replays is told of them.
    `surprisal` float64 (T,), bits, is for the encoder alone.
    """

    ids: np.ndarray
    positions: np.ndarray
    earlier: np.ndarray
    coarse: range
    due: range = range(0)
    surprisal: np.ndarray | None = None
    replayed: Replayed | None = None

    @classmethod
    def following(cls, ids: np.ndarray, first_position: int) -> Tokens:
        """All tokens of a block, at positions that follow one by one, coarse."""
        return cls(ids, np.arange(first_position, first_position + len(ids)), earlier_ids(ids), range(len(ids)))

    @classmethod
    def at(cls, block: int, span: range, ids: np.ndarray, ahead: int, known: np.ndarray | None) -> Tokens:
        """The tokens `span` of an archive with sealed blocks of `block` tokens, behind the `known` ids, all coarse.

        Their positions are `ahead` of their indexes.
        """
        positions = np.arange(span.start + ahead, span.stop + ahead)
        return cls(ids, positions, earlier_ids(ids, span.start, block, known), range(len(ids)))

    @classmethod
    def joined(cls, blocks: Sequence[Tokens]) -> Tokens:
        """Blocks one behind the other as one. Of several, none has tokens that are due or replayed, and what is coarse
        of them has no gap."""
        if len(blocks) == 1:
            return blocks[0]
        starts = np.cumsum([0, *(len(block.ids) for block in blocks)]).tolist()
        coarse = [(at + b.coarse.start, at + b.coarse.stop) for at, b in zip(starts, blocks, strict=False) if b.coarse]
        ids, positions, earlier = (np.concatenate([block[column] for block in blocks]) for column in range(3))
        return cls(ids, positions, earlier, range(coarse[0][0], coarse[-1][1]) if coarse else range(0))

    @property
    def fine(self) -> np.ndarray:
        """Indexes of the tokens that are not coarse: those before and those behind."""
        rows: np.ndarray = np.r_[: self.coarse.start, self.coarse.stop : len(self.ids)]
        return rows

    def take(self, rows: slice | np.ndarray) -> Tokens:
        ids = self.ids[rows]
        bits = None if self.surprisal is None else self.surprisal[rows]
        told = None if self.replayed is None else self.replayed.take(rows)
        return Tokens(ids, self.positions[rows], self.earlier[rows], range(len(ids)), range(0), bits, told)

    def context(self, grade: Grade = Grade.COARSE) -> Context:
        """What is known of them before the first layer group."""
        return Context(self.ids, self.positions, self.earlier, grade, self.replayed)


def earlier_ids(
    ids: np.ndarray, start: int = 0, block: int | None = None, known: np.ndarray | None = None
) -> np.ndarray:
    """Ids int64 (T, LOOKBACK) of the tokens before each of `ids`, the first of which has index `start`; −1 for none.

    They are looked for among the tokens of a sealed block (of `block` tokens, all by default) only, whether it is
    sealed already or not, so that what is predicted from them stays when it is. `known` are the ids right before.
    """
    known = np.empty(0, np.int64) if known is None else known
    index = start + np.arange(len(ids))
    line = np.concatenate([np.full(LOOKBACK, -1), known, ids])[-len(ids) - LOOKBACK :] if len(ids) else ids
    found = np.full((len(ids), LOOKBACK), -1, np.int64)
    for back in range(1, LOOKBACK + 1):
        same = index >= back if block is None else (index - back) // block == index // block
        found[same, back - 1] = line[LOOKBACK - back : len(line) - back][same]
    return found
