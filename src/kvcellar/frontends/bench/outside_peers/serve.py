"""The peer's side of the protocol: one JSON object a line in, one a line out, tensors in safetensors files.

    {"ready": true}                                                    first, when everything is loaded
    {"cache", "peer", "options", "model": {"rope_theta", "head_dim", "folder"}, "following"?, "out"}   → the answer,
    {"nbytes", "payload_nbytes", "profile_nbytes", "save_s", "restore_s", "kept", "note"}   or   {"error": "…"}

`cache` names a file of `k0, v0, k1, …`, each (H, T, D) in the model's dtype, and `tokens`, int64 (T,), when they are
known. `out` then holds the restored `k0, v0, …`. A peer that runs the model itself leaves the tokens it kept there
instead, each (H, T′, D) at their old positions, where all heads and layers kept equally many, and, when the message
has `following`, `logits` (n − 1, V), which predict its tokens 1…n−1. `restore_s` is null where saving and restoring
are one step.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Message = dict[str, Any]
Answer = dict[str, Any]


def serve(load: Callable[[], Callable[[Message], Answer]], *packages: str) -> None:
    """Answer messages until standard input ends. `load` imports what is needed and gives the function that answers.

    Standard output belongs to the protocol: whatever libraries print goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def say(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    try:
        answer = load()
        say({"ready": True, "versions": {package: version(package) for package in packages}})
    except Exception as error:
        say(_failure(error))
        return
    for line in sys.stdin:
        try:
            say(answer(json.loads(line)))
        except Exception as error:
            say(_failure(error))


def _failure(error: Exception) -> dict[str, str]:
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"}


def read_pairs(path: str) -> list[tuple[Any, Any]]:
    """(keys, values) of each layer in a cache file, each (H, T, D)."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    layers = sum(name.startswith("k") for name in tensors)
    return [(tensors[f"k{layer}"], tensors[f"v{layer}"]) for layer in range(layers)]


def write_pairs(path: str, pairs: list[tuple[Any, Any]], **others: Any) -> None:
    """`pairs` (H, T, D) per layer as a cache file, with `others` beside them."""
    from safetensors.torch import save_file

    sides = {f"{side}{layer}": x for layer, pair in enumerate(pairs) for side, x in zip("kv", pair, strict=True)}
    save_file({name: x.contiguous() for name, x in {**sides, **others}.items()}, path)


def answer(
    nbytes: int,
    save_s: float,
    restore_s: float | None,
    note: str,
    *,
    payload_nbytes: int | None = None,
    kept: float = 1.0,
) -> Answer:
    """An answer's fields. None of these peers needs a profile."""
    return {
        "nbytes": nbytes,
        "payload_nbytes": payload_nbytes,
        "profile_nbytes": 0,
        "save_s": save_s,
        "restore_s": restore_s,
        "kept": kept,
        "note": note,
    }
