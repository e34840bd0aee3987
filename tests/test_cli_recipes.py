"""Which recipe `save` and `recompress` use, on a tiny model that `calibrate` made a profile and a curve for."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcellar
import models
from clitools import run, write_model
from kvcellar.archive.info import coarse_bytes_per_token
from kvcellar.archive.reader import ArchiveReader
from kvcellar.calibrate import find_fitted, fitted_stages
from kvcellar.evaluate.divergence import kl_divergence
from kvcellar.frontends import measure
from kvcellar.frontends.calibration import Cut
from kvcellar.frontends.cli.models import LocalModel, cache_geometry, empty_cache
from kvcellar.frontends.measure import measure_curve
from kvcellar.recipe import PRESETS, Recipe
from kvcellar.store.local import LocalStore
from test_cellar import _recipe

WORDS = ["wine", "cellar", "stone", "vault", "cask", "cork", "bottle", "dust", "dark", "cool", "year", "grape", "oak"]
CALIBRATE = ("--only-text", "--window", 160, "--tokens", 640)


def _text(path: Path, seed: int, words: int = 400) -> Path:
    rng = np.random.default_rng(seed)
    path.write_text(" ".join(rng.choice(WORDS, words)))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def presets() -> Iterator[dict[str, Recipe]]:
    """The presets that need no profile, and a `cellar` small enough for the model, with a sister of another step."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name, each in PRESETS.items() if fitted_stages(each)]:
            patch.delitem(PRESETS, name)
        base = replace(_recipe(0.1), name="cellar")
        patch.setitem(PRESETS, "cellar", base)
        patch.setitem(
            PRESETS, "cellar-small", replace(base, name="cellar-small", quantize={**base.quantize, "step": 0.5})
        )
        patch.setattr(measure, "PREFIX", 256)
        patch.setattr(measure, "SCORED", 48)
        yield PRESETS


