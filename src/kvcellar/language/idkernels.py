"""Compiled inner loop of `idcode`: one walk over token ids that encodes or decodes them bit by bit.

Both directions are the same code, so encoder and decoder cannot disagree about a probability. Every number is an int64
once loaded and below 2⁴⁸ in magnitude. Tests run the walk uncompiled, too.
"""

import numpy as np
from numba import njit
from numba.extending import register_jitable

from ..symbols.binarycoder import ENCODE, MAX_WEIGHT, STRETCHED, code_bit

ORDERS = 5  # no token before, one, two, three, and the last but one alone
INPUTS = ORDERS + 2  # and the match, and a constant
CAP = 15  # counts end here
STATES = 256  # zeros seen and ones seen, each 0 … 15
GROUPS = 8  # bits of an id from the top, two or more at a time
SETS = 6 * 8  # of weights: how much is known about this token, and which bit it is
MATCHES = 16  # classes of the match's length
STEP = 12  # how fast weights follow
DONE, NO_ROOM, OUT_OF_BITS = 0, 1, 2
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9], np.uint64)
_MASK = np.uint64((1 << 62) - 1)


@register_jitable
def _hash(a, b):
    """Two numbers from 0 on as one below 2⁶². Unsigned: of signed products the compiler assumes that they fit."""
    x = (np.uint64(a) ^ (np.uint64(b) * _FACTORS[0])) * _FACTORS[1]
    x ^= x >> np.uint64(29)
    return np.int64(x & _MASK)


@register_jitable
def _slot(keys, key):
    """Where the counts of `key` lie: its own place, or the older of two once both are taken."""
    mask = len(keys) - 1
    at = key & mask
    check = np.uint32((key >> 30) | 1)
    for step in range(4):
        here = (at + step) & mask
        if keys[here] == check:
            return here, False
        if keys[here] == 0:
            keys[here] = check
            return here, True
    keys[at] = check
    return at, True


@njit(nogil=True, cache=True, error_model="numpy")
def walk(mode, ids, width, data, place, numbers, model, memory):
    """Go through `ids` int64 (T,) of `width` bits each; gives what became of it.

    `place`: low end (of the code, when decoding) and width of the interval, next byte of `data`.
    `numbers`: stretch int16 (4096,), squash uint16 (4096,), rates int64 (256,).
    `model`: maps uint16 (ORDERS, GROUPS, STATES), uses uint8 alike, matched uint16 (MATCHES,), weights int32
    (SETS, INPUTS).
    `memory`: keys uint32 (2ⁿ,), counts uint8 (2ⁿ,), last int32 (2ᵐ,) where a pair of tokens was seen last.
    """
    stretch, squash, rates = numbers
    maps, uses, matched, weights = model
    keys, counts, last = memory
    low, span, at = place[0], place[1], place[2]
    contexts = np.zeros(ORDERS, np.int64)
    slots = np.zeros(ORDERS, np.int64)
    logits = np.zeros(INPUTS, np.int64)
    one, two, three = np.int64(0), np.int64(0), np.int64(0)
    pointer, length = np.int64(0), np.int64(0)
    for t in range(len(ids)):
        if mode == ENCODE and at + 2 * width + 8 > len(data):
            return NO_ROOM
        contexts[1] = _hash(one, np.int64(1))
        contexts[2] = _hash(_hash(one, two), np.int64(2))
        contexts[3] = _hash(_hash(_hash(one, two), three), np.int64(3))
        contexts[4] = _hash(two, np.int64(4))
        node, agrees = np.int64(1), length > 0
        guess = ids[pointer] if agrees else np.int64(0)
        token = ids[t] if mode == ENCODE else np.int64(0)
        for depth in range(width):
            group = min(depth >> 1, GROUPS - 1)
            known = 0
            for k in range(ORDERS):
                slot, fresh = _slot(keys, _hash(contexts[k], node * ORDERS + k))
                if fresh:
                    counts[slot] = 0
                slots[k] = slot
                state = counts[slot]
                if state == 0:
                    logits[k] = 0
                else:
                    logits[k] = stretch[maps[k, group, state] >> 4]
                    if 1 <= k <= 3:
                        known = k
            if agrees:
                expected = (guess >> (width - 1 - depth)) & 1
                p = np.int64(matched[min(length, MATCHES - 1)])
                s = np.int64(stretch[p >> 4])
                logits[ORDERS] = s if expected else -s
                known = 4 if length < 3 else 5
            else:
                expected = np.int64(0)
                logits[ORDERS] = 0
            logits[ORDERS + 1] = 256
            row = known * 8 + group
            dot = np.int64(0)
            for i in range(INPUTS):
                dot += np.int64(weights[row, i]) * logits[i]
            mixed = min(max(dot >> 16, -STRETCHED), STRETCHED)
            p = np.int64(squash[mixed + 2048])
            bit = (token >> (width - 1 - depth)) & 1 if mode == ENCODE else 0
            bit, low, span, at = code_bit(mode, bit, p, low, span, at, data)
            slip = ((bit << 16) - p) * STEP
            for i in range(INPUTS):
                w = np.int64(weights[row, i]) + ((logits[i] * slip + (1 << 17)) >> 18)
                weights[row, i] = min(max(w, -MAX_WEIGHT), MAX_WEIGHT)
            for k in range(ORDERS):
                state = np.int64(counts[slots[k]])
                if state:
                    m = np.int64(maps[k, group, state])
                    n = np.int64(uses[k, group, state])
                    m += ((bit * 65535 - m) * rates[n]) >> 16
                    maps[k, group, state] = m
                    if n < 255:
                        uses[k, group, state] = n + 1
                zeros, ones = state >> 4, state & 15
                if bit:
                    ones = min(ones + 1, CAP)
                    if zeros > 2:
                        zeros = (zeros + 3) >> 1
                else:
                    zeros = min(zeros + 1, CAP)
                    if ones > 2:
                        ones = (ones + 3) >> 1
                counts[slots[k]] = (zeros << 4) | ones
            if agrees:
                c = min(length, MATCHES - 1)
                hit = 1 if bit == expected else 0
                m = np.int64(matched[c])
                matched[c] = m + ((hit * 65535 - m) >> 6)
                agrees = hit == 1
            node = node * 2 + bit
        token = node - (np.int64(1) << width)
        ids[t] = token
        if mode != ENCODE and at > len(data) + 4:
            return OUT_OF_BITS
        three, two, one = two, one, token
        if length > 0 and guess == token:
            length += 1
            pointer += 1
        else:
            length = 0
        here = _hash(_hash(one, two), np.int64(7)) & (len(last) - 1)
        if length == 0 and t > 0:
            candidate = np.int64(last[here]) - 1
            if candidate > 0 and ids[candidate] == one and ids[candidate - 1] == two:
                pointer = candidate + 1
                length = 1
        last[here] = t + 1
    place[0], place[1], place[2] = low, span, at
    return DONE
