"""How many tokens each head gets: water-filling over predicted errors.

A random subset of K out of n tokens misses by c/K · (n − K)/(n − 1), c the trace of what the head reads
(`reduce/response.py`). The sum over heads is least where all have the same slope c/K², so

    K_h = μ √c_h, within [least, n],

and one number μ is left to find: the smallest that meets a given error. For a given number of slots whole ones go, one
after another, to the head that gains most by one more, which is the optimum exactly since gains diminish.

Source: reverse water-filling (Shannon 1959) with an error that falls like 1/K. Ours: the application to heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64

from ..errors import InvalidInput

_HALVINGS = 200


def predicted(
    costs: Float64[np.ndarray, " heads"], slots: Int64[np.ndarray, " heads"] | int, tokens: int
) -> Float64[np.ndarray, " heads"]:
    """Each head's predicted error with `slots` of `tokens` tokens, in the unit of `costs`."""
    keep = np.maximum(np.broadcast_to(slots, costs.shape), 1)
    errors: np.ndarray = costs / keep * (tokens - keep) / max(tokens - 1, 1)
    return errors


def for_slots(costs: Sequence[float], total: int, tokens: int, least: int = 1) -> Int64[np.ndarray, " heads"]:
    """Slots of each head, `total` together, each within `least`…`tokens`, with the least predicted error.

    Raises InvalidInput where `total` does not lie between both, and for costs that are negative or not finite.
    """
    checked = _checked(costs, tokens, least)
    heads, positive = len(checked), checked[checked > 0]
    if not heads * least <= total <= heads * tokens:
        raise InvalidInput(f"{total} slots for {heads} heads; expected {heads * least} to {heads * tokens}")
    slots = np.full(heads, least, np.int64)
    if positive.size:
        low, high = np.log(positive.min()) - 2 * np.log(tokens) - 1, np.log(positive.max()) + 1
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if _worth(checked, middle, least, tokens).sum() <= total else (middle, high)
        slots = _worth(checked, high, least, tokens)
    while missing := total - int(slots.sum()):  # slots that are worth the same, or nothing
        gain = np.where(slots < tokens, checked / (slots * (slots + 1.0)), -1.0)
        if gain.max() > 0:
            slots[gain.argmax()] += 1
        else:
            slots[np.flatnonzero(gain == 0)[:missing]] += 1
    return slots


def _worth(costs: np.ndarray, log_gain: float, least: int, tokens: int) -> np.ndarray:
    """How many slots of each head gain at least so much: the K-th gains c/K(K − 1)."""
    worth = np.log(np.where(costs > 0, costs, 1.0)) - log_gain
    wanted = (1 + np.sqrt(1 + 4 * np.where(costs > 0, np.exp(worth.clip(-700, 80)), 0.0))) / 2
    found: np.ndarray = np.clip(np.floor(np.minimum(wanted, tokens)), least, tokens).astype(np.int64)
    return found


def for_error(costs: Sequence[float], target: float, tokens: int, least: int = 1) -> Int64[np.ndarray, " heads"]:
    """The fewest slots of each head, within `least`…`tokens`, with a mean predicted error of at most `target`.

    Raises InvalidInput for a target under 0, and for costs that are negative or not finite.
    """
    checked = _checked(costs, tokens, least)
    if not (np.isfinite(target) and target >= 0):
        raise InvalidInput(f"a target error of {target!r}; expected a finite number of 0 or more")
    weights = np.sqrt(checked)

    def slots(level: float) -> np.ndarray:
        found: np.ndarray = np.clip(np.ceil(level * weights - 1e-9), least, tokens).astype(np.int64)
        return found

    if not weights.any():
        return slots(0.0)
    low, high = np.log(least / weights.max()), np.log(tokens / weights[weights > 0].min()) + 1e-6
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        meets = predicted(checked, slots(np.exp(middle)), tokens).mean() <= target
        low, high = (low, middle) if meets else (middle, high)
    return slots(np.exp(high))


def _checked(costs: Sequence[float], tokens: int, least: int) -> np.ndarray:
    found = np.asarray(costs, np.float64)
    if not found.size or not np.isfinite(found).all() or (found < 0).any():
        raise InvalidInput("costs of heads: expected at least one, all finite and none negative")
    if not 1 <= least <= tokens:
        raise InvalidInput(f"at least {least} of {tokens} tokens a head; expected 1 to {tokens}")
    return found
