"""Many heads reduced in one call: those of a layer, for all nodes of a level of the tree, are of one shape.

`random` and `matching` with selection "response" are computed here for all of them at once, by the formulas of
`random.py` and `matching.py`; every other reducer takes them one after another. What differs from one head at a time is
rounding alone. A head's result does not depend on which others are in the call, so that a prefix scan over all chunks
and a loop over chunks agree to the bit: products are therefore taken head by head (`products`), since MKL rounds a
batch of small matrices by how many there are (seen on AMD processors), and a product by where its numbers lie.

Weights (non-negative least squares) take most of the time, each step reading the whole kernel. In `matching` values are
fitted after the weights and make up for what these leave, so `steps` may be fewer than one head alone takes.

Source: as of the reducers; batching is ours. Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from ..errors import InvalidInput
from .matching import LEAST, STEPS, Matching
from .random import RandomSubset
from .tokens import Reducer, Weighted, check_queries

AT_ONCE = 1 << 22
"""Numbers of an attention matrix handled at a time."""
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Heads:
    """Weighted tokens of several heads, as many of each; what `Weighted` says of one head holds of each."""

    keys: Float[Tensor, "heads slots key_width"]
    values: Float[Tensor, "heads slots value_width"]
    positions: Int64[Tensor, "heads slots"]
    log_weights: Float32[Tensor, "heads slots"]

    def __len__(self) -> int:
        """Tokens of each head."""
        return self.keys.shape[1]

    @property
    def count(self) -> int:
        """How many heads."""
        return self.keys.shape[0]

    def __getitem__(self, which: slice) -> Heads:
        """The same tokens of every head."""
        return self._each(lambda x: x[:, which])

    def heads(self, which: slice) -> Heads:
        """All tokens of some of the heads."""
        return self._each(lambda x: x[which])

    def head(self, index: int) -> Weighted:
        return Weighted(self.keys[index], self.values[index], self.positions[index], self.log_weights[index])

    def chosen(self, which: Int64[Tensor, "heads chosen"]) -> Heads:
        """Of each head its own choice of tokens."""
        rows = torch.arange(self.count)[:, None]
        return self._each(lambda x: x[rows, which])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Heads:
        return Heads(change(self.keys), change(self.values), change(self.positions), change(self.log_weights))

    @classmethod
    def of(cls, keys: Float[Tensor, "heads slots key_width"], values: Tensor, first: int) -> Heads:
        """Tokens that weigh 1 each, at positions from `first` on."""
        heads, slots = keys.shape[:2]
        positions = torch.arange(first, first + slots).expand(heads, slots)
        return cls(keys, values, positions, torch.zeros(heads, slots))

    @classmethod
    def stacked(cls, heads: Sequence[Weighted]) -> Heads:
        """Heads of as many tokens each."""
        return cls(
            torch.stack([h.keys for h in heads]),
            torch.stack([h.values for h in heads]),
            torch.stack([h.positions for h in heads]),
            torch.stack([h.log_weights for h in heads]),
        )


def concatenated(parts: Sequence[Heads], dim: int) -> Heads:
    """Along heads (0): more of them; along tokens (1): the tokens of the same heads behind each other."""
    return Heads(
        torch.cat([p.keys for p in parts], dim),
        torch.cat([p.values for p in parts], dim),
        torch.cat([p.positions for p in parts], dim),
        torch.cat([p.log_weights for p in parts], dim),
    )


def reduce_heads(
    reducer: Reducer,
    tokens: Heads,
    keep: int,
    queries: Float[Tensor, "heads queries key_width"] | None,
    scale: float,
    generators: Sequence[torch.Generator],
    rest: Heads | None = None,
    *,
    steps: int = STEPS,
) -> Heads:
    """`keep` tokens of each head, as `reducer` chooses them; `queries`, `rest` and a generator for each head.

    `steps` are those of the non-negative least squares, where heads are computed together. Raises InvalidInput where
    numbers of heads or widths differ, there is nothing to reduce, queries are missing, or numbers are not finite.
    """
    shapes = [None if x is None else (x.shape[0], x.shape[2]) for x in (queries, None if rest is None else rest.keys)]
    expected = (tokens.count, tokens.keys.shape[2])
    if any(n not in (None, expected) for n in shapes) or len(generators) != tokens.count or not 0 < keep < len(tokens):
        raise InvalidInput(
            f"{len(tokens)} tokens of {expected[0]} heads, {expected[1]} wide, {keep} to keep; queries, rest of "
            f"(heads, width) {shapes[0]}, {shapes[1]}, {len(generators)} generators; expected as many heads of all, "
            "and fewer to keep"
        )
    if not bool(torch.isfinite(tokens.keys).all() and torch.isfinite(tokens.values).all()):
        raise InvalidInput("keys or values that are not finite numbers: no token can stand for them")
    if type(reducer) is RandomSubset:
        return _random(reducer, tokens, keep, generators)
    if type(reducer) is not Matching or reducer.selection != "response":
        return Heads.stacked(
            [
                reducer.reduce(
                    tokens.head(i),
                    keep,
                    None if queries is None else queries[i],
                    scale,
                    generator,
                    None if rest is None else rest.head(i),
                )
                for i, generator in enumerate(generators)
            ]
        )
    asked = check_queries(reducer, queries)
    size = max(2, AT_ONCE // (asked.shape[1] * (len(tokens) + (0 if rest is None else len(rest)))))
    found = []
    for start in range(0, tokens.count, size):
        which = slice(start, start + size)
        near = None if rest is None else rest.heads(which)
        found.append(_matching(reducer, tokens.heads(which), keep, asked[which], scale, near, steps))
    return concatenated(found, 0)


def _random(reducer: RandomSubset, tokens: Heads, keep: int, generators: Sequence[torch.Generator]) -> Heads:
    """Heads where no token weighs an equal share or more are drawn together."""
    weights = tokens.log_weights.double().exp()
    total = weights.sum(dim=1, keepdim=True)
    if bool((weights > total / keep * (1 + 1e-9)).any()):
        reduced = [reducer.reduce(tokens.head(i), keep, None, 1.0, g) for i, g in enumerate(generators)]
        return Heads.stacked(reduced)
    orders, starts = [], []
    for generator in generators:
        orders.append(torch.randperm(len(tokens), generator=generator))
        starts.append(torch.rand(1, generator=generator, dtype=torch.float64))
    order = torch.stack(orders)
    ends = weights.gather(1, order).cumsum(1)
    marks = (torch.arange(keep) + torch.stack(starts)) * (ends[:, -1:] / keep)
    found = torch.searchsorted(ends, marks, right=True).clamp(max=len(tokens) - 1)
    at = torch.arange(keep)
    distinct = torch.minimum((found - at).cummax(1).values + at, len(tokens) - keep + at)
    kept = tokens.chosen(order.gather(1, distinct).sort(dim=1).values)
    return Heads(kept.keys, kept.values, kept.positions, (total / keep).log().float().expand(-1, keep))


def _matching(
    reducer: Matching, tokens: Heads, keep: int, queries: Tensor, scale: float, rest: Heads | None, steps: int
) -> Heads:
    everything = tokens if rest is None else concatenated([tokens, rest], 1)
    logits = products(queries, everything.keys.float().transpose(1, 2))
    shares = logits.mul_(scale).add_(everything.log_weights[:, None]).softmax(dim=2)
    read = products(shares, everything.values.float())
    shares = shares[:, :, : len(tokens)]
    values = tokens.values.float()
    asked, level = products(shares, values), shares.sum(dim=2, keepdim=True)
    spread = (values - values.mean(dim=1, keepdim=True)).square().sum(dim=2).mean(dim=1)
    # E[a²(‖v − o‖² + c²)] = E[a²](‖v‖² + c²) − 2 v·E[a² o] + E[a²‖o‖²]
    squares = shares.square().transpose(1, 2)
    sums = products(squares, torch.cat([read, read.square().sum(dim=2, keepdim=True), torch.ones_like(level)], dim=2))
    constant = values.square().sum(dim=2) + reducer.mass**2 * spread[:, None]
    far = constant * sums[:, :, -1] - 2 * (values * sums[:, :, :-2]).sum(dim=2) + sums[:, :, -2]
    kept = far.topk(keep, dim=1).indices.sort(dim=1).values
    columns = shares.gather(2, kept[:, None].expand(-1, shares.shape[1], -1))
    kernel = products(columns.transpose(1, 2), columns)
    weights = nonnegative_all(kernel, products(columns.transpose(1, 2), level)[:, :, 0], steps).clamp(min=LEAST)
    columns = columns * weights[:, None]
    goal = asked + read * (columns.sum(dim=2, keepdim=True) - level)
    chosen = tokens.chosen(kept)
    start = chosen.values.float()
    wide = (kernel * weights[:, None] * weights[:, :, None]).double()
    diagonal = wide.diagonal(dim1=1, dim2=2)
    diagonal += reducer.ridge * diagonal.mean(dim=1, keepdim=True).clamp(min=TINY)
    left = products(columns.transpose(1, 2), goal - products(columns, start)).double()
    new = start + torch.cholesky_solve(left, torch.linalg.cholesky(wide)).float()
    most = torch.finfo(tokens.values.dtype).max
    new = new.clamp(-most, most).to(tokens.values.dtype)
    return Heads(chosen.keys, new, chosen.positions, chosen.log_weights + weights.log())


def apart(matrices: Float32[Tensor, "heads rows columns"]) -> list[Tensor]:
    """Each head's matrix in memory of its own."""
    return [matrix.clone() for matrix in matrices]


