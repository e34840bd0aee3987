"""The lossy middle of the loop: q = quantize(T(x − p)); the restored group is p + T⁻¹(dequantize(q)).

Finite in, finite out: numbers that are none are refused, and what would round beyond the stored dtype's largest number
becomes that number. Tried on: CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import UnsupportedCache
from ..placing import place
from ..residual import Place, Residual
from ..stages import Grade, Quantizer, Transform


class Coefficients(Residual):
    lossless = False

    def __init__(self, transform: Transform | None, quantizer: Quantizer):
        self.transform, self.quantizer = transform, quantizer
        self._layouts: dict[tuple[range, Grade], Sequence[tuple[int, type[np.generic]]]] = {}

    def layout(self, layers: range, grade: Grade) -> Sequence[tuple[int, type[np.generic]]]:
        """The quantizer's, kept: a restore asks for that of each group of each block."""
        if (layers, grade) not in self._layouts:
            self._layouts[layers, grade] = self.quantizer.layout(layers, grade)
        return self._layouts[layers, grade]

    def encode(self, x: list[Tensor], p: list[Tensor] | None, at: Place) -> list[np.ndarray]:
        _require_finite(x, at)
        residual = [t.float() for t in x] if p is None else [a.float() - b for a, b in zip(x, p, strict=True)]
        transform = self.transform
        flat = transform.forward(residual, at.layers, at.positions, x, at.grade) if transform else flatten(residual)
        return self.quantizer.quantize_told(flat, at.layers, at.grade, at.surprisal)

    def decode(self, symbols: list[np.ndarray], p: list[Tensor] | None, out: list[Tensor], at: Place) -> None:
        if p is None and self._straight(symbols, out, at):
            return
        flat = self.quantizer.dequantize(symbols, at.layers, at.grade)
        if p is None and self._placed(flat, out, at):
            return
        if self.transform is None:
            residual = unflatten(flat, out)
        else:
            residual = self.transform.inverse(flat, out, at.layers, at.positions)
        for i, tensor in enumerate(out):
            rec = residual[i] if p is None else p[i] + residual[i]
            largest = torch.finfo(tensor.dtype).max
            tensor.copy_(rec.clamp(-largest, largest))

    def surprisal(self, symbols: list[np.ndarray]) -> np.ndarray | None:
        return self.quantizer.surprisal(symbols)

    def _straight(self, symbols: list[np.ndarray], out: list[Tensor], at: Place) -> bool:
        """From symbols to numbers in one pass where nothing is predicted and keys are turned at most."""
        transform = self.transform
        turns = [None] * len(out) if transform is None else transform.turned_by(at.layers, at.positions)
        return turns is not None and self.quantizer.dequantize_into(symbols, at.layers, at.grade, out, turns)

    def _placed(self, flat: Tensor, out: list[Tensor], at: Place) -> bool:
        """The same in one pass where nothing is predicted, if that can be had."""
        if self.transform is None:
            return place(flat, out, [None] * len(out))
        return self.transform.inverse_into(flat, out, at.layers, at.positions)


def _require_finite(x: list[Tensor], at: Place) -> None:
    for i, tensor in enumerate(x):
        if math.isfinite(float(tensor.sum(dtype=torch.float32))):  # then so is each of them
            continue
        if not (finite := tensor.isfinite()).all():
            token = int(at.positions[(~finite).any(dim=2).any(dim=0)][0])
            side = "values" if i % 2 else "keys"
            raise UnsupportedCache(
                f"layer {at.layers[i // 2]} {side} at position {token} are not finite numbers; a lossy recipe cannot "
                "keep them: use recipe 'exact'"
            )


def flatten(group: list[Tensor]) -> Tensor:
    """(T, C) from tensors (H, T, D): one row per token."""
    return torch.cat([t.transpose(0, 1).reshape(t.shape[1], -1) for t in group], dim=1)


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views (H, T, D) of (T, C), shaped like `like`."""
    columns = torch.split(flat, [t.shape[0] * t.shape[2] for t in like], dim=1)
    return [c.reshape(t.shape[1], t.shape[0], t.shape[2]).transpose(0, 1) for c, t in zip(columns, like, strict=True)]
