"""Field cases about what a restore gives back: G05, G06, G12, G13, G41, G47 (shared/FIELD_CASES.md)."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvcellar
from kvcellar.errors import InvalidInput
from models import generate, llama, logits, pairs, prefill, prompt, same_bits

IDS = prompt(40)
NEW = prompt(5, seed=1)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """40 tokens of the shared Llama."""
    kvcellar.save(tmp_path / "a.kvc", prefill(llama(), IDS), tokens=IDS, model=llama())
    return tmp_path / "a.kvc"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_field_g05_restores_share_nothing(archive: Path) -> None:
    before = _digest(archive)
    with kvcellar.open(archive, model=llama()) as stored:
        first, second = stored.restore().cache, stored.restore().cache
        untouched = copy.deepcopy(pairs(second))
        generate(llama(), IDS + NEW, first, new=5)
        assert first.get_seq_length() == 49
        assert second.get_seq_length() == 40
        assert same_bits(pairs(second), untouched)
        assert torch.equal(logits(llama(), second, NEW), logits(llama(), prefill(llama(), IDS), NEW))
    assert _digest(archive) == before


def test_field_g05_writing_into_a_restored_tensor_changes_nothing_else(archive: Path) -> None:
    before = _digest(archive)
    with kvcellar.open(archive, model=llama()) as stored:
        first, second = stored.restore().cache, stored.restore().cache
        keys, values = stored.read(0, 0, 40)
        untouched = copy.deepcopy(pairs(second))
        for written in [*(side for pair in pairs(first) for side in pair), keys, values]:
            written.fill_(7.0)
        assert same_bits(pairs(second), untouched)
        assert same_bits(pairs(stored.restore().cache), untouched)
    assert _digest(archive) == before


def test_field_g05_source_cache_may_go_on_after_save(tmp_path: Path) -> None:
    source = prefill(llama(), IDS)
    held = copy.deepcopy(pairs(source))
    kvcellar.save(tmp_path / "a.kvc", source, tokens=IDS, model=llama())
    assert same_bits(pairs(source), held)
    logits(llama(), source, NEW)
    pairs(source)[0][0].zero_()
    with kvcellar.open(tmp_path / "a.kvc", model=llama()) as stored:
        assert same_bits(pairs(stored.restore().cache), held)


@pytest.mark.parametrize("length", [40, 30, 39, 2, 41])
def test_field_g06_prompt_no_longer_than_the_cache(archive: Path, length: int) -> None:
    given = [*IDS, 5][:length]
    with kvcellar.open(archive, model=llama()) as stored:
        restored = stored.restore(prompt=given)
    assert restored.matched == min(length - 1, 40)
    assert restored.cache.get_seq_length() == restored.matched
    assert generate(llama(), given, restored.cache, new=8) == generate(llama(), given, new=8)


def test_field_g06_prompt_of_one_token(archive: Path) -> None:
    with kvcellar.open(archive, model=llama()) as stored:
        restored = stored.restore(prompt=IDS[:1])
    assert restored.matched == 0
    assert restored.cache.get_seq_length() == 0
    assert generate(llama(), IDS[:1], restored.cache, new=8) == generate(llama(), IDS[:1], new=8)


def test_field_g12_empty_cache_object_is_refused_not_taken_for_absent(tmp_path: Path) -> None:
    empty = DynamicCache()
    assert not empty  # falsy, which is what made other tools ignore it
    with pytest.raises(InvalidInput, match="empty"):
        kvcellar.save(tmp_path / "a.kvc", empty, tokens=[], identity="m")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tokens", [1, 2])
def test_field_g12_short_caches_keep_every_token(tmp_path: Path, tokens: int) -> None:
    ids, source = IDS[:tokens], prefill(llama(), IDS[:tokens])
    info = kvcellar.save(tmp_path / "a.kvc", source, tokens=ids, model=llama())
    assert info.tokens == tokens
    with kvcellar.open(tmp_path / "a.kvc", model=llama(), mode="a") as stored:
        assert len(stored) == tokens
        assert stored.restore().matched == tokens
        restored = stored.restore().cache
        assert same_bits(pairs(restored), pairs(source))
        logits(llama(), restored, NEW[:1])
        stored.append(restored, ids + NEW[:1])
        assert len(stored) == tokens + 1
        assert same_bits(pairs(stored.restore().cache), pairs(restored))


CHUNK = 4


@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 150 * CHUNK + 3])
def test_field_g13_any_number_of_blocks_and_any_remainder(
    make_cache: Callable, make_ids: Callable, saved: Callable, tokens: int
) -> None:
    source = make_cache(layers=2, tokens=tokens)
    recipe = {**kvcellar.Recipe(name="g13", symbols={"id": "byteplanes-zstd/1"}).to_json(), "block": CHUNK}
    path = saved(source, recipe=recipe)
    rng = np.random.default_rng(tokens)
    with kvcellar.open(path, identity="m") as stored:
        assert stored.info().blocks == -(-tokens // CHUNK)
        assert stored.tokens.tolist() == make_ids(tokens)
        whole = pairs(stored.restore().cache)
        assert same_bits(whole, source)
        for start, stop in np.sort(rng.integers(0, tokens + 1, (20, 2)), axis=1).tolist():
            cut = [(keys[0, :, start:stop], values[0, :, start:stop]) for keys, values in whole]
            assert same_bits([stored.read(layer, start, stop) for layer in range(2)], cut), (start, stop)
            assert stored.restore(positions=range(start, stop)).matched == stop - start


def test_field_g41_tensors_outlive_the_file(archive: Path) -> None:
    expected = pairs(prefill(llama(), IDS))
    with kvcellar.open(archive, model=llama()) as stored:
        restored = stored.restore().cache
        part = stored.read(1, 3, 17)
        if sys.platform == "linux":
            assert str(archive) not in Path("/proc/self/maps").read_text()
    archive.write_bytes(b"\xff" * archive.stat().st_size)
    archive.unlink()
    assert same_bits(pairs(restored), expected)
    assert same_bits([part], [tuple(side[0, :, 3:17] for side in expected[1])])
    assert torch.equal(logits(llama(), restored, NEW), logits(llama(), prefill(llama(), IDS), NEW))


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/self/fd")
def test_field_g41_close_releases_the_file(archive: Path) -> None:
    def held() -> list[str]:
        links = (entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
        return [target for target in (str(link.readlink()) for link in links) if target.startswith(str(archive))]

    stored = kvcellar.open(archive, model=llama())
    assert held() == [str(archive)]
    restored = stored.restore()
    stored.close()
    assert held() == []
    assert restored.cache.get_seq_length() == 40


def _first_reads(ids: list[int], cache: object, new: int) -> tuple[list[int], list[int]]:
    """What `generate` gives, and how many tokens the embedding saw in each forward."""
    seen: list[int] = []
    hook = llama().get_input_embeddings().register_forward_hook(lambda _, given, __: seen.append(given[0].shape[-1]))
    try:
        return generate(llama(), ids, cache, new=new), seen
    finally:
        hook.remove()


@pytest.mark.parametrize("by_prompt", [False, True])
def test_field_g47_the_model_reads_only_the_new_tokens(archive: Path, by_prompt: bool) -> None:
    ids = IDS + NEW
    with kvcellar.open(archive, model=llama()) as stored:
        restored = stored.restore(prompt=ids) if by_prompt else stored.restore()
    assert restored.matched == 40
    out, seen = _first_reads(ids, restored.cache, new=4)
    assert seen == [5, 1, 1, 1]
    assert out == generate(llama(), ids, new=4)


def test_field_g47_a_diverging_prompt_reads_from_the_divergence(archive: Path) -> None:
    ids = [*IDS[:25], IDS[25] ^ 1, *NEW]
    with kvcellar.open(archive, model=llama()) as stored:
        restored = stored.restore(prompt=ids)
    assert restored.matched == 25
    out, seen = _first_reads(ids, restored.cache, new=3)
    assert seen == [6, 1, 1]
    assert out == generate(llama(), ids, new=3)


def test_field_g47_selected_positions_are_usable_too(archive: Path) -> None:
    with kvcellar.open(archive, model=llama()) as stored:
        restored = stored.restore(positions=[*range(4), *range(20, 40)])
    assert restored.matched == 24
    _, seen = _first_reads(IDS + NEW, restored.cache, new=3)
    assert seen == [5, 1, 1]
