"""`kvcellar bench rate`: equal divergence from result files, variants of the codec, and where bits are said to go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clitools import run, write_model
from kvcellar.errors import InvalidInput
from kvcellar.evaluate.texts import Document
from kvcellar.frontends import calibration as calibrations
from kvcellar.frontends.bench import rateablation, ratebits, ratepeers
from kvcellar.frontends.bench.rateablation import POINTS, compare
from kvcellar.frontends.bench.rateshow import show
from kvcellar.frontends.bench.ratevariants import Blind, WeightedNumbers
from kvcellar.frontends.bench.ratewindows import Kept, chosen
from kvcellar.frontends.cli import bench_rate, bench_setup
from kvcellar.metric import loss_metric
from kvcellar.profile import Profile
from kvcellar.recipe import PRESETS
from kvcellar.rope import Rope
from kvcellar.symbols.adaptive import AdaptiveCoder, trained
from test_rate_stages import bound, calibration, sides, unseen

LAYERS = range(2)


def _row(recipe: str, kl: float, size: float, **more: Any) -> dict[str, Any]:
    sizes = {"file_bytes_per_token": size, "payload_bytes_per_token": size / 2}
    return {"recipe": recipe, "text": "all", "windows": 2, "kl": kl, "restore_class": "none", **sizes, **more}


def _run(name: str, windows: str, *rows: dict[str, Any]) -> ratepeers.Run:
    return ratepeers.Run(name, frozenset(windows), list(rows), "quality")


CURVE = (_row("cellar-fine", 0.01, 400), _row("cellar", 0.04, 100), _row("cellar-small", 0.1, 40))
EMPTY = {**_row("floor:empty", 0.3, 0), "file_bytes_per_token": None, "payload_bytes_per_token": None}


def test_a_peer_is_set_against_the_curve_at_its_own_divergence() -> None:
    runs = [_run("ours.json", "abc", EMPTY, *CURVE), _run("peers.json", "ab", EMPTY, _row("peer:x", 0.02, 4000))]
    (found,) = ratepeers.compare(runs)
    assert found["ours"]["file_bytes_per_token"] == pytest.approx(200)  # half way on logarithms
    assert found["ratio"] == {s: pytest.approx(20) for s in ratepeers.SIZES}
    assert (found["curve_file"], found["shared_windows"], found["why"]) == ("ours.json", 2, None)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (_row("peer:x", 0.2, 4000), "outside KL 0.01…0.1"),
        (_row("peer:x", 0.001, 4000), "outside KL 0.01…0.1"),
        (_row("peer:x", 0.4, 4000), "worse than ∅ (0.3)"),
        (_row("peer:x", 0.02, 4000, restore_class="whole"), "its restore runs the model (whole)"),
        (_row("peer:x", 0.02, 4000, text="essays"), "no cellar rows on this text"),
    ],
)
def test_what_cannot_be_compared_gets_no_ratio_and_a_reason(row: dict[str, Any], why: str) -> None:
    (found,) = ratepeers.compare([_run("one.json", "ab", EMPTY, row, *CURVE)])
    assert found["why"] == why
    assert found["ratio"] == dict.fromkeys(ratepeers.SIZES)


def test_windows_that_both_sides_tell_of_are_the_ones_compared() -> None:
    def told(kl: float, size: float) -> dict[str, Any]:
        return {"kl": kl, "file_bytes_per_token": size, "payload_bytes_per_token": size}

    peer = _row("peer:x", 9.0, 1, by_window={"b": told(0.02, 3000), "c": told(7.0, 1)})
    ours = [
        {**row, "by_window": {"a": told(5.0, 1), "b": told(row["kl"], row["file_bytes_per_token"])}} for row in CURVE
    ]
    (found,) = ratepeers.compare([_run("ours.json", "ab", *ours), _run("peers.json", "bc", peer)])
    assert found["by_window"]
    assert found["shared_windows"] == 1
    assert found["ratio"]["file_bytes_per_token"] == pytest.approx(3000 / 200)


def test_only_results_of_the_bench_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"rows": 1}')
    with pytest.raises(InvalidInput, match=r"a\.json"):
        ratepeers.read_run(tmp_path / "a.json")
    for name in ("quality", "quantizers"):
        value = {"benchmark": name, "windows": [{"id": "a"}], "rows": [CURVE[0]]}
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    assert [each.name for each in ratepeers.known_runs(tmp_path)] == ["quality.json"]


def test_tokens_bits_add_up_to_the_part() -> None:
    random = np.random.default_rng(0)
    arrays = [random.integers(-3, 4, (40, 1), np.int16), (random.standard_normal((40, 30)) * 2).astype(np.int16)]
    coder = AdaptiveCoder()
    tables = trained((LAYERS, which, array) for which, array in enumerate(arrays))
    coder.bind(calibration().geometry, Profile({f"symbols.{name}": value for name, value in tables.items()}, {}))
    bits, size = ratebits.spent(coder, arrays, LAYERS)
    assert [len(each) for each in bits] == [40, 40]
    assert all((each > 0).all() for each in bits)
    assert 8 * (size - 4) <= sum(each.sum() for each in bits) <= 8 * (size - len(arrays))
    none = [arrays[0], np.empty((40, 0), np.int16)]
    assert not ratebits.spent(coder, none, LAYERS)[0][1].any()


def test_static_tables_cost_no_less_than_the_entropy_of_what_they_counted() -> None:
    symbols = (np.random.default_rng(0).standard_normal((2000, 3)) * [0.2, 1, 9]).astype(np.int16)
    least = 2000 * ratebits.entropies(symbols).sum()
    assert least <= ratebits.Static(symbols).bits(symbols) <= 1.05 * least
    assert ratebits.Static(symbols).bits(np.full((1, 3), 5000)) > 3 * 20


def test_rank_correlation_with_equal_values() -> None:
    assert ratebits.spearman(np.array([1, 2, 2, 9]), np.array([-1, 5, 5, 6])) == pytest.approx(1)
    assert ratebits.spearman(np.array([1, 2, 3]), np.array([3, 2, 1])) == pytest.approx(-1)
    assert ratebits.spearman(np.array([1, 2, 3]), np.array([7, 7, 7])) is None


def test_weighted_numbers_come_back() -> None:
    stage = bound(WeightedNumbers(layers_per_group=2))
    tokens, held = unseen()
    x, positions = sides(held, LAYERS), torch.from_numpy(tokens.positions)
    back = stage.inverse(stage.forward(x, LAYERS, positions), x, LAYERS, positions)
    for a, b in zip(x, back, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)


def test_blind_gradients_know_variances_alone() -> None:
    blind, rope = Blind.of(calibration()), Rope()
    turns = rope.fit(blind, {})
    rope.bind(blind.geometry, Profile({f"transform.{name}": value for name, value in turns.items()}, {}))
    metric = loss_metric(blind, rope)
    costs = [f.diagonal() * v for f, v in zip(metric.layers, blind.variances, strict=True)]
    for layer, cost in enumerate(costs):
        torch.testing.assert_close(cost / costs[0].mean(), torch.ones(len(cost)), atol=0.02, rtol=0)
        matrix = metric.layers[layer] * blind.variances[layer].sqrt().outer(blind.variances[layer].sqrt())
        others = matrix - matrix.diagonal().diag()
        assert others.abs().mean() < 0.1 * matrix.diagonal().mean()
    seeing = loss_metric(calibration(), rope)
    assert [w.scaled[0].shape for w in metric.windows] == [w.scaled[0].shape for w in seeing.windows]


def _measured(name: str, factor: float, steps: tuple[float, ...]) -> dict[str, Any]:
    windows = np.array([1.0, 2.0, 4.0])
    kl, size = ([list(windows * s) for s in steps], [list(factor * windows / s) for s in steps])
    return {"variant": name, "what": "", "steps": list(steps), "kl": kl, "bytes": size}


def test_variants_are_compared_at_the_whole_codecs_divergences() -> None:
    steps = tuple(sorted(float((PRESETS[name].quantize or {})["step"]) for name in POINTS))
    whole, twice = _measured("whole", 1, steps), _measured("twice", 2, (steps[0] / 2, steps[1] * 1.3, steps[2] * 2))
    short = _measured("short", 2, steps[1:])
    found = {(row["variant"], row["point"]): row for row in compare([whole, twice, short], ["a", "b", "c"])}
    for point in POINTS:
        assert found["twice", point]["ratio"] == pytest.approx(2)
        assert found["twice", point]["ci"] == (pytest.approx(2), pytest.approx(2))
    assert found["short", "cellar-fine"]["ratio"] is None
    assert found["short", "cellar-fine"]["ci"] is None


def test_kept_results_are_made_once(tmp_path: Path) -> None:
    kept, made = Kept(tmp_path), []
    for _ in range(2):
        assert kept.get("one", lambda: made.append(1) or {"x": 1.5}) == {"x": 1.5}
    assert kept.get("two", lambda: 2) == 2
    assert made == [1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_the_study_on_a_tiny_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(calibrations, "WINDOW", 128)
    monkeypatch.setattr(bench_setup, "QUICK_CALIBRATION", 512)
    monkeypatch.setattr(bench_rate, "QUICK_CALIBRATION", 512)
    monkeypatch.setattr(rateablation, "MOST", 3)
    texts: list[object] = []
    for i in range(4):
        file = tmp_path / f"text{i}.txt"
        file.write_text(" ".join(f"Cellar {i} holds {j * j * (i + 1)} bottles of {j % 7}." for j in range(40)))
        texts += ["--text", file]
    results = tmp_path / "bench.json"
    results.write_text(json.dumps({"benchmark": "quality", "windows": [{"id": "a"}], "rows": [EMPTY, *CURVE]}))
    words = ("bench", "rate", "--model", model, *texts, "--from", results, "--quick", "--prefix", 544)
    more = ("--continuation", 24, "--out", tmp_path / "out.json", "--plot", tmp_path / "plot.png")
    done = run(*words, *more, "--json")
    assert done.code == 0, done.err
    result = done.json
    assert {"curve", "ablation", "bits", "surprisal", "length"} <= set(result)
    assert json.loads((tmp_path / "out.json").read_text())["ablation"] == result["ablation"]
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    names = [row["variant"] for row in result["ablation"]["rows"]]
    assert names[:2] == ["whole", "no prediction"]
    assert names[-1] == "static tables"
    rows = {row["variant"]: row for row in result["ablation"]["rows"]}
    assert rows["static tables"]["kl"] == rows["whole"]["kl"]
    for row in result["bits"]["groups"]:
        shared = sum(side["keys"] + side["values"] for side in row["sides"])
        assert shared == pytest.approx(row["coefficients"])
        assert row["payload"] == pytest.approx(row["exponents"] + row["coefficients"] + row["rest"])
        assert 0 < row["rest"] < 0.05  # bytes per token, of parts of 256
    assert result["surprisal"]["tokens"] == 2 * 256
    assert sum(row["tokens"] for row in result["surprisal"]["bins"]) == 2 * 256
    lengths = result["length"]["recipes"]["cellar"]
    assert [row["tokens"] for row in lengths] == [256, 512, 1024]
    assert lengths[0]["file"] > lengths[-1]["file"] > lengths[-1]["payload"]
    kept = run(*words, "--continuation", 24, "--part", "curve", "--part", "ablation")  # for a person, nothing anew
    assert kept.code == 0, kept.err
    assert "static tables" in kept.out
    assert "profile …" not in kept.err
    show({part: result[part] for part in ("bits", "surprisal", "length")})
    assert "Spearman" in capsys.readouterr().out


def test_test_text_is_refused() -> None:
    with pytest.raises(InvalidInput, match="for tuning alone"):
        chosen(lambda text: [1] * 99, [Document("d", "essays", "test", "text")], (), 8, 8, 1)
