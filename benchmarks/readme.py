"""Write the tables of README and docs/quantizers.md from benchmarks/results; with --check only say if they are current.

python benchmarks/readme.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import readmetables as tables

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
QUANTIZERS = ROOT / "docs" / "quantizers.md"
EVALUATION = ROOT / "docs" / "evaluation.md"
RATE = ROOT / "docs" / "rate.md"
RISK = ROOT / "docs" / "risk.md"
RESULTS = ROOT / "benchmarks" / "results"


def main() -> int:
    result = json.loads((RESULTS / "exact.json").read_text())
    quality, speed = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("bench-lossy", "bench-speed"))
    pages = {
        README: {
            "info": tables.info(result),
            "results": tables.results(result),
            "quality": tables.quality(quality, speed),
        }
    }
    if (RESULTS / "quantizers.json").is_file():  # twenty minutes of both cores
        pages[QUANTIZERS] = {"study": tables.study(json.loads((RESULTS / "quantizers.json").read_text()))}
    for page, name, file, table in (
        (EVALUATION, "encyclopedia", "bench-encyclopedia", tables.articles),
        (EVALUATION, "long", "bench-long", tables.articles),
        (QUANTIZERS, "turbo", "turbo_validation", tables.turbo),
        (EVALUATION, "peers", "peers_validation", tables.peers),
        (RATE, "curve", "rate-curve", tables.equal_divergence),
        (RISK, "reduced", "reduce", tables.reduced),
    ):
        path = RESULTS / f"{file}.json"
        if path.is_file():  # up to half an hour of both cores each
            pages.setdefault(page, {})[name] = table({**json.loads(path.read_text()), "file": path.name})
    stale = []
    for page, named in pages.items():
        fresh = text = page.read_text()
        for name, content in named.items():
            fresh = _filled(fresh, name, content)
        if fresh != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(fresh)
    if "--check" in sys.argv:
        print(f"not those of benchmarks/results: the tables of {', '.join(stale)}" if stale else "current")
        return int(bool(stale))
    return 0


def _filled(text: str, name: str, content: str) -> str:
    pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


if __name__ == "__main__":
    raise SystemExit(main())
