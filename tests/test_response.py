"""Response profiles against their definition, written out, and against errors measured."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import InvalidInput
from kvcellar.reduce.matching import Matching
from kvcellar.reduce.random import RandomSubset
from kvcellar.reduce.response import errors, responses
from kvcellar.reduce.tokens import Weighted, joined
from weightedheads import SCALE, generator, head, questions


def written_out(tokens: Weighted, queries: torch.Tensor, rest: Weighted | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Γ (n, queries, width + 1) and p, straight from the definition."""
    everything = joined([tokens, rest]) if rest else tokens
    power = (queries.double() @ everything.keys.double().T * SCALE).exp()
    weights = everything.log_weights.double().exp()
    z = power @ weights
    o = (power * weights) @ everything.values.double() / z[:, None]
    own = weights[: len(tokens)]
    a = (own.sum() * power[:, : len(tokens)] / z[:, None]).T
    gamma = a[..., None] * (tokens.values.double()[:, None] - o)
    return torch.cat([gamma, a[..., None]], dim=2), own / own.sum()


def attended(tokens: Weighted, rest: Weighted | None, queries: torch.Tensor) -> torch.Tensor:
    everything = joined([tokens, rest]) if rest else tokens
    logits = queries.double() @ everything.keys.double().T * SCALE + everything.log_weights.double()
    return logits.softmax(dim=1) @ everything.values.double()


@settings(max_examples=30, deadline=None)
@given(count=st.integers(3, 40), seed=st.integers(0, 9), rest=st.booleans(), fitted=st.booleans())
def test_the_error_is_exactly_what_the_identity_says(count: int, seed: int, rest: bool, fitted: bool) -> None:
    tokens, q = head(count, seed, weighted=True), questions(20, seed)
    beside = head(4, 50) if rest else None
    keep = max(1, count // 3)
    method = Matching() if fitted else RandomSubset()
    reduced = method.reduce(tokens, keep, q, SCALE, generator(seed), beside)
    measured = attended(reduced, beside, q) - attended(tokens, beside, q)
    assert torch.allclose(errors(tokens, reduced, q, SCALE, beside), measured, atol=1e-6, rtol=0)
    if not fitted:
        gamma, _ = written_out(tokens, q, beside)
        share = reduced.log_weights.double().exp() / tokens.total
        top = torch.einsum("k,kqd->qd", share, gamma[reduced.positions])
        outside = 1 - written_out(tokens, q, beside)[1] @ gamma[..., -1]
        by_profile = top[:, :-1] + outside[:, None] * _outside_read(tokens, beside, q)
        assert torch.allclose(by_profile / (top[:, -1:] + outside[:, None]), measured, atol=1e-6, rtol=0)


def _outside_read(tokens: Weighted, rest: Weighted | None, q: torch.Tensor) -> torch.Tensor:
    """What the rest reads, minus what all reads."""
    if rest is None:
        return torch.zeros(len(q), tokens.values.shape[1], dtype=torch.float64)
    return attended(rest, None, q) - attended(tokens, rest, q)


@pytest.mark.parametrize("rest", [None, head(5, 60)])
def test_the_spectrum_is_that_of_the_covariance(rest: Weighted | None) -> None:
    tokens, q = head(30, weighted=True), questions(25)
    gamma, p = written_out(tokens, q, rest)
    flat = gamma.flatten(1) / len(q) ** 0.5
    centred = flat - p @ flat
    covariance = (p[:, None] * centred).T @ centred
    expected = torch.linalg.eigvalsh(covariance).flip(0)[:30]
    profile = responses(tokens, q, SCALE, rest)
    assert torch.allclose(profile.spectrum, expected.clamp(min=0), atol=1e-8 * float(expected[0]))
    assert profile.trace == pytest.approx(float(expected.sum()))
    assert profile.tail(5) == pytest.approx(float(expected[5:].sum()))
    assert profile.tail(0) == pytest.approx(profile.trace)
    assert profile.aware_bound(9) == pytest.approx(profile.tail(3) / 9)
    assert profile.effective_rank == pytest.approx(float(expected.sum() ** 2 / expected.square().sum()))


def test_a_random_subset_errs_as_expected() -> None:
    """The mean over many subsets, within what the second order leaves; and below the trace bound."""
    tokens, q = head(80, 3), questions(30) / 3
    profile = responses(tokens, q, SCALE)
    for keep in (20, 40, 79):
        found = []
        for seed in range(300):
            reduced = RandomSubset().reduce(tokens, keep, None, SCALE, generator(seed))
            found.append(errors(tokens, reduced, q, SCALE).square().sum(dim=1).mean())
        assert float(torch.stack(found).mean()) == pytest.approx(profile.sampling_error(keep), rel=0.12)
        assert profile.sampling_error(keep) < profile.agnostic_bound(keep)


def test_equal_tokens_have_nothing_to_lose() -> None:
    tokens = joined([head(1)] * 9)
    profile = responses(tokens, questions(), SCALE)
    assert profile.trace == pytest.approx(0, abs=1e-12)
    assert profile.sampling_error(3) == pytest.approx(0, abs=1e-12)
    assert profile.effective_rank < 2


def test_a_shift_of_all_values_changes_only_the_mass() -> None:
    """v − o is what counts: values far from 0 lose no digits."""
    tokens = head(20)
    far = Weighted(tokens.keys, tokens.values + 1000, tokens.positions, tokens.log_weights)
    near, shifted = (responses(t, questions(), SCALE).read for t in (tokens, far))
    assert torch.allclose(near, shifted, rtol=1e-2, atol=1e-3 * float(near.diagonal().max()))


def test_what_does_not_fit_is_refused() -> None:
    profile = responses(head(10, weighted=True), questions(), SCALE)
    with pytest.raises(InvalidInput, match="expected all alike"):
        profile.sampling_error(3)
    with pytest.raises(InvalidInput, match="11 tokens to keep; expected 1 to 10"):
        profile.agnostic_bound(11)
    with pytest.raises(InvalidInput, match="0 queries"):
        responses(head(10), questions(0), SCALE)
