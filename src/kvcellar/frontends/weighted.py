"""transformers caches whose slots are fewer than their positions and stand for several tokens each.

A slot of weight w answers as w copies of its token would:

    o(q) = softmax(q·k·scale + log w) @ v

and a slot of weight 0 (log w = −inf) is a pad. `log w` reaches the attention function as its `position_bias`, which a
layer puts among the arguments that the model is about to call it with; nothing in transformers is replaced. The slots
lie where the last positions before the next token would (mask offset = positions − slots), so that causality holds by
the ordinary mask, and position ids and `generate` go on from the number of positions.

One mask serves all layers of full attention, so under ``sdpa`` all hold the same number of slots, pads included.
Layers of different lengths need `ragged_attention`, which masks by itself; transformers learns of it when it is asked
for and not before. Other attention functions do not read a bias: they are refused, since the answer would be wrong.

Source: the weights are those of sparse reweighted measures (see `kvcellar.reduce.weighted`); the way in is ours.
Importing this imports transformers. Tried on: CPU, transformers 5.24, float32, float16, bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from ..cache import LayerKV
from ..errors import InvalidInput, UnsupportedCache
from .queries import COLLECTING
from .transformers import Device, place_layer

RAGGED = "kvcellar_ragged"
_READS_BIAS = ("sdpa", RAGGED)
_REASONS = {
    "eager": "its attention ignores the weights without saying so",
    "flex_attention": "it was never tried with weights",
}


class WeightedLayer(DynamicLayer):  # type: ignore[misc]
    """Slots (B, H, S, D) with log-weights float32 (B, H, S), standing for `length` tokens; newer tokens weigh 1.

    `positions` int64 (B, H, S) say where in the sequence the first slots come from; the tokens behind them follow one
    by one and end at `length`. `group` query heads read each KV head.
    """

    is_croppable = False

    def __init__(
        self, keys: Tensor, values: Tensor, log_weights: Tensor, positions: Tensor, length: int, group: int
    ) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.log_weights: Tensor | None = log_weights
        self.positions: Tensor | None = positions
        self.length, self.group = length, group
        self.plain = not bool(log_weights.any())

    @property
    def slots(self) -> int:
        """Slots physically held, pads included."""
        return self.keys.shape[-2] if self.is_initialized else 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, kwargs: dict[str, Any] | None = None, **other: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens of weight 1, and leave the bias of all slots in the attention's `kwargs`."""
        if not self.plain and kwargs is None:
            raise UnsupportedCache(
                "this model's attention does not hand its arguments to the cache, so the weights of a reduced cache "
                "cannot reach it"
            )
        if not self.plain and kwargs and kwargs.get("position_bias") is not None:
            raise UnsupportedCache("the attention has a position bias already; the weights of a reduced cache need it")
        keys, values = super().update(key_states, value_states, *args, **other)
        self.length += key_states.shape[-2]
        if not self.plain and kwargs is not None:
            kwargs["position_bias"] = self.bias()
        return keys, values

    def bias(self) -> Tensor:
        """What is added to the logits, (B, query heads, 1, slots): float32 on the CPU, elsewhere the keys' dtype."""
        if self.log_weights is None:
            raise InvalidInput("this layer has no weights")
        # The kernels of other devices want a bias of the queries' dtype; on the CPU it can be exact.
        dtype = torch.float32 if self.keys.device.type == "cpu" else self.keys.dtype
        newer = self.slots - self.log_weights.shape[2]
        weights = functional.pad(self.log_weights, (0, newer)).to(self.keys.device, dtype)
        return weights.repeat_interleave(self.group, dim=1)[:, :, None]

    def kept(self, row: int = 0) -> LayerKV:
        """One row's slots as they stand, newer tokens included, pads with log-weight −inf. Views where possible."""
        keys, values = self.keys[row], self.values[row]
        if self.log_weights is None or self.positions is None:
            return LayerKV(keys, values)
        weights, positions = self.log_weights[row], self.positions[row]
        newer = torch.arange(self.length - self.slots + weights.shape[1], self.length, device=positions.device)
        positions = torch.cat([positions, newer.expand(len(positions), -1)], dim=1)
        return LayerKV(keys, values, positions, functional.pad(weights, (0, len(newer))), self.length)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots + query_length, self.length - self.slots

    def reset(self) -> None:
        super().reset()
        self.length, self.plain, self.log_weights, self.positions = 0, True, None, None

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise UnsupportedCache("a reduced cache cannot go back: its slots stand for several tokens each")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._rows(lambda x: x[indices.to(x.device) if isinstance(indices, Tensor) else indices])

    def _rows(self, change: Any) -> None:
        """Weights and positions move with the rows of keys and values."""
        if self.log_weights is not None and self.positions is not None:
            self.log_weights, self.positions = change(self.log_weights), change(self.positions)


