"""Telling a folder's trie file what the model thought of the tokens of an archive just saved or appended to.

The trie file is a hint (docs/language.md): what cannot be written there is a warning, the archive itself being whole.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import numpy as np

from ..archive.reader import ArchiveReader
from ..errors import KVCellarError
from ..identity import Identity
from ..language.cells import common_prefix
from ..language.tokenlog import TokenLog
from ..language.triefile import Entry, Stamp, trie_key
from ..store.base import Reader
from ..store.local import LocalStore
from .tokeninfo import is_log
from .trielog import TrieLog

Told = tuple[int, np.ndarray]
"""Index of the first token, and log2 probabilities float32 (n,) of it and those behind it."""


class Logged:
    """Tokens of a token log, as an archive's are looked at. Raises KVCellarError where only the model decodes them."""

    def __init__(self, log: TokenLog):
        self.log, self.tokens = log, log.tokens

    def token_ids(self) -> np.ndarray:
        return self.log.token_ids()

    def match(self, prompt: np.ndarray) -> tuple[int, int | None]:
        ids = self.log.token_ids()
        matched = common_prefix(ids.astype(np.uint32), prompt.astype(np.uint32))
        return matched, int(ids[matched]) if matched < min(self.tokens, len(prompt)) else None


def session_in(handle: Reader, namespace: str) -> tuple[Identity, ArchiveReader | Logged]:
    """Whose session a file holds, and its tokens. Raises KVCellarError."""
    if is_log(handle):
        log = TokenLog.read(handle, namespace)
        return log.identity, Logged(log)
    reader = ArchiveReader(handle, namespace)
    return reader.manifest.identity, reader


def remember(
    store: LocalStore,
    name: str,
    identity: Identity,
    namespace: str,
    told: Sequence[Told],
    ids: np.ndarray | None = None,
) -> None:
    """Append what the model makes of an archive's tokens to the trie file beside it, without reading that file.

    Tokens that `told` says nothing of are unknown, and stay what they were to whoever reads the file. Nothing is
    written where the archive is not of `identity`, or does not hold just the tokens `ids` (T,), if they are given. What
    goes wrong is a warning.
    """
    try:
        _append(store, name, identity, namespace, told, ids)
    except (KVCellarError, OSError) as error:
        warnings.warn(f"the tokens' probabilities are not kept: {error}", stacklevel=3)


def _append(
    store: LocalStore, name: str, identity: Identity, namespace: str, told: Sequence[Told], ids: np.ndarray | None
) -> None:
    try:
        stamp = Stamp.of(os.stat(store.folder / name))
    except OSError:
        return
    with store.open_reader(name) as handle:
        who, session = session_in(handle, namespace)
        if not identity.same(who):
            return
        if ids is not None and not session.tokens == len(ids) == session.match(ids)[0]:
            return
        tokens = (session.token_ids() if ids is None else ids).astype(np.uint32)
    log2_probs = np.full(len(tokens), np.nan, np.float32)
    for start, known in told:
        at = slice(start, min(start + len(known), len(tokens)))
        log2_probs[at] = np.where(np.isnan(known[: at.stop - start]), log2_probs[at], known[: at.stop - start])
    log = TrieLog(store, trie_key(identity, namespace))
    with log.writing() as file:
        log.append(file, [Entry(name, stamp, tokens, log2_probs)])
