"""A KV cache as kvcellar holds it in memory: per layer keys (H, T, Dk) and values (H, T, Dv) of one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .errors import InvalidInput, UnsupportedCache
from .geometry import DTYPES, FULL, NO_LAYER, SLIDING, Geometry, LayerGeometry, SideGeometry

_NAMES = {getattr(torch, name): name for name in DTYPES}


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def side_geometry(x: Tensor, where: str) -> SideGeometry:
    """Heads, width and dtype of keys or values (H, T, D). Raises UnsupportedCache naming `where`."""
    if x.dtype not in _NAMES:
        raise UnsupportedCache(f"{where}: dtype {x.dtype} cannot be stored; expected one of {', '.join(DTYPES)}")
    return SideGeometry(heads=x.shape[0], width=x.shape[2], dtype=_NAMES[x.dtype])


@dataclass(frozen=True)
class LayerKV:
    """One layer's cache.

    `keys` (H, T, Dk) and `values` (H, T, Dv), keys as the model cached them (rotated, if the model rotates first).
    `positions` (T,) when they are not 0…T−1, and (H, T) where heads kept different tokens; `log_weights` (H, T) added
    to the attention logits of merged tokens; `length` the number of tokens the layer stands for, when it is not T.
    A sliding layer has a `window` and holds tokens `first`…`first` + T − 1 of the cache's.
    """

    keys: Float[Tensor, "key_heads slots key_width"]
    values: Float[Tensor, "value_heads slots value_width"]
    positions: Int[Tensor, "*heads slots"] | None = None
    log_weights: Float[Tensor, "key_heads slots"] | None = None
    length: int | None = None
    window: int = 0
    first: int = 0

    @property
    def empty(self) -> bool:
        """Whether the layer has no keys and values of its own."""
        return self.keys.shape[2] == self.values.shape[2] == 0

    @property
    def slots(self) -> int:
        """Tokens physically held, T."""
        return self.keys.shape[1]

    @property
    def dense(self) -> bool:
        """One slot per token held, in order, unweighted."""
        whole = self.window or self.length in (None, self.slots)
        return self.positions is None and self.log_weights is None and bool(whole)

    @property
    def reduced(self) -> bool:
        """Whether slots with positions and weights stand for `length` tokens."""
        return self.log_weights is not None and self.positions is not None and self.length is not None

    def tokens(self, start: int, stop: int) -> LayerKV:
        """Views of what is held of tokens `start`…`stop`; `first` then counts from `start`."""
        begin = min(max(start, self.first), self.first + self.slots)
        end = max(begin, min(stop, self.first + self.slots))
        cut = slice(begin - self.first, end - self.first)
        first = begin - start if self.window and end > begin else 0
        return LayerKV(self.keys[:, cut], self.values[:, cut], window=self.window, first=first)


@dataclass(frozen=True)
class KVCache:
    """All layers of one sequence of `length` tokens (default: those of the layer that reaches furthest).

    Raises InvalidInput or UnsupportedCache when the layers do not fit together.
    """

    layers: tuple[LayerKV, ...]
    length: int = -1

    def __post_init__(self) -> None:
        if not self.layers:
            raise InvalidInput("the cache has no layers: nothing to save")
        if self.length < 0:
            lengths = (kv.length if kv.length and kv.reduced else kv.first + kv.slots for kv in self.layers)
            object.__setattr__(self, "length", max(lengths))
        for index, layer in enumerate(self.layers):
            if layer.reduced:
                self._require_reduced(index, layer)
                continue
            expected = len(self) if not layer.empty and not layer.window else layer.slots
            if layer.values.shape[1] != layer.slots or layer.slots != expected:
                raise InvalidInput(
                    f"layer {index} holds {layer.slots} keys and {layer.values.shape[1]} values; "
                    f"expected {expected} of each, as in layer {self._longest()}"
                )
            if layer.first + layer.slots > len(self) or layer.first < 0:
                raise InvalidInput(f"layer {index} holds tokens from {layer.first} on, beyond the cache's {len(self)}")

    def _require_reduced(self, index: int, layer: LayerKV) -> None:
        shapes = [
            tuple(x.shape[:2]) for x in (layer.keys, layer.values, layer.positions, layer.log_weights) if x is not None
        ]
        if layer.length != len(self) or len(set(shapes)) > 1:
            raise InvalidInput(
                f"layer {index}: keys, values, positions and log-weights of (heads, slots) {shapes}, standing for "
                f"{layer.length} tokens; expected four times the same, and {len(self)} tokens"
            )

    @property
    def reduced(self) -> bool:
        """Whether slots stand for more than one token each; such a cache cannot be cut."""
        return any(layer.reduced for layer in self.layers)

    def _longest(self) -> int:
        return max(range(len(self.layers)), key=lambda i: self.layers[i].first + self.layers[i].slots)

    def __len__(self) -> int:
        """Tokens the cache stands for; a sliding layer holds fewer."""
        return self.length

    @property
    def geometry(self) -> Geometry:
        return Geometry(tuple(_layer_geometry(i, kv) for i, kv in enumerate(self.layers)))

    def tokens(self, start: int, stop: int) -> KVCache:
        """Views of what every layer holds of tokens `start`…`stop`."""
        if self.reduced:
            if (start, stop) == (0, len(self)):
                return self
            raise UnsupportedCache(f"tokens {start}…{stop} of a reduced cache: its slots stand for all {len(self)}")
        return KVCache(tuple(kv.tokens(start, stop) for kv in self.layers), stop - start)

    def followed_by(self, other: KVCache) -> KVCache:
        """The tokens of this and then of `other`; of a sliding layer what `other` holds, and what joins on to it."""
        pairs = zip(self.layers, other.layers, strict=True)
        return KVCache(tuple(_joined(a, b, len(self)) for a, b in pairs), len(self) + len(other))


def _joined(a: LayerKV, b: LayerKV, tokens: int) -> LayerKV:
    """Layer `a`, of a cache of `tokens` tokens, and then `b`."""
    if b.window and not b.slots:
        return a
    if b.window and a.first + a.slots != tokens + b.first:
        return replace(b, first=tokens + b.first)
    keys, values = torch.cat([a.keys, b.keys], dim=1), torch.cat([a.values, b.values], dim=1)
    return LayerKV(keys, values, window=b.window, first=a.first)


def _layer_geometry(index: int, kv: LayerKV) -> LayerGeometry:
    if kv.empty:
        return NO_LAYER
    sides = side_geometry(kv.keys, f"layer {index} keys"), side_geometry(kv.values, f"layer {index} values")
    return LayerGeometry(*sides, SLIDING if kv.window else FULL, kv.window)


def no_layer() -> LayerKV:
    """A layer without keys and values of its own."""
    nothing = torch.empty(1, 0, 0)
    return LayerKV(nothing, nothing)


class Restored(NamedTuple):
    """A transformers cache, how many tokens of the prompt (or of the archive) it covers, the position that follows.

    `next_position` is what position ids go on with. It equals the cache's own length unless the archive was saved with
    another next position, as for models whose images take fewer positions than tokens: then pass position ids.
    """

    cache: object
    matched: int
    next_position: int


def allocate(geometry: Geometry, tokens: Mapping[int, int]) -> dict[int, LayerKV]:
    """Uninitialised layers for so many `tokens` each, by layer index."""
    out = {}
    for index, count in tokens.items():
        layer = geometry.layers[index]
        keys, values = (
            torch.empty(s.heads, count, s.width, dtype=torch_dtype(s.dtype)) for s in (layer.key, layer.value)
        )
        out[index] = LayerKV(keys, values, window=layer.window)
    return out
