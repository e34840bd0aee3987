"""A disk that refuses any one call, or fills up for real: our error, the last state readable, nothing deleted."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from transformers import DynamicCache

import kvcellar
from crashers import BLOCK, append, cache_of, held, held_by, save, start, version
from faults import Refusal, watching
from kvcellar.errors import StorageError
from models import pairs, same_bits

pytestmark = pytest.mark.usefixtures("quick")
ERRORS = [errno.EIO, errno.EACCES, errno.ENOSPC]
OLD, NEW = version(1, 6), version(1, 3 * BLOCK)
OTHER = version(2, 10)
LATE = ["fstat"]  # a file's size is asked for once more, for the report of an append that is done


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An archive of OLD, which was once shorter."""
    (tmp_path / "store").mkdir()
    save(tmp_path / "store" / "a.kvc", OLD[:5])
    append(tmp_path / "store" / "a.kvc", OLD)
    return tmp_path / "store" / "a.kvc"


def _each_refusal(path: Path, job: Callable[[], object], number: int, *, lasts: bool) -> tuple[Refusal, bool]:
    """Run `job` with its `number`th call refused; whether it failed, with an error of ours that gives the reason."""
    refusal = Refusal(number, ERRORS[number % len(ERRORS)], lasts=lasts)
    try:
        with watching(refusal), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that dead bytes stay
            job()
    except StorageError as error:
        told = error
    else:
        return refusal, False
    assert told.errno == refusal.error, refusal.refused
    assert str(path.parent) in str(told), "which file?"
    return refusal, True


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("operation", ["save over it", "append", "compact"])
def test_every_refused_call_of_a_write(operation: str, lasts: bool, path: Path, tmp_path: Path) -> None:
    jobs = {
        "save over it": (lambda: save(path, OTHER), OTHER),
        "append": (lambda: append(path, NEW), NEW),
        "compact": (lambda: _compact(path), OLD),
    }
    job, after = jobs[operation]
    shutil.copytree(path.parent, tmp_path / "before")
    failures = []
    for number in count():
        shutil.rmtree(path.parent)
        shutil.copytree(tmp_path / "before", path.parent)
        refusal, failed = _each_refusal(path, job, number, lasts=lasts)
        if not refusal.refused:
            break
        failures.append(failed)
        what = f"{refusal.refused[0]}, call {number}"
        assert held(path) in ([OLD, after] if failed else [after]), what
        if failed and operation == "append" and not lasts and refusal.refused != LATE:
            assert held(path) == OLD, f"{what}: an append that failed is there all the same"
        if not lasts:
            assert os.listdir(path.parent) == ["a.kvc"], f"{what}: litter"
        job()
        assert held(path) == after
        assert os.listdir(path.parent) == ["a.kvc"]
    assert sum(failures) > 10
    assert held(path) == after


def _compact(path: Path) -> None:
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.compact()


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
def test_an_archive_that_stays_open_goes_on_after_any_refusal(lasts: bool, path: Path) -> None:
    """What it says it holds is what the file holds, and the next append adds to just that."""
    for number in count():
        save(path, OLD[:5])
        archive = kvcellar.open(path, identity="m", mode="a")
        with archive:
            refusal, failed = _each_refusal(path, lambda: archive.append(cache_of(NEW), NEW), number, lasts=lasts)  # noqa: B023
            if not refusal.refused:
                break
            what = f"{refusal.refused[0]}, call {number}"
            assert held_by(archive) in ([OLD[:5], NEW] if failed else [NEW]), what
            if not lasts:
                assert held_by(archive) == held(path), what
                assert not failed or refusal.refused == LATE or held_by(archive) == OLD[:5], what
            longer = version(1, 20)
            archive.append(cache_of(longer), longer)
            assert held_by(archive) == longer, what
        assert held(path) == longer, what
    assert number > 5


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
def test_every_refused_call_of_a_read(lasts: bool, path: Path) -> None:
    """Nothing is given back, nothing is changed, and the same archive can be read as soon as the disk can be."""
    before = path.read_bytes()

    def looks() -> list[object]:
        with kvcellar.open(path, identity="m") as archive:
            return [archive.info(), held_by(archive), archive.restore(positions=3).matched, archive.verify().ok]

    expected = looks()
    for number in count():
        refusal, failed = _each_refusal(path, looks, number, lasts=lasts)
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == ["a.kvc"]
        if not refusal.refused:
            break
        assert failed or refusal.refused == ["close"], f"{refusal.refused[0]}, call {number}: passed over in silence"
        assert looks() == expected
    assert number > 20


def test_a_refused_restore_can_be_repeated(path: Path) -> None:
    with kvcellar.open(path, identity="m") as archive:
        expected = held_by(archive)
        for number in count():
            refusal, failed = _each_refusal(path, archive.restore, number, lasts=False)
            if not refusal.refused:
                break
            assert failed
            assert held_by(archive) == expected
            assert archive.restore().matched == len(expected)
    assert number > 0


