"""Keys and values foreseen from the tokens and the shallower layers, by ridge regression of reduced rank.

A group's row y = [K before RoPE, V, …] (P numbers) is foreseen as p = ȳ + ((φ − μ)/σ) D U with D (F, R) and U (R, P).
The features φ are the embeddings of the token and the three before it, and of the group before its last two layers as
restored. Embeddings come as a table of at most `embedding` columns, int8, in the profile: those directions of the
model's normalised embeddings from which the first group is foreseen best, so decoding needs no model.

R directions are kept that explain most in the loss metric (`metric.py`): with B the ridge solution for targets y·A, A
the metric's root, they are the leading eigenvectors of Bᵀ ΦᵀΦ B. Source: reduced-rank regression (Izenman 1975); we
differ in the metric, and in fitting the shallower layers as they are, not as restored. Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from ..errors import InvalidInput, InvalidRecipe, ProfileMismatch, ProfileMissing
from ..geometry import Geometry
from ..metric import loss_metric, root
from ..profile import Profile
from ..rope import Rope
from ..rounding import restored, rounded, widths_of
from ..stages import LOOKBACK, Context, Predictor

if TYPE_CHECKING:
    from ..calibrate import Calibration

SEEN_LAYERS = 2
RIDGE = 3e-4
SHRINK = 0.05
CLOSED = 0.02  # share of a restored feature's variance that is taken to be quantization noise


class LinearPredictor(Predictor):
    id = "linear/1"
    needs_profile = True

    def __init__(self, *, layers_per_group: int = 10, rank: int = 256, embedding: int = 128):
        for name, number, most in (
            ("layers_per_group", layers_per_group, 4096),
            ("rank", rank, 65536),
            ("embedding", embedding, 4096),
        ):
            if type(number) is not int or not 1 <= number <= most:
                raise InvalidRecipe(f"{name} {number!r}; expected a whole number from 1 to {most}")
        self.layers_per_group, self.rank, self.embedding = layers_per_group, rank, embedding

    def fit_settings(self) -> Mapping[str, object]:
        return {"layers_per_group": self.layers_per_group, "rank": self.rank, "embedding": self.embedding}

    def fit(self, calibration: Calibration, fitted: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """`table` int8 (V, E) with `table_scale` (E,); rotary state as of rope/1; and per group `mean`, `centre`,
        `spread` float32, and `down` (R, F) and `up` (R, P) int8 with scales `down_scale` and `up_scale`.

        Raises InvalidInput without a model, UnsupportedCache where keys cannot be turned back.
        """
        if calibration.model is None:
            raise InvalidInput(f"stage {self.id!r} reads the model's embeddings and gradients: calibrate with a model")
        rope = Rope()
        state = dict(rope.fit(calibration, {}))
        rope.bind(calibration.geometry, Profile({f"transform.{n}": v for n, v in state.items()}, {}))
        metric = loss_metric(calibration, rope)
        groups = _groups(len(calibration.geometry), self.layers_per_group)
        moments = [Moments() for _ in groups]
        embeddings = _normalised(calibration.model.get_input_embeddings().weight.detach().float())
        table = torch.empty(0)
        for label in ("embeddings", "prediction"):
            for tokens, cache in calibration.caches(label):
                positions = torch.arange(len(tokens))
                seen: list[Tensor] = []
                for layers, moment in zip(groups, moments, strict=True):
                    x = [side.float() for i in layers for side in (cache.layers[i].keys, cache.layers[i].values)]
                    y = rope.forward(x, layers, positions)
                    if label == "embeddings":
                        moment.add(embeddings[torch.from_numpy(tokens)], y)
                        break
                    ids = [torch.from_numpy(_before(tokens, back)) for back in range(LOOKBACK + 1)]
                    moment.add(torch.cat([_looked_up(table, i) for i in ids] + seen, dim=1), y)
                    last = layers[-SEEN_LAYERS:]
                    seen = [rope.forward(x[-2 * len(last) :], last, positions)]
            if label == "embeddings":
                roots = roots_of(metric.layers, groups[0], moments[0])
                down = moments[0].solve(roots, self.embedding, 0)[0]
                centre, spread = moments[0].centre, moments[0].spread
                table = ((embeddings - centre) / spread) @ down
                scale = table.abs().amax(dim=0).clamp(min=1e-6) / 127
                state["table"] = (table / scale).round().to(torch.int8).numpy()
                state["table_scale"] = scale.numpy()
                table = torch.from_numpy(state["table"]).float() * scale
                moments[0] = Moments()
        for g, (layers, moment) in enumerate(zip(groups, moments, strict=True)):
            roots = roots_of(metric.layers, layers, moment)
            down, up = moment.solve(roots, self.rank, (LOOKBACK + 1) * table.shape[1])
            seen_widths = widths_of(calibration.geometry, groups[g - 1][-SEEN_LAYERS:]) if g else []
            widths = [table.shape[1]] * (LOOKBACK + 1) + seen_widths
            state[f"down.{g}"], state[f"down_scale.{g}"] = rounded(down.T, widths)
            state[f"up.{g}"], state[f"up_scale.{g}"] = rounded(up, widths_of(calibration.geometry, layers))
            state |= {f"mean.{g}": moment.mean.numpy(), f"centre.{g}": moment.centre.numpy()}
            state[f"spread.{g}"] = moment.spread.numpy()
        return state

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        if profile is None:
            raise ProfileMissing(f"stage {self.id!r} needs a profile")
        state = {n.removeprefix("predict."): t for n, t in profile.tensors.items() if n.startswith("predict.")}
        self.rope = Rope()
        groups = _groups(len(geometry), self.layers_per_group)
        try:
            turns = {f"transform.{name}": state[name] for name in ("inv_freq", "pairs", "layout")}
            self.rope.bind(geometry, Profile(turns, {}))
            self.table = torch.from_numpy(state["table"])
            self.scale = torch.from_numpy(state["table_scale"])
            seen = [widths_of(geometry, groups[g - 1][-SEEN_LAYERS:]) if g else [] for g in range(len(groups))]
            embedded = [len(self.scale)] * (LOOKBACK + 1)
            self.groups = [
                Regression.read(state, g, embedded + seen[g], widths_of(geometry, layers))
                for g, layers in enumerate(groups)
            ]
        except KeyError as error:
            raise ProfileMismatch(
                f"the profile has no predict.{error.args[0]}: it was made for another recipe"
            ) from None
        except ValueError as error:
            raise ProfileMismatch(f"the profile's prediction does not fit this cache: {error}") from None
        finite = bool(self.scale.isfinite().all())
        shaped = self.table.ndim == 2 and self.table.shape[1:] == self.scale.shape
        if self.table.dtype != torch.int8 or not (shaped and finite):
            raise ProfileMismatch("the profile's embeddings are not a table of int8 with a scale for each column")

    def predict(self, context: Context, like: list[Tensor]) -> list[Tensor]:
        number = len(context.restored)
        layers = range(number * self.layers_per_group, number * self.layers_per_group + len(like) // 2)
        positions = torch.from_numpy(np.ascontiguousarray(context.positions, np.int64))
        flat = self.groups[number].predict(self._features(context, layers.start, positions))
        return self.rope.inverse(flat, like, layers, positions)

    def _features(self, context: Context, start: int, positions: Tensor) -> Tensor:
        ids = [context.tokens, *context.earlier.T]
        found = [_looked_up(self.table, torch.from_numpy(np.ascontiguousarray(i, np.int64))) * self.scale for i in ids]
        if context.restored:
            before = [side.float() for side in context.restored[-1][-2 * SEEN_LAYERS :]]
            found.append(self.rope.forward(before, range(start - len(before) // 2, start), positions))
        return torch.cat(found, dim=1)


class Regression:
    """Regression of one layer group, float32."""

    def __init__(self, centre: Tensor, spread: Tensor, down: Tensor, up: Tensor, mean: Tensor):
        self.centre, self.spread, self.down, self.up, self.mean = centre, spread, down, up, mean

    @classmethod
    def read(
        cls, state: Mapping[str, np.ndarray], g: int, features: Sequence[int], numbers: Sequence[int]
    ) -> Regression:
        """Of rows with so many `features` and `numbers` by block. Raises ValueError, KeyError."""
        down = restored(state[f"down.{g}"], state[f"down_scale.{g}"], features).T.contiguous()
        up = restored(state[f"up.{g}"], state[f"up_scale.{g}"], numbers)
        rows = [torch.from_numpy(np.array(state[f"{name}.{g}"])).float() for name in ("centre", "spread", "mean")]
        centre, spread, mean = rows
        fits = centre.shape == spread.shape == (len(down),) and mean.shape == (up.shape[1],)
        if not (fits and down.shape[1] == len(up) and all(bool(t.isfinite().all()) for t in rows)):
            raise ValueError(f"group {g} has features {tuple(centre.shape)} and numbers {tuple(mean.shape)}")
        if not bool((spread > 0).all()):
            raise ValueError(f"group {g} has features that do not vary")
        return cls(centre, spread, down, up, mean)

    def predict(self, features: Float32[Tensor, "tokens features"]) -> Float32[Tensor, "tokens numbers"]:
        return self.mean + ((features - self.centre) / self.spread) @ self.down @ self.up


class Moments:
    """First and second moments of features φ (T, F) with targets y (T, P), summed in float32 about the first rows."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, features: Tensor, y: Tensor) -> None:
        if not self.count:
            self.origin = features.mean(dim=0), y.mean(dim=0)
            sizes = features.shape[1], y.shape[1]
            self.sums = torch.zeros(sizes[0]), torch.zeros(sizes[1])
            self.gram, self.cross = torch.zeros(sizes[0], sizes[0]), torch.zeros(sizes)
            self.squares = torch.zeros(sizes[1])
        f, y = features - self.origin[0], y - self.origin[1]
        self.sums[0].add_(f.sum(dim=0))
        self.sums[1].add_(y.sum(dim=0))
        self.gram.addmm_(f.T, f)
        self.cross.addmm_(f.T, y)
        self.squares.add_(y.square().sum(dim=0))
        self.count += len(f)

    @property
    def centre(self) -> Tensor:
        return self.origin[0] + self.sums[0] / self.count

    @property
    def mean(self) -> Tensor:
        return self.origin[1] + self.sums[1] / self.count

    @property
    def spread(self) -> Tensor:
        variance = self.gram.diagonal() / self.count - (self.sums[0] / self.count).square()
        return variance.clamp(min=1e-12).sqrt()

    @property
    def variance(self) -> Tensor:
        return (self.squares / self.count - (self.sums[1] / self.count).square()).clamp(min=0)

    def solve(self, roots: list[Tensor], rank: int, embedded: int) -> tuple[Tensor, Tensor]:
        """D (F, R) and U (R, P) for targets weighted with the roots; features from `embedded` on will be restored."""
        f, y = (s / self.count for s in self.sums)
        spread = self.spread
        gram = ((self.gram / self.count - torch.outer(f, f)) / torch.outer(spread, spread)).double()
        cross = (self.cross / self.count - torch.outer(f, y)) / spread[:, None]
        weighted = _times(cross, roots).double()
        penalty = torch.full((len(f),), RIDGE, dtype=torch.float64)
        penalty[embedded:] = CLOSED if embedded else RIDGE
        solution = torch.linalg.solve(gram + torch.diag(penalty), weighted)
        half = torch.linalg.cholesky(gram + torch.diag(penalty)).T @ solution
        explained, left = torch.linalg.eigh(half @ half.T)
        rank = min(rank, int((explained > explained[-1] * 1e-10).sum()), half.shape[1])
        basis = left[:, -rank:].flip(1).T @ half / explained[-rank:].flip(0).sqrt()[:, None]
        return (solution @ basis.T).float(), _times(
            basis.float(), [torch.linalg.inv(a.double()).float() for a in roots]
        )


