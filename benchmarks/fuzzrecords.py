"""An archive taken apart into its records, and put together again with offsets, lengths and checksums set right."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvcellar.archive.commit import ENTRY
from kvcellar.archive.format import COMMIT, END_MAGIC, HEADER_SIZE, INDEX, checksum, pack_header, read_frame
from kvcellar.store.base import Reader


class Memory(Reader):
    """Bytes as an open file."""

    def __init__(self, data: bytes, name: str = "memory"):
        self.data, self.name = data, name

    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]

    def close(self) -> None:
        pass


@dataclass
class Rec:
    """A record taken apart. `frame` overrides (offset, width, value) of frame fields once lengths are set."""

    tag: bytes
    head: bytearray
    body: bytearray
    offset: int
    frame: tuple[tuple[int, int, int], ...] = ()

    @property
    def length(self) -> int:
        return 40 + len(self.head) + len(self.body)

    def copy(self) -> Rec:
        return replace(self, head=bytearray(self.head), body=bytearray(self.body))


def taken_apart(data: bytes) -> list[Rec]:
    """The records of a sound archive."""
    found, at = [], HEADER_SIZE
    while at < len(data):
        tag, head, body = read_frame(Memory(data), at, len(data))
        start = at + 32
        rest = bytearray(data[start + head + 8 : start + head + 8 + body])
        found.append(Rec(tag, bytearray(data[start : start + head]), rest, at))
        at = start + head + 8 + body
    return found


def put_together(
    records: list[Rec], late: Callable[[list[Rec]], object] = lambda _: None, *, follow: bool = True
) -> bytes:
    """A file in which offsets, lengths and checksums are right, whatever `late` changes in index and commits before
    the last are set. With `follow`, they also name the tokens that the blocks' heads now claim.
    """
    moved: dict[int, Rec] = {}
    new: list[int] = []
    at = HEADER_SIZE
    for record in records:
        moved.setdefault(record.offset, record)
        new.append(at)
        at += record.length
    places = {id(record): offset for record, offset in zip(records, new, strict=True)}
    for record, offset in zip(records, new, strict=True):
        if record.tag == INDEX:
            record.body = bytearray(_relinked(bytes(record.body), moved, places, follow))
        elif record.tag == COMMIT and len(record.head) >= 64:
            sequence, _, previous, index, *rest = struct.unpack_from("<8Q", record.head)
            previous, index = (places[id(moved[o])] if o in moved else o for o in (previous, index))
            record.head[:64] = struct.pack("<8Q", sequence, offset, previous, index, *rest)
            record.head[64:] = _relinked(bytes(record.head[64:]), moved, places, follow)
    late(records)
    out = bytearray(pack_header())
    for record in records:
        if record.tag == INDEX and len(record.head) == 16 and not record.frame:
            record.head[8:] = struct.pack("<Q", checksum(bytes(record.body)))
        if record.tag == COMMIT and len(record.body) == 16:
            record.body[:] = struct.pack("<Q", record.length) + END_MAGIC
        frame = bytearray(struct.pack("<4sIQQ", record.tag, 0, len(record.head), len(record.body)))
        for offset, width, value in record.frame:
            frame[offset : offset + width] = value.to_bytes(8, "little")[:width]
        frame += struct.pack("<Q", checksum(bytes(frame) + struct.pack("<Q", len(out))))
        head = bytes(record.head)
        out += frame + head + struct.pack("<Q", checksum(head)) + record.body
    return bytes(out)


def _relinked(packed: bytes, moved: dict[int, Rec], places: dict[int, int], fields: bool) -> bytes:
    """Entries that name blocks where they now are; with `fields`, also with the tokens their heads now claim."""
    entries = np.frombuffer(packed[: len(packed) // 40 * 40], ENTRY).copy()
    for i, old in enumerate(entries["offset"].tolist()):
        if (block := moved.get(old)) is not None:
            entries["offset"][i], entries["length"][i] = places[id(block)], block.length
            entries["head"][i] = checksum(bytes(block.head))
            if fields and len(block.head) >= 32:
                _, flags, _, _, count, start, _, _, _ = struct.unpack_from("<BBBBIQQII", block.head)
                entries["start"][i], entries["count"][i], entries["sealed"][i] = start, count, flags & 1
    return entries.tobytes()
