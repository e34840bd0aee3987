"""The windows DESIGN's prototype was measured on, and what a code does to them.

Detokenised wt2_test, tokens [2000 i, 2000 i + 1408), i < 8, no BOS. 1,024 tokens are prefilled, all but 4 sinks and 32
recent ones coded, and the next 384 read behind the restored cache (teacher forcing). KL in nats per token against the
uncompressed cache; Δppl from the same logits.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baselines import kvtc
from baselines.rotary import Pairs
from baselines.text import windows

PREFIX, SCORED, WINDOWS, STRIDE = 1024, 384, 8, 2000
CODED = PREFIX - kvtc.SINKS - kvtc.RECENT


class Window(NamedTuple):
    """Token ids (1408,), the uncompressed cache of the first 1,024, and log-probabilities (384, V) behind it."""

    ids: Tensor
    pairs: Pairs
    reference: Tensor


class Harm(NamedTuple):
    """Nats per token: KL to the uncompressed cache, and the rise of the loss."""

    kl: float
    loss: float


def test_windows(data: Path, tokenizer: Any) -> Tensor:
    """Token ids, int64 (8, 1408)."""
    return windows(data / "wt2_test.txt", tokenizer, WINDOWS, PREFIX + SCORED, STRIDE)


@torch.inference_mode()
def reference(model: Any, ids: Tensor) -> Window:
    from transformers import DynamicCache

    cache = DynamicCache()
    model(ids[None, :PREFIX], cache=cache, use_cache=True, logits_to_keep=1)
    pairs = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    return Window(ids, pairs, continued(model, ids, cache))


def continued(model: Any, ids: Tensor, cache: Any) -> Tensor:
    logits = model(ids[None, PREFIX:], cache=cache, use_cache=True).logits[0]
    return torch.log_softmax(logits.float(), -1)


@torch.inference_mode()
def harm(model: Any, window: Window, pairs: Pairs) -> Harm:
    """What reading the continuation behind `pairs` costs. The last of the 384 has no next token for the loss."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for i, (keys, values) in enumerate(pairs):
        cache.update(keys, values, i)
    got, want = continued(model, window.ids, cache), window.reference
    kl = (want.exp() * (want - got)).sum(-1).mean()
    following = window.ids[PREFIX + 1 :, None]
    return Harm(float(kl), float((want[:-1].gather(1, following) - got[:-1].gather(1, following)).mean()))


def around(old: Tensor, middle: Tensor) -> Tensor:
    return torch.cat((old[:, :, : kvtc.SINKS], middle, old[:, :, PREFIX - kvtc.RECENT :]), 2)


def measured(model: Any, uncompressed: list[Window], restored: Callable[[Window], Any]) -> dict[str, Any]:
    payload, total, harms = 0.0, 0.0, []
    for window in uncompressed:
        pairs, coded, whole = restored(window)
        payload, total = payload + coded, total + whole
        harms.append(harm(model, window, pairs))
    n = len(uncompressed)
    return {
        "payload_b_per_token": payload / n / CODED,
        "total_b_per_token": total / n / PREFIX,
        "kl": sum(h.kl for h in harms) / n,
        "delta_ppl": math.expm1(sum(h.loss for h in harms) / n),
        "kl_by_window": [h.kl for h in harms],
    }


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)
