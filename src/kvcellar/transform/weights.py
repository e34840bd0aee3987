"""How much finer than others a token is coded: a whole number of halvings of the squared error, from its numbers.

log2 w = direction · x − level, by ridge regression on log2 of the energy that a token's loss gradient has in the space
of coefficients. The regression shrinks what it foresees; how much of that to take back, and in deeper groups, where a
wrong weight costs bits oftener, not to, was chosen on held-out text (`TRUST`).
"""

from __future__ import annotations

import torch
from jaxtyping import Float32
from torch import Tensor

LEAST, MOST = -3, 12
DIRECTIONS = 192
RIDGE = (0.1, 0.3)  # first group, deeper groups
TRUST = (1.25, 0.9)  # that many times what the regression says


class Weights:
    """log2 w = direction · x − level, rounded to LEAST…MOST."""

    def __init__(self, direction: Float32[Tensor, " numbers"], level: float):
        self.direction, self.level = direction, level

    def exponents(self, x: Float32[Tensor, "tokens numbers"]) -> Float32[Tensor, " tokens"]:
        found = (x @ self.direction - self.level).round().clamp(LEAST, MOST)
        return found.nan_to_num(nan=0.0)  # numbers near the largest of float32

    @classmethod
    def fit(cls, x: list[Tensor], energies: list[Tensor], roots: list[Tensor], *, first: bool) -> Weights:
        """From rows x (T, P) and energies (T,) of windows; directions are sought in x weighted by `roots`."""
        tiny = torch.finfo(torch.float32).tiny
        logs = [energy.clamp(min=tiny).log2() for energy in energies]
        y = torch.cat([log - log.mean() for log in logs]).double()
        rows = torch.cat(x)
        mean = rows.mean(dim=0)
        parts = torch.split(rows - mean, [len(a) for a in roots], dim=1)
        z = torch.cat([part @ a for part, a in zip(parts, roots, strict=True)], dim=1)
        with torch.random.fork_rng(devices=[]):  # torch.svd_lowrank takes no generator
            torch.manual_seed(0)
            left, size, right = torch.svd_lowrank(z, q=min(DIRECTIONS, *z.shape), niter=2)
        there = size > size[0] * 1e-5
        size, right = size[there], right[:, there]
        features = left[:, there].double() * len(z) ** 0.5
        gram = features.T @ features / len(z)
        ridge = RIDGE[not first] * torch.eye(len(gram), dtype=torch.float64)
        solved = torch.linalg.solve(gram + ridge, features.T @ y / len(z)) * TRUST[not first]
        flat = right @ (solved.float() * len(z) ** 0.5 / size)
        turned = zip(roots, torch.split(flat, [len(a) for a in roots]), strict=True)
        direction = torch.cat([a @ part for a, part in turned])
        return cls(direction, float(mean @ direction))
