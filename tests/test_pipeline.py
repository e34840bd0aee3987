"""The closed loop, with stages small enough to check by hand: encoder and decoder agree, and errors stay put."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvcellar
from kvcellar import stages
from kvcellar.cache import KVCache, LayerKV, allocate
from kvcellar.errors import InvalidRecipe
from kvcellar.pipeline import Pipeline
from kvcellar.recipe import Window
from kvcellar.stages import Context
from kvcellar.tokens import Tokens
from models import bits, same_bits
from toystages import PREDICT, QUANTIZE, STEP, TRANSFORM, Coarse, FromShallower, exact, lossy

LAYERS = 5  # two groups of two layers and a last one of one
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def restored_by(monkeypatch: pytest.MonkeyPatch) -> list[list[list[Tensor]]]:
    """For each run of the loop, encoder or decoder, the groups it had restored at its end."""
    runs: list[list[list[Tensor]]] = []

    class Recorded(Context):
        def __init__(self, *known: np.ndarray):
            super().__init__(*known)
            runs.append(self.restored)

    monkeypatch.setattr("kvcellar.tokens.Context", Recorded)
    return runs


def _kv(pairs: list[tuple[Tensor, Tensor]]) -> KVCache:
    return KVCache(tuple(LayerKV(keys[0], values[0]) for keys, values in pairs))


def _sides(layers: Iterable[LayerKV]) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in layers]


def _decoded(pipeline: Pipeline, parts: list[bytes], ids: np.ndarray, groups: list[int] | None = None) -> Any:
    """Layers by index, of all groups or of `groups` alone."""
    groups = list(range(len(pipeline.groups))) if groups is None else groups
    out = allocate(pipeline.geometry, {i: len(ids) for group in groups for i in pipeline.groups[group]})
    pipeline.decode(groups, [[memoryview(parts[group]) for group in groups]], [Tokens.following(ids, 0)], out)
    return out


def _errors(kv: KVCache, out: dict[int, LayerKV]) -> list[float]:
    """Largest error of each layer."""
    pairs = [(kv.layers[i], out[i]) for i in range(len(kv.layers))]
    return [max((a - b).abs().max().item() for a, b in ((x.keys, y.keys), (x.values, y.values))) for x, y in pairs]


def test_groups_are_layers_in_order_and_the_last_may_be_smaller(make_cache: Callable) -> None:
    geometry = _kv(make_cache(layers=LAYERS)).geometry
    assert Pipeline(lossy(), geometry).groups == [range(2), range(2, 4), range(4, 5)]
    assert Pipeline(lossy(predict=None), geometry).groups == [range(i, i + 1) for i in range(LAYERS)]
    wide = lossy(predict={**PREDICT, "layers_per_group": 8})
    assert Pipeline(wide, geometry).groups == [range(5)]
    assert not Pipeline(lossy(), geometry).lossless
    assert Pipeline(exact(), geometry).lossless


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transform", [None, TRANSFORM])
def test_the_decoder_restores_what_the_encoder_went_on_from(
    make_cache: Callable, make_ids: Callable, restored_by: list, dtype: torch.dtype, transform: dict | None
) -> None:
    kv, ids = _kv(make_cache(layers=LAYERS, dtype=dtype)), np.array(make_ids(40))
    pipeline = Pipeline(lossy(transform=transform), kv.geometry)
    _decoded(pipeline, pipeline.encode(kv, Tokens.following(ids, 0)), ids)
    encoder, decoder = restored_by
    assert [len(group) for group in decoder] == [4, 4, 2]
    assert [len(group) for group in encoder] == [4, 4], "nothing is predicted from the last group"
    for one, other in zip(chain(*encoder), chain(*decoder[:2]), strict=True):
        assert one.dtype == other.dtype == dtype
        assert torch.equal(bits(one), bits(other))
    assert not torch.equal(encoder[1][0], kv.layers[2].keys)  # it is the reconstruction, not the original


def test_errors_do_not_add_up_over_groups(make_cache: Callable, make_ids: Callable) -> None:
    kv, ids = _kv(make_cache(layers=16)), np.array(make_ids(40))
    pipeline = Pipeline(lossy(), kv.geometry)
    out = _decoded(pipeline, pipeline.encode(kv, Tokens.following(ids, 0)), ids)
    errors = _errors(kv, out)
    assert max(errors) <= STEP / 2 * (1 + 1e-4)
    assert min(errors) > STEP / 4  # every group was really rounded


def test_predicting_from_the_original_would_add_errors_up(
    make_cache: Callable, make_ids: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same stages in an open loop, to show that the test above can fail."""
    kv, ids = _kv(make_cache(layers=16)), np.array(make_ids(40))
    pipeline = Pipeline(lossy(), kv.geometry)
    groups = iter(pipeline.groups)

    def original(symbols: object, p: object, out: list[Tensor], at: object) -> None:
        sides = (side for i in next(groups) for side in (kv.layers[i].keys, kv.layers[i].values))
        for goal, side in zip(out, sides, strict=True):
            goal.copy_(side)

    with monkeypatch.context() as patched:
        patched.setattr(pipeline.residual, "decode", original)
        parts = pipeline.encode(kv, Tokens.following(ids, 0))
    assert _errors(kv, _decoded(pipeline, parts, ids))[-1] > STEP


