"""The optional index: a suffix array of the sequence read backwards, by which a phrase is found in O(s log T).

The ends 0 … T − 1 in the order of the text before them, newest symbol first. Sorting `line` points gives just this
order, cut after the symbols that one point holds; here ties go on to older symbols, so phrases may be of any length.
Built by prefix doubling (Manber & Myers 1993) on machine words: keys hold the newest m symbols at once, then the ranks
of m, 2m, 4m … symbols are joined in pairs until all differ; O(T log² T) in numpy's sorts.

Bytes: magic (8), T (uint64), then T uint32, all little-endian: 4 B a symbol and 16. Nothing of it is believed:
`from_bytes` proves the order against the symbols, in O(T).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Integer, UInt32

from ..errors import DamagedArchive, InvalidInput
from . import kernels
from .suffix import alike, as_symbols

MAGIC = b"kvcsufx1"
MAX_SYMBOLS = (1 << 32) - 1
SORTED_SHARE = 64  # of the sequence: a smaller share of hits is quicker to sort than to tick off
PART = "suffix index"
_HEAD = struct.Struct("<8sQ")


@dataclass(frozen=True, eq=False)
class SuffixIndex:
    """`order` (T,): the ends of `symbols` (T,) sorted by the text before them. Made by `build` or `from_bytes`."""

    symbols: Integer[np.ndarray, " T"]
    order: UInt32[np.ndarray, " T"]

    @classmethod
    def build(cls, symbols: Integer[np.ndarray, " T"]) -> SuffixIndex:
        """Raises InvalidInput for more than 2³² − 1 symbols, or negative ones."""
        symbols = as_symbols(symbols, "the sequence")
        if len(symbols) > MAX_SYMBOLS:
            raise InvalidInput(f"{len(symbols)} symbols; an index holds at most {MAX_SYMBOLS}")
        key, length = _newest_symbols(symbols)
        while True:
            order = np.argsort(key, kind="stable")
            steps = np.diff(key[order]) != 0
            if steps.all():
                return cls(symbols, order.astype(np.uint32))
            rank = np.empty(len(order), np.uint64)
            rank[order] = np.concatenate([[1], 1 + np.cumsum(steps)])
            older = np.zeros(len(order), np.uint64)  # 0 where the text ends there
            older[length:] = rank[: len(rank) - length]
            key, length = rank * np.uint64(len(rank) + 1) + older, 2 * length

    def range_of(self, phrase: Integer[np.ndarray, " s"]) -> range:
        """Where in `order` the ends of all occurrences stand; its length counts them. Raises InvalidInput if empty."""
        symbols, phrase = alike(self.symbols, phrase)
        return range(*(kernels.bound(symbols, self.order, phrase, after) for after in (False, True)))

    def find(self, phrase: Integer[np.ndarray, " s"]) -> Int64[np.ndarray, " M"]:
        """Ends of all occurrences of `phrase`, ascending: what `suffix.exact` gives. Raises InvalidInput."""
        places = self.range_of(phrase)
        ends = self.order[places.start : places.stop]
        if len(ends) * SORTED_SHARE < len(self.order):
            return np.sort(ends).astype(np.int64)
        out = np.empty(len(ends), np.int64)
        kernels.ascending(ends, np.zeros(len(self.order) // 64 + 1, np.uint64), out)
        return out

    def longest(self, phrase: Integer[np.ndarray, " s"]) -> tuple[int, Int64[np.ndarray, " M"]]:
        """The length of the longest suffix of `phrase` that occurs, 0 for none, and its ends, ascending.

        The nearest neighbours in the code space of `line`: they stand next to where the phrase would be sorted in.
        """
        symbols, phrase = alike(self.symbols, phrase)
        place = kernels.bound(symbols, self.order, phrase, False)
        beside = self.order[max(0, place - 1) : place + 1].astype(np.int64)
        length = max((_common_suffix(symbols[: end + 1], phrase) for end in beside), default=0)
        return length, self.find(phrase[-length:]) if length else np.empty(0, np.int64)

    def to_bytes(self) -> bytes:
        return _HEAD.pack(MAGIC, len(self.order)) + self.order.astype("<u4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, symbols: Integer[np.ndarray, " T"]) -> SuffixIndex:
        """The index that `to_bytes` gave for `symbols`. Raises DamagedArchive when it is anything else."""
        symbols = as_symbols(symbols, "the sequence")
        expected = _HEAD.size + 4 * len(symbols)
        if len(data) != expected:
            raise DamagedArchive(PART, f"{len(data)} bytes for {len(symbols)} symbols, expected {expected}")
        magic, count = _HEAD.unpack_from(data)
        if magic != MAGIC or count != len(symbols):
            raise DamagedArchive(PART, f"begins with {magic!r} and {count} symbols, expected {MAGIC!r}, {len(symbols)}")
        order = np.frombuffer(data, "<u4", offset=_HEAD.size).astype(np.uint32)
        if not kernels.is_suffix_array(symbols, order, np.empty(len(order), np.int64)):
            raise DamagedArchive(PART, "not the order of these symbols")
        return cls(symbols, order)


def _newest_symbols(symbols: np.ndarray) -> tuple[np.ndarray, int]:
    """A key (T,), uint64, that sorts like the newest m symbols of each end, and m; 0 stands before the first symbol."""
    low, high = (int(symbols.min()), int(symbols.max())) if len(symbols) else (0, 0)
    if low < 0:
        raise InvalidInput(f"symbol {low} in the sequence; expected none below 0")
    base, length = high + 2, 1
    while base ** (length + 1) <= 1 << 64:
        length += 1
    digits = symbols.astype(np.uint64) + np.uint64(1)
    key = np.zeros(len(symbols), np.uint64)
    for back in range(min(length, len(symbols))):
        key[back:] += digits[: len(digits) - back] * np.uint64(base ** (length - 1 - back))
    return key, length


def _common_suffix(text: np.ndarray, phrase: np.ndarray) -> int:
    count = min(len(text), len(phrase))
    differ = np.flatnonzero(text[len(text) - count :][::-1] != phrase[len(phrase) - count :][::-1])
    return int(differ[0]) if len(differ) else count
