"""The prefix scan against the chunk-by-chunk counter, and what no summary may know."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import InvalidInput
from kvcellar.reduce.tokens import Reducer
from kvcellar.reduce.tree import Buckets, Merge, prefix_summaries, scan
from kvcellar.reduce.weighted import REDUCERS
from weightedheads import SCALE, head, questions, same

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
        assert buckets.slots <= keep * buckets.chunks.bit_count()


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
    assert buckets.held() is None
    tokens = head(8 * 63)
    for i in range(63):
        buckets.push(tokens[8 * i : 8 * i + 8])
    held = buckets.held()
    assert held is not None
    assert len(held) == buckets.slots == 5 * 6
    assert math.isclose(held.total, 8 * 63, rel_tol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidInput, match="0 tokens to keep"):
        Merge(method("random"), 0, SCALE)
    for chunk, keep in ((0, 8), (4, 4)):
        with pytest.raises(InvalidInput, match=f"chunks of {chunk}, {keep} to keep"):
            prefix_summaries(head(10), chunk, keep, method("random"), scale=SCALE)
