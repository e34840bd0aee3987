"""The command line on a tiny model: what it writes, what it says, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvcellar
from clitools import Outcome, run, write_model

TEXT = "The cellar is cool and dark, and the wine in it keeps for years. " * 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def archive(model: Path, text: Path, tmp_path: Path) -> Path:
    assert run("save", "--model", model, "--text", text, tmp_path / "out.kvc").code == 0
    return tmp_path / "out.kvc"


def test_save_reports_the_recipe_and_the_real_size(model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.kvc"
    outcome = run("save", "--model", model, "--text", text, out)
    assert outcome.code == 0
    assert "recipe exact" in outcome.err
    info = run("info", out, "--json").json
    assert info["tokens"] == len(TEXT)
    assert info["file_bytes"] == out.stat().st_size
    assert f"{len(TEXT):,} in" in outcome.out


def test_save_as_json_says_how_long_it_took(model: Path, text: Path, tmp_path: Path) -> None:
    outcome = run("save", "--model", model, "--text", text, tmp_path / "out.kvc", "--json", "--max-tokens", 20)
    assert outcome.json["tokens"] == 20
    assert {"prefill_s", "save_s"} <= set(outcome.json)
    assert outcome.err == ""


def test_text_from_standard_input(model: Path, tmp_path: Path) -> None:
    assert run("save", "--model", model, "--text", "-", tmp_path / "o.kvc", "--json", stdin="abc").json["tokens"] == 3


def test_a_recipe_file(model: Path, text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "small.json"
    recipe.write_text(json.dumps({**kvcellar.recipe.EXACT.to_json(), "block": 64, "name": "small-blocks"}))
    outcome = run("save", "--model", model, "--text", text, tmp_path / "o.kvc", "--recipe", recipe, "--json")
    assert outcome.json["recipe"] == "small-blocks"
    assert outcome.json["sealed_blocks"] == len(TEXT) // 64


def test_generate_goes_on_as_one_run_over_the_whole_text_would(archive: Path, model: Path) -> None:
    from kvcellar.frontends.cli.generate import generate
    from kvcellar.frontends.cli.models import LocalModel, empty_cache

    restored = run("generate", archive, "--prompt", " And", "--max-new-tokens", 12, "--json").json
    local = LocalModel(model)
    ids = local.encode(TEXT) + local.encode(" And")
    assert restored["restored_tokens"] == len(TEXT)
    assert restored["token_ids"] == generate(local, ids, empty_cache(), 12, 0.0, 0, stream=False)


def test_generate_prints_the_text_alone_on_stdout(archive: Path) -> None:
    shown = run("generate", archive, "--prompt", " And", "--max-new-tokens", 12)
    expected = run("generate", archive, "--prompt", " And", "--max-new-tokens", 12, "--json").json["text"]
    assert shown.out.strip() == expected.strip()
    assert f"restored {len(TEXT):,} of" in shown.err


def test_generate_without_a_prompt_goes_on_at_the_end(archive: Path) -> None:
    outcome = run("generate", archive, "--max-new-tokens", 3, "--json").json
    assert outcome["restored_tokens"] == len(TEXT) - 1
    assert len(outcome["token_ids"]) == 3


def test_sampling_repeats_with_its_seed(archive: Path) -> None:
    words = ("generate", archive, "--temperature", 2.0, "--max-new-tokens", 24, "--json", "--seed")
    first, again, other = (run(*words, seed).json["token_ids"] for seed in (1, 1, 2))
    assert first == again != other


def test_generate_append_keeps_what_was_said(archive: Path) -> None:
    said = run("generate", archive, "--prompt", " And", "--max-new-tokens", 12, "--append", "--json").json
    info = run("info", archive, "--json").json
    assert info["tokens"] == len(TEXT) + 4 + 11  # the last new token was never run through the model
    with kvcellar.open(archive) as opened:
        assert opened.tokens[-11:].tolist() == said["token_ids"][:11]
    assert run("verify", archive).code == 0


def test_append_equals_the_cache_of_the_whole_text(archive: Path, model: Path, tmp_path: Path) -> None:
    more = tmp_path / "more.txt"
    more.write_text(" More of it.")
    assert run("append", archive, "--text", more, "--json").json["new_tokens"] == 12
    whole = tmp_path / "whole.txt"
    whole.write_text(TEXT + " More of it.")
    run("save", "--model", model, "--text", whole, tmp_path / "whole.kvc")
    answers = [
        run("generate", path, "--max-new-tokens", 10, "--json").json["token_ids"]
        for path in (archive, tmp_path / "whole.kvc")
    ]
    assert answers[0] == answers[1]


def test_verify_names_the_damaged_part(archive: Path) -> None:
    assert run("verify", archive, "--json").json["ok"] is True
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    outcome = run("verify", archive)
    assert outcome.code == 4
    assert "block 0" in outcome.out
    assert run("verify", archive, "--json").json["problems"][0]["part"].startswith("block 0")


def test_another_model_is_refused(archive: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", seed=1)
    outcome = run("generate", archive, "--model", other)
    assert outcome.code == 6
    assert "belongs to another model" in outcome.err


def test_a_changed_model_is_fingerprinted_again(archive: Path, model: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    assert run("generate", archive, "--model", copy, "--max-new-tokens", 1).code == 0
    write_model(copy, seed=1)
    assert run("generate", archive, "--model", copy, "--max-new-tokens", 1).code == 6


def test_namespaces_do_not_see_each_other(model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.kvc"
    assert run("save", "--model", model, "--text", text, out, "--namespace", "tenant").code == 0
    hidden, missing = run("info", out), run("info", tmp_path / "none.kvc")
    assert (hidden.code, missing.code) == (3, 3)
    assert hidden.err.replace("out.kvc", "none.kvc") == missing.err
    assert run("info", out, "--namespace", "tenant").code == 0


def _outcomes(tmp_path: Path, model: Path, text: Path) -> dict[str, tuple[Outcome, int]]:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    save = ("save", "--model", model, "--text")
    return {
        "no archive": (run("info", tmp_path / "none.kvc"), 3),
        "a folder": (run("verify", tmp_path), 2),
        "foreign file": (run("info", text), 4),
        "never over a foreign file": (run(*save, text, text), 4),
        "no such folder": (run(*save, text, tmp_path / "no" / "o.kvc"), 8),
        "no text": (run(*save, empty, tmp_path / "o.kvc"), 2),
        "binary text": (run(*save, binary, tmp_path / "o.kvc"), 2),
        "no text file": (run(*save, tmp_path / "none.txt", tmp_path / "o.kvc"), 2),
        "no model in the folder": (run("save", "--model", tmp_path, "--text", text, tmp_path / "o.kvc"), 2),
        "unknown recipe": (run(*save, text, tmp_path / "o.kvc", "--recipe", "magic"), 2),
        "recipe file missing": (run(*save, text, tmp_path / "o.kvc", "--recipe", tmp_path / "no.json"), 2),
        "unknown option": (run("info", "--nonsense", text), 2),
        "unknown command": (run("nonsense"), 2),
    }


def test_bad_input_is_a_message_and_an_exit_code(tmp_path: Path, model: Path, text: Path) -> None:
    before = text.read_bytes()
    for what, (outcome, code) in _outcomes(tmp_path, model, text).items():
        assert outcome.code == code, (what, outcome)
        assert outcome.err.strip(), what
        assert "Traceback" not in outcome.err, what
    assert text.read_bytes() == before
    assert not list(tmp_path.glob("*.kvc")), "nothing half-made stays behind"


def test_an_error_as_json(tmp_path: Path) -> None:
    outcome = run("info", tmp_path / "none.kvc", "--json")
    assert outcome.code == 3
    assert outcome.json["error"]["type"] == "ArchiveNotFound"


def test_too_long_for_the_model(archive: Path) -> None:
    outcome = run("generate", archive, "--max-new-tokens", 2000)
    assert outcome.code == 2
    assert "positions for 2,048" in outcome.err
