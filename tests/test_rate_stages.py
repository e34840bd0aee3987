"""Prediction, loss-weighted KLT and dead-zone quantizer: what they fit, what they keep, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import models
from kvcellar import stages
from kvcellar.cache import KVCache, LayerKV
from kvcellar.calibrate import Calibration, Sample, fit_profile
from kvcellar.errors import DamagedArchive, InvalidInput, InvalidRecipe, ProfileMismatch, ProfileMissing
from kvcellar.frontends.fingerprint import identity_of_model
from kvcellar.frontends.transformers import take_cache
from kvcellar.metric import loss_metric, root
from kvcellar.pipeline import Pipeline
from kvcellar.predict.linear import LinearPredictor, _shifted
from kvcellar.profile import Profile
from kvcellar.quantize.deadzone import DeadZone
from kvcellar.recipe import Recipe, Window
from kvcellar.rope import Rope
from kvcellar.rounding import from_nibbles, in_nibbles
from kvcellar.stages import Context, Grade, SymbolCoder
from kvcellar.testing.stages import RecipeConformance
from kvcellar.tokens import Tokens
from kvcellar.transform import klt as klt_module
from kvcellar.transform.basis import balanced, leading
from kvcellar.transform.klt import MARK, WeightedKLT
from kvcellar.transform.weights import LEAST, MOST, Weights

WINDOW = 96
PREDICT = {"id": "linear/1", "layers_per_group": 2, "rank": 24, "embedding": 16, "reach": 1}
TRANSFORM = {"id": "klt/1", "layers_per_group": 2, "coefficients": 120}
QUANTIZE = {"id": "deadzone/1", "step": 0.4, "fine_step": 0.01, "keep": 0.02}


def recipe(**changes: Any) -> Recipe:
    chosen = {"predict": PREDICT, "transform": TRANSFORM, "quantize": QUANTIZE, "symbols": {"id": "byteplanes-zstd/1"}}
    return Recipe(**{"name": "rate", "window": Window(2, 4), **chosen, **changes})


@cache
def model() -> Any:
    return models.llama()


@cache
def calibration() -> Calibration:
    samples = []
    for seed in range(20):
        ids = models.prompt(WINDOW, seed)
        held = take_cache(models.prefill(model(), ids))
        samples.append(Sample(np.array(ids, np.int64), "toy", lambda held=held: held))
    return Calibration(identity_of_model(model()), samples[0].load().geometry, samples, model=model())


@cache
def profile() -> Profile:
    return fit_profile(recipe(), calibration())


def unseen(seed: int = 50, tokens: int = 60) -> tuple[Tokens, KVCache]:
    ids = models.prompt(tokens, seed)
    return Tokens.following(np.array(ids, np.int64), 0), take_cache(models.prefill(model(), ids))


def sides(held: KVCache, layers: range) -> list[Tensor]:
    return [side for i in layers for side in (held.layers[i].keys, held.layers[i].values)]


def bound(stage: Any, **changes: np.ndarray) -> Any:
    stage.bind(calibration().geometry, Profile({**profile().tensors, **changes}, {}))
    return stage


def predictor() -> LinearPredictor:
    return bound(LinearPredictor(layers_per_group=2, rank=24, embedding=16, reach=1))


def klt() -> WeightedKLT:
    return bound(WeightedKLT(layers_per_group=2, coefficients=120))


def energy(group: list[Tensor]) -> float:
    return sum(float(t.square().sum()) for t in group)


# Prediction


def test_the_first_layer_is_foreseen_from_the_tokens_and_deeper_ones_from_it() -> None:
    tokens, held = unseen()
    context = Context(tokens.ids, tokens.positions, tokens.earlier)
    for layers, share in ((range(2), 0.85), (range(2, 3), 0.85)):
        x = sides(held, layers)
        p = predictor_predict(context, x)
        assert [t.shape for t in p] == [t.shape for t in x]
        centred = [t - t.mean(dim=1, keepdim=True) for t in x[1::2]]  # values: keys turn, their mean says little
        missed = [a - b for a, b in zip(x[1::2], p[1::2], strict=True)]
        assert energy(missed) < share * energy(centred)
        context.push(x)


def predictor_predict(context: Context, like: list[Tensor]) -> list[Tensor]:
    return predictor().predict(context, [torch.full_like(t, torch.nan) for t in like])  # numbers must not be read


def test_a_token_is_foreseen_from_those_before_it_in_its_block_and_of_its_grade() -> None:
    tokens, held = unseen()
    first, x = sides(held, range(2)), sides(held, range(2, 3))

    def foreseen(rows: slice, grade: Grade = Grade.COARSE, block_begins: int | None = None) -> Tensor:
        part = tokens.take(rows)
        earlier = part.earlier.copy()
        if block_begins is not None:
            earlier[block_begins, 0] = -1
        context = Context(part.ids, part.positions, earlier, grade)
        context.push([t[:, rows] for t in first])
        return torch.cat(predictor_predict(context, [t[:, rows] for t in x]), dim=2)

    def alike(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, atol=1e-4)

    whole, part = foreseen(slice(0, 60)), foreseen(slice(20, 30))
    assert alike(whole[:, 21:30], part[:, 1:])
    assert not alike(whole[:, 20:21], part[:, :1])
    alone = torch.cat([foreseen(slice(i, i + 1)) for i in range(20, 30)], dim=1)
    assert alike(foreseen(slice(20, 30), Grade.FINE), alone)
    apart = foreseen(slice(20, 30), block_begins=5)
    assert alike(apart[:, :5], part[:, :5])
    assert not alike(apart[:, 5:6], part[:, 5:6])
    assert alike(apart[:, 6:], part[:, 6:])


def test_the_rows_of_tokens_before_or_the_average() -> None:
    follows = torch.tensor([False, True, True, False, True, True])
    rows, average = torch.arange(6.0)[:, None], torch.tensor([-1.0])
    assert _shifted(rows, 1, average, follows)[:, 0].tolist() == [-1, 0, 1, -1, 3, 4]
    assert _shifted(rows, 2, average, follows)[:, 0].tolist() == [-1, -1, 0, -1, -1, 3]


def test_ids_that_the_table_lacks_and_missing_ones_count_as_zeros() -> None:
    strange = np.array([10**9, -1])
    context = Context(strange, np.arange(2), np.full((2, 3), -1))
    like = [torch.empty(2, 2, 16) for _ in range(4)]
    p = predictor_predict(context, like)
    assert torch.equal(p[1][:, 0], p[1][:, 1])
    assert all(t.isfinite().all() for t in p)


# Metric


def test_the_metric_comes_from_tokens_that_read_the_cache() -> None:
    rope = bound(Rope())
    metric = loss_metric(calibration(), rope)
    assert len(metric.layers) == 3
    assert len(metric.windows) == 10
    for layer in metric.layers:
        assert torch.allclose(layer, layer.T)
        assert torch.linalg.eigvalsh(layer).min() > -1e-6 * layer.trace()
    assert metric.windows[0].rows(2).shape == (2, 60 - 4 - 32, 64)


def test_a_root_is_one_and_no_direction_is_free() -> None:
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    metric, spread = x.T @ x / 40, torch.ones(8)
    assert torch.allclose(root(metric, spread, 0.0) @ root(metric, spread, 0.0), metric, atol=1e-5)
    flat = torch.diag(torch.tensor([1.0] + [0.0] * 7))
    assert torch.linalg.eigvalsh(root(flat, spread, 0.05)).min() > 0


# Transform


def test_coefficients_come_back() -> None:
    tokens, held = unseen()
    positions = torch.from_numpy(tokens.positions)
    x = sides(held, range(2))
    stage = klt()
    assert stage.forward(x, range(2), positions, x).shape == (60, 1 + 120 + 128)
    wanted = torch.randn(60, 121, generator=torch.Generator().manual_seed(4))
    wanted[:, 0] = stage.forward(x, range(2), positions, x)[:, 0]
    residual = stage.inverse(wanted, x, range(2), positions)
    assert [t.shape for t in residual] == [t.shape for t in x]
    again = stage.forward(residual, range(2), positions, x)
    assert torch.allclose(again[:, :121], wanted, atol=2e-2)
    whole = stage.inverse(stage.forward(x, range(2), positions, x), x, range(2), positions)
    assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(whole, x, strict=True))


def test_weights_scale_a_tokens_coefficients_and_come_in_front() -> None:
    tokens, held = unseen()
    positions = torch.from_numpy(tokens.positions)
    x = sides(held, range(2))
    stage = klt()
    stage.groups[0].sink = 5.0
    stage.groups[0].weights = Weights(torch.zeros(128), -6.0)
    assert (stage.forward(x, range(2), positions, x)[:, 0] == 6 + MARK).all()  # like a first token, all of them
    stage.groups[0].weights = Weights(torch.zeros(128), -3.0)
    heavy = stage.forward(x, range(2), positions, x)
    stage.groups[0].weights = Weights(torch.zeros(128), 0.0)
    plain = stage.forward(x, range(2), positions, x)
    assert (heavy[1:, 0] == 3).all()
    assert heavy[0, 0] == 3 + MARK  # the first token
    assert torch.allclose(heavy[:, 1:121], plain[:, 1:121] * 8**0.5, rtol=1e-4, atol=1e-4)
    back = [stage.inverse(flat, x, range(2), positions) for flat in (heavy, plain)]
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*back, strict=True))


def test_weights_are_learned_from_energies_that_the_numbers_tell() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(400, 6, generator=generator) for _ in range(3)]
    weights = Weights.fit(rows, [torch.exp2(3 * r[:, 0]) for r in rows], [torch.eye(6)], first=True)
    found = weights.exponents(rows[0])
    assert torch.equal(found, found.round())
    assert float((found - (3 * rows[0][:, 0]).clamp(LEAST, MOST)).abs().mean()) < 0.5


def test_gradients_cost_the_same_along_every_coefficient() -> None:
    """The metric between layers, from gradients that are anything but alike in all directions."""
    generator = torch.Generator().manual_seed(5)
    mixing = torch.randn(6, 6, generator=generator)
    gradients = torch.randn(2, 20000, 6, generator=generator) @ mixing
    w, variance = balanced(torch.eye(6), torch.ones(6), [gradients], [torch.zeros(20000)])
    before, after = (
        torch.linalg.cond(torch.cov(g.flatten(0, 1).T)) for g in (gradients, gradients @ torch.linalg.inv(w).T)
    )
    assert (variance.diff() <= 0).all()
    assert after < before / 4


def test_leading_eigenvectors_are_those_of_a_full_decomposition() -> None:
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(1)) * torch.exp(-torch.arange(200) / 20)
    covariance = x.T @ x / 300
    vectors, variance = leading(covariance, 20)
    expected = torch.linalg.eigvalsh(covariance).flip(0)[:20]
    assert torch.allclose(variance, expected, rtol=1e-3)
    assert torch.allclose(vectors.T @ vectors, torch.eye(20), atol=1e-4)


# Quantizer


def quantizer(**settings: Any) -> DeadZone:
    stage = DeadZone(**{"step": 0.5, "fine_step": 0.01, **settings})
    variance = np.array([9.0, 1.0, 1e-4], np.float32)
    stage.bind(calibration().geometry, Profile({"transform.variance.0": variance}, {}))
    return stage


def test_rounding_leaves_at_most_the_zone_and_keeps_whole_columns() -> None:
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(2)) * 3
    x[:, 0] = torch.arange(200) % 7 - 3
    for grade, zone, step in ((Grade.COARSE, 0.6, 0.5), (Grade.FINE, 0.5, 0.01)):
        coder = quantizer(keep=0.0)
        symbols = coder.quantize(x, range(1), grade)
        assert [(a.shape[1], a.dtype) for a in symbols] == coder.layout(range(1), grade)
        back = coder.dequantize(symbols, range(1), grade)
        assert torch.equal(back[:, 0], x[:, 0])
        assert float((back - x)[:, 1:].abs().max()) <= zone * step * 1.001


def test_coefficients_that_are_all_zeros_have_no_column() -> None:
    assert [columns for columns, _ in quantizer().layout(range(1), Grade.COARSE)] == [1, 2]
    assert [columns for columns, _ in quantizer().layout(range(1), Grade.FINE)] == [1, 3]
    back = quantizer().dequantize([np.zeros((2, 1), np.int16), np.ones((2, 2), np.int16)], range(1), Grade.COARSE)
    assert back.shape == (2, 4)
    assert (back[:, 3] == 0).all()


@pytest.mark.parametrize(("grade", "dtype", "most"), [(Grade.COARSE, np.int16, 32767), (Grade.FINE, np.int32, 1 << 24)])
def test_large_numbers_are_clipped_and_symbols_never_written_are_refused(grade: Grade, dtype: Any, most: int) -> None:
    coder = quantizer()
    q = coder.quantize(torch.full((1, 4), -1e9), range(1), grade)
    assert q[1].min() == -most
    assert coder.dequantize(q, range(1), grade).isfinite().all()
    with pytest.raises(DamagedArchive, match=str(-most - 1)):
        coder.dequantize([q[0], np.full(q[1].shape, -most - 1, dtype)], range(1), grade)


def test_marked_fine_tokens_are_coded_more_finely() -> None:
    coder = quantizer(sink_gain=8.0)
    x = torch.full((2, 4), 0.004)
    x[:, 0] = torch.tensor([12.0, 13.0])
    back = coder.dequantize(coder.quantize(x, range(1), Grade.FINE), range(1), Grade.FINE)
    assert float(back[0, 1]) == 0
    assert float(back[1, 1]) == pytest.approx(0.004, abs=0.01 / 16)


@given(step=st.floats(1e-3, 10), largest=st.floats(1e-3, 10), seed=st.integers(0, 99))
def test_to_round_twice_is_to_round_once_where_grids_are_nested(step: float, largest: float, seed: int) -> None:
    coder = quantizer(step=step, fine_step=largest, nested=True, keep=0.0)
    fine = coder.steps[Grade.FINE]
    ratio = step / fine
    assert ratio == pytest.approx(round(ratio))
    assert round(ratio) % 2 == 1
    assert fine <= largest * (1 + 1e-9) or (ratio == 1 and step <= largest * (1 + 1e-9))
    assert ratio < 3 or step / (ratio - 2) > largest * (1 - 1e-9), "a coarser one would do"
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(seed)) * 2 * step
    x[:, 0] = 0
    again = coder.dequantize(coder.quantize(x, range(1), Grade.FINE), range(1), Grade.FINE)
    once, twice = (coder.quantize(each, range(1), Grade.COARSE)[1] for each in (x, again))
    clear = ((x[:, 1:] / step).abs() % 1 - 0.5).abs().numpy() > 1e-3
    assert (once == twice)[clear].all()
    assert clear.mean() > 0.9


def test_grids_that_are_not_nested_move_what_they_round_twice() -> None:
    """What `nested` is for: at 1.92 fine steps to a coarse one nearly all that is not 0 in the fine grid becomes 1."""
    x = torch.full((1, 4), 0.3)
    for nested, expected in ((False, 1), (True, 0)):
        coder = quantizer(step=1.0, fine_step=1 / 1.92, nested=nested, keep=0.0)
        fine = coder.dequantize(coder.quantize(x, range(1), Grade.FINE), range(1), Grade.FINE)
        assert coder.quantize(fine, range(1), Grade.COARSE)[1][0, 1] == expected


# All together


def test_a_finer_step_restores_closer_and_the_fine_grade_closest() -> None:
    tokens, held = unseen()
    errors = []
    for step in (1.6, 0.4, 0.1):
        pipeline = Pipeline(recipe(quantize={**QUANTIZE, "step": step}), held.geometry, profile())
        for grade in (Grade.COARSE, Grade.FINE):
            restored = pipeline.quantize(held.layers, tokens, grade, restore=True)[1]
            pairs = [(held.layers[i], restored[i]) for i in range(3)]
            missed = [side for a, b in pairs for side in (a.keys - b.keys, a.values - b.values)]
            errors.append(energy(missed) / energy(sides(held, range(3))))
    coarse, fine = errors[::2], errors[1::2]
    assert coarse[0] > coarse[1] > coarse[2] > fine[0] * 0.99
    assert fine[0] == fine[1] == fine[2] < 0.02


def test_the_decoder_restores_what_the_encoder_restored() -> None:
    tokens, held = unseen()
    pipeline = Pipeline(recipe(), held.geometry, profile())
    symbols, restored = pipeline.quantize(held.layers, tokens, Grade.COARSE, restore=True)
    out = {i: LayerKV(torch.empty_like(kv.keys), torch.empty_like(kv.values)) for i, kv in enumerate(held.layers)}
    pipeline.dequantize(range(len(pipeline.groups)), symbols, tokens, Grade.COARSE, out)
    for i, kv in restored.items():
        assert torch.equal(out[i].keys, kv.keys)
        assert torch.equal(out[i].values, kv.values)


def test_noise_in_the_last_places_moves_nothing() -> None:
    tokens, held = unseen()
    pipeline = Pipeline(recipe(), held.geometry, profile())
    symbols, restored = pipeline.quantize(held.layers, tokens, Grade.COARSE, restore=True)
    noisy = Profile(
        {n: t * np.float32(1 + 4 * 2.0**-23) if t.dtype == np.float32 else t for n, t in profile().tensors.items()}, {}
    )
    out = {i: LayerKV(torch.empty_like(kv.keys), torch.empty_like(kv.values)) for i, kv in enumerate(held.layers)}
    Pipeline(recipe(), held.geometry, noisy).dequantize(range(2), symbols, tokens, Grade.COARSE, out)
    for i, kv in restored.items():
        assert torch.allclose(out[i].keys, kv.keys, atol=1e-3)
        assert torch.allclose(out[i].values, kv.values, atol=1e-3)


def test_a_fit_says_the_same_twice() -> None:
    again = fit_profile(recipe(), calibration())
    assert again.id == profile().id


class Int16(SymbolCoder):
    """The arrays' bytes as they are."""

    id = "test-int16/1"
    max_expansion = 1

    def encode(self, arrays: Sequence[np.ndarray], layers: range) -> bytes:
        return b"".join(np.ascontiguousarray(array, "<i2").tobytes() for array in arrays)

    def decode(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], groups: Sequence[range]
    ) -> None:
        for part, arrays in zip(parts, out, strict=True):
            at = 0
            for array in arrays:
                array[...] = np.frombuffer(part[at : at + array.nbytes], "<i2").reshape(array.shape)
                at += array.nbytes


