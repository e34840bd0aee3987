"""What is still readable in a damaged file: its manifest and profile, its blocks, and what index and commits say.

All records are walked in file order, from tag to tag where a frame is unreadable. A frame's checksum covers its own
offset, so bytes that only look like a record are never taken for one. Every damage met is noted, none stops the walk.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import ArchiveNotFound, DamagedArchive, InvalidInput, NotAnArchive
from ..store.base import Reader
from .block import BlockHead
from .commit import read_commit, read_index, records
from .format import BLOCK, COMMIT, HEADER_SIZE, INDEX, MANIFEST, PROFILE, check_header, checksum, read_record
from .format import record_name as name_of
from .manifest import Manifest
from .reader import ArchiveReader

_ANYWHERE = 1 << 63


@dataclass(frozen=True)
class Piece:
    """Bytes of the damaged file that the new one lacks: tokens `start` to `stop` (exclusive), None where unknown."""

    offset: int
    length: int
    start: int | None
    stop: int | None
    reason: str


@dataclass
class Found:
    """A block whose head is readable; `older` are those of the same tokens that it replaced, in file order."""

    offset: int
    length: int
    start: int
    stop: int
    sealed: bool
    older: list[Found] = field(default_factory=list)

    def piece(self, reason: str) -> Piece:
        return Piece(self.offset, self.length, self.start, self.stop, reason)


class Survey:
    """The readable state of a file: `manifest`, `profile` bytes, `live` blocks, and everything damaged so far.

    `like`, a sound archive of the same model, recipe and namespace, stands in for a damaged manifest or profile.
    Raises what `repair` raises.
    """

    def __init__(self, reader: Reader, namespace: str, like: ArchiveReader | None):
        self.reader, self.size = reader, reader.size()
        self.problems: list[DamagedArchive] = []
        self.damaged: list[Piece] = []
        self.named: dict[int, tuple[int, int, int]] = {}  # by offset of a block: start, stop, checksum of its head
        self.ends: set[int] = set()  # numbers of tokens that an intact index or commit speaks of
        self.positions: dict[int, int] = {}  # by number of tokens, the next position an intact commit states
        self._embedded: bytes | None = None
        foreign = self._header()
        manifest = self._manifest(namespace)
        blocks = list(self._blocks())
        if not blocks:
            raise foreign or DamagedArchive("block", f"none is readable in the {self.size} bytes there are")
        if manifest is not None:
            self.manifest = manifest
        elif like is not None:
            self.manifest = like.manifest
        else:
            problem = next(problem for problem in self.problems if problem.part.startswith("manifest"))
            raise DamagedArchive(
                problem.part,
                f"{problem.problem}; {len(blocks)} blocks are there, but only the manifest says which model they are "
                "of: name a sound archive of the same model and recipe to take it from (--like)",
            )
        self._expected = self.manifest.geometry, self.manifest.recipe.digest, self.manifest.profile, None
        self.live = self._live(blocks)
        if manifest is None and like is not None and not self.live:
            raise InvalidInput(f"no block is of the geometry, recipe and profile of {like.reader.name}")
        self._choose_profile(like)

    def _header(self) -> NotAnArchive | DamagedArchive | None:
        try:
            check_header(self.reader.read(0, HEADER_SIZE), self.reader.name)
        except NotAnArchive as error:
            self.problems.append(DamagedArchive("header", "it does not start as an archive does"))
            return error
        except DamagedArchive as damage:
            self.problems.append(damage)
            return damage
        return None

    def _manifest(self, namespace: str) -> Manifest | None:
        try:
            manifest = Manifest.unpack(read_record(self.reader, HEADER_SIZE, self.size, MANIFEST).head)
        except DamagedArchive as damage:
            self.problems.append(damage)
            return None
        if manifest.namespace != namespace:
            raise ArchiveNotFound(errno.ENOENT, f"no archive at {self.reader.name}")
        return manifest

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Offset and length of everything that looks like a block, in file order; takes in all other records."""
        at = HEADER_SIZE
        for tag, start, end in records(self.reader, HEADER_SIZE, self.size):
            if start != at:
                self._note_unreadable(at, start)
            at = end
            try:
                if tag == BLOCK:
                    yield start, end - start
                elif tag == INDEX:
                    self._name(read_index(self.reader, start, end))
                elif tag == COMMIT:
                    commit = read_commit(self.reader, start, end)
                    self._name(commit.added)
                    self.ends.add(commit.tokens)
                    self.positions[commit.tokens] = commit.next_position
                elif tag == PROFILE:
                    self._take_profile(start, end)
            except DamagedArchive as damage:
                self.problems.append(damage)
        if at < self.size:
            with suppress(DamagedArchive):
                if read_record(self.reader, at, _ANYWHERE).tag == BLOCK:  # the file was cut within its body
                    yield at, self.size - at
                    return
            self._note_unreadable(at, self.size)

    def _note_unreadable(self, start: int, end: int) -> None:
        if start > HEADER_SIZE:  # the manifest is noted already
            self.problems.append(DamagedArchive(f"record at byte {start}", f"{end - start} bytes are not readable"))

    def _name(self, entries: np.ndarray) -> None:
        for offset, _, start, count, _, head in entries.tolist():
            self.named[offset] = (start, start + count, head)
        self.ends.update(int(last["start"]) + int(last["count"]) for last in entries[-1:])

    def _take_profile(self, start: int, end: int) -> None:
        record = read_record(self.reader, start, end, PROFILE)
        data = self.reader.read(record.body_offset, record.body_length)
        if record.head != struct.pack("<Q", checksum(data)):
            raise DamagedArchive(name_of(PROFILE, start), "checksum differs")
        self._embedded = self._embedded or data

    def _choose_profile(self, like: ArchiveReader | None) -> None:
        """The embedded profile, else that of `like`; without either, the new manifest says that none is embedded."""
        wanted = self.manifest.profile
        self.profile = self._embedded if wanted is not None else None
        if self.profile is None and wanted is not None and like is not None and like.manifest.profile == wanted:
            self.profile = like.embedded_profile()
        self.profile_lost = self.manifest.profile_embedded and self.profile is None
        self.manifest = replace(self.manifest, profile_embedded=self.profile is not None)

    def head(self, offset: int) -> tuple[BlockHead, int]:
        """Head of the block at `offset` and where its body starts. Raises DamagedArchive unless it belongs here."""
        record = read_record(self.reader, offset, _ANYWHERE, BLOCK)
        part = name_of(BLOCK, offset)
        if offset in self.named and self.named[offset][2] != record.head_checksum:
            raise DamagedArchive(part, "not the block that index or commit name")
        head = BlockHead.unpack(record.head, part)
        profile = head.profile.hex() if head.profile else None
        if (head.geometry, head.recipe, profile, head.base) != self._expected:
            raise DamagedArchive(part, "another geometry, recipe, profile or base than the manifest's")
        if head.body_length != record.body_length:
            raise DamagedArchive(part, f"{record.body_length} bytes of parts, its table says {head.body_length}")
        return head, record.body_offset

    def _live(self, blocks: list[tuple[int, int]]) -> list[Found]:
        """Blocks with readable heads that no later one replaced, first token first."""
        live: list[Found] = []
        for offset, length in blocks:
            try:
                head, _ = self.head(offset)
            except DamagedArchive as damage:
                self.problems.append(damage)
                start, stop, _ = self.named.get(offset, (None, None, 0))
                self.damaged.append(Piece(offset, length, start, stop, damage.problem))
                continue
            new = Found(offset, length, head.start, head.start + head.count, head.sealed)
            replaced = []
            while live and live[-1].start >= new.start:
                replaced.append(live.pop())
            for old in reversed(replaced):
                if self._vouched(old, head):
                    new.older += [*old.older, old]
                    old.older = []
            live.append(new)
        return live

    def _vouched(self, old: Found, head: BlockHead) -> bool:
        """Whether the block with `head` holds the very tokens of `old`."""
        stored = self.head(old.offset)[0].tokens
        return np.array_equal(head.tokens[old.start - head.start : old.stop - head.start], stored)

    def parts(self, found: Found) -> Iterator[bytes]:
        """The parts of a block, one after the other. Raises DamagedArchive at the first that does not check."""
        head, at = self.head(found.offset)
        for group, (length, expected) in enumerate(head.parts):
            part = self.reader.read(at, max(0, min(length, self.size - at)))
            if len(part) != length or checksum(part) != expected:
                where = (
                    f"{name_of(BLOCK, found.offset)} (tokens {found.start} to {found.stop - 1}), layer group {group}"
                )
                raise DamagedArchive(where, "checksum differs" if len(part) == length else "cut off")
            at += length
            yield part

    def intact(self, found: Found, *, note: bool = True) -> bool:
        """Whether all parts of a block check; with `note`, the first damaged one is noted."""
        try:
            for _ in self.parts(found):
                pass
        except DamagedArchive as damage:
            if note:
                self.problems.append(damage)
                self.damaged.append(found.piece(damage.problem))
            return False
        return True
