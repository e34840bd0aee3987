"""`adaptive/1`: transform coefficients by a binary arithmetic coder whose probabilities are mixed from a few contexts.

Method. A symbol is a row of yes/no decisions: zero or not, its sign, then one flag for each further step, and an
Exp-Golomb number above 14. Two adaptive tables and a static probability of the coefficient foresee each decision; their
logits are added with weights that follow the data, and a binary arithmetic coder takes the result. What the contexts
are made of: how loud the coefficient is in the calibration text, how loud this token is so far (next to it and as a
whole), what the coefficient did in the tokens before, as signed means, and the token's number in the array before,
where that has one column: its *note*. What a prediction leaves over is alike over a stretch of text, in its sign too,
and looking back here costs nothing, since symbols have no rounding that could build up. Every part starts from the
profile's state, so it is decoded alone. All numbers are integers of stated widths (exactness rule D1).

Logistic mixing as in PAQ (Mahoney 2005, *Adaptive weighing of context models*), carry propagation as in Schindler's
range coder; we differ in that the tables begin trained, in the contexts, and in 16-bit probabilities under a 40-bit
interval. Bytes and what was tried: docs/entropy.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DamagedArchive, InvalidInput, ProfileMismatch
from ..stages import SymbolCoder
from . import adaptivekernels as kernels
from .adaptivetables import FIELDS, Tables, Walk, flat
from .binarycoder import DECODE, ENCODE, TOP, flush

if TYPE_CHECKING:
    from ..calibrate import Calibration
    from ..geometry import Geometry
    from ..profile import Profile

ID = "adaptive/1"
MAX_EXPANSION = 4096
MAX_COLUMNS = 1 << 24
PART = "block part"
PART_TOKENS = 256  # how the symbols of calibration text are cut
TRAINING_TOKENS = 16_384
ENOUGH = 1.02  # times its own bytes
_TRIED_ROWS = 32
_SYMBOL_BYTES = 96  # more than one can take
_DTYPES = ("int8", "int16", "int32", "uint8", "uint16")


class AdaptiveCoder(SymbolCoder):
    """Coder of integer arrays (…, C) of at most 32 bits, rows being tokens and columns coefficients.

    A part begins with one byte for each array that is not empty: which of the profile's tables for its layers and
    its C it begins with, or none of them, or where none are for its C one for another. The encoder takes the one that
    codes the first rows best.
    """

    id = ID
    max_expansion = MAX_EXPANSION
    needs_profile = True

    def __init__(self, **settings: object):
        self.refuse_unknown(settings)
        self._tables: dict[int, list[Tables]] = {}

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        found: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        for name, tensor in (profile.tensors if profile is not None else {}).items():
            kind, *place = name.split(".")
            if kind == "symbols":
                match place:
                    case [layer, which, field] if (layer + which).isdecimal() and layer and which and field in FIELDS:
                        found.setdefault((int(layer), int(which)), {})[field] = np.array(tensor)
                    case _:
                        raise ProfileMismatch(f"{ID}: the profile has an unknown tensor {name!r}")
        for (first, _), fields in sorted(found.items()):
            if fields.keys() != FIELDS.keys():
                raise ProfileMismatch(f"{ID}: the profile has only {', '.join(sorted(fields))} for layer {first}")
            self._tables.setdefault(first, []).append(Tables(**fields))

    def fit(self, calibration: Calibration, fitted: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return trained(calibration.symbols("symbol statistics", TRAINING_TOKENS))

    def encode(self, arrays: Sequence[np.ndarray], layers: range) -> bytes:
        chosen, jobs = bytearray(), []
        for array in arrays:
            if array.dtype.name not in _DTYPES or (array.size and array.shape[-1] >= MAX_COLUMNS):
                raise InvalidInput(
                    f"{ID} cannot code {array.dtype} {array.shape}; expected one of {', '.join(_DTYPES)}"
                )
        for array, notes in _noted(arrays):
            symbols = np.ascontiguousarray(array.reshape(len(notes), -1), np.int32)
            offered, tried = self._offered(layers, symbols.shape[1]), (symbols[:_TRIED_ROWS], notes[:_TRIED_ROWS])
            chosen.append(int(np.argmin([len(_encode([(*tried, tables)])) for tables in offered])))
            jobs.append((symbols, notes, offered[chosen[-1]]))
        part = bytes(chosen) + (_encode(jobs) if jobs else b"")
        return part + bytes(max(0, _shortest(arrays) - len(part)))

    def decode(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], groups: Sequence[range]
    ) -> None:
        for part, arrays, layers in zip(parts, out, groups, strict=True):
            used = self._decode(np.frombuffer(part, np.uint8), arrays, layers)
            length = max(used, _shortest(arrays))
            if len(part) != length or any(part[used:]):
                raise DamagedArchive(PART, f"{len(part)} bytes, of which its symbols take {used}; expected {length}")

    def _decode(self, data: np.ndarray, arrays: Sequence[np.ndarray], layers: range) -> int:
        """Fill the arrays; gives how many bytes that took."""
        count = sum(array.size > 0 for array in arrays)
        if not count:
            return 0
        if len(data) <= count:
            raise DamagedArchive(PART, f"{len(data)} bytes for {count} arrays")
        chosen, stream = data[:count].tolist(), data[count:].copy()
        first = int.from_bytes(stream[:5].tobytes().ljust(5, b"\0"), "big")
        place = np.array([first, TOP, 5, 0], np.int64)
        for index, (array, notes) in zip(chosen, _noted(arrays), strict=True):
            offered = self._offered(layers, array.shape[-1])
            if index >= len(offered):
                raise DamagedArchive(PART, f"tables {index} of {len(offered)}")
            symbols, limits = np.empty((len(notes), array.shape[-1]), np.int32), np.iinfo(array.dtype)
            place[3] = 0
            result = Walk(offered[index])(DECODE, symbols, notes, stream, place, (limits.min, limits.max))
            if result != kernels.DONE:
                short = result == kernels.OUT_OF_BITS
                raise DamagedArchive(PART, "ends before its symbols" if short else f"symbol not in {array.dtype}")
            array[...] = symbols.reshape(array.shape)
        return count + int(place[2]) - 4

    def _offered(self, layers: range, columns: int) -> list[Tables]:
        """Those for so many columns, those that know nothing, and if there are none of the first, others cut or padded:
        a step that is not one of those the tables were trained at keeps some coefficients more or less."""
        known = self._tables.get(layers.start, [])
        fitting = [tables for tables in known if tables.columns == columns]
        if fitting or columns == 1:
            return [*fitting, flat(columns)]
        return [flat(columns), *(tables.resized(columns) for tables in known if tables.columns > 1)]


def trained(symbols: Iterable[tuple[range, int, np.ndarray]]) -> dict[str, np.ndarray]:
    """Tables by name, ``LAYER.WHICH.FIELD``, from symbols (T, C) of samples.

    Each comes with its group's layers and its place among their arrays, which follow each other, those of coarse
    tokens before those of fine ones. A single column that another's tables code as well gets none: the exponents under
    several steps are the same.
    """
    parts: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
    before: list[np.ndarray] = []
    for layers, which, array in symbols:
        before = [*before[:which], array]
        if array.size:
            *_, (_, notes) = _noted(before)
            cut = [slice(i, i + PART_TOKENS) for i in range(0, len(notes), PART_TOKENS)]
            parts.setdefault((layers.start, which), []).extend((array[rows], notes[rows]) for rows in cut)
    made: dict[tuple[int, int], Tables] = {}
    for (layer, which), arrays in sorted(parts.items()):
        own = Tables.train(arrays)
        known = [t for (at, _), t in made.items() if at == layer and t.columns == own.columns == 1]
        if not known or min(_length(arrays, t) for t in known) > ENOUGH * _length(arrays, own):
            made[layer, which] = own
    return {f"{layer}.{which}.{name}": getattr(t, name) for (layer, which), t in made.items() for name in FIELDS}


def _length(arrays: Sequence[tuple[np.ndarray, np.ndarray]], tables: Tables) -> int:
    """Bytes of arrays (T, C) with their notes, each beginning with `tables`."""
    return sum(len(_encode([(np.ascontiguousarray(array, np.int32), notes, tables)])) for array, notes in arrays)


def _noted(arrays: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each array with numbers, and what the one before it, filled by then, tells of its rows: uint8 (rows,) 0 … 7.

    That is its symbol + 3, limited, if it has one column and as many rows; else 3.
    """
    before = None
    for array in arrays:
        if array.size:
            notes = np.full(array.size // array.shape[-1], 3, np.uint8)
            if before is not None and before.size == len(notes) and before.shape[-1] == 1:
                notes[:] = np.clip(before.reshape(-1).astype(np.int64) + 3, 0, 7)
            yield array, notes
        before = array


def _shortest(arrays: Sequence[np.ndarray]) -> int:
    return -(-sum(array.nbytes for array in arrays) // MAX_EXPANSION)


def _encode(jobs: Sequence[tuple[np.ndarray, np.ndarray, Tables]]) -> bytes:
    """One stream of some arrays int32 (T, C), with their notes and where their models begin."""
    row_bytes = max(_SYMBOL_BYTES * symbols.shape[1] for symbols, _, _ in jobs)
    data = np.empty(2 * row_bytes + 1, np.uint8)
    place = np.array([0, TOP, 0, 0], np.int64)
    for symbols, notes, tables in jobs:
        place[3], walk = 0, Walk(tables)
        while walk(ENCODE, symbols, notes, data, place, row_bytes=row_bytes) == kernels.NO_ROOM:
            data = np.concatenate([data, np.empty_like(data)])
    data = np.concatenate([data, np.empty(1, np.uint8)])
    return data[: flush(data, place[2], place[0])].tobytes()
