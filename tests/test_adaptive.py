"""The coder `adaptive/1`: arrays come back, its walk is the one docs/entropy.md describes, damage is noticed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import DamagedArchive, InvalidInput, InvalidRecipe, ProfileMismatch
from kvcellar.geometry import FULL, Geometry, LayerGeometry, SideGeometry
from kvcellar.profile import Profile
from kvcellar.stages import SymbolCoder
from kvcellar.symbols.adaptive import MAX_EXPANSION, AdaptiveCoder, _encode, trained
from kvcellar.symbols.adaptive import _noted as notes_of
from kvcellar.symbols.adaptivetables import Tables, flat
from kvcellar.symbols.binarycoder import SQUASH, STRETCH
from kvcellar.testing.stages import SymbolCoderConformance
from plaincoder import PlainCoder

DTYPES = ["int8", "int16", "int32", "uint8", "uint16"]
COLUMNS = 24
LAYERS, NOTED = range(3, 6), range(6, 9)
LOUDEST = 3.0, 12.0
ANY = Geometry((LayerGeometry(SideGeometry(1, 8, "float32"), SideGeometry(1, 8, "float32"), FULL),) * 6)


def _coefficients(tokens: int, seed: int = 0, columns: int = COLUMNS, loudest: float = 3.0) -> np.ndarray:
    """int16 (T, C) as a quantizer makes them: falling scales, loud and quiet tokens, a mean that wanders."""
    rng = np.random.default_rng(seed)
    scale = loudest * np.exp(-4 * np.arange(columns) / columns)
    drift = np.cumsum(rng.normal(size=(tokens, columns)), axis=0) / max(tokens, 1) ** 0.5
    energy = np.exp(rng.normal(size=(tokens, 1)) / 2)
    return np.rint(scale * (energy * rng.laplace(size=(tokens, columns)) + drift)).astype(np.int16)


def _noted(tokens: int, seed: int = 0) -> list[np.ndarray]:
    """A token's loudness, −3 … 3 and sometimes more, and coefficients that it tells something of."""
    steps = np.rint(1.5 * np.random.default_rng(seed).normal(size=(tokens, 1))).astype(np.int16)
    return [steps, np.rint(_coefficients(tokens, seed) * 2.0**steps).astype(np.int16)]


def _trained() -> dict[str, np.ndarray]:
    """Tables of coarse and of fine tokens, and for a group that has notes."""
    samples: list[tuple[range, int, np.ndarray]] = []
    for seed in range(100, 116):
        samples += [(LAYERS, which, _coefficients(300, seed, loudest=loud)) for which, loud in enumerate(LOUDEST)]
        samples += [(NOTED, which, array) for which, array in enumerate(_noted(300, seed))]
    return trained(samples)


TRAINED = _trained()


def _bound(tensors: Mapping[str, np.ndarray] = TRAINED) -> AdaptiveCoder:
    coder = AdaptiveCoder()
    coder.bind(ANY, Profile({f"symbols.{name}": tensor for name, tensor in tensors.items()}, {}))
    return coder


CODER = _bound()


class TestConformance(SymbolCoderConformance):
    dtypes = ("int8", "int16", "int32", "uint8", "uint16")

    def coder(self) -> SymbolCoder:
        return CODER


def _decoded(
    part: bytes, like: list[np.ndarray], coder: AdaptiveCoder = CODER, layers: range = LAYERS
) -> list[np.ndarray]:
    out = [np.full(array.shape, 77, array.dtype) for array in like]
    coder.decode([part], [out], [layers])
    return out


def _round_trip(arrays: list[np.ndarray], coder: AdaptiveCoder = CODER, layers: range = LAYERS) -> bytes:
    part = coder.encode(arrays, layers)
    for array, back in zip(arrays, _decoded(part, arrays, coder, layers), strict=True):
        assert np.array_equal(array, back)
    assert sum(array.nbytes for array in arrays) <= MAX_EXPANSION * len(part)
    return part


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_arrays_come_back(data: st.DataObject) -> None:
    arrays = []
    for _ in range(data.draw(st.integers(0, 3))):
        dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
        shape = data.draw(st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 7, COLUMNS])))
        limits, spread = np.iinfo(dtype), data.draw(st.sampled_from([0.2, 2, 50, 3000, 1e9]))
        values = np.random.default_rng(data.draw(st.integers(0, 99))).laplace(scale=spread, size=shape)
        arrays.append(np.clip(np.rint(values), limits.min, limits.max).astype(dtype))
    _round_trip(arrays)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_every_type(dtype: str) -> None:
    limits = np.iinfo(dtype)
    _round_trip([np.array([[limits.max, limits.min, 0, 14, 15, 16, min(limits.max, 32767)]] * 3, dtype)])


def test_a_view_and_more_dimensions() -> None:
    wide = _coefficients(60, columns=2 * COLUMNS)
    out = np.zeros_like(wide)
    CODER.decode([CODER.encode([wide[:, ::2]], LAYERS)], [[out[:, ::2]]], [LAYERS])
    assert np.array_equal(out[:, ::2], wide[:, ::2])
    assert not out[:, 1::2].any()
    _round_trip([wide.reshape(3, 20, 2 * COLUMNS)])


