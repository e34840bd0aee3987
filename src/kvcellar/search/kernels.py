"""Compiled inner loops of the search. They trust their arguments: shapes and ranges were checked by the callers.

A sequence is `symbols` (T,), a phrase (s,), both of the same integer dtype; an end is the index of a match's newest
symbol. Where hits are rare they are written without a branch: every position writes its index, a hit moves on.
"""

import numpy as np
from numba import njit, types
from numba.extending import intrinsic


@njit(nogil=True, cache=True, error_model="numpy")
def in_cell(points, low, width, first, out):
    """Ends from `first` on whose unsigned point lies in low…low + width − 1; gives their number."""
    found = 0
    for k in range(first, len(points)):
        out[found] = k
        found += points[k] - low < width
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def within(points, x, y, radius, first, out):
    """Ends from `first` on whose point (T, 2) lies within `radius` of (x, y), in the points' own precision."""
    found, limit = 0, radius * radius
    for k in range(first, len(points)):
        dx, dy = points[k, 0] - x, points[k, 1] - y
        out[found] = k
        found += dx * dx + dy * dy <= limit
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def bound(symbols, order, phrase, after):
    """How many suffixes sort before the phrase; with `after`, how many sort before or begin with it.

    Suffixes and phrase are read newest symbol first, and where one ends it sorts before what goes on.
    """
    s, low, high = len(phrase), 0, len(order)
    while low < high:
        middle = (low + high) // 2
        end, j = np.int64(order[middle]), 0
        limit = min(s, end + 1)
        while j < limit and symbols[end - j] == phrase[s - 1 - j]:
            j += 1
        before = after if j == s else (j == limit or symbols[end - j] < phrase[s - 1 - j])
        if before:
            low = middle + 1
        else:
            high = middle
    return low


@intrinsic
def _lowest_bit(typing_context, word):
    """The number of zeros below the lowest one of a uint64 that is not 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), generate


@njit(nogil=True, cache=True, error_model="numpy")
def ascending(ends, words, out):
    """`ends`, all different, in ascending order, through a set of bits: `words`, uint64 (⌈T/64⌉,), starts at zero."""
    found = 0
    for end in ends:
        words[end >> 6] |= np.uint64(1) << np.uint64(end & 63)
    for i in range(len(words)):
        word = words[i]
        while word:
            out[found] = 64 * i + np.int64(_lowest_bit(word))
            found += 1
            word &= word - np.uint64(1)


@njit(nogil=True, cache=True, error_model="numpy")
def is_suffix_array(symbols, order, ranks):
    """Whether `order` (T,) names every end once, in ascending order of suffixes. `ranks`, int64 (T,), is scratch.

    Two suffixes with the same newest symbol sort as the suffixes one symbol shorter do, so looking at neighbours is
    enough (Burkhardt & Kärkkäinen 2003, §8).
    """
    count = len(order)
    ranks[:] = -1
    for i in range(count):
        end = order[i]
        if end >= count or ranks[end] >= 0:
            return False
        ranks[end] = i
    for i in range(count - 1):
        a, b = np.int64(order[i]), np.int64(order[i + 1])
        if symbols[a] > symbols[b]:
            return False
        if symbols[a] == symbols[b] and a > 0 and (b == 0 or ranks[a - 1] > ranks[b - 1]):
            return False
    return True
