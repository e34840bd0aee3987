"""Blocks of a file from a cache."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from .archive.block import BlockHead, part_table
from .archive.manifest import Manifest
from .archive.writer import NewBlock
from .cache import KVCache
from .errors import InvalidInput
from .geometry import Geometry
from .pipeline import Pipeline
from .replayed import Replayed, require_own
from .tokens import Tokens
from .window import FineWindow, Symbols, encode_graded


def encode_blocks(
    pipeline: Pipeline,
    manifest: Manifest,
    kv: KVCache,
    ids: np.ndarray,
    first: int,
    position: int | None = None,
    stored: Symbols | None = None,
    known: np.ndarray | None = None,
    surprisal: np.ndarray | None = None,
    replayed: Replayed | None = None,
) -> Iterator[NewBlock]:
    """Blocks of the tokens `stored` in the archive's tail and then those of `kv`; `ids` are of both.

    The first token has index `first` and that `position` (default: the index); `known` are the ids right before it.
    Only the last block may be unsealed. `surprisal` float64 (tokens of `kv`,) in bits, NaN for unknown. A recipe that
    replays is told of all of `ids` in `replayed`; raises UnsupportedCache where `kv` is not what the model computes.
    """
    if pipeline.replays and replayed is not None:
        require_own(kv.layers, replayed.take(slice(len(replayed) - len(kv), None)))
    stored = stored or Symbols.none(pipeline)
    if len(stored) + len(kv) != len(ids):
        raise InvalidInput(f"{len(stored) + len(kv)} tokens and {len(ids)} ids of them")
    window = FineWindow(manifest.recipe, first + len(ids))
    cuts = _cuts(window, kv, ids, first, first if position is None else position, stored, known, surprisal, replayed)
    encode = partial(_encoded, pipeline, manifest, window)
    # Without prediction a bit-exact block takes little longer than writing it does; several at once would only take
    # more memory.
    plain = pipeline.lossless and not pipeline.chained
    yield from map(encode, cuts) if plain else _ahead(encode, cuts)


class _Cut(NamedTuple):
    """A block to encode: its tokens, the symbols of those that are stored already, and the cache of the others."""

    span: range
    tokens: Tokens
    stored: Symbols
    new: KVCache


def _cuts(
    window: FineWindow,
    kv: KVCache,
    ids: np.ndarray,
    first: int,
    position: int,
    stored: Symbols,
    known: np.ndarray | None,
    surprisal: np.ndarray | None,
    replayed: Replayed | None,
) -> Iterator[_Cut]:
    if surprisal is not None:
        surprisal = np.concatenate([np.full(len(stored), np.nan), surprisal])
    for span in window.blocks(first):
        before = known if span.start == first else ids[: span.start - first]
        tokens = Tokens.at(
            window.recipe.block, span, ids[span.start - first : span.stop - first], position - first, before
        )
        old, stored = stored.split(len(span))
        stop = span.stop - first - len(ids) + len(kv)
        new = kv.tokens(stop - len(span) + len(old), stop)
        bits = None if surprisal is None else surprisal[span.start - first : span.stop - first]
        told = None if replayed is None else replayed.take(slice(span.start - first, span.stop - first))
        yield _Cut(span, tokens._replace(coarse=window.coarse(span), surprisal=bits, replayed=told), old, new)


def _encoded(pipeline: Pipeline, manifest: Manifest, window: FineWindow, cut: _Cut) -> NewBlock:
    tokens = cut.tokens
    if pipeline.lossless:
        parts = pipeline.encode(cut.new, tokens)
    else:
        parts = encode_graded(pipeline, cut.new, tokens, cut.stored)
    head = BlockHead(
        start=cut.span.start,
        tokens=tokens.ids,
        sealed=window.seals(cut.span),
        geometry=manifest.geometry,
        recipe=manifest.recipe.digest,
        parts=part_table(parts),
        first_position=int(tokens.positions[0]),
        profile=bytes.fromhex(manifest.profile) if manifest.profile else None,
        held=_held(cut.new, manifest.geometry),
        coarse=tokens.coarse if len(tokens.fine) else None,
    )
    return NewBlock(head, parts)


def _ahead(encode: Callable[[_Cut], NewBlock], cuts: Iterable[_Cut]) -> Iterator[NewBlock]:
    """Blocks in order, encoded on all cores, no more of them at once than there are cores."""
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers, thread_name_prefix="kvcellar") as pool:
        running: deque[Future[NewBlock]] = deque()
        try:
            for cut in cuts:
                running.append(pool.submit(encode, cut))
                if len(running) == workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def _held(cut: KVCache, geometry: Geometry) -> tuple[tuple[int, int], ...]:
    """For each run of sliding layers the tokens of the block they hold. Raises InvalidInput when they differ."""
    found: dict[int, tuple[int, int]] = {}
    for layer, run in geometry.sliding_runs.items():
        kv = cut.layers[layer]
        held = (kv.first, kv.first + kv.slots) if kv.slots else (0, 0)
        if found.setdefault(run, held) != held:
            raise InvalidInput(f"layer {layer} holds tokens {held} of a block, its neighbours {found[run]}")
    return tuple(found.values())
