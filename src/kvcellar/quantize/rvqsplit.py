"""How many residual stages each head's keys and values get, and codebooks for what their error costs.

An error δ of a head's key (before RoPE) or value costs ½ δᵀ F δ nats of divergence (`metric.py`), F the head's own
block of the metric. Two things follow. k-means (`codebooks.py`) runs on vectors times the root of F, so that entries
lie where distances matter; they are stored turned back, and decoding knows nothing of it. And each next stage goes to
the head whose cost it lowers most (greedy bit allocation: Shoham & Gersho 1988), measured on vectors that no codebook
was fitted on, until all stages are given away. Most heads end with one stage or none, a few with a dozen.

Stages are fitted only as far as the allocation asks: it goes on with what the last stages let expect, and what it would
give away is fitted, until all it gives is known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from ..errors import InvalidRecipe
from ..geometry import Geometry
from ..metric import loss_metric, root
from .codebooks import Vectors, kmeans, nearest, require_vectors, rounded
from .rvqbooks import KEY, least_stages, shapes, total_stages

if TYPE_CHECKING:
    from ..calibrate import Calibration

SHRINK = 0.01  # of 0.2, 0.05 and 0.01 the best on tuning text
FLOOR = 2.0**-8  # added to a root whose largest number is 1, so that no rounding to float16 makes it singular
TRIED = 8  # one of so many vectors is kept from the fit, to tell what a stage is worth
EXPECTED = 0.6, 0.9  # of a stage's gain, what the next one is expected to bring: at first, and at most

Kept = Callable[[str, Callable[[], Mapping[str, np.ndarray]]], Mapping[str, np.ndarray]]


class Place(NamedTuple):
    """A head's keys or values."""

    layer: int
    side: str
    head: int


