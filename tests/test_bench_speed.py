"""What the bench says of bytes and seconds, the floor without residuals, and peers at equal KL."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cheats
import kvcellar
import toystages
from benchtools import PREFIX, small_windows
from clitools import write_model
from kvcellar.errors import DamagedArchive, InvalidInput
from kvcellar.frontends.bench import speed, worker
from kvcellar.frontends.bench.coded import Coded
from kvcellar.frontends.bench.peers import PEERS
from kvcellar.frontends.bench.run import Bench
from kvcellar.frontends.bench.sizes import PARTS, bytes_by_part
from kvcellar.frontends.bench.zero import Zeros, zero_residual
from kvcellar.frontends.cli.bench import _zero_floors
from kvcellar.frontends.cli.models import MeasuredModel, held_in
from kvcellar.profile import Profile
from kvcellar.recipe import EXACT

LAYERS = 3


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCELLAR_HOME", str(tmp_path_factory.mktemp("home")))
        local = MeasuredModel(write_model(tmp_path_factory.mktemp("model")))
        made = Bench(local, small_windows(local.encode), quiet=True)
        made.prepare()
        yield made


def test_bytes_by_part_add_up_to_the_file(saved: Callable[..., Path], make_cache: Any, make_ids: Any) -> None:
    profile = Profile({"level": np.arange(600, dtype=np.float32)}, {})
    path = saved(make_cache(tokens=40), recipe=toystages.lossy(block=16), profile=profile, embed_profile=True)
    parts = bytes_by_part(path)
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == path.stat().st_size
    assert parts["dead"] == 0
    ids = make_ids(40)
    packed = [math.ceil(len(block) * max(block).bit_length() / 8) for block in (ids[:16], ids[16:32], ids[32:])]
    assert parts["token_ids"] == sum(packed)
    assert 0 < parts["profile"] - len(profile.pack()) < 64
    with kvcellar.open(path) as archive:
        heads = [archive._open().block(i).head for i in range(3)]
        assert parts["payload"] == sum(length for head in heads for length, _ in head.parts)
    assert all(parts[name] for name in PARTS if name != "dead")


def test_replaced_blocks_are_dead_bytes(saved: Callable[..., Path], make_cache: Any, make_ids: Any) -> None:
    path = saved(make_cache(tokens=20), make_ids(20), recipe=toystages.exact(block=16))
    before = bytes_by_part(path)
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.append(make_cache(tokens=32), make_ids(32))
    after = bytes_by_part(path)
    assert sum(after.values()) == path.stat().st_size
    assert after["dead"] > 4 * before["token_ids"] / 20
    assert after["commits"] > before["commits"]


def test_a_row_says_what_bytes_and_seconds_went_where(bench: Bench) -> None:
    whole, *kinds = bench.recipe(EXACT)
    for row in (whole, *kinds):
        assert sum(row["bytes_by_part"].values()) == row["file_bytes"]
        assert row["bytes_by_part"]["dead"] == 0
    seconds = ("prefill_s", "save_s", "restore_s", "append_s", "random_access_s", "memcpy_s")
    assert all(0 < whole[name] < 60 for name in seconds)
    assert whole["memcpy_s"] < whole["restore_s"]
    raw = PREFIX * LAYERS * 2 * 2 * 16 * 4
    assert whole["peak_to_raw"] == pytest.approx(whole["peak_bytes"] / raw)
    assert 0 <= whole["save_peak_to_raw"] < 100
    (docs,) = (row for row in kinds if row["text"] == "docs")  # one window: its ratios are its medians' ratios
    assert docs["restore_speedup"] == pytest.approx(docs["prefill_s"] / docs["restore_s"])
    assert docs["save_to_prefill"] == pytest.approx(docs["save_s"] / docs["prefill_s"])
    assert docs["append_to_prefill"] == pytest.approx(docs["append_s"] / docs["prefill_s"])
    assert docs["random_access_to_prefill"] == pytest.approx(docs["random_access_s"] / docs["prefill_s"])
    assert docs["restore_to_memcpy"] == pytest.approx(docs["restore_s"] / docs["memcpy_s"])
    assert docs["prefill_dtype"] in ("float32", "bfloat16")
    assert docs["threads"] == torch.get_num_threads()


def test_scoring_leaves_the_archive_as_it_is(bench: Bench, tmp_path: Path) -> None:
    window = bench.windows[0]
    archive = bench.references.archive(window)
    before = archive.read_bytes()
    costs = worker.score(
        bench.local, str(archive), str(bench.references.logits_file(window)), PREFIX, str(tmp_path / "out.npz")
    )
    assert costs["append_s"] > 0
    assert archive.read_bytes() == before


def test_appending_measures_what_grows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the archive gets one token at a time, the first of them not counted."""
    grown, took = [], []
    append = kvcellar.Archive.append

    def slow_at_first(self: Any, cache: Any, tokens: Any) -> Any:
        started = time.perf_counter()
        grown.append(len(tokens) - len(self))
        time.sleep(0 if took else 1)
        info = append(self, cache, tokens)
        took.append(time.perf_counter() - started)
        return info

    monkeypatch.setattr(kvcellar.Archive, "append", slow_at_first)
    monkeypatch.setattr(speed, "REPEATS", 1)
    window = bench.windows[0]
    cache = bench.original(window)
    ids = list(window.ids)
    bench.local.model(torch.tensor([ids[window.prefix :]]), cache=cache, use_cache=True)
    spent = speed.append_s(bench.references.archive(window), bench.local, cache, ids)
    assert grown == [1, 1]
    assert spent == pytest.approx(took[1], rel=0.2, abs=0.02)
    assert speed.append_s(bench.references.archive(window), bench.local, cache, ids[:-1]) is None


