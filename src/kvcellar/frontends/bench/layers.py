"""What a recipe does to each layer: the share of energy its keys and values lost. KL decides; this says where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..cli.models import LocalModel
from ..transformers import take_cache
from .speed import opened_with


def layer_errors(archive: Path, exact: Path, local: LocalModel) -> list[dict[str, Any]]:
    """Per layer Σ|x − x̂|² ÷ Σ|x|² of its keys and of its values, of `archive` against the same cache in `exact`.

    None for a side that holds nothing; 0 where nothing was lost.
    """
    held = []
    for path in (exact, archive):
        with opened_with(local, path) as opened:
            held.append(take_cache(opened.restore().cache).layers)
    return [
        {"layer": i, "keys": _lost(before.keys, after.keys), "values": _lost(before.values, after.values)}
        for i, (before, after) in enumerate(zip(*held, strict=True))
    ]


def _lost(before: Tensor, after: Tensor) -> float | None:
    energy = before.double().square().sum()
    return float((before.double() - after.double()).square().sum() / energy) if energy else None


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table with a line per layer and two columns per recipe."""
    from rich.console import Console
    from rich.table import Table

    measured = {row["recipe"]: row["layer_errors"] for row in rows if row.get("layer_errors")}
    if not measured:
        return
    table = Table(title="share of energy lost, first window", box=None, pad_edge=False, padding=(0, 1))
    table.add_column("layer", justify="right")
    for name in measured:
        table.add_column(f"{name}\nkeys", justify="right")
        table.add_column("\nvalues", justify="right")
    for layer in range(max(map(len, measured.values()))):
        lost = [errors[layer][side] for errors in measured.values() for side in ("keys", "values")]
        table.add_row(str(layer), *("–" if each is None else f"{each:.2g}" for each in lost))
    Console(width=max(Console().width, 8 + 22 * len(measured))).print(table)
