"""Map codes: every sequence over every alphabet comes back, in the words the page promises; broken points do not."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcellar.errors import DamagedArchive, InvalidInput
from kvcellar.symbols import mapkernels as kernels
from kvcellar.symbols.maps import CODES, MAX_LINE_ALPHABET, map_code

LARGEST = 262_144
EDGES = [2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 127, 128, 129, 254, 255, 256, 257, 49_152, 65_535, 65_536, 65_537, LARGEST]
EDGES += [LARGEST - 1, 131_071, 181, 4095, 4097]
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
ALPHABETS = st.sampled_from(EDGES) | st.integers(2, LARGEST)
NAMES = sorted(CODES)
PLANES = ["grid", "ring"]


def symbols_of(kind: str, alphabet: int, count: int, seed: int = 0) -> np.ndarray:
    """Random symbols, and the walks that go nearest to the edges of their cells."""
    rng = np.random.default_rng(seed)
    made = {
        "random": rng.integers(0, alphabet, count),
        "first": np.zeros(count),
        "last": np.full(count, alphabet - 1),
        "middle": np.full(count, alphabet // 2),
        "opposite": np.arange(count) % 2 * (alphabet // 2),
        "neighbours": np.arange(count) % 2,
        "ends": rng.integers(0, 2, count) * (alphabet - 1),
        "ramp": np.arange(count) % alphabet,
    }[kind]
    return made.astype(np.min_scalar_type(alphabet - 1))


KINDS = ["random", "first", "last", "middle", "opposite", "neighbours", "ends", "ramp"]


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(NAMES), ALPHABETS, st.integers(0, 300), st.sampled_from(KINDS), st.data())
@example("line", 2, 0, "first", None)
@example("ring", 3, 44 * 3, "neighbours", None)
def test_any_sequence_comes_back(name: str, alphabet: int, count: int, kind: str, data: st.DataObject | None) -> None:
    code = map_code(name, alphabet)
    symbols = symbols_of(kind, alphabet, count, alphabet)
    stored = code.encode(symbols)
    assert len(stored) == code.size(count)
    decoded = code.decode(stored, count)
    assert decoded.dtype == symbols.dtype
    assert np.array_equal(decoded, symbols)
    if count and data is not None:
        index = data.draw(st.integers(0, count - 1))
        assert code.at(stored, count, index) == symbols[index]
        assert code.at(stored, count, count - 1) == symbols[-1]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(NAMES), ALPHABETS, st.lists(st.integers(0, 70), max_size=6), st.sampled_from(KINDS))
def test_appending_gives_the_points_of_the_whole(name: str, alphabet: int, lengths: list[int], kind: str) -> None:
    code = map_code(name, alphabet)
    symbols = symbols_of(kind, alphabet, sum(lengths))
    stored, count = code.encode([]), 0
    for length in lengths:
        stored = code.append(stored, count, symbols[count : count + length])
        count += length
        assert np.array_equal(code.decode(stored, count), symbols[:count])
    whole = code.encode(symbols)
    assert np.array_equal(stored[: len(whole)], whole)
    assert not stored[len(whole) :].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("alphabet", [3, 16, 256, 49_152])
def test_appending_writes_in_place_and_seldom_moves(name: str, alphabet: int) -> None:
    code = map_code(name, alphabet)
    symbols = symbols_of("random", alphabet, 3000)
    stored, moves = code.encode(symbols[:1]), 0
    for i in range(1, len(symbols)):
        longer = code.append(stored, i, symbols[i : i + 1])
        moves += longer is not stored
        stored = longer
    assert moves <= math.log2(code.size(len(symbols))) + 2
    assert np.array_equal(code.decode(stored, len(symbols)), symbols)
    assert [code.at(stored, 3000, i) for i in range(0, 3000, 7)] == symbols[::7].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_refused_append_changes_nothing(name: str) -> None:
    code = map_code(name, 10)
    stored = code.append(code.encode([1, 2, 3]), 3, [4] * 200)
    before = stored.copy()
    for bad in ([5, 10], [-1], [5, 2**40], [1.5], ["a"]):
        with pytest.raises(InvalidInput):
            code.append(stored, 203, bad)
        assert np.array_equal(stored, before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_symbols_of_any_integer_type(name: str, dtype: str) -> None:
    code = map_code(name, 100)
    symbols = symbols_of("random", 100, 50)
    assert np.array_equal(code.encode(symbols.astype(dtype)), code.encode(symbols))
    with pytest.raises(InvalidInput, match="expected 0 to 99"):
        code.encode(np.array([3, 100], dtype))


# --- line: the words -------------------------------------------------------------------------------------------------


def _line_by_hand(symbols: list[int], alphabet: int, *, packed: bool = False) -> bytes:
    """The words of docs/map-codes.md in plain integers: p_k = c_k·B^(m−1) + ⌊p_{k−1} / B⌋."""
    plain = (alphabet - 1).bit_length()
    spans = [m for m in range(1, 58) if (alphabet**m - 1).bit_length() <= 57]
    m = min(spans, key=lambda m: ((alphabet**m - 1).bit_length() / m, -m))
    base = alphabet
    if packed or (alphabet**m - 1).bit_length() == plain * m:
        base, m = 1 << plain, 57 // plain
    stream = used = 0
    for first in range(0, len(symbols), m):
        span = symbols[first : first + m]
        p = 0
        for c in span:
            p = c * base ** (len(span) - 1) + p // base
        assert p == sum(c * base**i for i, c in enumerate(span)), "the newest digit leads"
        stream |= p << used
        used += (base ** len(span) - 1).bit_length()
    return stream.to_bytes(-(-used // 8), "little")


@settings(deadline=None, max_examples=200)
@given(st.booleans(), ALPHABETS | st.integers(LARGEST, MAX_LINE_ALPHABET), st.integers(0, 150), st.sampled_from(KINDS))
def test_words_are_those_of_the_page(packed: bool, alphabet: int, count: int, kind: str) -> None:
    symbols = symbols_of(kind, alphabet, count, count)
    code = map_code("packed" if packed else "line", alphabet)
    stored = code.encode(symbols)
    assert stored.tobytes() == _line_by_hand(symbols.tolist(), alphabet, packed=packed)
    assert np.array_equal(code.decode(stored, count), symbols)


def test_alphabets_of_whole_bytes_are_plain_numbers() -> None:
    rng = np.random.default_rng(0)
    for alphabet, dtype in ((256, "<u1"), (65_536, "<u2"), (2**32, "<u4")):
        symbols = rng.integers(0, alphabet, 1001).astype(dtype)
        assert map_code("line", alphabet).encode(symbols).tobytes() == symbols.tobytes()


@pytest.mark.parametrize("bits", range(1, 19))
def test_powers_of_two_are_plain_bits(bits: int) -> None:
    symbols = np.random.default_rng(bits).integers(0, 1 << bits, 1003)
    expected = np.packbits((symbols[:, None] >> np.arange(bits) & 1).astype(np.uint8), bitorder="little")
    assert np.array_equal(map_code("line", 1 << bits).encode(symbols), expected)


def test_no_alphabet_costs_more_than_one_percent_above_whole_bits() -> None:
    """Those of every N up to 262,144 are looked at by benchmarks/maps.py."""
    rng = np.random.default_rng(0)
    for alphabet in [*range(2, 3000), *rng.integers(3000, LARGEST + 1, 1000).tolist(), *EDGES]:
        whole = (alphabet - 1).bit_length()
        code = CODES["line"](alphabet)
        assert math.log2(alphabet) - 1e-9 <= code.bits_per_symbol <= whole
        for count in (0, 1, 2, 7, 100, 12_345):
            assert code.size(count) <= -(-count * whole // 8)
    assert map_code("line", 49_152).bits_per_symbol == 47 / 3
    assert map_code("line", 256).bits_per_symbol == 8


@pytest.mark.parametrize("bits", range(1, 33))
def test_fast_unpacking_does_what_plain_unpacking_does(bits: int) -> None:
    code = map_code("line", 1 << bits)
    for dtype in [kind for kind in (np.uint8, np.uint16, np.uint32) if bits <= 8 * np.dtype(kind).itemsize]:
        for count in [0, 1, 7, 8, 9, 63, 64, 65, 200]:
            symbols = np.random.default_rng(count).integers(0, 1 << bits, count).astype(dtype)
            stored = code.encode(symbols)
            fenced = np.full(count + 20, 0x5A, dtype)
            code.decode(stored, count, fenced[10 : 10 + count])
            assert np.array_equal(fenced[10 : 10 + count], symbols)
            assert (fenced[:10] == 0x5A).all()
            assert (fenced[10 + count :] == 0x5A).all()
            plain = np.empty(count, dtype)
            kernels.read_bits(stored, bits, plain)
            assert np.array_equal(plain, symbols)


# --- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_too_few_points_and_wrong_indexes(name: str) -> None:
    code = map_code(name, 50)
    stored = code.encode(symbols_of("random", 50, 100))
    for count in (-1, 100 + code.span * 2, 10**18):
        with pytest.raises(DamagedArchive):
            code.decode(stored, count)
    for index in (-1, 100, 10**9):
        with pytest.raises(InvalidInput):
            code.at(stored, 100, index)
    with pytest.raises(DamagedArchive):
        code.at(stored[:1], 100, 99)
    for shape in ((101,), (99,), (10, 10)):
        with pytest.raises(InvalidInput, match="of shape"):
            code.decode(stored, 100, np.empty(shape, np.uint8))


def test_words_too_large_for_their_digits_are_noticed() -> None:
    for alphabet, count in ((3, 29), (49_152, 3), (200, 30), (200, 5), (254, 20), (10, 1), (100_000, 2)):
        for name in ("line", "packed"):
            code = map_code(name, alphabet)
            full = np.full(code.size(count), 0xFF, np.uint8)
            full[-1] >>= -code.bits(count) % 8  # type: ignore[attr-defined]
            with pytest.raises(DamagedArchive):
                code.decode(full, count)
    padding = map_code("line", 8).encode([1, 2])
    with pytest.raises(DamagedArchive):
        map_code("line", 8).decode(padding | np.uint8(0x80), 2)


@pytest.mark.parametrize("alphabet", [-1, 0, 1, LARGEST + 1])
def test_alphabets_that_no_code_takes(alphabet: int) -> None:
    for name in PLANES if alphabet > LARGEST else NAMES:
        with pytest.raises(InvalidInput, match="expected 2 to"):
            map_code(name, alphabet)
    with pytest.raises(InvalidInput):
        map_code("line", MAX_LINE_ALPHABET + 1)
    with pytest.raises(InvalidInput, match="circle"):
        map_code("circle", 4)


def test_the_page_shows_the_measured_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its Python runs."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("bench_maps", BENCHMARKS / "maps.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    page = bench.PAGE.read_text(encoding="utf-8")
    result = json.loads((BENCHMARKS / "results" / "maps.json").read_text(encoding="utf-8"))
    assert bench.page(page, result) == page, "python benchmarks/maps.py --page"
    scope: dict[str, np.ndarray] = {}
    exec(compile(page.split("```python\n")[1].split("```")[0], "map-codes.md", "exec"), scope)
    assert scope["walk"].shape == (4,)
