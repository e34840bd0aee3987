"""Does our KVTC baseline count as a peer? The grouped KLT coder against DESIGN's figures, then KVTC's own points.

    python benchmarks/baselines/validate_kvtc.py [--model DIR] [--data DIR] [--keep DIR] [--dtype bfloat16]

Windows and measures of DESIGN's prototype (`prototype.py`). Calibration: 20 windows of 1,024 tokens of wt2_valid one
after the other, 988 of each, those that would be coded.

Two views of the same curve, since DESIGN gives the prototype's KL with one or two digits and its step sizes not at all:
bytes at its KL, interpolated, with the range of its rounding; and bytes and KL at the steps that give its bytes.
Points are kept under `home()/baselines`, so a second run goes on where one was stopped; `--keep` does the same for what
calibration read. Writes benchmarks/results/kvtc_validation.json, with bfloat16 (slow on most CPUs: two steps, float32
calibration if kept) only that part of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from baselines import allocation, calibration, klt, kvtc, prototype, rotary
from baselines.prototype import CODED, PREFIX, SCORED, WINDOWS, Window, around, measured, reference, say, test_windows
from baselines.rotary import Pairs, frequencies, layers, matrices
from baselines.text import windows
from common import RESULTS, add_model, machine, rounded, write_result
from kvcellar.profile import home

CALIBRATION = (20, 1024)
STEPS = {0.6: (0.5, 0.6, 1.2, 1.4), 0.5: (0.65, 1.5)}  # by dead zone
INFERRED = {0.6: (0.5, 1.2)}  # where the prototype's bytes come out
BUDGETS = (2000, 4500, 13000)  # bits per token before DEFLATE
GOALS = ((0.008, 1474.0), (0.035, 613.0))  # KL, B/token
DIGIT = 0.0005  # the prototype's KL is rounded to thousandths
TOLERANCE = 0.05


def main() -> None:
    options = _options()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    from transformers import AutoTokenizer

    from realcache import load

    whole = options.dtype == "float32"
    model = load(options.model, getattr(torch, options.dtype))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tune = windows(options.data / "wt2_valid.txt", tokenizer, *CALIBRATION, CALIBRATION[1])
    test = test_windows(options.data, tokenizer)
    reused = bool(options.keep and _calibration_file(options.keep).exists())
    kept = home() / "baselines" / f"kvtc-validation-{_key(model, tune, test)}.json"
    parts = cache(lambda: _gathered(model, tune, options.keep))
    coder = cache(lambda: klt.fit(*(torch.cat(side) for side in zip(*parts(), strict=True)), _shape(model.config)))
    learned = cache(lambda: calibration.fitted(parts(), frequencies(model), _shape(model.config)))
    uncompressed = cache(lambda: [reference(model, ids) for ids in test])
    points, result = [], {}
    for zone, sizes in (STEPS if whole else INFERRED).items():
        for size in sizes:
            measure = partial(lambda *at: grouped_point(model, uncompressed(), coder(), *at), size, zone)
            points.append(_point(kept, f"grouped {zone} {size}", measure))
        of_zone = [p for p in points if p.get("dead_zone") == zone]
        result[f"grouped_{zone}"] = compared(of_zone)
        result |= {f"grouped_{zone}_at_steps": at_steps(of_zone, steps) for z, steps in INFERRED.items() if z == zone}
    for budget in BUDGETS if whole else ():
        measure = partial(lambda at: kvtc_point(model, uncompressed(), learned().state([at]), at), budget)
        points.append(_point(kept, f"kvtc {budget}", measure))
    setting = {
        "dtype": options.dtype,
        "prefix": PREFIX,
        "scored": SCORED,
        "windows": WINDOWS,
        "calibration_tokens": CALIBRATION[0] * (CALIBRATION[1] - kvtc.SINKS - kvtc.RECENT),
        "calibration_reused": reused,
    }
    _write(options, {"setting": setting, "points": points, **result})


def _key(model: Any, tune: Tensor, test: Tensor) -> str:
    """What a point depends on: the model and its dtype, all tokens, and the source of this and of what it measures."""
    from kvcellar.frontends.fingerprint import identity_of_model

    modules = (allocation, calibration, klt, kvtc, prototype, rotary)
    source = [Path(str(at)).read_text(encoding="utf-8") for at in (__file__, *(m.__file__ for m in modules))]
    said = [identity_of_model(model).digest, str(model.dtype), torch.__version__, tune.tolist(), test.tolist(), source]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def _point(kept: Path, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A point of an earlier run that was stopped, or what `measure` gives, which is kept for the next one."""
    done: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    if name not in done:
        done[name] = measure()
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(".part")
        part.write_text(json.dumps(done), encoding="utf-8")
        part.replace(kept)
    say(_line(done[name]))
    return done[name]


