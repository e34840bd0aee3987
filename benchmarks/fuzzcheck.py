"""What the fuzzer does with one input, and what it holds to be wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from fuzzcases import MANY, PROFILE, Case, contents, prefix_of, same
from fuzzmutate import mutated
from fuzzrecords import Memory
from kvcellar import Identity, KVCellarError
from kvcellar.archive.info import describe
from kvcellar.archive.reader import ArchiveReader, problems
from kvcellar.archive.repair import repair
from kvcellar.errors import InvalidInput
from kvcellar.frontends.archive import Archive
from kvcellar.store.base import Appender, Pending, Store
from kvcellar.store.local import LocalStore

VERIFY_EVERY, REPAIR_EVERY = 4, 10  # what costs most is not done with every input


class Wrong(Exception):
    """A result that is neither right nor an error of ours."""


class Kept(Pending):
    """A new object in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def append(self, data: bytes | memoryview) -> None:
        self.data += data

    def size(self) -> int:
        return len(self.data)

    def commit(self) -> None:
        pass

    def commit_and_hold(self) -> Appender:
        raise Wrong("repair holds on to what it wrote")

    def discard(self) -> None:
        raise Wrong("repair takes back what it wrote")


class OneObject(Store):
    """A store of a single object in memory."""

    def __init__(self, data: bytes):
        self.data = data

    def open_reader(self, name: str) -> Memory:
        return Memory(self.data, name)

    def open_appender(self, name: str) -> Appender:
        raise Wrong("repair opens the damaged archive for writing")

    def create(self, name: str) -> Pending:
        return Kept()

    def exists(self, name: str) -> bool:
        return True

    def names(self) -> list[str]:
        return ["memory"]


class Input(NamedTuple):
    number: int
    kind: str
    data: bytes
    case: Case
    other: Case

    @property
    def forged(self) -> bool:
        return self.kind.startswith("forged")


def input_of(seed: int, number: int, held: list[Case]) -> Input:
    rng = random.Random(f"{seed} {number}")
    weights = [1 if case.name == MANY else 40 for case in held]
    case, other = rng.choices(held, weights, k=2)
    kind, data = mutated(rng, case.data, other.data)
    return Input(number, kind, data, case, other)


def exercise(given: Input) -> str:
    """Do everything with one input, verify with every fourth and repair with every tenth; what became of it.

    Raises Wrong, or whatever else is a finding.
    """
    try:
        reader = ArchiveReader(Memory(given.data))
    except KVCellarError as error:
        said = type(error).__name__
        repaired(given, None)
        return said
    archive = Archive(LocalStore("."), "memory", reader, Identity.named("m"), None)
    said, tokens = "right", None
    describe(reader)
    sound = given.number % VERIFY_EVERY == 1 and all(problem is None for _, problem in list(problems(reader)))
    try:
        found = contents(archive)
        tokens = len(archive)
        if not given.forged and not any(prefix_of(found, case, whole=True) for case in (given.case, given.other)):
            raise Wrong("contents that were never saved")
        agree(archive, found, given.number)
    except KVCellarError as error:
        if sound and not given.forged:
            raise Wrong(f"verify says that all is sound, and reading: {error}") from error
        said = f"opened, then {type(error).__name__}"
    repaired(given, tokens)
    return said


def agree(archive: Archive, found: list[Tensor], number: int) -> None:
    """What read and match tell of the archive, and now and then a restore of some tokens, is what was `found` in it."""
    ids, layer = found[0].numpy(), number % len(archive.manifest.geometry)
    start, stop = sorted((number % (len(ids) + 1), number // 7 % (len(ids) + 1)))
    if archive._open().match(ids)[0] != len(ids):
        raise Wrong("its own tokens do not match")
    if not archive.manifest.geometry.uniform:
        return  # not all of a sliding layer can be read
    whole = found[1 + 2 * layer], found[2 + 2 * layer]
    if not all(same(a, b[:, start:stop]) for a, b in zip(archive.read(layer, start, stop), whole, strict=True)):
        raise Wrong("restore and read differ")
    if number % 4 == 0:
        restored = archive.restore(positions=slice(start, stop), layers=[layer])
        if restored.matched != stop - start:
            raise Wrong(f"restored {restored.matched} of tokens {start} to {stop}")
        if start < stop and not same(restored.cache.layers[layer].keys[0], whole[0][:, start:stop]):
            raise Wrong("two restores differ")


def repaired(given: Input, readable: int | None) -> None:
    """Repair: the new file is sound, holds what could be read before, and after blind damage only what was saved."""
    if given.number % REPAIR_EVERY:
        return
    made = Kept()

    @contextmanager
    def goal() -> Iterator[tuple[str, Pending]]:
        yield "new", made

    before = bytes(given.data)
    try:
        report = repair(OneObject(given.data), "memory", goal)
    except KVCellarError as error:
        if readable is not None:
            raise Wrong(f"readable, but repair says: {error}") from error
        return
    if bytes(given.data) != before or (report.out is not None) != bool(made.data):
        raise Wrong("repair wrote where it must not")
    # A restore passes over parts of sliding layers that it does not need; repair wants every part of a block.
    if not given.forged and not any(given.case.windows) and readable is not None and report.tokens < readable:
        raise Wrong(f"repair kept {report.tokens} of {readable} readable tokens")
    if not made.data:
        return
    with ArchiveReader(Memory(bytes(made.data))) as reader:
        found = [problem for _, problem in problems(reader) if problem is not None]
        if found or reader.tokens != report.tokens:
            raise Wrong(f"the repaired file: {found[:1]}, {reader.tokens} of {report.tokens} tokens")
        if given.forged:
            return
        try:
            held = contents(Archive(LocalStore("."), "memory", reader, Identity.named("m"), PROFILE))
        except InvalidInput:
            if reader.manifest.geometry.uniform:
                raise
            return  # what sliding layers would need behind a shorter run was never stored
        if not any(prefix_of(held, case, whole=False) for case in (given.case, given.other)):
            raise Wrong("repair gave what was never saved")
