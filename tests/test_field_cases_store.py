"""Field cases about files and names: G09, G16, G21, G22, G32, G33, G34, G42 (shared/FIELD_CASES.md)."""

from __future__ import annotations

import errno
import json
import os
import pickle
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcellar
from archives import spans
from clitools import run
from kvcellar.archive.block import BlockHead
from kvcellar.archive.commit import Commit, read_commit
from kvcellar.archive.format import COMMIT, INDEX, pack_record, read_record
from kvcellar.errors import ArchiveError, DamagedArchive, KVCellarError, NotAnArchive, StorageError
from kvcellar.store.local import LocalStore
from models import llama, new_llama, pairs, prefill, prompt, same_bits

SLOW = 1.0  # seconds a refusal may take


def test_field_g09_every_layer_has_a_shape_of_its_own(saved: Callable) -> None:
    shapes = [(8, 32), (8, 32), (2, 64), (8, 32)]
    source = [(torch.randn(1, h, 33, d), torch.randn(1, h, 33, d)) for h, d in shapes]
    with kvcellar.open(saved(source, prompt(33)), identity="m") as stored:
        runs = [(run["layers"], run["key"]["heads"], run["key"]["width"]) for run in stored.info().geometry]
        assert runs == [(2, 8, 32), (1, 2, 64), (1, 8, 32)]
        assert same_bits(pairs(stored.restore().cache), source)
        keys, values = stored.read(2, 7, 9)
        assert torch.equal(keys, source[2][0][0, :, 7:9])
        assert torch.equal(values, source[2][1][0, :, 7:9])


