"""Compiled inner loops of `byteplanes`. They trust their table: every length was checked where it was made.

Addresses instead of arrays let one call join all streams of a task outside the interpreter lock. Tests compare
them with the plain numpy form.
"""

import numpy as np
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic


@intrinsic
def _bytes_at(typing_context, address):
    """The address of bytes as a pointer that `carray` takes."""
    return types.CPointer(types.uint8)(types.int64), _to_pointer


@intrinsic
def _words_at(typing_context, address):
    return types.CPointer(types.uint16)(types.int64), _to_pointer


@intrinsic
def _double_words_at(typing_context, address):
    return types.CPointer(types.uint32)(types.int64), _to_pointer


def _to_pointer(context, builder, signature, arguments):
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@njit(types.void(types.int64[:, ::1]), nogil=True, cache=True, error_model="numpy")
def join2(table):
    """Rows: addresses of planes 0 and 1, base, out; words from head to head of out; H, T, D."""
    for r in range(table.shape[0]):
        a0, a1, at_base, at_out, step, heads, tokens, width = table[r]
        n = heads * tokens * width
        p0, p1 = carray(_bytes_at(a0), (n,)), carray(_bytes_at(a1), (n,))
        base = carray(_words_at(at_base), (heads * width,))
        out = carray(_words_at(at_out), ((heads - 1) * step + tokens * width,))
        for h in range(heads):
            add = base[h * width : (h + 1) * width]
            for t in range(tokens):
                i, o = (h * tokens + t) * width, h * step + t * width
                row, b0, b1 = out[o : o + width], p0[i : i + width], p1[i : i + width]
                for d in range(width):
                    row[d] = np.uint16(np.uint16(b0[d]) | (np.uint16(b1[d]) << np.uint16(8))) + add[d]


@njit(types.void(types.int64[:, ::1]), nogil=True, cache=True, error_model="numpy")
def join4(table):
    """Rows: addresses of planes 0 to 3, base, out; words from head to head of out; H, T, D."""
    for r in range(table.shape[0]):
        a0, a1, a2, a3, at_base, at_out, step, heads, tokens, width = table[r]
        n = heads * tokens * width
        p0, p1 = carray(_bytes_at(a0), (n,)), carray(_bytes_at(a1), (n,))
        p2, p3 = carray(_bytes_at(a2), (n,)), carray(_bytes_at(a3), (n,))
        base = carray(_double_words_at(at_base), (heads * width,))
        out = carray(_double_words_at(at_out), ((heads - 1) * step + tokens * width,))
        for h in range(heads):
            add = base[h * width : (h + 1) * width]
            for t in range(tokens):
                i, o = (h * tokens + t) * width, h * step + t * width
                row = out[o : o + width]
                b0, b1, b2, b3 = p0[i : i + width], p1[i : i + width], p2[i : i + width], p3[i : i + width]
                for d in range(width):
                    low = np.uint32(b0[d]) | (np.uint32(b1[d]) << np.uint32(8))
                    high = np.uint32(b2[d]) | (np.uint32(b3[d]) << np.uint32(8))
                    row[d] = np.uint32(low | (high << np.uint32(16))) + add[d]
