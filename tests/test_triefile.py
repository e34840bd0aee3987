"""The trie file: what is written comes back, and no damage passes for a record."""

from __future__ import annotations

import multiprocessing
import struct
from pathlib import Path

import numpy as np
import pytest

from archives import Bytes
from kvcellar.errors import DamagedArchive, InvalidInput, NewerFormat
from kvcellar.frontends.trielog import TrieLog
from kvcellar.identity import Identity
from kvcellar.language.triefile import (
    FRAME_SIZE,
    HEADER_SIZE,
    Entry,
    Stamp,
    check_header,
    file_name,
    pack_header,
    read_entries,
    trie_key,
)
from kvcellar.store.local import LocalStore

KEY = trie_key(Identity.named("m"), "")
NAMES = ("a.kvc", "größe.kvc", "\udcff.kvc", "no archive.kvc")


def entry(number: int, name: str) -> Entry:
    ids = np.arange(number, number + 3, dtype=np.uint32) * 1_000_000_007
    logs = np.array([0, -1.5, np.nan], np.float32) if number % 2 else None
    stamp = Stamp(number, -1, 1 << 60, (1 << 64) - 1)
    return Entry(name, stamp, None if number == 3 else ids, logs if number < 3 else None)


def file_of(entries: list[Entry]) -> bytes:
    data = pack_header(KEY)
    for each in entries:
        packed = each.pack(len(data))
        assert len(packed) == each.packed_bytes
        data += packed
    return data


def plain(each: Entry | None) -> object:
    if each is None:
        return None
    numbers = [part if part is None else part.tobytes() for part in (each.tokens, each.log2_probs)]
    return each.name, each.stamp, *numbers


ENTRIES = [entry(number, name) for number, name in enumerate(NAMES)]
DATA = file_of(ENTRIES)


def found_in(data: bytes) -> list[object]:
    return [plain(each) for _, each in read_entries(Bytes(data), HEADER_SIZE)]


def test_entries_come_back() -> None:
    check_header(DATA, KEY)
    assert found_in(DATA) == [plain(each) for each in ENTRIES]
    assert Entry("a", ENTRIES[0].stamp, ENTRIES[0].tokens, np.full(3, np.nan, np.float32)).packed_bytes == len(
        Entry("a", ENTRIES[0].stamp, ENTRIES[0].tokens).pack(0)
    )


def test_cut_anywhere_it_keeps_the_records_before() -> None:
    ends = [end for end, _ in read_entries(Bytes(DATA), HEADER_SIZE)]
    for stop in range(HEADER_SIZE, len(DATA)):
        found = found_in(DATA[:stop])
        whole = sum(end <= stop for end in ends)
        assert found[:whole] == [plain(each) for each in ENTRIES[:whole]]
        assert all(each is None for each in found[whole:])
        assert len(found) > whole or stop in (HEADER_SIZE, *ends)  # a torn end is noticed


@pytest.mark.parametrize("bit", [0, 7])
def test_with_any_bit_flipped_it_loses_one_record_and_says_so(bit: int) -> None:
    expected = [plain(each) for each in ENTRIES]
    for at in range(len(DATA)):
        data = bytearray(DATA)
        data[at] ^= 1 << bit
        if at < HEADER_SIZE:
            with pytest.raises(DamagedArchive, match="trie header"):
                check_header(bytes(data), KEY)
            continue
        found = found_in(bytes(data))
        sound = [each for each in found if each is not None]
        assert None in found
        assert len(sound) == len(expected) - 1
        assert all(each in expected for each in sound)


def test_a_record_moved_elsewhere_is_none() -> None:
    first = len(ENTRIES[0].pack(0))
    moved = DATA[:HEADER_SIZE] + DATA[HEADER_SIZE + first :]
    assert set(found_in(moved)) == {None}


