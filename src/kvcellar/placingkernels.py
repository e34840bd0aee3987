"""Compiled loops of `placing.py`, under the rules of `quantize/kernels.py`: they trust their shapes, and products are
summed in one order without fused multiply-add."""

import numpy as np
from numba import boolean, float32, int64, njit, types, uint16, uint32, void

from .geometry import HALF

MATRIX = types.Array(float32, 2, "C", readonly=True)
VECTOR = types.Array(float32, 1, "C", readonly=True)
LARGEST, LARGEST_FLOAT16, LARGEST_BFLOAT16 = (np.uint32(x) for x in (0x7F7FFFFF, 0x477FE000, 0x7F7F0000))  # bits
_ROW = (float32[::1], VECTOR, VECTOR, int64, float32[::1])


@njit(void(*_ROW), nogil=True, cache=True, error_model="numpy")
def turn_row(x, cos, sin, layout, out):
    """A key's numbers turned pair by pair, those behind the pairs as they are."""
    pairs, width = cos.shape[0], x.shape[0]
    if layout == HALF:
        a, b, to_a, to_b = x[:pairs], x[pairs : 2 * pairs], out[:pairs], out[pairs : 2 * pairs]
        for j in range(pairs):
            to_a[j] = a[j] * cos[j] - b[j] * sin[j]
        for j in range(pairs):
            to_b[j] = b[j] * cos[j] + a[j] * sin[j]
    else:
        for j in range(pairs):
            a, b = x[2 * j], x[2 * j + 1]
            out[2 * j] = a * cos[j] - b * sin[j]
            out[2 * j + 1] = b * cos[j] + a * sin[j]
    for j in range(2 * pairs, width):
        out[j] = x[j]


@njit(void(uint32[::1], uint32, uint32[::1]), nogil=True, cache=True, error_model="numpy")
def bound(bits, largest, out):
    """float32 bits with the magnitude kept to the bits `largest`: as whole numbers they order as the floats do."""
    for j in range(bits.shape[0]):
        x = bits[j]
        out[j] = (x & np.uint32(0x80000000)) | min(x & np.uint32(0x7FFFFFFF), largest)


_WHERE = (
    float32[:, ::1],  # x (T, C)
    *(MATRIX, MATRIX, int64),  # cosines and sines (T, pairs), layout of the pairs
    *(int64, int64, int64),  # first column, heads, width
    *(int64, int64),  # how far apart heads and tokens lie in the memory
)


@njit(void(*_WHERE, uint32[::1]), nogil=True, cache=True, error_model="numpy")
def place_float32(x, cos, sin, layout, column, heads, width, head_stride, token_stride, memory):
    """`memory` holds the bits of float32."""
    row, known, largest = np.empty(width, np.float32), x.view(np.uint32), LARGEST
    turned = row.view(np.uint32)
    for t in range(x.shape[0]):
        of_cos, of_sin = cos[t], sin[t]
        for h in range(heads):
            source, goal = column + h * width, h * head_stride + t * token_stride
            bits = known[t, source : source + width]
            if cos.shape[1]:
                turn_row(x[t, source : source + width], of_cos, of_sin, layout, row)
                bits = turned
            bound(bits, largest, memory[goal : goal + width])


@njit(void(uint32[::1], uint16[::1]), nogil=True, cache=True, error_model="numpy")
def to_bfloat16(bits, out):
    """Upper halves of float32 bits, bounded and rounded to nearest, half to even."""
    for j in range(out.shape[0]):
        x = bits[j]
        size = min(x & np.uint32(0x7FFFFFFF), LARGEST_BFLOAT16)
        size = (size + np.uint32(0x7FFF) + ((size >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        out[j] = np.uint16(((x >> np.uint32(16)) & np.uint32(0x8000)) | size)


@njit(void(uint32[::1], uint16[::1]), nogil=True, cache=True, error_model="numpy")
def to_float16(bits, out):
    """float16 bits, bounded and rounded to nearest, half to even, of float32 bits, which change.

    Below 2⁻¹⁴ float16 counts in steps of 2⁻²⁴, as float32 does just above ½: adding ½ there rounds and lines up.
    """
    x = bits.view(np.float32)
    for j in range(out.shape[0]):
        sign = (bits[j] >> np.uint32(16)) & np.uint32(0x8000)
        size = min(bits[j] & np.uint32(0x7FFFFFFF), LARGEST_FLOAT16)
        bits[j] = size
        normal = (
            size - np.uint32(112 << 23) + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))
        ) >> np.uint32(13)
        small = size < np.uint32(113 << 23)
        x[j] = x[j] + np.float32(0.5)
        tiny = bits[j] - np.uint32(0x3F000000)
        out[j] = np.uint16(sign | (tiny if small else normal))


@njit(void(uint32[::1], boolean, uint16[::1]), nogil=True, cache=True, error_model="numpy")
def to_16(bits, brain, out):
    """`brain` for bfloat16, else float16. The bits may change."""
    if brain:
        to_bfloat16(bits, out)
    else:
        to_float16(bits, out)


@njit(void(*_WHERE, boolean, uint16[::1]), nogil=True, cache=True, error_model="numpy")
def place_16(x, cos, sin, layout, column, heads, width, head_stride, token_stride, brain, memory):
    """`brain` for bfloat16, else float16."""
    row, known = np.empty(width, np.float32), x.view(np.uint32)
    turned = row.view(np.uint32)
    for t in range(x.shape[0]):
        of_cos, of_sin = cos[t], sin[t]
        for h in range(heads):
            source, goal = column + h * width, h * head_stride + t * token_stride
            bits = known[t, source : source + width]
            if cos.shape[1]:
                turn_row(x[t, source : source + width], of_cos, of_sin, layout, row)
                bits = turned
            elif not brain:
                for j in range(width):
                    turned[j] = bits[j]
                bits = turned
            to_16(bits, brain, memory[goal : goal + width])
