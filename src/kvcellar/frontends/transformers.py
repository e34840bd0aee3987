"""transformers caches: the way in (any cache to a `KVCache`) and the way back.

Taking a cache needs no transformers: layers are recognised by their class names and attributes, older forms by
their shape. Only giving one back imports it. A layer that would come back changed is refused by name.

Tried on: CPU, transformers 5.24. Tensors on other devices are copied to the CPU on the way in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cache import KVCache, LayerKV, torch_dtype
from ..errors import InvalidInput, MissingExtra, UnsupportedCache
from ..geometry import DTYPES

if TYPE_CHECKING:
    from transformers import Cache

_PLAIN = {"DynamicLayer", "StaticLayer"}
_QUANTIZED = {"QuantoQuantizedLayer", "HQQQuantizedLayer", "Fp8QuantizedLayer"}
_REASONS = {
    "is_sliding": "a sliding-window layer, whose true length this version does not store",
    "conv_states": "a layer with recurrent state, which this version does not store",
    "indexer_keys": "an indexed-attention layer, whose index keys this version does not store",
    "logical_length": "a cache restored at selected positions: it is not the whole sequence",
}


def take_cache(cache: Any, row: int = 0) -> KVCache:
    """One row of any cache as a `KVCache` of views.

    `cache`: a `KVCache`; a transformers cache; a tuple or list of (keys, values); an object with `key_cache` and
    `value_cache`. Tensors (B, H, T, D). Raises UnsupportedCache naming the layer, InvalidInput for what fits no form.
    """
    if isinstance(cache, KVCache):
        for index, layer in enumerate(cache.layers):
            if not layer.dense:
                raise UnsupportedCache(f"layer {index}: positions, weights or merged tokens cannot be stored yet")
            _require_equal_sides(index, layer.keys, layer.values)
        return cache
    pairs = _layer_pairs(cache)
    if not pairs or all(keys is None or (isinstance(keys, Tensor) and keys.numel() == 0) for keys, _ in pairs):
        raise InvalidInput("the cache is empty: it holds no token, so there is nothing to save")
    return KVCache(tuple(_one_row(index, keys, values, row) for index, (keys, values) in enumerate(pairs)))


def _layer_pairs(cache: Any) -> list[tuple[Tensor, Tensor]]:
    if hasattr(cache, "self_attention_cache"):
        raise UnsupportedCache(f"{type(cache).__name__}: cross-attention caches cannot be stored yet")
    if hasattr(cache, "layers"):
        pairs = [_from_layer(index, layer) for index, layer in enumerate(cache.layers)]
        missing = [index for index, (keys, _) in enumerate(pairs) if keys is None or keys.numel() == 0]
        if missing and len(missing) < len(pairs):
            raise UnsupportedCache(f"layer {missing[0]} ({type(cache.layers[missing[0]]).__name__}) is empty")
        return pairs
    if hasattr(cache, "key_cache") and hasattr(cache, "value_cache"):
        if len(cache.key_cache) != len(cache.value_cache):
            raise InvalidInput(f"{len(cache.key_cache)} layers of keys and {len(cache.value_cache)} of values")
        return list(zip(cache.key_cache, cache.value_cache, strict=True))
    if isinstance(cache, Sequence) and all(isinstance(pair, Sequence) and len(pair) >= 2 for pair in cache):
        return [(pair[0], pair[1]) for pair in cache]
    raise InvalidInput(
        f"{type(cache).__name__} is no cache: expected a transformers cache, (keys, values) pairs, KVCache"
    )


def _from_layer(index: int, layer: Any) -> tuple[Any, Any]:
    """Keys and values (B, H, T, D) that the model would attend to next."""
    name = type(layer).__name__
    for attribute, reason in _REASONS.items():
        value = getattr(layer, attribute, None)
        if value is not None and value is not False:
            raise UnsupportedCache(f"layer {index} ({name}) is {reason}")
    if name == "DummyLayer":
        return None, None
    if name not in _PLAIN | _QUANTIZED:
        raise UnsupportedCache(f"layer {index} is a {name}; expected one of {', '.join(sorted(_PLAIN | _QUANTIZED))}")
    if not layer.is_initialized:
        return None, None
    if name in _QUANTIZED:
        return dequantized(layer)
    if name == "StaticLayer":
        length = int(layer.get_seq_length())
        return layer.keys[:, :, :length], layer.values[:, :, :length]
    return layer.keys, layer.values


def dequantized(layer: Any) -> tuple[Tensor, Tensor]:
    """What the model reads from a quantized layer: the dequantized part, then the full-precision residual."""
    sides = layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
    if hasattr(layer, "_apply_pending_reorder"):
        sides = layer._apply_pending_reorder(*sides)
    recent = layer.keys, layer.values
    keys, values = (
        torch.cat([old, new], dim=-2) if new.numel() else old for old, new in zip(sides, recent, strict=True)
    )
    return keys, values


def _one_row(index: int, keys: Any, values: Any, row: int) -> LayerKV:
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
        raise UnsupportedCache(f"layer {index}: keys are {type(keys).__name__}, values {type(values).__name__}")
    if keys.dim() != 4 or values.dim() != 4:
        raise UnsupportedCache(
            f"layer {index}: keys of shape {tuple(keys.shape)}, values {tuple(values.shape)}; expected (B, H, T, D)"
        )
    if keys.shape[:1] != values.shape[:1] or keys.shape[2] != values.shape[2]:
        raise UnsupportedCache(f"layer {index}: keys {tuple(keys.shape)} and values {tuple(values.shape)} do not pair")
    if not 0 <= row < keys.shape[0]:
        raise InvalidInput(f"row {row} of a batch of {keys.shape[0]}")
    if keys.is_meta or values.is_meta:
        raise UnsupportedCache(f"layer {index}: tensors on the meta device hold no numbers")
    k, v = (x[row].detach().cpu() for x in (keys, values))
    _require_equal_sides(index, k, v)
    return LayerKV(k, v)


def _require_equal_sides(index: int, keys: Tensor, values: Tensor) -> None:
    if keys.shape != values.shape:
        raise UnsupportedCache(
            f"layer {index}: keys (H, T, D) {tuple(keys.shape)} and values {tuple(values.shape)} differ in shape, "
            "which this version does not store"
        )


def give_cache(
    layers: Mapping[int, LayerKV],
    *,
    total_layers: int,
    next_position: int,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Cache:
    """A DynamicCache with `layers` at their indexes, the others empty.

    When fewer tokens than `next_position` are held, the layers report the logical length, so that `generate` and
    position ids go on at `next_position`. Raises MissingExtra, InvalidInput when a number does not fit `dtype`.
    """
    try:
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer
    except ImportError as error:
        raise MissingExtra("a transformers cache needs the extra: pip install 'kvcellar[hf]'") from error
    cache = DynamicCache()
    for index in range(total_layers):
        if index not in layers:
            cache.layers.append(DynamicLayer())
            continue
        kv = layers[index]
        keys, values = (_converted(x, dtype, device, f"layer {index}")[None] for x in (kv.keys, kv.values))
        layer = _selected_layer()(next_position) if kv.slots != next_position else DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _converted(x: Tensor, dtype: torch.dtype | None, device: torch.device | str | None, where: str) -> Tensor:
    if dtype is not None and dtype != x.dtype:
        converted = x.to(dtype)
        if not torch.equal(converted.isfinite(), x.isfinite()):
            raise InvalidInput(
                f"{where}: {x[x.isfinite()].abs().max().item():g} does not fit {dtype}; stored as {x.dtype}"
            )
        x = converted
    return x.to(device) if device is not None else x


def _selected_layer() -> Callable[[int], Any]:
    """The layer class for caches that hold fewer keys than positions, made when transformers is there."""
    from transformers.cache_utils import DynamicLayer

    class SelectedLayer(DynamicLayer):  # type: ignore[misc]
        """Keys of selected positions; `logical_length` counts all positions, held or not."""

        is_croppable = False

        def __init__(self, logical_length: int):
            super().__init__()
            self.logical_length = logical_length

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.logical_length += key_states.shape[-2]
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values

        def reset(self) -> None:
            super().reset()
            self.logical_length = 0

        def get_seq_length(self) -> int:
            return self.logical_length

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            held = self.keys.shape[-2] if self.is_initialized else 0
            return held + query_length, self.logical_length - held

    return SelectedLayer


def dtype_of(name: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name or itself. Raises InvalidInput for one no cache can have."""
    if name is None:
        return None
    short = str(name).removeprefix("torch.")
    if short not in DTYPES:
        raise InvalidInput(f"dtype {name!r}; expected one of {', '.join(DTYPES)}")
    return torch_dtype(short)
