"""Matrices of a profile in int8: each row has a scale of its own in each of its blocks of columns.

Numbers of different layers, and of keys and values, differ by orders of magnitude; within a block they are alike.
Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from .geometry import Geometry

LARGEST = 127


def widths_of(geometry: Geometry, layers: range) -> list[int]:
    """Columns of each block of a row [K, V, …] of `layers`: one block for each side."""
    sides = [side for i in layers for side in (geometry.layers[i].key, geometry.layers[i].value)]
    return [side.numbers_per_token for side in sides]


def rounded(matrix: Float32[Tensor, "rows columns"], widths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """int8 (rows, columns), and scales float32 (rows, blocks)."""
    scales = torch.stack([part.abs().amax(dim=1) for part in torch.split(matrix, list(widths), dim=1)], dim=1)
    scales = scales.float().clamp(min=torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    numbers = (matrix.float() / _spread(scales, widths)).round().clamp(-LARGEST, LARGEST)
    return numbers.to(torch.int8).numpy(), scales.numpy()


def restored(numbers: np.ndarray, scales: np.ndarray, widths: Sequence[int]) -> Float32[Tensor, "rows columns"]:
    """The matrix again. Raises ValueError for arrays that `rounded` never gives for such `widths`."""
    shapes = numbers.shape == (len(numbers), sum(widths)), scales.shape == (len(numbers), len(widths))
    if numbers.dtype != np.int8 or scales.dtype != np.float32 or not (all(shapes) and np.isfinite(scales).all()):
        raise ValueError(f"{numbers.dtype} {numbers.shape} with scales {scales.dtype} {scales.shape}")
    matrix: Tensor = torch.from_numpy(np.array(numbers)).float()
    return matrix.mul_(_spread(torch.from_numpy(np.array(scales)), widths))


def triangle(symmetric: Float32[Tensor, "n n"]) -> tuple[np.ndarray, np.ndarray]:
    """The lower triangle row by row, int8 (n(n+1)/2,), and scales float32 (n,) of its rows."""
    lower = symmetric.tril()
    scales = lower.abs().amax(dim=1).float().clamp(min=torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    numbers = (lower / scales[:, None]).round().to(torch.int8).numpy()
    return numbers[np.tril_indices(len(numbers))], scales.numpy()


def is_triangle(numbers: np.ndarray, scales: np.ndarray, n: int) -> bool:
    """Whether they are a `triangle` of a matrix of n rows."""
    shaped = numbers.dtype == np.int8 and numbers.shape == (n * (n + 1) // 2,) and scales.shape == (n,)
    return shaped and scales.dtype == np.float32 and bool(np.isfinite(scales).all())


def symmetric(numbers: np.ndarray, scales: np.ndarray) -> Float32[Tensor, "n n"]:
    """The matrix of a `triangle`."""
    lower = np.zeros((len(scales), len(scales)), np.float32)
    lower[np.tril_indices(len(scales))] = numbers
    lower *= scales[:, None]
    return torch.from_numpy(lower + np.tril(lower, -1).T)


def _spread(scales: Tensor, widths: Sequence[int]) -> Tensor:
    """Scales (rows, blocks) as one of each column."""
    return scales.repeat_interleave(torch.tensor(list(widths)), dim=1)
