"""Our KVTC-style baseline as an outside peer of `kvcellar bench`: one JSON object a line in, one out.

    python benchmarks/baselines/peer.py [--texts FILE] [--data DIR] [--windows N]

speaks the protocol of kvcellar/frontends/bench/outside_peers/serve.py. What comes back was decoded from the coded file
alone. Peers are `kvtc-fine`, `kvtc` and `kvtc-small`; options: `budget` in bits per token before DEFLATE, and `file`,
where the coded bytes are to be left. `nbytes` has the exact sinks and recent tokens in it, `payload_nbytes` codes the
`payload_tokens` others; `profile_nbytes` are means, bases and one plan. No token ids are kept.

Calibration text is what benchmarks/texts.toml declares for tuning, in short and long windows, see `LENGTHS`; the model
reads it in float32, as the bench does. What they teach is kept under `home()/baselines` by model, texts, lengths and
source.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from baselines import allocation, calibration, klt, kvtc, rotary
from kvcellar.evaluate.texts import Document, load_sources, windows
from kvcellar.frontends.bench.outside_peers.serve import serve, write_pairs
from kvcellar.frontends.cli.common import progress
from kvcellar.frontends.cli.models import MeasuredModel
from kvcellar.profile import home

HERE = Path(__file__).resolve().parent
BUDGETS = {"kvtc-fine": 13000, "kvtc": 4500, "kvtc-small": 2000}  # bits per token before DEFLATE
LENGTHS = ((44, 1024), (2, 7680))  # calibration windows and their tokens
MOST = 8  # bits a coefficient can have
_OPTIONS = {"budget", "file"}
_LEARNING = (allocation, calibration, klt, kvtc, rotary)  # what is learned depends on their source


class Peer:
    """Answers messages for the models it is told of; what it learned about one is kept here and on disk."""

    def __init__(self, texts: Path, data: Path, lengths: tuple[tuple[int, int], ...] = LENGTHS):
        self.texts, self.data, self.lengths = texts, data, lengths
        self.prepared = cache(self._prepared)
        self.state = cache(self._state)

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Code `message["cache"]`, decode it again into `message["out"]`. Raises ValueError, KeyError or OSError."""
        model, options = message["model"], message.get("options") or {}
        if unknown := set(options) - _OPTIONS:
            raise ValueError(f"unknown options {sorted(unknown)}, expected {sorted(_OPTIONS)}")
        budget = options["budget"] if "budget" in options else _budget(message["peer"])
        state = self.state(Path(model["folder"]).resolve(), budget)
        _require_same_rope(state, model)
        pairs = _pairs(safetensors.torch.load_file(message["cache"]), state.shape)
        with tempfile.TemporaryDirectory(prefix="kvtc-") as scratch:
            coded = Path(options.get("file") or Path(scratch) / "cache.kvtc")
            save_s = _timed(lambda: coded.write_bytes(kvtc.encode(pairs, state, budget)))[1]
            back, restore_s = _timed(lambda: kvtc.decode(coded.read_bytes(), state))
            payload, total = kvtc.sizes(coded.read_bytes())
        write_pairs(message["out"], [(keys[0], values[0]) for keys, values in back])
        tokens = pairs[0][0].shape[2]
        return {
            "nbytes": total,
            "payload_nbytes": payload,
            "payload_tokens": max(0, tokens - kvtc.SINKS - kvtc.RECENT),
            "profile_nbytes": state.nbytes,
            "save_s": save_s,
            "restore_s": restore_s,
            "kept": 1.0,
            "note": f"{budget} bits a token before DEFLATE, {len(state.plans[budget][0])} components, float32 profile",
        }

    def _state(self, folder: Path, budget: int) -> kvtc.State:
        path = self.prepared(folder)
        kept = path.with_name(f"{path.stem}-{budget}.safetensors")
        if not kept.is_file():
            learned = calibration.load(path)
            most = MOST * sum(map(len, learned.means))
            if not 0 < budget <= most:
                raise ValueError(f"budget {budget}, expected 1 to {most} bits a token")
            with progress(f"bits for {budget} a token", 1, quiet=False):
                _write(kept, learned.state([budget]).save)
        return kvtc.load(kept)

    def _prepared(self, folder: Path) -> Path:
        """The file with what the model in `folder` and the tuning texts teach; made when it is not there."""
        local = MeasuredModel(folder)
        documents = load_sources(self.texts, self.data).documents("tune")
        path = home() / "baselines" / f"kvtc-{self._key(local, documents)}.safetensors"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            chosen = self._windows(local, documents)
            _write(path, _calibrated(local.model, chosen).save)
        return path

    def _key(self, local: MeasuredModel, documents: list[Document]) -> str:
        source = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in _LEARNING]
        texts = [[document.name, document.role, document.text] for document in documents]
        return _sha256([local.identity.digest, str(local.model.dtype), self.lengths, texts, source])[:32]

    def _windows(self, local: MeasuredModel, documents: list[Document]) -> list[Tensor]:
        def encode(text: str) -> list[int]:
            return local.encode(text, continues=True)

        chosen = []
        for count, length in self.lengths:
            length = min(length, local.max_tokens or length)
            chosen += windows(documents, encode, length - 1, 1, count)
        if not chosen:
            raise ValueError(f"no tuning text reaches {min(length for _, length in self.lengths)} tokens")
        return [torch.tensor(window.ids) for window in chosen]


