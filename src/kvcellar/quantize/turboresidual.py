"""`turbo-residual/1`: TurboQuant on what a prediction leaves, with bits by surprisal.

The stack of "Sequential KV Cache Compression via Probabilistic Language Tries" (Magarshak 2026, arXiv 2604.15356) ends
in a per-vector quantizer whose bits follow the token's surprisal h_i: b_i = max(1, ⌊b0·h_i/h̄⌋). Behind `klt/1` a
group's residual is a row of coefficients in which errors cost alike. They are cut into *bands* of like variance; each
is a vector for TurboQuant (arXiv 2504.19874): an energy, a random rotation (`rotation.py`), and Lloyd–Max levels of b
bits for every coordinate (`lloydmax.py`). `allocation` says where b comes from, with r = h_i/h̄ and Δ the `step`:

- "uniform": max(`least`, ⌊`bits`·r⌋ in every band. With `least` 1 it is the published rule.
- "variance": max(`least`, ⌊β·r⌋), β from the band's calibrated variance v by reverse water-filling, ½·log2(v/Δ²) in
  quarters of a bit. With r = 1 it is plain water-filling.
- "energy": from the band's own energy in this token: bit by bit as long as one more saves Δ² or more per coordinate.
  Asks for no surprisal. Ours.
- "both": as "energy", the token's Δ² being less by a factor of 2 for every doubling of r, at most 4 either way. Ours.

`least` 0 lets a band have no bits, which the published rule does not: one bit for every number is already more than
`cellar` takes for the whole token. h̄ is the setting `mean_surprisal`, not the mean of the text at hand, which is known
only once the text has ended: bulk and append would not agree. Where no surprisal is known r = 1.

What decides bits stands in the stream as integers (exactness rule D1): r in eighths, by token, and each band's energy
e = ⌊log2(mean square/Δ²)⌉. Coordinates are divided by 2^(e/2)·Δ, so rounding e costs no gain error, only levels that
are a little too wide or too narrow. A code is a level's number counted from the middle, …, −2, −1, 1, 2, …, and 0 where
there are no bits. What we differ in besides: no outlier slots and no stretched levels, which `turbo/1` has.

Fine tokens are coded as by `deadzone/1`. Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from ..errors import DamagedArchive, InvalidRecipe, ProfileMismatch
from ..geometry import Geometry
from ..profile import Profile
from ..stages import Grade, Quantizer
from .deadzone import MOST, DeadZone
from .lloydmax import boundaries, levels
from .rotation import rotation

ALLOCATIONS = ("uniform", "variance", "energy", "both")
TILT = 2  # the most by which log2 r counts
MAX_BITS = 8
EIGHTHS = 8  # of r that a symbol counts
MAX_RATIO = 63
LARGEST = np.float32(2.0**47)  # of Δ
ENERGIES = (-48, 94)
NARROWEST, GAUSSIAN = 4, 256  # width of the first band; width at which a coordinate is as good as Gaussian
# What b bits leave of a Gaussian's variance (Max 1960), in units of 2⁻²⁴.
LEFT = (16777216, 6096682, 1970987, 579513, 159327, 41927, 10805, 2743, 692)


class Band(NamedTuple):
    """`width` coefficients from `start` on, their codes from column `code` on, and bits in quarters at r = 1."""

    start: int
    width: int
    code: int
    quarters: int


class TurboResidual(Quantizer):
    id = "turbo-residual/1"
    needs_profile = True

    def __init__(
        self,
        *,
        step: float,
        allocation: str = "variance",
        bits: int = 2,
        least: int = 0,
        mean_surprisal: float = 4.0,
        band: int = 32,
        seed: int = 0,
        fine_step: float = 0.002,
        keep: float = 0.0005,
    ):
        if allocation not in ALLOCATIONS:
            raise InvalidRecipe(f"allocation {allocation!r}; expected one of {', '.join(ALLOCATIONS)}")
        for name, number, low, most in (
            ("bits", bits, 1, MAX_BITS),
            ("least", least, 0, 1),
            ("band", band, NARROWEST, 256),
            ("seed", seed, 0, (1 << 32) - 1),
        ):
            if type(number) is not int or not low <= number <= most:
                raise InvalidRecipe(f"{name} {number!r}; expected a whole number from {low} to {most}")
        if type(mean_surprisal) not in (int, float) or not 1e-3 <= mean_surprisal <= 64:
            raise InvalidRecipe(f"mean_surprisal {mean_surprisal!r}; expected bits from 0.001 to 64")
        self.fine = DeadZone(step=step, fine_step=fine_step, keep=keep)
        self.step, self.keep = float(step), float(keep)
        self.allocation, self.bits, self.least, self.width, self.seed = allocation, bits, least, band, seed
        self.mean_surprisal = float(mean_surprisal)

    def fit_settings(self) -> Mapping[str, object]:
        """Reads what `deadzone/1` reads, so a profile for one serves the other."""
        return {"id": DeadZone.id}

    def bind(self, geometry: Geometry, profile: Profile | None) -> None:
        """Needs what `deadzone/1` needs. Raises ProfileMissing, ProfileMismatch."""
        self.fine.bind(geometry, profile)
        self.bands = {first: self._cut(variance) for first, variance in self.fine.variances.items()}

    def layout(self, layers: range, grade: Grade) -> list[tuple[int, type[np.generic]]]:
        """r in eighths (1); then of coarse tokens n (1), the bands' energies and their codes, of fine ones as
        deadzone/1."""
        first: list[tuple[int, type[np.generic]]] = [(1, np.uint8)]
        if grade is Grade.FINE:
            return first + list(self.fine.layout(layers, grade))
        bands = self._bands(layers)
        return [*first, (1, np.int16), (len(bands), np.int16), (sum(band.width for band in bands), np.int16)]

    def quantize(
        self, coefficients: Float32[Tensor, "tokens coefficients"], layers: range, grade: Grade
    ) -> list[np.ndarray]:
        return self.quantize_told(coefficients, layers, grade, None)

    def quantize_told(
        self,
        coefficients: Float32[Tensor, "tokens coefficients"],
        layers: range,
        grade: Grade,
        surprisal: np.ndarray | None,
    ) -> list[np.ndarray]:
        ratios = self._ratios(surprisal, len(coefficients))
        if grade is Grade.FINE:
            return [ratios, *self.fine.quantize(coefficients, layers, grade)]
        x, bands = coefficients.numpy(), self._bands(layers)
        silent = -TILT if self.allocation == "both" else 0
        whole = np.rint(x[:, :1]).clip(-MOST, MOST).astype(np.int16)
        energies = np.empty((len(x), len(bands)), np.int16)
        codes = np.zeros((len(x), sum(band.width for band in bands)), np.int16)
        for k, band in enumerate(bands):
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                vectors = x[:, 1 + band.start : 1 + band.start + band.width] / np.float32(self.step)
                vectors = np.nan_to_num(vectors, nan=0.0).clip(-LARGEST, LARGEST)
                mean = np.square(vectors, dtype=np.float64).mean(axis=1)
                energies[:, k] = np.rint(np.log2(mean)).clip(*ENERGIES).astype(np.int16)
            if self.allocation in ("energy", "both"):
                energies[:, k] = energies[:, k].clip(silent)  # below, none has bits
            turned = vectors @ rotation(band.width, self.seed)
            turned /= np.exp2(energies[:, k] / np.float32(2), dtype=np.float32)[:, None]
            bits, at = self._bits(band, ratios[:, 0], energies[:, k]), slice(band.code, band.code + band.width)
            energies[bits == 0, k] = silent  # nobody asks: one symbol for all
            for b in np.unique(bits[bits > 0]):
                rows = bits == b
                number = np.searchsorted(boundaries(levels(GAUSSIAN, int(b))), turned[rows]) - (1 << (int(b) - 1))
                codes[rows, at] = number + (number >= 0)
        return [ratios, whole, energies, codes]

    def dequantize(
        self, symbols: Sequence[np.ndarray], layers: range, grade: Grade
    ) -> Float32[Tensor, "tokens coefficients"]:
        ratios = symbols[0]
        _require_within("surprisal ratio", ratios, 0, MAX_RATIO)
        if grade is Grade.FINE:
            return self.fine.dequantize(symbols[1:], layers, grade)
        _, whole, energies, codes = symbols
        _require_within("exponent", whole, -MOST, MOST)
        _require_within("energy", energies, *ENERGIES)
        x = np.zeros((len(whole), 1 + len(self.fine.variances[layers.start])), np.float32)
        x[:, :1] = whole
        for k, band in enumerate(self._bands(layers)):
            bits = self._bits(band, ratios[:, 0], energies[:, k])
            written = codes[:, band.code : band.code + band.width]
            half = np.where(bits > 0, 1 << np.maximum(bits - 1, 0), 0)[:, None]
            if (np.abs(written.astype(np.int32)) > half).any() or ((written == 0) & (half > 0)).any():
                raise DamagedArchive("block part", f"a code that {int(bits.max(initial=0))} bits or fewer cannot be")
            turned = np.zeros(written.shape, np.float32)
            for b in np.unique(bits[bits > 0]):
                rows = bits == b
                number = written[rows] - (written[rows] > 0) + (1 << (int(b) - 1))
                turned[rows] = levels(GAUSSIAN, int(b))[number]
            gains = np.exp2(energies[:, k] / np.float32(2), dtype=np.float32) * np.float32(self.step)
            back = turned * gains[:, None] @ rotation(band.width, self.seed).T
            x[:, 1 + band.start : 1 + band.start + band.width] = back
        return torch.from_numpy(x)

    def surprisal(self, symbols: Sequence[np.ndarray]) -> np.ndarray:
        """Bits (T,), as far as the stream knows them."""
        known: np.ndarray = symbols[0][:, 0].astype(np.float64) * (self.mean_surprisal / EIGHTHS)
        return known

    def _ratios(self, surprisal: np.ndarray | None, tokens: int) -> UInt8[np.ndarray, "tokens 1"]:
        if surprisal is None:
            return np.full((tokens, 1), EIGHTHS, np.uint8)
        given = np.where(np.isnan(surprisal), self.mean_surprisal, surprisal)
        ratios: np.ndarray = np.rint(given / self.mean_surprisal * EIGHTHS).clip(0, MAX_RATIO).astype(np.uint8)
        return ratios[:, None]

    def _bits(self, band: Band, ratios: np.ndarray, energies: np.ndarray) -> np.ndarray:
        """int64 (T,) bits a coordinate; integers alone decide."""
        if self.allocation in ("energy", "both"):
            tilt = _TILT_OF_RATIO[ratios] if self.allocation == "both" else np.int64(0)
            found: np.ndarray = _BITS_OF_ENERGY[np.clip(energies + tilt, *ENERGIES) - ENERGIES[0]]
            return found
        wanted = band.quarters * ratios.astype(np.int64) // (4 * EIGHTHS)
        return wanted.clip(self.least, MAX_BITS)

    def _cut(self, variance: np.ndarray) -> list[Band]:
        """The bands that are kept: width 4 and then as wide as all before together, up to `band`."""
        found, start, code = list[Band](), 0, 0
        while start < len(variance):
            width = min(self.width, max(NARROWEST, 1 << (start.bit_length() - 1)) if start else NARROWEST)
            width = min(width, len(variance) - start)
            mean = float(variance[start : start + width].mean())
            if mean >= self.keep * self.step**2:
                found.append(
                    Band(start, width, code, 4 * self.bits if self.allocation == "uniform" else self._of(mean))
                )
                code += width
            start += width
        return found

    def _of(self, variance: float) -> int:
        """½·log2(v/Δ²) in quarters of a bit, rounded down, at least 0, by comparing alone."""
        least, quarters = self.step**2, 0
        while quarters < 4 * MAX_BITS and variance >= least * _HALF_POWERS[quarters + 1]:
            quarters += 1
        return quarters

    def _bands(self, layers: range) -> list[Band]:
        if layers.start not in self.bands:
            raise ProfileMismatch(f"the profile has no transform.variance.{layers.start}")
        return self.bands[layers.start]


_HALF_POWERS = [2.0 ** (n // 2) * (1.4142135623730951 if n % 2 else 1.0) for n in range(4 * MAX_BITS + 1)]


def _bits_of_energy() -> np.ndarray:
    """For every energy e how many bits pay: the next one as long as it saves 1 of 2^e."""
    saved = [LEFT[b] - LEFT[b + 1] for b in range(MAX_BITS)]  # in 2⁻²⁴
    pays = [[e >= 0 and (s << e) >= 1 << 24 for s in saved] for e in range(ENERGIES[0], ENERGIES[1] + 1)]
    return np.array([sum(row) for row in pays], np.int64)


_BITS_OF_ENERGY = _bits_of_energy()
_TILT_OF_RATIO = np.array([n.bit_length() - EIGHTHS.bit_length() for n in range(MAX_RATIO + 1)]).clip(-TILT, TILT)


def _require_within(what: str, array: np.ndarray, least: int, most: int) -> None:
    if array.size and not least <= int(array.min()) <= int(array.max()) <= most:
        raise DamagedArchive("block part", f"{what} {int(array.min())} or {int(array.max())}; expected {least}…{most}")
