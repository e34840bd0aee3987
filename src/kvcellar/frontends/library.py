"""The Python library: `save`, `open` and `find`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..archive.format import MAGIC
from ..archive.info import ArchiveInfo, describe
from ..archive.manifest import Manifest
from ..archive.reader import ArchiveReader
from ..archive.writer import write_archive
from ..calibrate import find_fitted
from ..encode import encode_blocks
from ..errors import (
    ArchiveNotFound,
    InvalidInput,
    MissingIdentity,
    NotAnArchive,
)
from ..identity import Identity, require_same
from ..language.tokenlog import TokenLog, is_token_log
from ..pipeline import Pipeline
from ..profile import Profile
from ..ready import ready
from ..recipe import Recipe, find_recipe
from ..replayed import Replayed
from ..store.base import Appender, Reader
from ..store.local import LocalStore
from ..symbols import byteplanes as byteplanes  # its kernels load with this module, not in the first restore
from .archive import Archive
from .fingerprint import require_every_layer, require_plain_positions
from .inputs import resolve_identity, take_row, told_log2_probs
from .reducedfiles import is_reduced, slot_blocks, take_reduced
from .remember import remember
from .replayer import Replayer
from .sessions import Found as Found
from .sessions import find as find
from .tokenfiles import TokenArchive
from .tokeninfo import describe_log, is_log
from .tokensave import is_tokens, log_of

Path = str | os.PathLike[str]


def save(
    path: Path,
    cache: Any,
    *,
    tokens: Any,
    model: Any = None,
    identity: Identity | str | None = None,
    recipe: str | Recipe | Mapping[str, Any] = "exact",
    profile: Profile | None = None,
    namespace: str = "",
    row: int = 0,
    attention_mask: Any = None,
    positions: Any = None,
    next_position: int | None = None,
    embed_profile: bool = False,
    reduce_with: Any = None,
    log2_probs: Any = None,
    replay_with: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> ArchiveInfo:
    """Write one sequence's cache to `path`, replacing an archive there at once.

    Args:
        cache: a transformers cache, (keys, values) pairs of shape (B, H, T, D), or a `KVCache`.
        tokens: the T token ids the cache was computed from, (T,) or (B, T).
        model: the transformers model it belongs to; or `identity`, an `Identity` or a name, when there is no model.
        recipe: a preset's name, a `Recipe`, or a recipe's JSON object. The default is bit-exact. One that reduces
            needs `model`; a cache that is reduced already takes a bit-exact one, and `tokens` are all it stands for.
            Of "tokens" the file holds the ids alone (docs/language-tokens.md).
        profile: the calibrated state the recipe needs, stored inside the file with `embed_profile`. Default: the
            newest one that `kvcellar calibrate` made for this recipe and model.
        namespace: archives of different namespaces never see each other.
        row: which sequence of a batch.
        attention_mask: 0 for the pads of a padded batch, (T,) or (B, T); only the row's real tokens are stored.
        positions: the position ids the model used, (T,) or (B, T), one by one. Default: from 0 for the first real
            token, as `generate` counts them from the mask.
        next_position: the position of the token to come, where it is not the one behind the last: models whose images
            take fewer positions than tokens. Such an archive restores only as a whole.
        reduce_with: the model that a recipe with a reduction, or that codes ids under it, asks, where `identity` is
            given in place of `model`.
        replay_with: the model that a recipe with a replay runs again, where `identity` is given in place of `model`.
        log2_probs: log2 of the model's probability of each stored token given those before it, (T,): finite, at most
            0, NaN where not known, 0 for a first token that is given. A recipe whose bits follow surprisal goes by them
            (`sequential`; without, every token counts as an average one), and they go into the trie file of the folder
            (docs/language.md), but not those of ids that only the model decodes; a failure there is a warning, since
            the archive itself is whole.
        progress: told how many layers are reduced, and of how many, by a recipe that reduces; or tokens, by `tokens`.

    Raises MissingIdentity, TokensMismatch, InvalidInput (also for a multimodal model without `next_position`),
    UnsupportedCache (naming the layer), InvalidRecipe, ProfileMissing, ModelMissing, ArchiveLocked, NotAnArchive (an
    existing file that is none is never replaced), StorageError.
    """
    who = resolve_identity(model, identity)
    if who is None:
        raise MissingIdentity("save needs model= or identity=: without it, nothing could refuse a wrong restore")
    if next_position is None and model is not None:
        require_plain_positions(model)
    chosen, first_position = find_recipe(recipe), 0
    if is_tokens(chosen):
        if next_position is not None or is_reduced(cache):
            raise InvalidInput("recipe tokens: neither a reduced cache nor one with next_position can be replayed")
        kv, ids, first_position = take_row(cache, tokens, row, attention_mask, positions)
        asked = reduce_with if model is None else model
        told = None if log2_probs is None else told_log2_probs(log2_probs, len(ids))
        log = log_of(chosen, who, kv, ids, first=first_position, namespace=namespace, model=asked, progress=progress)
        info = _save_log(path, log)
        if log.ids is not None and told is not None:
            remember(*LocalStore.at(path), who, namespace, [(0, told)], ids)
        return info
    reduced = chosen.reduce is not None or is_reduced(cache)
    if reduced:
        if next_position is not None:
            raise InvalidInput("next_position of a reduced cache: it goes on behind the last token it stands for")
        asked = reduce_with if model is None else model
        kv, ids, chosen = take_reduced(cache, tokens, chosen, asked, row, attention_mask, positions, progress)
    else:
        kv, ids, first_position = take_row(cache, tokens, row, attention_mask, positions)
    told = None if log2_probs is None else told_log2_probs(log2_probs, len(ids))
    if model is not None:
        require_every_layer(model, len(kv.layers))
    if profile is None and not reduced:
        profile = find_fitted(chosen, who, kv.geometry)
    profile_id = None if profile is None else profile.id
    manifest = Manifest(chosen, who, kv.geometry, namespace, profile_id, embed_profile and profile is not None)
    if reduced:
        blocks = slot_blocks(manifest, kv, ids)
    else:
        pipeline = ready(chosen, kv.geometry, profile)
        surprisal = None if told is None else -told.astype("float64")
        layers = _replayed(pipeline, replay_with if model is None else model, ids, first_position, next_position)
        blocks = encode_blocks(pipeline, manifest, kv, ids, 0, first_position, surprisal=surprisal, replayed=layers)
    store, name = LocalStore.at(path)
    with Replaceable(store, name), store.replacing(name) as pending:
        embedded = profile.pack() if manifest.profile_embedded and profile else None
        write_archive(pending, manifest, blocks, embedded, next_position)
    if told is not None:
        remember(store, name, who, namespace, [(0, told)], ids)
    with ArchiveReader(store.open_reader(name), namespace) as archive:
        return describe(archive)


def _save_log(path: Path, log: TokenLog) -> ArchiveInfo:
    store, name = LocalStore.at(path)
    data = log.pack()
    with Replaceable(store, name), store.replacing(name) as pending:
        pending.append(data)
    return describe_log(log, str(store.folder / name), len(data))


def _replayed(
    pipeline: Pipeline, model: Any, ids: np.ndarray, position: int, next_position: int | None
) -> Replayed | None:
    """What a recipe that replays is told of the tokens."""
    if not pipeline.replays:
        return None
    if next_position is not None:
        raise InvalidInput("next_position: a replay needs tokens whose positions follow one by one")
    replay = None if model is None else Replayer(model, pipeline.replays, pipeline.geometry, position)
    return pipeline.replayed(replay, ids)


class Replaceable:
    """Hold the writer lock of a file about to be replaced, so that no append to it is lost; refuse foreign files."""

    def __init__(self, store: LocalStore, name: str):
        self.store, self.name = store, name
        self.held: Appender | None = None

    def __enter__(self) -> None:
        try:
            self.held = self.store.open_appender(self.name)
        except ArchiveNotFound:
            return
        try:
            _refuse_foreign(self.held)
        except BaseException:
            self.held.close()
            raise

    def __exit__(self, *exc: object) -> None:
        if self.held is not None:
            self.held.close()


def _refuse_foreign(existing: Reader) -> None:
    start = existing.read(0, len(MAGIC))
    if start and start != MAGIC[: len(start)] and not is_token_log(start):
        raise NotAnArchive(f"{existing.name} exists and is no kvcellar archive; it is left as it is")


def require_replaceable(path: Path) -> None:
    """Raise what `save` would raise for this path, before the work of making a cache: NotAnArchive, StorageError."""
    store, name = LocalStore.at(path)
    store.require_folder()
    if store.exists(name):
        with store.open_reader(name) as existing:
            _refuse_foreign(existing)


def open(
    path: Path,
    *,
    model: Any = None,
    identity: Identity | str | None = None,
    profile: Profile | None = None,
    namespace: str = "",
    allow_mismatch: bool = False,
    mode: str = "r",
    config: Any = None,
    replay_with: Any = None,
) -> Archive | TokenArchive:
    """Open the archive at `path`; with mode ``"a"`` also for appending, alone.

    An archive of recipe `tokens` comes as a `TokenArchive`, whose cache `model` computes, or `replay_with` where
    `identity` is given.

    A reduced cache is restored for a model's config: that of `model`, or `config` where `identity` is given.
    One whose recipe replays layers of the model needs it: `model`, or `replay_with` where `identity` is given; whoever
    gives that vouches for its being the model of this identity.

    With `model` or `identity`, raises IdentityMismatch unless the archive is theirs or `allow_mismatch` is set.
    Without, everything but `restore` and `append` works. Raises ArchiveNotFound (also for another namespace),
    NotAnArchive, DamagedArchive naming the part, NewerFormat, OlderFormat, ArchiveLocked, StorageError.
    """
    if mode not in ("r", "a"):
        raise InvalidInput(f"mode {mode!r}; expected 'r' or 'a'")
    who = resolve_identity(model, identity)
    store, name = LocalStore.at(path)
    handle = store.open_appender(name) if mode == "a" else store.open_reader(name)
    try:
        if is_log(handle):
            asked = replay_with if model is None else model
            log = TokenArchive(store, name, handle, namespace, who, asked)
            if who is not None and not allow_mismatch:
                require_same(log.manifest.identity, who, str(path))
            return log
        reader = ArchiveReader(handle, namespace)
        if who is not None and not allow_mismatch:
            require_same(reader.manifest.identity, who, str(path))
        replayer = model if replay_with is None else replay_with
        return Archive(store, name, reader, who, profile, getattr(model, "config", config), replayer)
    except BaseException:
        handle.close()
        raise
