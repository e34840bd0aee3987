"""Compiled inner loop of `causal/1`: one walk over a layer's tokens that encodes or decodes. docs/exact-small.md.

Both are the same code, so they cannot disagree. Every number is an int64, but for the sums of products, which are
float64 that hold integers below 2⁵³: those are exact in any order. Tests compare the walk with a plain Python one.
"""

import numpy as np
from numba import njit
from numba.extending import register_jitable

from .binarycoder import carry

ENCODE, DECODE = 0, 1
TOP = 1 << 56  # the interval starts this wide
BOTTOM = 1 << 48  # and is widened by a byte whenever it is narrower than this
PATTERNS = 1 << 16
TOTAL = (1 << 24) + PATTERNS
FINE = 20  # a channel's unit is 2^FINE
COARSE = 12  # and 2^COARSE as what others are foreseen from
SUM = 30  # and 2^SUM in the sums of products
LIMIT = 1 << 40  # of a number in fine units
REACH = 1 << 17  # of one in coarse units
LOUDEST = 64 * 34  # of the logarithm of a deviation
TOKEN_RATE, CHANNEL_RATE = 640, 384  # how fast deviations follow, in 1/2^24 octaves for each 1/1024
ADAPTED = 6 << 14  # at most so far, 2^-14 octaves
DRIFT_SHIFT, DRIFT_GAIN = 5, 96  # how fast a channel's mean follows, and how much of it is believed (/ 256)
# what became of a walk
DONE, NO_ROOM = 0, 1
ROW_BYTES = 4  # more than a number can take


@register_jitable
def _fixed(magnitude, bits, shift):
    """A magnitude of a float format with `bits` mantissa bits, its exponent moved by `shift`, as an integer."""
    exponent, mantissa = magnitude >> bits, magnitude & ((1 << bits) - 1)
    if exponent > 0:
        mantissa |= 1 << bits
    else:
        exponent = 1
    by = exponent + shift
    if by >= 0:
        return LIMIT if by > 40 else min(mantissa << by, LIMIT)
    return mantissa >> min(-by, 62)


@register_jitable
def _edge(n, bits, shift, half):
    """Where the cell of the n-th of all patterns in rising order begins."""
    if n >= 32768:
        m = n - 32768
        return _fixed(2 * m - half, bits, shift) if m > 0 else 0
    return -_fixed(2 * (32767 - n) + 2 - half, bits, shift)


@register_jitable
def _below(n, mu, inverse, by, bits, shift, half, shape):
    """How much of TOTAL lies below the n-th pattern."""
    if n <= 0:
        return 0
    if n >= PATTERNS:
        return TOTAL
    z = (((_edge(n, bits, shift, half) - mu) * inverse) >> by) + 16 * 1024
    z = min(max(z, 0), 32 * 1024 - 1)
    i, f = z >> 5, z & 31
    return shape[i] + (((shape[i + 1] - shape[i]) * f) >> 5) + n


@register_jitable
def _logarithm(v, table):
    """64 · log2 of v ≥ 1."""
    top, x = 0, v
    for step in (32, 16, 8, 4, 2, 1):
        if x >> step:
            x >>= step
            top += step
    return 64 * top + table[((v << 6) >> top) & 63 if top < 57 else (v >> (top - 6)) & 63]


