"""`causal/1` and recipe exact-small: every bit comes back, in fewer bytes, and nothing but integers decides."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvcellar
import models
import plaincausal
from causalcase import SETTINGS, profile_for
from kvcellar.cache import KVCache, LayerKV, allocate
from kvcellar.calibrate import Calibration, Sample, fit_profile
from kvcellar.errors import (
    DamagedArchive,
    InvalidInput,
    InvalidRecipe,
    ProfileMismatch,
    ProfileMissing,
    UnsupportedCache,
)
from kvcellar.frontends.fingerprint import identity_of_model
from kvcellar.frontends.transformers import take_cache
from kvcellar.geometry import Geometry, LayerGeometry, SideGeometry
from kvcellar.pipeline import Pipeline
from kvcellar.profile import Profile
from kvcellar.quantize.bits import bits
from kvcellar.recipe import EXACT, EXACT_SMALL, Recipe
from kvcellar.stages import Context
from kvcellar.symbols import causalkernels as kernels
from kvcellar.symbols.causal import Walk
from kvcellar.symbols.causalnumbers import logarithms, powers, shape, sines
from kvcellar.symbols.causalstate import angles, order_of
from kvcellar.testing.stages import HEADS, LAYERS, WIDTH, RecipeConformance
from kvcellar.tokens import Tokens

WINDOW = 96
RECIPE = Recipe(name="exact-small", symbols={"id": "causal/1", "seen": 2, "embedding": 16, "before": 8}, block=48)
TOY = Recipe(name="toy-small", symbols=SETTINGS, block=16)


@cache
def model() -> Any:
    return models.llama()


def held(ids: list[int], dtype: torch.dtype) -> KVCache:
    cache = take_cache(models.prefill(model(), ids))
    return KVCache(tuple(LayerKV(kv.keys.to(dtype), kv.values.to(dtype)) for kv in cache.layers))


@cache
def calibration(dtype: torch.dtype) -> Calibration:
    samples = []
    for seed in range(12):
        ids = models.prompt(WINDOW, seed)
        cache = held(ids, dtype)
        samples.append(Sample(np.array(ids, np.int64), "toy", lambda cache=cache: cache))
    return Calibration(identity_of_model(model()), samples[0].load().geometry, samples, model=model())


@cache
def profile(dtype: torch.dtype = torch.bfloat16) -> Profile:
    return fit_profile(RECIPE, calibration(dtype))


def unseen(dtype: torch.dtype = torch.bfloat16, seed: int = 50, tokens: int = 90) -> tuple[Tokens, KVCache]:
    ids = models.prompt(tokens, seed)
    return Tokens.following(np.array(ids, np.int64), 0), held(ids, dtype)


def side(dtype: str = "bfloat16", heads: int = HEADS, width: int = WIDTH) -> SideGeometry:
    return SideGeometry(heads, width, dtype)


def geometry(dtype: str = "bfloat16") -> Geometry:
    return Geometry((LayerGeometry(side(dtype), side(dtype)),) * LAYERS)


def decoded(pipeline: Pipeline, parts: list[bytes], tokens: Tokens, layers: int | None = None) -> dict[int, LayerKV]:
    layers = len(parts) if layers is None else layers
    out = allocate(pipeline.geometry, dict.fromkeys(range(layers), len(tokens.ids)))
    pipeline.decode(range(layers), [[memoryview(part) for part in parts[:layers]]], [tokens], out)
    return out


def same_bits(a: KVCache, b: dict[int, LayerKV]) -> bool:
    sides = [
        (x, y)
        for i, kv in b.items()
        for x, y in zip((kv.keys, kv.values), (a.layers[i].keys, a.layers[i].values), strict=True)
    ]
    return all(np.array_equal(bits(x), bits(y)) for x, y in sides)


class TestConformance(RecipeConformance):
    recipe = TOY
    profile = profile_for(geometry(), pairs=6)


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.85), (torch.float16, 0.99), (torch.float32, 0.99)])
def test_every_bit_comes_back_in_fewer_bytes_than_exact(dtype: torch.dtype, share: float) -> None:
    tokens, cache = unseen(dtype)
    pipeline = Pipeline(RECIPE, cache.geometry, profile(dtype))
    parts = pipeline.encode(cache, tokens)
    plain = Pipeline(EXACT, cache.geometry).encode(cache, tokens)
    assert sum(part[0] for part in parts) > len(parts) // 2, "the rest are byte planes"
    assert sum(map(len, parts)) < share * sum(map(len, plain))
    assert same_bits(cache, decoded(pipeline, parts, tokens))
    assert same_bits(cache, decoded(pipeline, parts, tokens, layers=2))


def test_it_depends_on_what_it_foresees_from() -> None:
    """Other token ids, or other positions, foresee worse: neither is a mere ornament of the code."""
    tokens, cache = unseen()
    pipeline = Pipeline(RECIPE, cache.geometry, profile())
    size = sum(map(len, pipeline.encode(cache, tokens)))
    others = tokens._replace(ids=tokens.ids[::-1].copy(), earlier=tokens.earlier[::-1].copy())
    assert sum(map(len, pipeline.encode(cache, others))) > 1.02 * size
    moved = tokens._replace(positions=tokens.positions + 5)
    assert sum(map(len, pipeline.encode(cache, moved))) > 1.02 * size


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize(
    "sides",
    [
        (side(), side()),
        (side(heads=1, width=10), side(heads=3, width=4)),
        (side("float16", 2, 8), side("float16", 1, 80)),
        (side("float32", 1, 6), side("float32", 1, 0)),
    ],
)
def test_any_geometry(sides: tuple[SideGeometry, SideGeometry], layout: int) -> None:
    shape_ = Geometry((LayerGeometry(*sides),) * 2)
    rng = np.random.default_rng(3)
    layers = allocate(shape_, {0: 20, 1: 20})
    for kv in layers.values():
        for x in (kv.keys, kv.values):
            x.copy_(torch.from_numpy(rng.normal(size=tuple(x.shape))))
    cache, tokens = KVCache(tuple(layers.values())), Tokens.following(rng.integers(0, 99, 20), 1000)
    for pairs in (0, 2, sides[0].width // 2):
        pipeline = Pipeline(TOY, shape_, profile_for(shape_, pairs, layout))
        assert same_bits(cache, decoded(pipeline, pipeline.encode(cache, tokens), tokens))


@pytest.mark.parametrize("kind", ["noise", "zeros"])
def test_what_cannot_be_foreseen_is_stored_plainly_and_layers_behind_it_still_fit(kind: str) -> None:
    tokens, cache = unseen()
    first, foreign, last = cache.layers
    rng = np.random.default_rng(1)
    words = rng.integers(-(2**15), 2**15, (2, *foreign.keys.shape), dtype=np.int16) * np.int16(kind == "noise")
    foreign = LayerKV(*(torch.from_numpy(w).view(torch.bfloat16) for w in words))
    cache = KVCache((first, foreign, last))
    pipeline = Pipeline(RECIPE, cache.geometry, profile())
    parts = pipeline.encode(cache, tokens)
    assert [part[0] for part in parts[:2]] == [1, 0]
    assert parts[2][0] == (kind == "zeros"), "foreseen from zeros it still is, from noise it is not"
    assert len(parts[1]) <= words.nbytes + 3
    assert same_bits(cache, decoded(pipeline, parts, tokens))


def test_save_append_and_read(tmp_path: Path) -> None:
    tokens, cache = unseen(tokens=WINDOW)
    pairs = [(kv.keys[None], kv.values[None]) for kv in cache.layers]
    ids = tokens.ids.tolist()
    settings: dict[str, Any] = {"identity": "m", "recipe": RECIPE, "profile": profile()}
    kvcellar.save(tmp_path / "bulk.kvc", pairs, tokens=ids, **settings)
    kvcellar.save(tmp_path / "a.kvc", [(k[:, :, :7], v[:, :, :7]) for k, v in pairs], tokens=ids[:7], **settings)
    for stop in (8, 60, WINDOW):
        with kvcellar.open(tmp_path / "a.kvc", identity="m", profile=profile(), mode="a") as archive:
            archive.append([(k[:, :, :stop], v[:, :, :stop]) for k, v in pairs], ids[:stop])
    with kvcellar.open(tmp_path / "a.kvc", identity="m", profile=profile(), mode="a") as archive:
        for layer, start, stop in ((0, 0, WINDOW), (2, 40, 55), (1, 95, 96)):
            for got, whole in zip(archive.read(layer, start, stop), pairs[layer], strict=True):
                assert np.array_equal(bits(got), bits(whole[0, :, start:stop]))
        archive.compact()
        assert archive.info().recipe == "exact-small"
    assert (tmp_path / "a.kvc").read_bytes() == (tmp_path / "bulk.kvc").read_bytes()


def _refused(pipeline: Pipeline, parts: list[bytes], tokens: Tokens, cache: KVCache) -> None:
    """Damage is noticed, or gives numbers: a part's own checksum is what tells those."""
    try:
        decoded(pipeline, parts, tokens)
    except DamagedArchive:
        return


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_damaged_parts_are_refused_or_stay_within_bounds(dtype: str) -> None:
    rng = np.random.default_rng(5)
    layers = allocate(geometry(dtype), dict.fromkeys(range(LAYERS), 20))
    for kv in layers.values():
        for x in (kv.keys, kv.values):
            x.copy_(torch.from_numpy(rng.normal(size=tuple(x.shape))))
    cache, tokens = KVCache(tuple(layers.values())), Tokens.following(np.arange(20), 0)
    pipeline = Pipeline(TOY, geometry(dtype), profile_for(geometry(dtype), 4))
    parts = pipeline.encode(cache, tokens)
    for length in range(0, len(parts[1]), 7):
        with pytest.raises(DamagedArchive):
            decoded(pipeline, [parts[0], parts[1][:length], parts[2]], tokens)
    for extra in (b"\0", b"x", bytes(100)):
        with pytest.raises(DamagedArchive):
            decoded(pipeline, [parts[0], parts[1] + extra, parts[2]], tokens)
    for mode in (2, 255):
        with pytest.raises(DamagedArchive, match=f"mode {mode}"):
            decoded(pipeline, [bytes([mode]) + parts[0][1:], *parts[1:]], tokens)
    for _ in range(40):
        hurt = bytearray(parts[1])
        for at in rng.integers(1, len(hurt), 3):
            hurt[at] = rng.integers(0, 256)
        _refused(pipeline, [parts[0], bytes(hurt), parts[2]], tokens, cache)


