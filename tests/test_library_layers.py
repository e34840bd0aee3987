"""Caches that come in: what is saved as the model would read it, and what is refused by naming the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import jaxtyping
import numpy as np
import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

import kvcellar
from kvcellar.errors import InvalidInput, KVCellarError, UnsupportedCache
from models import llama, logits, pairs, prefill, prompt, same_bits

IDS = prompt(40)


@pytest.fixture
def as_released() -> Iterator[None]:
    """Without the checks of named dimensions, which would refuse some tensors before kvcellar does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def _filled(layer: DynamicLayer, width: int = 16) -> DynamicLayer:
    layer.update(torch.randn(1, 2, 40, width), torch.randn(1, 2, 40, width))
    return layer


def _behind_good_layers(layer: object) -> Cache:
    return Cache(layers=[_filled(DynamicLayer()), _filled(DynamicLayer()), layer])


def _refused(saved: Callable, cache: object, message: str) -> None:
    with pytest.raises(UnsupportedCache, match=message):
        saved(cache, IDS)


def test_quantized_layers_are_saved_as_the_model_reads_them(saved: Callable) -> None:
    quantized = QuantizedCache(backend="fp8", config=llama().config)
    prefill(llama(), IDS[:30], quantized)
    prefill(llama(), IDS[30:], quantized)
    path = saved(quantized, IDS)
    read_next = []
    for layer in quantized.layers:
        nothing = torch.empty(1, 2, 0, 16)
        read_next.append(layer.update(nothing, nothing))
    with kvcellar.open(path, identity="m") as stored:
        assert len(stored) == 40
        assert same_bits(pairs(stored.restore().cache), read_next)
    assert not same_bits(read_next, pairs(prefill(llama(), IDS)))


def test_quantized_layers_after_one_forward(saved: Callable) -> None:
    quantized = prefill(llama(), IDS, QuantizedCache(backend="fp8", config=llama().config))
    with kvcellar.open(saved(quantized, IDS), identity="m") as stored:
        restored = stored.restore().cache
    expected = logits(llama(), quantized, [7])
    assert torch.allclose(logits(llama(), restored, [7]), expected, atol=0.2)  # the 41st token stays exact here
    assert not torch.equal(logits(llama(), prefill(llama(), IDS), [7]), expected)


@pytest.mark.parametrize("kind", [LinearAttentionLayer, LinearAttentionAndFullAttentionLayer])
def test_layers_with_recurrent_state_are_refused(saved: Callable, kind: type) -> None:
    layer = kind()
    if isinstance(layer, DynamicLayer):
        DynamicLayer.update(layer, torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16))
    layer.update_conv_state(torch.randn(1, 8, 4))
    _refused(saved, _behind_good_layers(layer), rf"layer 2 \({kind.__name__}\) .*recurrent state")


def test_indexed_layers_are_refused(saved: Callable) -> None:
    layer = _filled(DynamicIndexedLayer())
    layer.update_indexer(torch.randn(1, 40, 8))
    _refused(saved, _behind_good_layers(layer), r"layer 2 \(DynamicIndexedLayer\)")


def test_layers_of_unknown_classes_are_refused(saved: Callable) -> None:
    class DynamicLayerOfOurs(DynamicLayer):
        """Keeps keys in a way nobody here knows."""

    _refused(saved, _behind_good_layers(_filled(DynamicLayerOfOurs())), "layer 2 is a DynamicLayerOfOurs")


def test_empty_layers_among_filled_ones_are_refused(saved: Callable) -> None:
    _refused(saved, _behind_good_layers(DynamicLayer()), r"layer 2 \(DynamicLayer\) is empty")


