"""The quantizer study: codebooks pooled or per head, how many stages, equal for all or split as calibration finds,
keys and values apart, and what the codes weigh.

The table has the shape of the fractal archive's own (Gusev 2026, arXiv 2607.07144: GPT-2, one context of 1,024 tokens,
4 sinks and 32 recent tokens exact), on the model and windows at hand and with bytes on disk. Its published sizes came
from a reference packer; bit-packed the same indices take 833 B a token, the real walk round the ring 2,221.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...calibrate import find_fitted
from ...evaluate.bootstrap import paired
from ...evaluate.scores import Name, measure
from ...recipe import FRACTAL, Recipe
from ..library import save
from .rows import Result, rows_of
from .run import Bench
from .sizes import coarse_bytes

CODES = ("line", "packed", "grid", "ring")
PUBLISHED = (
    {"config": "RVQ pooled, K2/V2", "dppl": 0.292},
    {"config": "RVQ per head, K2/V2", "dppl": 0.150},
    {"config": "per head, keys only", "dppl": 0.145},
    {"config": "per head, values only", "dppl": 0.040},
    {
        "config": "RVQ per head, K4/V2",
        "dppl": 0.112,
        "dppl_second_half": 0.166,
        "bytes_per_token": {"reference packer": 1025, "packed": 833, "ring": 2221},
    },
)


class Config(NamedTuple):
    """A row of the study: its name, and the stages of keys and values; None keeps a side fine.

    With `split`, so many stages of a key and a value head together go where calibration finds that they pay.
    """

    name: str
    keys: int | None
    values: int | None
    pooled: bool = False
    rope: bool = True
    split: int | None = None

    @property
    def recipe(self) -> Recipe:
        quantize = {"id": "rvq/1", "key_stages": self.keys, "value_stages": self.values, "pooled": self.pooled}
        if self.split is not None:
            quantize = {"id": "rvq/1", "stages": self.split}
        return replace(FRACTAL, name=self.name, quantize=quantize, transform=FRACTAL.transform if self.rope else None)


CONFIGS = (
    Config("VQ pooled, K1/V1", 1, 1, pooled=True),
    Config("VQ per head, K1/V1", 1, 1),
    Config("RVQ pooled, K2/V2", 2, 2, pooled=True),
    Config("RVQ per head, K2/V2", 2, 2),
    Config("per head, keys only", 2, None),
    Config("per head, values only", None, 2),
    Config("RVQ per head, K2/V4", 2, 4),
    Config("RVQ per head, K3/V3", 3, 3),
    Config("RVQ per head, K4/V2", 4, 2),
    Config("RVQ pooled, K4/V2", 4, 2, pooled=True),
    Config("RVQ per head, K4/V2, rotated keys", 4, 2, rope=False),
    Config("RVQ per head, K4/V4", 4, 4),
    Config("fitted split", None, None, split=6),
)
COMPARISONS: tuple[tuple[str, str], ...] = (
    ("RVQ per head, K2/V2", "RVQ pooled, K2/V2"),
    ("RVQ per head, K4/V2", "RVQ pooled, K4/V2"),
    ("RVQ per head, K4/V2", "RVQ per head, K3/V3"),
    ("RVQ per head, K4/V2", "RVQ per head, K2/V4"),
    ("RVQ per head, K4/V2", "RVQ per head, K4/V2, rotated keys"),
    ("per head, values only", "per head, keys only"),
    ("fitted split", "RVQ per head, K3/V3"),
    ("fitted split", "RVQ per head, K4/V2"),
    ("fitted split", "RVQ per head, K4/V4"),
)
MEASURES: tuple[Name, ...] = ("kl", "dppl")


def study(bench: Bench, fit: Callable[[Sequence[Recipe]], None], configs: Sequence[Config] = CONFIGS) -> dict[str, Any]:
    """Rows over all texts, one a config, and differences with intervals; `fit` makes the profiles that are lacking."""
    fit([config.recipe for config in configs])
    results: dict[str, list[Result]] = {}
    rows = []
    for config in configs:
        results[config.name] = bench.scored(config.recipe)
        row = rows_of(config.name, results[config.name], bench.windows[0].prefix)[0]
        rows.append({**row, "config": config._asdict(), "payload_by_code": payload_by_code(bench, config.recipe)})
    return {
        "rows": rows,
        "floor": bench.floor()[0],
        "differences": [_difference(results, *pair) for pair in COMPARISONS if set(pair) <= set(results)],
        "published": list(PUBLISHED),
    }


def payload_by_code(bench: Bench, recipe: Recipe) -> dict[str, float]:
    """Bytes that code a coarse token, its id included, of the first window in files of each map code."""
    window, found = bench.windows[0], {}
    cache, profile = bench.original(window), find_fitted(recipe, bench.local.identity, bench.geometry())
    for code in CODES:
        with tempfile.TemporaryDirectory(prefix="kvcellar-bench-") as scratch:
            path = Path(scratch) / "window.kvc"
            coded = replace(recipe, symbols={**recipe.symbols, "code": code})
            ids = window.ids[: window.prefix]
            save(path, cache, tokens=ids, identity=bench.local.identity, recipe=coded, profile=profile)
            size, tokens = coarse_bytes(path, profile)
            found[code] = size / tokens
    return found


def _difference(results: dict[str, list[Result]], a: str, b: str) -> dict[str, Any]:
    """Measures of `a` less those of `b`, on the same windows."""
    differences: dict[str, Any] = {}
    for name in MEASURES:
        one, other = (measure([r.scores for r in results[each]], name) for each in (a, b))
        differences[name] = asdict(paired(one, other))
    return {"better": a, "than": b, **differences}


def show(result: dict[str, Any]) -> None:
    """Print the study for a person."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, 150))
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    published = {row["config"]: row["dppl"] for row in result["published"]}
    columns = (
        "codebooks and stages",
        *(f"{code}\nB/token" for code in CODES),
        "KL\nnats",
        "Δppl\n%",
        "2nd half\n%",
        "RCB",
    )
    for column in (*columns, "published\nΔppl %"):
        table.add_column(column, justify="left" if column == columns[0] else "right", no_wrap=True)
    for row in result["rows"]:
        known = published.get(row["recipe"])
        table.add_row(
            row["recipe"],
            *(f"{row['payload_by_code'][code]:,.0f}" for code in CODES),
            f"{row['kl']:.3g}",
            f"{100 * row['dppl']:.1f}",
            f"{100 * row['dppl_second_half']:.1f}",
            "–" if row["rcb"] is None else f"{row['rcb']:.2f}",
            "" if known is None else f"{100 * known:.1f}",
        )
    console.print(table)
    for each in result["differences"]:
        low, high = each["kl"]["ci"] or (float("nan"), float("nan"))
        better, value = f"{each['better']} less {each['than']}", each["kl"]["value"]
        console.print(f"KL of {better}: {value:+.3g} [{low:+.3g}, {high:+.3g}]")
    console.print(f"∅: KL {result['floor']['kl']:.3g}, Δppl {100 * result['floor']['dppl']:+.1f} %")
