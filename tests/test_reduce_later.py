"""Queries turned to later positions are those a model would ask there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import InvalidInput
from kvcellar.reduce.later import asked_later
from kvcellar.rope import HALF, INTERLEAVED, NO_TURN, Turn, turned
from weightedheads import generator


def turn_of(pairs: int, layout: int) -> Turn:
    return Turn((100.0 ** -np.linspace(0, 1, pairs)).astype(np.float32).tobytes(), layout)


def rotated(x: torch.Tensor, turn: Turn, positions: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    turned(x, turn, positions.numpy().tobytes(), out, back=False)
    return out


@settings(max_examples=20, deadline=None)
@given(
    layout=st.sampled_from([HALF, INTERLEAVED]),
    pairs=st.integers(1, 4),
    start=st.integers(0, 3000),
    horizon=st.integers(1, 500),
)
def test_a_turned_query_is_one_asked_there(layout: int, pairs: int, start: int, horizon: int) -> None:
    x = torch.randn(2, 30, 8, generator=generator())
    positions = torch.arange(5, 35)
    turn = turn_of(pairs, layout)
    found = asked_later(rotated(x, turn, positions), positions, turn, start, horizon=horizon, seed=3)
    goal = start + torch.randint(0, horizon, (30,), generator=generator(3))
    assert torch.allclose(found, rotated(x, turn, goal), atol=2e-3)


def test_layers_that_do_not_turn_keep_their_queries() -> None:
    x = torch.randn(2, 6, 8, generator=generator())
    assert torch.equal(asked_later(x, torch.arange(6), NO_TURN, 100), x)


@pytest.mark.usefixtures("quick")  # dimensions are not checked, as in use
@pytest.mark.parametrize(("count", "horizon"), [(5, 10), (6, 0)])
def test_what_does_not_fit_is_refused(count: int, horizon: int) -> None:
    with pytest.raises(InvalidInput, match=f"6 queries at {count} positions, horizon {horizon}"):
        asked_later(torch.zeros(1, 6, 8), torch.arange(count), NO_TURN, 100, horizon=horizon)
