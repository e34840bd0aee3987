"""Heads of blocks cut at any byte, or with any byte altered: DamagedArchive, or a head that can be packed again."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from kvcellar.archive.block import BlockHead
from kvcellar.errors import DamagedArchive
from kvcellar.geometry import FULL, SLIDING, Geometry, LayerGeometry, SideGeometry

SIDE = SideGeometry(2, 4, "bfloat16")
KINDS = {"full": [(FULL, 0)], "sliding": [(SLIDING, 6)], "mixed": [(FULL, 0), (SLIDING, 6), (FULL, 0), (SLIDING, 9)]}


def head_of(kind: str) -> BlockHead:
    layers = tuple(LayerGeometry(SIDE, SIDE, name, window) for name, window in KINDS[kind])
    geometry = Geometry(layers)
    return BlockHead(
        start=8,
        tokens=np.arange(100, 105),
        sealed=False,
        geometry=geometry,
        recipe=bytes(32),
        parts=((5, 6),) * len(layers),
        first_position=8,
        held=((1, 5),) * len(set(geometry.sliding_runs.values())),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_head_is_damaged(kind: str) -> None:
    packed = head_of(kind).pack()
    assert BlockHead.unpack(packed, "block").pack() == packed
    for cut in range(len(packed)):
        with pytest.raises(DamagedArchive, match="block"):
            BlockHead.unpack(packed[:cut], "block")


@pytest.mark.parametrize("kind", KINDS)
def test_an_altered_head_is_damaged_or_packs_again(kind: str) -> None:
    packed = head_of(kind).pack()
    for at in range(len(packed)):
        for value in {0, 1, 2, 3, 127, 255, packed[at] ^ 1} - {packed[at]}:
            altered = packed[:at] + bytes([value]) + packed[at + 1 :]
            with suppress(DamagedArchive):
                BlockHead.unpack(altered, "block").pack()
