"""What every benchmark shares: which machine it ran on, how repeats are timed, and where results go."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LIBRARIES = ("torch", "transformers", "numpy", "numba", "blosc2", "zstandard", "safetensors")


def machine() -> dict[str, Any]:
    """CPU, cores, memory, versions, commit and date: without them a figure is worth little."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """Hash of the checked-out commit, with ``+`` when files that git follows differ from it."""
    try:
        git = ["git", "-C", str(HERE)]
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "../src"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + "+" * bool(changed)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    fields = dict.fromkeys(("vendor_id", "cpu family", "model", "model name"), "")
    for line in info.read_text().splitlines() if info.exists() else []:
        key, _, value = line.partition(":")
        if key.strip() in fields:
            fields[key.strip()] = value.strip()
    name = fields["model name"] or platform.processor()
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if fields["model"] else name


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm: int = 1,
    before: Callable[[], object] = gc.collect,
) -> dict[str, list[float]]:
    """Seconds of every call, the cases taking turns so that a slow minute of the machine hits all of them.

    Odd rounds run in reverse order, so none always follows the same other. A result is freed and `before` is called,
    outside the time, before the next call.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(-warm, rounds):
        for name in list(cases) if number % 2 == 0 else list(cases)[::-1]:
            before()
            spent = timed(cases[name])
            if number >= 0:
                seconds[name].append(spent)
    return seconds


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call; its result is freed after the time is taken."""
    start = time.perf_counter()
    result = call()
    spent = time.perf_counter() - start
    del result
    return spent


def give_memory_back() -> None:
    """Hand what the allocator keeps of freed memory back to the system (glibc; elsewhere only collects garbage).

    Otherwise repeats in a loop may get the very pages they had, which a program that restores once never does; a page
    fault for each 4 KiB of 46 MB costs as much as decoding does.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def summary(seconds: list[float], nbytes: int | None = None) -> dict[str, Any]:
    """Median, fastest and slowest of some repeats; with the bytes they handled, also MB/s (10⁶) at the median."""
    middle = statistics.median(seconds)
    figures = {"median_s": middle, "min_s": min(seconds), "max_s": max(seconds), "repeats": len(seconds)}
    return figures if nbytes is None else {**figures, "mb_per_s": nbytes / middle / 1e6}


def rounded(value: Any) -> Any:
    """`value` with every float cut to five digits, which is more than any of them deserves."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_result(name: str, result: Mapping[str, Any]) -> Path:
    """`benchmarks/results/NAME.json`, from which the README's table is made."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(rounded(result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
