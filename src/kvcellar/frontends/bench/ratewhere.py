"""Where the bits of recipe `cellar` go, and whether they go where the model was surprised.

Bytes of a layer group fall into the exponents that weigh tokens, the coefficients, and what a part has besides
(`ratebits.spent` measures the first two). A coefficient belongs to no layer and no side: its bits are shared out by the
energy that its row of the basis has in the loss metric's space in each layer's keys and values. What is predicted away
costs nothing and shows nowhere.

The energy of a token's residual is |A (x − p)|², p the prediction as the decoder makes it, A the root of the loss
metric, once without and once with the token's weight. Surprisal is −log2 P of the token under the model itself, from
what came before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from ...errors import InvalidInput
from ...identity import Identity
from ...pipeline import Pipeline
from ...profile import Profile
from ...quantize.coefficients import Coefficients
from ...quantize.deadzone import DeadZone
from ...recipe import Recipe
from ...rounding import widths_of
from ...stages import Context, Grade
from ...transform.basis import times
from ...transform.klt import MARK, WeightedKLT
from ...transform.weights import LEAST, MOST
from ..cli.models import LocalModel
from ..library import save
from .ratebits import adaptive, entropies, ranks, spearman, spent
from .ratevariants import roots_of
from .ratewindows import HeldOut, coarse_rows, of_block, sealed, sides
from .sizes import bytes_by_part

BINS = 10
AGAINST = ("energy", "weighted", "bits")


class Spent:
    """A held-out window coded: symbols by group of its sealed blocks, each token's bits in them, bytes of their parts.

    `exponents` and `coefficients` are the bits, float64 (groups, tokens), `parts` bytes by group, and `weights` float64
    (groups, tokens) what the exponents say.
    """

    def __init__(self, window: HeldOut, pipeline: Pipeline):
        recipe, coder = pipeline.recipe, adaptive(pipeline)
        self.rows = coarse_rows(recipe, len(window.cache))
        symbols, self.restored = window.coarse(pipeline, window.fine(pipeline))
        blocks = sealed(recipe, len(window.cache))
        self.tokens = np.concatenate([np.arange(block.start, block.stop) for block in blocks])
        self.symbols = [arrays[1][self.tokens - self.rows.start] for arrays in symbols]
        marked = np.stack([arrays[0][self.tokens - self.rows.start, 0] for arrays in symbols]).astype(np.float64)
        self.weights = np.exp2((marked - MARK * (marked > MOST)).clip(LEAST, MOST))
        bits: list[list[list[np.ndarray]]] = [[[], []] for _ in symbols]
        self.parts = [0] * len(symbols)
        for block in blocks:
            for g, arrays in enumerate(of_block(symbols, block, self.rows.start)):
                (exponents, coefficients), size = spent(coder, arrays, pipeline.groups[g])
                bits[g][0].append(exponents)
                bits[g][1].append(coefficients)
                self.parts[g] += size
        self.exponents, self.coefficients = (np.stack([np.concatenate(of[k]) for of in bits]) for k in (0, 1))


def where(coded: Sequence[Spent], pipeline: Pipeline, profile: Profile) -> list[dict[str, Any]]:
    """Of each layer group `layers`, and bytes per coarse token: `payload`, `exponents`, `coefficients`, `rest`, and
    `sides`, for each layer its `keys` and `values`, which add up to the coefficients."""
    transform, quantizer = _klt(pipeline)
    tokens, found = sum(len(each.tokens) for each in coded), []
    for g, layers in enumerate(pipeline.groups):
        payload = sum(each.parts[g] for each in coded) / tokens
        exponents = sum(float(each.exponents[g].sum()) for each in coded) / 8 / tokens
        coefficients = sum(float(each.coefficients[g].sum()) for each in coded) / 8 / tokens
        inverse = transform.groups[g].inverse
        rows = times(inverse, roots_of(profile, layers)).square()
        blocks = [part.sum(dim=1).numpy() for part in torch.split(rows, widths_of(pipeline.geometry, layers), dim=1)]
        share = np.stack(blocks, axis=1)
        share = share / share.sum(axis=1, keepdims=True)
        weights = entropies(np.concatenate([each.symbols[g] for each in coded]))
        share = share[quantizer.kept[layers.start, Grade.COARSE]]
        total = weights.sum()
        bytes_of = coefficients * (weights @ share) / total if total else np.zeros(share.shape[1])
        by_layer = [
            {"layer": layer, "keys": float(bytes_of[2 * i]), "values": float(bytes_of[2 * i + 1])}
            for i, layer in enumerate(layers)
        ]
        sizes = {"payload": payload, "exponents": exponents, "coefficients": coefficients}
        rest = payload - exponents - coefficients
        found.append({"layers": [layers.start, layers.stop - 1], **sizes, "rest": rest, "sides": by_layer})
    return found


def file_parts(windows: Sequence[HeldOut], recipe: Recipe, profile: Profile, identity: Identity) -> dict[str, float]:
    """Bytes per token of each part of the windows' files."""
    total: dict[str, float] = {}
    for window in windows:
        with tempfile.TemporaryDirectory(prefix="kvcellar-rate-") as scratch:
            path, ids = Path(scratch) / "window.kvc", window.window.ids[: window.window.prefix]
            save(path, window.cache, tokens=ids, identity=identity, recipe=recipe, profile=profile)
            for name, size in bytes_by_part(path).items():
                total[name] = total.get(name, 0.0) + size
    tokens = sum(len(window.cache) for window in windows)
    return {name: size / tokens for name, size in total.items()}


