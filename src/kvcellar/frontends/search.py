"""Looking a phrase up in stored caches: only the blocks' heads are read, where the token ids are, and no part.

What is found can be restored alone, with the first and last tokens around it (`spans_for`), and generated from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..archive.reader import ArchiveReader
from ..errors import InvalidInput
from ..language.tokenlog import TokenLog
from ..search import suffix
from ..store.local import LocalStore
from .tokeninfo import is_log

if TYPE_CHECKING:
    from .archive import Archive

Mode = Literal["exact", "fuzzy"]


@dataclass(frozen=True)
class Hit:
    """Tokens `start` … `stop` − 1 of an archive match; `tokens` are their ids. A larger score is better, 1 the best."""

    start: int
    stop: int
    score: float
    tokens: tuple[int, ...]


def search(
    archive: Archive | ArchiveReader | str | os.PathLike[str],
    phrase: str | Sequence[int] | np.ndarray,
    *,
    tokenizer: Callable[..., Any] | None = None,
    mode: Mode = "exact",
    at_least: int | None = None,
    limit: int | None = None,
    namespace: str = "",
) -> list[Hit]:
    """Where `phrase` stands in the tokens of an archive.

    Args:
        archive: an open one, or the path of one.
        phrase: token ids, integers (s,); or text, which the `tokenizer` of the archive's model reads as it may stand
            at the beginning, after a space, and after a line break, since its tokens differ.
        mode: ``"exact"``: every token, by position; of readings that end at the same token, the longest counts.
            ``"fuzzy"``: at least `at_least` of the s tokens at their places, best first (then by position), score =
            their share of s; overlapping hits count once, by the best.
        limit: at most so many hits.
        namespace: of an archive given by its path.

    Raises InvalidInput, and for a path what `kvcellar.open` raises.
    """
    if mode not in ("exact", "fuzzy") or (mode == "fuzzy") != (at_least is not None):
        raise InvalidInput(f"mode {mode!r} with at_least={at_least}; expected 'exact', or 'fuzzy' and at_least=")
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit {limit}; expected at least one hit")
    if isinstance(phrase, str):
        if tokenizer is None:
            raise InvalidInput("a phrase of text needs tokenizer=; or give its token ids")
        asked = readings(phrase, tokenizer)
    else:
        asked = [suffix.as_symbols(phrase, "the phrase")]
    stored = _stored_ids(archive, namespace)
    found = _exact(stored, asked) if at_least is None else _fuzzy(stored, asked, at_least)
    return [Hit(a, b, score, tuple(stored[a:b].tolist())) for a, b, score in islice(found, limit)]


def readings(phrase: str, tokenizer: Callable[..., Any]) -> list[np.ndarray]:
    """Token ids, int64 (s,) each, of `phrase` at the beginning of a text, after a space, and after a line break.

    Raises InvalidInput for text without tokens.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    found, line_break = [encode(phrase), encode(f" {phrase}")], encode("\n")
    after_break = encode(f"\n{phrase}")
    if after_break[: len(line_break)] == line_break:
        found.append(after_break[len(line_break) :])
    different = dict.fromkeys(tuple(ids) for ids in found if ids)
    if not phrase or not different:
        raise InvalidInput(f"the phrase {phrase!r} has no token")
    return [np.array(ids, np.int64) for ids in different]


def spans_for(hits: Iterable[Hit], tokens: int, *, sinks: int = 4, recent: int = 32, context: int = 16) -> list[range]:
    """Ascending ranges of token indexes: the first `sinks`, each hit with `context` on both sides, the last `recent`.

    For ``archive.restore(positions=itertools.chain(*spans))``, in an archive of so many `tokens`: the cache then holds
    these at their positions and goes on behind the archive's last. Raises InvalidInput for a hit that lies outside.
    """
    if min(tokens, sinks, recent, context) < 0:
        raise InvalidInput(f"{tokens} tokens, {sinks} sinks, {recent} recent, context {context}; expected none below 0")
    chosen = np.zeros(tokens, bool)
    chosen[:sinks] = True
    chosen[max(0, tokens - recent) :] = True
    for hit in hits:
        if not 0 <= hit.start <= hit.stop <= tokens:
            raise InvalidInput(f"a hit in tokens {hit.start}…{hit.stop} of an archive of {tokens}")
        chosen[max(0, hit.start - context) : hit.stop + context] = True
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).tolist()
    return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _stored_ids(archive: Archive | ArchiveReader | str | os.PathLike[str], namespace: str) -> np.ndarray:
    if isinstance(archive, ArchiveReader):
        return archive.token_ids()
    if not isinstance(archive, (str, os.PathLike)):
        return archive.tokens
    store, name = LocalStore.at(archive)
    with store.open_reader(name) as handle:
        if is_log(handle):
            return TokenLog.read(handle, namespace).token_ids()
        return ArchiveReader(handle, namespace).token_ids()


def _exact(stored: np.ndarray, asked: list[np.ndarray]) -> list[tuple[int, int, float]]:
    starts: dict[int, int] = {}
    for phrase in sorted(asked, key=len):
        starts |= {end + 1: end + 1 - len(phrase) for end in suffix.exact(stored, phrase).tolist()}
    return [(starts[stop], stop, 1.0) for stop in sorted(starts)]


def _fuzzy(stored: np.ndarray, asked: list[np.ndarray], at_least: int) -> Iterator[tuple[int, int, float]]:
    """Best first, none overlapping another; readings with fewer tokens than must agree do not count."""
    long_enough = [phrase for phrase in asked if len(phrase) >= at_least] or asked
    found = []
    for phrase in long_enough:
        matches = suffix.best_apart(suffix.fuzzy(stored, phrase, at_least), len(phrase))
        stops = (matches.ends + 1).tolist()
        found += [(s - len(phrase), s, score) for s, score in zip(stops, matches.scores.tolist(), strict=True)]
    taken = np.zeros(len(stored), bool)
    for start, stop, score in sorted(found, key=lambda hit: (-hit[2], hit[0], -hit[1])):
        if not taken[start:stop].any():
            taken[start:stop] = True
            yield start, stop, score
