"""What a restore costs beside a prefill: the work of all threads, in turns with the prefill's, and FLOPs."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvcellar.frontends.bench.run import Bench
from kvcellar.frontends.bench.speed import _prefill, give_memory_back, opened_with
from kvcellar.frontends.library import save
from kvcellar.frontends.replayer import Replayer
from kvcellar.pipeline import Pipeline
from kvcellar.profile import Profile
from kvcellar.recipe import Recipe

REPEATS = 5


def costs_of(
    bench: Bench, curves: dict[str, list[Recipe]], profiles: dict[str, Profile | None], others: list[Recipe]
) -> dict[str, Any]:
    """Work of a restore of the first window, in turns with a prefill, and FLOPs of both."""
    local, window = bench.local, bench.windows[0]
    ids = window.ids[: window.prefix]
    prefill = bench.prefill()
    if prefill.dtype != str(local.model.dtype).removeprefix("torch."):
        print(f"the fastest prefill is in {prefill.dtype}: its ratios are of {local.model.dtype} here", flush=True)
    recipes = {**{name: of[0] for name, of in curves.items()}, **{recipe.name: recipe for recipe in others}}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ("prefill", *recipes)}
    with tempfile.TemporaryDirectory(prefix="kvcellar-bench-") as scratch:
        for name, recipe in recipes.items():
            save(
                Path(scratch) / name,
                bench.original(window),
                tokens=ids,
                identity=local.identity,
                recipe=recipe,
                profile=profiles[name],
                replay_with=local.model,
            )

        def restore(name: str) -> None:
            with opened_with(local, Path(scratch) / name) as archive:
                archive.restore()

        calls: dict[str, Callable[[], None]] = {"prefill": partial(_prefill, local.model, ids)}
        calls |= {name: partial(restore, name) for name in recipes}
        for turn in range(REPEATS + 1):
            for name, call in calls.items():
                give_memory_back()
                work, wall = time.process_time(), time.perf_counter()
                call()
                if turn:
                    spent[name].append((time.process_time() - work, time.perf_counter() - wall))
    work = {name: statistics.median(w for w, _ in each) for name, each in spent.items()}
    flops = {"prefill": _counted(calls["prefill"])}
    flops |= {name: _flops(bench, recipe, profiles[name], list(ids)) for name, recipe in recipes.items()}
    found: dict[str, Any] = {
        name: {
            "restore_work_s": work[name],
            "restore_wall_s": statistics.median(w for _, w in spent[name]),
            "restore_to_prefill": work[name] / work["prefill"],
            "flops_per_token": flops[name] / len(ids),
            "flops_to_prefill": flops[name] / flops["prefill"],
        }
        for name in recipes
    }
    return found | {
        "prefill": {
            "work_s": work["prefill"],
            "wall_s": statistics.median(w for _, w in spent["prefill"]),
            "flops_per_token": flops["prefill"] / len(ids),
            "dtype": str(local.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }
    }


def _counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def _flops(bench: Bench, recipe: Recipe, profile: Profile | None, ids: list[int]) -> int:
    """Of one restore: the replayed layers as torch counts them, and twice the numbers of the decoder's matrices."""
    pipeline, counted = Pipeline(recipe, bench.geometry(), profile), 0
    if pipeline.replays:
        replayer = Replayer(bench.local.model, pipeline.replays, bench.geometry())
        counted = _counted(lambda: replayer(np.array(ids)))
    tensors = {} if profile is None else profile.tensors
    per_group = [name for name in tensors if name.startswith(("predict.down.", "predict.up."))]
    per_group += [name for name in tensors if name.startswith(("transform.loud.", "transform.basis."))]
    return counted + 2 * len(ids) * sum(int(np.prod(tensors[name].shape)) for name in per_group)
