"""Archives as files in one folder.

A new file is written beside its goal under a name of its own, synced, and renamed over it, so that a reader sees
the old version or the new one and never a half. Appending takes an advisory lock on the file itself (released by
the kernel when its holder dies) and then checks that the name still leads to the locked file. New files are locked
likewise while they are written: one that nobody holds was left by a writer that died, and the next writer removes it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import ArchiveLocked, ArchiveNotFound, InvalidInput, KVCellarError, StorageError
from ..identity import require_text
from .base import Appender, Pending, Reader, Store

LOCK_SECONDS = 10.0
_PENDING = re.compile(r"\.kvcellar-\d+-[0-9a-f]{16}\.tmp")
_CHUNK = 1 << 30
_OPEN_FLAGS = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


@contextmanager
def _explained(name: str, *, creating: bool = False) -> Iterator[None]:
    """OSError as one of ours, with the file's name and the system's reason. Nothing is missing where it is created."""
    try:
        yield
    except OSError as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not creating:
            raise ArchiveNotFound(errno.ENOENT, f"no archive at {name}") from None
        raise StorageError(error.errno, f"{name}: {error.strerror or error}") from error


class LocalReader(Reader):
    def __init__(self, path: Path, flags: int = os.O_RDONLY, goal: Path | None = None, mode: int = 0o666):
        """Open `path`; messages name `goal`, when it is a file on its way there; `mode` is that of a new file."""
        self.name = str(goal or path)
        self._fd = -1
        with _explained(self.name, creating=bool(flags & os.O_CREAT)):
            self._fd = os.open(path, flags | _OPEN_FLAGS, mode)
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
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):  # the descriptor is gone all the same, and what had to be durable was synced
                os.close(fd)


class LocalAppender(LocalReader, Appender):
    def __enter__(self) -> LocalAppender:
        return self

    def __init__(self, path: Path, flags: int = 0, goal: Path | None = None, mode: int = 0o666):
        self.path, self._owner = path, os.getpid()
        super().__init__(path, os.O_RDWR | flags, goal, mode)
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

    def _require_owner(self) -> None:
        """A forked process shares file and lock with its parent, so that nothing else would keep the two apart."""
        if os.getpid() != self._owner:
            raise StorageError(errno.EPERM, f"{self.name} was opened for writing before a fork: open it again to write")

    def append(self, data: bytes | memoryview) -> None:
        self._require_owner()
        with _explained(self.name):
            view = memoryview(data)
            while view:
                written = os.pwrite(self._fd, view[:_CHUNK], self._end)
                self._end += written
                view = view[written:]

    def truncate(self, size: int) -> None:
        self._require_owner()
        with _explained(self.name):
            os.ftruncate(self._fd, size)
            self._end = size

    def is_current(self) -> bool:
        self._require_owner()
        with _explained(self.name):
            try:
                return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
            except FileNotFoundError:
                return False

    def sync(self) -> None:
        with _explained(self.name):
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0 and os.getpid() == self._owner:
            import portalocker

            with suppress(portalocker.exceptions.LockException):  # never locked, or where there are no locks
                portalocker.unlock(self._fd)  # or forked processes, which share the lock, would go on holding it
        super().close()


class LocalPending(Pending):
    """A new file; it takes over the mode of the one it replaces, so that private archives stay private."""

    _file: LocalAppender

    def __init__(self, goal: Path):
        self._goal = goal
        mode = _mode_of(goal)
        while not self._create(0o666 if mode is None else mode):
            pass
        if mode is not None:
            with suppress(OSError):  # places that keep no modes
                os.chmod(self._path, mode)  # whatever the umask took away

    def _create(self, mode: int) -> bool:
        """Make and lock a new file; false when another writer took it for litter in between."""
        self._path = self._goal.with_name(f".kvcellar-{os.getpid()}-{secrets.token_hex(8)}.tmp")
        try:
            self._file = LocalAppender(self._path, os.O_CREAT | os.O_EXCL, self._goal, mode)
            with suppress(StorageError):  # a place without locks: nobody takes anything for litter there
                self._file.lock(0.0)
            if self._file.is_current():
                return True
        except ArchiveLocked:
            pass
        except BaseException:
            self.discard()
            raise
        self._file.close()
        return False

    def append(self, data: bytes | memoryview) -> None:
        self._file.append(data)

    def size(self) -> int:
        return self._file.size()

    def commit(self) -> None:
        self.commit_and_hold().close()

    def commit_and_hold(self) -> LocalAppender:
        self._file.sync()
        with _explained(str(self._goal), creating=True):
            os.replace(self._path, self._goal)
            self._file.path = self._goal
            _sync_folder(self._goal.parent)
        return self._file

    def discard(self) -> None:
        with suppress(OSError):  # what cannot be removed now is litter for the next writer; another error is under way
            os.unlink(self._path)
        if hasattr(self, "_file"):
            self._file.close()


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable, where the system can sync folders."""
    if os.name == "posix":
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _mode_of(path: Path) -> int | None:
    try:
        return stat.S_IMODE(os.stat(path).st_mode)
    except OSError:
        return None


def _is_pending(name: str) -> bool:
    return _PENDING.fullmatch(name) is not None


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
        goal = self._path(name)
        self._remove_litter()
        return LocalPending(goal)

    def _remove_litter(self) -> None:
        """Remove what writers that were killed left unfinished: nobody holds the lock of such a file any more."""
        with suppress(OSError):  # each of these steps may be refused; the next writer tries again
            for entry in os.scandir(self.folder):
                if _is_pending(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(KVCellarError), LocalAppender(Path(entry.path)) as left:
                        left.lock(0.0)
                        os.unlink(entry.path)

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
