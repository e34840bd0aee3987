"""Write docs/models.md: the tiny models of tests/zoo.py, what an archive keeps of each, and what is tested with it.

python benchmarks/modelpage.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
sys.path.insert(0, str(ROOT / "tests"))

import transformers  # noqa: E402

import zoo  # noqa: E402
from kvcellar.errors import UnsupportedCache  # noqa: E402
from kvcellar.frontends.transformers import take_cache  # noqa: E402
from kvcellar.geometry import FULL, NONE, SLIDING  # noqa: E402
from models import prompt  # noqa: E402

_HEAD = """# Models

Written by `benchmarks/modelpage.py` from the tiny random models of `tests/zoo.py`, transformers {version}; a test
checks that it is current.

Each model reads {prompt} tokens: past its windows of {window} tokens, and past the positions that a scaled rope was
trained on. Its cache is saved at once, and also saved and appended in three steps, with recipe `exact`. It is restored
for a model that was built anew, whole and as a prefix. The same layers, lengths and bits come back, the logits of the
next tokens are equal bit for bit, and greedy generation gives the same tokens (`tests/test_models.py`).
"Also tested" adds:

- *static*, *fp8*: restored into a `StaticCache`, into a `QuantizedCache` of transformers' own backend `fp8`; logits
  equal bit for bit those after a prefill into such a cache.
- *batch*: four rows of unequal length joined by `batch`, each row's logits within 1e-5 of the row alone
  (`tests/test_batches.py`).
- *devices*: each layer on the device that `restore(device=…)` names for it (CPU and meta).
"""
_FOOT = """
## Refused

By name of the layer, and nothing is written. Attention comes first in these models where it can, so that a cache cut
short would look whole.

{refused}

Encoder-decoder caches (T5) are refused as well: cross-attention is not stored.

## What to know

- Sliding layers, and chunked ones, hold the last window − 1 tokens. A prefix can be restored where its window is
  stored: at the end, and wherever the archive was appended to in steps shorter than a window.
- Dynamic and longrope frequencies depend on the length that the model has seen. Keys come back as they were cached, so
  the model goes on as it would have. The keys of one prefill of all tokens would be others.
- Rope tables of transformers remember the longest text a model object has read. With rope type `dynamic`, a model that
  has read a longer text goes on differently, archived or not.
- Latent attention (MLA) is stored as transformers caches it: the latent as keys, the rotary part as values.
- Layers that read another layer's keys store nothing.
- A cache made without the model's config, `DynamicCache()`, keeps every token of sliding layers; so does its archive.

Not run here: offloaded caches (`DynamicCache(offloading=True)` needs CUDA), quanto and HQQ caches, real second devices.
"""


def main() -> int:
    PAGE.write_text(made(transformers.__version__), encoding="utf-8")
    return 0


def written_for() -> str:
    """The version of transformers that the page names."""
    return re.findall(r"transformers (\S+);", PAGE.read_text(encoding="utf-8"))[0]


def made(version: str) -> str:
    """The page, from caches of all models."""
    ids = prompt(zoo.PROMPT)
    rows = [["model", "here for", "layers: KV heads x width", "stored", "also tested"]]
    for entry in zoo.MODELS:
        geometry = take_cache(zoo.own_cache(entry.build(), ids)).geometry
        runs = geometry.runs()
        stored = dict.fromkeys(_stored(layer) for _, layer in runs)
        rows.append(
            [entry.name, entry.trait, "; ".join(_layers(*run) for run in runs), ", ".join(stored), _also(entry)]
        )
    refused = [["model", "what it has", "error"]]
    for entry in zoo.REFUSED:
        try:
            take_cache(zoo.own_cache(entry.build(), ids))
        except UnsupportedCache as error:
            refused.append([entry.name, entry.trait, str(error)])
        else:
            raise SystemExit(f"{entry.name} was expected to be refused")
    head = _HEAD.format(version=version, prompt=zoo.PROMPT, window=zoo.WINDOW)
    return head + "\n" + _table(rows) + "\n" + _FOOT.format(refused=_table(refused))


def _layers(count: int, layer: Any) -> str:
    """As "2 sliding: 2 x 16", or with K and V where they differ."""
    k, v = ((side.heads, side.width) for side in (layer.key, layer.value))
    if layer.kind == NONE:
        return f"{count} {layer.kind}"
    shape = f"{k[0]} x {k[1]}" if k == v else f"K {k[0]} x {k[1]}, V {v[0]} x {v[1]}"
    return f"{count} {layer.kind}: {shape}"


def _stored(layer: Any) -> str:
    if layer.kind == SLIDING:
        return f"last {layer.window - 1} tokens"
    return "every token" if layer.kind == FULL else "nothing"


def _also(entry: Any) -> str:
    lists = {"static": zoo.STATIC, "fp8": zoo.QUANTIZED, "batch": zoo.BATCHED, "devices": zoo.DEVICES}
    return ", ".join(what for what, names in lists.items() if entry.name in names)


def _table(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
