"""Files made to mislead: right checksums, wrong claims. Each is refused by name, before memory is asked for."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvcellar
from archives import SMALL, Bytes, outcome, same, spans
from hostile import CACHE, IDS, TOKENS, WHOLE, Forger, require_refused, taken
from kvcellar.archive.block import SLOTS, BlockHead
from kvcellar.archive.format import COMMIT, HEADER_SIZE, INDEX, MAGIC, MANIFEST, checksum, pack_header, pack_record
from kvcellar.archive.reader import ArchiveReader
from kvcellar.errors import DamagedArchive, KVCellarError, NewerFormat, NotAnArchive, OlderFormat
from kvcellar.geometry import Geometry, LayerGeometry, SideGeometry

pytestmark = pytest.mark.usefixtures("quick")
HUGE = [2**63, 2**63 - 1, 2**64 - 1, 2**40]


def test_without_a_lie_the_forger_writes_what_save_writes(saved: Callable, tmp_path: Path) -> None:
    data = Forger().build()
    assert data == saved(CACHE, IDS, recipe=SMALL).read_bytes()
    found = taken(data, tmp_path)
    assert found.complaints == []
    assert same(found.contents or [], WHOLE)


# --- files of another kind or version


@pytest.mark.parametrize("start", [b"\x89PNG\r\n\x1a\n" + bytes(100), b"PK\x03\x04" * 50, b"x", bytes(8), bytes(5000)])
def test_a_foreign_file_is_no_archive(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.kvc").write_bytes(start)
    with pytest.raises(NotAnArchive, match="not a kvcellar archive"):
        kvcellar.open(tmp_path / "a.kvc")


@pytest.mark.parametrize("start", [b"", MAGIC, pack_header()])
def test_a_beginning_alone_is_damage(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.kvc").write_bytes(start)
    with pytest.raises(DamagedArchive, match=r"header|manifest"):
        kvcellar.open(tmp_path / "a.kvc")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ((2, 0, 0, 0), NewerFormat),
        ((1, 0, 1, 0), NewerFormat),
        ((1, 0, 0, 5), NewerFormat),
        ((0, 9, 0, 0), OlderFormat),
    ],
)
def test_other_versions_are_told_apart(fields: tuple, error: type, tmp_path: Path) -> None:
    forger = Forger()
    head = struct.pack("<8sHHIQ", MAGIC, *fields)
    forger.header = head + struct.pack("<Q", checksum(head))
    (tmp_path / "a.kvc").write_bytes(forger.build())
    with pytest.raises(error, match=rf"format {fields[0]}\.{fields[1]}"):
        kvcellar.open(tmp_path / "a.kvc")


# --- frames and records


@pytest.mark.parametrize("length", HUGE)
@pytest.mark.parametrize("field", [8, 16], ids=["head", "body"])
def test_huge_lengths_in_frames(length: int, field: int, tmp_path: Path) -> None:
    forger = Forger()
    data = forger.build()
    for span in spans(data)[1:]:
        if span.tag == INDEX:
            continue  # a hint only
        frame = bytearray(data[span.start : span.start + 24])
        struct.pack_into("<Q", frame, field, length)
        frame += struct.pack("<Q", checksum(bytes(frame) + struct.pack("<Q", span.start)))
        require_refused(data[: span.start] + frame + data[span.start + 32 :], "do not fit", tmp_path)


@pytest.mark.parametrize("length", HUGE)
def test_huge_lengths_of_parts_and_end_marks(length: int, tmp_path: Path) -> None:
    forger = Forger()
    data = forger.build()
    require_refused(data[:-16] + struct.pack("<Q", length) + data[-8:], "length beyond the file", tmp_path)

    def pack_head(head: BlockHead) -> bytes:
        (_, digest), *others = head.parts
        return replace(head, parts=((length, digest), *others)).pack()

    require_refused(forger.build(pack_head=pack_head), "its table says", tmp_path)


def test_an_unknown_record_is_named(tmp_path: Path) -> None:
    forger = Forger()
    found = taken(forger.build(between=lambda offset: pack_record(b"KVCX", offset, b"new", 0)), tmp_path)
    at = HEADER_SIZE + len(pack_record(MANIFEST, HEADER_SIZE, forger.manifest_bytes, 0))
    assert any(f"record at byte {at}" in text for text in found.complaints)
    assert found.contents is None or same(found.contents, WHOLE)


def test_records_in_wrong_places(tmp_path: Path) -> None:
    forger = Forger()
    manifest = forger.manifest_bytes
    misplaced = pack_header() + pack_record(COMMIT, HEADER_SIZE, manifest, 0)
    require_refused(misplaced, "found a commit", tmp_path)
    require_refused(
        pack_header() + pack_record(MANIFEST, HEADER_SIZE + 1, manifest, 0), "frame checksum differs", tmp_path
    )

    elsewhere = taken(forger.build(index=lambda *_: b"", commit=lambda made: replace(made, index=40)), tmp_path)
    assert same(elsewhere.contents or [], WHOLE), "an index that is none is rebuilt"
    assert elsewhere.complaints


def test_swapped_bytes_are_noticed(tmp_path: Path) -> None:
    forger = Forger()
    data = forger.build()
    honest = ArchiveReader(Bytes(data)).entries
    first, second, _ = (span for span in spans(data) if span.tag == b"KVCB")
    size, length = len(forger.blocks[0].parts[0]), forger.blocks[0].head.body_length
    assert length == 2 * size == forger.blocks[1].head.body_length
    a, b = slice(first.stop - 2 * size, first.stop - size), slice(first.stop - size, first.stop)
    require_refused(_swapped(data, a, b), "block 0 (tokens 0…, byte " + f"{first.start}), layer group 0", tmp_path)

    bodies = slice(first.stop - length, first.stop), slice(second.stop - length, second.stop)
    require_refused(_swapped(data, *bodies), "checksum differs", tmp_path)
    require_refused(_swapped(data, slice(*first[:2]), slice(*second[:2])), "frame checksum differs", tmp_path)

    forger.blocks[:2] = forger.blocks[1::-1]  # with frames that are right where they now are, and the old index
    require_refused(forger.build(entries=lambda _: honest), "not the block the commit names", tmp_path)


def _swapped(data: bytes, a: slice, b: slice) -> bytes:
    out = bytearray(data)
    out[a], out[b] = data[b], data[a]
    assert out != data
    return bytes(out)


# --- block heads


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": SLOTS}, "unknown block kind 1"),
        ({"kind": 200}, "unknown block kind 200"),
        ({"tokens": np.empty(0, np.int64)}, "0 tokens"),
        ({"tokens": np.zeros(65537, np.int64)}, "65537 tokens"),
        ({"start": 2**63}, "tokens from 9223372036854775808"),
        ({"first_position": 2**64 - 1}, "at position 18446744073709551615"),
        ({"parts": ()}, "for 0 parts"),
        ({"parts": ((1, 1),) * 3}, "for 3 parts"),
        ({"recipe": bytes(32)}, "another geometry or recipe"),
        ({"profile": bytes(32)}, "another profile or base"),
        ({"base": bytes(32)}, "another profile or base"),
        ({"geometry": Geometry((LayerGeometry(*[SideGeometry(1, 4, "float16")] * 2),) * 3)}, "another geometry"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_block_heads_that_lie(changes: dict, words: str, tmp_path: Path) -> None:
    forger = Forger()
    require_refused(forger.build(pack_head=lambda head: replace(head, **changes).pack()), words, tmp_path)


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 8, 24, 28])
def test_other_values_in_the_fixed_fields_of_a_head(position: int, tmp_path: Path) -> None:
    """kind, flags, token code and width, counts, ids: each byte set to what no writer puts there."""
    forger = Forger()

    def pack_head(head: BlockHead) -> bytes:
        packed = bytearray(head.pack())
        packed[position] ^= 0xFF
        return bytes(packed)

    found = taken(forger.build(pack_head=pack_head), tmp_path)
    assert found.complaints
    assert found.contents is None


def test_a_block_with_fewer_parts_than_layers(tmp_path: Path) -> None:
    forger = Forger()
    for i, block in enumerate(forger.blocks):
        forger.blocks[i] = replace(block, head=replace(block.head, parts=block.head.parts[:1]), parts=block.parts[:1])
    require_refused(forger.build(), "part", tmp_path)


def test_a_part_too_short_for_what_it_should_hold(tmp_path: Path) -> None:
    """65,536 tokens of 65,535 heads of 65,535 numbers from one byte: refused, not allocated."""
    forger = Forger()
    side = SideGeometry(65535, 65535, "float32")
    recipe, geometry = replace(SMALL, block=65536), Geometry((LayerGeometry(side, side),))
    forger.manifest_bytes = replace(forger.manifest, recipe=recipe, geometry=geometry).pack()
    del forger.blocks[1:]
    forger.part(0, 0, b"\0")
    head = replace(forger.blocks[0].head, recipe=recipe.digest, geometry=geometry, tokens=np.zeros(65536, np.int64))
    forger.blocks[0] = replace(forger.blocks[0], head=replace(head, parts=head.parts[:1]), parts=[b"\0"])
    found = taken(forger.build(), tmp_path)
    assert found.contents is None
    assert any("1 bytes cannot decode to" in text for text in found.complaints)


@pytest.mark.parametrize("data", [b"\x07" + bytes(200), b"\x01" + b"\xff" * 200, b"\x02" * 200, b"\0" * 100 + b"\1"])
def test_a_part_that_is_no_stream_names_its_block(data: bytes, tmp_path: Path) -> None:
    forger = Forger()
    forger.part(1, 0, data)
    require_refused(forger.build(), "block 1 (tokens 8…", tmp_path)


@pytest.mark.parametrize("length", [5, 7, 16])
def test_sealed_blocks_of_another_length_are_not_built_upon(length: int, tmp_path: Path) -> None:
    """Append and compact reckon where the tail begins from the number of sealed blocks: tokens would be lost."""
    forger = Forger()
    forger.recut(length)
    found = taken(forger.build(), tmp_path)
    assert found.contents is None or same(found.contents, WHOLE)
    with suppress(KVCellarError), kvcellar.open(tmp_path / "a.kvc", identity="m", mode="a") as archive:
        archive.compact()
    after = outcome(tmp_path / "a.kvc")
    assert after.complaints == found.complaints
    assert (after.contents is None) == (found.contents is None)
    assert found.contents is None or same(after.contents or [], WHOLE), "compact lost tokens"


def test_a_tail_that_calls_itself_sealed(tmp_path: Path) -> None:
    forger = Forger()
    forger.head(2, sealed=True)
    require_refused(forger.build(), "sealed", tmp_path)


# --- index and commits


def _change(field: str, value: int, at: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    def change(entries: np.ndarray) -> np.ndarray:
        entries[field][at] = value
        return entries

    return change


@pytest.mark.parametrize("value", [0, 1, 31, 100, *HUGE[:3]])
@pytest.mark.parametrize("field", ["offset", "length", "start", "head"])
def test_an_index_that_lies_is_not_believed(field: str, value: int, tmp_path: Path) -> None:
    forger = Forger()
    found = taken(forger.build(entries=_change(field, value, at=1)), tmp_path)
    assert found.contents is None or same(found.contents, WHOLE)


@pytest.mark.parametrize("value", [0, 7, 9, 2**32 - 1])
@pytest.mark.parametrize("field", ["count", "sealed"])
def test_counts_that_lie_are_not_believed(field: str, value: int, tmp_path: Path) -> None:
    forger = Forger()
    found = taken(forger.build(entries=_change(field, value, at=1)), tmp_path)
    assert found.contents is None or same(found.contents, WHOLE)


@pytest.mark.parametrize("count", [*HUGE, 2**32 + 1, 4])
def test_an_index_of_more_entries_than_bytes(count: int, tmp_path: Path) -> None:
    forger = Forger()

    def index(offset: int, entries: np.ndarray) -> bytes:
        body = entries.tobytes()
        return pack_record(INDEX, offset, struct.pack("<QQ", count, checksum(body)), len(body)) + body

    found = taken(forger.build(index=index), tmp_path)
    assert same(found.contents or [], WHOLE), "the blocks are sound"
    assert any("index" in text for text in found.complaints)


@pytest.mark.parametrize(
    "changes",
    [
        {"previous": 2**64 - 1},
        {"index": 2**64 - 1},
        {"offset": 32},
        {"keep": 2**33},
        {"tokens": TOKENS + 1},
        {"tokens": 2**63},
        {"index": 0},
        {"index": 0, "keep": 0},
        {"index": 0, "keep": 0, "previous": 40},
    ],
    ids=str,
)
def test_commits_that_lie(changes: dict, tmp_path: Path) -> None:
    forger = Forger()
    found = taken(forger.build(commit=lambda honest: replace(honest, **changes)), tmp_path)
    assert same(found.contents, WHOLE) if found.contents is not None else found.complaints


def test_an_archive_of_no_tokens_is_an_answer_or_an_error(tmp_path: Path) -> None:
    forger = Forger()
    forger.blocks.clear()
    found = taken(forger.build(), tmp_path)
    assert found.complaints or [len(part) for part in found.contents[:1]] == [0]
