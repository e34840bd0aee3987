"""Repairing a damaged file on disk: where the new one goes, and how the damaged one is kept."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ..archive.reader import ArchiveReader
from ..archive.repair import RepairReport
from ..archive.repair import repair as repair_archive
from ..errors import InvalidInput, StorageError
from ..store.base import Pending
from ..store.local import LocalStore


def repair(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    like: str | os.PathLike[str] | None = None,
    namespace: str = "",
) -> RepairReport:
    """Repair the archive at `path` into the new file `out`, or `in_place`, keeping the damaged file beside it.

    Saves the unbroken run of intact blocks from token 0; the report says what was lost. `like` is a sound archive of
    the same model and recipe, to take a damaged manifest or profile from. `out` is by default NAME.repaired.kvc.

    Raises InvalidInput when `out` exists or both are given, and what `archive.repair.repair` raises.
    """
    if in_place and out is not None:
        raise InvalidInput("give out or in_place, not both")
    store, name = LocalStore.at(path)
    with ExitStack() as open_files:
        if in_place:
            open_files.enter_context(store.open_appender(name))  # no append may slip in before the file is replaced
        model = None
        if like is not None:
            like_store, like_name = LocalStore.at(like)
            model = open_files.enter_context(ArchiveReader(like_store.open_reader(like_name), namespace))
        damaged = store.folder / name
        goal = Path(out) if out is not None else damaged.with_name(f"{name.removesuffix('.kvc')}.repaired.kvc")
        new_file = partial(_replaced, damaged) if in_place else partial(_new, goal, damaged)
        return repair_archive(store, name, new_file, namespace=namespace, like=model)


@contextmanager
def _new(path: Path, damaged: Path) -> Iterator[tuple[str, Pending]]:
    """A new file at `path`, where nothing may be yet, readable for those who may read `damaged`.

    The name is taken at once, by an empty file whose lock keeps other writers away until the new one is complete.
    """
    store, name = LocalStore.at(path)
    store.require_folder()
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _mode(damaged)))
    except FileExistsError:
        raise InvalidInput(f"{path} exists, and repair overwrites nothing: name another file with --out") from None
    except OSError as error:
        raise StorageError(error.errno, f"{path}: {error.strerror}") from error
    with store.open_appender(name) as taken:
        try:
            with store.replacing(name) as pending:
                yield str(path), pending
                if not taken.is_current() or taken.size():
                    raise InvalidInput(f"{path} was written by another program meanwhile; it is left as it is")
        except BaseException:
            if taken.is_current() and not taken.size():
                path.unlink(missing_ok=True)
            raise


def _mode(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@contextmanager
def _replaced(damaged: Path) -> Iterator[tuple[str, Pending]]:
    """A new file in the place of `damaged`, which is first kept under a name of its own."""
    with LocalStore(damaged.parent).replacing(damaged.name) as pending:
        yield str(damaged), pending
        _keep(damaged)


def _keep(damaged: Path) -> None:
    """Give the file a second name, FILE.damaged-N, that nothing had."""
    number = 1
    while True:
        kept = damaged.with_name(f"{damaged.name}.damaged-{number}")
        try:
            return _copied(damaged, kept)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise StorageError(error.errno, f"{kept}: {error.strerror}") from error


def _copied(damaged: Path, kept: Path) -> None:
    try:
        os.link(damaged, kept)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        new = os.open(kept, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _mode(damaged))
        with open(damaged, "rb") as source, open(new, "wb") as copy:
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
