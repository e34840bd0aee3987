"""Codebooks from samples: k-means, and residual stages of it.

k-means++ starts (Arthur & Vassilvitskii 2007), drawn from a sample of the vectors; then Lloyd's iteration on all of
them. A residual quantizer (Juang & Gray 1982) is
a row of codebooks, each for what the ones before it left over. What differs: entries are rounded to float16 before the
next stage is fitted, so that it sees what a decoder will leave; an entry nobody is nearest to moves to a vector that is
coded worst.

The same vectors and seed give the same entries on one machine; a profile is named by its content, not by its inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float16, Float32, Int64
from torch import Tensor

from .. import stages
from ..cache import LayerKV
from ..errors import InvalidInput, InvalidRecipe
from ..profile import Profile
from .coefficients import flatten

if TYPE_CHECKING:
    from ..calibrate import Calibration

ROUNDS = 12
SEEDED_FROM = 16  # vectors for each entry, in the sample
SINKS = 4  # the first tokens of a text, which no codebook should be bent for: a recipe's window keeps them fine
HELD_BYTES = 1 << 30  # calibration vectors held at a time
_CHUNK = 1 << 22  # products at a time


class Vectors:
    """What a calibration's caches hold of a layer, as a quantizer meets it: behind the transform of its recipe.

    `behind` stands for that transform. As many layers as fit into `HELD_BYTES` are read at a time. Raises InvalidRecipe
    behind any stage but rope/1.
    """

    def __init__(self, calibration: Calibration, fitted: Mapping[str, np.ndarray]):
        self.calibration, self.rope = calibration, None
        if fitted:
            if "transform.inv_freq" not in fitted or any(not name.startswith("transform.") for name in fitted):
                raise InvalidRecipe(f"codebooks can be fitted behind rope/1 only; the recipe fits {sorted(fitted)}")
            self.rope = stages.build("transform", {"id": "rope/1"})
            self.rope.bind(calibration.geometry, Profile(fitted, {}))
        self.behind = hashlib.sha256(b"".join(fitted[name].tobytes() for name in sorted(fitted))).hexdigest()[:16]
        self.held: dict[int, Tensor] = {}

    def of(self, layer: int, keys: bool, head: int, most: int) -> Float32[Tensor, "vectors width"]:
        """At most so many of a head's key or value vectors, evenly from all samples."""
        if layer not in self.held:
            self._hold(layer)
        shape = self.calibration.geometry.layers[layer]
        side, first = (shape.key, 0) if keys else (shape.value, shape.key.numbers_per_token)
        start = first + head * side.width
        x = self.held[layer][:, start : start + side.width]
        count = min(len(x), most)
        return x[torch.arange(count) * len(x) // max(1, count)].contiguous()

    def _hold(self, first: int) -> None:
        """Read `first` and as many layers behind it as fit."""
        geometry, room, last = self.calibration.geometry, HELD_BYTES, first
        while last < len(geometry) and (room := room - 4 * self._numbers(last)) >= 0:
            last += 1
        layers = range(first, max(last, first + 1))
        rows: dict[int, list[Tensor]] = {i: [] for i in layers}
        for _, cache in self.calibration.caches(f"vectors of layers {layers.start} to {layers[-1]}"):
            for i in layers:
                rows[i].append(self._flat(cache.layers[i], i, len(cache)))
        self.held = {i: torch.cat(each) for i, each in rows.items()}

    def _numbers(self, layer: int) -> int:
        return self.calibration.tokens * self.calibration.geometry.layers[layer].numbers_per_token

    def _flat(self, kv: LayerKV, layer: int, tokens: int) -> Float32[Tensor, "tokens numbers"]:
        positions = torch.arange(tokens - kv.slots, tokens)
        group = [kv.keys.float(), kv.values.float()]
        flat = flatten(group) if self.rope is None else self.rope.forward(group, range(layer, layer + 1), positions)
        return flat[positions >= SINKS]


def fit_stage(
    rest: Float32[Tensor, "vectors width"], entries: int, seed: Sequence[int]
) -> Float16[np.ndarray, "entries width"]:
    """The next codebook for what earlier ones left over. Raises InvalidInput for fewer vectors than entries."""
    require_vectors(len(rest), entries)
    return rounded(kmeans(rest, entries, np.random.default_rng(seed))).half().numpy()


def require_vectors(count: int, entries: int) -> None:
    """Raise InvalidInput for fewer vectors than entries."""
    if count < entries:
        raise InvalidInput(f"{count:,} vectors for a codebook of {entries:,} entries: calibrate with more tokens")


class Residuals:
    """What the stages of codebooks so far leave of sets of vectors (N, D), which `make` gives when first asked for."""

    def __init__(self, make: Callable[[], list[Tensor]]):
        self.make, self.stages = make, 0
        self.sets: list[Tensor] = []

    def after(self, books: Float16[np.ndarray, "sets stages entries width"]) -> list[Tensor]:
        """One (N, D) for each set."""
        self.sets = self.sets or self.make()
        for stage in range(self.stages, books.shape[1]):
            entries = [torch.from_numpy(book).float() for book in books[:, stage]]
            self.sets = [x - book[nearest(x, book)[0]] for x, book in zip(self.sets, entries, strict=True)]
        self.stages = books.shape[1]
        return self.sets


def rounded(book: Tensor) -> Tensor:
    """To float16, within its range."""
    return book.clamp(-65504, 65504).half().float()


def kmeans(
    x: Float32[Tensor, "vectors width"], entries: int, rng: np.random.Generator
) -> Float32[Tensor, "entries width"]:
    some = x[torch.from_numpy(rng.permutation(len(x))[: SEEDED_FROM * entries])]
    book = _seeded(some, entries, rng)
    for _ in range(ROUNDS):
        book = _improved(x, book)
    return book


def nearest(
    x: Float32[Tensor, "vectors width"], book: Float32[Tensor, "entries width"]
) -> tuple[Int64[Tensor, " vectors"], Float32[Tensor, " vectors"]]:
    """The nearest entry of each vector and its squared distance."""
    half = book.square().sum(1) / 2
    found, gains = [], []
    for part in torch.split(x, max(1, _CHUNK // len(book))):
        gain, index = torch.addmm(half, part, book.T, beta=-1).max(1)
        found.append(index)
        gains.append(gain)
    distances = x.square().sum(1) - 2 * torch.cat(gains)
    return torch.cat(found), distances.clamp_min_(0)


def _seeded(x: Tensor, entries: int, rng: np.random.Generator) -> Tensor:
    """k-means++: each next entry is a vector drawn in proportion to its squared distance from those so far."""
    chosen = [int(rng.integers(len(x)))]
    size, distance = x.square().sum(1), torch.full((len(x),), torch.inf)
    for draw in rng.random(entries - 1):
        entry = x[chosen[-1]]
        distance = torch.minimum(distance, (size + entry.square().sum() - 2 * (x @ entry)).clamp_min_(0))
        mass = distance.double().cumsum(0)
        chosen.append(min(int(torch.searchsorted(mass, draw * float(mass[-1]), right=True)), len(x) - 1))
    return x[torch.tensor(chosen)]


def _improved(x: Tensor, book: Tensor) -> Tensor:
    """One round of Lloyd's: every entry moves into the mean of the vectors nearest to it."""
    index, distance = nearest(x, book)
    count = torch.bincount(index, minlength=len(book))
    moved = torch.zeros_like(book).index_add_(0, index, x) / count.clamp_min(1)[:, None]
    if nobody := int((count == 0).sum()):
        moved[count == 0] = x[distance.topk(nobody).indices]
    return moved
