"""Compiled inner loop of `adaptive`: one walk over the symbols that trains, encodes or decodes. docs/entropy.md.

All three are the same code, so encoder and decoder cannot disagree about a probability. Every number is an int64 once
loaded; docs/entropy.md gives the bounds that keep each below 2⁶³. Tests compare the walk with a plain Python one.
"""

import numpy as np
from numba import njit
from numba.extending import register_jitable

from .binarycoder import DECODE, ENCODE, MAX_WEIGHT, STRETCHED, code_bit

CAP = 40  # larger magnitudes count as this one in every mean
UNARY = 14  # magnitudes up to this are counted out, what is above is an Exp-Golomb number
MAX_EXPONENT = 31
LEVELS, KINDS, INPUTS = 32, 5, 4
# where each table starts among the adaptive probabilities
ENERGY = 0  # [4 kinds][level][energy nearby][energy of the token]
TREND = ENERGY + 4 * LEVELS * 64  # [4 kinds][level][fast mean][slow mean]
SIGN_MEANS = TREND + 4 * LEVELS * 64  # [symbol of the token before][fast mean][slow mean], signed
SIGN_LEVEL = SIGN_MEANS + 5 * 256  # [slow mean][level]
EXPONENT = SIGN_LEVEL + 16 * LEVELS  # [level][bits so far]
TABLE = EXPONENT + LEVELS * (MAX_EXPONENT + 1)
# what became of a walk
DONE, NO_ROOM, OUT_OF_BITS, BAD_SYMBOL = 0, 1, 2, 3


@register_jitable
def _adapt(table, index, bit, rate):
    p = np.int64(table[index])
    table[index] = p + ((65535 * bit - p) >> rate)


@register_jitable
def _steer(weights, row, i, logit, slip):
    w = np.int64(weights[row, i]) + ((logit * slip + (1 << 17)) >> 18)
    weights[row, i] = min(max(w, -MAX_WEIGHT), MAX_WEIGHT)


@njit(inline="always")
def _mixed(mode, bit, s0, s3, i1, i2, row, stretch, squash, table, weights, rate, step, low, span, at, data):
    """A decision foreseen by the logits s0 and s3 and two adaptive probabilities, all of which learn from it."""
    s1, s2 = np.int64(stretch[table[i1] >> 4]), np.int64(stretch[table[i2] >> 4])
    dot = weights[row, 0] * s0 + weights[row, 1] * s1 + weights[row, 2] * s2 + weights[row, 3] * s3
    p = np.int64(squash[min(max(dot >> 16, -STRETCHED), STRETCHED) + 2048])
    bit, low, span, at = code_bit(mode, bit, p, low, span, at, data)
    slip = ((bit << 16) - p) * step
    _steer(weights, row, 0, s0, slip)
    _steer(weights, row, 1, s1, slip)
    _steer(weights, row, 2, s2, slip)
    _steer(weights, row, 3, s3, slip)
    _adapt(table, i1, bit, rate)
    _adapt(table, i2, bit, rate)
    return bit, low, span, at


@register_jitable
def _watch(row, means, fast, slow):
    """Move the means of every coefficient by one token, and tell what the next token's contexts are."""
    for c in range(len(row)):
        v = min(max(np.int64(row[c]), -CAP), CAP) << 8
        near, far = np.int64(means[0, c]), np.int64(means[1, c])
        near += (v - near) >> 1
        far += (v - far) >> 4
        means[0, c], means[1, c] = near, far
        a = abs(near)
        q = (a > 6) + (a > 16) + (a > 32) + (a > 56) + (a > 96) + (a > 160) + (a > 288)
        fast[c] = 8 + q if near >= 0 else 8 - q
        a = abs(far)
        q = (a > 4) + (a > 10) + (a > 20) + (a > 40) + (a > 72) + (a > 128) + (a > 224)
        slow[c] = 8 + q if far >= 0 else 8 - q


