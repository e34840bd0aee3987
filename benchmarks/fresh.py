"""Measurements that need a process of their own: the first restore, and peak memory.

Run by `exact.py` as ``python fresh.py WHAT JSON``; prints one JSON line.

Peak memory is the kernel's high-water mark (VmHWM), reset just before the call by writing 5 to /proc/self/clear_refs,
less what was resident then (VmRSS). A small save or restore goes before it, so that loading libraries and starting
threads does not count; the memory this leaves behind is handed back to the system first. Linux only.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import give_memory_back

IDENTITY = "benchmark"
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def first(path: str) -> dict[str, float]:
    """Seconds of the first and the second restore of this process, imports timed apart."""
    start = time.perf_counter()
    import kvcellar

    open_archive = kvcellar.open
    ready = time.perf_counter()
    from transformers import DynamicCache

    imported = time.perf_counter()
    spent = []
    for _ in range(2):
        begin = time.perf_counter()
        with open_archive(path, identity=IDENTITY) as archive:
            cache = archive.restore().cache
        spent.append(time.perf_counter() - begin)
        if type(cache) is not DynamicCache:
            raise SystemExit(f"restored a {type(cache).__name__}")
        del cache
    return {
        "import_kvcellar_s": ready - start,
        "import_transformers_s": imported - ready,
        "first_s": spent[0],
        "second_s": spent[1],
    }


def save_memory(tensors: str, small: str, out: str) -> dict[str, int]:
    """Bytes that `save` needs beyond the cache, which is in memory before and after."""
    from safetensors.torch import load_file

    import kvcellar
    from realcache import named_pairs

    named = {name: x.clone() for name, x in load_file(tensors).items()}
    ids = named.pop("ids")
    pairs = list(named_pairs(named))
    few = [(k[:, :, :64], v[:, :, :64]) for k, v in pairs]
    kvcellar.save(small, few, tokens=ids[:64], identity=IDENTITY)
    del named
    extra, _ = _peak(lambda: kvcellar.save(out, pairs, tokens=ids, identity=IDENTITY))
    return {"extra": extra}


def restore_memory(path: str, small: str) -> dict[str, int]:
    """Bytes that `open` and `restore` need beyond the tensors they return."""
    from transformers import DynamicCache  # noqa: F401 (loaded before the measurement)

    from realcache import restore

    restore(Path(small), IDENTITY)
    peak, cache = _peak(lambda: restore(Path(path), IDENTITY))
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    return {"extra": peak - held, "restored": held}


def _peak(call: Callable[[], Any]) -> tuple[int, Any]:
    give_memory_back()
    before = _resident("VmRSS")
    _CLEAR_REFS.write_text("5")
    result = call()
    return _resident("VmHWM") - before, result


def _resident(field: str) -> int:
    """Bytes the kernel reports in `field` of this process."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {field} in {_STATUS}")


def run_fresh(what: str, arguments: dict[str, Any], repeats: int) -> list[dict[str, float]]:
    """Results of `repeats` processes, one after the other."""
    command = [sys.executable, __file__, what, json.dumps({key: str(value) for key, value in arguments.items()})]
    found = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{what} failed in its own process:\n{done.stderr}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in found) for key in found[0]}


if __name__ == "__main__":
    MEASUREMENTS: dict[str, Callable[..., dict[str, Any]]] = {
        "first": first,
        "save_memory": save_memory,
        "restore_memory": restore_memory,
    }
    print(json.dumps(MEASUREMENTS[sys.argv[1]](**json.loads(sys.argv[2]))))
