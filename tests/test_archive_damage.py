"""An archive cut at every byte and with a bit flipped in every byte: an error or an earlier state, never a guess."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import kvcellar
from archives import SMALL, Span, contents, contents_of, outcome, prefix, same, spans
from kvcellar.errors import DamagedArchive, KVCellarError
from kvcellar.profile import Profile

pytestmark = pytest.mark.usefixtures("quick")
STATES = (5, 7, 10, 21)  # tokens after the save and each append: a tail, a longer tail, a block and a tail, two more


@contextmanager
def flipped(path: Path, data: bytes, at: int, mask: int) -> Iterator[None]:
    """Alter one byte of the file in place, then put it back: writing thousands of whole files would take minutes."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(at)
        file.write(bytes([data[at] ^ mask]))
        yield
        file.seek(at)
        file.write(data[at : at + 1])


class Sample(NamedTuple):
    """A sound archive: its bytes, what it gives back, and (file size, contents) of each of its commits."""

    data: bytes
    contents: list[np.ndarray]
    commits: list[tuple[int, list[np.ndarray]]]


@pytest.fixture(scope="module")
def samples(make_cache: Callable, make_ids: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    folder = tmp_path_factory.mktemp("samples")
    cache = make_cache(layers=2, heads=1, tokens=STATES[-1], width=4, dtype=torch.float16)
    ids = make_ids(STATES[-1])

    bulk, appended = folder / "bulk.kvc", folder / "appended.kvc"
    profile = Profile({"w": np.arange(6, dtype=np.float32)}, {"text": "any"})
    kvcellar.save(bulk, cache, tokens=ids, identity="m", recipe=SMALL, profile=profile, embed_profile=True)
    whole = contents_of(cache, ids)

    commits = []
    first = STATES[0]
    size = kvcellar.save(appended, prefix(cache, first), tokens=ids[:first], identity="m", recipe=SMALL).file_bytes
    commits.append((size, contents_of(cache, ids, first)))
    for tokens in STATES[1:]:
        with kvcellar.open(appended, identity="m", mode="a") as archive:
            info = archive.append(prefix(cache, tokens), ids[:tokens])
        commits.append((info.file_bytes, contents_of(cache, ids, tokens)))
    assert info.commits == len(STATES), "compaction would leave nothing dead to damage"
    bulk_data = bulk.read_bytes()
    return {
        "bulk": Sample(bulk_data, whole, [(len(bulk_data), whole)]),
        "appended": Sample(appended.read_bytes(), whole, commits),
    }


@pytest.mark.parametrize("kind", ["bulk", "appended"])
def test_the_samples_are_sound(kind: str, samples: dict[str, Sample], tmp_path: Path) -> None:
    path = tmp_path / "a.kvc"
    path.write_bytes(samples[kind].data)
    found = outcome(path)
    assert found.complaints == []
    assert same(found.contents or [], samples[kind].contents)
    dead = [span for span in spans(samples[kind].data) if not span.live]
    assert bool(dead) == (kind == "appended")


@pytest.mark.parametrize("kind", ["bulk", "appended"])
def test_a_file_cut_at_any_byte_gives_the_last_commit_before_the_cut(
    kind: str, samples: dict[str, Sample], tmp_path: Path
) -> None:
    data, _, commits = samples[kind]
    path = tmp_path / "cut.kvc"
    path.write_bytes(data)
    for cut in reversed(range(len(data))):
        os.truncate(path, cut)
        before = [state for end, state in commits if end <= cut]
        found = outcome(path)
        if not before:
            assert found.contents is None, f"cut at {cut}: restored, though no commit was complete"
            with pytest.raises(DamagedArchive):
                kvcellar.open(path, identity="m")
            continue
        assert found.contents is not None, f"cut at {cut}: {found.complaints}"
        assert same(found.contents, before[-1]), f"cut at {cut}: not the last commit"
        assert (found.complaints == []) == any(end == cut for end, _ in commits), f"cut at {cut}: verify was wrong"


def test_a_cut_append_can_be_done_again(
    samples: dict[str, Sample], make_cache: Callable, make_ids: Callable, tmp_path: Path
) -> None:
    data, whole, commits = samples["appended"]
    cache = make_cache(layers=2, heads=1, tokens=STATES[-1], width=4, dtype=torch.float16)
    path = tmp_path / "cut.kvc"
    for cut in range(commits[-2][0], len(data), 41):
        path.write_bytes(data[:cut])
        with kvcellar.open(path, identity="m", mode="a") as archive:
            archive.append(cache, make_ids(STATES[-1]))
        found = outcome(path)
        assert found.complaints == [], f"cut at {cut}"
        assert same(found.contents or [], whole), f"cut at {cut}"


@pytest.mark.parametrize("kind", ["bulk", "appended"])
@pytest.mark.parametrize(("step", "bits"), [(1, 1), (7, 8)], ids=["every byte", "every bit of a sample"])
def test_a_flipped_bit_is_named_or_harmless(
    kind: str, step: int, bits: int, samples: dict[str, Sample], tmp_path: Path
) -> None:
    data, whole, _ = samples[kind]
    path = tmp_path / "flipped.kvc"
    path.write_bytes(data)
    wrong = []
    for span in spans(data):
        for at in range(span.start, span.stop, step):
            for bit in range(bits) if bits > 1 else (at % 8,):
                with flipped(path, data, at, 1 << bit):
                    problem = _judge(span, whole, path)
                if problem:
                    wrong.append(f"byte {at} bit {bit} ({span.tag!r} at {span.start}, live: {span.live}): {problem}")
    assert not wrong, f"{len(wrong)} flips, first:\n" + "\n".join(wrong[:10])


def _judge(span: Span, whole: list[np.ndarray], path: Path) -> str:
    """What is wrong with how the file at `path`, altered within `span`, was taken; empty if nothing."""
    found = outcome(path)
    if found.contents is not None and not same(found.contents, whole):
        return "restored something else"
    if found.contents is None and not found.complaints:
        return "nothing restored, and no reason given"
    if span.live:
        if not found.complaints:
            return "not noticed"
        if not span.named_in(found.complaints):
            return f"not named: {found.complaints}"
    return ""


def test_verify_names_every_damaged_part(samples: dict[str, Sample], tmp_path: Path) -> None:
    """One report for a profile, an index and two blocks that are all damaged in their bodies."""
    data = bytearray(samples["bulk"].data)
    bodies = [span for span in spans(bytes(data)) if span.tag in (b"KVCP", b"KVCB", b"KVCI")]
    assert len(bodies) == 5
    damaged = [span for i, span in enumerate(bodies) if i != 2]
    for span in damaged:
        data[span.stop - 1] ^= 1
    path = tmp_path / "a.kvc"
    path.write_bytes(data)
    with kvcellar.open(path, identity="m") as archive:
        report = archive.verify()
    parts = [part for part, _ in report.problems]
    assert [span for span in damaged if not span.named_in(parts)] == []
    assert not bodies[2].named_in(parts)


@pytest.mark.parametrize("kind", ["bulk", "appended"])
def test_a_damaged_index_is_rebuilt_from_the_blocks(kind: str, samples: dict[str, Sample], tmp_path: Path) -> None:
    """Wherever it is damaged: frame, head or entries; the last commit's own index, and the one it goes back to."""
    data, whole, _ = samples[kind]
    (index,) = [span for span in spans(data) if span.tag == b"KVCI"]
    path = tmp_path / "a.kvc"
    path.write_bytes(data)
    lost = []
    for at in range(index.start, index.stop):
        with flipped(path, data, at, 0x10):
            found = outcome(path)
        if found.contents is None:
            lost.append(f"byte {at - index.start}: {found.complaints[0]}")
            continue
        assert same(found.contents, whole)
        assert index.named_in(found.complaints), "verify has to say so"
    assert not lost, f"unreadable for {len(lost)} of {index.stop - index.start} bytes of the index:\n{lost[::16]}"


def test_damage_behind_the_last_commit_loses_nothing(samples: dict[str, Sample], tmp_path: Path) -> None:
    """Bytes of a write that never ended are passed over, and reported."""
    data, whole, _ = samples["appended"]
    path = tmp_path / "a.kvc"
    for rest in (b"\0", b"\nKVCend\n", b"\xff" * 100, data[-16:], data[-200:], data[32:300], data):
        path.write_bytes(data + rest)
        found = outcome(path)
        if found.contents is None:  # a whole commit that does not check: refused rather than guessed
            assert "commit" in found.complaints[0]
            continue
        assert same(found.contents, whole)
        assert any("follow the last commit" in text for text in found.complaints)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files by /proc")
def test_refused_files_are_closed(samples: dict[str, Sample], tmp_path: Path) -> None:
    """A service that looks through a folder again and again must not run out of files."""
    data, whole, _ = samples["bulk"]
    (tmp_path / "damaged.kvc").write_bytes(data[:-1])
    (tmp_path / "foreign.kvc").write_bytes(b"GIF89a")
    (tmp_path / "good.kvc").write_bytes(data)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.warns(UserWarning, match=r"passed over damaged\.kvc"):
            kvcellar.find(tmp_path, whole[0], identity="m")
        assert kvcellar.find(tmp_path, whole[0], identity="m", namespace="another").path is None
        for name in ("damaged.kvc", "foreign.kvc"):
            with pytest.raises(KVCellarError):
                kvcellar.open(tmp_path / name, identity="m")
        with pytest.raises(KVCellarError):
            kvcellar.open(tmp_path / "good.kvc", identity="another")
    assert len(os.listdir("/proc/self/fd")) == before


def test_verify_notices_what_happens_after_opening(samples: dict[str, Sample], tmp_path: Path) -> None:
    """It reads every part anew, also those that opening has read and kept."""
    data, _, _ = samples["bulk"]
    path = tmp_path / "a.kvc"
    path.write_bytes(data)
    unnoticed = []
    with kvcellar.open(path, identity="m") as archive:
        contents(archive)
        for span in spans(data):
            for at in range(span.start, span.stop, 9):
                with flipped(path, data, at, 0x20):
                    if not archive.verify().problems:
                        unnoticed.append(f"byte {at} ({span.tag!r} at {span.start})")
        assert archive.verify().problems == ()
    assert not unnoticed, f"{len(unnoticed)} bytes: {unnoticed[:5]} … {unnoticed[-5:]}"


def test_verify_of_an_older_snapshot_is_sound(samples: dict[str, Sample], tmp_path: Path, make_cache: Callable) -> None:
    """Somebody else's complete append behind an open reader is no damage."""
    data, whole, commits = samples["appended"]
    path = tmp_path / "a.kvc"
    path.write_bytes(data[: commits[-2][0]])
    cache = make_cache(layers=2, heads=1, tokens=STATES[-1], width=4, dtype=torch.float16)
    with kvcellar.open(path, identity="m") as reader:
        with kvcellar.open(path, identity="m", mode="a") as writer:
            writer.append(cache, whole[0].tolist())
        assert same(contents(reader), commits[-2][1]), "a snapshot does not move"
        assert reader.verify().problems == ()
