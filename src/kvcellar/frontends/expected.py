"""What the model's cache would be for each of the k likeliest tokens, asked of the model itself.

`candidate_caches`: with the prefix's cache there, all k candidates of many positions are read in one forward pass, a
tree of depth one: candidate c of position i stands at position i and attends to the stored tokens before i and to
itself alone, by a mask (1, 1, n·k, T + n·k). The candidates come from the logits behind the token before, the model's
own or a draft model's with the same vocabulary.

`CandidateCache`: speculative decoding has such caches already (Theorem 4 of arXiv 2604.15356). The draft's tokens are
candidates that the model has read behind the right prefix, and `crop`, by which assisted generation drops those that
were not accepted, is where they can be taken. No model is called for it. Stock assisted generation drafts one token a
position, so this is k = 1; the paper's top k needs a decoder that drafts trees.

Importing this imports transformers. Tried on: CPU, transformers 5.24, float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor
from transformers import DynamicCache

from ..cache import LayerKV
from ..errors import InvalidInput, UnsupportedCache
from ..predict.expected import MOST_CANDIDATES, among, candidates, expectation, fewer
from .inputs import token_ids

AT_ONCE = 640  # candidates in one pass


@dataclass(frozen=True)
class CandidateCaches:
    """Candidates of the tokens `span`, likeliest first, `weights` their renormalised probabilities, and their caches.

    `layers` hold keys and values (H, n·k, D), the k of a token side by side. `came` are the tokens that came. `calls`
    are the passes that were made over trees, `prefix_calls` those for the logits and the prefix's cache.
    """

    span: range
    ids: Int64[Tensor, "tokens k"]
    weights: Float32[Tensor, "tokens k"]
    layers: list[LayerKV]
    came: Int64[Tensor, " tokens"]
    calls: int
    prefix_calls: int

    @property
    def k(self) -> int:
        return int(self.ids.shape[1])

    def hits(self, k: int | None = None) -> Bool[Tensor, " tokens"]:
        """Whether the token that came is among the first k."""
        return among(self.ids[:, : k or self.k], self.came)

    def expected(self, k: int | None = None) -> list[LayerKV]:
        """Σ P·KV over the first k candidates: keys and values (H, n, D), float32, keys rotated as the model's."""
        _, weights = fewer(self.ids, self.weights, k or self.k)
        return [LayerKV(self._mean(kv.keys, weights), self._mean(kv.values, weights)) for kv in self.layers]

    def _mean(self, side: Tensor, weights: Tensor) -> Tensor:
        apart = side.reshape(side.shape[0], len(self.span), self.k, side.shape[2])
        return expectation(weights, apart[:, :, : weights.shape[1]].float())


