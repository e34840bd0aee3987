"""An open archive: restore, read, append, compact, verify."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..archive.info import ArchiveInfo, VerifyReport, describe, verify
from ..archive.manifest import Manifest
from ..archive.reader import ArchiveReader
from ..archive.writer import append_blocks, write_archive
from ..cache import LayerKV, Restored
from ..decode import coarse_symbols, decode_blocks
from ..errors import ArchiveClosed, DamagedArchive, InvalidInput, MissingIdentity, StorageError, TokensMismatch
from ..held import held as held_runs
from ..held import is_prefix, usable_prefix, wanted
from ..identity import Identity
from ..pipeline import Pipeline
from ..profile import Profile, find_profile
from ..ready import ready
from ..replayed import Replayed
from ..store.base import Appender
from ..store.local import LocalStore
from ..tail import compacted, extended
from .inputs import layers_of, spans_of, take_more, token_ids, told_log2_probs
from .reducedfiles import restore_reduced
from .remember import Told, remember
from .replayer import Replayer
from .search import Hit, search
from .transformers import Device, dtype_of, fill_cache, give_cache


class Archive:
    """An open archive: a snapshot of its last commit. Use it as a context manager."""

    def __init__(
        self,
        store: LocalStore,
        name: str,
        reader: ArchiveReader,
        identity: Identity | None,
        profile: Profile | None,
        config: Any = None,
        model: Any = None,
    ):
        self._config, self._bos = config, getattr(config, "bos_token_id", None)
        self._store, self._name, self._identity, self._profile_argument = store, name, identity, profile
        self._reader: ArchiveReader | None = reader
        self._pipeline: Pipeline | None = None
        self._model = model
        self._replayer: Replayer | None = None
        self._told: list[Told] = []  # of appended tokens, for the trie
        self._seen = np.empty(0, np.int64)  # all stored ids, once this handle appended a whole sequence

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
        device: Device | Mapping[int, Device] | None = None,
        into: Any = None,
    ) -> Restored:
        """A transformers cache in storage of its own, how many tokens it covers, and the position that comes next.

        Args:
            positions: which tokens; an int n means the first n. Selected tokens keep their positions: the cache then
                goes on at the archive's next position. With sliding layers only prefixes, and only those whose
                windows are stored: the end, and what was appended in steps.
            prompt: token ids; gives their longest stored prefix, at most `len(prompt) − 1` tokens, ready for
                `model.generate(prompt, cache=…)`. `matched` says how many.
            layers: only these; the others come back empty, at their places.
            dtype: convert by value; raises InvalidInput when a number does not fit. Default: as stored.
            device: where to put the tensors, or a device per layer. Default: CPU.
            into: an empty transformers cache (static, quantized, offloaded) to fill instead of a new DynamicCache; an
                error leaves it empty.

        Raises MissingIdentity when the archive was opened with neither model nor identity, InvalidInput,
        DamagedArchive, ProfileMissing, ProfileMismatch, MissingExtra.
        """
        reader = self._open()
        if self._identity is None:
            raise MissingIdentity("restore needs an archive opened with model= or identity=")
        if positions is not None and prompt is not None:
            raise InvalidInput("give positions or prompt, not both")
        chosen = self._layers(layers)
        if isinstance(device, Mapping):
            self._layers(device)
        if reader.reduced:
            request = {"positions": positions, "prompt": prompt, "layers": layers, "into": into, "device": device}
            return restore_reduced(reader, self._config, dtype=dtype_of(dtype), **request)
        if prompt is not None:
            ids = token_ids(prompt, what="prompt")
            if not len(ids):
                raise InvalidInput("the prompt has no token")
            matched = reader.match(ids)[0]
            self._warn_of_second_bos(ids[matched : matched + 1])
            spans = [range(usable_prefix(reader, min(matched, len(ids) - 1)))]
        else:
            spans = spans_of(positions, reader.tokens)
        if not reader.regular and sum(map(len, spans)) < reader.tokens:
            raise InvalidInput(
                f"only the whole archive can be restored: it goes on at position {reader.commit.next_position} after "
                f"{reader.tokens} tokens, and the positions in between are not stored"
            )
        held = sum(map(len, spans))
        next_position = reader.position_after(held if is_prefix(spans) else reader.tokens)
        length = next_position if reader.regular else held
        out = self._decode(wanted(reader, spans, chosen)) if held else {}
        if into is None:
            cache = give_cache(out, reader.manifest.geometry, length=length, dtype=dtype_of(dtype), device=device)
        else:
            cache = fill_cache(into, out, tokens=length, dtype=dtype_of(dtype), device=device)
        return Restored(cache, held, next_position)

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys (H, T, Dk) and values (H, T, Dv) of tokens `start`…`stop` of one layer, in the stored dtype.

        Keys are as the model cached them. Reads only the blocks and layer groups it needs. Raises InvalidInput,
        DamagedArchive.
        """
        (index,) = self._layers([layer])
        if not 0 <= start <= stop <= len(self):
            raise InvalidInput(f"tokens {start}…{stop} of an archive of {len(self)}")
        kv = self._decode({index: [range(start, stop)]})[index]
        if kv.slots != stop - start:
            runs = ", ".join(f"{run.start}…{run.stop}" for run in held_runs(self._open(), index, start, stop))
            raise InvalidInput(f"of tokens {start}…{stop} layer {index}, which slides, holds {runs or 'none'}")
        return kv.keys, kv.values

    def codes(self, layer: int, side: str = "key", head: int = 0, stage: int = 0) -> np.ndarray:
        """The symbols (T,) that stand for one KV head's keys or values, of a stage of a residual quantizer.

        What `kvcellar.search` can look through instead of token ids. Raises InvalidInput where the recipe has none
        (only vector quantizers do), DamagedArchive.
        """
        (index,) = self._layers([layer])
        pipeline = self._ready_pipeline()
        array, column = pipeline.column(index, side, head, stage)
        return np.ascontiguousarray(coarse_symbols(pipeline, self._open(), index)[array][:, column])

    def search(self, phrase: Any, **settings: Any) -> list[Hit]:
        """Where a phrase, text or token ids, stands; settings and errors are those of `frontends.search.search`."""
        return search(self, phrase, **settings)

    def append(self, cache: Any, tokens: Any, *, row: int = 0, start: int = 0, log2_probs: Any = None) -> ArchiveInfo:
        """Add the tokens of `cache` that the archive does not hold yet; `tokens` are all T ids of `cache`.

        Stored tokens keep their stored values; only new ones are coded. After an error the archive is as before.

        Args:
            row: which sequence of a batch.
            start: index in the sequence of the first token of `cache` and `tokens`; at most the number of stored
                tokens. With ``start=len(archive)`` they hold the new tokens alone, and the cost does not grow with
                the archive; nothing then compares the ids before them.
            log2_probs: as `save` takes them, one for each of `tokens`; they go into the trie file when the archive is
                closed, at once for all appends.

        Raises InvalidInput (mode, geometry, start), TokensMismatch when the ids do not extend the stored ones,
        MissingIdentity, UnsupportedCache, StorageError.
        """
        reader = self._open()
        if not isinstance(reader.reader, Appender):
            raise InvalidInput("the archive is open for reading; open it with mode='a' to append")
        if reader.reduced:
            raise InvalidInput("a reduced archive takes no more tokens: restore it, go on, and save the whole anew")
        if self._identity is None:
            raise MissingIdentity("append needs an archive opened with model= or identity=")
        kv, ids = take_more(cache, tokens, row, start, reader.tokens)
        matched, stored = (reader.tokens, None) if self._knows(ids, start) else reader.match(ids, start)
        if matched < reader.tokens:
            what = "the ids end there" if stored is None else f"stored id {stored}, given {int(ids[matched - start])}"
            raise TokensMismatch(f"the ids must extend the {reader.tokens} stored ones; they part at {matched}: {what}")
        if kv.geometry != reader.manifest.geometry:
            raise InvalidInput(f"the cache has {kv.geometry.summary}, the archive {reader.manifest.geometry.summary}")
        if start + len(ids) > matched:
            new, new_ids = kv.tokens(matched - start, len(ids)), ids[matched - start :]
            self._warn_of_second_bos(new_ids)
            logs = None if log2_probs is None else told_log2_probs(log2_probs, len(ids))
            told = None if logs is None else -logs[matched - start :].astype("float64")
            keep, blocks = extended(self._ready_pipeline(), reader, new, new_ids, told, self._replay)
            append_blocks(reader.reader, reader, keep, blocks)
            self._told += [] if logs is None else [(start, logs)]
            self._seen = ids if start == 0 else self._seen[:0]
            if reader.reader.size() > 2 * reader.commit.live:
                try:
                    self.compact()
                except (DamagedArchive, StorageError) as error:  # the append itself is safe; the next one tries again
                    warnings.warn(f"dead bytes stay for now: {error}", stacklevel=2)
        return self.info()

    def _warn_of_second_bos(self, following: np.ndarray) -> None:
        """Text tokenized as if it stood alone, and then added: the model never saw such a sequence."""
        if self._bos is None or not len(self) or not len(following) or int(following[0]) != self._bos:
            return
        if int(self._open().block(0).head.tokens[0]) == self._bos:
            message = f"what follows the stored tokens begins with a second beginning-of-sequence token {self._bos}"
            warnings.warn(message, stacklevel=3)

    def _knows(self, ids: np.ndarray, start: int) -> bool:
        """Whether `ids` begin with all stored ones, without reading any: true only when this handle wrote the last."""
        known = len(self._seen)
        return start == 0 and 0 < known == len(self) and np.array_equal(self._seen, ids[:known])

    def compact(self) -> ArchiveInfo:
        """Rewrite the file without dead bytes, at once; then it equals one saved in bulk. Needs mode ``"a"``."""
        reader = self._open()
        if not isinstance(reader.reader, Appender):
            raise InvalidInput("the archive is open for reading; open it with mode='a' to compact")
        if not reader.reader.is_current():
            raise StorageError(errno.ESTALE, f"{self.path} was replaced while it was open: open it again to compact")
        pending = self._store.create(self._name)
        try:
            next_position = reader.commit.next_position
            blocks = compacted(self._ready_pipeline, reader, self._replay)
            write_archive(pending, reader.manifest, blocks, reader.embedded_profile(), next_position)
            fresh = pending.commit_and_hold()
        except BaseException:
            pending.discard()
            raise
        self._reader = ArchiveReader(fresh, reader.manifest.namespace)
        reader.close()
        return self.info()

    def info(self) -> ArchiveInfo:
        """What `kvcellar info` prints."""
        return describe(self._open())

    def verify(self) -> VerifyReport:
        """Read and check every part; the report names each damaged one."""
        return verify(self._open())

    def close(self) -> None:
        if self._reader is not None:
            manifest, told, self._told = self.manifest, self._told, []
            self._reader.close()
            self._reader = None
            if told:
                remember(self._store, self._name, manifest.identity, manifest.namespace, told)

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> ArchiveReader:
        if self._reader is None:
            raise ArchiveClosed(f"{self.path} is closed")
        return self._reader

    def _layers(self, layers: Iterable[int] | None) -> list[int]:
        return layers_of(layers, len(self._open().manifest.geometry))

    def _ready_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            manifest = self.manifest
            embedded = self._open().embedded_profile() if self._profile_argument is None else None
            profile = find_profile(manifest.profile, self._profile_argument, embedded)
            self._pipeline = ready(manifest.recipe, manifest.geometry, profile)
        return self._pipeline

    def _replay(self, ids: np.ndarray) -> Replayed:
        pipeline = self._ready_pipeline()
        if self._replayer is None and self._model is not None:
            self._replayer = Replayer(self._model, pipeline.replays, pipeline.geometry, self._open().first_position)
        return pipeline.replayed(self._replayer, ids)

    def _decode(self, wanted: Mapping[int, Sequence[range]]) -> dict[int, LayerKV]:
        return decode_blocks(self._ready_pipeline(), self._open(), wanted, self._replay)
