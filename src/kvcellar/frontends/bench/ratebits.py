"""Bits of the coder token by token, of static tables, and where they go.

The adaptive coder's stream belongs to no symbol, but after every token its state tells how many bits it has come to:
8 bytes − log2 of the interval's width. Coding an array token by token and noting that gives each token's own bits;
they add up to the part but for its last byte and the bytes that name tables. Within a token nothing is measured: a
coefficient is given its share by its order-0 entropy over these windows.

`Static` is the code that has no context: one table for each coefficient, counted on calibration text, −log2 of it the
price, with no loss to any coder. It has the same symbols, so it is what the contexts are worth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from ...errors import InvalidInput
from ...pipeline import Arrays, Pipeline
from ...symbols import adaptivekernels as kernels
from ...symbols.adaptive import AdaptiveCoder, _noted
from ...symbols.adaptivetables import Walk
from ...symbols.binarycoder import ENCODE, TOP

CLAMP = 60
PRIOR = 8.0  # tokens that the geometric law is worth beside the counts
SYMBOLS = np.arange(-CLAMP, CLAMP + 1)


def spent(coder: AdaptiveCoder, arrays: Arrays, layers: range) -> tuple[list[Float64[np.ndarray, " tokens"]], int]:
    """Bits of each token in each array of a part, and bytes of the whole part."""
    part = coder.encode(arrays, layers)
    room = 96 * max((array.shape[-1] for array in arrays), default=1)
    data, place = np.empty(2 * len(part) + 4 * room, np.uint8), np.array([0, TOP, 0, 0], np.int64)
    found = []
    named, noted = iter(part), _noted(arrays)  # a part begins with a byte for each array that is not empty
    for array in arrays:
        bits, before = np.zeros(len(array)), _so_far(place)
        found.append(bits)
        if not array.size:
            continue
        symbols, notes = next(noted)
        walk, rows = Walk(coder._offered(layers, array.shape[-1])[next(named)]), np.ascontiguousarray(symbols, np.int32)
        for t in range(len(rows)):
            place[3] = t
            if walk(ENCODE, rows[: t + 1], notes[: t + 1], data, place, row_bytes=room) != kernels.DONE:
                raise InvalidInput(f"{len(data)} bytes are too few to count the bits of {len(rows)} tokens")
            now = _so_far(place)
            bits[t], before = now - before, now
    return found, len(part)


def _so_far(place: np.ndarray) -> float:
    return 8 * int(place[2]) + math.log2(TOP) - math.log2(int(place[1]))


def adaptive(pipeline: Pipeline) -> AdaptiveCoder:
    """The pipeline's symbol coder. Raises InvalidInput for another kind."""
    if not isinstance(pipeline.symbols, AdaptiveCoder):
        raise InvalidInput(f"recipe {pipeline.recipe.name!r} codes with {pipeline.symbols.id!r}; expected adaptive/1")
    return pipeline.symbols


class Static:
    """Code lengths (C, 121) in bits of −60…60 in each column of an array; what lies beyond costs an Elias gamma code.

    Counted on symbols (T, C) of calibration text, with a geometric law of the same mean beside the counts.
    """

    def __init__(self, symbols: np.ndarray):
        columns = symbols.shape[1]
        flat = np.clip(symbols, -CLAMP, CLAMP).astype(np.int64) + CLAMP + np.arange(columns) * len(SYMBOLS)
        counts = np.bincount(flat.reshape(-1), minlength=columns * len(SYMBOLS)).reshape(columns, -1).astype(float)
        total = counts.sum(axis=1, keepdims=True)
        mean = (counts @ np.abs(SYMBOLS) + 0.02) / (total[:, 0] + 2)
        decay = (mean / (1 + np.sqrt(1 + mean**2)))[:, None] ** np.abs(SYMBOLS)
        law = decay / decay.sum(axis=1, keepdims=True)
        self.lengths = -np.log2(np.maximum((counts + PRIOR * law) / (total + PRIOR), 1e-30))

    def bits(self, symbols: np.ndarray) -> float:
        inside = np.clip(symbols, -CLAMP, CLAMP).astype(np.int64) + CLAMP
        beyond = np.maximum(np.abs(symbols.astype(np.int64)) - CLAMP, 0)
        more = np.where(beyond > 0, 2 * np.floor(np.log2(np.maximum(beyond, 1))) + 1, 0)
        return float(self.lengths[np.arange(symbols.shape[1]), inside].sum() + more.sum())


def entropies(symbols: np.ndarray) -> Float64[np.ndarray, " columns"]:
    """Order-0 entropy of each column of (T, C), bits a token."""
    found = np.empty(symbols.shape[1])
    for c in range(symbols.shape[1]):
        _, counts = np.unique(symbols[:, c], return_counts=True)
        shares = counts / counts.sum()
        found[c] = -(shares * np.log2(shares)).sum()
    return found


def ranks(values: Sequence[float] | np.ndarray) -> Float64[np.ndarray, " values"]:
    """Ranks from 0, equal values sharing the mean of theirs."""
    _, which, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: np.ndarray = ends - (counts + 1) / 2
    found: np.ndarray = means[which]
    return found


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Rank correlation (Spearman 1904); None where one side does not vary."""
    x, y = ranks(a), ranks(b)
    if not (x.std() and y.std()):
        return None
    return float(np.corrcoef(x, y)[0, 1])
