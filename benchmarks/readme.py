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
    return "\n".join(["```", "$ kvcellar info exact.kvc", *result["info"]["lines"], "```"])


def _results(result: dict[str, Any]) -> str:
    """`exact` on the demo model, each figure beside what it is to be compared with, all from one run."""
    sizes, restore, memory = result["sizes"], result["restore"], result["memory"]
    blosc2 = restore[result["blosc2_fastest"]]
    ours = restore["exact"]
    mega = 1e6
    rows = [
        ("recipe `exact`", "figure", "beside it"),
        ("---", "---", "---"),
        (
            "file",
            f"{sizes['exact'] / mega:.2f} MB, {result['cache']['ratio_16bit']:.2f} x 16-bit",
            f"zstd-3 {sizes['zstd-3'] / mega:.2f} MB, Blosc2 shuffle + zstd {sizes['blosc2'] / mega:.2f} MB",
        ),
        (
            "restore of 2,000 tokens",
            f"{1000 * ours['median_s']:.0f} ms, {ours['mb_per_s'] / 1000:.2f} GB/s",
            f"Blosc2 decode {blosc2['mb_per_s'] / 1000:.2f} GB/s, "
            f"clone {restore['clone']['mb_per_s'] / 1000:.2f} GB/s, "
            f"fastest prefill {result['prefill']['fastest_s']:.2f} s",
        ),
        ("save", f"{1000 * result['save']['median_s']:.0f} ms", "synced to disk"),
        (
            "peak extra memory, save / restore",
            f"{memory['save_extra'] / mega:.1f} / {memory['restore_extra'] / mega:.1f} MB",
            f"two blocks of cache: {memory['limit'] / mega:.1f} MB",
        ),
        (
            "reading 10 tokens of one layer",
            f"{result['range']['reading'] / 1000:.0f} kB read",
            f"their part {result['range']['part'] / 1000:.0f} kB, the file {sizes['raw'] / mega:.0f} MB raw",
        ),
        ("`kvcellar info`", f"{result['info']['median_s']:.2f} s", "the whole command"),
    ]
    machine = result["machine"]
    where = (
        f"{result['cache']['tokens']:,} tokens of standard-library text through SmolLM2-135M-Instruct (bfloat16); "
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, commit {machine['commit']}. "
        "Medians; from `benchmarks/results/exact.json`, made by `make bench`."
    )
    return "\n".join([where, "", *("| " + " | ".join(row) + " |" for row in rows)])


if __name__ == "__main__":
    raise SystemExit(main())
