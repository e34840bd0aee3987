"""The first decoder layers of a transformers model run again over stored token ids.

Layers 0 … n−1 run whole; of layer n only what its attention caches is computed. A forward of the model's own decoder is
ended there by an exception of ours, raised where layer n hands its keys and values to the cache, so masks, positions
and rotations are the model's. What enters layer n is seen by a hook that goes with the call. Nothing of the model is
changed: another thread may use it meanwhile.

The tokens are read in chunks of `CHUNK` from the first on, before encoding and before decoding alike. On one machine
and thread count both give the same numbers, but nothing depends on that: another kernel, batch or thread count changes
the last bits of a state, those of a prediction with it, and so of a restored value, by far less than a quantizer's step
(exactness rule D3); a model in bfloat16 where the encoder's was in float32 changes the third digit. No token or layer
inherits another's difference: the recursion over tokens is the model's own, in its own numbers.

Tried on: CPU, transformers 5.24, float32 and bfloat16; Llama, Qwen3 and Mistral without a sliding window.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cache import LayerKV, torch_dtype
from ..errors import InvalidInput, MissingExtra, UnsupportedCache
from ..geometry import Geometry
from ..replayed import Replayed

CHUNK = 1024


class _Enough(Exception):
    """Layer n has computed what it caches."""


class Replayer:
    """Of `model`, its first `layers` decoder layers, over the ids of a sequence whose first token is at `position`.

    The last answer is kept, and serves every prefix of its ids. Raises UnsupportedCache for a model whose decoder
    layers do not lie in one list, one for each of `geometry`.
    """

    def __init__(self, model: Any, layers: int, geometry: Geometry, position: int = 0):
        self.decoder = decoder_of(model, len(geometry))
        if not 1 <= layers < len(geometry):
            raise InvalidInput(f"a replay of {layers} layers; the model has {len(geometry)}, and the last needs none")
        self.layers, self.geometry, self.position = layers, geometry, position
        self._said: tuple[np.ndarray, Replayed] | None = None

    def __call__(self, ids: np.ndarray) -> Replayed:
        """Raises InvalidInput for ids outside the vocabulary."""
        said = self._said  # another thread may replace it meanwhile
        if said is not None and np.array_equal(said[0][: len(ids)], ids):
            return said[1].take(slice(len(ids)))
        words = self.decoder.get_input_embeddings().weight.shape[0]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < words:
            raise InvalidInput(f"token ids {int(ids.min())}…{int(ids.max())}; the model knows 0…{words - 1}")
        own = np.array(ids, np.int64)
        replayed = self._run(torch.from_numpy(own))
        self._said = own, replayed
        return replayed

    def _run(self, ids: Tensor) -> Replayed:
        cache, states = _cache_to(self.layers), []
        me, where = threading.get_ident(), next(self.decoder.parameters()).device

        def seen(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if threading.get_ident() == me:
                states.append((arguments[0] if arguments else named["hidden_states"])[0].float().cpu())

        hook = self.decoder.layers[self.layers].register_forward_pre_hook(seen, with_kwargs=True)
        try:
            with torch.inference_mode():
                for start in range(0, len(ids), CHUNK):
                    chunk = ids[start : start + CHUNK].to(where)[None]
                    positions = self.position + torch.arange(start, start + chunk.shape[1], device=where)[None]
                    with contextlib.suppress(_Enough):
                        self.decoder(chunk, cache=cache, use_cache=True, position_ids=positions)
        finally:
            hook.remove()
        held = [(layer.keys, layer.values) for layer in cache.layers]
        if sum(map(len, states)) != len(ids) or (len(ids) and len(held) != self.layers + 1):
            raise UnsupportedCache(
                f"{type(self.decoder).__name__}: its layer {self.layers} was not reached as a Llama's is: its recipe "
                "cannot replay it"
            )
        return self._replayed(torch.cat(states) if states else torch.empty(0, self._width), held)

    @property
    def _width(self) -> int:
        width: int = self.decoder.get_input_embeddings().weight.shape[1]
        return width

    def _replayed(self, hidden: Tensor, held: list[tuple[Tensor, Tensor]]) -> Replayed:
        known = []
        for index, layer in enumerate(self.geometry.layers[: self.layers + 1]):
            sides = []
            for side, x in zip((layer.key, layer.value), held[index] if held else (None, None), strict=True):
                like = torch.empty(side.heads, 0, side.width) if x is None else x[0]
                if (like.shape[0], like.shape[2]) != (side.heads, side.width):
                    raise UnsupportedCache(
                        f"layer {index}: the model computes {like.shape[0]} heads of {like.shape[2]} numbers; stored "
                        f"are {side.heads} of {side.width}"
                    )
                sides.append(like.cpu().to(torch_dtype(side.dtype)).contiguous())
            keys, values = sides
            known.append(LayerKV(keys, values))
        return Replayed(hidden, tuple(known))


def decoder_of(model: Any, layers: int) -> Any:
    """The part of a model that has its decoder layers in a list `layers`, as Llama's has. Raises UnsupportedCache."""
    getter = getattr(model, "get_decoder", None)
    for part in (getter() if callable(getter) else None, getattr(model, "model", None), model):
        found = getattr(part, "layers", None)
        if isinstance(found, torch.nn.ModuleList) and len(found) == layers:
            if getattr(getattr(part, "config", None), "is_encoder_decoder", False):
                break
            return part
    raise UnsupportedCache(
        f"{type(model).__name__} cannot be replayed in part: expected a decoder whose {layers} layers lie in one list, "
        "model.model.layers"
    )


def _cache_to(last: int) -> Any:
    """A transformers cache that ends a forward once layer `last` has handed over its keys and values."""
    try:
        from transformers import DynamicCache
    except ImportError as error:
        raise MissingExtra("a replay needs the extra: pip install 'kvcellar[hf]'") from error

    class _Cache(DynamicCache):  # type: ignore[misc]
        def update(self, keys: Tensor, values: Tensor, layer_idx: int, *rest: Any, **named: Any) -> Any:
            both = super().update(keys, values, layer_idx, *rest, **named)
            if layer_idx == last:
                raise _Enough
            return both

    return _Cache()
