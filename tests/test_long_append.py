"""Appending and opening cost the same however much is stored, and new tokens may come without the old ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import kvcellar
from archives import BLOCK, SMALL, contents_at, contents_of, prefix, same
from kvcellar.archive.reader import ArchiveReader
from kvcellar.errors import InvalidInput, TokensMismatch
from kvcellar.store.local import LocalReader


@contextmanager
def reads_of() -> Iterator[list[int]]:
    """Offsets read from local files meanwhile."""
    found: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "read_into"):
            original = getattr(LocalReader, name)

            def counted(self: LocalReader, offset: int, what: object, original: Callable = original) -> object:
                found.append(offset)
                return original(self, offset, what)

            patch.setattr(LocalReader, name, counted)
        yield found


@pytest.mark.parametrize("added", [1, 3, 20])
def test_an_append_reads_as_much_however_long_the_archive(
    added: int, make_cache: Callable, make_ids: Callable, saved: Callable
) -> None:
    counts = []
    for blocks in (4, 64, 512):
        held = blocks * BLOCK + 6
        ids = make_ids(held + added)
        cache = make_cache(tokens=held + added, layers=1, heads=1, width=4)
        new = [(keys[:, :, held:], values[:, :, held:]) for keys, values in cache]
        path = saved(prefix(cache, held), ids[:held], recipe=SMALL)
        with kvcellar.open(path, identity="m", mode="a") as archive:
            archive.read(0, 0, 1)
            with reads_of() as found:
                archive.append(new, ids[held:], start=held)
        counts.append(len(found))
        assert same(contents_at(path), contents_of(cache, ids))
    assert counts[0] == counts[1] == counts[2]


def test_an_append_reads_as_much_however_many_came_before(
    make_cache: Callable, make_ids: Callable, saved: Callable
) -> None:
    ids, cache = make_ids(60), make_cache(tokens=60)
    path = saved(prefix(cache, 10), ids[:10], recipe=replace(SMALL, block=64))
    counts = []
    with kvcellar.open(path, identity="m", mode="a") as archive:
        for held in range(10, 60):
            new = [(keys[:, :, held : held + 1], values[:, :, held : held + 1]) for keys, values in cache]
            with reads_of() as found:
                archive.append(new, ids[held : held + 1], start=held)
            counts.append(len(found))
    assert len(set(counts[1:])) == 1, counts


def test_the_second_whole_sequence_reads_no_stored_ids_again(
    make_cache: Callable, make_ids: Callable, saved: Callable
) -> None:
    ids, cache = make_ids(200), make_cache(tokens=200)
    path = saved(prefix(cache, 160), ids[:160], recipe=SMALL)
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.append(prefix(cache, 161), ids[:161])
        with reads_of() as found:
            archive.append(prefix(cache, 162), ids[:162])
        assert len(found) <= 2, "the first block's head, and no other of 20"
        wrong = [*ids[:100], ids[100] + 1, *ids[101:]]
        with pytest.raises(TokensMismatch, match=f"part at 100: stored id {ids[100]}, given {ids[100] + 1}"):
            archive.append(cache, wrong)
        archive.append(cache, ids)
    assert same(contents_at(path), contents_of(cache, ids))


def test_new_tokens_alone_give_the_same_file(make_cache: Callable, make_ids: Callable, saved: Callable) -> None:
    ids, cache = make_ids(60), make_cache(tokens=60)
    whole = saved(prefix(cache, 5), ids[:5], recipe=SMALL, name="whole.kvc")
    alone = saved(prefix(cache, 5), ids[:5], recipe=SMALL, name="alone.kvc")
    with (
        kvcellar.open(whole, identity="m", mode="a") as one,
        kvcellar.open(alone, identity="m", mode="a") as other,
    ):
        for held, stop in ((5, 6), (6, 8), (8, 30), (30, 31), (31, 60)):
            start = max(0, held - 2)  # two tokens that are stored already do no harm
            one.append(prefix(cache, stop), ids[:stop])
            other.append([(k[:, :, start:stop], v[:, :, start:stop]) for k, v in cache], ids[start:stop], start=start)
            assert whole.read_bytes() == alone.read_bytes()
    assert same(contents_at(alone), contents_of(cache, ids))


def test_where_new_tokens_must_start(make_cache: Callable, make_ids: Callable, saved: Callable) -> None:
    ids, cache = make_ids(20), make_cache(tokens=20)
    path = saved(prefix(cache, 12), ids[:12], recipe=SMALL)
    before = path.read_bytes()
    tail = [(k[:, :, 10:], v[:, :, 10:]) for k, v in cache]
    with kvcellar.open(path, identity="m", mode="a") as archive:
        for start in (13, -1, True, 1.0, "3", None):
            with pytest.raises(InvalidInput, match="start lies in"):
                archive.append(tail, ids[10:], start=start)
        with pytest.raises(TokensMismatch, match=f"part at 11: stored id {ids[11]}, given 7"):
            archive.append(tail, [ids[10], 7, *ids[12:]], start=10)
        with pytest.raises(TokensMismatch, match="part at 11: the ids end there"):
            archive.append([(k[:, :, 10:11], v[:, :, 10:11]) for k, v in cache], ids[10:11], start=10)
        assert path.read_bytes() == before
        archive.append(tail, ids[10:], start=10)
    assert same(contents_at(path), contents_of(cache, ids))


def test_matching_from_anywhere(make_ids: Callable, make_cache: Callable, saved: Callable) -> None:
    ids = np.array(make_ids(40))
    with ArchiveReader(LocalReader(saved(make_cache(tokens=40), recipe=SMALL))) as archive:
        for start in range(41):
            assert archive.match(ids[start:], start) == (40, None)
            assert archive.match(ids[start : start + 3], start) == (min(40, start + 3), None)
            for at in range(start, 40, 7):
                wrong = ids.copy()
                wrong[at] += 1
                assert archive.match(wrong[start:], start) == (at, ids[at])


def test_the_state_after_an_append_is_the_one_a_reader_finds(
    make_cache: Callable, make_ids: Callable, saved: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the chain of commits to walk stays short while blocks are added, with one block to a commit."""
    monkeypatch.setattr("kvcellar.archive.writer.INDEX_EVERY", 4)
    ids, cache = make_ids(150 * BLOCK), make_cache(tokens=150 * BLOCK, layers=1, heads=1, width=2)
    path = saved(prefix(cache, BLOCK), ids[:BLOCK], recipe=SMALL)
    longest = 0
    with kvcellar.open(path, identity="m", mode="a") as archive:
        for held in range(BLOCK, len(ids), BLOCK):
            new = [(k[:, :, held : held + BLOCK], v[:, :, held : held + BLOCK]) for k, v in cache]
            archive.append(new, ids[held : held + BLOCK], start=held)
            state = archive._open()
            with ArchiveReader(LocalReader(path)) as found:
                assert np.array_equal(found.entries, state.entries)
                assert found.since_index == state.since_index
                assert replace(found.commit, added=None) == replace(state.commit, added=None)
                assert np.array_equal(found.commit.added, state.commit.added)
            longest = max(longest, state.since_index)
            assert state.since_index < max(4, len(state.entries) / 16)
    assert longest == 8
