"""A KV cache as kvcellar holds it in memory: per layer keys (H, T, Dk) and values (H, T, Dv) of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .errors import InvalidInput, UnsupportedCache
from .geometry import DTYPES, Geometry, LayerGeometry, SideGeometry

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
    """

    keys: Float[Tensor, "heads slots key_width"]
    values: Float[Tensor, "heads slots value_width"]
    positions: Int[Tensor, "*heads slots"] | None = None
    log_weights: Float[Tensor, "heads slots"] | None = None
    length: int | None = None

    @property
    def slots(self) -> int:
        """Tokens physically held, T."""
        return self.keys.shape[1]

    @property
    def dense(self) -> bool:
        """One slot per token, in order from position 0, unweighted."""
        return self.positions is None and self.log_weights is None and self.length in (None, self.slots)


@dataclass(frozen=True)
class KVCache:
    """All layers of one sequence. Raises InvalidInput or UnsupportedCache when the layers do not fit together."""

    layers: tuple[LayerKV, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise InvalidInput("the cache has no layers: nothing to save")
        for index, layer in enumerate(self.layers):
            if layer.values.shape[1] != layer.slots or layer.slots != self.layers[0].slots:
                raise InvalidInput(
                    f"layer {index} holds {layer.slots} keys and {layer.values.shape[1]} values; "
                    f"expected {self.layers[0].slots} of each, as in layer 0"
                )

    def __len__(self) -> int:
        """Tokens held."""
        return self.layers[0].slots

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            tuple(
                LayerGeometry(side_geometry(kv.keys, f"layer {i} keys"), side_geometry(kv.values, f"layer {i} values"))
                for i, kv in enumerate(self.layers)
            )
        )

    def tokens(self, start: int, stop: int) -> KVCache:
        """Views of tokens `start`…`stop` of every layer."""
        return KVCache(tuple(LayerKV(kv.keys[:, start:stop], kv.values[:, start:stop]) for kv in self.layers))


class Restored(NamedTuple):
    """A transformers cache, and how many tokens of the prompt (or of the archive) it covers."""

    cache: object
    matched: int


def allocate(geometry: Geometry, tokens: int, layers: range | list[int]) -> dict[int, LayerKV]:
    """Uninitialised layers for `tokens` tokens, by layer index."""
    out = {}
    for index in layers:
        sides = geometry.layers[index].key, geometry.layers[index].value
        keys, values = (torch.empty(s.heads, tokens, s.width, dtype=torch_dtype(s.dtype)) for s in sides)
        out[index] = LayerKV(keys, values)
    return out
