"""Keys and values foreseen from the tokens and the shallower layers, by ridge regression of reduced rank.

A group's row y = [K before RoPE, V, …] (P numbers) is foreseen as p = ȳ + ((φ − μ)/σ) D U with D (F, R) and U (R, P).
The features φ are the embeddings of the token and the three before it, and of the group before its last two layers as
restored, of this token and of the `reach` before it, whose values attention has mixed in. Where one of these is fine or
of another sealed block, its features count as average. Embeddings come as a table of at most `embedding` columns, int8,
in the profile: those directions of the model's normalised embeddings from which the first group is foreseen best, so
decoding needs no model.

R directions are kept that explain most in the loss metric (`metric.py`): with B the ridge solution for targets y·A, A
the metric's root, they are the leading eigenvectors of Bᵀ ΦᵀΦ B, of which no more than half as many count as there are
features. Matrices are int8, but U behind its first `LOUD` rows is nibbles (`rounding.py`). Looking at the group before
alone keeps the loop short: a rounding error of one token reaches as many tokens behind it as there are groups.

Source: reduced-rank regression (Izenman 1975); we differ in the metric, and in fitting the shallower layers as a
restore would give them (`regression.py`). Tried on: CPU.
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
from ..metric import SINKS, Metric, loss_metric
from ..profile import Profile
from ..rope import Rope
from ..rounding import from_nibbles, in_nibbles, restored, rounded, widths_of
from ..stages import LOOKBACK, Context, Predictor
from .regression import Moments, Restoring, roots_of

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..calibrate import Calibration

SEEN_LAYERS = 2
LOUD = 192


class LinearPredictor(Predictor):
    id = "linear/1"
    needs_profile = True

    def __init__(self, *, layers_per_group: int = 10, rank: int = 256, embedding: int = 128, reach: int = 0):
        for name, number, most in (
            ("layers_per_group", layers_per_group, 4096),
            ("rank", rank, 65536),
            ("embedding", embedding, 4096),
        ):
            if type(number) is not int or not 1 <= number <= most:
                raise InvalidRecipe(f"{name} {number!r}; expected a whole number from 1 to {most}")
        if type(reach) is not int or not 0 <= reach <= LOOKBACK:
            raise InvalidRecipe(f"reach {reach!r}; expected a whole number from 0 to {LOOKBACK}")
        self.layers_per_group, self.rank, self.embedding, self.reach = layers_per_group, rank, embedding, reach

    def fit_settings(self) -> Mapping[str, object]:
        settings = {"layers_per_group": self.layers_per_group, "rank": self.rank, "embedding": self.embedding}
        return {**settings, "reach": self.reach} if self.reach else settings

    def fit(self, calibration: Calibration, fitted: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """`table` int8 (V, E) with `table_scale` (E,); rotary state as of rope/1; and per group `mean`, `centre`,
        `spread` float32, `down` int8 (R, F), and `up` int8 (`LOUD`, P) with `quiet` uint8 (R − `LOUD`, P/2;
        `rounding.in_nibbles`) behind it, each with a scale.

        Raises InvalidInput without a model, UnsupportedCache where keys cannot be turned back.
        """
        if calibration.model is None:
            raise InvalidInput(f"stage {self.id!r} reads the model's embeddings and gradients: calibrate with a model")
        rope = Rope()
        state = dict(rope.fit(calibration, {}))
        rope.bind(calibration.geometry, Profile({f"transform.{n}": v for n, v in state.items()}, {}))
        metric = loss_metric(calibration, rope)
        groups = _groups(len(calibration.geometry), self.layers_per_group)
        state |= _table(calibration, metric, rope, groups[0], self.embedding)
        table = torch.from_numpy(state["table"]).float() * torch.from_numpy(state["table_scale"])
        restoring: list[_Restoring] = []
        for g, layers in enumerate(groups):
            numbers = widths_of(calibration.geometry, layers)
            moment, roots = Moments(sum(numbers[-2 * SEEN_LAYERS :])), list[Tensor]()
            generator = torch.Generator().manual_seed(g)
            for n, (tokens, cache) in enumerate(calibration.caches(f"prediction from layer {layers.start} on")):
                features = _embedded(table, tokens)
                for before in restoring:
                    seen = before(features, cache, generator if n % 2 else None)
                    features = torch.cat([_embedded(table, tokens), *seen], dim=1)
                moment.add(features, _rows(cache, layers, rope))
            roots = roots_of(metric.layers, layers, moment)
            rank = min(self.rank, max(1, len(moment.centre) // 2))
            down, up = moment.solve(roots, rank, (LOOKBACK + 1) * table.shape[1])
            widths = [table.shape[1]] * (LOOKBACK + 1) + self._seen_widths(calibration.geometry, groups, g)
            state[f"down.{g}"], state[f"down_scale.{g}"] = rounded(down.T, widths)
            state[f"up.{g}"], state[f"up_scale.{g}"] = rounded(up[:LOUD], numbers)
            if len(up) > LOUD:
                state[f"quiet.{g}"], state[f"quiet_scale.{g}"] = in_nibbles(up[LOUD:], numbers)
            state |= {f"mean.{g}": moment.mean.numpy(), f"centre.{g}": moment.centre.numpy()}
            state[f"spread.{g}"] = moment.spread.numpy()
            if layers.stop < len(calibration.geometry):
                level = restoring[0].left.level if restoring else None
                left = Restoring(moment.left(down, up), roots[-SEEN_LAYERS:], level)
                group = Regression.read(state, g, widths, numbers)
                restoring.append(_Restoring(group, left, layers[-SEEN_LAYERS:], rope, self.reach))
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
            seen = [self._seen_widths(geometry, groups, g) for g in range(len(groups))]
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
        group = self.groups[number]
        flat = group.predict(self._features(context, layers.start, positions, group.centre))
        return self.rope.inverse(flat, like, layers, positions)

    def _seen_widths(self, geometry: Geometry, groups: list[range], g: int) -> list[int]:
        """Columns of the features of restored layers, side by side."""
        return widths_of(geometry, groups[g - 1][-SEEN_LAYERS:]) * (1 + self.reach) if g else []

    def _features(self, context: Context, start: int, positions: Tensor, centre: Tensor) -> Tensor:
        ids = [context.tokens, *context.earlier.T]
        found = [_looked_up(self.table, torch.from_numpy(np.ascontiguousarray(i, np.int64))) * self.scale for i in ids]
        if context.restored:
            before = [side.float() for side in context.restored[-1][-2 * SEEN_LAYERS :]]
            rows = self.rope.forward(before, range(start - len(before) // 2, start), positions)
            average = centre[len(ids) * len(self.scale) :].view(1 + self.reach, -1)
            follows = torch.from_numpy(context.follows)
            found += [rows, *(_shifted(rows, back, average[back], follows) for back in range(1, self.reach + 1))]
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
        if f"quiet.{g}" in state:
            up = torch.cat([up, from_nibbles(state[f"quiet.{g}"], state[f"quiet_scale.{g}"], numbers)])
        rows = [torch.from_numpy(np.array(state[f"{name}.{g}"])).float() for name in ("centre", "spread", "mean")]
        centre, spread, mean = rows
        fits = centre.shape == spread.shape == (len(down),) and mean.shape == (up.shape[1],)
        if not (fits and down.shape[1] == len(up) and all(bool(t.isfinite().all()) for t in rows)):
            raise ValueError(f"group {g} has features {tuple(centre.shape)} and numbers {tuple(mean.shape)}")
        if not bool((spread > 0).all()):
            raise ValueError(f"group {g} has features that do not vary")
        return cls(centre, spread, down, up, mean)

    def predict(
        self, features: Float32[Tensor, "tokens features"], last: int | None = None
    ) -> Float32[Tensor, "tokens numbers"]:
        """All numbers, or so many last ones."""
        some = slice(0 if last is None else self.up.shape[1] - last, None)
        return self.mean[some] + ((features - self.centre) / self.spread) @ self.down @ self.up[:, some]


class _Restoring:
    """The features of a group's last layers as a restore would give them, or without a generator as they are."""

    def __init__(self, group: Regression, left: Restoring, layers: range, rope: Rope, reach: int):
        self.group, self.left, self.layers, self.rope, self.reach = group, left, layers, rope, reach

    def __call__(self, features: Tensor, cache: KVCache, generator: torch.Generator | None) -> list[Tensor]:
        found = x = _rows(cache, self.layers, self.rope)
        if generator is not None:
            p = self.group.predict(features, x.shape[1])
            found = p + self.left(x - p, generator)
            found[:SINKS] = x[:SINKS]  # they are fine
        far = torch.arange(len(x)) > SINKS  # what sinks are like would be all that the features say
        return [found, *(_shifted(found, back, found.mean(dim=0), far) for back in range(1, self.reach + 1))]