@njit(inline="always")
def _number(mode, pattern, mu, loud, bits, shift, half, tables, low, span, at, data):
    """One number with its middle `mu` and deviation 2^(loud/64): its pattern, fine value, how far out it lies (/1024
    deviations), and the interval afterwards."""
    shape, powers = tables
    mu = min(max(mu, -LIMIT), LIMIT)
    loud = min(max(loud, 0), LOUDEST)
    inverse, by = powers[loud & 63], 5 + (loud >> 6)
    each = span // TOTAL
    if mode == ENCODE:
        n = 32768 + pattern if pattern < 32768 else 65535 - pattern
        start = _below(n, mu, inverse, by, bits, shift, half, shape)
        stop = _below(n + 1, mu, inverse, by, bits, shift, half, shape)
        low += each * start
        if low >= TOP:
            low -= TOP
            carry(data, at)
    else:
        wanted = min(low // each, TOTAL - 1)
        n, beyond = 0, PATTERNS
        start, stop = 0, TOTAL
        while beyond - n > 1:
            middle = (n + beyond) >> 1
            there = _below(middle, mu, inverse, by, bits, shift, half, shape)
            if there <= wanted:
                n, start = middle, there
            else:
                beyond, stop = middle, there
        low -= each * start
        pattern = n - 32768 if n >= 32768 else 65535 - n
    span = each * (stop - start)
    while span < BOTTOM:
        if mode == ENCODE:
            data[at] = low >> 48
            low = (low & (BOTTOM - 1)) << 8
        else:
            low = (low << 8) | (np.int64(data[at]) if at < len(data) else 0)
        span <<= 8
        at += 1
    value = _fixed(2 * (pattern & 32767) + 1 - half, bits, shift)
    value = -value if pattern >= 32768 else value
    away = min(abs(((value - mu) * inverse) >> by), 4096)
    return pattern, value, away, low, span, at


@register_jitable
def _louder(old, away, rate):
    return min(max(old + ((((away * 1313) >> 10) - 1024) * rate >> 10), -ADAPTED), ADAPTED)


@register_jitable
def _seen(value):
    return min(max(value >> (FINE - COARSE), -REACH), REACH)


@register_jitable
def _missed(value, middle):
    return min(max(value - middle, -(1 << 26)), 1 << 26)


@njit(nogil=True, cache=True, error_model="numpy")
def walk(mode, patterns, seen, sums, within, pairs, turns, spread, exponent, token, form, tables, logs, place, data):
    """Encode or decode a layer.

    `patterns` int64 (T, C) in coding order, filled when decoding; `seen` float64 (T, C), filled with the coarse numbers
    before they were turned; `sums` float64 (T, C), what shallower layers foresee, used up; `within` float64 (C, C), row
    c what number c adds to later sums; the first 2·`pairs` columns are pairs, that `turns` int64 (2, T, P) turn;
    `spread` int64 (C,) logarithms of deviations; `exponent` int64 (C,) of units; `token` int64 (T,) how much louder a
    token is, followed; `form`: mantissa bits, bias of exponents, 1 for rounded numbers and 0 for cut ones; `place`: low
    end and width of the interval, next byte of `data`, next row.
    """
    columns, (bits, bias, half) = patterns.shape[1], form
    powers = tables[1]
    channel, drift = np.zeros(columns, np.int64), np.zeros(columns, np.int64)
    variance = np.empty(columns, np.int64)
    for c in range(columns):  # 2^(2·spread/64 − 10)
        twice = 2 * spread[c] - 640
        whole, part = twice >> 6, twice & 63
        scaled = 2 * powers[64 - part] if part else powers[0]  # 2^(15 + part/64)
        variance[c] = max(1, scaled << whole - 15 if whole >= 15 else scaled >> min(15 - whole, 62))
        variance[c] = min(variance[c], 1 << 34)
    low, span, at = place[0], place[1], place[2]
    for t in range(patterns.shape[0]):
        if mode == ENCODE and at + ROW_BYTES * columns > len(data):
            return NO_ROOM
        row, loud = sums[t], token[t]
        c = 0
        while c < columns:
            shift = FINE - exponent[c] - bias - bits - 1
            if c >= 2 * pairs:
                mu = (np.int64(row[c]) >> (SUM - FINE)) + (drift[c] * DRIFT_GAIN >> 8)
                pattern, value, away, low, span, at = _number(
                    mode, patterns[t, c], mu, spread[c] + ((loud + channel[c]) >> 8),
                    bits + 1, shift, half, tables, low, span, at, data,
                )  # fmt: skip
                patterns[t, c] = pattern
                channel[c], loud = _louder(channel[c], away, CHANNEL_RATE), _louder(loud, away, TOKEN_RATE)
                plain = np.int64(row[c]) >> (SUM - FINE)
                drift[c] += (_missed(value, plain) - drift[c]) >> DRIFT_SHIFT
                x = np.float64(_seen(value))
                seen[t, c] = x
                for later in range(c + 1, columns):
                    row[later] += x * within[c, later]
                c += 1
                continue
            cos, sin = turns[0, t, c >> 1], turns[1, t, c >> 1]
            plain_a, plain_b = np.int64(row[c]) >> (SUM - FINE), np.int64(row[c + 1]) >> (SUM - FINE)
            mu_a = min(max(plain_a + (drift[c] * DRIFT_GAIN >> 8), -LIMIT), LIMIT)
            mu_b = min(max(plain_b + (drift[c + 1] * DRIFT_GAIN >> 8), -LIMIT), LIMIT)
            # b is foreseen without a: its sum lacks x_a · within[c, c + 1], which comes with the middle of a here
            beta = min(max(np.int64(within[c, c + 1]) >> 2, -(1 << 19)), 1 << 19)
            mu_b = min(max(mu_b + (min(max(mu_a, -(1 << 37)), 1 << 37) * beta >> 16), -LIMIT), LIMIT)
            va, ve = variance[c], variance[c + 1]
            slope = min(max(beta, -(1 << 17)), 1 << 17) >> 6
            cov = va * slope >> 10
            vb = ve + (cov * slope >> 10)
            k, s = cos >> 4, sin >> 4
            first = max(1, (k * k * va - 2 * k * s * cov + s * s * vb) >> 20)
            joint = (k * s * (va - vb) + (k * k - s * s) * cov) >> 20
            rho = min(max((joint << 12) // first, -(1 << 15)), 1 << 15)
            lg = _logarithm(first, logs)
            lg_a, lg_b = (lg + 640) >> 1, spread[c] + spread[c + 1] - ((lg + 640) >> 1)
            mu = (cos * mu_a - sin * mu_b) >> 14
            pattern, ra, away, low, span, at = _number(
                mode, patterns[t, c], mu, lg_a + ((loud + channel[c]) >> 8),
                bits + 1, shift, half, tables, low, span, at, data,
            )  # fmt: skip
            patterns[t, c] = pattern
            channel[c], loud = _louder(channel[c], away, CHANNEL_RATE), _louder(loud, away, TOKEN_RATE)
            missed = min(max(ra - mu, -LIMIT), LIMIT)
            mu = ((sin * mu_a + cos * mu_b) >> 14) + (missed * rho >> 12)
            pattern, rb, away, low, span, at = _number(
                mode, patterns[t, c + 1], mu, lg_b + ((loud + channel[c + 1]) >> 8),
                bits + 1, shift, half, tables, low, span, at, data,
            )  # fmt: skip
            patterns[t, c + 1] = pattern
            channel[c + 1], loud = _louder(channel[c + 1], away, CHANNEL_RATE), _louder(loud, away, TOKEN_RATE)
            a, b = (ra * cos + rb * sin) >> 14, (rb * cos - ra * sin) >> 14
            x, y = np.float64(_seen(a)), np.float64(_seen(b))
            seen[t, c], seen[t, c + 1] = x, y
            drift[c] += (_missed(a, plain_a) - drift[c]) >> DRIFT_SHIFT
            plain_b = np.int64(row[c + 1] + x * within[c, c + 1]) >> (SUM - FINE)
            drift[c + 1] += (_missed(b, plain_b) - drift[c + 1]) >> DRIFT_SHIFT
            for later in range(c + 2, columns):
                row[later] += x * within[c, later] + y * within[c + 1, later]
            c += 2
        token[t] = loud
    place[0], place[1], place[2] = low, span, at
    return DONE


@njit(nogil=True, cache=True, error_model="numpy")
def flush(data, at, low):
    """Write the byte that ends the stream, all behind it being zeros; gives where the stream ends."""
    end = (low + BOTTOM - 1) >> 48
    if end > 255:
        carry(data, at)
    data[at] = end & 255
    return at + 1
