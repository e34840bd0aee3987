"""The prefix scan against the chunk-by-chunk counter, and what no summary may know."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import InvalidInput
from kvcellar.reduce.batched import Heads, nonnegative_all, reduce_heads
from kvcellar.reduce.matching import Matching, nonnegative
from kvcellar.reduce.random import RandomSubset
from kvcellar.reduce.tokens import Reducer, Weighted
from kvcellar.reduce.tree import Buckets, HeadsMerge, Merge, end_of, prefix_summaries, scan
from kvcellar.reduce.weighted import REDUCERS
from weightedheads import SCALE, generator, head, questions, same

names = st.sampled_from(["random", "balanced", "matching", "scissorhands"])


def method(name: str) -> Reducer:
    return REDUCERS[name]()


@settings(max_examples=20, deadline=None)
@given(name=names, count=st.integers(0, 21), size=st.integers(1, 9), keep=st.integers(1, 6), seed=st.integers(0, 3))
def test_the_scan_is_what_chunk_by_chunk_gives(name: str, count: int, size: int, keep: int, seed: int) -> None:
    tokens = head(max(count * size, 1), seed)
    chunks = [tokens[i * size : (i + 1) * size] for i in range(count)]
    merge = Merge(method(name), keep, SCALE, questions(8), seed=seed)
    buckets = Buckets(merge)
    at_once = scan(chunks, merge)
    assert len(at_once) == count
    for chunk, expected in zip(chunks, at_once, strict=True):
        grown = buckets.before()
        if expected is None or grown is None:
            assert expected is grown is None
            assert buckets.chunks == 0
        else:
            assert same(grown, expected)
            assert len(grown) <= keep
        buckets.push(chunk)
        assert sum(map(len, buckets.held())) <= keep * buckets.chunks.bit_count()


@settings(max_examples=20, deadline=None)
@given(name=names, length=st.integers(10, 70), size=st.integers(2, 16), data=st.data())
def test_a_later_token_changes_no_earlier_summary(name: str, length: int, size: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, length - 1))
    tokens = head(length, 5)
    other = replace(tokens, keys=tokens.keys.clone(), values=tokens.values.clone())
    other.keys[at] += 1
    other.values[at] -= 3

    def summaries(of: object) -> list:
        return prefix_summaries(of, size, 8, method(name), queries=questions(8), scale=SCALE, seed=2)  # type: ignore[arg-type]

    for c, (before, after) in enumerate(zip(summaries(tokens), summaries(other), strict=True)):
        if at >= 4 + c * size:
            assert same(before, after), f"chunk {c} knew of token {at}"
        elif at < 4:
            assert not same(before, after)


def test_before_the_thirteenth_chunk() -> None:
    """With room for everything nothing is reduced, and a summary is the text itself, in order."""
    tokens = head(13 * 3)
    found = scan([tokens[i * 3 : i * 3 + 3] for i in range(13)], Merge(method("random"), 100, SCALE))
    assert found[0] is None
    for c in range(1, 13):
        assert found[c] is not None
        assert same(found[c], tokens[: 3 * c])


def test_weights_add_up_to_the_tokens_before() -> None:
    tokens = head(100)
    found = prefix_summaries(tokens, 10, 9, method("random"), sinks=4, scale=SCALE)
    assert len(found) == 10
    assert same(found[0], tokens[:4])
    for c, summary in enumerate(found):
        assert len(summary) <= 9
        assert summary.total == pytest.approx(4 + 10 * c, rel=1e-4)
        assert bool((summary.positions.diff() > 0).all())
        assert summary.positions[-1] < 4 + 10 * c


def test_buckets_side_by_side_hold_the_logarithm() -> None:
    buckets = Buckets(Merge(method("random"), 5, SCALE))
    assert buckets.held() == []
    tokens = head(8 * 63)
    for i in range(63):
        buckets.push(tokens[8 * i : 8 * i + 8])
    held = buckets.held()
    assert [len(node) for node in held] == [5] * 6
    assert buckets.ends() == [32, 48, 56, 60, 62, 63]
    assert math.isclose(sum(node.total for node in held), 8 * 63, rel_tol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidInput, match="0 tokens to keep"):
        Merge(method("random"), 0, SCALE)
    for chunk, keep in ((0, 8), (4, 4)):
        with pytest.raises(InvalidInput, match=f"chunks of {chunk}, {keep} to keep"):
            prefix_summaries(head(10), chunk, keep, method("random"), scale=SCALE)


TOGETHER = (RandomSubset(), Matching(selection="response"), Matching(selection="response", mass=0.3, ridge=0.5))
ONE_BY_ONE = (Matching(), REDUCERS["balanced"](), REDUCERS["streaming"]())


def heads(count: int, size: int, seed: int, *, weighted: bool) -> Heads:
    return Heads.stacked([head(size, seed + 10 * i, weighted=weighted) for i in range(count)])


@settings(max_examples=25, deadline=None)
@given(
    reducer=st.sampled_from([*TOGETHER, *ONE_BY_ONE]),
    count=st.integers(1, 5),
    size=st.integers(3, 40),
    weighted=st.booleans(),
    beside=st.booleans(),
    data=st.data(),
)
def test_many_heads_at_once_are_what_each_alone_is(
    reducer: Reducer, count: int, size: int, weighted: bool, beside: bool, data: st.DataObject
) -> None:
    keep, seed = data.draw(st.integers(1, size - 1)), data.draw(st.integers(0, 5))
    tokens = heads(count, size, seed, weighted=weighted)
    asked = torch.stack([questions(30, seed + i) for i in range(count)])
    rest = heads(count, 3, seed + 99, weighted=False) if beside else None
    found = reduce_heads(reducer, tokens, keep, asked, SCALE, [generator(i) for i in range(count)], rest)
    assert len(found) == keep
    for i in range(count):
        near = None if rest is None else rest.head(i)
        alone = reducer.reduce(tokens.head(i), keep, asked[i], SCALE, generator(i), near)
        assert torch.equal(found.positions[i], alone.positions)
        assert torch.equal(found.keys[i], alone.keys)
        for name in ("values", "log_weights"):
            # weights at their least, in float32, hang on rounding; so do values where ridge is all that holds them
            mine, own = (getattr(x, name).float() for x in (found.head(i), alone))
            if name == "log_weights":
                mine, own = mine.exp(), own.exp()
            torch.testing.assert_close(mine, own, atol=2e-2, rtol=2e-2)


@settings(max_examples=15, deadline=None)
@given(reducer=st.sampled_from(TOGETHER), count=st.integers(2, 9), size=st.integers(3, 90), data=st.data())
def test_a_head_is_the_same_in_any_company_to_the_bit(
    reducer: Reducer, count: int, size: int, data: st.DataObject
) -> None:
    keep, first = data.draw(st.integers(1, size - 1)), data.draw(st.integers(0, count - 1))
    tokens = heads(count, size, 0, weighted=True)
    asked = torch.stack([questions(25, i) for i in range(count)])
    together = reduce_heads(reducer, tokens, keep, asked, SCALE, [generator(i) for i in range(count)])
    some = slice(first, data.draw(st.integers(first + 1, count)))
    numbers = range(count)[some]
    apart = reduce_heads(reducer, tokens.heads(some), keep, asked[some], SCALE, [generator(i) for i in numbers])
    for i, head_number in enumerate(numbers):
        assert same(apart.head(i), together.head(head_number))


def test_weights_of_all_heads_are_those_of_each() -> None:
    columns = torch.randn(4, 50, 20, generator=generator(3)).abs()
    kernels, goals = columns.transpose(1, 2) @ columns, columns.sum(dim=1) * torch.linspace(-0.2, 2, 20)
    found = nonnegative_all(kernels, goals, 400)
    assert bool((found >= 0).all())
    assert bool((found == 0).any())
    for kernel, goal, one in zip(kernels, goals, found, strict=True):
        torch.testing.assert_close(one, nonnegative(kernel, goal, 400), atol=1e-3, rtol=1e-3)


@settings(max_examples=8, deadline=None)
@given(
    reducer=st.sampled_from(TOGETHER),
    count=st.integers(1, 18),
    size=st.integers(2, 9),
    keep=st.integers(1, 6),
    own=st.booleans(),
)
def test_layers_scan_and_count_alike_to_the_bit(reducer: Reducer, count: int, size: int, keep: int, own: bool) -> None:
    """Two heads at a time, with queries of the text's own chunks or others."""
    tokens = heads(2, count * size, 1, weighted=False)
    chunks = [tokens[i * size : (i + 1) * size] for i in range(count)]
    asked = {c: torch.stack([questions(12, c), questions(12, -c)]) for c in range(1, count + 1)}
    fixed = None if own else torch.stack([questions(12), questions(12, 5)])
    merge = HeadsMerge(reducer, keep, SCALE, fixed, asked if own else {}, heads(2, 2, 7, weighted=False))
    buckets = Buckets(merge)
    for chunk, expected in zip(chunks, scan(chunks, merge), strict=True):
        grown = buckets.before()
        if expected is None or grown is None:
            assert expected is grown is None
        else:
            assert all(same(grown.head(i), expected.head(i)) for i in range(2))
            assert int(expected.positions.max()) < int(chunk.positions.min())
        buckets.push(chunk)


