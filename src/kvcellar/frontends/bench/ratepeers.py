"""Recipe `cellar`'s curve against every other point that `kvcellar bench` has measured, at equal divergence.

Of each result file the rows on one text are points (KL, bytes per token). A peer is set against the curve of the
`cellar` recipes at its own KL, log bytes linear in log KL between neighbours (`evaluate.bootstrap.bytes_at_kl`). The
curve is that of the peer's own file, else of the file with most windows. Where rows say what each window took
(`by_window`), both sides are means over the windows that both have; where they do not, the windows of the two files
differ, and `shared_windows` tells by how much. A peer worse than ∅ on its own windows is no peer, and one beyond the
curve is said to be beyond it: nothing is extrapolated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import InvalidInput
from ...evaluate.bootstrap import bytes_at_kl
from .rows import ALL, EMPTY, _unbeaten

RESULTS = Path("benchmarks") / "results"
CURVE = "cellar"
QUALITY = "quality"  # what `kvcellar bench` calls itself
SIZES = ("file_bytes_per_token", "payload_bytes_per_token")


class Run(NamedTuple):
    """A result file of `kvcellar bench`: its name, the ids of its windows, its rows, the benchmark's name."""

    name: str
    windows: frozenset[str]
    rows: list[dict[str, Any]]
    benchmark: str

    @property
    def lossy(self) -> bool:
        return any(_lossy(row) for row in self.rows)


def read_run(path: Path) -> Run:
    """Raises InvalidInput for anything else than results of `kvcellar bench`."""
    try:
        value = json.loads(path.read_bytes())
        rows = [row for row in value["rows"] if isinstance(row, dict) and {"recipe", "text", "kl", *SIZES} <= set(row)]
        return Run(path.name, frozenset(window["id"] for window in value["windows"]), rows, str(value.get("benchmark")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{path.name}: expected results of kvcellar bench ({type(error).__name__}: {error})"
        ) from None


def known_runs(folder: Path = RESULTS) -> list[Run]:
    """The result files in `folder` that have rows of lossy recipes or peers; files of other benchmarks are no runs."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            run = read_run(path)
        except InvalidInput:
            continue
        found += [run] if run.lossy and run.benchmark == QUALITY else []
    return found


def compare(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each peer and each recipe beside the curve, on each text: its bytes ÷ those of the curve at its KL.

    Keys: `file recipe text windows shared_windows kl`, the bytes, `curve_file`, `ours` and `ratio` by kind of bytes
    (None where there is no figure, and then `why` says so).
    """
    found = []
    for run in runs:
        for row in run.rows:
            if _lossy(row) and not _on_curve(row):
                found.append(_compared(run, row, runs))
    order = [each["text"] for each in found]
    return sorted(found, key=lambda each: (each["text"] != ALL, order.index(each["text"]), each["kl"]))


def curve_of(run: Run, text: str) -> list[dict[str, Any]]:
    """Rows of the `cellar` recipes on one text, by KL."""
    return sorted((r for r in run.rows if _on_curve(r) and _lossy(r) and r["text"] == text), key=lambda r: r["kl"])


def points_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every lossy row over all texts of a run, or on its only text, for a plot; `curve` says which are on the curve."""
    found = []
    for run in runs:
        texts = {row["text"] for row in run.rows}
        for row in run.rows:
            if _lossy(row) and (row["text"] == ALL or ALL not in texts):
                kept = {name: row[name] for name in ("recipe", "text", "kl", *SIZES)}
                found.append({"file": run.name, **kept, "curve": _on_curve(row)})
    return found


def _compared(run: Run, row: dict[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    text = row["text"]
    named = {"file": run.name, "recipe": row["recipe"], "text": text, "windows": row.get("windows"), "kl": row["kl"]}
    sizes = {size: row[size] for size in SIZES}
    empty = [r["kl"] for r in run.rows if r["recipe"] == EMPTY and r["text"] == text and r["kl"] is not None]
    against = _curve_run(run, text, runs)
    found = {**named, **sizes, "curve_file": None, "shared_windows": None, "by_window": False}
    found |= {"ours": dict.fromkeys(SIZES), "ratio": dict.fromkeys(SIZES), "why": None}
    if empty and row["kl"] > empty[0]:
        return {**found, "why": f"worse than ∅ ({empty[0]:.2g})"}
    if against is None:
        return {**found, "why": f"no {CURVE} rows on this text"}
    rows = curve_of(against, text)
    found |= {"curve_file": against.name, "shared_windows": len(run.windows & against.windows)}
    if row.get("restore_class") != rows[0].get("restore_class"):
        return {**found, "why": f"its restore runs the model ({row.get('restore_class')})"}
    shared = _shared(row, rows)
    if shared:
        row, rows = _over(row, shared), [_over(each, shared) for each in rows]
        found |= {"kl": row["kl"], "shared_windows": len(shared), "by_window": True, **{s: row[s] for s in SIZES}}
    for size in SIZES:
        points = _unbeaten([(float(each["kl"]), float(each[size])) for each in rows if each[size] is not None])
        ours = bytes_at_kl(points, float(row["kl"])) if points else None
        found["ours"][size] = ours
        if ours is not None and row[size] is not None:
            found["ratio"][size] = row[size] / ours
    if found["ours"][SIZES[0]] is None:
        found["why"] = f"outside KL {rows[0]['kl']:.2g}…{rows[-1]['kl']:.2g}"
    return found


def _curve_run(run: Run, text: str, runs: Sequence[Run]) -> Run | None:
    """The run whose curve this one's peers are set against: two points at least."""
    having = [each for each in runs if len(curve_of(each, text)) >= 2]
    if any(each is run for each in having):
        return run
    return max(having, key=lambda each: (len(each.windows), len(each.windows & run.windows)), default=None)


def _shared(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Ids of the windows that all of these rows tell of."""
    told = [each.get("by_window") or {} for each in (row, *rows)]
    return sorted(set(told[0]).intersection(*told[1:]))


def _over(row: dict[str, Any], shared: Sequence[str]) -> dict[str, Any]:
    """A row's KL and bytes as means over some of its windows."""
    windows = [row["by_window"][name] for name in shared]
    means: dict[str, Any] = {}
    for name in ("kl", *SIZES):
        values = [window.get(name) for window in windows]
        means[name] = None if any(v is None for v in values) else math.fsum(values) / len(values)
    return {**row, **means}


def _lossy(row: dict[str, Any]) -> bool:
    """Whether it is a point of a recipe or peer that loses something."""
    return not row["recipe"].startswith("floor:") and bool(row["kl"]) and row[SIZES[0]] is not None


def _on_curve(row: dict[str, Any]) -> bool:
    name: str = row["recipe"]
    return name == CURVE or name.startswith((f"{CURVE}-", f"{CURVE}@"))
