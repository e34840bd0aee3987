"""Synthetic heads for the tests of reduction, the same on every run."""

from __future__ import annotations

import torch

from kvcellar.reduce.response import errors
from kvcellar.reduce.tokens import Weighted

SCALE = 0.25


def head(count: int, seed: int = 0, *, weighted: bool = False, dtype: torch.dtype = torch.float32) -> Weighted:
    """A head's tokens around a few topics, with a large mean as real keys have."""
    g = generator(seed)
    topics = torch.randint(0, 6, (count,), generator=g)
    keys = torch.randn(6, 16, generator=g)[topics] + 0.5 * torch.randn(count, 16, generator=g) + 2
    values = torch.randn(6, 8, generator=g)[topics] + 0.3 * torch.randn(count, 8, generator=g)
    weights = torch.randint(1, 5, (count,), generator=g).float().log() if weighted else torch.zeros(count)
    return Weighted(keys.to(dtype), values.to(dtype), torch.arange(count), weights)


def questions(count: int = 60, seed: int = 1) -> torch.Tensor:
    return 1.5 * torch.randn(count, 16, generator=generator(seed))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(a: Weighted, b: Weighted) -> bool:
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("keys", "values", "positions", "log_weights"))


def error(tokens: Weighted, reduced: Weighted, queries: torch.Tensor) -> float:
    """Mean over the queries of the squared error of what they read."""
    return float(errors(tokens, reduced, queries, SCALE).square().sum(dim=1).mean())
