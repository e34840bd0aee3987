"""Bits by surprisal, by calibrated variance and by energy, and TurboQuant alone, on the same windows (`sequence.py`).

Every case is a recipe, told the surprisals or not. A window's figures are bytes of its sealed blocks' coarse tokens ÷
those tokens, and the divergence behind the restored prefix. Cases that share their fine tokens share that work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcellar.evaluate.bootstrap import bca, ratio_at_equal_kl
from kvcellar.frontends.bench.ratebits import ranks, spearman
from kvcellar.frontends.bench.ratevariants import roots_of
from kvcellar.frontends.bench.ratewindows import HeldOut, coarse_rows, of_block, sealed, sides
from kvcellar.frontends.cli.models import LocalModel
from kvcellar.geometry import Geometry
from kvcellar.pipeline import Pipeline
from kvcellar.profile import Profile
from kvcellar.recipe import CELLAR, SEQUENTIAL, TURBO, Recipe
from kvcellar.rounding import widths_of
from kvcellar.stages import Context, Grade
from kvcellar.transform.basis import times

BINS = 10
RESAMPLES = 2000
STEPS = (0.003, 0.01, 0.03)
QUICKLY = ("turbo", "cellar", "published", "sequential")
EDGES = (0.1, 0.5, 1.5, 3.0, 5.0, 7.0, 10.0)  # of surprisal classes, bits


class Case(NamedTuple):
    """A point of a curve."""

    curve: str
    recipe: Recipe
    told: bool


def cases(*, quick: bool = False) -> list[Case]:
    """All points of all curves; a `quick` look takes one of the longer ones, of each curve the ends."""
    found = _cases()
    if not quick:
        return found
    ends: dict[str, list[Case]] = {}
    for case in found:
        ends.setdefault(case.curve, []).append(case)
    return [case for name, of in ends.items() if name in QUICKLY for case in (of[0], of[-1])]


def _cases() -> list[Case]:
    found = [Case("turbo", recipe, False) for recipe in TURBO]
    found += [Case("cellar", recipe, False) for recipe in CELLAR]
    for curve, told, settings in (
        ("uniform", False, {"allocation": "uniform", "least": 1}),
        ("published", True, {"allocation": "uniform", "least": 1}),
        ("published, 0 allowed", True, {"allocation": "uniform", "least": 0}),
    ):
        for bits in (1, 2, 3):
            found.append(Case(curve, _with(step=0.01, bits=bits, **settings), told))
    for step in STEPS:
        found.append(Case("water-filling", _with(step=step, allocation="variance"), False))
        found.append(Case("sequential", _with(step=step), True))
        found.append(Case("water-filling × surprisal", _with(step=step, allocation="variance"), True))
        found.append(Case("at least 1 bit", _with(step=step, allocation="variance", least=1), True))
        found.append(Case("own energy", _with(step=step, allocation="energy"), False))
    return found


def _with(**settings: Any) -> Recipe:
    return replace(SEQUENTIAL, quantize={**(SEQUENTIAL.quantize or {}), **settings})


_transforms: dict[str, Any] = {}


def prepared(recipe: Recipe, geometry: Geometry, profile: Profile | None) -> Pipeline:
    """A pipeline that shares its transform with all that have the same: the way there inverts matrices, slowly."""
    pipeline = Pipeline(recipe, geometry, profile)
    if profile is not None:
        residual: Any = pipeline.residual
        residual.transform = _transforms.setdefault(f"{profile.id} {recipe.transform}", residual.transform)
    return pipeline


def measured(
    local: LocalModel, window: HeldOut, surprisal: np.ndarray, case: Case, profile: Profile, held: dict[str, Any]
) -> dict[str, float]:
    """`bytes` a token and `kl` of a case on a window; `held` keeps fine tokens from case to case."""
    pipeline = prepared(case.recipe, window.cache.geometry, profile if case.recipe.predict else None)
    fine_of = f"{case.recipe.predict} {(case.recipe.quantize or {}).get('id') if not case.recipe.predict else ''}"
    if held.get("of") != fine_of:
        held["of"], held["fine"] = fine_of, window.fine(pipeline)
    fine, rows = held["fine"], coarse_rows(case.recipe, len(window.cache))
    tokens = window.under(case.recipe)._replace(surprisal=surprisal if case.told else None)
    layers = {i: kv.tokens(rows.start, rows.stop) for i, kv in fine.items()}
    symbols, coarse = pipeline.quantize(layers, tokens.take(slice(rows.start, rows.stop)), Grade.COARSE, restore=True)
    blocks = sealed(case.recipe, len(window.cache))
    size = sum(len(part) for block in blocks for part in pipeline.pack([of_block(symbols, block, rows.start)]))
    kl = window.divergence(local, case.recipe, fine, coarse)
    return {"bytes": size / sum(map(len, blocks)), "kl": kl}


def conditioned(window: HeldOut, surprisal: np.ndarray, profile: Profile, recipe: Recipe) -> dict[str, float]:
    """Bytes a token of `cellar`'s symbols under contexts from the token's weight n, its surprisal class, or both.

    `weights` and `classes` are what it costs to send either, so that a context has to earn what it tells.
    """
    pipeline = prepared(recipe, window.cache.geometry, profile)
    symbols, _ = window.coarse(pipeline, window.fine(pipeline))
    first = coarse_rows(recipe, len(window.cache)).start
    total = dict.fromkeys(("none", "weight", "class", "both", "weights", "classes"), 0)
    count = 0
    for block in sealed(recipe, len(window.cache)):
        known = np.digitize(np.nan_to_num(surprisal[block.start : block.stop], nan=4.0), EDGES).astype(np.int16)[
            :, None
        ]
        count += len(block)
        for g, (n, q) in enumerate(of_block(symbols, block, first)):
            layers = pipeline.groups[g]
            both = np.digitize(n, (-1, 0, 1)).astype(np.int16) * 2 + (known > 3)
            notes = {"none": np.zeros_like(n), "weight": n, "class": known - 3, "both": both - 3}
            for name, note in notes.items():
                note = note.astype(np.int16)
                total[name] += len(pipeline.symbols.encode([note, q], layers)) - len(
                    pipeline.symbols.encode([note], layers)
                )
            total["weights"] += len(pipeline.symbols.encode([n], layers))
            total["classes"] += len(pipeline.symbols.encode([known], layers)) if g == 0 else 0
    return {name: size / count for name, size in total.items()}


def energies(window: HeldOut, surprisal: np.ndarray, profile: Profile, recipe: Recipe) -> dict[str, Any]:
    """|A (x − p)|² of each coarse token by layer, p predicted from what `recipe` restores, and its surprisal."""
    pipeline = prepared(recipe, window.cache.geometry, profile)
    rows = coarse_rows(recipe, len(window.cache))
    _, restored = window.coarse(pipeline, window.fine(pipeline))
    tokens = window.under(recipe).take(slice(rows.start, rows.stop))
    layers = {i: kv.tokens(rows.start, rows.stop) for i, kv in enumerate(window.cache.layers)}
    context, found = Context(tokens.ids, tokens.positions, tokens.earlier), []
    rope: Any = pipeline.residual.transform.rope  # type: ignore[attr-defined]
    positions = torch.from_numpy(tokens.positions)
    for group in pipeline.groups:
        x = [side.float() for side in sides(layers, group)]
        p = pipeline.predictor.predict(context, x) if pipeline.predictor else [torch.zeros_like(t) for t in x]
        r = rope.forward([a - b for a, b in zip(x, p, strict=True)], group, positions)
        parts = torch.split(times(r, roots_of(profile, group)).square(), widths_of(pipeline.geometry, group), dim=1)
        by_side = [part.sum(dim=1).numpy() for part in parts]
        per_layer = len(by_side) // len(group)
        found += [
            sum(by_side[i * per_layer : (i + 1) * per_layer]).astype(float).tolist()  # type: ignore[union-attr]
            for i in range(len(group))
        ]
        context.push(list(sides(restored, group)))
    return {"surprisal": surprisal[rows.start : rows.stop].tolist(), "energy": found}


def premise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By layer Spearman's ρ of surprisal and energy, and over `BINS` equal shares of tokens means ÷ the mean of all."""
    told = np.concatenate([row["surprisal"] for row in rows])
    energy = np.concatenate([np.array(row["energy"]) for row in rows], axis=1)
    which = np.minimum((ranks(told) * BINS / len(told)).astype(int), BINS - 1)
    return {
        "tokens": len(told),
        "mean_surprisal": float(told.mean()),
        "rho": [spearman(told, of) for of in energy],
        "surprisal": [float(told[which == k].mean()) for k in range(BINS)],
        "energy": [[float(of[which == k].mean() / of.mean()) for k in range(BINS)] for of in energy],
    }


