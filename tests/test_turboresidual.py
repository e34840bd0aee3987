"""`turbo-residual/1` and recipe `sequential` on a tiny model: bits, damage, growth, surprisal in the stream."""

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
from kvcellar.calibrate import fingerprint_of_fit, fit_profile
from kvcellar.errors import DamagedArchive, InvalidInput, InvalidRecipe
from kvcellar.frontends.bench.sizes import coarse_bytes
from kvcellar.frontends.transformers import take_cache
from kvcellar.pipeline import Pipeline
from kvcellar.profile import Profile
from kvcellar.quantize.lloydmax import boundaries, levels
from kvcellar.quantize.turboresidual import ENERGIES, GAUSSIAN, LEFT, MAX_BITS, TurboResidual
from kvcellar.recipe import CELLAR, SEQUENTIAL, Recipe, Window
from kvcellar.stages import Grade
from kvcellar.tokens import Tokens
from test_rate_stages import calibration, recipe, unseen

TOKENS = 75
GROUP = range(2)


def _recipe(**settings: Any) -> Recipe:
    quantize = {"id": "turbo-residual/1", "step": 0.05, "fine_step": 0.01, "keep": 0.02, "band": 16, **settings}
    return replace(
        recipe(), name="sequential", symbols={"id": "adaptive/1"}, quantize=quantize, block=16, window=Window(2, 6)
    )


@cache
def _profile() -> Profile:
    return fit_profile(_recipe(), calibration())


def _stage(**settings: Any) -> TurboResidual:
    residual: Any = Pipeline(_recipe(**settings), calibration().geometry, _profile()).residual
    stage = residual.quantizer
    assert isinstance(stage, TurboResidual)
    return stage


def _coefficients(stage: TurboResidual, tokens: int = 400) -> torch.Tensor:
    """Gaussian, of the calibrated variances."""
    scale = torch.from_numpy(stage.fine.variances[0]).sqrt().float()
    x = torch.randn(tokens, len(scale), generator=torch.Generator().manual_seed(1)) * scale
    return torch.cat([torch.zeros(tokens, 1), x], dim=1)