def test_field_g16_token_ids_and_not_text_are_the_identity(tmp_path: Path) -> None:
    model = new_llama(bos_token_id=1)
    text = [i for i in prompt(30) if i != 1][:20]
    for name, ids in (("with", [1, *text]), ("without", text)):
        kvcellar.save(tmp_path / f"{name}.kvc", prefill(model, ids), tokens=ids, model=model)
    for name, ids in (("with", [1, *text]), ("without", text)):
        found = kvcellar.find(tmp_path, [*ids, 5], model=model)
        assert (found.path, found.matched) == (str(tmp_path / f"{name}.kvc"), len(ids))
    with kvcellar.open(tmp_path / "with.kvc", model=model, mode="a") as stored:
        with pytest.warns(UserWarning, match="second beginning-of-sequence token 1"):
            stored.restore(prompt=[1, *text, 1, *text])
        with pytest.warns(UserWarning, match="second beginning-of-sequence token 1"):
            stored.append(prefill(model, [1, *text, 1, 9]), [1, *text, 1, 9])
    with kvcellar.open(tmp_path / "without.kvc", model=model) as stored, warnings.catch_warnings():
        warnings.simplefilter("error")
        stored.restore(prompt=[*text, 1, 9])  # the first one is no second one
        stored.restore(prompt=[*text, 9])


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0, "before the index"])
def test_field_g21_a_failed_store_is_never_visible(
    share: float | str, saved: Callable, make_cache: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = saved(make_cache(seed=1))
    before = path.read_bytes()
    size = saved(make_cache(seed=2), name="whole.kvc").stat().st_size
    (tmp_path / "whole.kvc").rename(tmp_path / "whole")
    index = next(span.start for span in spans((tmp_path / "whole").read_bytes()) if span.tag == INDEX)
    (tmp_path / "whole").unlink()
    limit = index if isinstance(share, str) else int(size * share) - (share == 1.0)
    written, real = [0], os.pwrite

    def write(file: int, data: Any, offset: int) -> int:
        if written[0] + len(data) > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        written[0] += len(data)
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    for name in ("a.kvc", "new.kvc"):
        written[0] = 0
        with pytest.raises(StorageError, match="No space left"):
            saved(make_cache(seed=2), name=name)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.kvc"]
    assert kvcellar.find(tmp_path, prompt(3), identity="m").path in (None, str(path))


def _use(path: Path) -> None:
    with kvcellar.open(path, identity="m") as stored:
        stored.restore()


def test_field_g22_every_cut_is_an_error_and_the_file_stays(saved: Callable, make_cache: Callable) -> None:
    path = saved(make_cache(tokens=20))
    data = path.read_bytes()
    borders = {edge for span in spans(data) for edge in (span.start, span.stop)}
    for cut in sorted({edge + step for edge in borders for step in (-1, 0, 1)}):
        if 0 <= cut < len(data):
            path.write_bytes(data[:cut])
            with pytest.raises(ArchiveError):
                _use(path)
            assert path.read_bytes() == data[:cut]
    path.write_bytes(data[:-1])
    assert run("verify", path).code == 4


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_field_g22_a_passing_error_deletes_nothing(
    code: int, saved: Callable, make_cache: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(make_cache())
    before = path.read_bytes()

    def fail(*arguments: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with kvcellar.open(path, identity="m") as stored:
        for call in ("pread", "preadv"):
            monkeypatch.setattr(os, call, fail)
        with pytest.raises(StorageError):
            stored.restore()
        monkeypatch.undo()
        assert same_bits(pairs(stored.restore().cache), make_cache())
    assert path.read_bytes() == before


def test_field_g32_pickles_are_never_executed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (marker,))

    trap = tmp_path / "trap.kvc"
    trap.write_bytes(pickle.dumps(Trap()))
    torch.save({"x": torch.zeros(2)}, tmp_path / "weights.kvc")
    for path in (trap, tmp_path / "weights.kvc"):
        with pytest.raises(NotAnArchive):
            kvcellar.open(path, identity="m")
        for command in ("info", "verify"):
            assert run(command, path).code == 4
        with pytest.raises(NotAnArchive):
            kvcellar.save(path, prefill(llama(), [1, 2]), tokens=[1, 2], identity="m")
    assert not marker.exists()


def _manifest_with(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The archive with a changed manifest, its checksums made right, so that what is checked is what it says."""
    data = path.read_bytes()
    record = read_record(LocalStore(path.parent).open_reader(path.name), 32, len(data), b"KVCM")
    value = json.loads(record.head)
    change(value)
    head = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    path.write_bytes(data[:32] + pack_record(b"KVCM", 32, head, 0) + data[record.end :])


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value["geometry"][0]["key"].update(heads=2**32, width=2**32),
        lambda value: value["geometry"][0]["key"].update(heads=-1),
        lambda value: value["geometry"][0].update(layers=2**40),
        lambda value: value["geometry"][0].update(kind="sliding", window=2**70),
        lambda value: value["geometry"][0].update(kind="os.system"),
        lambda value: value["recipe"]["symbols"].update(id="os:system"),
    ],
)
def test_field_g33_sizes_that_cannot_be_are_refused_at_once(
    saved: Callable, make_cache: Callable, change: Callable
) -> None:
    path = saved(make_cache())
    _manifest_with(path, change)
    started = time.perf_counter()
    with pytest.raises(KVCellarError):
        kvcellar.open(path, identity="m").restore()
    assert time.perf_counter() - started < SLOW


@pytest.mark.parametrize("data", [b"\x89KVC\r\n\x1a\n", b"", b"\x89KVC\r\n\x1a\n" + b"\xff" * 24, b"[" * 5000])
def test_field_g33_files_too_short_to_be_anything(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.kvc").write_bytes(data)
    with pytest.raises(ArchiveError):
        kvcellar.open(tmp_path / "a.kvc", identity="m")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a\\..\\b", "CON", "x" * 900])
def test_field_g34_names_in_archives_are_data(name: str, saved: Callable, make_cache: Callable, tmp_path: Path) -> None:
    path = saved(make_cache(), identity=name, namespace=name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.kvc"]
    with kvcellar.open(path, identity=name, namespace=name) as stored:
        assert stored.manifest.namespace == name
        assert stored.manifest.identity.label == name
    for outside in ("../x.kvc", "a/../../x.kvc"):
        with pytest.raises(KVCellarError):
            LocalStore(tmp_path).create(outside)


def test_field_g34_a_link_out_of_the_folder_is_not_written_through(
    saved: Callable, make_cache: Callable, tmp_path: Path
) -> None:
    (tmp_path / "inside").mkdir()
    outside = tmp_path / "outside.kvc"
    outside.write_bytes(b"not ours")
    (tmp_path / "inside" / "a.kvc").symlink_to(outside)
    with pytest.raises(NotAnArchive):
        kvcellar.save(tmp_path / "inside" / "a.kvc", make_cache(), tokens=prompt(40), identity="m")
    assert outside.read_bytes() == b"not ours"


@pytest.mark.parametrize("offset", [2**31 - 1, 2**31, 2**32 - 1, 2**32 + 1, 5 * 2**30, 2**62])
def test_field_g42_offsets_beyond_four_gigabytes(offset: int, make_cache: Callable, saved: Callable) -> None:
    path = saved(make_cache(tokens=4))
    store = LocalStore(path.parent)
    with store.open_reader(path.name) as reader:
        data = reader.read(0, reader.size())
    span = next(span for span in spans(data) if span.tag == COMMIT)
    with store.open_reader(path.name) as reader:
        commit = read_commit(reader, span.start, len(data))
    moved = Commit(7, offset, offset - 1, offset - 2, 1, offset, offset + 1, offset, commit.added)

    class Far:
        """A file whose bytes before `offset` nobody reads."""

        name = "far"

        def read(self, at: int, length: int) -> bytes:
            assert at >= offset
            return moved.pack()[at - offset : at - offset + length]

    read = read_commit(Far(), offset, offset + moved.packed_length)  # type: ignore[arg-type]
    assert (read.offset, read.previous, read.index, read.tokens) == (offset, offset - 1, offset - 2, offset)
    assert read.end == offset + moved.packed_length
    with pytest.raises(DamagedArchive):
        read_commit(Far(), offset, offset + moved.packed_length - 1)  # type: ignore[arg-type]
    assert struct.unpack_from("<4s", moved.pack())[0] == COMMIT
    far = BlockHead(offset, commit.added["start"][:0].astype("i8"), False, _geometry(make_cache), b"\0" * 32, (), 0)
    assert struct.unpack_from("<Q", far.pack(), 8)[0] == offset


def _geometry(make_cache: Callable) -> Any:
    from kvcellar.frontends.transformers import take_cache

    return take_cache(make_cache()).geometry