@pytest.fixture(scope="module")
def calibrated(model: Path, presets: dict[str, Recipe], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A home with the profile and its curve, and what `calibrate` said."""
    folder, home = tmp_path_factory.mktemp("texts"), tmp_path_factory.mktemp("home")
    texts = [word for seed in range(5) for word in ("--text", _text(folder / f"{seed}.txt", seed))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCELLAR_HOME", str(home))
        done = run("calibrate", "--model", model, *texts, *CALIBRATE, "--json")
    assert done.code == 0, done.out
    return home, done.json


@pytest.fixture
def home(calibrated: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCELLAR_HOME", str(shutil.copytree(calibrated[0], tmp_path / "home")))
    return tmp_path / "home"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return _text(tmp_path / "text.txt", 99, 60)


def test_calibrate_makes_one_profile_for_recipes_that_share_it_and_measures_its_curve(
    calibrated: tuple[Path, Any],
) -> None:
    home, result = calibrated
    (profile,) = result["profiles"]
    assert (profile["recipe"], profile["also"]) == ("cellar", ["cellar-small"])
    points = result["curve"]["points"]
    assert result["curve"]["profile"] == profile["id"]
    assert [p["step"] for p in points] == [0.0125, 0.03, 0.1, 0.3, 0.8]
    assert [p["kl"] for p in points] == sorted(p["kl"] for p in points)
    assert points[0]["kl"] < points[-1]["kl"] / 5
    assert [p["bytes_per_token"] for p in points] == sorted((p["bytes_per_token"] for p in points), reverse=True)
    assert (home / "profiles" / f"{profile['id']}.curve.json").is_file()


def test_a_curve_is_measured_on_text_that_the_profile_has_not_seen(
    calibrated: tuple[Path, Any], home: Path, model: Path, tmp_path: Path
) -> None:
    (curve,) = (home / "profiles").glob("*.curve.json")
    curve.unlink()
    folder = tmp_path / "same"
    folder.mkdir()
    texts = [word for seed in range(5) for word in ("--text", _text(folder / f"{seed}.txt", seed))]
    one = run("calibrate", "--model", model, *texts, *CALIBRATE, "--curve-only", "--json")
    assert one.json["curve"] == calibrated[1]["curve"]
    assert "profiles" not in one.json
    (made,) = (home / "profiles").glob("*.safetensors")
    known = kvcellar.Profile.unpack(made.read_bytes()).metadata["texts"]
    all_seen = [w for w in texts if w != "--text" and hashlib.sha256(Path(w).read_bytes()).hexdigest() in known]
    assert 0 < len(all_seen) < 5
    words = [word for path in all_seen for word in ("--text", path)]
    refused = run("calibrate", "--model", model, *words, *CALIBRATE, "--curve-only")
    assert refused.code == 2
    assert "none is left" in refused.err


def test_save_takes_cellar_where_there_is_a_profile_and_says_that_it_loses(
    home: Path, model: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.kvc"
    shown = run("save", "--model", model, "--text", text, out)
    assert "recipe cellar (lossy" in shown.err
    assert "--recipe exact" in shown.err
    assert "hint" not in shown.out
    assert run("info", out, "--json").json["recipe"] == "cellar"
    assert run("save", "--model", model, "--text", text, "--recipe", "exact", out, "--json").json["recipe"] == "exact"


def test_save_keeps_every_bit_where_there_is_none(
    presets: dict[str, Recipe], model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "nothing"))
    shown = run("save", "--model", model, "--text", text, tmp_path / "a.kvc")
    assert "recipe exact:" in shown.err
    assert "--recipe turbo-4 needs no profile" in shown.out
    refused = run("save", "--model", model, "--text", text, tmp_path / "b.kvc", "--target-kl", 0.1)
    assert refused.code == 6
    assert "kvcellar calibrate" in refused.err
    assert not (tmp_path / "b.kvc").exists()


def test_the_curve_says_what_archives_and_what_a_restore_is_worth(
    presets: dict[str, Recipe], home: Path, model: Path, text: Path, tmp_path: Path
) -> None:
    local, base = LocalModel(model), presets["cellar"]
    ids = local.encode(text.read_text())[:304]
    profile = find_fitted(base, local.identity, cache_geometry(local))
    assert profile is not None
    found = measure_curve(local, profile, base, [Cut(tuple(ids), "text", "")], lambda *_: nullcontext(lambda _: None))
    (point,) = [point for point in found.points if point.step == 0.1]
    assert (found.prefix, found.scored) == (256, 48)
    out, held, whole = tmp_path / "a.kvc", empty_cache(), empty_cache()
    local.prefill(ids[:256], held, quiet=True)
    kvcellar.save(out, held, tokens=ids[:256], identity=local.identity, recipe="cellar")
    store, name = LocalStore.at(out)
    with ArchiveReader(store.open_reader(name)) as archive:
        assert coarse_bytes_per_token(archive) == pytest.approx(point.bytes_per_token, rel=0.01)
    with kvcellar.open(out, identity=local.identity) as opened:
        restored = opened.restore().cache
    local.prefill(ids[:256], whole, quiet=True)
    expected, logits = (models.logits(local.model, cache, ids[256:]) for cache in (whole, restored))
    assert float(kl_divergence(expected, logits).mean()) == pytest.approx(point.kl, rel=0.01)


def test_a_target_divergence_gives_a_step_between_those_measured(
    calibrated: tuple[Path, Any], home: Path, model: Path, text: Path, tmp_path: Path
) -> None:
    points = calibrated[1]["curve"]["points"]
    target = float(f"{(points[1]['kl'] * points[2]['kl']) ** 0.5:.3g}")
    saved, exact, again = (tmp_path / name for name in ("a.kvc", "b.kvc", "c.kvc"))
    result = run("save", "--model", model, "--text", text, saved, "--target-kl", target, "--json").json
    assert result["recipe"] == f"cellar@{target:g}"
    assert result["recipe_json"]["quantize"]["step"] == pytest.approx((0.03 * 0.1) ** 0.5, rel=0.02)
    assert result["profile"] == calibrated[1]["curve"]["profile"]
    run("save", "--model", model, "--text", text, "--recipe", "exact", exact)
    made = run("recompress", exact, again, "--target-kl", target, "--json").json
    assert again.read_bytes() == saved.read_bytes()
    assert (made["recipe_before"], made["bytes_before"]) == ("exact", exact.stat().st_size)
    for words in (("save", "--model", model, "--text", text), ("recompress", exact)):
        beyond = run(*words, tmp_path / "d.kvc", "--target-kl", 50)
        assert beyond.code == 2
        assert f"{points[-1]['kl']:.4g}" in beyond.err
        both = run(*words, tmp_path / "d.kvc", "--target-kl", target, "--recipe", "exact")
        assert (both.code, "not both" in both.err) == (2, True)
    assert not (tmp_path / "d.kvc").exists()


def test_a_profile_without_a_curve_has_no_target(home: Path, model: Path, text: Path, tmp_path: Path) -> None:
    (curve,) = (home / "profiles").glob("*.curve.json")
    curve.unlink()
    refused = run("save", "--model", model, "--text", text, tmp_path / "a.kvc", "--target-kl", 0.1)
    assert refused.code == 6
    assert "--curve-only" in refused.err


def test_recompress_says_what_became_smaller_and_what_was_lost(
    home: Path, model: Path, text: Path, tmp_path: Path
) -> None:
    exact, small, smaller = (tmp_path / name for name in ("a.kvc", "b.kvc", "c.kvc"))
    run("save", "--model", model, "--text", text, "--recipe", "exact", exact)
    shown = run("recompress", exact, small, "--recipe", "turbo-4")
    assert shown.code == 0
    assert f"exact: {exact.stat().st_size:,} bytes" in shown.out
    assert f"turbo-4: {small.stat().st_size:,} bytes" in shown.out
    assert "x smaller" in shown.out
    assert "lost" not in shown.out
    twice = run("recompress", small, smaller, "--recipe", "cellar", "--embed-profile")
    assert "lost to turbo-4, then to cellar" in twice.out
    assert "turbo-4 → cellar" in run("info", smaller).out
    result = run("recompress", smaller, smaller, "--recipe", "cellar", "--json").json
    assert (result["copied"], result["lost_to"]) == (True, ["turbo-4", "cellar"])
    assert result["profile_bytes"] > 0
    back = run("recompress", small, tmp_path / "d.kvc", "--recipe", "exact")
    assert "x larger" in back.out
    assert "those that turbo-4 kept, bit by bit" in back.out
    assert run("recompress", exact, tmp_path / "e.kvc").code == 2
    assert run("recompress", tmp_path / "none.kvc", tmp_path / "e.kvc", "--recipe", "turbo-4").code == 3
    assert run("verify", smaller).code == 0


def test_info_says_when_a_text_lies_far_from_what_the_profile_was_made_from(
    home: Path, model: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.kvc"
    run("save", "--model", model, "--text", text, out)
    near = run("info", out, "--json").json
    store, name = LocalStore.at(out)
    with ArchiveReader(store.open_reader(name)) as archive:
        assert near["coarse_bytes_per_token"] == coarse_bytes_per_token(archive) > 0
        blocks = [archive.block(i).head for i in range(1, len(archive.entries) - 1)]
        assert near["coarse_bytes_per_token"] == sum(b.body_length for b in blocks) / sum(b.count for b in blocks)
    assert near["far_from_calibration"] is False
    assert near["coarse_bytes_per_token"] == pytest.approx(near["usual_coarse_bytes_per_token"], rel=0.45)
    assert "far" not in run("info", out).out
    strange = tmp_path / "strange.txt"
    strange.write_text("".join(map(chr, np.random.default_rng(3).integers(0x4E00, 0x9F00, 150))))
    run("save", "--model", model, "--text", strange, out)
    odd = run("info", out, "--json").json
    assert odd["coarse_bytes_per_token"] > 1.1 * near["coarse_bytes_per_token"]
    (curve,) = (home / "profiles").glob("*.curve.json")
    value = json.loads(curve.read_text())
    for point in value["points"]:
        point["bytes_per_token"] /= 3  # as if the profile's own text were a third as hard
    curve.write_text(json.dumps(value))
    assert run("info", out, "--json").json["far_from_calibration"] is True
    assert "far from the calibration text" in run("info", out).out
    curve.write_text("{}")
    assert run("info", out).code == 6
    curve.unlink()
    assert run("info", out, "--json").json["far_from_calibration"] is None
