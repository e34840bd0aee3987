"""What KVTC learns from calibration text, once for all budgets: means, PCA bases, and what each width of bits leaves.

Windows are read one after the other: moments of pre-RoPE keys and of values are summed in float64 around the first
window's mean, and some thousand evenly spaced tokens are kept to measure quantization errors on. The tokens of a window
that would be kept exact, sinks and recent ones, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from .allocation import allocate, distortions
from .klt import principal
from .kvtc import RECENT, SINKS, State
from .rotary import frequencies, matrices

_SAMPLE = 4096  # at least so many tokens, if there are, measure errors; at most twice as many


@dataclass(frozen=True)
class Calibration:
    """Of keys, then of values: means (P,), bases (P, P), mean squared errors and best steps (P, 9) for 0…8 bits."""

    means: tuple[Tensor, ...]
    bases: tuple[Tensor, ...]
    errors: tuple[Tensor, ...]
    steps: tuple[Tensor, ...]
    inv_freq: Tensor
    shape: tuple[int, int, int]  # layers, KV heads, width
    tokens: int

    def state(self, budgets: list[int]) -> State:
        """State for `budgets` (bits per token before DEFLATE); components that none of them uses are not kept."""
        chosen = allocate(torch.cat(self.errors).double().numpy(), budgets)
        bits = {b: torch.from_numpy(widths) for b, widths in chosen.items()}
        step = torch.cat(self.steps)
        plans = {b: (w, step.gather(1, w.long()[:, None])[:, 0]) for b, w in bits.items()}
        whole = State(*_pairs(self.means, self.bases), self.inv_freq, self.shape, plans)
        return whole.only(budgets)

    def save(self, path: Path) -> None:
        named = {f"{n}.{i}": x.contiguous() for n in _NAMES for i, x in enumerate(getattr(self, n))}
        numbers = {"shape": torch.tensor(self.shape), "tokens": torch.tensor(self.tokens)}
        safetensors.torch.save_file({**named, **numbers, "inv_freq": self.inv_freq}, path)


_NAMES = ("means", "bases", "errors", "steps")


def load(path: Path) -> Calibration:
    """What `Calibration.save` wrote."""
    named = safetensors.torch.load_file(path)
    sides = [tuple(named[f"{n}.{i}"] for i in (0, 1)) for n in _NAMES]
    layers, heads, width = named["shape"].tolist()
    return Calibration(*sides, named["inv_freq"], (layers, heads, width), int(named["tokens"]))


def calibrated(model: Any, token_windows: Iterable[Tensor]) -> Calibration:
    """What windows, int64 (T,) each, teach when a Llama model reads them."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (config.num_hidden_layers, config.num_key_value_heads, width)
    return fitted(read(model, token_windows), frequencies(model), shape)


@torch.inference_mode()
def read(model: Any, token_windows: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pre-RoPE keys and values, float32 (n, L·H·D) each, of the tokens of each window that are coded."""
    from transformers import DynamicCache

    inv_freq = frequencies(model)
    for window in token_windows:
        cache = DynamicCache()
        model(window[None], cache=cache, use_cache=True, logits_to_keep=1)
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
        yield matrices(pairs, inv_freq, SINKS, len(window) - RECENT)


def fitted(parts: Iterable[tuple[Tensor, Tensor]], inv_freq: Tensor, shape: tuple[int, int, int]) -> Calibration:
    """The same from pre-RoPE keys and values, float32 (n, L·H·D) each, in parts."""
    size = shape[0] * shape[1] * shape[2]
    moments = (_Moments(size), _Moments(size))
    for pair in parts:
        for moment, x in zip(moments, pair, strict=True):
            moment.add(x)
    means, bases, errors, steps = zip(*(moment.fitted() for moment in moments), strict=True)
    return Calibration(means, bases, errors, steps, inv_freq, shape, moments[0].count)


class _Moments:
    """Count, sum and sum of squares of rows (n, P) around the first part's mean, and an even sample of the rows."""

    def __init__(self, size: int):
        self.count, self.stride = 0, 1
        self.origin: Tensor | None = None
        self.sum = torch.zeros(size, dtype=torch.float64)
        self.squares = torch.zeros(size, size, dtype=torch.float64)
        self.sample = torch.zeros(0, size)

    def add(self, x: Tensor) -> None:
        self.origin = x.mean(0) if self.origin is None else self.origin
        moved = x - self.origin
        self.sum += moved.sum(0, dtype=torch.float64)
        self.squares += moved.T @ moved
        self.sample = torch.cat((self.sample, x[-self.count % self.stride :: self.stride]))
        self.count += len(x)
        while len(self.sample) > 2 * _SAMPLE:
            self.sample, self.stride = self.sample[::2], 2 * self.stride

    def fitted(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean, basis, errors and steps."""
        if self.origin is None or self.count < 2:
            raise ValueError(f"{self.count} calibration tokens, expected more")
        offset = self.sum / self.count
        covariance = self.squares.div_(self.count).sub_(torch.outer(offset, offset))
        mean = (self.origin + offset).float()
        _, basis = principal(covariance.float())
        return mean, basis, *distortions((self.sample - mean) @ basis)


def _pairs(means: tuple[Tensor, ...], bases: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x for pair in zip(means, bases, strict=True) for x in pair)
