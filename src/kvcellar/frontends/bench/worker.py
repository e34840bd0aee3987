"""Scores archives in a process of its own: all it knows of a cache is the archive's path.

    python -m kvcellar.frontends.bench.worker MODEL_DIR THREADS

loads the model and answers one JSON object a line with one. `{"fresh"}` forks a process for a recipe, so that the model
is loaded once and yet nothing of one recipe's archives is there for the next. That process answers `{"archive",
"prefix", "reference", "out", "speed"}` for a window and `{"archive", "prefix", "task"}`, until `{"done"}`. A recipe
that keeps anything in memory, and not in its file, has nothing to decode from here, and one that reads another file is
caught (`alone.py`). The first archive is restored twice, since a process's first restore also loads what decodes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ...errors import InvalidInput, KVCellarError
from ...evaluate.tasks import Task
from ..cli.models import LocalModel, MeasuredModel
from ..library import open as open_archive
from .alone import reading_only
from .reference import continuation_logits, write_scores
from .speed import PeakMemory, append_s, give_memory_back, memcpy_s, opened_with, random_access_s
from .tasks import scored
from .zero import FLOOR_ZERO_RESIDUAL as FLOOR_ZERO_RESIDUAL  # its stages register when they are imported


def score(
    local: LocalModel, archive: str, reference: str, prefix: int, out: str, *, speed: bool = True
) -> dict[str, Any]:
    """Restore `archive`, read the continuation behind it, and write the per-token scores to `out` (npz).

    Then, for `speed`, the cache that has grown serves to measure appending. The archive itself stays as it is.
    """
    cache, costs = _restored(local, archive, prefix)
    copying = memcpy_s(cache)
    expected = load_file(reference)  # not before: what decodes could look for it
    following: list[int] = expected["following"].tolist()
    logits = continuation_logits(local.model, following, cache)
    write_scores(expected, logits, Path(out))
    costs["memcpy_s"] = copying
    del expected, logits
    if not speed:
        return costs
    with open_archive(archive) as opened:
        ids = [*opened.tokens.tolist(), *following]
    return {
        **costs,
        "append_s": append_s(Path(archive), local, cache, ids),
        "random_access_s": random_access_s(Path(archive), local),
    }


def ask(local: LocalModel, archive: str, prefix: int, task: dict[str, Any]) -> dict[str, Any]:
    """Restore `archive` and put the task's question to it."""
    cache, _ = _restored(local, archive, prefix)
    return dict(scored(local, cache, Task(**{**task, "distractors": tuple(task["distractors"])})))


def _restored(local: LocalModel, archive: str, prefix: int) -> tuple[Any, dict[str, Any]]:
    """The cache in `archive`, which must stand for `prefix` tokens, and what restoring it took, in fresh memory."""
    give_memory_back()
    started = time.perf_counter()
    with PeakMemory() as peak, reading_only(archive), opened_with(local, archive) as opened:
        cache: Any = opened.restore().cache
        restore_s = time.perf_counter() - started
    held = int(cache.get_seq_length())
    if held != prefix:
        raise InvalidInput(f"the restored cache stands for {held} tokens, the window's prefix has {prefix}")
    return cache, {"restore_s": restore_s, "peak_bytes": peak.bytes}


def main() -> None:
    threads = int(sys.argv[2])
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    local = MeasuredModel(sys.argv[1])
    gc.freeze()  # what is loaded stays: each restore looks for garbage first
    _say(ready=True)
    while line := sys.stdin.readline():
        message = json.loads(line)
        if "done" in message:  # of a process that died, and whose error was told
            _say(done=True)
        elif "fresh" not in message:
            _say(error="expected a fresh process to be asked for")
        elif sys.platform != "linux":  # forks are not safe everywhere: this process is the only one
            serve(local, threads)
            _say(done=True)
            return
        elif child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            _say(**({"error": f"exit code {code}"} if code else {"done": True}))
        else:
            serve(local, threads)
            sys.stdout.flush()
            os._exit(0)


def serve(local: LocalModel, threads: int) -> None:
    """Answer for one recipe, until told that it is done."""
    torch.set_num_threads(threads)
    _say(ready=True)
    warm = False
    while line := sys.stdin.readline():
        message = json.loads(line)
        if "done" in message:
            return
        try:
            if not warm:
                _restored(local, message["archive"], message["prefix"])
                warm = True
            answer = ask(local, **message) if "task" in message else score(local, **message)
        except KVCellarError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say(**answer)


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
