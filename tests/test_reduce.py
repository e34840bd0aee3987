"""What every reducer must hold to, and what sets each apart; synthetic heads."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.cache import LayerKV
from kvcellar.errors import InvalidInput, InvalidRecipe
from kvcellar.reduce.balanced import Balanced, clusters, leading
from kvcellar.reduce.baselines import Scissorhands, SnapKV, Streaming
from kvcellar.reduce.matching import Matching, nonnegative, pursuit
from kvcellar.reduce.random import RandomSubset
from kvcellar.reduce.response import errors
from kvcellar.reduce.tokens import Reducer, Weighted, joined
from kvcellar.reduce.weighted import REDUCERS, reduce_head, reduce_layer
from weightedheads import SCALE, error, generator, head, questions, same

VARIANTS: list[Reducer] = [
    *(kind() for kind in REDUCERS.values()),
    Balanced(variant="mean"),
    Balanced(features="random", protected=3),
    Balanced(features="responses", protected=200),
    Matching(selection="response"),
    SnapKV(kernel=1),
]
EXACT = (RandomSubset, Balanced)
reducers = pytest.mark.parametrize("reducer", VARIANTS, ids=lambda r: "-".join(map(str, [r.id, *asdict(r).values()])))


@reducers
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_reduces_to_as_many_as_asked(reducer: Reducer, data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 50))
    keep = data.draw(st.integers(1, count - 1))
    tokens = head(count, data.draw(st.integers(0, 5)), weighted=data.draw(st.booleans()))
    out = reducer.reduce(tokens, keep, questions(12), SCALE, generator())
    assert len(out) == keep
    assert bool((out.positions.diff() > 0).all())
    assert bool(torch.isfinite(out.log_weights).all())
    assert bool(torch.isfinite(out.values).all())
    if isinstance(reducer, EXACT):
        assert math.isclose(out.total, tokens.total, rel_tol=1e-5)
    if getattr(reducer, "variant", "") != "mean":
        assert torch.equal(out.keys, tokens.keys[out.positions])
    assert same(out, reducer.reduce(tokens, keep, questions(12), SCALE, generator()))


@reducers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_keeps_dtypes(reducer: Reducer, dtype: torch.dtype) -> None:
    out = reducer.reduce(head(30, dtype=dtype), 9, questions(), SCALE, generator())
    assert (out.keys.dtype, out.values.dtype, out.log_weights.dtype) == (dtype, dtype, torch.float32)


@reducers
def test_equal_tokens_reduce_to_one_of_them(reducer: Reducer) -> None:
    """Nothing is lost of tokens that are all alike, when their weight may be passed on."""
    one = head(1)
    tokens = replace(joined([one] * 20), positions=torch.arange(20))
    rest = head(3, 7)
    out = reducer.reduce(tokens, 4, questions(), SCALE, generator(), rest)
    before = joined([tokens, rest]).attend(questions(), SCALE)
    after = joined([out, rest]).attend(questions(), SCALE)
    if isinstance(reducer, (*EXACT, Matching)):
        assert torch.allclose(before, after, atol=2e-2 if isinstance(reducer, Matching) else 1e-5)
    else:
        assert not torch.allclose(before, after, atol=2e-2)


def test_a_weight_counts_as_copies() -> None:
    tokens = head(5)
    twice = joined([tokens, tokens[1:2], tokens[1:2]])
    weights = torch.zeros(5)
    weights[1] = math.log(3)
    weighted = replace(tokens, log_weights=weights)
    assert torch.allclose(twice.attend(questions(), SCALE), weighted.attend(questions(), SCALE), atol=1e-6)


@pytest.mark.parametrize("reducer", [Matching(), Scissorhands()])
def test_weighted_tokens_are_treated_as_their_copies(reducer: Reducer) -> None:
    """Reducing {x twice, y} must cost no more than reducing the copies themselves does."""
    tokens = head(40, weighted=True)
    copies = joined(
        [tokens[torch.tensor([i])] for i in range(40) for _ in range(round(tokens.log_weights[i].exp().item()))]
    )
    copies = replace(copies, log_weights=torch.zeros(len(copies)))
    assert torch.allclose(copies.attend(questions(), SCALE), tokens.attend(questions(), SCALE), atol=1e-5)
    out = reducer.reduce(tokens, 10, questions(), SCALE, generator())
    assert error(tokens, out, questions()) == pytest.approx(error(copies, out, questions()), rel=1e-3, abs=1e-9)


def test_random_is_right_on_average() -> None:
    tokens = head(24, weighted=True)
    weights = tokens.log_weights.exp()
    found = torch.zeros(24)
    for seed in range(1000):
        out = RandomSubset().reduce(tokens, 6, None, SCALE, generator(seed))
        found[out.positions] += out.log_weights.exp() / 1000
    assert torch.allclose(found, weights, rtol=0.25)
    assert found.sum().item() == pytest.approx(weights.sum().item(), rel=1e-5)


def test_random_keeps_a_token_heavier_than_its_share() -> None:
    tokens = head(20)
    tokens.log_weights[3] = math.log(1000)
    for seed in range(20):
        out = RandomSubset().reduce(tokens, 5, None, SCALE, generator(seed))
        kept = out.log_weights[out.positions == 3]
        assert kept.item() == pytest.approx(math.log(1000), abs=1e-5)
        assert torch.allclose(out.log_weights[out.positions != 3].exp(), torch.full((4,), 19 / 4), rtol=1e-4)


def test_clusters_are_of_equal_weight() -> None:
    tokens = head(64)
    phi = leading(tokens.keys @ tokens.keys.T, torch.ones(64), 8)
    parts = clusters(phi, torch.ones(64), 16)
    assert sorted(torch.cat(parts).tolist()) == list(range(64))
    assert {len(part) for part in parts} == {4}


def test_leading_directions_agree_with_all_eigenvectors() -> None:
    """The block power method against a full decomposition: the same kernel of coordinates."""
    x = head(300).keys * torch.linspace(3, 0.1, 16)
    weights = torch.arange(300) % 3 + 1.0
    few, centred = leading(x @ x.T, weights, 4), x - (weights / weights.sum()) @ x
    _, size, directions = torch.linalg.svd(weights.sqrt()[:, None] * centred, full_matrices=False)
    exact = centred @ directions[:4].T
    assert size[3] > 1.01 * size[4]
    assert torch.allclose(few @ few.T, exact @ exact.T, atol=1e-2)


def test_balanced_keeps_protected_directions_in_balance() -> None:
    tokens = head(200, 3)
    q = questions(200)
    phi = leading(tokens.keys @ tokens.keys.T, torch.ones(200), 6)

    def imbalance(out: Weighted) -> float:
        return float((out.log_weights.exp() @ phi[out.positions] - phi.sum(dim=0)).norm())

    ours = Balanced(features="responses", protected=32).reduce(tokens, 25, q, SCALE, generator())
    plain = [RandomSubset().reduce(tokens, 25, None, SCALE, generator(s)) for s in range(10)]
    assert imbalance(Balanced().reduce(tokens, 25, None, SCALE, generator())) < min(map(imbalance, plain)) / 2
    assert error(tokens, ours, q) < min(error(tokens, p, q) for p in plain) / 2


def test_matching_beats_what_only_evicts_on_queries_it_never_saw() -> None:
    tokens = head(200, 2)
    others = questions(100, 9)

    def missed(reducer: Reducer) -> float:
        return error(tokens, reducer.reduce(tokens, 20, questions(200), SCALE, generator()), others)

    matching = missed(Matching())
    assert matching < missed(Matching(ridge=1e9)) / 2, "values fitted anew are worth having"
    for reducer in (Streaming(), SnapKV(), Scissorhands(), RandomSubset()):
        assert matching < missed(reducer) / 4, reducer.id


def test_matching_weighs_the_rest_in() -> None:
    """Where sinks take nearly all attention, a head's error is small, and the reducer knows what part of it counts."""
    tokens, q = head(100, 4), questions(200)
    sink = Weighted(6 * q.mean(dim=0, keepdim=True) + 3, torch.zeros(1, 8), torch.tensor([0]), torch.tensor([4.0]))
    alone = Matching().reduce(tokens, 8, q, SCALE, generator())
    knowing = Matching().reduce(tokens, 8, q, SCALE, generator(), sink)
    missed = [float(errors(tokens, out, q, SCALE, sink).square().sum()) for out in (knowing, alone)]
    assert missed[0] < missed[1]


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 12), st.integers(0, 100))
def test_nonnegative_least_squares_meets_its_conditions(count: int, seed: int) -> None:
    g = generator(seed)
    columns, goal = torch.rand(30, count, generator=g) + 0.1 * torch.eye(30, count), torch.randn(30, generator=g) + 0.5
    u = nonnegative(columns.T @ columns, columns.T @ goal, steps=1000)
    slope = columns.T @ (columns @ u - goal)
    assert bool((u >= 0).all())
    assert bool((slope > -2e-3).all()), "no weight may want to grow"
    assert float((u * slope).abs().max()) < 2e-3, "no positive weight may want to change"


