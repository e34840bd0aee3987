"""Blocks of a file from a cache, and a cache from blocks: where pipeline and archive meet."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from .archive.block import BlockHead, part_table
from .archive.manifest import Manifest
from .archive.reader import ArchiveReader, Block
from .archive.writer import NewBlock
from .cache import KVCache, LayerKV, allocate
from .errors import DamagedArchive
from .pipeline import Pipeline

CHUNK_BYTES = 3 << 19
_local = threading.local()


def encode_blocks(
    pipeline: Pipeline, manifest: Manifest, kv: KVCache, ids: np.ndarray, first: int
) -> Iterator[NewBlock]:
    """Blocks of `kv` whose first token has index `first` in the sequence; only the last may be unsealed."""
    size = manifest.recipe.block
    for start in range(0, len(ids), size):
        tokens = ids[start : start + size]
        parts = pipeline.encode(kv.tokens(start, start + len(tokens)), tokens, first + start)
        head = BlockHead(
            start=first + start,
            tokens=tokens,
            sealed=len(tokens) == size,
            geometry=manifest.geometry,
            recipe=manifest.recipe.digest,
            parts=part_table(parts),
            first_position=first + start,
            profile=bytes.fromhex(manifest.profile) if manifest.profile else None,
        )
        yield NewBlock(head, parts)


class _Task(NamedTuple):
    """Layer groups of a block to decode: its tokens `wanted` go to `position` of the output."""

    block: Block
    wanted: range
    groups: list[int]
    position: int


def decode_blocks(
    pipeline: Pipeline, reader: ArchiveReader, spans: Sequence[range], layers: list[int]
) -> dict[int, LayerKV]:
    """Tokens of `spans` (ascending, apart) of `layers`, one behind the other, on all cores.

    A task is one block, or without a predictor some of its layer groups: neither depends on another.
    """
    groups = pipeline.needed(layers)
    tasks: list[_Task] = []
    position = 0
    for span in spans:
        for block in reader.blocks(span.start, span.stop):
            if len(block.head.parts) != len(pipeline.groups):
                parts = f"{len(block.head.parts)} parts for {len(pipeline.groups)} layer groups"
                raise DamagedArchive(block.part, parts)
            wanted = range(max(span.start, block.head.start), min(span.stop, block.stop))
            for group in groups:
                try:
                    pipeline.require_plausible(group, block.head.count, block.head.parts[group][0])
                except DamagedArchive as error:
                    raise DamagedArchive(f"{block.part}, layer group {group}", error.problem) from error
            chunks = [groups] if pipeline.predictor else list(_chunks(block, groups))
            tasks += [_Task(block, wanted, chunk, position) for chunk in chunks]
            position += len(wanted)
    out = allocate(reader.manifest.geometry, position, layers)
    workers = min(os.cpu_count() or 1, len(tasks))
    if workers > 1:
        with ThreadPoolExecutor(workers, thread_name_prefix="kvcellar") as pool:
            futures = [pool.submit(_run, pipeline, reader, task, out) for task in tasks]
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()
    else:
        for task in tasks:
            _run(pipeline, reader, task, out)
    return out


def _run(pipeline: Pipeline, reader: ArchiveReader, task: _Task, out: Mapping[int, LayerKV]) -> None:
    """Decode a task straight into its place in `out`, or through a copy when only part of its block is wanted."""
    head = task.block.head
    end = task.position + len(task.wanted)
    members = [i for group in task.groups for i in pipeline.groups[group] if i in out]
    places = {i: LayerKV(out[i].keys[:, task.position : end], out[i].values[:, task.position : end]) for i in members}
    whole = len(task.wanted) == head.count
    target = places if whole else allocate(reader.manifest.geometry, head.count, members)
    try:
        buffer = _buffer(sum(head.parts[group][0] for group in task.groups))
        parts = reader.read_parts(task.block, task.groups, buffer)
        pipeline.decode(task.groups, parts, head.tokens, head.first_position, target)
    except DamagedArchive as error:
        part = error.part if error.part.startswith(task.block.part) else task.block.part
        raise DamagedArchive(part, error.problem) from error
    if not whole:
        cut = slice(task.wanted.start - head.start, task.wanted.stop - head.start)
        for index, place in places.items():
            place.keys.copy_(target[index].keys[:, cut])
            place.values.copy_(target[index].values[:, cut])


def _buffer(size: int) -> np.ndarray:
    """This thread's read buffer of at least `size` bytes, kept because fresh memory costs more than the read."""
    if not hasattr(_local, "buffer") or _local.buffer.size < size:
        _local.buffer = np.empty(size + size // 8, np.uint8)
    return _local.buffer  # type: ignore[no-any-return]


def _chunks(block: Block, groups: list[int]) -> Iterator[list[int]]:
    """`groups` in runs of neighbours, each of about CHUNK_BYTES on disk."""
    chunk: list[int] = []
    size = 0
    for group in groups:
        if chunk and (group != chunk[-1] + 1 or size >= CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(group)
        size += block.head.parts[group][0]
    if chunk:
        yield chunk
