"""The cells of a language trie: what two token sequences have in common, in bits, and what may go into a trie.

`trie.py` says what cells are, and where they come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, UInt32

from ..errors import InvalidInput

MAX_TOKENS = 1 << 32
"""Token ids are below this, as those of archives are."""
SMALLEST = math.ulp(0.0)


@dataclass(frozen=True)
class Cell:
    """The cell of a prefix: how many `tokens` lead there, of how many the probability is `unknown`, and the bits of
    the others, −log2 of their product: a lower bound of the depth, since no token has less than 0 bits.
    """

    tokens: int
    unknown: int
    at_least: float

    @property
    def depth(self) -> float:
        """−log2 of the cell's width in bits; NaN when a token's probability is not known."""
        return math.nan if self.unknown else self.at_least


@dataclass(frozen=True)
class Kinship:
    """What two sequences have in common: their smallest common `cell`, and whether they are the `same`."""

    cell: Cell
    same: bool

    @property
    def printed(self) -> float:
        """d_T in bits as the paper prints it: the larger, the closer. Not 0 for equal sequences. NaN: unknown."""
        return self.cell.depth

    @property
    def log2_ultrametric(self) -> float:
        """log2 of `ultrametric`, which does not underflow: −∞ for equal sequences. NaN: unknown."""
        return -math.inf if self.same else 0.0 - self.cell.depth

    @property
    def ultrametric(self) -> float:
        """u in 0…1: 0 for equal sequences, 1 where nothing is common. NaN: unknown.

        Cells below 2^−1074 count as that wide: different sequences are never at distance 0.
        """
        if self.same:
            return 0.0
        return math.nan if self.cell.unknown else max(SMALLEST, 2.0**-self.cell.at_least)


@dataclass(frozen=True)
class Neighbour:
    """A stored session by `name`, and its kinship with what was asked for."""

    name: str
    kinship: Kinship


def known(log2_probs: Float32[np.ndarray, " T"]) -> tuple[float, int]:
    """Bits of those that are known, and how many are not (NaN)."""
    missing = np.isnan(log2_probs)
    return max(0.0, -float(np.sum(log2_probs, dtype=np.float64, where=~missing))), int(np.count_nonzero(missing))


def common_prefix(one: UInt32[np.ndarray, " T"], other: UInt32[np.ndarray, " S"]) -> int:
    """How many first numbers two sequences (T,), (S,) share."""
    shorter = min(len(one), len(other))
    differ = one[:shorter] != other[:shorter]
    first = int(differ.argmax()) if shorter else 0
    return first if shorter and differ[first] else shorter


def checked_ids(tokens: object, vocabulary: int = MAX_TOKENS) -> UInt32[np.ndarray, " T"]:
    """Token ids (T,), also none. Raises InvalidInput for another shape, no integers, ids outside 0…vocabulary − 1."""
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"tokens cannot be read as integers: {error}") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidInput(f"tokens of shape {ids.shape} and dtype {ids.dtype}; expected integer ids (T,)")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise InvalidInput(f"tokens from {ids.min()} to {ids.max()}; a token id lies in 0…{vocabulary - 1}")
    return np.ascontiguousarray(ids, np.uint32)


def checked_log2_probs(log2_probs: object, count: int) -> Float32[np.ndarray, " T"]:
    """log2 probabilities (T,), T = `count`, as float32. Raises InvalidInput unless each is finite and ≤ 0, or NaN."""
    try:
        with np.errstate(over="ignore"):  # what is too large for float32 is refused as infinite
            logs = np.asarray(log2_probs, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"log2 probabilities cannot be read as numbers: {error}") from error
    if logs.shape != (count,):
        raise InvalidInput(f"log2 probabilities of shape {logs.shape} for {count} tokens; expected ({count},)")
    told = logs[~np.isnan(logs)]
    if told.size and (told.max() > 0 or not np.isfinite(told.min())):
        raise InvalidInput(
            f"log2 probabilities from {told.min():g} to {told.max():g}; expected finite, at most 0, or NaN"
        )
    return logs