def _write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    made_by = {"benchmark": "kvtc_validation", "model": options.model.name, "machine": machine()}
    path = RESULTS / "kvtc_validation.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if options.dtype == "float32":
        other = {"bfloat16": before["bfloat16"]} if "bfloat16" in before else {}
        write_result("kvtc_validation", {**made_by, **result, **other})
    else:
        write_result("kvtc_validation", {**before, options.dtype: {"machine": machine(), **result}})
    print(json.dumps(rounded(result), ensure_ascii=False))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), metavar="DIR")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep what calibration read here, or use it if there")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args()


def _shape(config: Any) -> tuple[int, int, int]:
    return config.num_hidden_layers, config.num_key_value_heads, config.head_dim


def _calibration_file(keep: Path) -> Path:
    return keep / "kvtc-calibration.safetensors"


def _gathered(model: Any, tune: Tensor, keep: Path | None) -> list[tuple[Tensor, Tensor]]:
    """Pre-RoPE keys and values of each calibration window, kept from another run or read now."""
    path = _calibration_file(keep) if keep else None
    if path and path.exists():
        named = safetensors.torch.load_file(path)
        return [(named[f"k{i}"], named[f"v{i}"]) for i in range(len(tune))]
    parts = []
    for pair in calibration.read(model, tune):
        parts.append(pair)
        say(f"read {len(parts)} of {len(tune)} windows")
    if path:
        safetensors.torch.save_file(
            {f"{s}{i}": x for i, p in enumerate(parts) for s, x in zip("kv", p, strict=True)}, path
        )
    return parts


def grouped_point(model: Any, uncompressed: list[Window], coder: klt.GroupedKLT, size: float, zone: float) -> dict:
    """One step size: ideal bytes per coded token, and the harm. Sinks and recent tokens are left as they are."""
    step = klt.fit_step(coder, size, zone)
    inv_freq = frequencies(model)

    def restored(window: Window) -> tuple[Pairs, float, float]:
        done = klt.measure(coder, step, *matrices(window.pairs, inv_freq, kvtc.SINKS, PREFIX - kvtc.RECENT))
        middle = layers(done.keys, done.values, inv_freq, coder.shape, kvtc.SINKS)
        whole = [tuple(map(around, pair, new)) for pair, new in zip(window.pairs, middle, strict=True)]
        return whole, done.bits / 8, done.bits / 8 + (PREFIX - CODED) * math.prod(coder.shape) * 4

    name = {"code": "grouped", "dead_zone": zone, "step": size, "coefficients": sum(step.kept)}
    return name | measured(model, uncompressed, restored)


def kvtc_point(model: Any, uncompressed: list[Window], state: kvtc.State, budget: int) -> dict[str, Any]:
    """One budget: real bytes, decoded again, and the harm."""

    def restored(window: Window) -> tuple[Pairs, float, float]:
        data = kvtc.encode(window.pairs, state, budget)
        return kvtc.decode(data, state), *kvtc.sizes(data)

    size = {"coefficients": len(state.plans[budget][0]), "state_bytes": state.nbytes}
    return {"code": "kvtc", "budget_bits": budget, **size, **measured(model, uncompressed, restored)}


def compared(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bytes at the goals' KL beside the goals, and at the ends of what the KL may have been before rounding."""
    curve = sorted((math.log(p["kl"]), math.log(p["payload_b_per_token"])) for p in points)
    rows = []
    for kl, goal in GOALS:
        ours, least, most = (_at(curve, at) for at in (kl, kl + DIGIT, kl - DIGIT))
        row = {"kl": kl, "goal": goal, "ours": ours, "ratio": ours / goal, "within": abs(ours / goal - 1) <= TOLERANCE}
        row |= {"inside": curve[0][0] <= math.log(kl) <= curve[-1][0]}
        rows.append(row | {"ratios_of_rounded_kl": [least / goal, most / goal]})
    return rows


def _at(curve: list[tuple[float, float]], kl: float) -> float:
    """Bytes at `kl`, log bytes over log KL between the nearest points on both sides, or through the last two."""
    x = math.log(kl)
    i = min(max(1, sum(at < x for at, _ in curve)), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def at_steps(points: list[dict[str, Any]], steps: tuple[float, ...]) -> list[dict[str, Any]]:
    """Bytes and KL at `steps`, one for each goal, over the goal's."""
    rows = []
    for step, (kl, goal) in zip(steps, GOALS, strict=True):
        ours, nats = next((p["payload_b_per_token"], p["kl"]) for p in points if p["step"] == step)
        rows.append({"step": step, "ours": ours, "goal": goal, "ratio": ours / goal, "kl": nats, "goal_kl": kl})
    return rows


def _line(p: dict[str, Any]) -> str:
    setting = f"step {p['step']}, zone {p['dead_zone']}" if p["code"] == "grouped" else f"{p['budget_bits']} bits"
    figures = f"{p['payload_b_per_token']:8.1f} B/token  {p['total_b_per_token']:8.1f} with exact tokens"
    return f"{p['code']:8} {setting:20} {figures}  KL {p['kl']:.4f}  ppl {p['delta_ppl']:+.2%}"


if __name__ == "__main__":
    main()
