"""Curves of divergence against step: what they say between their points, and what they refuse."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import InvalidInput, ProfileMismatch, ProfileMissing
from kvcellar.frontends.curve import FAR, Curve, Point, find_curve, recipe_for, spent, with_step, without_step
from kvcellar.geometry import Geometry, LayerGeometry, SideGeometry
from kvcellar.identity import Identity
from kvcellar.recipe import CELLAR, EXACT, TURBO

BASE = CELLAR[0]
ID = "ab" * 32
SIDE = SideGeometry(2, 16, "float32")
GEOMETRY = Geometry((LayerGeometry(SIDE, SIDE),))
STEPS = (0.001, 0.004, 0.016, 0.064)


def curve(kls: tuple[float, ...] = (0.004, 0.016, 0.08, 0.2)) -> Curve:
    points = tuple(Point(step, kl, 0.5 / step) for step, kl in zip(STEPS, kls, strict=True))
    return Curve(ID, without_step(BASE), points, 3, 576, 128)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    return tmp_path


def test_its_points_are_met() -> None:
    for point in curve().points:
        assert curve().step_for(point.kl) == point.step
        assert curve().bytes_at(point.step) == pytest.approx(point.bytes_per_token)


@given(st.floats(0.1, 3), st.floats(1e-3, 10), st.floats(0, 1))
def test_a_power_law_is_followed_exactly(power: float, scale: float, share: float) -> None:
    law = curve(tuple(scale * step**power for step in STEPS))
    step = math.exp(np.interp(share, [0, 1], np.log([STEPS[0] * 1.001, STEPS[-1] * 0.999])))
    assert law.step_for(scale * step**power) == pytest.approx(step, rel=1e-3)
    assert law.bytes_at(step) == pytest.approx(0.5 / step)


def test_more_divergence_is_a_larger_step() -> None:
    found = [curve().step_for(kl) for kl in np.geomspace(0.004, 0.2, 30)]
    assert found == sorted(set(found))


def test_noise_in_the_measurement_does_not_turn_the_curve() -> None:
    noisy = curve((0.004, 0.016, 0.015, 0.2))
    assert STEPS[1] <= noisy.step_for(0.016) <= STEPS[2] < noisy.step_for(0.05)


@pytest.mark.parametrize("kl", [0.0039, 0.21, 1e-9])
def test_beyond_what_was_measured_nothing_is_claimed(kl: float) -> None:
    with pytest.raises(InvalidInput, match=r"measured were 0\.004 to 0\.2"):
        curve().step_for(kl)
    assert curve().bytes_at(STEPS[0] / 2) is curve().bytes_at(STEPS[-1] * 2) is None


def test_a_curve_is_for_recipes_that_differ_in_the_step_alone() -> None:
    assert all(curve().covers(each) for each in CELLAR)
    assert curve().covers(with_step(BASE, 0.5, "mine"))
    assert not curve().covers(replace(BASE, block=128))
    assert not curve().covers(replace(BASE, quantize={**(BASE.quantize or {}), "zone": 0.7}))
    assert not curve().covers(EXACT)


def test_it_is_kept_beside_its_profile(home: Path) -> None:
    assert find_curve(ID) is None
    path = curve().save()
    assert path.parent == home / "profiles"
    assert find_curve(ID) == curve()


@pytest.mark.parametrize(
    "change",
    [
        {"profile": "cd" * 32},
        {"points": []},
        {"points": [{"step": 1, "kl": 1, "bytes_per_token": 1}]},
        {"points": [{"step": s, "kl": 0.0, "bytes_per_token": 1} for s in (1, 2)]},
        {"points": [{"step": s, "kl": 0.1, "bytes_per_token": 1} for s in (2, 1)]},
        {"points": [{"step": s, "kl": "x", "bytes_per_token": 1} for s in (1, 2)]},
        {"points": [{"step": s, "kl": 1e999, "bytes_per_token": 1} for s in (1, 2)]},
        {"points": [1, 2]},
        {"points": None},
        {"more": 1},
    ],
)
def test_a_damaged_curve_is_said_to_be_one(home: Path, change: dict[str, object]) -> None:
    path = curve().save()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}).replace("Infinity", "1e999"))
    with pytest.raises(ProfileMismatch):
        find_curve(ID)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ProfileMismatch):
        find_curve(ID)


def test_without_a_profile_there_is_no_recipe(home: Path) -> None:
    with pytest.raises(ProfileMissing, match="calibrate"):
        recipe_for(0.05, Identity.named("m"), GEOMETRY)


def test_text_is_far_that_takes_many_more_bytes(home: Path) -> None:
    curve().save()
    step, usual = STEPS[1], 0.5 / STEPS[1]
    chosen = with_step(BASE, step, "mine")
    for factor, far in ((0.5, False), (FAR - 0.01, False), (FAR + 0.01, True)):
        found = spent(chosen, ID, factor * usual)
        assert found is not None
        assert (found.usual, found.far) == (pytest.approx(usual), far)
    for recipe, profile, size in (
        (chosen, None, usual),
        (chosen, "cd" * 32, usual),
        (chosen, ID, None),
        (TURBO[0], ID, usual),
        (with_step(BASE, 1.0, "mine"), ID, usual),
    ):
        assert spent(recipe, profile, size) is None
