"""Coding an archive again under another recipe, from the file alone: a model is needed only where a recipe runs it.

What a lossy recipe lost stays lost, so a file whose values have been through more than one says so in its recipe's
name, which is free text: "turbo-4 → cellar" holds what `cellar` kept of what `turbo-4` had kept. One span of blocks is
in memory at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..archive.info import ArchiveInfo, describe
from ..archive.reader import ArchiveReader
from ..archive.writer import NewBlock, write_archive
from ..cache import KVCache, LayerKV
from ..calibrate import find_fitted, fingerprint_of_fit
from ..encode import encode_blocks
from ..errors import InvalidInput, ModelMissing
from ..language.blocks import Segment
from ..language.tokenlog import TokenLog
from ..pipeline import Pipeline
from ..profile import Profile, find_profile
from ..ready import ready
from ..recipe import Recipe, canonical_json, find_recipe, tokens_recipe
from ..replayed import Replay
from ..store.local import LocalStore
from ..tail import compacted, stored_cache
from .library import Replaceable
from .replayer import Replayer
from .tokeninfo import describe_log
from .tokenreplay import replay
from .tokensave import CHUNK, is_tokens, log_of, require_log
from .transformers import take_cache

THEN = " → "
LONGEST_NAME = 200


class Recompressed(NamedTuple):
    """Facts about the new file, the old one's bytes, and the recipes that its values have lost something to, in order.

    `copied`: the file had this recipe already, and no value was coded again.
    """

    info: ArchiveInfo
    bytes_before: int
    recipe_before: str
    lost_to: tuple[str, ...]
    copied: bool


def recompress(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    recipe: str | Recipe | Mapping[str, Any],
    profile: Profile | None = None,
    source_profile: Profile | None = None,
    namespace: str = "",
    embed_profile: bool = False,
    replay_with: Any = None,
    progress: Callable[[int], None] | None = None,
) -> Recompressed:
    """Write the archive at `path` to `out` (which may be `path`) under another recipe, replacing an archive there at
    once.

    Token ids, positions, identity and namespace stay. From a lossless recipe the new values are those `save` would have
    written; from a lossy one both losses add up. Under the recipe it has already, nothing is coded a second time: the
    blocks are copied, and the tail's become one.

    Under recipe `tokens` the ids are kept, and checks of the stored cache; of a lossy archive's, which is not what a
    restore will compute, those of the cache that the model computes now.

    Args:
        profile: the calibrated state the new recipe needs. Default: the archive's own if it was fitted for this recipe,
            too, else the newest that `kvcellar calibrate` made for this recipe and model.
        source_profile: the one the archive needs. Default: embedded in it, or on this machine.
        embed_profile: store the new recipe's profile inside the file. One that was embedded stays embedded.
        replay_with: the archive's model, where the old recipe or the new one runs it (`replay-N`; `tokens` of a lossy
            archive, or coded under the model). Whoever gives it vouches for its being the model of this identity.
        progress: told the number of tokens of each block that is written.

    Raises ModelMissing where it would take the model, what `open` raises for `path` and `save` for `out`; when anything
    fails, a file at `out` is as before.
    """
    target = find_recipe(recipe)
    goal, goal_name = LocalStore.at(out)
    source, source_name = LocalStore.at(path)
    with Replaceable(goal, goal_name), ArchiveReader(source.open_reader(source_name), namespace) as reader:
        manifest, before = reader.manifest, describe(reader)
        own = _OwnProfile(reader, source_profile)
        if is_tokens(target):
            log = _log_of(target, own, reader, replay_with)
            data = log.pack()
            with goal.replacing(goal_name) as pending:
                pending.append(data)
            if progress is not None:
                progress(reader.tokens)
            info = describe_log(log, str(goal.folder / goal_name), len(data))
            return Recompressed(info, before.file_bytes, before.recipe, (), copied=False)
        chosen = profile or own.serving(target) or find_fitted(target, manifest.identity, manifest.geometry)
        chosen_id = None if chosen is None else chosen.id
        coded = ready(target, manifest.geometry, chosen)
        copied = _same(target, manifest.recipe) and chosen_id == manifest.profile
        losses = _losses(manifest.recipe)
        if not copied:
            losses += () if coded.lossless else (_plain(target),)
            manifest = replace(manifest, recipe=_named(target, losses), profile=chosen_id)
        embedded = chosen is not None and (embed_profile or (own.embedded and chosen_id == own.id))
        manifest = replace(manifest, profile_embedded=embedded)
        with goal.replacing(goal_name) as pending:
            if copied:
                blocks = compacted(lambda: coded, reader, _replay(coded, reader, replay_with))
            else:
                stored, ids = _stored(own, reader, replay_with), reader.token_ids()
                said = _replay(coded, reader, replay_with)
                told = None if said is None else said(ids)
                blocks = encode_blocks(coded, manifest, stored, ids, 0, reader.first_position, replayed=told)
            container = chosen.pack() if embedded and chosen else None
            write_archive(pending, manifest, _told(blocks, progress), container, reader.commit.next_position)
    with ArchiveReader(goal.open_reader(goal_name), namespace) as archive:
        return Recompressed(describe(archive), before.file_bytes, before.recipe, losses, copied)


def _replay(pipeline: Pipeline, reader: ArchiveReader, model: Any) -> Replay | None:
    """What tells a recipe that replays of token ids, which raises ModelMissing where there is no model; else None."""
    if not pipeline.replays:
        return None
    if not reader.regular:
        raise InvalidInput("positions that do not follow one by one: a replay needs them to")
    made = None if model is None else Replayer(model, pipeline.replays, pipeline.geometry, reader.first_position)

    def said(ids: np.ndarray) -> Any:
        return pipeline.replayed(made, ids)

    return said


def _stored(own: _OwnProfile, reader: ArchiveReader, model: Any) -> _Stored:
    pipeline = ready(reader.manifest.recipe, reader.manifest.geometry, own.profile)
    return _Stored(pipeline, reader, _replay(pipeline, reader, model))


def _log_of(target: Recipe, own: _OwnProfile, reader: ArchiveReader, model: Any) -> TokenLog:
    manifest, ids = reader.manifest, reader.token_ids()
    if reader.reduced or not reader.regular:
        raise InvalidInput("recipe tokens: neither a reduced cache nor one with a next position of its own is replayed")
    coded, keep, chunk = require_log(target)
    kv: KVCache
    if _losses(manifest.recipe):
        if model is None:
            raise ModelMissing(
                f"recipe {manifest.recipe.name!r} has lost something, so what it stores is not what a restore from "
                "token ids computes: give the model, as replay_with=, to check against what it computes now"
            )
        chunk = min(chunk or CHUNK, len(ids))
        kv = take_cache(replay(model, ids, manifest.geometry, [Segment(len(ids), chunk)]))
        target = tokens_recipe(model_coded=coded, keep_ids=keep, chunk=chunk)
    else:
        kv = _stored(own, reader, model)
    first, namespace = reader.first_position, manifest.namespace
    return log_of(target, manifest.identity, kv, ids, first=first, namespace=namespace, model=model, progress=None)


class _OwnProfile:
    """The profile an archive was written with, looked for when it is needed."""

    def __init__(self, reader: ArchiveReader, argument: Profile | None):
        self.id, self.embedded = reader.manifest.profile, reader.manifest.profile_embedded
        self._reader, self._argument, self._found = reader, argument, False

    @property
    def profile(self) -> Profile | None:
        """None when it needs none. Raises ProfileMissing, ProfileMismatch."""
        if not self._found:
            self._profile = find_profile(self.id, self._argument, self._reader.embedded_profile())
            self._found = True
        return self._profile

    def serving(self, target: Recipe) -> Profile | None:
        """The profile, if the archive's recipe is `target` or it was fitted for what `target` needs."""
        if _same(target, self._reader.manifest.recipe):
            return self.profile
        fitted = fingerprint_of_fit(target)
        if not fitted or self.profile is None:
            return None
        same = canonical_json(self.profile.metadata.get("fitted")) == canonical_json(fitted)
        return self.profile if same else None


