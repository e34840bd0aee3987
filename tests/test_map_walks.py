"""Float codes and the points a search compares: as published, far from the edges of their cells, never fooled."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import DamagedArchive, InvalidInput
from kvcellar.symbols import mapkernels as kernels
from kvcellar.symbols.maps import digits, map_code, points, suffix_cell
from test_maps import ALPHABETS, KINDS, LARGEST, PLANES, symbols_of


def test_the_published_numbers_of_the_ring() -> None:
    assert map_code("ring", 256).ratio == pytest.approx(0.01212, abs=5e-6)
    assert map_code("ring", 256).span == 6
    assert map_code("ring", 256).bits_per_symbol == pytest.approx(21.33, abs=0.01)
    assert [map_code("ring", n).ratio for n in (2, 3, 4)] == [0.5] * 3
    assert map_code("ring", 5).ratio == pytest.approx((3 - math.sqrt(5)) / 2)  # pentaflake: 1/φ²
    assert map_code("ring", 6).ratio == pytest.approx(1 / 3)  # hexaflake
    assert map_code("ring", 8).ratio == pytest.approx(1 / (2 + math.sqrt(2)))
    assert map_code("grid", 256).ratio == 1 / 16
    assert map_code("grid", 49_152).ratio == 1 / 222


@pytest.mark.parametrize("alphabet", [2, 3, 5, 16, 256, 1000])
def test_the_ring_walks_as_published(alphabet: int) -> None:
    code = map_code("ring", alphabet)
    symbols = symbols_of("random", alphabet, 2 * code.span + 1)
    found = code.encode(symbols)
    for span, point in enumerate(found):
        p = np.zeros(2)
        for c in symbols[span * code.span : (span + 1) * code.span].tolist():
            angle = 2 * math.pi * c / alphabet
            vertex = np.array([math.cos(angle), math.sin(angle)])
            p = vertex + code.ratio * (p - vertex)
        assert np.allclose(point, p, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", PLANES)
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_stays_far_from_the_edges(name: str, kind: str) -> None:
    """At the longest spans every walk comes back to its anchor with room to spare."""
    for alphabet in [*range(2, 40), 100, 256, 257, 5000, 49_152, LARGEST]:
        code = map_code(name, alphabet)
        symbols = symbols_of(kind, alphabet, code.span * 40, alphabet)
        stored = code.encode(symbols)
        out = np.empty(len(symbols), np.uint32)
        corners, ratio, origin, side, span, slack = code._walk
        assert kernels.read_points(stored, corners, ratio, origin, side, span, slack / 4, out)
        assert np.array_equal(out, symbols)
        assert slack[-1] < 0.1


@pytest.mark.parametrize("name", PLANES)
@pytest.mark.parametrize("alphabet", [2, 3, 16, 17, 256, 49_152])
def test_points_off_the_walk_are_noticed(name: str, alphabet: int) -> None:
    code = map_code(name, alphabet)
    count = 3 * code.span
    good = code.encode(symbols_of("random", alphabet, count))
    for value in (math.nan, math.inf, -math.inf, 1e300, -1.0e-3 if name == "grid" else 1.5, 7.0):
        for place in ((1, 0), (1, 1)):
            bad = good.copy()
            bad[place] = value
            with pytest.raises(DamagedArchive):
                code.decode(bad, count)
            with pytest.raises(DamagedArchive):
                code.at(bad, count, code.span)
            assert code.at(bad, count, 0) == code.decode(good, count)[0], "other spans still read"


@pytest.mark.parametrize("name", PLANES)
def test_a_shifted_point_does_not_reach_its_anchor(name: str) -> None:
    code = map_code(name, 256)
    good = code.encode(symbols_of("random", 256, 600))
    noticed = 0
    rng = np.random.default_rng(1)
    for row in range(len(good)):
        bad = good.copy()
        bad[row] += rng.normal(0, 1e-6, 2)
        try:
            code.decode(bad, 600)
        except DamagedArchive:
            noticed += 1
    assert noticed >= 0.95 * len(good)


# --- trajectories ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(PLANES), ALPHABETS, st.sampled_from([np.float32, np.float64]), st.integers(0, 60))
def test_trajectories_of_the_plane(name: str, alphabet: int, dtype: type, count: int) -> None:
    symbols = symbols_of("random", alphabet, count, count)
    code = map_code(name, alphabet)
    found = points(symbols, alphabet, name, dtype)
    assert found.dtype == dtype
    assert found.shape == (count, 2)
    p = np.full(2, 0.5 if name == "grid" else 0.0)
    for c, point in zip(symbols.tolist(), found, strict=True):
        p = code.corners[c] + code.ratio * p  # type: ignore[attr-defined]
        assert np.allclose(point, p, rtol=0, atol=4 * np.finfo(dtype).eps)


@settings(deadline=None, max_examples=60)
@given(ALPHABETS, st.sampled_from([np.uint32, np.uint64]), st.integers(0, 90))
def test_trajectories_of_the_line(alphabet: int, dtype: type, count: int) -> None:
    symbols = symbols_of("random", alphabet, count, count).tolist()
    m = digits(alphabet, dtype)
    assert alphabet**m <= 2 ** (8 * np.dtype(dtype).itemsize) < alphabet ** (m + 1)
    found = points(symbols, alphabet, "line", dtype)
    p = 0
    for c, point in zip(symbols, found.tolist(), strict=True):
        p = c * alphabet ** (m - 1) + p // alphabet
        assert point == p


@pytest.mark.parametrize("alphabet", [2, 3, 5, 16, 200])
def test_common_endings_lie_in_one_cell(alphabet: int) -> None:
    """A common ending of s symbols: within r^s of each other; on the line also the converse, leading digits equal."""
    rng = np.random.default_rng(alphabet)
    symbols = rng.integers(0, min(alphabet, 3), 400) * (alphabet // min(alphabet, 3))
    equal = symbols[:, None] == symbols
    shared = equal.astype(int)  # length of the common ending of two positions
    for i in range(1, 400):
        shared[i, 1:] = (shared[i - 1, :-1] + 1) * equal[i, 1:]
    m = digits(alphabet)
    line = points(symbols, alphabet, "line")
    for s in range(1, min(m, 10) + 1):
        lead = line // np.uint64(alphabet ** (m - s))
        both = np.arange(400) >= s - 1
        pairs = both[:, None] & both
        assert np.array_equal((lead[:, None] == lead)[pairs], (shared >= s)[pairs])
        for name, diameter in (("ring", 2.0), ("grid", 1.0)):
            walk = points(symbols, alphabet, name)
            apart = np.abs(walk[:, None] - walk).max(axis=2)
            assert apart[pairs & (shared >= s)].max() <= diameter * suffix_cell(name, alphabet, s) + 1e-12
    assert suffix_cell("line", alphabet, 2) == pytest.approx(alphabet**-2)


def test_points_of_other_types_are_refused() -> None:
    for code, dtype in (("line", np.float64), ("ring", np.uint64), ("grid", np.float16), ("line", np.int64)):
        with pytest.raises(InvalidInput, match="points of type"):
            points([1, 2], 4, code, dtype)
    with pytest.raises(InvalidInput, match="expected 0 to 3"):
        points([1, 4], 4, "line")
