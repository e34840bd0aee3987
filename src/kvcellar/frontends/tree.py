"""A prompt read in one pass, each chunk attending to itself and to a summary of all before it.

Under `tree_attention` a layer attends as

    chunk c: softmax(q·[sinks, before(c), own tokens up to itself]·scale + log w)

with all of before(1), before(2), … made by one prefix scan of the layer's keys and values (`kvcellar.reduce.tree`). So
attention takes O(chunk·(chunk + keep)) memory however long the prompt is, and time in proportion to it. What comes out
holds the sinks, a summary of all, and the recent tokens, and `generate` goes on behind it. `treestream.py` reads the
same text chunk by chunk and comes to the same.

Reducers that want queries get those the last chunk of the merged tokens asked, turned to where later ones will stand:
what stands before a chunk depends on nothing in it or behind it, so no logit knows of a later token.

Source: "The risk of KV cache compression" (Haverbeck et al. 2026); the order of merges, whose queries they go by, and
the one pass are ours. Importing this imports transformers. Tried on: CPU, transformers 5.24, float32, bfloat16.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..cache import LayerKV
from ..errors import InvalidInput, UnsupportedCache
from ..reduce.batched import Heads
from ..reduce.tree import scan
from ..reduce.weighted import RECENT, SINKS, Reducer
from .attention import attending
from .inputs import token_ids
from .queries import Queries
from .reduce import reduction
from .treeplan import CHUNK, KEEP, METHOD, LayerPlan, Plan, plan_for
from .weighted import WeightedCache, weighted_cache

TREE = "kvcellar_tree"
_CHANGES_ATTENTION = ("softcap", "s_aux", "position_bias", "sliding_window", "dropout")


class TreeRun:
    """What a pass under `tree_attention` leaves of each layer, as slots of a reduced cache."""

    def __init__(self, plan: Plan, progress: Callable[[int], None] | None = None):
        self.plan, self.progress = plan, progress
        self.layers: dict[int, LayerKV] = {}
        self.devices: dict[int, torch.device] = {}

    def cache(self, model: Any) -> WeightedCache:
        """What the pass leaves. Raises UnsupportedCache where not every layer of `model` was read."""
        count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        if missing := set(range(count)) - set(self.layers):
            raise UnsupportedCache(f"layer {min(missing)} does not attend by an attention function of transformers")
        layers = [self.layers[index] for index in range(count)]
        made = reduction(self.plan.reducer, self.plan.keep)
        return weighted_cache(layers, model, length=layers[0].length or 0, device=self.devices, reduction=made)

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(1, query heads, T, Dv) of queries (1, query heads, T, D), and this layer's part of the cache."""
        plan, length = self.plan, key.shape[2]
        group = query.shape[1] // key.shape[1]
        held = Heads.of(key[0].cpu(), value[0].cpu(), 0)
        sinks = held[: plan.sinks] if plan.sinks else None
        layer, edges = LayerPlan(plan, index, sinks, scale, group), plan.edges(length)
        count = len(edges) - 1
        spans = [(max(a, min(plan.sinks, b)), b) for a, b in pairwise(edges)]
        for chunk, (start, stop) in enumerate(spans[:-1]):
            layer.ask(chunk + 1, query[0, :, start:stop], start)
        before = scan([held[slice(*span)] for span in spans], layer.merge())
        out = query.new_empty(*query.shape[:3], value.shape[3])
        mask = None
        for (start, stop), summary in zip(pairwise(edges), before, strict=True):
            seen = None if summary is None else layer.seen(summary)
            own = slice(start, stop)
            out[:, :, own], mask = _chunk(query[:, :, own], key[:, :, own], value[:, :, own], seen, scale, mask)
        first = max(0, length - plan.chunk)
        layer.ask(count, query[0, :, first:], first)
        chunk = max(0, min((length - plan.recent - plan.sinks) // plan.chunk, count - 1))
        self.layers[index] = layer.last(before[chunk], held[spans[chunk][0] :], length, count)
        self.devices[index] = key.device
        if self.progress is not None:
            self.progress(len(self.layers))
        return out


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, seen: Heads | None, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """A chunk's queries (1, query heads, q, D) on what is seen before it and causally on its own tokens.

    `mask` (KV heads, 1, q, slots) of the chunk before is used once more where its shape fits."""
    heads, count = key.shape[1], query.shape[2]
    grouped = query[0].reshape(heads, -1, count, query.shape[3])
    if seen is None:
        keys, values = (x[0, :, None].expand(-1, grouped.shape[1], -1, -1) for x in (key, value))
        out = scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale)
        return out.reshape(1, -1, *out.shape[2:]), None
    known = len(seen)
    if mask is None or mask.shape[2:] != (count, known + count):
        # kernels of other devices want a mask of the queries' dtype; on the CPU weights can be exact
        dtype = torch.float32 if query.device.type == "cpu" else query.dtype
        mask = torch.zeros(heads, 1, count, known + count, dtype=dtype, device=query.device)
        mask[..., known:] = torch.full((count, count), -torch.inf, dtype=dtype, device=query.device).triu(1)
    mask[..., :known] = seen.log_weights[:, None, None].to(mask)
    keys, values = (
        torch.cat([mine.to(own), own[0]], dim=1)[:, None].expand(-1, grouped.shape[1], -1, -1)
        for mine, own in ((seen.keys, key), (seen.values, value))
    )
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(1, -1, *out.shape[2:]), mask


_run: contextvars.ContextVar[TreeRun | None] = contextvars.ContextVar("kvcellar_tree", default=None)


def _tree_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    run, layer = _run.get(), getattr(module, "layer_idx", None)
    if run is None or layer is None:
        raise UnsupportedCache(f"attention {TREE!r} is used by prefill_tree alone")
    changed = [name for name in _CHANGES_ATTENTION if kwargs.get(name)]
    changed += ["attention_mask"] * (attention_mask is not None)
    if changed:
        raise UnsupportedCache(f"layer {layer}: attention with {', '.join(changed)} cannot be read through a tree")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise InvalidInput(
            f"layer {layer}: {query.shape[0]} sequences, {query.shape[2]} queries of {key.shape[2]} tokens; expected "
            "one whole prompt and no cache"
        )
    scale = kwargs.get("scaling")
    out = run.attend(int(layer), query, key, value, query.shape[3] ** -0.5 if scale is None else float(scale))
    return out.transpose(1, 2).contiguous(), None


def _no_mask(attention_mask: Tensor | None = None, local_size: int | None = None, **sizes: Any) -> None:
    """Stands for mask making: a mask of the whole prompt would be T² numbers."""
    if local_size is not None or (attention_mask is not None and not bool(attention_mask.all())):
        raise UnsupportedCache("sliding layers, and prompts with pads, cannot be read through a tree")


@contextmanager
def tree_attention(model: Any, plan: Plan, progress: Callable[[int], None] | None = None) -> Iterator[TreeRun]:
    """While it lasts, `model` reads whole prompts through the tree in this thread: ``model(ids, use_cache=False)``.

    Raises UnsupportedCache for a model that cannot take an attention function from outside.
    """
    run = TreeRun(plan, progress)
    with attending(model, TREE, _tree_attention, _no_mask, "it cannot read through a tree"):
        token = _run.set(run)
        try:
            yield run
        finally:
            _run.reset(token)


@torch.no_grad()
def prefill_tree(
    model: Any,
    ids: Any,
    *,
    chunk: int = CHUNK,
    keep: int = KEEP,
    method: str | Reducer | Mapping[str, Any] = METHOD,
    queries: Queries | Sequence[Tensor] | None = None,
    sinks: int = SINKS,
    recent: int = RECENT,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> WeightedCache:
    """Let `model` read a prompt in one pass whose attention takes O(chunk·(chunk + keep)) memory and linear time.

    A token sees the sinks, a summary of the chunks before its own, and its own chunk up to itself: where the prompt has
    more than `keep` tokens, what the model reads is not quite the prompt. To go on with `generate`, leave the prompt's
    last token out: ``model.generate(prompt, cache=prefill_tree(model, prompt[:-1]))``.

    Args:
        ids: token ids (T,) or (1, T).
        chunk: tokens of a chunk.
        keep: slots of every summary, and of the cache that comes out; the sinks count, and in the cache `recent`.
        method: a reducer's name, a `Reducer`, or its JSON object. `random` and `matching` with selection "response" are
            computed for all heads of a layer and all nodes of a level at once, others one by one.
        queries: what summaries should be good for instead of the text's own queries: of other texts, as `reduce_cache`
            takes them. Queries of this text would break causality.
        sinks, recent: tokens that stay as they are, first ones everywhere, last ones in the cache.
        seed: of methods that draw, and of the positions queries are turned to.
        progress: told after each layer how many are read, and of how many.

    Raises InvalidInput for an empty prompt and numbers that do not fit, InvalidRecipe for unknown methods, and
    UnsupportedCache for models whose layers slide, share keys, or do not attend by transformers' attention functions.
    """
    prompt = token_ids(ids)
    if not len(prompt):
        raise InvalidInput("a prompt of 0 tokens; expected at least 1")
    plan = plan_for(
        model,
        chunk=chunk,
        keep=keep,
        method=method,
        queries=queries,
        sinks=sinks,
        recent=recent,
        seed=seed,
    )
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    with tree_attention(model, plan, None if progress is None else lambda done: progress(done, layers)) as run:
        model(input_ids=torch.from_numpy(prompt)[None].to(model.device), use_cache=False, logits_to_keep=1)
    return run.cache(model)
