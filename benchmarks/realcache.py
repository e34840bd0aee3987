"""A real cache: the demo model run over text that comes with Python, and how long that takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kvcellar
from common import interleaved, summary, timed

Pairs = list[tuple[Tensor, Tensor]]
_CHARACTERS_PER_TOKEN = 20  # more than any text has


def topics_text() -> str:
    """Python's own reference texts, sorted by topic."""
    return "\n".join(topics[name] for name in sorted(topics))


def topics_ids(folder: Path, tokens: int) -> Tensor:
    """The first `tokens` token ids of `topics_text`, int64 (1, T)."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(topics_text()[: tokens * _CHARACTERS_PER_TOKEN])["input_ids"]
    if len(ids) < tokens:
        raise SystemExit(f"the text has {len(ids)} tokens, {tokens} were asked for")
    return torch.tensor([ids[:tokens]])


def load(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def prefill(model: Any, ids: Tensor) -> Any:
    """The cache of `ids`, computed the fastest way there is: logits of the last token only."""
    from transformers import DynamicCache

    cache = DynamicCache()
    model(ids, cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def measured_prefill(folder: Path, ids: Tensor, repeats: int, patience: float) -> tuple[Pairs, dict[str, Any]]:
    """The bfloat16 cache as (keys, values) of shape (1, H, T, D), and the time of a prefill in each dtype."""
    figures: dict[str, Any] = {"threads": torch.get_num_threads()}
    pairs: Pairs = []
    for dtype in ("bfloat16", "float32"):
        model = load(folder, getattr(torch, dtype))
        turns = interleaved({"prefill": lambda model=model: prefill(model, ids)}, repeats, patience=patience)
        figures[dtype] = {**summary(turns.seconds["prefill"]), "noisy_rounds": turns.noisy}
        if dtype == "bfloat16":
            figures["identity"] = _measured_identity(model)
            pairs = [(_own(layer.keys), _own(layer.values)) for layer in prefill(model, ids).layers]
        del model
        gc.collect()
    figures["fastest_s"] = min(figures[dtype]["min_s"] for dtype in ("bfloat16", "float32"))
    return pairs, figures


def _own(x: Tensor) -> Tensor:
    """`x` in memory of its own, heads one after the other, as an ordinary tensor."""
    return x.clone(memory_format=torch.contiguous_format)


def _measured_identity(model: Any) -> dict[str, Any]:
    """What `model=` costs in `save` and `open` beyond `identity=`: the first time, and when the model is known."""
    from kvcellar.frontends.fingerprint import identity_of_model

    first = timed(lambda: identity_of_model(model))
    again = summary([timed(lambda: identity_of_model(model)) for _ in range(5)])
    who = identity_of_model(model)
    return {"model": who.label, "digest": who.digest, "first_s": first, "again_s": again["median_s"]}


def raw_bytes(pairs: Pairs) -> np.ndarray:
    """All 16-bit numbers of the cache in one piece, uint16: per layer keys, then values."""
    return np.concatenate([x.view(torch.int16).numpy().view(np.uint16).reshape(-1) for pair in pairs for x in pair])


def tensors(pairs: Pairs) -> dict[str, Tensor]:
    """The cache by name, for a safetensors file."""
    return {f"{side}.{i}": x for i, pair in enumerate(pairs) for side, x in zip("kv", pair, strict=True)}


def named_pairs(named: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Inverse of `tensors`."""
    for i in range(len(named) // 2):
        yield named[f"k.{i}"], named[f"v.{i}"]


def restore(path: Path, identity: str) -> Any:
    with kvcellar.open(path, identity=identity) as archive:
        return archive.restore().cache
