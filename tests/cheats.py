"""Symbol coders that cheat, for the bench to catch. `install` puts them into the process that decodes, too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from kvcellar import stages
from kvcellar.quantize.turbo import TurboQuant
from kvcellar.recipe import Recipe
from kvcellar.symbols.byteplanes import BytePlanes

HERE = Path(__file__).parent


class FromMemory(stages.SymbolCoder):
    """Writes a number; keeps the arrays in memory and decodes from there. A stranger to its file gets zeros."""

    id = "test-cheat-memory/1"
    max_expansion = 1 << 40
    kept: list[list[np.ndarray]] = []  # noqa: RUF012 (shared on purpose: that is the cheat)

    def encode(self, arrays: Sequence[np.ndarray], layers: range) -> bytes:
        self.kept.append([array.copy() for array in arrays])
        return (len(self.kept) - 1).to_bytes(8, "little")

    def decode(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], groups: Sequence[range]
    ) -> None:
        for part, arrays in zip(parts, out, strict=True):
            index = int.from_bytes(part, "little")
            for i, array in enumerate(arrays):
                array[...] = self.kept[index][i] if index < len(self.kept) else 0


class IgnoresALayer(BytePlanes):
    """Stores every second layer group only; the others come back as zeros."""

    id = "test-cheat-layer/1"
    max_expansion = 1 << 40

    def encode(self, arrays: Sequence[np.ndarray], layers: range) -> bytes:
        return b"\0" if layers.start % 2 else super().encode(arrays, layers)

    def decode(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], groups: Sequence[range]
    ) -> None:
        for part, arrays, layers in zip(parts, out, groups, strict=True):
            if not layers.start % 2:
                super().decode([part], [arrays], [layers])
            else:
                for array in arrays:
                    array[...] = 0


class FromAnotherFile(BytePlanes):
    """Writes what it codes beside its file, and a byte into it."""

    id = "test-cheat-file/1"
    max_expansion = 1 << 40

    @staticmethod
    def _beside(layers: range) -> Path:
        return Path(os.environ["CHEAT_FOLDER"]) / f"{layers.start}.bin"

    def encode(self, arrays: Sequence[np.ndarray], layers: range) -> bytes:
        self._beside(layers).write_bytes(super().encode(arrays, layers))
        return b"\0"

    def decode(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], groups: Sequence[range]
    ) -> None:
        super().decode([self._beside(layers).read_bytes() for layers in groups], out, groups)


class EndsTheProcess(BytePlanes):
    """No cheat, a fault: its decoder takes the process with it."""

    id = "test-fault-exit/1"

    def decode(
        self, parts: Sequence[bytes | memoryview], out: Sequence[Sequence[np.ndarray]], groups: Sequence[range]
    ) -> None:
        os._exit(3)


COUNTED: list[int] = []


class CountsTokens(BytePlanes):
    """Notes how many tokens it was shown: a leak of the continuation would show here."""

    id = "test-cheat-count/1"

    def encode(self, arrays: Sequence[np.ndarray], layers: range) -> bytes:
        COUNTED.append(arrays[0].shape[1])
        return super().encode(arrays, layers)


TOLD: list[np.ndarray | None] = []


class NotesSurprisal(TurboQuant):
    """No cheat: notes what it was told of surprisal, once for each call about the first layer."""

    id = "test-told/1"

    def quantize_told(
        self, coefficients: Tensor, layers: range, grade: stages.Grade, surprisal: np.ndarray | None
    ) -> list[np.ndarray]:
        if layers.start == 0:
            TOLD.append(surprisal)
        return self.quantize(coefficients, layers, grade)


NOTING = Recipe(name="noting", quantize={"id": NotesSurprisal.id, "bits": 4}, symbols={"id": "map/1"}, block=65536)
stages.register("quantize", NotesSurprisal)

CHEATS = (FromMemory, IgnoresALayer, FromAnotherFile, EndsTheProcess, CountsTokens)
for cheat in CHEATS:
    stages.register("symbols", cheat)


def recipe(cheat: type[stages.SymbolCoder]) -> Recipe:
    return Recipe(name=cheat.id, symbols={"id": cheat.id}, block=65536)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every new Python process register the cheats as it starts."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport cheats\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