def roots_of(metric: list[Tensor], layers: range, moment: Moments) -> list[Tensor]:
    spreads = torch.split(moment.variance, [len(metric[i]) for i in layers])
    return [root(metric[i], spread, SHRINK) for i, spread in zip(layers, spreads, strict=True)]


def _times(rows: Tensor, blocks: list[Tensor]) -> Tensor:
    """Rows (N, P) times a matrix of diagonal blocks."""
    parts = torch.split(rows, [len(b) for b in blocks], dim=1)
    return torch.cat([part @ block for part, block in zip(parts, blocks, strict=True)], dim=1)


def _groups(layers: int, per_group: int) -> list[range]:
    return [range(i, min(i + per_group, layers)) for i in range(0, layers, per_group)]


def _before(tokens: np.ndarray, back: int) -> np.ndarray:
    ids = np.full(len(tokens), -1, np.int64)
    ids[back:] = tokens[: len(tokens) - back]
    return ids


def _looked_up(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of the table, float32; zeros for ids that are not in it."""
    there = (ids >= 0) & (ids < len(table))
    return table[ids.clamp(0, len(table) - 1)].float() * there[:, None]


def _normalised(embeddings: Tensor) -> Tensor:
    return embeddings * torch.rsqrt(embeddings.square().mean(dim=1, keepdim=True) + 1e-6)
