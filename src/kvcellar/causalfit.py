"""The fit of `causal/1`: ridge regression of every number of a layer on all that is known when it is coded.

Sums of products are taken over the calibration text, between a layer, the shallower ones it is foreseen from and the
embeddings. With B the ridge solution for a layer's numbers y and S = L Lᵀ the covariance of what it leaves, the rows of
D L⁻¹, D = diag L, foresee each number from B and the numbers before it, and D is what then remains (a Cholesky
factor is a chain of regressions). Floats end here: the profile holds integers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from .errors import InvalidInput, UnsupportedCache
from .profile import Profile
from .rope import Rope
from .symbols.causalkernels import COARSE, FINE, SUM
from .symbols.causalstate import BLOCK, EMBEDDED, LARGEST, WEIGHT, blocks_of, embedded, order_of

if TYPE_CHECKING:
    from .cache import KVCache
    from .calibrate import Calibration

RIDGE = 3e-4
FLOOR = 1e-7  # share of a number's variance that always remains
LOOK = 8  # samples that say how large numbers are, and which directions of embeddings matter
AHEAD = 3  # layers that choose those directions
FACTOR_LIMIT = (1 << 31) - 1


def fitted(calibration: Calibration, seen: int, embedding: int, before: int) -> Mapping[str, np.ndarray]:
    """The profile's tensors by name (`causalstate`). Raises InvalidInput without a model."""
    if calibration.model is None:
        raise InvalidInput("stage 'causal/1' reads the model's embeddings: calibrate with a model")
    return _Fit(calibration, seen, embedding, before).run()


