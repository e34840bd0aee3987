"""Matrices of a profile in int8 or in nibbles: each row has a scale of its own in each of its blocks of columns.

Numbers of different layers, and of keys and values, differ by orders of magnitude; within a block they are alike.
A nibble is a whole number of −7 … 7 plus 8, two of them a byte, the first in its lower half. Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from .geometry import Geometry

LARGEST = 127
LARGEST_NIBBLE = 7


def widths_of(geometry: Geometry, layers: range) -> list[int]:
    """Columns of each block of a row [K, V, …] of `layers`: one block for each side."""
    sides = [side for i in layers for side in (geometry.layers[i].key, geometry.layers[i].value)]
    return [side.numbers_per_token for side in sides]


def rounded(matrix: Float32[Tensor, "rows columns"], widths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """int8 (rows, columns), and scales float32 (rows, blocks)."""
    numbers, scales = _rounded(matrix, widths, LARGEST)
    return numbers.numpy(), scales.numpy()


def in_nibbles(matrix: Float32[Tensor, "rows columns"], widths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """uint8 (rows, ⌈columns/2⌉), and scales float32 (rows, blocks)."""
    numbers, scales = _rounded(matrix, widths, LARGEST_NIBBLE)
    pairs = torch.nn.functional.pad(numbers, (0, numbers.shape[1] % 2)).view(torch.uint8) + 8
    return (pairs[:, ::2] + 16 * pairs[:, 1::2]).numpy(), scales.numpy()


def from_nibbles(pairs: np.ndarray, scales: np.ndarray, widths: Sequence[int]) -> Float32[Tensor, "rows columns"]:
    """The matrix again. Raises ValueError for arrays that `in_nibbles` never gives for such `widths`."""
    columns = sum(widths)
    if pairs.dtype != np.uint8 or pairs.shape != (len(pairs), -(-columns // 2)):
        raise ValueError(f"{pairs.dtype} {pairs.shape}, not nibbles of {columns} columns")
    nibbles = np.stack([pairs % 16, pairs // 16], axis=2).reshape(len(pairs), 2 * pairs.shape[1])
    if not nibbles.all():
        raise ValueError("a nibble of 0 stands for no number")
    return restored(nibbles[:, :columns].astype(np.int8) - 8, scales, widths)


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


def _rounded(matrix: Tensor, widths: Sequence[int], largest: int) -> tuple[Tensor, Tensor]:
    """int8 (rows, columns) of at most `largest`, and scales (rows, blocks)."""
    scales = torch.stack([part.abs().amax(dim=1) for part in torch.split(matrix, list(widths), dim=1)], dim=1)
    scales = scales.float().clamp(min=torch.finfo(torch.float32).tiny * LARGEST) / largest
    numbers = (matrix.float() / _spread(scales, widths)).round().clamp(-largest, largest)
    return numbers.to(torch.int8), scales


def _spread(scales: Tensor, widths: Sequence[int]) -> Tensor:
    """Scales (rows, blocks) as one of each column."""
    return scales.repeat_interleave(torch.tensor(list(widths)), dim=1)
