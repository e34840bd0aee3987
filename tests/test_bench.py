"""The bench on a tiny model: its rows, its resuming, and that cheating recipes do not get away with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import cheats
from benchtools import CONTINUATION, PREFIX, small_windows
from clitools import run, write_model
from kvcellar.errors import KVCellarError
from kvcellar.evaluate.tasks import generate
from kvcellar.evaluate.texts import Window
from kvcellar.frontends.bench.margins import TaskBench
from kvcellar.frontends.bench.peers import PEERS
from kvcellar.frontends.bench.rows import FURTHER
from kvcellar.frontends.bench.run import ROW, Bench
from kvcellar.frontends.bench.scorer import Scorer
from kvcellar.frontends.cli.models import LocalModel, MeasuredModel, empty_cache
from kvcellar.recipe import EXACT

KEYS = set(ROW)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))


@pytest.fixture
def local(model: Path) -> MeasuredModel:
    return MeasuredModel(model)


@pytest.fixture
def chosen(local: LocalModel) -> list[Window]:
    return small_windows(local.encode)


@pytest.fixture
def bench(local: LocalModel, chosen: list[Window]) -> Bench:
    made = Bench(local, chosen, quiet=True)
    made.prepare()
    return made


def test_the_keys_of_a_row_are_fixed() -> None:
    """Other programs read them: the list is written out here, not taken from the code."""
    fixed = """recipe text tokens windows kept file_bytes file_bytes_per_token payload_bytes_per_token profile_bytes
    kl kl_ci kl_p99 dppl dppl_ci rcb rcb_ci top1 margin save_s restore_s prefill_s peak_bytes restore_class"""
    assert list(ROW) == fixed.split()
    further = """articles scored_tokens bytes_by_part append_s random_access_s memcpy_s prefill_dtype threads
    restore_speedup save_to_prefill append_to_prefill random_access_to_prefill restore_to_memcpy peak_to_raw
    save_peak_to_raw note ratio_at_equal_kl dppl_second_half layer_errors profile calibration_tokens
    slower_than_peers by_window"""
    assert list(FURTHER) == further.split()


def test_exact_diverges_by_nothing(bench: Bench) -> None:
    whole, *kinds = bench.recipe(EXACT)
    assert list(whole) == [*ROW, *FURTHER]
    assert (whole["recipe"], whole["text"], whole["windows"], whole["tokens"]) == ("exact", "all", 3, PREFIX)
    assert whole["kl"] == 0
    assert whole["kl_p99"] == 0
    assert whole["dppl"] == 0
    assert whole["top1"] == 1
    assert {row["text"] for row in kinds} == {"docs", "essays"}
    raw = 3 * 2 * 2 * 16 * 4  # layers, sides, heads, width, bytes
    assert 0 < whole["payload_bytes_per_token"] < whole["file_bytes_per_token"]
    assert whole["payload_bytes_per_token"] < raw * 1.1
    json.dumps(whole)


def test_the_floor_is_worse_and_costs_no_file(bench: Bench) -> None:
    floor = bench.floor()[0]
    assert floor["recipe"] == "floor:empty"
    assert floor["kl"] > 0
    assert floor["rcb"] == pytest.approx(0)
    assert floor["kept"] == pytest.approx(36 / PREFIX)
    assert floor["file_bytes"] is None


def test_lossless_peers_diverge_by_nothing_and_fp8_by_something(bench: Bench) -> None:
    assert bench.peer("zstd-3")[0]["kl"] == 0
    fp8 = bench.peer("hf-fp8")[0]
    assert fp8["kl"] > 0
    assert fp8["file_bytes_per_token"] == pytest.approx(3 * 2 * 2 * 16, rel=0.05)


@pytest.mark.parametrize("tokens", [64, 65, 200])
@pytest.mark.parametrize("name", ["zstd-3", "hf-fp8"])
def test_peers_take_any_number_of_tokens(local: LocalModel, name: str, tokens: int) -> None:
    """Group-wise backends fail on lengths that fill no group, so the rest stays in full precision."""
    cache = empty_cache()
    local.prefill(list(range(tokens)), cache, quiet=True)
    before = cache.layers[0].keys.clone()
    coded = PEERS[name](cache, local.model.config)
    assert coded.cache.get_seq_length() == tokens
    assert coded.nbytes > 0
    assert (coded.cache.layers[0].keys - before).abs().max() < 0.1 * before.abs().max()


def test_a_recipe_that_decodes_from_memory_is_caught(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheats.install(tmp_path, monkeypatch)
    row = bench.recipe(cheats.recipe(cheats.FromMemory))[0]
    assert row["kl"] > 1e-3, "in the process that decodes there is nothing to remember"
    assert row["rcb"] < 1


def test_a_recipe_that_ignores_a_layer_is_caught(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cheats.install(tmp_path, monkeypatch)
    assert bench.recipe(cheats.recipe(cheats.IgnoresALayer))[0]["kl"] > 1e-3


def test_a_recipe_that_decodes_from_another_file_is_caught(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHEAT_FOLDER", str(tmp_path))
    cheats.install(tmp_path, monkeypatch)
    with pytest.raises(KVCellarError, match=r"does not decode alone: restoring it opened .*0\.bin"):
        bench.recipe(cheats.recipe(cheats.FromAnotherFile))


def test_a_recipe_never_sees_the_continuation(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cheats.install(tmp_path, monkeypatch)
    cheats.COUNTED.clear()
    assert bench.recipe(cheats.recipe(cheats.CountsTokens))[0]["kl"] == 0
    assert set(cheats.COUNTED) == {PREFIX}


def _said(local: LocalModel, ids: list[int]) -> np.ndarray:
    """Bits of surprisal of each id, from one forward of this test's own; 0 for the first."""
    with torch.inference_mode():
        logs = torch.log_softmax(local.model(torch.tensor([ids])).logits[0, :-1].double(), dim=1)
    return np.concatenate([[0.0], -logs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy() / np.log(2)])


