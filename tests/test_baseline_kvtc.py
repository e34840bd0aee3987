"""The KVTC baseline of the benchmarks: its bytes decode, its bits are well spent, its exact tokens are exact."""

from __future__ import annotations

import itertools
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import models

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from baselines import allocation, calibration, klt, kvtc, rotary, text, validate_kvtc

SHAPE = (2, 2, 8)
BUDGETS = [4, 16, 48, 120]
INV_FREQ = 100.0 ** -torch.arange(0, 1, 0.25)


def rows(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values (T, 32): six strong directions, some noise, a mean."""
    fixed, free = torch.Generator().manual_seed(9), torch.Generator().manual_seed(seed)
    mix = torch.randn(2, 6, 32, generator=fixed) * torch.tensor([8.0, 6, 4, 2, 1, 0.5])[:, None]
    mean = torch.randn(2, 1, 32, generator=fixed)
    x = torch.randn(2, tokens, 6, generator=free) @ mix + mean + 0.05 * torch.randn(2, tokens, 32, generator=free)
    return x[0], x[1]


def cache(tokens: int = 100, seed: int = 1, dtype: torch.dtype = torch.float32) -> rotary.Pairs:
    pairs = rotary.layers(*rows(tokens, seed), INV_FREQ, SHAPE, 0)
    return [(k.to(dtype), v.to(dtype)) for k, v in pairs]


@pytest.fixture(scope="module")
def state() -> kvtc.State:
    return calibration.fitted([rows(3000, 0)], INV_FREQ, SHAPE).state(BUDGETS)


def error(left: rotary.Pairs, right: rotary.Pairs) -> float:
    return sum(
        float((a - b).square().sum())
        for one, two in zip(left, right, strict=True)
        for a, b in zip(one, two, strict=True)
    )


def test_the_error_falls_and_the_bytes_grow_with_the_budget(state: kvtc.State) -> None:
    coded = [kvtc.encode(cache(), state, budget) for budget in BUDGETS]
    errors = [error(cache(), kvtc.decode(data, state)) for data in coded]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 30
    payloads = [kvtc.sizes(data)[0] for data in coded]
    assert payloads == sorted(payloads)
    for budget, payload in zip(BUDGETS, payloads, strict=True):
        assert payload <= 64 * budget / 8 + 9 + 20  # 64 coded tokens; one byte of padding per width; DEFLATE's own


def test_a_saved_state_decodes_the_same(state: kvtc.State, tmp_path: Path) -> None:
    data = kvtc.encode(cache(), state, 48)
    state.save(tmp_path / "state.safetensors")
    fresh = kvtc.load(tmp_path / "state.safetensors")
    assert fresh.shape == state.shape
    assert sorted(fresh.plans) == BUDGETS
    assert models.same_bits(kvtc.decode(data, fresh), kvtc.decode(data, state))
    assert kvtc.encode(cache(), fresh, 48) == data


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 4, 36, 37, 100])
def test_sinks_and_recent_tokens_are_exact(state: kvtc.State, dtype: torch.dtype, tokens: int) -> None:
    pairs = cache(tokens, dtype=dtype)
    back = kvtc.decode(kvtc.encode(pairs, state, 4), state)
    for one, two in zip(pairs, back, strict=True):
        for a, b in zip(one, two, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            kept = a.half().float() if dtype == torch.float32 else a
            exact = [t for t in range(tokens) if t < 4 or t >= tokens - 32]
            assert torch.equal(kept[:, :, exact], b[:, :, exact])


def test_coefficients_without_bits_cost_nothing(state: kvtc.State) -> None:
    """The same bytes whether the components without bits exist in the state or not."""
    data = kvtc.encode(cache(), state, 16)
    bits, _ = state.plans[16]
    used = bits > 0
    assert 0 < int(used.sum()) < len(used)
    small = state.only([16])
    assert len(small.plans[16][0]) == int(used.sum()) == small.key_basis.shape[1] + small.value_basis.shape[1]
    assert small.nbytes < state.nbytes
    packed = sum(-(-64 * int(bits[bits == b].sum()) // 8) for b in range(1, 9))
    assert packed <= 64 * 16 / 8 + 8
    assert kvtc.sizes(kvtc.encode(cache(), small, 16))[0] == pytest.approx(kvtc.sizes(data)[0], abs=8)
    torch.testing.assert_close(kvtc.decode(data, small), kvtc.decode(data, state))


def test_calibration_does_not_depend_on_how_its_tokens_come() -> None:
    """Moments in parts, around a mean far from zero, are those of the whole; so are the tokens that errors see."""
    keys, values = (x + 100 for x in rows(700, 0))
    whole = calibration.fitted([(keys, values)], INV_FREQ, SHAPE)
    parts = calibration.fitted(zip(keys.split(99), values.split(99), strict=True), INV_FREQ, SHAPE)
    assert whole.tokens == parts.tokens == 700
    torch.testing.assert_close(whole.means[0], keys.mean(0))
    for i, x in enumerate((keys, values)):
        variances = (x - x.mean(0)).matmul(parts.bases[i]).square().mean(0)
        torch.testing.assert_close(
            variances, torch.linalg.eigvalsh(x.T.cov(correction=0)).flip(0), rtol=1e-2, atol=1e-3
        )
        torch.testing.assert_close(parts.errors[i][:6], whole.errors[i][:6], rtol=1e-2, atol=1e-4)


def test_the_sample_of_many_tokens_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SAMPLE", 10)
    moments = calibration._Moments(1)
    for part in torch.arange(95.0)[:, None].split(7):
        moments.add(part)
    assert moments.sample[:, 0].tolist() == list(range(0, 95, 8))


def test_a_saved_calibration_gives_the_same_state(tmp_path: Path) -> None:
    learned = calibration.fitted([rows(500, 0)], INV_FREQ, SHAPE)
    learned.save(tmp_path / "learned.safetensors")
    one, other = learned.state([48]), calibration.load(tmp_path / "learned.safetensors").state([48])
    assert kvtc.encode(cache(), one, 48) == kvtc.encode(cache(), other, 48)


def test_the_allocation_is_the_best_there_is() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        errors = np.sort(rng.random((4, 4)), axis=1)[:, ::-1] * rng.exponential(5, (4, 1))
        found = allocation.allocate(errors, range(1, 13))
        for budget, bits in found.items():
            ways = itertools.product(range(4), repeat=4)
            best = min(errors[range(4), way].sum() for way in ways if sum(way) <= budget)
            assert bits.sum() <= budget
            assert errors[range(4), bits].sum() == pytest.approx(best)


def test_measured_distortion_falls_by_bits_and_starts_at_the_variance() -> None:
    x = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5, 0])
    errors, _ = allocation.distortions(x)
    torch.testing.assert_close(errors[:, 0], x.square().mean(0))
    assert (errors[:2].diff(dim=1) < 0).all()
    assert errors[0, 1] == pytest.approx(0.3634, rel=0.05)  # Max 1960, one bit
    assert errors[0, 4] == pytest.approx(0.01154, rel=0.1)


def test_keys_turn_back_to_float_precision() -> None:
    keys = torch.randn(3, 50, 8, generator=torch.Generator().manual_seed(0))
    there = rotary.turned(keys, INV_FREQ, back=False, first=7)
    torch.testing.assert_close(rotary.turned(there, INV_FREQ, back=True, first=7), keys)


def test_rotation_is_the_models_own() -> None:
    """With one token repeated, layer 0 has the same key at every position but for the rotation."""
    model = models.llama()
    keys = models.prefill(model, [5] * 40).layers[0].keys
    plain = rotary.turned(keys, rotary.frequencies(model), back=True)
    torch.testing.assert_close(plain, plain[:, :, :1].expand_as(plain), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(keys, keys[:, :, :1].expand_as(keys), atol=1e-2)


def test_other_ropes_are_refused() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="linear"):
        rotary.frequencies(models.new_llama(rope_parameters=rope))


def test_a_model_is_calibrated_and_its_cache_restored() -> None:
    model = models.llama()
    seen = torch.tensor([models.prompt(200, seed) for seed in range(4)])
    learned = calibration.calibrated(model, seen)
    assert learned.tokens == 4 * (200 - 36)
    state = learned.state([40, 600])
    pairs = models.pairs(models.prefill(model, models.prompt(120, 9)))
    coarse, fine = (error(pairs, kvtc.decode(kvtc.encode(pairs, state, b), state)) for b in (40, 600))
    assert fine < coarse / 10


def test_damaged_bytes_and_unknown_budgets_are_refused(state: kvtc.State) -> None:
    data = kvtc.encode(cache(), state, 16)
    payload = len(data) - kvtc.sizes(data)[0]
    flipped = bytearray(data)
    flipped[payload + 20] ^= 1
    longer = data[: payload - 4] + b"\x09\0\0\0" + zlib.compress(b"1")
    for bad in (b"", data[:10], data[:-1], data + b"x", b"XXXX" + data[4:], bytes(flipped), longer):
        with pytest.raises(ValueError, match="expected"):
            kvtc.decode(bad, state)
    with pytest.raises(ValueError, match="no plan for 17"):
        kvtc.encode(cache(), state, 17)


def test_grouped_coding_spends_less_and_errs_more_with_larger_steps() -> None:
    coder = klt.fit(*rows(3000, 0), SHAPE, group=1)
    keys, values = rows(200, 1)
    done = [klt.measure(coder, klt.fit_step(coder, size), keys, values) for size in (0.02, 0.3, 2.0, 1e6)]
    bits = [one.bits for one in done]
    errors = [float((one.keys - keys).square().sum() + (one.values - values).square().sum()) for one in done]
    assert bits == sorted(bits, reverse=True)
    assert errors == sorted(errors)
    assert bits[-1] == 0  # every coefficient dropped
    assert errors[0] < 200 * 64 * 0.02**2 / 6


def test_an_escape_costs_more_than_any_symbol_of_the_table() -> None:
    coder = klt.fit(*rows(3000, 0), SHAPE, group=2)
    keys, values = rows(50, 1)
    step = klt.fit_step(coder, 0.02)
    ordinary = klt.measure(coder, step, keys, values)
    wild = klt.measure(coder, step, keys * 1000, values)
    assert wild.bits > ordinary.bits * 2
    torch.testing.assert_close(wild.keys, keys * 1000, rtol=0.01, atol=0.2)


def test_detokenising() -> None:
    raw = ' = = Career = = \n He said " The Bill , 2 @,@ 000 @-@ odd ( 9 – 15 in ) " ; it \'s 4 @.@ 5 % . \n'
    assert text.detokenised(raw) == '== Career ==\nHe said "The Bill, 2,000-odd (9–15 in)"; it\'s 4.5%.\n'


def test_bytes_at_a_divergence_are_read_off_the_curve() -> None:
    points = [{"kl": k, "payload_b_per_token": 1474 * (k / 0.008) ** -0.5, "step": 1.0} for k in (0.001, 0.02, 0.1)]
    first, second = validate_kvtc.compared(points)
    assert first["ours"] == pytest.approx(1474)
    assert (first["within"], first["inside"]) == (True, True)
    assert second["ratio"] == pytest.approx(1474 * (0.035 / 0.008) ** -0.5 / 613)
    assert not second["within"]
    assert first["ratios_of_rounded_kl"] == pytest.approx([(0.0085 / 0.008) ** -0.5, (0.0075 / 0.008) ** -0.5])
    assert not validate_kvtc.compared(points[1:])[0]["inside"]


def test_a_stopped_validation_goes_on_with_the_point_it_lacks(tmp_path: Path) -> None:
    kept, measured = tmp_path / "baselines" / "points.json", []

    def point(size: float) -> dict[str, object]:
        measured.append(size)
        figures = {"payload_b_per_token": 1.0, "total_b_per_token": 2.0, "kl": 0.1, "delta_ppl": 0.1}
        return {"code": "grouped", "step": size, "dead_zone": 0.5, **figures}

    for sizes in ([0.5], [0.5, 1.2], [1.2, 0.5]):
        assert [validate_kvtc._point(kept, str(at), lambda at=at: point(at))["step"] for at in sizes] == sizes
    assert measured == [0.5, 1.2]
