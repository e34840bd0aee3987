"""Files written by format 1.0, byte for byte: they must stay readable for ever, and the same cache gives them again.

They are written only by `KVCELLAR_WRITE_GOLDEN=1 pytest tests/test_golden.py`; a missing one fails. Write one anew
only together with a new stage id or format version: a changed golden file means that released files cannot be read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import kvcellar
from archives import Pairs, contents, contents_of, prefix, same
from kvcellar import Recipe

FOLDER = Path(__file__).parent / "golden"
WRITE = os.environ.get("KVCELLAR_WRITE_GOLDEN") == "1"
RECIPE = Recipe(name="exact", symbols={"id": "byteplanes-zstd/1"}, block=32)  # not the preset, which may be tuned
SHAPES = [(2, 8), (1, 12), (2, 8)]  # heads and width of each layer
IDENTITY = "golden"


class Golden(NamedTuple):
    dtype: torch.dtype
    steps: tuple[int, ...]  # tokens after the save and after each append


GOLDEN = {
    "v1.0-exact-bf16.kvc": Golden(torch.bfloat16, (40,)),
    "v1.0-exact-f32.kvc": Golden(torch.float32, (40,)),
    "v1.0-exact-appended-f16.kvc": Golden(torch.float16, (10, 13, 45, 50)),
}
SPECIAL = {  # NaN with a payload, quiet NaN, infinities, -0, 0, subnormals, largest
    torch.bfloat16: [0x7F81, 0xFFC1, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x807F, 0x7F7F],
    torch.float16: [0x7C01, 0xFE01, 0x7C00, 0xFC00, 0x8000, 0x0000, 0x0001, 0x83FF, 0x7BFF],
    torch.float32: [0x7F800001, 0xFFC00001, 0x7F800000, 0xFF800000, 1 << 31, 0, 1, 0x807FFFFF, 0x7F7FFFFF],
}


def golden_cache(dtype: torch.dtype) -> Pairs:
    """50 tokens made of integers alone, so that no library's random numbers or rounding can move them.

    Channels have a constant of their own as sign and exponent and a multiplicative hash below it, which is the
    regularity the code lives on; every 37th number is a special one.
    """
    size, tokens, made = dtype.itemsize, 50, 0
    unsigned, signed = (np.uint16, np.int16) if size == 2 else (np.uint32, np.int32)

    def side(heads: int, width: int) -> torch.Tensor:
        nonlocal made
        count = heads * tokens * width
        index = np.arange(made, made + count, dtype=np.uint64).reshape(heads, tokens, width)
        made += count
        hashed = (index * np.uint64(2654435761) + np.uint64(12345)) % np.uint64(1 << 32)
        channel = np.arange(heads * width, dtype=np.uint64).reshape(heads, 1, width) * np.uint64(7) % np.uint64(16)
        sign = (channel & np.uint64(1)) << np.uint64(8 * size - 1)
        exponent = (np.uint64(0x3C00 if size == 2 else 0x3C000000) + (channel << np.uint64(8 * size - 10))) | sign
        bits = exponent + (hashed >> np.uint64(32 - (6 if size == 2 else 22)))
        flat = bits.astype(unsigned).reshape(-1)
        flat[::37] = np.resize(np.array(SPECIAL[dtype], unsigned), flat[::37].size)
        return torch.from_numpy(flat.reshape(1, heads, tokens, width).view(signed)).view(dtype)

    return [(side(heads, width), side(heads, width)) for heads, width in SHAPES]


def golden_ids(tokens: int) -> list[int]:
    return [(i * 7919 + 13) % 49152 for i in range(tokens)]


def write(path: Path, golden: Golden) -> None:
    cache, (first, *later) = golden_cache(golden.dtype), golden.steps
    kvcellar.save(path, prefix(cache, first), tokens=golden_ids(first), identity=IDENTITY, recipe=RECIPE)
    for tokens in later:
        with kvcellar.open(path, identity=IDENTITY, mode="a") as archive:
            archive.append(prefix(cache, tokens), golden_ids(tokens))


@pytest.fixture(scope="module", autouse=True)
def _written() -> None:
    if WRITE:
        FOLDER.mkdir(exist_ok=True)
        for name, golden in GOLDEN.items():
            write(FOLDER / name, golden)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_are_readable(name: str) -> None:
    assert (FOLDER / name).is_file(), f"{name} is missing; it belongs to the repository"
    golden = GOLDEN[name]
    with kvcellar.open(FOLDER / name, identity=IDENTITY) as archive:
        assert archive.verify().problems == ()
        tokens = golden.steps[-1]
        assert same(contents(archive), contents_of(golden_cache(golden.dtype), golden_ids(tokens)))
        info = archive.info()
    assert (info.format, info.tokens, info.next_position, info.commits) == ("1.0", tokens, tokens, len(golden.steps))
    assert info.recipe_json == RECIPE.to_json()


@pytest.mark.parametrize("name", [name for name, golden in GOLDEN.items() if len(golden.steps) == 1])
def test_the_same_cache_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    """If this alone fails after an update of zstandard, old files are still good and only new ones differ."""
    golden, path = GOLDEN[name], tmp_path / "a.kvc"
    write(path, golden)
    assert path.read_bytes() == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_are_small_and_use_what_the_format_has(name: str) -> None:
    """A golden file of raw bytes alone would not notice a change of the code's bytes."""
    data, golden = (FOLDER / name).read_bytes(), GOLDEN[name]
    assert len(data) < 20_000
    assert data.count(b"\x28\xb5\x2f\xfd") >= 4, "some planes are zstd frames"
    assert data.count(b"KVCC") >= len(golden.steps)


def test_a_golden_file_compacts_to_a_bulk_save(tmp_path: Path) -> None:
    name = "v1.0-exact-appended-f16.kvc"
    golden, appended, bulk = GOLDEN[name], tmp_path / "a.kvc", tmp_path / "b.kvc"
    appended.write_bytes((FOLDER / name).read_bytes())
    with kvcellar.open(appended, identity=IDENTITY, mode="a") as archive:
        archive.compact()
    write(bulk, golden._replace(steps=golden.steps[-1:]))
    assert appended.read_bytes() == bulk.read_bytes()
