"""A binary arithmetic coder in integers, and the numbers to mix its probabilities by their logits. docs/entropy.md.

The interval is kept to 40 bits and widened byte by byte, a carry running back through the bytes that are written (the
range coder of Martin 1979). `code_bit` is the same code for both directions, so they cannot disagree. Codes of symbols
and of token ids call it from compiled loops of their own.
"""

import numpy as np
from numba import njit
from numba.extending import register_jitable

TRAIN, ENCODE, DECODE = 0, 1, 2
TOP = 1 << 40  # the interval starts this wide
BOTTOM = 1 << 32  # and is widened by a byte whenever it is narrower than this
STRETCHED = 2047  # logits lie within ± this, in units of 1/256
MAX_WEIGHT = 1 << 20  # of a logit in a mixture, in units of 1/2^16


@register_jitable
def carry(data, at):
    """Add one to the number that the bytes before `at` are."""
    at -= 1
    while data[at] == 255:
        data[at] = 0
        at -= 1
    data[at] += 1


@register_jitable
def code_bit(mode, bit, p, low, span, at, data):
    """One binary decision with P(1) = p / 2¹⁶: the bit, and the interval afterwards."""
    bound = (span >> 16) * p
    if mode == DECODE:
        bit = 1 if low < bound else 0
        if bit:
            span = bound
        else:
            low -= bound
            span -= bound
        while span < BOTTOM:
            low = (low << 8) | (np.int64(data[at]) if at < len(data) else 0)
            span <<= 8
            at += 1
    elif mode == ENCODE:
        if bit:
            span = bound
        else:
            low += bound
            span -= bound
            if low >= TOP:
                low -= TOP
                carry(data, at)
        while span < BOTTOM:
            data[at] = low >> 32
            low = (low & (BOTTOM - 1)) << 8
            span <<= 8
            at += 1
    return bit, low, span, at


@njit(nogil=True, cache=True, error_model="numpy")
def flush(data, at, low):
    """Write the byte that ends the stream, all behind it being zeros; gives where the stream ends."""
    end = (low + BOTTOM - 1) >> 32
    if end > 255:
        carry(data, at)
    data[at] = end & 255
    return at + 1


def _squash() -> np.ndarray:
    """2¹⁶ / (1 + e^(−x/256)) for x = index − 2048, uint16 (4096,), the same on every machine: integers alone."""
    one = 1 << 128
    term = power = root = one
    for n in range(1, 40):  # e^(1/256) by its series
        term //= 256 * n
        root += term
    below = [1 << 15]
    for _ in range(2047):
        power = power * root >> 128
        below.append(max((one << 16) // (one + power), 24))
    negative = np.array(below[:0:-1], np.int64)
    return np.concatenate([negative[:1], negative, [1 << 15], 65536 - negative[::-1]]).astype(np.uint16)


SQUASH = _squash()
STRETCH = np.maximum(np.searchsorted(SQUASH[1:], 16 * np.arange(4096) + 8, side="right") - 2048, -2047).astype(np.int16)
