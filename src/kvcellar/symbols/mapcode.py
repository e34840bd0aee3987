"""What every map code (`maps.py`) can do: encode, append, decode, and read one symbol of many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DamagedArchive, InvalidInput

MAX_ALPHABET = 1 << 18
PART = "map code"


class MapCode(ABC):
    """A code of symbols 0 … N−1.

    `points` is what is stored: a float64 array (P, 2) of `ring` and `grid`, a uint8 array (P,) of `line`. It may be
    longer than the `size(count)` that `count` symbols need; what lies behind must be zero.
    """

    name: ClassVar[str]
    largest_alphabet: ClassVar[int] = MAX_ALPHABET
    point_bytes: ClassVar[int]
    ratio: float
    span: int

    def __init__(self, alphabet: int):
        if not 2 <= alphabet <= self.largest_alphabet:
            raise InvalidInput(f"{self.name} code of {alphabet} symbols; expected 2 to {self.largest_alphabet}")
        self.alphabet = int(alphabet)
        self.dtype = np.min_scalar_type(alphabet - 1)

    @property
    @abstractmethod
    def bits_per_symbol(self) -> float:
        """What a symbol costs in a long sequence."""

    @abstractmethod
    def size(self, count: int) -> int:
        """Length of the points of `count` symbols."""

    def encode(self, symbols: ArrayLike) -> np.ndarray:
        """Points of integer symbols (T,). Raises InvalidInput for a number outside 0 … N−1."""
        return self.append(self._room(0), 0, symbols)

    def append(self, points: np.ndarray, count: int, symbols: ArrayLike) -> np.ndarray:
        """The points of `count` symbols and further ones, in time that depends on the further ones alone.

        They are written into `points` where it has room, otherwise into a copy twice as long: go on with what is
        returned. Raises InvalidInput, with nothing written, for a number outside 0 … N−1.
        """
        new = whole_numbers(symbols)
        needed = self.size(count + len(new))
        if count < 0 or len(points) < needed:
            self._require(points, count)
            held, points = points, self._room(max(needed, 2 * len(points)))
            points[: len(held)] = held
        if not self._write(new, points, count):
            raise outside(symbols, self.alphabet)
        return points

    def decode(self, points: np.ndarray, count: int, out: np.ndarray | None = None) -> np.ndarray:
        """The `count` symbols that `points` hold, in the smallest unsigned type that holds them or in `out` (count,).

        Raises DamagedArchive when there are too few points or they do not lead back to their anchors.
        """
        self._require(points, count)
        if out is None:
            out = np.empty(count, self.dtype)
        if out.shape != (count,):
            raise InvalidInput(f"{count} symbols to an array of shape {out.shape}")
        if not self._read(points, out):
            raise DamagedArchive(PART, f"points that no {count} of {self.alphabet} symbols lead to")
        return out

    def at(self, points: np.ndarray, count: int, index: int) -> int:
        """Symbol `index` of `count`, from the point that holds it. Raises as `decode`; InvalidInput for no index."""
        if not 0 <= index < count:
            raise InvalidInput(f"symbol {index} of {count}")
        self._require(points, count)
        symbol = self._digit(points, count, index)
        if not 0 <= symbol < self.alphabet:
            raise DamagedArchive(PART, f"point of symbol {index} is none of {self.alphabet} symbols'")
        return symbol

    @abstractmethod
    def from_bytes(self, raw: np.ndarray) -> np.ndarray:
        """Points from the uint8 array (P · point_bytes,) of their little-endian bytes, at any address."""

    def _require(self, points: np.ndarray, count: int) -> None:
        if count < 0 or len(points) < self.size(count):
            raise DamagedArchive(PART, f"{len(points)} points or bytes for {count} symbols")

    @abstractmethod
    def _room(self, size: int) -> np.ndarray: ...

    @abstractmethod
    def _write(self, symbols: np.ndarray, points: np.ndarray, count: int) -> bool: ...

    @abstractmethod
    def _read(self, points: np.ndarray, out: np.ndarray) -> bool: ...

    @abstractmethod
    def _digit(self, points: np.ndarray, count: int, index: int) -> int: ...


def whole_numbers(symbols: ArrayLike) -> np.ndarray:
    """Symbols (T,) as uint8, uint16, uint32 or uint64; negative ones become large. Raises InvalidInput for others."""
    array = np.ascontiguousarray(symbols)
    if array.ndim != 1:
        array = array.reshape(-1)
    if array.dtype.char in "BHI":
        return array
    if array.dtype.kind not in "iu" and array.size:
        raise InvalidInput(f"symbols of type {array.dtype}; expected integers")
    return array.astype(np.uint64)


def outside(symbols: ArrayLike, alphabet: int) -> InvalidInput:
    return InvalidInput(f"symbols from {np.min(symbols)} to {np.max(symbols)}; expected 0 to {alphabet - 1}")
