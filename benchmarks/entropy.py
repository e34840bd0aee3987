"""Bytes and nanoseconds of the coefficient coder `adaptive/1`, beside static tables; one core.

    python benchmarks/entropy.py SYMBOLS.npz … [--patience SECONDS]   write benchmarks/results/entropy.json
    python benchmarks/entropy.py --page [--check]                     only write (or check) the table of docs/entropy.md

A file of symbols holds, for array W of layer group G, `train_G_W` and `held_G_W`: int16 (samples, T, C) of calibration
text and of text the profile never saw, quantized at one rate. Static tables, one for each coefficient, are counted on
`train` and leaned towards a geometric law; their size is the ideal code length on `held`, and what a real range coder
makes of the same tables is constriction's row, where that is installed. "Own histogram" is the entropy of `held`
itself, column by column, which no decoder could know. Every stream is decoded and compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np

from common import RESULTS, interleaved, machine, rounded, write_result
from kvcellar.geometry import FULL, Geometry, LayerGeometry, SideGeometry
from kvcellar.profile import Profile
from kvcellar.symbols.adaptive import PART_TOKENS, TRAINING_TOKENS, AdaptiveCoder, trained
from kvcellar.symbols.adaptivetables import Tables
from plaincoder import PlainCoder

PAGE = Path(__file__).resolve().parent.parent / "docs" / "entropy.md"
LARGEST = 255  # of a static table; larger symbols are counted as this one
PLAIN_ROWS = 128
LAYERS = range(1)
GEOMETRY = Geometry((LayerGeometry(SideGeometry(1, 1, "float32"), SideGeometry(1, 1, "float32"), FULL),))
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description="bytes and speed of the coefficient coder")
    parser.add_argument("symbols", type=Path, nargs="*")
    parser.add_argument("--patience", type=float, default=0.0)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if not arguments.page:
        if not arguments.symbols:
            parser.error("give at least one file of symbols")
        rates = sorted((measure(path, arguments.patience) for path in arguments.symbols), key=lambda r: r["static"])
        write_result("entropy", {"machine": machine(), "part_tokens": PART_TOKENS, "rates": rates})
        print(json.dumps(rounded(rates)))
    write_page(check=arguments.check)


class Group:
    """One layer group: its coder, fitted on the calibration text, and its parts of the other text."""

    def __init__(self, train: list[np.ndarray], held: list[np.ndarray]):
        self.train, self.held = train, held
        samples = max(1, TRAINING_TOKENS // train[0].shape[1])
        symbols = ((LAYERS, which, a[i]) for i in range(len(train[0]))[:samples] for which, a in enumerate(train))
        self.tables = {f"symbols.{name}": tensor for name, tensor in trained(symbols).items()}
        self.coder = AdaptiveCoder()
        self.coder.bind(GEOMETRY, Profile(self.tables, {}))
        cuts = [
            (i, slice(t, t + PART_TOKENS)) for i in range(len(held[0])) for t in range(0, held[0].shape[1], PART_TOKENS)
        ]
        self.parts = [[array[i, rows] for array in held] for i, rows in cuts]
        self.coded = [self.coder.encode(arrays, LAYERS) for arrays in self.parts]
        self.out = [[np.empty_like(array) for array in arrays] for arrays in self.parts]

    def encode(self) -> None:
        for arrays in self.parts:
            self.coder.encode(arrays, LAYERS)

    def decode(self) -> None:
        self.coder.decode(self.coded, self.out, [LAYERS] * len(self.parts))

    def check(self) -> None:
        self.decode()
        for arrays, back in zip(self.parts, self.out, strict=True):
            if not all(np.array_equal(a, b) for a, b in zip(arrays, back, strict=True)):
                raise SystemExit("a stream does not decode to its symbols")

    def sizes(self) -> dict[str, float]:
        """Bytes of all parts, by how they are coded."""
        found = {"static": 0.0, "own histogram": 0.0, "adaptive": float(sum(map(len, self.coded)))}
        for train, held in zip(self.train, self.held, strict=True):
            columns = held.shape[2]
            tables, symbols = _static_tables(train.reshape(-1, columns)), held.reshape(-1, columns)
            found["static"] += _bits(tables, symbols) / 8
            found["own histogram"] += _bits(_counts(symbols) / len(symbols), symbols) / 8
            if importlib.util.find_spec("constriction"):
                found["constriction"] = found.get("constriction", 0.0) + _constricted(tables, symbols)
        return found

    def waste(self) -> float:
        """How much longer a stream is than the code length of its own probabilities, by the plain coder."""
        array = np.ascontiguousarray(self.held[-1][0, :PLAIN_ROWS])
        fields = {name.split(".")[3]: t for name, t in self.tables.items() if f".{len(self.held) - 1}." in name}
        stream, bits = PlainCoder(Tables(**fields)).encode(array.tolist(), [3] * len(array))
        if stream != self.coder.encode([array], LAYERS)[1:]:
            raise SystemExit("the compiled coder writes other bytes than the plain one")
        return len(stream) * 8 / bits - 1


def measure(path: Path, patience: float) -> dict[str, Any]:
    """One rate: bytes a token over all groups, nanoseconds a coefficient."""
    groups = list(_groups(path))
    sizes: dict[str, float] = {}
    for number, group in enumerate(groups):
        group.check()
        for name, size in group.sizes().items():
            sizes[name] = sizes.get(name, 0.0) + size
        print(f"{path.name}: groups up to {number}: { ({k: round(v) for k, v in sizes.items()}) }", flush=True)
    cases = {name: lambda name=name: [getattr(group, name)() for group in groups] for name in ("decode", "encode")}
    spent = interleaved(cases, ROUNDS, patience=patience)
    tokens = groups[0].held[0].shape[0] * groups[0].held[0].shape[1]
    numbers = [array for group in groups for array in group.held]
    count = sum(array.size for array in numbers)
    return {
        "symbols": path.name,
        "tokens": tokens,
        "coefficients": count / tokens,
        "nonzero": sum(int((array != 0).sum()) for array in numbers) / tokens,
        **{name: size / tokens for name, size in sizes.items()},
        "gain": 1 - sizes["adaptive"] / sizes["static"],
        "waste": groups[-1].waste(),
        "profile_bytes": sum(tensor.nbytes for group in groups for tensor in group.tables.values()),
        **{f"{name}_ns": min(seconds) / count * 1e9 for name, seconds in spent.seconds.items()},
        "noisy_rounds": spent.noisy,
    }


def _groups(path: Path) -> Iterator[Group]:
    with np.load(path, allow_pickle=False) as file:
        names = sorted(name for name in file.files if name.startswith("train_"))
        for _, members in itertools.groupby(names, key=lambda name: name.split("_")[1]):
            of_group = list(members)
            yield Group([file[name] for name in of_group], [file[name.replace("train", "held")] for name in of_group])


def _static_tables(train: np.ndarray) -> np.ndarray:
    """Probabilities (C, 2·LARGEST + 1): a coefficient's own counts and, as much as 8 tokens, a geometric law."""
    steps = np.abs(np.arange(-LARGEST, LARGEST + 1))
    mean = np.maximum(np.abs(train.astype(np.int64)).mean(0), 1e-4)[:, None]
    law = ((np.sqrt(mean**2 + 1) - 1) / mean) ** steps + 1e-7
    law /= law.sum(1, keepdims=True)
    return (_counts(train) + 8 * law) / (len(train) + 8)