def compared(
    articles: Sequence[str], points: dict[str, list[list[dict[str, float]]]], presets: Sequence[str]
) -> list[dict[str, Any]]:
    """Bytes of each TurboQuant preset ÷ those of each curve at that preset's KL, with 95 % BCa limits over articles.

    `points` by curve: a list of points, each a list of windows; `presets` are the names of those of "turbo". None where
    a curve does not reach the KL.
    """
    found = []
    for number, turbo in enumerate(points["turbo"]):
        for curve, others in points.items():
            if curve == "turbo":
                continue
            columns = [[w["kl"], w["bytes"]] for point in (turbo, *others) for w in point]
            sums = np.array(columns).reshape(1 + len(others), len(articles), 2).transpose(1, 0, 2)
            sums = np.concatenate([sums.reshape(len(articles), -1), np.ones((len(articles), 1))], axis=1)
            whole = _ratio(sums.sum(axis=0)[None])[0]
            limits = bca(articles, sums, _ratio, resamples=RESAMPLES) if np.isfinite(whole) else None
            ratio = float(whole) if np.isfinite(whole) else None
            found.append({"turbo": presets[number], "curve": curve, "ratio": ratio, "ci": limits})
    return found


def _ratio(sums: np.ndarray) -> np.ndarray:
    found = []
    for row in sums:
        points = [(float(kl), float(size)) for kl, size in (row[:-1] / row[-1]).reshape(-1, 2)]
        ratio = ratio_at_equal_kl(points[:1], points[1:], points[0][0])
        found.append(np.nan if ratio is None else ratio)
    return np.array(found)
