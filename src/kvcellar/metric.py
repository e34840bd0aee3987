"""What an error in a cached number costs: the Fisher metric of later tokens' loss, per layer, and which tokens matter.

For an error δ of one token's row [K before RoPE, V] of a layer, the divergence of later next-token distributions is
½ δᵀ F δ to second order, F = E[g gᵀ], g the gradient of their summed log-loss with labels drawn from the model itself
(Amari 1998). We differ from the usual estimate in whose loss counts: the cached prefix is a leaf, and only tokens
behind it, which read it *as stored*, send gradients, as after a restore. Heads that look at the last few tokens alone
then cost nothing, though they dominate the gradients of a plain forward.

A few tokens carry most of F (attention sinks in mid-text up to 400 times the average), and one F for all would be
theirs. So a token that stands out counts no more than `CLIP` median ones in F; the gradients themselves are kept
beside, and `transform/klt.py` learns from them which tokens are to be coded how much finer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from .errors import InvalidInput
from .rope import Rope

if TYPE_CHECKING:
    from .cache import KVCache
    from .calibrate import Calibration

PREFIX = 0.625  # of a window; the rest reads it
SINKS, RECENT = 4, 32  # tokens of the prefix that stay fine have no say
WINDOWS = range(10, 61)  # as many as the samples allow: one in `EVERY`
EVERY = 4
DRAWS = 2
CLIP = 4.0


class Window(NamedTuple):
    """A sample that was looked at: of its tokens `first`… the gradients by layer, float16 (draws, T, P) over `scale`.

    A row is [K before RoPE, V]; float16 would underflow without the scale, one number per layer.
    """

    sample: int
    first: int
    scaled: list[Tensor]
    scale: list[float]

    def rows(self, layer: int) -> Float32[Tensor, "draws tokens numbers"]:
        return self.scaled[layer].float() * self.scale[layer]


class Metric(NamedTuple):
    """F per layer float32 (P, P), and the windows it comes from."""

    layers: list[Tensor]
    windows: list[Window]


def loss_metric(calibration: Calibration, rope: Rope) -> Metric:
    """From gradients of some of the samples, kept for the next run. Raises InvalidInput without a model."""
    count, layers = len(calibration.samples), range(len(calibration.geometry))
    wanted = min(max(count // EVERY, WINDOWS.start), WINDOWS.stop - 1)
    chosen = sorted({i * count // wanted for i in range(wanted)})
    windows = []
    with calibration.progress("gradients", len(chosen)) as advance:
        for index in chosen:
            kept = calibration.kept(
                f"loss-gradients/1 {index} {PREFIX} {SINKS} {RECENT} {DRAWS}",
                lambda index=index: _of_window(calibration, index, rope),  # type: ignore[misc]
            )
            rows = [torch.from_numpy(kept[f"rows.{i}"]) for i in layers]
            windows.append(Window(index, SINKS, rows, kept["scale"].tolist()))
            advance(1)
    return Metric(
        [sum((_clipped(w.rows(i)) for w in windows), torch.zeros(())) / len(windows) for i in layers], windows
    )


def _clipped(rows: Tensor) -> Tensor:
    """E[g gᵀ] of one window and layer."""
    energy = rows.square().sum(dim=2)
    cap = (CLIP * energy.median(dim=1, keepdim=True).values).clamp(min=torch.finfo(torch.float32).tiny)
    flat = (rows * (energy / cap).clamp(min=1).rsqrt()[..., None]).flatten(0, 1)
    return flat.T @ flat / len(flat)


def _of_window(calibration: Calibration, index: int, rope: Rope) -> dict[str, np.ndarray]:
    """`rows.{layer}` and `scale` of one sample."""
    if calibration.model is None:
        raise InvalidInput("the loss metric comes from the model's gradients: calibrate with a model")
    sample = calibration.samples[index]
    prefix = int(len(sample.tokens) * PREFIX)
    if prefix <= SINKS + RECENT:
        raise InvalidInput(f"a window of {len(sample.tokens)} tokens is too short to see what later tokens read")
    ids = torch.from_numpy(np.asarray(sample.tokens, np.int64))[None]
    drawn = _gradients(calibration.model, ids, prefix, sample.load(), seed=index)
    positions = torch.arange(prefix)
    found: dict[str, np.ndarray] = {}
    scales = []
    for i in range(len(calibration.geometry)):
        sides = [rope.forward(list(g[2 * i : 2 * i + 2]), range(i, i + 1), positions) for g in drawn]
        rows = torch.stack(sides)[:, SINKS : prefix - RECENT]
        scales.append(max(float(rows.abs().max()) / 16384, torch.finfo(torch.float32).tiny))
        found[f"rows.{i}"] = (rows / scales[-1]).half().numpy()
    return {**found, "scale": np.array(scales, np.float64)}


def _gradients(model: Any, ids: Tensor, prefix: int, cache: KVCache, seed: int) -> list[list[Tensor]]:
    """For each draw dLoss/dK and dLoss/dV (H, prefix, D) of each layer; the loss is that of `ids` (1, T) behind."""
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(seed)
    wanted = [p for p in model.parameters() if p.requires_grad]
    leaves: list[Tensor] = []
    state = DynamicCache()
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            for i, kv in enumerate(cache.layers):
                sides = [side[None, :, :prefix].to(model.dtype).requires_grad_(True) for side in (kv.keys, kv.values)]
                state.update(*sides, i)
                leaves += sides
            logs = model(ids[:, prefix:], cache=state, use_cache=True).logits[0].float().log_softmax(dim=-1)
            draws = []
            for draw in range(DRAWS):
                labels = torch.multinomial(logs.detach().exp(), 1, generator=generator)
                again = draw + 1 < DRAWS
                draws.append(torch.autograd.grad(logs.gather(1, labels).sum(), leaves, retain_graph=again))
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
    return [[g[0].float() for g in drawn] for drawn in draws]


def root(
    metric: Float32[Tensor, "numbers numbers"], spread: Tensor, shrink: float
) -> Float32[Tensor, "numbers numbers"]:
    """A symmetric square root of `metric`, mixed with `shrink` of a metric in which each number of variance `spread`
    (numbers,) costs alike, so that no direction is free and none is trusted to be as dear as its few samples say."""
    share = metric.diagonal() @ spread
    plain = torch.diag(share / spread.clamp(min=spread.mean() * 1e-3) / len(spread))
    values, vectors = torch.linalg.eigh(((1 - shrink) * metric + shrink * plain).double())
    found: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return found.float()
