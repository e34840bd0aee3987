"""An open archive of recipe `tokens`: its ids, and the cache that a model computes from them."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from ..archive.info import ArchiveInfo, VerifyReport
from ..archive.manifest import Manifest
from ..errors import ArchiveClosed, InvalidInput, MissingIdentity, StorageError, TokensMismatch
from ..identity import Identity, require_same
from ..language.blocks import Segment, blocks_of
from ..language.checks import check_blocks
from ..language.idcode import encode_ids
from ..language.tokenlog import TokenLog, sum_of
from ..store.base import Appender, Reader
from ..store.local import LocalStore
from .inputs import resolve_identity, spans_of, token_ids, told_log2_probs
from .remember import remember
from .search import Hit, search
from .tokeninfo import describe_log, verify_log
from .tokenreplay import Progress, Replay, Replayed, compared, decode_log, replay
from .tokensave import CHUNK
from .transformers import Device, dtype_of, fill_cache, give_cache, take_cache


class TokenArchive:
    """An open token log: what `kvcellar.open` gives for archives of recipe `tokens`. Use it as a context manager."""

    def __init__(
        self, store: LocalStore, name: str, handle: Reader, namespace: str, identity: Identity | None, model: Any = None
    ):
        self._store, self._name, self._identity, self._model = store, name, identity, model
        self._handle: Reader | None = handle
        self._log = TokenLog.read(handle, namespace)
        self._ids: np.ndarray | None = None

    @property
    def path(self) -> str:
        return str(self._store.folder / self._name)

    @property
    def manifest(self) -> Manifest:
        """Recipe, identity, geometry and namespace."""
        log = self._open()
        return Manifest(log.recipe, log.identity, log.geometry, log.namespace)

    @property
    def tokens(self) -> np.ndarray:
        """All token ids, int64 (T,). Raises InvalidInput where they are coded under the model, before a restore."""
        if self._ids is None:
            self._ids = self._open().token_ids()
        return self._ids

    @property
    def readable(self) -> bool:
        """Whether `tokens` can be had without a replay."""
        return self._ids is not None or self._open().ids is not None

    def __len__(self) -> int:
        return self._open().tokens

    def restore(
        self,
        positions: int | slice | range | Iterable[int] | None = None,
        prompt: Any = None,
        layers: Iterable[int] | None = None,
        dtype: str | torch.dtype | None = None,
        device: Device | Mapping[int, Device] | None = None,
        into: Any = None,
        *,
        model: Any = None,
        progress: Progress | None = None,
    ) -> Replayed:
        """The transformers cache that the model computes anew, and in `replay` how near it is to what was saved.

        Args: those of `Archive.restore`, but that positions are a first part, and
            model: what computes it; default: the one the archive was opened with.
            progress: told how many tokens are done, and of how many.

        An interrupted replay leaves nothing behind; the next call starts again. Raises MissingIdentity without a model,
        IdentityMismatch for another one, RuntimeMismatch where ids are coded under the model on another runtime,
        TokensMismatch for ids outside its vocabulary, InvalidInput, DamagedArchive.
        """
        log = self._open()
        if positions is not None and prompt is not None:
            raise InvalidInput("give positions or prompt, not both")
        model = self._ready_model(model)
        decoded = None
        if not self.readable:
            self._ids, decoded = decode_log(model, log, progress)
        ids = self.tokens
        count = len(ids)
        if prompt is not None:
            asked = token_ids(prompt, what="prompt")
            if not len(asked):
                raise InvalidInput("the prompt has no token")
            count = min(common(ids, asked), len(asked) - 1)
        elif positions is not None:
            spans = spans_of(positions, len(ids))
            if spans and (len(spans) > 1 or spans[0].start):
                raise InvalidInput("positions of a token log: it is computed from its first token on")
            count = spans[0].stop if spans else 0
        cache, found = self._computed(model, ids[:count], decoded, progress)
        if count and not (layers is None and dtype is None and device is None and into is None):
            cache = _placed(cache, layers, dtype_of(dtype), device, into)
        restored = Replayed(cache, count, count)
        restored.replay = found
        return restored

    def _computed(self, model: Any, ids: np.ndarray, decoded: Any, progress: Progress | None) -> tuple[Any, Any]:
        """The cache of the first tokens; what decoding has left behind is taken where nothing is nearer."""
        log = self._open()
        near = None
        if decoded is not None and len(ids) == log.tokens:
            one_by_one = [Segment(log.tokens, 1)]
            near = compared(take_cache(decoded), log, one_by_one)
            if near.exact or list(log.segments) == one_by_one:
                return decoded, near
        cache = replay(model, ids, log.geometry, log.segments, progress)
        if not len(ids):
            return cache, Replay((), log.segments)
        found = compared(take_cache(cache), log, log.segments)
        if near is not None and not found.exact and near.distance < found.distance:
            return decoded, near
        return cache, found

    def append(self, cache: Any, tokens: Any, *, row: int = 0, start: int = 0, log2_probs: Any = None) -> ArchiveInfo:
        """Add the tokens of `cache` that the log does not hold yet; arguments and errors are those of `Archive.append`.

        The log is written anew, at once, and the trie file told of `log2_probs`. Raises InvalidInput where the ids are
        coded under the model.
        """
        log = self._open()
        if not isinstance(self._handle, Appender):
            raise InvalidInput("the archive is open for reading; open it with mode='a' to append")
        if log.coded is not None:
            raise InvalidInput("ids coded under the model take no more tokens: restore, go on, and save the whole anew")
        if self._identity is None:
            raise MissingIdentity("append needs an archive opened with model= or identity=")
        kv, ids = take_cache(cache, row), token_ids(tokens, row)
        if len(ids) != len(kv):
            raise TokensMismatch(f"the cache holds {len(kv)} tokens, {len(ids)} token ids were given")
        logs = None if log2_probs is None else told_log2_probs(log2_probs, len(ids))
        stored = self.tokens
        if isinstance(start, bool) or not isinstance(start, (int, np.integer)) or not 0 <= start <= len(stored):
            raise InvalidInput(f"tokens from {start!r} on; the archive holds {len(stored)}: start lies in 0…that")
        matched = start + common(stored[start:], ids)
        if matched < len(stored):
            raise TokensMismatch(f"the ids must extend the {len(stored)} stored ones; they part at {matched}")
        if kv.geometry != log.geometry:
            raise InvalidInput(f"the cache has {kv.geometry.summary}, the archive {log.geometry.summary}")
        if new := start + len(ids) - matched:
            whole = np.concatenate([stored, ids[matched - start :]])
            segments = (*log.segments, Segment(new, min(CHUNK, new)))
            old = len(log.blocks)
            more = check_blocks(kv, blocks_of(segments, log.block)[old:], log.sketches.shape[1], start=start)
            self._replace(
                replace(
                    log,
                    segments=segments,
                    sums=np.concatenate([log.sums[:old], more.sums]),
                    sketches=np.concatenate([log.sketches[:old], more.sketches]),
                    ids_sum=sum_of(whole),
                    ids=encode_ids(whole),
                )
            )
            self._ids = whole
            if logs is not None and self._identity.same(log.identity):
                remember(self._store, self._name, self._identity, log.namespace, [(start, logs)], whole)
        return self.info()

    def _replace(self, log: TokenLog) -> None:
        old = self._handle
        assert isinstance(old, Appender)
        if not old.is_current():
            raise StorageError(errno.ESTALE, f"{self.path} was replaced while it was open: open it again to append")
        pending = self._store.create(self._name)
        try:
            pending.append(log.pack())
            self._handle = pending.commit_and_hold()
        except BaseException:
            pending.discard()
            raise
        self._log = log
        old.close()

    def search(self, phrase: Any, **settings: Any) -> list[Hit]:
        """Where a phrase, text or token ids, stands; settings and errors are those of `frontends.search.search`."""
        return search(self, phrase, **settings)  # type: ignore[arg-type]

    def read(self, layer: int, start: int, stop: int) -> NoReturn:
        """Raises InvalidInput: a token log holds no numbers."""
        raise InvalidInput("a token log holds no numbers to read: restore(model=…) computes the cache")

    def codes(self, layer: int, side: str = "key", head: int = 0, stage: int = 0) -> NoReturn:
        """Raises InvalidInput: a token log holds no codes."""
        raise InvalidInput("a token log holds no codes of keys and values: search its token ids")

    def compact(self) -> ArchiveInfo:
        """Nothing to do: an append writes the log anew."""
        return self.info()

    def info(self) -> ArchiveInfo:
        """What `kvcellar info` prints."""
        return describe_log(self._open(), self.path, self._size())

    def verify(self) -> VerifyReport:
        """Check the file and decode its ids; what is coded under the model is checked by the file's checksum alone."""
        return verify_log(self._open(), self.path, self._size())

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def __enter__(self) -> TokenArchive:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> TokenLog:
        if self._handle is None:
            raise ArchiveClosed(f"{self.path} is closed")
        return self._log

    def _size(self) -> int:
        assert self._handle is not None
        return self._handle.size()

    def _ready_model(self, model: Any) -> Any:
        """The model to run; checked unless the archive was opened with it. Raises MissingIdentity, IdentityMismatch."""
        if model is not None and model is not self._model:
            who = resolve_identity(model, None)
            assert who is not None
            require_same(self._open().identity, who, self.path)
        chosen = self._model if model is None else model
        if chosen is None:
            raise MissingIdentity(
                f"{self.path} holds token ids alone, and its cache is computed anew: restore needs model=, the model "
                f"{self._open().identity}"
            )
        return chosen


def common(stored: np.ndarray, asked: np.ndarray) -> int:
    """How many first ids agree."""
    count = min(len(stored), len(asked))
    differ = np.flatnonzero(stored[:count] != asked[:count])
    return int(differ[0]) if len(differ) else count


def _placed(cache: Any, layers: Any, dtype: Any, device: Any, into: Any) -> Any:
    """The layers that are wanted, where and in which dtype they are wanted."""
    kv = take_cache(cache)
    try:
        chosen = range(len(kv.layers)) if layers is None else sorted({int(layer) for layer in layers})
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"layers {layers!r}; expected layer indexes: {error}") from error
    if any(not 0 <= layer < len(kv.layers) for layer in chosen):
        raise InvalidInput(f"layers {list(chosen)} of an archive with layers 0…{len(kv.layers) - 1}")
    out = {i: kv.layers[i] for i in chosen if not kv.layers[i].empty}
    if into is None:
        return give_cache(out, kv.geometry, length=len(kv), dtype=dtype, device=device)
    return fill_cache(into, out, tokens=len(kv), dtype=dtype, device=device)
