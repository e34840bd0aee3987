"""The pages say what the code does: every command and exit code, the README's code, its tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcellar import errors
from kvcellar.frontends.cli import COMMANDS, EPILOG
from models import new_llama, prompt

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for name in COMMANDS:
        assert f"`kvcellar {name}" in page, name


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    for code in {kind.exit_code for kind in kinds if issubclass(kind, errors.KVCellarError)}:
        assert f"| {code} |" in page
        assert f"{code} " in EPILOG


def test_every_error_stands_in_the_tree() -> None:
    tree = errors.__doc__ or ""
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, Exception) and not name.startswith("_"):
            assert name in tree, name


def test_the_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    new_llama().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    given = torch.tensor([prompt(40)])
    longer = torch.tensor([prompt(46)])
    scope = {"folder": tmp_path / "model", "ids": given, "longer_ids": longer}
    with torch.inference_mode():
        exec(compile(code, "README.md", "exec"), scope)
    assert scope["restored"].matched == 40  # type: ignore[attr-defined]


def test_the_readme_tables_come_from_the_results() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "readme.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr


def test_the_readme_opens_with_the_two_commands() -> None:
    screen = README[:1500]
    assert screen.index("make demo") < screen.index("make test")
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo:", makefile, re.MULTILINE)
    assert re.search(r"^test:", makefile, re.MULTILINE)


def test_every_field_case_listed_has_a_test() -> None:
    listed = re.findall(r"^\| G(\d\d) \|", (ROOT / "docs" / "field-cases.md").read_text(encoding="utf-8"), re.MULTILINE)
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    tested = set(re.findall(r"^def test_field_g(\d\d)_", tests, re.MULTILINE))
    assert len(listed) == len(set(listed)) == 47
    assert sorted(set(listed) - tested) == []
