"""How long things take, to be set against each other within one run on the same cores.

What is compared with a recipe is the fastest there is: a prefill that computes the logits of the last token only, in
the faster of the dtypes, and a copy of the raw cache into memory that is there already. Figures are medians of a few
repeats; what comes first, and warms up kernels, is not counted.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from ...cache import torch_dtype
from ..cli.models import LocalModel, empty_cache, fits_memory
from ..library import open as open_archive

REPEATS = 5
PREFILL_REPEATS = 3
PREFILL_BUDGET_S = 60.0
ACCESS_BUDGET_S = 2.0
_TRIAL_TOKENS = 256
_HOPELESS, _FAR = 3.0, 2.0
_PREFILL_DTYPES = (torch.float32, torch.bfloat16)


class Prefill(NamedTuple):
    """The fastest prefill: seconds, the dtype it took, and the threads it ran on."""

    seconds: float
    dtype: str
    threads: int


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call; its result is freed after the time is taken."""
    started = time.perf_counter()
    result = call()
    spent = time.perf_counter() - started
    del result
    return spent


def _work(call: Callable[[], object]) -> float:
    """Seconds that all cores work on one call, which other programs do not lengthen as they do its time."""
    started = time.process_time()
    call()
    return time.process_time() - started


def give_memory_back() -> None:
    """Hand what the allocator keeps of freed memory back to the system (glibc; elsewhere only collects garbage).

    A restore would otherwise get pages that an earlier one has touched, which a program that restores once never does.
    """
    gc.collect()
    trim_memory()


def trim_memory() -> None:
    """The same without a look for garbage, which takes long where much is loaded."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


class PeakMemory:
    """Peak memory of a block above what was there before it (Linux; None elsewhere)."""

    bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.before = _status("VmRSS")
        except OSError:
            self.before = None
        return self

    def __exit__(self, *exc: object) -> None:
        if self.before is not None:
            self.bytes = (_status("VmHWM") or 0) - self.before


def _status(key: str) -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


def fastest_prefill(local: LocalModel, ids: Sequence[int]) -> Prefill:
    """Median seconds of a prefill of `ids`, in the dtype the model is in, float32 or bfloat16, whichever is fastest.

    At most 3 repeats a dtype, and none is begun after a minute. Not tried is a dtype that takes three times the work on
    a few tokens, as bfloat16 is on a CPU without instructions for it, or one whose weights would fill more than a
    quarter of the machine's memory beside the model's.
    """
    tried: list[tuple[float, str]] = []
    best_trial = float("inf")
    for dtype in dict.fromkeys((local.model.dtype, *_PREFILL_DTYPES)):
        if dtype != local.model.dtype and not fits_memory(local.model, dtype, share=0.25):
            continue
        model = local.model if dtype == local.model.dtype else copy.deepcopy(local.model).to(dtype)
        trial = min(_work(partial(_prefill, model, ids[:_TRIAL_TOKENS])) for _ in range(2))
        too_long = trial * len(ids) / min(len(ids), _TRIAL_TOKENS) > PREFILL_BUDGET_S and trial > best_trial
        best_trial = min(best_trial, trial)
        if trial <= _HOPELESS * best_trial and not too_long:
            best = min(tried)[0] if tried else math.inf
            tried.append((_prefill_s(model, ids, best), str(dtype).removeprefix("torch.")))
        del model
        gc.collect()
    seconds, name = min(tried)
    return Prefill(seconds, name, torch.get_num_threads())


def _prefill_s(model: Any, ids: Sequence[int], best: float) -> float:
    """Median seconds; once is enough for one that is far from the `best` so far."""
    spent: list[float] = []
    while len(spent) < PREFILL_REPEATS and sum(spent) < PREFILL_BUDGET_S and max(spent, default=0) < _FAR * best:
        spent.append(timed(partial(_prefill, model, ids)))
    return median(spent)


@torch.inference_mode()
def _prefill(model: Any, ids: Sequence[int]) -> None:
    model(torch.tensor([list(ids)]), cache=empty_cache(), use_cache=True, logits_to_keep=1)


def memcpy_s(cache: Any) -> float:
    """Median seconds of copying all keys and values of a transformers cache into memory that is there already."""
    sides = [side for layer in cache.layers for side in (layer.keys, layer.values)]
    targets = [torch.empty_like(side) for side in sides]

    def copy_all() -> None:
        for side, target in zip(sides, targets, strict=True):
            target.copy_(side)

    return median([timed(copy_all) for _ in range(REPEATS + 1)][1:])


def append_s(archive: Path, local: LocalModel, cache: Any, ids: Sequence[int]) -> float | None:
    """Median seconds of appending one token to a copy of `archive`, open already; the copy grows by a few tokens.

    `cache` holds all tokens of `ids`, in any dtype; the archive holds the first of them and lacks at least two. None
    for a cache whose layers hold another number of tokens than it stands for.
    """
    if any(layer.keys.shape[2] != len(ids) for layer in cache.layers):
        return None
    with tempfile.TemporaryDirectory(prefix="kvcellar-bench-") as scratch:
        copied = shutil.copyfile(archive, Path(scratch) / "grown.kvc")
        with opened_with(local, copied, mode="a") as opened:
            held, spent = len(opened), []
            sides = [
                (layer.keys.to(torch_dtype(stored.key.dtype)), layer.values.to(torch_dtype(stored.value.dtype)))
                for layer, stored in zip(cache.layers, opened.manifest.geometry.layers, strict=True)
            ]
            for stop in range(held + 1, min(len(ids), held + REPEATS + 1) + 1):
                pairs = [(keys[:, :, :stop], values[:, :, :stop]) for keys, values in sides]
                started = time.perf_counter()
                opened.append(pairs, ids[:stop])
                spent.append(time.perf_counter() - started)
    return median(spent[1:])


def opened_with(local: LocalModel, archive: str | Path, mode: str = "r") -> Any:
    """The archive, opened for a model that its recipe may run again."""
    return open_archive(archive, identity=local.identity, replay_with=local.model, mode=mode)


def random_access_s(archive: Path, local: LocalModel) -> float:
    """Median seconds of reading the middle token of the middle layer.

    The archive is opened anew for each repeat, and its first token read, which loads the profile and makes the stages
    ready: neither is counted, and nothing is left of the reads before. Where that takes long there are fewer repeats.
    """
    spent: list[float] = []
    began = time.perf_counter()
    while len(spent) < 2 or (len(spent) <= REPEATS and time.perf_counter() - began < ACCESS_BUDGET_S):
        with opened_with(local, archive) as opened:
            layer, token = len(opened.manifest.geometry) // 2, len(opened) // 2
            opened.read(layer, 0, 1)
            started = time.perf_counter()
            opened.read(layer, token, token + 1)
            spent.append(time.perf_counter() - started)
    return median(spent[1:])
