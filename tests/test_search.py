"""Search by symbols, by points and by the index, against the plainest form of each."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import DamagedArchive, InvalidInput
from kvcellar.search import suffix
from kvcellar.search.index import SuffixIndex
from kvcellar.search.space import CodeSpace

PLANES = [("ring", np.float32), ("ring", np.float64), ("grid", np.float32), ("grid", np.float64)]


def plain_exact(symbols: np.ndarray, phrase: np.ndarray) -> list[int]:
    s = len(phrase)
    return [k for k in range(s - 1, len(symbols)) if symbols[k + 1 - s : k + 1].tolist() == phrase.tolist()]


def plain_counts(symbols: np.ndarray, phrase: np.ndarray) -> dict[int, int]:
    s = len(phrase)
    return {k: int((symbols[k + 1 - s : k + 1] == phrase).sum()) for k in range(s - 1, len(symbols))}


def words(length: int = 3000, alphabet: int = 256, seed: int = 0) -> np.ndarray:
    """Symbols that repeat like words do: 40 words of up to 9 symbols, one after the other at random."""
    rng = np.random.default_rng(seed)
    known = [rng.integers(0, alphabet, rng.integers(1, 10)) for _ in range(40)]
    return np.concatenate([known[i] for i in rng.integers(0, 40, length)])[:length]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A sequence, which may be empty, and a phrase, mostly cut from it."""
    alphabet = draw(st.sampled_from([1, 2, 3, 256, 49_152]))
    kind = draw(st.sampled_from([np.uint16, np.int32, np.uint32, np.int64] if alphabet > 256 else [np.uint8, np.int64]))
    symbol = st.integers(0, alphabet - 1)
    symbols = np.array(draw(st.lists(symbol, max_size=60)), kind)
    if len(symbols) and draw(st.integers(0, 3)):
        start = draw(st.integers(0, len(symbols) - 1))
        return symbols, symbols[start : draw(st.integers(start + 1, len(symbols)))]
    return symbols, np.array(draw(st.lists(symbol, min_size=1, max_size=20)), kind)


@settings(deadline=None)
@given(sequences())
def test_exact_search_finds_every_occurrence_and_nothing_else(case: tuple[np.ndarray, np.ndarray]) -> None:
    symbols, phrase = case
    expected = plain_exact(symbols, phrase)
    assert suffix.exact(symbols, phrase).tolist() == expected
    index = SuffixIndex.build(symbols)
    assert index.find(phrase).tolist() == expected
    assert len(index.range_of(phrase)) == len(expected)
    for kind in (np.uint32, np.uint64):
        matches = CodeSpace.of(symbols, 49_152, "line", kind).near(phrase)
        assert matches.ends.tolist() == expected
        assert matches.scores.tolist() == [1.0] * len(expected)


@settings(deadline=None)
@given(sequences())
def test_the_index_is_the_order_of_the_text_read_backwards(case: tuple[np.ndarray, np.ndarray]) -> None:
    symbols, phrase = case
    index = SuffixIndex.build(symbols)
    backwards = [symbols[: k + 1][::-1].tolist() for k in range(len(symbols))]
    assert index.order.tolist() == sorted(range(len(symbols)), key=lambda k: backwards[k])
    again = SuffixIndex.from_bytes(index.to_bytes(), symbols)
    assert np.array_equal(again.order, index.order)
    assert len(index.to_bytes()) == 16 + 4 * len(symbols)
    lengths = [s for s in range(1, len(phrase) + 1) if plain_exact(symbols, phrase[-s:])]
    length, ends = index.longest(phrase)
    assert length == max(lengths, default=0)
    assert ends.tolist() == (plain_exact(symbols, phrase[-length:]) if length else [])


@pytest.mark.parametrize("symbols", [np.zeros(5000, np.uint8), np.tile(np.arange(7, dtype=np.int64), 400), words()])
def test_an_index_of_what_repeats_for_long(symbols: np.ndarray) -> None:
    index = SuffixIndex.build(symbols)
    SuffixIndex.from_bytes(index.to_bytes(), symbols)
    for start, stop in ((0, 1), (5, 300), (100, 2700), (0, len(symbols))):
        assert index.find(symbols[start:stop]).tolist() == suffix.exact(symbols, symbols[start:stop]).tolist()


@pytest.mark.parametrize("symbols", [np.array([3, 1, 3, 1, 3, 0, 3], np.uint8), np.zeros(6, np.int64)])
def test_an_altered_index_is_refused(symbols: np.ndarray) -> None:
    data = SuffixIndex.build(symbols).to_bytes()
    for bit in range(8 * len(data)):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedArchive, match="suffix index"):
            SuffixIndex.from_bytes(bytes(altered), symbols)
    for i, j in itertools.combinations(range(len(symbols)), 2):
        order = np.frombuffer(data, "<u4", offset=16).copy()
        order[[i, j]] = order[[j, i]]
        with pytest.raises(DamagedArchive, match="order"):
            SuffixIndex.from_bytes(data[:16] + order.tobytes(), symbols)
    for wrong in (b"", data[:-1], data[:-4], data + bytes(4), data[:16]):
        with pytest.raises(DamagedArchive, match="bytes for"):
            SuffixIndex.from_bytes(wrong, symbols)