def test_encoder_decoder_caches_are_refused(saved: Callable) -> None:
    cache = EncoderDecoderCache(prefill(llama(), IDS), prefill(llama(), IDS))
    _refused(saved, cache, "EncoderDecoderCache")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, v: (k, v[:, :, :39]), "layer 1: .*do not pair"),
        (lambda k, v: (k, torch.cat([v, v])), "layer 1: .*do not pair"),
        (lambda k, v: (k[0], v[0]), r"layer 1: .*expected \(B, H, T, D\)"),
        (lambda k, v: (k.double(), v.double()), "layer 1 keys: dtype torch.float64"),
        (lambda k, v: (k, v.to(torch.int8)), "layer 1 values: dtype torch.int8"),
        (lambda k, v: (k.to(torch.complex64), v), "layer 1 keys: dtype torch.complex64"),
        (lambda k, v: (k.to("meta"), v.to("meta")), "layer 1: .*meta device"),
        (lambda k, v: (None, None), "layer 1: keys are NoneType"),
        (lambda k, v: (k.numpy(), v.numpy()), "layer 1: keys are ndarray"),
    ],
)
@pytest.mark.usefixtures("as_released")
def test_pairs_that_cannot_be_stored(make_cache: Callable, saved: Callable, change: Callable, message: str) -> None:
    source = make_cache()
    source[1] = change(*source[1])
    _refused(saved, source, message)
    _refused(saved, SimpleNamespace(key_cache=[k for k, _ in source], value_cache=[v for _, v in source]), message)


def test_numpy_pairs_are_refused_by_layer(make_cache: Callable, saved: Callable) -> None:
    _refused(saved, [(k.numpy(), v.numpy()) for k, v in make_cache()], "layer 0: keys are ndarray")


def test_lists_of_unequal_length_are_refused(make_cache: Callable, saved: Callable) -> None:
    keys, values = zip(*make_cache(), strict=True)
    with pytest.raises(KVCellarError):
        saved(SimpleNamespace(key_cache=list(keys), value_cache=list(values[:2])), IDS)


def test_layers_of_unequal_length_are_refused(make_cache: Callable, saved: Callable) -> None:
    source = make_cache()
    source[2] = make_cache(layers=1, tokens=39)[0]
    with pytest.raises(InvalidInput, match="layer 2 holds 39 keys"):
        saved(source, IDS)


@pytest.mark.parametrize("cache", [[], (), [[]], DynamicCache(), DynamicCache(config=llama().config), None, 5, "cache"])
def test_empty_caches_and_no_caches(saved: Callable, cache: object) -> None:
    with pytest.raises(InvalidInput):
        saved(cache, IDS)
    with pytest.raises(InvalidInput):
        saved(cache, [])


def test_own_caches_with_weights_or_positions_are_refused(make_cache: Callable, saved: Callable) -> None:
    (keys, values), second = [(k[0], v[0]) for k, v in make_cache(layers=2)]
    for extra in (
        {"positions": torch.arange(40)},
        {"log_weights": torch.zeros(2, 40)},
        {"length": 50},
    ):
        layers = kvcellar.LayerKV(*second), kvcellar.LayerKV(keys, values, **extra)
        _refused(saved, kvcellar.KVCache(layers), "layer 1")
    plain = kvcellar.LayerKV(keys, values, length=40)
    with kvcellar.open(saved(kvcellar.KVCache((plain,)), IDS), identity="m") as stored:
        assert same_bits(pairs(stored.restore().cache), [(keys[None], values[None])])


def test_tensors_of_any_layout_are_saved_by_value(make_cache: Callable, saved: Callable) -> None:
    source = make_cache()
    plain = saved(source, IDS).read_bytes()
    forms = {
        "transposed": [(k.transpose(1, 2).contiguous().transpose(1, 2), v.mT.contiguous().mT) for k, v in source],
        "grown": [(torch.cat([k, k], dim=2)[:, :, :40], torch.cat([v, v], dim=3)[..., :16]) for k, v in source],
        "trained": [(k.clone().requires_grad_(), v * torch.ones(1, requires_grad=True)) for k, v in source],
        "parameters": [(torch.nn.Parameter(k), torch.nn.Parameter(v)) for k, v in source],
    }
    for name, cache in forms.items():
        assert saved(cache, IDS, f"{name}.kvc").read_bytes() == plain, name
    shared = [(k[:, :1].expand(1, 2, 40, 16), v) for k, v in source]
    copied = [(np.repeat(k[:, :1].numpy(), 2, axis=1), v) for k, v in source]
    again = saved([(torch.from_numpy(k), v) for k, v in copied], IDS, "copied.kvc").read_bytes()
    assert saved(shared, IDS, "shared.kvc").read_bytes() == again
