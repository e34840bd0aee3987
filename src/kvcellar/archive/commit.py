"""Commits and the index: which blocks make up the archive now (docs/format.md §5 and §6).

A commit says: of the previous state keep the first `keep` blocks, then add these. The state of a commit is thus
found by walking back to the nearest commit with an index. The index only saves that walk; the same list can be
read off the blocks themselves, in file order, since a block replaces whatever starts at or behind its own start.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ..errors import DamagedArchive
from ..recipe import Recipe
from ..store.base import Reader
from .block import BlockHead
from .format import (
    BLOCK,
    COMMIT,
    END_MAGIC,
    END_SIZE,
    FRAME_SIZE,
    HEADER_SIZE,
    INDEX,
    Record,
    checksum,
    pack_record,
    read_frame,
    read_record,
    record_name,
)

# One live block: where its record lies, which tokens it holds, whether it is sealed, and its head's checksum.
ENTRY = np.dtype(
    [("offset", "<u8"), ("length", "<u8"), ("start", "<u8"), ("count", "<u4"), ("sealed", "<u4"), ("head", "<u8")]
)
_COMMIT = struct.Struct("<QQQQQQQQ")
_FRAME_START = re.compile(rb"KVC[MPBIC]\0{4}(.{3}\0|\0{3}\x01)\0{4}", re.DOTALL)  # tag, no flags, a head up to 2²⁴
_FRAME_START_SIZE = 16
_SEARCH_STEP = 1 << 20
MAX_BLOCKS = 1 << 32


@dataclass(frozen=True)
class Commit:
    """`sequence` counts from 1; `previous` and `index` are record offsets, 0 for none; `live` is bytes in use."""

    sequence: int
    offset: int
    previous: int
    index: int
    keep: int
    tokens: int
    next_position: int
    live: int
    added: np.ndarray  # ENTRY (A,)
    end: int = 0

    def pack(self) -> bytes:
        head = _COMMIT.pack(
            *(self.sequence, self.offset, self.previous, self.index),
            *(self.keep, self.tokens, self.next_position, self.live),
        )
        head += self.added.tobytes()
        record = pack_record(COMMIT, self.offset, head, END_SIZE)
        return record + struct.pack("<Q", len(record) + END_SIZE) + END_MAGIC

    @property
    def packed_length(self) -> int:
        return len(self.pack())


def read_commit(reader: Reader, offset: int, limit: int) -> Commit:
    """The commit record at `offset`. Raises DamagedArchive."""
    record = read_record(reader, offset, limit, COMMIT)
    part = record_name(COMMIT, offset)
    if len(record.head) < _COMMIT.size or (len(record.head) - _COMMIT.size) % ENTRY.itemsize:
        raise DamagedArchive(part, f"head of {len(record.head)} bytes")
    added = np.frombuffer(record.head, ENTRY, offset=_COMMIT.size)
    sequence, at, previous, index, keep, tokens, position, live = _COMMIT.unpack_from(record.head)
    commit = Commit(sequence, at, previous, index, keep, tokens, position, live, added, record.end)
    tail = reader.read(record.body_offset, END_SIZE)
    if record.body_length != END_SIZE or tail != struct.pack("<Q", record.length) + END_MAGIC:
        raise DamagedArchive(part, "its end mark differs")
    if commit.offset != offset or commit.previous >= offset or commit.index >= offset or commit.keep > MAX_BLOCKS:
        raise DamagedArchive(part, f"refers to {commit.offset}, {commit.previous}, {commit.index}")
    return commit


def last_commit(reader: Reader) -> Commit:
    """The newest complete commit.

    A write that stopped half-way leaves bytes behind it, which are passed over. A last commit that is all there but
    altered is DamagedArchive: falling back silently would lose tokens somebody was told are safe.
    """
    size = reader.size()
    if commit := _commit_ending_at(reader, size, strict=True):
        return commit
    end, tried = size, 0
    while end > HEADER_SIZE:
        begin = max(HEADER_SIZE, end - _SEARCH_STEP)
        window = reader.read(begin, min(size, end + len(END_MAGIC) - 1) - begin)
        found = len(window)
        while (found := window.rfind(END_MAGIC, 0, found + len(END_MAGIC) - 1)) >= 0:
            stop = begin + found + len(END_MAGIC)
            length = _length_ending_at(reader, stop)
            tried += length
            if tried > size:  # commits that lie within each other, which would take for ever to read one by one
                raise DamagedArchive("commit", f"more bytes of commits than the {size} there are")
            commit = _commit_ending_at(reader, stop, strict=False) if length else None
            if commit is not None:
                _require_torn(reader, commit.end, size)
                return commit
        end = begin
    raise DamagedArchive("commit", f"no complete commit in {size} bytes: the file was cut or never finished")


def _commit_ending_at(reader: Reader, end: int, *, strict: bool) -> Commit | None:
    """The commit whose last byte is just before `end`, or None when no end mark is there."""
    if end < HEADER_SIZE + END_SIZE:
        return None
    mark = reader.read(end - END_SIZE, END_SIZE)
    if mark[8:] != END_MAGIC:
        return None
    (length,) = struct.unpack_from("<Q", mark)
    try:
        return read_commit(reader, end - length, end) if HEADER_SIZE + length <= end else _cut(end)
    except DamagedArchive:
        if strict:
            raise
        return None


def _length_ending_at(reader: Reader, end: int) -> int:
    """Length of the commit whose end mark and frame both say that it ends just before `end`, 0 for none."""
    mark = reader.read(max(0, end - END_SIZE), END_SIZE)
    length = struct.unpack_from("<Q", mark)[0] if len(mark) == END_SIZE else end
    try:
        _, head_length, body_length = read_frame(reader, max(0, end - length), end, COMMIT)
    except DamagedArchive:
        return 0
    return length if FRAME_SIZE + head_length + 8 + body_length == length else 0


def _cut(end: int) -> Commit:
    raise DamagedArchive("commit", f"the end mark at byte {end - END_SIZE} gives a length beyond the file")


def _require_torn(reader: Reader, offset: int, size: int) -> None:
    """Raise DamagedArchive if the bytes behind the last good commit hold a whole commit that does not check."""
    while offset < size:
        try:
            tag, head_length, body_length = read_frame(reader, offset, size)
        except DamagedArchive:
            return
        end = offset + FRAME_SIZE + head_length + 8 + body_length
        if tag == COMMIT and end == size:
            if not any(reader.read(size - END_SIZE, END_SIZE)):
                return  # its length reached the disk and its bytes did not: the power failed while it was written
            raise DamagedArchive(record_name(COMMIT, offset), "altered after it was written")
        offset = end


def read_entries(
    reader: Reader, commit: Commit, first_block: int, recipe: Recipe
) -> tuple[np.ndarray, int, DamagedArchive | None]:
    """The live blocks of `commit`, ENTRY (B,), first token first, sealed as `recipe` says; then how many
    commits came since the nearest index.

    When the index or an earlier commit is damaged, the list is read off the blocks, and the damage comes with it.
    """
    try:
        entries, since_index = _walk(reader, commit)
        return check_entries(entries, commit, first_block, recipe), since_index, None
    except DamagedArchive as damage:
        entries = check_entries(scan_blocks(reader, first_block, commit.offset), commit, first_block, recipe)
        return entries, commit.sequence, damage


def _walk(reader: Reader, commit: Commit) -> tuple[np.ndarray, int]:
    """State by the chain of commits back to the nearest index, and the number of commits behind that."""
    steps = [commit]
    while not steps[-1].index and steps[-1].previous:
        steps.append(read_commit(reader, steps[-1].previous, steps[-1].offset))
    if not steps[-1].index and steps[-1].keep:
        raise DamagedArchive(record_name(COMMIT, steps[-1].offset), "keeps blocks of no earlier commit")
    state: list[np.ndarray] = []
    if steps[-1].index:
        state = [read_index(reader, steps[-1].index, steps.pop().offset)]
    since_index = len(steps)
    entries = np.concatenate(state) if state else np.empty(0, ENTRY)
    pieces = [entries]
    held = len(entries)
    for step in reversed(steps):
        if step.keep > held:
            raise DamagedArchive(record_name(COMMIT, step.offset), f"keeps {step.keep} of {held} blocks")
        while held > step.keep:
            last = pieces.pop()
            keep_here = max(0, len(last) - (held - step.keep))
            held -= len(last) - keep_here
            if keep_here:
                pieces.append(last[:keep_here])
        pieces.append(step.added)
        held += len(step.added)
    return np.concatenate(pieces), since_index


def pack_index(offset: int, entries: np.ndarray) -> bytes:
    """The index record at `offset`: number and checksum of the entries as its head, the entries as its body."""
    body = entries.astype(ENTRY).tobytes()
    return pack_record(INDEX, offset, struct.pack("<QQ", len(entries), checksum(body)), len(body)) + body


def read_index(reader: Reader, offset: int, limit: int) -> np.ndarray:
    record: Record = read_record(reader, offset, limit, INDEX)
    part = record_name(INDEX, offset)
    if len(record.head) != 16:
        raise DamagedArchive(part, f"head of {len(record.head)} bytes")
    count, expected = struct.unpack("<QQ", record.head)
    if count > MAX_BLOCKS or record.body_length != count * ENTRY.itemsize:
        raise DamagedArchive(part, f"{record.body_length} bytes for {count} blocks")
    body = reader.read(record.body_offset, record.body_length)
    if len(body) != record.body_length or checksum(body) != expected:
        raise DamagedArchive(part, "checksum differs")
    return np.frombuffer(body, ENTRY)


def scan_blocks(reader: Reader, first_block: int, end: int) -> np.ndarray:
    """Live blocks read off the records between `first_block` and `end`, in file order. Raises DamagedArchive."""
    live: list[tuple[int, int, int, int, int, int]] = []
    for tag, offset, _ in records(reader, first_block, end):
        if tag == BLOCK:
            record = read_record(reader, offset, end, BLOCK)
            head = BlockHead.unpack(record.head, record_name(BLOCK, offset))
            while live and live[-1][2] >= head.start:
                live.pop()
            live.append((offset, record.length, head.start, head.count, int(head.sealed), record.head_checksum))
    return np.array(live, ENTRY)


def records(reader: Reader, offset: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(tag, offset, end) of each record from `offset` on; a damaged frame is passed over to the next good one."""
    while offset < end:
        try:
            tag, head_length, body_length = read_frame(reader, offset, end)
        except DamagedArchive:
            offset = _next_frame(reader, offset + 1, end)
            continue
        stop = offset + FRAME_SIZE + head_length + 8 + body_length
        yield tag, offset, stop
        offset = stop


