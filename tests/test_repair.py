"""Repair: what is intact comes back bit for bit, and the report says what is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kvcellar
from archives import SMALL, Bytes, spans
from damaged import PROFILE_GIVEN, SAVED, TOKENS, Sample, damaged, live_block, make_samples, of_kind, repaired, starts
from hostile import Forger
from kvcellar.archive.block import part_table
from kvcellar.archive.format import BLOCK, COMMIT, INDEX, MANIFEST, PROFILE, pack_record
from kvcellar.archive.reader import ArchiveReader
from kvcellar.errors import DamagedArchive, InvalidInput
from kvcellar.frontends.repair import repair as repair_file

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def samples(make_cache: Callable, make_ids: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    return make_samples(make_cache, make_ids, tmp_path_factory.mktemp("samples"))


@pytest.mark.parametrize("kind", ["bulk", "appended"])
def test_a_sound_archive_is_left_alone(kind: str, samples: dict[str, Sample], tmp_path: Path) -> None:
    path = damaged(samples[kind], tmp_path)
    for in_place in (False, True):
        report = repair_file(path, in_place=in_place)
        assert (report.sound, report.complete, report.out, report.tokens) == (True, True, None, TOKENS)
    assert [each.name for each in tmp_path.iterdir()] == ["a.kvc"]
    assert path.read_bytes() == samples[kind].data


@pytest.mark.parametrize("kind", ["bulk", "appended"])
def test_a_flipped_bit_costs_no_more_than_the_blocks_behind_it(
    kind: str, samples: dict[str, Sample], tmp_path: Path
) -> None:
    sample = samples[kind]
    first = starts(sample.data)
    wrong = []
    for span in spans(sample.data):
        expected = SAVED[kind][first[span.start]] if span.start in first else TOKENS
        for at in [*range(span.start, span.stop, 7), span.stop - 1]:
            path = damaged(sample, tmp_path, at)
            where = f"byte {at} ({span.tag!r} at {span.start})"
            if span.tag == MANIFEST:
                with pytest.raises(DamagedArchive, match="--like"):
                    repaired(path)
                continue
            report, out = repaired(path)
            if report.sound and not span.live:
                continue  # nothing reads the parts of superseded blocks
            complete = expected == TOKENS and span.tag not in (PROFILE, COMMIT)
            parts = [part for part, _ in report.problems]
            named = span.named_in(parts) or any(f"byte {span.start}" in part for part in parts)
            if report.tokens != expected or not named:
                wrong.append(f"{where}: {report}")
            elif span.tag != COMMIT and report.complete != complete:
                wrong.append(f"{where}: complete {report.complete}")
            elif expected and not sample.holds(out, expected):
                wrong.append(f"{where}: other contents")
            out.unlink(missing_ok=True)
    assert not wrong, f"{len(wrong)}, first:\n" + "\n".join(wrong[:5])


@pytest.mark.parametrize("kind", ["bulk", "appended"])
def test_a_cut_file_gives_all_blocks_before_the_cut(kind: str, samples: dict[str, Sample], tmp_path: Path) -> None:
    sample = samples[kind]
    every = [span for span in spans(sample.data) if span.tag == BLOCK]
    commits = {span.stop for span in spans(sample.data) if span.tag == COMMIT}
    states = [8, 16, 21] if kind == "bulk" else [5, 7, 8, 10, 16, 21]  # tokens after each block, in file order
    for cut in range(len(sample.data)):
        if cut % 5 and cut not in {end for span in every for end in (span.stop - 1, span.stop, span.stop + 1)}:
            continue
        path = tmp_path / "cut.kvc"
        path.write_bytes(sample.data[:cut])
        there = sum(span.stop <= cut for span in every)
        if not there:
            assert _refused_or_empty(path), f"cut at {cut}"
            continue
        report, out = repaired(path)
        assert report.tokens == states[there - 1], f"cut at {cut}: {report}"
        assert report.sound == (cut in commits)
        assert report.sound or sample.holds(out, states[there - 1]), f"cut at {cut}"
        out.unlink(missing_ok=True)


def _refused_or_empty(path: Path) -> bool:
    try:
        return repaired(path)[0].tokens == 0
    except DamagedArchive:
        return [each.name for each in path.parent.iterdir()] == [path.name]


def test_without_its_commit_the_index_vouches_for_the_end(samples: dict[str, Sample], tmp_path: Path) -> None:
    data = samples["bulk"].data
    path = tmp_path / "a.kvc"
    path.write_bytes(data[: of_kind(data, COMMIT)[0]])
    report, out = repaired(path)
    assert (report.tokens, report.lost, report.certain, report.complete) == (TOKENS, 0, True, True)
    assert out.read_bytes() == data


def test_without_index_and_commit_nobody_knows_the_end(samples: dict[str, Sample], tmp_path: Path) -> None:
    data = samples["bulk"].data
    path = tmp_path / "a.kvc"
    path.write_bytes(data[: of_kind(data, INDEX)[0]])
    report, out = repaired(path)
    assert (report.tokens, report.lost, report.certain, report.complete) == (TOKENS, 0, False, False)
    assert out.read_bytes() == data


def test_a_repaired_archive_is_a_compacted_one(samples: dict[str, Sample], tmp_path: Path) -> None:
    """Index and every commit damaged; with tails in several blocks once they are joined."""
    for cut in (None, of_kind(samples["appended"].data, BLOCK, 2)[0]):  # [0…21), or the two tails of 7 tokens
        sample = Sample(samples["appended"].data[:cut], *samples["appended"][1:])
        sound, path = tmp_path / "sound.kvc", tmp_path / "a.kvc"
        sound.write_bytes(sample.data)
        path = damaged(sample, tmp_path, *(span.start for span in spans(sample.data) if span.tag in (INDEX, COMMIT)))
        report, out = repaired(path)
        assert report.tokens == (TOKENS if cut is None else 7)
        with kvcellar.open(sound, identity="m", mode="a") as archive:
            archive.compact()
        if cut is not None:
            assert out.read_bytes() != sound.read_bytes()
            with kvcellar.open(out, identity="m", mode="a") as archive:
                archive.compact()
        assert out.read_bytes() == sound.read_bytes()
        out.unlink()


def test_what_lies_behind_a_gap_is_reported_with_its_place(samples: dict[str, Sample], tmp_path: Path) -> None:
    data = samples["bulk"].data
    (_, gap_end), (start, stop) = live_block(data, 8), live_block(data, 16)
    report, _ = repaired(damaged(samples["bulk"], tmp_path, gap_end - 1))
    assert (report.tokens, report.lost, report.certain) == (8, 13, True)
    (lost,), (behind,) = report.damaged, report.out_of_reach
    assert (lost.start, lost.stop) == (8, 16)
    assert (behind.start, behind.stop, behind.offset, behind.length) == (16, 21, start, stop - start)
    assert "layer group 1" in report.problems[0][0]


def test_a_block_whose_head_is_damaged_is_known_from_the_index(samples: dict[str, Sample], tmp_path: Path) -> None:
    start, stop = live_block(samples["bulk"].data, 8)
    report, _ = repaired(damaged(samples["bulk"], tmp_path, start + 40))
    (lost,) = report.damaged
    assert (lost.offset, lost.length, lost.start, lost.stop) == (start, stop - start, 8, 16)


def test_nothing_to_save_writes_nothing(samples: dict[str, Sample], tmp_path: Path) -> None:
    report, out = repaired(damaged(samples["bulk"], tmp_path, live_block(samples["bulk"].data, 0)[1] - 1))
    assert (report.tokens, report.out, report.lost, report.complete) == (0, None, TOKENS, False)
    assert [piece.start for piece in report.out_of_reach] == [8, 16]
    assert not out.exists()


def test_a_block_of_another_file_is_not_taken_in(
    samples: dict[str, Sample], make_ids: Callable, tmp_path: Path
) -> None:
    """As after a crash of a file system that mixes up sectors: all of its own checksums are right."""
    sample = samples["bulk"]
    other = tmp_path / "other.kvc"
    ids = make_ids(TOKENS, 1)
    profile = {"profile": PROFILE_GIVEN, "embed_profile": True}
    kvcellar.save(other, sample.cache, tokens=ids, identity="m", recipe=SMALL, **profile)
    start, stop = live_block(sample.data, 8)
    assert live_block(other.read_bytes(), 8) == (start, stop)
    path = tmp_path / "a.kvc"
    path.write_bytes(sample.data[:start] + other.read_bytes()[start:stop] + sample.data[stop:])
    report, out = repaired(path)
    assert (report.tokens, report.lost) == (8, 13)
    assert sample.holds(out, 8)


# --- manifest and profile


def test_a_lost_manifest_is_taken_from_another_archive_of_the_model(
    samples: dict[str, Sample], saved: Callable, make_cache: Callable, tmp_path: Path
) -> None:
    sample = samples["appended"]
    small = make_cache(layers=2, heads=1, tokens=3, width=4, dtype=torch.float16, seed=5)
    like = saved(small, recipe=SMALL, name="like.kvc")
    for at in ([40], [0, 40], [*range(100)]):  # also when the header is gone, so that it looks like no archive
        report, out = repaired(damaged(sample, tmp_path, *at), like=like)
        assert (report.tokens, report.complete) == (TOKENS, True)
        assert sample.holds(out, TOKENS)
        out.unlink()
    for other in (saved(small[:1], recipe=SMALL, name="o.kvc"), saved(small, name="p.kvc")):  # geometry; recipe
        with pytest.raises(InvalidInput, match="no block is of the geometry, recipe and profile"):
            repair_file(tmp_path / "a.kvc", like=other)


def test_a_damaged_profile_is_left_out_or_taken_from_another_archive(
    samples: dict[str, Sample], tmp_path: Path
) -> None:
    sample = samples["bulk"]
    path = damaged(sample, tmp_path, of_kind(sample.data, PROFILE)[1] - 1)
    report, out = repaired(path)
    assert (report.tokens, report.lost, report.profile_lost, report.complete) == (TOKENS, 0, True, False)
    with kvcellar.open(out) as archive:
        assert archive.info().profile == PROFILE_GIVEN.id
        assert archive.info().profile_bytes is None
    out.unlink()
    (tmp_path / "like.kvc").write_bytes(sample.data)
    report, out = repaired(path, like=tmp_path / "like.kvc")
    assert report.complete
    assert out.read_bytes() == sample.data


def test_the_next_position_is_kept_or_said_to_be_assumed(tmp_path: Path) -> None:
    """As after positions that do not follow one by one, where only the commit knows what comes next."""
    path = tmp_path / "a.kvc"

    def written(next_position: int) -> bytearray:
        return bytearray(Forger().build(commit=lambda made: replace(made, next_position=next_position)))

    def outcome(data: bytearray, *flips: int) -> tuple[int, int, bool]:
        for at in flips:
            data[at] ^= 1
        path.write_bytes(data)
        report, out = repaired(path)
        with ArchiveReader(Bytes(out.read_bytes())) as archive:
            found = archive.tokens, archive.commit.next_position, report.position_assumed
        out.unlink()
        return found

    index, commit = (of_kind(bytes(written(0)), tag)[0] for tag in (INDEX, COMMIT))
    last = live_block(bytes(written(0)), 16)[1] - 1
    assert outcome(written(90), index) == (TOKENS, 90, False)
    assert outcome(written(90), commit) == (TOKENS, TOKENS, True)
    assert outcome(written(90), last) == (16, 16, True)
    assert outcome(written(TOKENS), last) == (16, 16, False)


def test_an_older_tail_of_other_tokens_does_not_step_in(tmp_path: Path) -> None:
    """A damaged block brings back the tail it replaced only if its head says that they hold the same tokens."""
    forger = Forger()
    assert tokens_saved(forger, forger.blocks[0].head.tokens[:5], tmp_path) == 5
    assert tokens_saved(forger, forger.blocks[0].head.tokens[1:6], tmp_path) == 0


def tokens_saved(forger: Forger, tokens: np.ndarray, folder: Path) -> int:
    """Tokens saved when a tail of these tokens lies before the blocks and the first of them is damaged."""
    head, parts = forger.blocks[0].head, [bytes(80), bytes(80)]
    tail = replace(head, tokens=tokens, sealed=False, parts=part_table(parts))

    def between(offset: int) -> bytes:
        return pack_record(BLOCK, offset, tail.pack(), 160) + b"".join(parts)

    made = bytearray(forger.build(between=between))
    made[live_block(bytes(made), 0)[1] - 1] ^= 1
    (folder / "a.kvc").write_bytes(made)
    report, out = repaired(folder / "a.kvc")
    out.unlink(missing_ok=True)
    return report.tokens


@pytest.mark.parametrize("rubbish", [b"\0", b"KVCB", b"KVCB" * 20, bytes(range(256)), pack_record(BLOCK, 7, b"", 0)])
def test_rubbish_between_records_is_passed_over(rubbish: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.kvc").write_bytes(Forger().build(between=lambda offset: rubbish))
    report, out = repaired(tmp_path / "a.kvc")
    assert (report.tokens, report.complete) == (TOKENS, True)
    assert out.read_bytes() == Forger().build()
