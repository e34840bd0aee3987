"""Write the README's tables from benchmarks/results; with --check only say whether they are current.

python benchmarks/readme.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def main() -> int:
    result = json.loads((RESULTS / "exact.json").read_text())
    text = README.read_text()
    fresh = _filled(_filled(text, "info", _info(result)), "results", _results(result))
    if "--check" in sys.argv:
        print("current" if fresh == text else "the README's tables are not those of benchmarks/results: make readme")
        return int(fresh != text)
    README.write_text(fresh)
    return 0


def _filled(text: str, name: str, content: str) -> str:
    pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def _info(result: dict[str, Any]) -> str:
    return "```\n" + "\n".join(result["info_lines"]) + "\n```"


def _results(result: dict[str, Any]) -> str:
    raise SystemExit(f"fill in from {sorted(result)}")


if __name__ == "__main__":
    raise SystemExit(main())
