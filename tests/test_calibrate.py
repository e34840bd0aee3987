"""`kvcellar calibrate`: samples on disk, stages that fit in order, profiles found by themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvcellar
from clitools import run, write_model
from kvcellar import Profile, stages
from kvcellar.calibrate import Calibration, Sample, find_fitted, fit_profile, fitted_stages
from kvcellar.errors import InvalidInput, InvalidRecipe, ProfileMismatch, ProfileMissing
from kvcellar.evaluate.texts import Document
from kvcellar.frontends import calibration as collecting
from kvcellar.frontends.cli.models import LocalModel, empty_cache
from kvcellar.frontends.transformers import take_cache
from kvcellar.recipe import PRESETS, Recipe
from models import pairs
from toystages import Coarse, Integers

WINDOW = 32


class Level(stages.Predictor):
    """Each layer side's mean over the samples, times `gain`, which the fit knows nothing of."""

    id = "test-level/1"
    needs_profile = True

    def __init__(self, *, gain: float = 1.0, offset: float = 0.0):
        self.gain, self.offset = gain, offset

    def fit_settings(self) -> Mapping[str, object]:
        return {"offset": self.offset}

    def fit(self, calibration: Calibration, fitted: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        assert not fitted
        totals = np.zeros((len(calibration.geometry), 2))
        for tokens, cache in calibration.caches("levels"):
            for i, layer in enumerate(cache.layers):
                totals[i] += [float(side.double().mean()) * len(tokens) for side in (layer.keys, layer.values)]
        return {"level": (totals / calibration.tokens + self.offset).astype(np.float32)}

    def bind(self, geometry: Any, profile: Profile | None) -> None:
        assert profile is not None
        self.level = torch.from_numpy(np.asarray(profile.tensors["predict.level"]))

    def predict(self, context: stages.Context, like: list[Tensor]) -> list[Tensor]:
        layer = len(context.restored)
        return [(self.gain * self.level[layer, side]).expand(t.shape) for side, t in enumerate(like)]


class Spread(Coarse):
    """Steps of the samples' deviation from the level that the predictor before fitted."""

    id = "test-spread/1"
    needs_profile = True

    def __init__(self) -> None:
        super().__init__(step=0.0)

    def fit(self, calibration: Calibration, fitted: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        level = fitted["predict.level"]
        worst = [
            float((layer.keys - level[i, 0]).abs().max())
            for _, cache in calibration.caches("spread")
            for i, layer in enumerate(cache.layers)
        ]
        return {"step": np.float32(max(worst) / 100)}

    def bind(self, geometry: Any, profile: Profile | None) -> None:
        super().bind(geometry, profile)
        assert profile is not None
        self.step = float(profile.tensors["quantize.step"])


stages.register("predict", Level)
stages.register("quantize", Spread)


def recipe(**level: float) -> Recipe:
    return Recipe("toy", {"id": Integers.id}, predict={"id": Level.id, **level}, quantize={"id": Spread.id}, block=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def preset(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The only preset that needs a profile, since the others want more text."""
    for name in [name for name, each in PRESETS.items() if fitted_stages(each)]:
        monkeypatch.delitem(PRESETS, name)
    monkeypatch.setitem(PRESETS, "toy", recipe())
    return PRESETS["toy"]


def _text(folder: Path, name: str = "mine.txt", characters: int = 200, seed: int = 0) -> Path:
    letters = np.random.default_rng(seed).choice(list("abcdefgh \n"), characters)
    path = folder / name
    path.write_text("".join(letters) + "x")
    return path


def _calibrate(model: Path, text: Path, *more: object) -> Any:
    done = run("calibrate", "--model", model, "--text", text, "--only-text", "--window", WINDOW, "--json", *more)
    assert done.code == 0, done.out + done.err
    return done.json


def test_from_text_to_a_profile_that_save_finds(model: Path, preset: Recipe, tmp_path: Path, home: Path) -> None:
    result = _calibrate(model, _text(tmp_path))
    (made,) = result["profiles"]
    assert result["tokens"] == 4 * WINDOW  # 201 bytes hold six windows, a document gives four
    assert made["path"] == str(home / "profiles" / f"{made['id']}.safetensors")
    local = LocalModel(model)
    ids, cache = local.encode("a new text of the same kind"), empty_cache()
    local.prefill(ids, cache, quiet=True)
    path = tmp_path / "new.kvc"
    info = kvcellar.save(path, cache, tokens=ids, identity=local.identity, recipe="toy")
    assert info.profile == made["id"]
    with kvcellar.open(path, identity=local.identity) as stored:
        restored = pairs(stored.restore().cache)
    worst = max(
        float((a - b).abs().max())
        for x, y in zip(restored, pairs(cache), strict=True)
        for a, b in zip(x, y, strict=True)
    )
    step = float(Profile.unpack(Path(made["path"]).read_bytes()).tensors["quantize.step"])
    assert 0 < worst <= step / 2 * 1.01


def test_the_profile_says_what_it_was_fitted_on(model: Path, preset: Recipe, tmp_path: Path) -> None:
    text = _text(tmp_path)
    (made,) = _calibrate(model, text, "--tokens", 2 * WINDOW)["profiles"]
    metadata = Profile.unpack(Path(made["path"]).read_bytes()).metadata
    assert metadata["tokens"] == 2 * WINDOW
    assert metadata["texts"] == [hashlib.sha256(text.read_bytes()).hexdigest()]
    assert metadata["model"] == {"kind": "model", "digest": LocalModel(model).identity.digest}
    assert metadata["fitted"] == {"predict": {"id": Level.id, "offset": 0.0}, "quantize": {"id": Spread.id}}
    local = LocalModel(model)
    ids = local.encode(text.read_text())
    means = []
    for start in (0, WINDOW):
        cache = empty_cache()
        local.prefill(ids[start : start + WINDOW], cache, quiet=True)
        means.append([[float(side.double().mean()) for side in pair] for pair in pairs(cache)])
    fitted = Profile.unpack(Path(made["path"]).read_bytes()).tensors["predict.level"]
    np.testing.assert_allclose(fitted, np.mean(means, axis=0), rtol=1e-5, atol=1e-7)


def test_an_interrupted_run_goes_on(
    model: Path, preset: Recipe, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, real, runs = _text(tmp_path), LocalModel.prefill, []

    def counted(self: LocalModel, *arguments: Any, **named: Any) -> None:
        if len(runs) == 2:
            raise KeyboardInterrupt
        runs.append(1)
        real(self, *arguments, **named)

    monkeypatch.setattr(LocalModel, "prefill", counted)
    assert run("calibrate", "--model", model, "--text", text, "--only-text", "--window", WINDOW).code != 0
    kept = sorted((home / "calibration").rglob("*.kvc"))
    assert len(kept) == 2
    assert not list(home.glob("profiles/*"))
    kept[0].write_bytes(kept[0].read_bytes()[:-3])  # as a full disk would leave it
    runs[:] = [0] * 10
    whole = _calibrate(model, text)["profiles"][0]["id"]
    assert len(runs) == 13, "two windows were missing and one was cut"
    assert _calibrate(model, text)["profiles"][0]["id"] == whole
    assert len(runs) == 13, "nothing was left to do"


def test_settings_that_the_fit_does_not_know_share_a_profile(model: Path, tmp_path: Path) -> None:
    local = LocalModel(model)
    cuts = collecting.cut(
        collecting.calibration_documents([_text(tmp_path)], standard=False),
        partial(local.encode, continues=True),
        100,
        WINDOW,
    )
    calibration = collecting.collect(local, cuts, Calibration.__dataclass_fields__["progress"].default)
    profile = fit_profile(recipe(gain=1.0), calibration)
    geometry = calibration.geometry
    assert find_fitted(recipe(), local.identity, geometry) is None
    profile.save()
    for found, wanted in ((recipe(gain=2.0), profile.id), (recipe(offset=1.0), None), (PRESETS["exact"], None)):
        got = find_fitted(found, local.identity, geometry)
        assert (got and got.id) == wanted
    other = kvcellar.Identity.named("another model")
    assert find_fitted(recipe(), other, geometry) is None


def test_the_newest_profile_wins_and_a_changed_one_is_refused(model: Path, preset: Recipe, tmp_path: Path) -> None:
    _calibrate(model, _text(tmp_path, seed=1))
    newest = _calibrate(model, _text(tmp_path, seed=2))["profiles"][0]
    local = LocalModel(model)
    cache = empty_cache()
    local.prefill([1, 2, 3], cache, quiet=True)
    geometry = take_cache(cache).geometry
    found = find_fitted(preset, local.identity, geometry)
    assert found is not None
    assert found.id == newest["id"]
    altered = Profile({**found.tensors, "quantize.step": np.float32(9)}, found.metadata)
    Path(newest["path"]).write_bytes(altered.pack())
    with pytest.raises(ProfileMismatch, match=altered.id):
        find_fitted(preset, local.identity, geometry)
    (tmp_path / "home" / "profiles" / "foreign.safetensors").write_bytes(b"no container")
    with pytest.raises(ProfileMismatch):
        find_fitted(preset, local.identity, geometry)


def test_saving_without_a_profile_says_how_to_make_one(make_cache: Any, saved: Any) -> None:
    with pytest.raises(ProfileMissing, match="kvcellar calibrate --model DIR --recipe toy"):
        saved(make_cache(), recipe=recipe())


def test_what_cannot_be_calibrated_is_refused(model: Path, tmp_path: Path, make_cache: Any) -> None:
    text = _text(tmp_path, characters=20)
    short = run("calibrate", "--model", model, "--text", text, "--only-text", "--window", WINDOW)
    assert short.code == 2
    assert "no document of the calibration text reaches 32 tokens" in short.err
    assert run("calibrate", "--model", model, "--recipe", "exact").code == 2
    assert run("calibrate", "--model", model, "--only-text").code == 2
    assert run("calibrate", "--model", model, "--recipe", "nonesuch").code == 2
    assert run("calibrate", "--model", model, "--window", 4096).code == 2
    kv = take_cache(make_cache(tokens=8))
    identity = kvcellar.Identity.named("m")
    with pytest.raises(InvalidInput, match="without samples"):
        Calibration(identity, kv.geometry, [])
    wrong = Calibration(identity, kv.geometry, [Sample(np.arange(9), "docs", lambda: kv)])
    with pytest.raises(InvalidInput, match="sample of 9 tokens"):
        fit_profile(recipe(), wrong)
    spoilt = take_cache([(k * np.nan, v) for k, v in make_cache(tokens=8)])
    with pytest.raises(InvalidInput, match="not finite"):
        fit_profile(recipe(), Calibration(identity, kv.geometry, [Sample(np.arange(8), "docs", lambda: spoilt)]))
    with pytest.raises(InvalidRecipe):
        find_fitted(Recipe("x", {"id": "nonesuch/1"}), identity, kv.geometry)


def test_kinds_take_turns_and_only_tuning_text_gets_in() -> None:
    def document(name: str, kind: str, length: int) -> Document:
        return Document(name, kind, "tune", f"{name}:" + kind[0] * length)

    given = [
        document("a", "docs", 300),
        document("b", "docs", 100),
        document("c", "code", 50),
        document("d", "code", 9),
    ]
    cuts = collecting.cut(given, lambda text: list(text.encode()), 7 * 10, 10)
    assert len(cuts) == 7
    assert [piece.kind for piece in cuts[:6]] == ["docs", "code", "docs", "code", "docs", "code"]
    assert max(sum(c.text == piece.text for c in cuts) for piece in cuts) <= collecting.PER_DOCUMENT
    everything = collecting.cut(given, lambda text: list(text.encode()), 10**6, 10)
    assert len(everything) == 4 + 4 + 4 + 1
    assert all(d.role == "tune" for d in collecting.calibration_documents([], standard=True))


def test_statistics_are_kept_per_samples_and_name(make_cache: Any, tmp_path: Path) -> None:
    kv, calls = take_cache(make_cache(tokens=8)), []

    def make() -> dict[str, np.ndarray]:
        calls.append(1)
        return {"x": np.arange(3)}

    def calibration(first: int, folder: Path | None = tmp_path) -> Calibration:
        sample = Sample(np.arange(first, first + 8), "docs", lambda: kv)
        return Calibration(kvcellar.Identity.named("m"), kv.geometry, [sample], folder=folder)

    for _ in range(2):
        assert calibration(0).kept("mean", make)["x"].tolist() == [0, 1, 2]
    assert len(calls) == 1
    calibration(1).kept("mean", make)
    calibration(0).kept("other", make)
    assert len(calls) == 3
    calibration(0, None).kept("mean", make)
    assert len(calls) == 4
    assert not list(tmp_path.glob("*.part"))
