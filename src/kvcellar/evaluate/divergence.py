"""Divergence of next-token distributions: KL(p ‖ q) = Σ p (log p − log q), in nats per token.

p is the distribution from the uncompressed cache, q the one from the restored cache; 0 exactly when the logits are
the same. Computed in float64, since the differences of good codes vanish in float32.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def kl_divergence(
    reference: Float[Tensor, "positions vocabulary"], restored: Float[Tensor, "positions vocabulary"]
) -> Float[Tensor, " positions"]:
    """KL in nats at each position, float64, from two sets of logits. Tried on: CPU."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (reference, restored))
    return (p.exp() * (p - q)).sum(dim=-1)


def agreeing_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two greedy continuations share before they part."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
