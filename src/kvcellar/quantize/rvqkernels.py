"""Compiled inner loops of residual vector quantization, under the rules of `kernels.py`."""

import numpy as np
from numba import float32, int64, njit, types, uint8, uint16, void

from .kernels import dot, turn

BOOKS = types.Array(float32, 4, "C", readonly=True)
HALVES = types.Array(float32, 3, "C", readonly=True)
_SEARCH = void(
    *(float32[:, ::1], int64, int64, int64, int64),  # x (T, C), first column, heads, first code column, beam
    *(BOOKS, HALVES),  # books, half squares
    uint16[:, ::1],  # codes (T, columns)
)


@njit(_SEARCH, nogil=True, cache=True, error_model="numpy")
def rvq_encode(x, column, heads, code_column, beam, books, halves, codes):
    """Codes of each head's vectors, stage by stage: of `beam` sums of entries so far, each continued by every entry of
    the next stage, the `beam` nearest to the vector are kept; of equals the first.

    `books` (H, S, D, E) entries in columns, (1, S, D, E) when the heads share them; `halves` (H, S, E) their |e|²/2.
    """
    stages, width, entries = books.shape[1], books.shape[2], books.shape[3]
    rest, next_rest = np.empty((beam, width), np.float32), np.empty((beam, width), np.float32)
    path, next_path = np.empty((beam, stages), np.uint16), np.empty((beam, stages), np.uint16)
    size, next_size = np.empty(beam, np.float32), np.empty(beam, np.float32)
    parent, entry = np.empty(beam, np.int64), np.empty(beam, np.int64)
    along = np.empty(entries, np.float32)
    for h in range(heads):
        book = h % books.shape[0]
        for t in range(x.shape[0]):
            for i in range(width):
                rest[0, i] = x[t, column + h * width + i]
            size[0] = dot(rest[0], rest[0])
            kept = 1
            for s in range(stages):
                found = 0
                for b in range(kept):
                    turn(rest[b], books[book, s], along)
                    for e in range(entries):
                        distance = size[b] - np.float32(2) * (along[e] - halves[book, s, e])
                        if found == beam and not distance < next_size[found - 1]:
                            continue
                        at = found if found < beam else beam - 1
                        while at > 0 and distance < next_size[at - 1]:
                            next_size[at], parent[at], entry[at] = next_size[at - 1], parent[at - 1], entry[at - 1]
                            at -= 1
                        next_size[at], parent[at], entry[at] = distance, b, e
                        found = min(found + 1, beam)
                for b in range(found):
                    for i in range(width):
                        next_rest[b, i] = rest[parent[b], i] - books[book, s, i, entry[b]]
                    next_path[b, :s] = path[parent[b], :s]
                    next_path[b, s] = entry[b]
                kept = found
                rest, next_rest = next_rest, rest
                path, next_path = next_path, path
                size, next_size = next_size, size
            for s in range(stages):
                codes[t, code_column + h * stages + s] = path[0, s]


@njit(
    [void(kind[:, ::1], int64, BOOKS, int64, int64, float32[:, ::1]) for kind in (uint8, uint16)],
    nogil=True,
    cache=True,
    error_model="numpy",
)
def rvq_decode(codes, code_column, books, column, heads, x):
    """Sums of entries from `books` (H, S, E, D); codes are below their number."""
    stages, width = books.shape[1], books.shape[3]
    total = np.empty(width, np.float32)
    for h in range(heads):
        book = h % books.shape[0]
        for t in range(codes.shape[0]):
            total[:] = np.float32(0)
            for s in range(stages):
                row = books[book, s, codes[t, code_column + h * stages + s]]
                for i in range(width):
                    total[i] += row[i]
            for i in range(width):
                x[t, column + h * width + i] = total[i]