def _altered(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Profile:
    given = profile_for(geometry(), 4)
    return Profile({**given.tensors, f"symbols.{name}": change(given.tensors[f"symbols.{name}"].copy())}, {})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weights.1", lambda x: x[:, 1:], "layer 1: weights is int8"),
        ("within.0", lambda x: x.astype(np.int16), "layer 0: within is int16"),
        ("factors.2", lambda x: x * 0 + (1 << 30), "a factor of"),
        ("factors.2", lambda x: -x - 1, "a factor of"),
        ("mean.0", lambda x: x + (1 << 52), "means or units out of range"),
        ("exponent.0", lambda x: x + np.arange(len(x), dtype=np.int16), "units of their own"),
        ("exponent.0", lambda x: x + np.int16(999), "means or units out of range"),
        ("pairs", lambda x: x + 99, "turns 103 pairs"),
        ("turns", lambda x: x[:1], "do not fit 3 layers"),
        ("table", lambda x: x.astype(np.float32), "do not fit"),
    ],
)
def test_profiles_that_do_not_fit_are_refused(name: str, change: Any, message: str) -> None:
    with pytest.raises(ProfileMismatch, match=message):
        Pipeline(TOY, geometry(), _altered(name, change))


def test_a_profile_of_another_recipe_and_none_at_all_are_refused() -> None:
    with pytest.raises(ProfileMismatch, match="made for another recipe"):
        Pipeline(TOY, geometry(), Profile({}, {}))
    with pytest.raises(ProfileMissing, match="kvcellar calibrate --model DIR --recipe exact-small"):
        Pipeline(EXACT_SMALL, geometry())


