"""The expected predictor: Σ_t P(t | prefix) · KV(prefix, t) over the k likeliest tokens, their mass renormalised.

Source: "Sequential KV Cache Compression via Probabilistic Language Tries" (Magarshak 2026, arXiv 2604.15356), whose
delta is what the cache of the token that came differs from this. Here is its arithmetic; what KV(prefix, t) is only the
model knows, and `frontends/expected.py` asks it, for many positions and all their candidates in one pass.

It is no stage of recipes. An archive holds its token ids, so whoever has the model at hand when restoring can evaluate
the one token that came, at a k-th of the price, and has nothing left to code. And a prediction that comes out of the
model's own floats for one token after another, each from the restored caches of those before, is a recursion over
tokens in floats, which another machine would not follow (exactness rule D3). We differ from the paper in nothing else:
k ≤ 20, renormalised mass. Tried on: CPU.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from ..errors import InvalidInput

MOST_CANDIDATES = 20


def candidates(
    logits: Float32[Tensor, "tokens vocabulary"], k: int
) -> tuple[Int64[Tensor, "tokens k"], Float32[Tensor, "tokens k"]]:
    """The `k` likeliest tokens by logits, likeliest first, and their probabilities divided by the sum of these.

    Raises InvalidInput for k outside 1…20 or above the vocabulary.
    """
    most = min(MOST_CANDIDATES, logits.shape[-1])
    if type(k) is not int or not 1 <= k <= most:
        raise InvalidInput(f"{k!r} candidates a token; expected a whole number from 1 to {most}")
    best, ids = logits.float().topk(k, dim=-1)
    return ids, best.softmax(dim=-1)


def expectation(
    weights: Float32[Tensor, "tokens k"], sides: Float32[Tensor, "heads tokens k width"]
) -> Float32[Tensor, "heads tokens width"]:
    """Mean of the candidates' keys or values under `weights`, which sum to 1."""
    return torch.einsum("tk,htkd->htd", weights.float(), sides.float())


def fewer(
    ids: Int64[Tensor, "tokens k"], weights: Float32[Tensor, "tokens k"], k: int
) -> tuple[Int64[Tensor, "tokens fewer"], Float32[Tensor, "tokens fewer"]]:
    """The first `k` of more candidates, renormalised: what `candidates` gives for k."""
    return ids[:, :k], weights[:, :k] / weights[:, :k].sum(dim=1, keepdim=True)


def among(ids: Int64[Tensor, "tokens k"], came: Int64[Tensor, " tokens"]) -> Bool[Tensor, " tokens"]:
    """Whether the token that came is one of the candidates."""
    return (ids == came[:, None]).any(dim=1)
