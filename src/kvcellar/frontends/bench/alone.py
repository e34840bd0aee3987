"""What a restore may read: the archive, profiles, and the program's own files. Anything else is cheating, and fails.

A recipe that keeps what it should have coded in another file, or asks another process for it, would look small. While
`reading_only` is on, Python's audit events tell of every file that is opened, every connection and every new process.
(Libraries that open files by themselves raise no such events; what they hand out was named by Python code before.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import KVCellarError
from ...profile import home

_CODE = frozenset((".py", ".pyc", ".so", ".nbi", ".nbc"))
_REFUSED = ("socket.connect", "subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
_PACKAGE = Path(__file__).resolve().parents[2]
_allowed: list[tuple[str, ...]] = []
_seen: list[str] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _allowed:
        return
    if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
        path = Path(os.path.abspath(os.fsdecode(args[0])))
        code = not _CODE.isdisjoint(path.suffixes) or any(part.endswith(".dist-info") for part in path.parts)
        if not code and not any(path.is_relative_to(each) for each in _allowed[-1]):
            _seen.append(f"opened {path}")
    elif event in _REFUSED:
        _seen.append(f"asked for {event}")


@contextmanager
def reading_only(archive: str | os.PathLike[str]) -> Iterator[None]:
    """Raise KVCellarError when what runs inside has read, or tried to read, more than it may."""
    if _hook not in _installed:
        sys.addaudithook(_hook)
        _installed.append(_hook)
    own = (archive, home() / "profiles", _PACKAGE, sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev")
    _allowed.append(tuple(os.path.abspath(each) for each in own))
    _seen.clear()
    try:
        yield
    finally:
        _allowed.pop()
    if _seen:
        raise KVCellarError(f"the archive does not decode alone: restoring it {_seen[0]}")


_installed: list[Any] = []
