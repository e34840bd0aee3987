"""Reducing a cache in memory to fewer, weighted tokens, at once or while a long prompt is read.

    keep  = budget of all T tokens, sinks and recent ones among them
    heads = reducer(middle, keep − sinks − recent) of each layer and KV head, by the queries that read it
    cache = a transformers cache of the slots, which applies their weights (`weighted.py`)

While a prompt is read chunk by chunk, what is held is reduced again whenever it has grown beyond the budget: at no
time are there more than budget + chunk slots. Each reduction is of slots that stand for several tokens already.

Source: the methods are those of `kvcellar.reduce`; reducing between chunks is the streaming case of merge and reduce,
here with one bucket. Importing this imports transformers. Tried on: CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from ..cache import KVCache, LayerKV
from ..errors import InvalidInput, UnsupportedCache
from ..reduce.weighted import RECENT, SINKS, Reducer, Weighted, reduce_layer
from ..slots import Head, head_of, stacked
from .inputs import token_ids
from .methods import find_reducer
from .queries import Queries, collect_queries, later, own_queries, queries_of, turns_for, turns_or_none
from .transformers import take_cache
from .weighted import WeightedCache, WeightedLayer, weighted_cache

Budget = float | int | Sequence[Sequence[int]]
CHUNK = 512


def reduce_cache(
    cache: Any,
    *,
    budget: Budget,
    model: Any,
    method: str | Reducer | Mapping[str, Any] = "matching",
    tokens: Any = None,
    queries: Queries | Sequence[Tensor] | None = None,
    sinks: int = SINKS,
    recent: int = RECENT,
    ragged: bool = False,
    seed: int = 0,
    row: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> WeightedCache:
    """A cache of fewer, weighted slots that `model` reads in place of `cache`, which stays as it is.

    Args:
        cache: what `kvcellar.save` takes, or a cache that is reduced already.
        budget: how much stays: a fraction of all tokens, over 0 up to 1 (but never fewer than sinks and recent
            tokens), a number of tokens, or a number for each KV head of each layer. It counts sinks and recent ones.
        method: a reducer's name, a `Reducer`, or its JSON object with id and settings.
        tokens: the token ids of `cache`, (T,) or (B, T), where a method needs queries and none are given: the model
            then reads the last ones once more (1,024, or 32 for `snapkv`), and what they ask decides, turned to
            where later tokens will stand if the method looks ahead.
        queries: what to be good for instead: `collect_queries`, or a tensor (query heads, q, width) for each layer,
            rotated as the model does.
        sinks, recent: the first and the last tokens, which stay as they are.
        ragged: leave layers at their own numbers of slots; the model then needs `use_ragged_attention`.
        seed: of methods that draw.
        row: which sequence of a batch.
        progress: told how many layers are reduced, and of how many, after each.

    Sliding layers stay as they are. Raises InvalidInput for a budget without room for sinks and recent tokens and for
    queries that are missing, UnsupportedCache for layers that cannot be reduced, InvalidRecipe for unknown methods.
    """
    reducer = find_reducer(method)
    layers, length, devices = taken(cache, row)
    if queries is None and tokens is not None and reducer.needs_queries:
        queries = queries_for(reducer, model, KVCache(tuple(layers), length), token_ids(tokens, row), seed)
    keeps = numbers_to_keep(budget, layers, length, sinks + recent)
    reduced = _reduced(reducer, layers, length, keeps, model, queries, sinks, recent, seed, progress)
    return weighted_cache(
        reduced, model, length=length, ragged=ragged, device=devices, reduction=reduction(reducer, budget)
    )


def queries_for(reducer: Reducer, model: Any, kv: KVCache, ids: np.ndarray, seed: int = 0) -> Queries:
    """A document's own queries as `reducer` wants them: how many, and from where they are asked."""
    asked = own_queries(model, kv, ids, last=reducer.asks)
    return later(asked, turns_or_none(model, kv, ids), len(ids), seed) if reducer.asks_later else asked