def _table(calibration: Calibration, metric: Metric, rope: Rope, layers: range, columns: int) -> dict[str, np.ndarray]:
    """Embeddings by the directions from which the first group is foreseen best."""
    embeddings = _normalised(calibration.model.get_input_embeddings().weight.detach().float())
    moment = Moments()
    for tokens, cache in calibration.caches("embeddings"):
        moment.add(embeddings[torch.from_numpy(tokens)], _rows(cache, layers, rope))
    down = moment.solve(roots_of(metric.layers, layers, moment), columns, 0)[0]
    table = ((embeddings - moment.centre) / moment.spread) @ down
    scale = table.abs().amax(dim=0).clamp(min=1e-6) / 127
    return {"table": (table / scale).round().to(torch.int8).numpy(), "table_scale": scale.numpy()}


def _rows(cache: KVCache, layers: range, rope: Rope) -> Tensor:
    """[K before RoPE, V, …] (T, P)."""
    x = [side.float() for i in layers for side in (cache.layers[i].keys, cache.layers[i].values)]
    return rope.forward(x, layers, torch.arange(x[0].shape[1]))


def _embedded(table: Tensor, tokens: np.ndarray) -> Tensor:
    """Of each token and those before it, side by side."""
    ids = [torch.from_numpy(_before(tokens, back)) for back in range(LOOKBACK + 1)]
    return torch.cat([_looked_up(table, i) for i in ids], dim=1)


def _groups(layers: int, per_group: int) -> list[range]:
    return [range(i, min(i + per_group, layers)) for i in range(0, layers, per_group)]


def _before(tokens: np.ndarray, back: int) -> np.ndarray:
    ids = np.full(len(tokens), -1, np.int64)
    ids[back:] = tokens[: len(tokens) - back]
    return ids


def _shifted(rows: Tensor, back: int, average: Tensor, follows: Tensor) -> Tensor:
    """Rows (T, F) of the tokens `back` before each; the `average` where one between them and it does not follow."""
    linked = follows.clone()
    for step in range(1, back):
        linked[step:] &= follows[:-step]
    linked[:back] = False
    found = average.expand_as(rows).clone()
    there = linked.nonzero()[:, 0]
    found[there] = rows[there - back]
    return found


def _looked_up(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of the table, float32; zeros for ids that are not in it."""
    there = (ids >= 0) & (ids < len(table))
    return table[ids.clamp(0, len(table) - 1)].float() * there[:, None]


def _normalised(embeddings: Tensor) -> Tensor:
    return embeddings * torch.rsqrt(embeddings.square().mean(dim=1, keepdim=True) + 1e-6)
