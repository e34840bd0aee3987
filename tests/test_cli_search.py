"""`kvcellar search`, and `generate` from what it finds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvcellar
from archives import SMALL
from clitools import run, write_model
from kvcellar.frontends.cli import COMMANDS
from kvcellar.frontends.search import search, spans_for

TEXT = "The cellar is cool.\nA cellar keeps wine; the attic keeps dust. " * 3 + "The end of it."


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A text of one token per byte, saved by the command line, so that its model's folder is known."""
    (tmp_path / "text.txt").write_text(TEXT)
    model = write_model(tmp_path / "model")
    assert run("save", "--model", model, "--text", tmp_path / "text.txt", tmp_path / "a.kvc").code == 0
    return tmp_path / "a.kvc"


def places(phrase: str) -> list[int]:
    return [found.start() for found in re.finditer(re.escape(phrase), TEXT)]


def test_search_prints_position_score_and_context(archive: Path) -> None:
    shown = run("search", archive, "attic", "--context", 4)
    assert (shown.code, shown.err) == (0, "")
    head, *lines = shown.out.splitlines()
    assert head.startswith(f"3 hits of 5 or 6 tokens in {len(TEXT):,} (")
    starts = [start - 1 for start in places("attic")]  # the reading after a space is longer
    assert [line.split()[:2] for line in lines] == [[f"{start}–{start + 5}", "1.00"] for start in starts]
    assert all(" the« attic» kee" in line for line in lines)


def test_search_as_json(archive: Path) -> None:
    result = run("search", archive, "cellar", "--context", 5, "--limit", 4, "--json").json
    assert (result["found"], len(result["hits"]), result["tokens"]) == (6, 4, len(TEXT))
    assert result["phrase_tokens"] == [6, 7]
    for hit, start in zip(result["hits"], places(" cellar"), strict=False):
        assert (hit["start"], hit["stop"], hit["score"]) == (start, start + 7, 1.0)
        before, after = TEXT[max(0, start - 5) : start], TEXT[start + 7 : start + 12]
        assert hit["text"] == {"before": before, "match": " cellar", "after": after}
        assert len(hit["token_ids"]["match"]) == 7
    again = run("search", archive, "--ids", ",".join(map(str, result["hits"][0]["token_ids"]["match"])), "--json").json
    assert [hit["start"] for hit in again["hits"]] == places(" cellar")
    assert again["hits"][0]["text"] is None


def test_a_fuzzy_search_sorts_by_score(archive: Path) -> None:
    assert run("search", archive, "the attis").code == 3
    result = run("search", archive, "the attis", "--fuzzy", 6, "--json").json
    assert [hit["text"]["match"] for hit in result["hits"]] == [" the attic"] * 3
    assert {hit["score"] for hit in result["hits"]} == {0.9}
    wider = run("search", archive, "the attis", "--fuzzy", 4, "--limit", 99, "--json").json["hits"]
    assert len(wider) > 3
    assert [hit["score"] for hit in wider] == sorted((hit["score"] for hit in wider), reverse=True)


def test_a_reading_with_fewer_tokens_than_must_agree_does_not_count(archive: Path) -> None:
    hits = run("search", archive, "cellar", "--fuzzy", 7, "--json").json["hits"]
    assert [hit["start"] for hit in hits] == places(" cellar")


def test_search_without_a_tokenizer(make_cache: Callable, make_ids: Callable, saved: Callable) -> None:
    path, ids = saved(make_cache(), recipe=SMALL), make_ids(40)
    shown = run("search", path, "--tokens", " ".join(map(str, ids[10:13])), "--context", 1)
    assert shown.code == 0
    assert f"10–12  1.00  {ids[9]} «{ids[10]} {ids[11]} {ids[12]}» {ids[13]}" in shown.out
    assert run("search", path, "text").code == 2
    assert "--model" in run("search", path, "text").err


def test_more_hits_than_are_shown_are_counted(archive: Path) -> None:
    lines = run("search", archive, "e", "--limit", 2).out.splitlines()
    assert len(lines) == 4
    assert lines[-1] == f"… and {len(places('e')) - 2} more; --limit shows them"


