"""Archives put together record by record: every checksum is right, whatever the content claims."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from archives import SMALL, Outcome, Pairs, contents_of, outcome
from kvcellar import Identity, KVCache, LayerKV
from kvcellar.archive.block import BlockHead
from kvcellar.archive.commit import ENTRY, Commit, pack_index
from kvcellar.archive.format import BLOCK, HEADER_SIZE, MANIFEST, checksum, pack_header, pack_record
from kvcellar.archive.manifest import Manifest
from kvcellar.archive.writer import NewBlock
from kvcellar.encode import encode_blocks
from kvcellar.pipeline import Pipeline

TOKENS = 21
IDS = list(range(100, 100 + TOKENS))


def _random_bits() -> Pairs:
    """Two layers that no code makes smaller: every part stays raw, and those of full blocks are equally long."""
    words = np.random.default_rng(3).integers(-(2**15), 2**15, (2, 2, 1, 1, TOKENS, 4), dtype=np.int16)
    sides = torch.from_numpy(words).view(torch.float16)
    return [(keys, values) for keys, values in sides]


CACHE = _random_bits()
WHOLE = contents_of(CACHE, IDS)


def taken(data: bytes, folder: Path) -> Outcome:
    """What becomes of a file of these bytes."""
    (folder / "a.kvc").write_bytes(data)
    return outcome(folder / "a.kvc")


def require_refused(data: bytes, words: str, folder: Path) -> None:
    """Nothing may come back, and `words` must be among the complaints."""
    found = taken(data, folder)
    assert found.contents is None, "was restored"
    assert words in "\n".join(found.complaints)


class Forger:
    """What a save of `CACHE` would write, as parts that can be altered before `build` puts them into a file."""

    def __init__(self) -> None:
        kv = KVCache(tuple(LayerKV(keys[0], values[0]) for keys, values in CACHE))
        self.header = pack_header()
        self.manifest = Manifest(SMALL, Identity.named("m"), kv.geometry)
        self.manifest_bytes = self.manifest.pack()
        pipeline = Pipeline(SMALL, kv.geometry)
        self.blocks: list[NewBlock] = list(encode_blocks(pipeline, self.manifest, kv, np.array(IDS), 0))

    def recut(self, block: int) -> None:
        """The same tokens in blocks of another length than the recipe's."""
        other = replace(self.manifest, recipe=replace(SMALL, block=block))
        kv = KVCache(tuple(LayerKV(keys[0], values[0]) for keys, values in CACHE))
        self.blocks = list(encode_blocks(Pipeline(SMALL, kv.geometry), other, kv, np.array(IDS), 0))
        for i in range(len(self.blocks)):
            self.head(i, recipe=SMALL.digest)

    def json(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Alter the manifest's JSON; the result may be what no Manifest can hold."""
        value = json.loads(self.manifest_bytes)
        change(value)
        self.manifest_bytes = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    def head(self, index: int, **changes: Any) -> None:
        """Alter fields of a block's head."""
        self.blocks[index] = replace(self.blocks[index], head=replace(self.blocks[index].head, **changes))

    def part(self, index: int, group: int, data: bytes) -> None:
        """Put other bytes in place of a part, with a table that describes them."""
        head, parts = self.blocks[index].head, [bytes(part) for part in self.blocks[index].parts]
        parts[group] = data
        table = tuple((len(part), checksum(part)) for part in parts)
        self.blocks[index] = NewBlock(replace(head, parts=table), parts)

    def build(
        self,
        *,
        between: Callable[[int], bytes] | None = None,
        entries: Callable[[np.ndarray], np.ndarray] = lambda found: found,
        index: Callable[[int, np.ndarray], bytes] = pack_index,
        commit: Callable[[Commit], Commit] = lambda made: made,
        pack_head: Callable[[BlockHead], bytes] = BlockHead.pack,
    ) -> bytes:
        """The file. `between` gives bytes to put, at their offset, between manifest and blocks."""
        data = bytearray(self.header + pack_record(MANIFEST, HEADER_SIZE, self.manifest_bytes, 0))
        if between is not None:
            data += between(len(data))
        found, tokens = [], 0
        for block in self.blocks:
            head, offset = pack_head(block.head), len(data)
            data += pack_record(BLOCK, offset, head, block.head.body_length) + b"".join(block.parts)
            entry = (offset, len(data) - offset, block.head.start, block.head.count, int(block.head.sealed))
            found.append((*entry, checksum(head)))
            tokens = block.head.start + block.head.count
        state, at_index = entries(np.array(found, ENTRY)), len(data)
        data += index(at_index, state)
        made = Commit(1, len(data), 0, at_index, len(state), tokens, tokens, 0, np.empty(0, ENTRY))
        made = replace(made, live=len(data) + made.packed_length)
        return bytes(data + commit(made).pack())
