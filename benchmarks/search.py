"""Search in place: recall, precision and time per suffix length, by symbols, by points and by the index.

    python benchmarks/search.py [--model DIR] [--quick]

Two sequences that read alike: the UTF-8 bytes of Python's reference topics and the sources of its standard library
(N = 256), and their token ids under the demo model's tokenizer (N = 49,152). The first 100,000 and 1,000,000 of each.
Phrases are cut from the sequence at random ends, so each occurs at least once; what is right comes from comparing whole
windows (for points, from the suffix array that this proves right). One core. Needs the extra: pip install -e '.[hf]'.
Prints tables and one JSON line; writes benchmarks/results/search.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from common import add_model, claims_table, machine, rounded, write_result
from kvcellar.search import suffix
from kvcellar.search.index import SuffixIndex
from kvcellar.search.space import CodeSpace
from realcache import topics_text

SIZES = (100_000, 1_000_000)
LENGTHS = range(1, 13)
BYTES, TOKENS = 256, 49_152
SPACES = {
    "bytes": [
        *((code, kind) for code in ("ring", "grid") for kind in ("float32", "float64")),
        *(("line", kind) for kind in ("uint32", "uint64")),
    ],
    "tokens": [("line", "uint32"), ("line", "uint64")],
}
SHORT = {"float32": "f32", "float64": "f64", "uint32": "u32", "uint64": "u64"}
PUBLISHED = {"scan_ms": 0.9, "recall": 1.0, "float64_precision": (0.89, 1.0)}
GOALS = {"index": 0.05, "scan": 0.5}
REPEATS = 5


def main() -> None:
    options = _options()
    load = [os.getloadavg()[0]]
    sequences = {"bytes": (text_bytes(), BYTES), "tokens": (token_ids(options.model), TOKENS)}
    results = []
    for (name, (symbols, alphabet)), size in ((s, t) for s in sequences.items() for t in SIZES):
        print(f"{size:,} {name} …", flush=True)
        results.append({"sequence": name, "alphabet": alphabet, **measured(symbols[:size], name, alphabet, options)})
    load.append(os.getloadavg()[0])
    result: dict[str, Any] = {
        "benchmark": "search",
        "machine": {**machine(), "load": load},
        "published": PUBLISHED,
        "queries": options.queries,
        "results": results,
    }
    result["claims"] = claims(results)
    show(result)
    write_result("search", result)
    print(json.dumps(rounded(result), ensure_ascii=False))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--quick", action="store_true", help="fewer queries, for a look")
    options = parser.parse_args()
    options.queries = 10 if options.quick else 30
    return options


def _text() -> str:
    library = Path(sysconfig.get_path("stdlib"))
    return topics_text() + "\n".join(path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py")))


def text_bytes() -> np.ndarray:
    """uint8 (T,)."""
    return np.frombuffer(_text().encode(), np.uint8)


def token_ids(folder: Path) -> np.ndarray:
    """int64 (T,)."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # of texts longer than the model's context
    return np.array(AutoTokenizer.from_pretrained(folder)(_text(), add_special_tokens=False)["input_ids"], np.int64)


def measured(symbols: np.ndarray, name: str, alphabet: int, options: argparse.Namespace) -> dict[str, Any]:
    """Every figure of one sequence."""
    started = time.perf_counter()
    index = SuffixIndex.build(symbols)
    built = time.perf_counter() - started
    data = index.to_bytes()
    read_ms = median_ms(lambda: SuffixIndex.from_bytes(data, symbols))
    phrases = {s: list(cut(symbols, s, options.queries)) for s in LENGTHS}
    return {
        "positions": len(symbols),
        "distinct": len(np.unique(symbols)),
        "index": {"build_s": built, "bytes_per_symbol": len(data) / len(symbols), "read_and_proved_ms": read_ms},
        "by_symbols": [by_symbols(symbols, index, s, phrases[s]) for s in LENGTHS],
        "by_points": [by_points(symbols, index, alphabet, *space, phrases) for space in SPACES[name]],
    }


def cut(symbols: np.ndarray, length: int, queries: int) -> Iterator[np.ndarray]:
    """Phrases of `length` from random places, the same on every run."""
    for end in np.random.default_rng(length).integers(length, len(symbols) + 1, queries):
        yield symbols[end - length : end].copy()


def by_symbols(symbols: np.ndarray, index: SuffixIndex, s: int, phrases: list[np.ndarray]) -> dict[str, Any]:
    """Recall, precision and times (median over phrases) of exact search without and with the index, and of fuzzy.

    What is right comes from a comparison of the whole windows; fuzzy search asks for s − 1 of s, and is only timed.
    """
    windows = np.lib.stride_tricks.sliding_window_view(symbols, s)
    times: dict[str, list[float]] = {"scan": [], "index": [], "index_range": [], "fuzzy": []}
    hits, rates = [], []
    for phrase in phrases:
        true = np.flatnonzero((windows == phrase).all(axis=1)) + s - 1
        hits.append(len(true))
        rates += [rate(true, found) for found in (suffix.exact(symbols, phrase), index.find(phrase))]
        times["scan"].append(median_ms(lambda phrase=phrase: suffix.exact(symbols, phrase)))
        times["index"].append(median_ms(lambda phrase=phrase: index.find(phrase)))
        times["index_range"].append(median_ms(lambda phrase=phrase: index.range_of(phrase)))
        times["fuzzy"].append(median_ms(lambda phrase=phrase: suffix.fuzzy(symbols, phrase, max(1, s - 1))))
    figures = {f"{name}_ms": statistics.median(each) for name, each in times.items()}
    slowest = {f"{name}_worst_ms": max(each) for name, each in times.items()}
    recall, precision = (min(each) for each in zip(*rates, strict=True))
    return {
        "length": s,
        "hits": statistics.median(hits),
        "recall": recall,
        "precision": precision,
        **figures,
        **slowest,
    }


