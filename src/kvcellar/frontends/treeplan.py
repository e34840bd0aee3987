"""How a text is cut into chunks and merged: what `tree.py`, at once, and `treestream.py`, chunk by chunk, agree on.

Chunk c holds the tokens from sinks + c·chunk on; the sinks come before chunk 0 and belong to no summary. What ends
before a chunk is merged by queries that tokens before it asked, so nothing knows of what comes later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from ..cache import LayerKV
from ..errors import InvalidInput, UnsupportedCache
from ..reduce.batched import Heads, concatenated
from ..reduce.later import asked_later
from ..reduce.tree import LAST, HeadsMerge
from ..reduce.weighted import RECENT, SINKS, Reducer
from ..rope import TOKENS, Turn
from .methods import find_reducer
from .queries import Queries, turns_or_none
from .transformers import take_cache

CHUNK, KEEP = 1024, 256
METHOD: Mapping[str, Any] = {"id": "matching", "selection": "response"}
ASKED = 255
"""About so many queries say what a KV head's tokens are merged by."""
STEPS = 40


@dataclass(frozen=True)
class Plan:
    """How a text is cut and merged. Chunk c holds tokens sinks + c·chunk and on; the sinks come before chunk 0.

    `fixed` are queries of each layer (query heads, q, width) that everything is merged by; otherwise a sample of what
    the text's own chunks ask, turned by `turns` to where later ones stand. Raises InvalidInput.
    """

    reducer: Reducer
    chunk: int = CHUNK
    keep: int = KEEP
    sinks: int = SINKS
    recent: int = RECENT
    seed: int = 0
    turns: Sequence[Turn] | None = None
    fixed: Mapping[int, Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.chunk < 1 or min(self.sinks, self.recent) < 0 or self.keep <= self.sinks + self.recent:
            raise InvalidInput(
                f"chunks of {self.chunk}, {self.keep} to keep; expected at least 1, and more than {self.sinks} sinks "
                f"and {self.recent} recent ones"
            )

    def edges(self, length: int) -> list[int]:
        """Where chunks begin, and `length`; the first begins with the sinks."""
        return [0, *range(self.sinks + self.chunk, length, self.chunk), length]


class LayerPlan:
    """What a layer of `group` query heads for each KV head is merged by; `sinks` stay beside everything."""

    def __init__(self, plan: Plan, index: int, sinks: Heads | None, scale: float, group: int):
        self.plan, self.index, self.sinks, self.scale, self.group = plan, index, sinks, scale, group
        self.asked: dict[int, Tensor] = {}

    def merge(self, keep: int = 0, rest: Heads | None = None) -> HeadsMerge:
        """To `keep` tokens (default: what the sinks leave) beside `rest` (default: the sinks)."""
        plan, fixed = self.plan, None
        if plan.fixed is not None:
            if self.index not in plan.fixed:
                raise InvalidInput(f"queries of {len(plan.fixed)} layers; expected some of layer {self.index}")
            fixed = self._per_head(plan.fixed[self.index].float().cpu())
        return HeadsMerge(
            plan.reducer,
            keep or plan.keep - plan.sinks,
            self.scale,
            fixed,
            self.asked,
            self.sinks if rest is None else rest,
            plan.seed * 1009 + self.index,
            STEPS,
        )

    def ask(self, chunk: int, queries: Tensor, first: int) -> None:
        """Some of `queries` (query heads, q, width), asked from position `first` on, go with what ends before `chunk`,
        which begins behind them."""
        if not self.plan.reducer.needs_queries or self.plan.fixed is not None:
            return
        count = max(1, min(queries.shape[1], ASKED // self.group))
        at = torch.arange(count) * queries.shape[1] // count
        some = queries[:, at].float().cpu()
        if self.plan.turns is not None:
            turn, begin = self.plan.turns[self.index], first + queries.shape[1]
            some = asked_later(some, first + at, turn, begin, horizon=self.plan.chunk, seed=self.plan.seed + begin)
        self.asked[chunk] = self._per_head(some)

    def _per_head(self, queries: Tensor) -> Tensor:
        return queries.reshape(queries.shape[0] // self.group, -1, queries.shape[2])

    def seen(self, before: Heads) -> Heads:
        """Sinks and summary."""
        return before if self.sinks is None else concatenated([self.sinks, before], 1)

    def last(self, before: Heads | None, tokens: Heads, length: int, chunk: int) -> LayerKV:
        """What is kept in the end: `before`, and of `tokens`, the last ones of all, those that are recent as they are.

        `chunk` is the number of chunks so far."""
        recent = min(self.plan.recent, len(tokens))
        middle, newest = tokens[: len(tokens) - recent], tokens[len(tokens) - recent :]
        middle = middle if before is None else concatenated([before, middle], 1)
        if length > self.plan.keep:
            beside = newest if self.sinks is None else concatenated([self.sinks, newest], 1)
            merge = self.merge(self.plan.keep - self.plan.sinks - self.plan.recent, beside)
            (middle,) = merge.reduced_all([(middle, (LAST, chunk))])
        kept = concatenated([x for x in (self.sinks, middle, newest) if x is not None], 1)
        return LayerKV(kept.keys, kept.values, kept.positions, kept.log_weights, length)


@torch.no_grad()
def plan_for(
    model: Any,
    *,
    chunk: int = CHUNK,
    keep: int = KEEP,
    method: str | Reducer | Mapping[str, Any] = METHOD,
    queries: Queries | Sequence[Tensor] | None = None,
    sinks: int = SINKS,
    recent: int = RECENT,
    seed: int = 0,
) -> Plan:
    """The plan of `prefill_tree`; where it matters the model is asked how its layers turn queries.

    Raises InvalidInput, InvalidRecipe, and UnsupportedCache for models whose layers cannot be read so.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None) or getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedCache(
            "layers that cache a latent or share their keys: what is cached are not the keys and values queries meet"
        )
    plan = Plan(find_reducer(method), chunk, keep, sinks, recent, seed)
    if queries is not None:
        return replace(plan, fixed=queries.layers if isinstance(queries, Queries) else dict(enumerate(queries)))
    if not plan.reducer.needs_queries or not plan.reducer.asks_later:
        return plan
    cache: Any = DynamicCache(config=model.config)
    ids = np.arange(1, TOKENS + 1)
    model(input_ids=torch.from_numpy(ids[:1])[None].to(model.device), cache=cache, use_cache=True)
    return replace(plan, turns=turns_or_none(model, take_cache(cache), ids))