@njit(nogil=True, cache=True, error_model="numpy")
def walk(mode, symbols, notes, lowest, highest, data, place, numbers, model, history, speed):
    """Go on with `symbols` int32 (T, C), of which `notes` uint8 (T,) tell, from row place[3]; gives what became of it.

    `place`: low end (of the code, when decoding) and width of the interval, next byte of `data`, next row.
    `numbers`: stretch int16 (4096,), squash uint16 (4096,), energy classes uint8 (2, 64).
    `model`: static int16 (2, C), level uint8 (C,), inverse int64 (2, C) expected energies, table uint16 (TABLE,),
    weights int32 (KINDS·LEVELS, INPUTS). `history`: means int32 (2, C), contexts uint8 (2, C).
    `speed`: how fast tables and weights follow, row bytes.
    """
    stretch, squash, classes = numbers
    static, level, inverse, table, weights = model
    means, contexts = history
    fast, slow = contexts[0], contexts[1]
    rate, step, row_bytes = speed
    low, span, at, first = place[0], place[1], place[2], place[3]
    columns = symbols.shape[1]
    for t in range(first, symbols.shape[0]):
        if mode == ENCODE and at + row_bytes > len(data):
            place[0], place[1], place[2], place[3] = low, span, at, t
            return NO_ROOM
        energy, total, note = np.int64(0), np.int64(0), np.int64(notes[t])
        for c in range(columns):
            lv = np.int64(level[c])
            nearby = np.int64(classes[0, min(((energy + 64) * inverse[0, c]) >> 16, 63)])
            whole = np.int64(classes[1, min(((total + 256) * inverse[1, c]) >> 28, 63)])
            near, far = np.int64(fast[c]), np.int64(slow[c])
            value = np.int64(symbols[t, c]) if mode != DECODE else 0
            size, sign, count = abs(value), 0, 0
            loud, mix = lv * 64 + nearby * 8 + whole, note * 4 + (lv >> 3)
            swift, trend = abs(near - 8), abs(far - 8)
            while count <= UNARY:  # is it zero? if not: its sign; is it more than one? more than two? …
                kind = min(count, 3)
                i1 = ENERGY + kind * LEVELS * 64 + loud
                i2 = TREND + kind * LEVELS * 64 + lv * 64 + swift * 8 + trend
                s0, row = np.int64(static[min(count, 1), c]), kind * LEVELS + mix
                bit = 1 if size > count else 0
                bit, low, span, at = _mixed(
                    mode, bit, s0, 256, i1, i2, row, stretch, squash, table, weights, rate, step, low, span, at, data
                )
                if bit == 0:
                    break
                if count == 0:
                    last = min(max(np.int64(symbols[t - 1, c]), -2), 2) if t else 0
                    i1, i2 = SIGN_MEANS + ((last + 2) * 16 + near) * 16 + far, SIGN_LEVEL + far * LEVELS + lv
                    sign, row = 1 if value < 0 else 0, 4 * LEVELS + mix
                    sign, low, span, at = _mixed(
                        mode, sign, 0, 0, i1, i2, row, stretch, squash, table, weights, rate, step, low, span, at, data
                    )
                    swift = max(8 - near if sign else near - 8, 0)
                    trend = max(8 - far if sign else far - 8, 0)
                count += 1
            if count > UNARY:  # Exp-Golomb: exponent by adaptive bits, mantissa by even ones
                rest, exponent, bit = size - UNARY, 0, 1
                while exponent < MAX_EXPONENT:
                    i1 = EXPONENT + lv * (MAX_EXPONENT + 1) + exponent
                    p = min(max(np.int64(table[i1]), 32), 65504)
                    bit = 1 if rest >> (exponent + 1) else 0
                    bit, low, span, at = code_bit(mode, bit, p, low, span, at, data)
                    _adapt(table, i1, bit, 5)
                    if bit == 0:
                        break
                    exponent += 1
                number = np.int64(1)
                for shift in range(exponent - 1, -1, -1):
                    bit, low, span, at = code_bit(mode, (rest >> shift) & 1, 32768, low, span, at, data)
                    number = 2 * number + bit
                count = number + UNARY
            if mode == DECODE:
                value = -count if sign else count
                if value < lowest or value > highest:
                    return BAD_SYMBOL
                symbols[t, c] = value
            heard = min(count, CAP) << 8
            energy += heard - (energy >> 3)
            total += heard
        if mode == DECODE and at > len(data) + 4:
            return OUT_OF_BITS
        _watch(symbols[t], means, fast, slow)
    place[0], place[1], place[2], place[3] = low, span, at, symbols.shape[0]
    return DONE
