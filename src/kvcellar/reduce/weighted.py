"""Heads and layers reduced to fewer weighted tokens: what every front end calls, and the reducers by name.

Weights, reducers and their source are described in `tokens.py`. The sinks and the recent tokens are set apart here, so
no reducer needs to know of them. Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from ..cache import LayerKV
from ..errors import InvalidInput
from .balanced import Balanced
from .baselines import Scissorhands, SnapKV, Streaming
from .matching import Matching
from .random import RandomSubset
from .tokens import Reducer as Reducer
from .tokens import Weighted as Weighted
from .tokens import joined

SINKS, RECENT = 4, 32

REDUCERS: Mapping[str, type[Reducer]] = MappingProxyType(
    {
        "random": RandomSubset,
        "balanced": Balanced,
        "matching": Matching,
        "streaming": Streaming,
        "snapkv": SnapKV,
        "scissorhands": Scissorhands,
    }
)


def reduce_head(
    reducer: Reducer,
    tokens: Weighted,
    keep: int,
    *,
    sinks: int = SINKS,
    recent: int = RECENT,
    queries: Float[Tensor, "queries key_width"] | None = None,
    scale: float,
    seed: int = 0,
) -> Weighted:
    """One head's tokens in `keep` slots, its first `sinks` and last `recent` among them and untouched.

    With no more tokens than `keep` they are given back as they are; with no slot to spare the middle is dropped.
    Raises InvalidInput where `keep` has no room for sinks and recent tokens, and for numbers that are not finite.
    """
    if min(sinks, recent) < 0 or keep < max(1, sinks + recent):
        raise InvalidInput(f"{keep} tokens to keep; expected at least {sinks} sinks + {recent} recent ones, and 1")
    count = len(tokens)
    if count <= keep:
        return tokens
    first, middle, last = tokens[:sinks], tokens[sinks : count - recent], tokens[count - recent :]
    rest = joined([first, last])
    if keep == len(rest):
        return rest
    if not bool(torch.isfinite(tokens.keys).all() and torch.isfinite(tokens.values).all()):
        raise InvalidInput("keys or values that are not finite numbers: no token can stand for them")
    generator = torch.Generator().manual_seed(seed)
    reduced = reducer.reduce(middle, keep - len(rest), queries, scale, generator, rest if len(rest) else None)
    return joined([first, reduced, last])


def reduce_layer(
    reducer: Reducer,
    layer: LayerKV,
    keep: int | Sequence[int],
    *,
    sinks: int = SINKS,
    recent: int = RECENT,
    queries: Float[Tensor, "heads queries key_width"] | None = None,
    group: int = 1,
    scale: float,
    seed: int = 0,
) -> list[Weighted]:
    """The KV heads of a layer, each reduced to `keep` tokens, or to its own number of a sequence.

    `keep` counts all tokens, sinks and recent ones included. `queries` are per *query* head, rotated at their
    positions; the `group` query heads that read a KV head share its one summary. The same seed gives the same tokens.
    Raises InvalidInput where numbers of heads do not fit, queries are missing, or `keep` has no room.
    """
    heads = Weighted.of(layer)
    keeps = [keep] * len(heads) if isinstance(keep, int) else list(keep)
    if len(keeps) != len(heads):
        raise InvalidInput(f"{len(keeps)} numbers of tokens to keep; expected one for each of {len(heads)} KV heads")
    asked: list[Tensor | None] = [None] * len(heads)
    if queries is not None:
        expected = (len(heads) * group, layer.keys.shape[2])
        if (queries.shape[0], queries.shape[2]) != expected:
            raise InvalidInput(
                f"queries of {queries.shape[0]} heads, {queries.shape[2]} wide; expected {expected[0]} heads "
                f"({len(heads)} KV heads x {group}), {expected[1]} wide"
            )
        asked = [*queries.reshape(len(heads), -1, expected[1])]
    elif reducer.needs_queries:
        raise InvalidInput(f"{reducer.id!r} weighs tokens by what queries ask for: expected queries, got none")
    return [
        reduce_head(
            reducer, head, k, sinks=sinks, recent=recent, queries=q, scale=scale, seed=seed * len(heads) + index
        )
        for index, (head, k, q) in enumerate(zip(heads, keeps, asked, strict=True))
    ]
