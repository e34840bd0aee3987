"""Compiled inner loops of the quantizers. They trust their shapes and indexes: whoever calls them has checked both.

Products are summed in one fixed order, without fused multiply-add and one token at a time, so that symbols and
restored values depend neither on the machine, nor on how many tokens come at once, nor on the number of threads.
"""

import numpy as np
from numba import boolean, float32, float64, int64, njit, types, uint8, uint16, void

MATRIX = types.Array(float32, 2, "C", readonly=True)
VECTOR = types.Array(float32, 1, "C", readonly=True)
SAFE = np.float32(1e36)  # no level is beyond 8, no width beyond 256: a scale below this makes nothing beyond 2 · 10³⁸
LARGEST_DOUBLE = float(np.finfo(np.float32).max)


@njit(void(float32[::1], MATRIX, float32[::1]), nogil=True, cache=True, error_model="numpy")
def turn(x, matrix, out):
    """out = x @ matrix, added up in the order of x."""
    out[:] = np.float32(0)
    many = x.shape[0] - x.shape[0] % 4
    for i in range(0, many, 4):  # four rows at a time: out stays in registers, a third of the time is saved
        a, b, c, d = x[i], x[i + 1], x[i + 2], x[i + 3]
        row_a, row_b, row_c, row_d = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
        for j in range(out.shape[0]):
            out[j] = (((out[j] + a * row_a[j]) + b * row_b[j]) + c * row_c[j]) + d * row_d[j]
    for i in range(many, x.shape[0]):
        a, row_a = x[i], matrix[i]
        for j in range(out.shape[0]):
            out[j] += a * row_a[j]


@njit(uint8(float32, VECTOR), nogil=True, cache=True, error_model="numpy")
def place(x, edges):
    """How many of the 2^b − 1 ascending `edges` lie below x."""
    found = 0
    step = (edges.shape[0] + 1) // 2
    while step:
        if x > edges[found + step - 1]:
            found += step
        step //= 2
    return np.uint8(found)


@njit(float32(float32[::1], float32[::1]), nogil=True, cache=True, error_model="numpy")
def dot(a, b):
    """a · b in four sums that are added at the end."""
    many = a.shape[0] - a.shape[0] % 4
    s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for i in range(0, many, 4):
        s0 += a[i] * b[i]
        s1 += a[i + 1] * b[i + 1]
        s2 += a[i + 2] * b[i + 2]
        s3 += a[i + 3] * b[i + 3]
    for i in range(many, a.shape[0]):
        s0 += a[i] * b[i]
    return (s0 + s1) + (s2 + s3)