def test_recipes_it_cannot_be_part_of_are_refused() -> None:
    lossy = Recipe(name="x", quantize={"id": "turbo/1", "bits": 4}, symbols=SETTINGS)
    with pytest.raises(InvalidRecipe, match="foresees and codes the bits itself"):
        Pipeline(lossy, geometry(), profile_for(geometry(), 4))
    for settings in ({"seen": -1}, {"embedding": 0}, {"before": 1.5}, {"seen": True}):
        with pytest.raises(InvalidRecipe, match="whole number"):
            Pipeline(Recipe(name="x", symbols={**SETTINGS, **settings}), geometry(), profile_for(geometry(), 4))


def test_caches_it_cannot_take_are_refused() -> None:
    mixed = Geometry((LayerGeometry(side(), side("float16")),) * LAYERS)
    with pytest.raises(UnsupportedCache, match="bfloat16 keys and float16 values"):
        Pipeline(TOY, mixed, profile_for(mixed, 4))
    sliding = Geometry((LayerGeometry(side(), side(), "sliding", 8), *geometry().layers[1:]))
    with pytest.raises(UnsupportedCache, match="use recipe 'exact'"):
        Pipeline(TOY, sliding, profile_for(sliding, 4))


def test_calibration_without_a_model_is_refused() -> None:
    with pytest.raises(InvalidInput, match="calibrate with a model"):
        fit_profile(RECIPE, Calibration(**{**vars(calibration(torch.bfloat16)), "model": None}))


