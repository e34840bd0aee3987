"""The floor `zero-residual`: what a recipe's prediction restores by itself, through the same file as every recipe.

The recipe keeps its predictor and its blocks; in place of transform, quantizer and symbol coder stand two stages that
know one residual only, zero. So each group comes back as its prediction from groups that came back likewise, and the
file holds a byte a part. A recipe that is no better than this spends its bits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...errors import DamagedArchive, InvalidInput
from ...geometry import Geometry
from ...profile import Profile
from ...recipe import Recipe
from ...stages import Grade, Quantizer, SymbolCoder, register

FLOOR_ZERO_RESIDUAL = "floor:zero-residual"
_PART = b"\0"


class ZeroResidual(Quantizer):
    """Every coefficient becomes 0."""

    id = "bench-zero-residual/1"

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        self.geometry = geometry

    def layout(self, layers: range, grade: Grade) -> list[tuple[int, type[np.generic]]]:
        return [(sum(self.geometry.layers[i].numbers_per_token for i in layers), np.uint8)]

    def quantize(self, coefficients: Tensor, layers: range, grade: Grade) -> list[np.ndarray]:
        return [np.zeros(tuple(coefficients.shape), np.uint8)]

    def dequantize(self, symbols: Sequence[np.ndarray], layers: range, grade: Grade) -> Tensor:
        return torch.from_numpy(symbols[0]).float()


class Zeros(SymbolCoder):
    """Zeros of any number as one byte. Raises InvalidInput for anything else."""

    id = "bench-zeros/1"
    max_expansion = 1 << 48

    def encode(self, arrays: Sequence[np.ndarray], layers: range) -> bytes:
        if any(array.any() for array in arrays):
            raise InvalidInput("expected zeros, got other symbols")
        return _PART

    def decode(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], groups: Sequence[range]
    ) -> None:
        for part, arrays in zip(parts, out, strict=True):
            if part != _PART:
                raise DamagedArchive("block part", f"{len(part)} bytes that are not the one for zeros")
            for array in arrays:
                array[...] = 0


register("quantize", ZeroResidual)
register("symbols", Zeros)


def zero_residual(recipe: Recipe, name: str = FLOOR_ZERO_RESIDUAL) -> Recipe:
    """`recipe` with every residual zero, called `name`. Raises InvalidInput for a recipe that predicts nothing."""
    if recipe.predict is None:
        raise InvalidInput(f"recipe {recipe.name!r} has no predictor: with no residual there is nothing left of it")
    return replace(recipe, name=name, transform=None, quantize={"id": ZeroResidual.id}, symbols={"id": Zeros.id})
