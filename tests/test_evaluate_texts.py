"""Texts: joined tokens, documents of each reader, the wall between test and tuning, windows that never change."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest

from kvcellar.errors import InvalidInput
from kvcellar.evaluate.documents import detokenise, split_essays, split_wikitext
from kvcellar.evaluate.texts import (
    Document,
    Source,
    load_sources,
    read_source,
    role_of,
    standard_library,
    texts_from_files,
    windows,
)

TEXTS_TOML = Path(__file__).parent.parent / "benchmarks" / "texts.toml"
WIKITEXT = """
= Alpha ( album ) =

Alpha is an album .

= = Music = =

It has a width of <unk>

= 1 <unk> and C =
1 <unk> .
= 2 =


= Beta =

Beta ends .
""".replace("\n", " \n ")
ESSAYS = """July 2010Alpha begins in
May 2009, as was said.  It ends in June 1998.

Want to start a startup?  Get funded by
Y Combinator.




November 2009, rev. May 2010(A talk.)
Beta said "so."April 2001

Gamma.
"""


def encode(text: str) -> list[int]:
    return [int.from_bytes(hashlib.sha256(word.encode()).digest()[:2]) for word in text.split()]


def document(name: str, words: int = 20, kind: str = "docs") -> Document:
    return Document(name, kind, "test", " ".join(f"{name}{i}" for i in range(words)))


def entry(name: str, role: str, read: str = "plain") -> str:
    return f'name = "{name}", kind = "docs", role = "{role}", read = "{read}", file = "{name}.txt"'


def declare(folder: Path, *entries: str) -> Path:
    path = folder / "texts.toml"
    path.write_text("\n".join("[[source]]\n" + entry.replace(", ", "\n") for entry in entries))
    return path


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("a guest @-@ starring role", "a guest-starring role"),
        ("1 @,@ 234 and 9 @.@ 87 million", "1,234 and 9.87 million"),
        ("film , television ; and : that .", "film, television; and: that."),
        ("Alpha ( album ) [ sic ] is", "Alpha (album) [sic] is"),
        ('role as " Craig " in " Teddy \'s Story " of', 'role as "Craig" in "Teddy\'s Story" of'),
        ('( " so " ) .', '("so").'),
        ("They Don 't and we 've", "They Don't and we've"),
        ("the soldiers ' camp", "the soldiers' camp"),
        ("he said ' go there ' again", "he said 'go there' again"),
        ("US $ 5 or 7 %", "US $5 or 7%"),
        ("9 km / h at 25 ° C", "9 km/h at 25°C"),
        ("<unk> – <unk> is = 3", "<unk> – <unk> is = 3"),
        (' one " a \n two " b " \n', 'one "a\ntwo "b"\n'),
        ("x \n \n = = Early life = = \n \n y \n", "x\nEarly life\ny\n"),
        ("x \n = 1 and C = \n y", "x\n= 1 and C =\ny"),
        ("x \n \n = 1 and C = \n y", "x\n= 1 and C =\ny"),
        ("", ""),
    ],
)
def test_tokens_are_joined(tokens: str, text: str) -> None:
    assert detokenise(tokens) == text


def test_wikitext_falls_into_articles() -> None:
    assert list(split_wikitext(WIKITEXT)) == [
        (
            "000 Alpha (album)",
            "Alpha (album)\nAlpha is an album.\nMusic\nIt has a width of <unk>\n= 1 <unk> and C =\n1 <unk>.\n= 2 =\n",
        ),
        ("001 Beta", "Beta\nBeta ends.\n"),
    ]


def test_essays_fall_apart_at_datelines() -> None:
    assert list(split_essays(ESSAYS)) == [
        ("000 July 2010", "July 2010Alpha begins in\nMay 2009, as was said.  It ends in June 1998.\n"),
        ("001 November 2009, rev. May 2010", 'November 2009, rev. May 2010(A talk.)\nBeta said "so."\n'),
        ("002 April 2001", "April 2001\n\nGamma.\n"),
    ]


def test_texts_toml_declares_the_roles_of_the_protocol(tmp_path: Path) -> None:
    declared = tomllib.loads(TEXTS_TOML.read_text())["source"]
    assert {(s.get("file", s["read"]), s["role"]) for s in declared} == {
        ("wt2_test.txt", "test"),
        ("essays.txt", "test"),
        ("wt2_valid.txt", "tune"),
        ("topics", "split"),
        ("stdlib", "split"),
    }
    found = load_sources(TEXTS_TOML, tmp_path)
    assert (found.missing, found.files) == (("wt2_test.txt", "essays.txt", "wt2_valid.txt"), ())
    assert {d.kind for d in found.documents("test")} == {"docs", "code"}


def test_roles_never_mix(tmp_path: Path) -> None:
    (tmp_path / "wt2_test.txt").write_text(WIKITEXT)
    (tmp_path / "wt2_valid.txt").write_text(WIKITEXT.replace("Alpha", "Gamma").replace("Beta", "Delta"))
    (tmp_path / "essays.txt").write_text(ESSAYS)
    found = load_sources(TEXTS_TOML, tmp_path)
    test, tune = found.documents("test"), found.documents("tune")
    assert not {d.name for d in test} & {d.name for d in tune}
    assert not {d.text for d in test} & {d.text for d in tune}
    assert ({d.role for d in test}, {d.role for d in tune}) == ({"test"}, {"tune"})
    assert {d.name.partition("/")[0] for d in test} == {"wikitext-2-test", "essays", "topics", "stdlib"}
    assert {d.name.partition("/")[0] for d in tune} == {"wikitext-2-valid", "topics", "stdlib"}
    assert {d.kind for d in found.documents("test", ["essays"])} == {"essays"}
    assert found.files == tuple(tmp_path / name for name in ("wt2_test.txt", "essays.txt", "wt2_valid.txt"))


def test_standard_library_is_split_in_halves_that_do_not_move() -> None:
    test, tune = standard_library("test"), standard_library("tune")
    for kind in ("docs", "code"):
        a, b = (sum(d.kind == kind for d in half) for half in (test, tune))
        assert 0.3 < a / (a + b) < 0.7
    folders = {part for d in test + tune if d.kind == "code" for part in d.name.split("/")[1:-1]}
    assert "json" in folders
    assert not folders & {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data"}
    assert (role_of("assert"), role_of("json/decoder.py")) == ("test", "tune")
    assert len(test + tune) == len({d.text for d in test + tune})


def test_a_loader_gives_its_role_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    source = Source("a", "docs", "tune", "plain", "a.txt")
    assert read_source(source, tmp_path, role="test") == []
    assert read_source(source, tmp_path, role="tune") == [Document("a", "docs", "tune", "some text")]
    with pytest.raises(InvalidInput, match="test or tune, got 'split'"):
        standard_library("split")  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["tune", "split"])
def test_the_same_file_in_two_roles_is_refused(tmp_path: Path, role: str) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the same text")
    entries = [entry("a", "test"), entry("b", role)]
    with pytest.raises(InvalidInput, match=f"a for test and the same as b for {role}"):
        load_sources(declare(tmp_path, *entries), tmp_path)
    assert len(load_sources(declare(tmp_path, entries[0]), tmp_path).documents("test")) == 1


def test_the_same_article_in_two_roles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WIKITEXT)
    (tmp_path / "b.txt").write_text(WIKITEXT.replace("Alpha", "Gamma"))
    entries = [entry("a", "test", "wikitext"), entry("b", "tune", "wikitext")]
    with pytest.raises(InvalidInput, match="a/001 Beta for test and the same as b/001 Beta for tune"):
        load_sources(declare(tmp_path, *entries), tmp_path)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ('name = "a", kind = "novel", role = "test", read = "plain", file = "a"', "kind: expected one of"),
        (
            'name = "a", kind = "docs", role = "both", read = "plain", file = "a"',
            "role: expected one of test, tune, split",
        ),
        ('name = "a", kind = "docs", role = "test", read = "pdf", file = "a"', "read: expected one of"),
        ('name = "a", kind = "docs", role = "test", read = "plain"', "expected a file"),
        ('name = "a", kind = "docs", role = "split", read = "topics", file = "a"', "expected a file unless"),
        ('name = "a", kind = "docs", role = "test", read = "plain", file = "/etc/a"', "bare file name"),
        ('name = "a", kind = "docs", role = "test", read = "plain", file = ".."', "bare file name"),
        ('name = "a", kind = "docs", role = "test", read = "plain", file = "a", size = 3', "size"),
        ('name = "a"', "expected .*source"),
        ("name = ", "texts.toml: expected"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(tmp_path: Path, declared: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        load_sources(declare(tmp_path, declared), tmp_path)


def test_files_that_are_not_what_was_declared_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no heading")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    for name, read, message in (("a", "wikitext", "expected wikitext text"), ("b", "plain", "UTF-8")):
        with pytest.raises(InvalidInput, match=message):
            load_sources(declare(tmp_path, entry(name, "test", read)), tmp_path)


def test_windows_are_the_beginnings_of_documents() -> None:
    found = windows([document("a", 30)], encode, 12, 8, 5)
    ids = tuple(encode(document("a", 30).text)[:20])
    assert [(w.article, w.kind, w.prefix, w.ids, len(w.id)) for w in found] == [("a", "docs", 12, ids, 16)]


def test_windows_depend_on_names_alone() -> None:
    documents = [document(f"{kind} {i}", kind=kind) for i in range(20) for kind in ("docs", "code")]
    found = windows(documents, encode, 12, 8, 6)
    assert windows(documents[::-1], encode, 12, 8, 6) == found
    assert windows(documents, encode, 12, 8, 3) == found[:3]
    docs = sorted((f"docs {i}" for i in range(20)), key=lambda name: hashlib.sha256(name.encode()).digest())
    assert [w.article for w in found[::2]] == docs[:3]


def test_kinds_take_turns_while_they_last() -> None:
    documents = [document(f"d{i}") for i in range(9)] + [document(f"c{i}", kind="code") for i in range(2)]
    assert [w.kind for w in windows(documents, encode, 12, 8, 7)] == ["docs", "code", "docs", "code", *["docs"] * 3]
    assert {w.kind for w in windows(documents, encode, 12, 8, 7, ["code"])} == {"code"}
    assert windows(documents, encode, 12, 8, 7, ["essays"]) == []


def test_short_and_repeated_documents_are_passed_over_and_counted() -> None:
    same = document("a")
    documents = [
        same,
        Document("b", "docs", "test", same.text),
        document("c", 19),
        document("d"),
        document("e", 3, "code"),
    ]
    found = windows(documents, encode, 12, 8, 9)
    assert {w.article for w in found} in ({"a", "d"}, {"b", "d"})
    assert found.looked_at == {"docs": 4, "code": 1}
    assert found.reaching == {"docs": 2, "code": 0}


def test_only_the_beginning_of_a_long_document_is_encoded() -> None:
    given: list[int] = []
    long, sparse = document("a", 10_000), Document("b", "docs", "test", ("x" * 100 + " ") * 30)
    assert len(windows([long], lambda text: given.append(len(text)) or encode(text), 12, 8, 1)) == 1
    assert given == [20 * 16]
    assert len(windows([sparse], encode, 12, 8, 1)) == 1  # few tokens a character: read on


def test_windows_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidInput, match="at least 1, got 0, 8, 5"):
        windows([document("a")], encode, 0, 8, 5)
    with pytest.raises(InvalidInput, match="different names"):
        windows([document("a"), document("a")], encode, 12, 8, 5)


def test_texts_of_a_user_are_told_by_their_content(tmp_path: Path) -> None:
    contents = {"w.txt": WIKITEXT, "e.txt": ESSAYS, "p.txt": "Plain text of May 2009.", "c.py": "x = 1", "r.md": "# R"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    found = texts_from_files([tmp_path / name for name in contents])
    assert [(d.name, d.kind) for d in found] == [
        ("w.txt/000 Alpha (album)", "encyclopedia"),
        ("w.txt/001 Beta", "encyclopedia"),
        ("e.txt/000 July 2010", "essays"),
        ("e.txt/001 November 2009, rev. May 2010", "essays"),
        ("e.txt/002 April 2001", "essays"),
        ("p.txt", "essays"),
        ("c.py", "code"),
        ("r.md", "docs"),
    ]
    assert {d.role for d in found} == {"test"}
    twins = [tmp_path / folder / "a.txt" for folder in ("x", "y")]
    for path in twins:
        path.parent.mkdir()
        path.write_text(path.parent.name)
    assert [d.name for d in texts_from_files(twins)] == ["a.txt#0", "a.txt#1"]


def test_files_of_a_user_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    for name in ("nothing", "empty"):
        with pytest.raises(InvalidInput, match=rf"{name}\.txt"):
            texts_from_files([tmp_path / f"{name}.txt"])
