"""Margins and exact match, worked out by hand; and what a cache without the context does to them."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcellar
from clitools import run, write_model
from kvcellar.errors import InvalidInput
from kvcellar.evaluate.tasks import Task, generate
from kvcellar.frontends.bench.margins import TaskBench
from kvcellar.frontends.bench.tasks import Retained, retained, scored
from kvcellar.frontends.cli.models import LocalModel, empty_cache
from models import pairs, same_bits

CONTEXT = "The key stands in this line: gold."


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCELLAR_HOME", str(folder / "home"))
        return LocalModel(write_model(folder / "model"))


@pytest.fixture
def cache(local: LocalModel) -> Any:
    filled = empty_cache()
    local.prefill(local.encode(CONTEXT), filled, quiet=True)
    return filled


def task(answer: str = "gold", distractors: tuple[str, ...] = ("lead", "iron")) -> Task:
    return Task("needle_single", CONTEXT, "\nThe key is", answer, distractors, 0.5, "t")


def mean_log_prob(local: LocalModel, candidate: str, context: str = CONTEXT) -> float:
    """By one pass over the whole text, without a cache."""
    before, ids = local.encode(f"{context}\nThe key is"), local.encode(f" {candidate}")
    with torch.no_grad():
        logits = local.model(torch.tensor([before + ids])).logits[0].double()
    log_probs = [
        float(logits[len(before) + i - 1, token] - logits[len(before) + i - 1].logsumexp(0))
        for i, token in enumerate(ids)
    ]
    return sum(log_probs) / len(log_probs)


def rigged(local: LocalModel, sentence: str, by: float) -> LocalModel:
    """`local`, but every token of `sentence` makes its next one likelier by `by` nats; the rest is all alike.

    The sentence must have no token twice, so that what follows is told by one token alone.
    """
    ids = local.encode(sentence)
    assert len(set(ids)) == len(ids)
    follower = dict(pairwise(ids))

    @dataclass
    class SteeredModel:
        dtype = torch.float32

        config: Any

        def __call__(self, given: Tensor, **settings: Any) -> Any:
            logits = torch.zeros_like(local.model(given, **settings).logits)
            for position, token in enumerate(given[0].tolist()):
                if token in follower:
                    logits[0, position, follower[token]] = by
            return SimpleNamespace(logits=logits)

    steered = copy.copy(local)
    steered.model = SteeredModel(local.model.config)
    return steered


def test_margin_is_that_of_one_pass_over_the_text(local: LocalModel, cache: Any) -> None:
    for answer, *distractors in (("gold", "lead", "iron"), ("iron", "gold"), ("a", "longer", "xy")):
        expected = mean_log_prob(local, answer) - max(mean_log_prob(local, wrong) for wrong in distractors)
        found = scored(local, cache, task(answer, tuple(distractors)))
        assert found["margin"] == pytest.approx(expected, abs=1e-4)


def test_the_cache_is_left_as_it_was(local: LocalModel, cache: Any) -> None:
    before = copy.deepcopy(pairs(cache))
    first = scored(local, cache, task())
    assert same_bits(pairs(cache), before)
    assert scored(local, cache, task()) == first


def test_margin_by_hand(local: LocalModel, cache: Any) -> None:
    """After "s": " " at +5, then "g", "o", "l", "d"; the vocabulary has 256 tokens, all others at 0."""
    steered = rigged(local, "s gold", by=5.0)
    likely = 5 - math.log(math.exp(5) + 255)
    alike = -math.log(256)
    unlikely = likely - 5  # where another token is the likely one
    found = scored(steered, cache, task("gold", ("lead", "iron")))
    # " lead": the space is likely; "l" for "g", "e" for "d", "a" and "d" after tokens that foretell nothing
    lead = (likely + 2 * unlikely + 2 * alike) / 5
    # " iron": the space; "i" for "g"; "r", "o" foretold by nothing; "n" where "l" was likely
    iron = (likely + 2 * unlikely + 2 * alike) / 5
    assert found == {"margin": pytest.approx(likely - max(lead, iron), abs=1e-6), "exact": True}


def test_a_model_that_prefers_a_distractor_has_a_negative_margin(local: LocalModel, cache: Any) -> None:
    steered = rigged(local, "s lead", by=5.0)
    found = scored(steered, cache, task("gold", ("iron", "lead")))
    likely, alike = 5 - math.log(math.exp(5) + 255), -math.log(256)
    # " gold": the space; "g" for "l"; "o", "l" foretold by nothing; "d" where "e" was likely
    gold = (likely + 2 * (likely - 5) + 2 * alike) / 5
    assert found == {"margin": pytest.approx(gold - likely, abs=1e-6), "exact": False}


def test_exact_takes_as_many_tokens_as_the_answer_and_strips(local: LocalModel, cache: Any) -> None:
    steered = rigged(local, "s golden", by=50.0)
    assert scored(steered, cache, task("gold"))["exact"]
    assert scored(steered, cache, task("golden"))["exact"]
    assert scored(steered, cache, task(" gold\n"))["exact"] is False  # two tokens more are generated: "golden"
    assert scored(rigged(local, "s\tgold", by=50.0), cache, task("gold"))["exact"]
    assert not scored(rigged(local, "s gol.", by=50.0), cache, task("gold"))["exact"]


def test_a_task_without_distractors_has_no_margin(local: LocalModel, cache: Any) -> None:
    assert scored(local, cache, task(distractors=()))["margin"] is None


def test_the_margin_depends_on_what_the_cache_holds(local: LocalModel, cache: Any, tmp_path: Path) -> None:
    ids = local.encode(CONTEXT)
    kvcellar.save(tmp_path / "a.kvc", cache, tokens=ids, identity=local.identity)
    with kvcellar.open(tmp_path / "a.kvc", identity=local.identity) as archive:
        whole, part = archive.restore().cache, archive.restore(positions=[0, 1, len(ids) - 1]).cache
    full = scored(local, cache, task())
    assert scored(local, whole, task()) == full
    empty = scored(local, part, task())
    assert empty["margin"] != pytest.approx(full["margin"], abs=0.01)
    assert scored(local, part, task()) == empty


def test_generated_tasks_are_scored(local: LocalModel) -> None:
    [made] = generate("key_value", [], local.encode, budget=300, count=1)
    filled = empty_cache()
    local.prefill(local.encode(made.context), filled, quiet=True)
    found = scored(local, filled, made)
    assert found["margin"] is not None
    assert math.isfinite(found["margin"])


def test_what_cannot_be_scored_is_refused(local: LocalModel, cache: Any) -> None:
    with pytest.raises(InvalidInput, match="positions for 2,048"):
        scored(local, cache, task(distractors=("x" * 2048,)))
    with pytest.raises(InvalidInput, match="'' gives no token"):
        scored(local, cache, Task("k", CONTEXT, "", "gold", (), None, "t"))


def test_retained_is_a_ratio_of_sums() -> None:
    # (8 − 1) + (3 − 1) kept of (10 − 0) + (4 − 1) = 13; the third task's context makes too little difference
    full, empty, restored = [10.0, 4.0, 5.0], [0.0, 1.0, 3.5], [7.0, 3.0, -90.0]
    assert retained(full, empty, restored) == Retained(pytest.approx(9 / 13), 2)
    assert retained(full, empty, full) == (1.0, 2)
    assert retained(full, empty, empty) == (0.0, 2)


def test_a_task_counts_from_two_nats_on() -> None:
    assert retained([2.0], [0.0], [1.0]) == (0.5, 1)
    assert retained([1.999], [0.0], [1.0]) is None
    assert retained([-3.0], [-5.0], [-4.0]) == (0.5, 1)
    assert retained([], [], []) is None


def test_tasks_without_margin_do_not_count() -> None:
    assert retained([4.0, None], [0.0, 0.0], [2.0, 2.0]) == (0.5, 1)
    assert retained([4.0], [0.0], [None]) is None


def test_margins_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInput, match="2 margins of full, 1 of empty and 2 of restored"):
        retained([1.0, 2.0], [1.0], [1.0, 2.0])
    for triple in ((math.nan, 0.0, 1.0), (5.0, -math.inf, 1.0), (5.0, 0.0, math.nan)):
        with pytest.raises(InvalidInput, match="expected finite numbers"):
            retained(*([margin] for margin in triple))


def test_tasks_of_files_that_fit_the_model_are_benched(
    local: LocalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    rows = [{"input": f"Line one.\nThe number is {n}.\nWhich? It is", "outputs": [n]} for n in ("12", "34", "56")]
    rows.append({"input": "x" * 3000 + "\nWhich? It is", "outputs": ["78"]})  # of 2,048 positions
    files = {"ruler": tmp_path / "ruler.jsonl", "text": tmp_path / "text.txt"}
    files["ruler"].write_text("\n".join(map(json.dumps, rows)))
    files["text"].write_text("Some text of the cellar. " * 12)
    size = ("--prefix", 96, "--continuation", 24, "--recipes", "exact", "--text", files["text"])
    found = run("bench", "--model", local.folder, *size, "--ruler", files["ruler"])
    assert found.code == 0, found.err
    assert "1 of 4 tasks need more than 2,048 positions: left out" in found.err
    assert "task:ruler" in found.out
    (row,) = (
        row
        for row in run("bench", "--model", local.folder, *size, "--ruler", files["ruler"], "--json").json
        if row["text"] == "task:ruler" and row["recipe"] == "exact"
    )
    assert (row["windows"], row["exact_match"]) == (3, row["exact_match_full"])
    files["ruler"].write_text(json.dumps(rows[-1]))
    refused = run("bench", "--model", local.folder, *size, "--ruler", files["ruler"])
    assert refused.code == 2
    assert "none of the 1 tasks fits the 2,048 positions" in refused.err


def test_a_task_that_changed_under_its_id_is_asked_anew(
    local: LocalModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    margins = []
    for context in (CONTEXT, CONTEXT.replace("gold", "lead"), CONTEXT):
        bench = TaskBench(local, [replace(task(), context=context)], quiet=True)
        bench.prepare()
        margins.append(bench._references()[0]["full"]["margin"])
    assert margins[0] == margins[2] != margins[1]
