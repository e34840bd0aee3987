"""Some thousand damaged archives in every run of the tests; and the fuzzer itself, which must notice what is wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import fuzz
import fuzzcheck
from fuzzcases import Case, cases
from fuzzcheck import exercise, input_of
from fuzzrecords import put_together, taken_apart
from kvcellar.archive import reader, survey
from kvcellar.archive.block import BlockHead
from kvcellar.archive.reader import ArchiveReader

pytestmark = pytest.mark.usefixtures("quick")
SEED = 20261130  # another one than that of the long run
INPUTS = 2_000


@pytest.fixture(scope="module")
def held() -> list[Case]:
    found = cases()
    fuzz.run(SEED, range(30), found)  # what is loaded with the first inputs is none of their time and memory
    return found


def findings(held: list[Case], inputs: int) -> list[str]:
    return [f"{found}" for found in fuzz.run(SEED, range(inputs), held)["findings"]]


def test_every_damaged_archive_gives_what_was_saved_or_an_error_of_ours(held: list[Case]) -> None:
    result = fuzz.run(SEED, range(INPUTS), held)
    assert result["findings"] == []
    outcomes = result["outcomes"]
    assert sum(outcomes.values()) == INPUTS
    deep = outcomes["right"] + outcomes["opened, then DamagedArchive"]
    assert deep > INPUTS // 4, f"too few reach what lies behind the checksums: {outcomes}"


def test_without_a_lie_an_archive_is_put_together_as_it_was(held: list[Case]) -> None:
    for case in held:
        assert put_together(taken_apart(case.data)) == case.data, case.name
        assert exercise(fuzzcheck.Input(0, "grow", case.data, case, case)) == "right"


def test_an_input_is_known_by_its_seed_and_number(held: list[Case]) -> None:
    first, again = ([input_of(SEED, number, held) for number in range(200)] for _ in range(2))
    assert [(given.kind, given.data) for given in first] == [(given.kind, given.data) for given in again]
    kinds = {kind for given in first for kind in given.kind.removeprefix("forged: ").split("+")}
    assert {"part", "block head", "manifest", "index", "commit", "frame", "records", "flip", "cut"} <= kinds
    assert sum(given.forged for given in first) > 80
    assert len({given.data for given in first} - {case.data for case in held}) > 180


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Ways to break what is fuzzed."""
    original = BlockHead.unpack

    def crash(data: bytes, part: str) -> BlockHead:
        head = original(data, part)
        return head if head.start < 1000 else {}[head.start]

    ways = {
        "a part's checksum": lambda: monkeypatch.setattr(reader, "checksum", Anything()),
        "an error that is not ours": lambda: monkeypatch.setattr(BlockHead, "unpack", staticmethod(crash)),
        "time": lambda: monkeypatch.setattr(fuzz, "SECONDS", 0),
        "memory": lambda: monkeypatch.setattr(fuzz, "MEGABYTES", -1),
        "repair takes too little": lambda: monkeypatch.setattr(survey.Survey, "intact", lambda *_, **__: False),
        "match": lambda: monkeypatch.setattr(ArchiveReader, "match", lambda *_: (0, None)),
    }
    return lambda what: ways[what]()  # type: ignore[return-value]


class Anything:
    """A checksum that is always the right one."""

    def __call__(self, data: object) -> Anything:
        return self

    def __eq__(self, other: object) -> bool:
        return True

    def __index__(self) -> int:
        return 0

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("what", ["a part's checksum", "an error that is not ours", "repair takes too little", "match"])
def test_the_fuzzer_notices(what: str, broken: Callable[[str], None], held: list[Case]) -> None:
    broken(what)
    assert findings(held, 300)


@pytest.mark.parametrize("what", ["time", "memory"])
def test_the_fuzzer_keeps_its_limits(what: str, broken: Callable[[str], None], held: list[Case]) -> None:
    broken(what)
    assert len(findings(held, 20)) == 20


def test_an_input_that_ends_the_process_is_a_finding(held: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    def deadly(given: fuzzcheck.Input) -> str:
        if given.number == 5:
            os._exit(3)
        return "right"

    monkeypatch.setattr(fuzz, "exercise", deadly)
    results = list(fuzz.isolated(SEED, range(12), held))
    total = fuzz.added(fuzz.empty(SEED, held), results, 12)
    (found,) = total["findings"]
    assert (found["input"], found["problem"]) == (5, "the process ended with code 3")
    assert total["outcomes"] == {"right": 6, "in a process that died": 5, "process died": 1}


def test_a_run_goes_on_where_it_stopped(held: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[dict] = []
    monkeypatch.setattr(fuzz, "CHUNK", 4)
    monkeypatch.setattr(fuzz, "exercise", lambda given: "right")
    monkeypatch.setattr(fuzz, "write_result", lambda name, total: saved.append(total))
    total = fuzz.go(fuzz.empty(SEED, held), 8, 2, held, "none")
    assert (total["inputs"], sorted(total["done"])) == (8, [0, 4])
    total = fuzz.go(total, 18, 2, held, "none")
    assert (total["inputs"], sorted(total["done"]), total["outcomes"]) == (18, [0, 4, 8, 12], {"right": 18})
    assert saved[-1] == total
