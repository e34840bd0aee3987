"""The codec with one part taken out: what `kvcellar bench rate` sets the whole of recipe `cellar` against.

Nothing of the product knows of these. They are other recipes (no predictor, a wider dead zone), other calibrations
(`Blind`: gradients that say nothing), other profiles (no token weights), and a transform that lives here
(`WeightedNumbers`).

- Without prediction: x itself is transformed, in bases fitted on x.
- Without the loss metric: in place of every window's gradients stand signs drawn at random, ±1/σ of each number, so
  that each number costs by its own variance and no layer, direction or token more than another. The weights of tokens
  come from gradients, too, and vanish with them. The total Σ F·σ² is that of the real gradients, since the step of fine
  tokens is in its units.
- Without the KLT: the coefficients are A r, one for each number, A the root of the loss metric; what the KLT did
  beside decorrelating, weighing across layers, falls away with it.
- Without token weights: all weights 1, in the bases of the whole codec.
- Dead zone 0.6 in place of rounding to nearest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int
from torch import Tensor

from ...calibrate import Calibration, fit_profile
from ...errors import ProfileMissing
from ...geometry import Geometry
from ...metric import CLIP
from ...profile import Profile
from ...recipe import PRESETS, Recipe
from ...rope import Rope
from ...rounding import symmetric
from ...stages import Grade, Transform, register
from ...transform.basis import groups_of, residuals, spreads_of, times
from ...transform.klt import MARK
from ...transform.weights import LEAST, MOST, Weights

BASE = PRESETS["cellar"]
ZONE = 0.6
NEVER = 127.0  # a token's exponent that is never reached


class WeightedNumbers(Transform):
    """c = √w · A r in place of a KLT: one coefficient for each number. Reads the state of klt/1."""

    id = "rate-numbers/1"
    needs_profile = True

    def __init__(self, *, layers_per_group: int = 10):
        self.layers_per_group = layers_per_group

    def fit_settings(self) -> Mapping[str, object]:
        return {"layers_per_group": self.layers_per_group}

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        if profile is None:
            raise ProfileMissing(f"stage {self.id!r} needs a profile")
        self.rope = Rope()
        self.rope.bind(geometry, profile)
        self.blocks, self.ways_back, self.weights, self.sinks = {}, {}, {}, {}
        for layers in groups_of(len(geometry), self.layers_per_group):
            first, roots = layers.start, roots_of(profile, layers)
            self.blocks[first] = roots
            self.ways_back[first] = [torch.linalg.inv(a.double()).float() for a in roots]
            direction = torch.from_numpy(np.array(profile.tensors[f"transform.weight.{first}"])).float()
            self.weights[first] = Weights(direction, float(profile.tensors[f"transform.level.{first}"][0]))
            self.sinks[first] = float(profile.tensors.get(f"transform.sink.{first}", np.array([NEVER]))[0])

    def forward(
        self,
        residual: list[Tensor],
        layers: range,
        positions: Int[Tensor, " tokens"],
        x: list[Tensor] | None = None,
        grade: Grade = Grade.FINE,
    ) -> Float32[Tensor, "tokens coefficients"]:
        r = self.rope.forward(residual, layers, positions)
        rows = r if x is None else self.rope.forward([t.float() for t in x], layers, positions)
        n = self.weights[layers.start].exponents(rows)
        marked = n + MARK * ((positions == 0) | (n >= self.sinks[layers.start]))
        c = times(r, self.blocks[layers.start]) * torch.exp2(n / 2)[:, None]
        return torch.cat([marked[:, None], c], dim=1)

    def inverse(
        self, coefficients: Tensor, like: list[Tensor], layers: range, positions: Int[Tensor, " tokens"]
    ) -> list[Tensor]:
        n, c = coefficients[:, :1], coefficients[:, 1:]
        n = (n - MARK * (n > MOST)).clamp(LEAST, MOST)
        flat = times(c * torch.exp2(-n / 2), self.ways_back[layers.start])
        return self.rope.inverse(flat, like, layers, positions)


def roots_of(profile: Profile, layers: range) -> list[Tensor]:
    """A of each layer (P, P), float32."""
    names = [(f"transform.root.{i}", f"transform.root_scale.{i}") for i in layers]
    return [symmetric(*(np.asarray(profile.tensors[name]) for name in pair)) for pair in names]


@dataclass(frozen=True)
class Blind(Calibration):
    """A calibration whose gradients say nothing: random signs over each number's deviation (`variances`, by layer)."""

    variances: Sequence[Tensor] = field(default=(), repr=False)

    @classmethod
    def of(cls, calibration: Calibration) -> Blind:
        known = {each.name: getattr(calibration, each.name) for each in fields(Calibration)}
        rope = Rope()
        state = rope.fit(calibration, {})
        rope.bind(calibration.geometry, Profile({f"transform.{name}": value for name, value in state.items()}, {}))
        return cls(**known, variances=[v.clamp(min=v.mean() * 1e-3) for v in spreads_of(calibration, rope)])

    def kept(self, name: str, make: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Of gradients (`metric._of_window`: `rows.{layer}` float16 (draws, T, P) over `scale`) blind ones instead."""
        found = super().kept(name, make)
        if "rows.0" not in found:
            return found
        layers = range(len(self.variances))
        rows = [torch.from_numpy(found[f"rows.{i}"]).float() * float(found["scale"][i]) for i in layers]
        share = sum(_usual(g.square() @ v) for g, v in zip(rows, self.variances, strict=True)) / len(layers)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        blind: dict[str, np.ndarray] = {}
        scales = []
        for i, (g, v) in enumerate(zip(rows, self.variances, strict=True)):
            size = (share / (len(v) * v)).sqrt()
            scales.append(float(size.max()) / 16384)
            signs = torch.randint(0, 2, g.shape, generator=generator) * 2 - 1
            blind[f"rows.{i}"] = (signs * (size / scales[-1])).half().numpy()
        return {**blind, "scale": np.array(scales, np.float64)}


def _usual(energies: Tensor) -> float:
    """Mean over draws and tokens (draws, T), each limited as the metric limits them."""
    return float(torch.minimum(energies, CLIP * energies.median(dim=1, keepdim=True).values).mean())


class Variant(NamedTuple):
    """A name, what it is in words, its recipe, and what makes its profile from a calibration and the whole codec's
    profile; None where it has the same one."""

    name: str
    what: str
    recipe: Recipe
    fit: Callable[[Calibration, Profile], Profile] | None


def variants() -> list[Variant]:
    """The whole codec comes first."""
    register("transform", WeightedNumbers)
    blind = replace(BASE, name="no metric")
    unpredicted = replace(BASE, name="no prediction", predict=None)
    numbers = {"id": WeightedNumbers.id, "layers_per_group": (BASE.transform or {})["layers_per_group"]}
    return [
        Variant("whole", "recipe cellar", BASE, None),
        Variant("no prediction", "x itself", unpredicted, lambda c, _: fitted(unpredicted, c)),
        Variant("no metric", "each number by its variance", blind, lambda c, _: fitted(blind, Blind.of(c))),
        Variant("no KLT", "weighted numbers", replace(BASE, name="no KLT", transform=numbers), _numbers),
        Variant("no weights", "all tokens alike", replace(BASE, name="no weights"), _weightless),
        Variant("dead zone 0.6", "instead of rounding", _with_zone(ZONE), None),
    ]


def fitted(recipe: Recipe, calibration: Calibration) -> Profile:
    """A profile without the symbol coder's tables, which are trained step by step (`rateablation.py`)."""
    return fit_profile(replace(recipe, symbols={"id": "map/1"}), calibration)


def _with_zone(zone: float) -> Recipe:
    return replace(BASE, name=f"dead zone {zone:g}", quantize={**(BASE.quantize or {}), "zone": zone})


def _weightless(calibration: Calibration, whole: Profile) -> Profile:
    alone: dict[str, Any] = dict(whole.tensors)
    for name, tensor in whole.tensors.items():
        if name.startswith(("transform.weight.", "transform.level.")):
            alone[name] = np.zeros_like(tensor)
        elif name.startswith("transform.sink."):
            alone[name] = np.full_like(tensor, NEVER)
    return Profile(alone, {**whole.metadata, "fitted": None, "variant": "no weights"})


def _numbers(calibration: Calibration, whole: Profile) -> Profile:
    """The whole codec's without its bases, with the variance of each weighted number of the residual."""
    left = ("transform.loud.", "transform.basis", "transform.spread.", "transform.variance.")
    tensors = {name: tensor for name, tensor in whole.tensors.items() if not name.startswith(left)}
    before = {name: tensor for name, tensor in whole.tensors.items() if name.startswith("predict.")}
    rope = Rope()
    rope.bind(calibration.geometry, whole)
    groups = groups_of(len(calibration.geometry), int((BASE.transform or {})["layers_per_group"]))
    blocks = [roots_of(whole, layers) for layers in groups]
    squares = [torch.zeros(sum(map(len, of))) for of in blocks]
    for found in residuals(replace(calibration, recipe=BASE, fitted=before), rope, groups):
        for total, r, of in zip(squares, found, blocks, strict=True):
            total += times(r, of).square().sum(dim=0)
    for layers, total in zip(groups, squares, strict=True):
        tensors[f"transform.variance.{layers.start}"] = (total / calibration.tokens).numpy()
    return Profile(tensors, {**whole.metadata, "fitted": None, "variant": "no KLT"})
