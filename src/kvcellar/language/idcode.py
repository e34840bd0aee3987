"""Token ids in few bits without any model of the language: `ids/1`.

Method. An id is coded bit by bit from the top, in as many bits as the largest id has. What the bits above it were is a
node; a node is counted in five contexts (no token before, one, two, three, and the last but one alone). The counts of
zeros and ones seen there are a state, which an adaptive map turns into a probability; the logits of these and of the
longest match's next bit are added with weights that follow the data, chosen by how much is known, and a binary
arithmetic coder takes the result. So a node seen once costs what nodes seen once have cost, which is how the escape
from known to new tokens is learned. Vocabularies by merges (BPE) number their tokens by how common they were: the upper
bits of a new id are therefore cheap, without a list of words.

Logistic mixing and indirect states as in PAQ (Mahoney 2005, *Adaptive weighing of context models*); we differ in coding
ids of up to 32 bits in place of bytes, and in that all is integers (exactness rule D1). Never more than the bit-packed
ids and one byte. Bytes and seconds: docs/language-tokens.md.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from ..errors import DamagedArchive, InvalidInput
from ..symbols.binarycoder import DECODE, ENCODE, SQUASH, STRETCH, TOP, flush
from . import idkernels as kernels

PART = "token ids"
MAX_ID = (1 << 32) - 1
_LARGEST_TABLE, _SMALLEST_TABLE = 22, 12
_PAIRS = 1 << 16
_MIXED = 32  # flag of the first byte, beside the width − 1
_BITS_A_BYTE = 16_384  # decisions; one costs at least 24 / 65,536 of a nat
_EMPTY = np.zeros(0, np.int64)


def width_of(ids: Int64[np.ndarray, " tokens"]) -> int:
    """Bits of the largest id, at least 1. Raises InvalidInput for ids outside 0 … 2³² − 1."""
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= MAX_ID:
        raise InvalidInput(f"token ids from {ids.min()} to {ids.max()}; expected 0…{MAX_ID}")
    return max(1, int(ids.max(initial=0)).bit_length())


def raw_size(ids: Int64[np.ndarray, " tokens"]) -> int:
    """Bytes of the bit-packed ids."""
    return -(-width_of(ids) * len(ids) // 8)


def encode_ids(ids: Int64[np.ndarray, " tokens"]) -> bytes:
    """The stream of ids int64 (T,), T ≥ 0: width and kind [1], then the coded or the bit-packed ids.

    At most `raw_size` + 1 bytes; none for no ids. Raises InvalidInput.
    """
    width = width_of(ids)
    if not len(ids):
        return b""
    data = np.zeros(raw_size(ids) + 2 * width + 9, np.uint8)
    place = np.array([0, TOP, 0], np.int64)
    if kernels.walk(ENCODE, ids.copy(), width, data, place, *_start(len(ids), width)) == kernels.DONE:
        stream = data[: flush(data, place[2], place[0])].tobytes()
        if len(stream) < raw_size(ids):
            return bytes([_MIXED | width - 1]) + stream
    shifts = np.arange(width)
    bits = (ids[:, None] >> shifts & 1).astype(np.uint8)
    return bytes([width - 1]) + np.packbits(bits, bitorder="little").tobytes()


def decode_ids(stream: bytes | memoryview, tokens: int) -> Int64[np.ndarray, " tokens"]:
    """The `tokens` ids of a stream. Raises DamagedArchive for a stream that cannot hold so many, or too many bytes."""
    data = np.frombuffer(stream, np.uint8).copy()  # the walk is compiled for bytes that may be written
    if not tokens and not len(data):
        return _EMPTY
    if not tokens or not len(data) or data[0] >= 2 * _MIXED:
        raise DamagedArchive(PART, f"a stream of {len(data)} bytes for {tokens} ids, which begins with no known kind")
    width, data = int(data[0] & _MIXED - 1) + 1, data[1:]
    if not stream[0] & _MIXED:
        return _unpacked(data, width, tokens)
    if tokens * width > _BITS_A_BYTE * (len(data) + 8):
        raise DamagedArchive(PART, f"{len(data)} bytes cannot hold {tokens} ids of {width} bits")
    ids = np.zeros(tokens, np.int64)
    first = int.from_bytes(data[:5].tobytes().ljust(5, b"\0"), "big")
    place = np.array([first, TOP, 5], np.int64)
    if kernels.walk(DECODE, ids, width, data, place, *_start(tokens, width)) != kernels.DONE:
        raise DamagedArchive(PART, f"{len(data)} bytes end before {tokens} ids of {width} bits do")
    return ids


def _unpacked(data: np.ndarray, width: int, tokens: int) -> np.ndarray:
    if len(data) != -(-width * tokens // 8):
        raise DamagedArchive(
            PART, f"{len(data)} bytes of {tokens} ids of {width} bits; they take {width * tokens} bits"
        )
    bits = np.unpackbits(data, count=width * tokens, bitorder="little").reshape(tokens, width)
    return np.asarray(bits.astype(np.int64) @ (np.int64(1) << np.arange(width)), np.int64)


def _start(tokens: int, width: int) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Numbers, model and memory of the walk, as they are before the first id."""
    zeros, ones = np.arange(kernels.STATES) >> 4, np.arange(kernels.STATES) & 15
    maps = np.tile(65_535 * (5 * ones + 2) // (5 * (zeros + ones) + 4), (kernels.ORDERS, kernels.GROUPS, 1))
    uses = np.full(maps.shape, 4, np.uint8)
    weights = np.full((kernels.SETS, kernels.INPUTS), 22_938, np.int32)
    weights[:, -1] = 0
    rates = 131_072 // (2 * np.minimum(np.arange(256), 127) + 3)
    nodes = 2 * kernels.ORDERS * width * tokens
    size = 1 << min(max(nodes.bit_length(), _SMALLEST_TABLE), _LARGEST_TABLE)
    matched = np.full(kernels.MATCHES, 60_000, np.uint16)
    memory = np.zeros(size, np.uint32), np.zeros(size, np.uint8), np.zeros(_PAIRS, np.int32)
    return (STRETCH, SQUASH, rates), (maps.astype(np.uint16), uses, matched, weights), memory
