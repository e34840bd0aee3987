"""What the model's replay tells of tokens: the first layers' keys and values, and the state that enters the next layer.

A recipe may ask for it (`predict/replay.py`); whoever has the model makes it (`frontends/replayer.py`) from the token
ids alone, the same way before encoding and before decoding, so that nothing of it is stored. The encoder compares the
keys and values it was given with the replayed ones (`require_own`): what a restore will put there must be the cache's.

Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from .cache import LayerKV
from .errors import InvalidInput, ModelMissing, UnsupportedCache

FAR = {torch.float32: 0.02, torch.float16: 0.02, torch.bfloat16: 0.15}
"""Of a token's norm, by the dtype of the stored cache; two ways to compute one cache differ by far less."""


@dataclass(frozen=True)
class Replayed:
    """Of T tokens: `hidden` float32 (T, E), what enters the first layer that is not known, and of the layers before it
    keys and values (H, T, D) as the model cached them, in the dtypes of the stored cache."""

    hidden: Float32[Tensor, "tokens width"]
    layers: tuple[LayerKV, ...]

    def __len__(self) -> int:
        return len(self.hidden)

    def take(self, rows: slice | np.ndarray) -> Replayed:
        """Of some of the tokens."""
        at = rows if isinstance(rows, slice) else torch.from_numpy(np.ascontiguousarray(rows, np.int64))
        return Replayed(self.hidden[at], tuple(LayerKV(kv.keys[:, at], kv.values[:, at]) for kv in self.layers))


Replay = Callable[[np.ndarray], Replayed]
"""Token ids int64 (T,) of a sequence from its first token on to what a replay tells of them."""


def known_layers(known: range, replayed: Replayed | None) -> dict[int, LayerKV]:
    """Keys and values (H, T, D) of the `known` layers, by index. Raises ModelMissing, InvalidInput for others."""
    if known and replayed is None:
        raise ModelMissing(f"layers {known.start}…{known.stop} come from the model's replay, and there is none")
    layers = () if replayed is None else replayed.layers
    if len(layers) != len(known):
        raise InvalidInput(f"a replay of {len(layers)} layers; expected {len(known)}")
    return dict(zip(known, layers, strict=True))


def fill(out: Mapping[int, LayerKV], known: Mapping[int, LayerKV]) -> None:
    """Write what is `known` of the layers in `out`, (H, T, D) by index, there."""
    for index in known.keys() & out.keys():
        out[index].keys.copy_(known[index].keys)
        out[index].values.copy_(known[index].values)


def require_own(given: Sequence[LayerKV], replayed: Replayed) -> None:
    """Raise UnsupportedCache unless the layers that a replay restores are, token by token, what it computes.

    The distance is that of a token's keys, or values, of a layer over their norm; more than `FAR` is
    no rounding.
    """
    for index, (kv, known) in enumerate(zip(given, replayed.layers, strict=False)):
        for side, x, y in (("keys", kv.keys, known.keys), ("values", kv.values, known.values)):
            if x.shape != y.shape:
                raise UnsupportedCache(
                    f"layer {index}: {side} {tuple(x.shape)}; the model's replay computes {tuple(y.shape)}"
                )
            far = _distance(x.float(), y.float())
            most = FAR[x.dtype]
            if not bool((far <= most).all()):
                token = int((~(far <= most)).nonzero()[0])
                raise UnsupportedCache(
                    f"layer {index}: the {side} of token {token} are {float(far[token]):.3g} of their norm away from "
                    f"what the model's replay computes; at most {most}: the cache is not this model's own of these "
                    "tokens, and a restore would not give it back: use another recipe"
                )


def _distance(x: Float32[Tensor, "heads tokens width"], y: Float32[Tensor, "heads tokens width"]) -> Tensor:
    norm = y.square().sum(dim=(0, 2)).sqrt()
    apart = (x - y).square().sum(dim=(0, 2)).sqrt()
    floor = norm.median().clamp(min=torch.finfo(torch.float32).tiny) * 0.1 if len(norm) else norm
    return apart / torch.maximum(norm, floor)
