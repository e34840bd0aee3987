"""The whole curve: bytes against restore time and restore work, from the tokens alone to the exact cache.

    python benchmarks/replay.py --data DIR [--windows 8] [--tokens 40960] [--layers 2,5,10]

Between `tokens` (the ids; a restore is a prefill) and `cellar` (a restore runs nothing of the model) lie the recipes
`replay-N`: N decoder layers run again, the rest foreseen from the state behind them. All that need a profile get one
fitted on the same calibration windows; what a recipe takes at the KL of `cellar` is interpolated on log bytes between
its own steps. Test windows, decoded and scored in another process (docs/evaluation.md). Times are seconds of all
threads' work (process_time), in turns with the fastest prefill's, since other programs do not lengthen those; FLOPs
are counted: of the model by torch, of the decoder from the shapes of its matrices. Profiles and windows are kept under
$KVCELLAR_HOME: an interrupted run goes on. Prints a table and one JSON line; writes benchmarks/results/replay.json and
docs/replay.png. Two cores: fits take ten minutes each, a window of a recipe half a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common import HERE, machine, rounded, write_result
from kvcellar.calibrate import fingerprint_of_fit, fit_profile, fitted_stages
from kvcellar.evaluate.bootstrap import bytes_at_kl
from kvcellar.frontends.bench.run import Bench
from kvcellar.frontends.calibration import calibration_documents, collect, cut
from kvcellar.frontends.cli.bench_setup import chosen_windows
from kvcellar.frontends.cli.common import progress
from kvcellar.frontends.cli.demo_model import demo_model
from kvcellar.frontends.cli.models import MeasuredModel
from kvcellar.profile import Profile, all_profiles, load_profile
from kvcellar.recipe import PRESETS, Recipe, canonical_json, replaying
from replaycosts import costs_of

PREFIX, CONTINUATION, WINDOW = 1024, 384, 1024
STEPS = (0.0123, 0.0298)
PLAIN = ("fractal", "turbo-4", "exact")
ID_BITS = 16


def main() -> None:
    options = _options()
    load = [os.getloadavg()[0]]
    local = MeasuredModel(options.model or demo_model(quiet=True))
    windows, sources, documents = chosen_windows(
        local, (), options.data, PREFIX, CONTINUATION, options.windows, quiet=False
    )
    bench = Bench(local, windows, texts=documents, quick=True)
    bench.prepare()
    curves = {f"replay-{n}" if n else "cellar": [replaying(n, step) for step in STEPS] for n in (0, *options.layers)}
    others = [PRESETS[name] for name in PLAIN if name not in options.without]
    profiles = _profiles([of[0] for of in curves.values()] + others, local, options)
    points = {
        name: [_point(bench, replace(each, name=f"{name}@{each.quantize['step']:g}"), profiles[name]) for each in of]
        for name, of in curves.items()
    }
    rows = [_tokens_row()]
    costs = costs_of(bench, curves, profiles, others)
    for name in sorted(curves, key=_layers_of, reverse=True):
        rows.append({"recipe": name, **_at_equal(points, name), **costs[name]})
    for recipe in others:
        rows.append({"recipe": recipe.name, **_point(bench, recipe, profiles[recipe.name]), **costs[recipe.name]})
    load.append(os.getloadavg()[0])
    result: dict[str, Any] = {
        "machine": machine(),
        "load": load,
        "model": local.identity.to_json(),
        "texts": sources,
        "windows": [window.id for window in windows],
        "tokens": PREFIX,
        "continuation": CONTINUATION,
        "calibration_tokens": options.tokens,
        "at_kl": points["cellar"][0]["kl"],
        "prefill": costs["prefill"],
        "points": points,
        "rows": rows,
    }
    path = write_result("replay", result)
    plot(result, HERE.parent / "docs" / "replay.png")
    _show(result)
    print(json.dumps(rounded({"written": path.name, "at_kl": result["at_kl"], "rows": rows})))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Folder of a model. Default: the demo model.")
    parser.add_argument("--data", type=Path, required=True, help="Folder of the files in benchmarks/texts.toml.")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40_960, help="Calibration tokens, of --data's tuning text too.")
    parser.add_argument("--layers", type=lambda text: [int(n) for n in text.split(",")], default=[2, 5, 10])
    parser.add_argument("--without", nargs="*", default=[], choices=PLAIN)
    return parser.parse_args()


def _layers_of(name: str) -> int:
    return int(name.removeprefix("replay-")) if name != "cellar" else 0


def _profiles(recipes: list[Recipe], local: Any, options: argparse.Namespace) -> dict[str, Profile | None]:
    """By recipe's name the profile fitted on the calibration windows, made where it is not kept yet."""
    texts = [options.data / "wt2_valid.txt"]
    documents = calibration_documents([path for path in texts if path.is_file()])
    cuts = cut(documents, partial(local.encode, continues=True), options.tokens, WINDOW)
    calibration = collect(local, cuts, progress)
    found: dict[str, Profile | None] = {}
    for recipe in recipes:
        name = "cellar" if recipe.name == "replay-0" else recipe.name
        if not fitted_stages(recipe):
            found[name] = None
            continue
        wanted = canonical_json(fingerprint_of_fit(recipe))
        kept = [
            path
            for path, said in all_profiles()
            if canonical_json(said.get("fitted")) == wanted
            and said.get("tokens") == calibration.tokens
            and said.get("texts") == sorted(calibration.texts)
        ]
        if not kept:
            started = time.process_time()
            profile = fit_profile(recipe, calibration)
            print(f"{name}: fitted in {time.process_time() - started:.0f} s of work", flush=True)
            kept = [profile.save()]
        found[name] = load_profile(kept[0])
    return found


