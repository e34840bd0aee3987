"""What a restore is cut into: independent pieces of work, each some layer groups of a block or of neighbouring blocks.

Blocks of a recipe without prediction are decoded together, up to RUN_TOKENS tokens, where all of them is wanted: the
same compiled loops then run over longer rows, so there are fewer of them, and tables that do not fit a processor's
cache are walked through once for all of the blocks. What is restored is the same.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .archive.reader import ArchiveReader, Block
from .errors import DamagedArchive
from .pipeline import Pipeline
from .tokens import Tokens

CHUNK_BYTES = 3 << 19
RUN_TOKENS = 1024
_SHARES, _LEAST = 4, 1 << 14  # pieces of a run for each core, since some take longer than others, and bytes of a piece


class Take(NamedTuple):
    """The tokens `wanted` of one layer of a block, and where they go in the output."""

    wanted: range
    position: int


class Task(NamedTuple):
    """Layer groups to decode of neighbouring blocks, and what is taken from them, by layer.

    Of a single block that may be a part; several are wanted whole.
    """

    blocks: list[Block]
    groups: list[int]
    takes: dict[int, Take]
    told: dict[int, Tokens]
    """What the tasks of the same blocks have made out about their tokens, by block."""

    def single(self) -> Iterator[Task]:
        """The same, block by block."""
        at = {layer: take.position for layer, take in self.takes.items()}
        for block in self.blocks:
            held = {layer: block.head.tokens_of(layer) for layer in at}
            yield Task([block], self.groups, {layer: Take(held[layer], at[layer]) for layer in at}, {})
            at = {layer: at[layer] + len(held[layer]) for layer in at}


def spans_by_block(
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


def tasks_of(pipeline: Pipeline, found: Sequence[tuple[Block, dict[int, Take]]], due: Sequence[bool]) -> Iterator[Task]:
    """Tasks for blocks and what is taken from each; `due` are those with tokens that are restored from finer ones."""
    for run in _runs(pipeline, found, due):
        blocks, takes, last = [block for block, _ in run], run[0][1], run[-1][1]
        groups, limit = pipeline.needed(takes), CHUNK_BYTES
        for block in blocks:
            require_plausible(pipeline, block, groups)
        if len(run) > 1:
            size = sum(block.head.parts[group][0] for block in blocks for group in groups)
            limit = min(limit, max(_LEAST, size // (_SHARES * (os.cpu_count() or 1))))
            takes = {i: Take(range(take.wanted.start, last[i].wanted.stop), take.position) for i, take in takes.items()}
        chunks = [groups] if pipeline.chained and takes else _chunks(blocks, groups, limit)
        told: dict[int, Tokens] = {}
        for chunk in chunks:
            yield Task(blocks, chunk, takes, told)


def _runs(
    pipeline: Pipeline, found: Sequence[tuple[Block, dict[int, Take]]], due: Sequence[bool]
) -> Iterator[list[tuple[Block, dict[int, Take]]]]:
    """`found` in runs of neighbours that can be decoded together."""
    run: list[tuple[Block, dict[int, Take]]] = []
    together = not (pipeline.chained or pipeline.lossless)
    for (block, takes), is_due in zip(found, due, strict=True):
        whole = together and not is_due and all(t.wanted == block.head.tokens_of(i) for i, t in takes.items())
        if run and not (whole and _continues(run, block, takes)):
            yield run
            run = []
        run.append((block, takes))
        if not whole:
            yield run
            run = []
    if run:
        yield run


def _continues(run: Sequence[tuple[Block, dict[int, Take]]], block: Block, takes: Mapping[int, Take]) -> bool:
    """Whether a block that is wanted whole may join a run: the next tokens of the same layers, not too many, and what
    is coarse of all of them without a gap."""
    before, last = [each for each, _ in run], run[-1][0]
    coarse, ends = block.head.coarse_tokens, last.head.coarse_tokens.stop == last.stop - last.head.start
    return (
        block.head.start == last.stop
        and takes.keys() == run[-1][1].keys()
        and block.stop - before[0].head.start <= RUN_TOKENS
        and (not coarse or not any(each.head.coarse_tokens for each in before) or (coarse.start == 0 and ends))
    )


def require_plausible(pipeline: Pipeline, block: Block, groups: Iterable[int]) -> None:
    head = block.head
    if len(head.parts) != len(pipeline.groups):
        raise DamagedArchive(block.part, f"{len(head.parts)} parts for {len(pipeline.groups)} layer groups")
    for group in groups:
        try:
            pipeline.require_plausible(group, head.count_of, len(head.coarse_tokens), head.parts[group][0])
        except DamagedArchive as error:
            raise DamagedArchive(f"{block.part}, layer group {group}", error.problem) from error


def _chunks(blocks: Sequence[Block], groups: list[int], limit: int) -> Iterator[list[int]]:
    """`groups` in runs of neighbours, each of about `limit` bytes on disk."""
    chunk: list[int] = []
    size = 0
    for group in groups:
        if chunk and (group != chunk[-1] + 1 or size >= limit):
            yield chunk
            chunk, size = [], 0
        chunk.append(group)
        size += sum(block.head.parts[group][0] for block in blocks)
    if chunk:
        yield chunk
