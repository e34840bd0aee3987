"""`kvcellar repair`: what is intact of a damaged archive, as a sound one; the damaged file is kept."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ...archive.repair import RepairReport
from ...archive.survey import Piece
from ...errors import DamagedArchive
from ..repair import repair
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
    report = repair(file, out, in_place=in_place, like=like, namespace=namespace)
    emit(report.to_json(), list(summary(report)), as_json=as_json)
    if not report.complete:
        raise SystemExit(DamagedArchive.exit_code)


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
