"""Tasks from files the user has: LongBench v2 (JSON or JSONL) and RULER (JSONL). Nothing here contacts a hub.

LongBench v2 (arXiv 2412.15204) has a context, a question, four choices and a letter; the distractors are the other
letters. RULER (arXiv 2404.06654) has one `input` and a list of `outputs`: the input's last line (with
`answer_prefix` where the file has one) is taken for the question, the rest for the context; the first output is the
answer; the distractors are first outputs of the records that follow, since RULER gives no wrong answers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InvalidInput
from .tasks import DISTRACTORS, Task

_LETTERS = "ABCD"


class _Record(NamedTuple):
    where: str
    fields: dict[str, Any]

    def text(self, field: str) -> str:
        """A field that must be there and be text that is not blank."""
        if field not in self.fields:
            raise InvalidInput(f"{self.where}: no field {field!r}; there are {', '.join(map(repr, self.fields))}")
        value = self.fields[field]
        if not isinstance(value, str) or not value.strip():
            raise InvalidInput(f"{self.where}: {field!r} is {_shown(value)}; expected text")
        return value


def longbench_v2(path: str | os.PathLike[str]) -> list[Task]:
    """One Task per record of a LongBench v2 file: fields context, question, choice_A to choice_D, answer (a letter).

    The file is a JSON list or one JSON object per line; ids come from `_id` where it is given. Raises InvalidInput,
    naming file, line (or record) and field, for what does not fit.
    """
    tasks = []
    for index, record in enumerate(_records(path)):
        answer = record.text("answer").strip()
        if answer not in _LETTERS or len(answer) != 1:
            raise InvalidInput(f"{record.where}: 'answer' is {_shown(answer)}; expected one of A, B, C, D")
        choices = "\n".join(f"({letter}) {record.text(f'choice_{letter}').strip()}" for letter in _LETTERS)
        question = f"\n\nQuestion: {record.text('question').strip()}\n{choices}\nThe letter of the right choice is"
        others = tuple(letter for letter in _LETTERS if letter != answer)
        name = f"longbench_v2-{record.fields.get('_id', index)}"
        tasks.append(Task("longbench_v2", record.text("context"), question, answer, others, None, name))
    return tasks


def ruler(path: str | os.PathLike[str]) -> list[Task]:
    """One Task per line of a RULER file: fields input (several lines, the last one asks) and outputs (texts).

    A file whose records all have the same outputs gives tasks without distractors, which have no margin. Raises
    InvalidInput, naming file, line and field, for what does not fit.
    """
    records = list(_records(path))
    outputs = [_outputs(record) for record in records]
    tasks = []
    for index, record in enumerate(records):
        context, line_break, asked = record.text("input").rstrip().rpartition("\n")
        if not line_break or not context.strip():
            raise InvalidInput(f"{record.where}: 'input' has one line; expected a context and, last, the question")
        prefix = record.fields.get("answer_prefix", "")
        if not isinstance(prefix, str):
            raise InvalidInput(f"{record.where}: 'answer_prefix' is {_shown(prefix)}; expected text")
        others = dict.fromkeys(wrong[0] for wrong in outputs[index + 1 :] + outputs[:index])
        distractors = [wrong for wrong in others if wrong not in outputs[index]][:DISTRACTORS]
        name = f"ruler-{record.fields.get('index', index)}"
        question = f"\n{asked}{prefix}".rstrip()
        tasks.append(Task("ruler", context.rstrip(), question, outputs[index][0], tuple(distractors), None, name))
    return tasks


def _outputs(record: _Record) -> list[str]:
    if "outputs" not in record.fields:
        raise InvalidInput(f"{record.where}: no field 'outputs'; there are {', '.join(map(repr, record.fields))}")
    outputs = record.fields["outputs"]
    if not isinstance(outputs, list) or not outputs or not all(isinstance(o, str) and o.strip() for o in outputs):
        raise InvalidInput(f"{record.where}: 'outputs' is {_shown(outputs)}; expected a list of at least one text")
    return [output.strip() for output in outputs]


def _records(path: str | os.PathLike[str]) -> Iterator[_Record]:
    """The objects of a JSON list (`record 1`, …) or of a JSONL file (`line 1`, …), with where they stand."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    found = 0
    for where, value in _values(file, text):
        found += 1
        if not isinstance(value, dict):
            raise InvalidInput(f"{where}: {_shown(value)}; expected a JSON object")
        yield _Record(where, value)
    if not found:
        raise InvalidInput(f"{file} holds no record")


def _values(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    if text.lstrip().startswith("["):
        values = _parsed(text, str(file), 0)
        yield from ((f"{file}, record {number}", value) for number, value in enumerate(values, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{file}, line {number}", _parsed(line, str(file), number)


def _parsed(text: str, file: str, line: int) -> Any:
    """JSON, of the whole file when `line` is 0."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        position = getattr(error, "lineno", 1)
        reason = getattr(error, "msg", "nested too deeply")
        raise InvalidInput(f"{file}, line {line or position}: no JSON: {reason}") from error


def _shown(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 40 else f"{shown[:40]}…"
