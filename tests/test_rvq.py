"""Residual vector quantization: codebooks from samples, codes and their columns, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcellar import stages
from kvcellar.cache import KVCache, LayerKV
from kvcellar.calibrate import Calibration, Sample, fit_profile
from kvcellar.errors import (
    DamagedArchive,
    InvalidInput,
    InvalidRecipe,
    ProfileMismatch,
    ProfileMissing,
    UnsupportedCache,
)
from kvcellar.frontends.transformers import take_cache
from kvcellar.geometry import HALF, Geometry, LayerGeometry, SideGeometry
from kvcellar.identity import Identity
from kvcellar.placing import Angles, place
from kvcellar.profile import Profile
from kvcellar.quantize import codebooks
from kvcellar.quantize.codebooks import Residuals, Vectors, fit_stage, kmeans, nearest
from kvcellar.quantize.coefficients import flatten
from kvcellar.quantize.rvq import ResidualVQ
from kvcellar.quantize.turbo import TurboQuant
from kvcellar.recipe import Recipe
from kvcellar.rope import Rope
from kvcellar.stages import Grade
from models import new_llama, prefill, prompt

ONE = range(1)
SMALL: dict[str, Any] = {"key_stages": 3, "value_stages": 1, "entries": 16}


def clustered(tokens: int, heads: int, width: int, seed: int, clusters: int = 12) -> Tensor:
    """(H, T, D) around a few centres for each head, the same centres for all seeds."""
    centres = torch.randn(heads, clusters, width, generator=torch.Generator().manual_seed(heads * width)) * 3
    rng = torch.Generator().manual_seed(seed)
    which = torch.randint(clusters, (heads, tokens), generator=rng)
    return centres[torch.arange(heads)[:, None], which] + torch.randn(heads, tokens, width, generator=rng)


def small_cache(tokens: int, seed: int, layers: int = 2) -> KVCache:
    sides = [
        (clustered(tokens, 2, 8, seed + 10 * i), clustered(tokens, 3, 6, seed + 10 * i + 5)) for i in range(layers)
    ]
    return KVCache(tuple(LayerKV(k, v.half()) for k, v in sides))


def _itself(cache: KVCache) -> KVCache:
    return cache


def calibration(folder: Path | None = None, samples: int = 3, tokens: int = 200) -> Calibration:
    caches = [small_cache(tokens, seed) for seed in range(samples)]
    given = [Sample(np.full(tokens, i), "test", partial(_itself, c)) for i, c in enumerate(caches)]
    return Calibration(Identity.named("test"), caches[0].geometry, given, folder=folder)


def fitted(**how: Any) -> ResidualVQ:
    made, coder = calibration(), ResidualVQ(**{**SMALL, **how})
    return bound(coder, made.geometry, coder.fit(made, {}))


def bound(coder: ResidualVQ, geometry: Geometry, tensors: Mapping[str, np.ndarray]) -> ResidualVQ:
    coder.bind(geometry, Profile({f"quantize.{name}": value for name, value in tensors.items()}, {}))
    return coder


@pytest.fixture(scope="module")
def coder() -> ResidualVQ:
    return fitted()


@pytest.fixture(scope="module")
def x() -> Tensor:
    """Layer 0 of a cache that is no sample, (T, C)."""
    layer = small_cache(150, 99).layers[0]
    return flatten([layer.keys, layer.values.float()])


def through(coder: ResidualVQ, x: Tensor, layers: range = ONE) -> Tensor:
    return coder.dequantize(coder.quantize(x, layers, Grade.COARSE), layers, Grade.COARSE)


def error(x: Tensor, y: Tensor) -> float:
    return float(((x - y) ** 2).sum() / (x**2).sum())


# Codebooks.


def test_kmeans_finds_clusters_that_lie_apart() -> None:
    centres = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)) * 100
    x = (centres[torch.arange(2000) % 20] + torch.randn(2000, 4, generator=torch.Generator().manual_seed(2))).float()
    index, distance = nearest(x, kmeans(x, 20, np.random.default_rng(0)))
    assert float(distance.mean()) < 4.5, "four numbers of variance 1"
    assert len(torch.unique(index)) == 20


def test_every_entry_is_used_though_many_vectors_are_equal() -> None:
    x = torch.cat([torch.zeros(900, 3), torch.randn(100, 3, generator=torch.Generator().manual_seed(0))])
    book = kmeans(x, 32, np.random.default_rng(0))
    assert len(torch.unique(nearest(x, book)[0])) > 28


def test_an_entry_nobody_is_nearest_to_moves_to_the_vector_coded_worst() -> None:
    x = torch.tensor([[0.0], [0.2], [0.4], [9.0]])
    moved = codebooks._improved(x, torch.tensor([[0.1], [500.0]]))
    torch.testing.assert_close(moved, torch.tensor([[2.4], [9.0]]))


def test_nearest_is_nearest() -> None:
    x, book = (torch.randn(n, 5, generator=torch.Generator().manual_seed(n)) for n in (700, 33))
    index, distance = nearest(x, book)
    expected = ((x[:, None] - book) ** 2).sum(2).min(1)
    assert torch.equal(index, expected.indices)
    torch.testing.assert_close(distance, expected.values, rtol=1e-4, atol=1e-4)


def _fit_stages(x: torch.Tensor, stages: int, entries: int) -> np.ndarray:
    residuals = Residuals(lambda: [x.clone()])
    books = np.empty((1, 0, entries, x.shape[1]), np.float16)
    for stage in range(stages):
        books = np.concatenate([books, fit_stage(residuals.after(books)[0], entries, (0, stage))[None, None]], axis=1)
    return books[0]


def test_each_stage_is_fitted_on_what_the_one_before_leaves() -> None:
    x = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0))
    books = _fit_stages(x, 4, 16)
    assert books.shape == (4, 16, 8)
    assert books.dtype == np.float16
    errors, rest = [], x.clone()
    for book in torch.from_numpy(books).float():
        rest -= book[nearest(rest, book)[0]]
        errors.append(float((rest**2).mean()))
    assert all(late < 0.75 * early for early, late in pairwise(errors))


def test_fit_is_the_same_again_and_says_so_by_its_bytes() -> None:
    first, second = (ResidualVQ(**SMALL).fit(calibration(), {}) for _ in range(2))
    assert set(first) == {"key.0", "value.0", "key.1", "value.1"}
    assert first["key.0"].shape == (2, 3, 16, 8)
    assert first["value.1"].shape == (3, 1, 16, 6)
    assert all(value.dtype == np.float16 for value in first.values())
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["key.0"][0], first["key.0"][1])


def test_recipes_of_fewer_stages_take_what_was_fitted_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ResidualVQ(**SMALL).fit(calibration(tmp_path), {})
    monkeypatch.setattr("kvcellar.quantize.rvq.fit_stage", None)
    fewer = ResidualVQ(**{**SMALL, "key_stages": 2}).fit(calibration(tmp_path), {})
    assert np.array_equal(fewer["key.1"], more["key.1"][:, :2])


@pytest.mark.parametrize("side", ["key", "value"])
def test_a_side_without_a_number_of_stages_stays_fine(side: str) -> None:
    how = {**SMALL, f"{side}_stages": None}
    coder = ResidualVQ(**how)
    books = coder.fit(calibration(), {})
    assert all(not name.startswith(side) for name in books)
    geometry = calibration().geometry
    coder.bind(geometry, Profile({f"quantize.{name}": value for name, value in books.items()}, {}))
    layers, width = range(2), sum(layer.numbers_per_token for layer in geometry.layers)
    x = torch.randn(20, width, generator=torch.Generator().manual_seed(1))
    symbols = coder.quantize(x, layers, Grade.COARSE)
    assert [(a.shape[1], a.dtype.type) for a in symbols] == coder.layout(layers, Grade.COARSE)
    y = coder.dequantize(symbols, layers, Grade.COARSE)
    first, columns = geometry.layers[0], {}
    columns["key"] = slice(first.key.numbers_per_token)
    columns["value"] = slice(first.key.numbers_per_token, first.numbers_per_token)
    for name, where in columns.items():
        lost = float((x - y)[:, where].square().sum() / x[:, where].square().sum())
        assert (lost < 1e-3) == (name == side)


def test_stages_for_neither_side_are_refused() -> None:
    with pytest.raises(InvalidRecipe, match="neither"):
        ResidualVQ(key_stages=None, value_stages=None)


def test_pooled_codebooks_are_shared() -> None:
    how = {**SMALL, "pooled": True}
    books = ResidualVQ(**how).fit(calibration(), {})
    assert {name: value.shape for name, value in books.items()} == {"key": (1, 3, 16, 8), "value": (1, 1, 16, 6)}


def test_fit_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    limit = 8

    def counted(*arguments: Any) -> Any:
        if len(made) == limit:
            raise KeyboardInterrupt
        made.append(1)
        return fit_stage(*arguments)

    monkeypatch.setattr("kvcellar.quantize.rvq.fit_stage", counted)
    with pytest.raises(KeyboardInterrupt):
        ResidualVQ(**SMALL).fit(calibration(tmp_path), {})
    limit = 1000
    again = ResidualVQ(**SMALL).fit(calibration(tmp_path), {})
    assert len(made) == 8 + 3 + 9, "3 stages of 2 heads' keys were there; of 3 heads' values not all"
    whole = ResidualVQ(**SMALL).fit(calibration(), {})
    assert all(np.array_equal(again[name], whole[name]) for name in whole)
    ResidualVQ(**{**SMALL, "entries": 8}).fit(calibration(tmp_path), {})
    assert len(made) > 20 + 10, "other settings are another fit"


def test_layers_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ResidualVQ(**SMALL).fit(calibration(), {})
    monkeypatch.setattr(codebooks, "HELD_BYTES", 1)
    parts = ResidualVQ(**SMALL).fit(calibration(), {})
    assert all(np.array_equal(parts[name], whole[name]) for name in whole)


def test_sinks_are_left_out_of_the_samples() -> None:
    made = calibration(samples=2, tokens=20)
    vectors = Vectors(made, {})
    expected = torch.cat([sample.load().layers[1].values[2, 4:].float() for sample in made.samples])
    assert torch.equal(vectors.of(1, False, 2, 1000), expected)
    assert torch.equal(vectors.of(1, False, 2, 8), expected[::4])


def test_codebooks_behind_rope_see_keys_without_their_turn() -> None:
    model = new_llama()
    kv = take_cache(prefill(model, [5] * 40))
    made = Calibration(Identity.named("t"), kv.geometry, [Sample(np.full(40, 5), "t", lambda: kv)], model=model)
    state = {f"transform.{name}": value for name, value in Rope().fit(made, {}).items()}
    behind, before = Vectors(made, state), Vectors(made, {})
    keys = behind.of(0, True, 1, 99)
    torch.testing.assert_close(keys, keys[:1].expand(36, 16), rtol=1e-4, atol=1e-4)
    assert float(before.of(0, True, 1, 99).std(0).max()) > 0.1, "else the case tests nothing"
    assert torch.equal(behind.of(0, False, 1, 99), before.of(0, False, 1, 99))
    assert behind.behind != before.behind


def test_a_whole_recipe_is_fitted() -> None:
    model = new_llama()
    kv = [take_cache(prefill(model, prompt(60, seed))) for seed in range(2)]
    samples = [Sample(np.arange(60) + i, "t", partial(_itself, c)) for i, c in enumerate(kv)]
    made = Calibration(Identity.named("t"), kv[0].geometry, samples, model=model)
    recipe = Recipe("f", {"id": "map/1"}, transform={"id": Rope.id}, quantize={"id": ResidualVQ.id, **SMALL})
    profile = fit_profile(recipe, made)
    assert profile.metadata["fitted"]["quantize"] == {"id": "rvq/1", **SMALL, "pooled": False}  # type: ignore[index]
    transform, quantizer = (stages.build(kind, getattr(recipe, kind)) for kind in ("transform", "quantize"))
    transform.bind(made.geometry, profile)
    quantizer.bind(made.geometry, profile)
    group, positions = [kv[0].layers[1].keys, kv[0].layers[1].values], torch.arange(60)
    flat = transform.forward(group, range(1, 2), positions)
    back = transform.inverse(through(quantizer, flat, range(1, 2)), group, range(1, 2), positions)
    assert error(group[0], back[0]) < 0.25
    assert error(group[1], back[1]) < 0.6


# Codes.


def plain(x: np.ndarray, books: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Greedy codes and sums of one head's vectors, in float64."""
    rest, codes = x.astype(np.float64), []
    for book in books.astype(np.float64):
        codes.append(((rest[:, None] - book) ** 2).sum(2).argmin(1))
        rest = rest - book[codes[-1]]
    return np.stack(codes, 1), x - rest


