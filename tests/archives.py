"""Small archives to damage, and the means to say what lies where in them and what they give back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import kvcellar
from kvcellar import Archive, KVCellarError, Recipe
from kvcellar.archive.format import (
    COMMIT,
    HEADER_SIZE,
    MANIFEST,
    RECORD_NAMES,
    read_record,
)
from kvcellar.archive.reader import ArchiveReader
from kvcellar.store.base import Reader

BLOCK = 8
SMALL = Recipe(name="small", symbols={"id": "byteplanes-zstd/1"}, block=BLOCK)
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
_UNSIGNED = {2: np.uint16, 4: np.uint32}


class Bytes(Reader):
    """A reader of bytes in memory."""

    def __init__(self, data: bytes):
        self.data, self.name = data, "memory"

    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]

    def close(self) -> None:
        pass


def prefix(cache: Pairs, tokens: int) -> Pairs:
    return [(keys[:, :, :tokens], values[:, :, :tokens]) for keys, values in cache]


def bits(x: torch.Tensor) -> np.ndarray:
    """The bits of `x`, so that NaN and -0 compare by what is stored."""
    x = x.detach().contiguous()
    return x.view(torch.uint8).numpy().reshape(-1).view(_UNSIGNED[x.element_size()]).reshape(x.shape)


def contents(archive: Archive) -> list[np.ndarray]:
    """Token ids, then the bits of keys and values (H, T, D) of each layer."""
    layers = len(archive.manifest.geometry)
    sides = [side for layer in range(layers) for side in archive.read(layer, 0, len(archive))]
    return [archive.tokens, *(bits(side) for side in sides)]


def contents_at(path: Path) -> list[np.ndarray]:
    with kvcellar.open(path, identity="m") as archive:
        return contents(archive)


def contents_of(cache: Pairs, ids: list[int], tokens: int | None = None) -> list[np.ndarray]:
    """What an archive of the first `tokens` tokens must give back."""
    tokens = len(ids) if tokens is None else tokens
    return [np.array(ids[:tokens]), *(bits(side[0]) for pair in prefix(cache, tokens) for side in pair)]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


class Span(NamedTuple):
    """Bytes `start`…`stop` of a file. `live`: the newest state needs them. `label`: a pattern that names them."""

    start: int
    stop: int
    live: bool
    label: str
    tag: bytes = b""

    def named_in(self, complaints: Iterable[str]) -> bool:
        return any(re.search(self.label, text) for text in complaints)


def spans(data: bytes) -> list[Span]:
    """Header and records of a sound archive, in file order."""
    archive = ArchiveReader(Bytes(data))
    live = {int(offset) for offset in archive.entries["offset"]} | {archive.commit.offset, archive.commit.index}
    found, offset = [Span(0, HEADER_SIZE, True, "header|not a kvcellar archive")], HEADER_SIZE
    while offset < len(data):
        record = read_record(Bytes(data), offset, len(data))
        # An altered length of the last commit leads to a wrong offset, but still to a commit.
        label = {MANIFEST: "manifest", COMMIT: "commit"}.get(record.tag, rf"byte {offset}\b")
        found.append(Span(offset, record.end, offset in live or offset < archive.first_block, label, record.tag))
        offset = record.end
    assert {span.tag for span in found[1:]} <= set(RECORD_NAMES)
    return found


class Outcome(NamedTuple):
    """What opening, reading and verifying a file gave: its contents unless reading failed, and all that was said."""

    contents: list[np.ndarray] | None
    complaints: list[str]


def outcome(path: Path) -> Outcome:
    """Anything but a KVCellarError goes through."""
    complaints: list[str] = []
    found = None
    try:
        archive = kvcellar.open(path, identity="m")
    except KVCellarError as error:
        return Outcome(None, [str(error)])
    with archive:
        complaints += [f"{part}: {problem}" for part, problem in archive.verify().problems]
        for ask in (archive.info, lambda: archive.tokens):
            try:
                ask()
            except KVCellarError as error:
                complaints.append(str(error))
        try:
            found = contents(archive)
        except KVCellarError as error:
            complaints.append(str(error))
    return Outcome(found, complaints)