class WeightedCache(Cache):  # type: ignore[misc]
    """A transformers cache of `WeightedLayer`s, and of sliding layers as they were.

    `reduction` is what made it, a JSON object, or None. Attention masks with zeros are not understood: what they hide
    may be anywhere in the slots.
    """

    def __init__(self, layers: list[Any], config: Any, reduction: Mapping[str, Any] | None = None):
        super().__init__(layers=layers)
        self.config, self.reduction = config, None if reduction is None else dict(reduction)

    @property
    def slots(self) -> int:
        """Slots of the longest layer of full attention, pads included."""
        return max(self._lengths())

    @property
    def ragged(self) -> bool:
        """Whether layers hold different numbers of slots."""
        return len(self._lengths()) > 1

    def _lengths(self) -> set[int]:
        return {layer.slots for layer in self.layers if isinstance(layer, WeightedLayer)}

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightedCache:
        """The copy looks at the same config, whose attention may be switched later."""
        memo[id(self.config)] = self.config
        same = memo[id(self)] = type(self).__new__(type(self))
        same.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return same

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Raises UnsupportedCache when the model's attention function would not apply the weights."""
        self._require_bias(layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def _require_bias(self, layer_idx: int) -> None:
        used = getattr(self.config, "_attn_implementation", None)
        if used not in (*_READS_BIAS, COLLECTING):
            reason = _REASONS.get(str(used), "it does not read a bias of the logits")
            raise UnsupportedCache(
                f"a reduced cache cannot be used with attention {used!r}: {reason}. Expected one of "
                f"{', '.join(_READS_BIAS)}: model.set_attn_implementation('sdpa')"
            )
        # Layers grow one after the other: only before the first of them are their lengths those of one step.
        if layer_idx == 0 and used != RAGGED and self.ragged:
            raise UnsupportedCache(
                f"the layers hold {', '.join(map(str, sorted(self._lengths())))} slots; {used!r} has one mask for all. "
                "Call use_ragged_attention(model), or make the cache without ragged=True"
            )


def weighted_cache(
    layers: Sequence[LayerKV],
    model: Any,
    *,
    length: int,
    ragged: bool = False,
    dtype: torch.dtype | None = None,
    device: Device | Mapping[int, Device] | None = None,
    reduction: Mapping[str, Any] | None = None,
) -> WeightedCache:
    """A cache of `layers` for `model` (or its config), standing for `length` tokens.

    A layer's `positions` and `log_weights` (H, S) go with its slots; without them it holds every token. Unless
    `ragged`, all layers of full attention are padded to the longest. Raises UnsupportedCache for layers without keys
    and for numbers of query heads that are no multiple of the KV heads, InvalidInput for more slots than tokens.
    """
    config = getattr(model, "config", model).get_text_config(decoder=True)
    full = [kv for kv in layers if not kv.window]
    if not full or any(kv.empty for kv in layers):
        raise UnsupportedCache("a cache with layers that have no keys of their own, or only sliding ones, stays whole")
    longest = max(kv.slots for kv in full)
    made: list[Any] = []
    for index, kv in enumerate(layers):
        keys, values = place_layer(index, kv, dtype, device)
        if kv.window:
            layer = DynamicSlidingWindowLayer(kv.window)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values, layer.cumulative_length = keys, values, length
            made.append(layer)
            continue
        made.append(_layer(index, kv, keys, values, length, 0 if ragged else longest, config))
    return WeightedCache(made, config, reduction)


def _layer(
    index: int, kv: LayerKV, keys: Tensor, values: Tensor, length: int, least: int, config: Any
) -> WeightedLayer:
    heads, slots = kv.keys.shape[:2]
    asking = int(config.num_attention_heads)
    if asking % heads:
        raise UnsupportedCache(f"layer {index}: {asking} query heads cannot share {heads} KV heads evenly")
    if slots > length or (kv.log_weights is None and slots != length):
        raise InvalidInput(
            f"layer {index}: {slots} slots for {length} tokens, and no weights to say what they stand for"
        )
    weights = torch.zeros(heads, slots) if kv.log_weights is None else kv.log_weights.float()
    positions = torch.arange(slots) if kv.positions is None else kv.positions
    positions = positions.to(torch.int64).expand(heads, slots)
    if weights.isnan().any() or (weights == float("inf")).any() or (weights.amax(dim=1) == -float("inf")).any():
        raise InvalidInput(f"layer {index}: log-weights that are no number, infinite, or −inf for a whole head")
    pads = max(0, least - slots)
    if pads:
        keys, values = (functional.pad(x, (0, 0, 0, pads)) for x in (keys, values))
        weights = functional.pad(weights, (0, pads), value=-float("inf"))
        positions = functional.pad(positions, (0, pads), value=-1)
    weights, positions = weights.to(keys.device)[None], positions.to(keys.device)[None]
    return WeightedLayer(keys, values, weights, positions, length, asking // heads)


def use_ragged_attention(model: Any) -> None:
    """Let `model` attend by `ragged_attention`; `model.set_attn_implementation("sdpa")` undoes it."""
    AttentionInterface.register(RAGGED, ragged_attention)
    AttentionMaskInterface.register(RAGGED, _no_mask)
    model.set_attn_implementation(RAGGED)


def ragged_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of queries (B, Hq, q, D), the last q of the slots (B, H, S, D), to all slots up to their own.

    The mask is made here from what this layer holds, so that layers may differ in length.
    """
    count, slots = query.shape[2], key.shape[2]
    if attention_mask is not None:
        raise UnsupportedCache(f"{RAGGED} makes its own mask; expected none, got one of {tuple(attention_mask.shape)}")
    mask = None
    if count > 1:
        mask = torch.ones(count, slots, dtype=torch.bool, device=query.device).tril(slots - count)[None, None]
    output: Tensor = sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
    return output, None


def _no_mask(attention_mask: Tensor | None = None, local_size: int | None = None, **sizes: Any) -> None:
    """Stands for mask making under `ragged_attention`. Raises UnsupportedCache for what only a mask could do."""
    if local_size is not None:
        raise UnsupportedCache(f"{RAGGED} has no sliding layers: use attention 'sdpa'")
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedCache(f"{RAGGED} cannot leave tokens out: expected an attention mask of ones")