@njit(
    float32(float32[::1], VECTOR, VECTOR, VECTOR, float32[::1], float32[::1]),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def best_stretch(x, levels, edges, stretches, sizes, nearest):
    """That of `stretches` whose multiple of the symmetric `levels` lies closest to x, if scaled to fit best.

    `sizes` and `nearest` are scratch of the width of x.
    """
    half = levels.shape[0] // 2
    for i in range(x.shape[0]):
        sizes[i] = abs(x[i])
    best, most = np.float32(1), np.float32(-1)
    for stretch in stretches:
        nearest[:] = levels[half]
        for n in range(half, edges.shape[0]):
            edge, step = edges[n] * stretch, levels[n + 1] - levels[n]
            for i in range(x.shape[0]):
                nearest[i] += step if sizes[i] > edge else np.float32(0)
        along = dot(sizes, nearest)
        explained = along * along / dot(nearest, nearest)  # |x|² less the error's square
        if explained > most:
            best, most = stretch, explained
    return best


@njit(float32(float64), nogil=True, cache=True, error_model="numpy")
def bounded(x):
    return np.float32(min(max(x, -LARGEST_DOUBLE), LARGEST_DOUBLE))


@njit(uint16(float32), nogil=True, cache=True, error_model="numpy")
def bfloat16_bits(x):
    """Rounded to nearest, half to even; what would round to infinity becomes the largest finite number."""
    holder = np.empty(1, np.float32)
    holder[0] = x
    bits = holder.view(np.uint32)[0]
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    if rounded & np.uint32(0x7FFF) >= np.uint32(0x7F80):
        rounded -= np.uint32(1)
    return np.uint16(rounded)


@njit(float32(uint16), nogil=True, cache=True, error_model="numpy")
def from_bfloat16(bits):
    holder = np.empty(1, np.uint32)
    holder[0] = np.uint32(bits) << np.uint32(16)
    return holder.view(np.float32)[0]


@njit(
    int64(float32[::1], float64, float64, int64, int64[::1], boolean[::1]), nogil=True, cache=True, error_model="numpy"
)
def find_outliers(x, first, further, slots, largest, taken):
    """How many of the largest numbers of x to take out, their indexes going to the front of `largest`.

    That many, n, that Σ(the others)² · first · furtherⁿ⁻¹ is least, or none. `taken` is scratch of the width of x.
    """
    width = x.shape[0]
    taken[:] = False
    best, least, factor = 0, np.inf, 1.0
    for n in range(slots + 1):
        at, energy, most = -1, 0.0, 0.0
        for i in range(width):
            if not taken[i]:
                square = np.float64(x[i]) * np.float64(x[i])
                energy += square
                if square > most:
                    at, most = i, square
        if n == 0:
            # At best every number taken is as large as the largest: most vectors need no further look.
            rest, bar, hopeless = energy - most, energy / first, True
            for _ in range(slots):
                hopeless = hopeless and rest > bar
                rest, bar = rest - most, bar / further
            if hopeless:
                return 0
        if energy * factor < least:
            best, least = n, energy * factor
        if at < 0 or n == slots:
            break
        taken[at] = True
        largest[n] = at
        factor *= further if n else first
    return best


@njit(
    void(float32[::1], float64, float64, uint16[::1], uint16[::1], int64[::1], boolean[::1]),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def take_outliers(x, first, further, indexes, values, largest, taken):
    """Move what stands out of x into slots that are zero so far.

    What moves is a number's bfloat16 value; the rest of it stays in x, and may be moved again while slots are free.
    """
    used, slots = 0, indexes.shape[0]
    while used < slots:
        found = find_outliers(x, further if used else first, further, slots - used, largest, taken)
        for n in range(found):
            bits = bfloat16_bits(x[largest[n]])
            if bits & 0x7FFF == 0:
                return
            indexes[used], values[used] = largest[n], bits
            x[largest[n]] -= from_bfloat16(bits)
            used += 1
        if found == 0:
            return


_ENCODE = void(
    *(float32[:, ::1], int64, int64, int64),  # x (T, C), first column, its column among the codes, stride
    *(float64, float64),  # prices of the first outlier and of further ones
    *(MATRIX, VECTOR, VECTOR, VECTOR, MATRIX),  # rotation, levels, edges, stretches, sketch rotation or (0, 0)
    *(uint8[:, ::1], float32[:, ::1], float32[:, ::1]),  # codes (T, columns), scales (T, H), sketch scales (T, H)
    *(uint16[:, :, ::1], uint16[:, :, ::1]),  # indexes and values of outliers (T, H, slots)
)


@njit(_ENCODE, nogil=True, cache=True, error_model="numpy")
def turbo_encode(
    x,
    column,
    code_column,
    stride,
    first,
    further,
    rotation,
    levels,
    edges,
    stretches,
    sketch,
    codes,
    scales,
    gains,
    indexes,
    values,
):
    """Codes and scales of vectors of `rotation`'s width at `column`, `column + stride`, … of every row."""
    width, heads = rotation.shape[0], scales.shape[1]
    sketched = sketch.shape[0] > 0
    sign = np.uint8(levels.shape[0])
    vector, unit = np.empty(width, np.float32), np.empty(width, np.float32)
    turned, rest = np.empty(width, np.float32), np.empty(width, np.float32)
    sizes = np.empty(width, np.float32)
    largest, taken = np.empty(indexes.shape[2], np.int64), np.empty(width, np.bool_)
    for t in range(x.shape[0]):
        for h in range(heads):
            source, goal = column + h * stride, code_column + h * stride
            for i in range(width):
                vector[i] = x[t, source + i]
            take_outliers(vector, first, further, indexes[t, h], values[t, h], largest, taken)
            energy = 0.0
            for i in range(width):
                energy += np.float64(vector[i]) * np.float64(vector[i])
            size = np.sqrt(energy / width)
            inverse = 1.0 / size if size > 0.0 else 0.0
            for i in range(width):
                unit[i] = np.float32(vector[i] * inverse)
            turn(unit, rotation, turned)
            stretch = best_stretch(turned, levels, edges, stretches, sizes, rest)
            along, square = 0.0, 0.0
            for i in range(width):
                code = place(turned[i] / stretch, edges)
                codes[t, goal + i] = code
                level = np.float64(levels[code])
                along += level * turned[i]
                square += level * level
            scale = along / square
            scales[t, h] = bounded(scale * size)
            if sketched:
                for i in range(width):
                    turned[i] = np.float32(turned[i] - scale * levels[codes[t, goal + i]])
                turn(turned, sketch, rest)
                energy, total = 0.0, 0.0
                for i in range(width):
                    energy += np.float64(rest[i]) * np.float64(rest[i])
                    total += abs(np.float64(rest[i]))
                    if rest[i] < 0:
                        codes[t, goal + i] += sign
                gains[t, h] = bounded(energy / total * size) if total > 0.0 else np.float32(0)


_DECODE = void(
    *(uint8[:, ::1], float32[:, ::1], float32[:, ::1]),  # codes, scales, sketch scales
    *(int64, int64, int64),  # first column among the codes, its column of x, stride
    *(MATRIX, VECTOR, MATRIX),  # inverse rotation, levels, inverse sketch rotation or (0, 0)
    float32[:, ::1],  # x (T, C)
)


@njit(_DECODE, nogil=True, cache=True, error_model="numpy")
def turbo_decode(codes, scales, gains, code_column, column, stride, inverse, levels, sketch, x):
    """Vectors from their codes and scales, finite for finite scales. Reads the low bits of a code only."""
    width, heads = inverse.shape[0], scales.shape[1]
    sketched = sketch.shape[0] > 0
    mask, half = np.uint8(levels.shape[0] - 1), np.uint8(levels.shape[0])
    unit, turned, rest = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    for t in range(codes.shape[0]):
        for h in range(heads):
            source, goal = code_column + h * stride, column + h * stride
            for i in range(width):
                unit[i] = levels[codes[t, source + i] & mask]
            turn(unit, inverse, turned)
            scale = scales[t, h]
            if sketched:
                for i in range(width):
                    unit[i] = np.float32(-1) if codes[t, source + i] & half else np.float32(1)
                turn(unit, sketch, rest)
                turn(rest, inverse, unit)
                gain = np.float64(gains[t, h])
                for i in range(width):
                    x[t, goal + i] = bounded(scale * np.float64(turned[i]) + gain * np.float64(unit[i]))
            elif scale < SAFE:
                for i in range(width):
                    x[t, goal + i] = scale * turned[i]
            else:
                for i in range(width):
                    x[t, goal + i] = bounded(scale * np.float64(turned[i]))


@njit(
    void(uint8[:, :, ::1], uint16[:, :, ::1], int64, int64, float32[:, ::1]),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def add_outliers(indexes, values, column, stride, x):
    """Put outliers (T, H, slots) back; indexes are below the vectors' width, values finite."""
    for t in range(values.shape[0]):
        for h in range(values.shape[1]):
            for slot in range(values.shape[2]):
                if values[t, h, slot]:
                    at = column + h * stride + indexes[t, h, slot]
                    x[t, at] = bounded(np.float64(x[t, at]) + np.float64(from_bfloat16(values[t, h, slot])))
