"""Eviction as it is usually done: some tokens stay with the weight they have, the others are gone.

- `streaming`: the latest (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453).
- `snapkv`: those the last queries look at, summed over queries and heads and smoothed by a maximum over `kernel`
  neighbours (SnapKV, Li et al. 2024, arXiv 2404.14469).
- `scissorhands`: those that got most attention altogether (Scissorhands, Liu et al. 2023, arXiv 2305.17118; H2O's
  heavy hitters, Zhang et al. 2023, arXiv 2306.14048). They sum up while generating; here the queries are given at once.

All heads that read one KV head share one set of tokens, unlike in the originals, where each has its own. Queries see
all tokens: those of the prompt itself also see the few that followed them. Tried on: CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from ..errors import InvalidRecipe
from .tokens import Reducer, Weighted, attention, check_queries, check_settings


@dataclass(frozen=True)
class Streaming(Reducer):
    id = "streaming/1"

    def reduce(
        self,
        tokens: Weighted,
        keep: int,
        queries: Float[Tensor, "queries key_width"] | None,
        scale: float,
        generator: torch.Generator,
        rest: Weighted | None = None,
    ) -> Weighted:
        return tokens[len(tokens) - keep :]


@dataclass(frozen=True)
class Scissorhands(Reducer):
    id = "scissorhands/1"
    needs_queries = True
    asks_later = False

    def scores(self, shares: Float32[Tensor, "queries slots"]) -> Float32[Tensor, " slots"]:
        """What a token is worth, from the share of its attention that each query gives it."""
        return shares.mean(dim=0)

    def reduce(
        self,
        tokens: Weighted,
        keep: int,
        queries: Float[Tensor, "queries key_width"] | None,
        scale: float,
        generator: torch.Generator,
        rest: Weighted | None = None,
    ) -> Weighted:
        shares, _ = attention(tokens, rest, check_queries(self, queries), scale)
        return tokens[self.scores(shares).topk(keep).indices.sort().values]


@dataclass(frozen=True)
class SnapKV(Scissorhands):
    id = "snapkv/1"
    asks = 32
    kernel: int = 7

    def __post_init__(self) -> None:
        check_settings(self, kernel=1)
        if self.kernel != int(self.kernel) or self.kernel % 2 == 0:
            raise InvalidRecipe(f"{self.id!r}: kernel {self.kernel!r}; expected an odd whole number")

    def scores(self, shares: Float32[Tensor, "queries slots"]) -> Float32[Tensor, " slots"]:
        mean = shares.mean(dim=0)
        return torch.nn.functional.max_pool1d(mean[None, None], self.kernel, 1, self.kernel // 2)[0, 0]
