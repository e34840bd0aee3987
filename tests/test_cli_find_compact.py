"""`kvcellar find` and `compact`: what they say, what they change, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kvcellar
from archives import SMALL, Pairs, contents_at, prefix, same
from clitools import run

TOKENS = 40


@pytest.fixture
def cache(make_cache: Callable) -> Pairs:
    return make_cache(tokens=TOKENS)


@pytest.fixture
def archive(cache: Pairs, saved: Callable) -> Path:
    return saved(cache, recipe=SMALL)


def test_compact_drops_superseded_bytes_and_no_value(cache: Pairs, make_ids: Callable, saved: Callable) -> None:
    path = saved(prefix(cache, 20), make_ids(20), recipe=SMALL)
    with kvcellar.open(path, identity="m", mode="a") as opened:
        for stop in range(21, TOKENS):
            opened.append(prefix(cache, stop), make_ids(stop))
    before, held = path.stat().st_size, contents_at(path)
    result = run("compact", path, "--json").json
    assert result["bytes_before"] == before > result["file_bytes"] == path.stat().st_size
    assert same(contents_at(path), held)
    said = run("compact", path)
    assert said.code == 0
    assert f"{path.stat().st_size:,} bytes, 0 fewer" in said.out


def test_compact_refuses_what_is_no_archive_or_locked(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.kvc").write_text("mine, and not an archive")
    assert run("compact", tmp_path / "text.kvc").code == 4
    assert run("compact", tmp_path / "none.kvc").code == 3
    assert run("compact", archive, "--namespace", "tenant").code == 3
    monkeypatch.setattr("kvcellar.store.local.LocalStore.__init__.__kwdefaults__", {"lock_seconds": 0.1})
    with kvcellar.open(archive, mode="a"):
        assert run("compact", archive).code == 9
    assert (tmp_path / "text.kvc").read_text() == "mine, and not an archive"


@pytest.fixture
def folder(cache: Pairs, make_ids: Callable, saved: Callable, tmp_path: Path) -> Path:
    """Archives of the first 10 and 30 tokens, one that parts at token 20, and others that must not count."""
    ids = make_ids(TOKENS)
    for tokens in (10, 30):
        saved(prefix(cache, tokens), ids[:tokens], f"first{tokens}.kvc")
    saved(cache, [*ids[:20], *(i + 1 for i in ids[20:])], "parts.kvc")
    saved(cache, ids, "other.kvc", identity="other")
    saved(cache, ids, "tenant.kvc", namespace="tenant")
    (tmp_path / "notes.txt").write_text("no archive")
    return tmp_path


def listed(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def test_find_names_the_longest_prefix_and_why_it_ends(folder: Path, make_ids: Callable) -> None:
    found = run("find", folder, "--identity", "m", "--ids", listed(make_ids(TOKENS)))
    assert found.code == 0
    assert str(folder / "first30.kvc") in found.out
    assert "30 of 40 tokens" in found.out
    assert "token 30: the archive ends here" in found.out


@pytest.mark.parametrize(
    ("change", "name", "matched", "reason"),
    [
        (lambda ids: ids, "first30.kvc", 30, "token 30: the archive ends here"),
        (lambda ids: ids[:15], "first30.kvc", 15, "token 15: the prompt ends here, the archive goes on to 30"),
        (lambda ids: [*ids[:20], *(i + 1 for i in ids[20:30]), 7], "parts.kvc", 30, "token 30: stored"),
        (lambda ids: [*ids[:25], 7], "first30.kvc", 25, "prompt 7"),
    ],
)
def test_find_as_json(
    folder: Path, make_ids: Callable, change: Callable[[list[int]], list[int]], name: str, matched: int, reason: str
) -> None:
    prompt = change(make_ids(TOKENS))
    found = run("find", folder, "--identity", "m", "--ids", "-", "--json", stdin=str(prompt))
    assert found.code == 0
    assert Path(found.json["archive"]).name == name
    assert found.json["matched"] == matched
    assert found.json["prompt_tokens"] == len(prompt)
    assert reason in found.json["reason"]
    assert f"token {matched}" in found.json["reason"]


def test_find_sees_one_identity_and_one_namespace(folder: Path, make_ids: Callable) -> None:
    ids = listed(make_ids(TOKENS))
    found = run("find", folder, "--identity", "other", "--ids", ids, "--json").json
    assert (Path(found["archive"]).name, found["matched"]) == ("other.kvc", TOKENS)
    found = run("find", folder, "--identity", "m", "--ids", ids, "--namespace", "tenant", "--json").json
    assert (Path(found["archive"]).name, found["matched"]) == ("tenant.kvc", TOKENS)


def test_find_without_a_match_is_exit_code_3(folder: Path, make_ids: Callable) -> None:
    wrong = listed([make_ids(1)[0] + 1, *make_ids(TOKENS)[1:]])
    found = run("find", folder, "--identity", "m", "--ids", wrong, "--json")
    assert (found.code, found.json["archive"], found.json["matched"]) == (3, None, 0)
    assert f"stored {make_ids(1)[0]}, prompt {make_ids(1)[0] + 1}" in found.json["reason"]
    nobody = run("find", folder, "--identity", "nobody", "--ids", wrong)
    assert nobody.code == 3
    assert "none" in nobody.out


def test_find_passes_over_damage_and_says_so(folder: Path, make_ids: Callable) -> None:
    data = (folder / "first30.kvc").read_bytes()
    (folder / "first30.kvc").write_bytes(data[:-40])
    ids = listed(make_ids(TOKENS))
    found = run("find", folder, "--identity", "m", "--ids", ids)
    assert found.code == 0
    assert "parts.kvc" in found.out
    assert "passed over first30.kvc" in found.err
    (remark,) = run("find", folder, "--identity", "m", "--ids", ids, "--json").json["passed_over"]
    assert "first30.kvc" in remark


@pytest.mark.parametrize(
    "words",
    [
        ("--ids", "1,2"),
        ("--identity", "m"),
        ("--identity", "m", "text"),
        ("--identity", "m", "--text", "-"),
        ("--identity", "m", "--ids", "1,2", "text"),
        ("--identity", "m", "--ids", "1,2", "--model", "."),
        *(("--identity", "m", "--ids", ids) for ids in ("", "a", "-1", "1.5", "1;2", "4294967296", "99999999999999")),
        ("--identity", "", "--ids", "1"),
    ],
)
def test_find_refuses_what_cannot_be_meant(folder: Path, words: tuple[str, ...]) -> None:
    outcome = run("find", folder, *words)
    assert outcome.code == 2, outcome
    assert outcome.err.strip()


def test_find_in_no_folder(tmp_path: Path) -> None:
    assert run("find", tmp_path / "none", "--identity", "m", "--ids", "1").code == 3
