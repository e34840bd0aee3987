"""A block: some consecutive tokens of all layers, decodable alone (docs/format.md §4).

The head holds everything needed to read the body: geometry, token ids, positions, recipe, profile, and the length
and checksum of each layer group's part. Index and commits only repeat where blocks are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import DamagedArchive
from ..geometry import Geometry
from ..recipe import MAX_BLOCK
from .format import checksum

DENSE, SLOTS = 0, 1
_SEALED, _HAS_PROFILE, _HAS_BASE, _HAS_FINE = 1, 2, 4, 8
_FIXED = struct.Struct("<BBBBIQQII")  # kind, flags, token code, token bits, count, start, position, parts, id bytes
_SPAN = struct.Struct("<II")
_COUNT = struct.Struct("<Q")
_PACKED_IDS = 0


@dataclass(frozen=True)
class BlockHead:
    """Head of a block.

    `start` is the index of its first token in the sequence, `first_position` that token's position (the others
    follow one by one), `tokens` int64 ids (T,), `parts` (length, xxh3) of each layer group's bytes in the body.
    `held` says for each run of sliding layers which of the block's tokens they hold: (first, stop) from its start;
    `coarse` which are coarse, counted likewise, the others being fine; None: all. A block of kind `SLOTS`, of a
    reduced cache, has some number of `slots` in all layers and heads.
    """

    start: int
    tokens: np.ndarray
    sealed: bool
    geometry: Geometry
    recipe: bytes
    parts: tuple[tuple[int, int], ...]
    first_position: int
    profile: bytes | None = None
    base: bytes | None = None
    kind: int = field(default=DENSE)
    held: tuple[tuple[int, int], ...] = ()
    coarse: range | None = None
    slots: int | None = None

    @property
    def coarse_tokens(self) -> range:
        return range(self.count) if self.coarse is None else self.coarse

    @property
    def all_coarse(self) -> bool:
        return len(self.coarse_tokens) == self.count

    def tokens_of(self, layer: int) -> range:
        """Which tokens of the sequence this block holds for `layer`."""
        run = self.geometry.sliding_runs.get(layer)
        if run is None:
            return range(self.start, self.start + self.count)
        first, stop = self.held[run]
        return range(self.start + first, self.start + stop)

    def count_of(self, layer: int) -> int:
        return len(self.tokens_of(layer))

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def body_length(self) -> int:
        return sum(length for length, _ in self.parts)

    @property
    def id_bytes(self) -> int:
        """Bytes of the packed token ids."""
        return len(pack_ids(self.tokens)[1])

    def part_offset(self, group: int) -> int:
        """Offset of a group's part within the body."""
        return sum(length for length, _ in self.parts[:group])

    def pack(self) -> bytes:
        bits, ids = pack_ids(self.tokens)
        flags = _SEALED * self.sealed | _HAS_PROFILE * (self.profile is not None) | _HAS_BASE * (self.base is not None)
        flags |= _HAS_FINE * (not self.all_coarse)
        fixed = _FIXED.pack(
            *(self.kind, flags, _PACKED_IDS, bits),
            *(self.count, self.start, self.first_position, len(self.parts), len(ids)),
        )
        table = b"".join(struct.pack("<QQ", *part) for part in self.parts)
        held = b"".join(_SPAN.pack(*each) for each in self.held)
        coarse = b"" if self.all_coarse else _SPAN.pack(self.coarse_tokens.start, self.coarse_tokens.stop)
        digests = self.recipe + (self.profile or b"") + (self.base or b"")
        slots = b"" if self.slots is None else _COUNT.pack(self.slots)
        return fixed + digests + self.geometry.pack() + held + coarse + slots + ids + table

    @classmethod
    def unpack(cls, data: bytes, part: str, expected: int | None = None) -> BlockHead:
        """Raises DamagedArchive naming `part`; unknown kinds and codes are refused, never guessed.

        `expected`: the kind of all blocks of this archive, where it is known.
        """
        try:
            kind, flags, code, bits, count, start, position, groups, id_bytes = _FIXED.unpack_from(data)
        except struct.error as error:
            raise DamagedArchive(part, f"head of {len(data)} bytes") from error
        kinds, known = (
            (DENSE, SLOTS) if expected is None else (expected,),
            _SEALED | _HAS_PROFILE | _HAS_BASE | _HAS_FINE,
        )
        if kind not in kinds or code != _PACKED_IDS or flags & ~known:
            raise DamagedArchive(part, f"unknown block kind {kind}, token code {code} or flags {flags:#x}")
        if not 1 <= count <= MAX_BLOCK or start + count >= 1 << 63 or position + count >= 1 << 63:
            raise DamagedArchive(part, f"{count} tokens from {start} at position {position}")
        offset = _FIXED.size
        digests: list[bytes | None] = []
        for present in (True, flags & _HAS_PROFILE, flags & _HAS_BASE):
            digests.append(data[offset : offset + 32] if present else None)
            offset += 32 if present else 0
        geometry, offset = Geometry.unpack(data, offset, part)
        sliding = len(set(geometry.sliding_runs.values()))
        held, offset = _spans(data, offset, sliding)
        if len(held) != sliding or any(not first <= stop <= count for first, stop in held):
            raise DamagedArchive(part, f"its sliding layers hold {held} of {count} tokens")
        coarse = None
        if flags & _HAS_FINE:
            spans, offset = _spans(data, offset, 1)
            if not spans or not spans[0][0] <= spans[0][1] <= count or spans[0] == (0, count):
                raise DamagedArchive(part, f"of {count} tokens {spans} are coarse")
            coarse = range(*spans[0])
        slots = None
        if kind == SLOTS:
            if len(data) < offset + _COUNT.size or not geometry.uniform or coarse is not None:
                raise DamagedArchive(
                    part, "the head of a reduced block without its number of slots, or like a dense one"
                )
            (slots,) = _COUNT.unpack_from(data, offset)
            offset += _COUNT.size
        if not 1 <= groups <= len(geometry) or len(data) != offset + id_bytes + 16 * groups:
            raise DamagedArchive(part, f"head of {len(data)} bytes for {groups} parts and {id_bytes} bytes of ids")
        tokens = unpack_ids(data[offset : offset + id_bytes], bits, count, part)
        parts = tuple(struct.iter_unpack("<QQ", data[offset + id_bytes :]))
        return cls(
            start=start,
            tokens=tokens,
            sealed=bool(flags & _SEALED),
            geometry=geometry,
            recipe=digests[0] or b"",
            parts=parts,
            first_position=position,
            profile=digests[1],
            base=digests[2],
            kind=kind,
            held=held,
            coarse=coarse,
            slots=slots,
        )


