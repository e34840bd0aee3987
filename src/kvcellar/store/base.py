"""What the archive asks of a place that keeps files.

A store reads at any offset, replaces a whole object at once, and lets one writer at a time append. Everything an
object-store or database back end cannot do natively stays out of this class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager


class Reader(ABC):
    """An object open for reading; it keeps showing the version it was opened on."""

    name: str

    @abstractmethod
    def size(self) -> int:
        """Bytes now in the object."""

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer only where the object ends. Raises StorageError."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`; returns the bytes read, fewer only where the object ends."""
        data = self.read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Appender(Reader):
    """An object open for reading and appending, held by this writer alone until closed.

    A process forked meanwhile may read and close it; anything else raises StorageError there.
    """

    @abstractmethod
    def append(self, data: bytes | memoryview) -> None:
        """Write `data` behind the end. Raises StorageError."""

    @abstractmethod
    def truncate(self, size: int) -> None:
        """Drop what lies behind `size`."""

    @abstractmethod
    def is_current(self) -> bool:
        """Whether the name still leads to this object; false once somebody put another in its place."""

    @abstractmethod
    def sync(self) -> None:
        """Return when everything appended so far survives a power cut."""


class Pending(ABC):
    """A new object that nobody sees until `commit`."""

    @abstractmethod
    def append(self, data: bytes | memoryview) -> None: ...

    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def commit(self) -> None:
        """Make the object durable and visible under its name, replacing an older one at once."""

    @abstractmethod
    def commit_and_hold(self) -> Appender:
        """Like `commit`, and stay its single writer: the lock is taken before anyone can see the object."""

    @abstractmethod
    def discard(self) -> None:
        """Forget the object; nothing stays behind."""


class Store(ABC):
    """A folder-like place of named objects. Names are data, never paths out of the place."""

    @abstractmethod
    def open_reader(self, name: str) -> Reader:
        """Raises ArchiveNotFound, StorageError."""

    @abstractmethod
    def open_appender(self, name: str) -> Appender:
        """Waits for the single-writer lock. Raises ArchiveNotFound, ArchiveLocked, StorageError."""

    @abstractmethod
    def create(self, name: str) -> Pending: ...

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def names(self) -> list[str]:
        """Sorted names of the objects here."""

    @contextmanager
    def replacing(self, name: str) -> Iterator[Pending]:
        """A pending object that is committed when the block ends well and discarded when it raises."""
        pending = self.create(name)
        try:
            yield pending
            pending.commit()
        except BaseException:
            pending.discard()
            raise
