"""Several restored sequences as the rows of one batch: pads in front, a mask that hides them, each row's positions.

Left padding is what transformers' `generate` works with. The pads are zeros that the mask hides, so every row says what
it says alone. Sliding layers join too, because the windows of all rows end together. A rope whose frequencies depend
on the length (dynamic, longrope) takes the longest row's for all.

Tried on: CPU, transformers 5.24, attention eager and sdpa.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..cache import Restored
from ..errors import InvalidInput, MissingExtra, UnsupportedCache
from .inputs import token_ids

if TYPE_CHECKING:
    from transformers import Cache

_FULL, _SLIDING, _NONE = "DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"


class Batch(NamedTuple):
    """Rows that hold T tokens at most: a DynamicCache and its mask, int64 (B, T), 0 for pads."""

    cache: Cache
    attention_mask: Tensor

    def forward_inputs(self, new: Any) -> dict[str, Any]:
        """What a model's forward takes to read `new` next: ids, (B, N), as many for each row.

        Gives input_ids (B, N), attention_mask (B, T + N), position_ids (B, N) and the cache. Raises InvalidInput.
        """
        rows = self._ids(new, "new")
        if len({len(row) for row in rows}) != 1 or not len(rows[0]):
            raise InvalidInput(f"new rows of {[len(row) for row in rows]} tokens; expected as many for each, 1 or more")
        mask = self.attention_mask
        ids = torch.stack(rows).to(mask.device)
        positions = mask.sum(dim=1, keepdim=True) + torch.arange(ids.shape[1], device=mask.device)
        grown = torch.cat([mask, torch.ones_like(ids)], dim=1)
        return {"input_ids": ids, "attention_mask": grown, "position_ids": positions, "cache": self.cache}

    def generate_inputs(self, prompts: Any) -> dict[str, Any]:
        """What `model.generate` takes to go on with `prompts`: each row's ids, those the cache holds and then its own.

        Gives input_ids and attention_mask, (B, T + N) for N new tokens at most, and the cache. Rows with fewer new
        tokens get pads between held and new ones. Raises InvalidInput for a prompt that adds nothing, and for new
        tokens of unequal number where layers slide: their windows would count the pads.
        """
        rows, held = self._ids(prompts, "prompts"), self.attention_mask.sum(dim=1).tolist()
        new = [len(row) - count for row, count in zip(rows, held, strict=True)]
        if min(new) < 1:
            raise InvalidInput(f"prompts of {[len(row) for row in rows]} tokens, rows that hold {held}; expected more")
        if len(set(new)) > 1 and any(self.cache.is_sliding):
            raise InvalidInput(f"prompts with {new} new tokens; where layers slide, expected as many for each row")
        mask = torch.zeros(len(rows), max(new), dtype=torch.int64)
        ids = torch.zeros(len(rows), self.attention_mask.shape[1] + max(new), dtype=torch.int64)
        for index, (row, count, added) in enumerate(zip(rows, held, new, strict=True)):
            mask[index, max(new) - added :] = 1
            ids[index, self.attention_mask.shape[1] - count : self.attention_mask.shape[1]] = row[:count]
            ids[index, ids.shape[1] - added :] = row[count:]
        where = self.attention_mask.device
        grown = torch.cat([self.attention_mask, mask.to(where)], dim=1)
        return {"input_ids": ids.to(where), "attention_mask": grown, "cache": self.cache}

    def _ids(self, given: Any, what: str) -> list[Tensor]:
        rows = [torch.from_numpy(token_ids(row, what=what)) for row in given]
        if len(rows) != len(self.attention_mask):
            raise InvalidInput(f"{what} for {len(rows)} rows; the batch has {len(self.attention_mask)}")
        return rows


def batch(rows: Sequence[Restored | Any]) -> Batch:
    """One cache of all `rows`, each as `restore` gave it or a DynamicCache of its own, padded on the left.

    Their tensors are copied. A row of no token is all pads. Raises InvalidInput for rows whose layers differ in kind,
    shape, dtype, window or device, and for one that goes on at another position than behind its last token;
    UnsupportedCache for layers of other kinds, and for ones left out or restored at selected positions; MissingExtra.
    """
    try:
        from transformers import DynamicCache
        from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer
    except ImportError as error:
        raise MissingExtra("a transformers cache needs the extra: pip install 'kvcellar[hf]'") from error
    caches = [_cache_of(index, row) for index, row in enumerate(rows)]
    lengths = [_length(index, cache) for index, cache in enumerate(caches)]
    if not any(lengths):
        raise InvalidInput("no row holds a token: there is nothing to join")
    joined, tokens = DynamicCache(), max(lengths)
    first = lengths.index(tokens)
    for index, like in enumerate(caches[first].layers):
        layers = [_layer(row, index, cache, caches[first]) for row, cache in enumerate(caches)]
        name = type(like).__name__
        if name == _NONE:
            joined.layers.append(DummyLayer())
            continue
        layer = DynamicSlidingWindowLayer(like.sliding_window) if name == _SLIDING else DynamicLayer()
        slots = min(tokens, like.sliding_window - 1) if name == _SLIDING else tokens
        keys, values = (torch.cat([_padded(each, side, like, slots) for each in layers]) for side in ("keys", "values"))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if name == _SLIDING:
            layer.cumulative_length = tokens
        joined.layers.append(layer)
    counts = [count for cache, count in zip(caches, lengths, strict=True) for _ in range(_rows(cache))]
    held = torch.tensor(counts, device=_device(joined))[:, None]
    mask = torch.arange(tokens, device=held.device)[None] >= tokens - held
    return Batch(joined, mask.to(torch.int64))


def _cache_of(index: int, row: Any) -> Any:
    if isinstance(row, Restored):
        if row.next_position != row.matched:
            raise InvalidInput(
                f"row {index} holds {row.matched} tokens and goes on at position {row.next_position}; "
                "in a batch, positions are counted from the mask"
            )
        row = row.cache
    if not getattr(row, "layers", None):
        raise InvalidInput(f"row {index} is a {type(row).__name__}; expected what restore gives, or a DynamicCache")
    return row


def _length(row: int, cache: Any) -> int:
    """Tokens of a cache. Raises UnsupportedCache for layers of another kind, or of another length."""
    lengths = {}
    for index, layer in enumerate(cache.layers):
        name = type(layer).__name__
        if name not in (_FULL, _SLIDING, _NONE):
            raise UnsupportedCache(f"row {row}, layer {index} is a {name}; expected a DynamicCache restored whole")
        if name != _NONE:
            lengths[index] = int(layer.get_seq_length())
    if len(set(lengths.values())) > 1:
        raise UnsupportedCache(
            f"row {row}: layers hold {sorted(set(lengths.values()))} tokens; expected all of one length"
        )
    return max(lengths.values(), default=0)


def _layer(row: int, index: int, cache: Any, like: Any) -> Any:
    """A row's layer, or None where the row holds no token. Raises InvalidInput when it is not like the other's."""
    if len(cache.layers) != len(like.layers):
        raise InvalidInput(f"row {row} has {len(cache.layers)} layers, others {len(like.layers)}")
    found, expected = _shape(cache.layers[index]), _shape(like.layers[index])
    if found is not None and found != expected:
        raise InvalidInput(f"row {row}, layer {index} is {found}; expected {expected}, as in other rows")
    return cache.layers[index] if found is not None else None


def _shape(layer: Any) -> str | None:
    """What has to agree between rows, in words; None for a layer of no token."""
    name = type(layer).__name__
    if name == _NONE:
        return name
    if not layer.is_initialized:
        return None
    k, v = layer.keys, layer.values
    window = f", window {layer.sliding_window}" if name == _SLIDING else ""
    return f"{name} of {k.shape[1]} x {k.shape[3]} {k.dtype} and {v.shape[1]} x {v.shape[3]} on {k.device}{window}"


def _padded(layer: Any, side: str, like: Any, slots: int) -> Tensor:
    """The last `slots` keys or values of a row, (B, H, slots, D), with zeros in front where it holds fewer."""
    held: Tensor = getattr(like, side)[:1, :, :0] if layer is None else getattr(layer, side)
    pads = held.new_zeros(held.shape[0], held.shape[1], max(0, slots - held.shape[2]), held.shape[3])
    return torch.cat([pads, held[:, :, max(0, held.shape[2] - slots) :]], dim=2)


def _rows(cache: Any) -> int:
    sizes = [layer.keys.shape[0] for layer in cache.layers if layer.keys is not None]
    return sizes[0] if sizes else 1


def _device(cache: Any) -> torch.device:
    device: torch.device = next(layer.keys.device for layer in cache.layers if layer.keys is not None)
    return device
