"""Files made to mislead: right checksums, wrong claims. Each is refused by name, before memory is asked for."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kvcellar
from archives import SMALL, Outcome, contents_of, outcome, same, spans, thousands_of_restores
from hostile import Forger
from kvcellar.archive.block import SLOTS, BlockHead
from kvcellar.archive.commit import ENTRY, Commit, pack_index
from kvcellar.archive.format import (
    COMMIT,
    HEADER_SIZE,
    INDEX,
    MAGIC,
    MANIFEST,
    checksum,
    pack_header,
    pack_record,
)
from kvcellar.errors import DamagedArchive, InvalidRecipe, NewerFormat, NotAnArchive, OlderFormat
from kvcellar.geometry import Geometry, LayerGeometry, SideGeometry

TOKENS = 21
HUGE = [2**63, 2**63 - 1, 2**64 - 1, 2**40]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with thousands_of_restores():
        yield


@pytest.fixture
def cache(make_cache: Callable) -> list:
    """Random bits, so that every part stays raw and all parts of full blocks are equally long."""
    shape = (1, 1, TOKENS, 4)
    rng = np.random.default_rng(3)
    sides = [torch.from_numpy(rng.integers(-(2**15), 2**15, shape, dtype=np.int16)) for _ in range(4)]
    halves = [side.view(torch.float16) for side in sides]
    return [(halves[0], halves[1]), (halves[2], halves[3])]


@pytest.fixture
def ids(make_ids: Callable) -> list[int]:
    return make_ids(TOKENS)


@pytest.fixture
def forger(cache: list, ids: list[int]) -> Forger:
    return Forger(cache, ids)


@pytest.fixture
def take(tmp_path: Path) -> Callable[[bytes], Outcome]:
    def take(data: bytes) -> Outcome:
        (tmp_path / "a.kvc").write_bytes(data)
        return outcome(tmp_path / "a.kvc")

    return take


@pytest.fixture
def refused(take: Callable[[bytes], Outcome]) -> Callable[..., None]:
    """Nothing may come back, and `words` must be among the complaints."""

    def refused(data: bytes, words: str) -> None:
        found = take(data)
        assert found.contents is None, "was restored"
        assert words in "\n".join(found.complaints)

    return refused


def test_without_a_lie_the_forger_writes_what_save_writes(
    forger: Forger, cache: list, ids: list[int], saved: Callable, take: Callable
) -> None:
    data = forger.build()
    assert data == saved(cache, ids, recipe=SMALL).read_bytes()
    assert same(take(data).contents, contents_of(cache, ids))


# --- files of another kind or version


@pytest.mark.parametrize("start", [b"\x89PNG\r\n\x1a\n" + bytes(100), b"PK\x03\x04" * 50, b"x", bytes(8), bytes(5000)])
def test_a_foreign_file_is_no_archive(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.kvc").write_bytes(start)
    with pytest.raises(NotAnArchive, match="not a kvcellar archive"):
        kvcellar.open(tmp_path / "a.kvc")


@pytest.mark.parametrize("start", [b"", MAGIC, pack_header()])
def test_a_beginning_alone_is_damage(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.kvc").write_bytes(start)
    with pytest.raises(DamagedArchive, match="header|manifest"):
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
def test_other_versions_are_told_apart(fields: tuple, error: type, forger: Forger, tmp_path: Path) -> None:
    head = struct.pack("<8sHHIQ", MAGIC, *fields)
    forger.header = head + struct.pack("<Q", checksum(head))
    (tmp_path / "a.kvc").write_bytes(forger.build())
    with pytest.raises(error, match=rf"format {fields[0]}\.{fields[1]}"):
        kvcellar.open(tmp_path / "a.kvc")


# --- frames and records


@pytest.mark.parametrize("length", HUGE)
@pytest.mark.parametrize("field", [8, 16], ids=["head", "body"])
def test_huge_lengths_in_frames(length: int, field: int, forger: Forger, refused: Callable) -> None:
    data = forger.build()
    for span in spans(data)[1:]:
        frame = bytearray(data[span.start : span.start + 24])
        struct.pack_into("<Q", frame, field, length)
        frame += struct.pack("<Q", checksum(bytes(frame) + struct.pack("<Q", span.start)))
        refused(data[: span.start] + frame + data[span.start + 32 :], "do not fit") if span.tag != INDEX else None


@pytest.mark.parametrize("length", HUGE)
def test_huge_lengths_of_parts_and_end_marks(length: int, forger: Forger, refused: Callable, take: Callable) -> None:
    data = forger.build()
    refused(data[:-16] + struct.pack("<Q", length) + data[-8:], "length beyond the file")

    def pack_head(head: BlockHead) -> bytes:
        (_, digest), *others = head.parts
        return replace(head, parts=((length, digest), *others)).pack()

    refused(forger.build(pack_head=pack_head), "its table says")


def test_an_unknown_record_is_named(forger: Forger, cache: list, ids: list[int], take: Callable) -> None:
    found = take(forger.build(between=lambda offset: pack_record(b"KVCX", offset, b"new", 0)))
    assert any("unknown record b'KVCX'" in text for text in found.complaints)
    assert found.contents is None or same(found.contents, contents_of(cache, ids))


def test_records_in_wrong_places(forger: Forger, refused: Callable) -> None:
    manifest = forger.manifest_bytes
    misplaced = pack_header() + pack_record(COMMIT, HEADER_SIZE, manifest, 0)
    refused(misplaced, "found a commit")
    refused(pack_header() + pack_record(MANIFEST, HEADER_SIZE + 1, manifest, 0), "frame checksum differs")
    refused(forger.build(index=lambda offset, entries: b"", commit=lambda c: replace(c, index=40)), "cover")


def test_swapped_bytes_are_noticed(forger: Forger, refused: Callable) -> None:
    data = forger.build()
    first, second, _ = (span for span in spans(data) if span.tag == b"KVCB")
    size, length = len(forger.blocks[0].parts[0]), forger.blocks[0].head.body_length
    assert length == 2 * size == forger.blocks[1].head.body_length
    a, b = slice(first.stop - 2 * size, first.stop - size), slice(first.stop - size, first.stop)
    refused(_swapped(data, a, b), "block 0 (tokens 0…, byte " + f"{first.start}), layer group 0")

    bodies = slice(first.stop - length, first.stop), slice(second.stop - length, second.stop)
    refused(_swapped(data, *bodies), "checksum differs")
    refused(_swapped(data, slice(*first[:2]), slice(*second[:2])), "frame checksum differs")

    forger.blocks[:2] = forger.blocks[1::-1]  # the same with frames that are right for their new offsets
    refused(forger.build(entries=lambda e: e[np.argsort(e["start"])]), "not the block the commit names")


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
def test_block_heads_that_lie(changes: dict, words: str, forger: Forger, refused: Callable) -> None:
    refused(forger.build(pack_head=lambda head: replace(head, **changes).pack()), words)


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 8, 16, 24, 28])
def test_other_values_in_the_fixed_fields_of_a_head(position: int, forger: Forger, take: Callable) -> None:
    """kind, flags, token code and width, counts, ids: each byte set to what no writer puts there."""

    def pack_head(head: BlockHead) -> bytes:
        packed = bytearray(head.pack())
        packed[position] ^= 0xFF
        return bytes(packed)

    found = take(forger.build(pack_head=pack_head))
    assert found.complaints
    assert found.contents is None


def test_a_block_with_fewer_parts_than_layers(forger: Forger, refused: Callable) -> None:
    for i, block in enumerate(forger.blocks):
        forger.blocks[i] = replace(block, head=replace(block.head, parts=block.head.parts[:1]), parts=block.parts[:1])
    refused(forger.build(), "part")


def test_a_part_too_short_for_what_it_should_hold(forger: Forger, take: Callable) -> None:
    """65,536 tokens of 65,535 heads of 65,535 numbers from one byte: refused, not allocated."""
    side = SideGeometry(65535, 65535, "float32")
    geometry = Geometry((LayerGeometry(side, side),))
    forger.manifest_bytes = replace(forger.manifest, geometry=geometry).pack()
    del forger.blocks[1:]
    forger.part(0, 0, b"\0")
    head = replace(forger.blocks[0].head, tokens=np.zeros(65536, np.int64), geometry=geometry)
    forger.blocks[0] = replace(forger.blocks[0], head=replace(head, parts=head.parts[:1]), parts=[b"\0"])
    found = take(forger.build())
    assert found.contents is None
    assert any("1 bytes cannot decode to" in text for text in found.complaints)


@pytest.mark.parametrize("data", [b"\x07" + bytes(200), b"\x01" + b"\xff" * 200, b"\x02" * 200, b"\0" * 100 + b"\1"])
def test_a_part_that_is_no_stream_names_its_block(data: bytes, forger: Forger, refused: Callable) -> None:
    forger.part(1, 0, data)
    refused(forger.build(), "block 1 (tokens 8…")


def test_a_sealed_block_shorter_than_a_block(forger: Forger, ids: list[int], cache: list, take: Callable) -> None:
    """Where blocks begin follows from the number of sealed ones; one of another length must not be built upon."""
    forger.head(2, sealed=True)
    found = take(forger.build())
    assert any("sealed" in text for text in found.complaints)


# --- index and commits


def _change(field: str, value: int, at: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    def change(entries: np.ndarray) -> np.ndarray:
        entries[field][at] = value
        return entries

    return change


@pytest.mark.parametrize("value", [0, 1, 31, 100, *HUGE[:3]])
@pytest.mark.parametrize("field", ["offset", "length", "start", "head"])
def test_an_index_that_lies_is_not_believed(
    field: str, value: int, forger: Forger, cache: list, ids: list[int], take: Callable
) -> None:
    found = take(forger.build(entries=_change(field, value, at=1)))
    assert found.contents is None or same(found.contents, contents_of(cache, ids))


@pytest.mark.parametrize("value", [0, 7, 9, 2**32 - 1])
@pytest.mark.parametrize("field", ["count", "sealed"])
def test_counts_that_lie_are_not_believed(
    field: str, value: int, forger: Forger, cache: list, ids: list[int], take: Callable
) -> None:
    found = take(forger.build(entries=_change(field, value, at=1)))
    assert found.contents is None or same(found.contents, contents_of(cache, ids))


@pytest.mark.parametrize("count", [*HUGE, 2**32 + 1, 4])
def test_an_index_of_more_entries_than_bytes(
    count: int, forger: Forger, cache: list, ids: list[int], take: Callable
) -> None:
    def index(offset: int, entries: np.ndarray) -> bytes:
        body = entries.tobytes()
        return pack_record(INDEX, offset, struct.pack("<QQ", count, checksum(body)), len(body)) + body

    found = take(forger.build(index=index))
    assert same(found.contents, contents_of(cache, ids)), "the blocks are sound"
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
def test_commits_that_lie(changes: dict, forger: Forger, cache: list, ids: list[int], take: Callable) -> None:
    made: list[Commit] = []

    def commit(honest: Commit) -> Commit:
        made.append(replace(honest, **changes))
        return made[0]

    found = take(forger.build(commit=commit))
    assert found.contents is None or same(found.contents, contents_of(cache, ids))
    assert found.complaints or found.contents is not None


def test_an_archive_of_no_tokens_is_an_answer_or_an_error(forger: Forger, take: Callable) -> None:
    forger.blocks.clear()
    found = take(forger.build())
    assert found.complaints or [len(part) for part in found.contents[:1]] == [0]


# --- the manifest


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "manifest"),
        (b"{", "manifest"),
        (b"[]", "keys"),
        (b'"text"', "keys"),
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 50_000, "nested"),
        (b'{"recipe":1,"recipe":2}', "duplicate"),
        (b'{"a":NaN}', "NaN"),
        (b"\xff\xfe{}", "manifest"),
        (b"[" + b"1," * (1 << 19) + b"1]", "bytes of JSON"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_manifests_that_are_no_manifest(text: bytes, words: str, forger: Forger, refused: Callable) -> None:
    forger.manifest_bytes = text
    refused(forger.build(), words)


@pytest.mark.parametrize("where", ["whole", "recipe", "setting", "geometry"])
def test_nesting_of_any_depth_is_refused(where: str, forger: Forger, take: Callable) -> None:
    """Just under the parser's limit as well: what can be parsed is printed and hashed later, deeper in the stack."""
    honest = forger.manifest_bytes.decode()
    for depth in [*range(10, 900, 50), *range(900, 1010)]:
        nested = "[" * depth + "]" * depth
        value = json.loads(honest)
        if where == "recipe":
            value["recipe"] = "NESTED"
        elif where == "setting":
            value["recipe"]["symbols"]["more"] = "NESTED"
        elif where == "geometry":
            value["geometry"][0]["key"]["heads"] = "NESTED"
        text = nested if where == "whole" else json.dumps(value).replace('"NESTED"', nested)
        forger.manifest_bytes = text.encode()
        found = take(forger.build())
        assert found.complaints, f"depth {depth}"
        assert found.contents is None, f"depth {depth}"


