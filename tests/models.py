"""Tiny random models, the same on every run, and what tests do with them. Nothing here contacts a hub."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

torch.set_num_threads(1)  # more threads than tiny tensors are worth cost ten times the run time

VOCABULARY = 128
# Wide weights, so that what a model says depends on every token it attends to and not on the last one alone.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}


def new_llama(seed: int = 0, *, attention: str = "sdpa", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A Llama of the test's own, to be changed at will."""
    return _built(LlamaForCausalLM, LlamaConfig(**{**_SHAPE, **config}), seed, attention, dtype)


@cache
def llama(attention: str = "sdpa") -> Any:
    """The Llama that tests share; nobody may change it."""
    return new_llama(attention=attention)


@cache
def mistral(window: int) -> Any:
    """A Mistral whose layers attend to the last `window` tokens."""
    return _built(MistralForCausalLM, MistralConfig(**_SHAPE, sliding_window=window), 0, "sdpa", torch.float32)


def _built(kind: type[PreTrainedModel], config: Any, seed: int, attention: str, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    model = model.to(dtype).eval()
    model.set_attn_implementation(attention)
    return model


def prompt(n: int, seed: int = 0) -> list[int]:
    """n token ids of the models' vocabulary; fewer ids are a prefix of more."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (512,), generator=generator)[:n].tolist()


def prefill(model: Any, ids: list[int] | list[list[int]], cache: Any = None) -> Any:
    """The cache after the model read `ids`."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    logits(model, cache, ids)
    return cache


@torch.no_grad()
def logits(model: Any, cache: Any, ids: list[int] | list[list[int]], **arguments: Any) -> torch.Tensor:
    """Logits (T, vocabulary) of `ids` read behind `cache`, which grows."""
    rows = ids if isinstance(ids[0], list) else [ids]
    return model(input_ids=torch.tensor(rows), cache=cache, use_cache=True, **arguments).logits[0]


@torch.no_grad()
def generate(model: Any, ids: list[int], cache: Any = None, new: int = 5) -> list[int]:
    """`ids` and `new` greedy tokens behind them."""
    given = torch.tensor([ids])
    arguments = {} if cache is None else {"cache": cache}
    out = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False, pad_token_id=0, **arguments
    )
    return out[0].tolist()


def pairs(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(keys, values) of each layer of a transformers cache."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a float tensor as integers, so that comparing tells −0 from 0 and one NaN from another."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same_bits(left: list[tuple[torch.Tensor, torch.Tensor]], right: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether two lists of (keys, values) have the same layers, shapes, dtypes and bits."""
    if len(left) != len(right):
        return False
    sides = [(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)]
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in sides)
