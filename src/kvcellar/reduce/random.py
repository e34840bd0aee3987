"""A random subset that stands for all: the best there is against queries nobody knows.

Each of K tokens kept stands for W/K, W the total weight. Token i stays with probability wᵢK/W, so every sum over the
tokens is met on average, and the total exactly. A token with wᵢ ≥ W/K stays for certain with the weight it has. With
equal weights this is a uniform subset, each weight times n/K; its squared error is about tr(Σ)/K (`response.py`).

Source: minimax for unknown queries, "The risk of KV cache compression" (Haverbeck et al. 2026). Unequal weights are
ours: systematic sampling in random order (Madow 1949). Tried on: CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from .tokens import Reducer, Weighted, ordered, scaled


@dataclass(frozen=True)
class RandomSubset(Reducer):
    id = "random/1"

    def reduce(
        self,
        tokens: Weighted,
        keep: int,
        queries: Float[Tensor, "queries key_width"] | None,
        scale: float,
        generator: torch.Generator,
        rest: Weighted | None = None,
    ) -> Weighted:
        weights = tokens.log_weights.double().exp()
        certain = _certain(weights, keep)
        others = (~certain).nonzero()[:, 0]
        left = keep - int(certain.sum())
        drawn = _systematic(weights[others], left, generator)
        chosen = torch.cat([certain.nonzero()[:, 0], others[drawn]])
        new = weights.clone()
        new[others] = weights[others].sum() / max(left, 1)
        return scaled(ordered(replace(tokens, log_weights=new.log().float())[chosen]), float(weights.sum()))


def _certain(weights: Tensor, keep: int) -> Tensor:
    """Tokens that weigh at least an equal share of what the others weigh among the slots left to them."""
    certain = torch.zeros(len(weights), dtype=torch.bool)
    while True:
        share = weights[~certain].sum() / max(keep - int(certain.sum()), 1)
        found = ~certain & (weights > share * (1 + 1e-9))
        if not bool(found.any()):
            return certain
        certain |= found


def _systematic(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` different indexes, each with probability in proportion to its weight, none of which exceeds a share."""
    order = torch.randperm(len(weights), generator=generator)
    ends = weights[order].cumsum(0)
    start = torch.rand(1, generator=generator, dtype=torch.float64)
    marks = (torch.arange(count) + start) * (ends[-1] / max(count, 1)) if count else ends[:0]
    found = torch.searchsorted(ends, marks, right=True).clamp(max=len(weights) - 1)
    return order[_distinct(found, len(weights))]


def _distinct(found: Tensor, count: int) -> Tensor:
    """Ascending indexes made strictly ascending: rounding can let two marks meet in a token of just one share."""
    steps = torch.arange(len(found))
    raised = (found - steps).cummax(0).values + steps
    return torch.minimum(raised, count - len(found) + steps)
