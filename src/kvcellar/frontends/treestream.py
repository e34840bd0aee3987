"""A text read chunk by chunk, or token by token, as `prefill_tree` reads it at once.

What is held: the sinks, a binary counter of summaries (`kvcellar.reduce.tree.Buckets`), the summary before the chunk at
hand, and that chunk's own tokens: O(keep·log T + chunk) slots however long the text grows. When a chunk is full it is
reduced and joins the counter. Given the same keys and values the summaries are those of the scan to the bit; a model
computes keys and values of a chunk and of a whole prompt with different rounding.

Importing this imports transformers. Tried on: CPU, transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from ..cache import LayerKV
from ..errors import InvalidInput, UnsupportedCache
from ..reduce.batched import Heads, concatenated
from ..reduce.tree import Buckets
from ..reduce.weighted import RECENT, SINKS, Reducer
from .inputs import token_ids
from .queries import Queries, collect_queries
from .reduce import reduction
from .treeplan import CHUNK, KEEP, METHOD, LayerPlan, plan_for
from .weighted import WeightedCache, weighted_cache


class _Chunk(NamedTuple):
    """Tokens that were read as they are, and what stands before them."""

    before: Heads | None
    tokens: Heads


class _Layer:
    """A layer's counter, the summary before the chunk at hand, and the chunks that recent tokens may lie in."""

    def __init__(self, plan: LayerPlan):
        self.plan, self.buckets = plan, Buckets(plan.merge())
        self.before: Heads | None = None
        self.past: list[_Chunk] = []

    def push(self, tokens: Heads, recent: int) -> Heads:
        """A full chunk, behind which the text goes on; returns what stands before the next."""
        self.past.append(_Chunk(self.before, tokens))
        self.buckets.push(tokens)
        self.before = before = self.buckets.before() or tokens
        ends = self.buckets.ends()
        for end in self.plan.asked.keys() - set(ends):
            del self.plan.asked[end]
        self.past = self.past[len(self.past) - min(len(self.past), -(-recent // len(tokens))) :]
        return before


class TreeStream:
    """A growing text: `read` what comes, `cache` what there is. The arguments are those of `prefill_tree`."""

    def __init__(
        self,
        model: Any,
        *,
        chunk: int = CHUNK,
        keep: int = KEEP,
        method: str | Reducer | Mapping[str, Any] = METHOD,
        queries: Queries | Sequence[Tensor] | None = None,
        sinks: int = SINKS,
        recent: int = RECENT,
        seed: int = 0,
    ) -> None:
        self.plan = plan_for(
            model,
            chunk=chunk,
            keep=keep,
            method=method,
            queries=queries,
            sinks=sinks,
            recent=recent,
            seed=seed,
        )
        self.length = 0
        self._model = model
        self._chunks = 0  # that are full and pushed
        self._cache: Any = DynamicCache(config=model.config)
        self._layers: list[_Layer] = []
        self._asked: dict[int, Tensor] = {}  # of each layer the queries of at most `chunk` last tokens
        self._scales: dict[int, float] = {}

    @torch.no_grad()
    def read(self, ids: Any, *, all_logits: bool = False) -> Tensor:
        """Read `ids` (n,) or (1, n), n > 0, and give the logits behind the last, (1, vocabulary), or behind each.

        Raises InvalidInput for no ids and what `prefill_tree` raises.
        """
        tokens = token_ids(ids)
        if not len(tokens):
            raise InvalidInput("0 tokens to read; expected at least 1")
        found: list[Tensor] = []
        while len(tokens):
            end = self.plan.sinks + (self._chunks + 1) * self.plan.chunk
            if self.length == end:
                self._roll()
                end += self.plan.chunk
            part, tokens = tokens[: end - self.length], tokens[end - self.length :]
            new = torch.from_numpy(part)[None].to(self._model.device)
            with collect_queries(self._model, len(part)) as queries:
                out = self._model(
                    input_ids=new, cache=self._cache, use_cache=True, logits_to_keep=0 if all_logits else 1
                )
            self.length += len(part)
            self._keep(queries)
            found = [*found, out.logits[0]] if all_logits else [out.logits[0]]
        return torch.cat(found)

    def _keep(self, queries: Queries) -> None:
        self._scales = queries.scales
        for index, new in queries.layers.items():
            held = self._asked.get(index)
            joint = new if held is None else torch.cat([held, new], dim=1)
            self._asked[index] = joint[:, -self.plan.chunk :].clone()

    def _sides(self, index: int) -> tuple[Tensor, Tensor]:
        layer = self._cache.layers[index]
        if getattr(layer, "is_sliding", False) or index not in self._asked:
            raise UnsupportedCache(f"layer {index} slides, or does not attend by an attention function of transformers")
        return layer.keys[0].cpu(), layer.values[0].cpu()

    def _own(self, index: int) -> Heads:
        """The tokens of the chunk at hand."""
        start = self.plan.sinks + self._chunks * self.plan.chunk
        keys, values = self._sides(index)
        count = max(0, self.length - start)
        return Heads.of(keys[:, keys.shape[1] - count :], values[:, values.shape[1] - count :], start)

    def _ready(self) -> list[_Layer]:
        """The layers; before the first chunk is full they are made anew from what there is."""
        if self._layers:
            return self._layers
        made = []
        for index in range(len(self._cache.layers)):
            keys, values = self._sides(index)
            sinks = Heads.of(keys, values, 0)[: self.plan.sinks] if self.plan.sinks else None
            group = self._asked[index].shape[0] // keys.shape[0]
            made.append(_Layer(LayerPlan(self.plan, index, sinks, self._scales[index], group)))
        return made

    def _ask(self, index: int, layer: _Layer) -> None:
        queries = self._asked[index]
        layer.plan.ask(self._chunks + 1, queries, self.length - queries.shape[1])

    def _roll(self) -> None:
        """The chunk at hand is full: it becomes part of what stands before the next."""
        self._layers = self._ready()
        layers, devices = [], {}
        for index, layer in enumerate(self._layers):
            self._ask(index, layer)
            seen = layer.plan.seen(layer.push(self._own(index), self.plan.recent))
            layers.append(LayerKV(seen.keys, seen.values, seen.positions, seen.log_weights, self.length))
            devices[index] = self._cache.layers[index].keys.device
        self._chunks += 1
        self._cache = weighted_cache(layers, self._model, length=self.length, device=devices)

    def cache(self) -> WeightedCache:
        """Sinks, a summary of all, and the recent tokens, in at most `keep` slots; the stream itself can go on.

        Raises InvalidInput when nothing was read yet.
        """
        if not self.length:
            raise InvalidInput("no tokens were read; expected at least 1")
        plan, count = self.plan, self._chunks + 1
        layers, devices = [], {}
        for index, layer in enumerate(self._ready()):
            self._ask(index, layer)
            parts = [*layer.past, _Chunk(layer.before, self._own(index))]
            first = max(0, min((self.length - plan.recent - plan.sinks) // plan.chunk, count - 1))
            parts = parts[len(parts) - (count - first) :]
            tokens = concatenated([part.tokens for part in parts], 1)
            layers.append(layer.plan.last(parts[0].before, tokens, self.length, count))
            devices[index] = self._cache.layers[index].keys.device
        made = reduction(plan.reducer, plan.keep)
        return weighted_cache(layers, self._model, length=self.length, device=devices, reduction=made)
