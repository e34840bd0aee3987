"""A cache, or symbols, from the blocks of a file."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .archive.reader import ArchiveReader, Block
from .cache import LayerKV, allocate
from .decodeplan import Take, Task, require_plausible, spans_by_block, tasks_of
from .errors import DamagedArchive
from .pipeline import Pipeline
from .replayed import Replay, Replayed
from .stages import LOOKBACK, Grade
from .tokens import Tokens
from .window import FineWindow, Symbols, restore_graded

_local = threading.local()


def stored_symbols(pipeline: Pipeline, reader: ArchiveReader, start: int, stop: int) -> Symbols:
    """The symbols of tokens `start`…`stop`, where blocks begin and end. Raises DamagedArchive."""
    found, groups = Symbols.none(pipeline), range(len(pipeline.groups))
    for block in reader.blocks(start, stop):
        require_plausible(pipeline, block, groups)
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
        require_plausible(pipeline, block, groups)
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
    tokens = Tokens.at(recipe.block, span, head.tokens, head.first_position - head.start, known)
    told = None if replayed is None else replayed.take(slice(span.start, span.stop))
    return tokens._replace(coarse=head.coarse_tokens, due=_due(reader, block), replayed=told)


def _due(reader: ArchiveReader, block: Block) -> range:
    """Tokens of a block that are stored fine and to be restored coarse, counted in the block."""
    now = FineWindow(reader.manifest.recipe, reader.tokens).coarse(range(block.head.start, block.stop))
    due = range(max(block.head.coarse_tokens.stop, now.start), now.stop)
    return due if due else range(0)


def ids_before(pipeline: Pipeline, reader: ArchiveReader, index: int) -> np.ndarray:
    """The ids right before token `index`, as far as a prediction may look back at them."""
    reach = min(LOOKBACK, index % reader.manifest.recipe.block) if pipeline.chained else 0
    blocks = reader.blocks(index - reach, index)
    return np.concatenate([np.empty(0, np.int64), *(block.head.tokens for block in blocks)])[-LOOKBACK:]


def decode_blocks(
    pipeline: Pipeline,
    reader: ArchiveReader,
    wanted: Mapping[int, Sequence[range]],
    replay: Replay | None = None,
) -> dict[int, LayerKV]:
    """What the archive holds of the `wanted` tokens (ascending spans, apart) of each layer, one behind the other, on
    all cores.

    Tasks (`decodeplan.py`) do not depend on each other. But where a predictor looks at the tokens before, those of an
    unsealed block may need the block before: they are one task. A recipe that replays is told by `replay` of the tokens
    up to the last block that holds a wanted one. Raises ModelMissing.
    """
    found: list[tuple[Block, dict[int, Take]]] = []
    in_tail: list[Task] = []
    counts = dict.fromkeys(wanted, 0)
    joined = pipeline.predictor is not None and pipeline.predictor.reach and _unsealed(reader) > 1
    for block, spans in spans_by_block(reader, wanted):
        takes = {}
        for layer, span in spans.items():
            held = block.head.tokens_of(layer)
            if both := range(max(span.start, held.start), min(span.stop, held.stop)):
                takes[layer] = Take(both, counts[layer])
                counts[layer] += len(both)
        if joined and not block.head.sealed:
            in_tail.append(Task([block], [], takes, {}))
        else:
            found.append((block, takes))
    tasks = list(tasks_of(pipeline, found, [bool(_due(reader, block)) for block, _ in found]))
    replayed = None
    if pipeline.replays and (tasks or in_tail):
        stop = reader.tokens if in_tail else max(block.stop for block, _ in found)
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
    tasks: Sequence[Task],
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


def _run(
    pipeline: Pipeline, reader: ArchiveReader, task: Task, out: Mapping[int, LayerKV], replayed: Replayed | None
) -> None:
    """Decode a task straight into its places in `out`, or through a copy where only part of a block is wanted."""
    members = [*pipeline.known, *(i for group in task.groups for i in pipeline.groups[group])]
    takes = {i: task.takes[i] for i in members if i in task.takes}
    places = {
        i: LayerKV(out[i].keys[:, at : at + len(span)], out[i].values[:, at : at + len(span)])
        for i, (span, at) in takes.items()
    }
    if len(task.blocks) > 1:
        try:
            pipeline.decode(task.groups, *_read(pipeline, reader, task, None), places)
        except DamagedArchive:  # which of them says decoding them one by one
            for single in task.single():
                _run(pipeline, reader, single, out, replayed)
            raise
        return
    (block,) = task.blocks
    held = {i: block.head.tokens_of(i) for i in takes}
    partly = {i: block.head.count_of(i) for i, take in takes.items() if take.wanted != held[i]}
    target = {**places, **allocate(reader.manifest.geometry, partly)}
    try:
        pipeline.decode(task.groups, *_read(pipeline, reader, task, replayed), target)
    except DamagedArchive as error:
        part = error.part if error.part.startswith(block.part) else block.part
        raise DamagedArchive(part, error.problem) from error
    for i in partly:
        cut = slice(takes[i].wanted.start - held[i].start, takes[i].wanted.stop - held[i].start)
        places[i].keys.copy_(target[i].keys[:, cut])
        places[i].values.copy_(target[i].values[:, cut])


def _read(
    pipeline: Pipeline, reader: ArchiveReader, task: Task, replayed: Replayed | None
) -> tuple[list[list[memoryview]], list[Tokens]]:
    """The parts of a task's layer groups, block by block, and the blocks' tokens."""
    sizes = [sum(block.head.parts[group][0] for group in task.groups) for block in task.blocks]
    buffer, at = _buffer(sum(sizes)), 0
    parts = []
    for i, (block, size) in enumerate(zip(task.blocks, sizes, strict=True)):
        parts.append(reader.read_parts(block, task.groups, buffer[at : at + size]))
        at += size
        if i not in task.told:
            task.told[i] = tokens_of(pipeline, reader, block, replayed)
    return parts, [task.told[i] for i in range(len(parts))]


def _buffer(size: int) -> np.ndarray:
    """This thread's read buffer of at least `size` bytes, kept because fresh memory costs more than the read."""
    if not hasattr(_local, "buffer") or _local.buffer.size < size:
        _local.buffer = np.empty(size + size // 8, np.uint8)
    return _local.buffer  # type: ignore[no-any-return]
