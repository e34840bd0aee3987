"""Bytes per token against the length of the context: what a file has beside its payload is spread over more tokens.

A causal model's cache of the first T tokens is the beginning of its cache of more, so one prefill serves all lengths.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...cache import KVCache
from ...errors import InvalidInput
from ...identity import Identity
from ...profile import Profile
from ...recipe import Recipe
from ..library import save
from .sizes import bytes_by_part, coarse_bytes

LENGTHS = (256, 512, 1024, 2048, 4096, 7680)
CODING = ("payload", "token_ids")


def by_length(
    cache: KVCache,
    ids: Sequence[int],
    recipe: Recipe,
    profile: Profile,
    identity: Identity,
    lengths: Sequence[int],
    log2_probs: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """For each length: bytes per token of the whole `file`, of its `payload` (ids included), and `coarse`, bytes that
    code a coarse token, its id included; None where no token is coarse. `log2_probs` are told as `save` takes them.

    Raises InvalidInput for a longer length than the cache's.
    """
    if max(lengths) > len(cache):
        raise InvalidInput(f"{max(lengths):,} tokens of a cache of {len(cache):,}")
    found = []
    for length in lengths:
        with tempfile.TemporaryDirectory(prefix="kvcellar-rate-") as scratch:
            path, part = Path(scratch) / "context.kvc", cache.tokens(0, length)
            told = None if log2_probs is None else log2_probs[:length]
            save(
                path,
                part,
                tokens=list(ids[:length]),
                identity=identity,
                recipe=recipe,
                profile=profile,
                log2_probs=told,
            )
            sizes, (coarse, tokens) = bytes_by_part(path), coarse_bytes(path, profile)
            row = {"tokens": length, "file": sum(sizes.values()) / length}
            row |= {"payload": sum(sizes[name] for name in CODING) / length}
            found.append({**row, "coarse": coarse / tokens if tokens else None})
    return found


def averaged(measured: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Means over documents, length by length."""
    found = []
    for rows in zip(*measured, strict=True):
        means = {name: _mean([row[name] for row in rows]) for name in ("file", "payload", "coarse")}
        found.append({"tokens": rows[0]["tokens"], "documents": len(rows), **means})
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None