def _spans(data: bytes, offset: int, count: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """`count` spans at `offset`, none when the data ends before, and the offset behind them."""
    packed = data[offset : offset + _SPAN.size * count]
    complete = len(packed) == _SPAN.size * count
    return tuple(_SPAN.iter_unpack(packed)) if complete else (), offset + _SPAN.size * count


def part_table(parts: Sequence[bytes]) -> tuple[tuple[int, int], ...]:
    return tuple((len(part), checksum(part)) for part in parts)


def pack_ids(tokens: np.ndarray) -> tuple[int, bytes]:
    """Ids as a run of `bits`-wide integers, lowest bit first; as many bits as the largest id needs."""
    ids = np.asarray(tokens, dtype=np.uint32)
    bits = max(1, int(ids.max(initial=0)).bit_length())
    rows = np.unpackbits(ids.astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, count=bits, bitorder="little")
    return bits, np.packbits(rows.reshape(-1), bitorder="little").tobytes()


def unpack_ids(data: bytes, bits: int, count: int, part: str) -> np.ndarray:
    """Inverse of `pack_ids`: int64 ids (count,)."""
    if not 1 <= bits <= 32 or len(data) != (bits * count + 7) // 8:
        raise DamagedArchive(part, f"{len(data)} bytes for {count} token ids of {bits} bits")
    flat = np.unpackbits(np.frombuffer(data, np.uint8), count=bits * count, bitorder="little").reshape(count, bits)
    wide = np.zeros((count, 32), np.uint8)
    wide[:, :bits] = flat
    return np.packbits(wide, axis=1, bitorder="little").view("<u4").reshape(count).astype(np.int64)