def test_kernels_do_what_the_plain_form_says(x: Tensor) -> None:
    coder = fitted(beam=1)
    (codes,) = coder.quantize(x, ONE, Grade.COARSE)
    back = coder.dequantize([codes], ONE, Grade.COARSE).numpy()
    for head in range(2):
        columns = slice(8 * head, 8 * head + 8)
        expected, total = plain(x[:, columns].numpy(), coder.books["key.0"].entries[3 * head : 3 * head + 3])
        same = (codes[:, 3 * head : 3 * head + 3] == expected).all(1)
        assert same.mean() > 0.98, "others are as near to two entries"
        np.testing.assert_allclose(back[same, columns], total[same], rtol=1e-4, atol=1e-4)


def test_a_beam_comes_closer_and_is_best_when_it_holds_all(x: Tensor) -> None:
    books = fitted(entries=4, key_stages=2).books["key.0"].entries[2:].astype(np.float64)
    every = (books[0][:, None] + books[1][None]).reshape(16, 8)
    best = ((x[:, None, 8:16].numpy() - every) ** 2).sum(2).min(1).sum()
    found = [
        float(((x - through(fitted(entries=4, key_stages=2, beam=beam), x))[:, 8:16] ** 2).sum()) for beam in (1, 2, 16)
    ]
    assert found[0] > found[1] >= found[2]
    assert found[2] == pytest.approx(best, rel=1e-4)


