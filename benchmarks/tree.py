"""Prefill through the tree against the model's own, on one long text: seconds, memory, and what the reading costs.

    python benchmarks/tree.py [--text FILE]     writes benchmarks/results/tree.json, piece by piece

*Speed*: prefills of `--tokens` tokens in the model's own dtype take turns; the model's own is its fastest of one pass
and of chunks of 512. Memory is the kernel's high-water mark of the process above what it held before the call (Linux).

*Quality*: KL (nats) of next-token distributions from those of the whole context, behind every 16th token, in the same
dtype. `streaming` keeps the sinks and the tokens just before the chunk; `own chunk` the sinks alone: the floor. The
ceiling is what rounding does: the same model read in chunks of 512. Positions after the first chunk count; the first is
exact in all.

A second run goes on where one was stopped, and measures nothing anew without --again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from common import RESULTS, add_model, give_memory_back, interleaved, machine, summary, write_result
from kvcellar.evaluate.divergence import kl_divergence
from kvcellar.frontends.tree import prefill_tree, tree_attention
from kvcellar.frontends.treeplan import METHOD, plan_for
from realcache import load, topics_text

EVERY = 16
SHAPES = ((1024, 256), (512, 256), (1024, 512), (512, 512))
METHODS: dict[str, Any] = {"matching": METHOD, "random": "random", "streaming": "streaming"}
TIMED = (("matching", 1024, 256), ("matching", 512, 256), ("random", 1024, 256))


def choices(method: str, chunk: int, keep: int) -> dict[str, Any]:
    if method == "own chunk":
        return {"method": "streaming", "chunk": chunk, "keep": 5, "recent": 0}
    return {"method": METHODS[method], "chunk": chunk, "keep": keep}


def name_of(method: str, chunk: int, keep: int) -> str:
    return f"{method}, chunks of {chunk}" + ("" if method == "own chunk" else f", {keep} kept")


def memory_peak(call: Callable[[], object]) -> tuple[int, object]:
    """Bytes the process grew by at most while in `call` (Linux)."""
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = call()
    return _resident("VmHWM") - before, result


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


@torch.inference_mode()
def own_prefill(model: Any, ids: torch.Tensor, chunk: int) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache()
    for start in range(0, ids.shape[1], chunk):
        model(ids[:, start : start + chunk], cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def speed(model: Any, ids: torch.Tensor, rounds: int, patience: float) -> dict[str, Any]:
    cases: dict[str, Callable[[], object]] = {
        "own, one pass": lambda: own_prefill(model, ids, ids.shape[1]),
        "own, chunks of 512": lambda: own_prefill(model, ids, 512),
    }
    for each in TIMED:
        cases[f"tree, {name_of(*each)}"] = lambda each=each: prefill_tree(model, ids, **choices(*each))  # type: ignore[misc]
    peaks: dict[str, list[int]] = {name: [] for name in cases}

    def watched(name: str) -> Callable[[], object]:
        def call() -> object:
            peak, found = memory_peak(cases[name])
            peaks[name].append(peak)
            return found

        return call

    turns = interleaved({name: watched(name) for name in cases}, rounds, patience=patience, before=give_memory_back)
    figures = {
        name: {**summary(seconds), "peak_mb": sorted(peaks[name])[len(peaks[name]) // 2] / 1e6}
        for name, seconds in turns.seconds.items()
    }
    fastest = min(figures[name]["median_s"] for name in cases if name.startswith("own"))
    for name, figure in figures.items():
        if name.startswith("tree"):
            figure["of_own_prefill"] = figure["median_s"] / fastest
    return {"cases": figures, "noisy_rounds": turns.noisy, "rounds": rounds, "load": os.getloadavg()[0]}


@torch.inference_mode()
def chunked_logits(model: Any, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    from transformers import DynamicCache

    cache, found = DynamicCache(), []
    for start in range(0, ids.shape[1], 512):
        here = at[(at >= start) & (at < start + 512)] - start
        found.append(model(ids[:, start : start + 512], cache=cache, use_cache=True, logits_to_keep=here).logits[0])
    return torch.cat(found)


@torch.inference_mode()
def tree_logits(model: Any, ids: torch.Tensor, at: torch.Tensor, **choice: Any) -> torch.Tensor:
    with tree_attention(model, plan_for(model, **choice)):
        logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=at).logits[0]
    return logits


def divergence(reference: torch.Tensor, found: torch.Tensor, at: torch.Tensor, chunk: int) -> dict[str, Any]:
    """Means over all positions behind the first chunk, over their quarters, and near the beginning of a chunk."""
    pairs = zip(reference.split(64), found.split(64), strict=True)
    kl = torch.cat([kl_divergence(a.float(), b.float()) for a, b in pairs])
    agree = (reference.argmax(dim=1) == found.argmax(dim=1)).double()
    behind = at >= chunk + 4
    kl, agree, offset = kl[behind], agree[behind], (at[behind] - 4) % chunk
    quarters = [float(part.mean()) for part in kl.chunk(4)]
    early = kl[offset < 64]
    return {
        "kl": float(kl.mean()),
        "kl_median": float(kl.median()),
        "kl_quarters": quarters,
        "kl_first_64_of_chunk": float(early.mean()) if len(early) else None,
        "same_top_token": float(agree.mean()),
        "positions": len(kl),
    }


def quality(model: Any, ids: torch.Tensor, held: dict[str, Any], save: Callable[[], object], quick: bool) -> None:
    at = torch.arange(EVERY - 1, ids.shape[1], EVERY)
    wanted = [(m, *shape) for shape in (SHAPES[:1] if quick else SHAPES) for m in METHODS]
    wanted += [("own chunk", 1024, 5)] if quick else [("own chunk", chunk, 5) for chunk in (1024, 512)]
    if all(name_of(*each) in held for each in wanted) and "rounding" in held:
        return
    with torch.inference_mode():
        reference = model(ids, use_cache=False, logits_to_keep=at).logits[0]
    if "rounding" not in held:
        held["rounding"] = divergence(reference, chunked_logits(model, ids, at), at, 512)
    for each in wanted:
        if name_of(*each) not in held:
            found = tree_logits(model, ids, at, **choices(*each))
            held[name_of(*each)] = divergence(reference, found, at, each[1])
            print(f"{name_of(*each):36} KL {held[name_of(*each)]['kl']:.4f}", flush=True)
            save()


def text_ids(folder: Path, text: str, tokens: int) -> torch.Tensor:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(text[: tokens * 20])["input_ids"]
    if len(ids) < tokens:
        raise SystemExit(f"the text has {len(ids)} tokens, {tokens} were asked for")
    return torch.tensor([ids[:tokens]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model(parser)
    parser.add_argument("--text", type=Path, help="default: Python's own reference texts")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=0.0, metavar="SECONDS", help="wait for quiet")
    parser.add_argument("--quick", action="store_true", help="one shape of chunks, for a look")
    parser.add_argument("--again", action="store_true", help="measure all anew")
    parser.add_argument("--only", choices=("speed", "quality"))
    parser.add_argument("--name", default="tree", help="name of the results file")
    options = parser.parse_args()

    text = topics_text() if options.text is None else options.text.read_text(encoding="utf-8")
    ids = text_ids(options.model, text, options.tokens)
    setup = {
        "model": options.model.name,
        "text": "topics" if options.text is None else options.text.name,
        "ids": hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16],
        "tokens": options.tokens,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
    }
    path = RESULTS / f"{options.name}.json"
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if options.again or result.get("setup") != setup:
        result = {"benchmark": "tree", "setup": setup, "quality": {}}
    result["machine"] = machine()
    model = load(options.model, getattr(torch, options.dtype))
    if options.only != "quality" and result.get("speed", {}).get("rounds", 0) < options.rounds:
        result["speed"] = speed(model, ids, options.rounds, options.patience)
        write_result(options.name, result)
        for name, figure in result["speed"]["cases"].items():
            print(f"{name:44} {figure['median_s']:7.2f} s {figure['peak_mb']:7.0f} MB", flush=True)
    if options.only != "speed":
        quality(model, ids, result["quality"], lambda: write_result(options.name, result), options.quick)
    write_result(options.name, result)
    print(json.dumps({"benchmark": "tree", **setup}))


if __name__ == "__main__":
    main()
