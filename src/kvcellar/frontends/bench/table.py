"""The rows of a bench run as a table for a person."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("recipe", lambda row: str(row["recipe"])),
    ("text", lambda row: str(row["text"])),
    ("win-\ndows", lambda row: str(row["windows"])),
    ("file\nB/token", lambda row: _number(row["file_bytes_per_token"], ",.0f")),
    ("payload\nB/token", lambda row: _number(row["payload_bytes_per_token"], ",.0f")),
    ("profile\nMB", lambda row: _number(row["profile_bytes"] or None, ",.1f", 1e-6)),
    ("fitted on\ntokens", lambda row: _number(row.get("calibration_tokens"), ",")),
    ("KL nats\n[95 %]", lambda row: _interval(row["kl"], row["kl_ci"], ".2g")),
    ("KL\np99", lambda row: _number(row["kl_p99"], ".2g")),
    ("Δppl %\n[95 %]", lambda row: _interval(row["dppl"], row["dppl_ci"], ".2f", 100)),
    ("RCB\n[95 %]", lambda row: _interval(row["rcb"], row["rcb_ci"], ".2f")),
    ("top-1\n%", lambda row: _number(None if row["top1"] is None else 100 * row["top1"], ".1f")),
    ("margin\nkept", lambda row: _number(row["margin"], ".2f")),
    ("save\ns", lambda row: _number(row["save_s"], ".2f")),
    ("prefill\n÷ restore", lambda row: _number(row.get("restore_speedup"), ",.1f")),
    ("append\n1, ms", lambda row: _number(row.get("append_s"), ".1f", 1000)),
    ("read 1\nms", lambda row: _number(row.get("random_access_s"), ".1f", 1000)),
    ("B ÷ recipes'\nat its KL", lambda row: _number(row.get("ratio_at_equal_kl"), ".2f")),
)
_WIDTH = 220  # what all columns need; a narrower terminal wraps lines, where cut numbers would say nothing


def _number(value: float | None, form: str, scale: float = 1) -> str:
    return "–" if value is None else f"{scale * value:{form}}"


def _interval(value: float | None, interval: Sequence[float] | None, form: str, scale: float = 1) -> str:
    if value is None:
        return "–"
    text = f"{scale * value:{form}}"
    return text if interval is None else f"{text}\n[{scale * interval[0]:{form}}, {scale * interval[1]:{form}}]"


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows; a – stands for what was not measured."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1))
    for name, _ in COLUMNS:
        table.add_column(name, justify="left" if name in ("recipe", "text") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(render(row) for _, render in COLUMNS))
    Console(width=max(Console().width, _WIDTH)).print(table)