@cache
def _text() -> tuple[list[int], Any, np.ndarray]:
    """Ids, cache and log2 P of a text."""
    ids = models.prompt(TOKENS, 50)
    cache = models.prefill(models.llama(), ids)
    with torch.no_grad():
        logs = models.llama()(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    known = [float(logs[i, ids[i + 1]] / np.log(2)) for i in range(TOKENS - 1)]
    return ids, cache, np.array([np.nan, *known])


def _saved(
    path: Path, steps: list[int], chosen: Recipe, *, told: bool = True
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids, cache, probs = _text()
    held, first, later = take_cache(cache), steps[0], steps[1:]
    given = {"log2_probs": probs[:first]} if told else {}
    kvcellar.save(
        path, held.tokens(0, first), tokens=ids[:first], identity="m", recipe=chosen, profile=_profile(), **given
    )
    with kvcellar.open(path, identity="m", profile=_profile(), mode="a") as archive:
        for stop in later:
            archive.append(held.tokens(0, stop), ids[:stop], log2_probs=probs[:stop] if told else None)
        return [archive.read(i, 0, len(archive)) for i in range(len(held.layers))]


@pytest.mark.parametrize("bits", range(1, 7))
def test_what_bits_leave_of_a_gaussian_is_what_the_rule_counts_with(bits: int) -> None:
    x = np.random.default_rng(0).standard_normal(400_000)
    of = levels(GAUSSIAN, bits)
    left = float(np.square(x - of[np.searchsorted(boundaries(of), x)]).mean())
    assert left == pytest.approx(LEFT[bits] / LEFT[0], rel=0.04)


@pytest.mark.parametrize("allocation", ["uniform", "variance", "energy", "both"])
def test_a_finer_step_or_more_bits_lose_less(allocation: str) -> None:
    errors, codes = [], []
    for step, bits in ((0.2, 1), (0.05, 3), (0.01, 5)):
        stage = _stage(allocation=allocation, step=step, bits=bits)
        x = _coefficients(stage)
        symbols = stage.quantize(x, GROUP, Grade.COARSE)
        errors.append(float((stage.dequantize(symbols, GROUP, Grade.COARSE) - x)[:, 1:].square().sum()))
        codes.append(int(np.abs(symbols[3]).astype(np.int64).sum()))
    assert errors == sorted(errors, reverse=True)
    assert codes == sorted(codes)
    assert errors[-1] < errors[0] / 10


def test_bits_follow_the_published_rule() -> None:
    stage = _stage(allocation="uniform", bits=2, least=1, mean_surprisal=4.0)
    x = _coefficients(stage, 6)
    surprisal = np.array([0.0, 2.0, 4.0, 8.0, np.nan, 1000.0])
    symbols = stage.quantize_told(x, GROUP, Grade.COARSE, surprisal)
    band = stage.bands[0][0]
    assert stage._bits(band, symbols[0][:, 0], symbols[2][:, 0]).tolist() == [1, 1, 2, 4, 2, MAX_BITS]
    assert stage.surprisal(symbols)[:5].tolist() == [0.0, 2.0, 4.0, 8.0, 4.0]  # unknown: the mean
    without = _stage(allocation="uniform", bits=2, least=0, mean_surprisal=4.0)
    symbols = without.quantize_told(x, GROUP, Grade.COARSE, surprisal)
    assert not symbols[3][0].any()  # no bits at all: nothing is written
    assert (symbols[3][3] != 0).all()


def test_surprisal_changes_coarse_tokens_alone_and_not_where_energy_decides() -> None:
    told, silent = np.full(400, 30.0), None
    for allocation, same in (("variance", False), ("energy", True), ("both", False)):
        stage = _stage(allocation=allocation)
        x = _coefficients(stage)
        one, other = (stage.quantize_told(x, GROUP, Grade.COARSE, s)[3] for s in (told, silent))
        assert np.array_equal(one, other) == same


def test_bits_of_an_energy_are_those_that_pay() -> None:
    stage = _stage(allocation="energy")
    energies = np.arange(ENERGIES[0], ENERGIES[1] + 1)
    bits = stage._bits(stage.bands[0][0], np.zeros(len(energies), np.uint8), energies)
    for energy, count in zip(energies.tolist(), bits.tolist(), strict=True):
        share = [2.0**energy * (LEFT[b] - LEFT[b + 1]) / LEFT[0] for b in range(MAX_BITS)]
        assert all(saved >= 1 for saved in share[:count])
        assert count == MAX_BITS or share[count] < 1 or energy < 0


def test_a_doubled_surprisal_counts_as_a_doubled_energy() -> None:
    stage = _stage(allocation="both")
    energies, band = np.arange(-2, 20), stage.bands[0][0]
    for eighths, tilt in ((0, -2), (1, -2), (4, -1), (8, 0), (15, 0), (16, 1), (32, 2), (63, 2)):
        bits = stage._bits(band, np.full(22, eighths, np.uint8), energies)
        plain = _stage(allocation="energy")._bits(band, np.full(22, 8, np.uint8), energies + tilt)
        assert np.array_equal(bits, plain)
        assert bits[0] == 0  # what is written where nothing is


@pytest.mark.parametrize("allocation", ["uniform", "variance", "energy", "both"])
def test_symbols_that_are_never_written_are_refused(allocation: str) -> None:
    stage = _stage(allocation=allocation)
    good = stage.quantize(_coefficients(stage, 20), GROUP, Grade.COARSE)
    stage.dequantize(good, GROUP, Grade.COARSE)
    for array, value, message in (
        (0, 64, "surprisal ratio"),
        (1, -32768, "exponent"),
        (2, ENERGIES[1] + 1, "energy"),
        (2, ENERGIES[0] - 1, "energy"),
        (3, 200, "cannot be"),
        (3, -200, "cannot be"),
    ):
        bad = [symbols.copy() for symbols in good]
        bad[array][3, 0] = value
        with pytest.raises(DamagedArchive, match=message):
            stage.dequantize(bad, GROUP, Grade.COARSE)
    bits = stage._bits(stage.bands[0][0], good[0][:, 0], good[2][:, 0])
    bad = [symbols.copy() for symbols in good]
    bad[3][np.flatnonzero(bits)[0], 0] = 0  # no level is 0
    with pytest.raises(DamagedArchive, match="cannot be"):
        stage.dequantize(bad, GROUP, Grade.COARSE)


@pytest.mark.parametrize(
    "settings",
    [
        {"allocation": "best"},
        {"bits": 0},
        {"bits": 9},
        {"bits": True},
        {"least": 2},
        {"band": 3},
        {"band": 257},
        {"mean_surprisal": 0},
        {"mean_surprisal": "4"},
        {"step": 0},
        {"seed": -1},
        {"shade": 1},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecipe):
        Pipeline(_recipe(**settings), calibration().geometry, _profile())


@pytest.mark.parametrize(
    ("allocation", "steps"),
    [("variance", [1, 75]), ("variance", [30, 31, 32, 50, 75]), ("both", [*range(10, 75, 7), 75])],
)
def test_an_archive_that_grew_restores_as_one_saved_at_once(tmp_path: Path, allocation: str, steps: list[int]) -> None:
    """The surprisals of stored tokens are read from their symbols when these become coarse."""
    chosen = _recipe(mean_surprisal=7.0, allocation=allocation)
    at_once = _saved(tmp_path / "bulk.kvc", [TOKENS], chosen)
    grown = _saved(tmp_path / "grown.kvc", steps, chosen)
    silent = _saved(tmp_path / "silent.kvc", [TOKENS], chosen, told=False)
    for one, other in zip(at_once, grown, strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
    assert not all(torch.allclose(a[0], b[0], atol=1e-3) for a, b in zip(at_once, silent, strict=True))
    with kvcellar.open(tmp_path / "grown.kvc", identity="m", profile=_profile(), mode="a") as archive:
        archive.compact()
        assert archive.info().file_bytes == pytest.approx((tmp_path / "bulk.kvc").stat().st_size, rel=0.02)
        for i, (keys, _) in enumerate(at_once):
            torch.testing.assert_close(archive.read(i, 0, TOKENS)[0], keys, rtol=1e-3, atol=1e-3)


def test_one_machine_gives_one_file_and_a_finer_step_a_closer_model(tmp_path: Path) -> None:
    ids, _, _ = _text()
    expected = models.logits(models.llama(), models.prefill(models.llama(), ids[:-1]), ids[-1:]).softmax(-1)
    away = []
    for step in (1.0, 0.001):
        for name in ("a", "b"):
            _saved(tmp_path / f"{name}.kvc", [TOKENS], _recipe(step=step, keep=0.0))
        assert (tmp_path / "a.kvc").read_bytes() == (tmp_path / "b.kvc").read_bytes()
        with kvcellar.open(tmp_path / "a.kvc", identity="m", profile=_profile()) as archive:
            cache = archive.restore(prompt=ids).cache
        away.append(float((models.logits(models.llama(), cache, ids[-1:]).softmax(-1) - expected).abs().sum()))
    assert away[1] < away[0] / 3


def test_fewer_bits_for_what_was_foreseen_cost_fewer_bytes(tmp_path: Path) -> None:
    ids, cache, _ = _text()
    sizes = []
    for bits in (2.0, 7.0, 14.0):
        path = tmp_path / f"{bits}.kvc"
        probs = np.full(TOKENS, -bits)
        chosen = _recipe(mean_surprisal=7.0)
        kvcellar.save(path, cache, tokens=ids, identity="m", recipe=chosen, profile=_profile(), log2_probs=probs)
        sizes.append(coarse_bytes(path, _profile())[0])
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2] / 2


@pytest.mark.parametrize("probs", [np.zeros(TOKENS - 1), np.zeros((1, TOKENS)), np.full(TOKENS, 0.5), ["a"] * TOKENS])
def test_log2_probs_that_are_none_are_refused(tmp_path: Path, probs: Any) -> None:
    ids, cache, _ = _text()
    path = tmp_path / "a.kvc"
    with pytest.raises(InvalidInput):
        kvcellar.save(path, cache, tokens=ids, identity="m", recipe=_recipe(), profile=_profile(), log2_probs=probs)
    assert not path.exists()


def test_improbable_tokens_and_unknown_ones(tmp_path: Path) -> None:
    ids, cache, _ = _text()
    probs = np.full(TOKENS, -1e4)
    probs[::2] = np.nan
    kvcellar.save(
        tmp_path / "a.kvc", cache, tokens=ids, identity="m", recipe=_recipe(), profile=_profile(), log2_probs=probs
    )
    with kvcellar.open(tmp_path / "a.kvc", identity="m", profile=_profile()) as archive:
        assert all(side.isfinite().all() for i in range(len(calibration().geometry)) for side in archive.read(i, 0, 75))


def test_it_reads_the_profile_of_cellar() -> None:
    assert fingerprint_of_fit(SEQUENTIAL) == fingerprint_of_fit(CELLAR[0])


def test_the_whole_of_a_part_is_checked(tmp_path: Path) -> None:
    pipeline = Pipeline(_recipe(), calibration().geometry, _profile())
    tokens, held = unseen()
    parts = pipeline.encode(held, Tokens.following(tokens.ids, 0))
    out = dict(enumerate(held.layers))
    noticed = 0
    for at in range(0, len(parts[0]), 7):
        broken = bytearray(parts[0])
        broken[at] ^= 0x5A
        try:
            copies = {i: type(kv)(kv.keys.clone(), kv.values.clone()) for i, kv in out.items()}
            pipeline.decode([0], [[memoryview(bytes(broken))]], [Tokens.following(tokens.ids, 0)], copies)
            assert all(kv.keys.isfinite().all() for kv in copies.values())
        except DamagedArchive:
            noticed += 1
    assert noticed
