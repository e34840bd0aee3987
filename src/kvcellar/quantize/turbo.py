"""TurboQuant: norm, random rotation, the best levels for one coordinate (Zandieh et al. 2025, arXiv 2504.19874).

A vector x of one head and token is written as a scale and D level numbers: after a random rotation every coordinate of
x/|x| follows the same density, for which `lloydmax.py` has the best levels, so nothing is calibrated. What we do
differently:

- The rotation comes from integers (`rotation.py`) and sums have one order (`kernels.py`): symbols and restored values
  depend neither on the machine nor on the number of threads or tokens. Sides wider than 256 are cut into equal pieces.
- Levels are fitted to each vector: of nine stretches of them (0.75 … 1.15) the one with the least error decides the
  codes c, and the scale is the least-squares ⟨y, c⟩/⟨c, c⟩ of the rotated y. As many bytes as for |x| and, at 4 bits,
  20 % less squared error; above 6 bits it is not worth the time. The scale is stored as 8 exponent and 8 mantissa bits
  of its float32, rounded to nearest: all of float32's range.
- Numbers that stand out of their vector, as key biases make, would spread over all its coordinates. Before rotating,
  up to `outliers` of them go into slots of their own (index, bfloat16 value), largest first; what bfloat16 rounds off
  stays in the vector. How many is decided by what they save (`_prices`), from the one vector alone: bulk and append
  agree. Slots without outliers are zeros; they come in tiers of 1, 1, 2, 4 and 8, each an array, so that most are all
  zero.
- `qjl`: keys have one bit less, and one for the sign of each coordinate of their error after a second rotation: the
  1-bit sketch of QJL (Zandieh et al. 2024, arXiv 2406.03482), whose inner products with queries have no bias. Theirs
  multiplies by Gaussian numbers; ours by a rotation, and its gain is |e|²/Σ|coordinate|, exact along the error e.

Fine tokens are coded with `fine_bits` and no sketch. Layers in `exact_layers` keep their numbers' own bits at both
grades, which is exact when no transform comes before. Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from ..cache import torch_dtype
from ..errors import DamagedArchive, InvalidRecipe
from ..geometry import DTYPES, Geometry, SideGeometry
from ..profile import Profile
from ..stages import Grade, Quantizer
from . import kernels
from .lloydmax import boundaries, levels
from .rotation import MAX_WIDTH, rotation

KEY, VALUE = "key", "value"
MAX_OUTLIERS = 16
OUTLIER_BITS = 24
STRETCHED_BITS = 6
_STRETCHES = np.array([0.75, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 1], np.float32)
_NO_SKETCH = np.empty((0, 0), np.float32)
_LARGEST_SCALE = 0xFEFF
_BFLOAT16_INFINITY = 0x7F80
Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Side:
    """Keys or values of a layer in a group: where they start among its coefficients, and how they are coded."""

    shape: SideGeometry
    column: int
    exact: bool
    bits: int
    sketched: bool

    @cached_property
    def pieces(self) -> list[tuple[int, int]]:
        """(offset in a head, width) of the pieces that are coded as vectors."""
        count = -(-self.shape.width // MAX_WIDTH)
        edges = [i * self.shape.width // count for i in range(count + 1)]
        return [(a, b - a) for a, b in pairwise(edges)]


class TurboQuant(Quantizer):
    id = "turbo/1"

    def __init__(
        self,
        *,
        bits: int,
        key_bits: int | None = None,
        value_bits: int | None = None,
        fine_bits: int = 8,
        seed: int = 0,
        qjl: bool = False,
        outliers: int = 8,
        exact_layers: Sequence[int] = (),
    ):
        self.key_bits = bits if key_bits is None else key_bits
        self.value_bits = bits if value_bits is None else value_bits
        given = {"bits": bits, "key_bits": self.key_bits, "value_bits": self.value_bits, "fine_bits": fine_bits}
        for name, number in given.items():
            _require(name, number, 2, 8)
        _require("seed", seed, 0, (1 << 32) - 1)
        _require("outliers", outliers, 0, MAX_OUTLIERS)
        if type(qjl) is not bool:
            raise InvalidRecipe(f"qjl {qjl!r}; expected true or false")
        if not isinstance(exact_layers, (list, tuple)):
            raise InvalidRecipe(f"exact_layers {exact_layers!r}; expected a list of layer numbers")
        self.fine_bits, self.seed, self.qjl, self.outliers = fine_bits, seed, qjl, outliers
        self.exact_layers = frozenset(exact_layers)
        self.leaves: frozenset[str] = frozenset()  # sides that another quantizer codes; their numbers stay unset
        edges = [edge for edge in (0, 1, 2, 4, 8, 16) if edge < outliers] + [outliers]
        self.tiers = [range(a, b) for a, b in pairwise(edges)]

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        for layer in self.exact_layers:
            if type(layer) is not int or not 0 <= layer < len(geometry):
                raise InvalidRecipe(f"exact_layers names layer {layer!r}; the cache has {len(geometry)}")
        self.geometry = geometry
        self._laid_out: dict[tuple[range, Grade], list[Side]] = {}

    def layout(self, layers: range, grade: Grade) -> list[tuple[int, type[np.unsignedinteger]]]:
        """Of each side that holds numbers: its own bits where it is exact, else codes, scales, the sketch's gains if it
        has one, and of each tier of slots indexes and values of outliers; columns are pieces × heads (× slots)."""
        found: list[tuple[int, type[np.unsignedinteger]]] = []
        for side in self._sides(layers, grade):
            numbers, vectors = side.shape.numbers_per_token, side.shape.heads * len(side.pieces)
            if side.exact:
                found.append((numbers * DTYPES[side.shape.dtype].size // 2, np.uint16))
            else:
                found += [(numbers, np.uint8)] + [(vectors, np.uint16)] * (1 + side.sketched)
                for tier in self.tiers:
                    found += [(vectors * len(tier), np.uint8), (vectors * len(tier), np.uint16)]
        return found

    def quantize(
        self, coefficients: Float32[Tensor, "tokens coefficients"], layers: range, grade: Grade
    ) -> list[np.ndarray]:
        """Raises InvalidRecipe when a transform gave another number of coefficients than the layers have numbers."""
        x = coefficients.contiguous().numpy()
        sides = self._sides(layers, grade)
        width = self._width(layers)
        if x.shape[1] != width:
            raise InvalidRecipe(f"stage {self.id!r} got {x.shape[1]} coefficients a token; expected {width}")
        return [array for side in sides for array in (self._bits(x, side) if side.exact else self._encode(x, side))]

    def dequantize(
        self, symbols: Sequence[np.ndarray], layers: range, grade: Grade
    ) -> Float32[Tensor, "tokens coefficients"]:
        sides = self._sides(layers, grade)
        x = np.empty((len(symbols[0]) if symbols else 0, self._width(layers)), np.float32)
        at = 0
        for side in sides:
            count = 1 if side.exact else 2 + side.sketched + 2 * len(self.tiers)
            (self._from_bits if side.exact else self._decode)(list(symbols[at : at + count]), side, x)
            at += count
        return torch.from_numpy(x)

    def _sides(self, layers: range, grade: Grade) -> list[Side]:
        """The sides that hold numbers and are coded here."""
        if (found := self._laid_out.get((layers, grade))) is None:
            found = self._laid_out[layers, grade] = list(self._laid(layers, grade))
        return found

    def _laid(self, layers: range, grade: Grade) -> Iterator[Side]:
        fine, column = grade is Grade.FINE, 0
        for i in layers:
            layer = self.geometry.layers[i]
            for is_key, shape in ((True, layer.key), (False, layer.value)):
                sketched = self.qjl and is_key and not fine
                bits = self.fine_bits if fine else self.key_bits if is_key else self.value_bits
                if shape.width and (KEY if is_key else VALUE) not in self.leaves:
                    yield Side(shape, column, i in self.exact_layers, bits - sketched, sketched)
                column += shape.numbers_per_token

    def _width(self, layers: range) -> int:
        return sum(self.geometry.layers[i].numbers_per_token for i in layers)

    def _bits(self, x: np.ndarray, side: Side) -> Arrays:
        numbers = torch.from_numpy(x[:, side.column : side.column + side.shape.numbers_per_token])
        stored = numbers.to(torch_dtype(side.shape.dtype)).contiguous()
        return [stored.view(torch.int16).numpy().view(np.uint16)]

    def _from_bits(self, symbols: Arrays, side: Side, x: np.ndarray) -> None:
        stored = torch.from_numpy(np.ascontiguousarray(symbols[0]).view(np.int16)).view(torch_dtype(side.shape.dtype))
        if not stored.isfinite().all():
            raise DamagedArchive("block part", "an exact layer holds numbers that are not finite")
        x[:, side.column : side.column + side.shape.numbers_per_token] = stored.float().numpy()

    def _encode(self, x: np.ndarray, side: Side) -> Arrays:
        tokens, heads, width = len(x), side.shape.heads, side.shape.width
        codes = np.empty((tokens, heads * width), np.uint8)
        scales, gains, indexes, values = [], [], [], []
        for offset, piece in side.pieces:
            scale, gain = (np.zeros((tokens, heads), np.float32) for _ in range(2))
            index, value = (np.zeros((tokens, heads, self.outliers), np.uint16) for _ in range(2))
            where = side.column + offset, offset, width, *_prices(piece)
            tools = self._tools(piece, side).encoding
            kernels.turbo_encode(x, *where, *tools, codes, scale, gain, index, value)  # type: ignore[call-arg]
            scales.append(_pack(scale))
            gains.append(_pack(gain))
            indexes.append(index)
            values.append(value)
        found = [codes, np.concatenate(scales, axis=1)] + [np.concatenate(gains, axis=1)] * side.sketched
        for tier in self.tiers:
            some = slice(tier.start, tier.stop)
            found.append(_columns([index[:, :, some] for index in indexes]).astype(np.uint8))
            found.append(_columns([value[:, :, some] for value in values]))
        return found

    def _decode(self, symbols: Arrays, side: Side, x: np.ndarray) -> None:
        codes, scales, *others = map(np.ascontiguousarray, symbols)
        gains = others.pop(0) if side.sketched else scales  # not read without a sketch
        _require_written("level", codes, (1 << (side.bits + side.sketched)) - 1)
        _require_written("scale", scales, _LARGEST_SCALE)
        if side.sketched:
            _require_written("gain", gains, _LARGEST_SCALE)
        heads, width = side.shape.heads, side.shape.width
        for n, (offset, piece) in enumerate(side.pieces):
            vectors, column = slice(n * heads, (n + 1) * heads), side.column + offset
            size = _unpack(scales[:, vectors])
            sizes = size, _unpack(gains[:, vectors]) if side.sketched else size
            tools = self._tools(piece, side).decoding
            kernels.turbo_decode(codes, *sizes, offset, column, width, *tools, x)  # type: ignore[call-arg]
            for indexes, values in zip(others[::2], others[1::2], strict=True):
                if np.count_nonzero(values):
                    shape = len(x), scales.shape[1], -1
                    index, value = (np.ascontiguousarray(a.reshape(shape)[:, vectors]) for a in (indexes, values))
                    _require_written("outlier index", index, piece - 1)
                    _require_written("outlier", value & 0x7FFF, _BFLOAT16_INFINITY - 1)
                    kernels.add_outliers(index, value, column, width, x)

    def _tools(self, width: int, side: Side) -> Tools:
        return _tools(width, side.bits, self.seed, side.sketched)


class Tools(NamedTuple):
    """What the kernels need to know of a width: `encoding` and `decoding` are the arguments in order."""

    encoding: tuple[np.ndarray, ...]
    decoding: tuple[np.ndarray, ...]


@lru_cache(64)
def _tools(width: int, bits: int, seed: int, sketched: bool) -> Tools:
    turn, of = rotation(width, seed), levels(width, bits)
    sketch = rotation(width, seed, 1) if sketched else _NO_SKETCH
    stretches = _STRETCHES if bits <= STRETCHED_BITS else _STRETCHES[-1:]
    return Tools((turn, of, boundaries(of), stretches, sketch), (turn.T.copy(), of, sketch.T.copy()))


def _prices(width: int) -> tuple[float, float]:
    """By what factor the first outlier, and each further one, must lessen its vector's energy to be taken out.

    A factor f is worth D/2 · log2 f bits and an outlier costs 24. The first must be worth three times that: where
    symbols take a fixed number of bits, one vector's outlier makes every vector of the block pay for the slot.
    """
    return float(2 ** (3 * OUTLIER_BITS * 2 / width)), float(2 ** (OUTLIER_BITS * 2 / width))


def _columns(pieces: Arrays) -> np.ndarray:
    """(T, pieces · H · slots) from one (T, H, slots) a piece."""
    return np.concatenate([piece.reshape(len(piece), piece.shape[1] * piece.shape[2]) for piece in pieces], axis=1)


def _pack(x: np.ndarray) -> np.ndarray:
    """uint16: exponent and 8 bits of mantissa of float32 ≥ 0, to nearest."""
    rounded = (x.view(np.uint32) + np.uint32(0x4000)) >> np.uint32(15)
    packed: np.ndarray = np.minimum(rounded, _LARGEST_SCALE).astype(np.uint16)
    return packed


def _unpack(scales: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(scales).astype(np.uint32) << np.uint32(15)).view(np.float32)


def _require_written(what: str, array: np.ndarray, largest: int) -> None:
    if largest < np.iinfo(array.dtype).max and array.size and int(array.max()) > largest:
        raise DamagedArchive("block part", f"{what} {int(array.max())}; at most {largest}")


def _require(name: str, number: object, least: int, most: int) -> None:
    if type(number) is not int or not least <= number <= most:
        raise InvalidRecipe(f"{name} {number!r}; expected a whole number from {least} to {most}")
