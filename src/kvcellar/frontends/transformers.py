"""transformers caches: the way in (any cache to a `KVCache`) and the way back.

Taking a cache needs no transformers: layers are recognised by their class names and attributes, older forms by
their shape. Only giving one back imports it. A layer that would come back changed is refused by name.

Tried on: CPU, transformers 5.24. Tensors on other devices are copied to the CPU on the way in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..cache import KVCache, LayerKV, no_layer, torch_dtype
from ..errors import InvalidInput, MissingExtra, UnsupportedCache
from ..geometry import DTYPES, FULL, NONE, SLIDING, Geometry

if TYPE_CHECKING:
    from transformers import Cache

Device = torch.device | str
_DYNAMIC, _STATIC = {"DynamicLayer"}, {"StaticLayer"}
_SLIDING = {"DynamicSlidingWindowLayer", "StaticSlidingWindowLayer"}
_QUANTIZED = {"QuantoQuantizedLayer", "HQQQuantizedLayer", "Fp8QuantizedLayer"}
_KNOWN = _DYNAMIC | _STATIC | _SLIDING | _QUANTIZED
_REASONS = {
    "conv_states": "a layer with recurrent state, which this version does not store",
    "indexer_keys": "an indexed-attention layer, whose index keys this version does not store",
    "log_weights": "a layer of a reduced cache, which can be saved as a whole and reduced again, and nothing else",
    "logical_length": "a cache restored at selected positions: it is not the whole sequence",
}


class _Layer(NamedTuple):
    """Keys and values (B, H, T, D) that a layer would attend to next, the window and the number of the first token."""

    keys: Any
    values: Any
    window: int = 0
    first: int = 0


def take_cache(cache: Any, row: int = 0) -> KVCache:
    """One row of any cache as a `KVCache` of views.

    `cache`: a `KVCache`; a transformers cache; a tuple or list of (keys, values); an object with `key_cache` and
    `value_cache`. Tensors (B, H, T, D). Raises UnsupportedCache naming the layer, InvalidInput for what fits no form.
    """
    if isinstance(cache, KVCache):
        if cache.reduced:
            raise UnsupportedCache(
                "a reduced cache, whose slots stand for several tokens, can be saved and nothing else"
            )
        for index, layer in enumerate(cache.layers):
            if not layer.dense:
                raise UnsupportedCache(f"layer {index}: positions of its own without weights cannot be stored")
        return cache
    layers = _layers(cache)
    if all(layer is None or layer.keys is None or _nothing(layer.keys) for layer in layers):
        raise InvalidInput("the cache is empty: it holds no token, so there is nothing to save")
    taken = (no_layer() if layer is None else _one_row(index, layer, row) for index, layer in enumerate(layers))
    return KVCache(tuple(taken))


def _nothing(keys: Any) -> bool:
    return isinstance(keys, Tensor) and keys.numel() == 0


def _layers(cache: Any) -> list[_Layer | None]:
    """Every layer; None for one that has no keys and values of its own by design."""
    if hasattr(cache, "self_attention_cache"):
        raise UnsupportedCache(f"{type(cache).__name__}: cross-attention caches cannot be stored yet")
    if hasattr(cache, "layers"):
        _refuse_more_than_layers(cache)
        layers = [_from_layer(index, layer) for index, layer in enumerate(cache.layers)]
        missing = [i for i, layer in enumerate(layers) if layer is not None and layer.keys is None]
        if missing and len(missing) < sum(layer is not None for layer in layers):
            raise UnsupportedCache(f"layer {missing[0]} ({type(cache.layers[missing[0]]).__name__}) is empty")
        return layers
    if hasattr(cache, "key_cache") and hasattr(cache, "value_cache"):
        if len(cache.key_cache) != len(cache.value_cache):
            raise InvalidInput(f"{len(cache.key_cache)} layers of keys and {len(cache.value_cache)} of values")
        return [_Layer(*pair) for pair in zip(cache.key_cache, cache.value_cache, strict=True)]
    if isinstance(cache, Sequence) and all(isinstance(pair, Sequence) and len(pair) >= 2 for pair in cache):
        return [_Layer(pair[0], pair[1]) for pair in cache]
    raise InvalidInput(
        f"{type(cache).__name__} is no cache: expected a transformers cache, (keys, values) pairs, KVCache"
    )


def _refuse_more_than_layers(cache: Any) -> None:
    """Raise UnsupportedCache for a cache that keeps tensors anywhere but in its layers, as MiniMax's does."""
    for name, value in getattr(cache, "__dict__", {}).items():
        if name != "layers" and _holds_tensors(value):
            raise UnsupportedCache(
                f"{type(cache).__name__} keeps {name} beside its layers, which this version does not store"
            )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_holds_tensors, value)))


