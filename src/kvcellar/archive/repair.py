"""Repair: a sound archive from the intact blocks of a damaged one. The damaged file is only ever read.

Method. A block is intact when frame, head and every part check, when it has the manifest's geometry, recipe and
profile, and when no readable index or commit names another block at its place (`survey.py`). Blocks replace each
other as docs/format.md §5 says, and the new file takes the unbroken run of intact blocks from token 0, with an index
and a commit of its own. Where the newest block is damaged, older ones of the same tokens step in, if the newest one's
head vouches for their tokens. Blocks behind a gap are of no use to a model, whose every token depends on those before;
they stay in the damaged file, and the report says where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

from ..errors import DamagedArchive, NotAnArchive
from ..recipe import Recipe
from ..store.base import Pending, Store
from .commit import last_commit
from .reader import ArchiveReader, problems
from .survey import Found, Piece, Survey
from .writer import NewBlock, write_archive

Goal = Callable[[], AbstractContextManager[tuple[str, Pending]]]
"""Opens the new file, with its name, once there is something to write; leaving it commits the file."""


@dataclass(frozen=True)
class RepairReport:
    """What a repair found and did.

    `sound`: nothing is damaged, so nothing was written. `tokens`: how many the new file `out` holds. `lost`: how many
    more there are known to have been; `certain` when something intact says where the archive ended, so that these are
    all. `problems`: (part, problem) of everything damaged. `damaged`: lost blocks; `out_of_reach`: intact ones behind
    a gap. `profile_lost`: the embedded profile is damaged, so the new file needs it from elsewhere.
    `position_assumed`: no intact commit says which position the next token has, so it is taken to follow the last one.
    """

    path: str
    out: str | None
    sound: bool
    tokens: int
    lost: int = 0
    certain: bool = True
    profile_lost: bool = False
    position_assumed: bool = False
    problems: tuple[tuple[str, str], ...] = ()
    damaged: tuple[Piece, ...] = ()
    out_of_reach: tuple[Piece, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether everything that was stored is there."""
        return not self.lost and self.certain and not self.profile_lost

    def to_json(self) -> dict[str, Any]:
        found = [{"part": part, "problem": problem} for part, problem in self.problems]
        return {"complete": self.complete, **asdict(self), "problems": found}


def repair(
    store: Store, name: str, goal: Goal, *, namespace: str = "", like: ArchiveReader | None = None
) -> RepairReport:
    """Write what can be saved of archive `name` to `goal`, unless it is sound or nothing can be saved.

    `like`, a sound archive of the same model, recipe and namespace, stands in for a damaged manifest or profile.

    Raises DamagedArchive when the manifest is damaged and `like` is not given, or no block is there; InvalidInput
    when no block is of the geometry, recipe and profile of `like`; NotAnArchive, NewerFormat, OlderFormat,
    ArchiveNotFound (also for another namespace), InvalidRecipe, StorageError. The damaged file is never changed.
    """
    with store.open_reader(name) as reader:
        sound = _sound(store, name, namespace)
        if sound is not None:
            return RepairReport(reader.name, None, True, sound)
        survey = Survey(reader, namespace, like)
        chain, out_of_reach = _run(survey)
        if survey.manifest.recipe.reduce is not None:
            _require_whole(_report(survey, None, _end(chain), out_of_reach))
        out = None
        position, assumed = _next_position(survey, chain)
        if chain:
            with goal() as (out, pending):
                write_archive(pending, survey.manifest, _new_blocks(survey, chain), survey.profile, position)
        report = _report(survey, out, _end(chain), out_of_reach)
        return replace(report, position_assumed=assumed)


def _sound(store: Store, name: str, namespace: str) -> int | None:
    """Number of tokens of an archive in which nothing is damaged, else None."""
    try:
        with ArchiveReader(store.open_reader(name), namespace) as archive:
            return archive.tokens if all(problem is None for _, problem in problems(archive)) else None
    except (DamagedArchive, NotAnArchive):
        return None


