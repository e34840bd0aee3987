"""What the workers of `crashers.py` do. `report` sends a JSON value to the test; an exception fails it."""

from __future__ import annotations

import errno
import os
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvcellar
import kvcellar.archive.writer as writer
from crashers import BLOCK, append, cache_of, held, held_by, save, version
from faults import WRITES, Death, watching
from kvcellar.errors import ArchiveLocked, ArchiveNotFound, StorageError
from kvcellar.store.local import LocalStore

Report = Callable[[Any], None]


def operate(operation: str, path: str, ids: list[int]) -> None:
    """One way to bring the archive at `path` to hold `ids`."""
    if operation == "save":
        save(path, ids)
    elif operation == "append":
        append(path, ids)
    elif operation == "append with an index":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "INDEX_EVERY", 1)
            append(path, ids)
    else:
        with kvcellar.open(path, identity="m", mode="a") as archive:
            archive.compact()


def dying(report: Report, operation: str, path: str, ids: list[int], number: int) -> None:
    """The operation, killed at its `number`th moment of writing."""
    with watching(Death(number), WRITES):
        operate(operation, path, ids)


def saving(report: Report, path: str, first: int) -> None:
    """Save one version after the other, for ever; report each that is safe."""
    for number in range(first, 1_000_000):
        save(path, version(number, 1 + number % 23))
        report(number)


def growing(report: Report, path: str, seed: int) -> None:
    """Append a few tokens at a time, for ever; report each length that is safe."""
    choose = random.Random(seed)
    with kvcellar.open(path, identity="m", mode="a") as archive:
        report(len(archive))
        while True:
            ids = version(1, len(archive) + choose.randint(1, 2 * BLOCK))
            archive.append(cache_of(ids), ids)
            report(len(ids))


def racing(report: Report, path: str, numbers: list[int]) -> None:
    """Save versions as fast as it goes."""
    waits = 0
    for number in numbers:
        while True:
            try:
                save(path, version(number, 1 + number % 23))
                break
            except ArchiveLocked:  # others were quicker for as long as a writer waits
                waits += 1
    report(waits)


