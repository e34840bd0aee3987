"""What `causal/1` knows of a model: for each layer, what its numbers are foreseen from, in integers.

A row of the weights foresees one number of a layer, in the order in which they are coded, from the features: the
embeddings of the token and of the one before, the coarse numbers of shallower layers, and those of this layer that come
first. Weights are int8 with a whole factor for each row and block of columns; w = number · factor counts 2⁻¹⁸. So a sum
of products is a whole number below 2⁵³, and float64 holds it whatever the order it was added in (exactness rule D2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import ProfileMismatch
from ..geometry import INTERLEAVED, Geometry, LayerGeometry
from .causalkernels import COARSE, REACH, SUM
from .causalnumbers import CIRCLE, sines

WEIGHT = SUM - COARSE
BLOCK = 64  # columns that share a factor
LARGEST = 127
EMBEDDED = 1 << 5  # coarse units of one step of the table
MOST_EXPONENT = 1 << 8


class Order(NamedTuple):
    """How a layer's numbers are coded: `columns` int64 (C,) of [K, V] flattened, keys' turned pairs first."""

    columns: np.ndarray
    pairs: int


def order_of(layer: LayerGeometry, pairs: int, layout: int) -> Order:
    """Of each head the pairs, one after the other, then the rest of the keys, then the values."""
    turned, rest, width = list[int](), list[int](), layer.key.width
    for head in range(layer.key.heads):
        start = head * width
        for j in range(pairs):
            a, b = (2 * j, 2 * j + 1) if layout == INTERLEAVED else (j, j + pairs)
            turned += [start + a, start + b]
        rest += range(start + 2 * pairs, start + width)
    values = range(layer.key.numbers_per_token, layer.numbers_per_token)
    return Order(np.array([*turned, *rest, *values], np.int64), layer.key.heads * pairs)


@dataclass(frozen=True)
class Layer:
    """One layer's part of the profile.

    `weights` int8 (C, F) for embeddings and shallower layers, `within` int8 (C·(C−1)/2,) the strict lower triangle row
    by row, `factors` int32 (C, blocks of F and then of C), `mean` int64 (C,) in sums' units, `spread` int16 (C,) and
    `exponent` int16 (C,) of the fine unit: it is 2^(exponent − 20).
    """

    order: Order
    weights: np.ndarray
    within: np.ndarray
    factors: np.ndarray
    mean: np.ndarray
    spread: np.ndarray
    exponent: np.ndarray

    FIELDS = ("weights", "within", "factors", "mean", "spread", "exponent")

    def require_fitting(self, features: int, where: str) -> None:
        c = len(self.order.columns)
        blocks = blocks_of(features) + blocks_of(c)
        expected = {
            "weights": ("int8", (c, features)),
            "within": ("int8", (c * (c - 1) // 2,)),
            "factors": ("int32", (c, blocks)),
            "mean": ("int64", (c,)),
            "spread": ("int16", (c,)),
            "exponent": ("int16", (c,)),
        }
        for name, (dtype, shape) in expected.items():
            array = getattr(self, name)
            if array.dtype.name != dtype or array.shape != shape:
                raise ProfileMismatch(
                    f"{where}: {name} is {array.dtype} {array.shape}; expected {dtype} {shape} for this cache"
                )
        largest = int(self.factors.max(initial=0))
        # every term is below 2^17 · 127 · factor, so all of them together stay below 2^52, and the mean beside them
        if int(self.factors.min(initial=0)) < 0 or largest * LARGEST * REACH * (features + c) >= 1 << 52:
            raise ProfileMismatch(f"{where}: a factor of {largest}: sums of products would not be whole")
        if (np.abs(self.mean) >= 1 << 51).any() or (np.abs(self.exponent) > MOST_EXPONENT).any():
            raise ProfileMismatch(f"{where}: means or units out of range")
        a, b = self.exponent[: 2 * self.order.pairs : 2], self.exponent[1 : 2 * self.order.pairs : 2]
        if not np.array_equal(a, b):
            raise ProfileMismatch(f"{where}: the two numbers of a pair have units of their own")

    def sums(self, features: np.ndarray) -> np.ndarray:
        """What `features` float64 (T, F), whole, foresee: float64 (T, C), whole."""
        spread = _spread(self.factors[:, : blocks_of(features.shape[1])], features.shape[1])
        found: np.ndarray = features @ (self.weights * spread).T.astype(np.float64)
        found += self.mean
        return found

    def followers(self) -> np.ndarray:
        """float64 (C, C): row c is what number c adds to the sums of those behind it."""
        c = len(self.order.columns)
        lower = np.zeros((c, c), np.int64)
        lower[np.tril_indices(c, -1)] = self.within
        lower *= _spread(self.factors[:, -blocks_of(c) :], c)
        return np.ascontiguousarray(lower.T, np.float64)


def blocks_of(columns: int) -> int:
    return -(-columns // BLOCK)


def _spread(factors: np.ndarray, columns: int) -> np.ndarray:
    return np.repeat(factors.astype(np.int64), BLOCK, axis=1)[:, :columns]


@dataclass(frozen=True)
class Knowledge:
    """All of it. `table` int8 (V, E); `turns` int64 (L, P) the turn of each pair from a position to the next in 2⁻⁶⁴
    circles, of which layer l has `pairs[l]`."""

    layers: tuple[Layer, ...]
    table: np.ndarray
    turns: np.ndarray
    pairs: tuple[int, ...]
    seen: int
    before: int

    @classmethod
    def read(cls, tensors: Mapping[str, np.ndarray], geometry: Geometry, seen: int, before: int) -> Knowledge:
        """From a profile's tensors, ``symbols.NAME``. Raises ProfileMismatch."""
        state = {n.removeprefix("symbols."): np.asarray(t) for n, t in tensors.items() if n.startswith("symbols.")}
        try:
            table, turns, pairs, layouts = (state[name] for name in ("table", "turns", "pairs", "layout"))
            count = len(geometry)
            shapes = turns.ndim == 2 and len(turns) == count and pairs.shape == layouts.shape == (count,)
            kinds = [array.dtype.name for array in (table, turns, pairs, layouts)]
            if not shapes or table.ndim != 2 or kinds != ["int8", "int64", "int32", "int32"]:
                raise ProfileMismatch(f"the profile's table or turns do not fit {count} layers of this cache")
            found = []
            for i, layer in enumerate(geometry.layers):
                if not 0 <= 2 * pairs[i] <= min(layer.key.width, 2 * turns.shape[1]) or layouts[i] not in (0, 1):
                    raise ProfileMismatch(f"the profile turns {pairs[i]} pairs of layer {i}'s keys")
                order = order_of(layer, int(pairs[i]), int(layouts[i]))
                found.append(Layer(order, **{name: state[f"{name}.{i}"] for name in Layer.FIELDS}))
        except KeyError as error:
            raise ProfileMismatch(
                f"the profile has no symbols.{error.args[0]}: it was made for another recipe"
            ) from None
        knowledge = cls(tuple(found), table, turns, tuple(pairs.tolist()), seen, min(before, table.shape[1]))
        for i, learned in enumerate(found):
            learned.require_fitting(knowledge.features(i), f"the profile's layer {i}")
        return knowledge

    def features(self, layer: int) -> int:
        shallower = self.layers[max(0, layer - self.seen) : layer]
        return int(self.table.shape[1]) + self.before + sum(len(each.order.columns) for each in shallower)

    def embedded(self, tokens: np.ndarray, earlier: np.ndarray) -> np.ndarray:
        """float64 (T, E + before): of the token, and of the one before it the first columns; zeros for unknown ids."""
        return embedded(self.table, tokens, earlier, self.before)

    def angles(self, layer: int, positions: np.ndarray) -> np.ndarray:
        """Cosines and sines int64 (2, T, P) of all pairs of a layer, one head after the other, in 2⁻¹⁴."""
        turns = self.turns[layer, : self.pairs[layer]]
        return angles(turns, positions, self.layers[layer].order.pairs // len(turns) if len(turns) else 1)


def embedded(table: np.ndarray, tokens: np.ndarray, earlier: np.ndarray, before: int) -> np.ndarray:
    """See `Knowledge.embedded`."""
    rows = [(tokens, table.shape[1]), (earlier, before)]
    found = []
    for ids, columns in rows:
        there = (ids >= 0) & (ids < len(table))
        part = table[np.where(there, ids, 0), :columns].astype(np.float64) * (there[:, None] * EMBEDDED)
        found.append(part)
    return np.concatenate(found, axis=1)


def angles(turns: np.ndarray, positions: np.ndarray, heads: int) -> np.ndarray:
    """Cosines and sines int64 (2, T, heads·P) at `positions` int64 (T,), by a table with lines between its entries."""
    phase = positions.astype(np.uint64)[:, None] * turns.view(np.uint64)[None, :]
    at, part = (phase >> np.uint64(52)).astype(np.int64), (phase >> np.uint64(40) & np.uint64(4095)).astype(np.int64)
    table = sines()
    found = []
    for start in (CIRCLE // 4, 0):
        low, high = table[at + start], table[np.minimum(at + start + 1, len(table) - 1)]
        found.append(low + ((high - low) * part >> 12))
    return np.tile(np.stack(found), (1, 1, heads))
