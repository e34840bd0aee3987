"""Tasks from a seed, and from files: the same each time, within the budget, and with the answer where it should be."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcellar.errors import InvalidInput
from kvcellar.evaluate.tasks import _CITIES, DEPTHS, KINDS, WORDS, Task, generate
from kvcellar.evaluate.tasks_files import longbench_v2, ruler

_SUBJECTS = "The archive|Each block|A reader|The checksum|This page|A lemon in Paris|The tower"
_VERBS = "is kept beside|names|may not change|ends before|was written for"
DOCUMENTS = [
    " ".join(
        f"{subject} {verb} number {page}, {subject.lower()} included."
        for page in range(start, start + 40)
        for subject in _SUBJECTS.split("|")
        for verb in _VERBS.split("|")
    )
    for start in (0, 50, 100)
]


def words(text: str) -> list[str]:
    """Words, marks and line breaks: a tokenizer whose counts do add up."""
    return re.findall(r"\w+|[^\w ]", text)


def octets(text: str) -> list[int]:
    return list(text.encode())


def merged(text: str) -> list[str]:
    """A tokenizer whose counts do not add up: a run of three lines' joints or spaces is one token, others are kept."""
    return re.findall(r"(?:[^\w]*\w){1,3}|[^\w]+", text)


def make(kind: str, budget: int = 900, encode: Any = words, count: int = 5, **settings: Any) -> list[Task]:
    return generate(kind, DOCUMENTS, encode, budget=budget, count=count, **settings)


def fact(task: Task) -> str:
    """The line that holds the answer."""
    [line] = [line for line in task.context.splitlines() if task.answer in line]
    return line


def test_words_are_told_apart() -> None:
    for names in (WORDS, _CITIES):
        assert len(set(names)) == len(names)
        assert not [(a, b) for a in names for b in names if a != b and a in b]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_tasks(kind: str) -> None:
    assert make(kind, seed=3) == make(kind, seed=3)
    assert make(kind, seed=3) == make(kind, seed=3, count=9)[:5]
    assert not {task.context for task in make(kind, seed=3)} & {task.context for task in make(kind, seed=4)}
    ids = [task.id for seed in (3, 4) for budget in (300, 900) for task in make(kind, budget, seed=seed)]
    assert len(set(ids)) == len(ids)


def test_another_process_makes_the_same_tasks() -> None:
    code = (
        "import sys, hashlib\nfrom kvcellar.evaluate.tasks import generate\n"
        "t = generate('key_value', [], str.split, budget=200, count=3)\n"
        "assert 'torch' not in sys.modules\nprint(hashlib.sha256(repr(t).encode()).hexdigest())"
    )
    seen = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(seen) == 1
    assert len(seen.pop().strip()) == 64


@pytest.mark.parametrize("encode", [words, octets, merged])
@pytest.mark.parametrize("budget", [500, 1500, 4000])
@pytest.mark.parametrize("kind", KINDS)
def test_budget_is_nearly_used_and_never_exceeded(kind: str, budget: int, encode: Any) -> None:
    for task in make(kind, budget, encode, count=3):
        assert (0.75 if encode is merged else 0.9) * budget <= len(encode(task.context)) <= budget