def _require_whole(report: RepairReport) -> None:
    """Raise DamagedArchive when tokens of a reduced cache are lost: the others' slots stand for them, too."""
    if not report.complete:
        part = report.damaged[0].reason if report.damaged else "blocks"
        raise DamagedArchive(
            part, f"{report.lost} or more tokens are lost, and a reduced cache is of use only as a whole: save it anew"
        )


def _run(survey: Survey) -> tuple[list[Found], list[Piece]]:
    """The blocks to keep, and the intact ones behind the gap that ends them. Reads every part."""
    chain: list[Found] = []
    stranded: list[Found] = []
    recipe = survey.manifest.recipe
    for found in survey.live:
        intact, at = survey.intact(found), _end(chain)
        if stranded or found.start != at or (intact and not _fits(chain, found, recipe)):
            stranded += [found] if intact else []
        elif intact:
            chain.append(found)
        else:
            _extend(chain, [old for old in found.older if survey.intact(old, note=False)], recipe)
    return chain, [block.piece(f"no intact block holds token {_end(chain)}") for block in stranded]


def _extend(chain: list[Found], usable: list[Found], recipe: Recipe) -> None:
    """Append the run of `usable` blocks that reaches furthest."""
    best: dict[int, tuple[int, Found]] = {}  # by first token: how far blocks from there reach, and the first of them
    for block in sorted(usable, key=lambda each: each.start, reverse=True):
        reach = best[block.stop][0] if block.stop in best else block.stop
        if block.start not in best or reach > best[block.start][0]:
            best[block.start] = (reach, block)
    while (at := _end(chain)) in best and _fits(chain, best[at][1], recipe):
        chain.append(best[at][1])


def _fits(chain: list[Found], block: Found, recipe: Recipe) -> bool:
    """Sealed blocks come first, then a tail, of as many tokens as `recipe` says."""
    tail = sum(each.stop - each.start for each in takewhile(lambda each: not each.sealed, reversed(chain)))
    count = block.stop - block.start
    return count == recipe.block and not tail if block.sealed else tail + count < recipe.tail


def _end(chain: list[Found]) -> int:
    return chain[-1].stop if chain else 0


def _next_position(survey: Survey, chain: list[Found]) -> tuple[int | None, bool]:
    """The position of the token behind `chain`, None for the one behind its last token's; whether that is a guess.

    It follows from any commit of as many tokens or fewer, since appended tokens take one position each; from a commit
    of more tokens only where all positions follow one by one.
    """
    tokens = _end(chain)
    earlier = [end for end in survey.positions if 0 < end <= tokens]
    if earlier:
        return survey.positions[max(earlier)] - max(earlier) + tokens, False
    if not chain or not survey.positions:
        return None, bool(chain)
    begin, end = survey.head(chain[0].offset)[0].first_position, min(survey.positions)
    return None, survey.positions[end] != begin + end


def _new_blocks(survey: Survey, chain: list[Found]) -> Iterator[NewBlock]:
    for found in chain:
        yield NewBlock(survey.head(found.offset)[0], list(survey.parts(found)))


def _report(survey: Survey, out: str | None, tokens: int, out_of_reach: list[Piece]) -> RepairReport:
    stops = [stop for _, stop, _ in survey.named.values()]
    stops += [piece.stop for piece in (*survey.damaged, *out_of_reach) if piece.stop is not None]
    known = max([tokens, *survey.ends, *stops])
    return RepairReport(
        path=survey.reader.name,
        out=out,
        sound=False,
        tokens=tokens,
        lost=known - tokens,
        certain=known in survey.ends or _unfinished(survey),
        profile_lost=survey.profile_lost,
        problems=tuple((problem.part, problem.problem) for problem in survey.problems),
        damaged=tuple(survey.damaged),
        out_of_reach=tuple(out_of_reach),
    )


def _unfinished(survey: Survey) -> bool:
    """Whether what lies behind the last commit is a write that never ended, by the rule every reader follows."""
    try:
        last_commit(survey.reader)
    except DamagedArchive:
        return False
    return True
