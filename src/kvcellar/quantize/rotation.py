"""A rotation made of integers: R = S₁ C S₂ C with random signs S and the orthonormal cosine matrix C (DCT-II).

TurboQuant (arXiv 2504.19874) turns every vector by one random rotation, so that each coordinate follows the same known
density whatever the vector was. The paper draws it from a QR decomposition of Gaussian numbers, which differs between
libraries, versions and threads. Here a file needs only a seed, by this algorithm, which is part of the stage's id:

1. splitmix64 from state `seed + 2³²·stream` gives 64-bit numbers z₀, z₁, …; S₁ has the sign −1 at i where the top bit
   of z_i is set, S₂ where that of z_{D+i} is.
2. c_kn = s_k cos(π(2n + 1)k / 2D), s₀ = √(1/D), s_k = √(2/D), as integers in units of 2⁻³⁰. Cosines come from their
   Taylor series and roots from integer square roots, both in units of 2⁻⁹⁶, rounded down, with π as the literal below.
3. R_ij = S₁(i) Σ_k c_ki S₂(k) c_jk in 64-bit integers, in units of 2⁻³⁰ (half a unit added, rounded down), and from
   there to the nearest float32.

A coordinate vector is spread by the first C and made noise-like by S₂ and the second; a constant one by S₁ and the
first C. Any width works alike: there is no padding. |RᵀR − 1| < 10⁻⁶.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import numpy as np
from jaxtyping import Float32

MAX_WIDTH = 256
_PI = 314159265358979323846264338327950288419716939937510  # · 10⁻⁵⁰
_FINE = 96
_UNIT = 30
_MASK = (1 << 64) - 1


def splitmix64(state: int, count: int) -> list[int]:
    """`count` numbers of 64 bits (Steele, Lea & Flood 2014)."""
    numbers = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        numbers.append(z ^ (z >> 31))
    return numbers


@lru_cache(16)
def rotation(width: int, seed: int, stream: int = 0) -> Float32[np.ndarray, "width width"]:
    """R, read-only: a row vector x turns into x @ R, and back with Rᵀ. Held whole: for widths of a few hundred."""
    signs = np.array([1 - 2 * (z >> 63) for z in splitmix64(seed + (stream << 32), 2 * width)], np.int64)
    first, second = signs[:width], signs[width:]
    cosines = _cosine_matrix(width)
    product = (cosines.T * second) @ cosines.T * first[:, None]
    turned = ((product + (1 << (_UNIT - 1))) >> _UNIT).astype(np.float64) / (1 << _UNIT)
    matrix: np.ndarray = turned.astype(np.float32)
    matrix.flags.writeable = False
    return matrix


def _cosine_matrix(width: int) -> np.ndarray:
    """C in units of 2⁻³⁰, int64: row k holds the wave of frequency k."""
    quarter = [_cosine(m, 2 * width) for m in range(width + 1)]  # of π m / 2D
    period = quarter + [-c for c in quarter[-2::-1]]  # 0 … π
    period += period[-2:0:-1]  # … 2π
    flat, wave = (isqrt((n << (2 * _FINE)) // width) for n in (1, 2))
    waves = np.array([(wave * c) >> (2 * _FINE - _UNIT) for c in period], np.int64)
    k, n = np.arange(width)[:, None], np.arange(width)
    matrix: np.ndarray = waves[(2 * n + 1) * k % (4 * width)]
    matrix[0] = flat >> (_FINE - _UNIT)
    return matrix


def _cosine(numerator: int, denominator: int) -> int:
    """cos(π · numerator / denominator) in units of 2⁻⁹⁶."""
    angle = (_PI << _FINE) * numerator // (denominator * 10**50)
    square, term, total, n = angle * angle >> _FINE, 1 << _FINE, 0, 0
    while term:
        total += term
        n += 2
        term = -(term * square >> _FINE) // (n * (n - 1))
        if term == -1:  # what rounding down leaves of a vanishing term
            break
    return total
