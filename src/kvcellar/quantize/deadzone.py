"""One step for every coefficient, with a dead zone if wanted: for a transform in which errors cost alike.

q = sign(c)·⌊|c|/Δ + 1 − z⌋ with dead zone z: 0.5 rounds to nearest, the default, since every wider zone lost more than
the bits it saved (benchmarks/LOG.md). Restored is sign(q)·(|q| − s)·Δ for q ≠ 0. Coefficients whose
calibrated variance is under `keep`·Δ² get no column; few are, since the transform makes those of some tokens a thousand
times as large as most. The first `whole` coefficients are whole numbers (a token's exponent) and come in an array of
their own, as they are. Fine tokens are coded with `fine_step`, rounded to nearest; what the transform leaves beside its
coefficients comes in columns behind them and is coded of fine tokens alone, with `rest_step` in deviations. Fine tokens
whose first whole number is `mark` or more are coded `sink_gain` times as finely: what is left of the attention sink
costs a hundred times as much as of all the other fine tokens together (benchmarks/LOG.md).

Coarse symbols are made from what fine ones restore, so each number is rounded twice. With `nested`, the fine step is Δ
over the least odd number that makes it no larger than `fine_step`: every cell of the coarse grid then consists of whole
cells of the fine one, and to round twice is to round once. At 1.92 fine steps to a coarse one, what was beyond 0.26 Δ
became ±1, and a file took a third more bytes at equal divergence (benchmarks/LOG.md).

Source: uniform threshold quantization with a dead zone (Sullivan 1996); nested grids are ours. Tried on: CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from ..errors import DamagedArchive, InvalidRecipe, ProfileMismatch, ProfileMissing
from ..geometry import Geometry
from ..profile import Profile
from ..stages import Grade, Quantizer

LARGEST = {np.dtype(np.int16): 32767, np.dtype(np.int32): 1 << 24}  # float32 knows every whole number up to there

MOST = 32767  # of whole columns


class DeadZone(Quantizer):
    id = "deadzone/1"
    needs_profile = True

    def __init__(
        self,
        *,
        step: float,
        fine_step: float,
        rest_step: float = 3.0,
        sink_gain: float = 32.0,
        zone: float = 0.5,
        shift: float = 0.0,
        keep: float = 0.002,
        whole: int = 1,
        mark: int = 13,
        nested: bool = False,
    ):
        for name, number, least, most in (
            ("step", step, 1e-9, 1e9),
            ("fine_step", fine_step, 1e-9, 1e9),
            ("rest_step", rest_step, 1e-9, 1e9),
            ("sink_gain", sink_gain, 1.0, 1e9),
            ("zone", zone, 0.5, 1.0),
            ("shift", shift, 0.0, 0.5),
            ("keep", keep, 0.0, 1e9),
        ):
            if type(number) not in (int, float) or not least <= number <= most:
                raise InvalidRecipe(f"{name} {number!r}; expected a number from {least} to {most}")
        if type(whole) is not int or not 0 <= whole <= 16:
            raise InvalidRecipe(f"whole {whole!r}; expected a whole number from 0 to 16")
        if type(mark) is not int or abs(mark) > MOST:
            raise InvalidRecipe(f"mark {mark!r}; expected a whole number from {-MOST} to {MOST}")
        if type(nested) is not bool:
            raise InvalidRecipe(f"nested {nested!r}; expected true or false")
        fine = nested_step(step, fine_step) if nested else fine_step
        self.steps = {Grade.COARSE: float(step), Grade.FINE: float(fine)}
        self.rest_step, self.sink_gain = float(rest_step), float(sink_gain)
        self.zone, self.shift = float(zone), float(shift)
        self.keep, self.whole, self.mark = float(keep), whole, mark

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        """Needs `variance.{first layer}` (C,) of each group from the transform, and if it leaves a rest `spread` (P,).

        Raises ProfileMissing, ProfileMismatch.
        """
        if profile is None:
            raise ProfileMissing(f"stage {self.id!r} needs a profile")
        prefix = "transform.variance."
        self.variances = {
            int(name.removeprefix(prefix)): np.asarray(value, np.float64)
            for name, value in profile.tensors.items()
            if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
        }
        if not self.variances:
            raise ProfileMismatch("the profile has no transform.variance: it was made for another recipe")
        self.rest = {
            first: len(profile.tensors[f"transform.spread.{first}"])
            for first in self.variances
            if f"transform.spread.{first}" in profile.tensors
        }
        self.kept = {
            (first, grade): np.flatnonzero(variance >= self.keep * step**2)
            for first, variance in self.variances.items()
            for grade, step in self.steps.items()
        }

    def layout(self, layers: range, grade: Grade) -> list[tuple[int, type[np.signedinteger]]]:
        """The whole numbers, the coefficients that are kept, and of fine tokens the rest."""
        found: list[tuple[int, type[np.signedinteger]]] = [(self.whole, np.int16)]
        fine = grade is Grade.FINE
        found.append((len(self._columns(layers, grade)), np.int32 if fine else np.int16))
        if fine and layers.start in self.rest:
            found.append((self.rest[layers.start], np.int32))
        return found

    def quantize(
        self, coefficients: Float32[Tensor, "tokens coefficients"], layers: range, grade: Grade
    ) -> list[np.ndarray]:
        x, columns = coefficients.numpy(), self._columns(layers, grade)
        rest = self.whole + len(self.variances[layers.start])
        whole = np.rint(x[:, : self.whole]).clip(-MOST, MOST).astype(np.int16)
        if grade is Grade.COARSE:
            return [whole, _rounded(x[:, self.whole : rest][:, columns], self.steps[grade], self.zone, np.int16)]
        gain = self._gain(whole)
        found = [whole, _rounded(x[:, self.whole : rest][:, columns] * gain, self.steps[grade], 0.5, np.int32)]
        if layers.start in self.rest:
            found.append(_rounded(x[:, rest:] * gain, self.rest_step, 0.5, np.int32))
        return found

    def dequantize(
        self, symbols: Sequence[np.ndarray], layers: range, grade: Grade
    ) -> Float32[Tensor, "tokens coefficients"]:
        for array in symbols:
            least, most = -LARGEST[array.dtype], LARGEST[array.dtype]
            if array.size and not least <= int(array.min()) <= int(array.max()) <= most:
                raise DamagedArchive("block part", f"symbol {int(array.min())} or {int(array.max())}; at most {most}")
        whole, q = symbols[:2]
        columns, step = self._columns(layers, grade), np.float32(self.steps[grade])
        count = self.whole + len(self.variances[layers.start])
        x = np.zeros((len(q), count + sum(array.shape[1] for array in symbols[2:])), np.float32)
        x[:, : self.whole] = whole
        if grade is Grade.COARSE:
            shift = np.float32(self.shift)
            x[:, self.whole + columns] = (q - np.sign(q) * shift) * step if shift else q * step
            return torch.from_numpy(x)
        gain = self._gain(whole)
        x[:, self.whole + columns] = q.astype(np.float32) * step / gain
        for array in symbols[2:]:
            x[:, count:] = array.astype(np.float32) * np.float32(self.rest_step) / gain
        return torch.from_numpy(x)

    def _gain(self, whole: np.ndarray) -> np.ndarray:
        """float32 (T, 1) for fine tokens."""
        marked = whole[:, :1] >= self.mark if self.whole else np.zeros((len(whole), 1), bool)
        return np.where(marked, np.float32(self.sink_gain), np.float32(1))

    def _columns(self, layers: range, grade: Grade) -> np.ndarray:
        if (layers.start, grade) not in self.kept:
            raise ProfileMismatch(f"the profile has no transform.variance.{layers.start}")
        return self.kept[layers.start, grade]


def nested_step(step: float, largest: float) -> float:
    """`step` over the least odd number that makes it no larger than `largest`."""
    return step / (2 * math.ceil((step / largest - 1) / 2) + 1) if step > largest else step


def _rounded(x: np.ndarray, step: float, zone: float, dtype: type[np.signedinteger]) -> np.ndarray:
    """Whole numbers, from float32."""
    with np.errstate(over="ignore", invalid="ignore"):  # numbers near the largest of float32 are clipped
        scaled = np.nan_to_num(x / np.float32(step), nan=0.0)
        size = np.floor(np.abs(scaled) + np.float32(1 - zone)).clip(0, LARGEST[np.dtype(dtype)])
    found: np.ndarray = np.copysign(size, scaled).astype(dtype)
    return found