def _from_layer(index: int, layer: Any) -> _Layer | None:
    name = type(layer).__name__
    for attribute, reason in _REASONS.items():
        value = getattr(layer, attribute, None)
        if value is not None and value is not False:
            raise UnsupportedCache(f"layer {index} ({name}) is {reason}")
    if name == "DummyLayer":
        return None
    if name not in _KNOWN:
        raise UnsupportedCache(f"layer {index} is a {name}; expected one of {', '.join(sorted(_KNOWN))}")
    if not layer.is_initialized or (name in _DYNAMIC and layer.keys.numel() == 0):
        return _Layer(None, None)
    if name in _QUANTIZED:
        return _Layer(*dequantized(layer))
    if name in _SLIDING:
        return _from_sliding(layer)
    if name in _STATIC:
        length = int(layer.get_seq_length())
        return _Layer(layer.keys[:, :, :length], layer.values[:, :, :length])
    return _Layer(layer.keys, layer.values)


def _from_sliding(layer: Any) -> _Layer:
    """The window − 1 tokens before the next one. A static layer that never slides is one of full attention."""
    seen, held = int(layer.get_seq_length()), layer.keys.shape[2]
    if not hasattr(layer, "sliding_window"):  # static: its size is the window, or all that will ever come
        held = min(held, seen)
        keys, values = layer.keys[:, :, :held], layer.values[:, :, :held]
        if layer.is_croppable:
            return _Layer(keys, values)
        window = int(layer.max_cache_len)
    else:
        keys, values, window = layer.keys, layer.values, int(layer.sliding_window)
    count = min(seen, window - 1)
    return _Layer(keys[:, :, held - count :], values[:, :, held - count :], window, seen - count)


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


def _one_row(index: int, layer: _Layer, row: int) -> LayerKV:
    keys, values = layer.keys, layer.values
    if values is None and isinstance(keys, Tensor):  # one latent stands for both
        values = keys[..., :0]
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
    return LayerKV(k, v, window=layer.window, first=layer.first)


def give_cache(
    layers: Mapping[int, LayerKV],
    geometry: Geometry,
    *,
    length: int,
    dtype: torch.dtype | None = None,
    device: Device | Mapping[int, Device] | None = None,
) -> Cache:
    """A DynamicCache with `layers` at their indexes, the others empty, that stands for `length` tokens.

    A layer of full attention that holds fewer reports `length` all the same, so that `generate` and position ids go
    on there. Raises MissingExtra, InvalidInput when a number does not fit `dtype`.
    """
    try:
        from transformers import DynamicCache
        from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

        from .selected import SelectedLayer
    except ImportError as error:
        raise MissingExtra("a transformers cache needs the extra: pip install 'kvcellar[hf]'") from error
    cache = DynamicCache()
    for index, kind in enumerate(geometry.layers):
        if kind.kind == NONE:
            cache.layers.append(DummyLayer())
            continue
        layer = DynamicSlidingWindowLayer(kind.window) if kind.kind == SLIDING else DynamicLayer()
        if index in layers:
            keys, values = place_layer(index, layers[index], dtype, device)
            if kind.kind == FULL and keys.shape[2] != length:
                layer = SelectedLayer(length)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if kind.kind == SLIDING:
                layer.cumulative_length = length
        cache.layers.append(layer)
    return cache


