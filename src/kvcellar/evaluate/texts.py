"""Texts for measurements: sources → documents → windows, and a wall between test and tuning.

A *source* is a file or a part of the standard library; it is split into *documents* (an article, an essay, a topic, a
file), the clusters that intervals resample; a *window* is the first prefix + continuation tokens of a document.

A source is for "test", for "tune", or its documents are split half and half by the SHA-256 of their names, which is
the same on every machine. What loads documents is asked for one role and gives documents of that role alone; the same
text under both roles is refused when the sources are loaded.

How a text falls into documents: `documents`.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, cast, get_args

from ..errors import InvalidInput
from .documents import DATELINE, HEADING, READERS, parts

Role = Literal["test", "tune"]
ROLES: tuple[Role, ...] = get_args(Role)
KINDS = ("encyclopedia", "essays", "docs", "code")
_CHARACTERS_A_TOKEN = 16


@dataclass(frozen=True)
class Source:
    """Where documents come from. `file` is a bare name, looked up in a folder the caller gives."""

    name: str
    kind: str
    role: str
    read: str
    file: str | None = None

    def __post_init__(self) -> None:
        choices = {"kind": KINDS, "role": (*ROLES, "split"), "read": tuple(READERS)}
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise InvalidInput(
                    f"source {self.name}: {key}: expected one of {', '.join(allowed)}, got {getattr(self, key)!r}"
                )
        if (self.file is None) != (self.read in _WITHOUT_FILE):
            raise InvalidInput(
                f"source {self.name}: expected a file unless read is {' or '.join(_WITHOUT_FILE)}, got {self.file!r}"
            )
        if self.file is not None and (self.file in ("", ".", "..") or re.search(r"[/\\:]", self.file)):
            raise InvalidInput(f"source {self.name}: file: expected a bare file name, got {self.file!r}")


@dataclass(frozen=True)
class Document:
    name: str
    kind: str
    role: Role
    text: str = field(repr=False)


def role_of(name: str) -> Role:
    """The role of a document of a split source: test for the even, tune for the odd SHA-256 of its name."""
    return ROLES[hashlib.sha256(name.encode()).digest()[-1] % 2]


_WITHOUT_FILE = ("topics", "stdlib")
_STANDARD_LIBRARY = (Source("topics", "docs", "split", "topics"), Source("stdlib", "code", "split", "stdlib"))


def read_source(source: Source, folder: Path, *, role: Role) -> list[Document]:
    """Documents of `source` in `role`, empty and repeated ones left out. Raises InvalidInput when there is no text."""
    _expect_role(role)
    if source.role not in (role, "split"):
        return []
    text = "" if source.file is None else _read(folder / source.file)
    return [document for document in _all_documents(source, text) if document.role == role]


def _all_documents(source: Source, text: str) -> list[Document]:
    """Documents of both roles; of those with the same text the first counts, so that roles share none."""
    found: dict[str, Document] = {}
    for name, part in READERS[source.read](text):
        role = role_of(name or source.name) if source.role == "split" else cast(Role, source.role)
        if part.strip():
            found.setdefault(_sha256(part), Document(f"{source.name}/{name}".rstrip("/"), source.kind, role, part))
    if not found:
        raise InvalidInput(f"source {source.name}: expected {source.read} text, got no document")
    return list(found.values())


def standard_library(role: Role) -> list[Document]:
    """Documentation and code that come with Python, the half of them that is for `role`."""
    return [document for source in _STANDARD_LIBRARY for document in read_source(source, Path(), role=role)]


@dataclass(frozen=True)
class Sources:
    """Declared sources; `files` were found in the folder and `missing` were not."""

    sources: tuple[Source, ...]
    folder: Path
    files: tuple[Path, ...]
    missing: tuple[str, ...]

    def documents(self, role: Role, kinds: Sequence[str] | None = None) -> list[Document]:
        """Every document of `role`, of these kinds (default: all), in the order declared."""
        _expect_role(role)
        present = [s for s in self.sources if s.file not in self.missing and (kinds is None or s.kind in kinds)]
        return [document for source in present for document in read_source(source, self.folder, role=role)]


def load_sources(toml_path: Path, folder: Path) -> Sources:
    """The sources a TOML file declares as ``[[source]]`` tables with the fields of `Source`.

    A file that is not in `folder` is listed as missing. Raises InvalidInput for a declaration that does not fit, and
    for a text (a file or a document, by SHA-256) that is declared both for test and for tuning.
    """
    try:
        declared = tomllib.loads(toml_path.read_text(encoding="utf-8")).get("source", [])
        sources = tuple(Source(**entry) for entry in declared)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, TypeError) as error:
        expected = ", ".join(each.name for each in fields(Source))
        raise InvalidInput(f"{toml_path.name}: expected [[source]] tables with {expected}: {error}") from None
    if len({source.name for source in sources}) != len(sources):
        raise InvalidInput(f"{toml_path.name}: expected different names, got {[source.name for source in sources]}")
    names = list(dict.fromkeys(source.file for source in sources if source.file is not None))
    missing = tuple(name for name in names if not (folder / name).is_file())
    loaded = Sources(sources, folder, tuple(folder / name for name in names if name not in missing), missing)
    _refuse_mixing(loaded)
    return loaded


def _refuse_mixing(loaded: Sources) -> None:
    owners: dict[str, tuple[str, str]] = {}

    def claim(text: str, role: str, name: str) -> None:
        held, owner = owners.setdefault(_sha256(text), (role, name))
        if held != role:
            raise InvalidInput(
                f"expected a text to have one role, got {owner} for {held} and the same as {name} for {role}"
            )

    for source in loaded.sources:
        if source.file not in loaded.missing:
            text = "" if source.file is None else _read(loaded.folder / source.file)
            if source.file is not None:
                claim(text, source.role, source.name)
            for document in _all_documents(source, text):
                claim(document.text, document.role, document.name)


def texts_from_files(paths: Sequence[Path], *, role: Role = "test") -> list[Document]:
    """Documents of a user's own files, told by their content: WikiText, several dated essays, or one plain text.

    The kind is encyclopedia for WikiText, code for .py, docs for .md and .rst, and otherwise essays.
    """
    _expect_role(role)
    found: list[Document] = []
    for number, path in enumerate(paths):
        text, suffix = _read(path), path.suffix.lower()
        wikitext, essays = any(parts(HEADING, "\n" + text)), len(list(parts(DATELINE, text))) > 1
        read = "wikitext" if wikitext else "essays" if essays else "plain"
        kind = "encyclopedia" if wikitext else {".py": "code", ".md": "docs", ".rst": "docs"}.get(suffix, "essays")
        name = f"{path.name}#{number}" if sum(path.name == other.name for other in paths) > 1 else path.name
        found += _all_documents(Source(name, kind, role, read, "-"), text)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path.name}: expected a text file in UTF-8: {error}") from None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _expect_role(role: str) -> None:
    if role not in ROLES:
        raise InvalidInput(f"expected role {' or '.join(ROLES)}, got {role!r}")


@dataclass(frozen=True)
class Window:
    """The first `ids` of a document, of which `prefix` are context. `id` is a short hash of the ids."""

    id: str
    article: str
    kind: str
    ids: tuple[int, ...] = field(repr=False)
    prefix: int


class Windows(list[Window]):
    """The windows chosen; by kind, how many documents were looked at and how many of them reach the length."""

    def __init__(self, chosen: Iterable[Window], looked_at: dict[str, int], reaching: dict[str, int]):
        super().__init__(chosen)
        self.looked_at, self.reaching = looked_at, reaching


def windows(
    documents: Iterable[Document],
    encode: Callable[[str], Sequence[int]],
    prefix: int,
    continuation: int,
    count: int,
    kinds: Sequence[str] | None = None,
) -> Windows:
    """At most `count` windows, one a document, the kinds (default: those there are) taking turns while they last.

    Within a kind documents come in the order of the SHA-256 of their names, which depends on nothing else. Shorter
    documents, and those with the ids of one before, are passed over. Of a long document only the first 16 characters
    a token are encoded, if they are enough. `encode` must add no special tokens.
    """
    if min(prefix, continuation, count) < 1:
        raise InvalidInput(
            f"expected prefix, continuation and count of at least 1, got {prefix}, {continuation}, {count}"
        )
    given = sorted(documents, key=lambda document: _sha256(document.name))
    if len({document.name for document in given}) != len(given):
        raise InvalidInput("expected documents of different names, got some twice")
    chosen_kinds = (
        list(dict.fromkeys(kinds)) if kinds is not None else [k for k in KINDS if any(d.kind == k for d in given)]
    )
    length, seen = prefix + continuation, set[str]()
    queues: dict[str, list[Window]] = {kind: [] for kind in chosen_kinds}
    looked_at = dict.fromkeys(chosen_kinds, 0)
    for document in given:
        if document.kind in queues:
            looked_at[document.kind] += 1
            ids = _first_ids(document.text, encode, length)
            name = _sha256(",".join(map(str, ids)))[:16]
            if len(ids) == length and name not in seen:
                seen.add(name)
                queues[document.kind].append(Window(name, document.name, document.kind, ids, prefix))
    reaching = {kind: len(queue) for kind, queue in queues.items()}
    turns = (queue[i] for i in range(max(reaching.values(), default=0)) for queue in queues.values() if i < len(queue))
    return Windows([window for _, window in zip(range(count), turns, strict=False)], looked_at, reaching)


def _first_ids(text: str, encode: Callable[[str], Sequence[int]], length: int) -> tuple[int, ...]:
    ids = encode(text[: length * _CHARACTERS_A_TOKEN])
    if len(ids) < length < len(text) / _CHARACTERS_A_TOKEN:
        ids = encode(text)
    return tuple(int(i) for i in ids[:length])
