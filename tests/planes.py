"""Byte planes read by plain numpy, straight from docs/format.md §7: the slow path that the compiled one must equal."""

from __future__ import annotations

import struct

import numpy as np
import zstandard

RAW, PLANES, PLANES_WITH_BASE = 0, 1, 2
PLANE_RAW, PLANE_ZSTD = 0, 1


def read_plain(part: bytes, shapes: list[tuple[int, int, int]], dtype: type) -> list[np.ndarray]:
    """Arrays (H, T, D) of a part; every number computed on its own terms, nothing shared with the coder."""
    size, at, out = np.dtype(dtype).itemsize, 0, []
    for heads, tokens, width in shapes:
        numbers = heads * tokens * width
        mode, at = part[at], at + 1
        if mode == RAW:
            flat = np.frombuffer(part[at : at + numbers * size], np.dtype(dtype).newbyteorder("<"))
            out.append(flat.reshape(heads, tokens, width).astype(dtype))
            at += numbers * size
            continue
        table = []
        for _ in range(size):
            table.append(struct.unpack_from("<BI", part, at))
            at += 5
        base = np.zeros((heads, 1, width), np.uint64)
        if mode == PLANES_WITH_BASE:
            top = np.frombuffer(part[at : at + 2 * heads * width], "<u2").astype(np.uint64)
            base = top.reshape(heads, 1, width) << np.uint64(8 * size - 16)
            at += 2 * heads * width
        total = np.zeros(numbers, np.uint64)
        for place, (codec, length) in enumerate(table):
            plane = part[at : at + length]
            at += length
            if codec == PLANE_ZSTD:
                plane = zstandard.ZstdDecompressor().decompress(plane)
            total += np.frombuffer(plane, np.uint8).astype(np.uint64) << np.uint64(8 * place)
        joined = total.reshape(heads, tokens, width) + base
        out.append((joined & np.uint64((1 << 8 * size) - 1)).astype(dtype))
    assert not any(part[at:]), "only padding may follow"
    return out


def like_keys(dtype: type, shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    """Bits of floats with a scale and sign of their own per channel, as keys have."""
    rng = np.random.default_rng(seed)
    mean = rng.normal(size=(shape[0], 1, shape[2])) * 2.0 ** rng.integers(-6, 6, (shape[0], 1, shape[2]))
    floats = (mean * (1 + rng.normal(size=shape) / 5)).astype(np.float32)
    return (floats.view(np.uint32) >> np.uint32(32 - 8 * np.dtype(dtype).itemsize)).astype(dtype)
