"""The token log: a file that keeps a cache's token ids, and of its numbers only what tells whether they came again.

Whoever has the model has the cache: a forward pass over the ids makes it anew. The ids are coded without any model
(`idcode`), under the model itself (`modelcode`), or both; `checks` says how near a replay came. The layout is normative
in docs/format.md, "Token logs". One file is a few thousand bytes, so that it is read and checked as a whole, and an
append writes it anew. No torch here: `kvcellar info` reads it.
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
from ..identity import MAX_LABEL, MODEL, NAME, Identity
from ..recipe import Recipe, tokens_recipe
from ..store.base import Reader
from .blocks import Segment, blocks_of

VERSION = 1
MAX_FILE = 1 << 30
MAX_TOKENS = 1 << 26
MAX_SKETCHES = 64
_IDS, _CODED, _OF_MODEL = 1, 2, 4
_PART = "token log"


@dataclass(frozen=True, eq=False)
class TokenLog:
    """All that a token log holds.

    `segments` say how the tokens were read; `sums` uint32 (blocks,) and `sketches` float32 (blocks, m) are the checks
    of each `block` tokens of a segment (and of the windows of layers that slide). `ids` is the stream of the model-free
    code, `coded` that under the model, and `runtime` what computed it, 8 bytes; one of the two is there. `ids_sum` is
    the checksum of the ids.
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
    runtime: bytes = bytes(8)

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
        out = [MAGIC, bytes([VERSION, flags]), bytes.fromhex(self.identity.digest)]
        out += [_text(label), _text(self.namespace), self.geometry.pack(), _number(len(self.segments))]
        out += [_number(number) for segment in self.segments for number in segment]
        out += [_number(self.block), _number(self.sketches.shape[1]), struct.pack("<I", self.ids_sum)]
        out += [self.sums.astype("<u4").tobytes(), self.sketches.astype("<f4").tobytes()]
        out += [] if self.ids is None else [_number(len(self.ids)), self.ids]
        out += [] if self.coded is None else [self.runtime, _number(len(self.coded)), self.coded]
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
        except (ValueError, IndexError, struct.error, UnicodeDecodeError, KVCellarError) as error:
            raise DamagedArchive(_PART, f"{name} cannot be read ({error})") from error

    @classmethod
    def _unpacked(cls, data: bytes) -> TokenLog:
        flags, take = data[5], _Cursor(data, 6)
        if flags & ~7 or not flags & (_IDS | _CODED):
            raise ValueError(f"flags {flags:#x}")
        digest = take.taken(32).hex()
        label, namespace = take.text(MAX_LABEL), take.text(MAX_NAMESPACE)
        identity = Identity(MODEL if flags & _OF_MODEL else NAME, digest, label)
        geometry, take.at = Geometry.unpack(data, take.at, _PART)
        segments = tuple(Segment(take.number(), take.number()) for _ in range(take.count(2)))
        block, sketches = take.number(), take.number()
        tokens = sum(segment.tokens for segment in segments)
        if not all(min(segment) > 0 for segment in segments) or not 0 < tokens <= MAX_TOKENS or not block:
            raise ValueError(f"{tokens} tokens in {len(segments)} segments, checked by {block}")
        (ids_sum,) = struct.unpack("<I", take.taken(4))
        windows = any(layer.kind == SLIDING for layer in geometry.layers)
        count = sum(-(-segment.tokens // block) for segment in segments) + windows
        if sketches > MAX_SKETCHES:
            raise ValueError(f"{sketches} sums a block")
        sums = np.frombuffer(take.taken(4 * count), "<u4")
        drawn = np.frombuffer(take.taken(4 * count * sketches), "<f4").reshape(count, sketches)
        ids = take.taken(take.number()) if flags & _IDS else None
        runtime = take.taken(8) if flags & _CODED else bytes(8)
        coded = take.taken(take.number()) if flags & _CODED else None
        if take.at != len(data):
            raise ValueError(f"{len(data) - take.at} bytes too many")
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


def _sum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF


def _number(value: int) -> bytes:
    """Seven bits a byte, lowest first, the top bit set on all but the last."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _text(text: str) -> bytes:
    raw = text.encode()
    return _number(len(raw)) + raw


class _Cursor:
    """Reads a log's fields one by one; a length that passes the end is a ValueError before anything is made for it."""

    def __init__(self, data: bytes, at: int):
        self.data, self.at = data, at

    def taken(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError(f"{count} bytes at {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        value = 0
        for shift in range(0, 63, 7):
            (byte,) = self.taken(1)
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError(f"a number of more than 63 bits at {self.at}")

    def count(self, least: int) -> int:
        """How many things of at least so many bytes each follow."""
        count = self.number()
        if count * least > len(self.data) - self.at:
            raise ValueError(f"{count} segments at {self.at} of {len(self.data)} bytes")
        return count

    def text(self, limit: int) -> str:
        text = self.taken(self.number()).decode()
        if len(text) > limit:
            raise ValueError(f"text of {len(text)} characters; at most {limit}")
        return text