def looking(report: Report, path: str, stop: str, verify: bool) -> None:
    """Open, read and verify until the file `stop` is there; an archive that was there once stays there."""
    absent = seen = 0
    versions = set()
    while not os.path.exists(stop):
        try:
            archive = kvcellar.open(path, identity="m")
        except ArchiveNotFound:
            assert not seen, "an archive that was there is gone"
            absent += 1
            continue
        with archive:
            ids = held_by(archive)
            problems = [] if not verify else archive.verify().problems
            assert not problems, problems
            versions.add((ids[0] // 1000, len(ids)))
        seen += 1
        time.sleep(0.002)  # leave the processors to the writers
    report({"seen": seen, "absent": absent, "states": sorted(versions)})


def joining(report: Report, path: str, writer: int, times: int, tokens: int) -> None:
    """Append `tokens` tokens of this writer's `times` times behind whatever the archive holds by then."""
    for _ in range(times):
        while True:
            try:
                with kvcellar.open(path, identity="m", mode="a") as archive:
                    ids = archive.tokens.tolist() + [writer] * tokens
                    archive.append(cache_of(ids), ids)
                break
            except ArchiveLocked:
                continue
        time.sleep(0.001)  # or one writer would be through before the next gets the lock


def sharing(report: Report, path: str) -> None:
    """An archive open for writing when the process forks: the child may read, the parent goes on writing."""
    ids = version(1, 6)
    archive = kvcellar.open(path, identity="m", mode="a")
    archive.append(cache_of(ids), ids)
    with _forked(lambda: _use_inherited(archive, ids)):
        longer = version(1, 2 * BLOCK + 1)
        archive.append(cache_of(longer), longer)
        assert held_by(archive) == longer
    longest = version(1, 3 * BLOCK + 2)
    archive.append(cache_of(longest), longest)
    assert held_by(archive) == longest
    with pytest.raises(ArchiveLocked):
        LocalStore(os.path.dirname(path), lock_seconds=0).open_appender(os.path.basename(path))
    with _forked(lambda: time.sleep(0.3)):  # it holds the file and the lock, too
        archive.close()
        append(path, [*longest, 7])
    report("done")


@contextmanager
def _forked(job: Callable[[], object]) -> Iterator[None]:
    """Another process runs `job` beside the block; it must end well."""
    pid = os.fork()
    if not pid:
        try:
            job()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    try:
        yield
    finally:
        _, status = os.waitpid(pid, 0)
    assert status == 0, "see what the child wrote to standard error"


def _use_inherited(archive: kvcellar.Archive, ids: list[int]) -> None:
    time.sleep(0.05)  # let the parent append meanwhile
    more = [*ids, 5]
    for write in (lambda: archive.append(cache_of(more), more), archive.compact):
        assert held_by(archive) == ids
        with pytest.raises(StorageError, match="fork"):
            write()
    with pytest.raises(ArchiveLocked):
        LocalStore(archive._store.folder, lock_seconds=0).open_appender(archive._name)
    archive.close()


def limited(report: Report, path: str, old: list[int], new: list[int]) -> None:
    """Append and save under every limit on a file's size, in steps, until both go through."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = os.path.getsize(path)
    for limit in range(size - 600, 1 << 20, 37):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        saved = _fits(errno.EFBIG, save, path + ".new", new)
        appended = _fits(errno.EFBIG, append, path, new)
        assert held(path) == (new if appended else old)
        assert held(path + ".new") == (new if saved else None)
        assert len(os.listdir(os.path.dirname(path))) == 1 + saved, "litter"
        if saved and appended:
            return
        report([saved, appended])


def filling(report: Report, folder: str) -> None:
    """Append and save on a small disk until it is full; then make room, and go on."""
    if refused := _mount_small(folder):
        return report({"skip": refused})
    path, ids = os.path.join(folder, "a.kvc"), version(1, 5)
    save(path, ids)
    filler = os.path.join(folder, "filler")
    with open(filler, "wb") as file:
        file.write(bytes(24 << 10))
    appended = 0
    with kvcellar.open(path, identity="m", mode="a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that dead bytes stay
        while _fits(errno.ENOSPC, archive.append, cache_of(ids), ids):
            assert held(path) == ids
            appended += 1
            ids = version(1, len(ids) + 9)
        assert held_by(archive) == held(path) == ids[:-9]
        assert not _fits(errno.ENOSPC, archive.compact)
        assert held_by(archive) == held(path) == ids[:-9]
        os.unlink(filler)
        assert _fits(errno.ENOSPC, archive.append, cache_of(ids), ids), "there is room again"
    assert held(path) == ids
    saved = 0
    while _fits(errno.ENOSPC, save, os.path.join(folder, f"{saved}.kvc"), version(2, 40)):
        saved += 1
    names = os.listdir(folder)
    assert not _fits(errno.ENOSPC, save, path, version(3, 400))
    assert held(path) == ids
    assert [held(os.path.join(folder, f"{i}.kvc")) for i in range(saved)] == [version(2, 40)] * saved
    assert os.listdir(folder) == names, "litter"
    os.unlink(os.path.join(folder, "0.kvc"))
    save(path, version(3, 2))
    assert held(path) == version(3, 2)
    return report({"appended": appended, "saved": saved})


def _fits(full: int, write: Callable[..., object], *arguments: Any) -> bool:
    """Whether the write goes through; if not, it must say `full`."""
    try:
        write(*arguments)
    except StorageError as error:
        reason = error
    else:
        return True
    assert reason.errno == full, reason
    return False


def _mount_small(folder: str) -> str:
    """Mount 64 KiB at `folder` for this process alone; why not, where that is not allowed."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    new_user, new_mounts, private, small = 0x10000000, 0x00020000, 0x44000, b"size=64k"
    try:
        if libc.unshare(new_mounts) and libc.unshare(new_user | new_mounts):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if os.getuid() != user:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
                Path("/proc/self", name).write_text(text)
        for arguments in ((b"none", b"/", None, private, None), (b"none", folder.encode(), b"tmpfs", 0, small)):
            if libc.mount(*arguments):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except (OSError, AttributeError) as error:
        return f"cannot mount a small disk here: {error}"
    return ""
