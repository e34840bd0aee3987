"""The whole of `cellar` on a tiny model, through real files: fitted, saved, grown, restored, generated from."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvcellar
import models
from kvcellar.calibrate import fit_profile
from kvcellar.errors import ProfileMissing
from kvcellar.frontends.bench.sizes import coarse_bytes
from kvcellar.frontends.transformers import take_cache
from kvcellar.profile import Profile
from kvcellar.recipe import CELLAR, Recipe, Window
from models import same_bits
from test_rate_stages import calibration, recipe

TOKENS = 75


def _recipe(step: float = 0.4) -> Recipe:
    quantize = {"id": "deadzone/1", "step": step, "fine_step": 0.01, "keep": 0.02}
    return replace(recipe(), symbols={"id": "adaptive/1"}, quantize=quantize, block=16, window=Window(2, 6))


@cache
def _profile() -> Profile:
    return fit_profile(_recipe(), calibration())


@cache
def _text() -> tuple[list[int], Any]:
    ids = models.prompt(TOKENS, 50)
    return ids, models.prefill(models.llama(), ids)


def _saved(path: Path, steps: list[int], chosen: Recipe) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What an archive restores to that was saved with the first of `steps` tokens and appended to up to the others."""
    ids, cache = _text()
    held = take_cache(cache)
    first, *later = steps
    kvcellar.save(path, held.tokens(0, first), tokens=ids[:first], identity="m", recipe=chosen, profile=_profile())
    with kvcellar.open(path, identity="m", profile=_profile(), mode="a") as archive:
        for stop in later:
            archive.append(held.tokens(0, stop), ids[:stop])
        return [archive.read(i, 0, len(archive)) for i in range(len(held.layers))]


def _lost(restored: list[tuple[torch.Tensor, torch.Tensor]], rows: slice) -> float:
    held = take_cache(_text()[1])
    pairs = [
        (x, y)
        for kv, back in zip(held.layers, restored, strict=True)
        for x, y in zip((kv.keys, kv.values), back, strict=True)
    ]
    error = sum(float((x - y)[:, rows].square().sum()) for x, y in pairs)
    return error / sum(float(x[:, rows].square().sum()) for x, _ in pairs)


def test_a_finer_step_costs_more_and_loses_less(tmp_path: Path) -> None:
    found = []
    for step in (1.0, 0.3, 0.1):
        path = tmp_path / f"{step}.kvc"
        restored = _saved(path, [TOKENS], _recipe(step))
        size, tokens = coarse_bytes(path, _profile())
        assert tokens == TOKENS - 8
        found.append((size, _lost(restored, slice(2, -6))))
        assert _lost(restored, slice(-6, None)) < found[-1][1] / 3
    sizes, losses = zip(*found, strict=True)
    assert list(sizes) == sorted(sizes)
    assert list(losses) == sorted(losses, reverse=True)
    numbers = sum(layer.numbers_per_token for layer in calibration().geometry.layers)
    assert sizes[0] / (TOKENS - 8) < numbers / 4  # less than two bits a number


@pytest.mark.parametrize("steps", [[1, 75], [30, 31, 32, 50, 75], [*range(10, 75, 7), 75]])
def test_an_archive_that_grew_restores_as_one_saved_at_once(tmp_path: Path, steps: list[int]) -> None:
    at_once = _saved(tmp_path / "bulk.kvc", [TOKENS], _recipe())
    grown = _saved(tmp_path / "grown.kvc", steps, _recipe())
    for one, other in zip(at_once, grown, strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)  # products round otherwise for other row counts
    with kvcellar.open(tmp_path / "grown.kvc", identity="m", profile=_profile(), mode="a") as archive:
        before = [archive.read(i, 0, TOKENS) for i in range(len(grown))]
        for whole, part in zip(before, (archive.read(i, 50, TOKENS - 3) for i in range(len(grown))), strict=True):
            assert all(torch.allclose(x[:, 50:-3], y, rtol=1e-3, atol=1e-3) for x, y in zip(whole, part, strict=True))
        archive.compact()
        assert archive.info().file_bytes == pytest.approx((tmp_path / "bulk.kvc").stat().st_size, rel=0.02)
        after = [archive.read(i, 0, TOKENS) for i in range(len(grown))]
    assert all(
        torch.allclose(x, y, rtol=1e-3, atol=1e-3)
        for a, b in zip(before, after, strict=True)
        for x, y in zip(a, b, strict=True)
    )


def test_one_machine_gives_one_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _saved(tmp_path / f"{name}.kvc", [TOKENS], _recipe())
    assert (tmp_path / "a.kvc").read_bytes() == (tmp_path / "b.kvc").read_bytes()


def test_without_its_profile_nothing_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    _saved(tmp_path / "a.kvc", [TOKENS], _recipe())
    with kvcellar.open(tmp_path / "a.kvc", identity="m") as archive:
        assert archive.tokens.tolist() == _text()[0]  # ids and info need none
        with pytest.raises(ProfileMissing):
            archive.restore()
    ids, cache = _text()
    embedded = tmp_path / "b.kvc"
    kvcellar.save(embedded, cache, tokens=ids, identity="m", recipe=_recipe(), profile=_profile(), embed_profile=True)
    with kvcellar.open(embedded, identity="m") as archive:
        assert archive.restore().matched == TOKENS


def test_generation_goes_on_from_what_is_fine(tmp_path: Path) -> None:
    ids, _ = _text()
    divergences = []
    for step in (0.02, 2.0):
        path = tmp_path / f"{step}.kvc"
        _saved(path, [TOKENS], _recipe(step))
        with kvcellar.open(path, identity="m", profile=_profile()) as archive:
            cache = archive.restore(prompt=ids).cache
        with torch.inference_mode():
            logits = models.llama()(torch.tensor([ids[-1:]]), cache=cache).logits[0, -1]
            expected = models.llama()(torch.tensor([ids])).logits[0, -1]
        divergences.append(
            float(
                torch.nn.functional.kl_div(
                    logits.log_softmax(0), expected.log_softmax(0), log_target=True, reduction="sum"
                )
            )
        )
    fine, coarse = divergences
    assert fine < 0.04 < coarse


def test_reading_one_layer_decodes_the_shallower_groups(tmp_path: Path) -> None:
    whole = _saved(tmp_path / "a.kvc", [TOKENS], _recipe())
    with kvcellar.open(tmp_path / "a.kvc", identity="m", profile=_profile()) as archive:
        assert same_bits([archive.read(2, 20, 40)], [tuple(side[:, 20:40] for side in whole[2])])


def test_presets_share_one_profile() -> None:
    assert len({str(replace(each, name="x", quantize=None).to_json()) for each in CELLAR}) == 1
    steps = [each.quantize["step"] for each in CELLAR if each.quantize]
    assert len(set(steps)) == len(CELLAR) == 3
    assert np.all(np.array(steps) > 0)
