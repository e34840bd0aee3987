"""Records that lie within each other, and files full of what looks like records: refused or read in linear time."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvcellar.archive.commit as commits
from archives import Bytes
from hostile import Forger, taken
from kvcellar.archive.block import BlockHead
from kvcellar.archive.commit import ENTRY, Commit, last_commit, pack_index, records
from kvcellar.archive.format import BLOCK, COMMIT, END_MAGIC, HEADER_SIZE, MANIFEST, checksum, pack_header, pack_record
from kvcellar.errors import DamagedArchive
from kvcellar.geometry import Geometry, LayerGeometry, SideGeometry

pytestmark = pytest.mark.usefixtures("quick")
SECOND = 1.0


def seconds(call: Callable[[], object]) -> float:
    """CPU time, so that other programs do not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


WIDTH, PER_BLOCK = 512, 8
SIDE = 2 * WIDTH * PER_BLOCK  # bytes of the keys of a block
STEP = 356  # from block to block: longer than a head, and SIDE − 4 is a multiple of it (see `overlapping`)


def overlapping(count: int, step: int) -> bytes:
    """An archive of `count` blocks that begin `step` bytes apart, so that each contains the heads of many others.

    Every checksum is right and every part is a raw stream that decodes, whatever lies in it. Both mode bytes of a part
    fall between the heads.
    """
    side = SideGeometry(1, WIDTH, "float16")
    forger = Forger()
    recipe = replace(forger.manifest.recipe, block=PER_BLOCK)
    manifest = replace(forger.manifest, recipe=recipe, geometry=Geometry((LayerGeometry(side, side),)))
    start = pack_header() + pack_record(MANIFEST, HEADER_SIZE, manifest.pack(), 0)
    length = 2 * (1 + SIDE)

    def head(number: int, part: bytes) -> BlockHead:
        return BlockHead(
            start=number * PER_BLOCK,
            tokens=np.zeros(PER_BLOCK, np.int64),
            sealed=True,
            geometry=manifest.geometry,
            recipe=recipe.digest,
            parts=((len(part), checksum(part)),),
            first_position=number * PER_BLOCK,
        )

    front = len(pack_record(BLOCK, 0, head(0, b"").pack(), 0))
    data = bytearray(start + bytes((count - 1) * step + front + length))
    entries = []
    for number in reversed(range(count)):  # a head states the checksum of all the heads behind it
        offset = len(start) + number * step
        packed = head(number, bytes(data[offset + front : offset + front + length])).pack()
        data[offset : offset + front] = pack_record(BLOCK, offset, packed, length)
        entries.append((offset, front + length, number * PER_BLOCK, PER_BLOCK, 1, checksum(packed)))
    state = np.array(entries[::-1], ENTRY)
    index, tokens = pack_index(len(data), state), count * PER_BLOCK
    at = len(data) + len(index)
    return bytes(data) + index + Commit(1, at, 0, len(data), count, tokens, tokens, 0, state[:0]).pack()


def test_blocks_within_each_other_are_refused(tmp_path: Path) -> None:
    """Each alone is plausible; together they would decode to more than any multiple of the file's size."""
    assert (SIDE - 4) % STEP == 0
    found = taken(overlapping(60, STEP), tmp_path)
    assert found.contents is None
    assert any("do not cover" in text for text in found.complaints)


def test_the_same_blocks_apart_are_read(tmp_path: Path) -> None:
    """So that the test above is refused for nothing else."""
    found = taken(overlapping(3, 24 * 1024), tmp_path)
    assert found.contents is not None
    assert len(found.contents[0]) == 3 * PER_BLOCK


def test_the_search_for_a_commit_reads_no_byte_again_and_again() -> None:
    """32 bytes of frame and 16 of end mark would each have a megabyte read: hours, for a file of some megabytes."""
    count, head = 2_000, 1 << 20
    data = bytearray(pack_header())
    for number in range(count):
        frame = struct.pack("<4sIQQ", COMMIT, 0, head, 16)
        data += frame + struct.pack("<Q", checksum(frame + struct.pack("<Q", HEADER_SIZE + 32 * number)))
    data += bytes(HEADER_SIZE + 32 + head + 8 - len(data))
    length = 32 + head + 8 + 16
    for number in range(count):  # the end of commit `number`, if its frame is to be believed
        stop = HEADER_SIZE + 32 * number + length
        data += bytes(stop - 16 - len(data)) + struct.pack("<Q", length) + END_MAGIC
    data += b"unfinished"
    reader = Counting(bytes(data))
    with pytest.raises(DamagedArchive, match="more bytes of commits"):
        last_commit(reader)
    assert reader.count < 4 * len(data)


class Counting(Bytes):
    """A reader that counts the bytes it gives."""

    count = 0

    def read(self, offset: int, length: int) -> bytes:
        found = super().read(offset, length)
        self.count += len(found)
        return found


def test_honest_damaged_commits_are_searched_through(tmp_path: Path) -> None:
    """However many commits are damaged: the budget is what records that do not overlap can need."""
    forger = Forger()
    whole = forger.build()
    data = bytearray(whole)
    for _ in range(50):
        offset = len(data)
        head = struct.pack("<8Q", 2, offset, 0, 0, 0, 21, 21, 0) + bytes(40 * 30)
        record = bytearray(pack_record(COMMIT, offset, head, 16))
        record[-1] ^= 1
        data += record + struct.pack("<Q", len(record) + 16) + END_MAGIC
    commit = last_commit(Bytes(bytes(data) + b"rest"))
    assert commit.end == len(whole)


@pytest.mark.parametrize("tag", [b"KVCB", b"KVC", b"KVCB\0\0\0\0\x10\0\0\0\0\0\0\0"])
def test_half_a_megabyte_of_tags_is_walked_within_a_second(tag: bytes) -> None:
    data = pack_header() + tag * ((1 << 19) // len(tag))
    assert seconds(lambda: list(records(Bytes(data), HEADER_SIZE, len(data)))) < SECOND


def test_the_next_frame_is_found_wherever_it_starts() -> None:
    """Also across the border of the steps in which it is searched for, and with the longest head there may be."""
    step = commits._SEARCH_STEP
    places = [(start, 3) for start in range(HEADER_SIZE + step - 34, HEADER_SIZE + step + 3)]
    for start, length in [*places, (HEADER_SIZE + 1, 3), (HEADER_SIZE + 1, 1 << 24)]:
        data = pack_header() + bytes(start - HEADER_SIZE) + pack_record(BLOCK, start, bytes(length), 0)
        assert list(records(Bytes(data), HEADER_SIZE, len(data))) == [(BLOCK, start, len(data))], start
