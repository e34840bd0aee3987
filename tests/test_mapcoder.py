"""The coder `map/1`: arrays come back, cost what its page says, and bytes that nobody wrote stay within the arrays."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import DamagedArchive, InvalidRecipe
from kvcellar.stages import SymbolCoder, build
from kvcellar.symbols.mapcoder import MAX_EXPANSION, MapCoder
from kvcellar.symbols.maps import CODES, map_code
from kvcellar.testing.stages import SymbolCoderConformance

NAMES = sorted(CODES)
EXACT = ["line", "packed"]
WORDS = [np.uint8, np.uint16, np.uint32]
LAYERS = range(1)


class _Conformance(SymbolCoderConformance):
    dtypes = ("uint8", "uint16", "uint32")
    code = "line"

    def coder(self) -> SymbolCoder:
        return MapCoder(code=self.code)


class TestLine(_Conformance):
    pass


class TestPacked(_Conformance):
    code = "packed"


class TestGrid(_Conformance):
    code = "grid"


class TestRing(_Conformance):
    code = "ring"


def _round_trip(arrays: list[np.ndarray], code: str = "line") -> bytes:
    coder = MapCoder(code=code)
    part = coder.encode(arrays, LAYERS)
    out = [np.full(array.shape, 0xA5, array.dtype) for array in arrays]
    coder.decode([part], [out], [LAYERS])
    for array, decoded in zip(arrays, out, strict=True):
        assert np.array_equal(array, decoded)
    raw = sum(array.nbytes for array in arrays)
    assert raw <= MAX_EXPANSION * len(part)
    if code in EXACT:
        assert len(part) <= raw + 4 * len(arrays)
    return part


def _refused(part: bytes, shape: tuple[int, ...] = (2, 10), dtype: type = np.uint8, code: str = "line") -> str:
    with pytest.raises(DamagedArchive) as caught:
        MapCoder(code=code).decode([part], [[np.empty(shape, dtype)]], [LAYERS])
    return str(caught.value)


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(NAMES))
def test_any_arrays_come_back(data: st.DataObject, code: str) -> None:
    arrays = []
    for _ in range(data.draw(st.integers(0, 4))):
        dtype = data.draw(st.sampled_from(WORDS))
        shape = data.draw(st.tuples(st.integers(0, 40), st.integers(0, 12)))
        top = data.draw(st.integers(0, np.iinfo(dtype).max) | st.integers(0, 300)) % (np.iinfo(dtype).max + 1)
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        arrays.append(rng.integers(0, top, shape, dtype, endpoint=True))
    _round_trip(arrays, code)


def test_bytes_are_those_of_the_page() -> None:
    """Alphabet, then the points: two words of N = 3, plain bytes, nothing for zeros, plain numbers for 2³² symbols."""
    three = np.array([[0, 1], [2, 2], [1, 0]], np.uint8)
    digits = sum(int(c) * 3**i for i, c in enumerate(three.reshape(-1)))
    assert _round_trip([three]) == struct.pack("<I", 3) + digits.to_bytes(2, "little")
    plain = np.arange(256, dtype=np.uint16).reshape(64, 4)
    assert _round_trip([plain]) == struct.pack("<I", 256) + bytes(range(256))
    assert _round_trip([np.zeros((4, 5), np.uint16)]) == struct.pack("<I", 1)
    large = np.array([[2**32 - 1, 7]], np.uint32)
    assert _round_trip([large]) == struct.pack("<III", 0, 2**32 - 1, 7)
    assert _round_trip([three, large, three]) == b"".join(_round_trip([a]) for a in (three, large, three))
    assert _round_trip([three], "packed") == struct.pack("<I", 3) + bytes([0b10_10_01_00, 0b00_01])
    ring = _round_trip([three], "ring")
    assert ring == struct.pack("<I", 3) + map_code("ring", 3).encode(three).astype("<f8").tobytes()


@pytest.mark.parametrize("code", EXACT)
def test_long_arrays_waste_nothing(code: str) -> None:
    rng = np.random.default_rng(3)
    for alphabet in (2, 3, 5, 11, 16, 200, 256, 1000, 49_152):
        array = rng.integers(0, alphabet, (500, 12)).astype(np.uint32)
        array[0, 0] = alphabet - 1
        bits = map_code(code, alphabet).bits_per_symbol
        assert len(_round_trip([array], code)) <= 4 + -(-array.size * (alphabet - 1).bit_length() // 8)
        assert len(_round_trip([array], code)) <= 4 + -(-array.size * bits // 8) + 8


def test_what_an_8_bit_symbol_costs_by_code() -> None:
    array = np.random.default_rng(0).integers(0, 256, (600, 10), np.uint8)
    bits = {code: (len(_round_trip([array], code)) - 4) * 8 / array.size for code in NAMES}
    assert bits["line"] == bits["packed"] == 8
    assert bits["ring"] == pytest.approx(128 / 6)
    assert bits["grid"] == pytest.approx(128 / 11, rel=1e-3)


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("code", NAMES)
def test_zeros_are_padded_to_the_expansion_limit(dtype: type, code: str) -> None:
    part = _round_trip([np.zeros((1000, 16), dtype)] * 2, code)
    assert len(part) == -(-2 * 16_000 * np.dtype(dtype).itemsize // MAX_EXPANSION)


@pytest.mark.parametrize("code", NAMES)
def test_arrays_may_be_slices_and_of_any_shape(code: str) -> None:
    rng = np.random.default_rng(2)
    whole = rng.integers(0, 9, (3, 60, 8), np.uint16)
    view = whole[:, 10:30, ::2]
    coder = MapCoder(code=code)
    part = coder.encode([view, view[0, 0], np.array(7, np.uint8)], LAYERS)
    assert part == coder.encode([view.copy(), view[0, 0].copy(), np.array(7, np.uint8)], LAYERS)
    target = np.full((3, 60, 8), 0xBEEF, np.uint16)
    expected = target.copy()
    expected[:, 10:30, ::2] = view
    row, one = np.empty(4, np.uint16), np.empty((), np.uint8)
    coder.decode([part], [[target[:, 10:30, ::2], row, one]], [LAYERS])
    assert np.array_equal(target, expected)
    assert np.array_equal(row, view[0, 0])
    assert one == 7


def test_parts_decode_together_as_they_do_alone() -> None:
    rng = np.random.default_rng(5)
    coder = MapCoder()
    groups = [[rng.integers(0, n, (20, 3)).astype(np.uint16) for n in (2, 30, 400)] for _ in range(4)]
    out = [[np.empty_like(array) for array in group] for group in groups]
    coder.decode([memoryview(coder.encode(group, LAYERS)) for group in groups], out, [LAYERS] * 4)
    assert all(np.array_equal(a, b) for g, o in zip(groups, out, strict=True) for a, b in zip(g, o, strict=True))


def test_other_settings_are_refused() -> None:
    with pytest.raises(InvalidRecipe, match="no setting level"):
        MapCoder(level=3)
    for code in ("circle", "", None, ["line"], 3):
        with pytest.raises(InvalidRecipe, match="expected one of"):
            MapCoder(code=code)  # type: ignore[arg-type]


def test_recipes_may_name_it() -> None:
    assert build("symbols", {"id": "map/1", "code": "grid"}).code == "grid"


# --- bytes nobody wrote ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", NAMES)
@pytest.mark.parametrize("top", [1, 2, 7, 10, 255, 256, 300, 65_535])
def test_a_part_cut_anywhere_is_refused(code: str, top: int) -> None:
    array = np.random.default_rng(0).integers(0, top, (7, 5), np.uint16, endpoint=True)
    array[0, 0] = top
    part = MapCoder(code=code).encode([array, array], LAYERS)
    for cut in range(len(part)):
        with pytest.raises(DamagedArchive):
            MapCoder(code=code).decode([part[:cut]], [[np.empty_like(array)] * 2], [LAYERS])


@pytest.mark.parametrize("code", NAMES)
def test_alphabets_that_do_not_fit_are_refused(code: str) -> None:
    for alphabet in (257, 2**18 + 1, 2**31, 2**32 - 1):
        assert f"{alphabet} symbols" in _refused(struct.pack("<I", alphabet) + bytes(4000), code=code)
    if code not in EXACT:
        assert "symbols" in _refused(struct.pack("<I", 2**18 + 1) + bytes(4000), dtype=np.uint32, code=code)


def test_numbers_beyond_the_alphabet_are_refused() -> None:
    for alphabet, code in ((200, "line"), (254, "line"), (5, "packed"), (200, "packed"), (3, "line")):
        size = map_code(code, alphabet).size(20)
        _refused(struct.pack("<I", alphabet) + b"\xff" * size, code=code)


@pytest.mark.parametrize("code", NAMES)
def test_what_follows_the_arrays_is_refused_unless_zero(code: str) -> None:
    array = np.random.default_rng(0).integers(0, 9, (2, 10), np.uint8)
    part = MapCoder(code=code).encode([array], LAYERS)
    for rest in (b"\1", b"\0\1", b"\xff" * 50):
        assert "left over" in _refused(part + rest, code=code)
    out = np.empty_like(array)
    MapCoder(code=code).decode([part + bytes(9)], [[out]], [LAYERS])
    assert np.array_equal(out, array)


def test_bits_behind_the_last_symbol_are_refused_unless_zero() -> None:
    array = np.array([[1, 7, 3]], np.uint8)
    part = MapCoder().encode([array], LAYERS)
    _refused(part[:-1] + bytes([part[-1] | 0x80]), (1, 3))


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=200), st.sampled_from([b"", b"\0\0\0\0", b"\3\0\0\0", b"\0\1\0\0"]), st.sampled_from(NAMES))
def test_no_bytes_do_more_than_raise(data: bytes, start: bytes, code: str) -> None:
    fenced = np.full(60, 0x5A, np.uint8)
    with suppress(DamagedArchive):
        MapCoder(code=code).decode([start + data], [[fenced[20:40]]], [LAYERS])
    assert (fenced[:20] == 0x5A).all()
    assert (fenced[40:] == 0x5A).all()


@pytest.mark.parametrize("code", NAMES)
@pytest.mark.parametrize("top", [1, 4, 7, 10, 199, 255, 300, 65_535])
def test_no_flipped_byte_does_more_than_raise_or_change_numbers(code: str, top: int) -> None:
    """Checksums notice such flips before; the coder must stay within its arrays, and its numbers within N."""
    array = np.random.default_rng(0).integers(0, top, (6, 5), np.uint16, endpoint=True)
    array[0, 0] = top
    coder = MapCoder(code=code)
    part = coder.encode([array], LAYERS)
    for at in range(len(part)):
        for mask in (0x01, 0x80, 0xFF):
            broken = bytearray(part)
            broken[at] ^= mask
            fenced = np.full((30, 5), 0x5A5A, np.uint16)
            with suppress(DamagedArchive):
                coder.decode([bytes(broken)], [[fenced[12:18]]], [LAYERS])
                alphabet = int.from_bytes(broken[:4], "little")
                assert not alphabet or fenced[12:18].max() < alphabet
            assert (fenced[:12] == 0x5A5A).all()
            assert (fenced[18:] == 0x5A5A).all()