def test_a_process_restores_once_before_it_counts(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seen: list[str] = []
    monkeypatch.setattr(worker, "_restored", lambda local, archive, prefix: seen.append(f"warm {archive}"))
    monkeypatch.setattr(worker, "score", lambda local, archive, **_: seen.append(archive) or {})
    messages = [{"archive": name, "prefix": 1, "reference": "", "out": ""} for name in ("a", "b")]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(message) + "\n" for message in messages)))
    worker.serve(None, torch.get_num_threads())  # type: ignore[arg-type]
    assert seen == ["warm a", "a", "b"]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_peer_is_warmed_up_and_may_bring_its_logits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def uniform(cache: Any, config: Any) -> Coded:
        calls.append(cache.get_seq_length())
        logits = torch.zeros(len(bench.windows[0].ids) - PREFIX - 1, config.vocab_size)
        seconds = 1000.0 if len(calls) == 1 else 1.0
        more = {"payload_nbytes": 480, "profile_nbytes": 7, "kept": 0.5, "note": "says nothing"}
        return Coded(None, 960, seconds, None, logits=logits, **more)  # type: ignore[arg-type]

    monkeypatch.setitem(PEERS, "uniform", uniform)
    row = bench.peer("uniform")[0]
    assert calls == [PREFIX] * 4
    assert (row["save_s"], row["restore_s"], row["restore_speedup"]) == (1.0, None, None)
    assert (row["kept"], row["profile_bytes"], row["note"]) == (0.5, 7, "says nothing")
    assert row["file_bytes_per_token"] == 10
    assert row["payload_bytes_per_token"] == 5
    full = [torch.log_softmax(bench.references.load(w)["full"].double(), -1) for w in bench.windows]
    expected = [math.log(p.shape[1]) + (p.exp() * p).sum(-1) for p in full]
    assert row["kl"] == pytest.approx(float(torch.cat(expected).mean()))


def test_the_fastest_prefill_is_found_and_a_hopeless_dtype_not_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []

    def pretend(model: Any, ids: Any) -> None:
        ran.append((str(model.dtype), len(ids)))
        end = time.process_time() + pace[str(model.dtype)] * len(ids)
        while time.process_time() < end:
            pass

    monkeypatch.setattr(speed, "_prefill", pretend)
    pace = {"torch.float32": 2e-4, "torch.bfloat16": 2e-3}
    found = speed.fastest_prefill(bench.local, range(300))
    assert (found.dtype, found.threads) == ("float32", torch.get_num_threads())
    assert found.seconds >= 300 * 2e-4
    assert ran.count(("torch.float32", 300)) == speed.PREFILL_REPEATS
    assert ("torch.bfloat16", 300) not in ran
    pace["torch.bfloat16"] = 5e-4
    assert speed.fastest_prefill(bench.local, range(300)).dtype == "float32"
    assert ran.count(("torch.bfloat16", 300)) == 1, "not hopeless, but far from the best"
    pace["torch.bfloat16"] = 1e-4
    assert speed.fastest_prefill(bench.local, range(300)).dtype == "bfloat16"


