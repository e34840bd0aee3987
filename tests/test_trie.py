"""The language trie: against plain dictionaries, what its distances are, and what it refuses."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import InvalidInput
from kvcellar.language.cells import SMALLEST
from kvcellar.language.trie import LanguageTrie

WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=7)
STEPS = st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | st.tuples(WORDS, st.integers(0, 7))), max_size=25)


def told(ids: list[int], count: int | None = None) -> list[float]:
    """A model's log2 probabilities of `ids`, the first one given; of those behind the first `count` not known."""
    logs = [0.0, *(-1.0 - token - place / 8 for place, token in enumerate(ids[1:]))]
    return logs if count is None else [log if place < count else math.nan for place, log in enumerate(logs)]


def shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@settings(max_examples=150, deadline=None)
@given(STEPS, st.lists(WORDS | st.just([]), min_size=1, max_size=4))
def test_it_answers_as_a_dictionary_of_sessions_does(steps: Any, asked: list[list[int]]) -> None:
    trie, plain = LanguageTrie(3), {}
    known: dict[tuple[int, ...], int] = {}
    for name, value in steps:
        if value is None:
            trie.discard(name)
            plain.pop(name, None)
        else:
            ids, count = value
            trie.add(name, ids, told(ids, count))
            plain[name] = ids
            for stop in range(1, min(count, len(ids)) + 1):
                known[tuple(ids[:stop])] = 1
    assert len(trie) == len(plain)
    assert sorted(trie.names()) == sorted(plain)
    for name, ids in plain.items():
        assert trie.tokens_of(name).tolist() == ids
        logs = trie.log2_probs_of(name)
        for place, log in enumerate(logs):  # what is known is right; what no session told is not known
            if not math.isnan(log):
                assert log == pytest.approx(told(ids)[place])
                assert tuple(ids[: place + 1]) in known
    for ids in asked:
        lengths = {name: shared(ids, held) for name, held in plain.items()}
        longest = max(lengths.values(), default=0)
        first = min((name for name, length in lengths.items() if length == longest), default=None)
        assert trie.longest_prefix(ids) == ((longest, first) if longest else (0, None))
        nearest = trie.nearest(ids)
        if not longest:
            assert nearest is None
        else:
            equal = sorted(name for name, held in plain.items() if held == ids)
            assert nearest is not None
            assert (nearest.name, nearest.kinship.same) == ((equal or [first])[0], bool(equal))
            assert nearest.kinship.cell.tokens == longest


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=3, max_size=6))
def test_the_ultrametric_is_one_and_the_printed_distance_is_none(sessions: list[list[int]]) -> None:
    trie = LanguageTrie(3)
    for number, ids in enumerate(sessions):
        trie.add(str(number), ids, told(ids))
    for a, b, c in permutations(sessions, 3):
        ab, bc, ac = (trie.kinship(*pair).ultrametric for pair in ((a, b), (b, c), (a, c)))
        assert ac <= max(ab, bc)
        assert ab == trie.kinship(b, a).ultrametric
        assert (ab == 0) == (a == b)
    for ids in sessions:
        assert trie.kinship(ids, ids).printed == pytest.approx(-sum(told(ids)))  # 0 only if nothing was surprising
        assert trie.kinship(ids, ids).log2_ultrametric == -math.inf


def test_depth_adds_up_over_edges_and_within_them() -> None:
    trie, ids = LanguageTrie(), [5, 1, 2, 3, 4]
    trie.add("long", ids, [0, -1, -2, -3, -4])
    trie.add("fork", [5, 1, 9], [0, -1, -7])
    assert [trie.cell(ids[:n]).depth for n in range(6)] == [0, 0, 1, 3, 6, 10]
    assert trie.cell_depth("long", "fork") == 1
    assert trie.cell_depth("long", [5, 1, 2, 3, 8]) == 6
    assert trie.kinship("long", "fork").ultrametric == 0.5
    assert trie.cell_depth("long", [6]) == 0
    assert trie.kinship("long", [6]).ultrametric == 1


