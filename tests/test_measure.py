"""`kvcellar measure`: the risk profile of a tiny model, its budget by water-filling, and what the command says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clitools import run, write_model
from kvcellar.errors import InvalidInput
from kvcellar.frontends.cli.models import MeasuredModel
from kvcellar.frontends.reduce import reduce_cache
from kvcellar.frontends.risk import BESIDE, Text, agreement, law, mean_errors, risks, slots_for
from kvcellar.frontends.riskbudget import for_error, for_slots, predicted
from kvcellar.frontends.riskreport import report
from kvcellar.reduce.response import errors, responses
from kvcellar.reduce.tokens import joined
from kvcellar.reduce.weighted import REDUCERS, reduce_head
from models import logits, prefill

TEXT = "".join(
    f"In cellar {i} the cask of year {1700 + 7 * i % 300} stands behind door {i * i % 97}. " for i in range(9)
)
TOKENS, CONTINUATION = 160, 48
costs = st.lists(st.floats(0, 1e4), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def local(model: Path, tmp_path_factory: pytest.TempPathFactory) -> MeasuredModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCELLAR_HOME", str(tmp_path_factory.mktemp("home")))
        return MeasuredModel(model)


@pytest.fixture(scope="module")
def text(local: MeasuredModel) -> Text:
    return Text(local, local.encode(TEXT)[: TOKENS + CONTINUATION], TOKENS, queries=32)


@pytest.fixture(scope="module")
def rows(text: Text) -> list[dict[str, Any]]:
    return risks(text, [0.3, 0.6], {name: REDUCERS[name]() for name in ("random", "matching")}, seeds=3, quiet=True)


@settings(deadline=None, max_examples=50)
@given(costs, st.integers(1, 9), st.integers(10, 30), st.floats(0, 1))
def test_slots_add_up_and_moving_one_gains_nothing(each: list[float], least: int, tokens: int, share: float) -> None:
    heads = len(each)
    total = heads * least + int(share * heads * (tokens - least))
    slots = for_slots(each, total, tokens, least)
    assert slots.sum() == total
    assert least <= slots.min() <= slots.max() <= tokens
    best = predicted(np.array(each), slots, tokens).sum()
    for giver in np.flatnonzero(slots > least):
        for taker in np.flatnonzero(slots < tokens):
            moved = slots.copy()
            moved[giver] -= 1
            moved[taker] += 1
            assert predicted(np.array(each), moved, tokens).sum() >= best * (1 - 1e-9) - 1e-12


@settings(deadline=None, max_examples=50)
@given(costs, st.floats(0, 100))
def test_a_target_error_is_met_and_not_by_far_too_many_slots(each: list[float], target: float) -> None:
    slots = for_error(each, target, 50, 2)
    assert predicted(np.array(each), slots, 50).mean() <= target + 1e-9
    fewer = np.maximum(slots - 1, 2)
    assert (fewer == slots).all() or predicted(np.array(each), fewer, 50).mean() > target


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: for_slots([1.0], 60, 50), "60 slots for 1 heads; expected 1 to 50"),
        (lambda: for_slots([-1.0], 5, 50), "none negative"),
        (lambda: for_error([1.0], float("nan"), 50), "target error of nan"),
        (lambda: slots_for([0.1], 200), "expected over 36"),
        (lambda: slots_for([1.0], 200), "fewer than 200"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(call: Any, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        call()


def test_what_a_head_is_asked_is_what_the_model_asks(text: Text, local: MeasuredModel) -> None:
    """The first layer's queries behind the cache, from its own weights and rotary angles."""
    ids = torch.tensor([local.encode(TEXT)[TOKENS : TOKENS + CONTINUATION]])
    layer, inner = local.model.model.layers[0], local.model.model
    with torch.no_grad():
        hidden = layer.input_layernorm(inner.embed_tokens(ids))
        asked = layer.self_attn.q_proj(hidden).view(1, CONTINUATION, 4, 16).transpose(1, 2)
        cos, sin = inner.rotary_emb(hidden, torch.arange(TOKENS, TOKENS + CONTINUATION)[None])
        half = torch.cat([-asked[..., 8:], asked[..., :8]], dim=-1)
        expected = (asked * cos[:, None] + half * sin[:, None])[0]
    assert text.later
    assert torch.allclose(text.behind[0], expected, atol=1e-4)


def test_measured_errors_are_those_of_the_exact_identity(text: Text, rows: list[dict[str, Any]]) -> None:
    for number, (layer, head) in enumerate(text.heads):
        tokens, own, behind, scale = text.of_head(layer, head)
        middle, rest = tokens[4:-32], joined([tokens[:4], tokens[-32:]])
        at = rows[number]["keep"]["0.3"]
        assert at["slots"] == 48
        reduced = reduce_head(REDUCERS["matching"](), tokens, 48, queries=own, scale=scale)
        exact = errors(middle, reduced[4:-32], behind, scale, rest).square().sum(dim=1).mean()
        assert at["measured"]["matching"] == pytest.approx(float(exact), rel=1e-3)


def test_random_subsets_err_as_much_as_predicted(text: Text) -> None:
    """Over many draws on the queries that the prediction was made from, where it is an expectation."""
    tokens, own, _, scale = text.of_head(0, 0)
    own = own / 8  # the first order holds where attention is spread
    whole = tokens.attend(own, scale)
    drawn = [reduce_head(REDUCERS["random"](), tokens, 96, scale=scale, seed=seed) for seed in range(200)]
    measured = np.mean([float((r.attend(own, scale) - whole).square().sum(dim=1).mean()) for r in drawn])
    profile = responses(tokens[4:-32], own, scale, joined([tokens[:4], tokens[-32:]]))
    assert measured == pytest.approx(profile.sampling_error(96 - BESIDE), rel=0.15)


