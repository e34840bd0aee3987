"""Rows of a bench of reducers: one for each method, kept fraction and text kind, and how they compare.

Comparisons are on the same windows: the difference of mean KL, and the ratio of mean KL (a ratio of sums over windows),
both with 95 % intervals by bootstrap over documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ...evaluate.bootstrap import Measure, paired
from ...evaluate.scores import measure
from .reducers import Case, averaged, settings_of
from .rows import Result, rows_of

AGAINST = ("streaming", "random")


def _quotient(sums: np.ndarray) -> np.ndarray:
    bottom = np.where(sums[..., 1] > 0, sums[..., 1], np.nan)
    found: np.ndarray = sums[..., 0] / bottom
    return found


def kl_ratio(a: Sequence[Result], b: Sequence[Result]) -> dict[str, Any]:
    """Mean KL of `a` ÷ that of `b` on the same windows, with its interval; None where `b` has none."""
    one, other = (measure([r.scores for r in side], "kl") for side in (a, b))
    both = Measure("KL ratio", one.windows, one.articles, np.stack([one.sums[:, 0], other.sums[:, 0]], 1), _quotient)
    value = both.value
    if not np.isfinite(value):
        return {"value": None, "ci": None}
    return {"value": value, "ci": both.interval()}


def rows_of_reducers(found: Mapping[Case, Sequence[Result]], prefix: int) -> list[dict[str, Any]]:
    """The rows of all cases, draws of a method averaged; `recipe` is ``reduce:METHOD@FRACTION``."""
    rows = []
    for (method, keep), draws in _grouped(found).items():
        for row in rows_of(f"reduce:{method}@{keep:g}", averaged(draws), prefix):
            chosen = [[r for r in each if row["text"] in ("all", r.scores.kind)] for each in draws]
            costs = [result.costs for result in chosen[0]]
            pooled = np.concatenate([r.scores.kl for each in chosen for r in each])
            rows.append(
                {
                    **row,
                    "method": method,
                    "keep": keep,
                    "settings": settings_of(method),
                    "seeds": len(draws),
                    "kl_by_seed": [float(np.concatenate([r.scores.kl for r in each]).mean()) for each in chosen],
                    "kl_p99": float(np.quantile(pooled, 0.99)),
                    "top1": float(np.mean([r.scores.agree.mean() for each in chosen for r in each])),
                    "slots": int(np.median([c["slots"] for c in costs])),
                    "freed": 1 - sum(c["held_bytes"] for c in costs) / sum(c["raw_bytes"] for c in costs),
                    "queries_s": float(np.max([c["queries_s"] for c in costs])),
                    "reduce_s": float(np.median([c["reduce_s"] for c in costs])),
                    "reduce_to_prefill": float(np.median([c["reduce_s"] / c["prefill_s"] for c in costs])),
                }
            )
    return rows


def comparisons(
    found: Mapping[Case, Sequence[Result]], peers: Mapping[tuple[str, float], Sequence[Result]]
) -> list[dict[str, Any]]:
    """Each method against `streaming`, `random` and the peers at the same kept fraction, over all texts."""
    own = {at: averaged(draws) for at, draws in _grouped(found).items()}
    out = []
    for (method, keep), results in own.items():
        others = {name: own[name, keep] for name in AGAINST if name != method and (name, keep) in own}
        others |= {f"peer:{name}": list(rows) for (name, fraction), rows in peers.items() if fraction == keep}
        for name, other in others.items():
            one, two = (measure([r.scores for r in side], "kl") for side in (results, other))
            found_at = {"method": method, "than": name, "keep": keep, "ratio": kl_ratio(results, other)}
            out.append({**found_at, "difference": asdict(paired(one, two))})
    return out


def _grouped(found: Mapping[Case, Sequence[Result]]) -> dict[tuple[str, float], list[Sequence[Result]]]:
    groups: dict[tuple[str, float], list[Sequence[Result]]] = {}
    for case, results in found.items():
        groups.setdefault((case.method, case.keep), []).append(results)
    return groups
