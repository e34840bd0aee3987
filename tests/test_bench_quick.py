"""`bench --quick` makes do with profiles from little text, and nothing else ever takes them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from clitools import run, write_model
from kvcellar.calibrate import find_fitted
from kvcellar.frontends import calibration
from kvcellar.frontends.cli import bench_setup
from kvcellar.frontends.cli.bench_setup import ensure_profiles, quick_profiles
from kvcellar.frontends.cli.models import MeasuredModel, empty_cache
from kvcellar.frontends.transformers import take_cache
from kvcellar.geometry import Geometry
from kvcellar.recipe import EXACT, PRESETS, Recipe, Window

QUICK, FULL = 256, 512


def _recipe(name: str, **settings: Any) -> Recipe:
    quantize = {"id": "rvq/1", "key_stages": 1, "value_stages": 1, "entries": 16, **settings}
    return Recipe(name, {"id": "map/1"}, transform={"id": "rope/1"}, quantize=quantize, window=Window(4, 32), block=64)


SMALL = _recipe("small")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def local(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasuredModel:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(calibration, "WINDOW", 64)
    monkeypatch.setattr(bench_setup, "QUICK_CALIBRATION", QUICK)
    monkeypatch.setattr(bench_setup, "CALIBRATION", FULL)
    return MeasuredModel(model)


@pytest.fixture
def geometry(local: MeasuredModel) -> Geometry:
    cache = empty_cache()
    local.prefill([1, 2, 3], cache, quiet=True)
    return take_cache(cache).geometry


def test_a_quick_profile_is_for_quick_benches_alone(
    local: MeasuredModel, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = quick_profiles(lambda: local, [EXACT, SMALL], geometry, quiet=True)
    assert set(made) == {"small"}
    assert made["small"].metadata["tokens"] == QUICK
    assert find_fitted(SMALL, local.identity, geometry) is None, "what save and calibrate look for"

    with monkeypatch.context() as patch:
        patch.setattr("kvcellar.calibrate.fit_profile", lambda *_: pytest.fail("fitted again"))
        again = quick_profiles(lambda: local, [SMALL, _recipe("alike")], geometry, quiet=True)
    assert {name: profile.id for name, profile in again.items()} == dict.fromkeys(("small", "alike"), made["small"].id)

    ensure_profiles(lambda: local, [SMALL], geometry, quiet=True)
    full = find_fitted(SMALL, local.identity, geometry)
    assert full is not None
    assert full.metadata["tokens"] == FULL
    assert quick_profiles(lambda: local, [SMALL], geometry, quiet=True)["small"].id == full.id


def test_a_quick_profile_is_for_its_stages_and_its_model(
    local: MeasuredModel, geometry: Geometry, tmp_path: Path
) -> None:
    profiles = quick_profiles(lambda: local, [SMALL, _recipe("larger", entries=32)], geometry, quiet=True)
    other = MeasuredModel(write_model(tmp_path / "other", seed=1))
    profiles["elsewhere"] = quick_profiles(lambda: other, [SMALL], geometry, quiet=True)["small"]
    assert len({profile.id for profile in profiles.values()}) == 3


def test_rows_of_a_quick_bench_say_how_little_text_it_was(
    local: MeasuredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "small", SMALL)
    text = tmp_path / "text.txt"
    text.write_text("Some text of the cellar. " * 12)
    size = ("--prefix", 96, "--continuation", 24, "--recipes", "exact,small", "--text", text)
    quick = run("bench", "--model", local.folder, *size, "--quick", "--json")
    assert quick.code == 0, quick.err
    rows = {row["recipe"]: row for row in quick.json}
    assert rows["small"]["calibration_tokens"] == QUICK
    assert rows["exact"]["calibration_tokens"] is None
    assert rows["small"]["payload_bytes_per_token"] > 0
    assert rows["small"]["append_s"] > 0
    assert rows["small"]["layer_errors"] is None
    shown = run("bench", "--model", local.folder, *size, "--quick")
    assert f"small: no profile here, so one from {QUICK} tokens" in " ".join(shown.err.split())
    full = run("bench", "--model", local.folder, *size, "--json")
    (row,) = (row for row in full.json if row["recipe"] == "small")
    assert row["calibration_tokens"] == FULL
    assert row["profile"] != rows["small"]["profile"]
    assert row["kl"] != rows["small"]["kl"]
    assert row["layer_errors"]


def test_a_profile_fitted_on_a_tested_text_is_refused_in_a_quick_bench(
    local: MeasuredModel, geometry: Geometry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = [document.text for document in calibration.calibration_documents([])]
    monkeypatch.setitem(PRESETS, "small", SMALL)
    made = quick_profiles(lambda: local, [SMALL], geometry, quiet=True)["small"]
    listed: Any = made.metadata["texts"]
    seen = next(text for text in texts if hashlib.sha256(text.encode()).hexdigest() in listed)
    path = tmp_path / "seen.txt"
    path.write_text(seen)
    size = ("--prefix", 96, "--continuation", 24, "--recipes", "small", "--text", path)
    refused = run("bench", "--model", local.folder, *size, "--quick")
    assert refused.code != 0
    assert "tested here" in refused.err
