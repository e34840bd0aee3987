"""What callers hand in, checked and brought into one form: token ids, positions, identities."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from ..cache import KVCache
from ..errors import InvalidInput, TokensMismatch, UnsupportedCache
from ..identity import Identity
from ..language.cells import checked_log2_probs
from .fingerprint import identity_of_model
from .transformers import take_cache

MAX_TOKEN_ID = (1 << 32) - 1


def token_ids(tokens: Any, row: int = 0, what: str = "tokens") -> np.ndarray:
    """Token ids as int64 (T,) from a list, array or tensor, (T,) or (B, T). Raises InvalidInput."""
    if isinstance(tokens, (str, bytes)):
        raise InvalidInput(f"{what} is text; expected token ids (run the tokenizer first)")
    try:
        ids = np.asarray(tokens.detach().cpu() if isinstance(tokens, Tensor) else tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"{what} cannot be read as integers: {error}") from error
    if ids.ndim == 2 and 0 <= row < len(ids):
        ids = ids[row]
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidInput(f"{what} of shape {ids.shape} and dtype {ids.dtype}; expected integer ids (T,) or (B, T)")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID):
        raise InvalidInput(f"{what} from {ids.min()} to {ids.max()}; a token id lies in 0…{MAX_TOKEN_ID}")
    return ids.astype(np.int64)


def told_log2_probs(log2_probs: Any, tokens: int) -> np.ndarray:
    """log2 P float32 (T,) of each of so many tokens, finite and at most 0, NaN where unknown. Raises InvalidInput."""
    if isinstance(log2_probs, Tensor):
        log2_probs = log2_probs.detach().float().cpu().numpy()
    return checked_log2_probs(log2_probs, tokens)


def take_row(cache: Any, tokens: Any, row: int, attention_mask: Any, positions: Any) -> tuple[KVCache, np.ndarray, int]:
    """The real tokens of one row of a cache, their ids, and the position of the first.

    `tokens` may hold the ids of all slots or of the real tokens alone. Raises TokensMismatch, and InvalidInput for a
    mask or positions with gaps.
    """
    kv, ids = take_cache(cache, row), token_ids(tokens, row)
    start, stop = 0, len(kv)
    if attention_mask is not None:
        start, stop = _real_slots(token_ids(attention_mask, row, "attention_mask"), len(kv))
    if len(ids) == len(kv):
        ids = ids[start:stop]
    if len(ids) != stop - start:
        raise TokensMismatch(
            f"the cache holds {stop - start} tokens, {len(ids)} token ids were given. "
            + ("After generate() the last token is not in the cache yet. " if len(ids) == len(kv) + 1 else "")
            + ("For a row with pads give attention_mask=." if len(ids) < len(kv) else "")
        )
    first = 0
    if positions is not None:
        given = token_ids(positions, row, "positions")
        given = given[start:stop] if len(given) == len(kv) else given
        if len(given) != len(ids) or (len(given) and not np.array_equal(given, given[0] + np.arange(len(given)))):
            raise InvalidInput(f"positions {given[:8]}…; expected one for each of {len(ids)} tokens, one by one")
        first = int(given[0]) if len(given) else 0
    if first and any(layer.window for layer in kv.layers):
        raise UnsupportedCache(f"sliding layers with positions from {first} on cannot be stored; expected from 0")
    if (start, stop) != (0, len(kv)):
        kv = kv.tokens(start, stop)
        for index, layer in enumerate(kv.layers):
            if layer.window and layer.first + layer.slots < len(kv):
                raise UnsupportedCache(f"layer {index}: pads behind the row pushed its last tokens out of the window")
    return kv, ids, first


def take_more(cache: Any, tokens: Any, row: int, start: Any, stored: int) -> tuple[KVCache, np.ndarray]:
    """One row of a cache that goes on from token `start` of a sequence with so many `stored` tokens, and its ids.

    Raises InvalidInput, TokensMismatch, UnsupportedCache.
    """
    kv, ids = take_cache(cache, row), token_ids(tokens, row)
    if len(ids) != len(kv):
        raise TokensMismatch(f"the cache holds {len(kv)} tokens, {len(ids)} token ids were given")
    if isinstance(start, bool) or not isinstance(start, (int, np.integer)) or not 0 <= start <= stored:
        raise InvalidInput(f"tokens from {start!r} on; the archive holds {stored}: start lies in 0…that")
    return kv, ids


def _real_slots(mask: np.ndarray, slots: int) -> tuple[int, int]:
    """Where the ones of a mask (T,) begin and end. Raises InvalidInput unless they are one run."""
    ones = np.flatnonzero(mask)
    if len(mask) != slots or not len(ones) or len(ones) != ones[-1] - ones[0] + 1:
        raise InvalidInput(
            f"attention_mask of {len(mask)} with {len(ones)} ones; expected one run of ones over {slots} slots"
        )
    return int(ones[0]), int(ones[-1]) + 1


def resolve_identity(model: Any, identity: Identity | str | None) -> Identity | None:
    """The identity that was given, in whichever form. Raises InvalidInput when both were."""
    if model is not None and identity is not None:
        raise InvalidInput("give model or identity, not both")
    if model is not None:
        return identity_of_model(model)
    return None if identity is None else Identity.of(identity)


def spans_of(positions: int | slice | range | Iterable[int] | None, tokens: int) -> list[range]:
    """Ascending runs of the chosen token indexes. Raises InvalidInput for any outside 0…tokens−1."""
    if positions is None:
        positions = tokens
    if isinstance(positions, (int, np.integer)) and not isinstance(positions, bool):
        if not 0 <= positions <= tokens:
            raise InvalidInput(f"the first {positions} tokens of an archive of {tokens}")
        return [range(int(positions))] if positions else []
    if isinstance(positions, slice):
        positions = range(tokens)[positions]
    if not isinstance(positions, Iterable):
        raise InvalidInput(f"positions {positions!r}; expected a number of tokens, a slice, or token indexes")
    chosen = np.unique(token_ids(positions if isinstance(positions, Tensor) else list(positions), what="positions"))
    if len(chosen) and chosen[-1] >= tokens:
        raise InvalidInput(f"position {chosen[-1]} of an archive of {tokens} tokens")
    runs = np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1) if len(chosen) else []
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs]


def layers_of(layers: Iterable[int] | None, count: int) -> list[int]:
    """The chosen of so many layers, ascending; all by default. Raises InvalidInput for any outside 0…count−1."""
    try:
        chosen = list(range(count)) if layers is None else sorted({operator.index(layer) for layer in layers})
    except TypeError as error:
        raise InvalidInput(f"layers {layers!r}; expected layer indexes: {error}") from error
    if any(not 0 <= layer < count for layer in chosen):
        raise InvalidInput(f"layers {chosen} of an archive with layers 0…{count - 1}")
    return chosen
