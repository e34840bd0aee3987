"""Rate and quality of prediction + loss-weighted KLT + dead zone on tuning text, at several steps.

Calibrates on the first documents of the tuning text (WikiText-2 valid from --data, and the half of the standard library
that is for tuning) and measures on its last ones: 1,024 tokens of context, of which 4 sinks and 32 recent stay exact,
384 scored. Bytes are ideal: −log2 of a static table per coefficient and class of token weight, counted on calibration
text. No test text is read. The last line is JSON.

    python benchmarks/rate_tune.py --data DIR --step 0.018 --step 0.03 --windows 4
"""

from __future__ import annotations

import argparse
import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcellar.cache import LayerKV
from kvcellar.calibrate import Calibration, find_fitted, fit_profile
from kvcellar.evaluate.divergence import kl_divergence
from kvcellar.frontends.bench.ratebits import Static
from kvcellar.frontends.calibration import calibration_documents, collect, cut
from kvcellar.frontends.cli.common import progress
from kvcellar.frontends.cli.demo_model import demo_model
from kvcellar.frontends.cli.models import MeasuredModel, empty_cache, held_in
from kvcellar.frontends.transformers import take_cache
from kvcellar.pipeline import Pipeline
from kvcellar.recipe import Recipe, Window
from kvcellar.stages import Grade
from kvcellar.tokens import Tokens

PREFIX, SCORED, SINKS, RECENT = 1024, 384, 4, 32
CLASSES = (0, 2, 4, 6)


class Tables:
    """Code lengths per coefficient and class of the token's exponent, from calibration symbols."""

    def __init__(self, exponents: np.ndarray, symbols: np.ndarray):
        self.symbols = [Static(symbols[_class(exponents) == k]) for k in range(len(CLASSES) + 1)]
        self.exponents = Static(exponents)

    def cost(self, exponents: np.ndarray, symbols: np.ndarray) -> float:
        """Bits of all tokens (T, 1), (T, C)."""
        of = _class(exponents)
        return self.exponents.bits(exponents) + sum(
            table.bits(symbols[of == k]) for k, table in enumerate(self.symbols)
        )


