"""How a text falls into documents, each with its name: WikiText articles, essays, what comes with Python.

- WikiText (Merity et al., Pointer Sentinel Mixture Models, 2016): at lines `` = Title = `` between blank lines; the
  blank lines matter, since a formula may fill a line of its own that looks the same. Its Moses tokens are joined
  again, see `detokenise`.
- essays in one file: at datelines (`July 2010`, perhaps with `, rev. June 2011`) that start the file or follow the end
  of a sentence without a space, and are followed by a new sentence without a space, or by the end of the line. The
  frame of the web page they were taken from ("Want to start a startup? …") is dropped.
- the topics of `pydoc_data.topics`, and the .py files of the standard library, without tests, without what is
  generated, and without `encodings`, whose tables repeat each other. They depend on the version of Python.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

Texts = Iterator[tuple[str, str]]  # name within the source, text
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages"}
HEADING = re.compile(r"(?:(?<=\n)|\A)[ \t]*\n ?= (?!=)(\S.*?)(?<!=) = ?\n(?=[ \t]*(?:\n|\Z))")
_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
DATELINE = re.compile(
    rf"(?:\A|(?<=[.?!:)\"\]])\n*|(?<=\n\n)){_MONTH} [12]\d{{3}}"
    rf"(?:, rev\. {_MONTH} \d{{4}}| \(rev\. {_MONTH} \d{{4}}\))?"
    r"(?=\n|[A-Z(\"'“])"
)
_ANY_HEADING = re.compile(r"(?:(?<=\n)|\A)[ \t]*\n ?(?:= )+(?!= )(.*?\S)(?: =)+ ?\n(?=[ \t]*(?:\n|\Z))")
_PAGE_FRAME = re.compile(r"\s*Want to start a startup\?\s+Get funded by\s+Y Combinator\.\s*\Z")


def split_wikitext(text: str) -> Texts:
    """(number and title, detokenised article) of each top-level heading."""
    for number, (heading, part) in enumerate(parts(HEADING, "\n" + text)):
        yield f"{number:03d} {detokenise(heading[1])}", detokenise(part)


def split_essays(text: str) -> Texts:
    """(number and date, essay) of each dateline; the date belongs to the essay."""
    for number, (date, part) in enumerate(parts(DATELINE, text)):
        yield f"{number:03d} {date[0].strip()}", _PAGE_FRAME.sub("", part).strip() + "\n"


def parts(start: re.Pattern[str], text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Each match of `start` with the text from there to the next; nothing where other text comes first."""
    found = list(start.finditer(text))
    if found and not text[: found[0].start()].strip():
        ends = [match.start() for match in found[1:]] + [len(text)]
        yield from ((match, text[match.start() : end]) for match, end in zip(found, ends, strict=True))


def _topics(_: str) -> Texts:
    from pydoc_data.topics import topics

    yield from sorted(topics.items())


def _standard_library(_: str) -> Texts:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        inside = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(inside.parts) and not inside.name.startswith("_sysconfigdata"):
            try:
                yield inside.as_posix(), path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue


READERS: dict[str, Callable[[str], Texts]] = {
    "wikitext": split_wikitext,
    "essays": split_essays,
    "plain": lambda text: iter([("", text)]),
    "topics": _topics,
    "stdlib": _standard_library,
}

_LEFT, _RIGHT, _BOTH = set(",.;:!?)]}%’”"), set("([{$£€“‘"), {"@-@": "-", "@,@": ",", "@.@": ".", "/": "/", "°": "°"}
_ENDING = re.compile(r"'(?:s|S|t|re|ve|ll|d|m|em|n)|n't")


def detokenise(text: str) -> str:
    """WikiText's Moses tokens joined into running text, line by line; blank lines go, ``<unk>`` stays.

    ``@-@ @,@ @.@ / °`` join both neighbours; ``, . ; : ! ? % ) ] }`` and endings ('s, 't, 'll …) join the word before,
    ``( [ { $ £ €`` the word after; ``"`` opens and closes by turns within its line. A lone ``'`` closes what one has
    opened, is a possessive after s, and else opens. A heading (``= = Title = =`` between blank lines) loses its marks.
    Whether the original had spaces around a dash or a colon between digits ("3 : 30") cannot be told.
    """
    lines = _ANY_HEADING.sub(r"\n\1\n", "\n" + text).split("\n")
    return re.sub(r"\n{2,}", "\n", "\n".join(_join(line.split()) for line in lines)).lstrip("\n")


def _join(tokens: list[str]) -> str:
    out: list[str] = []
    open_quotes: set[str] = set()
    glue = True
    for i, token in enumerate(tokens):
        before, glue_next = tokens[i - 1] if i else "", False
        if token in _BOTH and i:
            glue, glue_next, token = True, True, _BOTH[token]
        elif token in _LEFT or _ENDING.fullmatch(token):
            glue = True
        elif token in _RIGHT:
            glue_next = True
        elif token in ('"', "'"):
            closes = token in open_quotes or (token == "'" and before.endswith("s"))
            (open_quotes.discard if closes else open_quotes.add)(token)
            glue, glue_next = glue or closes, not closes
        out.append(token if glue else f" {token}")
        glue = glue_next
    return "".join(out)
