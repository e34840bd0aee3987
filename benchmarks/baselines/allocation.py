"""How many bits each coefficient gets: a dynamic program over measured distortions, zero bits allowed.

minimise Σᵢ D(i, bᵢ) subject to Σᵢ bᵢ ≤ B, 0 ≤ bᵢ ≤ 8. D(i, b) is the mean squared error that a uniform quantizer of 2^b
cells leaves on coefficient i, measured on calibration tokens at the best of a few steps; D(i, 0) is the second moment.
The program is exact: f₀(B) = 0, fᵢ(B) = min_b fᵢ₋₁(B − b) + D(i, b), and the choices are read backwards.
Source: KVTC (arXiv 2511.01815) chooses a type, none included, for groups of neighbouring components by such a program;
we decide for every single coefficient and every width of 0…8, which leaves the program more freedom. Where it shares a
scale and a shift in a group, ours are calibrated once for each coefficient and cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

MAX_BITS = 8
_UNIT_STEPS = (0.0, 1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)  # best for a unit Gaussian (Max 1960)
_FACTORS = (0.6, 0.8, 1.0, 1.3, 1.7)
_PIECE = 512


def levels(coefficients: Tensor, steps: Tensor, bits: Tensor) -> Tensor:
    """Cells 0…2^b − 1 of coefficients (N, P) for steps (P,) and bits (P,) ≥ 1: ⌊c/Δ⌋ + 2^(b−1), clamped; float."""
    cells = torch.exp2(bits.float())
    return torch.minimum(((coefficients / steps).floor() + cells / 2).clamp(min=0), cells - 1)


def centres(numbers: Tensor, steps: Tensor, bits: Tensor) -> Tensor:
    """Inverse of `levels` but for the rounding: the middle of each cell."""
    return (numbers - torch.exp2(bits.float()) / 2 + 0.5) * steps


def distortions(coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """Mean squared error and best step for 0…8 bits, (P, 9) each, from centred coefficients (N, P)."""
    pieces = [_distortions(piece) for piece in coefficients.split(_PIECE, 1)]
    return torch.cat([error for error, _ in pieces]), torch.cat([step for _, step in pieces])


def _distortions(x: Tensor) -> tuple[Tensor, Tensor]:
    power = x.square().mean(0)
    error = power[:, None].repeat(1, MAX_BITS + 1)
    step = torch.ones_like(error)
    for b in range(1, MAX_BITS + 1):
        width = torch.full_like(power, b)
        for factor in _FACTORS:
            tried = (power.sqrt() * _UNIT_STEPS[b] * factor).clamp(min=1e-12)
            left = (x - centres(levels(x, tried, width), tried, width)).square_().mean(0)
            better = left < error[:, b]
            error[:, b] = torch.where(better, left, error[:, b])
            step[:, b] = torch.where(better, tried, step[:, b])
    return error, step


def allocate(error: np.ndarray, budgets: Iterable[int]) -> dict[int, np.ndarray]:
    """Bits per coefficient, uint8 (P,), of least total error for each budget (bits), from errors (P, widths).

    Coefficients whose error no width lowers get none. One program serves all budgets.
    """
    budgets = sorted(budgets)
    most, (count, widths) = budgets[-1], error.shape
    best = np.zeros(most + 1)
    choice = np.zeros((count, most + 1), np.uint8)
    for i in range(count):
        new = best + error[i, 0]
        for b in range(1, min(widths - 1, most) + 1):
            tried = best[:-b] + error[i, b]
            better = tried < new[b:]
            np.copyto(new[b:], tried, where=better)
            np.putmask(choice[i, b:], better, b)
        best = new
    return {budget: _choices(choice, budget) for budget in budgets}


def _choices(choice: np.ndarray, left: int) -> np.ndarray:
    bits = np.zeros(len(choice), np.uint8)
    for i in reversed(range(len(choice))):
        bits[i] = choice[i, left]
        left -= int(bits[i])
    return bits