@torch.no_grad()
def candidate_caches(
    model: Any,
    ids: Any,
    span: range,
    k: int,
    *,
    draft: Any = None,
    at_once: int = AT_ONCE,
    progress: Callable[[int], None] | None = None,
) -> CandidateCaches:
    """Let `model` read the `k` likeliest tokens at each index of `span`, each behind the true tokens before it.

    Args:
        ids: token ids (T,) of a text whose tokens `span` are to be foreseen; those behind it are not read.
        span: consecutive indexes, from 1 on, since nothing foresees a first token.
        k: 1…20.
        draft: a model with the same vocabulary whose probabilities count instead of those of `model`.
        at_once: about so many candidates in a pass.
        progress: told how many tokens of `span` each pass has settled.

    Raises InvalidInput, UnsupportedCache for models whose layers do not keep every token's keys and values.
    """
    text = torch.from_numpy(token_ids(ids))
    if not (span and span.step == 1 and span.start >= 1 and span.stop <= len(text)):
        raise InvalidInput(f"tokens {span} of {len(text)}; expected consecutive ones from 1 on")
    if type(k) is not int or not 1 <= k <= MOST_CANDIDATES:
        raise InvalidInput(f"{k!r} candidates a token; expected a whole number from 1 to {MOST_CANDIDATES}")
    cache, asked = DynamicCache(config=model.config), model if draft is None else draft
    read, kept = text[None, : span.stop - 1], len(span)
    out = model(read.to(model.device), cache=cache, use_cache=True, logits_to_keep=kept if draft is None else 1)
    prefix_calls = 1
    if draft is not None:
        out, prefix_calls = asked(read.to(draft.device), use_cache=False, logits_to_keep=kept), 2
    _require_whole(cache, span.stop - 1)
    chosen, weights = candidates(out.logits[0, -kept:].float().cpu(), k)
    found: list[list[LayerKV]] = []
    each = max(1, at_once // k)
    for first in range(span.start, span.stop, each):
        part = range(first, min(first + each, span.stop))
        found.append(_tree_pass(model, cache, chosen[first - span.start : part.stop - span.start], part))
        if progress is not None:
            progress(len(part))
    layers = [
        LayerKV(torch.cat([kv.keys for kv in of], dim=1), torch.cat([kv.values for kv in of], dim=1))
        for of in zip(*found, strict=True)
    ]
    return CandidateCaches(span, chosen, weights, layers, text[span.start : span.stop], len(found), prefix_calls)


def _tree_pass(model: Any, cache: Any, ids: Tensor, part: range) -> list[LayerKV]:
    """Keys and values (H, n·k, D) of candidates (n, k) for the tokens `part`, `cache` being as before afterwards."""
    known, (n, k) = cache.get_seq_length(), ids.shape
    positions = torch.arange(part.start, part.stop).repeat_interleave(k)
    dtype = model.dtype
    mask = torch.full((n * k, known + n * k), torch.finfo(dtype).min, dtype=dtype)
    mask[:, :known].masked_fill_(torch.arange(known) < positions[:, None], 0)
    mask[:, known:].fill_diagonal_(0)
    model(
        ids.reshape(1, -1).to(model.device),
        cache=cache,
        use_cache=True,
        attention_mask=mask[None, None].to(model.device),
        position_ids=positions[None].to(model.device),
        logits_to_keep=1,
    )
    found = [LayerKV(layer.keys[0, :, known:].clone(), layer.values[0, :, known:].clone()) for layer in cache.layers]
    cache.crop(-n * k)
    return found


def _require_whole(cache: Any, tokens: int) -> None:
    for i, layer in enumerate(cache.layers):
        if layer.is_sliding or layer.keys is None or layer.keys.shape[-2] != tokens:
            raise UnsupportedCache(
                f"layer {i} does not keep all {tokens} tokens: its candidates cannot be read as a tree"
            )


class CandidateCache(DynamicCache):  # type: ignore[misc]
    """A cache for assisted generation that keeps what the model made of the draft's tokens.

        cache = CandidateCache(prompt=len(ids), config=model.config)
        model.generate(ids, assistant_model=draft, cache=cache, …)

    `accepted` are the indexes of drafted tokens that came: foreseen exactly. `rejected[i]` holds, of each layer, keys
    and values (H, 1, D) of the first token drafted for index i behind the right prefix that then did not come. What was
    drafted behind it stood behind a wrong one and is of no use. Neither knows the tokens that the model chose with no
    draft for them. Raises UnsupportedCache where a layer does not keep every token.
    """

    def __init__(self, *, prompt: int, config: Any = None):
        super().__init__(config=config)
        self.prompt = prompt
        self.accepted: set[int] = set()
        self.rejected: dict[int, list[LayerKV]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        before = self.get_seq_length() if layer_idx == 0 else 0
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == 0:  # the first token of a pass is one that came; the prompt's all are
            first = max(before + 1, self.prompt)
            self.accepted |= set(range(first, before + key_states.shape[-2]))
        return found

    def crop(self, tokens_to_remove: int) -> None:
        length = int(self.get_seq_length())
        kept = length - abs(tokens_to_remove)
        if kept < length:
            if any(layer.is_sliding for layer in self.layers):
                raise UnsupportedCache("sliding layers do not keep every token: candidates cannot be taken from them")
            self.rejected[kept] = [
                LayerKV(layer.keys[0, :, kept : kept + 1].clone(), layer.values[0, :, kept : kept + 1].clone())
                for layer in self.layers
            ]
            self.accepted -= set(range(kept, length))
        super().crop(tokens_to_remove)