def test_a_transform_works_on_the_residual_and_is_undone(make_cache: Callable, make_ids: Callable) -> None:
    kv, ids = _kv(make_cache(layers=LAYERS, heads=3, width=4)), np.array(make_ids(40))
    pipeline = Pipeline(lossy(transform=TRANSFORM), kv.geometry)
    errors = _errors(kv, _decoded(pipeline, pipeline.encode(kv, Tokens.following(ids, 0)), ids))
    assert max(errors) <= STEP / 4 * (1 + 1e-4)  # coefficients are twice the residual
    assert min(errors) > STEP / 16


def test_a_quantizer_alone_works_layer_by_layer(make_cache: Callable, make_ids: Callable) -> None:
    source = [make_cache(layers=1, heads=h, width=w, seed=h)[0] for h, w in ((1, 4), (3, 8), (2, 2))]
    kv, ids = _kv(source), np.array(make_ids(40))
    pipeline = Pipeline(lossy(predict=None), kv.geometry)
    parts = pipeline.encode(kv, Tokens.following(ids, 0))
    assert len(parts) == 3
    assert STEP / 4 < max(_errors(kv, _decoded(pipeline, parts, ids))) <= STEP / 2 * (1 + 1e-4)
    alone = _decoded(pipeline, parts, ids, [1])
    assert list(alone) == [1]
    assert torch.equal(alone[1].keys, torch.round(kv.layers[1].keys / STEP) * STEP)


def test_tokens_and_positions_reach_the_predictor(make_cache: Callable, make_ids: Callable) -> None:
    kv, ids = _kv(make_cache(layers=2)), np.array(make_ids(40))
    pipeline = Pipeline(lossy(predict={"id": "test-tokens/1"}), kv.geometry)
    out = allocate(kv.geometry, {0: 40, 1: 40})
    for first, expected in ((100, True), (0, False)):
        parts = [memoryview(part) for part in pipeline.encode(kv, Tokens.following(ids, 100))]
        pipeline.decode([0, 1], [parts], [Tokens.following(ids, first)], out)
        assert (max(_errors(kv, out)) <= STEP / 2 * (1 + 1e-3)) == expected


