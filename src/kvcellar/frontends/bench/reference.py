"""The uncompressed side of each window, computed once and kept on disk.

For a window of prefix and continuation: the prefix's cache (as an `exact` archive, from one prefill), the logits of
the continuation behind it, and the scores behind ∅, the cache of sinks and recent window alone at their true positions.

The model computes in float32, since bfloat16 is many times slower on a CPU without instructions for it and adds noise
of its own; caches are held in the model's own dtype, as it would hold them. All sides read the same held numbers, so
a bit-exact recipe has a divergence of exactly 0.

The first continuation token is fed but not scored: what predicts it is the prefix's last forward pass, which no
cache touches. Kept per model, torch version, dtype and thread count, since kernels differ in the last bits.

What the model thought of the prefix's own tokens is told to `save`, as `kvcellar save` does: made by a prefill of its
own when a recipe first asks, and kept beside the rest.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...evaluate.scores import score_logits
from ...evaluate.texts import Window
from ...profile import home
from ...store.local import LocalStore
from ..cli.common import progress
from ..cli.models import LocalModel, empty_cache, held_in
from ..library import open as open_archive
from ..library import save

SINKS, RECENT = 4, 32


def continuation_logits(model: Any, following: Sequence[int], cache: Any) -> Tensor:
    """Logits (n − 1, V) that predict tokens 1…n−1 of `following`, read behind `cache`, which grows.

    The cache is widened to the dtype that the model computes in. One that quantizes what it is fed is fed so much at a
    time that the tokens read what they would if they came one by one.
    """
    read = []
    with torch.inference_mode():
        widened = held_in(cache, model.dtype)
        for ids in torch.split(torch.tensor([list(following)]), _pieces(widened, len(following)), dim=1):
            read.append(model(ids, cache=widened, use_cache=True).logits[0])
    return torch.cat(read)[:-1]


def _pieces(cache: Any, tokens: int) -> list[int]:
    """Tokens of each call: up to where a transformers QuantizedLayer codes its residual, which the token that fills it
    still reads in full precision. All at once for any other cache, fp8 ones included: they code each token by itself.
    """
    layer = next(iter(cache.layers), None)
    most = getattr(layer, "residual_length", None)
    if layer is None or most is None:
        return [tokens]
    residual = layer.keys.shape[-2] if layer.keys.dim() == 4 else 0
    pieces = [min(max(1, most - residual), tokens)]
    while sum(pieces) < tokens:
        pieces.append(min(most, tokens - sum(pieces)))
    return pieces


def empty_positions(prefix: int) -> list[int]:
    """The positions ∅ keeps: the first `SINKS` and the last `RECENT` tokens."""
    return sorted({*range(min(SINKS, prefix)), *range(max(0, prefix - RECENT), prefix)})


def key(window: Window) -> str:
    """The name of a window's files: its tokens, and how many of them are context."""
    return f"{window.id}-{window.prefix}"


def write_scores(expected: Mapping[str, Tensor], logits: Tensor, out: Path) -> None:
    """Per-token scores of `logits` (n − 1, V) against the uncompressed side, with those of ∅, as an npz file."""
    kl, nll, nll_full, agree = score_logits(expected["full"], logits, expected["following"][1:])
    _write_npz(out, kl=kl, nll=nll, nll_full=nll_full, nll_empty=expected["empty_nll"].numpy(), agree=agree)


def write_empty_scores(expected: Mapping[str, Tensor], out: Path) -> None:
    """The same for ∅ itself."""
    scores = {name: expected[f"empty_{name}"].numpy() for name in ("kl", "nll", "nll_full", "agree")}
    _write_npz(out, **scores, nll_empty=scores["nll"])


def known_log2_probs(local: LocalModel, ids: Sequence[int], path: Path) -> Float32[np.ndarray, " tokens"]:
    """log2 of the model's probability of each of `ids` given those before it, 0 for the first, which is given.

    Kept in the npy file at `path`; made anew where that is not one of so many numbers.
    """
    try:
        kept: np.ndarray = np.load(path, allow_pickle=False)
        if kept.dtype == np.float32 and kept.shape == (len(ids),):
            return kept
    except (OSError, ValueError, EOFError):
        pass
    told = local.prefill(list(ids), empty_cache(), quiet=True, probabilities=True)
    assert told is not None
    data = io.BytesIO()
    np.save(data, told, allow_pickle=False)
    with LocalStore(path.parent).replacing(path.name) as pending:
        pending.append(data.getvalue())
    return told


def _write_npz(out: Path, **scores: np.ndarray) -> None:
    with out.open("wb") as file:
        np.savez(file, allow_pickle=False, **scores)


class References:
    """The uncompressed side of windows of one model, under `home()/bench`."""

    def __init__(self, local: LocalModel):
        self.local = local
        dtype = str(local.model.dtype).removeprefix("torch.")
        runtime = f"torch{torch.__version__}-{dtype}-threads{torch.get_num_threads()}"
        self.folder = home() / "bench" / f"{local.identity.digest[:16]}-{runtime}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def archive(self, window: Window) -> Path:
        return self.folder / f"{key(window)}.kvc"

    def logits_file(self, window: Window) -> Path:
        return self.folder / f"{key(window)}.safetensors"

    def log2_probs(self, window: Window) -> Float32[np.ndarray, " tokens"]:
        """What the model thought of each token of the prefix, as `save` takes it."""
        return known_log2_probs(self.local, window.ids[: window.prefix], self.folder / f"{key(window)}.log2.npy")

    def ensure(self, windows: Sequence[Window], *, quiet: bool) -> None:
        """Compute what is missing; an interrupted run goes on where it stopped."""
        missing = [window for window in windows if not self.logits_file(window).is_file()]
        if not missing:
            return
        with progress(f"uncompressed side of {len(missing)} windows", len(missing), quiet=quiet) as advance:
            for window in missing:
                self._compute(window)
                advance(1)

    def _compute(self, window: Window) -> None:
        model, ids = self.local.model, list(window.ids)
        prefix, following = ids[: window.prefix], ids[window.prefix :]
        cache = empty_cache()
        with torch.inference_mode():
            model(torch.tensor([prefix]), cache=cache, use_cache=True, logits_to_keep=1)
        held_in(cache, getattr(self.local, "cache_dtype", model.dtype))
        save(self.archive(window), cache, tokens=prefix, identity=self.local.identity)
        full = continuation_logits(model, following, cache)
        with open_archive(self.archive(window), identity=self.local.identity) as archive:
            sparse = archive.restore(positions=empty_positions(len(prefix))).cache
        empty = continuation_logits(model, following, sparse)
        kl, nll, nll_full, agree = score_logits(full, empty, torch.tensor(following)[1:])
        tensors = {
            "full": full.contiguous(),
            "following": torch.tensor(following),
            "empty_kl": torch.from_numpy(kl),
            "empty_nll": torch.from_numpy(nll),
            "empty_nll_full": torch.from_numpy(nll_full),
            "empty_agree": torch.from_numpy(agree),
        }
        unfinished = self.folder / f"{key(window)}-{os.getpid()}.part"
        save_file(tensors, unfinished)
        unfinished.replace(self.logits_file(window))

    def load(self, window: Window) -> dict[str, Tensor]:
        """`full` logits (n − 1, V), `following` ids (n,), and ∅'s scores at each token (n − 1,) as `empty_…`."""
        loaded: dict[str, Tensor] = load_file(self.logits_file(window))
        return loaded
