"""Residual vector quantization: a head's vector as the sum of one entry from each of a row of codebooks.

VQ of whole key and value vectors with more stages for keys than for values is the quantizer of the fractal archive
(arXiv 2607.07144); residual stages go back to Juang & Gray (1982). Keys come without their rotary turn where a
transform takes it off. What we do differently: with `stages`, calibration finds out how many each head's keys and
values need, and fits entries to what their errors cost (`rvqsplit.py`); with a `beam`, several sums of entries stay in
the running while a vector is encoded, at no cost in bytes or in decoding; codebooks are float16 in the profile; fine
tokens, exact in the paper, are coded by TurboQuant with `fine_bits`, since a codebook cannot come that close.

`entries` and the stages set a vector's size: stages · log2(entries) bits. `stages` is how many a head's key and value
have together, on average over heads and layers. Without it, every head has `key_stages` and `value_stages`: of 0
stages, a side is restored as zeros; with null instead of a number it stays as fine as fine tokens are; `pooled` shares
one row of codebooks among all heads of all layers, for keys and for values.

Encoding sums in a fixed order (`kernels.py`): codes do not depend on the machine or on how many tokens come at once.
Tried on: CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from ..errors import DamagedArchive, InvalidInput, InvalidRecipe, ProfileMissing, UnsupportedCache
from ..geometry import Geometry
from ..placing import Angles, fits, unturned, words
from ..profile import Profile
from ..stages import Grade, Quantizer
from . import rvqkernels as kernels
from .codebooks import Residuals, Vectors, fit_stage
from .rvqbooks import KEY, VALUE, Books, Side, counted, read_fixed, read_split, shapes
from .rvqsplit import fit_split
from .turbo import TurboQuant

if TYPE_CHECKING:
    from ..calibrate import Calibration

MAX_STAGES, MAX_ENTRIES, MAX_BEAM = 16, 65536, 64
VECTORS_PER_ENTRY = 96  # that a codebook is fitted on, at most; of pooled ones, five times as many
POOLED = 5


class ResidualVQ(Quantizer):
    id = "rvq/1"
    needs_profile = True

    def __init__(
        self,
        *,
        stages: int | None = None,
        entries: int = 256,
        pooled: bool = False,
        fine_bits: int = 8,
        beam: int = 1,
        **split: int | None,
    ):
        self.refuse_unknown(
            {name: value for name, value in split.items() if name not in ("key_stages", "value_stages")}
        )
        if stages is not None and (split or pooled):
            raise InvalidRecipe(f"stage {self.id!r} with stages {stages!r} finds the split between all heads by itself")
        of_side = {KEY: split.get("key_stages", 4), VALUE: split.get("value_stages", 2)}
        self.stages = {side: number for side, number in of_side.items() if number is not None}
        limits: dict[str, tuple[object, int, int]] = {"entries": (entries, 2, MAX_ENTRIES), "beam": (beam, 1, MAX_BEAM)}
        limits |= {f"{side}_stages": (number, 0, MAX_STAGES) for side, number in self.stages.items()}
        if stages is not None:
            limits["stages"] = stages, 1, 2 * MAX_STAGES
        for name, (number, least, most) in limits.items():
            if type(number) is not int or not least <= number <= most:
                raise InvalidRecipe(f"{name} {number!r}; expected a whole number from {least} to {most}")
        if type(pooled) is not bool:
            raise InvalidRecipe(f"pooled {pooled!r}; expected true or false")
        if not self.stages:
            raise InvalidRecipe(f"stage {self.id!r} with stages for neither keys nor values codes nothing")
        self.total, self.entries, self.pooled, self.beam = stages, entries, pooled, beam
        self.dtype: type[np.unsignedinteger] = np.uint8 if entries <= 256 else np.uint16
        self.fine = TurboQuant(bits=fine_bits, fine_bits=fine_bits)
        self.kept = TurboQuant(bits=fine_bits, fine_bits=fine_bits)
        self.kept.leaves = frozenset(self.stages)
        self._laid_out: dict[range, list[Side]] = {}

    def fit_settings(self) -> Mapping[str, object]:
        if self.total is not None:
            return {"stages": self.total, "entries": self.entries}
        split = {f"{side}_stages": self.stages.get(side) for side in (KEY, VALUE)}
        return {**split, "entries": self.entries, "pooled": self.pooled}

    def column(self, layers: range, layer: int, side: str, head: int, stage: int) -> tuple[int, int]:
        for each in self._sides(layers):
            if (each.layer, each.name) == (layer, side) and 0 <= head < each.shape.heads:
                if not 0 <= stage < (count := each.counts[head]):
                    raise InvalidInput(
                        f"no stage {stage} of layer {layer}, {side}, head {head}: it has {count} of them"
                    )
                return 0, each.code_column + sum(each.counts[:head]) + stage
        raise InvalidInput(f"no code of layer {layer}, {side}, head {head}, stage {stage} in layers {layers}")

    def layout(self, layers: range, grade: Grade) -> list[tuple[int, type[np.unsignedinteger]]]:
        """Coarse, one array: per layer keys, then values; per head its stages; behind it TurboQuant's for a side
        that has none. Fine, those of TurboQuant."""
        if grade is Grade.FINE:
            return self.fine.layout(layers, grade)
        columns = sum(sum(side.counts) for side in self._sides(layers))
        return [(columns, self.dtype), *self.kept.layout(layers, Grade.FINE)]

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        if profile is None:
            raise ProfileMissing(f"stage {self.id!r} needs a profile")
        self.geometry = geometry
        self.fine.bind(geometry, None)
        self.kept.bind(geometry, None)
        self.counts = self._fixed(geometry)
        if self.total is not None:
            self.counts = counted(profile, geometry, self.total, MAX_STAGES)
        self._laid_out = {}
        self.books: dict[str, Books] = {}
        for name, sides in self._shared().items():
            if self.total is not None:
                self.books[name] = read_split(profile, name, sides[0], self.entries)
            else:
                self.books[name] = read_fixed(profile, name, sides, self.entries, pooled=self.pooled)

    def quantize(
        self, coefficients: Float32[Tensor, "tokens coefficients"], layers: range, grade: Grade
    ) -> list[np.ndarray]:
        if grade is Grade.FINE:
            return self.fine.quantize(coefficients, layers, grade)
        x = coefficients.contiguous().numpy()
        (columns, _), *_ = self.layout(layers, grade)
        if x.shape[1] != sum(self.geometry.layers[i].numbers_per_token for i in layers):
            raise InvalidRecipe(f"stage {self.id!r} got {x.shape[1]} coefficients a token; its layers have others")
        codes = np.empty((len(x), columns), np.uint16)
        for side in self._sides(layers):
            books, heads = self.books[self._name(side)], side.shape.heads
            where = side.column, side.code_column, self.beam, books.first[:heads], books.count[:heads]
            kernels.rvq_encode(x, *where, books.bases, books.roots, *books.turned, codes)
        return [codes.astype(self.dtype), *self.kept.quantize(coefficients, layers, Grade.FINE)]

    def dequantize(
        self, symbols: Sequence[np.ndarray], layers: range, grade: Grade
    ) -> Float32[Tensor, "tokens coefficients"]:
        if grade is Grade.FINE:
            return self.fine.dequantize(symbols, layers, grade)
        codes = self._codes(symbols)
        x = self._unset(symbols[1:], len(codes), layers)
        for side in self._sides(layers):
            books, heads = self.books[self._name(side)], side.shape.heads
            where = side.code_column, books.first[:heads], books.count[:heads]
            kernels.rvq_decode(codes, *where, books.bases, books.entries, side.column, x)
        return torch.from_numpy(x)

    def dequantize_into(
        self,
        symbols: Sequence[np.ndarray],
        layers: range,
        grade: Grade,
        out: list[Tensor],
        turns: Sequence[Angles | None],
    ) -> bool:
        """Where both sides have codebooks and the cache has numbers of 16 bits."""
        sides = self._sides(layers)
        if grade is Grade.FINE or len(symbols) > 1 or len(sides) != len(out):
            return False
        codes = self._codes(symbols)
        if not all(fits(tensor, len(codes)) and tensor.dtype.itemsize == 2 for tensor in out):
            return False
        for side, tensor, turn in zip(sides, out, turns, strict=True):
            if tensor.numel():
                books, heads = self.books[self._name(side)], side.shape.heads
                where = side.code_column, books.first[:heads], books.count[:heads], books.bases, books.entries
                angles, strides = turn or unturned(len(codes)), (tensor.stride(0), tensor.stride(1))
                kernels.rvq_place_16(codes, *where, *angles, *strides, *words(tensor))
        return True

    def _codes(self, symbols: Sequence[np.ndarray]) -> np.ndarray:
        codes: np.ndarray = np.ascontiguousarray(symbols[0])
        if self.entries <= np.iinfo(codes.dtype).max and codes.size and int(codes.max()) >= self.entries:
            raise DamagedArchive("block part", f"code {int(codes.max())}; there are {self.entries} entries")
        return codes

    def _unset(self, kept: Sequence[np.ndarray], tokens: int, layers: range) -> np.ndarray:
        """Coefficients with those of sides without codebooks in their places, and nothing in the others."""
        if kept:
            return self.kept.dequantize(kept, layers, Grade.FINE).numpy()
        return np.empty((tokens, sum(self.geometry.layers[i].numbers_per_token for i in layers)), np.float32)

    def fit(self, calibration: Calibration, fitted: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Tensors as `rvqbooks.py` lists them.

        Raises InvalidInput for fewer vectors than entries, or without a model where the split is to be found;
        InvalidRecipe behind a transform other than rope/1; UnsupportedCache when layers of unequal widths are to share
        codebooks.
        """
        self.geometry = calibration.geometry
        vectors = Vectors(calibration, fitted)
        settings = {"id": self.id, "entries": self.entries, "pooled": self.pooled, "behind": vectors.behind}
        settings["vectors"] = VECTORS_PER_ENTRY
        if self.total is not None:
            most = VECTORS_PER_ENTRY * self.entries
            return fit_split(calibration, vectors, settings, self.total, self.entries, most, MAX_STAGES)
        self.counts, self._laid_out = self._fixed(self.geometry), {}
        parts = self._shared()
        found: dict[str, np.ndarray] = {}
        with calibration.progress("codebooks", sum(sides[0].counts[0] for sides in parts.values())) as advance:
            for name, sides in parts.items():
                residuals = Residuals(partial(self._sets, vectors, sides))
                first, sets = sides[0], 1 if self.pooled else sides[0].shape.heads
                books = np.empty((sets, 0, self.entries, first.shape.width), np.float16)
                for stage in range(first.counts[0]):  # each kept by itself: recipes of fewer stages share them
                    make = partial(self._next_books, residuals, books, first.layer)
                    new = calibration.kept(json.dumps([settings, name, stage]), make)["books"]
                    books = np.concatenate([books, new[:, None]], axis=1)
                    advance(1)
                found[name] = books
        return found

    def _sets(self, vectors: Vectors, sides: list[Side]) -> list[Tensor]:
        """The vectors of each head of `sides`, which gets codebooks of its own, or all that share them."""
        if len({side.shape.width for side in sides}) > 1:
            raise UnsupportedCache(f"the {sides[0].name}s of the layers differ in width: they cannot share codebooks")
        heads = [(side.layer, h) for side in sides for h in range(side.shape.heads)]
        most = VECTORS_PER_ENTRY * self.entries
        most = most * POOLED // len(heads) if self.pooled else most
        found = [vectors.of(layer, sides[0].name == KEY, h, most) for layer, h in heads]
        return [torch.cat(found)] if self.pooled else found

    def _next_books(self, residuals: Residuals, books: np.ndarray, layer: int) -> Mapping[str, np.ndarray]:
        seed = layer, books.shape[1]
        return {"books": np.stack([fit_stage(rest, self.entries, seed) for rest in residuals.after(books)])}

    def _fixed(self, geometry: Geometry) -> Mapping[tuple[int, str], tuple[int, ...]]:
        """The stages of each head, by layer and side, where all have equally many."""
        sides = ((i, *side) for i, layer in enumerate(geometry.layers) for side in shapes(layer))
        return {(i, name): (self.stages[name],) * side.heads for i, name, side in sides if name in self.stages}

    def _sides(self, layers: range) -> list[Side]:
        """The sides that hold numbers and have codebooks."""
        if (found := self._laid_out.get(layers)) is None:
            found = self._laid_out[layers] = list(self._laid(layers))
        return found

    def _laid(self, layers: range) -> Iterator[Side]:
        column = code_column = 0
        for i in layers:
            for name, shape in shapes(self.geometry.layers[i]):
                if counts := self.counts.get((i, name)):
                    yield Side(i, name, shape, counts, column, code_column)
                    code_column += sum(counts)
                column += shape.numbers_per_token

    def _shared(self) -> dict[str, list[Side]]:
        """The sides that have the same codebooks, by their name."""
        found: dict[str, list[Side]] = {}
        for each in self._sides(range(len(self.geometry))):
            found.setdefault(self._name(each), []).append(each)
        return found

    def _name(self, side: Side) -> str:
        return side.name if self.pooled else f"{side.name}.{side.layer}"
