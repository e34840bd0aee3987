"""The local store's system calls, each of which a test may refuse, cut short, or not survive."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import kvcellar.store.local as local

WRITES = ("open", "pwrite", "ftruncate", "fsync", "replace", "unlink", "chmod")
CALLS = (*WRITES, "stat", "fstat", "pread", "preadv", "scandir", "close")
Before = Callable[[str, tuple[Any, ...]], None]


class _Watched:
    """The module `os` as the store sees it."""

    def __init__(self, before: Before, calls: tuple[str, ...]):
        self._before, self._calls = before, calls

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self._calls:
            return real

        def watched(*arguments: Any, **named: Any) -> Any:
            self._before(name, arguments)
            return real(*arguments, **named)

        return watched


@contextmanager
def watching(before: Before, calls: tuple[str, ...] = CALLS) -> Iterator[None]:
    """`before` runs ahead of each of the store's `calls` and may raise in its place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "os", _Watched(before, calls))
        yield


class Refusal:
    """Raises `error` at the `number`th of the calls it watches, and at all later ones if it `lasts`.

    `about`: only calls about the file of this name count, as far as the system tells which one a descriptor is of.
    """

    def __init__(self, number: int, error: int, *, lasts: bool = False, about: str | None = None):
        self.number, self.error, self.lasts, self.about = number, error, lasts, about
        self.seen = 0
        self.refused: list[str] = []

    def __call__(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self.about is not None and self.about != _file_of(arguments):
            return
        self.seen += 1
        if self.seen == self.number + 1 or (self.lasts and self.seen > self.number):
            self.refused.append(name)
            raise OSError(self.error, os.strerror(self.error))


def _file_of(arguments: tuple[Any, ...]) -> str | None:
    """The name of the file that a call is about, which its first argument names or has open (Linux)."""
    first = arguments[0] if arguments else None
    if isinstance(first, int):
        try:
            first = os.readlink(f"/proc/self/fd/{first}")
        except OSError:
            return None
    return None if first is None else os.path.basename(first)


class Death:
    """Kills this process at the `number`th moment: before each call it watches, and half-way through each write."""

    def __init__(self, number: int):
        self.left = number

    def __call__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._moment()
        if name == "pwrite":
            descriptor, data, offset = arguments
            if self.left == 0:
                os.pwrite(descriptor, data[: len(data) // 2], offset)
            self._moment()

    def _moment(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
