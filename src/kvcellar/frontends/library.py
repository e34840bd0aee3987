"""The Python library: `save`, `open`, `find`, and the `Archive` they give."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..archive.block import BlockHead, part_table
from ..archive.info import ArchiveInfo, VerifyReport, describe, verify
from ..archive.manifest import Manifest
from ..archive.reader import ArchiveReader, Block
from ..archive.writer import NewBlock, append_blocks, write_archive
from ..cache import KVCache, LayerKV, Restored, allocate
from ..errors import (
    ArchiveClosed,
    ArchiveError,
    ArchiveNotFound,
    DamagedArchive,
    InvalidInput,
    MissingIdentity,
    NotAnArchive,
    StorageError,
    TokensMismatch,
)
from ..archive.format import MAGIC
from ..identity import Identity, require_same
from ..pipeline import Pipeline
from ..profile import Profile, find_profile
from ..recipe import Recipe, find_recipe
from ..store.base import Appender
from ..store.local import LocalStore
from .transformers import dtype_of, give_cache, identity_of_model, take_cache

Path = str | os.PathLike[str]
MAX_TOKEN_ID = (1 << 32) - 1
CHUNK_BYTES = 3 << 19
_local = threading.local()


def token_ids(tokens: Any, row: int = 0, what: str = "tokens") -> np.ndarray:
    """Token ids as int64 (T,) from a list, array or tensor, (T,) or (B, T). Raises InvalidInput."""
    if isinstance(tokens, (str, bytes)):
        raise InvalidInput(f"{what} is text; expected token ids (run the tokenizer first)")
    if isinstance(tokens, Tensor):
        tokens = tokens.detach().cpu().numpy()
    ids = np.asarray(tokens)
    if ids.ndim == 2 and 0 <= row < len(ids):
        ids = ids[row]
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidInput(f"{what} of shape {ids.shape} and dtype {ids.dtype}; expected integer ids (T,) or (B, T)")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID):
        raise InvalidInput(f"{what} from {ids.min()} to {ids.max()}; a token id lies in 0…{MAX_TOKEN_ID}")
    return ids.astype(np.int64)


def resolve_identity(model: Any, identity: Identity | str | None) -> Identity | None:
    """The identity that was given, in whichever form. Raises InvalidInput when both were."""
    if model is not None and identity is not None:
        raise InvalidInput("give model or identity, not both")
    if model is not None:
        return identity_of_model(model)
    return None if identity is None else Identity.of(identity)


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
    embed_profile: bool = False,
) -> ArchiveInfo:
    """Write one sequence's cache to `path`, replacing an archive there at once.

    Args:
        cache: a transformers cache, (keys, values) pairs of shape (B, H, T, D), or a `KVCache`.
        tokens: the T token ids the cache was computed from, (T,) or (B, T).
        model: the transformers model it belongs to; or `identity`, an `Identity` or a name, when there is no model.
        recipe: a preset's name, a `Recipe`, or a recipe's JSON object. The default is bit-exact.
        profile: the calibrated state the recipe needs, stored inside the file with `embed_profile`.
        namespace: archives of different namespaces never see each other.
        row: which sequence of a batch.

    Raises MissingIdentity, TokensMismatch, InvalidInput, UnsupportedCache (naming the layer), InvalidRecipe,
    ArchiveLocked, NotAnArchive (an existing file that is none is never replaced), StorageError.
    """
    who = resolve_identity(model, identity)
    if who is None:
        raise MissingIdentity("save needs model= or identity=: without it, nothing could refuse a wrong restore")
    kv, ids = take_cache(cache, row), token_ids(tokens, row)
    if len(ids) != len(kv):
        raise TokensMismatch(
            f"the cache holds {len(kv)} tokens, {len(ids)} token ids were given. "
            + ("After generate() the last token is not in the cache yet. " if len(ids) == len(kv) + 1 else "")
            + ("Left-padded rows cannot be stored yet." if len(ids) < len(kv) else "")
        )
    chosen = find_recipe(recipe)
    profile_id = None if profile is None else profile.id
    manifest = Manifest(chosen, who, kv.geometry, namespace, profile_id, embed_profile and profile is not None)
    pipeline = Pipeline(chosen, kv.geometry, profile)
    store, name = LocalStore.at(path)
    with _replaceable(store, name), store.replacing(name) as pending:
        blocks = _encode(pipeline, manifest, kv, ids, first=0)
        write_archive(pending, manifest, blocks, profile.pack() if manifest.profile_embedded and profile else None)
    with ArchiveReader(store.open_reader(name), namespace) as archive:
        return describe(archive)


class _replaceable:
    """Hold the writer lock of a file about to be replaced, so that no append to it is lost; refuse foreign files."""

    def __init__(self, store: LocalStore, name: str):
        self.store, self.name = store, name
        self.held: Appender | None = None

    def __enter__(self) -> None:
        try:
            self.held = self.store.open_appender(self.name)
        except ArchiveNotFound:
            return
        start = self.held.read(0, len(MAGIC))
        if start and start != MAGIC[: len(start)]:
            self.__exit__()
            raise NotAnArchive(f"{self.store.folder / self.name} exists and is no kvcellar archive; it is left as it is")

    def __exit__(self, *exc: object) -> None:
        if self.held is not None:
            self.held.close()


def _encode(pipeline: Pipeline, manifest: Manifest, kv: KVCache, ids: np.ndarray, first: int) -> Iterator[NewBlock]:
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


def open(
    path: Path,
    *,
    model: Any = None,
    identity: Identity | str | None = None,
    profile: Profile | None = None,
    namespace: str = "",
    allow_mismatch: bool = False,
    mode: str = "r",
) -> Archive:
    """Open the archive at `path`; with mode ``"a"`` also for appending, alone.

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
        reader = ArchiveReader(handle, namespace)
        if who is not None and not allow_mismatch:
            require_same(reader.manifest.identity, who, str(path))
        return Archive(store, name, reader, who, profile)
    except BaseException:
        handle.close()
        raise