class _Fit:
    def __init__(self, calibration: Calibration, seen: int, embedding: int, before: int):
        self.calibration, self.geometry, self.seen = calibration, calibration.geometry, seen
        self.rope = Rope()
        try:
            rope = dict(self.rope.fit(calibration, {}))
        except UnsupportedCache:  # keys that cannot be turned back are foreseen as they are
            none = np.zeros(len(self.geometry), np.int32)
            rope = {"inv_freq": np.zeros((len(none), 1), np.float32), "pairs": none, "layout": none}
        self.rope.bind(self.geometry, Profile({f"transform.{n}": v for n, v in rope.items()}, {}))
        self.pairs, self.layouts = rope["pairs"], rope["layout"]
        self.turns = np.array([[_turn(f) for f in row] for row in rope["inv_freq"].tolist()], np.int64)
        self.orders = [
            order_of(layer, int(p), int(w))
            for layer, p, w in zip(self.geometry.layers, self.pairs, self.layouts, strict=True)
        ]
        model = calibration.model
        table = model.get_input_embeddings().weight.detach().float()
        self.embeddings = (table * torch.rsqrt(table.square().mean(dim=1, keepdim=True) + 1e-6)).numpy()
        self.embedding, self.before = min(embedding, self.embeddings.shape[1]), min(before, embedding)

    def run(self) -> dict[str, np.ndarray]:
        self._look()
        state = {"table": self.table, "turns": self.turns, "pairs": self.pairs, "layout": self.layouts}
        self._sum()
        for i in range(len(self.geometry)):
            state |= {f"{name}.{i}": value for name, value in self._solve(i).items()}
        return state

    def _rows(self, cache: KVCache, layer: int) -> np.ndarray:
        """Numbers float32 (T, C) of a layer in coding order, keys before their turn, what is not finite as 0."""
        kv = cache.layers[layer]
        positions = torch.arange(kv.slots)
        rows = self.rope.forward([kv.keys.float(), kv.values.float()], range(layer, layer + 1), positions)
        ordered: np.ndarray = np.nan_to_num(rows.numpy()[:, self.orders[layer].columns], posinf=0, neginf=0)
        return ordered

    def _look(self) -> None:
        """Means, deviations and units of all numbers, and the table of embeddings, from a few samples."""
        count, width = 0, self.embeddings.shape[1]
        sums = [np.zeros((2, len(order.columns))) for order in self.orders]
        ahead = range(min(AHEAD, len(self.orders)))
        gram = np.zeros((width, width))
        cross = np.zeros((width, sum(len(self.orders[i].columns) for i in ahead)))
        step = max(1, len(self.calibration.samples) // LOOK)
        some = self.calibration.samples[::step][:LOOK]
        for sample in some:
            cache, ids = sample.load(), np.clip(sample.tokens, 0, len(self.embeddings) - 1)
            rows = [self._rows(cache, i) for i in range(len(self.orders))]
            for total, each in zip(sums, rows, strict=True):
                total += [each.sum(axis=0, dtype=np.float64), np.square(each, dtype=np.float64).sum(axis=0)]
            e = self.embeddings[ids]
            gram += e.T @ e
            cross += e.T @ np.concatenate([rows[i] for i in ahead], axis=1)
            count += len(ids)
        self.means = [total[0] / count for total in sums]
        self.spreads = [np.sqrt(np.maximum(s[1] / count - m * m, 1e-30)) for s, m in zip(sums, self.means, strict=True)]
        size = np.concatenate([self.spreads[i] for i in ahead])
        gram[np.diag_indices(width)] += 1e-3 * np.trace(gram) / width
        solution = np.linalg.solve(gram, cross / size)
        values, vectors = np.linalg.eigh(solution.T @ gram @ solution)
        rank = self.embedding
        table = self.embeddings @ (solution @ vectors[:, ::-1][:, : min(rank, len(values))])
        scale = np.maximum(np.abs(table).max(axis=0), 1e-12) / LARGEST
        self.table = np.rint(table / scale).astype(np.int8)
        self.before = min(self.before, self.table.shape[1])
        self.exponents = []
        for order, mean, spread in zip(self.orders, self.means, self.spreads, strict=True):
            root = np.sqrt(spread**2 + mean**2)
            pairs = root[: 2 * order.pairs].reshape(-1, 2).max(axis=1)
            root[: 2 * order.pairs] = np.repeat(pairs, 2)
            self.exponents.append(np.clip(np.ceil(np.log2(np.maximum(root, 1e-30))), -60, 60).astype(np.int16))

    def _sum(self) -> None:
        """Moments about fixed origins, coarse numbers in units of their own: of embeddings, of layers and `seen`."""
        layers = range(len(self.orders))
        columns = self.table.shape[1] + self.before
        sizes = [len(order.columns) for order in self.orders]
        self.count, self.first_e = 0, np.zeros(columns)
        self.first = [np.zeros(size) for size in sizes]
        self.ee = np.zeros((columns, columns))
        self.ey = [np.zeros((columns, size)) for size in sizes]
        self.yy = {(i, j): np.zeros((sizes[i], sizes[j])) for i in layers for j in range(max(0, i - self.seen), i + 1)}
        for tokens, cache in self.calibration.caches("prediction"):
            earlier = np.concatenate([[-1], tokens[:-1]])
            e = embedded(self.table, tokens, earlier, self.before).astype(np.float32) / (LARGEST * EMBEDDED)
            rows = [
                ((self._rows(cache, i) - self.means[i]) / 2.0 ** self.exponents[i]).astype(np.float32) for i in layers
            ]
            rows = [np.clip(each, -32, 32) for each in rows]
            self.count += len(tokens)
            self.ee += e.T @ e
            self.first_e += e.sum(axis=0)
            for i in layers:
                self.first[i] += rows[i].sum(axis=0)
                self.ey[i] += e.T @ rows[i]
                for j in range(max(0, i - self.seen), i + 1):
                    self.yy[i, j] += rows[i].T @ rows[j]

    def _solve(self, layer: int) -> dict[str, np.ndarray]:
        shallower = list(range(max(0, layer - self.seen), layer))
        f, y, n = len(self.first_e) + sum(len(self.first[j]) for j in shallower), len(self.first[layer]), self.count
        first = np.concatenate([self.first_e, *(self.first[j] for j in shallower), self.first[layer]]) / n
        gram = np.zeros((f + y, f + y))
        starts = np.cumsum([0, len(self.first_e), *(len(self.first[j]) for j in shallower)]).tolist()
        members = [-1, *shallower, layer]
        for a, i in enumerate(members):
            for b, j in enumerate(members[: a + 1]):
                block = self.ee if i < 0 else self.ey[i].T if j < 0 else self.yy[i, j]
                gram[starts[a] : starts[a] + len(block), starts[b] : starts[b] + block.shape[1]] = block
        gram = np.tril(gram) + np.tril(gram, -1).T
        gram = gram / n - np.outer(first, first)
        size = np.sqrt(np.maximum(np.diag(gram), 1e-12))
        gram /= np.outer(size, size)
        gram[np.diag_indices(f)] += RIDGE
        solution = np.linalg.solve(gram[:f, :f], gram[:f, f:])
        left = gram[f:, f:] - gram[f:, :f] @ solution
        left = (left + left.T) / 2
        left[np.diag_indices(y)] = np.maximum(np.diag(left), FLOOR) + FLOOR
        root = np.linalg.cholesky(left)
        deviation = np.diag(root)
        chain = np.linalg.inv(root) * deviation[:, None]
        weights = np.concatenate([chain @ solution.T, np.eye(y) - chain], axis=1) * size[f:, None] / size
        return self._rounded(layer, shallower, weights, first, deviation * size[f:])

    def _rounded(
        self, layer: int, shallower: list[int], weights: np.ndarray, first: np.ndarray, deviation: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Integers from weights (C, F + C) between numbers in their units, about `first`."""
        y, e = len(deviation), len(self.first_e)
        f = weights.shape[1] - y
        embedded_units = np.ones(f)
        embedded_units[:e] = 2.0**COARSE / (LARGEST * EMBEDDED)
        parts = [_int8(weights[:, :f] * embedded_units), _int8(np.tril(weights[:, f:], -1))]
        spreads = [q * np.repeat(s, BLOCK, axis=1)[:, : q.shape[1]] for q, s in parts]
        exact = np.concatenate(spreads, axis=1) / 2.0**WEIGHT
        # what the coder sees has its mean
        means = np.concatenate([self.means[j] / 2.0 ** self.exponents[j] for j in [*shallower, layer]])
        origin = np.concatenate([first[:e] * LARGEST * EMBEDDED, 2.0**COARSE * (first[e:] + means)])
        mean = np.rint((origin[f:] - exact @ origin) * 2.0 ** (SUM - COARSE))
        spread = np.rint(64 * np.log2(np.maximum(deviation * 2.0**FINE, 1.0)))
        return {
            "weights": parts[0][0],
            "within": parts[1][0][np.tril_indices(y, -1)],
            "factors": np.concatenate([s for _, s in parts], axis=1).astype(np.int32),
            "mean": mean.astype(np.int64),
            "spread": spread.astype(np.int16),
            "exponent": self.exponents[layer],
        }


def _int8(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 numbers and int64 factors (rows, blocks) of weights, which count 2⁻¹⁸."""
    columns = weights.shape[1]
    padded = np.zeros((len(weights), blocks_of(columns) * BLOCK))
    padded[:, :columns] = weights * 2.0**WEIGHT
    blocks = padded.reshape(len(weights), -1, BLOCK)
    factors = np.minimum(np.ceil(np.abs(blocks).max(axis=2) / LARGEST), FACTOR_LIMIT // LARGEST)
    numbers = np.rint(blocks / np.maximum(factors, 1)[:, :, None]).clip(-LARGEST, LARGEST)
    return numbers.reshape(padded.shape)[:, :columns].astype(np.int8), factors.astype(np.int64)


def _turn(frequency: float) -> int:
    """A frequency in radians for each position as a signed number of 2⁻⁶⁴ circles."""
    turn = round(math.fmod(frequency / (2 * math.pi), 1.0) * (1 << 64)) % (1 << 64)
    return turn - (1 << 64) if turn >> 63 else turn
