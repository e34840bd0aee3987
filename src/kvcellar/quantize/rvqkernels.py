"""Compiled inner loops of residual vector quantization, under the rules of `kernels.py`.

Heads have stages of their own: entries of head h are those of the codebooks `first[h]` to `first[h] + count[h]`, and
its codes follow those of the heads before it.
"""

import numpy as np
from llvmlite import ir
from numba import boolean, float32, int64, njit, types, uint8, uint16, void
from numba.core import cgutils
from numba.extending import intrinsic

from ..placingkernels import VECTOR, to_16, turn_row
from .kernels import MATRIX, dot, turn

BOOKS = types.Array(float32, 3, "C", readonly=True)
PLACES = types.Array(int64, 1, "C", readonly=True)
AHEAD, LINE = 6, 16  # tokens that entries are asked for ahead of, and float32 in a line of the processor's cache
_SEARCH = void(
    *(float32[:, ::1], int64, int64, int64),  # x (T, C), first column, first code column, beam
    *(PLACES, PLACES),  # first codebook of each head, and how many it has
    *(MATRIX, BOOKS, BOOKS, MATRIX),  # bases, roots, entries, half squares
    uint16[:, ::1],  # codes (T, columns)
)


@njit(_SEARCH, nogil=True, cache=True, error_model="numpy")
def rvq_encode(x, column, code_column, beam, first, count, bases, roots, books, halves, codes):
    """Codes of each head's vectors, stage by stage: of `beam` sums of entries so far, each continued by every entry of
    the next stage, the `beam` nearest to the vector are kept; of equals the first.

    What is coded is (vector − base) times its head's matrix of `roots` (H, D, D), or as it is for (0, D, D); `books`
    (N, D, E) hold entries times it in columns, `halves` (N, E) their |e|²/2; `bases` (H, D).
    """
    width, entries, most = books.shape[1], books.shape[2], max(1, count.max())
    rest, next_rest = np.empty((beam, width), np.float32), np.empty((beam, width), np.float32)
    path, next_path = np.empty((beam, most), np.uint16), np.empty((beam, most), np.uint16)
    size, next_size = np.empty(beam, np.float32), np.empty(beam, np.float32)
    parent, entry = np.empty(beam, np.int64), np.empty(beam, np.int64)
    along, offset = np.empty(entries, np.float32), np.empty(width, np.float32)
    for h in range(len(count)):
        stages = count[h]
        for t in range(x.shape[0] if stages else 0):
            for i in range(width):
                offset[i] = x[t, column + h * width + i] - bases[h, i]
            if roots.shape[0]:
                turn(offset, roots[h], rest[0])
            else:
                rest[0, :] = offset
            size[0] = dot(rest[0], rest[0])
            kept = 1
            for s in range(stages):
                book = first[h] + s
                found = 0
                for b in range(kept):
                    turn(rest[b], books[book], along)
                    for e in range(entries):
                        distance = size[b] - np.float32(2) * (along[e] - halves[book, e])
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
                        next_rest[b, i] = rest[parent[b], i] - books[book, i, entry[b]]
                    next_path[b, :s] = path[parent[b], :s]
                    next_path[b, s] = entry[b]
                kept = found
                rest, next_rest = next_rest, rest
                path, next_path = next_path, path
                size, next_size = next_size, size
            for s in range(stages):
                codes[t, code_column + s] = path[0, s]
        code_column += stages


@njit(void(BOOKS, PLACES, PLACES, BOOKS, float32[:, :, ::1]), nogil=True, cache=True, error_model="numpy")
def rvq_turn(entries, first, count, roots, out):
    """The entries (N, E, D) of each head's codebooks times its matrix of `roots` (H, D, D)."""
    for h in range(len(count)):
        for book in range(first[h], first[h] + count[h]):
            for e in range(entries.shape[1]):
                turn(entries[book, e].copy(), roots[h], out[book, e])


