"""Stages small enough to check by hand, for the closed loop. Importing this module registers them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kvcellar
from kvcellar import stages
from kvcellar.errors import DamagedArchive, ProfileMissing
from kvcellar.geometry import Geometry
from kvcellar.profile import Profile
from kvcellar.stages import Context, Grade


class FromShallower(stages.Predictor):
    """`factor` times the last layer of the group before, which is zero for the first group. Needs equal layers."""

    id = "test-shallower/1"

    def __init__(self, *, factor: float = 1.0, layers_per_group: int = 2):
        self.factor, self.layers_per_group = factor, layers_per_group

    def predict(self, context: Context, like: list[Tensor]) -> list[Tensor]:
        if not context.restored:
            return [torch.zeros(t.shape) for t in like]
        last = context.restored[-1][-2:]
        return [last[i % 2].float() * self.factor for i in range(len(like))]


class FromTokens(stages.Predictor):
    """Each number is the token's id plus its position: needs what a block says of its tokens."""

    id = "test-tokens/1"
    layers_per_group = 1

    def known(self, context: Context) -> np.ndarray:
        return context.tokens % 100 + context.positions

    def predict(self, context: Context, like: list[Tensor]) -> list[Tensor]:
        column = torch.from_numpy(self.known(context)).float()[None, :, None]
        return [column.expand(t.shape) for t in like]


class FromEarlier(FromTokens):
    """The same plus the ids of the three tokens before, of which the first tokens of a block have none."""

    id = "test-earlier/1"

    def known(self, context: Context) -> np.ndarray:
        return super().known(context) + (context.earlier % 7).sum(axis=1)


class FromProfile(stages.Predictor):
    """The profile's tensor `level`, one number per layer and side."""

    id = "test-profile/1"
    layers_per_group = 1

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        if profile is None:
            raise ProfileMissing(f"stage {self.id!r} needs a profile")
        self.level = torch.from_numpy(np.asarray(profile.tensors["level"], np.float32))

    def predict(self, context: Context, like: list[Tensor]) -> list[Tensor]:
        layer = len(context.restored)
        return [self.level[layer, side].expand(t.shape) for side, t in enumerate(like)]


class Doubled(stages.Transform):
    """Coefficients are twice the residual with channels in reverse order: halves every error."""

    id = "test-doubled/1"

    def __init__(self, *, layers_per_group: int = 2):
        self.layers_per_group = layers_per_group

    def forward(
        self,
        residual: list[Tensor],
        layers: range,
        positions: Tensor,
        x: list[Tensor] | None = None,
        grade: stages.Grade = stages.Grade.FINE,
    ) -> Tensor:
        return torch.cat([t.permute(1, 0, 2).flatten(1) for t in residual], dim=1).flip(1) * 2

    def inverse(self, coefficients: Tensor, like: list[Tensor], layers: range, positions: Tensor) -> list[Tensor]:
        columns = torch.split(coefficients.flip(1) / 2, [t.shape[0] * t.shape[2] for t in like], dim=1)
        return [c.unflatten(1, (t.shape[0], t.shape[2])).permute(1, 0, 2) for c, t in zip(columns, like, strict=True)]


class Coarse(stages.Quantizer):
    """Rounds to multiples of `step`, for fine tokens FINER times smaller."""

    id = "test-coarse/1"

    def __init__(self, *, step: float):
        self.step = step

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        self.geometry = geometry

    def layout(self, layers: range, grade: Grade) -> list[tuple[int, type[np.generic]]]:
        return [(sum(self.geometry.layers[i].numbers_per_token for i in layers), np.int32)]

    def quantize(self, coefficients: Tensor, layers: range, grade: Grade) -> list[np.ndarray]:
        return [torch.round(coefficients / self._step(grade)).to(torch.int32).numpy()]

    def dequantize(self, symbols: Sequence[np.ndarray], layers: range, grade: Grade) -> Tensor:
        return torch.from_numpy(symbols[0]).float() * self._step(grade)

    def _step(self, grade: Grade) -> float:
        return self.step / (FINER if grade is Grade.FINE else 1)


class Integers(stages.SymbolCoder):
    """int32 arrays through zlib: the length of each stream, then its bytes."""

    id = "test-integers/1"
    max_expansion = 4096

    def encode(self, arrays: Sequence[np.ndarray], layers: range) -> bytes:
        if any(array.dtype != np.int32 for array in arrays):
            raise TypeError(f"expected int32, got {[array.dtype for array in arrays]}")
        streams = [zlib.compress(np.ascontiguousarray(array, "<i4").tobytes()) for array in arrays]
        return b"".join(struct.pack("<I", len(stream)) + stream for stream in streams)

    def decode(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], groups: Sequence[range]
    ) -> None:
        for part, arrays in zip(parts, out, strict=True):
            at = 0
            for array in arrays:
                (length,) = struct.unpack_from("<I", part, at)
                data = zlib.decompress(part[at + 4 : at + 4 + length])
                if len(data) != array.nbytes:
                    raise DamagedArchive("block part", f"{len(data)} bytes, expected {array.nbytes}")
                array[...] = np.frombuffer(data, "<i4").reshape(array.shape)
                at += 4 + length


for _kind, _stage in (
    ("predict", FromShallower),
    ("predict", FromTokens),
    ("predict", FromEarlier),
    ("predict", FromProfile),
    ("transform", Doubled),
    ("quantize", Coarse),
    ("symbols", Integers),
):
    stages.register(_kind, _stage)

STEP = 0.5
FINER = 64
PREDICT = {"id": FromShallower.id}
TRANSFORM = {"id": Doubled.id}
QUANTIZE = {"id": Coarse.id, "step": STEP}


def lossy(**settings: Any) -> kvcellar.Recipe:
    """Predicted from the group before, rounded to STEP."""
    stages_ = {"predict": PREDICT, "quantize": QUANTIZE, "symbols": {"id": Integers.id}}
    return kvcellar.Recipe(**{"name": "toy", **stages_, **settings})


def exact(**settings: Any) -> kvcellar.Recipe:
    """Predicted from the group before, bit-exact."""
    return kvcellar.Recipe(
        **{"name": "toy exact", "predict": PREDICT, "symbols": {"id": "byteplanes-zstd/1"}, **settings}
    )
