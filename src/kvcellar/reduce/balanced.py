"""Protected clustering: clusters of equal weight, one token each, with r directions of a feature map Φ in balance.

1. Φ gives a kernel matrix of the tokens; its r leading principal directions are protected.
2. The tokens fall into K clusters of equal weight, as far as whole tokens allow, by cutting in two, again and again,
   across the direction in which the tokens at hand differ most.
3. `representative`: one token of each cluster takes its weight. Which one, cluster by cluster, is what brings
   Σ ŵ φ(kept) closest to Σ w φ, the largest spread first, and all over again for `SWEEPS` rounds.
   `mean`: the token nearest to the cluster's mean gives the position; key and value are the cluster's means.

The total weight is exact in both. Feature maps, each a kernel of two tokens:
- `whitened`: key and value, each relative to its spread;
- `random`: positive random features of the key (Performers, Choromanski et al. 2020, arXiv 2009.14794), times the
  value's own kernel plus one, as in Γ. Needs no queries: the features are responses to Gaussian ones;
- `responses`: Γ itself on the queries given (`response.py`), with the rest's share of the attention.

Source: "The risk of KV cache compression" (Haverbeck et al. 2026), which states what is to be balanced (64 or 128
directions) and under which assumption on Φ. Cuts, sweeps and feature maps are ours. Tried on: CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from ..errors import InvalidInput, InvalidRecipe
from .response import kernels
from .tokens import Reducer, Weighted, attention, check_queries, check_settings, ordered, scaled

SWEEPS = 3
RANDOM_FEATURES = 512
SPARE, POWERS = 16, 5
FEATURES = ("whitened", "random", "responses")
VARIANTS = ("representative", "mean")


@dataclass(frozen=True)
class Balanced(Reducer):
    """Settings: `features`, the map Φ; `protected`, r; `variant`, what stands for a cluster."""

    id = "balanced/1"

    features: str = "whitened"
    protected: int = 64
    variant: str = "representative"

    def __post_init__(self) -> None:
        for name, known in (("features", FEATURES), ("variant", VARIANTS)):
            if getattr(self, name) not in known:
                raise InvalidRecipe(f"{self.id!r}: {name} {getattr(self, name)!r}; expected one of {', '.join(known)}")
        check_settings(self, protected=1)
        if self.protected != int(self.protected):
            raise InvalidRecipe(f"{self.id!r}: protected {self.protected!r}; expected a whole number")

    def reduce(
        self,
        tokens: Weighted,
        keep: int,
        queries: Float[Tensor, "queries key_width"] | None,
        scale: float,
        generator: torch.Generator,
        rest: Weighted | None = None,
    ) -> Weighted:
        weights = tokens.log_weights.double().exp().float()
        phi = leading(self._kernel(tokens, queries, scale, generator, rest), weights, int(self.protected))
        parts = clusters(phi, weights, keep)
        if self.variant == "mean":
            merged = [_mean(tokens[part], phi[part]) for part in parts]
            stacked = Weighted(
                torch.stack([m[0] for m in merged]).to(tokens.keys.dtype),
                torch.stack([m[1] for m in merged]).to(tokens.values.dtype),
                torch.stack([m[2] for m in merged]),
                torch.stack([m[3] for m in merged]),
            )
        else:
            chosen = representatives(phi, weights, parts)
            sums = torch.stack([weights[part].sum() for part in parts])
            stacked = replace(tokens[chosen], log_weights=sums.log())
        return scaled(ordered(stacked), tokens.total)

    def _kernel(
        self,
        tokens: Weighted,
        queries: Tensor | None,
        scale: float,
        generator: torch.Generator,
        rest: Weighted | None,
    ) -> Float32[Tensor, "slots slots"]:
        keys, values = tokens.keys.float(), tokens.values.float()
        if self.features == "responses":
            if queries is None:
                raise InvalidInput(f"{self.id!r} with features 'responses' needs queries, got none")
            shares, read = attention(tokens, rest, check_queries(self, queries), scale)
            a = shares * (-tokens.log_weights).exp()
            levels, masses = kernels(a, values, read)
            found: Tensor = levels + masses * (values - values.mean(dim=0)).square().mean()
            return found
        keys, values = keys - keys.mean(dim=0), _standard(values)
        alike: Tensor = values @ values.T / values.shape[1]
        if self.features == "whitened":
            keys = _standard(keys)
            return alike + keys @ keys.T / keys.shape[1]
        width = keys.shape[1]
        directions = torch.randn(RANDOM_FEATURES, width, generator=generator)
        turned = keys * scale**0.5
        logs = turned @ directions.T - turned.square().sum(dim=1, keepdim=True) / 2
        features = (logs - logs.max()).exp()
        features = features / features.mean().clamp(min=torch.finfo(torch.float32).tiny)
        similar: Tensor = features @ features.T / RANDOM_FEATURES
        return (1 + alike) * similar


def _standard(x: Tensor) -> Tensor:
    """Each column without its mean, over its standard deviation."""
    x = x - x.mean(dim=0)
    return x / x.square().mean(dim=0).sqrt().clamp(min=torch.finfo(torch.float32).tiny)


def leading(
    kernel: Float32[Tensor, "slots slots"], weights: Float32[Tensor, " slots"], count: int
) -> Float32[Tensor, "slots directions"]:
    """The tokens' coordinates along their `count` leading principal directions, from their kernel matrix."""
    shares = weights.double() / weights.sum()
    centred = kernel.double()
    towards = centred @ shares
    centred = centred - towards[:, None] - towards[None, :] + towards @ shares
    half = shares.sqrt()
    centred = half[:, None] * centred * half[None, :]
    count = min(count, len(centred))
    basis = torch.eye(len(centred), dtype=torch.float64)
    if count + SPARE < len(centred) // 2:  # a few block power steps cost a fraction of all eigenvectors
        largest = centred.diagonal().argsort(descending=True, stable=True)[: count + SPARE]
        basis = torch.linalg.qr(centred[:, largest])[0]
        for _ in range(POWERS):
            basis = torch.linalg.qr(centred @ basis)[0]
    values, vectors = torch.linalg.eigh(basis.T @ centred @ basis)
    values, vectors = values[-count:].flip(0).clamp(min=0), vectors[:, -count:].flip(1)
    along: Tensor = basis @ vectors * values.sqrt() / half[:, None]
    return along.float()