def test_a_merge_asks_only_what_came_before() -> None:
    """The place of every merge ends where its queries must have ended."""
    seen: list[tuple[int, int]] = []

    class Watched(Merge):
        def reduced_all(self, jobs: list) -> list[Weighted]:  # type: ignore[override]
            seen.extend((end_of(where), int(tokens.positions[-1]) + 1) for tokens, where in jobs)
            return super().reduced_all(jobs)

    tokens = head(13 * 3)
    scan([tokens[i * 3 : i * 3 + 3] for i in range(13)], Watched(RandomSubset(), 2, SCALE))
    assert len(seen) > 20
    assert all(last <= 3 * end for end, last in seen)
    assert max(end for end, _ in seen) == 12


def test_heads_that_do_not_fit_together_are_refused() -> None:
    tokens = heads(2, 9, 0, weighted=False)
    with pytest.raises(InvalidInput, match="9 tokens of 2 heads, 16 wide, 9 to keep"):
        reduce_heads(RandomSubset(), tokens, 9, None, SCALE, [generator()] * 2)
    with pytest.raises(InvalidInput, match="None, None, 1 generators"):
        reduce_heads(RandomSubset(), tokens, 3, None, SCALE, [generator()])
    with pytest.raises(InvalidInput, match="expected queries, got none"):
        reduce_heads(TOGETHER[1], tokens, 3, None, SCALE, [generator()] * 2)
    tokens.values[1, 3, 0] = torch.nan
    with pytest.raises(InvalidInput, match="not finite"):
        reduce_heads(RandomSubset(), tokens, 3, None, SCALE, [generator()] * 2)
    with pytest.raises(InvalidInput, match="0 tokens to keep"):
        HeadsMerge(RandomSubset(), 0, SCALE)