def fill_cache(
    target: Any,
    layers: Mapping[int, LayerKV],
    *,
    tokens: int,
    dtype: torch.dtype | None = None,
    device: Device | Mapping[int, Device] | None = None,
) -> Any:
    """Put `layers`, which stand for `tokens` tokens, into an empty transformers cache through its own `update`.

    Raises InvalidInput when `target` is not empty, has no room, or would have to be told of tokens that are not held;
    it is empty again after an error.
    """
    if not hasattr(target, "update") or not hasattr(target, "get_seq_length"):
        raise InvalidInput(f"into is a {type(target).__name__}; expected a transformers cache")
    if int(target.get_seq_length()):
        raise InvalidInput(f"into holds {int(target.get_seq_length())} tokens already; expected an empty cache")
    placed = {index: place_layer(index, kv, dtype, device) for index, kv in layers.items() if not kv.empty}
    own = getattr(target, "layers", [])
    for index, (keys, _) in placed.items():
        sliding = index < len(own) and bool(getattr(own[index], "is_sliding", False))
        room = target.get_max_length(index) if index < len(own) else -1
        if not sliding and 0 <= room < tokens:
            raise InvalidInput(f"into has room for {room} tokens, {tokens} are to be restored")
        if sliding and layers[index].window not in (0, room) and tokens >= min(room, layers[index].window):
            raise InvalidInput(f"layer {index} slides over {layers[index].window} tokens, that of into over {room}")
        if keys.shape[2] != tokens and not (sliding and layers[index].window):
            raise InvalidInput(f"layer {index}: {keys.shape[2]} of {tokens} tokens cannot go into another cache")
    try:
        for index, (keys, values) in placed.items():
            _fill_layer(target, index, keys, values, tokens)
    except BaseException:
        target.reset()
        raise
    return target


def _fill_layer(target: Any, index: int, keys: Tensor, values: Tensor, tokens: int) -> None:
    """Give a layer the last of `tokens` tokens, and say how many there were."""
    layer = target.layers[index] if index < len(target.layers) else None
    if keys.shape[2] == tokens or layer is None:
        target.update(keys, values, index)
    elif hasattr(layer, "cumulative_length_int"):  # a full static window holds one token more, which goes next
        target.update(*(torch.cat([x[:, :, :1], x], dim=2) for x in (keys, values)), index)
        layer.cumulative_length_int = tokens
    else:
        target.update(keys, values, index)
        layer.cumulative_length = tokens


def place_layer(
    index: int, kv: LayerKV, dtype: torch.dtype | None, device: Device | Mapping[int, Device] | None
) -> tuple[Tensor, Tensor]:
    """Keys and values (1, H, T, D) in the dtype and on the device they are wanted."""
    where = device.get(index) if isinstance(device, Mapping) else device
    keys, values = (_converted(x, dtype, where, f"layer {index}")[None] for x in (kv.keys, kv.values))
    return keys, values


def _converted(x: Tensor, dtype: torch.dtype | None, device: torch.device | str | None, where: str) -> Tensor:
    if dtype is not None and dtype != x.dtype:
        converted = x.to(dtype)
        if not torch.equal(converted.isfinite(), x.isfinite()):
            raise InvalidInput(
                f"{where}: {x[x.isfinite()].abs().max().item():g} does not fit {dtype}; stored as {x.dtype}"
            )
        x = converted
    try:
        return x.to(device) if device is not None else x
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError) as error:  # torch's words for a device that is unknown or not there
        raise InvalidInput(f"{where} cannot be put on device {device!r}: {error}") from error


def dtype_of(name: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name or itself. Raises InvalidInput for one no cache can have."""
    if name is None:
        return None
    short = str(name).removeprefix("torch.")
    if short not in DTYPES:
        raise InvalidInput(f"dtype {name!r}; expected one of {', '.join(DTYPES)}")
    return torch_dtype(short)
