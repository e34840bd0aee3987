"""The KVTC baseline as an outside peer of the bench: its lines, its files, and what it makes of bad ones."""

from __future__ import annotations

import json
import math
import os
import random
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import models
from clitools import write_model
from kvcellar.frontends.cli.models import LocalModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from baselines import kvtc, peer

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
WINDOWS = 6
TEXT = "The cellar keeps what the harvest gave; nobody counts its bottles twice. " * 12
PREFIX = 300


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all tests here: what calibration makes is to be found again."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("KVCELLAR_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def local(home: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    return LocalModel(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Declared sources, one to tune with and one to test with, and their files beside it."""
    folder = tmp_path_factory.mktemp("texts")
    letters = random.Random(0)
    for role, word in (("tune", "Tuning"), ("test", "Testing")):
        bodies = ["".join(letters.choices(string.ascii_letters + "  ,.", k=1100)) for _ in range(WINDOWS + 1)]
        articles = [f" \n = {word} {i} = \n \n {word} {body}\n" for i, body in enumerate(bodies)]
        (folder / f"{role}.txt").write_text("".join(articles))
        fields = {"name": role, "kind": "encyclopedia", "role": role, "read": "wikitext", "file": f"{role}.txt"}
        with (folder / "texts.toml").open("a") as file:
            file.write("\n".join(["[[source]]", *(f'{name} = "{value}"' for name, value in fields.items()), ""]))
    return folder / "texts.toml"


@pytest.fixture(scope="module")
def adapter(home: Path, texts: Path) -> peer.Peer:
    return peer.Peer(texts, texts.parent, ((WINDOWS, 512),))


def written(local: LocalModel, path: Path, tokens: int = PREFIX, dtype: torch.dtype = torch.float32) -> Path:
    """The cache of the first `tokens` of TEXT as the bench writes it."""
    pairs = models.pairs(models.prefill(local.model, local.encode(TEXT)[:tokens]))
    named = {f"{s}{i}": x[0].to(dtype) for i, pair in enumerate(pairs) for s, x in zip("kv", pair, strict=True)}
    save_file({**{n: x.contiguous() for n, x in named.items()}, "tokens": torch.arange(tokens)}, path)
    return path


def message(local: LocalModel, cache: Path, **changed: Any) -> dict[str, Any]:
    config = local.model.config
    model = {"rope_theta": config.rope_parameters["rope_theta"], "head_dim": 16, "folder": str(local.folder)}
    out = str(cache.with_suffix(".out"))
    return {"cache": str(cache), "peer": "kvtc", "options": {}, "model": model, "out": out, **changed}


def divergence(local: LocalModel, named: dict[str, Tensor], full: dict[str, Tensor]) -> float:
    """KL of what follows the cache, in nats per token."""
    following = local.encode(TEXT)[PREFIX : PREFIX + 100]
    said = []
    for tensors in (full, named):
        cache = models.prefill(local.model, following[:1])
        for i, layer in enumerate(cache.layers):
            layer.keys, layer.values = tensors[f"k{i}"][None], tensors[f"v{i}"][None]
        said.append(models.logits(local.model, cache, following).log_softmax(-1))
    return float((said[0].exp() * (said[0] - said[1])).sum(-1).mean())


def test_divergence_falls_and_bytes_grow_with_the_budget(local: LocalModel, adapter: peer.Peer, tmp_path: Path) -> None:
    full = load_file(written(local, tmp_path / "cache"))
    answers, nats = [], []
    for budget in (30, 100, 300, 900):
        asked = message(local, tmp_path / "cache", options={"budget": budget})
        answers.append(adapter.answer(asked))
        nats.append(divergence(local, load_file(asked["out"]), full))
    assert nats == sorted(nats, reverse=True)
    assert nats[-1] < nats[0] / 30
    sizes = [answer["nbytes"] for answer in answers]
    assert sizes == sorted(sizes)
    sides = 3 * 2 * 2 * 16  # layers, K and V, heads, width
    for answer, budget in zip(answers, (30, 100, 300, 900), strict=True):
        coded = PREFIX - 36
        assert answer["payload_tokens"] == coded
        assert answer["payload_nbytes"] < coded * budget / 8 + 40
        assert answer["nbytes"] == answer["payload_nbytes"] + 36 * sides * 2 + kvtc.HEADER_BYTES
        assert answer["profile_nbytes"] >= 4 * sides * 2  # at the least both means and a component
        assert math.isfinite(answer["save_s"] + answer["restore_s"])
        assert answer["kept"] == 1.0
    assert answers[0]["profile_nbytes"] < answers[-1]["profile_nbytes"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [20, PREFIX, 800])
def test_what_comes_back_has_the_form_of_what_went_in(
    local: LocalModel, adapter: peer.Peer, tmp_path: Path, dtype: torch.dtype, tokens: int
) -> None:
    path = written(local, tmp_path / "cache", tokens, dtype)
    asked = message(local, path, options={"budget": 900})
    adapter.answer(asked)
    before, after = load_file(path), load_file(asked["out"])
    assert set(after) == set(before) - {"tokens"}
    for name, x in after.items():
        assert (x.shape, x.dtype) == (before[name].shape, dtype)
        kept = before[name].half().to(dtype) if dtype == torch.float32 else before[name]
        exact = [t for t in range(tokens) if t < 4 or t >= tokens - 32]
        assert torch.equal(x[:, exact], kept[:, exact])
        error = (x.float() - before[name].float()).square().mean() / before[name].float().square().mean()
        assert float(error) < 0.02  # at position 700 as at 7: rotations are undone where they were made


def test_the_script_speaks_json_alone_and_another_process_decodes_the_same(
    local: LocalModel, home: Path, texts: Path, tmp_path: Path
) -> None:
    cache = written(local, tmp_path / "cache", dtype=torch.bfloat16)
    coded = tmp_path / "coded"
    good = message(local, cache, peer="kvtc-small", options={"file": str(coded), "budget": 200})
    (tmp_path / "cut").write_bytes(cache.read_bytes()[:-100])
    bad = [{**good, "peer": "gzip", "options": {}}, {**good, "cache": str(tmp_path / "cut")}]
    lines = [json.dumps(good), "no JSON", *map(json.dumps, bad), json.dumps(good)]
    script = [sys.executable, str(BENCHMARKS / "baselines" / "peer.py")]
    script += ["--windows", "3", "--texts", str(texts), "--data", str(texts.parent)]
    env = {**os.environ, "KVCELLAR_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, input="\n".join(lines), capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    ready, first, broken, unknown, cut, again = map(json.loads, done.stdout.splitlines())
    assert ready["ready"] is True
    assert "JSONDecodeError" in broken["error"]
    assert "SafetensorError" in cut["error"]
    assert "kvtc-fine" in unknown["error"]
    assert {n: first[n] for n in first if not n.endswith("_s")} == {n: again[n] for n in again if not n.endswith("_s")}
    assert first["nbytes"] == coded.stat().st_size
    assert "KVTC calibration, 3,072 tokens" in done.stderr
    (state,) = (home / "baselines").glob("*-200.safetensors")
    back, out = kvtc.decode(coded.read_bytes(), kvtc.load(state)), load_file(good["out"])
    named = {f"{s}{i}": x[0] for i, pair in enumerate(back) for s, x in zip("kv", pair, strict=True)}
    assert set(named) == set(out)
    assert all(torch.equal(named[name].view(torch.int16), out[name].view(torch.int16)) for name in out)


def test_calibration_is_made_once_and_for_these_texts(
    local: LocalModel, adapter: peer.Peer, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = message(local, written(local, tmp_path / "cache"), options={"budget": 100})
    expected = adapter.answer(asked)

    def refuse(*_: object) -> None:
        raise RuntimeError("calibrated again")

    monkeypatch.setattr(peer.calibration, "calibrated", refuse)
    fresh = peer.Peer(texts, texts.parent, ((WINDOWS, 512),))
    assert fresh.answer(asked)["payload_nbytes"] == expected["payload_nbytes"]
    (tmp_path / "tune.txt").write_text((texts.parent / "tune.txt").read_text().replace("a", "b"))
    for other in (peer.Peer(texts, tmp_path, fresh.lengths), peer.Peer(texts, texts.parent, ((WINDOWS + 1, 512),))):
        with pytest.raises(RuntimeError, match="again"):
            other.answer(asked)


def test_calibration_reads_tuning_text_alone(local: LocalModel, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text for tests is declared beside it, could be read, and is not."""
    read: list[str] = []

    def spy(model: Any, windows: Any) -> None:
        read.extend(local.tokenizer.decode(window) for window in windows)
        raise InterruptedError

    monkeypatch.setattr(peer.calibration, "calibrated", spy)
    with pytest.raises(InterruptedError):
        peer.Peer(texts, texts.parent, ((WINDOWS + 1, 500),)).prepared(local.folder)
    assert len(read) == WINDOWS + 1
    assert all(text.startswith("Tuning") and "Testing" not in text for text in read)


def test_a_cache_or_a_request_that_does_not_fit_is_refused(
    local: LocalModel, adapter: peer.Peer, tmp_path: Path
) -> None:
    path = written(local, tmp_path / "cache")
    named, asked = load_file(path), message(local, path, options={"budget": 100})
    damaged = {
        "expected k0, v0 to v2": {n: x for n, x in named.items() if n != "v2"},
        "v1: torch.float32 .2, 299, 16., expected": {**named, "v1": named["v1"][:, 1:].contiguous()},
        "k0: not finite": {**named, "k0": named["k0"] * math.inf},
        "int32": {n: x.int() for n, x in named.items()},
    }
    for expected, tensors in damaged.items():
        save_file(tensors, tmp_path / "bad")
        with pytest.raises(ValueError, match=expected):
            adapter.answer({**asked, "cache": str(tmp_path / "bad")})
    model = asked["model"]
    for expected, changed in {
        "head_dim 8": {"model": {**model, "head_dim": 8}},
        "rope_theta 500000": {"model": {**model, "rope_theta": 500000}},
        "unknown options .'bugdet'.": {"options": {"bugdet": 100}},
        "budget 0, expected 1 to 1536": {"options": {"budget": 0}},
        "unknown peer 'zip'": {"options": {}, "peer": "zip"},
    }.items():
        with pytest.raises(ValueError, match=expected):
            adapter.answer({**asked, **changed})


def test_a_16_bit_model_calibrates_in_float32(
    home: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU without bfloat16 instructions would take hours, and the bench computes in float32, too."""
    folder = write_model(tmp_path / "model")
    LocalModel(folder).model.to(torch.bfloat16).save_pretrained(folder)
    dtypes: list[torch.dtype] = []

    def spy(model: Any, windows: Any) -> None:
        dtypes.append(model.dtype)
        raise InterruptedError

    monkeypatch.setattr(peer.calibration, "calibrated", spy)
    with pytest.raises(InterruptedError):
        peer.Peer(texts, texts.parent, ((WINDOWS, 512),)).prepared(folder)
    assert dtypes == [torch.float32]
