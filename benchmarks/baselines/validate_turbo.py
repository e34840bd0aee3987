"""TurboQuant's rows of DESIGN's table again: as published, and as recipes `turbo-4`, `turbo-3` and `turbo-2` store it.

    python benchmarks/baselines/validate_turbo.py [--model DIR] [--data DIR]

Windows and measures of DESIGN's prototype (`prototype.py`), coded between 4 sinks and 32 recent tokens that are left as
they are. `published` is the method alone (arXiv 2504.19874): a head's vector as its norm in 16 bits and, after one
random rotation, the nearest best level of each coordinate; bytes are bits and norms. `turbo` is what a file of that
recipe restores, sinks and recent tokens at its own 8 bits; bytes are its payload over all tokens. Intervals are 95 %,
BCa over the eight windows, which share articles with their neighbours: read them as the spread they are, no more.
Writes benchmarks/results/turbo_validation.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kvcellar
from baselines import kvtc
from baselines.prototype import CODED, PREFIX, Window, around, measured, reference, say, test_windows
from baselines.rotary import Pairs
from common import add_model, machine, rounded, write_result
from kvcellar.evaluate.bootstrap import bca
from kvcellar.frontends.bench.sizes import bytes_by_part
from kvcellar.quantize.lloydmax import boundaries, levels
from kvcellar.quantize.rotation import rotation

DESIGN = {4: (6120, 0.007, 0.008), 3: (4680, 0.028, 0.031), 2: (3240, 0.121, 0.127)}  # B/token, KL, Δppl


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), metavar="DIR")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    from transformers import AutoTokenizer

    from realcache import load

    model = load(options.model, torch.float32)
    test = test_windows(options.data, AutoTokenizer.from_pretrained(options.model))
    uncompressed = [reference(model, ids) for ids in test]
    rows = []
    for bits, (nbytes, kl, loss) in DESIGN.items():
        for code, restored in (("published", partial(published, bits)), ("turbo", partial(from_file, bits))):
            point = measured(model, uncompressed, restored)
            interval = _interval(point["kl_by_window"])
            design = {"design_payload": nbytes, "design_kl": kl, "design_dppl": loss}
            inside = interval[0] <= kl + _last_digit(kl) / 2 and kl - _last_digit(kl) / 2 <= interval[1]
            rows.append({"code": code, "bits": bits, **point, "kl_ci": interval, **design, "design_kl_inside": inside})
            say(f"{code:9} {bits} bits: {point['payload_b_per_token']:7.1f} B/token, KL {point['kl']:.4f} {interval}")
    result = {"benchmark": "turbo_validation", "model": options.model.name, "machine": machine(), "rows": rows}
    write_result("turbo_validation", result)
    print(json.dumps(rounded(result), ensure_ascii=False))


def published(bits: int, window: Window) -> tuple[Pairs, float, float]:
    """The cache with its middle coded, and bits and norms in bytes: of coded tokens, and with 4-byte numbers around."""
    middle = [tuple(quantized(x[:, :, kvtc.SINKS : PREFIX - kvtc.RECENT], bits) for x in pair) for pair in window.pairs]
    pairs = [tuple(map(around, pair, new)) for pair, new in zip(window.pairs, middle, strict=True)]
    vectors = sum(math.prod(x.shape[1:3]) for pair in middle for x in pair)
    width = window.pairs[0][0].shape[3]
    coded = vectors * (bits * width / 8 + 2)
    return pairs, coded, coded + vectors / CODED * (PREFIX - CODED) * width * 4


def quantized(x: Tensor, bits: int) -> Tensor:
    """Vectors (…, D) after norm, rotation and nearest level, and back."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    turn = torch.from_numpy(rotation(x.shape[-1], 0).copy())
    best = levels(x.shape[-1], bits) / np.sqrt(np.float32(x.shape[-1]))  # ours are for a root mean square of 1
    edges = torch.from_numpy(np.asarray(boundaries(best)).copy())
    nearest = torch.from_numpy(best)[torch.bucketize((x / norm) @ turn, edges)]
    return nearest @ turn.T * norm.half().float()


def from_file(bits: int, window: Window) -> tuple[Pairs, float, float]:
    """What an archive restores, and its bytes of tokens: those of coded ones by their share, and all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.kvc"
        ids = window.ids[:PREFIX].tolist()
        kvcellar.save(path, window.pairs, tokens=ids, identity="prototype", recipe=f"turbo-{bits}")
        parts = bytes_by_part(path)
        with kvcellar.open(path, identity="prototype") as archive:
            restored = archive.restore().cache
    payload = float(parts["payload"])
    return [(x.keys, x.values) for x in restored.layers], payload * CODED / PREFIX, payload


def _interval(by_window: list[float]) -> tuple[float, float]:
    sums = np.array([(kl, 1.0) for kl in by_window])
    found = bca([str(i) for i in range(len(sums))], sums, lambda total: total[:, 0] / total[:, 1])
    assert found is not None
    return found


def _last_digit(number: float) -> float:
    return float(10.0 ** -len(str(number).split(".")[1]))


if __name__ == "__main__":
    main()