def test_more_stages_come_closer(x: Tensor) -> None:
    errors = [error(x[:, :16], through(fitted(key_stages=n), x)[:, :16]) for n in range(5)]
    assert errors[0] == 1, "no stages, no numbers"
    assert all(late < 0.9 * early for early, late in pairwise(errors))
    pooled = error(x[:, :16], through(fitted(key_stages=3, pooled=True), x)[:, :16])
    assert pooled > errors[3], "heads differ, so codebooks of their own are better"


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    tokens=st.integers(0, 40),
    ahead=st.integers(0, 3),
    turning=st.booleans(),
    scale=st.sampled_from([1.0, 1e5, 1e-6]),
    seed=st.integers(0, 9),
)
def test_straight_into_a_cache_as_by_way_of_coefficients(
    dtype: torch.dtype, tokens: int, ahead: int, turning: bool, scale: float, seed: int
) -> None:
    """The same bits; and nothing is written beside them, nor at all into a cache of another dtype."""
    rng = np.random.default_rng(seed)
    maker, of = fitted(), small_cache(4, 0).geometry
    scaled = {name: replace(books, entries=books.entries * np.float32(scale)) for name, books in maker.books.items()}
    maker.books = scaled
    columns = sum(count for count, _ in maker.layout(ONE, Grade.COARSE))
    codes = [rng.integers(0, SMALL["entries"], (tokens, columns)).astype(np.uint8)]
    angles = rng.uniform(0, 7, (tokens, 3)).astype(np.float32)
    turns = [Angles(np.cos(angles), np.sin(angles), HALF) if turning else None, None]
    sides = [of.layers[0].key, of.layers[0].value]
    rooms = [[torch.full((s.heads, ahead + tokens + 2, s.width), 7.0, dtype=dtype) for s in sides] for _ in range(2)]
    straight, plainly = ([room[:, ahead : ahead + tokens] for room in pair] for pair in rooms)
    assert maker.dequantize_into(codes, ONE, Grade.COARSE, straight, turns)
    assert place(maker.dequantize(codes, ONE, Grade.COARSE), plainly, turns)
    for one, other in zip(*rooms, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
    wide = [torch.zeros(s.heads, tokens, s.width) for s in sides]
    assert not maker.dequantize_into(codes, ONE, Grade.COARSE, wide, turns)


@pytest.mark.parametrize("how", [{}, {"pooled": True}, {"value_stages": 0}, {"entries": 257}])
def test_a_column_belongs_to_one_head(how: dict[str, Any]) -> None:
    both, coder = range(2), fitted(**how)
    layers = [small_cache(30, 99).layers[i] for i in both]
    flat = torch.cat([flatten([kv.keys, kv.values.float()]) for kv in layers], dim=1)
    symbols = coder.quantize(flat, both, Grade.COARSE)
    ((columns, dtype),) = coder.layout(both, Grade.COARSE)
    assert symbols[0].shape == (30, columns)
    assert symbols[0].dtype == dtype == (np.uint16 if "entries" in how else np.uint8)
    before = coder.dequantize(symbols, both, Grade.COARSE)
    seen = set()
    for layer in both:
        for side, heads, count, width, start in (("key", 2, 3, 8, 0), ("value", 3, coder.stages["value"], 6, 16)):
            for head in range(heads):
                for stage in range(count):
                    array, column = coder.column(both, layer, side, head, stage)
                    seen.add(column)
                    changed = symbols[0].copy()
                    changed[:, column] = (changed[:, column] + 1) % coder.entries
                    moved = (coder.dequantize([changed], both, Grade.COARSE) != before).any(0).nonzero().flatten()
                    first = 34 * layer + start + width * head
                    assert array == 0
                    assert first <= moved.min() <= moved.max() < first + width
    assert seen == set(range(columns))


@pytest.mark.parametrize(
    "place", [(1, "key", 0, 0), (0, "key", 2, 0), (0, "key", 0, 3), (0, "value", -1, 0), (0, "keys", 0, 0)]
)
def test_columns_that_are_not_there(coder: ResidualVQ, place: tuple[int, str, int, int]) -> None:
    with pytest.raises(InvalidInput):
        coder.column(ONE, *place)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 9))