class Archive:
    """An open archive: a snapshot of its last commit. Use it as a context manager."""

    def __init__(
        self, store: LocalStore, name: str, reader: ArchiveReader, identity: Identity | None, profile: Profile | None
    ):
        self._store, self._name, self._identity, self._profile_argument = store, name, identity, profile
        self._reader: ArchiveReader | None = reader
        self._pipeline: Pipeline | None = None

    @property
    def path(self) -> str:
        return str(self._store.folder / self._name)

    @property
    def manifest(self) -> Manifest:
        """Recipe, identity, geometry, namespace and profile id."""
        return self._open().manifest

    @property
    def tokens(self) -> np.ndarray:
        """All stored token ids, int64 (T,)."""
        return self._open().token_ids()

    def __len__(self) -> int:
        """Stored tokens."""
        return self._open().tokens

    def restore(
        self,
        positions: int | slice | range | Iterable[int] | None = None,
        prompt: Any = None,
        layers: Iterable[int] | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> Restored:
        """A transformers DynamicCache in storage of its own, and how many tokens it covers.

        Args:
            positions: which tokens; an int n means the first n. Selected tokens keep their positions: the cache then
                goes on at the archive's next position.
            prompt: token ids; gives their longest stored prefix, at most `len(prompt) − 1` tokens, ready for
                `model.generate(prompt, cache=…)`. `matched` says how many.
            layers: only these; the others come back empty, at their places.
            dtype: convert by value; raises InvalidInput when a number does not fit. Default: as stored.
            device: where to put the tensors. Default: CPU.

        Raises MissingIdentity when the archive was opened with neither model nor identity, InvalidInput,
        DamagedArchive, ProfileMissing, ProfileMismatch, MissingExtra.
        """
        reader = self._open()
        if self._identity is None:
            raise MissingIdentity("restore needs an archive opened with model= or identity=")
        if positions is not None and prompt is not None:
            raise InvalidInput("give positions or prompt, not both")
        chosen = self._layers(layers)
        if prompt is not None:
            ids = token_ids(prompt, what="prompt")
            if not len(ids):
                raise InvalidInput("the prompt has no token")
            spans = [range(0, min(reader.match(ids)[0], len(ids) - 1))]
        else:
            spans = _spans(positions, reader.tokens)
        held = sum(map(len, spans))
        prefix = not spans or (len(spans) == 1 and spans[0].start == 0)
        next_position = held if prefix else reader.commit.next_position
        out = self._decode(spans, chosen) if held else {}
        target = give_cache(
            out,
            total_layers=len(reader.manifest.geometry),
            next_position=next_position,
            dtype=dtype_of(dtype),
            device=device,
        )
        return Restored(target, held)

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys (H, T, Dk) and values (H, T, Dv) of tokens `start`…`stop` of one layer, in the stored dtype.

        Keys are as the model cached them. Reads only the blocks and layer groups it needs. Raises InvalidInput,
        DamagedArchive.
        """
        (index,) = self._layers([layer])
        if not 0 <= start <= stop <= len(self):
            raise InvalidInput(f"tokens {start}…{stop} of an archive of {len(self)}")
        kv = self._decode([range(start, stop)], [index])[index]
        return kv.keys, kv.values

    def append(self, cache: Any, tokens: Any, *, row: int = 0) -> ArchiveInfo:
        """Add the tokens of `cache` that the archive does not hold yet; `tokens` are all T ids of `cache`.

        Stored tokens keep their stored values; only new ones are coded. After an error the archive is as before.
        Raises InvalidInput (mode, geometry), TokensMismatch when the ids do not extend the stored ones,
        MissingIdentity, UnsupportedCache, StorageError.
        """
        reader = self._open()
        if not isinstance(reader.reader, Appender):
            raise InvalidInput("the archive is open for reading; open it with mode='a' to append")
        if self._identity is None:
            raise MissingIdentity("append needs an archive opened with model= or identity=")
        kv, ids = take_cache(cache, row), token_ids(tokens, row)
        if len(ids) != len(kv):
            raise TokensMismatch(f"the cache holds {len(kv)} tokens, {len(ids)} token ids were given")
        matched, stored = reader.match(ids)
        if matched < reader.tokens:
            what = "the ids end there" if stored is None else f"stored id {stored}, given {int(ids[matched])}"
            raise TokensMismatch(f"the ids must extend the {reader.tokens} stored ones; they part at {matched}: {what}")
        if kv.geometry != reader.manifest.geometry:
            raise InvalidInput(f"the cache has {_shape(kv.geometry)}, the archive {_shape(reader.manifest.geometry)}")
        if len(ids) > matched:
            keep, blocks = self._extended(kv, ids, matched)
            append_blocks(reader.reader, reader, keep, blocks)
            if reader.reader.size() > 2 * reader.commit.live:
                self.compact()
        return self.info()

    def _extended(self, kv: KVCache, ids: np.ndarray, stored: int) -> tuple[int, Iterator[NewBlock]]:
        """How many blocks stay, and the blocks that follow them: the tail joins in once it fills a block."""
        reader, size = self._open(), self._open().manifest.recipe.block
        sealed = int(np.count_nonzero(reader.entries["sealed"]))
        tail_start = sealed * size
        if len(ids) - tail_start < size:
            return len(reader.entries), self._blocks(kv.tokens(stored, len(ids)), ids[stored:], stored)
        joined = kv.tokens(tail_start, len(ids))
        if stored > tail_start:
            tail = self._decode([range(tail_start, stored)], list(range(len(reader.manifest.geometry))))
            joined = _joined(tail, kv.tokens(stored, len(ids)))
        return sealed, self._blocks(joined, ids[tail_start:], tail_start)

    def _blocks(self, kv: KVCache, ids: np.ndarray, first: int) -> Iterator[NewBlock]:
        return _encode(self._ready_pipeline(), self.manifest, kv, ids, first)

    def compact(self) -> ArchiveInfo:
        """Rewrite the file without dead bytes, at once; then it equals one saved in bulk. Needs mode ``"a"``."""
        reader = self._open()
        if not isinstance(reader.reader, Appender):
            raise InvalidInput("the archive is open for reading; open it with mode='a' to compact")
        pending = self._store.create(self._name)
        try:
            write_archive(pending, reader.manifest, self._compacted(), reader.embedded_profile())
            fresh = pending.commit_and_hold()
        except BaseException:
            pending.discard()
            raise
        self._reader = ArchiveReader(fresh, reader.manifest.namespace)
        reader.close()
        return self.info()

    def _compacted(self) -> Iterator[NewBlock]:
        reader = self._open()
        sealed = int(np.count_nonzero(reader.entries["sealed"]))
        for index in range(sealed):
            block = reader.block(index)
            yield NewBlock(block.head, reader.read_parts(block, range(len(block.head.parts))))
        start = sealed * reader.manifest.recipe.block
        if start < reader.tokens:
            layers = self._decode([range(start, reader.tokens)], list(range(len(reader.manifest.geometry))))
            tail = KVCache(tuple(layers[i] for i in range(len(layers))))
            yield from self._blocks(tail, reader.token_ids()[start:], start)

    def info(self) -> ArchiveInfo:
        """What `kvcellar info` prints."""
        return describe(self._open())

    def verify(self) -> VerifyReport:
        """Read and check every part; the report names each damaged one."""
        return verify(self._open())

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> ArchiveReader:
        if self._reader is None:
            raise ArchiveClosed(f"{self.path} is closed")
        return self._reader

    def _layers(self, layers: Iterable[int] | None) -> list[int]:
        count = len(self._open().manifest.geometry)
        chosen = list(range(count)) if layers is None else sorted({int(layer) for layer in layers})
        if any(not 0 <= layer < count for layer in chosen):
            raise InvalidInput(f"layers {chosen} of an archive with layers 0…{count - 1}")
        return chosen

    def _ready_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            manifest = self.manifest
            embedded = self._open().embedded_profile() if self._profile_argument is None else None
            profile = find_profile(manifest.profile, self._profile_argument, embedded)
            self._pipeline = Pipeline(manifest.recipe, manifest.geometry, profile)
        return self._pipeline

    def _decode(self, spans: Sequence[range], layers: list[int]) -> dict[int, LayerKV]:
        """Tokens of `spans` (ascending, apart) of `layers`, one behind the other, on all cores.

        A task is one block, or without a predictor some of its layer groups: neither depends on another.
        """
        reader, pipeline = self._open(), self._ready_pipeline()
        groups = pipeline.needed(layers)
        tasks: list[_Task] = []
        position = 0
        for span in spans:
            for block in reader.blocks(span.start, span.stop):
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
                futures = [pool.submit(self._run, task, out) for task in tasks]
                try:
                    for future in futures:
                        future.result()
                finally:
                    for future in futures:
                        future.cancel()
        else:
            for task in tasks:
                self._run(task, out)
        return out

    def _run(self, task: _Task, out: Mapping[int, LayerKV]) -> None:
        """Decode a task straight into its place in `out`, or through a copy when only part of its block is wanted."""
        reader, pipeline, head = self._open(), self._ready_pipeline(), task.block.head
        end = task.position + len(task.wanted)
        members = [i for group in task.groups for i in pipeline.groups[group] if i in out]
        places = {
            i: LayerKV(out[i].keys[:, task.position : end], out[i].values[:, task.position : end]) for i in members
        }
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


class _Task(NamedTuple):
    """Layer groups of a block to decode: its tokens `wanted` go to `position` of the output."""

    block: Block
    wanted: range
    groups: list[int]
    position: int


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


def _spans(positions: int | slice | range | Iterable[int] | None, tokens: int) -> list[range]:
    """Ascending runs of the chosen token indexes. Raises InvalidInput for any outside 0…tokens−1."""
    if positions is None:
        return [range(tokens)] if tokens else []
    if isinstance(positions, int):
        if not 0 <= positions <= tokens:
            raise InvalidInput(f"the first {positions} tokens of an archive of {tokens}")
        return [range(positions)] if positions else []
    if isinstance(positions, slice):
        positions = range(tokens)[positions]
    chosen = np.unique(token_ids(list(positions), what="positions")) if not isinstance(positions, Tensor) else None
    if chosen is None:
        chosen = np.unique(token_ids(positions, what="positions"))
    if len(chosen) and chosen[-1] >= tokens:
        raise InvalidInput(f"position {chosen[-1]} of an archive of {tokens} tokens")
    runs = np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1) if len(chosen) else []
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs]


def _joined(tail: Mapping[int, LayerKV], new: KVCache) -> KVCache:
    return KVCache(
        tuple(
            LayerKV(torch.cat([tail[i].keys, kv.keys], dim=1), torch.cat([tail[i].values, kv.values], dim=1))
            for i, kv in enumerate(new.layers)
        )
    )


def _shape(geometry: Any) -> str:
    return "; ".join(f"{run['layers']} layers of {run['key']}" for run in geometry.to_json())


class Found(NamedTuple):
    """The archive with the longest common prefix, or None; how many tokens match; where and why it ends."""

    path: str | None
    matched: int
    reason: str


def find(
    folder: Path,
    prompt: Any,
    *,
    model: Any = None,
    identity: Identity | str | None = None,
    namespace: str = "",
) -> Found:
    """The archive in `folder` whose tokens share the longest prefix with `prompt`, of this identity and namespace.

    `reason` says what stopped the match, with its index. Archives that cannot be read are passed over with a
    warning. Raises MissingIdentity, InvalidInput, ArchiveNotFound when there is no such folder.
    """
    who = resolve_identity(model, identity)
    if who is None:
        raise MissingIdentity("find needs model= or identity=")
    ids = token_ids(prompt, what="prompt")
    store = LocalStore(folder)
    best = Found(None, 0, f"no archive of this model shares a first token with the prompt in {folder}")
    for name in store.names():
        if not name.endswith(".kvc"):
            continue
        try:
            with ArchiveReader(store.open_reader(name), namespace) as reader:
                if reader.manifest.identity != who:
                    continue
                matched, stored = reader.match(ids)
                if matched > best.matched or (best.path is None and matched):
                    best = Found(str(store.folder / name), matched, _why(reader.tokens, ids, matched, stored))
                elif best.path is None and stored is not None:
                    best = Found(None, 0, f"token 0: stored {stored}, prompt {int(ids[0])} (nothing matches)")
        except (ArchiveNotFound, NotAnArchive):
            continue
        except (ArchiveError, StorageError) as error:
            warnings.warn(f"passed over {name}: {error}", stacklevel=2)
    return best


def _why(tokens: int, ids: np.ndarray, matched: int, stored: int | None) -> str:
    if stored is not None:
        return f"token {matched}: stored {stored}, prompt {int(ids[matched])}"
    if matched == tokens:
        return f"token {matched}: the archive ends here" + (" and so does the prompt" if matched == len(ids) else "")
    return f"token {matched}: the prompt ends here, the archive goes on to {tokens}"
