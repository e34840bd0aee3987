"""Map codes: bits and microseconds a symbol, random access, append, and unpacking speed; one core.

    python benchmarks/maps.py [--patience SECONDS]     measure, write benchmarks/results/maps.json and the page's table
    python benchmarks/maps.py --page [--check]         only write (or check) the table of docs/map-codes.md
    python benchmarks/maps.py --picture FILE           only draw the attractor at N = 3 and N = 256

The symbols are uniform random numbers: these codes take the same bits and the same steps for all of them, and every
sequence is compared after its way back. A figure is the fastest round, since whatever else runs only adds to it; the
medians stand in the result, too. Published: arXiv 2607.07144, its own machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from common import RESULTS, interleaved, machine, rounded, summary, write_result
from kvcellar.symbols.mapcode import MAX_ALPHABET, MapCode
from kvcellar.symbols.mapcoder import MapCoder
from kvcellar.symbols.maps import CODES, map_code, points

PAGE = Path(__file__).resolve().parent.parent / "docs" / "map-codes.md"
ALPHABETS = (3, 16, 256, 49_152)
NAMES = ("ring", "grid", "line")
SYMBOLS = {"ring": 10**6, "grid": 10**6, "line": 10**7}
CALLS = 500
ROUNDS = 15
PUBLISHED = {"encode": 0.68, "at": 311.0, "append": 175.0}  # µs a symbol or call
LIMITS = {"encode": 0.02, "decode": 0.02, "at": 5.0, "append": 5.0}
UNPACKED = ((4, "uint8"), (8, "uint8"), (16, "uint8"), (11, "uint8"), (256, "uint8"), (4096, "uint16"))
MUST_UNPACK = ("N = 4 to uint8", "N = 8 to uint8", "N = 16 to uint8")


class Stored:
    """Symbols of one code in memory, with what is timed on them."""

    def __init__(self, code: MapCode):
        self.code, self.count = code, SYMBOLS[code.name]
        rng = np.random.default_rng(code.alphabet)
        self.symbols = rng.integers(0, code.alphabet, self.count).astype(code.dtype)
        self.points = code.encode(self.symbols)
        self.out = np.empty_like(self.symbols)
        self.bits = 8 * self.points.nbytes / self.count
        self.indexes = rng.integers(0, self.count, CALLS).tolist()
        self.grown, self.held = self.points.copy(), self.count

    def check(self) -> None:
        if not np.array_equal(self.code.decode(self.points, self.count), self.symbols):
            raise SystemExit(f"{self.code.name} at N = {self.code.alphabet} is not lossless")
        found = [self.code.at(self.points, self.count, i) for i in self.indexes]
        if found != self.symbols[self.indexes].tolist():
            raise SystemExit(f"{self.code.name} at N = {self.code.alphabet}: random access reads other symbols")

    def encode(self) -> None:
        self.code.encode(self.symbols)

    def decode(self) -> None:
        self.code.decode(self.points, self.count, self.out)

    def at(self) -> None:
        for index in self.indexes:
            self.code.at(self.points, self.count, index)

    def append(self) -> None:
        for i in range(CALLS):
            self.grown = self.code.append(self.grown, self.held, self.symbols[i : i + 1])
            self.held += 1


def measure(patience: float) -> dict[str, Any]:
    held = {(name, alphabet): Stored(map_code(name, alphabet)) for name in NAMES for alphabet in ALPHABETS}
    cases: dict[str, Callable[[], object]] = {}
    for (name, alphabet), stored in held.items():
        stored.check()
        for what in LIMITS:
            cases[f"{name} {alphabet} {what}"] = getattr(stored, what)
    raw = np.zeros(10**7, np.uint8)
    cases["memcpy"] = raw.copy
    unpacking = dict(_unpacking())
    turns = interleaved({**cases, **{case: run for case, (run, _) in unpacking.items()}}, ROUNDS, patience=patience)
    spent = {case: summary(seconds) for case, seconds in turns.seconds.items()}
    rows = [_row(stored, spent) for stored in held.values()]
    return {
        "machine": machine(),
        "noisy_rounds": turns.noisy,
        "published_us": PUBLISHED,
        "memcpy_us_per_byte": spent["memcpy"]["min_s"] / raw.size * 1e6,
        "codes": rows,
        "unpacking_mb_per_s": {case: size / spent[case]["min_s"] / 1e6 for case, (_, size) in unpacking.items()},
        "alphabets": _all_alphabets(),
    }


def _row(stored: Stored, seconds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    code = stored.code
    per = {"encode": stored.count, "decode": stored.count, "at": CALLS, "append": CALLS}
    runs = {what: seconds[f"{code.name} {code.alphabet} {what}"] for what in per}
    spent = {what: runs[what]["min_s"] / n * 1e6 for what, n in per.items()}
    return {
        "code": code.name,
        "alphabet": code.alphabet,
        "ratio": code.ratio,
        "span": code.span,
        "symbols": stored.count,
        "bits_per_symbol": stored.bits,
        "entropy_bits": math.log2(code.alphabet),
        "us": spent,
        "median_us": {what: runs[what]["median_s"] / n * 1e6 for what, n in per.items()},
        "times_faster_than_published": {what: PUBLISHED[what] / spent[what] for what in PUBLISHED},
    }


def _unpacking() -> Iterator[tuple[str, tuple[Callable[[], object], int]]]:
    """Restoring one array of 4,096 tokens × 576 columns by `map/1`, and the bytes it fills."""
    for alphabet, dtype in UNPACKED:
        array = np.random.default_rng(alphabet).integers(0, alphabet, (4096, 576)).astype(dtype)
        coder, out = MapCoder(), np.empty_like(array)
        part = coder.encode([array], range(1))

        def run(coder: MapCoder = coder, part: bytes = part, out: np.ndarray = out) -> None:
            coder.decode([part], [[out]], [range(1)])

        run()
        if not np.array_equal(array, out):
            raise SystemExit(f"map/1 at N = {alphabet} is not lossless")
        yield f"N = {alphabet} to {dtype}", (run, array.nbytes)


def _all_alphabets() -> dict[str, Any]:
    """What `line` costs for every N: against whole bits, and against the entropy."""
    worst_whole, worst_entropy = (0.0, 0), (0.0, 0)
    for alphabet in range(2, MAX_ALPHABET + 1):
        bits = CODES["line"](alphabet).bits_per_symbol
        worst_whole = max(worst_whole, (bits / (alphabet - 1).bit_length(), alphabet))
        worst_entropy = max(worst_entropy, (bits / math.log2(alphabet), alphabet))
    names = ("times", "alphabet")
    return {
        "largest": MAX_ALPHABET,
        "worst_against_whole_bits": dict(zip(names, worst_whole, strict=True)),
        "worst_against_entropy": dict(zip(names, worst_entropy, strict=True)),
    }


def claims(result: dict[str, Any]) -> list[tuple[str, bool]]:
    found = []
    for row in result["codes"]:
        if row["code"] == "line" and row["alphabet"] in (256, 49_152):
            for what, limit in LIMITS.items():
                spent = row["us"][what]
                found.append((f"line, N = {row['alphabet']}: {what} {spent:.4f} µs, limit {limit}", spent <= limit))
            whole = math.ceil(row["entropy_bits"])
            bits = row["bits_per_symbol"]
            found.append((f"line, N = {row['alphabet']}: {bits:.3f} bit, limit {whole} + 1 %", bits <= whole * 1.01))
    worst = result["alphabets"]["worst_against_whole_bits"]["times"]
    found.append((f"line, every N to {MAX_ALPHABET:,}: at most {worst:.3f} × ⌈log2 N⌉, limit 1.01", worst <= 1.01))
    ring = next(row for row in result["codes"] if (row["code"], row["alphabet"]) == ("ring", 256))
    found.append((f"ring, N = 256: r = {ring['ratio']:.5f}, published 0.01212", round(ring["ratio"], 5) == 0.01212))
    bits = ring["bits_per_symbol"]
    found.append((f"ring, N = 256: {bits:.1f} bit a symbol, by hand 128 / 6 = 21.3", round(bits, 1) == 21.3))
    for case in MUST_UNPACK:
        speed = result["unpacking_mb_per_s"][case]
        found.append((f"map/1, {case}: {speed:.0f} MB/s restored, limit 500", speed >= 500))
    return found


def table(result: dict[str, Any]) -> str:
    """The page's figures, in Markdown."""
    place = result["machine"]
    lines = [
        "| code | N | r | span | bits/symbol | log2 N | encode µs | decode µs | random access µs | append µs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["codes"]:
        cells = [row["code"], f"{row['alphabet']:,}", f"{row['ratio']:.4g}", str(row["span"])]
        cells += [f"{row['bits_per_symbol']:.3f}", f"{row['entropy_bits']:.3f}"]
        for what in ("encode", "decode", "at", "append"):
            gain = row["times_faster_than_published"].get(what)
            cells.append(f"{row['us'][what]:.3g}" + (f" ({gain:,.0f}×)" if gain else ""))
        lines.append("| " + " | ".join(cells) + " |")
    unpacking = ", ".join(f"{case} {speed / 1000:.1f} GB/s" for case, speed in result["unpacking_mb_per_s"].items())
    worst = result["alphabets"]["worst_against_entropy"]
    return "\n".join(
        [
            *lines,
            "",
            f"In brackets: times faster than published (encode {PUBLISHED['encode']} µs a symbol, random access "
            f"{PUBLISHED['at']:.0f} µs, append {PUBLISHED['append']:.0f} µs; there on other hardware, decode not "
            f"given). The fastest of {ROUNDS} rounds, one core of {place['cpu']}, numba {place['numba']}, commit "
            f"{place['commit']}; random access and append are single calls from Python. For scale, memcpy takes "
            f"{result['memcpy_us_per_byte']:.2g} µs a byte.",
            "",
            f"`line` over every N from 2 to {MAX_ALPHABET:,}: never above ⌈log2 N⌉ bits, at most "
            f"{100 * (worst['times'] - 1):.1f} % above log2 N (at N = {worst['alphabet']:,}).",
            "",
            f"Restoring arrays with `map/1`, in bytes of the array: {unpacking}.",
        ]
    )


def page(text: str, result: dict[str, Any]) -> str:
    pattern = re.compile("(<!-- figures -->\n).*?(\n<!-- /figures -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{table(result)}{match[2]}", text)


def picture(path: Path) -> None:
    """The points of `ring` after many random symbols: N = 3, N = 256, and one cell of N = 256."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    rng = np.random.default_rng(0)
    for axis, alphabet, count in zip(axes, (3, 256, 256), (300_000, 300_000, 5_000_000), strict=True):
        walk = points(rng.integers(0, alphabet, count), alphabet, "ring")[20:]  # the first ones are still on their way
        if count > 300_000:
            walk = walk[walk[:, 0] > 0.95]
        axis.plot(*walk.T, ",", color="#20406a", rasterized=True)
        axis.set(aspect="equal", xticks=[], yticks=[])
        axis.set_title(f"ring, N = {alphabet}, r = {map_code('ring', alphabet).ratio:.4f}")
    middle, half = 1 - map_code("ring", 256).ratio, 1.1 * map_code("ring", 256).ratio
    axes[2].set(xlim=(middle - half, middle + half), ylim=(-half, half), title="the cell of symbol 0, N = 256")
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for other programs to pause")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.picture is not None:
        picture(options.picture)
        return 0
    if not options.page:
        write_result("maps", measure(options.patience))
    result = json.loads((RESULTS / "maps.json").read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    if options.check:
        return int(page(text, result) != text)
    PAGE.write_text(page(text, result), encoding="utf-8")
    print(table(result), "\n")
    held = claims(result)
    for claim, holds in held:
        print("holds" if holds else "FAILS", claim)
    print(json.dumps(rounded({"claims": dict(held)}), ensure_ascii=False))
    return int(not all(holds for _, holds in held))


if __name__ == "__main__":
    raise SystemExit(main())