def _point(bench: Bench, recipe: Recipe, profile: Profile | None) -> dict[str, Any]:
    row = bench.recipe(recipe, profile)[0]
    print(f"{recipe.name}: {row['file_bytes_per_token']:.1f} B a token, KL {row['kl']:.4f}", flush=True)
    keys = ("file_bytes_per_token", "payload_bytes_per_token", "kl", "kl_ci", "dppl", "restore_class", "profile_bytes")
    return {key: row[key] for key in keys} | {"by_window": row["by_window"]}


def _at_equal(points: dict[str, list[dict[str, Any]]], name: str) -> dict[str, Any]:
    """Bytes of a curve at the KL of `cellar`'s first step, on all windows and on each left out, and the share saved."""
    base, own = points["cellar"], points[name]
    kl = base[0]["kl"]
    at = bytes_at_kl([(p["kl"], p["file_bytes_per_token"]) for p in own], kl)
    shares = []
    for left_out in base[0]["by_window"]:
        goal = _mean(base[0], "kl", left_out)
        some = bytes_at_kl([(_mean(p, "kl", left_out), _mean(p, "file_bytes_per_token", left_out)) for p in own], goal)
        if some is not None:
            shares.append(1 - some / _mean(base[0], "file_bytes_per_token", left_out))
    return {
        "file_bytes_per_token": at,
        "kl": kl,
        "interpolated": name != "cellar",
        "saved": None if at is None else 1 - at / base[0]["file_bytes_per_token"],
        "saved_jackknife": [min(shares), max(shares)] if len(shares) == len(base[0]["by_window"]) else None,
        "restore_class": own[0]["restore_class"],
        "profile_bytes": own[0]["profile_bytes"],
    }


def _mean(point: dict[str, Any], key: str, left_out: str) -> float:
    return statistics.fmean(of[key] for window, of in point["by_window"].items() if window != left_out)


def _tokens_row() -> dict[str, Any]:
    """Ids as a block packs them; what a model of them saves is the token log's business."""
    return {
        "recipe": "tokens",
        "file_bytes_per_token": ID_BITS / 8,
        "kl": 0.0,
        "restore_class": "whole",
        "restore_to_prefill": 1.0,
        "flops_to_prefill": 1.0,
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Bytes against work and against FLOPs of a restore, both in prefills; a point a recipe, its KL beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, key, label in zip(
        axes,
        ("restore_to_prefill", "flops_to_prefill"),
        ("work of a restore ÷ work of a prefill", "FLOPs of a restore ÷ FLOPs of a prefill"),
        strict=True,
    ):
        for row in result["rows"]:
            if row.get("file_bytes_per_token") is None:
                continue
            x = max(row[key], 1e-3)
            marker = {"none": "o", "part": "s", "whole": "D"}[row["restore_class"]]
            ax.plot(x, row["file_bytes_per_token"], marker, color="#1f4e79" if row["kl"] else "#888888")
            words = f"{row['recipe']}\nKL {row['kl']:.3g}" if ax is axes[0] else row["recipe"]
            ax.annotate(words, (x, row["file_bytes_per_token"]), (5, 4), textcoords="offset points", fontsize=7)
        ax.set(xscale="log", yscale="log", xlabel=label)
        ax.axvline(1, color="#bbbbbb", linewidth=0.8)
        ax.axvline(1 / 3, color="#bbbbbb", linewidth=0.8, linestyle=":")
        ax.grid(alpha=0.2, which="both")
        ax.margins(x=0.18, y=0.1)
    axes[0].set_ylabel("bytes a token, whole file")
    tokens, windows = result["tokens"], len(result["windows"])
    figure.suptitle(
        f"{windows} windows of {tokens:,} tokens; replay-N at the KL of cellar; dotted: a third of a prefill",
        fontsize=9,
    )
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _show(result: dict[str, Any]) -> None:
    print(f"{'recipe':<12}{'B/token':>9}{'KL':>9}{'saved':>8}{'restore':>9}{'FLOPs':>8}  class")
    for row in result["rows"]:
        cells = [
            row.get(key) for key in ("file_bytes_per_token", "kl", "saved", "restore_to_prefill", "flops_to_prefill")
        ]
        formats = ("9.1f", "9.4f", "8.3f", "9.3f", "8.3f")
        words = "".join(
            f"{'–':>{f.split('.')[0]}}" if c is None else f"{c:{f}}" for c, f in zip(cells, formats, strict=True)
        )
        print(f"{row['recipe']:<12}{words}  {row['restore_class']}")


if __name__ == "__main__":
    main()
