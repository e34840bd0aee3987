"""benchmarks/sequence.py: what its tables and its picture are made of."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import sequence
import sequencebits
import sequenceplot
from clitools import run, write_model
from kvcellar.cache import KVCache, LayerKV
from kvcellar.frontends.bench import ratelength
from kvcellar.frontends.bench.ratewindows import Kept, cache_of
from kvcellar.frontends.cli.models import MeasuredModel
from kvcellar.identity import Identity
from kvcellar.profile import Profile
from kvcellar.recipe import SEQUENTIAL
from sequenceexpected import KS, Predictors


def test_a_quick_look_takes_the_ends_of_some_curves() -> None:
    whole, quick = sequencebits.cases(), sequencebits.cases(quick=True)
    assert {case.curve for case in quick} == set(sequencebits.QUICKLY)
    for name in sequencebits.QUICKLY:
        of = [case for case in whole if case.curve == name]
        assert [case for case in quick if case.curve == name] == [of[0], of[-1]]
    assert [case.told for case in quick if case.curve == "sequential"] == [True, True]


def test_the_premise_is_found_where_it_holds_and_not_where_it_does_not() -> None:
    rng = np.random.default_rng(0)
    told = rng.exponential(4, (2, 500))
    rows = [{"surprisal": s.tolist(), "energy": [(3 * s).tolist(), rng.exponential(1, 500).tolist()]} for s in told]
    found = sequencebits.premise(rows)
    assert found["tokens"] == 1000
    assert found["rho"][0] == pytest.approx(1)
    assert abs(found["rho"][1]) < 0.1
    np.testing.assert_allclose(found["energy"][0], np.array(found["surprisal"]) / found["mean_surprisal"])
    assert found["surprisal"] == sorted(found["surprisal"])


def test_the_table_of_predictors_sums_over_windows(tmp_path: Path) -> None:
    def row(left: float, size: float, evaluations: int) -> dict[str, Any]:
        return {
            "left": left,
            "bytes": [size, 2 * size, size / 2],
            "error": [2.0, 1.0, 4.0],
            "mflop": 10.0 * evaluations,
            "evaluations": evaluations,
        }

    found = [
        {
            "all": whole,
            "by": {"linear/1": row(whole / 4, 10, 0), "expected, k = 4": row(whole / 2, 20, 5)},
            "hits": dict.fromkeys(map(str, KS), 0.5),
            "calls": 2,
            "prefix_calls": 1,
            "evaluated": 320,
        }
        for whole in (8.0, 40.0)
    ]
    predictors = Predictors(torch.nn.Linear(3, 5), Profile({}, {}), Kept(tmp_path), range(16))
    table = predictors.table(["a", "b"], found)
    assert (table["tokens"], table["calls"], table["prefix_calls"], table["evaluated"]) == (32, 4, 2, 640)
    linear, expected = table["rows"]
    assert (linear["explained"], expected["explained"]) == (0.75, 0.5)
    assert expected["explained_ci"] is not None
    assert expected["bytes_ci"][0] is not None
    assert expected["bytes"] == [20, 40, 10]
    assert expected["bytes_at_error_of_linear"] == [20, 40, 10]
    assert table["token_itself"] == {"mflop": 2e-6 * 20, "evaluations": 1, "explained": 1.0, "bytes": 0.0}
    assert predictors.table(["a", "a"], found)["rows"][0]["explained_ci"] is None, "one article says nothing of others"


def test_each_length_is_told_its_own_surprisals(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, Any]] = []

    def save(path: Path, cache: Any, *, tokens: list[int], log2_probs: Any, **_: Any) -> None:
        given.append((len(tokens), log2_probs))
        path.touch()

    monkeypatch.setattr(ratelength, "save", save)
    monkeypatch.setattr(ratelength, "bytes_by_part", lambda path: dict.fromkeys(ratelength.CODING, 8))
    monkeypatch.setattr(ratelength, "coarse_bytes", lambda path, profile: (4, 2))
    cache = KVCache((LayerKV(torch.zeros(1, 9, 2), torch.zeros(1, 9, 2)),))
    told, profile = -np.arange(9, dtype=np.float32), Profile({}, {})
    rows = ratelength.by_length(cache, range(9), SEQUENTIAL, profile, Identity.named("m"), (4, 9), told)
    assert [row["tokens"] for row in rows] == [4, 9]
    for (tokens, logs), length in zip(given, (4, 9), strict=True):
        assert tokens == length
        np.testing.assert_array_equal(logs, told[:length])
    ratelength.by_length(cache, range(9), SEQUENTIAL, profile, Identity.named("m"), (4,))
    assert given[-1] == (4, None)


def test_a_cache_comes_with_what_the_model_thought_of_its_tokens(tmp_path: Path) -> None:
    local, ids = MeasuredModel(write_model(tmp_path / "model")), list(range(3, 40))
    told = np.full(len(ids), np.nan, np.float32)
    cache = cache_of(local, ids, told)
    with torch.inference_mode():
        logs = torch.log_softmax(local.model(torch.tensor([ids])).logits[0, :-1].double(), dim=1)
    expected = logs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy() / np.log(2)
    np.testing.assert_allclose(told, [0, *expected], atol=1e-4)
    for one, other in zip(cache.layers, cache_of(local, ids).layers, strict=True):
        assert torch.equal(one.keys, other.keys)


def drawn(**parts: Any) -> dict[str, Any]:
    return {"windows": [{}] * 3, "prefix": 1024, **parts}


PARTS: dict[str, Any] = {
    "bits": {
        "premise": {
            "mean_surprisal": 4.0,
            "surprisal": [0.5, 2.0, 9.0],
            "energy": [[0.5, 1.0, 1.5], [1.0, 1.0, 1.0]],
            "rho": [0.5, 0.0],
        }
    },
    "curve": {
        "floor_bytes_per_token": 0.5,
        "rows": [
            {"recipe": "tokens", "restore_to_prefill": 1.1, "file_bytes_per_token": 2.0, "kl": 0.0},
            {"recipe": "cellar", "restore_to_prefill": 0.2, "file_bytes_per_token": 150.0, "kl": 0.02},
        ],
    },
    "length": {
        "documents": 2,
        "recipes": {"cellar": [{"tokens": 256, "coarse": None}, {"tokens": 512, "coarse": 90.0}], "floor": []},
    },
}


@pytest.mark.parametrize("names", [["bits"], ["curve"], ["length"], ["bits", "curve", "length"]], ids="+".join)
def test_a_panel_is_drawn_for_each_part_there_is(tmp_path: Path, names: list[str]) -> None:
    from matplotlib.image import imread

    path = tmp_path / "plot.png"
    sequenceplot.draw(drawn(**{name: PARTS[name] for name in names}), path)
    height, width, _ = imread(path).shape
    assert round(width / height / (5.6 / 4.8)) == len(names)


def test_without_a_part_nothing_is_drawn(tmp_path: Path) -> None:
    sequenceplot.draw(drawn(expected={}), tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())


def test_the_whole_of_it_runs_and_goes_on_from_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    model = write_model(tmp_path / "model")
    made = run("calibrate", "--model", model, "--recipe", "cellar", "--tokens", 2048, "--no-curve")
    assert made.code == 0, made
    monkeypatch.setattr(sequence, "demo_model", lambda: model)
    command = ["sequence.py", "--data", str(tmp_path), "--quick", "--part"]
    monkeypatch.setattr(sys, "argv", [*command, "bits", "expected", "length"])
    sequence.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["expected"]["tokens"] == 2 * len(sequence.QUICK.span)
    assert told["expected"]["evaluated"] == 20 * told["expected"]["tokens"]
    assert {row["curve"] for row in told["bits"]["rows"]} == set(sequencebits.QUICKLY)
    assert [row["tokens"] for row in told["length"]["recipes"]["sequential"]] == list(sequence.QUICK.lengths)
    assert {row["turbo"] for row in told["bits"]["at_equal_kl"]} == {"turbo-4", "turbo-2"}
    (written,) = (tmp_path / "home" / "bench" / "sequence").glob("*/quick.json")
    assert written.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sequencebits, "measured", None)
    monkeypatch.setattr(sys, "argv", [*command, "bits"])
    sequence.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bits"] == told["bits"]
    assert json.loads(written.read_text())["expected"] == told["expected"], "of a part that was not asked for"