@settings(max_examples=20, deadline=None)
def test_field_g29_bulk_and_append_make_the_same_codes(runs: list[int], beam: int) -> None:
    made = calibration()
    coder = bound(ResidualVQ(**SMALL, beam=beam), made.geometry, _BOOKS)
    layer = small_cache(sum(runs), 98).layers[0]
    x = flatten([layer.keys, layer.values.float()])
    whole = coder.quantize(x, ONE, Grade.COARSE)[0]
    parts = [coder.quantize(run, ONE, Grade.COARSE)[0] for run in torch.split(x, runs)]
    assert np.array_equal(whole, np.concatenate(parts))


_BOOKS = ResidualVQ(**SMALL).fit(calibration(), {})


def test_the_fine_grade_is_turboquant(coder: ResidualVQ, x: Tensor) -> None:
    turbo = TurboQuant(bits=8)
    turbo.bind(calibration().geometry, None)
    symbols, expected = coder.quantize(x, ONE, Grade.FINE), turbo.quantize(x, ONE, Grade.FINE)
    assert all(np.array_equal(a, b) for a, b in zip(symbols, expected, strict=True))
    assert coder.layout(ONE, Grade.FINE) == turbo.layout(ONE, Grade.FINE)
    assert error(x, coder.dequantize(symbols, ONE, Grade.FINE)) < 1e-4


