"""The instances of benchmarks/risk_theory.py behave as the theory says; fewer seeds, one strength each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import risk_theory as theory
from kvcellar.reduce.response import responses


def measured(family: str, strength: float, keep: int) -> dict[str, float]:
    made = getattr(theory, family)(strength, 0)
    profile = responses(made.tokens, made.queries, theory.SCALE)
    found = {name: theory.missed(made, reducer, keep, 0) for name, reducer in theory.reducers(keep).items()}
    return {**found, "rank": profile.effective_rank, "tail share": profile.tail(keep // 3) / profile.trace}


def test_a_repeated_sentence_costs_little_when_its_directions_are_kept() -> None:
    found = measured("repeated", 0.03, 48)
    assert found["rank"] < 16
    assert found["tail share"] < 0.01
    assert found["balanced"] < found["random"] / 30


def test_a_lookup_costs_the_same_whoever_knows_the_queries() -> None:
    found = measured("lookup", 8.0, 48)
    assert found["rank"] > 100
    assert found["tail share"] > 0.8
    assert found["balanced"] > 0.9 * found["random"]
    assert found["matching"] > 0.5 * found["random"], "not even new values help"


def test_errors_go_as_the_bounds_do() -> None:
    rows = list(theory.rows(seeds=1, keeps=(16, 64)))
    found = theory.slopes(rows)
    assert found["random against trace_over_k"] == pytest.approx(1, abs=0.25)
    assert found["balanced against tail_over_k"] == pytest.approx(1, abs=0.25)


def test_a_slope_is_that_of_the_power() -> None:
    assert theory.slope([1.0, 2.0, 5.0], [3.0, 12.0, 75.0]) == pytest.approx(2)


def test_a_growing_text_misses_no_more_than_the_streaming_bound_says() -> None:
    rows = list(theory.growing(seeds=3, lengths=(128, 512)))
    assert {row["instance"] for row in rows} == {"repeated", "lookup", "topics"}
    for row in rows:
        assert 0.05 < row["error"] / row["streaming_bound"] < 2
