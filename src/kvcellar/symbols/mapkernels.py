"""Compiled inner loops of the map codes (`maps.py`). They trust their arguments: lengths are checked by the caller.

Loops that check what they read say so in their result, since an exception cannot name the part from here.
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, register_jitable

U1 = np.uint64(1)
TURN = 2 * math.pi


def _are_bytes(array):
    return isinstance(array, types.Array) and array.dtype == types.uint8 and array.layout == "C"


@intrinsic
def _load(typing_context, packed, at):
    """Eight bytes of a uint8 array from byte `at`, wherever that is, as a little-endian number."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(place, align=1)

    return (types.uint64(packed, types.intp), generate) if _are_bytes(packed) else None


@intrinsic
def _store(typing_context, packed, at, value):
    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        builder.store(arguments[2], place, align=1)
        return context.get_dummy_value()

    return (types.void(packed, types.intp, types.uint64), generate) if _are_bytes(packed) else None


@intrinsic
def _high(typing_context, a, b):
    """The upper 64 bits of a product: division by a constant without dividing."""

    def generate(context, builder, signature, arguments):
        a, b = (builder.zext(each, ir.IntType(128)) for each in arguments)
        return builder.trunc(builder.lshr(builder.mul(a, b), ir.Constant(ir.IntType(128), 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


# Handing an array to a helper counts a reference up and down, which takes longer than a word does: the loops below
# spell the common case out and call a helper for the last bytes only.


@register_jitable
def _bits_at(packed, bit):
    """At least 57 bits from `bit` on; beyond the array there are zeros."""
    at, value = bit >> 3, np.uint64(0)
    for j in range(min(8, len(packed) - at)):
        value |= np.uint64(packed[at + j]) << np.uint64(8 * j)
    return value >> np.uint64(bit & 7)


@register_jitable
def _store_last(packed, at, value):
    for j in range(min(8, len(packed) - at)):
        packed[at + j] = np.uint8(value >> np.uint64(8 * j))


@register_jitable
def _low(bits):
    return (U1 << np.uint64(bits)) - U1


@njit(nogil=True, cache=True, error_model="numpy")
def all_below(symbols, alphabet):
    """Whether every number is in [0, alphabet); negative ones are not."""
    largest = np.uint64(0)
    for c in symbols:
        largest = max(largest, np.uint64(c))
    return largest < np.uint64(alphabet)


@njit(nogil=True, cache=True, error_model="numpy")
def write_words(symbols, alphabet, base, span, widths, packed, count):
    """Append symbols to `count` packed ones, `widths[k]` bits a word of k digits; bits behind them become zero.

    False, and no byte changed, when a symbol is not below `alphabet`.
    """
    if not all_below(symbols, alphabet):
        return False
    n, held, total = np.uint64(base), count % span, len(symbols)
    bit, i = count // span * widths[span], 0
    carry = _bits_at(packed, bit & ~7) & _low(bit & 7)
    started, place = _bits_at(packed, bit) & _low(widths[held]), U1  # a word that has digits already
    for _ in range(held):
        place *= n
    while i < total:
        digits = min(span - held, total - i)
        value, j = np.uint64(0), i + digits
        while j > i:
            j -= 1
            value = value * n + np.uint64(symbols[j])
        at, below = bit >> 3, bit & 7
        joined = carry | ((started + place * value) << np.uint64(below))
        if at + 8 <= len(packed):
            _store(packed, at, joined)
        else:
            _store_last(packed, at, joined)
        below += widths[held + digits]
        carry = (joined >> np.uint64(below & 56)) if below < 64 else np.uint64(0)
        bit += widths[held + digits]
        i += digits
        held, started, place = 0, np.uint64(0), U1
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def read_words(packed, base, span, widths, reciprocal, shift, out):
    """Unpack `len(out)` symbols; False when a word is too large for its digits.

    ⌊w / base⌋ = (w · reciprocal) >> (64 + shift) for every w of at most 57 bits.
    """
    n, reciprocal, shift = np.uint64(base), np.uint64(reciprocal), np.uint64(shift)
    largest, mask = np.uint64(0), _low(widths[span])
    bit, i, total = 0, 0, len(out)
    while i < total:
        last = i + span - 1
        if last < total and (bit >> 3) + 8 <= len(packed):
            value = (_load(packed, bit >> 3) >> np.uint64(bit & 7)) & mask
        else:
            last = min(last, total - 1)
            value = _bits_at(packed, bit) & _low(widths[last - i + 1])
        bit += widths[span]
        while i < last:
            quotient = _high(value, reciprocal) >> shift
            out[i] = value - quotient * n
            value = quotient
            i += 1
        out[last] = value
        largest = max(largest, value)
        i += 1
    return largest < n


@njit(nogil=True, cache=True, error_model="numpy")
def read_bits(packed, bits, out):
    """Unpack `len(out)` numbers of `bits` each, at most 57."""
    mask = _low(bits)
    safe = max(0, min(len(out), (8 * len(packed) - 57) // bits + 1))
    for i in range(safe):
        bit = i * bits
        out[i] = (_load(packed, bit >> 3) >> np.uint64(bit & 7)) & mask
    for i in range(safe, len(out)):
        out[i] = _bits_at(packed, i * bits) & mask


@njit(nogil=True, cache=True, error_model="numpy")
def read_small_bits(packed, bits, out):
    """Unpack numbers of fewer than 8 bits into bytes, eight at once: halves, quarters and eighths move apart."""
    low4 = _low(4 * bits)
    low2 = _low(2 * bits) * np.uint64(0x0000000100000001)
    low1 = _low(bits) * np.uint64(0x0001000100010001)
    move4, move2, move1 = np.uint64(32 - 4 * bits), np.uint64(16 - 2 * bits), np.uint64(8 - bits)
    high4, high2, high1 = low4 << np.uint64(4 * bits), low2 << np.uint64(2 * bits), low1 << np.uint64(bits)
    groups = max(0, min(len(out) // 8, (len(packed) - 8) // bits + 1))
    for group in range(groups):
        x = _load(packed, group * bits)
        x = (x & low4) | ((x & high4) << move4)
        x = (x & low2) | ((x & high2) << move2)
        x = (x & low1) | ((x & high1) << move1)
        _store(out, 8 * group, x)
    mask = _low(bits)
    for i in range(8 * groups, len(out)):
        out[i] = _bits_at(packed, i * bits) & mask


@njit(nogil=True, cache=True, error_model="numpy")
def line_walk(symbols, alphabet, top, out):
    """p_k = c_k·top + ⌊p_{k−1}/N⌋ at every position, p_0 = 0."""
    n, top, p = np.uint64(alphabet), np.uint64(top), np.uint64(0)
    for k in range(len(symbols)):
        p = np.uint64(symbols[k]) * top + p // n
        out[k] = p


@njit(nogil=True, cache=True, error_model="numpy")
def plane_walk(symbols, corners, ratio, origin, out):
    """p_k = corners[c_k] + r·p_{k−1} at every position, p_0 = origin, in the floats of `corners` and `ratio`."""
    x = y = origin
    for k in range(len(symbols)):
        c = symbols[k]
        x = corners[c, 0] + ratio * x
        y = corners[c, 1] + ratio * y
        out[k, 0], out[k, 1] = x, y


@njit(nogil=True, cache=True, error_model="numpy")
def write_points(symbols, corners, ratio, origin, span, points, count):
    """Append symbols to `count` ones already there, one point for each span. False as in `write_words`."""
    if not all_below(symbols, len(corners)):
        return False
    at, held = count // span, count % span
    x, y = (points[at, 0], points[at, 1]) if held else (origin, origin)
    for c in symbols:
        x = corners[c, 0] + ratio * x
        y = corners[c, 1] + ratio * y
        points[at, 0], points[at, 1] = x, y
        held += 1
        if held == span:
            at, held, x, y = at + 1, 0, origin, origin
    return True


@register_jitable
def _cell(x, y, side, alphabet):
    """The symbol whose cell the point lies in, −1 for none: by row and column of a grid, by angle on a ring."""
    if side:
        if not (0.0 <= x < 1.0 and 0.0 <= y < 1.0):
            return -1
        return min(int(y * side), side - 1) * side + min(int(x * side), side - 1)
    if not x * x + y * y < 2.0:
        return -1
    symbol = round(math.atan2(y, x) * (alphabet / TURN))
    return symbol + alphabet if symbol < 0 else symbol


@njit(nogil=True, cache=True, error_model="numpy")
def read_points(points, corners, ratio, origin, side, span, slack, out):
    """Walk every span backwards; False when one leaves the cells or does not end at its anchor.

    `slack[k]` is how far from the anchor rounding may have moved the end of a walk of k steps.
    """
    alphabet = len(corners)
    for first in range(0, len(out), span):
        x, y = points[first // span, 0], points[first // span, 1]
        steps = min(span, len(out) - first)
        for i in range(first + steps - 1, first - 1, -1):
            symbol = _cell(x, y, side, alphabet)
            if not 0 <= symbol < alphabet:
                return False
            out[i] = symbol
            x = (x - corners[symbol, 0]) / ratio
            y = (y - corners[symbol, 1]) / ratio
        if not (abs(x - origin) <= slack[steps] and abs(y - origin) <= slack[steps]):
            return False
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def point_digit(points, corners, ratio, origin, side, span, slack, count, index):
    """The symbol at `index` of `count`, its span walked to the anchor; −1 where `read_points` gives False."""
    first = index - index % span
    symbols = np.empty(min(span, count - first), np.int64)
    here = points[first // span : first // span + 1]
    if not read_points(here, corners, ratio, origin, side, span, slack, symbols):
        return -1
    return symbols[index - first]
