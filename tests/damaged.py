"""Damaged archives for the tests of repair, and what a repair may do to the folder they lie in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import kvcellar
from archives import SMALL, Bytes, contents, contents_of, prefix, same, spans
from kvcellar.archive.reader import ArchiveReader
from kvcellar.archive.repair import RepairReport
from kvcellar.frontends.repair import repair as repair_file
from kvcellar.profile import Profile

STATES = (5, 7, 10, 21)  # a tail, a longer tail, a block and a tail that replace it, two blocks and a tail
TOKENS = STATES[-1]
# Tokens saved when the block that starts here is damaged: older tails of the same tokens step in.
SAVED = {"bulk": {0: 0, 8: 8, 16: 16}, "appended": {0: 7, 8: 10, 16: 16}}
PROFILE_GIVEN = Profile({"w": np.arange(6, dtype=np.float32)}, {"text": "any"})


class Sample(NamedTuple):
    data: bytes
    cache: list
    ids: list[int]
    profile: bool

    def holds(self, path: Path, tokens: int) -> bool:
        """Whether the archive at `path` verifies and gives back the first tokens bit for bit."""
        profile = PROFILE_GIVEN if self.profile else None
        with kvcellar.open(path, identity="m", profile=profile) as archive:
            return archive.verify().ok and same(contents(archive), contents_of(self.cache, self.ids, tokens))


def make_samples(make_cache: Callable, make_ids: Callable, folder: Path) -> dict[str, Sample]:
    """An archive saved at once, with an embedded profile, and one that was appended to."""
    cache = make_cache(layers=2, heads=1, tokens=TOKENS, width=4, dtype=torch.float16)
    ids, settings = make_ids(TOKENS), {"identity": "m", "recipe": SMALL}
    bulk, appended = folder / "bulk.kvc", folder / "appended.kvc"
    kvcellar.save(bulk, cache, tokens=ids, profile=PROFILE_GIVEN, embed_profile=True, **settings)
    kvcellar.save(appended, prefix(cache, STATES[0]), tokens=ids[: STATES[0]], **settings)
    for tokens in STATES[1:]:
        with kvcellar.open(appended, identity="m", mode="a") as archive:
            archive.append(prefix(cache, tokens), ids[:tokens])
    return {path.stem: Sample(path.read_bytes(), cache, ids, path == bulk) for path in (bulk, appended)}


def damaged(sample: Sample, folder: Path, *at: int, name: str = "a.kvc") -> Path:
    """The sample with a bit flipped in some bytes."""
    data = bytearray(sample.data)
    for byte in at:
        data[byte] ^= 4
    (folder / name).write_bytes(data)
    return folder / name


def starts(data: bytes) -> dict[int, int]:
    """First token of each live block by its offset."""
    return {int(entry["offset"]): int(entry["start"]) for entry in ArchiveReader(Bytes(data)).entries}


def of_kind(data: bytes, tag: bytes, number: int = 0) -> tuple[int, int]:
    span = [span for span in spans(data) if span.tag == tag][number]
    return span.start, span.stop


def live_block(data: bytes, start: int) -> tuple[int, int]:
    (offset,) = [offset for offset, first in starts(data).items() if first == start]
    (span,) = [span for span in spans(data) if span.start == offset]
    return span.start, span.stop


def repaired(path: Path, **settings: object) -> tuple[RepairReport, Path]:
    """Repair into a new file; the damaged one must not move, and nothing else may appear."""
    before, names = path.read_bytes(), {each.name for each in path.parent.iterdir()}
    out = path.with_name("new.kvc")
    report = repair_file(path, out, **settings)  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert {each.name for each in path.parent.iterdir()} == names | ({"new.kvc"} if report.out else set())
    return report, out