def test_a_recipe_is_told_the_surprisals_of_the_prefix(
    bench: Bench, chosen: list[Window], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheats.install(tmp_path, monkeypatch)
    cheats.TOLD.clear()
    bench.recipe(cheats.NOTING)
    assert len(cheats.TOLD) == len(chosen) + 1, "the first save is made twice, to warm up"
    for window, told in zip([chosen[0], *chosen], cheats.TOLD, strict=True):
        assert told is not None
        np.testing.assert_allclose(told, _said(bench.local, list(window.ids[:PREFIX])), atol=1e-4)


def test_surprisals_are_kept_and_made_anew_where_the_file_is_not_theirs(
    bench: Bench, chosen: list[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench.references.log2_probs(chosen[0])
    (file,) = bench.references.folder.glob("*.log2.npy")
    for damage in (b"", file.read_bytes()[:-3], b"\x93NUMPY"):
        file.write_bytes(damage)
        np.testing.assert_array_equal(bench.references.log2_probs(chosen[0]), first)
    monkeypatch.setattr(LocalModel, "prefill", None)
    np.testing.assert_array_equal(bench.references.log2_probs(chosen[0]), first)


def test_an_archive_of_more_than_the_prefix_is_refused(bench: Bench, chosen: list[Window], tmp_path: Path) -> None:
    scorer = Scorer(bench.local.folder)
    try:
        window = chosen[0]
        given = bench.references.archive(window), bench.references.logits_file(window)
        assert scorer.score(*given, PREFIX, tmp_path / "out.npz")["restore_s"] > 0
        with pytest.raises(KVCellarError, match=f"stands for {PREFIX} tokens"):
            scorer.score(*given, PREFIX - 1, tmp_path / "out.npz")
    finally:
        scorer.close()


def test_a_recipe_the_decoding_process_does_not_know_fails(bench: Bench) -> None:
    with pytest.raises(KVCellarError, match="decoding in a new process failed"):
        bench.recipe(cheats.recipe(cheats.FromMemory))


def test_a_decoder_that_dies_ends_its_recipe_alone(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheats.install(tmp_path, monkeypatch)
    with pytest.raises(KVCellarError, match="exit code 3"):
        bench.recipe(cheats.recipe(cheats.EndsTheProcess))
    assert bench.recipe(EXACT)[0]["kl"] == 0


def test_an_interrupted_run_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench.floor()[0]
    done = bench.recipe(EXACT)[0]

    def forbidden(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(bench.references, "_compute", forbidden)
    monkeypatch.setattr(Bench, "_recipe_window", forbidden)
    bench.prepare()
    assert bench.floor()[0] == first
    assert bench.recipe(EXACT)[0] == done


@pytest.fixture
def tasks(local: LocalModel) -> TaskBench:
    filler = ["The cellar is cool and dark, and the wine in it keeps for years. " * 40]
    made = generate("key_value", filler, lambda text: local.encode(text, continues=True), budget=400, count=3)
    bench = TaskBench(local, made, quiet=True)
    bench.prepare()
    return bench


def _margins(tasks: TaskBench, side: str) -> list[float]:
    return [reference[side]["margin"] for reference in tasks._references()]


def test_exact_keeps_every_margin_and_the_floor_none(tasks: TaskBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcellar.frontends.bench.tasks.COUNTS_FROM", 0.0)  # a random model knows little
    row = tasks.recipe(EXACT)[0]
    assert row["text"] == "task:key_value"
    assert set(row) >= KEYS
    assert _margins(tasks, "full") != _margins(tasks, "empty")
    assert row["margin_tasks"] > 0
    assert row["margin"] == pytest.approx(1, abs=1e-9)
    assert tasks.floor()[0]["margin"] == pytest.approx(0, abs=1e-9)
    assert tasks.peer("zstd-3")[0]["margin"] == pytest.approx(1, abs=1e-9)


def test_a_tasks_context_is_told_its_surprisals(
    tasks: TaskBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheats.install(tmp_path, monkeypatch)
    cheats.TOLD.clear()
    tasks.recipe(cheats.NOTING)
    assert len(cheats.TOLD) == len(tasks.tasks)
    for task, told in zip(tasks.tasks, cheats.TOLD, strict=True):
        assert told is not None
        expected = _said(tasks.local, tasks.local.encode(task.context, continues=True))
        np.testing.assert_allclose(told, expected, atol=1e-4)


def test_a_task_is_not_answered_from_memory(tasks: TaskBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcellar.frontends.bench.tasks.COUNTS_FROM", 0.0)
    cheats.install(tmp_path, monkeypatch)
    assert tasks.recipe(cheats.recipe(cheats.FromMemory))[0]["margin"] != pytest.approx(1, abs=1e-6)


def test_the_command_prints_rows_and_writes_what_made_them(model: Path, tmp_path: Path) -> None:
    texts = []
    for i in range(2):
        texts += ["--text", tmp_path / f"{i}.txt"]
        texts[-1].write_text(f"Text number {i} of the cellar. " * 12)  # type: ignore[attr-defined]
    size = ("--prefix", PREFIX, "--continuation", CONTINUATION, "--recipes", "exact,turbo-2", "--layers")
    out, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    outcome = run("bench", "--model", model, *texts, *size, "--json", "--out", out, "--plot", plot, "--peers", "zstd-3")
    assert outcome.code == 0, outcome
    assert {row["recipe"] for row in outcome.json} == {"floor:empty", "exact", "turbo-2", "peer:zstd-3"}
    written = json.loads(out.read_text())
    assert written["rows"] == outcome.json
    assert len(written["texts"]) == 2
    assert {"commit", "torch"} <= set(written["machine"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = run("bench", "--model", model, *texts, *size)
    assert "floor:empty" in shown.out
    assert "share of energy lost" in shown.out
    assert run("bench", "--model", model, *texts, *size, "--recipes", "magic").code == 2
