"""Byte planes: a float's own bits, split so that an order-0 code finds what is regular in them.

Method. Per KV head and channel, subtract (mod 2^w) a base: the mean magnitude over the block's tokens read as an
integer, its top 10 bits, with the majority sign. What is left of exponent and sign is near zero whatever the
channel's scale, so one Huffman table serves the whole part. Then split words into byte planes; zstd codes a plane
where that saves at least 1/32, otherwise it stays raw. zstd runs with a tiny match table, so the planes become
plain Huffman blocks: smaller here than with matches, and faster to decode.

Splitting bytes before compressing is Blosc's and HDF5's shuffle filter; we differ in subtracting a base first and
in the order of the bytes: words are split into a first and a second half, and byte 2i of a plane belongs to word
i, byte 2i+1 to word h + i. Whole 16-bit words then carry two plane bytes, and joining needs only word operations.

Bytes: docs/format.md §7.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Sequence

import numpy as np
import zstandard

from ..errors import DamagedArchive
from ..stages import SymbolCoder

ID = "byteplanes-zstd/1"
MAX_EXPANSION = 64
MIN_TOKENS_FOR_BASE = 16
_RAW, _PLANES, _PLANES_WITH_BASE = 0, 1, 2
_PLANE_RAW, _PLANE_ZSTD = 0, 1
_BASE_BITS = 10
_WORST_SAVING = 32
_PLANE = struct.Struct("<BI")
_COLUMNS = 1024
_local = threading.local()


class Planes:
    """One array's decoded planes, ready to be joined: `words` are (low, high) byte planes as 16-bit words."""

    def __init__(self, raw: memoryview | None, base: np.ndarray | None, words: list[tuple[np.ndarray, np.ndarray]]):
        self.raw, self.base, self.words = raw, base, words


