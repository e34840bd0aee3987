"""From the tokens alone to the exact cache: bytes, seconds of a restore and divergence, over the floor of the text.

`points`: whole files, saved, restored and scored as `kvcellar bench` does it; `tokens` is restored in this process,
which has the model. The floor is Σ −log2 P(t) of the tokens under the model, in bytes: what a cache cannot do without
(Theorem 1 of arXiv 2604.15356), since whoever has the model has the rest. `by_text_length` asks whether bytes a token
fall as the text gets longer and so more predictable (Corollary 5).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvcellar.calibrate import find_fitted, fitted_stages
from kvcellar.evaluate.texts import Window
from kvcellar.frontends.bench.ratelength import by_length
from kvcellar.frontends.bench.ratewindows import cache_of
from kvcellar.frontends.bench.run import Bench
from kvcellar.frontends.bench.speed import opened_with
from kvcellar.frontends.cli.models import MeasuredModel
from kvcellar.frontends.library import save
from kvcellar.profile import Profile
from kvcellar.recipe import (
    CELLAR,
    EXACT,
    EXACT_SMALL,
    FRACTAL,
    PRESETS,
    SEQUENTIAL,
    TURBO,
    Recipe,
    replaying,
    tokens_recipe,
)

CURVE = (*(replaying(n) for n in (10, 5, 2)), *CELLAR, SEQUENTIAL, FRACTAL, *TURBO, EXACT_SMALL, EXACT)
QUICKLY = ("cellar", "sequential", "turbo-3", "exact")
KEYS = ("file_bytes_per_token", "kl", "kl_ci", "restore_s", "prefill_s", "restore_class")
REPEATS = 3


def points(
    local: MeasuredModel, windows: Sequence[Window], shared: Profile, *, quick: bool, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Rows of all recipes that have a profile here (`shared` serves those of `cellar`), and what they take over the
    floor; the others are named in `left_out`."""
    bench = Bench(local, windows, quick=True)
    bench.prepare()
    floor = -np.concatenate([bench.references.log2_probs(window) for window in windows]).astype(np.float64)
    floor_bytes = float(np.nansum(floor)) / 8 / len(floor)
    geometry = bench.geometry()
    rows, left_out = [_tokens(bench, windows)], []
    for recipe in CURVE:
        if recipe.name in without or (quick and recipe.name not in QUICKLY):
            continue
        profile = shared if recipe.predict == SEQUENTIAL.predict else None
        if profile is None:
            profile = find_fitted(recipe, local.identity, geometry)
        if profile is None and fitted_stages(recipe):
            left_out.append(recipe.name)
            print(f"{recipe.name}: no profile for it here, left out (kvcellar calibrate makes one)", flush=True)
            continue
        row = bench.recipe(recipe, profile)[0]
        rows.append({"recipe": recipe.name, **{key: row[key] for key in KEYS}})
        print(f"{recipe.name}: {row['file_bytes_per_token']:.1f} B a token, KL {row['kl']:.4f}", flush=True)
    for row in rows:
        row["over_floor"] = row["file_bytes_per_token"] / floor_bytes
        row["restore_to_prefill"] = row["restore_s"] / row["prefill_s"]
    raw = geometry.bytes_per_token_16bit
    return {
        "floor_bytes_per_token": floor_bytes,
        "raw_over_floor": raw / floor_bytes,
        "rows": rows,
        "left_out": left_out,
    }


def _tokens(bench: Bench, windows: Sequence[Window]) -> dict[str, Any]:
    """Recipe `tokens`, its restores checked bit by bit against what was saved, as far as the steps are the same."""
    sizes, seconds, distances = [], [], []
    for window in windows:
        ids = window.ids[: window.prefix]
        recipe = tokens_recipe(chunk=len(ids))
        with tempfile.TemporaryDirectory(prefix="kvcellar-bench-") as scratch:
            path = Path(scratch) / "window.kvc"
            cache = bench.original(window)
            sizes.append(save(path, cache, tokens=ids, identity=bench.local.identity, recipe=recipe).file_bytes)
            for _ in range(REPEATS):
                started = time.perf_counter()
                with opened_with(bench.local, path) as archive:
                    restored = archive.restore()
                seconds.append(time.perf_counter() - started)
            distances.append(restored.replay.distance)
    tokens = statistics.fmean(window.prefix for window in windows)
    return {
        "recipe": "tokens",
        "file_bytes_per_token": statistics.fmean(sizes) / tokens,
        "kl": 0.0,
        "kl_ci": None,
        "restore_s": statistics.median(seconds),
        "prefill_s": bench.prefill().seconds,
        "restore_class": "whole",
        "largest_distance": max(distances),
    }


def by_text_length(
    local: MeasuredModel, window: Window, profile: Profile, lengths: Sequence[int]
) -> dict[str, list[dict[str, Any]]]:
    """`ratelength.by_length` of a text under static codes and codes by surprisal, and the floor at each length."""
    told = np.full(len(window.ids), np.nan, np.float32)
    cache = cache_of(local, window.ids, told)
    cases: dict[str, tuple[Recipe, np.ndarray | None]] = {
        "cellar": (PRESETS["cellar"], None),
        "sequential, not told": (SEQUENTIAL, None),
        "sequential": (SEQUENTIAL, told),
    }
    found = {
        name: by_length(cache, window.ids, recipe, profile, local.identity, lengths, logs)
        for name, (recipe, logs) in cases.items()
    }
    bits = np.cumsum(-np.nan_to_num(told.astype(np.float64)))
    floor = [{"tokens": n, "file": v, "payload": v, "coarse": v} for n in lengths for v in [bits[n - 1] / 8 / n]]
    return {**found, "floor": floor}
