"""Reduced-rank ridge regression under a loss metric, from sums over samples; and what a restore makes of its targets.

Source of the regression: Izenman 1975. Shallower layers serve as features *as restored*, and coarse tokens lose much of
what prediction leaves of them. Fitted on layers as they are, a regression of high rank leans on what will not be there:
at equal bytes it gave a tenth more divergence than one of half the rank (benchmarks/LOG.md). So in every other sample
features are as a restore would have them, by the forward test channel of reverse water-filling (Cover & Thomas,
*Elements of Information Theory*, 10.3.3): of each direction of the residual in the metric's space, of variance λ, the
share g = 1 − θ/λ comes back, with noise of variance g·θ, and nothing where λ < θ. At θ the first group loses `LOST`.
The other samples stay as they are: recipes that code finer share the profile. Tried on: CPU.
"""

from __future__ import annotations

import torch
from jaxtyping import Float32
from torch import Tensor

from ..metric import root

RIDGE = 3e-4
CLOSED = 5e-3  # of restored features, whose noise is drawn from a model
AS_THEY_ARE = 0.02  # of features that will be restored, and are not made so
SHRINK = 0.05
LOST = 0.4  # of its last layers' residual energy in the loss metric, as at the step of recipe `cellar`


class Moments:
    """First and second moments of features φ (T, F) with targets y (T, P), summed in float32 about the first rows."""

    def __init__(self, last: int = 0) -> None:
        self.count, self.last = 0, last  # of the targets so many last ones, whose products are summed, too

    def add(self, features: Tensor, y: Tensor) -> None:
        if not self.count:
            self.origin = features.mean(dim=0), y.mean(dim=0)
            sizes = features.shape[1], y.shape[1]
            self.sums = torch.zeros(sizes[0]), torch.zeros(sizes[1])
            self.gram, self.cross = torch.zeros(sizes[0], sizes[0]), torch.zeros(sizes)
            self.squares, self.products = torch.zeros(sizes[1]), torch.zeros(self.last, self.last)
        f, y = features - self.origin[0], y - self.origin[1]
        self.sums[0].add_(f.sum(dim=0))
        self.sums[1].add_(y.sum(dim=0))
        self.gram.addmm_(f.T, f)
        self.cross.addmm_(f.T, y)
        self.squares.add_(y.square().sum(dim=0))
        ending = y[:, y.shape[1] - self.last :]
        self.products.addmm_(ending.T, ending)
        self.count += len(f)

    @property
    def centre(self) -> Tensor:
        return self.origin[0] + self.sums[0] / self.count

    @property
    def mean(self) -> Tensor:
        return self.origin[1] + self.sums[1] / self.count

    @property
    def spread(self) -> Tensor:
        variance = self.gram.diagonal() / self.count - (self.sums[0] / self.count).square()
        return variance.clamp(min=1e-12).sqrt()

    @property
    def variance(self) -> Tensor:
        return (self.squares / self.count - (self.sums[1] / self.count).square()).clamp(min=0)

    def solve(self, roots: list[Tensor], rank: int, embedded: int, closed: float = CLOSED) -> tuple[Tensor, Tensor]:
        """D (F, R) and U (R, P) for targets weighted with the roots; features from `embedded` on are restored ones, and
        have `closed` for a ridge."""
        gram, cross = self._standardised()
        penalty = torch.full((len(gram),), RIDGE, dtype=torch.float64)
        penalty[embedded:] = closed if embedded else RIDGE
        gram = gram.double() + torch.diag(penalty)
        solution = torch.linalg.solve(gram, times(cross, roots).double())
        half = torch.linalg.cholesky(gram).T @ solution
        explained, left = torch.linalg.eigh(half @ half.T)
        rank = min(rank, int((explained > explained[-1] * 1e-10).sum()), half.shape[1])
        basis = left[:, -rank:].flip(1).T @ half / explained[-rank:].flip(0).sqrt()[:, None]
        return (solution @ basis.T).float(), times(basis.float(), [torch.linalg.inv(a.double()).float() for a in roots])

    def _standardised(self) -> tuple[Tensor, Tensor]:
        """Covariances of the features, each of variance 1, with themselves and with the targets."""
        f, y = (s / self.count for s in self.sums)
        spread = self.spread
        gram = (self.gram / self.count - torch.outer(f, f)) / torch.outer(spread, spread)
        return gram, (self.cross / self.count - torch.outer(f, y)) / spread[:, None]

    def left(self, down: Tensor, up: Tensor) -> Float32[Tensor, "last last"]:
        """Covariance of what D and U leave of the last targets."""
        gram, cross = self._standardised()
        weights, cross = down @ up[:, -self.last :], cross[:, -self.last :]
        mean = self.sums[1][-self.last :] / self.count
        both = weights.T @ cross
        return self.products / self.count - torch.outer(mean, mean) - both - both.T + weights.T @ (gram @ weights)


class Restoring:
    """What comes back of a residual (T, N) of that covariance, at a level θ in the metric that the roots are of."""

    def __init__(self, covariance: Tensor, roots: list[Tensor], level: Tensor | None = None):
        root = times(torch.eye(len(covariance)), roots).double()
        variance, directions = torch.linalg.eigh(root @ covariance.double() @ root)
        variance = variance.clamp(min=0)
        self.level = level = _water_level(variance, LOST * variance.sum()) if level is None else level
        share = (1 - level / variance.clamp(min=1e-300)).clamp(min=0)
        back = torch.linalg.solve(root, directions).T
        self.kept = (root @ (directions * share) @ back).float()
        self.noise = ((share * level).sqrt()[:, None] * back).float()

    def __call__(self, residual: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(residual.shape, generator=generator) @ self.noise
        return torch.addmm(noise, residual, self.kept)


def _water_level(variance: Tensor, lost: Tensor) -> Tensor:
    """θ at which Σ min(λ, θ) is `lost`."""
    low, high = torch.zeros((), dtype=torch.float64), variance.max()
    for _ in range(100):
        level = (low + high) / 2
        low, high = (level, high) if variance.clamp(max=level).sum() < lost else (low, level)
    return high


def roots_of(metric: list[Tensor], layers: range, moment: Moments) -> list[Tensor]:
    spreads = torch.split(moment.variance, [len(metric[i]) for i in layers])
    return [root(metric[i], spread, SHRINK) for i, spread in zip(layers, spreads, strict=True)]


def times(rows: Tensor, blocks: list[Tensor]) -> Tensor:
    """Rows (N, P) times a matrix of diagonal blocks."""
    parts = torch.split(rows, [len(b) for b in blocks], dim=1)
    return torch.cat([part @ block for part, block in zip(parts, blocks, strict=True)], dim=1)