def test_forged_records_are_refused_before_anything_is_allocated() -> None:
    import xxhash

    def framed(body: bytes, length: int | None = None) -> bytes:
        start = struct.pack(
            "<4sIQQ", b"KVTR", 0, len(body) if length is None else length, xxhash.xxh3_64_intdigest(body)
        )
        return start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start + struct.pack("<Q", HEADER_SIZE))) + body

    sound = ENTRIES[1].pack(HEADER_SIZE)[FRAME_SIZE:]
    assert plain(Entry.unpack(sound, "it")) == plain(ENTRIES[1])
    forged = [b"", sound[:20], sound[:-1], sound + b"\0"]
    forged += [struct.pack("<Q", count) + sound[8:] for count in (0, 1 << 63, 2, 4)]
    forged += [sound[:40] + struct.pack("<I", kind) + sound[44:] for kind in (0, 1, 3)]
    forged += [sound[:44] + struct.pack("<I", length) + sound[48:] for length in (0, 1 << 31)]
    forged += [sound[:-4] + struct.pack("<f", value) for value in (0.5, float("inf"), float("-inf"))]
    for body in forged:
        with pytest.raises(DamagedArchive, match="the part"):
            Entry.unpack(body, "the part")
        assert found_in(DATA[:HEADER_SIZE] + framed(body)) == [None]
    assert set(found_in(DATA[:HEADER_SIZE] + framed(sound, 1 << 62))) == {None}
    for name in ("", "x" * 5000):
        with pytest.raises(InvalidInput, match="file name"):
            Entry(name, ENTRIES[0].stamp, None).pack(0)


def test_records_within_each_other_are_given_up_on() -> None:
    import xxhash

    data, size = pack_header(KEY), 1 << 17
    while len(data) < size:  # each says that the rest of the file is its body, which would be 2³⁹ bytes to read in all
        start = struct.pack("<4sIQQ", b"KVTR", 0, size - len(data) - FRAME_SIZE, 0)
        data += start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start + struct.pack("<Q", len(data))))

    class Counting(Bytes):
        read_bytes = 0

        def read(self, offset: int, length: int) -> bytes:
            self.read_bytes += length
            return super().read(offset, length)

    reader = Counting(data)
    assert {each for _, each in read_entries(reader, HEADER_SIZE)} == {None}
    assert reader.read_bytes < 20 * size


def test_headers_of_others() -> None:
    import xxhash

    for at, word in ((8, 2), (12, 1), (48, 1)):
        head = bytearray(DATA[:56])
        struct.pack_into("<H", head, at, word)
        with pytest.raises(NewerFormat):
            check_header(bytes(head) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head))), KEY)
    with pytest.raises(DamagedArchive, match="expected"):
        check_header(DATA, trie_key(Identity.named("m"), "tenant"))
    with pytest.raises(DamagedArchive):
        check_header(DATA[:40], KEY)


def test_identities_and_namespaces_have_files_of_their_own() -> None:
    model = Identity("model", Identity.named("m").digest)
    keys = {
        trie_key(who, space) for who in (Identity.named("m"), Identity.named("n"), model) for space in ("", "m", "n")
    }
    assert len({file_name(key) for key in keys}) == 9


def _append(folder: str, letter: str) -> None:
    for number in range(40):
        log = TrieLog(LocalStore(folder), KEY)
        with log.writing() as file:
            log.append(file, [entry(number % 3, f"{letter}{number}")])


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_append, args=(str(tmp_path), letter)) for letter in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    log = TrieLog(LocalStore(tmp_path), KEY)
    assert {each.name for each in log.read()} == {f"{letter}{number}" for letter in "ab" for number in range(40)}
    assert not log.damaged
    assert list(log.read()) == []
    assert (tmp_path / file_name(KEY)).stat().st_mode & 0o077 == 0


def test_what_is_appended_behind_a_torn_record_is_found(tmp_path: Path) -> None:
    path = tmp_path / file_name(KEY)
    path.write_bytes(DATA[:-5])
    log = TrieLog(LocalStore(tmp_path), KEY)
    with log.writing() as file:
        log.append(file, [entry(1, "new")])
    found = list(log.read())
    assert [each.name for each in found] == [*NAMES[:-1], "new"]
    assert log.damaged
    with log.writing():
        log.rewrite(found)
    again = TrieLog(LocalStore(tmp_path), KEY)
    assert [plain(each) for each in again.read()] == [plain(each) for each in found]
    assert not again.damaged


@pytest.mark.parametrize("content", [b"", DATA[:10], b"x" * 200, pack_header(bytes(32)) + DATA[64:]])
def test_a_file_that_is_none_begins_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / file_name(KEY)).write_bytes(content)
    log = TrieLog(LocalStore(tmp_path), KEY)
    assert list(log.read()) == []
    assert log.damaged == bool(content)
    with log.writing() as file:
        log.append(file, ENTRIES)
    assert (tmp_path / file_name(KEY)).read_bytes() == DATA
