"""A folder of archives against a plain dict: any order of saves, appends, compactions, reads, searches and failures."""

from __future__ import annotations

import errno
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import kvcellar
from archives import bits
from crashers import RECIPE, cache_of, held_by
from faults import WRITES, Refusal, watching
from kvcellar.errors import ArchiveNotFound, StorageError, TokensMismatch
from models import pairs

NAMES = st.sampled_from(["a.kvc", "b.kvc", "c.kvc"])
SPACES = st.sampled_from(["", "tenant"])
SIZES = st.integers(1, 20)
VERSIONS = st.integers(0, 2)
FAILURES = st.tuples(st.integers(0, 14), st.sampled_from([errno.EIO, errno.ENOSPC, errno.EACCES]), st.booleans())


def ids_of(version: int, tokens: int) -> list[int]:
    """Versions share their first three tokens, so that searches have something to compare."""
    return [i if i < 3 else 100 * version + i for i in range(tokens)]


class Cellar(RuleBasedStateMachine):
    """`model` holds, by file name, the namespace and the token ids; every number follows from its id."""

    snapshots = Bundle("snapshots")

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.model: dict[str, tuple[str, list[int]]] = {}
        self.writers: dict[str, kvcellar.Archive] = {}
        self.open_snapshots: list[kvcellar.Archive] = []

    def path(self, name: str) -> Path:
        return Path(self.folder.name, name)

    def opened(self, name: str, mode: str = "r") -> kvcellar.Archive:
        return kvcellar.open(self.path(name), identity="m", namespace=self.model[name][0], mode=mode)

    def writer(self, name: str) -> kvcellar.Archive:
        if name not in self.writers:
            self.writers[name] = self.opened(name, "a")
        return self.writers[name]

    def save(self, name: str, ids: list[int], space: str) -> None:
        if name in self.writers:
            self.writers.pop(name).close()
        kvcellar.save(self.path(name), cache_of(ids), tokens=ids, identity="m", recipe=RECIPE, namespace=space)

    # --- writes

    @rule(name=NAMES, version=VERSIONS, tokens=SIZES, space=SPACES)
    def save_one(self, name: str, version: int, tokens: int, space: str) -> None:
        self.save(name, ids_of(version, tokens), space)
        self.model[name] = space, ids_of(version, tokens)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), more=SIZES, version=VERSIONS)
    def append_to_one(self, data: st.DataObject, more: int, version: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        space, ids = self.model[name]
        longer = ids + ids_of(version, len(ids) + more)[len(ids) :]
        assert self.writer(name).append(cache_of(longer), longer).tokens == len(longer)
        self.model[name] = space, longer

    @precondition(lambda self: self.model)
    @rule(data=st.data(), cut=st.integers(0, 25))
    def append_what_does_not_extend(self, data: st.DataObject, cut: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        ids = self.model[name][1]
        other = [*ids[:cut], 9999] if cut < len(ids) else [*ids[:-1], 9999, 1]
        with pytest.raises(TokensMismatch):
            self.writer(name).append(cache_of(other), other)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def compact_one(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        info = self.writer(name).compact()
        assert (info.tokens, info.commits, info.uncommitted_bytes) == (len(self.model[name][1]), 1, 0)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def close_or_delete_one(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        if name in self.writers:
            self.writers.pop(name).close()
        else:
            self.path(name).unlink()
            del self.model[name]

    # --- writes that fail

    @precondition(lambda self: self.model)
    @rule(data=st.data(), failure=FAILURES, what=st.sampled_from(["save", "append", "compact"]), tokens=SIZES)
    def fail(self, data: st.DataObject, failure: tuple[int, int, bool], what: str, tokens: int) -> None:
        """A call of the store is refused: the archive holds what it held, or what it was to hold, and is whole."""
        name = data.draw(st.sampled_from(sorted(self.model)))
        space, ids = self.model[name]
        writer = self.writer(name)
        longer = [*ids, *range(5000, 5000 + tokens)]
        jobs: dict[str, tuple[Callable[[], object], list[int]]] = {
            "save": (lambda: self.save(name, ids_of(7, tokens), space), ids_of(7, tokens)),
            "append": (lambda: writer.append(cache_of(longer), longer), longer),
            "compact": (writer.compact, ids),
        }
        job, after = jobs[what]
        number, error, lasts = failure
        failed = False
        with watching(Refusal(number, error, lasts=lasts), WRITES), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that dead bytes stay for now
            try:
                job()
            except StorageError:
                failed = True
        if what == "append":
            self.model[name] = space, ids if failed else longer
            assert held_by(writer) == self.model[name][1]
        else:
            with self.opened(name) as archive:
                found = held_by(archive)
            assert found in ([ids, after] if failed else [after])
            self.model[name] = space, found
        if failed:  # what a failure leaves behind the last commit goes with the next append, or a new handle
            with suppress(KeyError):
                self.writers.pop(name).close()
            self._settle(name)

    def _settle(self, name: str) -> None:
        """After a failure that lasted the disk may hold the state after it; the next writer takes what it finds."""
        space, ids = self.model[name]
        with self.opened(name) as archive:
            found = held_by(archive)
        assert found[: len(ids)] == ids
        self.model[name] = space, found

    # --- reads

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def read_ranges(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        ids = self.model[name][1]
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(ids))] * 2)))
        picked = sorted(data.draw(st.sets(st.integers(0, len(ids) - 1), min_size=1)))
        archive = self.writers.get(name) or self.opened(name)
        expected = cache_of(ids)
        for layer, sides in enumerate(expected):
            for found, whole in zip(archive.read(layer, start, stop), sides, strict=True):
                assert np.array_equal(bits(found), bits(whole[0, :, start:stop]))
        restored = archive.restore(positions=picked)
        assert restored.matched == len(picked)
        for found_pair, sides in zip(pairs(restored.cache), expected, strict=True):
            for found, whole in zip(found_pair, sides, strict=True):
                assert np.array_equal(bits(found), bits(whole[:, :, picked]))
        if name not in self.writers:
            archive.close()

    @precondition(lambda self: self.model)
    @rule(data=st.data(), other=SPACES)
    def open_in_another_namespace(self, data: st.DataObject, other: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        if other != self.model[name][0]:
            with pytest.raises(ArchiveNotFound):
                kvcellar.open(self.path(name), identity="m", namespace=other)

    @rule(version=VERSIONS, tokens=SIZES, space=SPACES)
    def find(self, version: int, tokens: int, space: str) -> None:
        prompt = ids_of(version, tokens)
        lengths = {n: _common(ids, prompt) for n, (where, ids) in self.model.items() if where == space}
        found = kvcellar.find(self.folder.name, prompt, identity="m", namespace=space)
        best = max(lengths.values(), default=0)
        assert found.matched == best
        if not best:
            assert found.path is None
            return
        name = Path(found.path).name
        ids = self.model[name][1]
        assert lengths[name] == best
        assert found.reason.startswith(f"token {best}: ")
        if best < min(len(ids), tokens):
            assert found.reason == f"token {best}: stored {ids[best]}, prompt {prompt[best]}"
        assert kvcellar.find(self.folder.name, prompt, identity="n", namespace=space).path is None

    # --- snapshots

    @precondition(lambda self: self.model)
    @rule(target=snapshots, data=st.data())
    def take_snapshot(self, data: st.DataObject) -> Any:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.open_snapshots.append(self.opened(name))
        return self.open_snapshots[-1], self.model[name][1]

    @rule(snapshot=snapshots)
    def look_at_snapshot(self, snapshot: tuple[kvcellar.Archive, list[int]]) -> None:
        archive, ids = snapshot
        assert held_by(archive) == ids

    @rule(snapshot=consumes(snapshots))
    def drop_snapshot(self, snapshot: tuple[kvcellar.Archive, list[int]]) -> None:
        archive, ids = snapshot
        assert held_by(archive) == ids
        archive.close()

    # --- always

    @invariant()
    def everything_is_as_modelled(self) -> None:
        if not hasattr(self, "model"):
            return
        assert sorted(p.name for p in Path(self.folder.name).iterdir() if p.suffix == ".kvc") == sorted(self.model)
        for name, (_, ids) in self.model.items():
            with self.opened(name) as archive:
                assert held_by(archive) == ids

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        for name in self.model:
            with self.opened(name, "a") if name not in self.writers else self.writers[name] as archive:
                archive.append(cache_of([*self.model[name][1], 1]), [*self.model[name][1], 1])
                assert archive.verify().ok
        for archive in (*self.writers.values(), *self.open_snapshots):
            archive.close()
        self.folder.cleanup()


def _common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.usefixtures("quick")
def test_any_history_is_that_of_a_dict() -> None:
    run_state_machine_as_test(
        Cellar,
        settings=settings(
            max_examples=20,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
