"""`kvcellar compact`: the same archive without its dead bytes."""

from __future__ import annotations

import time

import click

from .common import emit, human_bytes, json_option, namespace_option


@click.command("compact")
@click.argument("file", type=click.Path(dir_okay=False))
@namespace_option
@json_option
def command(file: str, namespace: str, as_json: bool) -> None:
    """Rewrite the archive FILE without the bytes that appends have superseded.

    The new file takes the old one's place at once when it is complete; no stored value changes. Appending does this by
    itself once dead bytes outweigh the rest. Needs as much free space as the archive's live part.

    \b
    Example:
      kvcellar compact chat.kvc
    """
    from ..library import open as open_archive

    with open_archive(file, namespace=namespace, mode="a") as archive:
        before = archive.info().file_bytes
        if not as_json:
            click.echo(f"compact {human_bytes(before)} …", err=True)
        started = time.perf_counter()
        info = archive.compact()
        seconds = time.perf_counter() - started
    lines = [
        f"{file}: {before:,} → {info.file_bytes:,} bytes, {before - info.file_bytes:,} fewer, in {seconds:.2f} s",
        f"{info.tokens:,} tokens, {info.bytes_per_token:,.0f} B/token",
    ]
    emit({**info.to_json(), "bytes_before": before, "compact_s": seconds}, lines, as_json=as_json)