def test_a_refused_restore_leaves_the_target_empty(path: Path) -> None:
    """Field case G22: never half a cache; the same target can be filled as soon as the disk can be read."""
    with kvcellar.open(path, identity="m") as archive:
        for number in count():
            target = DynamicCache()
            refusal, failed = _each_refusal(path, lambda: archive.restore(into=target), number, lasts=False)  # noqa: B023
            if not refusal.refused:
                break
            assert failed
            assert target.get_seq_length() == 0
            archive.restore(into=target)
            assert same_bits(pairs(target), cache_of(OLD))
    assert number > 0


def _trie_file(path: Path) -> Path | None:
    return next(path.parent.glob(".kvcellar-*.trie"), None)


@pytest.mark.parametrize("known", [False, True], ids=["no trie", "trie"])
def test_find_makes_do_with_any_one_call_refused(path: Path, known: bool) -> None:
    """What could not be read is read once more: by the scan behind the trie, or by that of all archives."""
    refused_calls = set()
    for number in count():
        if known:
            kvcellar.find(path.parent, OLD, identity="m")
            assert _trie_file(path)
        elif trie := _trie_file(path):
            trie.unlink()
        refusal = Refusal(number, errno.EIO)
        try:
            with watching(refusal):
                found = kvcellar.find(path.parent, OLD, identity="m")
        except StorageError:
            assert refusal.refused == ["scandir"], "the folder itself"
            continue
        if not refusal.refused:
            break
        refused_calls |= set(refusal.refused)
        assert (found.path, found.matched) == (str(path), len(OLD)), refusal.refused
        assert kvcellar.find(path.parent, OLD, identity="m").matched == len(OLD)
    assert number > 5
    assert {"open", "pread"} <= refused_calls


@pytest.mark.parametrize("known", [False, True], ids=["no trie", "trie"])
def test_find_passes_over_what_it_cannot_read_now_and_finds_it_again(path: Path, known: bool) -> None:
    """Calls about the archive alone are refused, from one on: never an answer from the trie alone."""
    passed_over = 0
    for number in count():
        if known:
            kvcellar.find(path.parent, OLD, identity="m")
            assert _trie_file(path)
        elif trie := _trie_file(path):
            trie.unlink()
        refusal = Refusal(number, errno.EIO, lasts=True, about=path.name)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with watching(refusal):
                found = kvcellar.find(path.parent, OLD, identity="m")
        if not refusal.refused:
            break
        if set(refusal.refused) == {"close"}:  # nothing was missed by then
            assert found.matched == len(OLD)
            continue
        assert (found.path, found.matched) == (None, 0), refusal.refused
        assert "passed over a.kvc" in str(told[0].message)
        passed_over += 1
        assert kvcellar.find(path.parent, OLD, identity="m").matched == len(OLD)
    assert passed_over > 5


def test_places_without_locks_take_new_archives_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An append there would not be alone; and what others are writing there must not be taken for litter."""
    import portalocker

    def lock(*_: object) -> None:
        raise portalocker.exceptions.LockException(OSError(errno.EOPNOTSUPP, "not supported"))

    pending = path.parent / ".kvcellar-1-0123456789abcdef.tmp"
    pending.touch()
    monkeypatch.setattr(portalocker, "lock", lock)
    save(path.with_name("new.kvc"), OTHER)
    assert held(path.with_name("new.kvc")) == OTHER
    for write in (lambda: append(path, NEW), lambda: save(path, OTHER)):
        with pytest.raises(StorageError, match="cannot lock"):
            write()
    assert held(path) == OLD
    assert pending.exists()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_private_archive_stays_private(mode: int, path: Path) -> None:
    path.chmod(mode)
    save(path, OTHER)
    assert path.stat().st_mode & 0o777 == mode
    append(path, [*OTHER, 7])
    _compact(path)
    assert path.stat().st_mode & 0o777 == mode


# --- full for real


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the process that is limited")
def test_a_limit_on_the_file_size(path: Path) -> None:
    """The kernel cuts a write anywhere: each limit up to the size that is needed."""
    pytest.importorskip("resource")
    tried = start("limited", path=path, old=OLD, new=NEW).results()
    assert len(tried) > 20
    assert held(path) == NEW
    assert held(Path(f"{path}.new")) == NEW


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the process that sees the small disk")
def test_a_full_disk(tmp_path: Path) -> None:
    """A file system of 64 KiB that only the worker sees."""
    *_, last = start("filling", folder=tmp_path).results()
    if "skip" in last:
        pytest.skip(last["skip"])
    assert last["appended"] > 10
    assert last["saved"] > 2
