"""Compiled loops of `placing.py`, under the rules of `quantize/kernels.py`: they trust their shapes, and products are
summed in one order without fused multiply-add."""

import numpy as np
from numba import boolean, float32, int64, njit, types, uint16, uint32, void

from .geometry import HALF

MATRIX = types.Array(float32, 2, "C", readonly=True)
VECTOR = types.Array(float32, 1, "C", readonly=True)
LARGEST = np.float32(np.finfo(np.float32).max)
LARGEST_FLOAT16 = np.float32(65504)
LARGEST_BFLOAT16 = np.float32(3.3895313892515355e38)
_ROW = (float32[::1], VECTOR, VECTOR, int64, float32, float32[::1])


@njit(void(*_ROW), nogil=True, cache=True, error_model="numpy")
def turn_row(x, cos, sin, layout, largest, out):
    """A key's numbers turned pair by pair, those behind the pairs as they are, all within ± `largest`."""
    pairs, width = cos.shape[0], x.shape[0]
    if layout == HALF:
        a, b, to_a, to_b = x[:pairs], x[pairs : 2 * pairs], out[:pairs], out[pairs : 2 * pairs]
        for j in range(pairs):
            to_a[j] = min(max(a[j] * cos[j] - b[j] * sin[j], -largest), largest)
            to_b[j] = min(max(b[j] * cos[j] + a[j] * sin[j], -largest), largest)
    else:
        for j in range(pairs):
            a, b = x[2 * j], x[2 * j + 1]
            out[2 * j] = min(max(a * cos[j] - b * sin[j], -largest), largest)
            out[2 * j + 1] = min(max(b * cos[j] + a * sin[j], -largest), largest)
    for j in range(2 * pairs, width):
        out[j] = min(max(x[j], -largest), largest)


_WHERE = (
    float32[:, ::1],  # x (T, C)
    *(MATRIX, MATRIX, int64),  # cosines and sines (T, pairs), layout of the pairs
    *(int64, int64, int64),  # first column, heads, width
    *(int64, int64),  # how far apart heads and tokens lie in the memory
)


@njit(void(*_WHERE, float32[::1]), nogil=True, cache=True, error_model="numpy")
def place_float32(x, cos, sin, layout, column, heads, width, head_stride, token_stride, memory):
    for t in range(x.shape[0]):
        for h in range(heads):
            source, goal = column + h * width, h * head_stride + t * token_stride
            turn_row(x[t, source : source + width], cos[t], sin[t], layout, LARGEST, memory[goal : goal + width])


@njit(void(uint32[::1], uint16[::1]), nogil=True, cache=True, error_model="numpy")
def to_bfloat16(bits, out):
    """Upper halves of float32 bits, rounded to nearest, half to even."""
    for j in range(out.shape[0]):
        x = bits[j]
        out[j] = np.uint16((x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(void(float32[::1], uint32[::1], uint16[::1]), nogil=True, cache=True, error_model="numpy")
def to_float16(x, bits, out):
    """float16 bits, rounded to nearest, half to even, of float32 within its range, whose bits are `bits` as well.

    Below 2⁻¹⁴ float16 counts in steps of 2⁻²⁴, as float32 does just above ½: adding ½ there rounds and lines up.
    """
    for j in range(out.shape[0]):
        sign = (bits[j] >> np.uint32(16)) & np.uint32(0x8000)
        x[j] = abs(x[j])
        size = bits[j]
        normal = (
            size - np.uint32(112 << 23) + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))
        ) >> np.uint32(13)
        small = size < np.uint32(113 << 23)
        x[j] = x[j] + np.float32(0.5)
        tiny = bits[j] - np.uint32(0x3F000000)
        out[j] = np.uint16(sign | (tiny if small else normal))


@njit(void(*_WHERE, boolean, uint16[::1]), nogil=True, cache=True, error_model="numpy")
def place_16(x, cos, sin, layout, column, heads, width, head_stride, token_stride, brain, memory):
    """`brain` for bfloat16, else float16."""
    row = np.empty(width, np.float32)
    bits = row.view(np.uint32)
    largest = LARGEST_BFLOAT16 if brain else LARGEST_FLOAT16
    for t in range(x.shape[0]):
        for h in range(heads):
            source, goal = column + h * width, h * head_stride + t * token_stride
            turn_row(x[t, source : source + width], cos[t], sin[t], layout, largest, row)
            if brain:
                to_bfloat16(bits, memory[goal : goal + width])
            else:
                to_float16(row, bits, memory[goal : goal + width])
