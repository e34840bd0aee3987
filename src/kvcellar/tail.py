"""How an archive grows: new tokens join the tail, and the tail becomes sealed blocks once it is long enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from .archive.reader import ArchiveReader
from .archive.writer import NewBlock
from .cache import KVCache, allocate
from .decode import decode_blocks, ids_before, stored_symbols
from .encode import encode_blocks
from .geometry import Geometry
from .held import held
from .pipeline import Pipeline
from .replayed import Replay, Replayed
from .window import FineWindow


def extended(
    pipeline: Pipeline,
    reader: ArchiveReader,
    new: KVCache,
    ids: np.ndarray,
    surprisal: np.ndarray | None = None,
    replay: Replay | None = None,
) -> tuple[int, Iterator[NewBlock]]:
    """How many blocks stay, and the blocks of the `new` tokens behind them.

    The tail joins in once it fills one, or when some of the new tokens are coarse at once and foreseen from its tokens.
    A recipe that replays is told of all tokens by `replay`. Raises ModelMissing, UnsupportedCache.
    """
    start, total = _tail_start(reader), reader.tokens + len(ids)
    reaching = pipeline.predictor is not None and pipeline.predictor.reach and start < reader.tokens
    coarse_at_once = FineWindow(reader.manifest.recipe, total).coarse(range(reader.tokens, total))
    if total - start < reader.manifest.recipe.tail and not (reaching and coarse_at_once):
        position = reader.first_position + reader.tokens
        known = ids_before(pipeline, reader, reader.tokens)
        told = _replayed(pipeline, reader, ids, replay, reader.tokens)
        blocks = encode_blocks(
            pipeline, reader.manifest, new, ids, reader.tokens, position, None, known, surprisal, told
        )
        return len(reader.entries), blocks
    return int(np.count_nonzero(reader.entries["sealed"])), _rewritten(pipeline, reader, new, ids, surprisal, replay)


def compacted(
    pipeline: Callable[[], Pipeline], reader: ArchiveReader, replay: Replay | None = None
) -> Iterator[NewBlock]:
    """The blocks of an archive as a bulk save makes them: sealed ones as they are, then the tail as one."""
    for index in range(int(np.count_nonzero(reader.entries["sealed"]))):
        block = reader.block(index)
        yield NewBlock(block.head, reader.read_parts(block, range(len(block.head.parts))))
    if _tail_start(reader) < reader.tokens:
        nothing = _nothing(reader.manifest.geometry)
        yield from _rewritten(pipeline(), reader, nothing, np.empty(0, np.int64), replay=replay)


def _tail_start(reader: ArchiveReader) -> int:
    return int(np.count_nonzero(reader.entries["sealed"])) * reader.manifest.recipe.block


def _rewritten(
    pipeline: Pipeline,
    reader: ArchiveReader,
    new: KVCache,
    ids: np.ndarray,
    surprisal: np.ndarray | None = None,
    replay: Replay | None = None,
) -> Iterator[NewBlock]:
    """Blocks of the tail's tokens and then the `new` ones: what is stored keeps its values, or its symbols."""
    start, stop = _tail_start(reader), reader.tokens
    tokens = np.concatenate([*(block.head.tokens for block in reader.blocks(start, stop)), ids])
    if pipeline.lossless:
        symbols = None
        new = stored_cache(pipeline, reader, start, stop).followed_by(new) if start < stop else new
    else:
        symbols = stored_symbols(pipeline, reader, start, stop)
    position = reader.first_position + start
    told = _replayed(pipeline, reader, ids, replay, start)
    return encode_blocks(pipeline, reader.manifest, new, tokens, start, position, symbols, None, surprisal, told)


def _replayed(
    pipeline: Pipeline, reader: ArchiveReader, ids: np.ndarray, replay: Replay | None, start: int
) -> Replayed | None:
    """What a recipe that replays is told of the archive's tokens from `start` on and the new `ids`."""
    if not pipeline.replays:
        return None
    whole = np.concatenate([reader.token_ids(), ids])
    return pipeline.replayed(replay, whole).take(slice(start, None))


def stored_cache(
    pipeline: Pipeline, reader: ArchiveReader, start: int, stop: int, replay: Replay | None = None
) -> KVCache:
    """Tokens `start`…`stop` as a cache; of a sliding layer the last run that is stored. `replay` as `decode_blocks`
    takes it."""
    geometry = reader.manifest.geometry
    runs = {i: held(reader, i, start, stop)[-1:] for i in geometry.sliding_runs}
    out = decode_blocks(pipeline, reader, {i: runs.get(i, [range(start, stop)]) for i in range(len(geometry))}, replay)
    firsts = {i: run[0].start - start for i, run in runs.items() if run}
    return KVCache(tuple(replace(out[i], first=firsts.get(i, 0)) for i in range(len(geometry))), stop - start)


def _nothing(geometry: Geometry) -> KVCache:
    """A cache of no tokens."""
    layers = allocate(geometry, dict.fromkeys(range(len(geometry)), 0))
    return KVCache(tuple(layers[i] for i in range(len(geometry))), 0)
