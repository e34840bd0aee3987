"""Grouped KLT with one step size: the transform coder of DESIGN's prototype, its rate counted as ideal entropy.

Keys before RoPE and values of `group` layers form one vector of a token; its KLT (PCA, mean removed) is fitted once on
calibration text. All coefficients of all groups share one step Δ, which is reverse water-filling at high rate: a
coefficient whose calibrated variance is under (Δ/2)² is dropped and costs nothing, the others are rounded,
q = sign(c)·⌊|c|/Δ + 1 − z⌋ with dead zone z (0.5 is plain rounding), and restored as q·Δ.
Rate: −log2 of a static table per coefficient, counted on calibration data with one half added to each of the 2·60 + 1
symbols and to an escape; |q| > 60 costs the escape, a sign and 2·⌊log2(|q| − 60)⌋ + 1 bits (Elias gamma).
Source: textbook transform coding (Goyal 2001), parameters from DESIGN. No bytes are made: a measure, not a file format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CLAMP = 60
_SYMBOLS = 2 * CLAMP + 2  # −60…60 and the escape
_PIECE = 256  # coefficients whose counts are made at a time


@dataclass(frozen=True)
class GroupedKLT:
    """Per group of layers: mean (P,), orthonormal basis (P, P) with columns of falling variance, variances (P,)."""

    means: list[Tensor]
    bases: list[Tensor]
    variances: list[Tensor]
    training: list[Tensor]  # coefficients (N, P) of the calibration tokens, for the tables of any step
    shape: tuple[int, int, int]  # layers, KV heads, width


@dataclass(frozen=True)
class Step:
    """What one step size needs beside the bases: how many coefficients are kept per group, and their code lengths."""

    size: float
    dead_zone: float
    kept: list[int]
    bits: list[Tensor]  # (kept, 122) each


@dataclass(frozen=True)
class Measured:
    """Restored pre-RoPE keys and values, float32 (T, L·H·D) each, and the ideal bits of the coded tokens."""

    keys: Tensor
    values: Tensor
    bits: float


def fit(keys: Tensor, values: Tensor, shape: tuple[int, int, int], group: int = 5) -> GroupedKLT:
    """KLT per group of layers from pre-RoPE keys and values, float32 (N, L·H·D)."""
    means, bases, variances, training = [], [], [], []
    for x in _split(keys, values, shape, group):
        mean = x.mean(0)
        centred = x - mean
        variance, basis = principal(centred.T @ centred / len(centred))
        means.append(mean)
        bases.append(basis)
        variances.append(variance)
        training.append(centred @ basis)
    return GroupedKLT(means, bases, variances, training, shape)


def principal(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Variances (P,), falling, and eigenvectors (P, P) of a covariance (P, P)."""
    variance, basis = torch.linalg.eigh(covariance)
    return variance.flip(0).clamp(min=0), basis.flip(1).contiguous()


def fit_step(klt: GroupedKLT, size: float, dead_zone: float = 0.5) -> Step:
    """Tables of the step `size`, counted on the calibration tokens."""
    kept, bits = [], []
    for variance, training in zip(klt.variances, klt.training, strict=True):
        n = int((variance > (size / 2) ** 2).sum())
        kept.append(n)
        bits.append(_code_lengths(_rounded(training[:, :n], size, dead_zone)))
    return Step(size, dead_zone, kept, bits)


def measure(klt: GroupedKLT, step: Step, keys: Tensor, values: Tensor) -> Measured:
    """What `step` makes of the tokens with pre-RoPE keys and values float32 (T, L·H·D), and their ideal bits."""
    group = klt.shape[0] // len(klt.bases)
    total, rebuilt = 0.0, []
    for i, x in enumerate(_split(keys, values, klt.shape, group)):
        basis = klt.bases[i][:, : step.kept[i]]
        q = _rounded((x - klt.means[i]) @ basis, step.size, step.dead_zone)
        total += _cost(q, step.bits[i])
        rebuilt.append(klt.means[i] + (q * step.size) @ basis.T)
    half = rebuilt[0].shape[1] // 2
    return Measured(torch.cat([x[:, :half] for x in rebuilt], 1), torch.cat([x[:, half:] for x in rebuilt], 1), total)


def _split(keys: Tensor, values: Tensor, shape: tuple[int, int, int], group: int) -> list[Tensor]:
    count, heads, width = shape
    if count % group:
        raise ValueError(f"{count} layers do not divide into groups of {group}")
    size = group * heads * width
    return [torch.cat(sides, 1) for sides in zip(keys.split(size, 1), values.split(size, 1), strict=True)]


def _rounded(coefficients: Tensor, size: float, dead_zone: float) -> Tensor:
    return coefficients.sign() * (coefficients.abs() / size + (1 - dead_zone)).floor()


def _symbols(q: Tensor) -> Tensor:
    """−60…60 as 0…120 and everything beyond as 121, int64."""
    return torch.where(q.abs() > CLAMP, torch.tensor(float(_SYMBOLS - 1)), q + CLAMP).long()


def _code_lengths(q: Tensor) -> Tensor:
    """Bits of each symbol per coefficient, (P, 122), from symbols q (N, P)."""
    tables = []
    for piece in q.split(_PIECE, 1):
        n = piece.shape[1]
        flat = _symbols(piece) + torch.arange(n) * _SYMBOLS
        counts = torch.bincount(flat.reshape(-1), minlength=n * _SYMBOLS).reshape(n, _SYMBOLS) + 0.5
        tables.append(-(counts / counts.sum(1, keepdim=True)).log2())
    return torch.cat(tables) if tables else torch.zeros(0, _SYMBOLS)


def _cost(q: Tensor, bits: Tensor) -> float:
    symbols = _symbols(q)
    coded = bits.gather(1, symbols.T).sum(dtype=torch.float64)
    beyond = q.abs()[q.abs() > CLAMP] - CLAMP
    return float(coded + (2 * beyond.log2().floor() + 2).sum(dtype=torch.float64))
