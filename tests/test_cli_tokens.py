"""The command line on archives of recipe `tokens`."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from clitools import run, write_model

TEXT = "the cellar keeps what the cellar keeps, and the cat sleeps on the cellar's steps. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def log(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text(TEXT)
    done = run("save", tmp_path / "a.kvc", "--model", model, "--text", tmp_path / "text.txt", "--recipe", "tokens")
    assert done.code == 0, done.err
    assert "token ids alone" in done.out
    return tmp_path / "a.kvc"


def test_a_log_is_saved_shown_grown_and_generated_from(log: Path, model: Path) -> None:
    told = run("info", log, "--json").json
    assert (told["recipe"], told["tokens"], told["coded_bytes"]) == ("tokens", len(TEXT), None)
    assert told["file_bytes"] == log.stat().st_size
    assert "bits/token" in run("info", log).out
    assert "every part is sound" in run("verify", log).out
    made = run("generate", log, "--max-new-tokens", "4", "--json").json
    assert made["restored_tokens"] == len(TEXT) - 1
    more = log.with_name("more.txt")
    more.write_text(" And so on.")
    assert run("append", log, "--text", more, "--json").json["tokens"] == len(TEXT) + 11
    told = run("generate", log, "--max-new-tokens", "4")
    assert "replayed: bit by bit" in told.err or "replayed: about" in told.err
    found = run("find", log.parent, "--model", model, TEXT, "--json").json
    assert Path(found["archive"]).name == "a.kvc"
    assert run("search", log, "cellar", "--json").json["found"] == 9
    assert run("compact", log).code == 0


def test_a_log_becomes_a_safetensors_file(log: Path, model: Path) -> None:
    out = log.with_name("x.safetensors")
    done = run("restore", log, "--out", out, "--positions", "0:50", "--json")
    assert done.code == 0, done.err
    assert (done.json["recipe"], done.json["tokens"]) == ("tokens", 50)
    with safe_open(out, "pt") as tensors:
        assert tensors.get_tensor("layers.0.keys").shape == (2, 50, 16)
        assert '"tokens/1"' in tensors.metadata()["recipe"]
    assert sorted(path.name for path in log.parent.iterdir() if path.name[0] != ".") == [
        "a.kvc",
        "home",
        "text.txt",
        "x.safetensors",
    ]


def test_options_of_the_coded_log(log: Path, model: Path) -> None:
    text = log.with_name("text.txt")
    save = ("save", log, "--model", model, "--text", text)
    assert run(*save, "--recipe", "exact", "--model-coded").code == 2
    assert run(*save, "--recipe", "tokens", "--keep-ids").code == 2
    done = run(*save, "--recipe", "tokens", "--model-coded", "--keep-ids", "--max-tokens", "8", "--json")
    assert done.code == 0, done.err
    assert run("info", log, "--json").json["ids_bytes"] > 0


def test_what_a_log_is_not_is_said(log: Path) -> None:
    for words in (("recompress", log, log.with_name("b.kvc"), "--recipe", "exact"), ("repair", log)):
        done = run(*words)
        assert done.code == 4
        assert "token log" in done.err
    log.write_bytes(log.read_bytes()[:-9])
    for words in (("verify", log), ("info", log), ("generate", log)):
        assert run(*words).code == 4
