"""Byte planes: a float's own bits, split so that an order-0 code finds what is regular in them.

Method. Per KV head and channel, subtract (mod 2^w) a base: the mean magnitude over the block's tokens read as an
integer, its top 10 bits, with the majority sign. What is left of exponent and sign is near zero whatever the
channel's scale, so one Huffman table serves the whole part. Then split the numbers into byte planes; zstd codes a
plane where that saves at least 1/32, otherwise it stays raw. zstd runs with a tiny match table, so the planes become
plain Huffman blocks: smaller here than with matches, and faster to decode.

Splitting bytes before compressing is the shuffle filter of HDF5 and Blosc; we differ in subtracting a base first and
in coding each plane on its own. Bytes: docs/format.md §7.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence

import numpy as np
import zstandard

from ..errors import DamagedArchive, UnsupportedCache
from ..stages import SymbolCoder
from .kernels import join2, join4

ID = "byteplanes-zstd/1"
MAX_EXPANSION = 64
MAX_PLANE = (1 << 32) - 1
MIN_TOKENS_FOR_BASE = 16
PART = "block part"
_RAW, _PLANES, _PLANES_WITH_BASE = 0, 1, 2
_PLANE_RAW, _PLANE_ZSTD = 0, 1
_BASE_BITS = 10
_RLE_BLOCK = 1
_WORST_SAVING = 32
_HEADS = {2: struct.Struct("<BBIBI"), 4: struct.Struct("<BBIBIBIBI")}  # mode, then codec and length of each plane
_local = threading.local()


class BytePlanes(SymbolCoder):
    """Coder of uint16 or uint32 arrays (H, T, D). Never more than 1 byte per array above the raw bytes."""

    id = ID
    max_expansion = MAX_EXPANSION

    def __init__(self, **settings: object):
        self.refuse_unknown(settings)

    def encode(self, arrays: Sequence[np.ndarray], layers: range) -> bytes:
        if largest := max((array.size for array in arrays if array.size > MAX_PLANE), default=0):
            raise UnsupportedCache(
                f"{largest} numbers in one block of a layer; at most {MAX_PLANE}: use a smaller block"
            )
        part = b"".join(_encode(np.ascontiguousarray(array)) for array in arrays)
        shortest = -(-sum(array.nbytes for array in arrays) // MAX_EXPANSION)
        return part + bytes(max(0, shortest - len(part)))

    def decode(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], groups: Sequence[range]
    ) -> None:
        jobs = _Jobs()
        for part, arrays in zip(parts, out, strict=True):
            _read_streams(memoryview(part), arrays, jobs)
        jobs.run()


def _encode(array: np.ndarray) -> bytes:
    """mode; codec and length of each plane; base; planes. Raw: mode, bytes."""
    raw = bytes([_RAW]) + array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    if not array.size:
        return raw
    mode, base = _PLANES, b""
    if array.shape[1] >= MIN_TOKENS_FOR_BASE:
        top = _base(array)
        mode, base = _PLANES_WITH_BASE, top.astype("<u2").tobytes()
        array = array - _widened(top, array.dtype)
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    split = little.reshape(-1).view(np.uint8).reshape(-1, array.dtype.itemsize).T
    planes = [_encode_plane(plane.tobytes()) for plane in split]
    table = [number for codec, data in planes for number in (codec, len(data))]
    coded = b"".join([_HEADS[array.itemsize].pack(mode, *table), base, *(data for _, data in planes)])
    return coded if len(coded) < len(raw) else raw


def _base(array: np.ndarray) -> np.ndarray:
    """Top 16 bits of the base of each head and channel, uint16 (H, 1, D)."""
    bits = 8 * array.dtype.itemsize
    sign = array.dtype.type(1 << (bits - 1))
    mean = (array & ~sign).sum(axis=1, dtype=np.uint64, keepdims=True) // np.uint64(array.shape[1])
    negative = (array >= sign).sum(axis=1, keepdims=True) * 2 > array.shape[1]
    top = (mean >> np.uint64(bits - 16)).astype(np.uint16) & np.uint16(0xFFFF << (16 - _BASE_BITS) & 0xFFFF)
    base: np.ndarray = top | (negative.astype(np.uint16) << np.uint16(15))
    return base


def _widened(base: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The base in numbers of `dtype`, of which it is the top 16 bits."""
    if dtype.itemsize == 2:
        return base
    wide: np.ndarray = base.astype(dtype) << dtype.type(8 * dtype.itemsize - 16)
    return wide


def _encode_plane(raw: bytes) -> tuple[int, bytes]:
    if not hasattr(_local, "compressor"):
        params = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17, write_content_size=True
        )
        _local.compressor = zstandard.ZstdCompressor(compression_params=params)
    coded = _local.compressor.compress(raw)
    return (_PLANE_ZSTD, coded) if len(coded) < len(raw) - len(raw) // _WORST_SAVING else (_PLANE_RAW, raw)