def surprise(
    local: LocalModel, windows: Sequence[HeldOut], coded: Sequence[Spent], pipeline: Pipeline, profile: Profile
) -> dict[str, Any]:
    """Surprisal against energy, energy times weight, and bits of the same token: Spearman's ρ by layer group, over all
    tokens and the least and most of a single window, and over `BINS` equal shares of the tokens by surprisal means ÷
    the mean of all."""
    bits = [window.surprisal(local)[each.tokens] for window, each in zip(windows, coded, strict=True)]
    energies = [energy(window, each, pipeline, profile) for window, each in zip(windows, coded, strict=True)]
    costs = [each.exponents + each.coefficients for each in coded]
    weighted = [found * each.weights for found, each in zip(energies, coded, strict=True)]
    told = np.concatenate(bits)
    sides_of = [
        (name, np.concatenate(of, axis=1), of) for name, of in zip(AGAINST, (energies, weighted, costs), strict=True)
    ]
    groups = []
    for g, layers in enumerate(pipeline.groups):
        row: dict[str, Any] = {"layers": [layers.start, layers.stop - 1]}
        for name, whole, parts in sides_of:
            single = [spearman(a, b[g]) for a, b in zip(bits, parts, strict=True)]
            known = [rho for rho in single if rho is not None]
            row[name] = {"rho": spearman(told, whole[g]), "windows": [min(known), max(known)] if known else None}
        groups.append(row)
    bins = np.minimum((ranks(told) * BINS / len(told)).astype(int), BINS - 1)
    means = []
    for k in range(BINS):
        chosen = bins == k
        if chosen.any():
            row = {"tokens": int(chosen.sum()), "surprisal": float(told[chosen].mean())}
            for name, whole, _ in sides_of:
                row[name] = [float(of[chosen].mean() / of.mean()) for of in whole]
            means.append(row)
    return {"tokens": len(told), "mean_surprisal": float(told.mean()), "groups": groups, "bins": means}


def energy(window: HeldOut, coded: Spent, pipeline: Pipeline, profile: Profile) -> Float64[np.ndarray, "groups tokens"]:
    """|A (x − p)|² of each of `coded.tokens`, p predicted from what was restored of the groups above."""
    tokens = window.under(pipeline.recipe).take(slice(coded.rows.start, coded.rows.stop))
    layers = {i: kv.tokens(coded.rows.start, coded.rows.stop) for i, kv in enumerate(window.cache.layers)}
    context, rope, found = Context(tokens.ids, tokens.positions, tokens.earlier), _klt(pipeline)[0].rope, []
    positions = torch.from_numpy(tokens.positions)
    for group in pipeline.groups:
        x = [side.float() for side in sides(layers, group)]
        p = pipeline.predictor.predict(context, x) if pipeline.predictor else [torch.zeros_like(t) for t in x]
        r = rope.forward([a - b for a, b in zip(x, p, strict=True)], group, positions)
        found.append(times(r, roots_of(profile, group)).double().square().sum(dim=1).numpy())
        context.push(list(sides(coded.restored, group)))
    return np.stack(found)[:, coded.tokens - coded.rows.start]


def _klt(pipeline: Pipeline) -> tuple[WeightedKLT, DeadZone]:
    """Raises InvalidInput for a recipe without klt/1 and deadzone/1."""
    residual = pipeline.residual
    if isinstance(residual, Coefficients):
        transform, quantizer = residual.transform, residual.quantizer
        if isinstance(transform, WeightedKLT) and isinstance(quantizer, DeadZone):
            return transform, quantizer
    raise InvalidInput(f"recipe {pipeline.recipe.name!r} has no klt/1 and deadzone/1: its bits go nowhere known")
