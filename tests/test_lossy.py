"""Recipes that lose something, through real files: growth, determinism, and the field cases about quantizers.

G26, G27, G29, G30, G31, G45 (shared/FIELD_CASES.md); those about a quantizer alone are in test_turbo.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kvcellar
from kvcellar.archive.reader import ArchiveReader
from kvcellar.errors import DamagedArchive, InvalidInput, UnsupportedCache
from kvcellar.frontends.bench.sizes import bytes_by_part, coarse_bytes
from kvcellar.recipe import PRESETS, TURBO, Recipe
from kvcellar.store.local import LocalStore
from models import same_bits

TURBO_4, TURBO_3, TURBO_2 = TURBO
SMALL = replace(TURBO_4, block=16, window=kvcellar.recipe.Window(2, 6))
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _normal(
    layers: int = 3, heads: int = 2, tokens: int = 120, width: int = 64, dtype: torch.dtype = torch.float32
) -> Pairs:
    rng = torch.Generator().manual_seed(5)
    sides = [torch.randn(1, heads, tokens, width, generator=rng).to(dtype) for _ in range(2 * layers)]
    return list(zip(sides[::2], sides[1::2], strict=True))


def _through(path: Path, cache: Pairs, recipe: str | Recipe) -> Pairs:
    kvcellar.save(path, cache, tokens=range(cache[0][0].shape[2]), identity="m", recipe=recipe)
    with kvcellar.open(path, identity="m") as archive:
        return [archive.read(i, 0, len(archive)) for i in range(len(cache))]


def _relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.float() - y.float()).square().sum() / x.float().square().sum())


@pytest.mark.parametrize("recipe", TURBO, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_error_and_size_are_those_of_so_many_bits(recipe: Recipe, dtype: torch.dtype, tmp_path: Path) -> None:
    """Lloyd–Max levels of a normal density at 4, 3 and 2 bits leave 0.95 %, 3.45 % and 11.75 % of the energy.

    No code of so many bits leaves less than 4^−bits.
    """
    bits = recipe.quantize["bits"] if recipe.quantize else 0
    cache, path = _normal(tokens=300, dtype=dtype), tmp_path / "a.kvc"
    restored = _through(path, cache, recipe)
    theory = {4: 0.0095, 3: 0.0345, 2: 0.1175}[bits]
    for sides, back in zip(cache, restored, strict=True):
        for x, y in zip(sides, back, strict=True):
            assert 4**-bits < _relative_error(x[0, :, 4:-32], y[:, 4:-32]) < theory
            assert _relative_error(x[0, :, -32:], y[:, -32:]) < 3e-4
            assert _relative_error(x[0, :, :4], y[:, :4]) < 3e-4
    payload, tokens = coarse_bytes(path, None)
    assert tokens == 300 - 36
    vectors = 3 * 2 * 2
    assert payload / tokens == pytest.approx(vectors * (64 * bits / 8 + 2) + 9 / 8, rel=0.02)
    assert sum(bytes_by_part(path).values()) == path.stat().st_size


def test_field_g26_finite_in_finite_out(tmp_path: Path) -> None:
    cache = _normal(dtype=torch.float16)
    keys, values = cache[0]
    keys[0, 0, 50] = 0
    keys[0, 1, :, 7] = 0
    keys[0, 0, 51] = 3.25
    values[0, 0, 52] = 0
    values[0, 0, 52, 9] = 1e-7
    values[0, 1, 53] = 65504 * torch.randn(64).sign()
    for x, y in zip(cache[0], _through(tmp_path / "a.kvc", cache, "turbo-4")[0], strict=True):
        assert y.isfinite().all()
        assert _relative_error(x[0], y) < 0.02
    back = _through(tmp_path / "a.kvc", cache, "turbo-4")[0]
    assert not back[0][0, 50].any()
    assert _relative_error(keys[0, 0, 51], back[0][0, 51]) < 0.02
    for bad in (float("nan"), float("inf")):
        keys[0, 1, 33, 2] = bad
        with pytest.raises(UnsupportedCache, match="layer 0 keys at position 33 are not finite"):
            _through(tmp_path / "b.kvc", cache, "turbo-4")


def test_field_g27_attention_survives_extreme_key_channels(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(1)
    keys, queries = torch.randn(128, 64, generator=rng), torch.randn(32, 64, generator=rng)
    keys[:, 5] += 600
    keys[:, 40] -= 300
    cache = [(keys[None, None], torch.randn(1, 1, 128, 64, generator=rng))]
    recipe = replace(TURBO_4, window=None)
    restored = _through(tmp_path / "a.kvc", cache, recipe)[0][0][0]
    before, after = ((queries @ k.T / 8).softmax(dim=1) for k in (keys, restored))
    assert 0.5 * (before - after).abs().sum(dim=1).max() < 0.1


def test_field_g29_one_codec_for_bulk_and_append(tmp_path: Path) -> None:
    cache, ids = _normal(tokens=70), list(range(70))
    bulk = _through(tmp_path / "bulk.kvc", cache, SMALL)

    def upto(n: int) -> Pairs:
        return [(k[:, :, :n], v[:, :, :n]) for k, v in cache]

    kvcellar.save(tmp_path / "grown.kvc", upto(12), tokens=ids[:12], identity="m", recipe=SMALL)
    with kvcellar.open(tmp_path / "grown.kvc", identity="m", mode="a") as archive:
        for n in [13, 14, 15, 16, 17, 40, 41, 69, 70]:
            archive.append(upto(n), ids[:n])
        assert same_bits([archive.read(i, 0, 70) for i in range(3)], bulk)
        archive.compact()
    assert (tmp_path / "grown.kvc").read_bytes() == (tmp_path / "bulk.kvc").read_bytes()


def test_field_g30_neither_threads_nor_seeds_change_a_byte(tmp_path: Path) -> None:
    program = """
