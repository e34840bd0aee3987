"""Where the model of `adaptive/1` begins, and how that is learned from symbols of calibration text.

A static probability and a mean magnitude for each coefficient are counted; the adaptive tables and the weights are what
the coder itself has made of them after two passes over the calibration symbols. Training may use floats, what it gives
are integers; everything a decoder computes from them is integer arithmetic. Bytes and formulas: docs/entropy.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from ..errors import ProfileMismatch
from . import adaptivekernels as kernels
from .binarycoder import MAX_WEIGHT, SQUASH, STRETCH, STRETCHED, TRAIN

ID = "adaptive/1"
_RATE, _TRAINING_RATE = 7, 8  # a table moves by 2^−rate of what it missed
_STEP = 2
_LOCAL_CLASSES = (4, 8, 12, 17, 24, 36, 56)  # in sixteenths of what is expected
_TOTAL_CLASSES = (8, 11, 13, 16, 19, 23, 30)
FIELDS = {  # of the profile: dtype, lowest and highest number
    "static": ("int16", -STRETCHED, STRETCHED),
    "mean": ("uint16", 1, kernels.CAP << 8),
    "table": ("uint16", 0, 65535),
    "weights": ("int32", -MAX_WEIGHT, MAX_WEIGHT),
}


_CLASSES = np.array(
    [[sum(ratio > edge for edge in edges) for ratio in range(64)] for edges in (_LOCAL_CLASSES, _TOTAL_CLASSES)],
    np.uint8,
)
_NUMBERS = (STRETCH, SQUASH, _CLASSES)


@dataclass(frozen=True, eq=False)
class Tables:
    """Where the model of an array of C columns begins.

    `static` int16 (2, C): logits, in 1/256, of "not zero" and "more than one if not zero"; `mean` uint16 (C,): mean
    magnitude in 1/256, 1 … 10,240; `table` uint16 (TABLE,): adaptive probabilities, 2⁻¹⁶; `weights` int32
    (KINDS·LEVELS, INPUTS), 2⁻¹⁶. Raises ProfileMismatch for anything else.
    """

    static: np.ndarray
    mean: np.ndarray
    table: np.ndarray
    weights: np.ndarray

    def __post_init__(self) -> None:
        for name, (dtype, low, high) in FIELDS.items():
            field, shape = getattr(self, name), self._shape(name)
            if field.dtype != dtype or field.shape != shape:
                raise ProfileMismatch(f"{ID}: {name} is {field.dtype} {field.shape}; expected {dtype} {shape}")
            if field.min(initial=low) < low or field.max(initial=high) > high:
                raise ProfileMismatch(f"{ID}: {name} holds numbers outside {low} … {high}")

    def _shape(self, name: str) -> tuple[int, ...]:
        sizes = {"static": (2, self.columns), "mean": (self.columns,), "table": (kernels.TABLE,)}
        return sizes.get(name, (kernels.KINDS * kernels.LEVELS, kernels.INPUTS))

    @property
    def columns(self) -> int:
        return int(self.mean.size)

    @cached_property
    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Level uint8 (C,) of each coefficient, 2·log2 of its mean, and inverse int64 (2, C) of expected energies."""
        means = self.mean.tolist()
        inverse, near, total = np.empty((2, len(means)), np.int64), 0, 0
        for c, mean in enumerate(means):
            inverse[:, c] = (1 << 20) // (near + 64), (1 << 32) // (total + 256)
            near += mean - (near >> 3)
            total += mean
        return np.array([(mean * mean).bit_length() - 1 for mean in means], np.uint8), inverse

    def resized(self, columns: int) -> Tables:
        """The same for another number of columns, from the first on: what is too much is cut off, what is lacking is as
        the last one is."""
        last = self.columns - 1
        chosen = np.minimum(np.arange(columns), last)
        return replace(self, static=np.ascontiguousarray(self.static[:, chosen]), mean=self.mean[chosen])

    @classmethod
    def train(cls, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Tables:
        """From symbols (T, C) of calibration text and their notes uint8 (T,), both cut as blocks would be."""
        columns = parts[0][0].shape[1]
        tokens = sum(len(symbols) for symbols, _ in parts)
        loud, several, sizes = np.zeros((3, columns), np.int64)
        for symbols, _ in parts:
            size = np.minimum(np.abs(symbols.astype(np.int64)), kernels.CAP)
            loud, several, sizes = loud + (size > 0).sum(0), several + (size > 1).sum(0), sizes + size.sum(0)
        # a rare event's own count says little: both shares lean towards those of the neighbours
        share = (loud + 3 * (_smooth(loud) + 0.2) / max(tokens, 1)) / (tokens + 3)
        further = (several + 6 * (_smooth(several) + 0.3) / (_smooth(loud) + 1)) / (loud + 6)
        mean = np.clip(np.rint(256 * (sizes + 0.3) / (tokens + 1)), 1, kernels.CAP << 8).astype(np.uint16)
        tables = replace(flat(columns), static=np.stack([_logits(share), _logits(further)]), mean=mean)
        walk = Walk(tables)
        for symbols, notes in 2 * list(parts):
            walk.start()
            whole = np.ascontiguousarray(symbols, np.int32)
            walk(TRAIN, whole, np.ascontiguousarray(notes), np.empty(0, np.uint8), np.zeros(4, np.int64))
        return replace(tables, table=walk.table, weights=walk.weights)


@lru_cache(16)
def flat(columns: int) -> Tables:
    """Tables that know nothing: for arrays unlike those of the calibration."""
    static, mean = np.zeros((2, columns), np.int16), np.full(columns, 256, np.uint16)
    table = np.full(kernels.TABLE, 1 << 15, np.uint16)
    weights = np.full((kernels.KINDS * kernels.LEVELS, kernels.INPUTS), 1 << 14, np.int32)
    return Tables(static, mean, table, weights)


class Walk:
    """The kernel on one array, and what has become of its tables."""

    def __init__(self, tables: Tables):
        self.tables, self.table, self.weights = tables, tables.table.copy(), tables.weights.copy()
        self.start()

    def start(self) -> None:
        """Forget the tokens before."""
        columns = self.tables.columns
        self.history = np.zeros((2, columns), np.int32), np.full((2, columns), 8, np.uint8)

    def __call__(
        self,
        mode: int,
        symbols: np.ndarray,
        notes: np.ndarray,
        data: np.ndarray,
        place: np.ndarray,
        limits: tuple[int, int] = (0, 0),
        row_bytes: int = 0,
    ) -> int:
        speed = (_TRAINING_RATE if mode == TRAIN else _RATE, _STEP, row_bytes)
        model = (self.tables.static, *self.tables.expected, self.table, self.weights)
        return int(kernels.walk(mode, symbols, notes, *limits, data, place, _NUMBERS, model, self.history, speed))


def _smooth(counts: np.ndarray) -> np.ndarray:
    return np.convolve(np.pad(counts, 4, mode="edge"), np.full(9, 1 / 9), "valid")


def _logits(shares: np.ndarray) -> np.ndarray:
    shares = np.clip(shares, 1e-5, 1 - 1e-5)
    logits: np.ndarray = np.clip(np.rint(256 * np.log(shares / (1 - shares))), -2047, 2047).astype(np.int16)
    return logits