def reduce_layers(
    kv: KVCache,
    *,
    budget: Budget,
    model: Any,
    reducer: Reducer,
    queries: Queries | Sequence[Tensor] | None,
    sinks: int = SINKS,
    recent: int = RECENT,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[LayerKV]:
    """The layers of `reduce_cache`, without a cache around them; each head's pads have log-weight −inf."""
    keeps = numbers_to_keep(budget, kv.layers, len(kv), sinks + recent)
    return _reduced(reducer, kv.layers, len(kv), keeps, model, queries, sinks, recent, seed, progress)


@torch.no_grad()
def prefill_reduced(
    model: Any,
    ids: Any,
    *,
    budget: float | int,
    method: str | Reducer | Mapping[str, Any] = "matching",
    chunk: int = CHUNK,
    sinks: int = SINKS,
    recent: int = RECENT,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> WeightedCache:
    """Let `model` read a prompt chunk by chunk, holding at most `budget` + `chunk` slots at any time.

    The queries of the last tokens read so far say what is kept, as `reduce_cache` takes them. To go on with `generate`,
    leave the last token of the prompt out of `ids`:
    ``model.generate(prompt, cache=prefill_reduced(model, prompt[:-1], budget=1024))``.

    Args:
        ids: token ids (T,) or (1, T).
        budget: as for `reduce_cache`; a fraction is one of all of `ids`.
        progress: told how many tokens are read and how many slots are held, after each chunk.

    Raises what `reduce_cache` raises, and InvalidInput for an empty prompt or chunk.
    """
    reducer, prompt = find_reducer(method), token_ids(ids)
    if chunk < 1 or not len(prompt):
        raise InvalidInput(f"{len(prompt)} tokens in chunks of {chunk}; expected at least one of each")
    keep = number_to_keep(budget, len(prompt), sinks + recent)
    cache: Any = DynamicCache(config=model.config)
    turns = turns_for(model, prompt) if reducer.needs_queries and reducer.asks_later else None
    with collect_queries(model, reducer.asks) as queries:
        for start in range(0, len(prompt), chunk):
            part = torch.from_numpy(prompt[start : start + chunk])[None].to(model.device)
            model(input_ids=part, cache=cache, use_cache=True, logits_to_keep=1)
            layers, length, devices = taken(cache)
            if max(kv.slots for kv in layers if not kv.window) > keep or start + chunk >= len(prompt):
                keeps = numbers_to_keep(keep, layers, length, sinks + recent)
                asked = later(queries, turns, length, seed + start)
                reduced = _reduced(reducer, layers, length, keeps, model, asked, sinks, recent, seed + start)
                del layers  # the old slots go before the next chunk comes
                cache = weighted_cache(
                    reduced, model, length=length, device=devices, reduction=reduction(reducer, budget)
                )
            if progress is not None:
                progress(min(start + chunk, len(prompt)), _slots(cache))
    held: WeightedCache = cache
    return held


def _slots(cache: Any) -> int:
    return cache.slots if isinstance(cache, WeightedCache) else int(cache.get_seq_length())


def taken(cache: Any, row: int = 0) -> tuple[list[LayerKV], int, dict[int, torch.device]]:
    """The layers of any cache on the CPU, how many tokens they stand for, and where each layer was.

    Raises what `take_cache` raises, and UnsupportedCache for layers without keys and values.
    """
    if isinstance(cache, WeightedCache):
        layers, devices = [], {}
        for index, layer in enumerate(cache.layers):
            devices[index] = layer.keys.device
            if isinstance(layer, WeightedLayer):
                layers.append(_on_cpu(layer.kept(row)))
            else:
                whole = DynamicCache()
                whole.layers = [layer]
                layers.append(take_cache(whole, row).layers[0])
        return layers, int(cache.get_seq_length()), devices
    kv = take_cache(cache, row)
    empty = [index for index, layer in enumerate(kv.layers) if layer.empty]
    if empty:
        raise UnsupportedCache(f"layer {empty[0]} has no keys of its own: a model whose layers share them stays whole")
    where = {i: layer.keys.device for i, layer in enumerate(getattr(cache, "layers", [])) if _is_placed(layer)}
    return list(kv.layers), len(kv), where


def _is_placed(layer: Any) -> bool:
    return isinstance(getattr(layer, "keys", None), Tensor)


def _on_cpu(kv: LayerKV) -> LayerKV:
    positions, weights = (None if x is None else x.cpu() for x in (kv.positions, kv.log_weights))
    return LayerKV(kv.keys.cpu(), kv.values.cpu(), positions, weights, kv.length)


def number_to_keep(budget: float | int, tokens: int, least: int) -> int:
    """How many of `tokens` a budget leaves, sinks and recent ones (`least`) included. Raises InvalidInput."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise InvalidInput(f"budget {budget!r}; expected a fraction of the tokens or their number")
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise InvalidInput(f"budget {budget!r}; a fraction lies over 0 and up to 1 (a number of tokens is an int)")
        return max(math.ceil(budget * tokens - 1e-9), least, 1)  # 0.07 x 100 is a little over 7 as a float
    if budget < max(least, 1):
        raise InvalidInput(f"budget of {budget} tokens; expected at least the {least} sinks and recent ones, and 1")
    return budget


def numbers_to_keep(budget: Budget, layers: Sequence[LayerKV], tokens: int, least: int) -> list[list[int]]:
    """For each KV head of each layer; nothing for layers that slide."""
    if not isinstance(budget, Sequence):
        keep = number_to_keep(budget, tokens, least)
        return [[] if kv.window else [keep] * kv.keys.shape[0] for kv in layers]
    wanted = [0 if kv.window else kv.keys.shape[0] for kv in layers]
    if [len(each) for each in budget] != wanted:
        raise InvalidInput(f"budgets of {[len(each) for each in budget]} heads a layer; expected {wanted}")
    return [[number_to_keep(int(keep), tokens, least) for keep in each] for each in budget]


def reduction(reducer: Reducer, budget: Budget) -> dict[str, Any]:
    """What made a cache, as JSON: the reducer's id and settings, and what it was told to keep."""
    settings = asdict(reducer) if is_dataclass(reducer) else {}
    keep = budget if isinstance(budget, (int, float)) else [list(map(int, each)) for each in budget]
    return {"id": reducer.id, **settings, "keep": keep}


def _reduced(
    reducer: Reducer,
    layers: Sequence[LayerKV],
    length: int,
    keeps: Sequence[Sequence[int]],
    model: Any,
    queries: Queries | Sequence[Tensor] | None,
    sinks: int,
    recent: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[LayerKV]:
    if queries is None and reducer.needs_queries:
        raise InvalidInput(
            f"method {reducer.id!r} weighs tokens by what queries ask of them: give tokens=, so that the model can "
            "read its last ones once more, or queries="
        )
    asked = None if queries is None else queries_of(layers, queries)
    config = getattr(model, "config", model).get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedCache("latent attention: what is cached are not yet the keys and values that queries meet")
    scales = _scales(model, queries)
    out = []
    for index, (kv, keep) in enumerate(zip(layers, keeps, strict=True)):
        if kv.window:
            out.append(kv)
            continue
        heads, group = kv.keys.shape[0], int(config.num_attention_heads) // kv.keys.shape[0]
        scale = scales.get(index, kv.keys.shape[2] ** -0.5)
        of_layer = None if asked is None else asked[index].to("cpu", torch.float32)
        found: list[Weighted] = []
        for head, count in enumerate(keep):
            of_head = None if of_layer is None else of_layer[head * group : (head + 1) * group]
            own_keys, own_values, positions, weights = (x[None] for x in head_of(kv, head))
            one = LayerKV(own_keys, own_values, positions, weights, kv.length)
            own_seed = seed * heads + head
            found += reduce_layer(
                reducer,
                one,
                count,
                sinks=sinks,
                recent=recent,
                queries=of_head,
                group=group,
                scale=scale,
                seed=own_seed,
            )
        out.append(stacked([_as_cached(w, kv) for w in found], length))
        if progress is not None:
            progress(index + 1, len(layers))
    return out


def _as_cached(tokens: Weighted, kv: LayerKV) -> Head:
    """Merged keys and values rounded to the dtype of those they were made from."""
    keys, values = tokens.keys.to(kv.keys.dtype), tokens.values.to(kv.values.dtype)
    return keys, values, tokens.positions, tokens.log_weights


def _scales(model: Any, queries: Queries | Sequence[Tensor] | None) -> dict[int, float]:
    """The factor of each layer's logits, where the model or its queries tell."""
    if isinstance(queries, Queries):
        return queries.scales
    modules = model.modules() if isinstance(model, torch.nn.Module) else []
    found = {getattr(m, "layer_idx", None): getattr(m, "scaling", None) for m in modules}
    return {int(i): float(scale) for i, scale in found.items() if i is not None and isinstance(scale, float)}
