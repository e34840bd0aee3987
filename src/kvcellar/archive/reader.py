"""Reading an archive: header, manifest, the last commit's blocks, and any range of a block's parts."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from ..errors import ArchiveNotFound, DamagedArchive, NewerFormat, NotAnArchive, OlderFormat
from ..store.base import Reader
from .block import DENSE, SLOTS, BlockHead
from .commit import Commit, check_entries, last_commit, read_commit, read_entries, read_index, records
from .format import (
    BLOCK,
    COMMIT,
    HEADER_SIZE,
    INDEX,
    MANIFEST,
    PROFILE,
    REDUCED,
    Record,
    check_header,
    checksum,
    read_record,
    record_name,
)
from .manifest import Manifest

HEADS_KEPT = 128


@dataclass(frozen=True)
class Block:
    """A block's head and where its body starts in the file."""

    head: BlockHead
    body_offset: int
    part: str

    @property
    def stop(self) -> int:
        return self.head.start + self.head.count


class ArchiveReader:
    """The committed state of an archive as it was when opened.

    Raises ArchiveNotFound for another namespace (told apart from a missing file by nobody), NotAnArchive,
    DamagedArchive, NewerFormat, OlderFormat, StorageError.
    """

    def __init__(self, reader: Reader, namespace: str = ""):
        self.reader = reader
        try:
            self._read(namespace)
        except BaseException:
            reader.close()
            raise

    def _read(self, namespace: str) -> None:
        reader = self.reader
        flags = check_header(reader.read(0, HEADER_SIZE), reader.name)
        size = reader.size()
        record = read_record(reader, HEADER_SIZE, size, MANIFEST)
        self.manifest = Manifest.unpack(record.head)
        self._recipe_digest = self.manifest.recipe.digest
        if self.manifest.namespace != namespace:
            raise ArchiveNotFound(errno.ENOENT, f"no archive at {reader.name}")
        if bool(flags & REDUCED) != self.reduced:
            raise DamagedArchive("header", f"its flags {flags:#x} contradict the recipe's reduction")
        self.profile_record: Record | None = None
        if self.manifest.profile_embedded:
            self.profile_record = record = read_record(reader, record.end, size, PROFILE)
        self.first_block = record.end
        self.refresh()

    def refresh(self) -> None:
        """Take the newest commit of the open file as the state."""
        commit = last_commit(self.reader)
        recipe = self.manifest.recipe
        entries, self.since_index, self.index_damage = read_entries(self.reader, commit, self.first_block, recipe)
        self._take(commit, entries)

    def advance(self, commit: Commit, entries: np.ndarray) -> None:
        """Take a commit just written behind the state as the new one, without the walk that reading it back costs."""
        self.since_index += 1
        if commit.index:
            self.since_index, self.index_damage = 0, None
        self._take(commit, check_entries(entries, commit, self.first_block, self.manifest.recipe))

    def _take(self, commit: Commit, entries: np.ndarray) -> None:
        self.commit, self.entries = commit, entries
        self._starts = entries["start"].astype(np.int64)
        self.block = lru_cache(HEADS_KEPT)(self.read_block)

    @property
    def tokens(self) -> int:
        return self.commit.tokens

    @property
    def reduced(self) -> bool:
        """Whether blocks hold slots of a reduced cache instead of every token."""
        return self.manifest.recipe.reduce is not None

    @property
    def slots(self) -> int | None:
        """Slots of all layers and heads of a reduced cache, as the heads of its blocks say; None for others."""
        return sum(block.head.slots or 0 for block in self.blocks(0, self.tokens)) if self.reduced else None

    @property
    def first_position(self) -> int:
        return self.block(0).head.first_position if len(self.entries) else 0

    @property
    def regular(self) -> bool:
        """Whether positions follow one by one; if not, only the next position is known."""
        return self.commit.next_position == self.first_position + self.tokens

    def position_after(self, tokens: int) -> int:
        """The position of the token that follows the first `tokens`, where positions are known."""
        return self.commit.next_position - self.tokens + tokens

    def read_block(self, index: int) -> Block:
        """Head of live block `index`, read anew and checked against index, manifest and geometry."""
        entry = self.entries[index]
        offset = int(entry["offset"])
        part = f"block {index} (tokens {entry['start']}…, byte {offset})"
        record = read_record(self.reader, offset, self.commit.offset, BLOCK)
        if record.head_checksum != entry["head"] or record.length != entry["length"]:
            raise DamagedArchive(part, "not the block the commit names")
        head = BlockHead.unpack(record.head, part, SLOTS if self.reduced else DENSE)
        if (head.start, head.count, head.sealed) != (entry["start"], entry["count"], bool(entry["sealed"])):
            raise DamagedArchive(part, "its tokens are not those the index names")
        if head.geometry != self.manifest.geometry or head.recipe != self._recipe_digest:
            raise DamagedArchive(part, "another geometry or recipe than the manifest's")
        if (head.profile.hex() if head.profile else None) != self.manifest.profile or head.base is not None:
            raise DamagedArchive(part, "another profile or base than the manifest's")
        if not head.all_coarse and self.manifest.recipe.window is None:
            raise DamagedArchive(part, "it holds fine tokens, and the recipe has none")
        if head.body_length != record.body_length:
            raise DamagedArchive(part, f"{record.body_length} bytes of parts, its table says {head.body_length}")
        return Block(head, record.body_offset, part)

    def block_indexes(self, start: int, stop: int) -> range:
        """Indexes of the blocks that hold tokens of `start`…`stop`."""
        if start >= stop:
            return range(0)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        return range(first, int(np.searchsorted(self._starts, stop, side="left")))

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """Blocks that hold tokens of `start`…`stop`, in order."""
        yield from map(self.block, self.block_indexes(start, stop))

    def read_parts(self, block: Block, groups: Sequence[int], buffer: np.ndarray | None = None) -> list[memoryview]:
        """Bytes of consecutive layer groups of a block, each checked, in one read of just these bytes.

        They lie in `buffer`, uint8 and large enough, when one is given.
        """
        if not groups:
            return []
        table = [block.head.parts[group] for group in groups]
        offset = block.body_offset + block.head.part_offset(groups[0])
        length = sum(length for length, _ in table)
        data = (np.empty(length, np.uint8) if buffer is None else buffer).data[:length]
        data = data[: self.reader.read_into(offset, data)]
        parts, at = [], 0
        for group, (length, expected) in zip(groups, table, strict=True):
            part = data[at : at + length]
            at += length
            if len(part) != length or checksum(part) != expected:
                raise DamagedArchive(f"{block.part}, layer group {group}", "checksum differs")
            parts.append(part)
        return parts

    def token_ids(self) -> np.ndarray:
        """All token ids, int64 (T,)."""
        ids = [block.head.tokens for block in self.blocks(0, self.tokens)]
        return np.concatenate(ids) if ids else np.empty(0, np.int64)

    def match(self, ids: np.ndarray, start: int = 0) -> tuple[int, int | None]:
        """Where the tokens from `start` on stop equalling `ids`, and the stored id there (None where either ends).

        With `start` 0 the first number is the length of the common prefix. `start` is at most the number of tokens.
        """
        stop = min(self.tokens, start + len(ids))
        for block in self.blocks(start, stop):
            first, last = max(start, block.head.start), min(stop, block.stop)
            stored = block.head.tokens[first - block.head.start : last - block.head.start]
            differ = np.flatnonzero(stored != ids[first - start : last - start])
            if len(differ):
                return first + int(differ[0]), int(stored[differ[0]])
        return stop, None

    def embedded_profile(self) -> bytes | None:
        if self.profile_record is None:
            return None
        record = self.profile_record
        data = self.reader.read(record.body_offset, record.body_length)
        if len(record.head) != 8 or record.head != struct.pack("<Q", checksum(data)):
            raise DamagedArchive(record_name(PROFILE, record.offset), "checksum differs")
        return data

    def close(self) -> None:
        self.reader.close()

    def __enter__(self) -> ArchiveReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def problems(archive: ArchiveReader) -> Iterator[tuple[float, DamagedArchive | None]]:
    """Check every record of the file and every part of its live blocks: (fraction done, problem or None) per step.

    Of superseded blocks only frame and head count, since nothing reads their parts. Bytes behind the last commit are
    reported too: a sound file ends with it.
    """
    reader, commit = archive.reader, archive.commit
    steps = len(archive.entries) + 2
    found: list[DamagedArchive] = [archive.index_damage] if archive.index_damage else []
    found += _collect(
        lambda: check_header(reader.read(0, HEADER_SIZE), reader.name),
        archive.embedded_profile,
        lambda: read_commit(reader, commit.offset, commit.end),
        lambda: _require_end(reader, commit),
    )
    offset = HEADER_SIZE
    for tag, start, end in records(reader, offset, commit.offset):
        if start != offset:
            found.append(DamagedArchive(f"record at byte {offset}", "its frame is not readable"))
        check = {INDEX: read_index, COMMIT: read_commit}.get(tag, read_record)
        found += _collect(partial(check, reader, start, commit.offset))
        offset = end
    if offset != commit.offset:
        found.append(DamagedArchive(f"record at byte {offset}", "its frame is not readable"))
    yield from ((1 / steps, problem) for problem in found)
    for index in range(len(archive.entries)):
        try:
            block = archive.read_block(index)
        except DamagedArchive as error:
            yield (index + 2) / steps, error
            continue
        for group in range(len(block.head.parts)):
            try:
                archive.read_parts(block, [group])
            except DamagedArchive as error:
                yield (index + 2) / steps, error
        yield (index + 2) / steps, None
    yield 1.0, None


def _collect(*checks: Callable[[], object]) -> list[DamagedArchive]:
    """What is wrong, of a list of checks."""
    found = []
    for check in checks:
        try:
            check()
        except DamagedArchive as problem:
            found.append(problem)
        except (NotAnArchive, NewerFormat, OlderFormat) as problem:
            found.append(DamagedArchive("header", str(problem)))
    return found


def _require_end(reader: Reader, commit: Commit) -> None:
    """Raise DamagedArchive unless the file ends with `commit`, or with a later one of another writer."""
    size = reader.size()
    if commit.end != size and last_commit(reader).end != size:
        part = f"end of file at byte {commit.end}"
        raise DamagedArchive(part, f"{size - commit.end} bytes follow the last commit")
