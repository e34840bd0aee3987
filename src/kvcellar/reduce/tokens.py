"""Weighted tokens of a head, and what a reducer does: n of them become K that answer queries alike.

A head's cache is a measure over tokens (k, v). A token of weight w counts in the softmax as w copies of it would:

    o(q) = Σᵢ wᵢ exp(q·kᵢ·scale) vᵢ / Σᵢ wᵢ exp(q·kᵢ·scale) = softmax(q·k·scale + log w) @ v

so evicting tokens is the special case w ∈ {0, 1}. The first tokens (sinks) and the most recent ones stay as they are;
a reducer gets the middle, and the rest beside it, since what an error in the middle costs depends on how much of the
attention the rest takes.

Source: sparse reweighting of the measure, "The risk of KV cache compression" (Haverbeck et al. 2026). That sinks and a
window are exempt is custom since StreamingLLM (Xiao et al. 2023, arXiv 2309.17453). Tried on: CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from ..cache import LayerKV
from ..errors import InvalidInput, InvalidRecipe


@dataclass(frozen=True)
class Weighted:
    """Tokens of one KV head, each standing for `exp(log_weights)` tokens.

    Keys are as cached (rotated). A merged token has the position of its representative; positions ascend.
    """

    keys: Float[Tensor, "slots key_width"]
    values: Float[Tensor, "slots value_width"]
    positions: Int64[Tensor, " slots"]
    log_weights: Float32[Tensor, " slots"]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, which: slice | Tensor) -> Weighted:
        """The tokens of a slice or of an index tensor."""
        return Weighted(self.keys[which], self.values[which], self.positions[which], self.log_weights[which])

    @property
    def total(self) -> float:
        """How many tokens these stand for."""
        return float(self.log_weights.double().exp().sum())

    def logits(self, queries: Float[Tensor, "queries key_width"], scale: float) -> Float32[Tensor, "queries slots"]:
        """q·k·scale + log w, in float32."""
        return queries.float() @ self.keys.float().T * scale + self.log_weights

    def attend(self, queries: Float[Tensor, "queries key_width"], scale: float) -> Float32[Tensor, "queries width"]:
        """What the queries read when these are all the tokens there are."""
        return self.logits(queries, scale).softmax(dim=1) @ self.values.float()

    @classmethod
    def of(cls, layer: LayerKV) -> list[Weighted]:
        """The KV heads of a layer. Raises InvalidInput where keys and values differ in heads or the layer is empty."""
        heads, slots = layer.keys.shape[:2]
        if layer.empty or layer.values.shape[0] != heads:
            raise InvalidInput(
                f"a layer of {heads} key heads and {layer.values.shape[0]} value heads, {slots} slots; "
                "expected as many of both, and at least one token"
            )
        start = torch.arange(layer.first, layer.first + slots) if layer.positions is None else layer.positions
        positions = start.to(torch.int64).expand(heads, slots)
        weights = torch.zeros(heads, slots) if layer.log_weights is None else layer.log_weights.float()
        return [cls(layer.keys[h], layer.values[h], positions[h], weights[h]) for h in range(heads)]


def joined(parts: Sequence[Weighted]) -> Weighted:
    """Several sets of tokens as one, in the order given."""
    return Weighted(
        torch.cat([p.keys for p in parts]),
        torch.cat([p.values for p in parts]),
        torch.cat([p.positions for p in parts]),
        torch.cat([p.log_weights for p in parts]),
    )


def ordered(tokens: Weighted) -> Weighted:
    """The same tokens by ascending position."""
    return tokens[tokens.positions.argsort(stable=True)]


def scaled(tokens: Weighted, total: float) -> Weighted:
    """The same tokens with weights multiplied so that they stand for `total` tokens."""
    shift = torch.tensor(total, dtype=torch.float64).log() - tokens.log_weights.double().logsumexp(dim=0)
    return replace(tokens, log_weights=(tokens.log_weights.double() + shift).float())


def attention(
    tokens: Weighted, rest: Weighted | None, queries: Float[Tensor, "queries key_width"], scale: float
) -> tuple[Float32[Tensor, "queries slots"], Float32[Tensor, "queries width"]]:
    """The share of each query's attention that `tokens` get, and what the query reads from them and the rest."""
    everything = tokens if rest is None else joined([tokens, rest])
    shares = everything.logits(queries, scale).softmax(dim=1)
    return shares[:, : len(tokens)], shares @ everything.values.float()


@dataclass(frozen=True)
class Reducer(ABC):
    """A way to make K tokens of n. Settings are frozen and survive JSON; the id names the arithmetic."""

    id: ClassVar[str]
    needs_queries: ClassVar[bool] = False
    """Whether it cannot work without a sample of queries."""
    asks: ClassVar[int] = 1024
    """How many of a document's last queries it is given when no others are."""
    asks_later: ClassVar[bool] = True
    """Whether these are turned to where later ones will stand (`later.py`)."""

    @abstractmethod
    def reduce(
        self,
        tokens: Weighted,
        keep: int,
        queries: Float[Tensor, "queries key_width"] | None,
        scale: float,
        generator: torch.Generator,
        rest: Weighted | None = None,
    ) -> Weighted:
        """`keep` tokens, 0 < keep < len(tokens), that stand for `tokens`.

        `queries` as the model asks them (rotated), of all query heads that read this KV head; `rest` are tokens that
        stay beside and that the queries see as well.
        """


def check_queries(reducer: Reducer, queries: Tensor | None) -> Tensor:
    """The queries in float32. Raises InvalidInput when there are none or one is not finite."""
    if queries is None or not len(queries):
        raise InvalidInput(f"{reducer.id!r} weighs tokens by what queries ask for: expected queries, got none")
    if not bool(torch.isfinite(queries).all()):
        raise InvalidInput(f"{reducer.id!r}: queries that are not finite numbers")
    return queries.float()


def check_settings(reducer: Reducer, **least: float | int) -> None:
    """Raises InvalidRecipe for a setting that is no finite number or below its least value."""
    for name, bound in least.items():
        value = getattr(reducer, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not bound <= value < float("inf"):
            raise InvalidRecipe(f"{reducer.id!r}: {name} {value!r}; expected a number from {bound:g}")
