"""A phrase in an archive: its readings, its hits, what they restore, and that a model goes on from it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kvcellar
from archives import SMALL
from kvcellar.archive.reader import ArchiveReader
from kvcellar.errors import ArchiveNotFound, InvalidInput
from kvcellar.frontends.search import Hit, readings, search, spans_for
from kvcellar.store.local import LocalStore
from models import generate, llama, logits, pairs, prefill, prompt, same_bits

IDS = prompt(60)
IDS[40:44] = IDS[20:24]
NEW = prompt(5, seed=1)


@pytest.fixture
def of_llama(tmp_path: Path) -> Path:
    """60 tokens of the shared Llama, of which 20 … 23 come again at 40, in small blocks."""
    kvcellar.save(tmp_path / "a.kvc", prefill(llama(), IDS), tokens=IDS, model=llama(), recipe=SMALL)
    return tmp_path / "a.kvc"


def reader_at(path: Path) -> ArchiveReader:
    store, name = LocalStore.at(path)
    return ArchiveReader(store.open_reader(name))


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint8)])
def test_a_phrase_is_found_in_an_archive(of_llama: Path, form: Callable) -> None:
    expected = [Hit(20, 24, 1.0, tuple(IDS[20:24])), Hit(40, 44, 1.0, tuple(IDS[20:24]))]
    phrase = form(IDS[20:24])
    with kvcellar.open(of_llama) as archive, reader_at(of_llama) as reader:
        assert search(of_llama, phrase) == search(archive, phrase) == search(reader, phrase) == expected
    assert search(str(of_llama), phrase, limit=1) == expected[:1]
    assert search(of_llama, form([1, 2, 3, 1, 2, 3])) == []


def test_a_search_reads_no_part_of_a_block(of_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a part was read")

    monkeypatch.setattr(ArchiveReader, "read_parts", refuse)
    assert len(search(of_llama, IDS[20:24])) == 2
    with kvcellar.open(of_llama, model=llama()) as archive, pytest.raises(AssertionError):
        archive.restore(positions=4)


def test_fuzzy_hits_come_best_first_and_apart(of_llama: Path) -> None:
    phrase = [*IDS[20:23], IDS[23] % 127 + 1, *IDS[24:26]]
    hits = search(of_llama, phrase, mode="fuzzy", at_least=3)
    assert [(hit.start, hit.stop, hit.score) for hit in hits[:2]] == [(20, 26, 5 / 6), (40, 46, 3 / 6)]
    assert hits[0].tokens == tuple(IDS[20:26])
    assert search(of_llama, phrase) == []
    assert search(of_llama, phrase, mode="fuzzy", at_least=5) == hits[:1]
    every = search(of_llama, phrase, mode="fuzzy", at_least=1)
    covered = sorted(i for hit in every for i in range(hit.start, hit.stop))
    assert len(covered) == len(set(covered))
    assert [hit.score for hit in every] == sorted((hit.score for hit in every), reverse=True)


@pytest.mark.parametrize(
    "words",
    [
        {"mode": "near"},
        {"mode": "fuzzy"},
        {"at_least": 2},
        {"mode": "fuzzy", "at_least": 0},
        {"mode": "fuzzy", "at_least": 4},
        {"limit": 0},
        {"phrase": []},
        {"phrase": "text"},
        {"phrase": [0.5]},
        {"phrase": [[1], [2]]},
    ],
)
def test_searches_that_cannot_be_meant(of_llama: Path, words: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        search(of_llama, **{"phrase": [1, 2, 3], **words})


def test_a_namespace_hides_its_archives(make_cache: Callable, make_ids: Callable, saved: Callable) -> None:
    path = saved(make_cache(), namespace="mine")
    assert len(search(path, make_ids(3), namespace="mine")) == 1
    with pytest.raises(ArchiveNotFound):
        search(path, make_ids(3))


def spaced(text: str, add_special_tokens: bool = True) -> SimpleNamespace:
    """A tokenizer that joins a word with one space before it, as byte-pair encodings do: its id is odd then."""
    ids = [0] * add_special_tokens
    for i, word in enumerate(text.replace("\n", " \n ").split(" ")):
        if word == "\n":
            ids.append(1)
        elif word:
            ids.append(2 * (sum(map(ord, word)) % 50 + 1) + (i > 0 and not text[: text.index(word)].endswith("\n")))
    return SimpleNamespace(input_ids=ids)


def test_a_phrase_is_read_as_it_may_stand_in_a_text() -> None:
    alone, after_space = spaced("cat sat", False).input_ids, spaced(" cat sat", False).input_ids
    assert alone != after_space
    assert [ids.tolist() for ids in readings("cat sat", spaced)] == [alone, after_space]
    for phrase in ("", " ", "   "):
        with pytest.raises(InvalidInput, match="no token"):
            readings(phrase, spaced)


def test_hits_of_all_readings_are_merged(make_cache: Callable, saved: Callable) -> None:
    text = "cat sat on a cat sat\ncat sat"
    ids = spaced(text, False).input_ids
    path = saved(make_cache(tokens=len(ids)), tokens=ids)
    found = search(path, "cat sat", tokenizer=spaced)
    assert [(hit.start, hit.stop) for hit in found] == [(0, 2), (4, 6), (7, 9)]
    nearly = search(path, "cat mat", tokenizer=spaced, mode="fuzzy", at_least=1)
    assert {(hit.start, hit.stop) for hit in nearly} == {(0, 2), (4, 6), (7, 9)}
    assert {hit.score for hit in nearly} == {0.5}


def test_of_readings_that_end_together_the_longest_counts(make_cache: Callable, saved: Callable) -> None:
    def letters(text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(text.encode()))

    path = saved(make_cache(tokens=40), tokens=letters("a banana is an ananas and not a banana b").input_ids)
    assert [(hit.start, hit.stop) for hit in search(path, "ana", tokenizer=letters)] == [
        (3, 6),
        (5, 8),
        (14, 18),
        (17, 20),
        (33, 36),
        (35, 38),
    ]
    for hit in search(path, "ana x", tokenizer=letters, mode="fuzzy", at_least=4):
        assert hit.score >= 4 / 6


@pytest.mark.parametrize(
    ("hits", "sizes", "expected"),
    [
        ([], {}, [range(4), range(68, 100)]),
        ([(40, 43)], {}, [range(4), range(24, 59), range(68, 100)]),
        ([(60, 63), (50, 52)], {"context": 4, "recent": 8}, [range(4), range(46, 67), range(92, 100)]),
        ([(50, 52), (52, 54)], {"context": 0, "recent": 0, "sinks": 0}, [range(50, 54)]),
        ([(2, 6), (97, 100)], {"context": 2, "recent": 4}, [range(8), range(95, 100)]),
        ([(0, 1)], {"sinks": 200}, [range(100)]),
        ([(0, 1)], {"recent": 200}, [range(100)]),
        ([], {"sinks": 0, "recent": 0}, []),
    ],
)
def test_spans_are_sinks_hits_and_recent_tokens(
    hits: list[tuple[int, int]], sizes: dict[str, int], expected: list[range]
) -> None:
    assert spans_for([Hit(a, b, 1.0, ()) for a, b in hits], 100, **sizes) == expected


def test_spans_of_hits_that_are_not_there_are_refused() -> None:
    for start, stop in ((98, 101), (-1, 3), (5, 4)):
        with pytest.raises(InvalidInput, match="a hit in tokens"):
            spans_for([Hit(start, stop, 1.0, ())], 100)
    with pytest.raises(InvalidInput, match="below 0"):
        spans_for([], 100, context=-1)


def test_a_model_goes_on_from_hits_alone_at_their_positions(of_llama: Path) -> None:
    model, full = llama(), prefill(llama(), IDS)
    with kvcellar.open(of_llama, model=model) as archive:
        hits = search(archive, IDS[20:24])
        spans = spans_for(hits, len(archive), recent=5, context=3)
        chosen = list(itertools.chain(*spans))
        assert chosen == [*range(4), *range(17, 27), *range(37, 47), *range(55, 60)]
        restored, again = (archive.restore(positions=itertools.chain(*spans)) for _ in range(2))
    assert (restored.matched, restored.next_position) == (len(chosen), 60)
    assert same_bits(pairs(restored.cache), [(k[:, :, chosen], v[:, :, chosen]) for k, v in pairs(full)])
    mask = torch.full((1, 1, 5, 65), float("-inf"))
    mask[..., chosen] = 0.0
    for row in range(5):
        mask[..., row, 60 : 61 + row] = 0.0
    expected = logits(model, copy.deepcopy(full), NEW, attention_mask=mask)
    assert torch.allclose(logits(model, again.cache, NEW), expected, atol=1e-5, rtol=1e-5)
    said = generate(model, IDS + NEW, restored.cache, new=6)
    assert said[65] == int(expected[-1].argmax())
    assert restored.cache.get_seq_length() == 70
