"""Which machine, versions and commit a measurement was made with: without them a figure is worth little."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIBRARIES = ("torch", "transformers", "numpy", "numba", "blosc2", "zstandard", "safetensors", "hqq", "optimum-quanto")


def machine() -> dict[str, Any]:
    """CPU, cores, memory, versions, commit and date."""
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
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".."], check=False).returncode
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
