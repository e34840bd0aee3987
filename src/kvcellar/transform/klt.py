"""The Karhunen–Loève transform of a group's residual, in a space where every error costs alike, token by token.

Coefficients are c = √w · Wᵀ A r, with r the residual [K before RoPE, V, …] of one token, A the root of the loss metric
(`metric.py`; a block for each layer), and w the token's weight. One step size for all coefficients then spends bits
where later tokens notice them. W comes in two steps: U, the leading eigenvectors of the covariance of A r over
calibration text; then the metric once more, between layers too, in the few hundred dimensions that U leaves:
with h = Uᵀ A⁻¹ g of gradients g, M = E[h hᵀ/w] mixed with its diagonal, W = U M^½ Q, Q the eigenvectors of
M^½ Λ M^½ and Λ the variances along U.

The profile holds the way back, G = (W⁺)ᵀ A⁻¹ (C, P), all that a decoder needs: its first `LOUD` rows in float16, those
up to `QUIET` in int8, the others in nibbles. The encoder takes the c that G brings closest to r in the metric,
c = r F Gᵀ (G F Gᵀ)⁻¹ with F = A²; so rounding G costs a little of its span and no consistency, and A may be as rough as
int8.

w = 2^n, n a whole number that the encoder finds from the token's own numbers x (`weights.py`). The decoder cannot
foresee it (a sink looks like any other "the" until it is one), so n goes with the coefficients, as a column in front.

What the span of W leaves of r follows in P more columns, over `spread`, where C < P: nobody misses it of a token that
is read from afar, which is all the metric knows, but the next few tokens do. So the quantizer codes it of fine tokens
alone, and the inverse takes coefficients with or without it. All later tokens miss it of a sequence's first token, the
attention sink, so the quantizer is told: n is larger by `MARK` for the token at position 0 and any whose n is as large
as first tokens' in calibration text (`sink`).

Source: KLT coding under a weighted error (Gersho & Gray 1992); a prefix's metric as it is restored, and weights of
tokens, are ours. Tried on: CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float32, Int
from torch import Tensor

from ..errors import InvalidRecipe, ProfileMismatch, ProfileMissing
from ..geometry import Geometry
from ..metric import loss_metric, root
from ..profile import Profile
from ..rope import Rope
from ..rounding import from_nibbles, in_nibbles, is_triangle, restored, rounded, symmetric, triangle, widths_of
from ..stages import Grade, Transform
from .basis import balanced, felt_along, groups_of, leading, left_over, residuals, rows_of, spreads_of, times, way_back
from .weights import LEAST, MOST, Weights

if TYPE_CHECKING:
    from ..calibrate import Calibration

SHRINK = 0.05
STRIDE = 2  # of the calibration tokens so many make one that counts for the basis
FELT = 150  # leading coefficients in which the energy of a gradient tells a token's weight
LOUD, QUIET = 64, 128
MARK = 16  # more than MOST − LEAST
USUAL = 0.95  # of tokens that have a smaller log2 w than anything like a sink


class WeightedKLT(Transform):
    id = "klt/1"
    needs_profile = True

    def __init__(self, *, layers_per_group: int = 10, coefficients: int = 768, first_layer: int = 0):
        for name, number, most in (("layers_per_group", layers_per_group, 4096), ("coefficients", coefficients, 65534)):
            if type(number) is not int or not 1 <= number <= most:
                raise InvalidRecipe(f"{name} {number!r}; expected a whole number from 1 to {most}")
        if type(first_layer) is not int or not 0 <= first_layer <= 4096:
            raise InvalidRecipe(f"first_layer {first_layer!r}; expected a whole number from 0 to 4096")
        self.first_layer = first_layer
        self.layers_per_group, self.coefficients = layers_per_group, coefficients

    def fit_settings(self) -> Mapping[str, object]:
        settings = {"layers_per_group": self.layers_per_group, "coefficients": self.coefficients}
        return {**settings, "first_layer": self.first_layer} if self.first_layer else settings

    def fit(self, calibration: Calibration, fitted: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Rotary state as of rope/1; `root.{layer}` int8 (P(P+1)/2,) with `root_scale.{layer}` float32 (P,)
        (`rounding.triangle`); per group, by its first layer, G as `loud` float16 (`LOUD`, P), `basis` int8
        (`QUIET` − `LOUD`, P) and `quiet` uint8 (C − `QUIET`, P/2; `rounding.in_nibbles`), these with `basis_scale` and
        `quiet_scale` float32; `variance` float32 (C,), `weight` float32 (P,) with `level` float32 (1,), which give n;
        and where C < P `spread` float32 (P,) and `sink` float32 (1,), n of first tokens.
        (int8 alone is too rough for G: numbers of sinks are so large that what it leaves of them costs more than all
        steps.)

        Raises InvalidInput without a model, UnsupportedCache where keys cannot be turned back.
        """
        rope = Rope()
        state = dict(rope.fit(calibration, {}))
        rope.bind(calibration.geometry, Profile({f"transform.{n}": v for n, v in state.items()}, {}))
        metric = loss_metric(calibration, rope)
        groups = groups_of(len(calibration.geometry), self.layers_per_group, self.first_layer)
        spreads = spreads_of(calibration, rope)
        roots = [root(f, spread, SHRINK) for f, spread in zip(metric.layers, spreads, strict=True)]
        for i, a in enumerate(roots[self.first_layer :], self.first_layer):
            state[f"root.{i}"], state[f"root_scale.{i}"] = triangle(a)
        blocks = [[roots[i] for i in layers] for layers in groups]
        covariances = [torch.zeros(n, n) for n in (sum(len(b) for b in of) for of in blocks)]
        for residual in residuals(calibration, rope, groups):
            for covariance, r, of in zip(covariances, residual, blocks, strict=True):
                z = times(r[::STRIDE], of)
                covariance.addmm_(z.T, z)
        count = sum(-(-len(s.tokens) // STRIDE) for s in calibration.samples)
        rows, sinks = rows_of(calibration, rope, groups, metric)
        for g, (layers, covariance) in enumerate(zip(groups, covariances, strict=True)):
            u, along_u = leading(covariance / count, self.coefficients)
            felt = felt_along(metric, layers, blocks[g], u)
            energies = [h[..., :FELT].square().sum(dim=2).mean(dim=0) for h in felt]
            weights = Weights.fit(rows[g], energies, blocks[g], first=not layers.start)
            exponents = [weights.exponents(x) for x in rows[g]]
            basis, variance = balanced(u, along_u, felt, exponents)
            first, widths = layers.start, widths_of(calibration.geometry, layers)
            if basis.shape[1] < len(basis):
                state[f"spread.{first}"] = left_over(covariance / count, u, along_u, blocks[g]).numpy()
                like_a_sink = [weights.exponents(sinks[g]).median(), torch.cat(exponents).quantile(USUAL) + 1]
                state[f"sink.{first}"] = torch.stack(like_a_sink).amax(dim=0, keepdim=True).ceil().numpy()
            back = way_back(basis, blocks[g])
            state |= {f"loud.{first}": back[:LOUD].half().numpy(), f"variance.{first}": variance.numpy()}
            state[f"basis.{first}"], state[f"basis_scale.{first}"] = rounded(back[LOUD:QUIET], widths)
            if len(back) > QUIET:
                state[f"quiet.{first}"], state[f"quiet_scale.{first}"] = in_nibbles(back[QUIET:], widths)
            state[f"weight.{first}"] = weights.direction.numpy()
            state[f"level.{first}"] = np.array([weights.level], np.float32)
        return state

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        if profile is None:
            raise ProfileMissing(f"stage {self.id!r} needs a profile")
        self.rope = Rope()
        self.rope.bind(geometry, profile)
        groups = groups_of(len(geometry), self.layers_per_group, self.first_layer)
        self.groups = [_Group.read(profile, layers, geometry) for layers in groups]

    def forward(
        self,
        residual: list[Tensor],
        layers: range,
        positions: Int[Tensor, " tokens"],
        x: list[Tensor] | None = None,
        grade: Grade = Grade.FINE,
    ) -> Float32[Tensor, "tokens coefficients"]:
        """Columns: n, the C coefficients, and of fine tokens the P numbers that these leave.

        `x` are the group's numbers themselves (default: the residual).
        """
        group = self.groups[(layers.start - self.first_layer) // self.layers_per_group]
        r = self.rope.forward(residual, layers, positions)
        n = group.weights.exponents(r if x is None else self.rope.forward([t.float() for t in x], layers, positions))
        c = r @ group.forward
        marked = n + MARK * ((positions == 0) | (n >= group.sink))
        columns = [marked[:, None], c * torch.exp2(n / 2)[:, None]]
        if group.spread is not None and grade is Grade.FINE:
            columns.append((r - c @ group.inverse) / group.spread)
        return torch.cat(columns, dim=1)

    def inverse(
        self, coefficients: Tensor, like: list[Tensor], layers: range, positions: Int[Tensor, " tokens"]
    ) -> list[Tensor]:
        group = self.groups[(layers.start - self.first_layer) // self.layers_per_group]
        count = len(group.inverse)
        n, c, left = torch.split(coefficients, [1, count, coefficients.shape[1] - 1 - count], dim=1)
        n = (n - MARK * (n > MOST)).clamp(LEAST, MOST)
        there = _last_column(c) + 1
        flat = (c[:, :there] * torch.exp2(-n / 2)) @ group.inverse[:there]
        if left.shape[1] and group.spread is not None:
            flat = flat + left * group.spread
        return self.rope.inverse(flat, like, layers, positions)


class _Group:
    """Matrices of one layer group: `inverse` (C, P) and `forward` (P, C), float32; `spread` (P,) if C < P."""

    def __init__(
        self,
        inverse: Tensor,
        roots: list[tuple[np.ndarray, np.ndarray]],
        spread: Tensor | None,
        weights: Weights,
        sink: float,
    ):
        self.inverse, self.roots, self.spread, self.weights, self.sink = inverse, roots, spread, weights, sink
        self._forward: Tensor | None = None
        self._lock = threading.Lock()

    @property
    def forward(self) -> Tensor:
        """Made when the first block is encoded: a decoder never needs it. Raises ProfileMismatch."""
        with self._lock:
            if self._forward is None:
                roots = [symmetric(*packed) for packed in self.roots]
                aimed = times(times(self.inverse, roots), roots)  # the same twice: noise in it is no error
                try:
                    back = torch.linalg.inv((self.inverse @ aimed.T).double())
                except RuntimeError:  # of which torch's LinAlgError is one
                    raise ProfileMismatch("the profile's basis has no inverse in its loss metric") from None
                self._forward = aimed.T @ back.float()
            return self._forward

    @classmethod
    def read(cls, profile: Profile, layers: range, geometry: Geometry) -> _Group:
        """Raises ProfileMismatch."""
        state = {n.removeprefix("transform."): np.asarray(t) for n, t in profile.tensors.items()}
        first, widths = layers.start, widths_of(geometry, layers)
        try:
            roots = [(state[f"root.{i}"], state[f"root_scale.{i}"]) for i in layers]
            loud, weight, level, variance = (state[f"{n}.{first}"] for n in ("loud", "weight", "level", "variance"))
            rows = [restored(state[f"basis.{first}"], state[f"basis_scale.{first}"], widths)]
            if f"quiet.{first}" in state:
                rows.append(from_nibbles(state[f"quiet.{first}"], state[f"quiet_scale.{first}"], widths))
        except KeyError as error:
            missing = f"transform.{error.args[0]}"
            raise ProfileMismatch(f"the profile has no {missing}: it was made for another recipe") from None
        except ValueError as error:
            raise ProfileMismatch(f"the profile's transform of layers from {first} on: {error}") from None
        spread = state.get(f"spread.{first}", np.ones(sum(widths), np.float32))
        sink = state.get(f"sink.{first}", np.full(1, np.inf, np.float32))
        sizes = [geometry.layers[i].numbers_per_token for i in layers]
        fits = all(is_triangle(*packed, n) for packed, n in zip(roots, sizes, strict=True))
        fits = fits and loud.ndim == 2 and loud.shape[1] == len(weight) == len(spread) == sum(widths)
        fits = fits and variance.shape == (len(loud) + sum(map(len, rows)),)
        fits = (
            fits and weight.ndim == spread.ndim == 1 and level.shape == sink.shape == (1,) and bool((spread > 0).all())
        )
        if not (fits and all(np.isfinite(t).all() for t in (loud, weight, level, spread))):
            raise ProfileMismatch(f"the profile's transform of layers from {first} on does not fit this cache")
        inverse = torch.cat([torch.from_numpy(np.array(loud)).float(), *rows])
        weights = Weights(torch.from_numpy(np.array(weight)).float(), float(level[0]))
        left = torch.from_numpy(np.array(spread)).float() if f"spread.{first}" in state else None
        return cls(inverse, roots, left, weights, float(sink[0]))


def _last_column(c: Tensor) -> int:
    """Of those that are not all zeros; 0 where there is none."""
    there = c.any(dim=0).nonzero()
    return int(there[-1]) if len(there) else 0