@intrinsic
def _soon(typing_context, books, book, entry, i):
    """Tell the processor that number i of an entry will be read soon: a hint, which computes nothing."""

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        _, entries, width = cgutils.unpack_tuple(builder, array.shape, 3)
        row = builder.add(builder.mul(arguments[1], entries), arguments[2])
        place = builder.gep(array.data, [builder.add(builder.mul(row, width), arguments[3])])
        place = builder.bitcast(place, ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, word, word, word])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(prefetch, [place, word(0), word(3), word(1)])  # to read, keep it near, data
        return context.get_dummy_value()

    return types.void(books, types.intp, types.intp, types.intp), generate


_CODED = [(kind[:, ::1], int64, PLACES, PLACES, MATRIX, BOOKS) for kind in (uint8, uint16)]
_KINDS = [(BOOKS, int64, kind[::1], VECTOR, float32[::1]) for kind in (uint8, uint16)]


@njit([void(*of) for of in _KINDS], nogil=True, cache=True, error_model="numpy")
def _sum(books, book, code, base, out):
    """A base (D,) and the entries `code` of the codebooks from `book` on, one each."""
    stages, width = code.shape[0], out.shape[0]
    many = stages - stages % 4
    for i in range(width):
        out[i] = base[i]
    for s in range(0, many, 4):  # four entries at a time, as `turn` does it: half of the time is saved
        a, b = books[book + s, code[s]], books[book + s + 1, code[s + 1]]
        c, d = books[book + s + 2, code[s + 2]], books[book + s + 3, code[s + 3]]
        for i in range(width):
            out[i] = (((out[i] + a[i]) + b[i]) + c[i]) + d[i]
    for s in range(many, stages):
        a = books[book + s, code[s]]
        for i in range(width):
            out[i] += a[i]


@njit([void(*of, int64, float32[:, ::1]) for of in _CODED], nogil=True, cache=True, error_model="numpy")
def rvq_decode(codes, code_column, first, count, bases, books, column, x):
    """Sums of a base (H, D) and entries from `books` (N, E, D); codes are below their number.

    Codebooks of all layers do not fit the cache of a processor: half of the time is saved by asking for entries ahead.
    """
    width = books.shape[2]
    for h in range(len(count)):
        book, stages, start, base = first[h], count[h], column + h * width, bases[h]
        for t in range(codes.shape[0]):
            if t + AHEAD < codes.shape[0]:
                for s in range(stages):
                    for i in range(0, width, LINE):
                        _soon(books, book + s, np.int64(codes[t + AHEAD, code_column + s]), i)
            _sum(books, book, codes[t, code_column : code_column + stages], base, x[t, start : start + width])
        code_column += stages


@njit(
    [void(*of, MATRIX, MATRIX, int64, int64, int64, boolean, uint16[::1]) for of in _CODED],
    nogil=True,
    cache=True,
    error_model="numpy",
)
def rvq_place_16(
    codes, code_column, first, count, bases, books, cos, sin, layout, head_stride, token_stride, brain, memory
):
    """The same sums, turned by cosines and sines (T, pairs) and laid into a cache as `placingkernels.place_16` does it:
    in one pass, with none of them in memory in between."""
    width = books.shape[2]
    row, turned = np.empty(width, np.float32), np.empty(width, np.float32)
    bits = (turned if cos.shape[1] else row).view(np.uint32)
    for h in range(len(count)):
        book, stages, base = first[h], count[h], bases[h]
        for t in range(codes.shape[0]):
            if t + AHEAD < codes.shape[0]:
                for s in range(stages):
                    for i in range(0, width, LINE):
                        _soon(books, book + s, np.int64(codes[t + AHEAD, code_column + s]), i)
            _sum(books, book, codes[t, code_column : code_column + stages], base, row)
            if cos.shape[1]:
                turn_row(row, cos[t], sin[t], layout, turned)
            goal = h * head_stride + t * token_stride
            to_16(bits, brain, memory[goal : goal + width])
        code_column += stages
