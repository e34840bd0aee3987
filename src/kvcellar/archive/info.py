"""What an archive says of itself: `info` without reading any part, `verify` by reading all of them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ..recipe import Recipe
from .format import MAJOR, MINOR
from .reader import ArchiveReader, problems

BLOCKS_LOOKED_AT = 32


@dataclass(frozen=True)
class ArchiveInfo(Mapping[str, Any]):
    """Facts about an archive; every size is bytes really on disk. Reads as attributes and as a mapping.

    `ratio_16bit` compares the file with the same cache in any 16-bit dtype; `profile_bytes` stands beside the file
    because an archive that needs a profile cannot be decoded without it (None when its size is not known here).
    `slots` are those a reduced cache stores, over all layers and heads (None for a cache of every token); ratios and
    raw bytes are then those of the cache before it was reduced.
    """

    path: str
    format: str
    recipe: str
    recipe_json: dict[str, Any]
    identity: dict[str, Any]
    namespace: str
    tokens: int
    next_position: int
    layers: int
    geometry: list[dict[str, Any]]
    blocks: int
    sealed_blocks: int
    commits: int
    file_bytes: int
    live_bytes: int
    bytes_per_token: float
    raw_bytes: int
    raw_bytes_per_token: int
    ratio_raw: float
    ratio_16bit: float
    profile: str | None
    profile_bytes: int | None
    uncommitted_bytes: int = field(default=0)
    slots: int | None = None
    slots_per_head: float | None = None

    def __getitem__(self, key: str) -> Any:
        if key not in self.__dataclass_fields__:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (f.name for f in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def to_json(self) -> dict[str, Any]:
        return dict(self)


def describe(archive: ArchiveReader) -> ArchiveInfo:
    manifest, commit = archive.manifest, archive.commit
    size = archive.reader.size()
    tokens = commit.tokens
    recipe: Recipe = manifest.recipe
    embedded = archive.profile_record
    slots, heads = archive.slots, sum(layer.key.heads for layer in manifest.geometry.layers)
    return ArchiveInfo(
        path=archive.reader.name,
        format=f"{MAJOR}.{MINOR}",
        recipe=recipe.name,
        recipe_json=recipe.to_json(),
        identity=manifest.identity.to_json(),
        namespace=manifest.namespace,
        tokens=tokens,
        next_position=commit.next_position,
        layers=len(manifest.geometry),
        geometry=manifest.geometry.to_json(),
        blocks=len(archive.entries),
        sealed_blocks=int((archive.entries["sealed"] == 1).sum()),
        commits=commit.sequence,
        file_bytes=size,
        live_bytes=commit.live,
        bytes_per_token=size / tokens,
        raw_bytes=tokens * manifest.geometry.bytes_per_token,
        raw_bytes_per_token=manifest.geometry.bytes_per_token,
        ratio_raw=tokens * manifest.geometry.bytes_per_token / size,
        ratio_16bit=tokens * manifest.geometry.bytes_per_token_16bit / size,
        profile=manifest.profile,
        profile_bytes=embedded.body_length if embedded else (0 if manifest.profile is None else None),
        uncommitted_bytes=size - commit.end,
        slots=slots,
        slots_per_head=None if slots is None else slots / heads,
    )


def coarse_bytes_per_token(archive: ArchiveReader) -> float | None:
    """Bytes of parts (without ids) per token of sealed blocks that hold coarse tokens alone; None if there is none.

    Reads the heads of at most `BLOCKS_LOOKED_AT` blocks, spread over the archive, and no part. Raises DamagedArchive.
    """
    sealed = np.flatnonzero(archive.entries["sealed"])
    if archive.manifest.recipe.quantize is None:
        return None
    some = sealed[np.linspace(0, len(sealed) - 1, min(len(sealed), BLOCKS_LOOKED_AT)).astype(int)]
    heads = [head for head in (archive.block(int(i)).head for i in some) if head.all_coarse]
    tokens = sum(head.count for head in heads)
    return sum(head.body_length for head in heads) / tokens if tokens else None


@dataclass(frozen=True)
class VerifyReport:
    """`problems` lists (part, problem) of everything damaged; true when there is none."""

    path: str
    tokens: int
    blocks: int
    checked_bytes: int
    problems: tuple[tuple[str, str], ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def to_json(self) -> dict[str, Any]:
        found = [{"part": part, "problem": problem} for part, problem in self.problems]
        return {"ok": self.ok, **{f.name: getattr(self, f.name) for f in fields(self)}, "problems": found}


def verify(archive: ArchiveReader, progress: Callable[[float], None] | None = None) -> VerifyReport:
    """Check every part of the live state; `progress` is told the fraction done."""
    found = []
    for fraction, problem in problems(archive):
        if problem is not None:
            found.append((problem.part, problem.problem))
        if progress is not None:
            progress(fraction)
    size = archive.reader.size()
    return VerifyReport(archive.reader.name, archive.tokens, len(archive.entries), size, tuple(found))
