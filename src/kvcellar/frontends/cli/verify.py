"""`kvcellar verify`: every checksum of the live archive; exit code 4 when a part is damaged."""

from __future__ import annotations

import click

from ...archive.info import VerifyReport, verify
from ...archive.reader import ArchiveReader
from ...errors import DamagedArchive
from ...language.tokenlog import TokenLog
from ...store.local import LocalStore
from ..tokeninfo import is_log, verify_log
from .common import emit, human_bytes, json_option, namespace_option, progress


@click.command("verify")
@click.argument("file", type=click.Path(dir_okay=False))
@namespace_option
@json_option
def command(file: str, namespace: str, as_json: bool) -> None:
    """Read and check every part of the archive FILE; name each damaged one.

    Exit code 0 when all is well, 4 when something is damaged. Nothing is changed.
    """
    store, name = LocalStore.at(file)
    with store.open_reader(name) as handle:
        if is_log(handle):
            _tell(file, verify_log(TokenLog.read(handle, namespace), handle.name, handle.size()), as_json=as_json)
            return
        archive = ArchiveReader(handle, namespace)
        steps = 100
        with progress("verify", steps, quiet=as_json or archive.reader.size() < 1 << 28) as advance:
            done = 0

            def move(fraction: float) -> None:
                nonlocal done
                advance(int(steps * fraction) - done)
                done = int(steps * fraction)

            report = verify(archive, move)
    _tell(file, report, as_json=as_json)


def _tell(file: str, report: VerifyReport, *, as_json: bool) -> None:
    lines = [f"damaged: {part}: {problem}" for part, problem in report.problems]
    checked = f"{report.blocks} blocks, {report.tokens:,} tokens, {human_bytes(report.checked_bytes)}"
    lines.append(f"{file}: {'every part is sound' if report else f'{len(report.problems)} damaged'} ({checked})")
    emit(report.to_json(), lines, as_json=as_json)
    if not report:
        raise SystemExit(DamagedArchive.exit_code)
