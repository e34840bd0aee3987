"""Processes that write archives, to be killed, starved and raced, and what their archives must hold then.

Importing torch takes seconds, so one process does it once and forks the workers: `start("job", …)` takes
milliseconds. A job is a function of `crashjobs.py`; what it reports comes back line by line.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvcellar
from archives import bits
from kvcellar import Archive, Recipe

BLOCK = 4
RECIPE = Recipe(name="tiny", symbols={"id": "byteplanes-zstd/1"}, block=BLOCK)
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


# --- archives whose numbers follow from their token ids, so that any state can be checked by itself


def version(number: int, tokens: int) -> list[int]:
    """Token ids that tell which version they belong to and where in it they stand."""
    return [number * 1000 + i for i in range(tokens)]


def cache_of(ids: list[int]) -> Pairs:
    """Two layers with one head of width 2, float32; each token's numbers are its id's."""
    x = torch.tensor(ids, dtype=torch.float32)
    keys = torch.stack([x, -x - 1], dim=-1)[None, None]
    return [(keys * scale, keys * scale + 0.5) for scale in (1.0, 0.25)]


def save(path: Path | str, ids: list[int], **settings: Any) -> None:
    kvcellar.save(path, cache_of(ids), tokens=ids, **{"identity": "m", "recipe": RECIPE, **settings})


def append(path: Path | str, ids: list[int], **settings: Any) -> None:
    with kvcellar.open(path, identity="m", mode="a", **settings) as archive:
        archive.append(cache_of(ids), ids)


def held_by(archive: Archive) -> list[int]:
    """The token ids of an archive, once all its numbers have been compared with theirs."""
    ids: list[int] = archive.tokens.tolist()
    for layer, sides in enumerate(cache_of(ids)):
        for found, expected in zip(archive.read(layer, 0, len(ids)), sides, strict=True):
            assert np.array_equal(bits(found), bits(expected[0])), f"layer {layer} of {ids} holds other numbers"
    return ids


def held(path: Path | str) -> list[int] | None:
    """The same of the file at `path`; None where there is none."""
    try:
        with kvcellar.open(path, identity="m") as archive:
            return held_by(archive)
    except kvcellar.errors.ArchiveNotFound:
        return None


# --- workers


class Worker:
    """A forked process that runs one job."""

    def __init__(self, pid: int, reports: int):
        self.pid = pid
        self._reports = os.fdopen(reports)
        self.code: int | None = None

    def report(self) -> Any:
        """The next thing the job reports; None once it ended."""
        line = self._reports.readline()
        return json.loads(line) if line.endswith("\n") else None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)  # still ours: nobody else waits for it

    def wait(self) -> int:
        """Exit status, or minus the signal that ended it."""
        if self.code is None:
            self.code = int(_ask({"wait": self.pid}))
        return self.code

    def results(self) -> list[Any]:
        """All that is left to report by a job that must end well."""
        found = []
        while (one := self.report()) is not None:
            found.append(one)
        assert self.wait() == 0, found[-1] if found else f"ended with {self.code}"
        self._reports.close()
        return found


def start(job: str, **arguments: Any) -> Worker:
    """Run the function `job` of `crashjobs.py` in a process of its own; its arguments go through JSON."""
    reading, writing = os.pipe()
    try:
        return Worker(int(_ask({"job": job, "arguments": arguments}, writing)), reading)
    finally:
        os.close(writing)


def _ask(request: dict[str, Any], *descriptors: int) -> str:
    connection = _nursery()
    socket.send_fds(connection, [json.dumps(request, default=str).encode()], list(descriptors))
    answer = connection.recv(1 << 10)
    assert answer, "the process that forks the workers is gone"
    return answer.decode()


@cache
def _nursery() -> socket.socket:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(connection: socket.socket) -> None:
    """Fork a worker per request and say its process id; wait for one and say how it ended."""
    import crashjobs

    kvcellar.save  # noqa: B018 (loads what workers will use)
    gc.freeze()  # a collection in a worker would copy all of the memory it shares
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if not pid:
            connection.close()
            _work(getattr(crashjobs, request["job"]), request["arguments"], descriptors[0])
        os.close(descriptors[0])
        connection.send(str(pid).encode())


def _work(job: Any, arguments: dict[str, Any], descriptor: int) -> None:
    def report(value: Any) -> None:
        os.write(descriptor, json.dumps(value).encode() + b"\n")

    try:
        job(report, **arguments)
    except BaseException:
        with suppress(OSError):
            report(traceback.format_exc())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