@pytest.mark.parametrize("value", [0.0, 3.25, -1e-8, 65504.0, 3e38])
def test_field_g26_finite_in_finite_out(coder: ResidualVQ, value: float) -> None:
    assert through(coder, torch.full((3, 34), value)).isfinite().all()


def test_no_tokens_and_no_values() -> None:
    sides = SideGeometry(1, 4, "float32"), SideGeometry(1, 0, "float32")
    geometry = Geometry((LayerGeometry(*sides),))
    coder = bound(ResidualVQ(**SMALL), geometry, {"key.0": np.ones((1, 3, 16, 4), np.float16)})
    assert through(coder, torch.empty(0, 4)).shape == (0, 4)
    assert through(coder, torch.ones(2, 4)).shape == (2, 4)


# What is refused.


@pytest.mark.parametrize(
    "bad",
    [
        {"key_stages": 17},
        {"value_stages": -1},
        {"entries": 1},
        {"entries": 65537},
        {"entries": True},
        {"beam": 0},
        {"beam": 2.0},
        {"pooled": 1},
        {"fine_bits": 1},
        {"depth": 2},
    ],
)
def test_wrong_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecipe):
        stages.build("quantize", {"id": ResidualVQ.id, **bad})


@pytest.mark.parametrize(
    "change",
    [
        {"key.1": None},
        {"key.0": np.zeros((2, 3, 16, 8), np.float32)},
        {"key.0": np.zeros((2, 3, 15, 8), np.float16)},
        {"key.0": np.zeros((1, 3, 16, 8), np.float16)},
        {"key.0": np.zeros((2, 3, 128), np.float16)},
        {"value.1": np.full((3, 1, 16, 6), np.inf, np.float16)},
    ],
)
def test_profiles_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    tensors = {name: value for name, value in {**_BOOKS, **change}.items() if value is not None}
    with pytest.raises(ProfileMismatch):
        bound(ResidualVQ(**SMALL), calibration().geometry, tensors)
    with pytest.raises(ProfileMissing):
        ResidualVQ(**SMALL).bind(calibration().geometry, None)


