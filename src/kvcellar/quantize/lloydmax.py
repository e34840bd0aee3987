"""The best levels for one coordinate of a random direction (Lloyd 1957, Max 1960), computed alike on every machine.

A coordinate x of a random unit vector in D dimensions has the density f(x) ∝ (1 − x²)^((D−3)/2), near a Gaussian of
variance 1/D (TurboQuant, arXiv 2504.19874, lemma 1). Lloyd's iteration puts each level into the mean of its cell
and each cell's edge midway between levels. Ours runs on f tabulated at 2¹⁵ points of one half (levels are symmetric),
weights and their sums in 64-bit integers; what is left are divisions and square roots, which IEEE 754 rounds alike
everywhere. It starts from the levels of the high-rate optimum, dense as f^(1/3), so that 300 rounds settle 256 levels.

Levels are in units of the vector's root mean square, that is √D times those for a unit vector.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Float32

_POINTS = 1 << 15
_ONE = 1 << 30
_REACH = 8  # standard deviations
_ROUNDS = 300


@lru_cache(64)
def levels(width: int, bits: int) -> Float32[np.ndarray, " levels"]:
    """2^bits ascending levels, symmetric about 0, read-only. `width` ≥ 1; a width of 1 or 2 is treated as 3."""
    width = max(width, 3)
    reach = min(1.0, _REACH / np.sqrt(width))
    weights = _density(width - 3, reach)
    places = 2 * np.arange(_POINTS) + 1  # cell middles in units of reach / 2¹⁶
    mass = np.concatenate([[0], np.cumsum(weights)])
    moment = np.concatenate([[0], np.cumsum(weights * places)])
    half = _spread(_density((width - 3) // 3, reach), 1 << (bits - 1)).astype(np.float64)
    for _ in range(_ROUNDS):
        edges = np.concatenate([[0], np.searchsorted(places, (half[1:] + half[:-1]) / 2), [_POINTS]])
        inside = np.diff(mass[edges])
        means = np.diff(moment[edges]).astype(np.float64) / np.maximum(inside, 1)
        half = np.where(inside > 0, means, half)
    upper = half * (reach * np.sqrt(width) / (2 * _POINTS))
    found: np.ndarray = np.concatenate([-upper[::-1], upper]).astype(np.float32)
    found.flags.writeable = False
    return found


def boundaries(of: Float32[np.ndarray, " levels"]) -> Float32[np.ndarray, " levels-1"]:
    """Where the nearest level changes."""
    middle: np.ndarray = ((of[1:].astype(np.float64) + of[:-1]) / 2).astype(np.float32)
    return middle


def _density(twice_exponent: int, reach: float) -> np.ndarray:
    """(1 − x²)^(twice_exponent / 2) over (0, reach), int64 in units of 2⁻³⁰."""
    x = (np.arange(_POINTS) + 0.5) / _POINTS * reach
    base = np.floor((1 - x * x) * _ONE).astype(np.int64)
    power = np.full(_POINTS, _ONE, np.int64)
    if twice_exponent % 2:
        power = np.floor(np.sqrt((base * _ONE).astype(np.float64))).astype(np.int64)
    exponent = twice_exponent // 2
    while exponent:
        if exponent & 1:
            power = power * base >> 30
        base, exponent = base * base >> 30, exponent >> 1
    return power


def _spread(density: np.ndarray, count: int) -> np.ndarray:
    """Places that cut the mass of `density` into `count` equal parts, each in the middle of its part."""
    mass = np.cumsum(density)
    wanted = (2 * np.arange(count) + 1) * int(mass[-1]) // (2 * count)
    return 2 * np.searchsorted(mass, wanted) + 1