import sys, torch, numpy, kvcellar
torch.set_num_threads(int(sys.argv[1])); torch.manual_seed(int(sys.argv[1])); numpy.random.seed(int(sys.argv[1]))
x = torch.randn(1, 2, 90, 80, generator=torch.Generator().manual_seed(3))
kvcellar.save(sys.argv[2], [(x, x.flip(3))] * 2, tokens=range(90), identity="m", recipe="turbo-3")
"""
    for threads in ("1", "8"):
        subprocess.run([sys.executable, "-c", program, threads, str(tmp_path / f"{threads}.kvc")], check=True)
    assert (tmp_path / "1.kvc").read_bytes() == (tmp_path / "8.kvc").read_bytes()


def test_field_g30_another_rotation_is_another_recipe(tmp_path: Path) -> None:
    """The seed of the rotation stands in the recipe, whose digest every block repeats."""
    assert TURBO_4.quantize is not None
    other = replace(TURBO_4, quantize={**TURBO_4.quantize, "seed": 7})
    cache = _normal()
    first = _through(tmp_path / "a.kvc", cache, TURBO_4)
    assert not same_bits(first, _through(tmp_path / "b.kvc", cache, other))
    data = (tmp_path / "b.kvc").read_bytes()
    assert data.count(b'"seed":7') == 1
    (tmp_path / "c.kvc").write_bytes(data.replace(b'"seed":7', b'"seed":8'))
    with pytest.raises(DamagedArchive):
        kvcellar.open(tmp_path / "c.kvc", identity="m")


def test_field_g31_parts_that_were_swapped_are_noticed(tmp_path: Path) -> None:
    cache, path = _normal(), tmp_path / "a.kvc"
    _through(path, cache, "turbo-4")
    store, name = LocalStore.at(path)
    with ArchiveReader(store.open_reader(name)) as reader:
        block = reader.block(0)
        (one, _), (two, _), *_ = block.head.parts
        start = block.body_offset
    data = bytearray(path.read_bytes())
    assert one == two
    data[start : start + one], data[start + one : start + 2 * one] = (
        data[start + one : start + 2 * one],
        data[start : start + one],
    )
    path.write_bytes(data)
    with kvcellar.open(path, identity="m") as archive:
        assert not archive.verify().ok
        with pytest.raises(DamagedArchive, match="checksum"):
            archive.restore()


def test_field_g45_exact_layers_stay_exact_when_the_archive_grows(tmp_path: Path) -> None:
    recipe = replace(SMALL, quantize={"id": "turbo/1", "bits": 3, "exact_layers": [0, 3]})
    cache, ids, path = _normal(layers=4, tokens=50, dtype=torch.bfloat16), list(range(50)), tmp_path / "a.kvc"
    kvcellar.save(path, [(k[:, :, :30], v[:, :, :30]) for k, v in cache], tokens=ids[:30], identity="m", recipe=recipe)
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.append(cache, ids)
        for compacted in (False, True):
            if compacted:
                archive.compact()
            restored = [archive.read(i, 0, 50) for i in range(4)]
            assert same_bits([restored[0], restored[3]], [tuple(s[0] for s in cache[i]) for i in (0, 3)])
            assert all(_relative_error(cache[i][0][0], restored[i][0]) > 0.01 for i in (1, 2))
        assert archive.info().recipe_json["quantize"]["exact_layers"] == [0, 3]


def test_codes_of_a_recipe_that_has_none(tmp_path: Path) -> None:
    for recipe, message in (("exact", "own bits"), ("turbo-4", "whole vector")):
        _through(tmp_path / "a.kvc", _normal(layers=1), recipe)
        with kvcellar.open(tmp_path / "a.kvc", identity="m") as archive, pytest.raises(InvalidInput, match=message):
            archive.codes(0)


def test_one_token_of_one_layer(tmp_path: Path) -> None:
    cache = _normal(tokens=70)
    whole = _through(tmp_path / "a.kvc", cache, SMALL)
    with kvcellar.open(tmp_path / "a.kvc", identity="m") as archive:
        for token in (0, 1, 2, 15, 16, 40, 63, 64, 69):
            assert same_bits([archive.read(1, token, token + 1)], [tuple(s[:, token : token + 1] for s in whole[1])])


def test_presets_are_named_by_what_they_do() -> None:
    assert list(PRESETS)[:4] == ["exact", "turbo-4", "turbo-3", "turbo-2"]
    for recipe in PRESETS.values():
        assert Recipe.from_json(recipe.to_json()) == recipe
    assert np.all([recipe.window is not None for recipe in PRESETS.values() if recipe.quantize])


def test_field_g39_compression_keeps_the_order_of_scores(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(2)
    keys = torch.randn(50, 64, generator=rng)
    recipe = replace(TURBO_4, window=None)
    restored = _through(tmp_path / "a.kvc", [(keys[None, None], keys[None, None])], recipe)[0][0][0]
    query = keys[7]
    for score in (
        lambda k: k @ query,
        lambda k: torch.nn.functional.cosine_similarity(k, query[None], dim=1),
        lambda k: -(k - query).norm(dim=1),
    ):
        exact, coded = score(keys), score(restored)
        assert coded.argmax() == exact.argmax() == 7
        assert torch.corrcoef(torch.stack([exact, coded]))[0, 1] >= 0.95


def test_field_g39_the_best_hit_of_a_search_has_the_largest_score(tmp_path: Path) -> None:
    ids = [*range(100, 140), 1, 2, 3, 4, *range(200, 220), 1, 2, 9, 4, *range(300, 320)]
    cache = _normal(layers=1, tokens=len(ids))
    kvcellar.save(tmp_path / "a.kvc", cache, tokens=ids, identity="m", recipe="turbo-4")
    with kvcellar.open(tmp_path / "a.kvc") as archive:
        hits = archive.search([1, 2, 3, 4], mode="fuzzy", at_least=3)
        assert [(hit.start, hit.score) for hit in hits] == [(40, 1.0), (64, 0.75)]
        assert [hit.start for hit in archive.search([1, 2, 3, 4])] == [40]
