"""K tokens that answer sample queries as all do: which ones, how much each weighs, and new values for them.

With A the queries' shares of attention (queries, n), those of all tokens beside counted in, o what a query reads of
everything, and S the K tokens:

1. *Selection.* Every token of S may get any value, so it stands for a multiple of its column of A. `pursuit` takes, one
   after another, the tokens whose columns explain most of what is left of [A (V − v̄), c m], m = A 1: orthogonal least
   squares, c the root mean square of ‖v − v̄‖ times `mass`. `response` takes those with the largest
   responses, E[a²(‖v − o‖² + c²)].
2. *Weights.* u ≥ 0 by non-negative least squares, A_S u ≈ m: the attention that S takes is that of all.
3. *Values.* By ridge, pulled to the values they had, B = A_S diag(u): B V̂ ≈ A V + o(B 1 − m)ᵀ. With this right-hand
   side B(V̂ − o) is what A(V − o) was, so the numerator of the exact error (`response.py`) is what is minimised, and
   values make up for what the weights could not meet.

Keys stay as they are, and stay real keys. Sample queries should be like those to come: as the model will ask them at
later positions, and of more than one text (benchmarks/LOG.md).

Source: attention matching, "Fast KV compaction" (arXiv 2602.16284): mass by NNLS, values by least squares. Ours: the
tokens that stay beside (sinks, recent) count in every share, the selection has as many targets as a value has numbers,
ridge towards the old values, weighted tokens as input. Orthogonal least squares: Chen, Billings & Luo 1989. Projected
accelerated gradient: Beck & Teboulle 2009, restarted as by O'Donoghue & Candès 2015. Tried on: CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from ..errors import InvalidRecipe
from .tokens import Reducer, Weighted, attention, check_queries, check_settings

STEPS = 200
LEAST = 1e-4  # times the weight a token had: no token kept is wasted, and its logarithm is a number
JITTER = 1e-3
LEAST_RIDGE = 1e-4  # what float32 leaves of a sum of squares is far below


@dataclass(frozen=True)
class Matching(Reducer):
    """Settings: `selection`, "pursuit" or "response"; `mass`, how much it counts the attention tokens get beside
    what is read; `ridge` on the change of values, in mean squares of a column of B."""

    id = "matching/1"
    needs_queries = True

    selection: str = "pursuit"
    mass: float = 1.0
    ridge: float = 0.1

    def __post_init__(self) -> None:
        if self.selection not in ("pursuit", "response"):
            raise InvalidRecipe(f"{self.id!r}: selection {self.selection!r}; expected 'pursuit' or 'response'")
        check_settings(self, mass=0.0, ridge=LEAST_RIDGE)

    def reduce(
        self,
        tokens: Weighted,
        keep: int,
        queries: Float[Tensor, "queries key_width"] | None,
        scale: float,
        generator: torch.Generator,
        rest: Weighted | None = None,
    ) -> Weighted:
        shares, read = attention(tokens, rest, check_queries(self, queries), scale)
        values = tokens.values.float()
        asked = shares @ values
        level = shares.sum(dim=1, keepdim=True)
        loud = self.mass * (values - values.mean(dim=0)).square().sum(dim=1).mean().sqrt()
        if self.selection == "pursuit":
            chosen = pursuit(shares, torch.cat([asked - level * values.mean(dim=0), loud * level], dim=1), keep)
        else:
            far = values.square().sum(dim=1) - 2 * read @ values.T + read.square().sum(dim=1, keepdim=True)
            chosen = (shares.square() * (far + loud.square())).mean(dim=0).topk(keep).indices
        kept = chosen.sort().values
        columns = shares[:, kept]
        weights = nonnegative(columns.T @ columns, (columns.T @ level)[:, 0]).clamp(min=LEAST)
        columns = columns * weights
        goal = asked + read * (columns.sum(dim=1, keepdim=True) - level)
        most = torch.finfo(tokens.values.dtype).max
        new = ridge(columns, goal, values[kept], self.ridge).clamp(-most, most)
        return replace(
            tokens[kept],
            values=new.to(tokens.values.dtype),
            log_weights=tokens.log_weights[kept] + weights.log(),
        )


def pursuit(
    columns: Float32[Tensor, "rows slots"], goal: Float32[Tensor, "rows targets"], count: int
) -> Int64[Tensor, " count"]:
    """Indexes of `count` columns in the order taken, each the one that explains most of what is left of the goal."""
    kernel, left = columns.T @ columns, columns.T @ goal
    slots = len(kernel)
    jitter = JITTER * kernel.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    energy = kernel.diagonal() + jitter  # of each column, beside those taken
    factor = torch.zeros(count, slots)  # rows of a pivoted Cholesky factor of the kernel
    free = torch.ones(slots, dtype=torch.bool)
    taken = torch.zeros(count, dtype=torch.int64)
    for k in range(count):
        i = int((left.square().sum(dim=1) / energy).masked_fill(~free, -1).argmax())
        length = energy[i].sqrt()
        row = kernel[i] - factor[:k, i] @ factor[:k]
        row[i] += jitter
        row /= length
        factor[k] = row
        left -= row[:, None] * (left[i] / length)
        energy = (energy - row.square()).clamp(min=float(jitter) * 1e-2)
        free[i] = False
        taken[k] = i
    return taken


def nonnegative(
    kernel: Float32[Tensor, "slots slots"], goal: Float32[Tensor, " slots"], steps: int = STEPS
) -> Float32[Tensor, " slots"]:
    """u ≥ 0 that minimises ½ uᵀ G u − bᵀ u, by `steps` of a projected accelerated gradient from u = 1."""
    size = kernel.diagonal().clamp(min=torch.finfo(torch.float32).tiny).sqrt()
    scaled, target = kernel / size[:, None] / size, goal / size
    bound = scaled.abs().sum(dim=1).max()  # of the largest eigenvalue; the power method comes close from below
    x = torch.ones_like(goal)
    for _ in range(20):
        x = scaled @ (x / x.norm())
    bound = torch.minimum(bound, 1.1 * x.norm())
    u = y = size.clone()
    speed = 1.0
    for _ in range(steps):
        new = (y - (scaled @ y - target) / bound).clamp(min=0)
        faster = (1 + (1 + 4 * speed * speed) ** 0.5) / 2
        if float((y - new) @ (new - u)) > 0:
            y, faster = new, 1.0
        else:
            y = new + (speed - 1) / faster * (new - u)
        u, speed = new, faster
    return u / size


def ridge(
    columns: Float32[Tensor, "rows slots"],
    goal: Float32[Tensor, "rows width"],
    start: Float32[Tensor, "slots width"],
    amount: float,
) -> Float32[Tensor, "slots width"]:
    """V that minimises ‖B V − goal‖² + r‖V − start‖², r = `amount` mean squares of a column of B."""
    kernel = (columns.T @ columns).double()
    kernel.diagonal().add_(amount * kernel.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny))
    left = (columns.T @ (goal - columns @ start)).double()
    return start + torch.cholesky_solve(left, torch.linalg.cholesky(kernel)).float()
