"""Peers that quantize what is read behind the prefix, too: the same as reading it token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, QuantizedLayer

from clitools import write_model
from kvcellar.frontends.bench.peers import PEERS, THROUGH, gives_cache
from kvcellar.frontends.bench.reference import continuation_logits
from kvcellar.frontends.cli.models import MeasuredModel, empty_cache

RESIDUAL = 6


class Rounding(QuantizedLayer):
    """A group-wise backend that needs no package: a step of a sixteenth of the largest number there is."""

    def __init__(self) -> None:
        super().__init__(residual_length=RESIDUAL)

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        step = tensor.abs().amax() / 16
        return (tensor / step).round(), step

    def _dequantize(self, qtensor: tuple[Tensor, Tensor]) -> Tensor:
        return qtensor[0] * qtensor[1]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> MeasuredModel:
    return MeasuredModel(write_model(tmp_path_factory.mktemp("model")))


def prefilled(local: MeasuredModel, tokens: int) -> Any:
    cache = empty_cache()
    local.prefill(list(range(tokens)), cache, quiet=True)
    return cache


def quantized(cache: Any, *, residual: int) -> Cache:
    """`cache` in `Rounding` layers, its last `residual` tokens in full precision."""
    held = Cache(layers=[Rounding() for _ in cache.layers])
    for index, layer in enumerate(cache.layers):
        whole = layer.keys.shape[2] - residual
        held.update(layer.keys[:, :, :whole], layer.values[:, :, :whole], index)
        if residual:
            held.update(layer.keys[:, :, whole:], layer.values[:, :, whole:], index)
    return held


@torch.inference_mode()
def one_by_one(model: Any, following: list[int], cache: Any) -> Tensor:
    return torch.cat([model(torch.tensor([[i]]), cache=cache, use_cache=True).logits[0] for i in following])[:-1]


@pytest.mark.parametrize("residual", [0, 2, RESIDUAL - 1])
@pytest.mark.parametrize("tokens", [3, RESIDUAL, 20])
def test_pieces_read_what_single_tokens_would(local: MeasuredModel, residual: int, tokens: int) -> None:
    cache, following = prefilled(local, 40), [(7 * i) % 90 for i in range(tokens)]
    expected = one_by_one(local.model, following, quantized(cache, residual=residual))
    got = continuation_logits(local.model, following, quantized(cache, residual=residual))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_one_call_would_quantize_less(local: MeasuredModel) -> None:
    cache, following = prefilled(local, 40), list(range(20))
    expected = one_by_one(local.model, following, quantized(cache, residual=0))
    with torch.inference_mode():
        at_once = local.model(torch.tensor([following]), cache=quantized(cache, residual=0)).logits[0, :-1]
    assert (at_once - expected).abs().max() > 1e-3


@pytest.mark.parametrize("tokens", [64, 65, 200])
def test_fp8_codes_the_continuation_and_the_prefix_peer_does_not(local: MeasuredModel, tokens: int) -> None:
    following, cache = list(range(30)), prefilled(local, tokens)
    alone = PEERS["hf-fp8"](cache, local.model.config)
    through = PEERS["hf-fp8-through"](prefilled(local, tokens), local.model.config)
    assert through.nbytes == alone.nbytes
    assert through.cache.get_seq_length() == alone.cache.get_seq_length() == tokens
    assert isinstance(alone.cache, DynamicCache)
    read = [continuation_logits(local.model, following, each.cache) for each in (alone, through)]
    full = continuation_logits(local.model, following, cache)
    harm = [(logits - full).abs().mean() for logits in read]
    assert 0 < harm[0] < harm[1]
    assert through.cache.layers[0]._quantized_keys[0].shape[2] == tokens + 30, "the new tokens are held in fp8"


def test_what_codes_the_continuation_is_not_asked_tasks() -> None:
    """Tasks put several answers to one cache, which would no longer be the prefix's."""
    assert THROUGH
    assert not any(map(gives_cache, THROUGH))
    assert gives_cache("hf-fp8")
