"""The process that decodes and scores, seen from the one that saves."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ...errors import KVCellarError
from .jsonlines import tell


class Scorer:
    """A process that decodes: told paths, never shown a cache. Raises KVCellarError when it dies.

    Each comes from a process that has loaded the model in `folder` and nothing else (`worker.py`), so what one
    restored cannot serve another; one at a time.
    """

    def __init__(self, folder: Path):
        self.process = _server(folder)
        self._send({"fresh": True})

    def score(self, archive: Path, reference: Path, prefix: int, out: Path, *, speed: bool = True) -> dict[str, Any]:
        """Costs of restoring `archive`, and with `speed` of appending and random access; the scores go to `out`."""
        paths = {"archive": str(archive), "reference": str(reference), "out": str(out)}
        return self._send({**paths, "prefix": prefix, "speed": speed})

    def ask(self, archive: Path, prefix: int, task: dict[str, Any]) -> dict[str, Any]:
        """The margin and exact match of a task behind the archive of its context."""
        return self._send({"archive": str(archive), "prefix": prefix, "task": task})

    def _send(self, message: dict[str, Any]) -> dict[str, Any]:
        tell(self.process, message)
        return _answer(self.process)

    def close(self) -> None:
        if self.process.poll() is None:
            self._send({"done": True})


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise KVCellarError(f"the decoding process ended with exit code {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise KVCellarError(f"decoding in a new process failed: {answer['error']}")
    return answer


_running: list[tuple[object, subprocess.Popen[str]]] = []


def _server(folder: Path) -> subprocess.Popen[str]:
    """The process that others come from; another one where model, threads or environment are others than before."""
    wanted = folder, torch.get_num_threads(), dict(os.environ)
    if _running and (_running[0][0] != wanted or _running[0][1].poll() is not None):
        _end()
    if not _running:
        command = [sys.executable, "-m", "kvcellar.frontends.bench.worker", str(folder), str(torch.get_num_threads())]
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        _running.append((wanted, started))
        _answer(started)
    return _running[0][1]


@atexit.register
def _end() -> None:
    while _running:
        process = _running.pop()[1]
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
