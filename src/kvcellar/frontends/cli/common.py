"""Options and output that several commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
namespace_option = click.option(
    "--namespace", default="", show_default="none", help="Archives of different namespaces never see each other."
)
model_option = click.option(
    "--model",
    "model_dir",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of the transformers model. Default: where this machine last saw the archive's model.",
)
out_option = click.option("--out", type=click.Path(dir_okay=False), help="Also write everything to this JSON.")
plot_option = click.option("--plot", type=click.Path(dir_okay=False), help="Also draw it (PNG or SVG).")


def human_bytes(count: float) -> str:
    """1234567 as '1.23 MB' (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:,.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def emit(value: Mapping[str, Any], lines: list[str], *, as_json: bool) -> None:
    """A result as one JSON object, or as lines for a person."""
    click.echo(json.dumps(value, ensure_ascii=False, default=str) if as_json else "\n".join(lines))


def facts(rows: Mapping[str, str]) -> list[str]:
    """Aligned 'name  value' lines."""
    width = max(map(len, rows))
    return [f"{name.ljust(width)}  {value}" for name, value in rows.items()]


@contextmanager
def progress(label: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that `advance(n)` moves; a single line where stderr is no terminal; nothing when quiet."""
    if quiet or not sys.stderr.isatty():
        if not quiet:
            click.echo(f"{label} …", err=True)
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
