"""Rows of a bench: results on windows summed up, per text kind and over all, with keys that are fixed.

`ROW` are the keys every row has, `FURTHER` those that rows of windows have besides (docs/evaluation.md); None means
not measured. Ratios are taken window by window, since only figures of one run are comparable, and then the median.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from ...evaluate.bootstrap import ratio_at_equal_kl
from ...evaluate.scores import WindowScore, summarize

ROW = (
    *("recipe", "text", "tokens", "windows", "kept", "file_bytes", "file_bytes_per_token", "payload_bytes_per_token"),
    *("profile_bytes", "kl", "kl_ci", "kl_p99", "dppl", "dppl_ci", "rcb", "rcb_ci", "top1", "margin", "save_s"),
    *("restore_s", "prefill_s", "peak_bytes", "restore_class"),
)
FURTHER = (
    *("articles", "scored_tokens", "bytes_by_part", "append_s", "random_access_s", "memcpy_s", "prefill_dtype"),
    *("threads", "restore_speedup", "save_to_prefill", "append_to_prefill", "random_access_to_prefill"),
    *(
        "restore_to_memcpy",
        "peak_to_raw",
        "save_peak_to_raw",
        "note",
        "ratio_at_equal_kl",
        "dppl_second_half",
        "layer_errors",
    ),
    *("profile", "calibration_tokens", "slower_than_peers", "by_window"),
)
ALL = "all"
EMPTY = "floor:empty"


@dataclass(frozen=True)
class Result:
    """One window under one recipe: the scores per token, and what the file and its decoding cost."""

    scores: WindowScore
    costs: dict[str, Any]


def rows_of(name: str, results: Sequence[Result], prefix: int | None) -> list[dict[str, Any]]:
    """Rows of a recipe, peer or floor: over all texts if there are several kinds, then per kind.

    `prefix` is the number of tokens stored per window, None when it differs.
    """
    kinds = sorted({result.scores.kind for result in results})
    groups = [(kind, [r for r in results if r.scores.kind == kind]) for kind in kinds]
    groups = [(ALL, list(results)), *groups] if len(groups) > 1 else groups
    return [_row(name, kind, group, prefix) for kind, group in groups]


def _row(name: str, kind: str, group: list[Result], prefix: int | None) -> dict[str, Any]:
    summary = summarize([result.scores for result in group])
    costs = [result.costs for result in group]
    files = sorted((c for c in costs if c.get("file_bytes") is not None), key=lambda c: int(c["file_bytes"]))
    middle = files[(len(files) - 1) // 2] if files else {}
    all_bytes = sum(c["file_bytes"] for c in files)
    coded = [c for c in costs if c.get("payload_bytes") is not None]
    return {
        "recipe": name,
        "text": kind,
        "tokens": prefix,
        "windows": summary.windows,
        "kept": _median(costs, "kept"),
        "file_bytes": middle.get("file_bytes"),
        "file_bytes_per_token": all_bytes / (len(files) * prefix) if files and prefix else None,
        "payload_bytes_per_token": (
            sum(c["payload_bytes"] for c in coded) / sum(c["payload_tokens"] for c in coded) if coded else None
        ),
        "profile_bytes": costs[0].get("profile_bytes"),
        "kl": summary.kl,
        "kl_ci": summary.kl_ci,
        "kl_p99": summary.kl_p99,
        "dppl": summary.dppl,
        "dppl_ci": summary.dppl_ci,
        "rcb": summary.rcb,
        "rcb_ci": summary.rcb_ci,
        "top1": 1 - summary.top1_flips,
        "margin": None,
        "save_s": _median(costs, "save_s"),
        "restore_s": _median(costs, "restore_s"),
        "prefill_s": _median(costs, "prefill_s"),
        "peak_bytes": max((c["peak_bytes"] for c in costs if c.get("peak_bytes") is not None), default=None),
        "restore_class": costs[0].get("restore_class"),
        "articles": summary.articles,
        "scored_tokens": summary.tokens,
        "bytes_by_part": middle.get("bytes_by_part"),
        "append_s": _median(costs, "append_s"),
        "random_access_s": _median(costs, "random_access_s"),
        "memcpy_s": _median(costs, "memcpy_s"),
        "prefill_dtype": costs[0].get("prefill_dtype"),
        "threads": costs[0].get("threads"),
        "restore_speedup": _median_ratio(costs, "prefill_s", "restore_s"),
        "save_to_prefill": _median_ratio(costs, "save_s", "prefill_s"),
        "append_to_prefill": _median_ratio(costs, "append_s", "prefill_s"),
        "random_access_to_prefill": _median_ratio(costs, "random_access_s", "prefill_s"),
        "restore_to_memcpy": _median_ratio(costs, "restore_s", "memcpy_s"),
        "peak_to_raw": _ratio(costs, "peak_bytes", "raw_bytes", max),
        "save_peak_to_raw": _ratio(costs, "save_peak_bytes", "raw_bytes", max),
        "note": costs[0].get("note") or None,
        "ratio_at_equal_kl": None,
        "dppl_second_half": second_half([result.scores for result in group]),
        "layer_errors": next((c["layer_errors"] for c in costs if c.get("layer_errors")), None),
        "profile": costs[0].get("profile"),
        "calibration_tokens": costs[0].get("calibration_tokens"),
        "slower_than_peers": None,
        "by_window": {result.scores.id: _by_window(result, prefix) for result in group},
    }


def _by_window(result: Result, prefix: int | None) -> dict[str, float | None]:
    """What a comparison on the windows of another file needs of one."""
    costs, scores = result.costs, result.scores
    nbytes, payload = costs.get("file_bytes"), costs.get("payload_bytes")
    return {
        "kl": float(np.mean(scores.kl)),
        "nll": float(np.mean(scores.nll - scores.nll_full)),
        "file_bytes_per_token": None if nbytes is None or not prefix else nbytes / prefix,
        "payload_bytes_per_token": None if payload is None else payload / costs["payload_tokens"],
    }


def second_half(scores: Sequence[WindowScore]) -> float:
    """Δppl, a fraction, over the second half of each continuation: where little of what is attended to is recent."""
    behind = [(score.nll - score.nll_full)[score.tokens // 2 :] for score in scores]
    return float(np.expm1(np.concatenate(behind).mean()))


def _ratio(costs: list[dict[str, Any]], over: str, under: str, choose: Callable[[list[float]], float]) -> float | None:
    """`choose` of one cost ÷ another, over the windows that have both."""
    ratios = [c[over] / c[under] for c in costs if c.get(over) is not None and c.get(under)]
    return choose(ratios) if ratios else None


def _median_ratio(costs: list[dict[str, Any]], over: str, under: str) -> float | None:
    return _ratio(costs, over, under, median)


def _median(costs: list[dict[str, Any]], name: str) -> float | None:
    values = [c[name] for c in costs if c.get(name) is not None]
    return median(values) if values else None


def compare_at_equal_kl(rows: Sequence[dict[str, Any]]) -> None:
    """Fill in `ratio_at_equal_kl` of the peers' rows: their bytes ÷ those of this run's recipes at the same KL.

    A row is compared with the recipes of its own restore class on its own text, interpolated on log bytes between
    those that no other beats in both bytes and KL. None stays where the recipes do not reach that KL, and for a peer
    worse than ∅, which compresses no context.
    """
    for row in rows:
        if not row["recipe"].startswith("peer:") or row["kl"] is None or row["file_bytes_per_token"] is None:
            continue
        same_text = [other for other in rows if other["text"] == row["text"] and other["kl"] is not None]
        if any(other["recipe"] == EMPTY and row["kl"] > other["kl"] for other in same_text):
            continue
        ours = [
            (other["kl"], other["file_bytes_per_token"])
            for other in same_text
            if ":" not in other["recipe"] and other["restore_class"] == row["restore_class"]
        ]
        row["ratio_at_equal_kl"] = ratio_at_equal_kl(
            [(row["kl"], row["file_bytes_per_token"])], _unbeaten(ours), row["kl"]
        )


def compare_speed(rows: Sequence[dict[str, Any]]) -> None:
    """Fill in `slower_than_peers` of the recipes' rows: for each peer its name, and how many times as long we take.

    `save` and `restore` are ratios of medians on the same text, each in units of the fastest prefill of its own run,
    since a result that was kept may come from another; None where a peer does both in one step.
    """
    for row in rows:
        if ":" in row["recipe"] or row["kl"] is None:
            continue
        row["slower_than_peers"] = {
            other["recipe"]: {side: _times(row, other, f"{side}_s") for side in ("save", "restore")}
            for other in rows
            if other["recipe"].startswith("peer:") and other["text"] == row["text"]
        } or None


def _times(row: dict[str, Any], other: dict[str, Any], name: str) -> float | None:
    if not all(each[key] for each in (row, other) for key in (name, "prefill_s")):
        return None
    ratio: float = row[name] / row["prefill_s"] / (other[name] / other["prefill_s"])
    return ratio


def _unbeaten(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (KL, bytes) that no other one beats or equals in both."""
    chosen: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not chosen or point[1] < chosen[-1][1]:
            chosen.append(point)
    return chosen
