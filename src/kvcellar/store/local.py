"""Archives as files in one folder.

A new file is written beside its goal under a name of its own, synced, and renamed over it, so that a reader sees
the old version or the new one and never a half. Appending takes an advisory lock on the file itself (released by
the kernel when its holder dies) and then checks that the name still leads to the locked file.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ArchiveLocked, ArchiveNotFound, InvalidInput, StorageError
from ..identity import require_text
from .base import Appender, Pending, Reader, Store

LOCK_SECONDS = 10.0
_PENDING = ".kvcellar-"
_CHUNK = 1 << 30
_OPEN_FLAGS = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """OSError as one of ours, with the file's name and the system's reason."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise ArchiveNotFound(errno.ENOENT, f"no archive at {name}") from None
    except OSError as error:
        raise StorageError(error.errno, f"{name}: {error.strerror or error}") from error


class LocalReader(Reader):
    def __init__(self, path: Path, flags: int = os.O_RDONLY):
        self.name = str(path)
        self._fd = -1
        with _explained(self.name):
            self._fd = os.open(path, flags | _OPEN_FLAGS)
            try:
                if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
            except BaseException:
                self.close()
                raise

    def size(self) -> int:
        with _explained(self.name):
            return os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        with _explained(self.name):
            data = os.pread(self._fd, min(length, _CHUNK), offset)
            if len(data) == length or not data:
                return data
        buffer = bytearray(length)
        buffer[: len(data)] = data
        got = len(data) + self.read_into(offset + len(data), memoryview(buffer)[len(data) :])
        return bytes(buffer[:got])

    def read_into(self, offset: int, buffer: memoryview) -> int:
        got = 0
        with _explained(self.name):
            while got < len(buffer):
                more = os.preadv(self._fd, [buffer[got : got + _CHUNK]], offset + got)
                if not more:
                    break
                got += more
        return got

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalAppender(LocalReader, Appender):
    def __init__(self, path: Path):
        super().__init__(path, os.O_RDWR)
        try:
            self._end = self.size()
        except BaseException:
            self.close()
            raise

    def lock(self, seconds: float) -> None:
        """Take the single-writer lock, waiting at most `seconds`."""
        import portalocker  # only writers need it

        deadline = time.monotonic() + seconds
        while True:
            try:
                portalocker.lock(self._fd, portalocker.LockFlags.EXCLUSIVE | portalocker.LockFlags.NON_BLOCKING)
                break
            except (portalocker.exceptions.AlreadyLocked, BlockingIOError):
                if time.monotonic() >= deadline:
                    raise ArchiveLocked(f"{self.name} is being written by another process or handle") from None
                time.sleep(0.01)
            except portalocker.exceptions.LockException as error:
                raise StorageError(errno.ENOLCK, f"{self.name}: cannot lock: {error}") from error
        self._end = self.size()

    def append(self, data: bytes | memoryview) -> None:
        with _explained(self.name):
            view = memoryview(data)
            while view:
                written = os.pwrite(self._fd, view[:_CHUNK], self._end)
                self._end += written
                view = view[written:]

    def truncate(self, size: int) -> None:
        with _explained(self.name):
            os.ftruncate(self._fd, size)
            self._end = size

    def is_current(self) -> bool:
        with _explained(self.name):
            try:
                return os.path.samestat(os.fstat(self._fd), os.stat(self.name))
            except FileNotFoundError:
                return False

    def sync(self) -> None:
        with _explained(self.name):
            os.fsync(self._fd)


class LocalPending(Pending):
    def __init__(self, goal: Path):
        self._goal = goal
        self._path = goal.with_name(f"{_PENDING}{os.getpid()}-{secrets.token_hex(8)}.tmp")
        self._size = 0
        with _explained(str(goal)):
            self._file = open(self._path, "xb", buffering=0)  # noqa: SIM115 (closed by commit or discard)

    def append(self, data: bytes | memoryview) -> None:
        with _explained(str(self._goal)):
            view = memoryview(data)
            while view:
                written = self._file.write(view[:_CHUNK])
                view = view[written:]
            self._size += len(data)

    def size(self) -> int:
        return self._size

    def commit(self) -> None:
        with _explained(str(self._goal)):
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._path, self._goal)
            _sync_folder(self._goal.parent)

    def commit_and_hold(self) -> LocalAppender:
        held = LocalAppender(self._path)
        try:
            held.name = str(self._goal)
            held.lock(0.0)
            self.commit()
        except BaseException:
            held.close()
            raise
        return held

    def discard(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable, where the system can sync folders."""
    if os.name == "posix":
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _is_pending(name: str) -> bool:
    return name.startswith(_PENDING) and name.endswith(".tmp")


class LocalStore(Store):
    """The files of one folder; a name is one path component."""

    def __init__(self, folder: str | os.PathLike[str], *, lock_seconds: float = LOCK_SECONDS):
        self.folder = Path(folder)
        self.lock_seconds = lock_seconds

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> tuple[LocalStore, str]:
        """The store and name of the file at `path`; a link is followed, so that it stays a link when replaced."""
        resolved = Path(os.path.realpath(path))
        return cls(resolved.parent), resolved.name

    def _path(self, name: str) -> Path:
        if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise InvalidInput(f"{name!r} is no file name")
        require_text(name, None, "file name")
        return self.folder / name

    def open_reader(self, name: str) -> LocalReader:
        return LocalReader(self._path(name))

    def open_appender(self, name: str) -> LocalAppender:
        path = self._path(name)
        deadline = time.monotonic() + self.lock_seconds
        while True:
            appender = LocalAppender(path)
            try:
                appender.lock(max(0.0, deadline - time.monotonic()))
                if appender.is_current():
                    return appender
            except BaseException:
                appender.close()
                raise
            appender.close()  # replaced while we waited: the lock is on the old file

    def create(self, name: str) -> LocalPending:
        self.require_folder()
        return LocalPending(self._path(name))

    def require_folder(self) -> None:
        """Raise StorageError unless there is a folder to write to."""
        if not self.folder.is_dir():
            raise StorageError(errno.ENOENT, f"no folder {self.folder}")

    def exists(self, name: str) -> bool:
        return self._path(name).is_file()

    def names(self) -> list[str]:
        if not self.folder.is_dir():
            raise ArchiveNotFound(errno.ENOENT, f"no folder {self.folder}")
        with _explained(str(self.folder)):
            return sorted(
                entry.name for entry in os.scandir(self.folder) if entry.is_file() and not _is_pending(entry.name)
            )
