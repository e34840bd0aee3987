"""Map codes: a sequence of symbols as points that every symbol contracts towards its own place.

Method. An alphabet of N symbols, a contraction r, and for each symbol c a corner A(c); from p_0 on,
p_k = A(c_k) + r·p_{k−1}. Cells of different symbols do not overlap, so the newest symbol is read off p_k, and
p_{k−1} = (p_k − A(c_k)) / r: the walk goes backwards to its anchor p_0, which proves it right. Sequences with the same
last s symbols lie within r^s of each other, so points answer "where did this ending occur" (`points`, `suffix_cell`).

    ring   N corners of a regular polygon, r(N) = 1/(2(1+Σ_{k=1}^{⌊N/4⌋} cos(2πk/N))), ½ for N ≤ 4; p_0 = its centre
    grid   ⌈√N⌉ × ⌈√N⌉ squares that tile the unit square, r = 1/⌈√N⌉; p_0 = its centre
    line   the integers: p_k = c_k·N^(m−1) + ⌊p_{k−1}/N⌋, the last m symbols as digits, the newest one first

`ring` is the code of "Fractal KV-Cache Archives" (arXiv 2607.07144), a chaos game representation: one point of two
float64 for each span of m = max(1, ⌊44 / log2(1/r)⌋) symbols, which leaves rounding 2⁸ of room. We read a symbol by its
angle instead of comparing corners. `grid` and `line` are ours: `line` wastes next to nothing and rounds nothing, so it
is the default. Its words are packed one behind the other, ⌈m·log2 N⌉ bits each, m chosen to cost least a symbol among
words of at most 57 bits, which one unaligned load reads. For N a power of two that is plain bit packing, for N = 256
plain bytes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..errors import InvalidInput
from . import mapkernels as kernels
from .mapcode import MapCode, outside, whole_numbers

MAX_LINE_ALPHABET = 1 << 32
WORD_BITS = 57
_SAFE_BITS = 44
_SLACK = 2.0**-48


class _Plane(MapCode):
    """What `ring` and `grid` share: corners in the plane, and one point for each span."""

    point_bytes = 16
    origin: ClassVar[float] = 0.0

    def __init__(self, alphabet: int):
        super().__init__(alphabet)
        self.ratio = self._ratio()
        self.span = max(1, int(_SAFE_BITS / -math.log2(self.ratio)))
        self.corners = self._corners()
        self._slack = _SLACK * self.ratio ** -np.arange(self.span + 1.0)
        self._walk = (self.corners, self.ratio, self.origin, self.side, self.span, self._slack)

    @property
    def side(self) -> int:
        """Cells in a row; 0 where they are told apart by angle."""
        return 0

    @abstractmethod
    def _ratio(self) -> float: ...

    @abstractmethod
    def _corners(self) -> np.ndarray:
        """A(c), float64 (N, 2)."""

    @property
    def bits_per_symbol(self) -> float:
        return 128 / self.span

    def size(self, count: int) -> int:
        return -(-count // self.span)

    def from_bytes(self, raw: np.ndarray) -> np.ndarray:
        return np.array(raw.view("<f8"), np.float64).reshape(-1, 2)

    def _room(self, size: int) -> np.ndarray:
        return np.zeros((size, 2))

    def _write(self, symbols: np.ndarray, points: np.ndarray, count: int) -> bool:
        done: bool = kernels.write_points(symbols, self.corners, self.ratio, self.origin, self.span, points, count)
        return done

    def _read(self, points: np.ndarray, out: np.ndarray) -> bool:
        sound: bool = kernels.read_points(points, *self._walk, out)
        return sound

    def _digit(self, points: np.ndarray, count: int, index: int) -> int:
        return int(kernels.point_digit(points, *self._walk, count, index))


class Ring(_Plane):
    """The published code: corners V(c) of a regular polygon on the unit circle, A(c) = (1 − r)·V(c)."""

    name = "ring"

    def _ratio(self) -> float:
        if self.alphabet <= 4:
            return 0.5
        k = np.arange(1, self.alphabet // 4 + 1)
        return float(1 / (2 * (1 + np.cos(2 * np.pi * k / self.alphabet).sum())))

    def _corners(self) -> np.ndarray:
        angle = 2 * np.pi * np.arange(self.alphabet) / self.alphabet
        return (1 - self.ratio) * np.stack([np.cos(angle), np.sin(angle)], axis=1)


class Grid(_Plane):
    """Squares in rows: A(c) = (column, row) / side."""

    name = "grid"
    origin = 0.5

    @property
    def side(self) -> int:
        return math.isqrt(self.alphabet - 1) + 1

    def _ratio(self) -> float:
        return 1 / self.side

    def _corners(self) -> np.ndarray:
        row, column = np.divmod(np.arange(self.alphabet), self.side)
        return np.stack([column, row], axis=1) / self.side


class Line(MapCode):
    """Integer points of `span` digits to `base`, `word_bits` each, lowest bit first, run on without padding.

    `base` is N, or the next power of two where that costs no more. A last span of k < m symbols takes ⌈k·log2 base⌉
    bits. Every machine reads the same words.
    """

    name = "line"
    largest_alphabet = MAX_LINE_ALPHABET
    point_bytes = 1

    def __init__(self, alphabet: int):
        super().__init__(alphabet)
        self.ratio = 1 / alphabet
        self.base, self.span, self._widths = min(self._bases(), key=lambda base: base[2][-1] / base[1])
        self.word_bits = self._widths[-1]
        self._words = (self.base, self.span, np.array(self._widths, np.int64))
        self._plain = 0 if self.base & (self.base - 1) else self.base.bit_length() - 1  # bits, if a symbol has its own
        self._whole = np.dtype(f"<u{self._plain // 8}") if self._plain in (8, 16, 32) else None
        scale = WORD_BITS + self.base.bit_length()  # words are divided exactly by it (Granlund and Montgomery 1994)
        reciprocal = ((1 << scale) // self.base + 1) << max(0, 64 - scale)
        self._divide = (np.uint64(0 if self._plain else reciprocal), max(0, scale - 64))

    def _bases(self) -> list[tuple[int, int, list[int]]]:
        """What the walk may count in, first choice first."""
        return [_spans(1 << (self.alphabet - 1).bit_length()), _spans(self.alphabet)]

    @property
    def bits_per_symbol(self) -> float:
        return self.word_bits / self.span

    def bits(self, count: int) -> int:
        """What `count` symbols cost."""
        words, rest = divmod(count, self.span)
        return words * self.word_bits + self._widths[rest]

    def size(self, count: int) -> int:
        return -(-self.bits(count) // 8)

    def from_bytes(self, raw: np.ndarray) -> np.ndarray:
        return raw

    def _room(self, size: int) -> np.ndarray:
        return np.zeros(size, np.uint8)

    def _write(self, symbols: np.ndarray, points: np.ndarray, count: int) -> bool:
        done: bool
        if self._whole is None:
            done = kernels.write_words(symbols, self.alphabet, *self._words, points, count)
        elif done := kernels.all_below(symbols, self.alphabet):
            plain = symbols.astype(self._whole, copy=False).view(np.uint8)
            first = count * self._whole.itemsize
            points[first : first + len(plain)] = plain
        return done

    def _read(self, points: np.ndarray, out: np.ndarray) -> bool:
        used = self.bits(len(out))
        if used & 7 and points[used >> 3] >> (used & 7):
            return False
        points = points[: -(-used // 8)]
        if not self._plain:
            sound: bool = kernels.read_words(points, *self._words, *self._divide, out)
            return sound
        if self._whole is not None:
            out[:] = points.view(self._whole)
        else:
            kernel = kernels.read_small_bits if self._plain < 8 and out.dtype == np.uint8 else kernels.read_bits
            kernel(points, self._plain, out)
        return self.base == self.alphabet or bool(kernels.all_below(out, self.alphabet))

    def _digit(self, points: np.ndarray, count: int, index: int) -> int:
        word, place = divmod(index, self.span)
        at, shift = divmod(word * self.word_bits, 8)
        value = int.from_bytes(points[at : at + 8].tobytes(), "little") >> shift & ((1 << self.word_bits) - 1)
        return int(value // self.base**place % self.base)


def _spans(base: int) -> tuple[int, int, list[int]]:
    """`base`, the cheapest span of a word and the bits of its first 0, 1, … digits."""
    widths = [0]
    while (width := (base ** len(widths) - 1).bit_length()) <= WORD_BITS:
        widths.append(width)
    span = min(range(1, len(widths)), key=lambda m: (widths[m] / m, -m))
    return base, span, widths[: span + 1]


class Packed(Line):
    """Plain bit packing, ⌈log2 N⌉ bits a symbol: what `line` is compared with."""

    name = "packed"

    def _bases(self) -> list[tuple[int, int, list[int]]]:
        return super()._bases()[:1]


CODES: dict[str, type[MapCode]] = {code.name: code for code in (Ring, Grid, Line, Packed)}


def map_code(name: str, alphabet: int) -> MapCode:
    """The code of this name for an alphabet of N symbols. Raises InvalidInput when there is none."""
    if name not in CODES:
        raise InvalidInput(f"map code {name!r}; expected one of {', '.join(CODES)}")
    return (_words if issubclass(CODES[name], Line) else _corners)(name, alphabet)


@lru_cache(4096)  # a part has dozens of alphabets, and neighbours share most of them
def _words(name: str, alphabet: int) -> MapCode:
    return CODES[name](alphabet)


@lru_cache(8)  # the corners of a large alphabet are megabytes
def _corners(name: str, alphabet: int) -> MapCode:
    return CODES[name](alphabet)


def digits(alphabet: int, dtype: DTypeLike = np.uint64) -> int:
    """How many of the last symbols an integer point of `points` tells: the most whose N^m values fit its type."""
    m = 1
    while alphabet ** (m + 1) <= np.iinfo(dtype).max + 1:
        m += 1
    return m


def points(symbols: ArrayLike, alphabet: int, code: str = "line", dtype: DTypeLike | None = None) -> np.ndarray:
    """Where the walk stands after every symbol, from p_0 on without a new start at spans: what a search compares.

    For `ring` and `grid` (T, 2) in float64 (default) or float32, the walk itself done in that type. For `line` (T,) in
    uint64 or uint32: the last m = `digits(alphabet, dtype)` symbols, the newest one the leading digit, so endings of
    length s ≤ m are equal where p // N^(m−s) is. Raises InvalidInput for numbers outside 0 … N−1 and for other types.
    """
    given, made = whole_numbers(symbols), map_code(code, alphabet)
    allowed = (np.float64, np.float32) if isinstance(made, _Plane) else (np.uint64, np.uint32)
    kind: np.dtype = np.dtype(dtype if dtype is not None else allowed[0])
    if kind not in allowed:
        raise InvalidInput(f"points of type {kind} for a {code} code")
    if not kernels.all_below(given, alphabet):
        raise outside(symbols, alphabet)
    if isinstance(made, _Plane):
        walk = np.empty((len(given), 2), kind)
        ratio, origin = np.array([made.ratio, made.origin], kind)
        kernels.plane_walk(given, made.corners.astype(kind), ratio, origin, walk)
        return walk
    line = np.empty(len(given), kind)
    kernels.line_walk(given, alphabet, np.uint64(alphabet ** (digits(alphabet, kind) - 1)), line)
    return line


def suffix_cell(code: str, alphabet: int, length: int) -> float:
    """r^length, the width of the cell that holds every walk with the same last `length` symbols.

    In units of the plane for `ring` and `grid`, and of N^m, the range of all points, for `line`.
    """
    return float(map_code(code, alphabet).ratio ** length)