class _Stored(KVCache):
    """An archive's tokens, decoded when a span of them is asked for; what was decoded last is kept for the next span.

    For spans in ascending order no block is decoded twice, unless a span ends within it and the next begins there.
    """

    _pipeline: Pipeline
    _reader: ArchiveReader
    _replay: Replay | None
    _span: range
    _kept: KVCache

    def __init__(self, pipeline: Pipeline, reader: ArchiveReader, replay: Replay | None = None):
        self._set(_pipeline=pipeline, _reader=reader, _replay=replay, length=reader.tokens)
        self._keep(0, 0)

    @property
    def layers(self) -> tuple[LayerKV, ...]:
        return self.tokens(0, len(self)).layers

    def tokens(self, start: int, stop: int) -> KVCache:
        if not self._span.start <= start <= stop <= self._span.stop:
            self._keep(start, stop)
        return self._kept.tokens(start - self._span.start, stop - self._span.start)

    def _keep(self, start: int, stop: int) -> None:
        """Decode tokens `start`…`stop`, of uniform layers all those of their blocks."""
        if self._reader.manifest.geometry.uniform and start < stop:
            blocks = list(self._reader.blocks(start, stop))
            start, stop = blocks[0].head.start, blocks[-1].stop
        self._set(_span=range(start, stop), _kept=stored_cache(self._pipeline, self._reader, start, stop, self._replay))

    def _set(self, **state: object) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)  # the base class is frozen


def _told(blocks: Iterable[NewBlock], progress: Callable[[int], None] | None) -> Iterator[NewBlock]:
    for block in blocks:
        count = block.head.count
        yield block
        if progress is not None:
            progress(count)


def _same(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes write the same bytes, whatever they are called."""
    return replace(one, name="x") == replace(other, name="x")


def _plain(recipe: Recipe) -> str:
    """A recipe's name without what came before it."""
    return recipe.name.split(THEN)[-1]


def _losses(recipe: Recipe) -> tuple[str, ...]:
    """The recipes that values of an archive with this recipe have lost something to, in order."""
    names = tuple(recipe.name.split(THEN))
    return names if recipe.quantize is not None else names[:-1]


def _named(recipe: Recipe, losses: tuple[str, ...]) -> Recipe:
    """`recipe` under a name that says what the values have been through, the latest where there is too much to say."""
    names = [*losses, *([] if recipe.quantize is not None else [_plain(recipe)])]
    told = (THEN.join(["…"] * (first > 0) + names[first:]) for first in range(len(names)))
    return replace(recipe, name=next((name for name in told if len(name) <= LONGEST_NAME), names[-1]))
