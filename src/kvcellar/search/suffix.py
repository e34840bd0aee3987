"""Search by symbols: where a sequence ends in a phrase, wholly or nearly, in one pass over the sequence.

A phrase of s symbols is a suffix of length s: it occurs at every end k whose symbols k − s + 1 … k are its own. Two
ways of agreeing: every symbol (`exact`), or at least m of the s at their places (`fuzzy`). The sequence may be token
ids, or the symbols of one (layer, head, stage) of an archive.

Source: Gusev, Fractal KV-Cache Archives (arXiv 2607.07144), "in-place retrieval". There the pass compares 2-D points
(here `space`, whose precision depends on floats); these compare the integers, so recall and precision are 1 for any
length. Plain numpy: about as fast as a compiled loop here, and a single look-up need not wait for a compiler. Scores
lie in 0…1, and a larger one is better, in every mode.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, Integer

from ..errors import InvalidInput


class Matches(NamedTuple):
    """Indexes of the matches' newest symbols, int64 (M,), and their scores, float64 (M,): larger is better, 1 best."""

    ends: Int64[np.ndarray, " M"]
    scores: Float64[np.ndarray, " M"]


def exact(symbols: Integer[np.ndarray, " T"], phrase: Integer[np.ndarray, " s"]) -> Int64[np.ndarray, " M"]:
    """Ends of all occurrences of `phrase`, ascending, overlapping ones too. Raises InvalidInput for an empty phrase."""
    symbols, phrase = alike(symbols, phrase)
    s = len(phrase)
    ends = np.flatnonzero(symbols[s - 1 :] == phrase[-1]) + (s - 1)
    for back in range(1, s):
        if not len(ends):
            break
        ends = ends[symbols[ends - back] == phrase[s - 1 - back]]
    return ends


def fuzzy(symbols: Integer[np.ndarray, " T"], phrase: Integer[np.ndarray, " s"], at_least: int) -> Matches:
    """Where at least `at_least` of the last s symbols equal the phrase's at the same place; score = their share of s.

    Ascending by position; symbols may be replaced, not inserted or left out. Raises InvalidInput unless `at_least`
    lies in 1…s.
    """
    symbols, phrase = alike(symbols, phrase)
    s = len(phrase)
    if not 1 <= at_least <= s:
        raise InvalidInput(f"at least {at_least} of a phrase of {s} symbols; expected 1…{s}")
    counts = np.zeros(max(0, len(symbols) - s + 1), np.min_scalar_type(s))
    for place, wanted in enumerate(phrase):
        counts += symbols[place : place + len(counts)] == wanted
    starts = np.flatnonzero(counts >= at_least)
    return Matches(starts + (s - 1), counts[starts] / s)


def best_apart(matches: Matches, length: int) -> Matches:
    """Of matches of `length` symbols the best that do not overlap, best first; of equals the earliest counts.

    Greedy: the best match stays, what overlaps it goes, and so on.
    """
    taken = np.zeros(int(matches.ends.max(initial=0)) + 1, bool)
    kept: list[tuple[int, float]] = []
    for score in np.unique(matches.scores)[::-1]:
        ends = matches.ends[matches.scores == score]
        # All matches are equally long, so two overlap exactly when one holds the other's first or last symbol.
        ends = ends[~(taken[ends] | taken[ends - (length - 1)])]
        at = 0
        while at < len(ends):
            end = int(ends[at])
            taken[end + 1 - length : end + 1] = True
            kept.append((end, float(score)))
            at = int(np.searchsorted(ends, end + length))
    return Matches(np.array([end for end, _ in kept], np.int64), np.array([score for _, score in kept], np.float64))


def as_symbols(values: object, what: str) -> np.ndarray:
    """`values` as a contiguous array (T,) of uint8, which stays, or int64: so kernels are compiled for two kinds only.

    Raises InvalidInput for another shape, for what is no integer, and for uint64.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.dtype == np.uint64)):
        raise InvalidInput(f"{what} of shape {array.shape} and dtype {array.dtype}; expected integers (T,)")
    return np.ascontiguousarray(array, np.uint8 if array.dtype == np.uint8 else np.int64)


def alike(symbols: object, phrase: object) -> tuple[np.ndarray, np.ndarray]:
    """Sequence and phrase in one dtype, in which no number of either wraps. Raises InvalidInput, also if empty."""
    stored, asked = as_symbols(symbols, "the sequence"), as_symbols(phrase, "the phrase")
    if not len(asked):
        raise InvalidInput("the phrase is empty; expected at least one symbol")
    if stored.dtype == np.uint8 and not (asked.min() >= 0 and asked.max() <= 255):
        stored = stored.astype(np.int64)
    return stored, asked.astype(stored.dtype)
