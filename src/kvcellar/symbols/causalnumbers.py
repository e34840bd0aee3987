"""Integer tables of `causal/1`, made without a float: exponentials, logarithms, a circle, the shape of a residual.

They decide how a part is read, so they must be the same on every machine. `decimal` rounds alike everywhere, and where
a table begins is given by its formula in docs/exact-small.md, not by whatever a maths library returns.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import cache

import numpy as np

DIGITS = 40
OCTAVE = 64  # steps of a logarithm to base 2
EXP_BITS = 15
CIRCLE = 4096  # entries of a whole turn
CIRCLE_BITS = 14
SHAPE_STEPS = 32  # entries of the shape for each deviation
SHAPE_REACH = 16  # deviations to either side
SHAPE_BITS = 24
_PI = Decimal("3.1415926535897932384626433832795028841971693993751")
# Logistic distributions that together have the shape of what is left over: share and deviation of each.
MIXTURE = ((Decimal("0.62"), Decimal("0.84")), (Decimal("0.38"), Decimal("1.18")))


@cache
def powers() -> np.ndarray:
    """Round(2^(15 − i/64)), int64 (64,)."""
    with localcontext() as context:
        context.prec = DIGITS
        found = [Decimal(2) ** (EXP_BITS - Decimal(i) / OCTAVE) for i in range(OCTAVE)]
        return _frozen([int(x.to_integral_value()) for x in found])


@cache
def logarithms() -> np.ndarray:
    """Round(64 · log2(1 + i/64)), int64 (64,)."""
    with localcontext() as context:
        context.prec = DIGITS
        two = Decimal(2).ln()
        found = [OCTAVE * (1 + Decimal(i) / OCTAVE).ln() / two for i in range(OCTAVE)]
        return _frozen([int(x.to_integral_value()) for x in found])


@cache
def sines() -> np.ndarray:
    """Round(2¹⁴ sin 2πi/4096), int64 (4096 + 1024 + 1,): a cosine is read a quarter further on."""
    with localcontext() as context:
        context.prec = DIGITS
        quarter = [_sine(2 * _PI * i / CIRCLE) for i in range(CIRCLE // 4 + 1)]
        rising = [int((x * (1 << CIRCLE_BITS)).to_integral_value()) for x in quarter]
    half = rising + rising[-2:0:-1]
    return _frozen((half + [-x for x in half] + half)[: CIRCLE + CIRCLE // 4 + 1])


def _sine(x: Decimal) -> Decimal:
    total, term, n = Decimal(0), x, 1
    while abs(term) > Decimal(10) ** (5 - DIGITS):
        total += term
        term *= -x * x / ((n + 1) * (n + 2))
        n += 2
    return total


@cache
def shape() -> np.ndarray:
    """Round(2²⁴ F(i/32 − 16)), int64 (1025,), F the distribution function of `MIXTURE`; 0 at the start, 2²⁴ at the
    end."""
    with localcontext() as context:
        context.prec = DIGITS
        root = Decimal(3).sqrt()
        found = []
        for i in range(2 * SHAPE_REACH * SHAPE_STEPS + 1):
            z = Decimal(i) / SHAPE_STEPS - SHAPE_REACH
            f = sum((share / (1 + (-z * _PI / (root * width)).exp()) for share, width in MIXTURE), Decimal(0))
            found.append(int((f * (1 << SHAPE_BITS)).to_integral_value()))
    return _frozen([0, *found[1:-1], 1 << SHAPE_BITS])


def _frozen(numbers: list[int]) -> np.ndarray:
    table = np.array(numbers, np.int64)
    table.flags.writeable = False
    return table
