"""Symbols of the three `cellar` presets for benchmarks/entropy.py: of calibration text, and of text behind it.

    python benchmarks/entropy_symbols.py OUT_FOLDER [--text FILE …] [--held 10]

Takes the profile that `kvcellar calibrate --recipe cellar` made with the same --text: its text is `train_G_W`, and
windows of the same documents' order that come after it are `held_G_W`, which no stage has seen.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np

from kvcellar.cache import KVCache
from kvcellar.calibrate import find_fitted
from kvcellar.errors import ProfileMissing
from kvcellar.frontends.calibration import WINDOW, calibration_documents, collect, cut
from kvcellar.frontends.cli.bench_setup import CALIBRATION
from kvcellar.frontends.cli.common import progress
from kvcellar.frontends.cli.demo_model import demo_model
from kvcellar.frontends.cli.models import MeasuredModel
from kvcellar.pipeline import Pipeline
from kvcellar.recipe import CELLAR
from kvcellar.stages import Grade
from kvcellar.tokens import Tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="symbols for the benchmark of the entropy coder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, action="append", default=[])
    parser.add_argument("--held", type=int, default=10, help="windows of text that was not fitted on")
    parser.add_argument("--train", type=int, default=20, help="windows of text that was")
    arguments = parser.parse_args()
    local = MeasuredModel(demo_model())
    documents, encode = calibration_documents(arguments.text), partial(local.encode, continues=True)
    fitted = len(cut(documents, encode, CALIBRATION, WINDOW))
    cuts = cut(documents, encode, CALIBRATION + arguments.held * WINDOW, WINDOW)
    chosen = [*cuts[: arguments.train], *cuts[fitted : fitted + arguments.held]]
    calibration = collect(local, chosen, partial(progress, quiet=False))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for recipe in CELLAR:
        profile = find_fitted(recipe, local.identity, calibration.geometry)
        if profile is None:
            raise ProfileMissing("run kvcellar calibrate --recipe cellar with the same --text first")
        pipeline = Pipeline(recipe, calibration.geometry, profile)
        samples = [symbols(pipeline, ids, cache) for ids, cache in calibration.caches(recipe.name)]
        named = {}
        for kind, some in (("train", samples[: arguments.train]), ("held", samples[arguments.train :])):
            for group in range(len(pipeline.groups)):
                for which in range(len(some[0][group])):
                    named[f"{kind}_{group}_{which}"] = np.stack([sample[group][which] for sample in some])
        np.savez(arguments.out / f"{recipe.name}.npz", **named)


def symbols(pipeline: Pipeline, ids: np.ndarray, cache: KVCache) -> list[list[np.ndarray]]:
    """Coarse symbols of each layer group: of all tokens but the sinks and recent ones."""
    window = pipeline.recipe.window
    assert window is not None
    rows = slice(window.sinks, len(ids) - window.recent)
    tokens = Tokens.following(ids, 0).take(rows)
    layers = [kv.tokens(rows.start, rows.stop) for kv in cache.layers]
    _, restored = pipeline.quantize(layers, tokens, Grade.FINE, restore=True)
    return pipeline.quantize(restored, tokens, Grade.COARSE)[0]


if __name__ == "__main__":
    main()
