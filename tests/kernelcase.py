"""What lossy recipes make of one cache, written down by a process of its own threads and kernels.

    python kernelcase.py FOLDER OUT

FOLDER holds `ids` and layer sides in cache.npz and per recipe NAME.json, NAME.profile (where it has one) and NAME.kvc,
an archive that another process wrote. OUT gets, per recipe: the symbols and restored numbers of every token in both
grades, what NAME.kvc restores to, and an archive of its own with what that restores to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

import kvcellar
from kvcellar.cache import LayerKV
from kvcellar.pipeline import Arrays, Pipeline
from kvcellar.profile import Profile
from kvcellar.recipe import Recipe
from kvcellar.stages import Grade
from kvcellar.tokens import Tokens

NAMES = ("cellar", "fractal", "turbo-4", "sequential")
Coded = dict[Grade, tuple[list[Arrays], dict[int, LayerKV]]]


class Case:
    """One recipe on the cache of a folder."""

    def __init__(self, folder: Path, name: str):
        held = np.load(folder / "cache.npz")
        self.folder, self.name = folder, name
        self.tokens = Tokens.following(held["ids"], 0)
        sides = [torch.from_numpy(held[f"side.{i}"]) for i in range(len(held.files) - 1)]
        self.layers = [LayerKV(k, v) for k, v in zip(sides[::2], sides[1::2], strict=True)]
        profile = folder / f"{name}.profile"
        self.recipe = Recipe.from_json(json.loads((folder / f"{name}.json").read_text()))
        self.profile = Profile.unpack(profile.read_bytes()) if profile.exists() else None

    def pipeline(self) -> Pipeline:
        geometry = kvcellar.KVCache(tuple(self.layers)).geometry
        return Pipeline(self.recipe, geometry, self.profile)

    def coded(self) -> Coded:
        """Symbols and restored layers: of all tokens fine, and then coarse from what fine ones restore to."""
        pipeline = self.pipeline()
        fine = pipeline.quantize(self.layers, self.tokens, Grade.FINE, restore=True)
        return {Grade.FINE: fine, Grade.COARSE: pipeline.quantize(fine[1], self.tokens, Grade.COARSE, restore=True)}

    def save(self, path: Path) -> None:
        pairs = [(kv.keys[None], kv.values[None]) for kv in self.layers]
        kvcellar.save(path, pairs, tokens=self.tokens.ids, identity="m", recipe=self.recipe, profile=self.profile)

    def read(self, path: Path) -> list[LayerKV]:
        with kvcellar.open(path, identity="m", profile=self.profile) as archive:
            return [LayerKV(*archive.read(i, 0, len(archive))) for i in range(len(self.layers))]

    def said(self) -> dict[str, np.ndarray]:
        """Symbols and restored numbers of `coded`, by name."""
        found: dict[str, np.ndarray] = {}
        for grade, (symbols, restored) in self.coded().items():
            for g, arrays in enumerate(symbols):
                found |= {f"{grade}.symbols.{g}.{k}": array for k, array in enumerate(arrays)}
            found |= _named(f"{grade}.restored", list(restored.values()))
        return found

    def write(self, out: Path) -> None:
        """What OUT gets of this recipe."""
        found = self.said() | _named("read", self.read(self.folder / f"{self.name}.kvc"))
        self.save(out / f"{self.name}.kvc")
        found |= _named("own", self.read(out / f"{self.name}.kvc"))
        np.savez(out / f"{self.name}.npz", **found)  # type: ignore[arg-type]


def _named(prefix: str, layers: list[LayerKV]) -> dict[str, np.ndarray]:
    return {
        f"{prefix}.{i}.{side}": getattr(kv, side).numpy() for i, kv in enumerate(layers) for side in ("keys", "values")
    }


def layers_of(found: dict[str, np.ndarray], prefix: str, count: int) -> list[LayerKV]:
    """The inverse of what `write` keeps of restored layers."""
    sides = ("keys", "values")
    return [LayerKV(*(torch.from_numpy(found[f"{prefix}.{i}.{side}"]) for side in sides)) for i in range(count)]


if __name__ == "__main__":
    for each in NAMES:
        Case(Path(sys.argv[1]), each).write(Path(sys.argv[2]))
    print(torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())
