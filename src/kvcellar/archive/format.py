"""Header and record frames: the bytes every part of a `.kvc` file starts with (docs/format.md §1 and §2).

All integers are unsigned and little-endian, all offsets 64-bit. Checksums are xxh3-64: they notice damage, they do
not authenticate. A frame's checksum covers its own offset, so a record moved elsewhere in the file is noticed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from ..errors import DamagedArchive, NewerFormat, NotAnArchive, OlderFormat, UnsupportedCache
from ..store.base import Reader

MAGIC = b"\x89KVC\r\n\x1a\n"
TOKEN_LOG_MAGIC = b"\x89KVT"
MAJOR, MINOR = 1, 0
REDUCED = 2
"""Header flag: blocks hold slots of a reduced cache. Readers that do not know it take the file for a newer one."""
HEADER_SIZE = 32
FRAME_SIZE = 32
MAX_HEAD = 1 << 24
MANIFEST, PROFILE, BLOCK, INDEX, COMMIT = b"KVCM", b"KVCP", b"KVCB", b"KVCI", b"KVCC"
RECORD_NAMES = {MANIFEST: "manifest", PROFILE: "profile", BLOCK: "block", INDEX: "index", COMMIT: "commit"}
END_MAGIC = b"\nKVCend\n"
END_SIZE = 16

_HEADER = struct.Struct("<8sHHIQ")
_FRAME = struct.Struct("<4sIQQ")
_U64 = struct.Struct("<Q")


def checksum(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


def pack_header(flags: int = 0) -> bytes:
    head = _HEADER.pack(MAGIC, MAJOR, MINOR, flags, 0)
    return head + _U64.pack(checksum(head))


def check_header(data: bytes, name: str) -> int:
    """The header's flags. Raises NotAnArchive, DamagedArchive, NewerFormat or OlderFormat for files of others."""
    if not data:
        raise DamagedArchive("header", f"{name} is empty")
    if data[: len(TOKEN_LOG_MAGIC)] == TOKEN_LOG_MAGIC:
        raise NotAnArchive(f"{name} is a token log (recipe tokens), which has no blocks: this takes archives that do")
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise NotAnArchive(f"{name} is not a kvcellar archive: it starts with {data[:8]!r}, expected {MAGIC!r}")
    if len(data) < HEADER_SIZE:
        raise DamagedArchive("header", f"{name} ends after {len(data)} bytes; a header has {HEADER_SIZE}")
    _, major, minor, flags, reserved = _HEADER.unpack_from(data)
    if _U64.unpack_from(data, _HEADER.size)[0] != checksum(data[: _HEADER.size]):
        raise DamagedArchive("header", "checksum differs")
    if major > MAJOR or (major == MAJOR and (flags & ~REDUCED or reserved)):
        raise NewerFormat(f"{name} has format {major}.{minor} (flags {flags:#x}); this kvcellar reads up to {MAJOR}.x")
    if major < MAJOR:
        raise OlderFormat(f"{name} has format {major}.{minor}; no release wrote it, this kvcellar reads {MAJOR}.x")
    return int(flags)


@dataclass(frozen=True)
class Record:
    """A record's place in the file; `head` is read and checked, the body is not."""

    tag: bytes
    offset: int
    head: bytes
    body_length: int

    @property
    def body_offset(self) -> int:
        return self.offset + FRAME_SIZE + len(self.head) + 8

    @property
    def length(self) -> int:
        return FRAME_SIZE + len(self.head) + 8 + self.body_length

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def head_checksum(self) -> int:
        return checksum(self.head)


def pack_record(tag: bytes, offset: int, head: bytes, body_length: int) -> bytes:
    """Frame and head of a record that starts at `offset`; the body follows."""
    if len(head) > MAX_HEAD:
        raise UnsupportedCache(
            f"a {RECORD_NAMES[tag]} head of {len(head)} bytes; at most {MAX_HEAD}: save in smaller steps"
        )
    frame = _FRAME.pack(tag, 0, len(head), body_length)
    return frame + _U64.pack(checksum(frame + _U64.pack(offset))) + head + _U64.pack(checksum(head))


def record_name(tag: bytes, offset: int) -> str:
    return f"{RECORD_NAMES.get(tag, 'record')} at byte {offset}"


def read_frame(reader: Reader, offset: int, limit: int, expected: bytes | None = None) -> tuple[bytes, int, int]:
    """Tag, head length and body length of the record at `offset`, all of it known to lie below `limit`.

    Raises DamagedArchive when the frame is cut, altered, moved, or not the `expected` kind of record.
    """
    part = record_name(expected or b"", offset)
    if offset < HEADER_SIZE or offset + FRAME_SIZE > limit:
        raise DamagedArchive(part, f"its frame does not lie within the {limit} bytes there are")
    data = reader.read(offset, FRAME_SIZE)
    if len(data) < FRAME_SIZE or _U64.unpack_from(data, 24)[0] != checksum(data[:24] + _U64.pack(offset)):
        raise DamagedArchive(part, "frame checksum differs")
    tag, flags, head_length, body_length = _FRAME.unpack_from(data)
    if tag not in RECORD_NAMES or flags:
        raise DamagedArchive(part, f"unknown record {tag!r} with flags {flags:#x}")
    if expected is not None and tag != expected:
        raise DamagedArchive(part, f"found a {RECORD_NAMES[tag]}")
    if head_length > MAX_HEAD or offset + FRAME_SIZE + head_length + 8 + body_length > limit:
        raise DamagedArchive(part, f"{head_length} + {body_length} bytes do not fit into the {limit} there are")
    return tag, head_length, body_length


def read_record(reader: Reader, offset: int, limit: int, expected: bytes | None = None) -> Record:
    """The record at `offset` with its head checked. Raises DamagedArchive."""
    tag, head_length, body_length = read_frame(reader, offset, limit, expected)
    data = reader.read(offset + FRAME_SIZE, head_length + 8)
    head = data[:head_length]
    if len(data) < head_length + 8 or _U64.unpack_from(data, head_length)[0] != checksum(head):
        raise DamagedArchive(record_name(tag, offset), "head checksum differs")
    return Record(tag, offset, head, body_length)