def test_an_index_of_another_sequence_is_refused() -> None:
    symbols = words(500)
    other = symbols.copy()
    other[250] ^= 1
    with pytest.raises(DamagedArchive):
        SuffixIndex.from_bytes(SuffixIndex.build(symbols).to_bytes(), other)


@settings(deadline=None)
@given(sequences(), st.data())
def test_fuzzy_search_counts_equal_symbols(case: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    symbols, phrase = case
    at_least = data.draw(st.integers(1, len(phrase)))
    counts = {k: n for k, n in plain_counts(symbols, phrase).items() if n >= at_least}
    found = suffix.fuzzy(symbols, phrase, at_least)
    assert dict(zip(found.ends.tolist(), found.scores.tolist(), strict=True)) == {
        k: n / len(phrase) for k, n in counts.items()
    }
    assert found.ends.tolist() == sorted(counts)
    if at_least == len(phrase):
        assert found.ends.tolist() == suffix.exact(symbols, phrase).tolist()


def test_fuzzy_search_in_a_longer_sequence() -> None:
    symbols = words(3 * 4096 + 5).astype(np.uint8)
    phrase = symbols[4090:4103].copy()
    phrase[3] ^= 1
    found = suffix.fuzzy(symbols, phrase, 6)
    counts = {k: n for k, n in plain_counts(symbols, phrase).items() if n >= 6}
    assert found.ends.tolist() == list(counts)
    assert np.array_equal(found.scores, np.array(list(counts.values())) / 13)
    assert found.scores[found.ends.tolist().index(4102)] == 12 / 13


@settings(deadline=None)
@given(sequences(), st.data())
def test_of_overlapping_matches_the_best_stays(case: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    symbols, phrase = case
    s = len(phrase)
    matches = suffix.fuzzy(symbols, phrase, data.draw(st.integers(1, s)))
    kept = suffix.best_apart(matches, s)
    left = sorted(zip((-matches.scores).tolist(), matches.ends.tolist(), strict=True))
    expected = []
    while left:
        expected.append(left[0])
        left = [each for each in left if abs(each[1] - expected[-1][1]) >= s]
    assert list(zip((-kept.scores).tolist(), kept.ends.tolist(), strict=True)) == expected


@pytest.mark.parametrize("phrase", [[300], [-1], [256 + 7, 8], [1 << 40, 8]])
def test_what_does_not_fit_the_sequence_s_dtype_matches_nothing(phrase: list[int]) -> None:
    symbols, asked = np.arange(256, dtype=np.uint8), np.array(phrase)
    assert suffix.exact(symbols, asked).tolist() == SuffixIndex.build(symbols).find(asked).tolist() == []
    assert suffix.fuzzy(symbols, asked, 1).ends.tolist() == ([8] if len(phrase) == 2 else [])


@pytest.mark.parametrize(
    "values", [np.zeros((2, 2), int), np.array(3), np.array([1.0]), np.array([True]), np.array(["a"]), np.uint64([1])]
)
def test_what_is_no_sequence_of_integers_is_refused(values: np.ndarray) -> None:
    with pytest.raises(InvalidInput, match="expected integers"):
        suffix.as_symbols(values, "the phrase")


def test_what_cannot_be_asked_is_refused() -> None:
    symbols, none = np.arange(9), np.empty(0, np.int64)
    index, space = SuffixIndex.build(symbols), CodeSpace.of(symbols, 256)
    for ask in (suffix.exact, lambda _, p: index.find(p), lambda _, p: index.longest(p), lambda _, p: space.near(p)):
        with pytest.raises(InvalidInput, match="empty"):
            ask(symbols, none)
    for at_least in (0, -1, 4):
        with pytest.raises(InvalidInput, match="expected 1…3"):
            suffix.fuzzy(symbols, symbols[:3], at_least)
    with pytest.raises(InvalidInput, match="below 0"):
        SuffixIndex.build(np.array([1, -1]))
    for made in (lambda: CodeSpace.of(symbols, 4), lambda: space.near(np.array([256])), lambda: space.context(9)):
        with pytest.raises(InvalidInput):
            made()
    with pytest.raises(InvalidInput, match="at most 8"):
        space.context(4, 9)


@pytest.mark.parametrize(("code", "kind"), PLANES)
@pytest.mark.parametrize("alphabet", [2, 5, 256, 1000])
def test_nearest_points_never_miss_an_occurrence(code: str, kind: type, alphabet: int) -> None:
    symbols = words(alphabet=alphabet)
    space = CodeSpace.of(symbols, alphabet, code, kind)
    assert space.points.dtype == kind
    for s, end in itertools.product((1, 2, 3, 5, 8, 12), (11, 500, 2999)):
        phrase = symbols[end + 1 - s : end + 1]
        true = set(suffix.exact(symbols, phrase).tolist())
        for spread in (1.0, 2.0):
            found = space.near(phrase, spread=spread)
            assert true <= set(found.ends.tolist()), (s, end, spread)
            assert np.all(np.diff(found.ends) > 0)
            assert found.scores.min() >= 0
            assert found.scores.max() <= 1


def test_a_radius_of_one_cell_leaves_the_neighbours_out() -> None:
    """In float64, for suffixes that it can tell apart; the published radius of two takes neighbours in."""
    symbols = np.arange(256).repeat(12)
    np.random.default_rng(0).shuffle(symbols)
    space = CodeSpace.of(symbols, 256, "ring", np.float64)
    wider = 0
    for end in range(40, 60):
        for s in (1, 2, 3):
            phrase = symbols[end + 1 - s : end + 1]
            true = suffix.exact(symbols, phrase).tolist()
            assert space.near(phrase, spread=1.0).ends.tolist() == true
            wider += len(space.near(phrase).ends) - len(true)
    assert wider > 0


@pytest.mark.parametrize(("alphabet", "kind", "reach"), [(256, np.uint64, 8), (256, np.uint32, 4), (49_152, None, 4)])
def test_the_context_of_a_hit_comes_from_its_point_alone(alphabet: int, kind: type | None, reach: int) -> None:
    symbols = words(alphabet=alphabet)
    space = CodeSpace.of(symbols, alphabet, "line", kind)
    assert space.reach == reach
    (end, *_) = space.near(symbols[500:510]).ends.tolist()
    alone = CodeSpace("line", alphabet, np.zeros_like(space.points))
    alone.points[end] = space.points[end]
    assert alone.context(end).tolist() == symbols[end + 1 - reach : end + 1].tolist()
    assert alone.context(end, 2).tolist() == symbols[end - 1 : end + 1].tolist()
    assert space.context(1).tolist() == symbols[:2].tolist()


@pytest.mark.parametrize(("code", "kind"), PLANES)
def test_the_context_from_points_in_the_plane(code: str, kind: type) -> None:
    symbols = np.random.default_rng(0).integers(0, 256, 500)
    space = CodeSpace.of(symbols, 256, code, kind)
    assert space.reach == {"ring": (2, 6), "grid": (3, 11)}[code][kind == np.float64]
    right = [space.context(end).tolist() == symbols[end + 1 - space.reach : end + 1].tolist() for end in range(20, 500)]
    assert sum(right) >= 0.99 * len(right)
    newest = [space.context(end, 1).tolist() == [symbols[end]] for end in range(500)]
    assert sum(newest) >= 499


def test_a_larger_score_is_better_in_every_mode() -> None:
    """FIELD case G39, of 50 keys: the query's own comes first, near ones stay over a threshold and far ones do not."""
    keys = np.random.default_rng(0).integers(0, 256, (50, 8))
    close = keys[7].copy()
    close[0] ^= 1  # the oldest symbol, so that the points lie near each other too
    symbols, own = np.concatenate([*keys, close]), 8 * 7 + 7
    found = [suffix.fuzzy(symbols, keys[7], at_least) for at_least in (1, 5)]
    for code, ratio in (("ring", 0.01212), ("grid", 1 / 16)):
        found.append(CodeSpace.of(symbols, 256, code, np.float64).near(keys[7], spread=5 / ratio))  # 7 symbols' cell
    for ends, scores in found:
        best = np.argsort(-scores, kind="stable")
        assert ends[best[:2]].tolist() == [own, len(symbols) - 1]
        assert scores[best[0]] > 0.99
        assert scores[best[0]] > scores[best[1]]
        assert scores[best[1]] > 0.8
        assert np.all(scores[best[2:]] < 0.8)
    assert [len(ends) for ends, _ in found[1:]] == [2, 2, 2]
    assert CodeSpace.of(symbols, 256).near(keys[7]).ends.tolist() == [own]


def test_codes_of_a_head_are_searched_like_tokens() -> None:
    """uint8 symbols of one (layer, head, stage): the same text quantizes to nearly the same codes."""
    codes = words(2000).astype(np.uint8)
    codes[1500:1532] = codes[200:232]
    codes[[1503, 1519]] ^= 1
    found = suffix.best_apart(suffix.fuzzy(codes, codes[200:232], 28), 32)
    assert found.ends.tolist() == [231, 1531]
    assert found.scores.tolist() == [1.0, 30 / 32]
