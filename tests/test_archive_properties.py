"""However an archive came to be: its state, its bytes after compaction, and what a read of it touches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvcellar
from archives import BLOCK, SMALL, Pairs, bits, contents, contents_at, contents_of, prefix, same, spans
from kvcellar import Archive
from kvcellar.archive.block import pack_ids, unpack_ids
from kvcellar.archive.commit import Commit, last_commit
from kvcellar.archive.format import INDEX
from kvcellar.archive.writer import INDEX_EVERY
from kvcellar.errors import DamagedArchive
from kvcellar.store.local import LocalReader

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LONGEST = 160


@pytest.fixture(scope="module")
def caches(make_cache: Callable) -> dict[torch.dtype, Pairs]:
    return {dtype: make_cache(layers=2, heads=2, tokens=LONGEST, width=6, dtype=dtype) for dtype in DTYPES}


@pytest.fixture(scope="module")
def ids(make_ids: Callable) -> list[int]:
    return make_ids(LONGEST)


def save(path: Path, cache: Pairs, ids: list[int], tokens: int) -> None:
    kvcellar.save(path, prefix(cache, tokens), tokens=ids[:tokens], identity="m", recipe=SMALL)


def append(archive: Archive, cache: Pairs, ids: list[int], tokens: int) -> None:
    archive.append(prefix(cache, tokens), ids[:tokens])


# --- bulk and append


@pytest.mark.usefixtures("quick")
@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 20), min_size=2, max_size=8), dtype=st.sampled_from(DTYPES), reopen=st.booleans())
@example(sizes=[8, 8, 8], dtype=torch.float16, reopen=False)
@example(sizes=[1] * 8, dtype=torch.float32, reopen=True)
@example(sizes=[7, 1, 1, 15, 16, 17], dtype=torch.bfloat16, reopen=False)
def test_any_appends_then_compact_are_a_bulk_save(
    caches: dict, ids: list[int], sizes: list[int], dtype: torch.dtype, reopen: bool
) -> None:
    cache = caches[dtype]
    with tempfile.TemporaryDirectory() as folder:
        bulk, grown = Path(folder, "bulk.kvc"), Path(folder, "grown.kvc")
        save(bulk, cache, ids, sum(sizes))
        save(grown, cache, ids, sizes[0])
        archive = kvcellar.open(grown, identity="m", mode="a")
        for count in np.cumsum(sizes)[1:].tolist():
            if reopen:
                archive.close()
                archive = kvcellar.open(grown, identity="m", mode="a")
            append(archive, cache, ids, count)
            assert same(contents(archive), contents_of(cache, ids, count))
            assert archive.verify().problems == ()
        archive.compact()
        assert same(contents(archive), contents_of(cache, ids, sum(sizes)))
        archive.close()
        assert grown.read_bytes() == bulk.read_bytes()
        assert {path.name for path in Path(folder).iterdir()} == {"bulk.kvc", "grown.kvc"}


@pytest.mark.usefixtures("quick")
def test_dead_bytes_never_outweigh_live_ones(caches: dict, ids: list[int], tmp_path: Path) -> None:
    """Appending token by token leaves commits and outgrown tails behind; the file is compacted by itself."""
    cache, path, sizes = caches[torch.float32], tmp_path / "a.kvc", []
    save(path, cache, ids, 1)
    with kvcellar.open(path, identity="m", mode="a") as archive:
        for tokens in range(2, 41):
            append(archive, cache, ids, tokens)
            info = archive.info()
            assert info.file_bytes == path.stat().st_size <= 2 * info.live_bytes
            assert same(contents(archive), contents_of(cache, ids, tokens))
            sizes.append(info.file_bytes)
        assert any(later < earlier for earlier, later in pairwise(sizes)), "never compacted"
        assert archive.verify().problems == ()
        append(archive, cache, ids, 60)
    assert same(contents_at(path), contents_of(cache, ids, 60))


# --- index


@pytest.fixture
def grown(caches: dict, ids: list[int], tmp_path: Path, make_cache: Callable, make_ids: Callable) -> tuple[Path, list]:
    """An archive after 70 appends of a block each, which leave too little dead to be compacted; and its contents."""
    tokens, path = 71 * BLOCK, tmp_path / "grown.kvc"
    cache, ids = make_cache(layers=1, heads=2, tokens=tokens, width=8), make_ids(tokens)
    save(path, cache, ids, BLOCK)
    with kvcellar.open(path, identity="m", mode="a") as archive:
        for end in range(2 * BLOCK, tokens + 1, BLOCK):
            append(archive, cache, ids, end)
        assert archive.info().commits == 71, "no compaction between"
    return path, contents_of(cache, ids)


@pytest.mark.usefixtures("quick")
def test_a_long_chain_of_commits_gets_an_index(grown: tuple[Path, list]) -> None:
    path, whole = grown
    with LocalReader(path) as reader:
        commit: Commit = last_commit(reader)
        assert commit.sequence == 71
        assert not commit.index
    indexes = [span for span in spans(path.read_bytes()) if span.tag == INDEX]
    assert len(indexes) == 2, f"one of the bulk save, one of the commit after the {INDEX_EVERY}th"
    assert same(contents_at(path), whole)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("which", [0, 1, -1, -3], ids=["first index", "later index", "a commit's head", "its end mark"])
def test_damage_of_an_old_index_or_commit_loses_no_block(grown: tuple[Path, list], which: int) -> None:
    path, whole = grown
    data = bytearray(path.read_bytes())
    dead = [span for span in spans(bytes(data)) if not span.live]
    indexes, commits = ([s for s in dead if s.tag == tag] for tag in (INDEX, b"KVCC"))
    at = indexes[which].stop - 9 if which >= 0 else commits[which].stop - (60 if which == -1 else 3)
    data[at] ^= 4
    path.write_bytes(data)
    assert same(contents_at(path), whole)
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.compact()
        assert same(contents(archive), whole)
        assert archive.verify().problems == ()


# --- random access


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize(("blocks", "more"), [(0, 1), (1, -1), (1, 0), (1, 1), (150, 3)])
def test_any_range_is_a_slice_of_the_whole(
    block: int, blocks: int, more: int, make_cache: Callable, make_ids: Callable, saved: Callable
) -> None:
    """Field case G13: right for a few chunks, wrong beyond about 114, wrong in the last, partial one."""
    tokens = max(1, blocks * block + more)
    cache = make_cache(layers=2, heads=2, tokens=tokens, width=4, dtype=torch.float16)
    path = saved(cache, make_ids(tokens), recipe=kvcellar.Recipe("tiny", SMALL.symbols, block=block))
    rng = np.random.default_rng(tokens)
    cuts = rng.integers(0, tokens + 1, (12, 2)).tolist()
    borders = [i for i in (0, block - 1, block, block + 1, tokens - block, tokens - 1, tokens) if 0 <= i <= tokens]
    with kvcellar.open(path, identity="m") as archive:
        whole = contents(archive)
        assert same(whole, contents_of(cache, make_ids(tokens)))
        for a, b in [*cuts, *((i, j) for i in borders for j in borders)]:
            start, stop = min(a, b), max(a, b)
            for layer in range(2):
                for side, full in zip(archive.read(layer, start, stop), whole[1 + 2 * layer :][:2], strict=True):
                    assert np.array_equal(bits(side), full[:, start:stop]), f"tokens {start}…{stop} of layer {layer}"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("layer", [0, 4])
@pytest.mark.parametrize(("start", "stop", "blocks"), [(17, 23, 1), (15, 17, 2), (0, 8, 1), (40, 43, 1), (3, 30, 4)])
def test_a_read_touches_its_own_parts_and_nothing_else(
    layer: int,
    start: int,
    stop: int,
    blocks: int,
    make_cache: Callable,
    make_ids: Callable,
    saved: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the layer's part of each touched block: that block's frame and head, once."""
    path = saved(make_cache(layers=5, heads=2, tokens=43, width=64), make_ids(43), recipe=SMALL)
    touched: list[tuple[int, int]] = []
    read, read_into = LocalReader.read, LocalReader.read_into

    def counted_read(self: LocalReader, offset: int, length: int) -> bytes:
        data = read(self, offset, length)
        touched.append((offset, len(data)))
        return data

    def counted_read_into(self: LocalReader, offset: int, buffer: memoryview) -> int:
        touched.append((offset, len(buffer)))
        return read_into(self, offset, buffer)

    with kvcellar.open(path, identity="m") as archive:
        monkeypatch.setattr(LocalReader, "read", counted_read)
        monkeypatch.setattr(LocalReader, "read_into", counted_read_into)
        archive.read(layer, start, stop)
        monkeypatch.undo()
        reader = archive._open()
        expected = set()
        for block in reader.blocks(start, stop):
            length, _ = block.head.parts[layer]
            expected.add((block.body_offset + block.head.part_offset(layer), length))
        record_starts = reader.entries["offset"].tolist()
    assert len(expected) == blocks
    parts = [place for place in touched if place[0] in {offset for offset, _ in expected}]
    heads = [place for place in touched if place not in parts]
    assert set(parts) == expected
    assert len(parts) == blocks, "each part is read once"
    head_bytes = dict.fromkeys(record_starts, 0)
    for offset, length in heads:
        owner = max(start for start in record_starts if start <= offset)
        head_bytes[owner] += length
    assert sum(1 for count in head_bytes.values() if count) == blocks, "heads of other blocks were read"
    assert all(count <= 32 + 400 for count in head_bytes.values())


