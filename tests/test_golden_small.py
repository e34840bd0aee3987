"""A file of recipe exact-small written by format 1.0, byte for byte: see test_golden.py.

Written by `KVCELLAR_WRITE_GOLDEN=1 pytest tests/test_golden_small.py`; its profile is made of integers and lies in it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import kvcellar
from archives import Pairs, bits, prefix
from causalcase import SETTINGS, profile_for
from kvcellar.frontends.transformers import take_cache
from kvcellar.recipe import Recipe
from test_golden import FOLDER, IDENTITY, WRITE
from test_golden_lossy import TOKENS, WIDTH, _cache

FILE = "v1.0-exact-small-appended-bf16.kvc"
RECIPE = Recipe(name="exact-small", symbols=SETTINGS, block=32)
STEPS = (20, 21, 70, TOKENS)
SPECIAL = torch.tensor([0x7F81, -63, 0x7F80, -128, -32768, 0, 1], dtype=torch.int16)  # NaNs, infinities, zeros, …


def cache() -> Pairs:
    """Numbers of about 2, and some that are not."""
    found = _cache(torch.bfloat16)
    found[1][0].view(torch.int16)[0, 1, 30, : len(SPECIAL)] = SPECIAL
    return found


def ids(tokens: int) -> list[int]:
    return [(i * i + 3) % 70 for i in range(tokens)]


def write(path: Path) -> None:
    numbers = cache()
    profile = profile_for(take_cache(numbers).geometry, WIDTH // 2 - 1)
    first, *later = STEPS
    kvcellar.save(
        path,
        prefix(numbers, first),
        tokens=ids(first),
        identity=IDENTITY,
        recipe=RECIPE,
        profile=profile,
        embed_profile=True,
    )
    for tokens in later:
        with kvcellar.open(path, identity=IDENTITY, mode="a") as archive:
            archive.append(prefix(numbers, tokens), ids(tokens))


def test_the_golden_file_restores_every_bit(tmp_path: Path) -> None:
    if WRITE and not (FOLDER / FILE).exists():
        write(FOLDER / FILE)
    assert (FOLDER / FILE).is_file(), f"{FILE} is missing; it belongs to the repository"
    with kvcellar.open(FOLDER / FILE, identity=IDENTITY) as archive:
        assert archive.verify().problems == ()
        assert archive.tokens.tolist() == ids(TOKENS)
        for layer, pair in enumerate(cache()):
            for got, whole in zip(archive.read(layer, 0, TOKENS), pair, strict=True):
                assert np.array_equal(bits(got), bits(whole[0]))
        blocks = list(archive._open().blocks(0, TOKENS))
        coded = [archive._open().read_parts(block, [0, 1]) for block in blocks]
        assert any(bytes(part)[:1] == b"\1" for parts in coded for part in parts), "all of it is byte planes"


def test_the_same_cache_gives_the_same_file(tmp_path: Path) -> None:
    write(tmp_path / "a.kvc")
    assert (tmp_path / "a.kvc").read_bytes() == (FOLDER / FILE).read_bytes()
