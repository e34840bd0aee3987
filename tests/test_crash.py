"""Writers killed at any moment: what was safe stays readable, the next writer goes on, and no litter stays for ever.

Field cases G21 and G24 (shared/FIELD_CASES.md) are about the same promise for errors; here the process just ends.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

import kvcellar
from crashers import BLOCK, Worker, append, held, save, start, version
from crashjobs import operate
from kvcellar.store.local import LocalStore

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the processes it kills"),
]
KILLED = -9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store" / "a.kvc"


def litter(path: Path) -> list[str]:
    return sorted(set(os.listdir(path.parent)) - {path.name})


# --- killed at each call that changes the disk


def _before(path: Path, operation: str) -> tuple[list[int] | None, list[int]]:
    """Prepare the archive; what it holds now, and what it must hold when the operation is through."""
    if operation == "save anew":
        return None, version(2, 10)
    save(path, version(1, 6))
    if operation == "save over it":
        return version(1, 6), version(2, 10)
    if operation == "append and compact":
        for tokens in (7, 8, 9, 10, 11):  # one more append, and dead bytes outweigh the live ones
            append(path, version(1, tokens))
        return version(1, 11), version(1, 12)
    return version(1, 6), version(1, 3 * BLOCK)


JOBS = {
    "save anew": "save",
    "save over it": "save",
    "append blocks and an index": "append with an index",
    "append and compact": "append",
}


@pytest.mark.parametrize("operation", JOBS)
def test_killed_at_every_call_that_writes(operation: str, path: Path, tmp_path: Path) -> None:
    before, after = _before(path, operation)
    shutil.copytree(path.parent, tmp_path / "before")
    states = []
    for number in count():
        shutil.rmtree(path.parent)
        shutil.copytree(tmp_path / "before", path.parent)
        worker = start("dying", operation=JOBS[operation], path=path, ids=after, number=number)
        if worker.wait() == 0:
            break
        assert worker.wait() == KILLED, worker.results()
        states.append(held(path))
        assert states[-1] in (before, after), f"moment {number}"
        assert LocalStore(path.parent).names() == ([] if states[-1] is None else ["a.kvc"]), "litter is no archive"
        if states[-1] is not None:
            found = kvcellar.find(path.parent, states[-1], identity="m")
            assert (found.path, found.matched) == (str(path), len(states[-1]))
        if states[-1] != after:
            operate(JOBS[operation], str(path), after)
        assert held(path) == after, f"moment {number}: the next writer does not go on"
        with kvcellar.open(path) as archive:
            assert archive.verify().ok
    assert len(states) >= 5, "hardly anything was tried"
    switch = states.index(after)
    assert states == [before] * switch + [after] * (len(states) - switch), "back and forth"
    assert held(path) == after


@pytest.mark.parametrize("left_by", ["save", "compact"])
def test_the_next_new_file_removes_what_a_killed_writer_left(left_by: str, path: Path) -> None:
    save(path, version(1, 6))
    append(path, version(1, 9))
    assert start("dying", operation=left_by, path=path, ids=version(1, 9), number=4).wait() == KILLED
    (left,) = litter(path)
    save(path.with_name("another.kvc"), version(2, 3))
    assert litter(path) == ["another.kvc"], f"{left} stays for ever"
    assert held(path) == version(1, 9)


def test_what_a_living_writer_is_writing_is_no_litter(path: Path) -> None:
    """Nor is what only looks like it: other names, folders and links."""
    store = LocalStore(path.parent)
    pending = store.create("slow.kvc")
    pending.append(b"half of it")
    like = [".kvcellar-notes.tmp", ".kvcellar-1-0123456789abcdef.tmp.bak", ".kvcellar-2-0123456789abcdef.tmp"]
    for name in like[:2]:
        (path.parent / name).write_text("mine")
    (path.parent / like[2]).mkdir()
    (path.parent / ".kvcellar-3-0123456789abcdef.tmp").symlink_to(path.parent / like[0])
    for _ in range(2):
        save(path, version(1, 6))
    assert set(like) <= set(litter(path))
    assert (path.parent / ".kvcellar-3-0123456789abcdef.tmp").is_symlink()
    pending.append(b", and the other half")
    pending.commit()
    with store.open_reader("slow.kvc") as reader:
        assert reader.read(0, 100) == b"half of it, and the other half"


# --- killed at random moments

KILLS = 15


def _killed_after(worker: Worker, reported: int, seconds: float) -> list[int]:
    """All that the worker had reported when it was killed `seconds` after it had reported so many."""
    reports = [worker.report() for _ in range(reported)]
    time.sleep(seconds)
    worker.kill()
    while (one := worker.report()) is not None:
        reports.append(one)
    assert worker.wait() == KILLED, reports[-1]
    return reports


def _moments() -> Iterator[tuple[int, float]]:
    choose = random.Random(20260101)
    return ((choose.randint(1, 4), choose.uniform(0.0, 0.01)) for _ in range(KILLS))


def test_killed_while_saving(path: Path) -> None:
    first = 1
    for moment in _moments():
        safe = _killed_after(start("saving", path=path, first=first), *moment)[-1]
        states = {number: version(number, 1 + number % 23) for number in (safe, safe + 1)}
        found = held(path)
        assert found in states.values(), "neither the last version that was reported nor the one after"
        assert len(litter(path)) <= 1, "litter of one killed writer at most"
        first = found[0] // 1000 + 1
    assert first > KILLS
    save(path, version(1, 2))
    assert litter(path) == []


def test_killed_while_appending(path: Path) -> None:
    save(path, version(1, 2))
    torn = 0
    for seed, (reported, seconds) in enumerate(_moments()):
        safe = _killed_after(start("growing", path=path, seed=seed), reported + 1, seconds)[-1]
        found = held(path)
        assert found is not None
        assert found == version(1, len(found)), "another order"
        assert safe <= len(found) <= safe + 2 * BLOCK, "tokens that were reported safe are lost"
        with closing(kvcellar.open(path)) as archive:
            torn += archive.info().uncommitted_bytes > 0
    assert len(found) > KILLS
    append(path, [*found, 7])
    with kvcellar.open(path) as archive:
        assert archive.verify().ok, f"{torn} of the kills left bytes behind the last commit; they are gone now"
    save(path, version(1, 2))
    assert litter(path) == []
