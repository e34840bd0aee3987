"""The token log: a file that keeps a cache's token ids, and of its numbers only what tells whether they came again.

Whoever has the model has the cache: a forward pass over the ids makes it anew. The ids are coded without any model
(`idcode`), under the model itself (`modelcode`), or both; `checks` says how near a replay came. The layout is normative
in docs/format.md, "Token logs". One file is a few thousand bytes, so that it is read and checked as a whole, and an
append writes it anew. No torch here: `kvcellar info` reads it.

Of a page of text coded under the model the rest of the file would be a third, so it is kept short. Half of the
identity's digest: 128 bits tell all models apart that nobody made to collide, and an identity guards against mistakes,
not against attackers, who could write all of it. Four bytes of the runtime: the ids' checksum stands behind them.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from ..archive.format import TOKEN_LOG_MAGIC as MAGIC
from ..archive.manifest import MAX_NAMESPACE
from ..errors import ArchiveNotFound, DamagedArchive, InvalidInput, KVCellarError, NewerFormat, NotAnArchive
from ..geometry import SLIDING, Geometry
from ..identity import HALF, MAX_LABEL, MODEL, NAME, Identity
from ..recipe import Recipe, tokens_recipe
from ..store.base import Reader
from . import fields
from .blocks import Segment, blocks_of
from .fields import RUNTIME_BYTES

VERSION = 1
MAX_FILE = 1 << 30
MAX_TOKENS = 1 << 26
MAX_SKETCHES = 64
MAX_BLOCK = 1 << 31
_IDS, _CODED, _OF_MODEL, _LABEL, _NAMESPACE, _GREW = 1, 2, 4, 8, 16, 32
_PART = "token log"


@dataclass(frozen=True, eq=False)
class TokenLog:
    """All that a token log holds. Of `identity` a file keeps the first half of the digest.

    `segments` say how the tokens were read; `sums` uint32 (blocks,) and `sketches` float32 (blocks, m) are the checks
    of each `block` tokens of a segment (and of the windows of layers that slide); `block` is a power of two, as is m
    unless it is 0. `ids` is the stream of the model-free code, `coded` that under the model, and `runtime` what
    computed it, 4 bytes; one of the two is there. `ids_sum` is the checksum of the ids.
    """

    identity: Identity
    geometry: Geometry
    namespace: str
    segments: tuple[Segment, ...]
    block: int
    sums: np.ndarray
    sketches: np.ndarray
    ids_sum: int
    ids: bytes | None = None
    coded: bytes | None = None
    runtime: bytes = bytes(RUNTIME_BYTES)

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    @property
    def recipe(self) -> Recipe:
        return tokens_recipe(model_coded=self.coded is not None, keep_ids=self.ids is not None)

    @property
    def blocks(self) -> list[range]:
        return blocks_of(self.segments, self.block)

    def token_ids(self) -> np.ndarray:
        """The ids int64 (T,) of the model-free code. Raises InvalidInput where there is none, DamagedArchive."""
        if self.ids is None:
            raise InvalidInput(
                "the token ids are coded under the model alone: restore(model=…) decodes them (save with keep_ids to "
                "read them without it)"
            )
        from .idcode import decode_ids  # compiled code, which `info` does without

        return self.checked(decode_ids(self.ids, self.tokens))

    def checked(self, ids: np.ndarray) -> np.ndarray:
        """`ids` themselves. Raises DamagedArchive unless they have the stored checksum."""
        if sum_of(ids) != self.ids_sum:
            raise DamagedArchive("token ids", "the decoded ids do not have the checksum of those that were saved")
        return ids

    def pack(self) -> bytes:
        """The file's bytes, as docs/format.md lists them."""
        flags = _IDS * (self.ids is not None) | _CODED * (self.coded is not None)
        flags |= _OF_MODEL * (self.identity.kind == MODEL)
        # a model's label says nothing that its digest does not, and takes a tenth of what a coded page of text does
        label = "" if self.identity.kind == MODEL and self.ids is None else self.identity.label
        flags |= _LABEL * bool(label) | _NAMESPACE * bool(self.namespace) | _GREW * (len(self.segments) > 1)
        out = [MAGIC, bytes([VERSION, flags]), bytes.fromhex(self.identity.digest[:HALF])]
        out += [fields.text(text) for text in (label, self.namespace) if text]
        out += [fields.geometry(self.geometry), fields.number(len(self.segments)) if flags & _GREW else b""]
        out += [fields.number(number) for segment in self.segments for number in segment]
        out += [bytes([_checked(self.block, self.sketches.shape[1])]), struct.pack("<I", self.ids_sum)]
        out += [self.sums.astype("<u4").tobytes(), self.sketches.astype("<f4").tobytes()]
        if self.ids is not None and self.coded is not None:
            out.append(fields.number(len(self.ids)))  # the last stream ends where the file does
        out += [self.ids or b"", self.runtime if self.coded is not None else b"", self.coded or b""]
        body = b"".join(out)
        return body + struct.pack("<I", _sum(body))

    @classmethod
    def unpack(cls, data: bytes, name: str) -> TokenLog:
        """Raises NotAnArchive, NewerFormat, DamagedArchive for anything but what `pack` writes."""
        if not is_token_log(data):
            raise NotAnArchive(f"{name} is no token log: it starts with {data[:4]!r}, expected {MAGIC!r}")
        if len(data) < 10 or struct.unpack("<I", data[-4:])[0] != _sum(data[:-4]):
            raise DamagedArchive(_PART, f"{name}: the checksum of its {len(data)} bytes differs")
        if data[4] != VERSION:
            raise NewerFormat(f"{name} has token log version {data[4]}; this kvcellar reads {VERSION}")
        try:
            return cls._unpacked(data[:-4])
        except DamagedArchive:
            raise
        except (ValueError, struct.error, UnicodeDecodeError, KVCellarError) as error:
            raise DamagedArchive(_PART, f"{name} cannot be read ({error})") from error

    @classmethod
    def _unpacked(cls, data: bytes) -> TokenLog:
        flags, take = data[5], fields.Cursor(data, 6)
        if flags & ~63 or not flags & (_IDS | _CODED):
            raise ValueError(f"flags {flags:#x}")
        digest = take.taken(HALF // 2).hex()
        label = take.text(MAX_LABEL) if flags & _LABEL else ""
        namespace = take.text(MAX_NAMESPACE) if flags & _NAMESPACE else ""
        identity = Identity(MODEL if flags & _OF_MODEL else NAME, digest, label)
        geometry = take.geometry()
        segments = tuple(Segment(take.number(), take.number()) for _ in range(take.count(2) if flags & _GREW else 1))
        (checked,) = take.taken(1)
        block, sketches = 1 << (checked & 31), 1 << (checked >> 5) >> 1
        tokens = sum(segment.tokens for segment in segments)
        if not all(min(segment) > 0 for segment in segments) or not 0 < tokens <= MAX_TOKENS:
            raise ValueError(f"{tokens} tokens in {len(segments)} segments")
        (ids_sum,) = struct.unpack("<I", take.taken(4))
        windows = any(layer.kind == SLIDING for layer in geometry.layers)
        count = sum(-(-segment.tokens // block) for segment in segments) + windows
        sums = np.frombuffer(take.taken(4 * count), "<u4")
        drawn = np.frombuffer(take.taken(4 * count * sketches), "<f4").reshape(count, sketches)
        ids = None
        if flags & _IDS:
            ids = take.taken(take.number()) if flags & _CODED else take.rest()
        runtime = take.taken(RUNTIME_BYTES) if flags & _CODED else bytes(RUNTIME_BYTES)
        coded = take.rest() if flags & _CODED else None
        return cls(identity, geometry, namespace, segments, block, sums, drawn, ids_sum, ids, coded, runtime)

    @classmethod
    def read(cls, reader: Reader, namespace: str) -> TokenLog:
        """The log behind an open reader. Raises what `unpack` does, and ArchiveNotFound for another namespace."""
        size, name = reader.size(), reader.name
        if size > MAX_FILE:
            raise DamagedArchive(_PART, f"{name} has {size} bytes; expected at most {MAX_FILE}")
        log = cls.unpack(reader.read(0, size), name)
        if log.namespace != namespace:
            raise ArchiveNotFound(errno.ENOENT, f"no archive {name} in namespace {namespace!r}")
        return log


def is_token_log(start: bytes | memoryview) -> bool:
    """Whether a file that starts so, with four bytes or more, is a token log, whole or not."""
    return bytes(start[: len(MAGIC)]) == MAGIC


def sum_of(ids: np.ndarray) -> int:
    """The checksum of ids int64 (T,): the lower half of the xxh3 of their little-endian bytes."""
    return _sum(np.ascontiguousarray(ids, "<i8").tobytes())


def _checked(block: int, sketches: int) -> int:
    """The byte that says how much is checked: log2 of `block`, and 32 times 0 for no sketch, else log2 of m and 1."""
    if block.bit_count() != 1 or block > MAX_BLOCK or sketches.bit_count() > 1 or sketches > MAX_SKETCHES:
        raise InvalidInput(f"blocks of {block} tokens with {sketches} sums; expected powers of two")
    return block.bit_length() - 1 | sketches.bit_length() << 5


def _sum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF
