"""What each part of recipe `cellar` is worth: its bytes without it, at the divergence of the whole, on tuning text.

Every variant is fitted on the same calibration and coded at a few steps, with tables trained at each of them on
calibration symbols. The whole codec's own three steps (`cellar-fine`, `cellar`, `cellar-small`) are the points of
comparison: a variant's bytes at the whole's divergence there, log bytes linear in log KL between its own steps, the
nearest of which are looked for. Intervals are 95 %, BCa, each resample drawing the same documents for both and
interpolating anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...cache import LayerKV
from ...calibrate import Calibration
from ...evaluate.bootstrap import bca
from ...pipeline import Arrays, Pipeline
from ...profile import Profile, load_profile
from ...recipe import PRESETS, Recipe, canonical_json
from ...stages import Grade
from ...store.local import LocalStore
from ...symbols.adaptive import trained
from ...tokens import Tokens
from ..cli.common import progress
from ..cli.models import LocalModel
from ..curve import with_step
from .ratebits import Static
from .ratevariants import BASE, Variant, fitted, variants
from .ratewindows import HeldOut, Kept, coarse_rows, of_block, sealed
from .run import source_digest

POINTS = ("cellar-fine", "cellar", "cellar-small")
FURTHER = 2.5  # the next step beyond what was measured
BEYOND = 1.15  # how far beyond a point's divergence it is measured, for resamples
NEAR = 1.1  # a divergence so near to a point's needs no other step
MOST = 9
TRAINED_ON = 4  # samples
MEASURING = ("rateablation", "ratebits", "ratelength", "ratevariants", "ratewhere", "ratewindows")
STATIC = "static tables"


class Ablation:
    """Variants measured on held-out windows; `calibration` is what all are fitted on."""

    def __init__(
        self, local: LocalModel, calibration: Calibration, windows: Sequence[HeldOut], folder: Path, *, quiet: bool
    ):
        self.local, self.calibration, self.windows, self.quiet = local, calibration, windows, quiet
        ids = [f"{each.window.id}-{each.window.prefix}-{len(each.window.ids)}" for each in windows]
        self.key = f"{sources()} {calibration.digest} {' '.join(ids)}"
        self.folder, self.results = folder, Kept(folder)
        self._of, self._kept_fine = "", dict[int, dict[int, LayerKV]]()

    @cached_property
    def whole(self) -> Profile:
        return self._fitted(Variant("whole", "", BASE, lambda calibration, _: fitted(BASE, calibration)), None)

    def measure(self) -> list[dict[str, Any]]:
        """A row for each variant: `steps`, and by step `kl` (nats) and `bytes` (per coarse token) of each window.

        Static tables are the whole codec's symbols under another code, and come last.
        """
        rows: list[dict[str, Any]] = []
        for variant in variants():
            measured = self._steps(variant, rows[0] if rows else None)
            costs = [measured[step] for step in sorted(measured)]
            rows.append({"variant": variant.name, "what": variant.what, "steps": sorted(measured), **_columns(costs)})
        whole = {**rows[0], "variant": STATIC, "what": "instead of contexts", "bytes": rows[0]["static"]}
        return [*rows, whole]

    def _steps(self, variant: Variant, whole: dict[str, Any] | None) -> dict[float, Any]:
        points = [float((PRESETS[name].quantize or {})["step"]) for name in POINTS]
        found: dict[float, Any] = {}

        def at(step: float) -> float:
            step = float(f"{step:.4g}")
            if step not in found:
                found[step] = self._cost(variant, step)
            return float(np.mean(found[step]["kl"]))

        for step in points:
            at(step)
        if whole is None:
            return found
        targets = [float(np.mean(kl)) for step, kl in zip(whole["steps"], whole["kl"], strict=True) if step in points]
        while at(min(found)) > min(targets) / BEYOND and len(found) < MOST:
            at(min(found) / FURTHER)
        while at(max(found)) < max(targets) * BEYOND and len(found) < MOST:
            at(max(found) * FURTHER)
        for target in targets:
            steps = sorted(found)
            costs = np.maximum.accumulate([at(step) for step in steps])
            nearest = np.abs(np.log(costs / target)).min()
            if costs[0] < target < costs[-1] and nearest > np.log(NEAR) and len(found) < MOST:
                at(float(np.exp(np.interp(np.log(target), np.log(costs), np.log(steps)))))
        return found

    def _cost(self, variant: Variant, step: float) -> dict[str, Any]:
        recipe = with_step(variant.recipe, step, variant.name)
        name = f"step {self.key} {variant.name} {canonical_json(recipe.to_json()).decode()}"
        found: dict[str, Any] = self.results.get(name, lambda: self._measured(variant, recipe))
        return found

    def _measured(self, variant: Variant, recipe: Recipe) -> dict[str, Any]:
        profile = self._profile(variant)
        with_tables, static = self._tables(recipe, profile)
        pipeline = Pipeline(recipe, self.calibration.geometry, with_tables)
        costs: dict[str, Any] = {"kl": [], "bytes": [], "static": []}
        label = f"{variant.name}, step {(recipe.quantize or {})['step']:g}"
        with progress(label, len(self.windows), quiet=self.quiet) as advance:
            for number, window in enumerate(self.windows):
                fine = self._fine(variant, number, pipeline)
                symbols, coarse = window.coarse(pipeline, fine)
                blocks, first = sealed(recipe, len(window.cache)), coarse_rows(recipe, len(window.cache)).start
                parts = [of_block(symbols, block, first) for block in blocks]
                tokens = sum(map(len, blocks))
                coded = sum(len(part) for arrays in parts for part in pipeline.pack([arrays]))
                bits = sum(table.bits(array) for arrays in parts for table, array in _tables_of(static, arrays))
                costs["kl"].append(window.divergence(self.local, recipe, fine, coarse))
                costs["bytes"].append(coded / tokens)
                costs["static"].append(bits / 8 / tokens)
                advance(1)
        return costs

    def _fine(self, variant: Variant, number: int, pipeline: Pipeline) -> dict[int, LayerKV]:
        """The window's fine tokens, kept while one variant is measured."""
        if self._of != variant.name:
            self._of, self._kept_fine = variant.name, {}
        if number not in self._kept_fine:
            self._kept_fine[number] = self.windows[number].fine(pipeline)
        return self._kept_fine[number]

    def _tables(self, recipe: Recipe, profile: Profile) -> tuple[Profile, list[list[Static]]]:
        """The profile with the coder's tables for this step, and static ones, by group and array."""
        pipeline = Pipeline(replace(recipe, symbols={"id": "map/1"}), self.calibration.geometry, profile)
        samples = self.calibration.samples
        some = samples[:: max(1, len(samples) // TRAINED_ON)][:TRAINED_ON]
        first = recipe.window.sinks if recipe.window else 0
        coded: list[list[Arrays]] = []
        for sample in some:
            rows, cache = slice(first, None), sample.load()
            tokens = Tokens.following(sample.tokens, 0).take(rows)
            coded.append(pipeline.quantize(cache.tokens(first, len(cache)).layers, tokens, Grade.COARSE)[0])

        def arrays() -> Iterator[tuple[range, int, np.ndarray]]:
            for symbols in coded:
                for layers, group in zip(pipeline.groups, symbols, strict=True):
                    for which, array in enumerate(group):
                        yield layers, which, array

        tables = {f"symbols.{name}": value for name, value in trained(arrays()).items()}
        static = [
            [Static(np.concatenate([symbols[g][which] for symbols in coded])) for which in range(len(coded[0][g]))]
            for g in range(len(pipeline.groups))
        ]
        return Profile({**profile.tensors, **tables}, profile.metadata), static

    def _profile(self, variant: Variant) -> Profile:
        return self.whole if variant.fit is None else self._fitted(variant, self.whole)

    def _fitted(self, variant: Variant, whole: Profile | None) -> Profile:
        """The variant's profile, made once."""
        name = f"profile {sources()} {self.calibration.digest} {variant.name} {variant.recipe.digest.hex()}"
        file = f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.safetensors"
        if not (self.folder / file).is_file():
            with progress(f"{variant.name}: profile", 1, quiet=self.quiet):
                assert variant.fit is not None
                profile = variant.fit(self.calibration, whole if whole is not None else Profile({}, {}))
            with LocalStore(self.folder).replacing(file) as pending:
                pending.append(profile.pack())
        return load_profile(self.folder / file)


def sources() -> str:
    """Short hash of all source that bytes and divergences of the study depend on."""
    root = Path(__file__).resolve().parents[2]
    files = [root / f"{name}.py" for name in ("calibrate", "metric", "pipeline", "rope", "rounding")]
    files += [Path(__file__).parent / f"{name}.py" for name in MEASURING]
    folders = source_digest("predict", "transform", "quantize", "symbols")
    return hashlib.sha256(b"".join(path.read_bytes() for path in files) + folders.encode()).hexdigest()[:16]


def compare(rows: Sequence[dict[str, Any]], articles: Sequence[str]) -> list[dict[str, Any]]:
    """For each variant and point: bytes ÷ the whole codec's at its divergence there, with an interval over documents.

    `ratio` is None where the variant was not measured at that divergence.
    """
    whole, found = rows[0], []
    for row in rows[1:]:
        for name in POINTS:
            step = float((PRESETS[name].quantize or {})["step"])
            at, count = whole["steps"].index(step), len(row["steps"])
            sums = np.array([whole["kl"][at], whole["bytes"][at], *row["kl"], *row["bytes"]]).T

            def statistic(total: np.ndarray, count: int = count) -> np.ndarray:
                return _ratios(total, count)

            ratio = float(statistic(sums.sum(axis=0)[None])[0])
            ci = bca(articles, sums, statistic, resamples=2000) if np.isfinite(ratio) else None
            kl, nbytes = float(np.mean(whole["kl"][at])), float(np.mean(whole["bytes"][at]))
            values = {"ratio": ratio if np.isfinite(ratio) else None, "ci": ci, "kl": kl, "whole_bytes": nbytes}
            found.append({"variant": row["variant"], "what": row["what"], "point": name, **values})
    return found


def _ratios(total: np.ndarray, count: int) -> np.ndarray:
    """Bytes of the variant at the whole's divergence ÷ the whole's; rows hold sums (2 + 2·count) over windows."""
    logs = np.log(np.maximum(total, 1e-300))
    found = np.full(len(total), np.nan)
    for i, row in enumerate(logs):
        costs = np.maximum.accumulate(row[2 : 2 + count])
        found[i] = np.exp(np.interp(row[0], costs, row[2 + count :], left=np.nan, right=np.nan) - row[1])
    return found


def _columns(costs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: [cost[name] for cost in costs] for name in ("kl", "bytes", "static")}


def _tables_of(static: Sequence[Sequence[Static]], arrays: Sequence[Arrays]) -> Iterator[tuple[Static, np.ndarray]]:
    for tables, group in zip(static, arrays, strict=True):
        yield from zip(tables, group, strict=True)
