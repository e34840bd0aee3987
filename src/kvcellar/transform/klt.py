"""The Karhunen–Loève transform of a group's residual, in a space where every error costs alike, token by token.

Coefficients are c = √w · Wᵀ A r, with r the residual [K before RoPE, V, …] of one token, A the root of the loss metric
(`metric.py`; a block for each layer), and w the token's weight. One step size for all coefficients then spends bits
where later tokens notice them. W comes in two steps: U, the leading eigenvectors of the covariance of A r over
calibration text; then the metric once more, between layers too, in the few hundred dimensions that U leaves:
with h = Uᵀ A⁻¹ g of gradients g, M = E[h hᵀ/w] mixed with its diagonal, W = U M^½ Q, Q the eigenvectors of
M^½ Λ M^½ and Λ the variances along U. The inverse is that on the span of W.

w = 2^n, n a whole number that the encoder finds from the token's own numbers x (`weights.py`). The decoder cannot
foresee it (a sink looks like any other "the" until it is one), so n goes with the coefficients, as a column in front.

What the span of W leaves of r follows in P more columns, over `spread`: nobody misses it of a token that is read from
afar, which is all the metric knows, but the next few tokens do. So the quantizer codes it of fine tokens alone, and the
inverse takes coefficients with or without it.

Source: KLT coding under a weighted error (Gersho & Gray 1992); a prefix's metric as it is restored, and weights of
tokens, are ours. Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float32, Int
from torch import Tensor

from ..cache import KVCache
from ..errors import InvalidRecipe, ProfileMismatch, ProfileMissing
from ..geometry import Geometry
from ..metric import Metric, loss_metric, root
from ..profile import Profile
from ..rope import Rope
from ..stages import LOOKBACK, Context, Predictor, Transform
from .weights import Weights

if TYPE_CHECKING:
    from ..calibrate import Calibration

SHRINK = 0.05
STRIDE = 2  # of the calibration tokens so many make one that counts for the basis
ROUNDS = 6
OVERSAMPLED = 32
FELT = 150  # leading coefficients in which the energy of a gradient tells a token's weight
MIXED = 0.3  # share of the diagonal in M
CLIP = 30.0  # a gradient's energy against the mean


class WeightedKLT(Transform):
    id = "klt/1"
    needs_profile = True

    def __init__(self, *, layers_per_group: int = 10, coefficients: int = 1024):
        for name, number, most in (("layers_per_group", layers_per_group, 4096), ("coefficients", coefficients, 65534)):
            if type(number) is not int or not 1 <= number <= most:
                raise InvalidRecipe(f"{name} {number!r}; expected a whole number from 1 to {most}")
        self.layers_per_group, self.coefficients = layers_per_group, coefficients

    def fit_settings(self) -> Mapping[str, object]:
        return {"layers_per_group": self.layers_per_group, "coefficients": self.coefficients}

    def fit(self, calibration: Calibration, fitted: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Rotary state as of rope/1; `root.{layer}` float16 (P, P); per group, by its first layer, `basis`
        float16 (P, C), `variance` float32 (C,), `spread` float32 (P,) of what it leaves, and `weight` float32 (P,) with
        `level` float32 (1,), which give log2 w.
        (int8 is too rough for W: numbers of sinks are so large that what it leaves of them costs more than all steps.)

        Raises InvalidInput without a model, UnsupportedCache where keys cannot be turned back.
        """
        rope = Rope()
        state = dict(rope.fit(calibration, {}))
        rope.bind(calibration.geometry, Profile({f"transform.{n}": v for n, v in state.items()}, {}))
        metric = loss_metric(calibration, rope)
        groups = _groups(len(calibration.geometry), self.layers_per_group)
        spreads = _spreads(calibration, rope)
        roots = [root(f, spread, SHRINK) for f, spread in zip(metric.layers, spreads, strict=True)]
        size = max(float(a.abs().max()) for a in roots) or 1.0  # of all layers: float16 holds them
        state |= {f"root.{i}": (a / size).half().numpy() for i, a in enumerate(roots)}
        blocks = [[torch.from_numpy(state[f"root.{i}"]).float() * size for i in layers] for layers in groups]
        covariances = [torch.zeros(n, n) for n in (sum(len(b) for b in of) for of in blocks)]
        for residual in _residuals(calibration, rope, groups):
            for covariance, r, of in zip(covariances, residual, blocks, strict=True):
                z = times(r[::STRIDE], of)
                covariance.addmm_(z.T, z)
        count = sum(-(-len(s.tokens) // STRIDE) for s in calibration.samples)
        rows = _rows_of(calibration, rope, groups, metric)
        for g, (layers, covariance) in enumerate(zip(groups, covariances, strict=True)):
            u, along_u = leading(covariance / count, self.coefficients)
            felt = _felt(metric, layers, blocks[g], u)
            energies = [h[..., :FELT].square().sum(dim=2).mean(dim=0) for h in felt]
            weights = Weights.fit(rows[g], energies, blocks[g], first=g == 0)
            basis, variance = _balanced(u, along_u, felt, [weights.exponents(x) for x in rows[g]])
            first = layers.start
            state[f"spread.{first}"] = _left(covariance / count, u, along_u, blocks[g]).numpy()
            state |= {f"basis.{first}": (basis * size).half().numpy(), f"variance.{first}": variance.numpy()}
            state[f"weight.{first}"] = weights.direction.numpy()
            state[f"level.{first}"] = np.array([weights.level], np.float32)
        return state

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        if profile is None:
            raise ProfileMissing(f"stage {self.id!r} needs a profile")
        self.rope = Rope()
        self.rope.bind(geometry, profile)
        groups = _groups(len(geometry), self.layers_per_group)
        self.groups = [_Group.read(profile, layers, geometry) for layers in groups]

    def forward(
        self,
        residual: list[Tensor],
        layers: range,
        positions: Int[Tensor, " tokens"],
        x: list[Tensor] | None = None,
    ) -> Float32[Tensor, "tokens coefficients"]:
        """Columns: n, the C coefficients, and the P numbers that these leave.

        `x` are the group's numbers themselves (default: the residual).
        """
        group = self.groups[layers.start // self.layers_per_group]
        r = self.rope.forward(residual, layers, positions)
        n = group.weights.exponents(r if x is None else self.rope.forward([t.float() for t in x], layers, positions))
        c = r @ group.forward
        left = (r - c @ group.inverse) / group.spread
        return torch.cat([n[:, None], c * torch.exp2(n / 2)[:, None], left], dim=1)

    def inverse(
        self, coefficients: Tensor, like: list[Tensor], layers: range, positions: Int[Tensor, " tokens"]
    ) -> list[Tensor]:
        group = self.groups[layers.start // self.layers_per_group]
        n, c, left = torch.split(coefficients, [1, group.count, coefficients.shape[1] - 1 - group.count], dim=1)
        flat = (c * torch.exp2(-n / 2)) @ group.inverse
        return self.rope.inverse(flat + left * group.spread if left.shape[1] else flat, like, layers, positions)


class _Group:
    """Folded matrices of one layer group: `forward` (P, C) and `inverse` (C, P), float32."""

    def __init__(self, roots: list[Tensor], basis: Tensor, spread: Tensor, weights: Weights):
        sizes = [len(a) for a in roots]
        dual = torch.linalg.solve(basis.double().T @ basis.double(), basis.double().T).T
        pairs = zip(roots, torch.split(basis, sizes), torch.split(dual, sizes), strict=True)
        folded = [(a.double().T @ u.double(), torch.linalg.solve(a.double(), v)) for a, u, v in pairs]
        self.forward = torch.cat([forward for forward, _ in folded]).float()
        self.inverse = torch.cat([back for _, back in folded]).T.float().contiguous()
        self.count, self.spread, self.weights = basis.shape[1], spread, weights

    @classmethod
    def read(cls, profile: Profile, layers: range, geometry: Geometry) -> _Group:
        """Raises ProfileMismatch."""
        numbers = [geometry.layers[i].numbers_per_token for i in layers]
        names = [f"root.{i}" for i in layers]
        names += [f"{name}.{layers.start}" for name in ("basis", "spread", "weight", "level")]
        missing = [name for name in names if f"transform.{name}" not in profile.tensors]
        if missing:
            raise ProfileMismatch(f"the profile has no transform.{missing[0]}: it was made for another recipe")
        tensors = [torch.from_numpy(np.asarray(profile.tensors[f"transform.{name}"])).float() for name in names]
        *roots, basis, spread, weight, level = tensors
        fits = all(tuple(a.shape) == (n, n) for a, n in zip(roots, numbers, strict=True))
        fits = fits and basis.ndim == 2 and len(basis) == sum(numbers) and tuple(weight.shape) == (sum(numbers),)
        fits = fits and tuple(spread.shape) == (sum(numbers),) and bool((spread > 0).all())
        if not (fits and tuple(level.shape) == (1,) and all(bool(t.isfinite().all()) for t in tensors)):
            raise ProfileMismatch(f"the profile's transform of layers from {layers.start} on does not fit this cache")
        try:
            return cls(roots, basis, spread, Weights(weight, float(level)))
        except RuntimeError:  # of which torch's LinAlgError is one
            raise ProfileMismatch("the profile's loss metric has no inverse") from None


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


def _groups(layers: int, per_group: int) -> list[range]:
    return [range(i, min(i + per_group, layers)) for i in range(0, layers, per_group)]


def _spreads(calibration: Calibration, rope: Rope) -> list[Tensor]:
    """Variance of each number of each layer's row, from a few samples."""
    step = max(1, len(calibration.samples) // 8)
    rows: list[list[Tensor]] = [[] for _ in range(len(calibration.geometry))]
    for sample in calibration.samples[::step]:
        cache, positions = sample.load(), torch.arange(len(sample.tokens))
        for i, kv in enumerate(cache.layers):
            rows[i].append(rope.forward([kv.keys.float(), kv.values.float()], range(i, i + 1), positions))
    return [torch.cat(each).var(dim=0) for each in rows]


def _rows_of(calibration: Calibration, rope: Rope, groups: list[range], metric: Metric) -> list[list[Tensor]]:
    """Of each group the rows (T, P) of the tokens that have gradients, one tensor for each window."""
    found: list[list[Tensor]] = [[] for _ in groups]
    for window in metric.windows:
        sample = calibration.samples[window.sample]
        cache, positions = sample.load(), torch.arange(len(sample.tokens))
        tokens = slice(window.first, window.first + window.scaled[0].shape[1])
        for g, layers in enumerate(groups):
            found[g].append(rope.forward(_sides(cache, layers), layers, positions)[tokens])
    return found


def _felt(metric: Metric, layers: range, roots: list[Tensor], u: Tensor) -> list[Tensor]:
    """Gradients by the coefficients of U, (draws, T, C), one tensor for each window."""
    parts = torch.split(u.double(), [len(a) for a in roots])
    back = torch.cat([torch.linalg.solve(a.double(), part) for a, part in zip(roots, parts, strict=True)]).float()
    return [torch.cat([window.rows(i) for i in layers], dim=2) @ back for window in metric.windows]


def _balanced(u: Tensor, variance: Tensor, felt: list[Tensor], exponents: list[Tensor]) -> tuple[Tensor, Tensor]:
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


def _left(covariance: Tensor, u: Tensor, variance: Tensor, roots: list[Tensor]) -> Tensor:
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


def _residuals(calibration: Calibration, rope: Rope, groups: list[range]) -> Iterator[list[Tensor]]:
    """Rows of each group less what the recipe's predictor says from numbers as they are, sample by sample."""
    predictor = calibration.before.get("predict")
    for tokens, cache in calibration.caches("residuals"):
        positions = torch.arange(len(tokens))
        context = Context(tokens, positions.numpy(), _earlier(tokens))
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
