"""What a peer gives back for one cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Coded:
    """`cache` as it comes back, the bytes it took, and the seconds of both ways.

    A peer that runs the model itself gives `logits` (n − 1, V) of the continuation, and a cache only where the kept
    tokens can be read without it. `restore_s` is None where saving and restoring are one step, `payload_nbytes` where
    all bytes grow with the tokens, `payload_tokens` where it codes them all. `kept` is the fraction of (head, token)
    pairs that is left.
    """

    cache: Any
    nbytes: int
    save_s: float
    restore_s: float | None
    payload_nbytes: int | None = None
    payload_tokens: int | None = None
    profile_nbytes: int = 0
    kept: float = 1.0
    logits: Tensor | None = None
    note: str = ""