def _next_frame(reader: Reader, offset: int, end: int) -> int:
    """Where the next good frame starts, or `end`."""
    while offset < end:
        window = reader.read(offset, min(_SEARCH_STEP, end - offset))
        for match in _FRAME_START.finditer(window):
            with suppress(DamagedArchive):
                read_frame(reader, offset + match.start(), end)
                return offset + match.start()
        offset += max(1, len(window) - _FRAME_START_SIZE + 1)
    return end


def check_entries(entries: np.ndarray, commit: Commit, first_block: int, recipe: Recipe) -> np.ndarray:
    """Raise DamagedArchive unless the blocks cover the commit's tokens without gap, lie before it, and are sealed
    exactly where they hold `recipe.block` tokens, with a tail of less than `recipe.tail` tokens behind.
    """
    part = record_name(COMMIT, commit.offset)
    starts, counts = entries["start"].astype(np.uint64), entries["count"].astype(np.uint64)
    expected = np.concatenate([[np.uint64(0)], np.cumsum(counts, dtype=np.uint64)])
    covered = np.array_equal(starts, expected[:-1]) and int(expected[-1]) == commit.tokens
    if not covered or not counts.all() or not len(entries):
        raise DamagedArchive(part, f"its blocks do not cover its {commit.tokens} tokens")
    offsets, lengths = entries["offset"], entries["length"]
    inside = (offsets >= first_block) & (offsets < commit.offset) & (lengths <= commit.offset - offsets)
    if not inside.all() or (offsets[1:] < offsets[:-1] + lengths[:-1]).any():
        raise DamagedArchive(part, "a block lies outside the file, or within another one")
    sealed = entries["sealed"]
    full = int(np.count_nonzero(sealed == 1))
    in_order = (sealed[:full] == 1).all() and (sealed[full:] == 0).all() and (counts[:full] == recipe.block).all()
    if not in_order or int(counts[full:].sum()) >= recipe.tail:
        raise DamagedArchive(part, f"its blocks are not sealed ones of {recipe.block} tokens and a shorter tail")
    return entries