def _counts(symbols: np.ndarray) -> np.ndarray:
    limited = np.clip(symbols, -LARGEST, LARGEST) + LARGEST
    return np.stack([np.bincount(column, minlength=2 * LARGEST + 1) for column in limited.T])


def _bits(tables: np.ndarray, symbols: np.ndarray) -> float:
    limited = np.clip(symbols, -LARGEST, LARGEST).astype(np.int64) + LARGEST
    return float(-np.log2(np.take_along_axis(tables.T, limited, axis=0)).sum())


def _constricted(tables: np.ndarray, symbols: np.ndarray) -> float:
    """Bytes of constriction's range coder with the same static tables, a part at a time, column by column."""
    import constriction

    total = 0
    models = [constriction.stream.model.Categorical(row.astype(np.float64), perfect=False) for row in tables]
    for first in range(0, len(symbols), PART_TOKENS):
        encoder = constriction.stream.queue.RangeEncoder()
        limited = np.clip(symbols[first : first + PART_TOKENS], -LARGEST, LARGEST).astype(np.int32) + LARGEST
        for column, model in zip(limited.T, models, strict=True):
            encoder.encode(np.ascontiguousarray(column), model)
        total += encoder.get_compressed().nbytes
    return total


def write_page(*, check: bool) -> None:
    rates = json.loads((RESULTS / "entropy.json").read_text(encoding="utf-8"))["rates"]
    lines = [
        "| B/token: static tables | constriction | own histogram | `adaptive/1` | fewer than static | over own ideal "
        "| ns a coefficient: decode | encode |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rates:
        reference = f"{r['constriction']:.1f}" if "constriction" in r else "–"
        lines.append(
            f"| {r['static']:.1f} | {reference} | {r['own histogram']:.1f} | **{r['adaptive']:.1f}** | "
            f"{r['gain']:.1%} | {r['waste']:.3%} | {r['decode_ns']:.0f} | {r['encode_ns']:.0f} |"
        )
    page = PAGE.read_text(encoding="utf-8")
    block = f"<!-- figures -->\n{chr(10).join(lines)}\n<!-- /figures -->"
    new = re.sub(r"<!-- figures -->.*<!-- /figures -->", lambda _: block, page, flags=re.DOTALL)
    if check and new != page:
        raise SystemExit(f"{PAGE.name} shows other figures than entropy.json: run benchmarks/entropy.py --page")
    if not check:
        PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
