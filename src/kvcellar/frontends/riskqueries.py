"""Sample queries for measuring and for benches: a document's own and those of other texts, as later tokens would ask.

Own queries are what the document's tokens ask of its cache, each turned to a position behind the document
(`reduce/later.py`). Queries of other texts are collected where they stand behind a prefix of about the same length and
turned to the same positions. A model whose turns are not known gives its last queries as they were asked.

Importing this imports transformers. Tried on: CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..cache import KVCache
from ..errors import InvalidInput
from ..profile import home
from ..reduce.later import HORIZON, asked_later
from ..rope import Turn
from ..store.local import LocalStore
from .calibration import Cut
from .cli.common import progress
from .cli.models import LocalModel, empty_cache
from .queries import EARLIEST, Queries, collect_queries, own_queries

REREAD = 4096
"""Of a long document only so many last tokens are asked: one pass over all of them would need T² memory."""


@dataclass(frozen=True)
class Asked:
    """Queries of each layer (query heads, q, width) as they were asked, and their positions."""

    layers: dict[int, Tensor]
    positions: Int64[Tensor, " queries"]

    def later(self, turns: Sequence[Turn] | None, start: int, count: int, *, seed: int = 0) -> dict[int, Tensor]:
        """`count` of them, turned to where tokens behind `start` stand, float32; the last ones where `turns` is None.

        Raises InvalidInput for a count under 1.
        """
        if count < 1:
            raise InvalidInput(f"{count} queries a head; expected at least 1")
        total = len(self.positions)
        if turns is None:
            return {i: queries[:, -count:].float() for i, queries in self.layers.items()}
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(total, generator=generator)[:count].sort().values
        return {
            i: asked_later(queries[:, chosen], self.positions[chosen], turns[i], start, horizon=HORIZON, seed=seed)
            for i, queries in self.layers.items()
        }


def own_asked(local: LocalModel, kv: KVCache, ids: np.ndarray) -> Asked:
    """What a document asks of its own cache, all tokens but the first few; at most the last `REREAD` of them.

    One forward pass over these tokens. Raises UnsupportedCache where layers do not hold every token.
    """
    count = max(1, min(REREAD, len(ids) - min(EARLIEST, len(ids) // 2)))
    dtype = local.model.dtype
    wide = [replace(layer, keys=layer.keys.to(dtype), values=layer.values.to(dtype)) for layer in kv.layers]
    held: Queries = own_queries(local.model, KVCache(tuple(wide), len(kv)), ids, last=count)
    return Asked(held.layers, torch.arange(len(ids) - count, len(ids)))


def foreign_asked(local: LocalModel, cuts: Sequence[Cut], prefix: int, count: int, *, quiet: bool) -> Asked:
    """What other texts ask behind their first `prefix` tokens: about `count` queries a head, kept on disk as bfloat16.

    Raises InvalidInput without a window that is longer than `prefix`.
    """
    long = [each for each in cuts if len(each.ids) > prefix]
    if not long:
        raise InvalidInput(f"no window of other texts is longer than {prefix:,} tokens: nothing asks behind them")
    names = [hashlib.sha256(np.array(each.ids, "<i8").tobytes()).hexdigest() for each in long]
    digest = hashlib.sha256(f"{local.identity.digest} {local.model.dtype} {prefix} {count} {names}".encode())
    file = home() / "calibration" / f"queries-{digest.hexdigest()[:32]}.safetensors"
    if not file.is_file():
        found = _collected(local, long, prefix, -(-count // len(long)), quiet=quiet)
        file.parent.mkdir(parents=True, exist_ok=True)
        _save(file, found)
    loaded = load_file(file)
    positions = loaded.pop("positions")
    return Asked({int(name): queries for name, queries in loaded.items()}, positions)


def _collected(local: LocalModel, cuts: Sequence[Cut], prefix: int, each: int, *, quiet: bool) -> Asked:
    parts: list[dict[int, Tensor]] = []
    where = []
    with progress(f"queries of {len(cuts)} other texts", len(cuts), quiet=quiet) as advance:
        for number, piece in enumerate(cuts):
            behind = len(piece.ids) - prefix
            with collect_queries(local.model, behind) as queries:
                local.prefill(list(piece.ids), empty_cache(), quiet=True)
            generator = torch.Generator().manual_seed(number)
            chosen = torch.randperm(behind, generator=generator)[:each].sort().values
            parts.append({i: asked[:, chosen].to(torch.bfloat16) for i, asked in queries.layers.items()})
            where.append(prefix + chosen)
            advance(1)
    layers = {i: torch.cat([part[i] for part in parts], dim=1) for i in parts[0]}
    return Asked(layers, torch.cat(where))


def _save(file: Path, asked: Asked) -> None:
    scratch = file.with_name(f"{file.name}.part")
    save_file({**{str(i): x.contiguous() for i, x in asked.layers.items()}, "positions": asked.positions}, scratch)
    with LocalStore(file.parent).replacing(file.name) as pending:
        pending.append(scratch.read_bytes())
    scratch.unlink()


def together(*sides: dict[int, Tensor]) -> dict[int, Tensor]:
    """Queries of several kinds, layer by layer."""
    return {i: torch.cat([side[i] for side in sides], dim=1) for i in sides[0]}