def test_no_hit_is_exit_code_3(archive: Path) -> None:
    shown = run("search", archive, "vineyard", "--json")
    assert (shown.code, shown.json["found"], shown.json["hits"]) == (3, 0, [])
    assert run("search", archive.parent / "none.kvc", "x").code == 3
    assert run("search", archive, "cellar", "--namespace", "other").code == 3


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("cellar", "--ids", "1"),
        ("--ids", "x"),
        ("--ids", ""),
        ("",),
        ("cellar", "--fuzzy", "0"),
        ("cellar", "--fuzzy", "8"),
        ("cellar", "--model", "."),
        ("cellar", "--limit", "0"),
    ],
)
def test_search_refuses_what_cannot_be_meant(archive: Path, words: tuple[str, ...]) -> None:
    outcome = run("search", archive, *words)
    assert outcome.code == 2, outcome
    assert outcome.err.strip()


def test_a_stored_text_cannot_command_the_terminal(make_cache: Callable, saved: Callable, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = write_model(tmp_path / "model")
    ids = AutoTokenizer.from_pretrained(model)("a\x1b[2Jb\r\nc\td\u202e").input_ids
    shown = run("search", saved(make_cache(tokens=len(ids)), tokens=ids), "b", "--model", model)
    assert shown.code == 0
    assert "a�[2J«b»�↵c d�" in shown.out


def test_a_search_by_ids_loads_neither_torch_nor_a_compiler(
    make_cache: Callable, make_ids: Callable, saved: Callable
) -> None:
    words = ["search", str(saved(make_cache())), "--ids", ",".join(map(str, make_ids(3)))]
    code = f"""
import sys
from kvcellar.frontends.cli import main
sys.argv = ["kvcellar", *{words!r}]
try:
    main()
except SystemExit as stop:
    print("exit", stop.code, sorted({{"torch", "transformers", "numba"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("exit 0 []\n"), done.stderr


def test_generate_from_the_places_of_a_phrase(archive: Path) -> None:
    from kvcellar.frontends.cli.generate import generate, opened

    words = ("generate", archive, "--prompt", " In the attic", "--max-new-tokens", 8)
    found = run(*words, "--from-search", "attic", "--hits", 2, "--context", 5, "--json")
    with opened(str(archive), None, "", "r") as (stored, local):
        hits = search(stored, "attic", tokenizer=local.tokenizer, limit=2)
        chosen = [i for span in spans_for(hits, len(TEXT), context=5) for i in span]
        assert len(chosen) == 4 + 2 * 16 + 32
        ids = stored.tokens.tolist() + local.encode(" In the attic", continues=True)
        expected = generate(local, ids, stored.restore(positions=chosen).cache, 8, 0.0, 0, stream=False)
    assert (found.code, found.json["token_ids"]) == (0, expected)
    assert found.json["restored_tokens"] == len(chosen)
    assert found.json["stored_tokens"] == len(TEXT)
    assert found.json["token_ids"] != run(*words, "--json").json["token_ids"]


def test_generate_from_a_search_refuses_what_cannot_be_meant(archive: Path) -> None:
    before = archive.read_bytes()
    for words, said in (
        (("--from-search", "attic"), "needs --prompt"),
        (("--from-search", "attic", "--prompt", " x", "--append"), "--append"),
        (("--from-search", "vineyard", "--prompt", " x"), "does not stand in"),
    ):
        outcome = run("generate", archive, *words)
        assert outcome.code == 2
        assert said in outcome.err
    assert archive.read_bytes() == before
    with kvcellar.open(archive) as stored:
        assert len(stored) == len(TEXT)


def test_help_teaches_with_an_example() -> None:
    assert "search" in COMMANDS
    shown = run("search", "--help")
    assert shown.code == 0
    assert "  kvcellar search out.kvc " in shown.out
    assert "  kvcellar generate out.kvc --from-search " in run("generate", "--help").out
