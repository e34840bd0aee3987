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
from ...recipe import Recipe
from ...stages import Quantizer, SymbolCoder, register

FLOOR_ZERO_RESIDUAL = "floor:zero-residual"
_PART = b"\0"


class ZeroResidual(Quantizer):
    """Every coefficient becomes 0."""

    id = "bench-zero-residual/1"

    def quantize(self, coefficients: Tensor) -> np.ndarray:
        return np.zeros(tuple(coefficients.shape), np.int32)

    def dequantize(self, symbols: np.ndarray) -> Tensor:
        return torch.from_numpy(symbols).float()


class Zeros(SymbolCoder):
    """Zeros of any number as one byte. Raises InvalidInput for anything else."""

    id = "bench-zeros/1"
    max_expansion = 1 << 48

    def encode(self, arrays: Sequence[np.ndarray]) -> bytes:
        if any(array.any() for array in arrays):
            raise InvalidInput("expected zeros, got other symbols")
        return _PART

    def decode(self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]]) -> None:
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