stages.register("symbols", Int16)


class TestConformance(RecipeConformance):
    recipe = recipe(symbols={"id": "test-int16/1"})

    @pytest.fixture(autouse=True)
    def fitted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(self), "profile", profile())


def test_quiet_rows_in_nibbles_span_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    without = profile()
    monkeypatch.setattr(klt_module, "QUIET", 72)
    with_nibbles = fit_profile(recipe(), calibration())
    assert with_nibbles.tensors["transform.quiet.0"].shape == (120 - 72, 128 // 2)
    assert with_nibbles.nbytes < without.nbytes
    tokens, held = unseen()
    positions, layers = torch.from_numpy(tokens.positions), range(2)
    x = sides(held, layers)
    stage = WeightedKLT(layers_per_group=2, coefficients=120)
    missed = []
    for made in (without, with_nibbles):
        stage.bind(calibration().geometry, made)
        c = stage.forward([t.float() for t in x], layers, positions)[:, :121]
        again = stage.inverse(c, x, layers, positions)
        missed.append(energy([a.float() - b for a, b in zip(x, again, strict=True)]))
    assert missed[1] < 2 * missed[0] + 0.01 * energy(x)
    for name in ("transform.quiet.0", "transform.quiet_scale.0"):
        bent = {name: np.zeros_like(with_nibbles.tensors[name][:-1])}
        with pytest.raises(ProfileMismatch):
            stage.bind(calibration().geometry, Profile({**with_nibbles.tensors, **bent}, {}))


@pytest.mark.parametrize("widths", [[5, 6], [192, 192], [1]])
def test_nibbles_come_back_within_half_a_step(widths: list[int]) -> None:
    matrix = torch.randn(20, sum(widths), generator=torch.Generator().manual_seed(3))
    matrix[3] = 0
    pairs, scales = in_nibbles(matrix, widths)
    assert pairs.dtype == np.uint8
    assert pairs.shape == (20, -(-sum(widths) // 2))
    again = from_nibbles(pairs, scales, widths)
    step = torch.from_numpy(scales).repeat_interleave(torch.tensor(widths), dim=1)
    assert ((again - matrix).abs() <= 0.5001 * step).all()
    for wrong in (pairs[:, :-1], pairs.astype(np.int8), pairs & 0xF0, pairs & 0x0F):
        with pytest.raises(ValueError, match="nibble"):
            from_nibbles(wrong, scales, widths)


# What is refused


def test_stages_refuse_settings_and_profiles_that_do_not_fit() -> None:
    for wrong in ({"rank": 0}, {"embedding": -1}, {"layers_per_group": 5000}):
        with pytest.raises(InvalidRecipe, match="expected a whole number"):
            LinearPredictor(**wrong)
    with pytest.raises(InvalidRecipe, match="coefficients"):
        WeightedKLT(coefficients=0)
    for wrong in ({"step": 0.0}, {"step": float("nan")}, {"zone": 0.4}, {"whole": -1}):
        with pytest.raises(InvalidRecipe, match=next(iter(wrong))):
            DeadZone(**{"step": 1.0, "fine_step": 1.0, **wrong})
    with pytest.raises(InvalidRecipe, match="nested"):
        stages.build("quantize", {"id": "deadzone/1", "step": 1.0, "fine_step": 1.0, "nested": 1})
    for stage in (LinearPredictor(), WeightedKLT(), DeadZone(step=1.0, fine_step=0.1)):
        with pytest.raises(ProfileMissing):
            stage.bind(calibration().geometry, None)
        with pytest.raises(ProfileMismatch):
            stage.bind(calibration().geometry, Profile({}, {}))


@pytest.mark.parametrize(
    "name", ["predict.down.0", "predict.table_scale", "transform.basis.0", "transform.loud.2", "transform.root.1"]
)
def test_tensors_of_another_shape_are_refused(name: str) -> None:
    bent = {name: profile().tensors[name][:-1]}
    with pytest.raises(ProfileMismatch):
        Pipeline(recipe(), calibration().geometry, Profile({**profile().tensors, **bent}, {}))


def test_without_a_model_there_is_no_metric() -> None:
    without = Calibration(calibration().identity, calibration().geometry, calibration().samples)
    with pytest.raises(InvalidInput, match="calibrate with a model"):
        fit_profile(recipe(), without)
