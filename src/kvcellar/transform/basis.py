"""What `klt.py` fits: the basis in which errors cost alike, and what is left beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from ..metric import Metric
from ..rope import Rope
from ..stages import LOOKBACK, Context, Predictor

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..calibrate import Calibration

ROUNDS = 6
OVERSAMPLED = 32
MIXED = 0.3  # share of the diagonal in M
CLIP = 30.0  # a gradient's energy against the mean


def way_back(basis: Tensor, roots: list[Tensor]) -> Float32[Tensor, "coefficients numbers"]:
    """(W⁺)ᵀ A⁻¹ of W (P, C)."""
    wide = basis.double()
    dual = torch.linalg.solve(wide.T @ wide, wide.T).T
    parts = zip(roots, torch.split(dual, [len(a) for a in roots]), strict=True)
    return torch.cat([torch.linalg.solve(a.double(), part) for a, part in parts]).T.float()


def leading(covariance: Float32[Tensor, "n n"], count: int) -> tuple[Float32[Tensor, "n count"], Tensor]:
    """Leading eigenvectors, and variances along them, falling; by subspace iteration from a fixed start."""
    n = len(covariance)
    count = min(count, n)
    if n <= 2 * count:
        variance, vectors = torch.linalg.eigh(covariance)
        return vectors.flip(1)[:, :count].contiguous(), variance.flip(0)[:count].clamp(min=0)
    start = torch.randn(n, min(n, count + OVERSAMPLED), generator=torch.Generator().manual_seed(0))
    for _ in range(ROUNDS):
        start = torch.linalg.qr(covariance @ start).Q
    variance, inner = torch.linalg.eigh(start.T @ covariance @ start)
    return (start @ inner.flip(1))[:, :count].contiguous(), variance.flip(0)[:count].clamp(min=0)


def times(rows: Tensor, blocks: list[Tensor]) -> Tensor:
    """Rows (N, P) times a matrix of diagonal blocks."""
    parts = torch.split(rows, [len(b) for b in blocks], dim=1)
    return torch.cat([part @ block for part, block in zip(parts, blocks, strict=True)], dim=1)


def groups_of(layers: int, per_group: int, first: int = 0) -> list[range]:
    return [range(i, min(i + per_group, layers)) for i in range(first, layers, per_group)]


def spreads_of(calibration: Calibration, rope: Rope) -> list[Tensor]:
    """Variance of each number of each layer's row, from a few samples."""
    step = max(1, len(calibration.samples) // 8)
    rows: list[list[Tensor]] = [[] for _ in range(len(calibration.geometry))]
    for sample in calibration.samples[::step]:
        cache, positions = sample.load(), torch.arange(len(sample.tokens))
        for i, kv in enumerate(cache.layers):
            rows[i].append(rope.forward([kv.keys.float(), kv.values.float()], range(i, i + 1), positions))
    return [torch.cat(each).var(dim=0) for each in rows]


def rows_of(
    calibration: Calibration, rope: Rope, groups: list[range], metric: Metric
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Of each group the rows (T, P) of the tokens that have gradients, one tensor for each window, and those of the
    windows' first tokens (windows, P)."""
    found: list[list[Tensor]] = [[] for _ in groups]
    sinks: list[list[Tensor]] = [[] for _ in groups]
    for window in metric.windows:
        sample = calibration.samples[window.sample]
        cache, positions = sample.load(), torch.arange(len(sample.tokens))
        tokens = slice(window.first, window.first + window.scaled[0].shape[1])
        for g, layers in enumerate(groups):
            rows = rope.forward(_sides(cache, layers), layers, positions)
            found[g].append(rows[tokens])
            sinks[g].append(rows[:1])
    return found, [torch.cat(each) for each in sinks]


def felt_along(metric: Metric, layers: range, roots: list[Tensor], u: Tensor) -> list[Tensor]:
    """Gradients by the coefficients of U, (draws, T, C), one tensor for each window."""
    parts = torch.split(u.double(), [len(a) for a in roots])
    back = torch.cat([torch.linalg.solve(a.double(), part) for a, part in zip(roots, parts, strict=True)]).float()
    return [torch.cat([window.rows(i) for i in layers], dim=2) @ back for window in metric.windows]


def balanced(u: Tensor, variance: Tensor, felt: list[Tensor], exponents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """W (P, C) and the variances along it, from gradients by coefficient and the exponents of their tokens."""
    h = torch.cat([(f * torch.exp2(-n / 2)[:, None]).flatten(0, 1) for f, n in zip(felt, exponents, strict=True)])
    energy = h.square().sum(dim=1)
    h = h * (energy / (CLIP * energy.mean())).clamp(min=1).rsqrt()[:, None]
    m = (h.T @ h / len(h)).double()
    m = (1 - MIXED) * m + MIXED * torch.diag(_smoothed(m.diagonal()))
    values, vectors = torch.linalg.eigh(m)
    half = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    along, q = torch.linalg.eigh(half @ torch.diag(variance.double()) @ half)
    return (u.double() @ half @ q.flip(1)).float(), along.flip(0).clamp(min=0).float()


def left_over(covariance: Tensor, u: Tensor, variance: Tensor, roots: list[Tensor]) -> Tensor:
    """Deviation (P,) of each number of r that the span of U leaves."""
    edges = [0, *np.cumsum([len(a) for a in roots]).tolist()]
    found = []
    for a, start, stop in zip(roots, edges, edges[1:], strict=False):
        part = u[start:stop]
        rest = (covariance[start:stop, start:stop] - (part * variance) @ part.T).double()
        back = torch.linalg.inv(a.double())
        found.append((back * (rest @ back.T).T).sum(dim=1))
    deviation = torch.cat(found).clamp(min=0).sqrt().float()
    return deviation.clamp(min=max(float(deviation.max()) * 1e-3, 1e-6))


def _smoothed(x: Tensor, reach: int = 15) -> Tensor:
    padded = torch.nn.functional.pad(x[None, None], (reach, reach), mode="replicate")
    return torch.nn.functional.avg_pool1d(padded, 2 * reach + 1, 1)[0, 0]


def residuals(calibration: Calibration, rope: Rope, groups: list[range]) -> Iterator[list[Tensor]]:
    """Rows of each group less what the recipe's predictor says from numbers as they are, sample by sample."""
    predictor = calibration.before.get("predict")
    for tokens, cache in calibration.caches("residuals"):
        positions = torch.arange(len(tokens))
        context = Context(tokens, positions.numpy(), _earlier(tokens), replayed=calibration.told(tokens, cache))
        found = []
        for layers in groups:
            x = _sides(cache, layers)
            if isinstance(predictor, Predictor):
                foreseen = predictor.predict(context, x)
                found.append(rope.forward([a - b for a, b in zip(x, foreseen, strict=True)], layers, positions))
                context.push(x)
            else:
                found.append(rope.forward(x, layers, positions))
        yield found


def _sides(cache: KVCache, layers: range) -> list[Tensor]:
    return [side.float() for i in layers for side in (cache.layers[i].keys, cache.layers[i].values)]


def _earlier(tokens: np.ndarray) -> np.ndarray:
    """Ids int64 (T, LOOKBACK) of the tokens before each, −1 for none."""
    line = np.concatenate([np.full(LOOKBACK, -1, np.int64), tokens])
    return np.stack([line[LOOKBACK - back : len(line) - back] for back in range(1, LOOKBACK + 1)], axis=1)
