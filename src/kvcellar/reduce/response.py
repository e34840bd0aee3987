"""How much a head loses when some of its tokens stand for the others: response profiles and their covariance.

Tokens (kᵢ, vᵢ) with weights wᵢ are the measure pᵢ = wᵢ/W. With Z(q) the sum of all exponentials and o(q) what q reads,

    aᵢ(q) = W exp(q·kᵢ·scale) / Z(q),    Γᵢ(q) = (aᵢ(q)(vᵢ − o(q)), aᵢ(q)).

For any other tokens with weights p̂ on the same W, those of the same measure or not, the error is exactly

    ô(q) − o(q) = Σ p̂ a(v − o) / Σ p̂ a,

so tokens reduce well where few of them have the mean of Γ that all have. Σ is the covariance of Γ under p, in L² over
the queries; its spectrum is that of the tokens' kernel matrix (n, n), since n is less than queries times width.
K tokens miss by about tr(Σ)/K when chosen without knowing the queries and by tail_{K/3}(Σ)/K when the K/3 leading
directions are kept in balance; tail_j is the sum of all eigenvalues but the j largest.

Source: "The risk of KV cache compression" (Haverbeck et al. 2026). Ours: tokens that stay beside (`rest`) count in Z
and o, so that Γ tells what an error among the others costs the head; and the expected error of a random subset, which
the trace only bounds. Computed in float64. Tried on: CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ..errors import InvalidInput
from .tokens import Weighted, joined


@dataclass(frozen=True)
class ResponseProfile:
    """The kernel matrices of the tokens' responses, as means over the queries, and the tokens' shares p.

    `read` holds ⟨aᵢ(vᵢ − o), aⱼ(vⱼ − o)⟩ and `mass` ⟨aᵢ, aⱼ⟩; Γ's kernel is their sum.
    """

    read: Float64[Tensor, "slots slots"]
    mass: Float64[Tensor, "slots slots"]
    shares: Float64[Tensor, " slots"]

    @cached_property
    def spectrum(self) -> Float64[Tensor, " slots"]:
        """Eigenvalues of Σ, the largest first."""
        values: Tensor = torch.linalg.eigvalsh(self._covariance(self.read + self.mass))
        return values.flip(0).clamp(min=0)

    @property
    def trace(self) -> float:
        return float(self._covariance(self.read + self.mass).diagonal().sum())

    def tail(self, first: int) -> float:
        """The sum of all eigenvalues of Σ but the `first` largest."""
        return float(self.spectrum[first:].sum())

    @property
    def effective_rank(self) -> float:
        """tr(Σ)² / tr(Σ²): how many directions of equal size would have this trace and this norm; 0 where Σ is 0."""
        square = float(self.spectrum.square().sum())
        return float(self.spectrum.sum()) ** 2 / square if square > 0 else 0.0

    def agnostic_bound(self, keep: int) -> float:
        """tr(Σ)/K."""
        return self.trace / self._checked(keep)

    def aware_bound(self, keep: int) -> float:
        """tail_{K/3}(Σ)/K."""
        return self.tail(keep // 3) / self._checked(keep)

    def sampling_error(self, keep: int) -> float:
        """E‖ô − o‖² of a uniform subset of K out of n tokens of equal weight, to first order in the error:
        tr(Σ_read)/K · (n − K)/(n − 1). Second order adds what varies in the denominator, little while K is large.

        Raises InvalidInput where the weights differ.
        """
        count = len(self.shares)
        if count > 1 and float(self.shares.max() - self.shares.min()) > 1e-6 / count:
            raise InvalidInput(f"tokens weigh {self.shares.min():.3g} to {self.shares.max():.3g}; expected all alike")
        trace = float(self._covariance(self.read).diagonal().sum())
        return trace / self._checked(keep) * (count - keep) / max(count - 1, 1)

    def _checked(self, keep: int) -> int:
        if not 1 <= keep <= len(self.shares):
            raise InvalidInput(f"{keep} tokens to keep; expected 1 to {len(self.shares)}")
        return keep

    def _covariance(self, kernel: Tensor) -> Tensor:
        """√pᵢ √pⱼ ⟨Γᵢ − Γ̄, Γⱼ − Γ̄⟩, whose eigenvalues other than 0 are those of Σ."""
        towards = kernel @ self.shares
        centred = kernel - towards[:, None] - towards[None, :] + towards @ self.shares
        half = self.shares.sqrt()
        scaled: Tensor = half[:, None] * centred * half[None, :]
        return scaled


def responses(
    tokens: Weighted, queries: Float[Tensor, "queries key_width"], scale: float, rest: Weighted | None = None
) -> ResponseProfile:
    """The response profile of `tokens` for `queries`, each of which counts alike, with `rest` beside them.

    Memory is O(n·queries + n²). Raises InvalidInput without queries or tokens.
    """
    if not len(queries) or not len(tokens):
        raise InvalidInput(f"{len(tokens)} tokens and {len(queries)} queries; expected at least one of each")
    logits, read = _read(tokens, rest, queries, scale)
    a = (logits - tokens.log_weights.double()).exp() * tokens.log_weights.double().exp().sum()
    shares = tokens.log_weights.double().softmax(dim=0)
    read_kernel, mass_kernel = kernels(a, tokens.values.double(), read)
    return ResponseProfile(read_kernel, mass_kernel, shares)


def kernels(
    a: Float[Tensor, "queries slots"], values: Float[Tensor, "slots width"], read: Float[Tensor, "queries width"]
) -> tuple[Float[Tensor, "slots slots"], Float[Tensor, "slots slots"]]:
    """⟨aᵢ(vᵢ − o), aⱼ(vⱼ − o)⟩ and ⟨aᵢ, aⱼ⟩, means over the queries, without a tensor (queries, n, width)."""
    mass = a.T @ a / len(a)
    centre = values.mean(dim=0)  # of v and o alike: differences of large numbers would lose digits
    values, read = values - centre, read - centre
    crossed = a.T @ (a * (read @ values.T)) / len(a)
    squares = (a * read.square().sum(dim=1, keepdim=True)).T @ a / len(a)
    return mass * (values @ values.T) - crossed - crossed.T + squares, mass


def errors(
    tokens: Weighted,
    reduced: Weighted,
    queries: Float[Tensor, "queries key_width"],
    scale: float,
    rest: Weighted | None = None,
) -> Float64[Tensor, "queries width"]:
    """ô(q) − o(q) of `reduced` in place of `tokens`, with `rest` beside either, by the identity above."""
    everything = tokens if rest is None else joined([tokens, rest])
    other = reduced if rest is None else joined([reduced, rest])
    level, read = _partition(everything, queries, scale)
    a = (_logits(other, queries, scale) - level[:, None]).exp()
    return (a @ other.values.double() - a.sum(dim=1, keepdim=True) * read) / a.sum(dim=1, keepdim=True)


def _logits(tokens: Weighted, queries: Tensor, scale: float) -> Tensor:
    return queries.double() @ tokens.keys.double().T * scale + tokens.log_weights.double()


def _partition(tokens: Weighted, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """log Z(q), and what the queries read of `tokens`."""
    logits = _logits(tokens, queries, scale)
    return logits.logsumexp(dim=1), logits.softmax(dim=1) @ tokens.values.double()


def _read(tokens: Weighted, rest: Weighted | None, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """log of each token's share of the attention, and what the queries read of all."""
    everything = tokens if rest is None else joined([tokens, rest])
    level, read = _partition(everything, queries, scale)
    return _logits(tokens, queries, scale) - level[:, None], read
