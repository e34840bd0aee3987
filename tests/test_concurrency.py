"""Many processes on one archive: field cases G24 and G25 (shared/FIELD_CASES.md), forks, and readers that stay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pytest

import kvcellar
from crashers import BLOCK, Worker, append, cache_of, held, held_by, save, start, version
from kvcellar.errors import ArchiveNotFound, StorageError

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its processes"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store" / "a.kvc"


@contextmanager
def readers(path: Path, *, verify: bool) -> Iterator[list[dict]]:
    """Two processes read the archive as long as the block runs; what they saw is in the list then."""
    stop = path.parent.parent / "stop"
    looking = [start("looking", path=path, stop=stop, verify=verify) for _ in range(2)]
    seen: list[dict] = []
    try:
        yield seen
    finally:
        stop.touch()
        seen += [worker.results()[-1] for worker in looking]


def finish(workers: list[Worker]) -> None:
    for worker in workers:
        worker.results()


def test_field_g24_eight_processes_save_to_one_path(path: Path) -> None:
    """Four of them the same content, four other contents, 50 times each."""
    numbers = [[1] * 50] * 4 + [[writer * 50 + i for i in range(50)] for writer in range(4)]
    with readers(path, verify=True) as seen:
        finish([start("racing", path=path, numbers=mine) for mine in numbers])
    found = held(path)
    assert found is not None
    number = found[0] // 1000
    assert found == version(number, 1 + number % 23)
    assert number in {mine[-1] for mine in numbers}, "the last save of a process is what stays"
    with kvcellar.open(path) as archive:
        assert archive.verify().ok
    assert os.listdir(path.parent) == ["a.kvc"], "no file of a writer stays behind"
    for one in seen:
        assert one["seen"] > 20
        assert all(tokens == 1 + number % 23 for number, tokens in one["states"]), "a mixture of two versions"


@pytest.mark.parametrize("tokens", [25, 5])
def test_field_g25_four_processes_append_to_one_archive(tokens: int, path: Path) -> None:
    """Each 25 tokens, at once or in five turns; the length they start from ends in the middle of a block."""
    first = version(1, BLOCK + 1)
    save(path, first)
    with readers(path, verify=False) as seen:
        finish(
            [start("joining", path=path, writer=writer, times=25 // tokens, tokens=tokens) for writer in range(2, 6)]
        )
    found = held(path)
    assert found is not None
    assert found[: len(first)] == first
    runs = [(writer, len(list(run))) for writer, run in groupby(found[len(first) :])]
    assert {writer: sum(n for who, n in runs if who == writer) for writer in range(2, 6)} == dict.fromkeys(
        range(2, 6), 25
    )
    assert all(length % tokens == 0 for _, length in runs), "another writer's tokens came between"
    with kvcellar.open(path) as archive:
        assert archive.verify().ok
    assert os.listdir(path.parent) == ["a.kvc"]
    for one in seen:
        assert one["seen"] > 0
        assert all((length - len(first)) % tokens == 0 for _, length in one["states"]), "half an append"


def test_a_fork_with_an_archive_open_for_writing(path: Path) -> None:
    """File and lock are shared with the child: it may read and close, and only its parent may write."""
    save(path, version(1, 2))
    assert start("sharing", path=path).results() == ["done"]
    assert held(path) == [*version(1, 3 * BLOCK + 2), 7]


def test_a_reader_keeps_its_state_whatever_others_do(path: Path) -> None:
    """Ten versions by another process, appends, a compaction, and the end of the file."""
    save(path, version(1, 9))
    with kvcellar.open(path, identity="m") as replaced:
        finish([start("racing", path=path, numbers=list(range(2, 12)))])
        state = held(path)
        assert state == version(11, 12)
        with kvcellar.open(path, identity="m") as appended:
            finish([start("joining", path=path, writer=3, times=3, tokens=3)])
            with kvcellar.open(path, identity="m", mode="a") as archive:
                archive.compact()
            with kvcellar.open(path, identity="m") as deleted:
                path.unlink()
                for archive, ids in ((replaced, version(1, 9)), (appended, state), (deleted, [*state, *[3] * 9])):
                    assert held_by(archive) == ids
                    assert archive.verify().ok
    assert held(path) is None


def test_a_writer_whose_file_was_deleted_or_replaced_says_so(path: Path) -> None:
    """Rather than write where nobody will read."""
    ids = version(1, 9)
    for change in (path.unlink, lambda: os.replace(path.with_name("other"), path)):
        save(path.with_name("other"), version(2, 3))
        save(path, ids[:6])
        with kvcellar.open(path, identity="m", mode="a") as archive:
            change()
            for write in (lambda: archive.append(cache_of(ids), ids), archive.compact):
                with pytest.raises(StorageError, match="replaced while it was open"):
                    write()
            assert held_by(archive) == ids[:6]
    assert held(path) == version(2, 3)
    with pytest.raises(ArchiveNotFound):
        append(path.with_name("absent"), ids)
