"""Blocks that are decoded together restore what each restores alone, and a damaged one among them is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcellar
from kvcellar import decode, decodeplan
from kvcellar.archive.reader import ArchiveReader
from kvcellar.errors import DamagedArchive
from kvcellar.recipe import PRESETS, Recipe, Window
from kvcellar.store.local import LocalStore
from models import same_bits

BLOCK = 16
SMALL = replace(PRESETS["turbo-3"], block=BLOCK, window=Window(2, 6))
ALL_COARSE = replace(SMALL, window=None)
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _cache(tokens: int) -> Pairs:
    rng = torch.Generator().manual_seed(tokens)
    sides = [torch.randn(1, 2, tokens, 32, generator=rng).bfloat16() for _ in range(6)]
    return list(zip(sides[::2], sides[1::2], strict=True))


@contextmanager
def _at_most(tokens: int) -> Iterator[list[int]]:
    """Blocks are decoded together up to so many tokens; gives how many blocks each task had."""
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decodeplan, "RUN_TOKENS", tokens)
        plain = decodeplan.tasks_of

        def noting(*given: object) -> Iterator[decodeplan.Task]:
            for task in plain(*given):  # type: ignore[arg-type]
                seen.append(len(task.blocks))
                yield task

        patch.setattr(decode, "tasks_of", noting)
        yield seen


@settings(max_examples=30, deadline=None)
@given(
    recipe=st.sampled_from([SMALL, ALL_COARSE]),
    steps=st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=5),
    limit=st.sampled_from([2 * BLOCK, 5 * BLOCK, 1024]),
    data=st.data(),
)
def test_together_as_alone(recipe: Recipe, steps: list[int], limit: int, data: st.DataObject) -> None:
    total = sum(steps)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    pairs, path, at = _cache(total), None, 0
    with TemporaryDirectory() as folder:
        for count in steps:
            new = [(k[:, :, at : at + count], v[:, :, at : at + count]) for k, v in pairs]
            ids = list(range(at, at + count))
            if path is None:
                path = Path(folder) / "a.kvc"
                kvcellar.save(path, new, tokens=ids, identity="m", recipe=recipe)
            else:
                with kvcellar.open(path, mode="a", identity="m") as archive:
                    archive.append(new, tokens=ids, start=at)
            at += count
        assert path is not None
        with kvcellar.open(path, identity="m") as archive:
            for chosen in (None, range(start, stop)):
                with _at_most(0) as alone:
                    one_by_one = archive.restore(positions=chosen).cache
                with _at_most(limit):
                    found = archive.restore(positions=chosen).cache
                assert set(alone) == {1}
                for a, b in zip(one_by_one.layers, found.layers, strict=True):
                    assert same_bits(a.keys, b.keys)
                    assert same_bits(a.values, b.values)


def test_a_whole_restore_decodes_blocks_together_and_a_part_of_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.kvc"
    kvcellar.save(path, _cache(5 * BLOCK), tokens=range(5 * BLOCK), identity="m", recipe=SMALL)
    with kvcellar.open(path, identity="m") as archive, _at_most(4 * BLOCK) as seen:
        archive.restore()
        assert set(seen) == {4, 1}
        seen.clear()
        archive.restore(positions=range(3, 2 * BLOCK + 1))
        assert set(seen) == {1}, "two of the three blocks are wanted in part"


def test_of_blocks_decoded_together_the_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.kvc"
    kvcellar.save(path, _cache(5 * BLOCK), tokens=range(5 * BLOCK), identity="m", recipe=SMALL)
    with ArchiveReader(LocalStore(tmp_path).open_reader("a.kvc")) as reader:
        block = reader.block(2)
    raw = bytearray(path.read_bytes())
    raw[block.body_offset + block.head.part_offset(1)] ^= 1
    path.write_bytes(raw)
    with kvcellar.open(path, identity="m") as archive, pytest.raises(DamagedArchive) as caught:
        archive.restore()
    assert caught.value.part == f"{block.part}, layer group 1"