def test_pursuit_takes_the_columns_a_goal_is_made_of() -> None:
    columns = torch.randn(40, 20, generator=generator(1))
    goal = columns[:, [3, 8, 15]] @ torch.randn(3, 5, generator=generator(2))
    assert sorted(pursuit(columns, goal, 3).tolist()) == [3, 8, 15]
    assert sorted(pursuit(columns, goal, 20).tolist()) == list(range(20))


def layer(heads: int = 2, slots: int = 60, **more: Any) -> LayerKV:
    parts = [head(slots, h) for h in range(heads)]
    return LayerKV(torch.stack([p.keys for p in parts]), torch.stack([p.values for p in parts]), **more)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_layer_keeps_sinks_and_recent_tokens(name: str) -> None:
    kv = layer()
    q = questions(4 * 10).reshape(4, 10, 16)
    out = reduce_layer(REDUCERS[name](), kv, [20, 59], sinks=3, recent=5, queries=q, group=2, scale=SCALE, seed=1)
    for h, (tokens, keep) in enumerate(zip(out, [20, 59], strict=True)):
        assert len(tokens) == keep
        assert tokens.positions[:3].tolist() == [0, 1, 2]
        assert tokens.positions[-5:].tolist() == list(range(55, 60))
        assert bool((tokens.positions.diff() > 0).all())
        fixed = torch.cat([torch.arange(3), torch.arange(keep - 5, keep)])
        assert torch.equal(tokens.values[fixed], kv.values[h, tokens.positions[fixed]])
        assert bool((tokens.log_weights[fixed] == 0).all())


