"""`kvcellar repair`: what is intact of a damaged archive, as a sound one; the damaged file is kept."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import click

from ...archive.reader import ArchiveReader
from ...archive.repair import RepairReport, repair
from ...archive.survey import Piece
from ...errors import DamagedArchive, InvalidInput, StorageError
from ...store.base import Pending
from ...store.local import LocalStore
from .common import emit, json_option, namespace_option


@click.command("repair")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--out", type=click.Path(dir_okay=False), help="The new file. Default: FILE.repaired.kvc beside FILE.")
@click.option("--in-place", is_flag=True, help="Put the new file in FILE's place and keep FILE as FILE.damaged-N.")
@click.option(
    "--like",
    type=click.Path(dir_okay=False, exists=True),
    help="A sound archive of the same model and recipe, to take a damaged manifest or profile from.",
)
@namespace_option
@json_option
def command(file: str, out: str | None, in_place: bool, like: str | None, namespace: str, as_json: bool) -> None:
    """Save what is intact of the damaged archive FILE into a new, sound archive. No data is ever deleted.

    Keeps the tokens from the first up to the first damaged block, and builds a new index and commit. Exit code 0 when
    everything was recovered or FILE is sound, 4 when something is lost; the report says which tokens.
    """
    report = repair_file(file, out, in_place=in_place, like=like, namespace=namespace)
    emit(report.to_json(), list(summary(report)), as_json=as_json)
    if not report.complete:
        raise SystemExit(DamagedArchive.exit_code)


def repair_file(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    like: str | os.PathLike[str] | None = None,
    namespace: str = "",
) -> RepairReport:
    """Repair the archive at `path` into the new file `out`, or `in_place`, keeping the damaged file beside it.

    Raises InvalidInput when `out` exists or both are given, and what `archive.repair.repair` raises.
    """
    if in_place and out is not None:
        raise InvalidInput("give --out or --in-place, not both")
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
        return repair(store, name, new_file, namespace=namespace, like=model)


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


def summary(report: RepairReport) -> Iterator[str]:
    """The lines a person reads."""
    if report.sound:
        yield f"{report.path}: nothing to repair, every part is sound ({report.tokens:,} tokens)"
        return
    yield from (f"damaged: {part}: {problem}" for part, problem in report.problems)
    yield from (f"lost: {_where(piece)}: {piece.reason}" for piece in report.damaged)
    yield from (f"out of reach: {_where(piece)}, intact: {piece.reason}" for piece in report.out_of_reach)
    if report.profile_lost:
        yield "lost: the embedded profile; the new file needs it from where it came from"
    if report.position_assumed:
        yield "no intact commit gives the position of the next token: it is taken to follow the last one"
    if report.out is None:
        yield f"{report.path}: no token can be saved, nothing was written"
    else:
        yield f"{report.path}: {report.tokens:,} tokens saved to {report.out}"
    if report.lost:
        yield f"{report.lost:,} tokens lost" + (
            "" if report.certain else ", or more: nothing intact says where it ended"
        )
    elif not report.certain:
        yield "nothing intact says where the archive ended: there may have been more tokens"
    elif not report.profile_lost:
        yield "nothing is lost"


def _where(piece: Piece) -> str:
    tokens = (
        "unknown tokens" if piece.start is None or piece.stop is None else f"tokens {piece.start} to {piece.stop - 1}"
    )
    return f"{tokens}, {piece.length:,} bytes at byte {piece.offset}"
