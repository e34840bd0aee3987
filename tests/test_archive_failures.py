"""A disk that fills up, fails or is interrupted at any point of a write: the old version stays, nothing else does."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcellar
import kvcellar.store.local as local
from archives import SMALL, bits, contents, contents_at, contents_of, prefix, same, spans
from kvcellar.archive.format import BLOCK, INDEX
from kvcellar.errors import ArchiveLocked, DamagedArchive, KVCellarError, StorageError
from kvcellar.store.local import LocalAppender, LocalPending, LocalStore

pytestmark = pytest.mark.usefixtures("quick")
TOKENS = 45
POINTS = ["first byte", "10 %", "50 %", "before the index", "last byte"]


def full() -> BaseException:
    return StorageError(errno.ENOSPC, "no space left on device")


def point(name: str, written: bytes, before_index: int) -> int:
    """How many of the bytes a write would write reach the disk."""
    size = len(written)
    places = {"first byte": 0, "10 %": size // 10, "50 %": size // 2, "last byte": size - 1}
    return before_index if name == "before the index" else places[name]


@contextmanager
def failing_after(count: int, kind: type, error: Callable[[], BaseException] = full) -> Iterator[None]:
    """Appends of `kind` write `count` bytes in all, then raise in the middle of what they were given."""
    original, left = kind.append, count

    def append(self: Any, data: bytes | memoryview) -> None:
        nonlocal left
        original(self, data[:left])
        left -= min(left, len(data))
        if not left:
            raise error()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "append", append)
        yield


@pytest.fixture
def cache(make_cache: Callable) -> list:
    return make_cache(layers=2, heads=1, tokens=TOKENS, width=8, dtype=torch.bfloat16)


@pytest.fixture
def ids(make_ids: Callable) -> list[int]:
    return make_ids(TOKENS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.kvc"


def save(path: Path, cache: list, ids: list[int], tokens: int) -> None:
    kvcellar.save(path, prefix(cache, tokens), tokens=ids[:tokens], identity="m", recipe=SMALL)


@pytest.mark.parametrize("where", POINTS)
@pytest.mark.parametrize("over", [True, False], ids=["over an old archive", "anew"])
@pytest.mark.parametrize("error", [full, KeyboardInterrupt], ids=["full disk", "interrupt"])
def test_a_failed_save(where: str, over: bool, error: Callable, path: Path, cache: list, ids: list[int]) -> None:
    save(path, cache, ids, TOKENS)
    new = path.read_bytes()
    (index,) = [span for span in spans(new) if span.tag == INDEX]
    path.unlink()
    if over:
        save(path, cache, ids, 12)
    old = path.read_bytes() if over else None
    with failing_after(point(where, new, index.start), LocalPending, error), pytest.raises(type(error())):
        save(path, cache, ids, TOKENS)
    assert os.listdir(path.parent) == (["a.kvc"] if over else [])
    if over:
        assert path.read_bytes() == old
    save(path, cache, ids, TOKENS)
    assert path.read_bytes() == new, "and nothing of the failure lingers"


@pytest.mark.parametrize("where", POINTS)
@pytest.mark.parametrize("error", [full, KeyboardInterrupt], ids=["full disk", "interrupt"])
def test_a_failed_append(
    where: str, error: Callable, path: Path, cache: list, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcellar.archive.writer.INDEX_EVERY", 1)  # every append writes an index, too
    save(path, cache, ids, 12)
    old = path.read_bytes()
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.append(cache, ids)
    new = path.read_bytes()
    index = [span for span in spans(new) if span.tag == INDEX][-1]
    path.write_bytes(old)

    with kvcellar.open(path, identity="m", mode="a") as archive:
        bytes_before_failure = point(where, new[len(old) :], index.start - len(old))
        with failing_after(bytes_before_failure, LocalAppender, error), pytest.raises(type(error())):
            archive.append(cache, ids)
        assert path.read_bytes() == old
        assert os.listdir(path.parent) == ["a.kvc"]
        assert same(contents(archive), contents_of(cache, ids, 12)), "the open archive goes on as before"
        assert archive.verify().problems == ()
        archive.append(cache, ids)
    assert path.read_bytes() == new


@pytest.mark.parametrize("count", [0, 100, 700])
def test_a_failed_append_that_cannot_be_cut_back(count: int, path: Path, cache: list, ids: list[int]) -> None:
    """The disk refuses even that: bytes of the failure stay behind the last commit, harmless, until the next append."""
    save(path, cache, ids, 12)
    old = path.read_bytes()

    def truncate(self: LocalAppender, size: int) -> None:
        raise StorageError(errno.EIO, "input/output error")

    with kvcellar.open(path, identity="m", mode="a") as archive:
        with pytest.MonkeyPatch.context() as patch, failing_after(count, LocalAppender):
            patch.setattr(LocalAppender, "truncate", truncate)
            with pytest.raises(StorageError) as caught:
                archive.append(cache, ids)
            assert caught.value.errno == errno.ENOSPC, "the first failure is the one that is told"
        assert same(contents(archive), contents_of(cache, ids, 12))
    assert path.read_bytes()[: len(old)] == old
    assert same(contents_at(path), contents_of(cache, ids, 12))
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.append(cache, ids)
        assert archive.verify().problems == ()
    assert same(contents_at(path), contents_of(cache, ids))


@pytest.mark.parametrize("call", [1, 2])
def test_a_failed_sync_is_a_failed_append(call: int, path: Path, cache: list, ids: list[int]) -> None:
    """Before the commit, and after it: what is not known to be durable is not reported as done."""
    save(path, cache, ids, 12)
    old, calls = path.read_bytes(), 0

    def sync(self: LocalAppender) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise full()

    with kvcellar.open(path, identity="m", mode="a") as archive:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalAppender, "sync", sync)
            with pytest.raises(StorageError):
                archive.append(cache, ids)
        assert path.read_bytes() == old
        archive.append(cache, ids)
    assert same(contents_at(path), contents_of(cache, ids))


def test_blocks_are_durable_before_their_commit_is_written(path: Path, cache: list, ids: list[int]) -> None:
    save(path, cache, ids, 12)
    events: list[str] = []
    append, sync = LocalAppender.append, LocalAppender.sync

    def noted_append(self: LocalAppender, data: bytes | memoryview) -> None:
        events.append("commit" if bytes(data[:4]) == b"KVCC" else "data")
        append(self, data)

    def noted_sync(self: LocalAppender) -> None:
        events.append("sync")
        sync(self)

    with kvcellar.open(path, identity="m", mode="a") as archive, pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalAppender, "append", noted_append)
        patch.setattr(LocalAppender, "sync", noted_sync)
        archive.append(cache, ids)
    assert events[-3:] == ["sync", "commit", "sync"]
    assert set(events[:-3]) == {"data"}


@pytest.mark.parametrize("where", POINTS)
def test_a_failed_compaction(where: str, path: Path, cache: list, ids: list[int]) -> None:
    save(path, cache, ids, TOKENS)
    bulk = path.read_bytes()
    (index,) = [span for span in spans(bulk) if span.tag == INDEX]
    save(path, cache, ids, 12)
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.append(cache, ids)
        old = path.read_bytes()
        assert old != bulk
        with failing_after(point(where, bulk, index.start), LocalPending), pytest.raises(StorageError):
            archive.compact()
        assert path.read_bytes() == old
        assert os.listdir(path.parent) == ["a.kvc"]
        assert same(contents(archive), contents_of(cache, ids))
        with pytest.raises(ArchiveLocked):
            LocalStore(path.parent, lock_seconds=0).open_appender("a.kvc")
        archive.compact()
    assert path.read_bytes() == bulk


def test_an_append_does_not_fail_because_compaction_did(path: Path, cache: list, ids: list[int]) -> None:
    """After an error the archive is as before, so an append that is committed must not end in one."""
    save(path, cache, ids, 1)
    with kvcellar.open(path, identity="m", mode="a") as archive, failing_after(0, LocalPending):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for tokens in range(2, 30):
                archive.append(prefix(cache, tokens), ids[:tokens])
                assert same(contents(archive), contents_of(cache, ids, tokens))
        assert any("no space left" in str(warning.message) for warning in told)
        assert archive.info().commits == 29, "nothing could be compacted"
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.append(cache, ids)
        assert archive.info().commits == 1, "made up for as soon as it is possible"
    assert os.listdir(path.parent) == ["a.kvc"]
    assert same(contents_at(path), contents_of(cache, ids))


def test_an_append_does_not_fail_because_an_old_block_is_damaged(path: Path, cache: list, ids: list[int]) -> None:
    """Compaction reads that block, the append did not: the new tokens are committed and must not end in an error."""
    save(path, cache, ids, 9)
    (first, _) = [span for span in spans(path.read_bytes()) if span.tag == BLOCK]
    with open(path, "r+b") as file:
        file.seek(first.stop - 1)
        file.write(bytes([path.read_bytes()[first.stop - 1] ^ 1]))
    with kvcellar.open(path, identity="m", mode="a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that dead bytes have to stay
        for tokens in range(10, 40):
            archive.append(prefix(cache, tokens), ids[:tokens])
        assert [bits(side).tolist() for side in archive.read(0, 8, 39)] == [
            bits(side[0, :, 8:39]).tolist() for side in cache[0]
        ]
        assert archive.info().commits == 31, "nothing could be compacted"
        with pytest.raises(DamagedArchive, match="block 0"):
            archive.compact()
    assert os.listdir(path.parent) == ["a.kvc"]


@pytest.mark.parametrize("name", ["_sync_folder", "replace"])
def test_nothing_is_appended_to_a_file_that_was_replaced(name: str, path: Path, cache: list, ids: list[int]) -> None:
    """Compaction that fails on either side of the renaming: what is appended next is in the file, or is refused."""
    save(path, cache, ids, 12)
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.append(prefix(cache, 20), ids[:20])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local if name == "_sync_folder" else local.os, name, _refuse)
            with pytest.raises(StorageError):
                archive.compact()
        with suppress(KVCellarError):
            archive.append(cache, ids)
            assert same(contents_at(path), contents_of(cache, ids)), "appended to a file that has no name any more"
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.append(cache, ids)
    assert same(contents_at(path), contents_of(cache, ids))
    assert os.listdir(path.parent) == ["a.kvc"]


def test_a_file_that_was_replaced_is_not_replaced_by_its_past(path: Path, cache: list, ids: list[int]) -> None:
    """Compaction failed behind the renaming, somebody else appended: compacting once more must not undo that."""
    save(path, cache, ids, 12)
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.append(prefix(cache, 20), ids[:20])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local, "_sync_folder", _refuse)
            with pytest.raises(StorageError):
                archive.compact()
        with kvcellar.open(path, identity="m", mode="a") as other:
            other.append(cache, ids)
        with suppress(KVCellarError):
            archive.compact()
    assert same(contents_at(path), contents_of(cache, ids))


def _refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "input/output error")


def test_a_refused_look_at_the_old_file_does_not_keep_its_lock(path: Path, cache: list, ids: list[int]) -> None:
    save(path, cache, ids, 12)

    def read(self: LocalAppender, offset: int, length: int) -> bytes:
        raise StorageError(errno.EIO, "input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalAppender, "read", read)
        with pytest.raises(StorageError):
            save(path, cache, ids, TOKENS)
    LocalStore(path.parent, lock_seconds=0).open_appender("a.kvc").close()
    assert same(contents_at(path), contents_of(cache, ids, 12))


@pytest.mark.parametrize("lost", ["the commit", "its end mark", "its last byte"])
def test_a_power_cut_leaves_zeros_where_the_commit_was_written(
    lost: str, cache: list, make_ids: Callable, saved: Callable
) -> None:
    """The length of a file can reach the disk before its bytes do. One lost byte alone is damage."""
    path = saved(prefix(cache, 20), make_ids(20), recipe=SMALL)
    before = contents_at(path)
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.append(cache, make_ids(TOKENS))
    data = bytearray(path.read_bytes())
    last = spans(bytes(data))[-1]
    zeros = {"the commit": last.stop - last.start - 40, "its end mark": 16, "its last byte": 1}[lost]
    data[-zeros:] = bytes(zeros)
    path.write_bytes(data)
    if zeros == 1:
        with pytest.raises(DamagedArchive):
            contents_at(path)
        return
    assert same(contents_at(path), before)
    with kvcellar.open(path, identity="m", mode="a") as archive:
        assert not archive.verify().ok  # it says that something follows
        archive.append(cache, make_ids(TOKENS))
        assert archive.verify().ok
    assert same(contents_at(path), contents_of(cache, make_ids(TOKENS)))
