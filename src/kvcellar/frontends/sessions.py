"""Which stored session goes with a prompt: the archives of a folder, and the language trie that knows them all.

Without the trie every archive must be opened. With it the folder is listed, and only files that changed since are;
the one that the trie names is opened and compared, so that no answer rests on the trie alone. Archives that cannot be
read whole are looked at one by one, each time. So `find` says what opening every archive would say.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..archive.manifest import MAX_NAMESPACE
from ..errors import ArchiveNotFound, KVCellarError, MissingIdentity, NewerFormat, NotAnArchive
from ..identity import Identity, require_text
from ..language.cells import Kinship
from ..language.trie import LanguageTrie
from ..language.triefile import Entry, Stamp, trie_key
from ..store.local import LocalStore
from .inputs import resolve_identity, token_ids
from .remember import session_in
from .trielog import TrieLog

Path = str | os.PathLike[str]
_SPARE = 1 << 16  # bytes of superseded records that are not worth a new file


class Found(NamedTuple):
    """The archive with the longest common prefix, or None; how many tokens match; where and why it ends."""

    path: str | None
    matched: int
    reason: str


@dataclass(frozen=True)
class Nearest:
    """The stored session of the deepest cell that holds a prompt: its archive, how many first tokens the two share,
    how many the session has, and what that makes in bits.
    """

    path: str
    matched: int
    tokens: int
    kinship: Kinship


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
    warning. Keeps what it learns of the folder in a trie file there, if it may (docs/language.md). Raises
    MissingIdentity, InvalidInput, ArchiveNotFound when there is no such folder.
    """
    sessions = Sessions(folder, model=model, identity=identity, namespace=namespace)
    found, remarks = sessions.search(token_ids(prompt, what="prompt"))
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    return found


def nearest(
    folder: Path,
    prompt: Any,
    *,
    model: Any = None,
    identity: Identity | str | None = None,
    namespace: str = "",
) -> Nearest | None:
    """The stored session nearest to `prompt`: that of the deepest common cell. None when no first token is shared.

    Its depth is known where the model's probabilities of the common prefix were told to `save`. Warns and raises as
    `find` does.
    """
    sessions = Sessions(folder, model=model, identity=identity, namespace=namespace)
    ids = token_ids(prompt, what="prompt")
    found, remarks = sessions.search(ids)
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    return sessions.nearest(ids, found)


