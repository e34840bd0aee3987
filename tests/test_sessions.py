"""Sessions of a folder: what the trie answers is what opening every archive says, whatever happened to the files."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvcellar
from archives import SMALL
from clitools import run, write_model
from kvcellar.errors import ArchiveNotFound, InvalidInput, MissingIdentity
from kvcellar.frontends.cli.models import LocalModel, log2_probs_of
from kvcellar.frontends.sessions import Sessions
from models import llama

Save = Callable[..., Path]


@pytest.fixture
def store(make_cache: Callable, saved: Callable) -> Save:
    def save(name: str, ids: list[int], **settings: object) -> Path:
        return saved(
            make_cache(layers=1, heads=1, width=2, tokens=len(ids)), ids, f"{name}.kvc", **{"recipe": SMALL, **settings}
        )

    return save


def trie_file(folder: Path) -> Path:
    (path,) = folder.glob(".kvcellar-*.trie")
    return path


def scanned(folder: Path, ids: list[int], namespace: str = "") -> tuple[Any, list[str]]:
    """What opening every archive says."""
    sessions = Sessions(folder, identity="m", namespace=namespace)
    return sessions._scan([name for name in sessions.store.names() if name.endswith(".kvc")], np.array(ids, np.int64))


def test_probabilities_told_to_appends_go_into_the_trie_when_the_archive_is_closed(
    store: Save, make_cache: Callable, tmp_path: Path
) -> None:
    path = store("a", [5, 1, 2], log2_probs=[0, -1, -1])
    with kvcellar.open(path, identity="m", mode="a") as archive:
        for start, ids, logs in ((3, [3, 4], [-2, -2]), (0, [5, 1, 2, 3, 4, 6], [math.nan] * 5 + [-4]), (6, [7], None)):
            archive.append(make_cache(layers=1, heads=1, width=2, tokens=len(ids)), ids, start=start, log2_probs=logs)
        with pytest.raises(InvalidInput):
            archive.append(make_cache(layers=1, heads=1, width=2, tokens=1), [8], start=7, log2_probs=[0.5])
        before = trie_file(tmp_path).read_bytes()
    assert trie_file(tmp_path).read_bytes() != before
    sessions = Sessions(tmp_path, identity="m")
    read: list[str] = []
    sessions._read_archive = lambda name, stamp: read.append(name)  # type: ignore[assignment, method-assign]
    sessions.refresh()
    assert not read, "the record holds for the archive as it is now"
    np.testing.assert_array_equal(sessions.trie.log2_probs_of("a.kvc"), np.float32([0, -1, -1, -2, -2, -4, math.nan]))


def test_a_trie_that_cannot_be_told_is_a_warning_and_the_append_stands(
    store: Save, make_cache: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store("a", [5, 1])
    monkeypatch.setattr("kvcellar.frontends.remember.trie_key", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # not everything is passed over
        kvcellar.frontends.remember.remember(*_at(path), kvcellar.Identity.of("m"), "", [(0, np.zeros(2))])
    monkeypatch.setattr("kvcellar.frontends.remember.trie_key", lambda *_: _raise(OSError("no room")))
    with pytest.warns(UserWarning, match="not kept: no room"), kvcellar.open(path, identity="m", mode="a") as archive:
        archive.append(make_cache(layers=1, heads=1, width=2, tokens=1), [2], start=2, log2_probs=[-1])
    with kvcellar.open(path) as archive:
        assert archive.tokens.tolist() == [5, 1, 2]


def _at(path: Path) -> tuple[Any, str]:
    from kvcellar.store.local import LocalStore

    return LocalStore.at(path)


def _raise(error: Exception) -> Any:
    raise error


def searched(folder: Path, ids: list[int], namespace: str = "") -> tuple[Any, list[str]]:
    return Sessions(folder, identity="m", namespace=namespace).search(ids)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(3))
def test_the_trie_answers_as_opening_every_archive_does(
    store: Save, make_cache: Callable, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)

    def ids() -> list[int]:
        return [rng.randrange(2) for _ in range(rng.randint(1, 12))]

    def damage(path: Path, share: float) -> None:
        data = bytearray(path.read_bytes())
        if data and share < 0.5:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif data:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)

    kept = Sessions(tmp_path, identity="m")
    for _ in range(60):
        paths = sorted(tmp_path.glob("*.kvc"))
        step = rng.choice(["save", "save", "append", "delete", "other", "damage", "trie", "none", "touch"])
        if step == "save":
            store(rng.choice("abcdefgh"), ids())
        elif step == "other":
            store(rng.choice("abcd"), ids(), **rng.choice([{"identity": "n"}, {"namespace": "n"}]))
        elif step == "trie" and (found := list(tmp_path.glob(".kvcellar-*.trie"))):
            rng.choice([lambda: damage(found[0], rng.random()), found[0].unlink])()
        elif step == "none":
            (tmp_path / f"{rng.choice('xy')}.kvc").write_bytes(rng.choice([b"", b"none", b"\x89KVC\r\n\x1a\n"]))
        elif paths and step == "delete":
            rng.choice(paths).unlink()
        elif paths and step == "damage" and rng.random() < 0.5:
            damage(rng.choice(paths), rng.random())
        elif paths and step == "touch":
            os.utime(rng.choice(paths), ns=(rng.randrange(10**18), rng.randrange(10**18)))
        elif paths and step == "append":
            try:
                with kvcellar.open(rng.choice(paths), identity="m", mode="a") as archive:
                    longer = [*archive.tokens.tolist(), *ids()]
                    archive.append(make_cache(layers=1, heads=1, width=2, tokens=len(longer)), longer)
            except kvcellar.KVCellarError:
                pass  # one that was damaged before, or another's
        for prompt in ([], ids(), ids(), [7]):
            expected = scanned(tmp_path, prompt)
            assert searched(tmp_path, prompt) == expected
            assert kept.search(prompt) == expected


def test_only_changed_archives_are_opened(store: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        store(name, [1, 2, ord(name)])
    store("other", [1, 2, 3], identity="n")
    opened: list[str] = []
    reading = Sessions._read_archive
    monkeypatch.setattr(
        Sessions, "_read_archive", lambda self, name, stamp: (opened.append(name), reading(self, name, stamp))[1]
    )
    for expected in (["a.kvc", "b.kvc", "c.kvc", "other.kvc"], []):
        opened.clear()
        assert searched(tmp_path, [1, 2, ord("c")])[0].path == str(tmp_path / "c.kvc")
        assert opened == expected
    store("b", [1, 2, 3, 4])
    store("other", [1, 2, 3])
    opened.clear()
    assert searched(tmp_path, [1, 2, 3, 4])[0].matched == 4
    assert opened == ["b.kvc", "other.kvc"]


def test_a_trie_that_lies_is_found_out(store: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store("a", [1, 2, 3])
    store("b", [1, 5])
    searched(tmp_path, [1])
    stamp = os.stat(path)
    store("a", [1, 9, 9])
    monkeypatch.setattr(
        "kvcellar.frontends.sessions.Stamp.of",
        lambda status, of=kvcellar.frontends.sessions.Stamp.of: (
            of(stamp) if status.st_size == stamp.st_size else of(status)
        ),
    )
    assert searched(tmp_path, [1, 2, 3])[0] == (str(path), 1, "token 1: stored 9, prompt 2")


def test_superseded_records_are_dropped_in_time(store: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcellar.frontends.sessions._SPARE", 100)
    sizes = []
    for number in range(12):
        store("a", [1, 2, number])
        searched(tmp_path, [1])
        sizes.append(trie_file(tmp_path).stat().st_size)
    assert max(sizes) < 64 + 100 + 3 * (sizes[0] - 64)
    kept = Sessions(tmp_path, identity="m")
    for number in range(12):
        store("a", list(range(number, number + 30)))
        assert kept.search([number])[0].matched == 1
    assert kept.trie.pooled_tokens < 100


def test_where_nothing_can_be_written_it_is_all_in_memory(
    store: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store("a", [1, 2])
    (tmp_path / "sub").mkdir()

    def refuse(*arguments: object, **settings: object) -> None:
        raise kvcellar.errors.StorageError(13, "no")

    monkeypatch.setattr("kvcellar.frontends.trielog.LocalAppender", refuse)
    assert searched(tmp_path, [1])[0].matched == 1
    assert not list(tmp_path.glob(".kvcellar-*"))
    with pytest.warns(UserWarning, match="probabilities are not kept"):
        store("b", [1, 2, 3], log2_probs=[0, -1, -2])
    assert searched(tmp_path, [1, 2, 3])[0].matched == 3


def test_a_later_version_s_trie_file_is_left_alone(store: Save, tmp_path: Path) -> None:
    import struct

    import xxhash

    store("a", [1, 2])
    searched(tmp_path, [1])
    path = trie_file(tmp_path)
    head = bytearray(path.read_bytes()[:56])
    struct.pack_into("<H", head, 8, 2)
    later = bytes(head) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head))) + b"whatever"
    path.write_bytes(later)
    store("b", [1, 2, 3])
    assert searched(tmp_path, [1, 2, 3])[0].matched == 3
    assert path.read_bytes() == later


def test_saved_probabilities_give_the_depth(store: Save, tmp_path: Path) -> None:
    store("a", [5, 1, 2, 3], log2_probs=[0, -1, -2, -3])
    store("b", [5, 1, 9], log2_probs=torch.tensor([0, -1, -8], dtype=torch.bfloat16))
    near = kvcellar.nearest(tmp_path, [5, 1, 2, 7], identity="m")
    assert near is not None
    assert (Path(near.path).name, near.matched, near.tokens) == ("a.kvc", 3, 4)
    assert (near.kinship.printed, near.kinship.ultrametric) == (3, 1 / 8)
    same = kvcellar.nearest(tmp_path, [5, 1, 9], identity="m")
    assert same is not None
    assert (same.kinship.same, same.kinship.ultrametric, same.kinship.printed) == (True, 0, 9)
    assert kvcellar.nearest(tmp_path, [6], identity="m") is None
    assert kvcellar.nearest(tmp_path, [], identity="m") is None
    assert kvcellar.nearest(tmp_path, [5], identity="m", namespace="n") is None
    assert kvcellar.nearest(tmp_path, [5], identity="n") is None


def test_probabilities_outlive_what_happens_to_an_archive_but_not_to_the_trie_file(
    store: Save, make_cache: Callable, tmp_path: Path
) -> None:
    path = store("a", [5, 1, 2], log2_probs=[0, -1, -2])
    with kvcellar.open(path, identity="m", mode="a") as archive:
        archive.append(make_cache(layers=1, heads=1, width=2, tokens=4), [5, 1, 2, 3])
    near = kvcellar.nearest(tmp_path, [5, 1, 2, 3], identity="m")
    assert near is not None
    assert math.isnan(near.kinship.printed)
    assert math.isnan(near.kinship.cell.depth)
    assert (near.kinship.cell.unknown, near.kinship.cell.at_least) == (1, 3)
    trie_file(tmp_path).unlink()
    near = kvcellar.nearest(tmp_path, [5, 1, 2, 3], identity="m")
    assert near is not None
    assert (near.matched, near.kinship.cell.unknown, near.kinship.cell.at_least) == (4, 4, 0)


@pytest.mark.parametrize("logs", [[0], [0, 1], [[0, -1]], [0, -math.inf], "ab"])
def test_probabilities_that_are_none_save_nothing(store: Save, tmp_path: Path, logs: Any) -> None:
    with pytest.raises(InvalidInput, match="log2 prob"):
        store("a", [1, 2], log2_probs=logs)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(MissingIdentity):
        Sessions(tmp_path)
    with pytest.raises(ArchiveNotFound):
        kvcellar.nearest(tmp_path / "none", [1], identity="m")
    for prompt in ([-1], [1 << 32], [0.5], "text"):
        with pytest.raises(InvalidInput):
            kvcellar.nearest(tmp_path, prompt, identity="m")
    with pytest.raises(InvalidInput, match="namespace"):
        Sessions(tmp_path, identity="m", namespace="\ud800")


def test_log2_probabilities_are_the_model_s() -> None:
    ids = torch.randint(0, 128, (1, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = llama()(ids).logits[0]
    told = log2_probs_of(logits[:-1], ids[0, 1:])
    expected = torch.log_softmax(logits[:-1].double(), 1)[torch.arange(149), ids[0, 1:]] / math.log(2)
    assert np.allclose(told, expected.numpy(), atol=1e-4)
    logits[3, int(ids[0, 4])] = -math.inf
    assert np.isnan(log2_probs_of(logits[:-1], ids[0, 1:])[3])
    assert len(log2_probs_of(logits[:0], ids[0, :0])) == 0


def test_the_command_line_tells_what_the_model_said(tmp_path: Path) -> None:
    """`save` keeps what one forward over the whole text says, in chunks or not, and `find --nearest` adds it up."""
    folder, text = write_model(tmp_path / "model"), "You are a helpful assistant. " * 20
    assert len(text) > 512  # more than one chunk
    (tmp_path / "text.txt").write_text(text)
    caches = tmp_path / "caches"
    caches.mkdir()
    save = ("save", "--model", folder, "--text", tmp_path / "text.txt", "--recipe", "exact")
    assert run(*save, caches / "told.kvc").code == 0
    prompt = text[:530] + "!"
    found = run("find", caches, "--model", folder, "--nearest", "--json", prompt).json
    local = LocalModel(folder)
    ids = torch.tensor([local.encode(text)])
    with torch.no_grad():
        bits = torch.log_softmax(local.model(ids).logits[0, :-1].double(), 1) / math.log(2)
    expected = -float(bits[torch.arange(529), ids[0, 1:530]].sum())
    near = found["nearest"]
    assert (near["common_tokens"], near["unknown_tokens"], near["same"]) == (530, 0, False)
    assert near["cell_depth_bits"] == near["d_t_as_printed_bits"] == pytest.approx(expected, rel=1e-4)
    assert near["log2_ultrametric"] == -near["cell_depth_bits"]
    said = run("find", caches, "--model", folder, "--nearest", prompt)
    assert f"{near['cell_depth_bits']:,.1f} bits" in said.out
    assert "no distance" in said.out
    same = run("find", caches, "--model", folder, "--nearest", "--json", text).json["nearest"]
    assert (same["same"], same["ultrametric"], same["log2_ultrametric"]) == (True, 0, None)
    assert "0: the same tokens" in run("find", caches, "--model", folder, "--nearest", text).out
    nothing = run("find", caches, "--model", folder, "--nearest", "--json", "?")
    assert (nothing.code, nothing.json["nearest"]) == (3, None)

    (tmp_path / "silent").mkdir()
    assert run(*save, "--no-probabilities", tmp_path / "silent" / "a.kvc").code == 0
    assert not list((tmp_path / "silent").glob(".kvcellar-*"))
    said = run("find", tmp_path / "silent", "--model", folder, "--nearest", prompt)
    assert "not known: 530 of 530 tokens have no probability; at least 0.0 bits" in said.out
    silent = run("find", tmp_path / "silent", "--model", folder, "--nearest", "--json", prompt).json["nearest"]
    assert silent["cell_depth_bits"] is silent["d_t_as_printed_bits"] is silent["ultrametric"] is None
    assert silent["cell_depth_at_least_bits"] == 0


def test_the_paper_s_figure_of_speech(tmp_path: Path) -> None:
    """ "You are a helpful assistant" and "You are an AI assistant" share a cell as deep as "You are a" and no deeper.

    d_T sees that prefix and nothing behind it: not that both go on with " assistant", nor that they mean nearly the
    same. Any other text with that prefix is exactly as far. What merges is the prefix.
    """
    local = LocalModel(write_model(tmp_path))
    from transformers import DynamicCache

    from kvcellar.language.trie import LanguageTrie

    trie = LanguageTrie(256)
    texts = ("You are a helpful assistant", "You are an AI assistant", "You are a zebra", "The assistant")
    ids = {text: local.encode(text) for text in texts}
    for text in texts:
        trie.add(text, ids[text], local.prefill(ids[text], DynamicCache(), quiet=True, probabilities=True))
    helpful, ai, zebra, other = texts
    common = len("You are a")
    depth = trie.cell_depth(helpful, ai)
    assert trie.kinship(helpful, ai).cell.tokens == common
    assert depth == trie.cell(ids[helpful][:common]).depth > 0
    # The common end counts for nothing, and neither does meaning:
    assert trie.cell_depth(zebra, ai) == depth
    assert trie.kinship(helpful, ai).ultrametric == trie.kinship(zebra, ai).ultrametric == 2**-depth
    assert trie.cell_depth(helpful, other) == 0
    assert trie.kinship(helpful, other).ultrametric == 1
    # As printed, a sequence is farther from itself than from any other; the ultrametric puts that right.
    assert trie.cell_depth(helpful, helpful) > trie.cell_depth(helpful, zebra) >= depth
    assert trie.kinship(helpful, helpful).ultrametric == 0
    # What the trie stores once is the common prefix.
    assert trie.pooled_tokens == sum(map(len, texts)) - common - len("You are a ")
