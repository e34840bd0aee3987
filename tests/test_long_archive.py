"""Archives beyond 4 GiB: sizes, offsets and token counts keep their 64 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvcellar
from archives import BLOCK, SMALL, Bytes, Pairs, contents_at, contents_of, same
from kvcellar.archive.block import BlockHead
from kvcellar.archive.commit import (
    ENTRY,
    Commit,
    check_entries,
    last_commit,
    pack_index,
    read_commit,
    read_index,
)
from kvcellar.archive.format import BLOCK as BLOCK_TAG
from kvcellar.archive.format import HEADER_SIZE, MANIFEST, checksum, pack_header, pack_record, read_record
from kvcellar.archive.reader import ArchiveReader
from kvcellar.archive.writer import NewBlock, append_blocks
from kvcellar.errors import DamagedArchive
from kvcellar.store.local import LocalAppender, LocalReader, LocalStore

EDGES = [*((1 << bits) + step for bits in (31, 32) for step in (-1, 0, 1)), 5 << 30, 1 << 40]
GAP = (5 << 30) + 4097  # bytes of a block that is a hole in the file


class Far(Bytes):
    """`data` behind `base` zero bytes, of which no memory is made."""

    def __init__(self, base: int, data: bytes):
        super().__init__(data)
        self.base = base

    def size(self) -> int:
        return self.base + len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        assert offset >= self.base, f"read at {offset}, far below {self.base}"
        return self.data[offset - self.base :][:length]


@pytest.mark.parametrize("edge", EDGES)
def test_a_record_anywhere(edge: int) -> None:
    data = pack_record(BLOCK_TAG, edge, b"head", edge)
    record = read_record(Far(edge, data), edge, 4 * edge)
    assert (record.offset, record.body_length, record.head) == (edge, edge, b"head")
    assert (record.body_offset, record.end) == (edge + len(data), 2 * edge + len(data))
    for moved in (edge - (1 << 32), edge + (1 << 32)):
        if moved >= HEADER_SIZE:
            with pytest.raises(DamagedArchive, match="checksum differs"):
                read_record(Far(moved, data), moved, 4 * edge + (2 << 32))
    with pytest.raises(DamagedArchive, match="do not fit"):
        read_record(Far(edge, data), edge, record.end - 1)


@pytest.mark.parametrize("edge", EDGES)
def test_a_commit_and_an_index_anywhere(edge: int) -> None:
    entry = np.array([(edge - 500, 400, edge, 7, 0, edge * 3), (edge - 90, 80, edge + 7, 1, 0, 1)], ENTRY)
    index = pack_index(edge, entry)
    assert np.array_equal(read_index(Far(edge, index), edge, edge + len(index)), entry)
    commit = Commit(edge, edge, edge - 100, edge - 50, 0, edge + 8, edge + 9, edge * 2, entry)
    reader = Far(edge, commit.pack())
    for found in (read_commit(reader, edge, reader.size()), last_commit(reader)):
        assert found.end == reader.size()
        for name in ("sequence", "offset", "previous", "index", "tokens", "next_position", "live"):
            assert getattr(found, name) == getattr(commit, name), name
        assert np.array_equal(found.added, entry)


@pytest.mark.parametrize("edge", EDGES)
def test_blocks_are_checked_against_far_bounds(edge: int) -> None:
    entries = np.array([(100, edge, 0, BLOCK, 1, 0), (100 + edge, 50, BLOCK, 3, 0, 0)], ENTRY)
    commit = Commit(1, 150 + edge, 0, 0, 0, BLOCK + 3, BLOCK + 3, 0, entries)
    assert check_entries(entries, commit, 100, SMALL) is entries
    for field, value in (("length", edge + 51), ("offset", 151 + edge), ("offset", 99)):
        wrong = entries.copy()
        wrong[0][field] = value
        with pytest.raises(DamagedArchive, match="outside the file"):
            check_entries(wrong, commit, 100, SMALL)


@pytest.mark.parametrize("edge", EDGES)
def test_a_block_head_of_far_tokens_and_large_parts(edge: int, make_cache: Callable, saved: Callable) -> None:
    with ArchiveReader(LocalReader(saved(make_cache(tokens=BLOCK), recipe=SMALL))) as archive:
        head = archive.read_block(0).head
    far = replace(head, start=edge, first_position=edge + 5, parts=((edge, 1), (edge + 1, 2), (3, 3)))
    assert (far.body_length, far.part_offset(2)) == (2 * edge + 4, 2 * edge + 1)
    found = BlockHead.unpack(far.pack(), "block")
    assert (found.start, found.first_position, found.parts) == (far.start, far.first_position, far.parts)
    assert (found.body_length, found.part_offset(2)) == (far.body_length, far.part_offset(2))


@pytest.fixture
def far(cache: Pairs, make_ids: Callable, saved: Callable, tmp_path: Path) -> Path:
    """An archive of 40 tokens whose blocks lie behind a superseded one of 5 GiB, which is a hole in the file."""
    near = saved(cache, recipe=SMALL, name="near.kvc")
    path = tmp_path / "far.kvc"
    path.touch()
    with LocalReader(near) as reader, LocalAppender(path) as appender:
        source = ArchiveReader(reader)
        _write_hole(appender, source, source.read_block(0).head)
        if path.stat().st_blocks * 512 > 1 << 20:
            pytest.skip("this file system keeps no holes")
        archive = ArchiveReader(appender)
        assert archive.tokens == 4
        for keep, chosen in ((0, range(3)), (3, range(3, 5))):
            append_blocks(appender, archive, keep, _copies(source, chosen))
    assert path.stat().st_size > GAP
    return path


@pytest.fixture
def cache(make_cache: Callable) -> Pairs:
    return make_cache(tokens=40)


def _write_hole(appender: LocalAppender, source: ArchiveReader, like: BlockHead) -> None:
    """Header, manifest, a block of 4 tokens whose parts are GAP bytes nobody wrote, and a commit."""
    appender.append(pack_header() + pack_record(MANIFEST, HEADER_SIZE, source.manifest.pack(), 0))
    offset, parts = appender.size(), ((GAP // 2, 0), (GAP // 2, 0), (1, 0))
    head = replace(like, tokens=like.tokens[:4], sealed=False, parts=parts).pack()
    appender.append(pack_record(BLOCK_TAG, offset, head, GAP))
    length = appender.size() + GAP - offset
    appender.truncate(offset + length)
    entry = np.array([(offset, length, 0, 4, 0, checksum(head))], ENTRY)
    appender.append(Commit(1, offset + length, 0, 0, 0, 4, 4, offset + length, entry).pack())


def _copies(source: ArchiveReader, chosen: range) -> Iterator[NewBlock]:
    for index in chosen:
        block = source.read_block(index)
        yield NewBlock(block.head, source.read_parts(block, range(len(block.head.parts))))


def test_an_archive_beyond_5_gib_reads_and_verifies(far: Path, cache: Pairs, make_ids: Callable) -> None:
    with kvcellar.open(far, identity="m") as archive:
        assert min(archive._open().entries["offset"]) > 5 << 30
        assert archive.verify().ok
        assert archive.info().file_bytes == far.stat().st_size
        assert archive.restore(positions=range(30, 40)).cache.layers[0].keys.shape[2] == 10
    assert same(contents_at(far), contents_of(cache, make_ids(40)))
    assert kvcellar.find(far.parent, make_ids(40), identity="m").matched == 40


def test_damage_beyond_5_gib_is_noticed_and_the_blocks_found(far: Path, cache: Pairs, make_ids: Callable) -> None:
    with ArchiveReader(LocalReader(far)) as archive:
        block, first_commit = archive.read_block(2), last_commit(archive.reader).previous
    _flip(far, first_commit + 40)  # an earlier commit: the list of blocks is read off the blocks instead
    assert same(contents_at(far), contents_of(cache, make_ids(40)))
    with kvcellar.open(far) as opened:
        assert not opened.verify().ok
    _flip(far, block.body_offset)
    with kvcellar.open(far) as opened, pytest.raises(DamagedArchive, match="block 2"):
        opened.read(0, 16, 17)


def _flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_appending_beyond_5_gib_reclaims_them(far: Path, make_cache: Callable, make_ids: Callable) -> None:
    longer = make_cache(tokens=43)
    with kvcellar.open(far, identity="m", mode="a") as archive:
        archive.append(longer, make_ids(43))
        assert archive.info().file_bytes == far.stat().st_size < 1 << 20
    assert same(contents_at(far), contents_of(longer, make_ids(43)))


def test_the_store_reads_and_writes_at_far_offsets(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    with LocalStore(tmp_path).open_appender("sparse") as appender:
        for edge in EDGES[:-1]:
            appender.truncate(edge)
            appender.append(b"mark")
        assert appender.size() == EDGES[-2] + 4
        buffer = bytearray(6)
        assert appender.read_into(EDGES[-2] - 2, memoryview(buffer)) == 6
        assert buffer == b"\0\0mark"
        assert appender.read(EDGES[-2] + 2, 10) == b"rk"
        assert appender.read(2, 2) == b"\0\0"
