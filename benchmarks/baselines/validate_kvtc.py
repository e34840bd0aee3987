"""Does our KVTC baseline count as a peer? The grouped KLT coder against DESIGN's figures, then KVTC's own points.

    python benchmarks/baselines/validate_kvtc.py [--model DIR] [--data DIR] [--keep DIR]

Windows of DESIGN's prototype: detokenised wt2_test, tokens [2000 i, 2000 i + 1408), i < 8, no BOS. 1,024 tokens are
prefilled, all but 4 sinks and 32 recent ones coded, and the next 384 read behind the restored cache (teacher forcing).
KL in nats per token against the uncompressed cache; Δppl from the same logits. Calibration: 20 windows of 1,024 tokens
of wt2_valid, sinks left out. Everything runs in float32. Writes benchmarks/results/kvtc_validation.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from baselines import klt, kvtc
from baselines.rotary import Pairs, frequencies, layers, matrices
from baselines.text import windows
from common import machine, rounded, write_result
from kvcellar.profile import home

PREFIX, SCORED, WINDOWS, STRIDE = 1024, 384, 8, 2000
CALIBRATION = (20, 1024)
CODED = PREFIX - kvtc.SINKS - kvtc.RECENT
STEPS = {0.6: (0.4, 0.5, 0.6, 1.2, 1.4), 0.5: (0.7, 0.9, 1.4, 1.6)}  # by dead zone
BUDGETS = [2000, 4000, 8000, 12000, 16000]  # bits per token before DEFLATE
GOALS = ((0.008, 1474.0), (0.035, 613.0))  # KL, B/token
TOLERANCE = 0.05


class Window(NamedTuple):
    """Token ids (1408,), the uncompressed cache of the first 1,024, and log-probabilities (384, V) behind it."""

    ids: Tensor
    pairs: Pairs
    reference: Tensor


class Harm(NamedTuple):
    """Nats per token: KL to the uncompressed cache, and the rise of the loss."""

    kl: float
    loss: float


def main() -> None:
    options = _options()
    torch.set_num_threads(2)
    from transformers import AutoTokenizer

    from realcache import load

    model, tokenizer = load(options.model, torch.float32), AutoTokenizer.from_pretrained(options.model)
    inv_freq, shape = frequencies(model), _shape(model.config)
    tune = windows(options.data / "wt2_valid.txt", tokenizer, *CALIBRATION, CALIBRATION[1])
    test = windows(options.data / "wt2_test.txt", tokenizer, WINDOWS, PREFIX + SCORED, STRIDE)
    _say("calibration")
    keys, values = _gathered(model, tune, options.keep)
    coder = klt.fit(keys, values, shape)
    state = _state(keys, values, inv_freq, shape, options.keep)
    del keys, values
    _say("uncompressed caches")
    uncompressed = [reference(model, ids) for ids in test]
    result: dict[str, Any] = {
        "benchmark": "kvtc_validation",
        "model": options.model.name,
        "machine": machine(),
        "setting": {"prefix": PREFIX, "scored": SCORED, "windows": WINDOWS, "calibration_tokens": len(tune) * 1024},
        "state_bytes": state.nbytes,
        "points": [],
    }
    for zone, sizes in STEPS.items():
        for size in sizes:
            result["points"].append(grouped_point(model, uncompressed, coder, size, zone))
            _say(_line(result["points"][-1]))
        result[f"grouped_{zone}"] = compared([p for p in result["points"] if p.get("dead_zone") == zone])
    for budget in BUDGETS:
        result["points"].append(kvtc_point(model, uncompressed, state, budget))
        _say(_line(result["points"][-1]))
    print("\n".join(_line(point) for point in result["points"]))
    write_result("kvtc_validation", result)
    print(json.dumps(rounded(result), ensure_ascii=False))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=home() / "models" / "smollm2-135m-instruct", metavar="DIR")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), metavar="DIR")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep what calibration made here, or use it if there")
    return parser.parse_args()


def _shape(config: Any) -> tuple[int, int, int]:
    return config.num_hidden_layers, config.num_key_value_heads, config.head_dim


def _gathered(model: Any, tune: Tensor, keep: Path | None) -> tuple[Tensor, Tensor]:
    path = keep and keep / "kvtc-calibration.safetensors"
    if path and path.exists():
        named = safetensors.torch.load_file(path)
        return named["keys"], named["values"]
    keys, values = kvtc.gather(model, tune)
    if path:
        safetensors.torch.save_file({"keys": keys, "values": values}, path)
    return keys, values


def _state(keys: Tensor, values: Tensor, inv_freq: Tensor, shape: tuple[int, int, int], keep: Path | None) -> Any:
    path = keep and keep / "kvtc-state.safetensors"
    if path and path.exists():
        return kvtc.load(path)
    state = kvtc.fit(keys, values, inv_freq, shape, BUDGETS)
    if path:
        state.save(path)
    return state


@torch.inference_mode()
def reference(model: Any, ids: Tensor) -> Window:
    from transformers import DynamicCache

    cache = DynamicCache()
    model(ids[None, :PREFIX], cache=cache, use_cache=True, logits_to_keep=1)
    pairs = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    return Window(ids, pairs, _continued(model, ids, cache))


def _continued(model: Any, ids: Tensor, cache: Any) -> Tensor:
    logits = model(ids[None, PREFIX:], cache=cache, use_cache=True).logits[0]
    return torch.log_softmax(logits.float(), -1)


@torch.inference_mode()
def harm(model: Any, window: Window, pairs: Pairs) -> Harm:
    """What reading the continuation behind `pairs` costs. The last of the 384 has no next token for the loss."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for i, (keys, values) in enumerate(pairs):
        cache.update(keys, values, i)
    got, want = _continued(model, window.ids, cache), window.reference
    kl = (want.exp() * (want - got)).sum(-1).mean()
    following = window.ids[PREFIX + 1 :, None]
    return Harm(float(kl), float((want[:-1].gather(1, following) - got[:-1].gather(1, following)).mean()))