def test_codes_that_were_never_written_are_noticed(coder: ResidualVQ, x: Tensor) -> None:
    (codes,) = coder.quantize(x, ONE, Grade.COARSE)
    codes[7, 2] = 16
    with pytest.raises(DamagedArchive, match="code 16; there are 16 entries"):
        coder.dequantize([codes], ONE, Grade.COARSE)


def test_coefficients_of_another_width_are_refused(coder: ResidualVQ) -> None:
    with pytest.raises(InvalidRecipe, match="got 33 coefficients"):
        coder.quantize(torch.zeros(2, 33), ONE, Grade.COARSE)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(InvalidInput, match="for a codebook of 1,024 entries: calibrate with more tokens"):
        ResidualVQ(entries=1024).fit(calibration(), {})
    for state in ({"predict.level": np.ones(2)}, {"transform.basis": np.ones(2)}):
        with pytest.raises(InvalidRecipe, match="behind rope/1 only"):
            ResidualVQ(**SMALL).fit(calibration(), state)
    layers = [LayerKV(clustered(99, 1, w, w), clustered(99, 1, 4, w)) for w in (4, 6)]
    cache = KVCache(tuple(layers))
    made = Calibration(Identity.named("t"), cache.geometry, [Sample(np.arange(99), "t", lambda: cache)])
    with pytest.raises(UnsupportedCache, match="keys of the layers differ in width"):
        ResidualVQ(**SMALL, pooled=True).fit(made, {})
    ResidualVQ(**SMALL).fit(made, {})
