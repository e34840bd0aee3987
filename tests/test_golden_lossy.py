"""Lossy files written by format 1.0 and what they restored to then: they must stay readable for ever.

Like the files of test_golden.py they are written by `KVCELLAR_WRITE_GOLDEN=1 pytest tests/test_golden_lossy.py`, and
anew only with a new stage id or format version. The numbers beside each are float32 what a restore gave.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kvcellar
from archives import Pairs, prefix
from kvcellar.profile import Profile
from kvcellar.recipe import FRACTAL, TURBO, Recipe, Window
from test_golden import FOLDER, IDENTITY, WRITE, golden_ids

HEADS, WIDTH, LAYERS, TOKENS = 2, 16, 2, 90
WINDOW = Window(4, 8)


def _hashed(count: int, seed: int) -> np.ndarray:
    """Integers alone, about normal: sums of four bytes of a multiplicative hash, in 64ths."""
    index = np.arange(count, dtype=np.uint64) + np.uint64(seed << 24)
    mixed = (index * np.uint64(0x9E3779B97F4A7C15)) ^ (index >> np.uint64(7)) * np.uint64(0xBF58476D1CE4E5B9)
    parts = [(mixed >> np.uint64(shift)) & np.uint64(0xFF) for shift in (56, 44, 32, 20)]
    return (np.sum(parts, axis=0).astype(np.int64) - 510).astype(np.float32) / 64


def _cache(dtype: torch.dtype) -> Pairs:
    sides = [
        torch.from_numpy(_hashed(HEADS * TOKENS * WIDTH, seed).reshape(1, HEADS, TOKENS, WIDTH)).to(dtype)
        for seed in range(1, 2 * LAYERS + 1)
    ]
    return list(zip(sides[::2], sides[1::2], strict=True))


def _profile() -> Profile:
    tensors: dict[str, np.ndarray] = {
        "transform.inv_freq": np.array([[2.0**-i for i in range(WIDTH // 2)]] * LAYERS, np.float32),
        "transform.pairs": np.full(LAYERS, WIDTH // 2, np.int32),
        "transform.layout": np.zeros(LAYERS, np.int32),
    }
    for layer in range(LAYERS):
        for side, stages in (("key", 2), ("value", 1)):
            shape = HEADS, stages, 16, WIDTH
            books = _hashed(int(np.prod(shape)), 100 + 2 * layer + stages).reshape(shape)
            tensors[f"quantize.{side}.{layer}"] = (books / 2).astype(np.float16)
    return Profile(tensors, {})


class Golden(NamedTuple):
    recipe: Recipe
    dtype: torch.dtype
    steps: tuple[int, ...]


SMALL_RVQ = {"id": "rvq/1", "key_stages": 2, "value_stages": 1, "entries": 16}
GOLDEN = {
    "v1.0-turbo-4-bf16.kvc": Golden(replace(TURBO[0], block=32, window=WINDOW), torch.bfloat16, (90,)),
    "v1.0-turbo-2-appended-f16.kvc": Golden(
        replace(TURBO[2], block=32, window=WINDOW), torch.float16, (20, 21, 70, 90)
    ),
    "v1.0-fractal-f32.kvc": Golden(replace(FRACTAL, block=32, window=WINDOW, quantize=SMALL_RVQ), torch.float32, (90,)),
}


def _write(path: Path, golden: Golden) -> None:
    cache, (first, *later) = _cache(golden.dtype), golden.steps
    needs = golden.recipe.name == FRACTAL.name
    kvcellar.save(
        path,
        prefix(cache, first),
        tokens=golden_ids(first),
        identity=IDENTITY,
        recipe=golden.recipe,
        profile=_profile() if needs else None,
        embed_profile=needs,
    )
    for tokens in later:
        with kvcellar.open(path, identity=IDENTITY, mode="a") as archive:
            archive.append(prefix(cache, tokens), golden_ids(tokens))


def _restored(path: Path) -> dict[str, torch.Tensor]:
    with kvcellar.open(path, identity=IDENTITY) as archive:
        layers = range(len(archive.manifest.geometry))
        sides = {i: archive.read(i, 0, len(archive)) for i in layers}
        assert archive.tokens.tolist() == golden_ids(TOKENS)
        assert archive.verify().ok
    return {f"{i}.{name}": side.float() for i, pair in sides.items() for name, side in zip("kv", pair, strict=True)}


@pytest.mark.parametrize("name", GOLDEN)
def test_old_lossy_files_restore_what_they_did(name: str, tmp_path: Path) -> None:
    path = FOLDER / name
    expected = path.with_suffix(".safetensors")
    if WRITE and not path.exists():
        _write(path, GOLDEN[name])
        save_file(_restored(path), expected)
    (tmp_path / name).write_bytes(path.read_bytes())
    restored, then = _restored(tmp_path / name), load_file(expected)
    assert set(restored) == set(then)
    for side in then:  # turned keys owe their last bits to the machine's sines
        torch.testing.assert_close(restored[side], then[side], rtol=1e-5, atol=1e-5 if "fractal" in name else 0)
    source = {
        f"{i}.{s}": x[0].float()
        for i, pair in enumerate(_cache(GOLDEN[name].dtype))
        for s, x in zip("kv", pair, strict=True)
    }
    lost = [float((restored[s] - source[s])[:, 4:-8].square().sum() / source[s].square().sum()) for s in source]
    assert max(lost) < (1.5 if "fractal" in name else 0.13)


@pytest.mark.parametrize("name", [name for name in GOLDEN if "fractal" not in name])
def test_the_same_cache_gives_the_same_lossy_file(name: str, tmp_path: Path) -> None:
    _write(tmp_path / name, GOLDEN[name])
    assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