@pytest.mark.parametrize("count", [1, 2, 36, 40])
@pytest.mark.parametrize("name", REDUCERS)
def test_few_tokens_stay_as_they_are(name: str, count: int) -> None:
    kv = layer(slots=count)
    out = reduce_layer(REDUCERS[name](), kv, 40, queries=questions(2).reshape(2, 1, 16), scale=SCALE)
    assert all(same(a, b) for a, b in zip(out, Weighted.of(kv), strict=True))


def test_no_slot_to_spare_leaves_sinks_and_recent_tokens() -> None:
    out = reduce_head(RandomSubset(), head(60), 36, scale=SCALE)
    assert out.positions.tolist() == [*range(4), *range(28, 60)]


def test_positions_and_weights_of_a_reduced_layer_are_read() -> None:
    positions = torch.stack([torch.arange(0, 120, 2), torch.arange(60)])
    kv = layer(positions=positions, log_weights=torch.full((2, 60), math.log(2)), length=120)
    out = reduce_layer(RandomSubset(), kv, 50, scale=SCALE)
    assert [t.positions[-1].item() for t in out] == [118, 59]
    assert [t.total for t in out] == pytest.approx([120, 120], rel=1e-5)


def test_query_heads_belong_to_their_kv_head() -> None:
    """KV head h is read by the query heads h·group … h·group + group − 1."""
    kv = layer()
    q = questions(4 * 10).reshape(4, 10, 16)
    both = reduce_layer(Scissorhands(), kv, 50, queries=q, group=2, scale=SCALE)
    for h, tokens in enumerate(both):
        alone = reduce_head(
            Scissorhands(), Weighted.of(kv)[h], 50, queries=q[2 * h : 2 * h + 2].flatten(0, 1), scale=SCALE
        )
        assert same(tokens, alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keep": 35}, "35 tokens to keep; expected at least 4 sinks"),
        ({"keep": 0, "sinks": 0, "recent": 0}, "0 tokens to keep"),
        ({"sinks": -1}, "-1 sinks"),
        ({"keep": [40]}, "1 numbers of tokens to keep; expected one for each of 2"),
        ({"queries": None}, "expected queries, got none"),
        ({"queries": questions(6).reshape(2, 3, 16)}, "queries of 2 heads, 16 wide; expected 4 heads"),
        ({"queries": torch.full((4, 3, 16), math.nan)}, "not finite"),
        ({"queries": torch.zeros(4, 0, 16)}, "expected queries, got none"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"keep": 40, "queries": questions(12).reshape(4, 3, 16), **change}
    with pytest.raises(InvalidInput, match=message):
        reduce_layer(Matching(), layer(), arguments.pop("keep"), group=2, scale=SCALE, **arguments)


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused(name: str, value: float) -> None:
    for side in ("keys", "values"):
        tokens = head(60)
        getattr(tokens, side)[30, 3] = value
        with pytest.raises(InvalidInput, match="not finite"):
            reduce_head(REDUCERS[name](), tokens, 40, queries=questions(), scale=SCALE)


@pytest.mark.parametrize("fill", [0.0, 1.0, 1e-42])
@reducers
def test_constant_heads_reduce(reducer: Reducer, fill: float) -> None:
    """Zeros, constants and subnormal numbers: nothing to tell tokens apart by, and no division by it."""
    tokens = Weighted(torch.full((20, 16), fill), torch.full((20, 8), fill), torch.arange(20), torch.zeros(20))
    out = reducer.reduce(tokens, 5, questions(), SCALE, generator())
    assert len(out) == 5
    assert torch.allclose(out.attend(questions(), SCALE), tokens.attend(questions(), SCALE), atol=1e-3)


def test_new_values_stay_within_their_dtype() -> None:
    tokens = head(30, dtype=torch.float16)
    tokens.values.mul_(20000)
    out = Matching(ridge=1e-4).reduce(tokens, 3, questions(), SCALE, generator())
    assert bool(torch.isfinite(out.values).all())


def test_an_empty_layer_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at least one token"):
        Weighted.of(LayerKV(torch.empty(1, 0, 0), torch.empty(1, 0, 0)))


@pytest.mark.usefixtures("quick")  # settings from JSON meet no other check of their types
@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        (Matching, {"selection": "luck"}),
        (Matching, {"ridge": 0.0}),
        (Matching, {"mass": math.inf}),
        (Balanced, {"features": "taste"}),
        (Balanced, {"variant": "median"}),
        (Balanced, {"protected": 0}),
        (SnapKV, {"kernel": 4}),
        (SnapKV, {"kernel": True}),
    ],
)
def test_settings_are_checked(kind: type[Reducer], setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(InvalidRecipe, match=name):
        kind(**setting)