def _set(*path: object, to: object) -> Callable[[dict], None]:
    def change(value: dict) -> None:
        for key in path[:-1]:
            value = value[key]  # type: ignore[index]
        value[path[-1]] = to  # type: ignore[index]

    return change


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("geometry",), []),
        (("geometry",), 7),
        (("geometry", 0, "layers"), 0),
        (("geometry", 0, "layers"), 10**9),
        (("geometry", 0, "layers"), True),
        (("geometry", 0, "kind"), "sliding"),
        (("geometry", 0, "key", "heads"), 0),
        (("geometry", 0, "key", "heads"), 1.0),
        (("geometry", 0, "key", "heads"), True),
        (("geometry", 0, "value", "width"), 4.0),
        (("geometry", 0, "value", "width"), "4"),
        (("geometry", 0, "value", "dtype"), "float64"),
        (("geometry", 0, "value", "dtype"), ["float16"]),
        (("geometry", 0, "value", "more"), 1),
        (("identity",), None),
        (("identity", "kind"), "other"),
        (("identity", "digest"), "00"),
        (("identity", "digest"), ["0"] * 64),
        (("identity", "label"), "x" * 5000),
        (("identity", "label"), ["label"]),
        (("namespace",), "x" * 2000),
        (("namespace",), None),
        (("profile",), {"id": "zz"}),
        (("profile",), {"id": "0" * 64, "embedded": True}),
        (("profile",), {"id": "0" * 64, "embedded": 1}),
        (("more",), 1),
        (("recipe", "block"), 8.0),
        (("recipe", "block"), 10**6),
        (("recipe", "name"), "\ud800"),
        (("recipe", "window"), {"sinks": -1, "recent": 2}),
        (("recipe", "symbols"), None),
        (("recipe", "symbols", "id"), "nobody/1"),
        (("recipe", "symbols", "more"), 1),
        (("recipe", "quantize"), {"id": "nobody/1"}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_manifests_with_a_wrong_value(path: tuple, to: object, forger: Forger, take: Callable) -> None:
    forger.json(_set(*path, to=to))
    found = take(forger.build())
    assert found.complaints
    assert found.contents is None


@pytest.mark.parametrize("version", [0, 2, 10**30])
def test_a_recipe_of_another_version_is_named(version: int, forger: Forger, tmp_path: Path) -> None:
    forger.json(_set("recipe", "version", to=version))
    (tmp_path / "a.kvc").write_bytes(forger.build())
    with pytest.raises(InvalidRecipe, match=f"version {version}"):
        kvcellar.open(tmp_path / "a.kvc")


def test_find_passes_over_what_it_cannot_read(forger: Forger, cache: list, ids: list[int], saved: Callable) -> None:
    good = saved(cache, ids, recipe=SMALL, name="good.kvc")
    (good.parent / "damaged.kvc").write_bytes(forger.build()[:-1])
    forger.json(_set("recipe", "version", to=2))
    (good.parent / "newer.kvc").write_bytes(forger.build())
    with pytest.warns(UserWarning, match="passed over") as warned:
        found = kvcellar.find(good.parent, ids, identity="m")
    assert (found.path, found.matched) == (str(good), TOKENS)
    assert len(warned) == 2


def test_an_empty_index_and_a_forged_one_are_packed_alike() -> None:
    """The forger's own tools: an index without entries is a record the reader accepts."""
    assert len(pack_index(64, np.empty(0, ENTRY))) == 32 + 16 + 8
