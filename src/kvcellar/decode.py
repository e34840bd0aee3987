"""A cache, or symbols, from the blocks of a file."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from .archive.reader import ArchiveReader, Block
from .cache import LayerKV, allocate
from .errors import DamagedArchive
from .pipeline import Pipeline
from .replayed import Replay, Replayed
from .stages import LOOKBACK, Grade
from .tokens import Tokens
from .window import FineWindow, Symbols, restore_graded

CHUNK_BYTES = 3 << 19
_local = threading.local()


def stored_symbols(pipeline: Pipeline, reader: ArchiveReader, start: int, stop: int) -> Symbols:
    """The symbols of tokens `start`…`stop`, where blocks begin and end. Raises DamagedArchive."""
    found, groups = Symbols.none(pipeline), range(len(pipeline.groups))
    for block in reader.blocks(start, stop):
        _require_plausible(pipeline, block, groups)
        tokens = tokens_of(pipeline, reader, block)
        rows = {Grade.COARSE: len(tokens.coarse), Grade.FINE: len(tokens.fine)}
        arrays = {grade: pipeline.buffers(groups, count, grade) for grade, count in rows.items()}
        try:
            pipeline.unpack(groups, reader.read_parts(block, groups), {g: a for g, a in arrays.items() if rows[g]})
        except DamagedArchive as error:
            raise DamagedArchive(block.part, error.problem) from error
        found = found.followed_by(Symbols.of_block(tokens, arrays))
    return found


def coarse_symbols(pipeline: Pipeline, reader: ArchiveReader, layer: int) -> list[np.ndarray]:
    """The coarse symbols of `layer`'s group, arrays (T, columns) over all tokens of a lossy archive.

    Tokens that are still fine get the symbols they would have as coarse ones. Raises DamagedArchive.
    """
    groups = pipeline.needed([layer])
    found: list[list[np.ndarray]] = []
    for block in reader.blocks(0, reader.tokens):
        _require_plausible(pipeline, block, groups)
        tokens = tokens_of(pipeline, reader, block)
        rows = {Grade.COARSE: np.r_[tokens.coarse.start : tokens.coarse.stop], Grade.FINE: tokens.fine}
        arrays = {grade: pipeline.buffers(groups, len(at), grade) for grade, at in rows.items() if len(at)}
        pipeline.unpack(groups, reader.read_parts(block, groups), arrays)
        if Grade.FINE in arrays:
            fine, members = tokens.take(tokens.fine), [i for group in groups for i in pipeline.groups[group]]
            restored = allocate(reader.manifest.geometry, dict.fromkeys(members, len(fine.ids)))
            pipeline.dequantize(groups, arrays[Grade.FINE], fine, Grade.FINE, restored)
            fine = fine._replace(surprisal=pipeline.residual.surprisal(arrays[Grade.FINE][0]))
            arrays[Grade.FINE] = pipeline.quantize(restored, fine, Grade.COARSE, groups)[0]
        order = np.argsort(np.concatenate([rows[grade] for grade in arrays]))
        of_grade = zip(*(each[-1] for each in arrays.values()), strict=True)
        found.append([np.concatenate(pair)[order] for pair in of_grade])
    return [np.concatenate(of_blocks) for of_blocks in zip(*found, strict=True)]


def tokens_of(pipeline: Pipeline, reader: ArchiveReader, block: Block, replayed: Replayed | None = None) -> Tokens:
    """A block's tokens, those stored fine that newer ones made coarse being due; `replayed` is of the archive's."""
    head, recipe = block.head, reader.manifest.recipe
    span, known = range(head.start, block.stop), ids_before(pipeline, reader, head.start)
    now, coarse = FineWindow(recipe, reader.tokens).coarse(span), head.coarse_tokens
    due = range(max(coarse.stop, now.start), now.stop)
    tokens = Tokens.at(recipe.block, span, head.tokens, head.first_position - head.start, known)
    told = None if replayed is None else replayed.take(slice(span.start, span.stop))
    return tokens._replace(coarse=coarse, due=due if due else range(0), replayed=told)


def ids_before(pipeline: Pipeline, reader: ArchiveReader, index: int) -> np.ndarray:
    """The ids right before token `index`, as far as a prediction may look back at them."""
    reach = min(LOOKBACK, index % reader.manifest.recipe.block) if pipeline.chained else 0
    blocks = reader.blocks(index - reach, index)
    return np.concatenate([np.empty(0, np.int64), *(block.head.tokens for block in blocks)])[-LOOKBACK:]


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
    pipeline: Pipeline,
    reader: ArchiveReader,
    wanted: Mapping[int, Sequence[range]],
    replay: Replay | None = None,
) -> dict[int, LayerKV]:
    """What the archive holds of the `wanted` tokens (ascending spans, apart) of each layer, one behind the other, on
    all cores.

    A task is one block, or some of its layer groups where they are not chained: neither depends on another. But where a
    predictor looks at the tokens before, those of an unsealed block may need the block before: they are one task. A
    recipe that replays is told by `replay` of the tokens up to the last block that holds a wanted one. Raises
    ModelMissing.
    """
    tasks: list[_Task] = []
    in_tail: list[_Task] = []
    counts = dict.fromkeys(wanted, 0)
    joined = pipeline.predictor is not None and pipeline.predictor.reach and _unsealed(reader) > 1
    for block, spans in _spans_by_block(reader, wanted):
        takes = {}
        for layer, span in spans.items():
            held = block.head.tokens_of(layer)
            if both := range(max(span.start, held.start), min(span.stop, held.stop)):
                takes[layer] = _Take(both, counts[layer])
                counts[layer] += len(both)
        if joined and not block.head.sealed:
            in_tail.append(_Task(block, [], takes))
        else:
            tasks += _tasks(pipeline, block, takes)
    replayed = None
    if pipeline.replays and (tasks or in_tail):
        stop = reader.tokens if in_tail else max(task.block.stop for task in tasks)
        replayed = pipeline.replayed(replay, reader.token_ids()[:stop])
    out = allocate(reader.manifest.geometry, counts)
    workers = min(os.cpu_count() or 1, len(tasks))
    if workers > 1:
        with ThreadPoolExecutor(workers, thread_name_prefix="kvcellar") as pool:
            futures = [pool.submit(_run, pipeline, reader, task, out, replayed) for task in tasks]
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()
    else:
        for task in tasks:
            _run(pipeline, reader, task, out, replayed)
    if in_tail:
        _take_from_tail(pipeline, reader, in_tail, out, replayed)
    return out


def _take_from_tail(
    pipeline: Pipeline,
    reader: ArchiveReader,
    tasks: Sequence[_Task],
    out: Mapping[int, LayerKV],
    replayed: Replayed | None,
) -> None:
    """All unsealed blocks as if they were one, and what the tasks want of it."""
    recipe, start = reader.manifest.recipe, _sealed_blocks(reader) * reader.manifest.recipe.block
    span = range(start, reader.tokens)
    ids = np.concatenate([block.head.tokens for block in reader.blocks(span.start, span.stop)])
    tokens = Tokens.at(recipe.block, span, ids, reader.first_position, None)
    told = None if replayed is None else replayed.take(slice(span.start, span.stop))
    tokens = tokens._replace(coarse=FineWindow(recipe, reader.tokens).coarse(span), replayed=told)
    whole = allocate(reader.manifest.geometry, dict.fromkeys(range(len(reader.manifest.geometry)), len(span)))
    restore_graded(pipeline, tokens, stored_symbols(pipeline, reader, span.start, span.stop), whole)
    for task in tasks:
        for i, (wanted, at) in task.takes.items():
            rows, goal = slice(wanted.start - start, wanted.stop - start), slice(at, at + len(wanted))
            out[i].keys[:, goal] = whole[i].keys[:, rows]
            out[i].values[:, goal] = whole[i].values[:, rows]


def _sealed_blocks(reader: ArchiveReader) -> int:
    return int(np.count_nonzero(reader.entries["sealed"]))


def _unsealed(reader: ArchiveReader) -> int:
    return len(reader.entries) - _sealed_blocks(reader)


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
    _require_plausible(pipeline, block, groups)
    chunks = [groups] if pipeline.chained and takes else list(_chunks(block, groups))
    return [_Task(block, chunk, takes) for chunk in chunks]


def _require_plausible(pipeline: Pipeline, block: Block, groups: Iterable[int]) -> None:
    head = block.head
    if len(head.parts) != len(pipeline.groups):
        raise DamagedArchive(block.part, f"{len(head.parts)} parts for {len(pipeline.groups)} layer groups")
    for group in groups:
        try:
            pipeline.require_plausible(group, head.count_of, len(head.coarse_tokens), head.parts[group][0])
        except DamagedArchive as error:
            raise DamagedArchive(f"{block.part}, layer group {group}", error.problem) from error


def _run(
    pipeline: Pipeline, reader: ArchiveReader, task: _Task, out: Mapping[int, LayerKV], replayed: Replayed | None
) -> None:
    """Decode a task straight into its places in `out`, or through a copy where only part of a block is wanted."""
    head = task.block.head
    members = [*pipeline.known, *(i for group in task.groups for i in pipeline.groups[group])]
    takes = {i: task.takes[i] for i in members if i in task.takes}
    places = {
        i: LayerKV(out[i].keys[:, at : at + len(span)], out[i].values[:, at : at + len(span)])
        for i, (span, at) in takes.items()
    }
    partly = {i: head.count_of(i) for i, take in takes.items() if take.wanted != head.tokens_of(i)}
    target = {**places, **allocate(reader.manifest.geometry, partly)}
    try:
        buffer = _buffer(sum(head.parts[group][0] for group in task.groups))
        parts = reader.read_parts(task.block, task.groups, buffer)
        pipeline.decode(task.groups, parts, tokens_of(pipeline, reader, task.block, replayed), target)
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