def test_more_tokens_err_less_and_agreement_is_over_all_heads(rows: list[dict[str, Any]]) -> None:
    few, many = mean_errors(rows, ["matching"])
    assert (few["slots"], many["slots"]) == (48, 96)
    assert 0 < many["relative_error"] < few["relative_error"]
    found = agreement(rows, ["random", "matching"])
    said = {"random": ("expected", "sampling"), "matching": ("expected", "aware")}
    assert [(each["method"], each["predictor"], each["keep"], each["heads"]) for each in found] == [
        (name, by, keep, 6) for name, by_name in said.items() for by in by_name for keep in (0.3, 0.6)
    ]


def test_a_law_between_predicted_and_measured_errors() -> None:
    said = [0.1, 0.2, 0.5, 3.0]
    found = law(said, [7 * p**1.2 for p in said])
    assert (found["heads"], found["spearman"], found["slope"]) == (4, pytest.approx(1), pytest.approx(1.2))
    turned = law([*said, 0.0], [1 / p for p in said] + [9.0])
    assert (turned["heads"], turned["slope"]) == (4, pytest.approx(-1))
    same = law([1.0, 1.0], [1.0, 2.0])
    assert (same["spearman"], same["slope"], same["ratio"]) == (None, None, 1.5)


def test_what_is_expected_knows_nothing_of_the_next_tokens(text: Text, rows: list[dict[str, Any]]) -> None:
    """Another continuation changes what is measured, and no prediction."""
    other = copy.copy(text)
    other.behind = {i: queries.flip(2) for i, queries in text.behind.items()}
    again = risks(other, [0.3, 0.6], {name: REDUCERS[name]() for name in ("random", "matching")}, seeds=3, quiet=True)
    for row, same in zip(rows, again, strict=True):
        assert {**row, "keep": 0} == {**same, "keep": 0}
        for fraction in row["keep"]:
            a, b = row["keep"][fraction], same["keep"][fraction]
            assert {**a, "measured": 0} == {**b, "measured": 0}
            assert a["measured"] != b["measured"]


def test_the_report_names_hard_heads_and_takes_the_best_method(rows: list[dict[str, Any]]) -> None:
    methods = {name: REDUCERS[name]() for name in ("random", "matching")}
    made = report(rows, methods, TOKENS, budget=0.3)
    assert made["recommendation"]["method"] == "matching"
    assert made["recommendation"]["reduce"]["id"] == "matching/1"
    assert made["recommendation"]["reduce"]["keep"] == 0.3
    worst = max(rows, key=lambda row: row["keep"]["0.3"]["expected"]["matching"] / row["read"])
    assert made["hard_heads"]["worst"][0]["layer"] == worst["layer"]
    budget = made["budget"]
    assert sum(map(sum, budget["slots"])) == 6 * 48
    assert budget["relative_error"] <= budget["relative_error_alike"] * (1 + 1e-9)
    strict = report(rows, methods, TOKENS, target=1e-9)
    assert not strict["recommendation"]["met"]
    assert strict["recommendation"]["sentence"].startswith("None of the fractions")
    assert strict["budget"]["relative_error"] <= 1e-9
    easy = report(rows, methods, TOKENS, target=1e9)
    assert (easy["recommendation"]["keep"], easy["recommendation"]["met"]) == (0.3, True)
    with pytest.raises(InvalidInput, match="one of both"):
        report(rows, methods, TOKENS)


def test_the_budget_is_one_that_reduce_cache_takes(local: MeasuredModel, rows: list[dict[str, Any]]) -> None:
    budget = report(rows, {"random": REDUCERS["random"]()}, TOKENS, budget=0.3)["budget"]["slots"]
    ids = local.encode(TEXT)[:TOKENS]
    cache = reduce_cache(prefill(local.model, ids), budget=budget, model=local.model, method="random")
    assert cache.slots == max(map(max, budget))
    assert cache.get_seq_length() == TOKENS
    assert torch.isfinite(logits(local.model, cache, ids[:3])).all()


def _measure(model: Path, tmp_path: Path, *words: object) -> Any:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    sizes = ("--tokens", TOKENS, "--continuation", CONTINUATION, "--queries", 16, "--seeds", 2)
    return run("measure", "--model", model, "--text", file, *sizes, *words)


def test_the_command(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    out, plot = tmp_path / "risk.json", tmp_path / "risk.png"
    common = ("--keep", "0.3,0.6", "--methods", "random,matching")
    told = _measure(model, tmp_path, *common, "--target-error", 0.5, "--out", out, "--plot", plot)
    assert told.code == 0, told.err
    assert "of the tokens by" in told.out.splitlines()[-1]
    assert "rank correlation" in told.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(out.read_text())
    assert len(written["heads"]) == 6
    assert written["text"] == {"name": "text.txt", "tokens": TOKENS, "continuation": CONTINUATION}
    found = _measure(model, tmp_path, *common, "--budget", 0.4, "--json").json
    assert set(found["heads"][0]["keep"]) == {"0.3", "0.4", "0.6"}
    assert found["budget"]["kept"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--budget", 0.3, "--target-error", 1), "one of both"),
        (("--keep", "0.1"), "expected over 36"),
        (("--keep", "lots"), "expected fractions"),
        (("--methods", "magic", "--keep", "0.4"), "unknown method 'magic'"),
        (("--tokens", 3000), "3,048 tokens; the model has positions for 2,048"),
        (("--tokens", 1000), "tokens; expected 1,000"),
    ],
)
def test_the_command_refuses(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], told: str
) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    outcome = _measure(model, tmp_path, *words)
    assert outcome.code == 2
    assert told in outcome.err