class Head:
    """What is known of a head so far: mean float16 (D), root float16 (D, D), codebooks (E, D), and the cost left by
    0, 1, … of them.

    `vectors` gives the head's (N, D); `metric` is its F (D, D). `kept` keeps what is computed, under `settings` too.
    """

    def __init__(
        self,
        place: Place,
        entries: int,
        vectors: Callable[[], Tensor],
        metric: Tensor,
        kept: Kept,
        settings: Mapping[str, object],
    ):
        self.place, self.entries, self.vectors, self.metric = place, entries, vectors, metric
        self.kept = kept
        self.settings = {**settings, "shrink": SHRINK, "metric": hashlib.sha256(metric.numpy().tobytes()).hexdigest()}
        self.rest: Tensor | None = None
        self.taken = 0
        self.costs: list[float] = []
        self.books: list[np.ndarray] = []

    def extend(self, stages: int) -> None:
        """Fit what is lacking of so many stages."""
        if not self.costs:
            start = self._kept("start", self._start)
            self.mean, self.root, self.costs = start["mean"], start["root"], [float(start["cost"][0])]
        while len(self.books) < stages:
            found = self._kept(str(len(self.books)), self._next)
            self.books.append(found["book"])
            self.costs.append(float(found["cost"][0]))
        self.rest, self.taken = None, 0

    def gain(self, stage: int) -> float:
        """What the stage after `stage` others lowers the cost by; beyond what is fitted, what can be expected of it."""
        gains = [max(0.0, a - b) for a, b in zip(self.costs, self.costs[1:], strict=False)]
        if stage < len(gains):
            return gains[stage]
        if not gains:
            return self.costs[0]
        first, most = EXPECTED
        ratio = min(most, gains[-1] / gains[-2]) if len(gains) > 1 and gains[-2] > 0 else first
        return gains[-1] * ratio ** (stage + 1 - len(gains))

    def _kept(self, what: str, make: Callable[[], Mapping[str, np.ndarray]]) -> Mapping[str, np.ndarray]:
        return self.kept(json.dumps([self.settings, *self.place, what]), make)

    def _start(self) -> Mapping[str, np.ndarray]:
        fitted, tried = self._parts(self.vectors())
        mean = rounded(fitted.mean(0))
        weighted = torch.eye(len(mean))
        if self.metric.diagonal().sum() > 0:
            weighted = root(self.metric, fitted.var(0).clamp(min=1e-12), SHRINK)
        weighted = weighted / weighted.abs().max() + FLOOR * torch.eye(len(mean))  # a factor alone changes no order
        cost = np.array([self._cost(tried - mean)])
        return {"mean": mean.half().numpy(), "root": weighted.half().numpy(), "cost": cost}

    def _next(self) -> Mapping[str, np.ndarray]:
        """The next codebook, and the cost it leaves."""
        turn = torch.from_numpy(self.root).double()
        if self.rest is None:
            self.rest = (self.vectors() - torch.from_numpy(self.mean).float()) @ turn.float()
        for earlier in self.books[self.taken :]:
            self._take_off(torch.from_numpy(earlier).float() @ turn.float())
        fitted, _ = self._parts(self.rest)
        require_vectors(len(fitted), self.entries)
        layer, side, head = self.place
        rng = np.random.default_rng((layer, side == "key", head, len(self.books)))
        back = torch.linalg.inv(turn)
        book = rounded((kmeans(fitted, self.entries, rng).double() @ back).float())
        self._take_off(book @ turn.float())
        _, tried = self._parts(self.rest)
        return {"book": book.half().numpy(), "cost": np.array([self._cost((tried.double() @ back).float())])}

    def _take_off(self, book: Tensor) -> None:
        assert self.rest is not None
        self.rest = self.rest - book[nearest(self.rest, book)[0]]
        self.taken += 1

    def _cost(self, error: Float32[Tensor, "vectors width"]) -> float:
        return float(((error @ self.metric) * error).sum().double() / max(1, len(error)))

    @staticmethod
    def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
        """To fit on, and to try on: the last ones, of other texts."""
        return x[: len(x) - len(x) // TRIED], x[len(x) - len(x) // TRIED :]


def allotted(heads: Sequence[Head], least: Mapping[int, int], total: int, most: int) -> list[int]:
    """Stages of each head, `total` together, at most `most` each and at least `least[layer]` in a layer.

    Raises InvalidRecipe when so many cannot be given.
    """
    counts = [0] * len(heads)
    of_layer: dict[int, list[int]] = {}
    for i, head in enumerate(heads):
        of_layer.setdefault(head.place.layer, []).append(i)
    fits = all(least[layer] <= most * len(members) for layer, members in of_layer.items())
    if not (fits and sum(least[layer] for layer in of_layer) <= total <= most * len(heads)):
        raise InvalidRecipe(f"{total} stages for {len(heads)} heads' keys and values in {len(of_layer)} layers")
    for layer, members in of_layer.items():
        _give(heads, counts, members, least[layer], most)
    _give(heads, counts, range(len(heads)), total - sum(counts), most)
    return counts


def _give(heads: Sequence[Head], counts: list[int], members: Iterable[int], stages: int, most: int) -> None:
    gains = {i: heads[i].gain(counts[i]) for i in members}
    for _ in range(stages):
        best = max((i for i in gains if counts[i] < most), key=lambda i: (gains[i], -counts[i]))
        counts[best] += 1
        gains[best] = heads[best].gain(counts[best])


def fit_split(
    calibration: Calibration,
    vectors: Vectors,
    settings: Mapping[str, object],
    stages: int,
    entries: int,
    vectors_per_book: int,
    most: int,
) -> dict[str, np.ndarray]:
    """Stages for all heads and their codebooks, as `rvqbooks.py` lists them.

    Raises InvalidRecipe behind anything but rope/1, InvalidInput without a model or with too few vectors.
    """
    if vectors.rope is None:
        raise InvalidRecipe("what an error in a turned key costs is not known: a fitted split goes behind rope/1")
    geometry, wanted = calibration.geometry, vectors_per_book * TRIED // (TRIED - 1)
    metric = loss_metric(calibration, vectors.rope)
    heads: list[Head] = []
    for i, layer in enumerate(geometry.layers):
        column = 0
        for name, side in shapes(layer):
            for h in range(side.heads):
                own = slice(column, column + side.width)
                of_head = partial(vectors.of, i, name == KEY, h, wanted)
                block = metric.layers[i][own, own].contiguous()
                heads.append(Head(Place(i, name, h), entries, of_head, block, calibration.kept, settings))
                column += side.width
    total = total_stages(geometry, stages)
    least = {i: least_stages(layer) for i, layer in enumerate(geometry.layers)}
    with calibration.progress("codebooks", total) as advance:
        counts = _fitted(heads, least, total, most, advance)
    return _tensors(geometry, heads, counts, entries)


def _fitted(
    heads: Sequence[Head], least: Mapping[int, int], total: int, most: int, advance: Callable[[int], None]
) -> list[int]:
    """Fit the heads as far as the stages go that they get, whose numbers are returned."""
    counts = [1] * len(heads)
    while any(len(head.books) < count for head, count in zip(heads, counts, strict=True)):
        for head, count in zip(heads, counts, strict=True):
            advance(max(0, count - len(head.books)))
            head.extend(count)
        counts = allotted(heads, least, total, most)
    return counts


def _tensors(geometry: Geometry, heads: Sequence[Head], counts: list[int], entries: int) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {"stages": np.array(counts, np.uint8)}
    for i, layer in enumerate(geometry.layers):
        for name, side in shapes(layer):
            own = [(h, n) for h, n in zip(heads, counts, strict=True) if h.place[:2] == (i, name)]
            books = [book for head, n in own for book in head.books[:n]]
            found[f"{name}.{i}"] = np.array(books, np.float16).reshape(len(books), entries, side.width)
            found[f"{name}.{i}.mean"] = np.stack([head.mean for head, _ in own])
            found[f"{name}.{i}.root"] = np.stack([head.root for head, _ in own])
    return found