@pytest.mark.parametrize("encode", [words, merged])
@pytest.mark.parametrize("depth", [0.0, 0.03, *DEPTHS, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_depth_is_met(kind: str, depth: float, encode: Any) -> None:
    for task in make(kind, 1500, encode, count=4, depths=[depth]):
        before, _, after = task.context.partition(fact(task))
        tokens = len(encode(before)), len(encode(after))
        assert task.depth == depth
        assert tokens[0] / sum(tokens) == pytest.approx(depth, abs=0.03)


def test_depths_are_gone_round() -> None:
    assert [task.depth for task in make("key_value", 200, count=7)] == [*DEPTHS, *DEPTHS[:2]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_stands_in_the_context_once_and_differs_from_distractors(kind: str) -> None:
    for task in make(kind, count=10, seed=8):
        assert task.kind == kind
        assert task.context.count(task.answer) == 1
        assert task.answer not in task.question
        assert len({task.answer, *task.distractors}) == 1 + len(task.distractors)
        assert len(task.distractors) >= 3
        assert set(task.distractors) <= set(WORDS)
        assert task.question.startswith("\n")
        assert task.question == task.question.rstrip()


def test_a_single_needle_is_a_line_and_its_distractors_are_nowhere() -> None:
    for task in make("needle_single", count=10):
        assert fact(task) == f"{task.question.strip()} {task.answer}."
        assert not any(word in task.context for word in task.distractors)


def test_many_needles_are_asked_for_one() -> None:
    for task in make("needle_multi", count=10):
        lines = [line for line in task.context.splitlines() if re.fullmatch(r"The \w+ \w+ of \w+ is \w+\.", line)]
        assert len(lines) == 4
        assert fact(task) == f"{task.question.strip()} {task.answer}."
        assert {line.split()[-1].rstrip(".") for line in lines} == {task.answer, *task.distractors}


def test_a_table_asks_for_one_of_its_rows() -> None:
    for task in make("key_value", count=10):
        rows = dict(line.split(": ") for line in task.context.splitlines()[1:])
        assert len(rows) == len(task.context.splitlines()) - 1 > 100
        assert rows[task.question.strip("\n:")] == task.answer
        assert set(task.distractors) <= set(rows.values())


def test_a_chain_of_variables_leads_to_the_answer() -> None:
    for task in make("variables", count=10):
        assigned = dict(line.split(" = ") for line in task.context.splitlines() if " = " in line)
        value = task.question.split()[-2]
        hops = 0
        while value in assigned:
            value, hops = assigned[value], hops + 1
        assert value == task.answer
        assert hops >= 2
        assert task.distractors[0] in assigned.values()
        assert not any(word in task.context for word in task.distractors[1:])


def test_one_row_of_a_list_deviates() -> None:
    for task in make("repeated", count=10):
        rows = [line.rstrip(".").split()[1::2] for line in task.context.splitlines()[1:]]
        assert len({key for key, _ in rows}) == len(rows) > 100
        assert [word for _, word in rows].count(task.distractors[0]) == len(rows) - 1
        assert f"{task.question.strip()} {task.answer}." == fact(task)


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_without_room_is_refused(kind: str) -> None:
    for budget in (-1, 0, 1, 8):
        with pytest.raises(InvalidInput, match="budget"):
            make(kind, budget)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"task kind 'haystack'; expected one of needle_single"):
        make("haystack")
    for depths in ([], [0.5, 1.5], [-0.1], [float("nan")]):
        with pytest.raises(InvalidInput, match="depths"):
            make("key_value", depths=depths)
    for documents in ([], [""], ["Too short."]):
        with pytest.raises(InvalidInput, match="tokens of filler"):
            generate("needle_single", documents, words, budget=400, count=1)


LONGBENCH = {
    "_id": "a1",
    "context": "Long text.",
    "question": "Which?",
    "choice_A": "one",
    "choice_B": "two",
    "choice_C": "three",
    "choice_D": "four",
    "answer": "C",
}
RULER = [
    {"index": 7, "input": "Memorize.\nThe number is 12.\nWhat is it? It is ", "outputs": ["12"], "length": 20},
    {"input": "Text\nQuestion", "answer_prefix": " Answer:", "outputs": ["34", "12"]},
    {"input": "Text\nQuestion\n", "outputs": ["56"]},
]


def written(folder: Path, *records: Any, as_list: bool = False) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text(json.dumps(records, indent=1) if as_list else "\n\n".join(map(json.dumps, records)) + "\n")
    return path


@pytest.mark.parametrize("as_list", [False, True])
def test_longbench_v2_loads(tmp_path: Path, as_list: bool) -> None:
    second = {k: v for k, v in LONGBENCH.items() if k != "_id"} | {"answer": " A "}
    first, other = longbench_v2(written(tmp_path, LONGBENCH, second, as_list=as_list))
    assert first == Task(
        "longbench_v2",
        "Long text.",
        "\n\nQuestion: Which?\n(A) one\n(B) two\n(C) three\n(D) four\nThe letter of the right choice is",
        "C",
        ("A", "B", "D"),
        None,
        "longbench_v2-a1",
    )
    assert (other.answer, other.id) == ("A", "longbench_v2-1")


def test_ruler_loads(tmp_path: Path) -> None:
    first, second, third = ruler(written(tmp_path, *RULER))
    assert first == Task(
        "ruler", "Memorize.\nThe number is 12.", "\nWhat is it? It is", "12", ("34", "56"), None, "ruler-7"
    )
    assert (second.question, second.answer, second.distractors) == ("\nQuestion Answer:", "34", ("56",))
    assert (third.context, third.question, third.distractors) == ("Text", "\nQuestion", ("12", "34"))
    assert [task.distractors for task in ruler(written(tmp_path, RULER[0]))] == [()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": None}, r"tasks\.jsonl, line 3: 'context' is null; expected text"),
        ({"choice_C": ""}, r"line 3: 'choice_C' is \"\"; expected text"),
        ({"question": ["x" * 50]}, r"line 3: 'question' is \[\"x{38}…; expected text"),
        ({"answer": "E"}, r"line 3: 'answer' is \"E\"; expected one of A, B, C, D"),
        ({"answer": "AB"}, r"'answer' is \"AB\"; expected one of A, B, C, D"),
        (["choice_B"], r"line 3: no field 'choice_B'; there are '_id', 'context'"),
        (["answer"], r"line 3: no field 'answer'"),
    ],
)
def test_wrong_longbench_records_are_named(tmp_path: Path, change: Any, message: str) -> None:
    bad = LONGBENCH | change if isinstance(change, dict) else {k: v for k, v in LONGBENCH.items() if k not in change}
    with pytest.raises(InvalidInput, match=message):
        longbench_v2(written(tmp_path, LONGBENCH, bad))
    with pytest.raises(InvalidInput, match=message.replace("line 3", "record 2")):
        longbench_v2(written(tmp_path, LONGBENCH, bad, as_list=True))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"outputs": ["1"]}, r"line 3: no field 'input'; there are 'outputs'"),
        ({"input": "a\nb"}, r"line 3: no field 'outputs'; there are 'input'"),
        ({"input": "one line", "outputs": ["1"]}, r"line 3: 'input' has one line"),
        ({"input": "\nb", "outputs": ["1"]}, r"line 3: 'input' has one line"),
        ({"input": "a\nb", "outputs": []}, r"line 3: 'outputs' is \[\]; expected a list"),
        ({"input": "a\nb", "outputs": "1"}, r"line 3: 'outputs' is \"1\"; expected a list"),
        ({"input": "a\nb", "outputs": [1]}, r"line 3: 'outputs' is \[1\]; expected a list"),
        ({"input": "a\nb", "outputs": ["1"], "answer_prefix": 3}, r"line 3: 'answer_prefix' is 3; expected text"),
        ([1, 2], r"line 3: \[1, 2\]; expected a JSON object"),
    ],
)
def test_wrong_ruler_records_are_named(tmp_path: Path, bad: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ruler(written(tmp_path, RULER[0], bad))


@pytest.mark.parametrize("load", [longbench_v2, ruler])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no record"),
        (b"[]", "holds no record"),
        (b" \n\n", "holds no record"),
        (b"\n{,}", r"line 2: no JSON"),
        (b"[1,\n2", r"line 2: no JSON"),
        (b"[" * 200_000, "no JSON"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"3", "line 1: 3; expected a JSON object"),
    ],
)
def test_what_is_no_file_of_tasks_is_refused(tmp_path: Path, load: Any, content: bytes, message: str) -> None:
    path = tmp_path / "tasks.json"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("load", [longbench_v2, ruler])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, load: Any) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(InvalidInput, match=re.escape(str(path))):
            load(path)
