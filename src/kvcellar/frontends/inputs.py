"""What callers hand in, checked and brought into one form: token ids, positions, identities."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import InvalidInput
from ..identity import Identity
from .fingerprint import identity_of_model

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