def clusters(phi: Float32[Tensor, "slots directions"], weights: Float32[Tensor, " slots"], count: int) -> list[Tensor]:
    """`count` sets of indexes, none empty, their weights as equal as cuts between whole tokens make them."""
    done: list[Tensor] = []
    todo = [(torch.arange(len(phi)), count)]
    while todo:
        members, into = todo.pop()
        if into == 1:
            done.append(members)
            continue
        low = into // 2
        along = phi[members]
        along = along - (weights[members, None] * along).sum(dim=0) / weights[members].sum()
        order = members[(along @ _widest(along * weights[members, None].sqrt())).argsort(stable=True)]
        filled = weights[order].double().cumsum(0)
        cut = int((filled <= filled[-1] * low / into * (1 + 1e-6)).sum())
        cut = min(max(cut, low), len(order) - (into - low))
        todo += [(order[:cut], low), (order[cut:], into - low)]
    return done


def _widest(x: Tensor) -> Tensor:
    """The direction in which rows spread most, by a few steps of the power method from their longest row."""
    direction = x[x.square().sum(dim=1).argmax()]
    for _ in range(8):
        direction = x.T @ (x @ direction)
        direction = direction / direction.norm().clamp(min=torch.finfo(torch.float32).tiny)
    return direction


def representatives(
    phi: Float32[Tensor, "slots directions"], weights: Float32[Tensor, " slots"], parts: list[Tensor]
) -> Tensor:
    """One index of each part, such that Σ ŵ φ of those chosen is near Σ w φ of all."""
    offsets, spreads = [], []
    for part in parts:
        mean = (weights[part, None] * phi[part]).sum(dim=0) / weights[part].sum()
        offsets.append((phi[part] - mean) * weights[part].sum())
        spreads.append(float(offsets[-1].square().sum(dim=1).max()))
    order = sorted(range(len(parts)), key=lambda c: -spreads[c])
    off = torch.zeros(phi.shape[1])
    chosen: dict[int, int] = {}
    for _ in range(SWEEPS):
        for c in order:
            if c in chosen:
                off = off - offsets[c][chosen[c]]
            chosen[c] = int((off + offsets[c]).square().sum(dim=1).argmin())
            off = off + offsets[c][chosen[c]]
    return torch.stack([parts[c][chosen[c]] for c in range(len(parts))])


def _mean(part: Weighted, phi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Key, value, position and log-weight of a cluster's mean."""
    shares = part.log_weights.softmax(dim=0)
    nearest = (phi - shares @ phi).square().sum(dim=1).argmin()
    return (
        shares @ part.keys.float(),
        shares @ part.values.float(),
        part.positions[nearest],
        part.log_weights.logsumexp(dim=0),
    )
