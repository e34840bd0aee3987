"""Streams nobody wrote: each is DamagedArchive, whatever its lengths and frames claim, and stays within its arrays."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import DamagedArchive
from kvcellar.symbols.byteplanes import BytePlanes
from planes import PLANE_RAW, PLANE_ZSTD, PLANES, like_keys

WORDS = [np.uint16, np.uint32]
CODER = BytePlanes()


def _stream(planes: list[tuple[int, int, bytes]], mode: int = PLANES, base: bytes = b"") -> bytes:
    """mode; codec and length of each plane; base; planes. The lengths are what the caller says."""
    return (
        bytes([mode])
        + b"".join(struct.pack("<BI", c, n) for c, n, _ in planes)
        + base
        + b"".join(d for *_, d in planes)
    )


def _frame(content: bytes, **settings: object) -> bytes:
    return zstandard.ZstdCompressor(**settings).compress(content)


def _refused(part: bytes, shape: tuple[int, int, int] = (1, 16, 4), dtype: type = np.uint16, count: int = 1) -> str:
    out = [np.zeros(shape, dtype) for _ in range(count)]
    with pytest.raises(DamagedArchive) as caught:
        CODER.decode([part], [out], [range(1)])
    return str(caught.value)


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("make", [like_keys, lambda dtype, shape: np.arange(640, dtype=dtype).reshape(shape) * 40503])
def test_a_part_cut_anywhere_is_refused(dtype: type, make: Callable) -> None:
    array = make(dtype, (2, 20, 16))
    part = CODER.encode([array, array], range(1))
    for cut in range(len(part)):
        _refused(part[:cut], array.shape, dtype, 2)


@pytest.mark.parametrize("mode", [3, 4, 127, 255])
def test_unknown_modes_are_refused(mode: int) -> None:
    assert f"mode {mode}" in _refused(bytes([mode]) + bytes(200))


GOOD = (PLANE_RAW, 64, bytes(range(64)))
FRAME = _frame(bytes(64))
BOMB = _frame(bytes(1 << 26))
CHECKED = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(range(64)))


@pytest.mark.parametrize(
    "plane",
    [
        (PLANE_RAW, 63, bytes(63)),
        (PLANE_RAW, 65, bytes(65)),
        (PLANE_RAW, 0, b""),
        (PLANE_RAW, 2**32 - 1, bytes(64)),
        (PLANE_ZSTD, 2**32 - 1, FRAME),
        (PLANE_ZSTD, 0, b""),
        (PLANE_ZSTD, 1, b"\x28"),
        (PLANE_ZSTD, 64, bytes(64)),
        (2, 64, bytes(64)),
        (255, 64, bytes(64)),
        (PLANE_ZSTD, *(lambda f: (len(f), f))(_frame(bytes(63)))),
        (PLANE_ZSTD, *(lambda f: (len(f), f))(_frame(bytes(65)))),
        (PLANE_ZSTD, *(lambda f: (len(f), f))(_frame(b""))),
        (PLANE_ZSTD, len(BOMB), BOMB),
        (PLANE_ZSTD, len(FRAME) - 1, FRAME[:-1]),
        (PLANE_ZSTD, len(FRAME) + 3, FRAME + b"abc"),
        (PLANE_ZSTD, 2 * len(FRAME), 2 * FRAME),
        (PLANE_ZSTD, *(lambda f: (len(f), f))(_frame(bytes(64), write_content_size=False))),
        (PLANE_ZSTD, 16, b"\x50\x2a\x4d\x18\x08\0\0\0" + bytes(8)),
        (PLANE_ZSTD, len(CHECKED), CHECKED[:-1] + bytes([CHECKED[-1] ^ 1])),
        (PLANE_ZSTD, 14, b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**63) + b"\1"),
        (PLANE_ZSTD, 14, b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 64) + b"\1"),
    ],
    ids=[
        *("short", "long", "empty", "raw beyond the part", "frame beyond the part", "no frame", "one byte", "zeros"),
        *(
            "codec 2",
            "codec 255",
            "holds 63",
            "holds 65",
            "holds none",
            "bomb",
            "cut frame",
            "garbage behind the frame",
        ),
        *("two frames", "size unknown", "skippable frame", "wrong zstd checksum", "claims 2^63", "claims more"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_planes_that_lie_are_refused(plane: tuple[int, int, bytes], place: int) -> None:
    planes = [GOOD, plane] if place else [plane, GOOD]
    _refused(_stream(planes))


def test_lengths_that_shift_the_planes_are_refused() -> None:
    """Table entries that only together add up."""
    _refused(_stream([(PLANE_RAW, 63, bytes(63)), (PLANE_RAW, 65, bytes(65))]))
    _refused(_stream([(PLANE_RAW, 128, bytes(64)), (PLANE_RAW, 0, bytes(64))]))


def test_bytes_behind_the_streams_are_refused() -> None:
    array = like_keys(np.uint16, (2, 20, 16))
    part = CODER.encode([array], range(1))
    for rest in (b"\1", b"\0\1", b"\xff" * 50, part):
        assert "left over" in _refused(part + rest, array.shape)
    _refused(part, array.shape, count=2)


def test_a_part_for_other_arrays_is_refused() -> None:
    """More tokens, heads or width than were written, fewer, or other words."""
    array = like_keys(np.uint16, (2, 20, 16))
    part = CODER.encode([array], range(1))
    for shape in [(2, 21, 16), (3, 20, 16), (2, 20, 17), (2, 19, 16), (1, 20, 16), (2, 20, 8)]:
        _refused(part, shape)
    _refused(part, (2, 20, 16), np.uint32)
    _refused(part, (2, 10, 16), np.uint32)


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=300), st.sampled_from([b"", b"\0", b"\1", b"\2"]))
def test_no_bytes_do_more_than_raise(data: bytes, start: bytes) -> None:
    out = [np.zeros((1, 16, 4), np.uint16)]
    try:
        CODER.decode([start + data], [out], [range(1)])
    except DamagedArchive:
        return
    assert start + data[: 1 - len(start)] == b"\0", "only a raw stream of the right length can be read by chance"


@pytest.mark.parametrize("dtype", WORDS)
def test_no_flipped_byte_does_more_than_raise_or_change_numbers(dtype: type) -> None:
    """Checksums notice such flips before; the coder must stay within its arrays all the same."""
    array = like_keys(dtype, (2, 20, 8))
    part = CODER.encode([array], range(1))
    for at in range(len(part)):
        for mask in (0x01, 0x80, 0xFF):
            broken = bytearray(part)
            broken[at] ^= mask
            fenced = np.full((2, 60, 8), 0x5A5A, dtype)
            with suppress(DamagedArchive):
                CODER.decode([bytes(broken)], [[fenced[:, 20:40]]], [range(1)])
            assert (fenced[:, :20] == 0x5A5A).all()
            assert (fenced[:, 40:] == 0x5A5A).all()
