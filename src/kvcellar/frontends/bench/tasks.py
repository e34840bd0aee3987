"""How much of a context a restored cache still knows: margins of right answers, and exact match.

margin = mean log-prob of the right answer's tokens − the best distractor's mean, in nats per token, each candidate
read behind the question on a copy of the cache. Exact match takes as many greedy tokens as the answer has and
compares the text without its white space at the ends. A margin says something about the cache only where the context
made a difference: where margin(full) − margin(∅) ≥ 2 nats, ∅ being sinks and recent window alone. Over those tasks

    retained = Σ(margin_x − margin_∅) / Σ(margin_full − margin_∅)

is 1 for the uncompressed cache and 0 for ∅. The ratio of sums lets no single task of small difference decide.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import InvalidInput
from ...evaluate.tasks import Task
from ..cli.models import LocalModel, held_in

COUNTS_FROM = 2.0
"""Nats per token between full and ∅ from which a task counts."""


class Scored(TypedDict):
    """`margin` in nats per token, None for a task without distractors; `exact` whether the answer was generated."""

    margin: float | None
    exact: bool


class Retained(NamedTuple):
    """`share` of the context's benefit left (1 all, 0 none, beyond both possible), over `tasks` that counted."""

    share: float
    tasks: int


def scored(local: LocalModel, cache: Any, task: Task) -> Scored:
    """Margin and exact match of one task behind `cache`, which holds the task's context and is left as it was.

    `cache` is a transformers cache of one sequence; positions it does not hold are allowed, as `restore(positions=)`
    gives them. The question is read once. Raises InvalidInput when context, question and the longest candidate need
    more positions than the model has, or a text gives no token.
    """
    question = _tokens(local, task.question)
    answer, *distractors = [_tokens(local, f" {text}") for text in (task.answer, *task.distractors)]
    local.require_room(int(cache.get_seq_length()) + len(question) + max(map(len, (answer, *distractors))))
    asked = held_in(copy.deepcopy(cache), local.model.dtype)
    first = _read(local, question, asked)[-1]
    right = _mean_log_prob(local, answer, asked, first)
    wrong = [_mean_log_prob(local, candidate, asked, first) for candidate in distractors]
    generated = local.tokenizer.decode(_greedy(local, len(answer), asked, first))
    return {"margin": right - max(wrong) if wrong else None, "exact": generated.strip() == task.answer.strip()}


def retained(
    full: Sequence[float | None], empty: Sequence[float | None], restored: Sequence[float | None]
) -> Retained | None:
    """Share of the margins kept by `restored`, over the tasks where full − empty ≥ 2 nats; None when there are none.

    One margin per task in each, in the same order. A task whose margin is None in any of them does not count. Raises
    InvalidInput for lists of different lengths and for margins that are not finite.
    """
    if not len(full) == len(empty) == len(restored):
        raise InvalidInput(f"{len(full)} margins of full, {len(empty)} of empty and {len(restored)} of restored caches")
    counted = []
    for f, e, r in zip(full, empty, restored, strict=True):
        if f is None or e is None or r is None:
            continue
        if not all(map(math.isfinite, (f, e, r))):
            raise InvalidInput(f"margins (full, empty, restored) of {(f, e, r)}; expected finite numbers")
        if f - e >= COUNTS_FROM:
            counted.append((f, e, r))
    if not counted:
        return None
    return Retained(sum(r - e for _, e, r in counted) / sum(f - e for f, e, _ in counted), len(counted))


def _tokens(local: LocalModel, text: str) -> list[int]:
    ids = local.encode(text, continues=True)
    if not ids:
        raise InvalidInput(f"{text!r} gives no token")
    return ids


def _read(local: LocalModel, ids: Sequence[int], cache: Any) -> Float[Tensor, "tokens vocabulary"]:
    """Logits of `ids` read behind `cache`, which grows."""
    with torch.inference_mode():
        logits: Tensor = local.model(torch.tensor([list(ids)]), cache=cache, use_cache=True).logits[0]
    return logits


def _mean_log_prob(local: LocalModel, ids: Sequence[int], asked: Any, first: Float[Tensor, " vocabulary"]) -> float:
    """Mean log-probability of `ids` in nats per token, float64; `first` are the logits that predict the first."""
    logits = first[None]
    if len(ids) > 1:
        logits = torch.cat([logits, _read(local, ids[:-1], copy.deepcopy(asked))])
    chosen = torch.log_softmax(logits.double(), dim=-1).gather(1, torch.tensor(ids)[:, None])
    return float(chosen.mean())


def _greedy(local: LocalModel, count: int, asked: Any, first: Float[Tensor, " vocabulary"]) -> list[int]:
    """`count` tokens, each the likeliest; an end-of-text token is one like any other."""
    cache, ids = copy.deepcopy(asked), [int(first.argmax())]
    while len(ids) < count:
        ids.append(int(_read(local, ids[-1:], cache)[-1].argmax()))
    return ids
