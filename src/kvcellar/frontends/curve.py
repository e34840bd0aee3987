"""What a step of recipe `cellar` costs: a curve measured beside a profile, and the recipe for a wished divergence.

`kvcellar calibrate` measures, on text held out from the profile, the divergence (KL, nats per token) and the bytes of
coarse tokens at a few steps. Between them both follow a power of the step closely, so they are interpolated on
logarithms; beyond them nothing is claimed. The curve is a JSON file beside the profile and no part of it: measured
again, or not at all, it leaves the profile's id as it is. No torch: `kvcellar info` reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import InvalidInput, ProfileMismatch, ProfileMissing
from ..profile import home
from ..recipe import PRESETS, Recipe, canonical_json, strict_json
from ..store.local import LocalStore

if TYPE_CHECKING:
    from ..geometry import Geometry
    from ..identity import Identity
    from ..profile import Profile

BASE = "cellar"
FAR = 1.5
"""Text takes so many times the bytes of calibration text, or more: it lies far from it."""


class Point(NamedTuple):
    """At a quantizer's step: nats per token, and bytes per coarse token in sealed blocks (without ids)."""

    step: float
    kl: float
    bytes_per_token: float


@dataclass(frozen=True)
class Curve:
    """`points` by ascending step, for a profile's id and a `recipe` (its JSON without name and step).

    Measured over `windows` of `prefix` tokens, each with `scored` tokens behind it. Raises ProfileMismatch for points
    that are no curve.
    """

    profile: str
    recipe: Mapping[str, Any]
    points: tuple[Point, ...]
    windows: int
    prefix: int
    scored: int

    def __post_init__(self) -> None:
        numbers = [number for point in self.points for number in point]
        rising = all(a.step < b.step for a, b in zip(self.points, self.points[1:], strict=False))
        if not (len(self.points) >= 2 and rising and all(math.isfinite(x) and x > 0 for x in numbers)):
            raise ProfileMismatch(f"the curve of profile {self.profile} has the points {self.points}; expected rising")

    def covers(self, recipe: Recipe) -> bool:
        """Whether `recipe` differs from the measured one in its name and step alone."""
        return canonical_json(self.recipe) == canonical_json(without_step(recipe))

    def step_for(self, kl: float) -> float:
        """The step, to four digits, that costs about `kl`. Raises InvalidInput beyond what was measured."""
        # Of noise in the measurement: a finer step never costs more.
        costs = np.maximum.accumulate([point.kl for point in self.points])
        if not costs[0] <= kl <= costs[-1]:
            raise InvalidInput(
                f"a divergence of {kl:g} nats per token; measured were {costs[0]:.4g} to {costs[-1]:.4g}"
            )
        step = math.exp(np.interp(math.log(kl), np.log(costs), [math.log(point.step) for point in self.points]))
        return float(f"{step:.4g}")

    def bytes_at(self, step: float) -> float | None:
        """Bytes per coarse token that the held-out text took at this step; None beyond what was measured."""
        steps = [point.step for point in self.points]
        if not steps[0] <= step <= steps[-1]:
            return None
        sizes = [math.log(point.bytes_per_token) for point in self.points]
        return math.exp(np.interp(math.log(step), np.log(steps), sizes))

    def save(self) -> Path:
        """Write the curve beside its profile under `home()`; returns the file."""
        folder, name = home() / "profiles", _name(self.profile)
        folder.mkdir(parents=True, exist_ok=True)
        with LocalStore(folder).replacing(name) as pending:
            pending.append(
                json.dumps({**asdict(self), "points": [p._asdict() for p in self.points]}, indent=1).encode()
            )
        return folder / name


def find_curve(profile: str) -> Curve | None:
    """The curve beside the profile with this id; None without one. Raises ProfileMismatch when it is damaged."""
    path = home() / "profiles" / _name(profile)
    try:
        found = strict_json(path.read_bytes())
        curve = Curve(
            **{**found, "points": tuple(Point(**{k: float(v) for k, v in p.items()}) for p in found["points"])}
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProfileMismatch(f"{path} is no curve of a profile ({error})") from error
    if curve.profile != profile:
        raise ProfileMismatch(f"{path} belongs to profile {curve.profile}")
    return curve


def without_step(recipe: Recipe) -> dict[str, Any]:
    """A recipe's JSON without its name and its quantizer's step: what a curve is measured for."""
    value = recipe.to_json()
    del value["name"]
    value["quantize"] = {key: setting for key, setting in (value["quantize"] or {}).items() if key != "step"}
    return value


def with_step(recipe: Recipe, step: float, name: str) -> Recipe:
    return replace(recipe, name=name, quantize={**(recipe.quantize or {}), "step": step})


def recipe_for(kl: float, identity: Identity, geometry: Geometry) -> tuple[Recipe, Profile]:
    """Recipe `cellar` with the step that costs about `kl` nats per token for this model, and the profile it needs.

    Raises ProfileMissing without a profile or a curve beside it, InvalidInput beyond what was measured.
    """
    from ..calibrate import find_fitted

    base = PRESETS[BASE]
    profile = find_fitted(base, identity, geometry)
    if profile is None:
        raise ProfileMissing(
            f"a target divergence needs a profile of this model: run kvcellar calibrate --recipe {BASE}"
        )
    curve = find_curve(profile.id)
    if curve is None or not curve.covers(base):
        raise ProfileMissing(
            f"profile {profile.id[:16]}… has no measured curve, or one of other settings: "
            f"run kvcellar calibrate --curve-only --model DIR"
        )
    return with_step(base, curve.step_for(kl), f"{BASE}@{kl:g}"), profile


class Spent(NamedTuple):
    """Bytes per coarse token that a text took, and that the text held out from the profile took at the same step."""

    text: float
    usual: float

    @property
    def far(self) -> bool:
        """Whether the text lies far from what the profile was made from."""
        return self.text >= FAR * self.usual


def spent(recipe: Recipe, profile: str | None, bytes_per_token: float | None) -> Spent | None:
    """How an archive's `bytes_per_token` of coarse tokens compare; None where no curve says."""
    if profile is None or bytes_per_token is None or recipe.quantize is None or "step" not in recipe.quantize:
        return None
    curve = find_curve(profile)
    if curve is None or not curve.covers(recipe):
        return None
    usual = curve.bytes_at(float(recipe.quantize["step"]))
    return None if usual is None else Spent(bytes_per_token, usual)


def _name(profile: str) -> str:
    return f"{profile}.curve.json"