def test_info_reads_no_part_at_all(
    make_cache: Callable, make_ids: Callable, saved: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(make_cache(layers=5, heads=2, tokens=43, width=64), make_ids(43), recipe=SMALL)
    count = 0
    read = LocalReader.read

    def counted(self: LocalReader, offset: int, length: int) -> bytes:
        nonlocal count
        count += length
        return read(self, offset, length)

    monkeypatch.setattr(LocalReader, "read", counted)
    with kvcellar.open(path) as archive:
        assert archive.info().blocks == 6
    assert count < 2000 < path.stat().st_size // 10


# --- token ids


@given(ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300))
@example(ids=[0])
@example(ids=[2**32 - 1] * 9)
@example(ids=[0] * 300)
def test_packed_ids_come_back(ids: list[int]) -> None:
    width, data = pack_ids(np.array(ids))
    assert width == max(1, max(ids).bit_length())
    assert len(data) == -(-width * len(ids) // 8)
    assert unpack_ids(data, width, len(ids), "ids").tolist() == ids


@given(
    ids=st.lists(st.integers(0, 60_000), min_size=2, max_size=40),
    width=st.integers(-1, 40),
    count=st.integers(0, 60),
    cut=st.integers(-3, 3),
)
def test_packed_ids_of_another_length_are_refused(ids: list[int], width: int, count: int, cut: int) -> None:
    data = (pack_ids(np.array(ids))[1] + bytes(3))[: len(pack_ids(np.array(ids))[1]) + cut]
    if 1 <= width <= 32 and len(data) == -(-width * count // 8):
        assert len(unpack_ids(data, width, count, "ids")) == count
        return
    with pytest.raises(DamagedArchive, match="ids"):
        unpack_ids(data, width, count, "ids")