class _Jobs:
    """Streams whose planes wait to be decompressed and joined, all in two calls that leave the interpreter lock alone.

    A plane is known by its address: of raw bytes in the part, or of the zstd frame's contents once decompressed.
    """

    def __init__(self) -> None:
        self.frames: list[memoryview] = []
        self.sizes: list[int] = []
        self.kept: list[np.ndarray] = []
        self.rows: dict[int, list[tuple[int, ...]]] = {2: [], 4: []}  # by bytes per number

    def address(self, array: np.ndarray) -> int:
        """Where `array` lies; it stays there until the jobs are done."""
        self.kept.append(array)
        return _address(array)

    def frame(self, data: memoryview, size: int) -> int:
        """A stand-in for the address of the `size` bytes that a zstd frame holds."""
        self.frames.append(data)
        self.sizes.append(size)
        return -len(self.frames)

    def run(self) -> None:
        contents = np.array([_address(content) for content in self._decompressed()] + [0], np.int64)
        for size, rows in self.rows.items():
            if rows:
                table = np.array(rows, np.int64)
                places = table[:, :size]
                places[places < 0] = contents[-1 - places[places < 0]]
                (join2 if size == 2 else join4)(table)

    def _decompressed(self) -> list[np.ndarray]:
        if not self.frames:
            return []
        if not hasattr(_local, "decompressor"):
            _local.decompressor = zstandard.ZstdDecompressor()
        try:
            for frame, expected in zip(self.frames, self.sizes, strict=True):
                if (size := zstandard.frame_content_size(frame)) != expected:
                    raise DamagedArchive(PART, f"plane of {size} bytes, expected {expected}")
                if (length := _frame_length(frame)) != len(frame):
                    raise DamagedArchive(PART, f"a zstd frame of {length} bytes in {len(frame)}")
            sizes = struct.pack(f"<{len(self.sizes)}Q", *self.sizes)
            found = _local.decompressor.multi_decompress_to_buffer(self.frames, decompressed_sizes=sizes, threads=1)
            contents = [np.frombuffer(segment, np.uint8) for segment in found]
        except zstandard.ZstdError as error:
            raise DamagedArchive(PART, f"plane cannot be decoded ({error})") from error
        if [content.size for content in contents] != self.sizes:
            raise DamagedArchive(PART, "a plane decodes to fewer bytes than its frame says")
        self.kept += contents
        return contents


def _frame_length(frame: memoryview) -> int:
    """Bytes of the zstd frame that `frame` starts with, by its block headers (RFC 8878 §3.1.1.2)."""
    at = zstandard.frame_header_size(frame)
    last = False
    while not last and at + 3 <= len(frame):
        header = int.from_bytes(frame[at : at + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == _RLE_BLOCK else size)
    return at + 4 * zstandard.get_frame_parameters(frame).has_checksum if last else len(frame) + 1


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _read_streams(part: memoryview, arrays: Sequence[np.ndarray], jobs: _Jobs) -> None:
    """Read a part's streams, every length checked against the part and the array it goes to; raw ones at once."""
    at, part_address = 0, jobs.address(np.frombuffer(part, np.uint8)) if len(part) else 0
    for out in arrays:
        head, numbers, (heads, tokens, width) = _HEADS[out.itemsize], out.size, out.shape
        mode = part[at] if at < len(part) else -1
        if mode == _RAW:
            raw = np.frombuffer(_take(part, at + 1, out.nbytes), out.dtype.newbyteorder("<"))
            out[...] = raw.reshape(out.shape)
            at += 1 + out.nbytes
            continue
        if mode not in (_PLANES, _PLANES_WITH_BASE) or at + head.size > len(part):
            raise DamagedArchive(PART, f"stream of mode {mode} with {len(part) - at} bytes left")
        _, *table = head.unpack_from(part, at)
        at += head.size
        base = np.zeros(heads * width, np.uint16)
        if mode == _PLANES_WITH_BASE:
            base = np.frombuffer(_take(part, at, base.nbytes), "<u2")
            at += base.nbytes
        places = []
        for codec, length in zip(table[::2], table[1::2], strict=True):
            data = _take(part, at, length)
            if codec == _PLANE_ZSTD:
                places.append(jobs.frame(data, numbers))
            elif codec == _PLANE_RAW and length == numbers:
                places.append(part_address + at)
            else:
                raise DamagedArchive(PART, f"plane of codec {codec} and {length} bytes for {numbers} numbers")
            at += length
        step = out.strides[0] // out.itemsize
        row = (*places, jobs.address(_widened(base, out.dtype)), _address(out), step, heads, tokens, width)
        jobs.rows[out.itemsize].append(row)
    if any(part[at:]):
        raise DamagedArchive(PART, "bytes left over behind its streams")


def _take(part: memoryview, at: int, length: int) -> memoryview:
    taken = part[at : at + length]
    if len(taken) != length:
        raise DamagedArchive(PART, f"{length} bytes announced, {len(taken)} there")
    return taken