def test_a_16_bit_model_computes_in_float32_and_holds_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    folder = write_model(tmp_path / "model")
    plain = MeasuredModel(folder)
    plain.model.to(torch.bfloat16).save_pretrained(folder)
    local = MeasuredModel(folder)
    assert (local.model.dtype, local.cache_dtype) == (torch.float32, torch.bfloat16)
    made = Bench(local, small_windows(local.encode)[:1], quiet=True)
    made.prepare()
    cache = made.original(made.windows[0])
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert made.references.load(made.windows[0])["full"].dtype == torch.float32
    fp8 = made.peer("hf-fp8")[0]
    assert fp8["kl"] > 0
    assert made.peer("zstd-3")[0]["kl"] == 0
    assert held_in(cache, torch.float32).layers[1].values.dtype == torch.float32


def _install_toys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cheats.install(folder, monkeypatch)
    with (folder / "sitecustomize.py").open("a") as file:
        file.write("import toystages\n")


def test_the_floor_without_residuals_is_the_prediction(bench: Bench, tmp_path: Path, monkeypatch: Any) -> None:
    _install_toys(tmp_path, monkeypatch)
    recipe = toystages.lossy(predict={"id": toystages.FromTokens.id}, block=32)
    row = bench.zero_residual(recipe, "floor:zero-residual")[0]
    assert row["recipe"] == "floor:zero-residual"
    assert row["kl"] > 1e-3
    parts = row["bytes_by_part"]
    assert sum(parts.values()) == row["file_bytes"]
    assert parts["payload"] == LAYERS * PREFIX / 32  # one byte a part
    assert row["payload_bytes_per_token"] == (parts["payload"] + parts["token_ids"]) / PREFIX


@pytest.mark.parametrize("lossy", [True, False])
def test_with_no_residual_a_group_is_predicted_from_predictions(
    saved: Callable[..., Path], make_cache: Any, make_ids: Any, *, lossy: bool
) -> None:
    base = (toystages.lossy if lossy else toystages.exact)(predict={"id": toystages.FromTokens.id}, block=16)
    path = saved(make_cache(tokens=40), recipe=zero_residual(base))
    expected = torch.tensor(make_ids(40)) % 100 + torch.arange(40)
    with kvcellar.open(path, identity="m") as archive:
        for layer in archive.restore().cache.layers:
            assert torch.equal(layer.keys, expected.float()[None, None, :, None].expand(layer.keys.shape))
    chained = toystages.lossy(transform=toystages.TRANSFORM)  # the first group has nothing to be predicted from
    path = saved(make_cache(tokens=40, layers=4), name="b.kvc", recipe=zero_residual(chained))
    with kvcellar.open(path, identity="m") as archive:
        assert not any(layer.keys.any() for layer in archive.restore().cache.layers)


def test_the_floor_takes_nothing_but_zeros() -> None:
    with pytest.raises(InvalidInput, match="no predictor"):
        zero_residual(EXACT)
    with pytest.raises(InvalidInput, match="expected zeros"):
        Zeros().encode([np.array([[0, 1]], np.int32)], range(1))
    with pytest.raises(DamagedArchive):
        Zeros().decode([memoryview(b"\1")], [[np.empty((1, 2), np.int32)]], [range(1)])


def test_every_recipe_that_predicts_has_a_floor() -> None:
    one, same, other = toystages.lossy(), toystages.exact(), toystages.exact(block=64)
    assert _zero_floors([EXACT]) == []
    assert _zero_floors([EXACT, one]) == [(one, "floor:zero-residual")]
    assert _zero_floors([one, same]) == [(one, "floor:zero-residual")]
    assert [name for _, name in _zero_floors([one, same, other])] == [
        "floor:zero-residual:toy",
        "floor:zero-residual:toy exact",
    ]


def test_a_profile_that_has_seen_a_tested_text_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = toystages.lossy(predict={"id": toystages.FromProfile.id})
    folders = []
    monkeypatch.setattr(Bench, "_collect", lambda self, label, folder, compute: folders.append(folder.name) or [])
    monkeypatch.setattr(Bench, "_rows", lambda self, name, results: [])
    monkeypatch.setattr(bench, "texts", frozenset({"aa" * 32, "bb" * 32}))
    for level in (1, 2):
        bench.recipe(recipe, Profile({"level": np.full((3, 2), level, np.float32)}, {"texts": ["cc" * 32]}))
    assert len(set(folders)) == 2, "results of one profile must not be taken for those of another"
    seen = Profile({"level": np.zeros((3, 2), np.float32)}, {"texts": ["cc" * 32, "bb" * 32]})
    with pytest.raises(InvalidInput, match="tested here"):
        bench.recipe(recipe, seen)
    with pytest.raises(InvalidInput, match="does not list the texts"):
        bench.recipe(recipe, Profile({"level": np.zeros((3, 2), np.float32)}, {}))
