"""Recipe exact-small beside exact, zstd and blosc2: whole files of caches that the model computed in 16 bits.

    python benchmarks/exact_small.py [--data DIR] [--model DIR] [--profile FILE] [--dtypes bfloat16,float16]

Windows of 1,024 tokens of test text (encyclopedia, docs, code; benchmarks/texts.toml) and one of --long tokens go
through the model in the dtype of the cache; each file is restored and compared bit by bit. The profile is the one that
`kvcellar calibrate --recipe exact-small --dtype …` made, or --profile. Every window is kept as it is done, under
$KVCELLAR_HOME/exact_small, so a run that was interrupted goes on. Prints one JSON line last; writes
benchmarks/results/exact_small.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import kvcellar
from common import HERE, RESULTS, add_model, machine, rounded, write_result
from kvcellar.calibrate import find_fitted
from kvcellar.evaluate.texts import load_sources
from kvcellar.frontends.cli.models import LocalModel, empty_cache
from kvcellar.frontends.transformers import take_cache
from kvcellar.profile import Profile, home
from kvcellar.recipe import EXACT, EXACT_SMALL
from peers import blosc2_ways, require_exact, zstd_size
from realcache import raw_bytes

WINDOW = 1024
LONG = 4096
KINDS = ("encyclopedia", "docs", "code")
LEAST = 1.8
NAMES = ("raw", "zstd-3", "blosc2", "exact", "exact-small")


def main() -> None:
    options = _options()
    rows, profiles = [], {}
    for dtype in options.dtypes.split(","):
        local = LocalModel(options.model, dtype)
        geometry = _geometry(local)
        profile = Profile.unpack(options.profile.read_bytes()) if options.profile else None
        profile = profile or find_fitted(EXACT_SMALL, local.identity, geometry)
        if profile is None:
            raise SystemExit(f"no profile: kvcellar calibrate --recipe exact-small --model DIR --dtype {dtype}")
        profiles[dtype] = {"id": profile.id, "bytes": profile.nbytes, "tokens": profile.metadata.get("tokens")}
        for kind, ids in _windows(local, options):
            rows.append(_kept(partial(_measured, local, profile, ids), dtype, kind, ids, profile))
            _say(f"{dtype} {kind} {len(ids)}: {rows[-1]['bytes']['raw'] / rows[-1]['bytes']['exact-small']:.3f}×")
    result = {"benchmark": "exact_small", "machine": machine(), "profiles": profiles, "rows": rows}
    result["ratios"] = {dtype: _ratios([r for r in rows if r["dtype"] == dtype]) for dtype in profiles}
    result["claims"] = {f"{d} at least {LEAST}": all(s >= LEAST for s in _each(rows, d)) for d in profiles}
    _show(result)
    write_result(options.name, result)
    print(json.dumps(rounded(result), ensure_ascii=False))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--data", type=Path, default=Path("data"), metavar="DIR", help="folder of the text files")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="a profile's file in place of the newest")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--windows", type=int, default=4, help="windows of each kind of text")
    parser.add_argument("--long", type=int, default=LONG, help="tokens of the long window, 0 for none")
    parser.add_argument("--name", default="exact_small", help=f"file under {RESULTS.name}/")
    return parser.parse_args()


def _windows(local: LocalModel, options: argparse.Namespace) -> Iterator[tuple[str, list[int]]]:
    """Kind and ids: the start of one document each, and of the first that is long enough."""
    sources = load_sources(HERE / "texts.toml", options.data)
    long = options.long
    for kind in KINDS:
        found = 0
        documents = sources.documents("test", [kind]) if any(s.kind == kind for s in sources.sources) else []
        for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
            if found >= options.windows and not long:
                break
            ids = local.encode(document.text[: 16 * max(long, WINDOW)])
            if found < options.windows and len(ids) >= WINDOW:
                found += 1
                yield kind, ids[:WINDOW]
            elif long and len(ids) >= long:
                yield kind, ids[:long]
                long = 0


def _kept(make: Any, dtype: str, kind: str, ids: list[int], profile: Profile) -> dict[str, Any]:
    """`make()`, or what it gave in an earlier run of the same code."""
    code = b"".join(
        path.read_bytes() for path in sorted((Path(kvcellar.__file__).parent / "symbols").glob("causal*.py"))
    )
    parts = [dtype.encode(), np.array(ids, "<i8").tobytes(), profile.id.encode(), code]
    file = home() / "exact_small" / f"{hashlib.sha256(b'|'.join(parts)).hexdigest()[:32]}.json"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        made = {"dtype": dtype, "kind": kind, "tokens": len(ids), **make()}
        file.with_suffix(".part").write_text(json.dumps(made))
        file.with_suffix(".part").replace(file)
    row: dict[str, Any] = json.loads(file.read_text())
    return row


def _measured(local: LocalModel, profile: Profile, ids: list[int]) -> dict[str, Any]:
    """Bytes of every way, and seconds of processor time of prefill, save and restore."""
    cache, clock = empty_cache(), time.process_time
    started = clock()
    local.prefill(ids, cache, quiet=True)
    prefill = clock() - started
    pairs = [(layer.keys.contiguous(), layer.values.contiguous()) for layer in cache.layers]
    raw = raw_bytes(pairs)
    ways = blosc2_ways(raw, len(pairs))
    require_exact(ways, raw)
    sizes = {"raw": raw.nbytes, "zstd-3": zstd_size(raw), "blosc2": min(way.size for way in ways)}
    seconds = {"prefill": prefill}
    with tempfile.TemporaryDirectory(prefix="kvcellar-") as folder:
        for recipe in (EXACT, EXACT_SMALL):
            path, given = Path(folder) / f"{recipe.name}.kvc", profile if recipe is EXACT_SMALL else None
            started = clock()
            kvcellar.save(path, pairs, tokens=ids, identity=local.identity, recipe=recipe, profile=given)
            seconds[f"save {recipe.name}"] = clock() - started
            started = clock()
            with kvcellar.open(path, identity=local.identity, profile=given) as archive:
                back = archive.restore(ids).cache
            seconds[f"restore {recipe.name}"] = clock() - started
            if not np.array_equal(raw_bytes([(layer.keys, layer.values) for layer in back.layers]), raw):
                raise SystemExit(f"{recipe.name}: the restored cache differs from the saved one")
            sizes[recipe.name] = path.stat().st_size
    return {"bytes": sizes, "processor_s": seconds}


def _geometry(local: LocalModel) -> Any:
    cache = empty_cache()
    local.prefill([0], cache, quiet=True)
    return take_cache(cache).geometry


def _each(rows: list[dict[str, Any]], dtype: str) -> list[float]:
    return [r["bytes"]["raw"] / r["bytes"]["exact-small"] for r in rows if r["dtype"] == dtype]


def _ratios(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Raw bytes over those of each way, of all windows of a kind together, and what a restore takes."""
    found: dict[str, Any] = {}
    for kind in {f"{r['kind']}, {r['tokens']} tokens": 0 for r in rows}:
        these = [r for r in rows if f"{r['kind']}, {r['tokens']} tokens" == kind]
        total = {name: sum(r["bytes"][name] for r in these) for name in NAMES}
        restore = [r["processor_s"]["restore exact-small"] for r in these]
        found[kind] = {
            "windows": len(these),
            **{name: total["raw"] / total[name] for name in NAMES},
            "bytes_per_token": total["exact-small"] / sum(r["tokens"] for r in these),
            "restore_over_prefill": statistics.median(
                r["processor_s"]["restore exact-small"] / r["processor_s"]["prefill"] for r in these
            ),
            "restore_mb_per_s": total["raw"] / sum(restore) / 1e6,
        }
    return found


def _show(result: dict[str, Any]) -> None:
    for dtype, kinds in result["ratios"].items():
        print(f"\n{dtype}: raw bytes over whole-file bytes; profile {result['profiles'][dtype]['bytes'] / 1e6:.1f} MB")
        names = ("text", "windows", *NAMES[1:], "B/token", "restore MB/s a core", "of the prefill")
        print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
        for kind, r in kinds.items():
            print(
                f"| {kind} | {r['windows']} | {r['zstd-3']:.3f} | {r['blosc2']:.3f} | {r['exact']:.3f} | "
                f"{r['exact-small']:.3f} | {r['bytes_per_token']:,.0f} | {r['restore_mb_per_s']:.1f} | "
                f"{r['restore_over_prefill']:.2f} |"
            )


def _say(what: str) -> None:
    print(f"… {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    main()
