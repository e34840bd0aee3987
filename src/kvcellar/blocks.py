"""Blocks of a file from a cache, and a cache from blocks: where pipeline and archive meet."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from .archive.block import BlockHead, part_table
from .archive.manifest import Manifest
from .archive.reader import ArchiveReader, Block
from .archive.writer import NewBlock
from .cache import KVCache, LayerKV, allocate
from .errors import DamagedArchive, InvalidInput
from .geometry import Geometry
from .pipeline import Pipeline

CHUNK_BYTES = 3 << 19
_local = threading.local()


def encode_blocks(
    pipeline: Pipeline, manifest: Manifest, kv: KVCache, ids: np.ndarray, first: int, position: int | None = None
) -> Iterator[NewBlock]:
    """Blocks of `kv`, whose first token has index `first` and that `position` (default: the index).

    Only the last may be unsealed.
    """
    if len(kv) != len(ids):
        raise InvalidInput(f"{len(kv)} tokens and {len(ids)} ids of them")
    size = manifest.recipe.block
    position = first if position is None else position
    for start in range(0, len(ids), size):
        tokens = ids[start : start + size]
        cut = kv.tokens(start, start + len(tokens))
        parts = pipeline.encode(cut, tokens, position + start)
        head = BlockHead(
            start=first + start,
            tokens=tokens,
            sealed=len(tokens) == size,
            geometry=manifest.geometry,
            recipe=manifest.recipe.digest,
            parts=part_table(parts),
            first_position=position + start,
            profile=bytes.fromhex(manifest.profile) if manifest.profile else None,
            held=_held(cut, manifest.geometry),
        )
        yield NewBlock(head, parts)


def _held(cut: KVCache, geometry: Geometry) -> tuple[tuple[int, int], ...]:
    """For each run of sliding layers the tokens of the block they hold. Raises InvalidInput when they differ."""
    found: dict[int, tuple[int, int]] = {}
    for layer, run in geometry.sliding_runs.items():
        kv = cut.layers[layer]
        held = (kv.first, kv.first + kv.slots) if kv.slots else (0, 0)
        if found.setdefault(run, held) != held:
            raise InvalidInput(f"layer {layer} holds tokens {held} of a block, its neighbours {found[run]}")
    return tuple(found.values())


class _Take(NamedTuple):
    """The tokens `wanted` of one layer of a block, and where they go in the output."""

    wanted: range
    position: int


class _Task(NamedTuple):
    """Layer groups of a block to decode, and what is taken from them, by layer."""

    block: Block
    groups: list[int]
    takes: dict[int, _Take]


def decode_blocks(
    pipeline: Pipeline, reader: ArchiveReader, wanted: Mapping[int, Sequence[range]]
) -> dict[int, LayerKV]:
    """What the archive holds of the `wanted` tokens (ascending spans, apart) of each layer, one behind the other, on
    all cores.

    A task is one block, or without a predictor some of its layer groups: neither depends on another.
    """
    tasks: list[_Task] = []
    counts = dict.fromkeys(wanted, 0)
    for block, spans in _spans_by_block(reader, wanted):
        if len(block.head.parts) != len(pipeline.groups):
            parts = f"{len(block.head.parts)} parts for {len(pipeline.groups)} layer groups"
            raise DamagedArchive(block.part, parts)
        takes = {}
        for layer, span in spans.items():
            held = block.head.tokens_of(layer)
            if both := range(max(span.start, held.start), min(span.stop, held.stop)):
                takes[layer] = _Take(both, counts[layer])
                counts[layer] += len(both)
        tasks += _tasks(pipeline, block, takes)
    out = allocate(reader.manifest.geometry, counts)
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


def _spans_by_block(
    reader: ArchiveReader, wanted: Mapping[int, Sequence[range]]
) -> Iterator[tuple[Block, dict[int, range]]]:
    """Blocks with the span that each layer wants of them; a block comes again for a layer's next span in it."""
    alike: dict[tuple[range, ...], list[int]] = {}
    for layer, spans in wanted.items():
        alike.setdefault(tuple(spans), []).append(layer)
    indexes = {i for spans in alike for span in spans for i in reader.block_indexes(span.start, span.stop)}
    for block in map(reader.block, sorted(indexes)):
        touching = [(layers, _touching(spans, block)) for spans, layers in alike.items()]
        for turn in range(max(len(spans) for _, spans in touching)):
            yield block, {i: spans[turn] for layers, spans in touching if turn < len(spans) for i in layers}


def _touching(spans: Sequence[range], block: Block) -> Sequence[range]:
    """Those of ascending spans, apart from each other, that `block` holds tokens of."""
    first = bisect_right(spans, block.head.start, key=lambda span: span.stop)
    return spans[first : bisect_left(spans, block.stop, key=lambda span: span.start)]


def _tasks(pipeline: Pipeline, block: Block, takes: dict[int, _Take]) -> list[_Task]:
    groups = pipeline.needed(takes)
    for group in groups:
        try:
            pipeline.require_plausible(group, block.head.count_of, block.head.parts[group][0])
        except DamagedArchive as error:
            raise DamagedArchive(f"{block.part}, layer group {group}", error.problem) from error
    chunks = [groups] if pipeline.predictor and groups else list(_chunks(block, groups))
    return [_Task(block, chunk, takes) for chunk in chunks]


def _run(pipeline: Pipeline, reader: ArchiveReader, task: _Task, out: Mapping[int, LayerKV]) -> None:
    """Decode a task straight into its places in `out`, or through a copy where only part of a block is wanted."""
    head = task.block.head
    takes = {i: task.takes[i] for group in task.groups for i in pipeline.groups[group] if i in task.takes}
    places = {
        i: LayerKV(out[i].keys[:, at : at + len(span)], out[i].values[:, at : at + len(span)])
        for i, (span, at) in takes.items()
    }
    partly = {i: head.count_of(i) for i, take in takes.items() if take.wanted != head.tokens_of(i)}
    target = {**places, **allocate(reader.manifest.geometry, partly)}
    try:
        buffer = _buffer(sum(head.parts[group][0] for group in task.groups))
        parts = reader.read_parts(task.block, task.groups, buffer)
        pipeline.decode(task.groups, parts, head.tokens, head.first_position, target)
    except DamagedArchive as error:
        part = error.part if error.part.startswith(task.block.part) else task.block.part
        raise DamagedArchive(part, error.problem) from error
    for i in partly:
        start = head.tokens_of(i).start
        cut = slice(takes[i].wanted.start - start, takes[i].wanted.stop - start)
        places[i].keys.copy_(target[i].keys[:, cut])
        places[i].values.copy_(target[i].values[:, cut])


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