def test_several_parts_and_groups_at_once() -> None:
    groups = [LAYERS, range(1), LAYERS]
    arrays = [[_coefficients(40, seed), _coefficients(3, seed, loudest=12.0)] for seed in range(3)]
    parts = [CODER.encode(of_group, layers) for of_group, layers in zip(arrays, groups, strict=True)]
    out = [[np.empty_like(array) for array in of_group] for of_group in arrays]
    CODER.decode(parts, out, groups)
    for expected, found in zip(arrays, out, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_no_symbols_take_no_bytes() -> None:
    assert _round_trip([]) == b""
    assert _round_trip([np.zeros((0, COLUMNS), np.int16), np.zeros((9, 0), np.int16)]) == b""
    with pytest.raises(DamagedArchive, match="take 0; expected 0"):
        _decoded(b"\0", [np.zeros((0, 3), np.int16)])


def test_zeros_are_padded_to_the_expansion_limit() -> None:
    zeros = np.zeros((2000, 500), np.int16)
    part = _round_trip([zeros])
    assert len(part) == -(-zeros.nbytes // MAX_EXPANSION)
    for wrong in (part[:-1], part + b"\0", part[:-1] + b"\1"):
        with pytest.raises(DamagedArchive):
            _decoded(wrong, [zeros])


def test_single_columns_that_are_alike_share_tables() -> None:
    """Presets differ in the step alone, so their exponents are the same: once is enough in a profile."""
    exponents, coefficients = _noted(300)
    alike, unlike = _noted(300, seed=1)[0], 20 + exponents % 2
    arrays = (exponents, coefficients, alike, coefficients, unlike)
    made = trained([*((LAYERS, which, array) for which, array in enumerate(arrays)), (NOTED, 0, exponents)])
    known = {tuple(map(int, name.split(".")[:2])) for name in made}
    assert known == {(LAYERS.start, 0), (LAYERS.start, 1), (LAYERS.start, 3), (LAYERS.start, 4), (NOTED.start, 0)}


def test_same_bytes_every_time_and_after_a_profile_came_back() -> None:
    array = _coefficients(50)
    again = _trained()
    assert all(np.array_equal(again[name], tensor) for name, tensor in TRAINED.items())
    profile = Profile({f"symbols.{name}": tensor for name, tensor in again.items()}, {})
    other = AdaptiveCoder()
    other.bind(ANY, Profile.unpack(profile.pack()))
    assert other.encode([array], LAYERS) == CODER.encode([array], LAYERS) == CODER.encode([array], LAYERS)


def test_tables_are_those_that_fit_best() -> None:
    for which, loudest in enumerate(LOUDEST):
        assert _round_trip([_coefficients(60, 1, loudest=loudest)])[0] == which
    rng = np.random.default_rng(0)
    assert _round_trip([rng.integers(-999, 999, (60, COLUMNS)).astype(np.int16)[:, ::-1]])[0] == 2
    assert CODER.encode([_coefficients(60, 1)], range(1))[0] == 0  # no tables for these layers: the flat ones


@pytest.mark.parametrize("columns", [COLUMNS - 4, COLUMNS + 4])
def test_where_no_tables_fit_others_are_cut_or_padded(columns: int) -> None:
    array = _coefficients(120, 1)[:, :columns] if columns < COLUMNS else np.pad(_coefficients(120, 1), ((0, 0), (0, 4)))
    found = _round_trip([array])
    assert found[0] == 1  # behind the flat ones, the first of those trained, which are as loud
    unknown = AdaptiveCoder()
    unknown.bind(ANY, None)
    assert len(found) < 0.9 * len(unknown.encode([array], LAYERS))
    assert _round_trip([array[:, :1]])[0] == 0  # one column is another kind of number


def test_fewer_bytes_than_static_tables() -> None:
    """Against the entropy of each coefficient's own histogram of these very symbols, which no decoder knows."""
    arrays = [_coefficients(256, seed) for seed in range(20, 28)]
    ideal = 0.0
    for column in np.concatenate(arrays).T:
        share = np.unique(column, return_counts=True)[1] / len(column)
        ideal -= len(column) * float((share * np.log2(share)).sum()) / 8
    assert sum(len(_round_trip([array])) for array in arrays) < 0.98 * ideal


def test_every_truncation_and_every_byte_behind_are_noticed() -> None:
    arrays = [_coefficients(20), _coefficients(6, loudest=12.0)]
    part = CODER.encode(arrays, LAYERS)
    for length in range(len(part)):
        with pytest.raises(DamagedArchive):
            _decoded(part[:length], arrays)
    with pytest.raises(DamagedArchive, match="ends before its symbols"):
        _decoded(part[: len(part) // 2], arrays)
    for more in (b"\0", b"\1", bytes(9)):
        with pytest.raises(DamagedArchive, match="expected"):
            _decoded(part + more, arrays)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200), st.sampled_from(DTYPES), st.sampled_from([1, 7, COLUMNS]))
def test_any_bytes_decode_or_are_refused(data: bytes, dtype: str, columns: int) -> None:
    with suppress(DamagedArchive):
        _decoded(data, [np.empty((13, columns), dtype), np.empty((2, columns), dtype)])


def test_flipped_bits_stay_within_the_arrays() -> None:
    rng, arrays = np.random.default_rng(1), [_coefficients(30), _coefficients(4, loudest=12.0)]
    part = CODER.encode(arrays, LAYERS)
    noticed = 0
    for _ in range(300):
        bad = bytearray(part)
        bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        try:
            _decoded(bytes(bad), arrays)
        except DamagedArchive:
            noticed += 1
    assert noticed > 250


def test_a_symbol_its_type_cannot_hold() -> None:
    part = CODER.encode([np.full((2, 3), 300, np.int16)], LAYERS)
    with pytest.raises(DamagedArchive, match="symbol not in int8"):
        _decoded(part, [np.empty((2, 3), np.int8)])
    part = CODER.encode([np.full((2, 3), -1, np.int16)], LAYERS)
    with pytest.raises(DamagedArchive, match="symbol not in uint8"):
        _decoded(part, [np.empty((2, 3), np.uint8)])
    with pytest.raises(DamagedArchive, match="tables 3 of 3"):
        _decoded(b"\3" + part[1:], [np.empty((2, 3), np.int16)])


@pytest.mark.parametrize("dtype", ["uint32", "int64", "float32"])
def test_other_types_are_refused(dtype: str) -> None:
    with pytest.raises(InvalidInput, match=dtype):
        CODER.encode([np.zeros((2, 3), dtype)], LAYERS)


def test_settings_and_profiles_that_nobody_wrote() -> None:
    with pytest.raises(InvalidRecipe, match="speed"):
        AdaptiveCoder(speed=3)
    cases: list[tuple[str, np.ndarray]] = [
        ("3.0.mean", np.zeros(COLUMNS, np.uint16)),
        ("3.0.mean", np.full(COLUMNS, 10_241, np.uint16)),
        ("3.0.static", np.full((2, COLUMNS), 2048, np.int16)),
        ("3.0.static", np.zeros((2, COLUMNS - 1), np.int16)),
        ("3.0.weights", np.full((160, 4), -(1 << 20) - 1, np.int32)),
        ("3.0.table", TRAINED["3.0.table"].astype(np.int32)),
        ("3.0.table", TRAINED["3.0.table"][:-1]),
        ("3.0.other", np.zeros(1)),
        ("3.x.mean", np.zeros(1)),
        ("mean", np.zeros(1)),
        ("7.0.mean", np.ones(COLUMNS, np.uint16)),
    ]
    for name, tensor in cases:
        with pytest.raises(ProfileMismatch):
            _bound({**TRAINED, name: tensor})


def test_numbers_are_those_of_the_page() -> None:
    for x in (-2047, -1500, -256, -1, 0, 1, 256, 1500, 2047):
        exact = min(max(math.floor(65536 / (1 + math.exp(abs(x) / 256))), 24), 32768)
        assert SQUASH[x + 2048] == (exact if x <= 0 else 65536 - exact)
    for i in (0, 1, 7, 2000, 2048, 4095):
        assert STRETCH[i] == max([x for x in range(-2046, 2048) if SQUASH[x + 2048] <= 16 * i + 8], default=-2047)


def test_notes_save_bits_and_come_from_the_array_before() -> None:
    arrays = [_noted(256, seed) for seed in range(6)]
    with_notes = sum(len(_round_trip(pair, layers=NOTED)) for pair in arrays)
    without = sum(len(_round_trip([part], layers=NOTED)) for pair in arrays for part in pair)
    assert with_notes < 0.98 * without
    steps, coefficients = arrays[0]
    _round_trip([steps[:9], coefficients, steps, coefficients.reshape(2, 128, -1), coefficients[:, :1]], layers=NOTED)


@pytest.mark.parametrize("loudest", [0.3, 3.0, 400.0])
@pytest.mark.parametrize("begin", ["flat", "trained"])
def test_the_walk_is_that_of_the_page(begin: str, loudest: float) -> None:
    array, steps = _coefficients(156, 4, loudest=loudest), np.tile(np.arange(-5, 8, dtype=np.int16), 12)[:, None]
    array[5] = 32767
    array[7, ::3] = -32768
    fields = {name.split(".")[2]: tensor for name, tensor in TRAINED.items() if name.startswith("6.1.")}
    tables = flat(COLUMNS) if begin == "flat" else Tables(**fields)
    stream, bits = PlainCoder(tables).encode(array.tolist(), [min(max(n + 3, 0), 7) for n in steps[:, 0].tolist()])
    _, (_, notes) = notes_of([steps, array])
    assert _encode([(array.astype(np.int32), notes, tables)]) == stream
    assert len(stream) <= bits / 8 + 2