class BytePlanes(SymbolCoder):
    """Coder of uint16 or uint32 arrays (H, T, D). Never more than 1 byte per array above the raw bytes."""

    id = ID
    max_expansion = MAX_EXPANSION

    def __init__(self, **settings: object):
        self.refuse_unknown(settings)

    def encode(self, arrays: Sequence[np.ndarray]) -> bytes:
        part = b"".join(_encode(np.ascontiguousarray(array)) for array in arrays)
        shortest = -(-sum(array.nbytes for array in arrays) // MAX_EXPANSION)
        return part + bytes(max(0, shortest - len(part)))

    def unpack(self, data: bytes | memoryview, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> object:
        cursor = _Cursor(memoryview(data))
        planes = [_unpack(cursor, shape, dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True)]
        if any(cursor.rest()):
            raise DamagedArchive("block part", "bytes left over behind its streams")
        return planes

    def assemble(self, unpacked: object, out: Sequence[np.ndarray]) -> None:
        for planes, array in zip(unpacked, out, strict=True):  # type: ignore[call-overload]
            _assemble(planes, array)


class _Cursor:
    """Takes byte ranges off a part, refusing to run over its end."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 0

    def take(self, length: int) -> memoryview:
        if length > len(self.data) - self.at:
            raise DamagedArchive("block part", f"{length} bytes announced, {len(self.data) - self.at} there")
        self.at += length
        return self.data[self.at - length : self.at]

    def rest(self) -> memoryview:
        return self.data[self.at :]


def _encode(array: np.ndarray) -> bytes:
    raw = bytes([_RAW]) + array.tobytes()
    if not array.size:
        return raw
    if array.shape[1] >= MIN_TOKENS_FOR_BASE:
        base = _base(array)
        wide_base = base.astype(array.dtype) << array.dtype.type(8 * array.dtype.itemsize - 16)
        coded = bytes([_PLANES_WITH_BASE]) + _encode_words(base) + _encode_words(array - wide_base[:, None, :])
    else:
        coded = bytes([_PLANES]) + _encode_words(array)
    return coded if len(coded) < len(raw) else raw


def _base(array: np.ndarray) -> np.ndarray:
    """Top 16 bits of the base of each head and channel, uint16 (H, D)."""
    bits = 8 * array.dtype.itemsize
    sign = array.dtype.type(1 << (bits - 1))
    mean = (array & ~sign).sum(axis=1, dtype=np.uint64) // np.uint64(array.shape[1])
    negative = (array >= sign).sum(axis=1) * 2 > array.shape[1]
    top = (mean >> np.uint64(bits - 16)).astype(np.uint16) & np.uint16(0xFFFF << (16 - _BASE_BITS) & 0xFFFF)
    return top | (negative.astype(np.uint16) << np.uint16(15))


def _encode_words(array: np.ndarray) -> bytes:
    flat = array.reshape(-1)
    if flat.dtype.itemsize == 4:
        halves = [(flat >> np.uint32(16)).astype(np.uint16), flat.astype(np.uint16)]
    else:
        halves = [flat]
    return b"".join(_encode_plane(plane) for word in halves for plane in _split(word))


def _split(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high byte plane of uint16 words (n,), each as ceil(n/2) words of two plane bytes."""
    half = -(-words.size // 2)
    first, second = words[:half], np.zeros(half, np.uint16)
    second[: words.size - half] = words[half:]
    low = (first & np.uint16(0x00FF)) | (second << np.uint16(8))
    high = (first >> np.uint16(8)) | (second & np.uint16(0xFF00))
    return low, high


def _encode_plane(plane: np.ndarray) -> bytes:
    raw = plane.astype("<u2", copy=False).tobytes()
    if not hasattr(_local, "compressor"):
        params = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17, write_content_size=True
        )
        _local.compressor = zstandard.ZstdCompressor(compression_params=params)
    coded = _local.compressor.compress(raw)
    if len(coded) > len(raw) - len(raw) // _WORST_SAVING - 1:
        return _PLANE.pack(_PLANE_RAW, len(raw)) + raw
    return _PLANE.pack(_PLANE_ZSTD, len(coded)) + coded


def _unpack(cursor: _Cursor, shape: tuple[int, ...], itemsize: int) -> Planes:
    numbers = math.prod(shape)
    mode = cursor.take(1)[0]
    if mode == _RAW:
        return Planes(cursor.take(numbers * itemsize), None, [])
    if mode not in (_PLANES, _PLANES_WITH_BASE):
        raise DamagedArchive("block part", f"unknown stream mode {mode}")
    base = None
    if mode == _PLANES_WITH_BASE:
        low, high = _unpack_plane(cursor, shape[0] * shape[2]), _unpack_plane(cursor, shape[0] * shape[2])
        base = _join(low, high, shape[0] * shape[2]).reshape(shape[0], shape[2]).copy()
    words = [(_unpack_plane(cursor, numbers), _unpack_plane(cursor, numbers)) for _ in range(itemsize // 2)]
    return Planes(None, base, words)


def _unpack_plane(cursor: _Cursor, numbers: int) -> np.ndarray:
    length = 2 * -(-numbers // 2)
    codec, coded_length = _PLANE.unpack(cursor.take(_PLANE.size))
    coded = cursor.take(coded_length)
    if codec == _PLANE_RAW:
        if coded_length != length:
            raise DamagedArchive("block part", f"raw plane of {coded_length} bytes, expected {length}")
        return np.frombuffer(coded, "<u2")
    if codec != _PLANE_ZSTD:
        raise DamagedArchive("block part", f"unknown plane codec {codec}")
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    try:
        if zstandard.frame_content_size(coded) != length:
            raise DamagedArchive("block part", f"plane of {zstandard.frame_content_size(coded)} bytes, not {length}")
        plane = _local.decompressor.decompress(coded, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedArchive("block part", f"plane cannot be decoded ({error})") from error
    if len(plane) != length:
        raise DamagedArchive("block part", f"plane decodes to {len(plane)} bytes, expected {length}")
    return np.frombuffer(plane, "<u2")


def _join(low: np.ndarray, high: np.ndarray, numbers: int) -> np.ndarray:
    """Words (n,) of their byte planes; a view of this thread's scratch memory."""
    half = low.size
    words, term = _scratch(half)
    first, second = words[:half], words[half:]
    np.left_shift(high, np.uint16(8), out=first)
    np.bitwise_and(low, np.uint16(0x00FF), out=term)
    np.bitwise_or(first, term, out=first)
    np.right_shift(low, np.uint16(8), out=second)
    np.bitwise_and(high, np.uint16(0xFF00), out=term)
    np.bitwise_or(second, term, out=second)
    return words[:numbers]


def _scratch(half: int) -> tuple[np.ndarray, np.ndarray]:
    if getattr(_local, "half", 0) < half:
        _local.half, _local.words, _local.term = half, np.empty(2 * half, np.uint16), np.empty(half, np.uint16)
    return _local.words[: 2 * half], _local.term[:half]


def _assemble(planes: Planes, out: np.ndarray) -> None:
    """Join `planes` into `out` (H, T, D), which may be a slice along T of a larger array."""
    if planes.raw is not None:
        out[...] = np.frombuffer(planes.raw, out.dtype.newbyteorder("<")).reshape(out.shape)
        return
    words = _join(*planes.words[0], out.size)
    if len(planes.words) == 2:
        wide = words.astype(np.uint32) << np.uint32(16)
        words = np.bitwise_or(wide, _join(*planes.words[1], out.size), out=wide)
    if planes.base is None:
        out[...] = words.reshape(out.shape)
        return
    base = planes.base.astype(out.dtype) << out.dtype.type(8 * out.dtype.itemsize - 16)
    heads, tokens, width = out.shape
    rows = math.gcd(tokens, max(1, _COLUMNS // width))
    long = (heads, tokens // rows, rows * width)
    target = out.reshape(long, copy=False)  # merges the two inner axes, which are contiguous
    np.add(words.reshape(long), np.tile(base, (1, rows))[:, None, :], out=target)
