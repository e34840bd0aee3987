"""Codebooks of residual vector quantization as a profile holds them: where each side's are, read and checked.

With a fixed number of stages, `key.N` and `value.N` for layer N are float16 (H, S, E, D), or `key` and `value`
(1, S, E, D) for all. With a fitted split there are also `stages`, uint8, of every head of every layer's keys and then
values; `key.N` is (stages of all its heads, E, D), one head behind the other; `key.N.mean` (H, D) is what the entries
are added to, and `key.N.root` (H, D, D) what the encoder turns a vector with, so that the nearest sum costs least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..errors import ProfileMismatch
from ..geometry import Geometry, LayerGeometry, SideGeometry
from ..profile import Profile
from . import rvqkernels as kernels

KEY, VALUE = "key", "value"
BYTES_PER_STAGE = 1024  # of a layer's stored numbers, at most: a pipeline refuses to make more from a byte


class Side(NamedTuple):
    """Keys or values of a layer in a group: where their numbers and their codes start, and the stages of each head."""

    layer: int
    name: str
    shape: SideGeometry
    counts: tuple[int, ...]
    column: int
    code_column: int


@dataclass(frozen=True)
class Books:
    """float32 entries (N, E, D); int64 (H), where each head's codebooks start among the N and how many they are; what
    entries are added to (H, D); and what the encoder turns vectors with (H, D, D), or (0, D, D)."""

    entries: np.ndarray
    first: np.ndarray
    count: np.ndarray
    bases: np.ndarray
    roots: np.ndarray

    @cached_property
    def turned(self) -> tuple[np.ndarray, np.ndarray]:
        """Entries in columns (N, D, E), turned, and half of every such entry's square (N, E): only encoders need it."""
        rows = self.entries
        if len(self.roots):
            rows = np.empty_like(rows)
            kernels.rvq_turn(self.entries, self.first, self.count, self.roots, rows)
        halves = ((rows.astype(np.float64) ** 2).sum(2) / 2).astype(np.float32)
        return np.ascontiguousarray(rows.transpose(0, 2, 1)), halves


def shapes(layer: LayerGeometry) -> Sequence[tuple[str, SideGeometry]]:
    """The sides that hold numbers."""
    return [(name, side) for name, side in ((KEY, layer.key), (VALUE, layer.value)) if side.width]


def total_stages(geometry: Geometry, stages: int) -> int:
    """Of all heads together: `stages` for each pair of a key and a value head."""
    return stages * sum(max(side.heads for _, side in shapes(layer)) for layer in geometry.layers if shapes(layer))


def least_stages(layer: LayerGeometry) -> int:
    """Of all heads of a layer together, so that no part restores without end from next to nothing."""
    return max(1, -(-layer.bytes_per_token // BYTES_PER_STAGE))


def counted(profile: Profile, geometry: Geometry, stages: int, most: int) -> Mapping[tuple[int, str], tuple[int, ...]]:
    """The stages of each head, by layer and side. Raises ProfileMismatch."""
    counts = _tensor(profile, "stages")
    sides = [(i, name, side.heads) for i, layer in enumerate(geometry.layers) for name, side in shapes(layer)]
    if counts.dtype != np.uint8 or counts.shape != (sum(heads for *_, heads in sides),) or (counts > most).any():
        raise ProfileMismatch(
            f"quantize.stages is {counts.dtype} {counts.shape}; expected uint8 to {most}, one for each head"
        )
    if (total := int(counts.sum(dtype=np.int64))) != (expected := total_stages(geometry, stages)):
        raise ProfileMismatch(f"quantize.stages are {total} together; expected {expected}")
    found: dict[tuple[int, str], tuple[int, ...]] = {}
    at = 0
    for i, name, heads in sides:
        found[i, name] = tuple(map(int, counts[at : at + heads]))
        at += heads
    for i, layer in enumerate(geometry.layers):
        here = sum(sum(found[i, name]) for name, _ in shapes(layer))
        if shapes(layer) and here < least_stages(layer):
            raise ProfileMismatch(f"quantize.stages of layer {i} are {here}; expected {least_stages(layer)} or more")
    return found


def read_split(profile: Profile, name: str, side: Side, entries: int) -> Books:
    """Codebooks of a side whose heads have stages of their own. Raises ProfileMismatch."""
    heads, width, count = side.shape.heads, side.shape.width, np.array(side.counts, np.int64)
    books = _floats(profile, name, (int(count.sum()), entries, width))
    bases = _floats(profile, f"{name}.mean", (heads, width))
    roots = _floats(profile, f"{name}.root", (heads, width, width))
    return Books(books, np.cumsum(count) - count, count, bases, roots)


def read_fixed(profile: Profile, name: str, sides: Sequence[Side], entries: int, *, pooled: bool) -> Books:
    """Codebooks of heads that have equally many stages, shared by `sides`. Raises ProfileMismatch."""
    heads, width, stages = max(side.shape.heads for side in sides), sides[0].shape.width, sides[0].counts[0]
    for side in sides:
        books = _floats(profile, name, (1 if pooled else heads, stages, entries, side.shape.width))
    first = np.arange(heads, dtype=np.int64) * (0 if pooled else stages)
    nothing = np.zeros((heads, width), np.float32), np.empty((0, width, width), np.float32)
    return Books(books.reshape(-1, entries, width), first, np.full(heads, stages, np.int64), *nothing)


def _tensor(profile: Profile, name: str) -> np.ndarray:
    if (tensor := profile.tensors.get(f"quantize.{name}")) is None:
        raise ProfileMismatch(f"the profile has no quantize.{name}: it was made for another recipe")
    return np.asarray(tensor)


def _floats(profile: Profile, name: str, shape: tuple[int, ...]) -> np.ndarray:
    tensor = _tensor(profile, name)
    if tensor.dtype.name != "float16" or tensor.shape != shape or not np.isfinite(tensor).all():
        raise ProfileMismatch(f"quantize.{name} is {tensor.dtype} {tensor.shape}; expected finite float16 {shape}")
    return np.ascontiguousarray(tensor, np.float32)