def test_cells_of_patterns_are_in_order_and_hold_their_value() -> None:
    """The middle between two neighbours lies between them, for every pattern of every format."""
    for mantissa, bias, half in ((7, 127, 1), (10, 15, 1), (7, 127, 0)):
        shift = 20 - bias - mantissa - 1
        edges = [kernels._edge(n, mantissa + 1, shift, half) for n in range(1, 1 << 16, 37)]
        assert edges == sorted(edges)
        for pattern in (0x0000, 0x0001, 0x3F80, 0x4001, 0x7BFF, 0x8000, 0xBF81, 0xC123):
            n = 32768 + pattern if pattern < 32768 else 65535 - pattern
            value = kernels._fixed(2 * (pattern & 32767) + 1 - half, mantissa + 1, shift)
            value = -value if pattern >= 32768 else value
            low, high = (kernels._edge(k, mantissa + 1, shift, half) for k in (n, n + 1))
            assert low <= value <= high


def test_numbers_come_from_their_formulas() -> None:
    assert np.array_equal(powers(), np.rint(2.0 ** (15 - np.arange(64) / 64)))
    assert np.array_equal(logarithms(), np.rint(64 * np.log2(1 + np.arange(64) / 64)))
    assert np.abs(sines() - 2**14 * np.sin(2 * np.pi * np.arange(len(sines())) / 4096)).max() <= 0.500001
    assert shape()[0] == 0
    assert shape()[-1] == 1 << 24
    assert (np.diff(shape()) >= 0).all()
    assert shape()[512] == 1 << 23
    assert isinstance(Decimal(shape()[512].item()), Decimal)


def test_angles_are_those_of_the_model() -> None:
    frequency = 10000.0 ** (-np.arange(8) / 8)
    turns = np.rint(frequency / (2 * np.pi) * 2.0**64).astype(np.int64)
    positions = np.array([0, 1, 77, 8191, 1 << 20])
    found = angles(turns, positions, 2)
    assert found.shape == (2, 5, 16)
    exact = np.outer(positions, frequency)
    assert np.abs(found[0, :, :8] / 2**14 - np.cos(exact)).max() < 2e-4
    assert np.abs(found[1, :, 8:] / 2**14 - np.sin(exact)).max() < 2e-4


def test_pairs_come_before_the_rest_of_a_head() -> None:
    layer = LayerGeometry(side(heads=2, width=6), side(heads=1, width=3))
    assert order_of(layer, 2, 0).columns.tolist() == [0, 2, 1, 3, 6, 8, 7, 9, 4, 5, 10, 11, 12, 13, 14]
    assert order_of(layer, 2, 1).columns.tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 4, 5, 10, 11, 12, 13, 14]


