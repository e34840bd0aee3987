"""The file that keeps a language trie beside the archives of a folder (docs/language.md, "The trie file").

Method: an append-only log of checksummed records, one per archive. A record stands for itself (no record refers to
another), says which state of its archive it was made from (size, times, inode), and of two records of one archive the
later counts. So a file cut anywhere, or with any bit flipped, loses the records that are hit and no others, and is
rebuilt from the archives; only the probabilities that stood in a lost record are then unknown.

One file holds the sessions of one identity in one namespace; its name and header carry a digest of both.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from jaxtyping import Float32, UInt32

from ..errors import DamagedArchive, InvalidInput, NewerFormat
from ..identity import Identity, frame
from ..store.base import Reader
from .cells import checked_log2_probs

MAGIC = b"\x89KVL\r\n\x1a\n"  # not that of token logs, `\x89KVT`
MAJOR, MINOR = 1, 0
HEADER_SIZE, FRAME_SIZE = 64, 32
TAG = b"KVTR"
_HEADER = struct.Struct("<8sHHI32sQ")
_FRAME = struct.Struct("<4sIQQ")  # tag, flags, length of the body, xxh3 of the body; then xxh3 of these and the offset
_BODY = struct.Struct("<QQqqQII")  # tokens, size, mtime, ctime, inode, kind, bytes of the name
_U64 = struct.Struct("<Q")
FOREIGN, BARE, TOLD = 0, 1, 2
MAX_NAME = 4096
_STEP = 1 << 20


class Stamp(NamedTuple):
    """The state of a file: size in bytes, times of change in ns, inode. A file whose stamp differs has changed."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino & ((1 << 64) - 1))


