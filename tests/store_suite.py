"""What every store must do. A back end's tests inherit `StoreSuite` and say how to make an empty store."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from kvcellar.errors import ArchiveLocked, ArchiveNotFound, InvalidInput
from kvcellar.store.base import Store

OLD, NEW = b"old contents", b"new and longer contents"
REFUSED = ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "a\0b", "\ud800"]
ACCEPTED = ["a.kvc", "no ending", ".hidden", "ümlaut 日本.kvc", "a..b", "-rf", "~", "x" * 250, "日" * 80]


class StoreSuite(ABC):
    @abstractmethod
    def make(self, folder: Path, patience: float) -> Store:
        """The store that lives in `folder`, empty at first; it waits `patience` seconds for locks."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        (tmp_path / "store").mkdir()
        return self.make(tmp_path / "store", 0.05)

    @staticmethod
    def put(store: Store, name: str, data: bytes) -> None:
        with store.replacing(name) as pending:
            pending.append(data)

    @staticmethod
    def get(store: Store, name: str) -> bytes:
        with store.open_reader(name) as reader:
            return reader.read(0, reader.size())

    # --- objects come and go whole

    def test_an_object_is_what_was_appended_to_it(self, store: Store) -> None:
        with store.replacing("a") as pending:
            assert pending.size() == 0
            for piece in (b"one ", memoryview(b"two "), b"", bytes(100_000)):
                pending.append(piece)
            assert pending.size() == 100_008
        assert self.get(store, "a") == b"one two " + bytes(100_000)

    def test_nobody_sees_a_pending_object(self, store: Store) -> None:
        pending = store.create("a")
        pending.append(NEW)
        assert not store.exists("a")
        assert store.names() == []
        with pytest.raises(ArchiveNotFound):
            store.open_reader("a")
        pending.commit()
        assert store.exists("a")
        assert store.names() == ["a"]

    def test_an_object_is_replaced_at_once(self, store: Store) -> None:
        self.put(store, "a", OLD)
        pending = store.create("a")
        for piece in (NEW[:5], NEW[5:]):
            pending.append(piece)
            assert self.get(store, "a") == OLD
        pending.commit()
        assert self.get(store, "a") == NEW

    def test_readers_see_the_old_or_the_new_object_and_never_a_mixture(self, store: Store) -> None:
        versions = {bytes([i]) * (1000 + i) for i in range(30)}
        self.put(store, "a", min(versions))
        done, seen = threading.Event(), set()

        def read() -> None:
            while not done.is_set():
                seen.add(self.get(store, "a"))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for version in sorted(versions):
                self.put(store, "a", version)
        finally:
            done.set()
            reader.join()
        assert seen
        assert seen <= versions

    def test_a_discarded_object_leaves_nothing_behind(self, store: Store) -> None:
        self.put(store, "a", OLD)
        for name in ("a", "b"):
            pending = store.create(name)
            pending.append(NEW)
            pending.discard()
        assert store.names() == ["a"]
        assert self.get(store, "a") == OLD

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
    def test_a_failed_replacement_leaves_the_old_object(self, store: Store, error: type[BaseException]) -> None:
        self.put(store, "a", OLD)

        def fail() -> None:
            with store.replacing("a") as pending:
                pending.append(NEW)
                raise error

        with pytest.raises(error):
            fail()
        assert self.get(store, "a") == OLD
        assert store.names() == ["a"]

    def test_two_pending_objects_of_one_name_do_not_meet(self, store: Store) -> None:
        first, second = store.create("a"), store.create("a")
        first.append(OLD)
        second.append(NEW)
        first.append(OLD)
        second.commit()
        assert self.get(store, "a") == NEW
        first.commit()
        assert self.get(store, "a") == OLD + OLD
        assert store.names() == ["a"]

    # --- reading

    def test_reads_end_where_the_object_ends(self, store: Store) -> None:
        self.put(store, "a", bytes(range(100)))
        with store.open_reader("a") as reader:
            assert reader.size() == 100
            assert reader.read(10, 5) == bytes(range(10, 15))
            assert reader.read(90, 50) == bytes(range(90, 100))
            assert reader.read(100, 1) == reader.read(5000, 10) == reader.read(3, 0) == b""
            buffer = bytearray(b"\xff" * 20)
            assert reader.read_into(90, memoryview(buffer)) == 10
            assert buffer == bytes(range(90, 100)) + b"\xff" * 10
            assert reader.read_into(40, memoryview(buffer)[5:10]) == 5
            assert buffer[:12] == bytes([90, 91, 92, 93, 94, 40, 41, 42, 43, 44, 0xFF, 0xFF])

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        self.put(store, "a", b"")
        assert store.exists("a")
        assert self.get(store, "a") == b""

    def test_a_reader_keeps_the_version_it_was_opened_on(self, store: Store) -> None:
        self.put(store, "a", OLD)
        with store.open_reader("a") as reader:
            self.put(store, "a", NEW)
            assert reader.read(0, 100) == OLD
            assert reader.size() == len(OLD)
        assert self.get(store, "a") == NEW

    def test_closing_twice_is_closing(self, store: Store) -> None:
        self.put(store, "a", OLD)
        for reader in (store.open_reader("a"), store.open_appender("a")):
            reader.close()
            reader.close()

    # --- appending, alone

    def test_appended_bytes_follow_the_old_ones(self, store: Store) -> None:
        self.put(store, "a", OLD)
        with store.open_reader("a") as before, store.open_appender("a") as appender:
            appender.append(b"one")
            appender.append(memoryview(b"two"))
            appender.sync()
            assert appender.read(len(OLD), 10) == b"onetwo"
            assert appender.size() == before.size() == len(OLD) + 6
            appender.truncate(len(OLD) + 1)
            appender.append(b"!")
        assert self.get(store, "a") == OLD + b"o!"

    def test_one_writer_at_a_time(self, store: Store) -> None:
        self.put(store, "a", OLD)
        self.put(store, "b", OLD)
        holder = store.open_appender("a")
        with pytest.raises(ArchiveLocked, match="a"):
            store.open_appender("a")
        store.open_appender("b").close()
        assert self.get(store, "a") == OLD, "readers need no lock"
        holder.close()
        store.open_appender("a").close()

    def test_a_waiting_writer_gets_the_object_of_that_name(self, store: Store, tmp_path: Path) -> None:
        """Not the one it began to wait for, when that was replaced meanwhile."""
        self.put(store, "a", OLD)
        holder = store.open_appender("a")
        found: list[bytes] = []

        def wait() -> None:
            with self.make(tmp_path / "store", 30).open_appender("a") as appender:
                found.append(appender.read(0, 100))

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.1)
        self.put(store, "a", NEW)
        holder.append(b" lost with its object")
        holder.close()
        waiter.join()
        assert found == [NEW]

    def test_commit_and_hold_lets_no_other_writer_in_between(self, store: Store) -> None:
        self.put(store, "a", OLD)
        pending = store.create("a")
        pending.append(NEW)
        held = pending.commit_and_hold()
        assert self.get(store, "a") == NEW
        with pytest.raises(ArchiveLocked):
            store.open_appender("a")
        held.append(b"!")
        held.close()
        assert self.get(store, "a") == NEW + b"!"
        store.open_appender("a").close()

    # --- names

    def test_missing_objects_are_not_found(self, store: Store) -> None:
        assert not store.exists("a")
        for ask in (store.open_reader, store.open_appender):
            with pytest.raises(ArchiveNotFound):
                ask("a")
            with pytest.raises(FileNotFoundError):
                ask("a")

    def test_names_are_listed_sorted(self, store: Store) -> None:
        for name in ("b", "a.kvc", "C", "10"):
            self.put(store, name, OLD)
        assert store.names() == sorted(["b", "a.kvc", "C", "10"])

    @pytest.mark.parametrize("name", ACCEPTED, ids=lambda name: name[:8])
    def test_any_name_of_one_component_is_good(self, store: Store, name: str) -> None:
        self.put(store, name, OLD)
        assert store.names() == [name]
        with store.open_appender(name) as appender:
            assert appender.read(0, 100) == OLD
        self.put(store, name, NEW)
        assert self.get(store, name) == NEW

    @pytest.mark.parametrize("name", REFUSED, ids=repr)
    def test_names_that_lead_elsewhere_are_refused(self, store: Store, name: str) -> None:
        for ask in (store.open_reader, store.open_appender, store.create, store.exists):
            with pytest.raises(InvalidInput, match="name"):
                ask(name)