SCRIPT = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import numpy as np, torch
import kvcellar
from causalcase import SETTINGS, profile_for
from kvcellar.cache import KVCache, LayerKV
from kvcellar.pipeline import Pipeline
from kvcellar.tokens import Tokens
from kvcellar.recipe import Recipe
rng = np.random.default_rng(5)
digest = hashlib.sha256()
for dtype in (torch.bfloat16, torch.float16):
    sides = [torch.from_numpy(rng.normal(size=(2, 90, 40))).to(dtype) for _ in range(4)]
    cache = KVCache((LayerKV(*sides[:2]), LayerKV(*sides[2:])))
    pipeline = Pipeline(Recipe(name="t", symbols=SETTINGS), cache.geometry, profile_for(cache.geometry, 20))
    ids = rng.integers(0, 64, 90)
    digest.update(b"".join(pipeline.encode(cache, Tokens.following(ids, 0))))
    known = pipeline.symbols.known
    features = rng.integers(-(1 << 17), 1 << 17, (90, known.features(1))).astype(np.float64)
    rows = np.concatenate([known.layers[1].sums(features[i : i + 1]) for i in range(90)])
    assert np.array_equal(rows, known.layers[1].sums(features)), "batch and row"
    digest.update(rows.tobytes())
print(digest.hexdigest(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())
"""
BOTH = [("1", None), ("2", None), ("2", "default"), ("1", "avx2"), ("2", "avx512")]


def test_the_same_file_on_other_threads_and_kernels() -> None:
    seen, used = set(), set()
    for threads, capability in BOTH:
        environ = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        if capability:
            environ |= {"ATEN_CPU_CAPABILITY": capability}
            environ |= {"OPENBLAS_CORETYPE": {"default": "Nehalem", "avx2": "Haswell"}.get(capability, "Zen")}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)],
            env=environ, capture_output=True, text=True, check=True,
        )  # fmt: skip
        digest, count, kernel = done.stdout.split()
        assert count == threads
        seen.add(digest)
        used.add(kernel)
    assert len(seen) == 1
    assert len(used) > 1, f"only {used} ran: nothing was compared"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_page_says_how_to_read_it(dtype: str) -> None:
    """A decoder of plain Python integers, written from docs/format.md, reads what the compiled walk wrote."""
    rng = np.random.default_rng(8)
    layers = allocate(geometry(dtype), dict.fromkeys(range(LAYERS), 6))
    for kv in layers.values():
        for x in (kv.keys, kv.values):
            x.copy_(torch.from_numpy(rng.normal(size=tuple(x.shape)) * 2.0 ** rng.integers(-3, 4, WIDTH)))
    layers[1].keys[0, 3, :4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-7])
    tokens = Tokens.following(rng.integers(0, 70, 6), 12345)
    pipeline = Pipeline(TOY, geometry(dtype), profile_for(geometry(dtype), 5))
    known, token = pipeline.symbols.known, [0] * 6  # type: ignore[attr-defined]
    walk = Walk(known, Context(tokens.ids, tokens.positions, tokens.earlier))
    for i, layer in enumerate(known.layers):
        sums = layer.sums(np.concatenate([walk.embedded, *walk.seen[-1:]], axis=1)).astype(np.int64).tolist()
        arrays = [bits(x) for x in (layers[i].keys, layers[i].values)]
        stream = walk.encode(i, geometry(dtype).layers[i], arrays)
        plain = plaincausal.Layer(
            {"bfloat16": (7, 127, 1), "float16": (10, 15, 1)}[dtype],
            layer.spread.tolist(),
            layer.exponent.tolist(),
            layer.followers().T.astype(np.int64).tolist(),
        )
        turns = known.turns[i, :5].tolist()
        found = plain.decode(stream, sums, 5 * HEADS, turns, tokens.positions.tolist(), token)
        flat = np.concatenate([x.transpose(1, 0, 2).reshape(6, -1) for x in arrays], axis=1)
        assert np.array_equal(np.array(found), flat[:, layer.order.columns])
        assert token == walk.token.tolist()
