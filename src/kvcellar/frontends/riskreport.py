"""What a risk profile says to do: which heads cannot be reduced, how many tokens each gets, which method to take.

Slots per head are by water-filling (`riskbudget.py`) over errors as they are, not relative to what a head reads: what
heads read adds up, and loud heads say more. Each has its sinks, its recent tokens and a few more. The method is the one
that was best on the text's next tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidInput
from ..reduce.weighted import Reducer
from .reduce import reduction
from .risk import AGNOSTIC, BESIDE, agreement, mean_errors, predicted_error, slots_for
from .riskbudget import for_error, for_slots, predicted

SOME = 8
"""Slots of the middle that every head gets at least."""
NAMED = 5
HARD = 0.1
"""Relative error from which a head counts as one that cannot be reduced so far."""
_SAID = {"expected": "what ν lets expect", "sampling": "its first order", "aware": "tail/K"}


def report(
    rows: Sequence[Mapping[str, Any]],
    methods: Mapping[str, Reducer],
    tokens: int,
    *,
    budget: float | None = None,
    target: float | None = None,
) -> dict[str, Any]:
    """`agreement errors recommendation hard_heads budget` of the rows of `risks` on a cache of `tokens` tokens.

    For a `budget`, a kept fraction that was measured, or a `target`, the mean relative error to stay below. Raises
    InvalidInput unless one of both is given.
    """
    if (budget is None) == (target is None):
        raise InvalidInput("a budget or a target error: expected one of both")
    errors = mean_errors(rows, list(methods))
    advice = _recommendation(errors, methods, budget, target)
    return {
        "agreement": agreement(rows, list(methods)),
        "errors": errors,
        "recommendation": advice,
        "hard_heads": hard_heads(rows, advice["keep"], advice["method"]),
        "budget": head_budget(rows, tokens, budget=budget, target=target),
    }


def hard_heads(rows: Sequence[Mapping[str, Any]], keep: float, method: str) -> dict[str, Any]:
    """The heads with the largest relative error expected of a method at `keep`, and how many are at `HARD` or above."""
    found = sorted(
        (
            {
                "layer": row["layer"],
                "head": row["head"],
                "relative_error": predicted_error(row, f"{keep:g}", method, "expected") / row["read"],
            }
            for row in rows
        ),
        key=lambda each: -each["relative_error"],
    )
    return {
        "keep": keep,
        "method": method,
        "beyond": sum(each["relative_error"] >= HARD for each in found),
        "worst": found[:NAMED],
    }


def head_budget(
    rows: Sequence[Mapping[str, Any]], tokens: int, *, budget: float | None, target: float | None
) -> dict[str, Any]:
    """Slots of each head, sinks and recent ones included, and what a random subset of so many is predicted to miss,
    over all heads together relative to what they read, beside that of as many slots for every head."""
    read = np.mean([row["read"] for row in rows])
    costs, middle = np.array([row["cost"] for row in rows]) / read, tokens - BESIDE
    least = min(SOME, middle)
    if target is not None:
        own = for_error(costs.tolist(), target, middle, least)
    else:
        each = max(slots_for([budget or 0.0], tokens)[budget or 0.0] - BESIDE, least)
        own = for_slots(costs.tolist(), len(rows) * each, middle, least)
    alike = int(own.sum()) // len(rows)
    layers = 1 + max(row["layer"] for row in rows)
    slots: list[list[int]] = [[] for _ in range(layers)]
    for row, count in zip(rows, own, strict=True):
        slots[row["layer"]].append(int(count) + BESIDE)
    return {
        "slots": slots,
        "kept": float((own.sum() / len(rows) + BESIDE) / tokens),
        "relative_error": float(predicted(costs, own, middle).mean()),
        "relative_error_alike": float(predicted(costs, alike, middle).mean()),
    }


def _recommendation(
    errors: Sequence[Mapping[str, Any]], methods: Mapping[str, Reducer], budget: float | None, target: float | None
) -> dict[str, Any]:
    by_keep: dict[float, list[Mapping[str, Any]]] = {}
    for each in errors:
        by_keep.setdefault(each["keep"], []).append(each)
    best = {keep: min(group, key=lambda e: e["relative_error"]) for keep, group in sorted(by_keep.items())}
    if budget is not None:
        if budget not in best:
            raise InvalidInput(f"budget {budget:g} was not measured; expected one of {', '.join(map(str, best))}")
        chosen, met = best[budget], True
    else:
        enough = [each for each in best.values() if each["relative_error"] <= (target or 0.0)]
        chosen, met = (enough[0], True) if enough else (list(best.values())[-1], False)
    others = [each for each in by_keep[chosen["keep"]] if each is not chosen]
    beside = ", ".join(f"{each['method']}: {each['relative_error']:.2g}" for each in others)
    sentence = (
        f"Keep {chosen['keep']:.0%} of the tokens by {chosen['method']}: on the text's next tokens heads then err by "
        f"{chosen['relative_error']:.2g} of what they read, in squares{f' ({beside})' if beside else ''}."
    )
    if not met:
        sentence = (
            f"None of the fractions tried stays below {target:g}; the nearest: {sentence[0].lower()}{sentence[1:]}"
        )
    return {
        "method": chosen["method"],
        "keep": chosen["keep"],
        "relative_error": chosen["relative_error"],
        "met": met,
        "reduce": reduction(methods[chosen["method"]], chosen["keep"]),
        "sentence": sentence,
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The report for a person, below the table of heads."""
    out = [""]
    for each in result["agreement"]:
        if each["method"] == AGNOSTIC or each["method"] == result["recommendation"]["method"]:
            out.append(
                f"{each['method']} at {each['keep']:.0%}, measured against {_SAID[each['predictor']]}: {each['heads']} "
                f"heads, rank correlation {_number(each['spearman'])}, log–log slope {_number(each['slope'])}"
            )
    hard, budget = result["hard_heads"], result["budget"]
    worst = ", ".join(f"layer {e['layer']} head {e['head']} ({e['relative_error']:.2g})" for e in hard["worst"])
    out.append(
        f"{hard['beyond']} heads are expected to miss {HARD:g} or more by {hard['method']} at {hard['keep']:.0%} and "
        f"had better stay whole. The worst: {worst}"
    )
    counts = [count for layer in budget["slots"] for count in layer]
    out.append(
        f"slots by water-filling: {min(counts)} to {max(counts)} a head, {budget['kept']:.1%} of all; a random subset "
        f"is predicted to miss {budget['relative_error']:.2g}, and {budget['relative_error_alike']:.2g} with as many "
        "for each head"
    )
    return [*out, "", result["recommendation"]["sentence"]]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
