"""The queries a model asks, as its attention gets them: normed, rotated and per query head.

They are taken where every architecture has them in the same form, at the attention function: while `collect_queries`
lasts, the model attends by one that keeps what it is asked and lets transformers' `sdpa` answer. transformers learns
of that function when it is first used, and the model gets its own back.

Importing this imports transformers. Tried on: CPU, transformers 5.24.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..cache import KVCache, LayerKV
from ..errors import InvalidInput, UnsupportedCache
from ..reduce.later import asked_later
from ..rope import TOKENS, Turn, turns_of
from .attention import attending
from .transformers import take_cache

COLLECTING = "kvcellar_collecting"
LAST = 512
"""How many of a document's last tokens are asked by default."""
EARLIEST = 64
"""A document's first tokens have next to nothing behind them to ask about."""


class Queries:
    """The last queries of each layer, (query heads, at most `last`, width), and the scale of its logits.

    `row` of a batch. Layers that attend otherwise than by transformers' attention functions are not there.
    """

    def __init__(self, last: int = LAST, row: int = 0):
        if last < 1:
            raise InvalidInput(f"the last {last} queries; expected at least 1")
        self.last, self.row = last, row
        self.layers: dict[int, Tensor] = {}
        self.scales: dict[int, float] = {}

    def add(self, layer: int, queries: Tensor, scale: float | None) -> None:
        """`queries` (B, query heads, q, width) of a forward pass, behind those there are."""
        new = queries[self.row, :, -self.last :].detach()
        held = self.layers.get(layer)
        if held is not None:
            new = torch.cat([held, new.to(held.device)], dim=1)[:, -self.last :]
        self.layers[layer] = new.clone()  # a view would keep all queries of the pass
        self.scales[layer] = queries.shape[-1] ** -0.5 if scale is None else float(scale)

    def clear(self) -> None:
        self.layers.clear()


_sink: contextvars.ContextVar[Queries | None] = contextvars.ContextVar("kvcellar_queries", default=None)


def _collecting_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    sink, layer = _sink.get(), getattr(module, "layer_idx", None)
    if sink is not None and layer is not None:
        sink.add(int(layer), query, kwargs.get("scaling"))
    output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]
    return output, None


@contextmanager
def collect_queries(model: Any, last: int = LAST, row: int = 0) -> Iterator[Queries]:
    """While it lasts, keep what `model` asks in this thread. Its attention function is another one meanwhile.

    Raises UnsupportedCache for a model that cannot take one from outside.
    """
    queries = Queries(last, row)
    with attending(model, COLLECTING, _collecting_attention, sdpa_mask, "its queries cannot be had"):
        token = _sink.set(queries)
        try:
            yield queries
        finally:
            _sink.reset(token)


class _Reread(DynamicLayer):  # type: ignore[misc]
    """All tokens of a layer, for a forward pass that reads the last `count` of them once more and changes nothing."""

    def __init__(self, keys: Tensor, values: Tensor, count: int):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.count = keys, values, count

    def get_seq_length(self) -> int:
        return int(self.keys.shape[-2]) - self.count

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


@torch.no_grad()
def own_queries(model: Any, kv: KVCache, ids: np.ndarray, last: int = LAST, first_position: int = 0) -> Queries:
    """What the last tokens of a document ask of its cache: one forward pass over at most `last` tokens.

    `ids` int64 (T,) are the tokens of `kv`, the first at `first_position`. Raises UnsupportedCache where layers do not
    hold every token, since the pass would read something else than the document, and InvalidInput for other counts.
    """
    for index, layer in enumerate(kv.layers):
        if not layer.dense or layer.window or layer.empty:
            raise UnsupportedCache(
                f"layer {index} does not hold every token, so the document's own queries cannot be had from it: "
                "give queries, as collect_queries takes them during the prefill"
            )
    if len(ids) != len(kv):
        raise InvalidInput(f"{len(ids)} token ids for a cache of {len(kv)} tokens")
    count, device = min(last, len(ids)), model.device
    cache = DynamicCache()
    cache.layers = [_Reread(layer.keys[None].to(device), layer.values[None].to(device), count) for layer in kv.layers]
    positions = torch.arange(len(ids) - count, len(ids), device=device)[None] + first_position
    with collect_queries(model, count) as queries:
        tokens = torch.from_numpy(ids[-count:])[None].to(device)
        model(input_ids=tokens, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
    return queries


def turns_or_none(model: Any, kv: KVCache, ids: np.ndarray) -> list[Turn] | None:
    """How each layer turns keys and queries; None where that is not to be found out."""
    try:
        return turns_of(model, kv.geometry, ids[:TOKENS])
    except UnsupportedCache:
        return None


def turns_for(model: Any, ids: np.ndarray) -> list[Turn] | None:
    """The same where there is no cache yet: the model reads the first of `ids`."""
    cache: Any = DynamicCache(config=model.config)
    model(input_ids=torch.from_numpy(ids[:1])[None].to(model.device), cache=cache, use_cache=True)
    return turns_or_none(model, take_cache(cache), ids)


def later(queries: Queries, turns: Sequence[Turn] | None, length: int, seed: int = 0) -> Queries:
    """What the last tokens of a document of `length` tokens asked, turned to where those behind it will ask.

    All but what the first `EARLIEST` tokens asked, if there is more. Without `turns` the queries as they were.
    """
    if turns is None:
        return queries
    moved = Queries(queries.last, queries.row)
    moved.scales = dict(queries.scales)
    for index, asked in queries.layers.items():
        first = length - asked.shape[1]
        cut = max(0, min(EARLIEST - first, asked.shape[1] // 2))
        positions = torch.arange(first + cut, length)
        own = asked[:, cut:].cpu()
        moved.layers[index] = asked_later(own, positions, turns[index], length, seed=seed).to(asked.device)
    return moved


def queries_of(layers: Sequence[LayerKV], queries: Queries | Sequence[Tensor]) -> Sequence[Tensor]:
    """One tensor of queries a layer, of those of full attention. Raises InvalidInput where some are missing."""
    if not isinstance(queries, Queries):
        if len(queries) != len(layers):
            raise InvalidInput(f"queries of {len(queries)} layers; expected those of {len(layers)}")
        return queries
    missing = [i for i, kv in enumerate(layers) if not kv.window and i not in queries.layers]
    if missing:
        raise InvalidInput(f"layer {missing[0]} has asked nothing that could be kept; give queries of every layer")
    return [queries.layers.get(i, torch.empty(0)) for i in range(len(layers))]