def products(
    left: Float32[Tensor, "heads rows inner"] | list[Tensor], right: Float32[Tensor, "heads inner columns"]
) -> Float32[Tensor, "heads rows columns"]:
    """Of each head its own product, as it is in any company; `left` may lie apart already."""
    left = left if isinstance(left, list) else apart(left)
    return torch.stack([a @ b for a, b in zip(left, apart(right), strict=True)])


def nonnegative_all(
    kernels: Float32[Tensor, "heads slots slots"], goals: Float32[Tensor, "heads slots"], steps: int = STEPS
) -> Float32[Tensor, "heads slots"]:
    """`matching.nonnegative` of every head, each restarted when its own descent asks for it."""
    size = kernels.diagonal(dim1=1, dim2=2).clamp(min=TINY).sqrt()
    scaled, target = kernels / size[:, None] / size[:, :, None], (goals / size)[:, :, None]
    bound = scaled.abs().sum(dim=2).amax(dim=1)
    x, each = torch.ones_like(target), apart(scaled)
    for _ in range(20):
        x = products(each, x / x.norm(dim=1, keepdim=True))
    bound = torch.minimum(bound, 1.1 * x.norm(dim=1)[:, 0])[:, None, None]
    each, target = apart(scaled / bound), target / bound
    u = y = size[:, :, None]
    speed = torch.ones_like(bound)
    for _ in range(steps):
        new = (target + y - products(each, y)).clamp_(min=0)
        faster = (1 + (1 + 4 * speed * speed).sqrt()) / 2
        moved = new - u
        restart = ((y - new) * moved).sum(dim=1, keepdim=True) > 0
        y = new + moved * ((speed - 1) / faster).masked_fill(restart, 0)
        u, speed = new, faster.masked_fill(restart, 1)
    return u[:, :, 0] / size