def _calibrated(model: Any, chosen: list[Tensor]) -> calibration.Calibration:
    tokens = sum(map(len, chosen))
    with progress(f"KVTC calibration, {tokens:,} tokens", tokens, quiet=False) as advance:

        def reading() -> Any:
            for window in chosen:
                yield window
                advance(len(window))

        return calibration.calibrated(model, reading())


def _budget(peer: str) -> int:
    if peer not in BUDGETS:
        raise ValueError(f"unknown peer {peer!r}, expected one of {', '.join(BUDGETS)}")
    return BUDGETS[peer]


def _require_same_rope(state: kvtc.State, model: dict[str, Any]) -> None:
    """What the bench says of the model must be what calibration saw: else keys would be turned wrongly."""
    width, theta = model.get("head_dim"), model.get("rope_theta")
    if width is not None and width != state.shape[2]:
        raise ValueError(f"head_dim {width}, the model's is {state.shape[2]}")
    if theta is not None:
        said = float(theta) ** -(torch.arange(0, state.shape[2], 2, dtype=torch.float64) / state.shape[2])
        if not torch.allclose(said.float(), state.inv_freq, rtol=1e-4, atol=0):
            raise ValueError(f"rope_theta {theta} does not give the model's frequencies")


def _pairs(named: dict[str, Tensor], shape: tuple[int, int, int]) -> rotary.Pairs:
    """(1, H, T, D) keys and values per layer of a cache that fits the model. Raises ValueError for any other."""
    layers, heads, width = shape
    expected = {f"{side}{i}" for i in range(layers) for side in "kv"}
    if set(named) - {"tokens"} != expected:
        raise ValueError(f"tensors {sorted(set(named) - {'tokens'})[:4]}…, expected k0, v0 to v{layers - 1}")
    first = named["k0"]
    for name in expected:
        x = named[name]
        if x.dim() != 3 or x.shape != (heads, first.shape[1], width) or x.dtype != first.dtype:
            raise ValueError(f"{name}: {x.dtype} {tuple(x.shape)}, expected {first.dtype} ({heads}, T, {width})")
        if not bool(x.isfinite().all()):
            raise ValueError(f"{name}: not finite")
    if first.dtype not in kvtc.DTYPES:
        raise ValueError(f"{first.dtype}, expected one of {kvtc.DTYPES}")
    return [(named[f"k{i}"][None], named[f"v{i}"][None]) for i in range(layers)]


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


def _write(path: Path, save: Callable[[Path], None]) -> None:
    """Whole or not at all: others may look for `path` meanwhile."""
    part = path.with_name(f"{path.name}-{os.getpid()}.part")
    save(part)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=Path, default=HERE.parent / "texts.toml", metavar="FILE")
    parser.add_argument("--data", type=Path, default=HERE.parents[2] / "shared" / "data", metavar="DIR")
    parser.add_argument("--windows", type=int, metavar="N", help=f"N short calibration windows alone, not {LENGTHS}")
    options = parser.parse_args()
    lengths = LENGTHS if options.windows is None else ((options.windows, LENGTHS[0][1]),)
    serve(lambda: Peer(options.texts, options.data, lengths).answer)


if __name__ == "__main__":
    main()
