"""`kvcellar restore`: what it writes, what it says, and what it refuses; with a model, together with `find`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvcellar
from archives import SMALL, Pairs, bits
from clitools import run, write_model
from kvcellar.cache import KVCache, LayerKV, no_layer
from kvcellar.frontends.cli import COMMANDS
from kvcellar.recipe import EXACT

TOKENS = 40


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))


@pytest.fixture
def cache(make_cache: Callable) -> Pairs:
    return make_cache(tokens=TOKENS)


@pytest.fixture
def archive(cache: Pairs, saved: Callable) -> Path:
    return saved(cache, recipe=SMALL)


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and np.array_equal(bits(a), bits(b))


def test_restore_writes_every_layer_bit_for_bit(
    archive: Path, cache: Pairs, make_ids: Callable, tmp_path: Path
) -> None:
    out = tmp_path / "cache.safetensors"
    outcome = run("restore", archive, "--out", out)
    assert outcome.code == 0
    assert str(out) in outcome.out
    found = load_file(out)
    assert set(found) == {
        "tokens",
        "positions",
        *(f"layers.{i}.{side}" for i in range(3) for side in ("keys", "values")),
    }
    for i, pair in enumerate(cache):
        assert equal(found[f"layers.{i}.keys"], pair[0][0])
        assert equal(found[f"layers.{i}.values"], pair[1][0])
    assert found["tokens"].dtype == found["positions"].dtype == torch.int64
    assert found["tokens"].tolist() == make_ids(TOKENS)
    assert found["positions"].tolist() == list(range(TOKENS))


def test_restore_says_whose_cache_it_is(archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache.safetensors"
    result = run("restore", archive, "--out", out, "--identity", "m", "--json")
    assert result.err == ""
    said = metadata(out)
    assert json.loads(said["identity"]) == kvcellar.Identity.named("m").to_json() == result.json["identity"]
    assert kvcellar.Recipe.from_json(json.loads(said["recipe"])) == SMALL
    assert (said["next_position"], said["namespace"]) == (str(TOKENS), "")
    assert result.json["next_position"] == TOKENS
    assert result.json["bytes"] == out.stat().st_size
    assert set(result.json["tensors"]) == set(load_file(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_restore_keeps_the_stored_dtype(
    make_cache: Callable, saved: Callable, tmp_path: Path, dtype: torch.dtype
) -> None:
    cache = make_cache(tokens=9, dtype=dtype)
    assert run("restore", saved(cache), "--out", tmp_path / "o").code == 0
    assert equal(load_file(tmp_path / "o")["layers.2.values"], cache[2][1][0])


@pytest.mark.parametrize(
    ("positions", "chosen", "goes_on_at"),
    [
        ("0:4", list(range(4)), 4),
        (":4", list(range(4)), 4),
        ("36:", list(range(36, 40)), TOKENS),
        ("0:2,7:9,39", [0, 1, 7, 8, 39], TOKENS),
        ("17", [17], TOKENS),
        ("0:40", list(range(40)), TOKENS),
    ],
)
def test_restore_of_some_tokens(
    archive: Path, cache: Pairs, make_ids: Callable, tmp_path: Path, positions: str, chosen: list[int], goes_on_at: int
) -> None:
    out = tmp_path / "few.safetensors"
    result = run("restore", archive, "--out", out, "--positions", positions, "--layers", "2", "--json").json
    found = load_file(out)
    assert sorted(found) == ["layers.2.keys", "layers.2.values", "positions", "tokens"]
    assert equal(found["layers.2.keys"], cache[2][0][0][:, chosen])
    assert found["positions"].tolist() == chosen
    assert found["tokens"].tolist() == [make_ids(TOKENS)[i] for i in chosen]
    assert metadata(out)["next_position"] == str(goes_on_at)
    assert (result["tokens"], result["layers"]) == (len(chosen), [2])


@pytest.fixture
def sliding(make_cache: Callable, saved: Callable) -> tuple[Path, KVCache]:
    """A full layer, one that slides (window 8, so it holds the last 7 tokens), one without keys and values."""
    full, slides = (LayerKV(keys[0], values[0]) for keys, values in make_cache(layers=2, tokens=TOKENS))
    last = replace(slides.tokens(TOKENS - 7, TOKENS), window=8, first=TOKENS - 7)
    cache = KVCache((full, last, no_layer()), TOKENS)
    path = saved([(full.keys[None], full.values[None])], name="plain.kvc").with_name("sliding.kvc")
    kvcellar.save(path, cache, tokens=list(range(TOKENS)), identity="m", recipe=SMALL)
    return path, cache


def test_restore_of_sliding_and_of_empty_layers(sliding: tuple[Path, KVCache], tmp_path: Path) -> None:
    path, cache = sliding
    assert run("restore", path, "--out", tmp_path / "o").code == 0
    found = load_file(tmp_path / "o")
    assert not [name for name in found if name.startswith("layers.2")]
    assert equal(found["layers.0.keys"], cache.layers[0].keys)
    assert equal(found["layers.1.keys"], cache.layers[1].keys)
    assert equal(found["layers.1.values"], cache.layers[1].values)
    assert found["layers.1.positions"].tolist() == list(range(TOKENS - 7, TOKENS))
    assert found["positions"].tolist() == list(range(TOKENS))
    refused = run("restore", path, "--out", tmp_path / "p", "--positions", "0:20")
    assert refused.code == 2
    assert "sliding" in refused.err
    assert not (tmp_path / "p").exists()


def test_restore_converts_by_value(archive: Path, cache: Pairs, tmp_path: Path) -> None:
    assert run("restore", archive, "--out", tmp_path / "o", "--dtype", "bfloat16").code == 0
    assert equal(load_file(tmp_path / "o")["layers.0.keys"], cache[0][0][0].bfloat16())


def test_restore_refuses_numbers_that_do_not_fit_and_leaves_no_file(
    make_cache: Callable, saved: Callable, tmp_path: Path
) -> None:
    cache = [(keys * 1e6, values) for keys, values in make_cache()]
    path = saved(cache)
    before = sorted(os.listdir(tmp_path))
    outcome = run("restore", path, "--out", tmp_path / "o.safetensors", "--dtype", "float16")
    assert outcome.code == 2
    assert "does not fit" in outcome.err
    assert sorted(os.listdir(tmp_path)) == before


def test_restore_of_a_damaged_archive_leaves_the_old_file(archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    assert run("restore", archive, "--out", out).code == 0
    before, data = out.read_bytes(), bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    outcome = run("restore", archive, "--out", out)
    assert outcome.code == 4
    assert "damaged archive: block" in outcome.err
    assert out.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["a.kvc", "o.safetensors"]


def test_restore_replaces_what_a_restore_wrote_and_nothing_else(archive: Path, tmp_path: Path) -> None:
    out, foreign = tmp_path / "o.safetensors", tmp_path / "weights.safetensors"
    assert run("restore", archive, "--out", out, "--positions", "0:4").code == 0
    assert run("restore", archive, "--out", out).code == 0
    assert len(load_file(out)["tokens"]) == TOKENS
    save_file({"w": torch.ones(3)}, foreign, metadata={"format": "pt"})  # as transformers writes weights
    for path, data in ((foreign, foreign.read_bytes()), (tmp_path / "notes.txt", b"mine"), (tmp_path / "empty", b"")):
        path.write_bytes(data)
        refused = run("restore", archive, "--out", path)
        assert refused.code == 2
        assert "--force" in refused.err
        assert path.read_bytes() == data
        assert run("restore", archive, "--out", path, "--force").code == 0
        assert len(load_file(path)["tokens"]) == TOKENS


def test_restore_never_replaces_its_archive_or_what_is_no_file(archive: Path, tmp_path: Path) -> None:
    before = archive.read_bytes()
    os.link(archive, tmp_path / "twin")
    os.symlink(archive, tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    for out, code in (("a.kvc", 2), ("twin", 2), ("link", 2), ("pipe", 8), ("", 2), ("no/such/o", 8), ("a.kvc/o", 8)):
        assert run("restore", archive, "--out", tmp_path / out, "--force").code == code, out
    assert archive.read_bytes() == before
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    "words",
    [
        *(
            ("--positions", p)
            for p in ("41", "0:41", "5:5", "9:3", "-1", "-3:", "a:b", "", ",", "0:4,3:5", "1:2:3", "1e1")
        ),
        *(("--layers", p) for p in ("3", "0:4", "-1", "0,0", "x")),
        ("--positions", "99999999999999999999:"),
        ("--dtype", "int8"),
        ("--identity", "m", "--model", "."),
        ("--identity", ""),
    ],
)
def test_restore_refuses_what_cannot_be_meant(archive: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    outcome = run("restore", archive, "--out", tmp_path / "o.safetensors", *words)
    assert outcome.code == 2, outcome
    assert outcome.err.strip()
    assert not (tmp_path / "o.safetensors").exists()


def test_restore_for_another_identity_is_refused(archive: Path, tmp_path: Path) -> None:
    outcome = run("restore", archive, "--out", tmp_path / "o", "--identity", "other", "--json")
    assert outcome.code == outcome.json["error"]["exit_code"] == 6
    assert run("restore", archive, "--out", tmp_path / "o", "--namespace", "tenant").code == 3
    assert run("restore", tmp_path / "none.kvc", "--out", tmp_path / "o").code == 3
    assert not (tmp_path / "o").exists()


def test_restore_holds_one_layer_at_a_time(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[list[int], int]] = []
    original = kvcellar.Archive._decode

    def watched(self: Any, wanted: dict[int, list[range]]) -> Any:
        (pending,) = (p for p in os.listdir(tmp_path) if p.endswith(".tmp"))
        read.append((list(wanted), (tmp_path / pending).stat().st_size))
        return original(self, wanted)

    monkeypatch.setattr(kvcellar.Archive, "_decode", watched)
    assert run("restore", archive, "--out", tmp_path / "o").code == 0
    layer = 2 * 2 * TOKENS * 16 * 4
    assert [layers for layers, _ in read] == [[0], [1], [2]]
    assert [read[i + 1][1] - read[i][1] for i in range(2)] == [layer, layer]


def test_a_model_s_archives_by_its_text(tmp_path: Path) -> None:
    model, other = write_model(tmp_path / "model"), write_model(tmp_path / "other", seed=1)
    text, folder = tmp_path / "text.txt", tmp_path / "chats"
    folder.mkdir()
    text.write_text("The cellar is cool and dark.")
    assert run("save", "--model", model, "--text", text, folder / "a.kvc").code == 0
    found = run("find", folder, "--model", model, "The cellar", "is warm", "--json")
    assert (found.code, found.json["matched"]) == (0, len("The cellar is "))
    assert run("find", folder, "--model", model, "--text", text, "--json").json["matched"] == len(text.read_text())
    assert run("find", folder, "--model", other, "--text", text).code == 3
    out = tmp_path / "o.safetensors"
    assert run("restore", folder / "a.kvc", "--out", out, "--model", other).code == 6
    assert not out.exists()
    assert run("restore", folder / "a.kvc", "--out", out, "--model", model).code == 0
    assert json.loads(metadata(out)["recipe"])["name"] == EXACT.name


@pytest.mark.parametrize("command", ["restore", "find", "compact"])
def test_help_teaches_with_an_example(command: str) -> None:
    shown = run(command, "--help")
    assert shown.code == 0
    assert f"  kvcellar {command} " in shown.out
    assert command in COMMANDS