@dataclass(frozen=True)
class Entry:
    """What a trie file says of the archive `name` as it was at `stamp`.

    `tokens` are its ids, None for a file that is no archive of this identity and namespace; `log2_probs` what the
    model made of them, NaN where not known, None where nothing is.
    """

    name: str
    stamp: Stamp
    tokens: UInt32[np.ndarray, " T"] | None
    log2_probs: Float32[np.ndarray, " T"] | None = None

    @property
    def packed_bytes(self) -> int:
        """Bytes of its record."""
        numbers = 0 if self.tokens is None else len(self.tokens) * (1 + self._told)
        return FRAME_SIZE + _BODY.size + len(os.fsencode(self.name)) + 4 * numbers

    @property
    def _told(self) -> bool:
        return self.log2_probs is not None and not bool(np.isnan(self.log2_probs).all())

    def pack(self, offset: int) -> bytes:
        """The record that starts at `offset`. Raises InvalidInput for a name no file has."""
        name = os.fsencode(self.name)
        if not 1 <= len(name) <= MAX_NAME:
            raise InvalidInput(f"a file name of {len(name)} bytes; expected 1…{MAX_NAME}")
        ids = b"" if self.tokens is None else self.tokens.astype("<u4").tobytes()
        logs = b"" if self.log2_probs is None or not self._told else self.log2_probs.astype("<f4").tobytes()
        kind = FOREIGN if self.tokens is None else TOLD if logs else BARE
        body = _BODY.pack(len(ids) // 4, *self.stamp, kind, len(name)) + name + ids + logs
        start = _FRAME.pack(TAG, 0, len(body), _xxh3(body))
        return start + _U64.pack(_xxh3(start + _U64.pack(offset))) + body

    @classmethod
    def unpack(cls, body: bytes, part: str) -> Entry:
        """Raises DamagedArchive naming `part`."""
        if len(body) < _BODY.size:
            raise DamagedArchive(part, f"{len(body)} bytes; expected at least {_BODY.size}")
        count, *stamp, kind, name_bytes = _BODY.unpack_from(body)
        expected = _BODY.size + name_bytes + count * (8 if kind == TOLD else 4)
        if kind not in (FOREIGN, BARE, TOLD) or not 1 <= name_bytes <= MAX_NAME or len(body) != expected:
            raise DamagedArchive(part, f"kind {kind}, {len(body)} bytes for {count} tokens; expected {expected}")
        if (kind == FOREIGN) != (count == 0):
            raise DamagedArchive(part, f"kind {kind} with {count} tokens")
        at = _BODY.size + name_bytes
        name = os.fsdecode(body[_BODY.size : at])
        if kind == FOREIGN:
            return cls(name, Stamp(*stamp), None)
        tokens, logs = np.frombuffer(body, "<u4", count, at).astype(np.uint32), None
        if kind == TOLD:
            try:
                logs = checked_log2_probs(np.frombuffer(body, "<f4", count, at + 4 * count), count)
            except InvalidInput as error:
                raise DamagedArchive(part, str(error)) from error
        return cls(name, Stamp(*stamp), tokens, logs)


def trie_key(identity: Identity, namespace: str) -> bytes:
    """32 bytes that stand for an identity and a namespace in name and header of their trie file."""
    return hashlib.sha256(frame("kvcellar-trie/1", [identity.kind, identity.digest, namespace])).digest()


def file_name(key: bytes) -> str:
    return f".kvcellar-{key[:16].hex()}.trie"


def pack_header(key: bytes) -> bytes:
    head = _HEADER.pack(MAGIC, MAJOR, MINOR, 0, key, 0)
    return head + _U64.pack(_xxh3(head))


def check_header(data: bytes, key: bytes) -> None:
    """Raises DamagedArchive unless it is the header of the trie file of `key`; NewerFormat where a later one is."""
    if len(data) < HEADER_SIZE or data[:8] != MAGIC or _U64.unpack_from(data, 56)[0] != _xxh3(data[:56]):
        raise DamagedArchive("trie header", f"its {len(data[:HEADER_SIZE])} bytes are none; expected {HEADER_SIZE}")
    _, major, minor, flags, stored, reserved = _HEADER.unpack_from(data)
    if major != MAJOR or flags or reserved:
        raise NewerFormat(f"a trie file of format {major}.{minor} (flags {flags:#x}); this kvcellar reads {MAJOR}.x")
    if stored != key:
        raise DamagedArchive("trie header", f"of {stored.hex()[:12]}…; expected {key.hex()[:12]}…")


def read_entries(reader: Reader, offset: int) -> Iterator[tuple[int, Entry | None]]:
    """The records from `offset` on: where each ends, and its entry. None stands for bytes that are no sound record.

    One record is in memory at a time, and nothing is allocated that the file is too short for. Records that lie within
    each other, which would take for ever to read one by one, are given up on. Raises StorageError.
    """
    size = reader.size()
    lost = 0
    while offset < size:
        start = reader.read(offset, FRAME_SIZE)
        length, entry = _body_length(start, offset, size), None
        if length is not None:
            body = reader.read(offset + FRAME_SIZE, length)
            if len(body) == length and _FRAME.unpack_from(start)[3] == _xxh3(body):
                with suppress(DamagedArchive):
                    entry = Entry.unpack(body, f"trie record at byte {offset}")
                offset += FRAME_SIZE + length
                yield offset, entry
                continue
            lost += length  # a record that was cut short, perhaps, and written on behind: look for the next within it
        offset = _next_frame(reader, offset + 1, size) if lost <= size else size
        yield offset, None


def _body_length(data: bytes, offset: int, size: int) -> int | None:
    """Length of the body of the record whose frame is `data`; None when no sound frame is there."""
    if len(data) < FRAME_SIZE or _U64.unpack_from(data, 24)[0] != _xxh3(data[:24] + _U64.pack(offset)):
        return None
    tag, flags, length, _ = _FRAME.unpack_from(data)
    return int(length) if tag == TAG and not flags and length <= size - offset - FRAME_SIZE else None


def _next_frame(reader: Reader, offset: int, size: int) -> int:
    """Where the next sound frame starts, or `size`."""
    while offset < size:
        window = reader.read(offset, min(_STEP, size - offset))
        for match in re.finditer(re.escape(TAG), window):
            at = offset + match.start()
            if _body_length(reader.read(at, FRAME_SIZE), at, size) is not None:
                return at
        offset += max(1, len(window) - len(TAG) + 1)
    return size


def _xxh3(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)
