"""Byte planes: any bits come back, by the compiled path as by plain numpy, and nothing grows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import InvalidRecipe
from kvcellar.stages import build
from kvcellar.symbols.byteplanes import MAX_EXPANSION, MIN_TOKENS_FOR_BASE, BytePlanes
from planes import PLANES_WITH_BASE, RAW, like_keys, read_plain

WORDS = [np.uint16, np.uint32]
CODER = BytePlanes()


def _round_trip(arrays: list[np.ndarray]) -> bytes:
    """Encode, decode both ways, compare bits and sizes; gives the part."""
    part = CODER.encode(arrays, range(1))
    out = [np.full(array.shape, 0xA5, array.dtype) for array in arrays]
    CODER.decode([part], [out], [range(1)])
    plain = read_plain(part, [array.shape for array in arrays], arrays[0].dtype.type)
    for array, decoded, expected in zip(arrays, out, plain, strict=True):
        assert np.array_equal(array, expected), "encode and the format's text disagree"
        assert np.array_equal(array, decoded), "the compiled path disagrees"
    raw = sum(array.nbytes for array in arrays)
    assert len(part) <= max(raw + len(arrays), -(-raw // MAX_EXPANSION))
    assert raw <= MAX_EXPANSION * len(part)
    return part


SPECIAL = {  # name: bits of float16, bfloat16 (uint16) and float32 (uint32)
    np.uint16: [0x0000, 0x8000, 0x0001, 0x8001, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF, 0x7F80, 0xFF80, 0x7FC1, 0x7F81],
    np.uint32: [0, 1 << 31, 1, (1 << 31) | 1, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0x007FFFFF],
}


def test_every_16_bit_pattern_comes_back() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for shape in [(1, 1 << 16, 1), (1, 256, 256), (16, 64, 64), (1, 1, 1 << 16)]:
        _round_trip([patterns.reshape(shape)])
        _round_trip([np.random.default_rng(0).permutation(patterns).reshape(shape)])


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33, 100])
def test_tokens_around_the_first_base_and_widths(dtype: type, heads: int, tokens: int) -> None:
    for width in (1, 2, 3, 7, 31, 64, 65, 128, 255, 256):
        keys, values = (like_keys(dtype, (heads, tokens, width), seed) for seed in range(2))
        part = _round_trip([keys, values])
        if tokens >= MIN_TOKENS_FOR_BASE and width >= 31:
            assert part[0] == PLANES_WITH_BASE, "these bits are regular enough to be coded"


@pytest.mark.parametrize("dtype", WORDS)
def test_every_width_to_256(dtype: type) -> None:
    for width in range(1, 257):
        _round_trip([like_keys(dtype, (2, 16, width), width), like_keys(dtype, (2, 3, width), width)])


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("tokens", [1, 15, 16, 40])
def test_special_numbers_come_back_bit_by_bit(dtype: type, tokens: int) -> None:
    """NaN payloads, -0, subnormals, infinities: alone, as constants, and strewn among other numbers."""
    for pattern in SPECIAL[dtype]:
        _round_trip([np.full((2, tokens, 5), pattern, dtype)] * 2)
    rng = np.random.default_rng(tokens)
    mixed = like_keys(dtype, (2, tokens, 24))
    mask = rng.random(mixed.shape) < 0.2
    mixed[mask] = rng.choice(np.array(SPECIAL[dtype], dtype), int(mask.sum()))
    _round_trip([mixed, mixed[:, ::-1].copy()])


@pytest.mark.parametrize("dtype", WORDS)
def test_random_bits_cost_one_byte_an_array(dtype: type) -> None:
    rng = np.random.default_rng(1)
    noise = rng.integers(0, 1 << 8 * np.dtype(dtype).itemsize, (2, 50, 33), dtype=dtype)
    part = _round_trip([noise, noise])
    assert len(part) == 2 * noise.nbytes + 2
    assert part[0] == RAW


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 512])
@pytest.mark.parametrize("value", [0, 1, 0x3F80])
def test_constants_are_padded_to_the_expansion_limit(dtype: type, tokens: int, value: int) -> None:
    """A reader allocates at most 64 times what it was given: that must hold for the emptiest of caches, too."""
    array = np.full((4, tokens, 64), value, dtype)
    part = _round_trip([array] * 2)
    if tokens == 512:
        assert len(part) == 2 * array.nbytes // MAX_EXPANSION, "this is the case that needs padding"


@pytest.mark.parametrize("dtype", WORDS)
def test_arrays_without_numbers(dtype: type) -> None:
    empty = np.empty((2, 0, 8), dtype)
    full = like_keys(dtype, (2, 20, 8))
    for arrays in ([empty], [empty, empty], [full, empty], [empty, full]):
        _round_trip(arrays)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(WORDS))
def test_any_bits_of_any_shape(data: st.DataObject, dtype: type) -> None:
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 20)))
    seed = data.draw(st.integers(0, 2**32 - 1))
    spread = data.draw(st.integers(0, 8 * np.dtype(dtype).itemsize))
    rng = np.random.default_rng(seed)
    offset = rng.integers(0, 1 << 8 * np.dtype(dtype).itemsize, (shape[0], 1, shape[2]), dtype=dtype)
    arrays = [offset + rng.integers(0, 1 << spread, shape, dtype=np.uint64).astype(dtype) for _ in range(2)]
    _round_trip(arrays)


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("tokens", [5, 40])
def test_outputs_may_be_slices_of_larger_arrays(dtype: type, tokens: int) -> None:
    """A block goes straight to its tokens within the whole cache, and leaves its neighbours alone."""
    arrays = [like_keys(dtype, (3, tokens, 16), 1), np.zeros((3, tokens, 16), dtype)]
    noise = np.random.default_rng(2).integers(0, 1 << 16, (3, tokens, 16), dtype=dtype)
    for array in (*arrays, noise):
        whole = np.full((3, tokens + 30, 16), 0xBEEF, dtype)
        expected = whole.copy()
        expected[:, 11 : 11 + tokens] = array
        CODER.decode([CODER.encode([array], range(1))], [[whole[:, 11 : 11 + tokens]]], [range(1)])
        assert np.array_equal(whole, expected)


def test_inputs_may_be_slices_and_are_left_alone() -> None:
    whole = like_keys(np.uint16, (2, 60, 8))
    before = whole.copy()
    view = whole[:, 10:40]
    assert CODER.encode([view], range(1)) == CODER.encode([view.copy()], range(1))
    assert np.array_equal(whole, before)


def test_parts_decode_together_as_they_do_alone() -> None:
    """One call takes parts of both word sizes, raw and coded, and sorts them out."""
    rng = np.random.default_rng(5)
    arrays = [
        [like_keys(dtype, (2, tokens, 12), tokens), rng.integers(0, 1 << 16, (2, tokens, 12), dtype=dtype)]
        for dtype in WORDS
        for tokens in (3, 20, 64)
    ]
    out = [[np.empty_like(array) for array in group] for group in arrays]
    CODER.decode(
        [memoryview(CODER.encode(group, range(1))) for group in arrays], out, [range(i, i + 1) for i in range(len(out))]
    )
    for group, decoded in zip(arrays, out, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(group, decoded, strict=True))


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(InvalidRecipe, match="no setting level"):
        build("symbols", {"id": "byteplanes-zstd/1", "level": 3})