def _class(exponents: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.digitize(exponents[:, 0], CLASSES)
    return found


def recipe(step: float, fine_step: float, zone: float, keep: float) -> Recipe:
    return Recipe(
        "rate",
        predict={"id": "linear/1"},
        transform={"id": "klt/1"},
        quantize={"id": "deadzone/1", "step": step, "fine_step": fine_step, "zone": zone, "keep": keep},
        symbols={"id": "map/1"},
        window=Window(SINKS, RECENT),
    )


Texts = list[tuple[str, list[int]]]


def held_out(local: MeasuredModel, calibration: Calibration, data: list[Path], count: int) -> Texts:
    """(kind, ids) of the last documents long enough, the kinds taking turns, none of which is calibrated on."""
    found: dict[str, list[tuple[str, list[int]]]] = {}
    documents = sorted(
        calibration_documents(data), key=lambda d: hashlib.sha256(d.name.encode()).digest(), reverse=True
    )
    for document in documents:
        if hashlib.sha256(document.text.encode()).hexdigest() not in calibration.texts:
            of_kind = found.setdefault(document.kind, [])
            ids = local.encode(document.text[: 16 * (PREFIX + SCORED)], continues=True) if len(of_kind) < count else []
            if len(ids) >= PREFIX + SCORED:
                of_kind.append((document.kind, ids[: PREFIX + SCORED]))
    turns = [each[i] for i in range(count) for each in found.values() if i < len(each)]
    return turns[:count]


class Scorer:
    """A held-out window: its caches, and what the model says behind them."""

    def __init__(self, local: MeasuredModel, kind: str, ids: list[int]):
        self.local, self.kind, self.ids = local, kind, ids
        cache = empty_cache()
        local.prefill(ids[:PREFIX], cache, quiet=True)
        self.held = take_cache(held_in(cache, local.cache_dtype))
        self.reference = self._logits([(kv.keys, kv.values) for kv in self.held.layers])

    def divergence(self, restored: dict[int, LayerKV]) -> float:
        """Nats per token with the tokens between sinks and recent ones replaced."""
        pairs = []
        for i, kv in enumerate(self.held.layers):
            sides = kv.keys.clone(), kv.values.clone()
            for side, new in zip(sides, (restored[i].keys, restored[i].values), strict=True):
                side[:, SINKS : PREFIX - RECENT] = new
            pairs.append(sides)
        return float(kl_divergence(self.reference, self._logits(pairs)).mean())

    @torch.inference_mode()
    def _logits(self, pairs: list[Any]) -> Tensor:
        cache = empty_cache()
        for i, (keys, values) in enumerate(pairs):
            cache.update(keys[None].to(self.local.model.dtype), values[None].to(self.local.model.dtype), i)
        logits: Tensor = self.local.model(torch.tensor([self.ids[PREFIX:]]), cache=cache, use_cache=True).logits[0]
        return logits


def coded(pipeline: Pipeline, ids: np.ndarray, held: Any) -> tuple[Any, Any]:
    rows = slice(SINKS, PREFIX - RECENT)
    layers = [kv.tokens(rows.start, rows.stop) for kv in held.layers]
    return pipeline.quantize(layers, Tokens.following(ids, 0).take(rows), Grade.COARSE, restore=True)


def measure(pipeline: Pipeline, calibration: Calibration, scorers: list[Scorer]) -> dict[str, Any]:
    some = calibration.samples[1::4]
    trained = [coded(pipeline, sample.tokens, sample.load())[0] for sample in some]
    tables = []
    for g in range(len(pipeline.groups)):
        tables.append(Tables(*(np.concatenate([symbols[g][k] for symbols in trained]) for k in (0, 1))))
    sizes: dict[str, list[list[float]]] = {}
    divergences: dict[str, list[float]] = {}
    for scorer in scorers:
        symbols, restored = coded(pipeline, np.array(scorer.ids[:PREFIX]), scorer.held)
        bits = [table.cost(*of_group) for table, of_group in zip(tables, symbols, strict=True)]
        sizes.setdefault(scorer.kind, []).append([b / 8 / (PREFIX - SINKS - RECENT) for b in bits])
        divergences.setdefault(scorer.kind, []).append(scorer.divergence(restored))
    found = {}
    for kind, of_groups in sizes.items():
        mean = np.mean(of_groups, axis=0)
        kl = float(np.mean(divergences[kind]))
        found[kind] = {"bytes_per_token": float(mean.sum()), "of_groups": mean.tolist(), "kl": kl}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with wt2_valid.txt")
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--step", type=float, action="append", default=[])
    parser.add_argument("--fine-step", type=float, default=0.0005)
    parser.add_argument("--zone", type=float, default=0.55)
    parser.add_argument("--keep", type=float, default=0.0005)
    parser.add_argument("--windows", type=int, default=6)
    arguments = parser.parse_args()

    local = MeasuredModel(demo_model())
    local.model.requires_grad_(False)
    data = [arguments.data / "wt2_valid.txt"]
    cuts = cut(calibration_documents(data), partial(local.encode, continues=True), arguments.tokens, PREFIX)
    calibration = collect(local, cuts, partial(progress, quiet=False))
    first = recipe(1.0, arguments.fine_step, arguments.zone, arguments.keep)
    profile = find_fitted(first, calibration.identity, calibration.geometry)
    if profile is None or sorted(calibration.texts) != profile.metadata["texts"]:
        profile = fit_profile(first, calibration)
        profile.save()
    print(f"profile {profile.nbytes / 1e6:.1f} MB, {calibration.tokens:,} tokens")
    scorers = [Scorer(local, *window) for window in held_out(local, calibration, data, arguments.windows)]
    results = []
    for step in arguments.step or [0.018]:
        settings = recipe(step, arguments.fine_step, arguments.zone, arguments.keep)
        pipeline = Pipeline(settings, calibration.geometry, profile)
        found = measure(pipeline, calibration, scorers)
        results.append({"step": step, **found})
        for kind, row in found.items():
            print(f"step {step:g} {kind}: {row['bytes_per_token']:.1f} B/token, KL {row['kl']:.4f}")
    print(json.dumps({"zone": arguments.zone, "keep": arguments.keep, "profile": profile.nbytes, "results": results}))


if __name__ == "__main__":
    main()
