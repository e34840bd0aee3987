"""`map/1`: symbol arrays as the points of a map code (`maps.py`), one walk over each array.

Each array of a part is its alphabet N = largest symbol + 1, 4 bytes, and the points of its symbols; N = 1 needs none,
and N = 0 says that the numbers follow as they are. The walk takes the symbols row by row, the columns of a token
together and the newest token last: a restore then fills its arrays from front to back, a token's symbols lie at
token · columns + column, and a short array has one unfinished word instead of one for each column.

Settings: `code` is `line` (default), `packed` (⌈log2 N⌉ bits each), `grid` or `ring`. With the first two no array takes
more than 4 bytes above its raw bytes. The float codes are written as they are, though they cost more than that: they
are here to be measured. Bytes: docs/map-codes.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from ..errors import DamagedArchive, InvalidRecipe
from ..stages import SymbolCoder
from .maps import CODES, map_code

ID = "map/1"
MAX_EXPANSION = 32
PART = "block part"
_RAW, _ONLY_ZEROS = 0, 1
_ALPHABET = struct.Struct("<I")
_ZEROS = _ALPHABET.pack(_ONLY_ZEROS)


class MapCoder(SymbolCoder):
    """Coder of uint8, uint16 or uint32 arrays of any shape."""

    id = ID
    max_expansion = MAX_EXPANSION

    def __init__(self, *, code: str = "line", **settings: object):
        self.refuse_unknown(settings)
        if code not in tuple(CODES):  # it comes out of a file and may be anything
            raise InvalidRecipe(f"map code {code!r}; expected one of {', '.join(CODES)}")
        self.code = code

    def encode(self, arrays: Sequence[np.ndarray], layers: range) -> bytes:
        part = b"".join(self._encode(np.ascontiguousarray(array).reshape(-1)) for array in arrays)
        shortest = -(-sum(array.nbytes for array in arrays) // MAX_EXPANSION)
        return part + bytes(max(0, shortest - len(part)))

    def decode(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], groups: Sequence[range]
    ) -> None:
        for part, arrays in zip(parts, out, strict=True):
            data, at = np.frombuffer(part, np.uint8), 0
            for array in arrays:
                if part[at : at + _ALPHABET.size] == _ZEROS:  # most outliers: a restore has hundreds of such arrays
                    array.fill(0)
                    at += _ALPHABET.size
                    continue
                target = array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
                at = self._decode(part, data, at, target.reshape(-1))
                if target is not array:
                    array[...] = target
            if data[at:].any():
                raise DamagedArchive(PART, "bytes left over behind its arrays")

    def _encode(self, symbols: np.ndarray) -> bytes:
        alphabet = int(symbols.max(initial=0)) + 1
        if alphabet > CODES[self.code].largest_alphabet or alphabet >> 32:
            return _ALPHABET.pack(_RAW) + symbols.astype(symbols.dtype.newbyteorder("<"), copy=False).tobytes()
        points = map_code(self.code, alphabet).encode(symbols) if alphabet > 1 else symbols[:0]
        return _ALPHABET.pack(alphabet) + points.astype(points.dtype.newbyteorder("<"), copy=False).tobytes()

    def _decode(self, part: bytes | memoryview, data: np.ndarray, at: int, out: np.ndarray) -> int:
        """Fill `out` (count,) from the bytes of `part`, which are `data` as well, at `at`; gives where they end."""
        if len(data) < at + _ALPHABET.size:
            raise DamagedArchive(PART, f"{_ALPHABET.size} bytes announced, {len(data) - at} there")
        (alphabet,) = _ALPHABET.unpack_from(part, at)
        at += _ALPHABET.size
        if alphabet == _RAW:
            out[...] = _take(data, at, out.nbytes).view(out.dtype.newbyteorder("<"))
            return at + out.nbytes
        if alphabet > min(CODES[self.code].largest_alphabet, 1 << 8 * out.itemsize):
            raise DamagedArchive(PART, f"{alphabet} symbols of a {self.code} code in {out.dtype}")
        code = map_code(self.code, alphabet)
        raw = _take(data, at, code.size(out.size) * code.point_bytes)
        code.decode(code.from_bytes(raw), out.size, out)
        return at + raw.size


def _take(data: np.ndarray, at: int, length: int) -> np.ndarray:
    taken = data[at : at + length]
    if len(taken) != length:
        raise DamagedArchive(PART, f"{length} bytes announced, {len(taken)} there")
    return taken