def rate(true: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """Recall and precision of the ends `found`."""
    right = len(np.intersect1d(true, found, assume_unique=True))
    return right / len(true), right / max(1, len(found))


def by_points(
    symbols: np.ndarray,
    index: SuffixIndex,
    alphabet: int,
    code: str,
    kind: str,
    phrases: dict[int, list[np.ndarray]],
) -> dict[str, Any]:
    """Recall and precision of what lies near a phrase's point, within two cells (published) and within one."""
    space = CodeSpace.of(symbols, alphabet, code, np.dtype(kind))
    rows = []
    for s in LENGTHS:
        scores: dict[str, list[tuple[float, float]]] = {"published": [], "one_cell": []}
        times = []
        for phrase in phrases[s]:
            true = index.find(phrase)
            for name, spread in (("published", 2.0), ("one_cell", 1.0)):
                scores[name].append(rate(true, space.near(phrase, spread=spread).ends))
            times.append(median_ms(lambda phrase=phrase: space.near(phrase)))
        row: dict[str, Any] = {"length": s, "ms": statistics.median(times)}
        for name, pairs in scores.items():
            row[name] = {"recall": min(r for r, _ in pairs), "precision": statistics.mean(p for _, p in pairs)}
        rows.append(row)
    ends = np.random.default_rng(0).integers(0, len(symbols), 2000).tolist()
    right_contexts = sum(np.array_equal(c := space.context(end), symbols[end + 1 - len(c) : end + 1]) for end in ends)
    return {
        "code": code,
        "dtype": kind,
        "bytes_per_symbol": space.points.nbytes / len(symbols),
        "context": {"symbols": space.reach, "right": right_contexts / len(ends)},
        "lengths": rows,
    }


def median_ms(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def claims(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must hold at 100,000 positions, and the published figures beside it."""
    rows = []
    for result in (each for each in results if each["positions"] == SIZES[0]):
        for way, goal in GOALS.items():
            worst = max(row[f"{way}_ms"] for row in result["by_symbols"])
            figures = f"{worst:.3f} ms, {PUBLISHED['scan_ms'] / worst:.1f}× faster than published"
            rows.append((f"{result['sequence']}: exact, {way}, every length within {goal} ms", worst <= goal, figures))
        sure = min(min(row["recall"], row["precision"]) for row in result["by_symbols"])
        rows.append((f"{result['sequence']}: exact, recall and precision 1.00", sure == 1, "scan and index"))
        for space in result["by_points"]:
            two, one = ([row[name] for row in space["lengths"]] for name in ("published", "one_cell"))
            name = f"{result['sequence']}: {space['code']} {space['dtype']}"
            rows.append((f"{name}: recall 1.00", min(row["recall"] for row in two + one) == 1, "both radii"))
            if space["code"] == "line":
                rows.append((f"{name}: precision 1.00", min(row["precision"] for row in two) == 1, "every length"))
            if (space["code"], space["dtype"]) == ("ring", "float64"):
                told_apart = slice(0, 8)  # longer suffixes' cells are smaller than a float64's last bit
                low, high = PUBLISHED["float64_precision"]
                found = [row["precision"] for row in two][told_apart]
                tight = [row["precision"] for row in one][told_apart]
                mean = statistics.mean(found)
                figures = f"{min(found):.2f}–{max(found):.2f}, mean {mean:.2f}; within one cell {min(tight):.2f}–1"
                rows.append(
                    (f"{name}: precision to length 8, on average as published ({low}–{high})", mean >= low, figures)
                )
    return [{"claim": claim, "holds": bool(holds), "figures": figures} for claim, holds, figures in rows]


def show(result: dict[str, Any]) -> None:
    console = Console(width=120)
    for each in result["results"]:
        title = f"{each['positions']:,} {each['sequence']}, N = {each['alphabet']:,}"
        table = Table(
            title=f"{title}: ms a query (median), precision within two cells / within one", title_justify="left"
        )
        names = [f"{space['code']} {SHORT[space['dtype']]}" for space in each["by_points"]]
        for column in ("s", "hits", "scan", "index", "fuzzy", *names):
            table.add_column(column, justify="right")
        for i, row in enumerate(each["by_symbols"]):
            pairs = [space["lengths"][i] for space in each["by_points"]]
            cells = [f"{p['published']['precision']:.2f}/{p['one_cell']['precision']:.2f}" for p in pairs]
            times = [f"{row[f'{way}_ms']:.3f}" for way in ("scan", "index", "fuzzy")]
            table.add_row(str(row["length"]), f"{row['hits']:,.0f}", *times, *cells)
        console.print(table)
        index = each["index"]
        console.print(
            f"index {index['bytes_per_symbol']:.2f} B/symbol, built in {index['build_s']:.2f} s, read and proved in "
            f"{index['read_and_proved_ms']:.1f} ms; contexts decoded right: "
            + ", ".join(
                f"{name} {s['context']['right']:.1%} of {s['context']['symbols']}"
                for name, s in zip(names, each["by_points"], strict=True)
            )
        )
    console.print(claims_table(result))


if __name__ == "__main__":
    main()