def grouped_point(model: Any, uncompressed: list[Window], coder: klt.GroupedKLT, size: float, zone: float) -> dict:
    """One step size: ideal bytes per coded token, and the harm. Sinks and recent tokens are left as they are."""
    step = klt.fit_step(coder, size, zone)
    inv_freq = frequencies(model)

    def restored(window: Window) -> tuple[Pairs, float, float]:
        done = klt.measure(coder, step, *matrices(window.pairs, inv_freq, kvtc.SINKS, PREFIX - kvtc.RECENT))
        middle = layers(done.keys, done.values, inv_freq, coder.shape, kvtc.SINKS)
        whole = [tuple(map(_around, pair, new)) for pair, new in zip(window.pairs, middle, strict=True)]
        return whole, done.bits / 8, done.bits / 8 + (PREFIX - CODED) * math.prod(coder.shape) * 4

    name = {"code": "grouped", "dead_zone": zone, "step": size, "coefficients": sum(step.kept)}
    return name | _measured(model, uncompressed, restored)


def _around(old: Tensor, middle: Tensor) -> Tensor:
    return torch.cat((old[:, :, : kvtc.SINKS], middle, old[:, :, PREFIX - kvtc.RECENT :]), 2)


def kvtc_point(model: Any, uncompressed: list[Window], state: kvtc.State, budget: int) -> dict[str, Any]:
    """One budget: real bytes, decoded again, and the harm."""

    def restored(window: Window) -> tuple[Pairs, float, float]:
        data = kvtc.encode(window.pairs, state, budget)
        return kvtc.decode(data, state), *kvtc.sizes(data)

    used = int((state.plans[budget][0] > 0).sum())
    return {"code": "kvtc", "budget_bits": budget, "coefficients": used} | _measured(model, uncompressed, restored)


def _measured(model: Any, uncompressed: list[Window], restored: Callable[[Window], Any]) -> dict[str, Any]:
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


def compared(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bytes at the goals' KL, log bytes over log KL between the nearest points on both sides, beside the goals."""
    curve = sorted((math.log(p["kl"]), math.log(p["payload_b_per_token"])) for p in points)
    rows = []
    for kl, goal in GOALS:
        x = math.log(kl)
        i = min(max(1, sum(at < x for at, _ in curve)), len(curve) - 1)
        (x0, y0), (x1, y1) = curve[i - 1], curve[i]
        ours = math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
        within = abs(ours / goal - 1) <= TOLERANCE
        inside = curve[0][0] <= x <= curve[-1][0]
        rows.append({"kl": kl, "goal": goal, "ours": ours, "ratio": ours / goal, "within": within, "inside": inside})
    return rows


def _line(p: dict[str, Any]) -> str:
    setting = f"step {p['step']}, zone {p['dead_zone']}" if p["code"] == "grouped" else f"{p['budget_bits']} bits"
    figures = f"{p['payload_b_per_token']:8.1f} B/token  {p['total_b_per_token']:8.1f} with exact tokens"
    return f"{p['code']:8} {setting:20} {figures}  KL {p['kl']:.4f}  ppl {p['delta_ppl']:+.2%}"


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
