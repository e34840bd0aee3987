"""Reading and appending a folder's trie file: one writer at a time, and nothing of it is trusted unchecked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ..errors import ArchiveNotFound, DamagedArchive
from ..language.triefile import HEADER_SIZE, Entry, check_header, file_name, pack_header, read_entries
from ..store.base import Reader
from ..store.local import LocalAppender, LocalStore

PRIVATE = 0o600  # token ids are text: the file is no more readable than the most private archive beside it


class TrieLog:
    """The trie file of `key` in the folder of `store`. Remembers how far it has been read.

    `damaged`: some bytes met so far are no sound record; `rewrite` makes the file whole again.
    """

    def __init__(self, store: LocalStore, key: bytes):
        self.store, self.key, self.name = store, key, file_name(key)
        self.path = store.folder / self.name
        self.damaged = False
        self._file, self._end = 0, 0

    def read(self) -> Iterator[Entry]:
        """Entries that came since the last time; all of them after another writer made the file anew.

        Raises StorageError, NewerFormat. A file that is not there has none.
        """
        try:
            file = self.path.stat().st_ino
            reader = self.store.open_reader(self.name)
        except (OSError, ArchiveNotFound):
            return
        with reader:
            if file != self._file or reader.size() < self._end:
                self._file, self._end, self.damaged = file, 0, False
            yield from self._read(reader)

    def _read(self, reader: Reader) -> Iterator[Entry]:
        if not self._end and reader.size():
            try:
                check_header(reader.read(0, HEADER_SIZE), self.key)
            except DamagedArchive:
                self.damaged, self._end = True, reader.size()  # whose records these are, nothing says any more
                return
            self._end = HEADER_SIZE
        for end, entry in read_entries(reader, self._end):
            self._end = end
            if entry is None:
                self.damaged = True
            else:
                yield entry

    @contextmanager
    def writing(self) -> Iterator[LocalAppender]:
        """The file, made where there is none, held by this writer alone. Raises ArchiveLocked, StorageError."""
        self.store.require_folder()
        while True:
            with LocalAppender(self.path, os.O_CREAT, mode=PRIVATE) as file:
                file.lock(self.store.lock_seconds)
                if file.is_current():  # else it was made anew while we waited: the lock is on the old one
                    yield file
                    return

    def newly_read(self, file: LocalAppender) -> Iterator[Entry]:
        """What others wrote meanwhile, while no one can write; where damage was met, everything, to be sure of it."""
        number = self.path.stat().st_ino
        if self.damaged or number != self._file:
            self._file, self._end, self.damaged = number, 0, False
        yield from self._read(file)

    def append(self, file: LocalAppender, entries: Iterable[Entry]) -> None:
        """Add records behind the others; a file with a damaged header is emptied. Raises StorageError, NewerFormat."""
        if file.size():
            try:
                check_header(file.read(0, HEADER_SIZE), self.key)
            except DamagedArchive:
                file.truncate(0)
        read_all = self._end == file.size() or not file.size()
        if not file.size():
            file.append(pack_header(self.key))
        for entry in entries:
            file.append(entry.pack(file.size()))
        file.sync()
        if read_all:
            self._end = file.size()

    def rewrite(self, entries: Iterable[Entry]) -> None:
        """Put a file of just these records in its place, at once; call it within `writing`. Raises StorageError."""
        with self.store.replacing(self.name) as pending:
            pending.append(pack_header(self.key))
            for entry in entries:
                pending.append(entry.pack(pending.size()))
        self._file, self._end, self.damaged = self.path.stat().st_ino, self.path.stat().st_size, False
