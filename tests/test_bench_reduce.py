"""`kvcellar bench reduce` on a tiny model: rows of reducers, resuming, comparisons, and what samples may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchtools import CONTINUATION, PREFIX, small_windows
from clitools import run, write_model
from kvcellar.cache import KVCache
from kvcellar.errors import InvalidInput
from kvcellar.evaluate.scores import WindowScore
from kvcellar.evaluate.tasks import generate
from kvcellar.frontends.bench import reducers
from kvcellar.frontends.bench.reducerows import comparisons, kl_ratio, rows_of_reducers
from kvcellar.frontends.bench.reducers import Case, ReduceBench, Sampler, averaged, cases
from kvcellar.frontends.bench.reducertasks import ReduceTasks
from kvcellar.frontends.bench.rows import ROW, Result
from kvcellar.frontends.bench.run import Bench
from kvcellar.frontends.bench.speed import Prefill
from kvcellar.frontends.calibration import Cut
from kvcellar.frontends.cli import bench_reduce
from kvcellar.frontends.cli.models import MeasuredModel
from kvcellar.frontends.riskqueries import Asked, foreign_asked, own_asked
from kvcellar.frontends.transformers import take_cache
from models import prefill

KEEP = (0.5, 0.75)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Bench, "prefill", lambda self: Prefill(0.1, "float32", 1))


@pytest.fixture
def local(model: Path) -> MeasuredModel:
    return MeasuredModel(model)


def _others(local: MeasuredModel, text: str = "Other words about wheels and wagons go here. ") -> list[Cut]:
    ids = local.encode(text * 4, continues=True)[: PREFIX + CONTINUATION]
    return [Cut(tuple(ids), "docs", f"sha-{text[:5]}")]


@pytest.fixture
def bench(local: MeasuredModel) -> ReduceBench:
    made = ReduceBench(local, small_windows(local.encode), _others(local), queries=32, quiet=True)
    made.prepare()
    return made


def test_rows_of_all_cases(bench: ReduceBench) -> None:
    found = bench.measured(cases(["matching", "random", "streaming"], KEEP, seeds=2))
    rows = rows_of_reducers(found, PREFIX)
    assert all(set(ROW) < set(row) for row in rows)
    whole = {(row["method"], row["keep"]): row for row in rows if row["text"] == "all"}
    assert len(whole) == 6
    assert whole["matching", 0.5]["slots"] == 48
    assert whole["matching", 0.5]["kept"] == 0.5
    assert 0 < whole["matching", 0.75]["kl"] < whole["streaming", 0.5]["kl"]
    draws = whole["random", 0.5]["kl_by_seed"]
    assert len(draws) == 2
    assert draws[0] != draws[1]
    assert whole["random", 0.5]["kl"] == pytest.approx(np.mean(draws))
    assert whole["matching", 0.5]["settings"]["id"] == "matching/1"
    assert 0.3 < whole["matching", 0.5]["freed"] < 0.5  # weights and positions take some of the half
    compared = {(c["method"], c["than"], c["keep"]): c for c in comparisons(found, {})}
    against = compared["matching", "streaming", 0.5]
    assert against["ratio"]["value"] == pytest.approx(whole["matching", 0.5]["kl"] / whole["streaming", 0.5]["kl"])
    assert against["difference"]["value"] == pytest.approx(whole["matching", 0.5]["kl"] - whole["streaming", 0.5]["kl"])


def test_everything_kept_is_the_uncompressed_cache(bench: ReduceBench) -> None:
    (results,) = bench.measured([Case("streaming", 1.0)]).values()
    assert all(float(r.scores.kl.max()) == 0 for r in results)


def test_an_interrupted_run_goes_on(bench: ReduceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    real = reducers.reduced_by

    def stops(case: Case, *arguments: Any) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append((case.method, case.label))
        return real(case, *arguments)

    monkeypatch.setattr(reducers, "reduced_by", stops)
    todo = cases(["random", "streaming"], [0.5], seeds=1)
    with pytest.raises(KeyboardInterrupt):
        bench.measured(todo)
    monkeypatch.setattr(reducers, "reduced_by", lambda *a: done.append(("later", "")) or real(*a))
    bench.measured(todo)
    assert len(done) == 6
    monkeypatch.setattr(reducers, "reduced_by", stops)
    assert len(bench.measured(todo)) == 2  # nothing is left to do


def test_a_case_of_other_samples_or_source_is_another_result(
    bench: ReduceBench, local: MeasuredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ReduceBench(local, bench.windows, _others(local, "Quite another text on ships. "), queries=32, quiet=True)
    assert bench.folder(Case("matching", 0.5)) != other.folder(Case("matching", 0.5))
    assert bench.folder(Case("streaming", 0.5)) == other.folder(Case("streaming", 0.5))
    before = bench.folder(Case("streaming", 0.5))
    monkeypatch.setattr(reducers, "made_by", lambda: "other source")
    assert bench.folder(Case("streaming", 0.5)) != before


def test_sample_queries_from_a_tested_text_are_refused(local: MeasuredModel) -> None:
    foreign = _others(local)
    with pytest.raises(InvalidInput, match="cannot be tested on it"):
        ReduceBench(local, small_windows(local.encode), foreign, quiet=True, texts={foreign[0].text})


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"unknown method magic; known: matching,"):
        cases(["magic"], [0.5])


def test_foreign_queries_are_what_the_model_asks_behind_the_prefix(local: MeasuredModel) -> None:
    cuts = _others(local)
    asked = foreign_asked(local, cuts, PREFIX, 1000, quiet=True)
    assert asked.positions.tolist() == list(range(PREFIX, PREFIX + CONTINUATION))
    own = own_asked(local, _kv(local, list(cuts[0].ids)), np.array(cuts[0].ids, np.int64))
    for layer, queries in asked.layers.items():
        assert torch.allclose(queries.float(), own.layers[layer][:, -CONTINUATION:], atol=2e-2, rtol=2e-2)
    again = foreign_asked(local, cuts, PREFIX, 1000, quiet=True)
    assert torch.equal(again.layers[0], asked.layers[0])
    with pytest.raises(InvalidInput, match="longer than 500"):
        foreign_asked(local, cuts, 500, 10, quiet=True)


def _kv(local: MeasuredModel, ids: list[int]) -> KVCache:
    return take_cache(prefill(local.model, ids))


def test_later_queries_keep_their_length_and_a_model_of_unknown_turns_its_last(local: MeasuredModel) -> None:
    asked = Asked({0: torch.randn(4, 20, 16)}, torch.arange(20))
    last = asked.later(None, 100, 5)
    assert torch.equal(last[0], asked.layers[0][:, -5:])
    ids = list(range(1, 60))
    from kvcellar.frontends.queries import turns_or_none

    turns = turns_or_none(local.model, _kv(local, ids), np.array(ids))
    moved = asked.later(turns, 100, 20)[0]
    assert moved.shape == (4, 20, 16)
    assert torch.allclose(moved.norm(dim=2), asked.layers[0].norm(dim=2), rtol=1e-4)
    assert not torch.allclose(moved, asked.layers[0], atol=0.1)
    with pytest.raises(InvalidInput, match="at least 1"):
        asked.later(turns, 100, 0)


def _result(kl: list[float], article: str = "a") -> Result:
    column = np.array(kl)
    score = WindowScore(article, "docs", column, column, column * 0, np.full(len(kl), np.nan), column < 0.5, article)
    return Result(score, {"queries_s": 0.0, "reduce_s": kl[0], "save_s": 1.0})


def test_ratios_are_of_sums_and_draws_are_averaged() -> None:
    a, b = [_result([0.1, 0.3], "x"), _result([0.2, 0.2], "y")], [_result([0.4, 0.4], "x"), _result([0.4, 0.4], "y")]
    found = kl_ratio(a, b)
    assert found["value"] == pytest.approx(0.5)
    assert found["ci"] == pytest.approx((0.5, 0.5))
    assert kl_ratio(a, [_result([0.0], "x"), _result([0.0], "y")])["value"] is None
    mean = averaged([a, b])
    assert mean[0].scores.kl.tolist() == pytest.approx([0.25, 0.35])
    assert mean[0].costs["reduce_s"] == pytest.approx(0.25)


def test_tasks(local: MeasuredModel) -> None:
    filler = ["Barrels of oak lie in long rows, and each has a number that nobody reads. " * 40]
    put = generate("needle_single", filler, local.encode, budget=512, count=2, seed=1)
    sampler = Sampler(local, _others(local), PREFIX, 16, quiet=True)
    bench = ReduceTasks(local, put, sampler, quiet=True)
    bench.prepare()
    (row,) = bench.reduced(Case("matching", 0.5))
    assert (row["text"], row["windows"], row["method"]) == ("task:needle_single", 2, "matching")
    kept = [json.loads(p.read_text()) for p in bench.folder.glob("reduce-*/*.json")]
    assert [answer["kept"] for answer in kept] == pytest.approx([0.5, 0.5], abs=0.01)


def _bench(model: Path, tmp_path: Path, *words: object) -> Any:
    texts = []
    for name in ("first", "second"):
        texts.append(tmp_path / f"{name}.txt")
        texts[-1].write_text(f"The {name} document counts: " + " ".join(f"{i * i}" for i in range(120)))
    other = tmp_path / "other.txt"
    other.write_text("Wheels of wagons roll along roads that nobody mends. " * 8)
    given = [word for text in texts for word in ("--text", text)]
    sizes = ("--prefix", PREFIX, "--continuation", CONTINUATION, "--queries", 16, "--seeds", 2)
    return run("bench", "reduce", "--model", model, *given, "--foreign", other, *sizes, *words)


def test_the_command(model: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "reduce.json", tmp_path / "reduce.png"
    common = ("--keep", "0.5", "--methods", "matching,random,streaming")
    told = _bench(model, tmp_path, *common, "--out", out, "--plot", plot)
    assert told.code == 0, told.err
    assert "KL of matching ÷ streaming at 50%" in told.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(out.read_text())
    assert [row["recipe"] for row in written["rows"]] == [
        "floor:empty",
        *(f"reduce:{name}@0.5" for name in ("matching", "random", "streaming")),
    ]
    assert len(written["windows"]) == 2
    assert _bench(model, tmp_path, *common, "--json").json["rows"][1]["kl"] == written["rows"][1]["kl"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--keep", "0.1"), "expected over 36"),
        (("--keep", "0.5", "--methods", "magic"), "unknown method magic"),
        (("--keep", "0.5", "--peers", "magic"), "no press magic at these fractions; known: compactor"),
    ],
)
def test_the_command_refuses(model: Path, tmp_path: Path, words: tuple[object, ...], told: str) -> None:
    outcome = _bench(model, tmp_path, *words)
    assert outcome.code == 2
    assert told in outcome.err


def test_presses_go_by_name_and_fraction() -> None:
    both = [("kvpress-snapkv-0.25", 0.25), ("kvpress-snapkv-0.5", 0.5)]
    assert bench_reduce._presses("snapkv", [0.25, 0.5]) == both
    assert bench_reduce._presses("kvpress-snapkv-0.5", [0.25, 0.5]) == both[1:]
    assert bench_reduce._presses("none", [0.5]) == []
    assert ("kvpress-kvzip-0.5", 0.5) in bench_reduce._presses("all", [0.5])