@pytest.mark.parametrize(
    ("layers", "predicted", "alone"),
    [([4], [0, 1, 2], [2]), ([2], [0, 1], [1]), ([0, 1], [0], [0]), ([0, 4], [0, 1, 2], [0, 2]), ([], [], [])],
)
def test_a_layer_needs_the_shallower_groups_when_predicted(
    make_cache: Callable, layers: list[int], predicted: list[int], alone: list[int]
) -> None:
    geometry = _kv(make_cache(layers=LAYERS)).geometry
    assert Pipeline(lossy(transform=TRANSFORM), geometry).needed(layers) == predicted
    assert Pipeline(lossy(predict=None, transform=TRANSFORM), geometry).needed(layers) == alone


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.75, -3.0])
def test_a_predictor_without_a_quantizer_is_bit_exact(
    make_cache: Callable, make_ids: Callable, dtype: torch.dtype, factor: float
) -> None:
    source = make_cache(layers=LAYERS, dtype=dtype)
    source[1][0][0, 0, 0, :5] = torch.tensor([float("inf"), float("-inf"), -0.0, 0.0, 1e-40], dtype=dtype)
    kv, ids = _kv(source), np.array(make_ids(40))
    pipeline = Pipeline(exact(predict={**PREDICT, "factor": factor}), kv.geometry)
    out = _decoded(pipeline, pipeline.encode(kv, Tokens.following(ids, 0)), ids)
    assert same_bits(_sides(out[i] for i in range(LAYERS)), _sides(kv.layers))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_exact_prediction_of_nan(make_cache: Callable, make_ids: Callable, dtype: torch.dtype) -> None:
    """The encoder sees slices of a larger cache, the decoder memory of its own: NaN must predict alike in both."""
    source = make_cache(layers=LAYERS, tokens=101, width=15, dtype=dtype)
    for keys, values in source:
        words = bits(keys[0, 1]).flatten()
        words[::7] = bits(torch.tensor([float("nan")], dtype=dtype)) + torch.arange(len(words[::7])).to(words.dtype) % 3
        keys[0, 1] = words.view(dtype).view(keys[0, 1].shape)
        values[0, 0, 3:9] = float("nan")
    kv, ids = _kv(source).tokens(3, 44), np.array(make_ids(41))
    pipeline = Pipeline(exact(), kv.geometry)
    out = _decoded(pipeline, pipeline.encode(kv, Tokens.following(ids, 0)), ids)
    assert same_bits(_sides(out[i] for i in range(LAYERS)), _sides(kv.layers))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (lossy(quantize=None, transform=TRANSFORM), "transforms without a quantizer"),
        (lossy(transform={**TRANSFORM, "layers_per_group": 3}), r"group layers by \[2, 3\]"),
        (lossy(reduce={"id": "random/1"}), "reduces tokens"),
        (exact(window=Window(sinks=4, recent=32)), "fine window without a quantizer"),
        (lossy(predict={"id": "nothing/1"}), "unknown predict stage 'nothing/1'; known: .*test-shallower/1"),
        (lossy(transform={"id": FromShallower.id}), "unknown transform stage"),  # a predictor is no transform
        (lossy(quantize={"id": "byteplanes-zstd/1"}), "unknown quantize stage"),
        (lossy(symbols={"id": Coarse.id}), "unknown symbols stage"),
        (exact(symbols={"id": "byteplanes-zstd/1", "level": 9}), "no setting level"),
    ],
)
def test_stages_that_do_not_fit_together(
    make_cache: Callable, tmp_path: Any, recipe: kvcellar.Recipe, message: str
) -> None:
    source = make_cache(layers=LAYERS)
    with pytest.raises(InvalidRecipe, match=message):
        Pipeline(recipe, _kv(source).geometry)
    with pytest.raises(InvalidRecipe, match=message):
        kvcellar.save(tmp_path / "a.kvc", source, tokens=range(40), identity="m", recipe=recipe)
    assert not list(tmp_path.iterdir())


def test_an_id_is_registered_once() -> None:
    class Impostor(stages.Quantizer):
        id = Coarse.id

    stages.register("quantize", Coarse)  # the same class again does no harm
    with pytest.raises(InvalidRecipe, match="exists already"):
        stages.register("quantize", Impostor)
    assert type(stages.build("quantize", QUANTIZE)) is Coarse
    assert stages.build("quantize", None) is None
