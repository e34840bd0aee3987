"""The local folder store: the suite, and what only files can do: other processes, death, links, a disk that refuses."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvcellar.store.local as local
from kvcellar.errors import ArchiveLocked, ArchiveNotFound, StorageError
from kvcellar.store.local import LocalStore
from store_suite import NEW, OLD, StoreSuite

HOLD = """
import sys
from kvcellar.store.local import LocalStore
appender = LocalStore(sys.argv[1]).open_appender("a")
print("held", flush=True)
sys.stdin.readline()
appender.append(b" by the other")
appender.close()
print("closed", flush=True)
sys.stdin.readline()
"""


class TestLocalStore(StoreSuite):
    def make(self, folder: Path, patience: float) -> LocalStore:
        return LocalStore(folder, lock_seconds=patience)

    # --- other processes

    @contextmanager
    def holder(self, store: LocalStore) -> Iterator[subprocess.Popen[str]]:
        """Another process that holds "a" for writing, appends and closes at a line, and ends at the next."""
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(store.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()
            process.communicate()

    def test_another_process_holds_the_lock_until_it_closes(self, store: LocalStore) -> None:
        self.put(store, "a", OLD)
        with self.holder(store) as process:
            with pytest.raises(ArchiveLocked, match="another process"):
                store.open_appender("a")
            assert self.get(store, "a") == OLD
            process.stdin.write("go\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            assert process.stdout.readline() == "closed\n"  # type: ignore[union-attr]
            with store.open_appender("a") as appender:
                assert appender.read(0, 100) == OLD + b" by the other"

    def test_the_lock_dies_with_its_holder(self, store: LocalStore) -> None:
        self.put(store, "a", OLD)
        with self.holder(store) as process:
            with pytest.raises(ArchiveLocked):
                store.open_appender("a")
            process.send_signal(signal.SIGKILL)
            process.wait()
            with store.open_appender("a") as appender:
                appender.append(b"!")
        assert self.get(store, "a") == OLD + b"!"

    def test_a_writer_waits_for_the_lock(self, store: LocalStore) -> None:
        self.put(store, "a", OLD)
        patient = LocalStore(store.folder, lock_seconds=30)
        with self.holder(store) as process:
            process.stdin.write("go\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            with patient.open_appender("a") as appender:
                assert appender.size() == len(OLD + b" by the other"), "the end is where it is once the lock is held"

    # --- what is no file

    def test_a_folder_is_no_archive(self, store: LocalStore) -> None:
        (store.folder / "a").mkdir()
        for ask in (store.open_reader, store.open_appender):
            with pytest.raises(StorageError, match="a: "):
                ask("a")
        with pytest.raises(StorageError):
            self.put(store, "a", NEW)
        assert not store.exists("a")
        assert os.listdir(store.folder) == ["a"]

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
    def test_a_pipe_is_refused_without_waiting_for_its_other_end(self, store: LocalStore) -> None:
        os.mkfifo(store.folder / "a")
        with pytest.raises(StorageError, match="not a regular file"):
            store.open_reader("a")
        assert store.names() == []

    def test_a_missing_folder_is_named(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "none")
        with pytest.raises(ArchiveNotFound):
            store.open_reader("a")
        with pytest.raises(ArchiveNotFound, match="none"):
            store.names()
        with pytest.raises(StorageError, match="no folder"):
            store.create("a")

    def test_a_file_in_place_of_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(OLD)
        store = LocalStore(tmp_path / "file")
        with pytest.raises(ArchiveNotFound):
            store.open_reader("a")
        with pytest.raises(StorageError):
            store.create("a")

    def test_a_link_stays_a_link(self, store: LocalStore, tmp_path: Path) -> None:
        self.put(store, "a", OLD)
        link = tmp_path / "link.kvc"
        link.symlink_to(store.folder / "a")
        through, name = LocalStore.at(link)
        self.put(through, name, NEW)
        assert link.is_symlink()
        assert self.get(store, "a") == NEW
        assert sorted(os.listdir(tmp_path)) == ["link.kvc", "store"]

    def test_temporary_names_are_never_the_same(self, store: LocalStore) -> None:
        pending = [store.create("a") for _ in range(50)]
        assert len(os.listdir(store.folder)) == 50
        assert not any(name.endswith(".kvc") for name in os.listdir(store.folder)), "no half file looks whole"
        for one in pending:
            one.discard()
        assert os.listdir(store.folder) == []

    # --- a disk that refuses

    @pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
    @pytest.mark.parametrize("call", ["open", "fstat", "pread", "preadv"])
    def test_refused_reads(self, store: LocalStore, call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.put(store, "a", OLD)
        with monkeypatch.context() as patch:
            self.refuse(patch, call, number)
            before = _open_files()
            with pytest.raises(StorageError, match="a: ") as caught:
                _read(store)
            assert caught.value.errno == number
            assert _open_files() == before
        assert self.get(store, "a") == OLD

    @pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOSPC])
    @pytest.mark.parametrize("call", ["open", "pwrite", "ftruncate", "fsync"])
    def test_refused_appends(self, store: LocalStore, call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.put(store, "a", OLD)
        with monkeypatch.context() as patch:
            self.refuse(patch, call, number)
            with pytest.raises(StorageError, match="a: ") as caught:
                _append(store)
            assert caught.value.errno == number
        assert self.get(store, "a")[: len(OLD)] == OLD
        store.open_appender("a").close()

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_refused_replacements(self, store: LocalStore, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.put(store, "a", OLD)
        with monkeypatch.context() as patch:
            self.refuse(patch, call, errno.EIO)
            with pytest.raises(StorageError) as caught:
                self.put(store, "a", NEW)
            assert caught.value.errno == errno.EIO
            pending = store.create("a")
            with pytest.raises(StorageError):
                pending.commit_and_hold()
            pending.discard()
        assert self.get(store, "a") == OLD
        assert os.listdir(store.folder) == ["a"]
        store.open_appender("a").close()

    def test_a_write_in_pieces_is_finished(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """Systems may write and read less than asked for."""
        self.put(store, "a", OLD)
        pwrite, pread, preadv = os.pwrite, os.pread, os.preadv
        monkeypatch.setattr(local.os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
        monkeypatch.setattr(local.os, "pread", lambda fd, length, at: pread(fd, min(length, 3), at))
        monkeypatch.setattr(local.os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:3]], at))
        with store.open_appender("a") as appender:
            appender.append(NEW)
            assert appender.read(0, 100) == OLD + NEW
            buffer = bytearray(10)
            assert appender.read_into(2, memoryview(buffer)) == 10
            assert buffer == (OLD + NEW)[2:12]

    @staticmethod
    def refuse(patch: pytest.MonkeyPatch, call: str, number: int) -> None:
        def refusing(*_: Any, **__: Any) -> Any:
            raise OSError(number, os.strerror(number))

        patch.setattr(local.os, call, refusing)


def _read(store: LocalStore) -> None:
    with store.open_reader("a") as reader:
        reader.read_into(0, memoryview(bytearray(10)))
        reader.read(0, 10)


def _append(store: LocalStore) -> None:
    with store.open_appender("a") as appender:
        appender.append(b"!")
        appender.sync()
        appender.truncate(len(OLD))


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def test_importing_the_store_starts_nothing_heavy() -> None:
    code = "import sys, kvcellar.store.local; print(sorted({'torch', 'numba', 'portalocker'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