def test_unknown_probabilities_stay_unknown_until_told() -> None:
    trie = LanguageTrie()
    trie.add("a", [1, 2, 3], [0, math.nan, -2])
    cell = trie.kinship("a", "a").cell
    assert math.isnan(cell.depth)
    assert (cell.unknown, cell.at_least, cell.tokens) == (1, 2, 3)
    assert math.isnan(trie.kinship("a", [1, 2, 9]).ultrametric)
    assert math.isnan(trie.kinship("a", [1, 2, 9]).printed)
    trie.add("b", [1, 2, 4], [0, -1, -5])
    assert trie.cell_depth("a", "a") == 3
    trie.add("c", [1, 2, 4], [0, -3, -3])  # told again: the first holds
    assert trie.cell_depth("c", "c") == 6
    cell = trie.cell([1, 2, 7, 7])  # nobody was there yet
    assert (cell.unknown, cell.at_least) == (2, 1)
    trie.add("d", [8, 8])
    assert trie.cell([8, 8]).unknown == 2


def test_what_replaces_a_session_learns_from_it() -> None:
    trie = LanguageTrie()
    trie.add("a", [1, 2, 3], [0, -1, -2])
    trie.add("a", [1, 2, 3, 4])
    assert np.array_equal(trie.log2_probs_of("a"), [0, -1, -2, np.nan], equal_nan=True)
    assert trie.names() == ["a"]
    trie.discard("a")
    trie.discard("a")
    assert (len(trie), trie.longest_prefix([1, 2])) == (0, (0, None))


def test_distant_cells_do_not_merge_by_underflow() -> None:
    trie, ids = LanguageTrie(), list(range(400))
    trie.add("a", ids, [0.0, *[-17.0] * 399])
    near = trie.kinship("a", ids[:-1])
    assert near.ultrametric == SMALLEST > 0
    assert near.log2_ultrametric == -17 * 398
    assert trie.kinship("a", ids).ultrametric == 0


def test_one_token_and_none() -> None:
    trie = LanguageTrie()
    assert trie.nearest([]) is trie.nearest([1]) is None
    trie.add("a", [1], [0])
    nearest = trie.nearest([1])
    assert nearest is not None
    assert nearest.kinship.same
    assert trie.nearest([]) is None
    assert trie.kinship([], []).same
    assert trie.cell([]).depth == 0
    with pytest.raises(InvalidInput, match="no token"):
        trie.add("b", [])


@pytest.mark.parametrize(
    "tokens",
    [[-1], [10], [1 << 32], [1 << 70], [1.5], ["1"], [[1]], 7, None, [True], np.array([1.0]), np.array(3), [1, [2]]],
)
def test_tokens_that_are_none(tokens: Any) -> None:
    trie = LanguageTrie(10)
    trie.add("a", [1, 2])
    for ask in (trie.longest_prefix, trie.nearest, trie.cell, lambda t: trie.add("b", t)):
        with pytest.raises(InvalidInput, match="token"):
            ask(tokens)
    with pytest.raises(InvalidInput, match="no session 'zz' among the 1"):
        trie.tokens_of("zz")
    assert trie.names() == ["a"]


@pytest.mark.parametrize(
    "logs", [[0.1, -1], [-1], [[-1, -1]], [0, -math.inf], [0, math.inf], [0, -1e39], "ab", [0, None, 1]]
)
def test_log2_probabilities_that_are_none(logs: Any) -> None:
    trie = LanguageTrie(10)
    with pytest.raises(InvalidInput, match="log2 prob"):
        trie.add("b", [1, 2], logs)
    assert len(trie) == 0


@pytest.mark.parametrize("vocabulary", [0, -1, (1 << 32) + 1, True])
def test_vocabularies_that_are_none(vocabulary: Any) -> None:
    with pytest.raises(InvalidInput, match="vocabulary"):
        LanguageTrie(vocabulary)