class Sessions:
    """The archives of one identity and namespace in a folder, kept in memory for many look-ups.

    `trie` is the language trie of their tokens, by file name, as of the last `refresh`; its own look-ups take
    microseconds. Not for several threads at once. Raises MissingIdentity, InvalidInput.
    """

    def __init__(self, folder: Path, *, model: Any = None, identity: Identity | str | None = None, namespace: str = ""):
        who = resolve_identity(model, identity)
        if who is None:
            raise MissingIdentity("find needs model= or identity=")
        require_text(namespace, MAX_NAMESPACE, "namespace")
        self.folder, self.identity, self.namespace = folder, who, namespace
        self.store = LocalStore(folder)
        self.trie = LanguageTrie()
        self._log = TrieLog(self.store, trie_key(who, namespace))
        self._known: dict[str, tuple[Stamp, bool, int]] = {}  # stamp, whether it is in the trie, bytes of its record
        self._unread: list[str] = []

    def search(self, prompt: Any) -> tuple[Found, list[str]]:
        """What `find` returns, and a remark on each archive that was passed over. Refreshes first."""
        ids = token_ids(prompt, what="prompt")
        self.refresh()
        length, name = self.trie.longest_prefix(ids)
        if name is None:  # the reason then names the first token of the last archive
            name = max(self.trie.names(), default=None)
        found, remarks = self._scan({*self._unread, *([] if name is None else [name])}, ids)
        if found.matched < length and name is not None:  # not what it was, though nothing about the file says so
            self._forget(name)
            found, remarks = self._scan((each for each in self.store.names() if each.endswith(".kvc")), ids)
        return found, remarks

    def nearest(self, prompt: Any, found: Found) -> Nearest | None:
        """The nearest session to `prompt`, given what `search` has just found for it."""
        ids = token_ids(prompt, what="prompt")
        if found.path is None:
            return None
        name, same = os.path.basename(found.path), False
        near = self.trie.nearest(ids)
        if near is not None and near.kinship.same and found.matched == len(ids):
            name = near.name
        with self.store.open_reader(name) as handle:
            _, session = session_in(handle, self.namespace)
            matched, tokens = session.match(ids)[0], session.tokens
        same = matched == len(ids) == tokens
        return Nearest(str(self.store.folder / name), matched, tokens, Kinship(self.trie.cell(ids[:matched]), same))

    def refresh(self) -> None:
        """Notice which files of the folder are new, gone or changed; read those, and keep what they say.

        Raises ArchiveNotFound when there is no such folder.
        """
        listing = self._listing()
        writable = True
        try:
            for entry in self._log.read():
                self._take(entry)
        except NewerFormat:
            writable = False
        except KVCellarError:
            pass
        for name in self._known.keys() - listing.keys():
            self._forget(name)
        fresh, self._unread = [], []
        for name, stamp in listing.items():
            if name in self._known and self._known[name][0] == stamp:
                continue
            try:
                fresh.append(self._take(self._read_archive(name, stamp)))
            except KVCellarError:
                self._forget(name)
                self._unread.append(name)
        if writable and (fresh or self._log.damaged):
            with suppress(KVCellarError, OSError):  # a folder that cannot be written to: it is all in memory
                self._keep(fresh)
        if 2 * self.trie.wasted_tokens > self.trie.pooled_tokens:
            wasteful, self.trie = self.trie, LanguageTrie()
            for name in wasteful.names():
                self.trie.add(name, wasteful.tokens_of(name), wasteful.log2_probs_of(name))

    def _listing(self) -> dict[str, Stamp]:
        """Stamp of each archive, by name. It is taken before the file is read, so that it is never too new."""
        found = {}
        for name in self.store.names():
            if name.endswith(".kvc"):
                with suppress(OSError):  # gone in between
                    found[name] = Stamp.of(os.stat(self.store.folder / name))
        return found

    def _read_archive(self, name: str, stamp: Stamp) -> Entry:
        """Raises KVCellarError for one that is damaged, or that this version cannot read."""
        try:
            with self.store.open_reader(name) as handle:
                who, session = session_in(handle, self.namespace)
                if not self.identity.same(who):
                    return Entry(name, stamp, None)
                return Entry(name, stamp, session.token_ids().astype(np.uint32))
        except (ArchiveNotFound, NotAnArchive):
            return Entry(name, stamp, None)

    def _take(self, entry: Entry) -> Entry:
        """Hold what `entry` says in place of what was held; returns it with all that is known of its probabilities."""
        if entry.tokens is None:
            self.trie.discard(entry.name)
        else:
            self.trie.add(entry.name, entry.tokens, entry.log2_probs)
            entry = Entry(entry.name, entry.stamp, entry.tokens, self.trie.log2_probs_of(entry.name))
        self._known[entry.name] = entry.stamp, entry.tokens is not None, entry.packed_bytes
        return entry

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        self.trie.discard(name)

    def _keep(self, fresh: list[Entry]) -> None:
        with self._log.writing() as file:
            theirs = {entry.name: self._take(entry).stamp for entry in self._log.newly_read(file)}
            new = [self._take(entry) for entry in fresh if theirs.get(entry.name) != entry.stamp]
            if self._log.damaged or file.size() > 2 * sum(size for _, _, size in self._known.values()) + _SPARE:
                self._log.rewrite(map(self._entry, list(self._known)))
            elif new:
                self._log.append(file, new)

    def _entry(self, name: str) -> Entry:
        stamp, stored, _ = self._known[name]
        if not stored:
            return Entry(name, stamp, None)
        return Entry(name, stamp, self.trie.tokens_of(name), self.trie.log2_probs_of(name))

    def _scan(self, names: Iterable[str], ids: np.ndarray) -> tuple[Found, list[str]]:
        """The best of these archives, each opened and compared, and remarks on those that cannot be."""
        best = Found(None, 0, f"no archive of this model shares a first token with the prompt in {self.folder}")
        remarks = []
        for name in sorted(names):
            try:
                with self.store.open_reader(name) as handle:
                    who, session = session_in(handle, self.namespace)
                    if not self.identity.same(who):
                        continue
                    matched, stored = session.match(ids)
                    if matched > best.matched or (best.path is None and matched):
                        best = Found(str(self.store.folder / name), matched, _why(session.tokens, ids, matched, stored))
                    elif best.path is None and stored is not None:
                        best = Found(None, 0, f"token 0: stored {stored}, prompt {int(ids[0])} (nothing matches)")
            except (ArchiveNotFound, NotAnArchive):
                continue
            except KVCellarError as error:
                remarks.append(f"passed over {name}: {error}")
        return best, remarks


def _why(tokens: int, ids: np.ndarray, matched: int, stored: int | None) -> str:
    if stored is not None:
        return f"token {matched}: stored {stored}, prompt {int(ids[matched])}"
    if matched == tokens:
        return f"token {matched}: the archive ends here" + (" and so does the prompt" if matched == len(ids) else "")
    return f"token {matched}: the prompt ends here, the archive goes on to {tokens}"
