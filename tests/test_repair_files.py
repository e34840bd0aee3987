"""Repair deletes and overwrites nothing, tells versions and kinds of files apart, and says what it did."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clitools import run
from damaged import TOKENS, Sample, damaged, live_block, make_samples
from hostile import Forger
from kvcellar.archive.format import MAGIC, checksum
from kvcellar.errors import ArchiveLocked, ArchiveNotFound, DamagedArchive, InvalidInput, NotAnArchive, StorageError
from kvcellar.frontends.repair import repair as repair_file
from kvcellar.store.local import LocalPending, LocalStore

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def samples(make_cache: Callable, make_ids: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    return make_samples(make_cache, make_ids, tmp_path_factory.mktemp("samples"))


def test_an_existing_file_is_not_overwritten(
    samples: dict[str, Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damaged(samples["bulk"], tmp_path, len(samples["bulk"].data) - 40)
    out = tmp_path / "out.kvc"
    out.write_bytes(b"mine")
    with pytest.raises(InvalidInput, match="overwrites nothing"):
        repair_file(path, out)
    out.unlink()

    append = LocalPending.append

    def meanwhile(self: LocalPending, data: bytes) -> None:
        append(self, data)
        out.write_bytes(b"mine")

    monkeypatch.setattr(LocalPending, "append", meanwhile)
    with pytest.raises(InvalidInput, match="written by another program"):
        repair_file(path, out)
    assert out.read_bytes() == b"mine"
    assert {each.name for each in tmp_path.iterdir()} == {"a.kvc", "out.kvc"}


def test_the_new_file_is_no_less_private_than_the_damaged_one(samples: dict[str, Sample], tmp_path: Path) -> None:
    path = damaged(samples["bulk"], tmp_path, len(samples["bulk"].data) - 40)
    path.chmod(0o600)
    assert repair_file(path).out == str(tmp_path / "a.repaired.kvc")
    assert (tmp_path / "a.repaired.kvc").stat().st_mode & 0o777 == 0o600
    repair_file(path, in_place=True)
    assert path.stat().st_mode & 0o777 == (tmp_path / "a.kvc.damaged-1").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def without_links(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    return lambda: monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("links", [True, False])
def test_in_place_keeps_every_damaged_file(
    links: bool, samples: dict[str, Sample], tmp_path: Path, without_links: Callable
) -> None:
    if not links:
        without_links()
    kept = []
    for number, flipped in enumerate((live_block(samples["bulk"].data, 16)[1] - 1, len(samples["bulk"].data) - 40), 1):
        path = damaged(samples["bulk"], tmp_path, flipped)
        kept.append(path.read_bytes())
        report = repair_file(path, in_place=True)
        assert report.out == str(path)
        assert samples["bulk"].holds(path, report.tokens)
        names = {each.name: each.read_bytes() for each in tmp_path.iterdir() if each != path}
        assert names == {f"a.kvc.damaged-{i}": data for i, data in enumerate(kept, 1)}, number


def test_in_place_waits_for_the_writer(
    samples: dict[str, Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damaged(samples["bulk"], tmp_path, len(samples["bulk"].data) - 40)
    monkeypatch.setitem(LocalStore.__init__.__kwdefaults__, "lock_seconds", 0.05)
    store, name = LocalStore.at(path)
    with store.open_appender(name), pytest.raises(ArchiveLocked):
        repair_file(path, in_place=True)
    assert [each.name for each in tmp_path.iterdir()] == ["a.kvc"]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_full_disk_leaves_everything_as_it_was(
    in_place: bool, samples: dict[str, Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damaged(samples["bulk"], tmp_path, len(samples["bulk"].data) - 40)
    before = path.read_bytes()

    def full(self: LocalPending) -> Iterator[None]:
        raise StorageError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(LocalPending, "size", full)
    with pytest.raises(StorageError):
        repair_file(path, in_place=in_place)
    assert [each.name for each in tmp_path.iterdir()] == ["a.kvc"]
    assert path.read_bytes() == before


# --- what is no archive of ours


def test_what_cannot_be_repaired_is_refused_by_name(samples: dict[str, Sample], tmp_path: Path) -> None:
    path = tmp_path / "a.kvc"
    for data, error in (
        (b"GIF89a" * 100, NotAnArchive),
        (b"", DamagedArchive),
        (samples["bulk"].data[:32], DamagedArchive),
    ):
        path.write_bytes(data)
        with pytest.raises(error):
            repair_file(path)
    with pytest.raises(ArchiveNotFound):
        repair_file(damaged(samples["bulk"], tmp_path, 2000), namespace="another")
    with pytest.raises(ArchiveNotFound):
        repair_file(tmp_path / "none.kvc")
    with pytest.raises(InvalidInput, match="not both"):
        repair_file(path, "x.kvc", in_place=True)
    assert [each.name for each in tmp_path.iterdir()] == ["a.kvc"]


def _of_version(*fields: int) -> bytes:
    """An archive whose header states major and minor version, flags and reserved bits."""
    forger = Forger()
    head = struct.pack("<8sHHIQ", MAGIC, *fields)
    forger.header = head + struct.pack("<Q", checksum(head))
    return forger.build()


@pytest.mark.parametrize("command", ["info", "verify", "repair", "generate"])
def test_newer_older_and_damaged_are_three_exit_codes(command: str, tmp_path: Path) -> None:
    cut = Forger().build()[:-1]
    wrong_header = bytearray(Forger().build())
    wrong_header[25] ^= 1
    cases = {
        "newer": (_of_version(2, 0, 0, 0), 5),
        "newer by a flag": (_of_version(1, 0, 1, 0), 5),
        "newer by a reserved bit": (_of_version(1, 0, 0, 1), 5),
        "older": (_of_version(0, 9, 0, 0), 10),
        "damaged": (cut, 4),
        "damaged header": (bytes(wrong_header), 4),
        "foreign": (b"PK\3\4" * 50, 4),
    }
    for what, (data, code) in cases.items():
        path = tmp_path / "a.kvc"
        path.write_bytes(data)
        outcome = run(command, path, *(["--prompt", "x"] if command == "generate" else []))
        saves_all = command == "repair" and what.startswith("damaged")
        assert outcome.code == (0 if saves_all else code), (what, outcome)
        assert path.read_bytes() == data
        assert (tmp_path / "a.repaired.kvc").exists() == saves_all, what
        (tmp_path / "a.repaired.kvc").unlink(missing_ok=True)


def test_what_the_command_says(samples: dict[str, Sample], tmp_path: Path) -> None:
    path = damaged(samples["bulk"], tmp_path)
    assert run("repair", path).out == f"{path}: nothing to repair, every part is sound (21 tokens)\n"
    path = damaged(samples["bulk"], tmp_path, live_block(samples["bulk"].data, 8)[1] - 1)
    said = run("repair", path)
    assert said.code == 4
    for words in ("layer group 1: checksum differs", "lost: tokens 8 to 15, ", "out of reach: tokens 16 to 20, "):
        assert words in said.out
    assert f"8 tokens saved to {tmp_path / 'a.repaired.kvc'}\n13 tokens lost" in said.out
    again = run("repair", path)
    assert (again.code, "overwrites nothing" in again.err) == (2, True)
    told = run("repair", path, "--out", tmp_path / "b.kvc", "--json")
    assert told.code == 4
    assert {key: told.json[key] for key in ("complete", "tokens", "lost")} == {
        "complete": False,
        "tokens": 8,
        "lost": 13,
    }
    assert told.json["out_of_reach"][0]["start"] == 16
    assert told.json["problems"][0]["problem"] == "checksum differs"
    assert (tmp_path / "b.kvc").read_bytes() == (tmp_path / "a.repaired.kvc").read_bytes()


def test_a_lost_commit_loses_nothing_and_exits_with_0(samples: dict[str, Sample], tmp_path: Path) -> None:
    path = damaged(samples["bulk"], tmp_path, len(samples["bulk"].data) - 1)
    said = run("repair", path, "--in-place")
    assert (said.code, said.out.splitlines()[-1]) == (0, "nothing is lost")
    assert samples["bulk"].holds(path, TOKENS)


def test_repair_loads_no_torch(samples: dict[str, Sample], tmp_path: Path) -> None:
    path = damaged(samples["bulk"], tmp_path, len(samples["bulk"].data) - 40)
    code = """
import sys
from kvcellar.frontends.cli import main
try:
    main()
except SystemExit as stop:
    print("exit", stop.code, sorted({"torch", "transformers", "numba"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code, "repair", str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("nothing is lost\nexit 0 []\n"), done.stdout
