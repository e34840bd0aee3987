"""`append` and `compact`: what extends an archive, what is refused, and that bulk and append agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcellar
from kvcellar.errors import InvalidInput, TokensMismatch, UnsupportedCache
from models import generate, llama, logits, pairs, prefill, prompt, same_bits

BLOCK = 8
RECIPE = {**kvcellar.Recipe(name="blocks of 8", symbols={"id": "byteplanes-zstd/1"}).to_json(), "block": BLOCK}


def _cut(cache: list, tokens: int) -> list:
    return [(keys[:, :, :tokens], values[:, :, :tokens]) for keys, values in cache]


@pytest.mark.parametrize(
    "lengths", [[1, 2], [3, 8], [3, 9], [8, 16], [8, 9], [7, 40], [5, 6, 7, 8, 9], [1, 17, 18, 39, 40]]
)
def test_append_adds_what_is_new(make_cache: Callable, make_ids: Callable, saved: Callable, lengths: list[int]) -> None:
    source = make_cache()
    path = saved(_cut(source, lengths[0]), recipe=RECIPE)
    with kvcellar.open(path, identity="m", mode="a") as stored:
        for tokens in lengths[1:]:
            info = stored.append(_cut(source, tokens), make_ids(tokens))
            assert info.tokens == len(stored) == tokens
            assert info == stored.info()
            assert same_bits(pairs(stored.restore().cache), _cut(source, tokens))
        assert stored.verify().ok
    with kvcellar.open(path, identity="m") as again:
        assert again.tokens.tolist() == make_ids(lengths[-1])
        assert same_bits(pairs(again.restore().cache), _cut(source, lengths[-1]))
        assert again.info().sealed_blocks == lengths[-1] // BLOCK


def test_append_keeps_the_stored_values(make_cache: Callable, make_ids: Callable, saved: Callable) -> None:
    stored_first, given_later = make_cache(tokens=20), make_cache(tokens=30, seed=1)
    with kvcellar.open(saved(stored_first, recipe=RECIPE), identity="m", mode="a") as stored:
        stored.append(given_later, make_ids(30))
        found = pairs(stored.restore().cache)
    assert same_bits(_cut(found, 20), stored_first)
    new = [(keys[:, :, 20:], values[:, :, 20:]) for keys, values in found]
    assert same_bits(new, [(keys[:, :, 20:], values[:, :, 20:]) for keys, values in given_later])


def test_append_of_nothing_new_changes_no_byte(make_cache: Callable, make_ids: Callable, saved: Callable) -> None:
    path = saved(make_cache())
    before = path.read_bytes()
    with kvcellar.open(path, identity="m", mode="a") as stored:
        assert stored.append(make_cache(), make_ids(40)).commits == 1
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c, i: (c, [*i[:17], i[17] + 1, *i[18:]]), TokensMismatch, r"part at 17: stored id \d+, given \d+"),
        (lambda c, i: (_cut(c, 30), i[:30]), TokensMismatch, r"extend the 40 stored ones; they part at 30.*end there"),
        (lambda c, i: (c, i[:45]), TokensMismatch, "50 tokens, 45 token ids"),
        (lambda c, i: (c, [float(x) for x in i]), InvalidInput, "float"),
        (lambda c, i: (c[:2], i), InvalidInput, "3 layers"),
        (lambda c, i: ([(k.half(), v) for k, v in c], i), InvalidInput, "float16.*float32"),
        (lambda c, i: ([(k[..., :8], v[..., :8]) for k, v in c], i), InvalidInput, "'width': 8"),
        (lambda c, i: ([(k[:, :1], v[:, :1]) for k, v in c], i), InvalidInput, "'heads': 1"),
        (lambda c, i: ([*c[:2], (c[2][0].double(), c[2][1])], i), UnsupportedCache, "layer 2"),
        (lambda c, i: ([], []), InvalidInput, "empty"),
    ],
)
def test_append_refuses_and_leaves_the_file_alone(
    make_cache: Callable, make_ids: Callable, saved: Callable, change: Callable, error: type, message: str
) -> None:
    path = saved(make_cache())
    before = path.read_bytes()
    with kvcellar.open(path, identity="m", mode="a") as stored:
        with pytest.raises(error, match=message):
            stored.append(*change(make_cache(tokens=50), make_ids(50)))
        assert path.read_bytes() == before
        assert stored.append(make_cache(tokens=50), make_ids(50)).tokens == 50


def test_reading_handles_do_not_write(make_cache: Callable, make_ids: Callable, saved: Callable) -> None:
    path = saved(make_cache())
    before = path.read_bytes()
    with kvcellar.open(path, identity="m") as stored:
        with pytest.raises(InvalidInput, match="mode='a' to append"):
            stored.append(make_cache(tokens=41), make_ids(41))
        with pytest.raises(InvalidInput, match="mode='a' to compact"):
            stored.compact()
    assert path.read_bytes() == before


@pytest.mark.parametrize("tokens", [23, 24, 25, 40])
def test_bulk_equals_append_after_compact(
    make_cache: Callable, make_ids: Callable, saved: Callable, tokens: int
) -> None:
    source, steps = make_cache(dtype=torch.bfloat16), [3, 4, 11, 16, 22]
    bulk = saved(_cut(source, tokens), name="bulk.kvc", recipe=RECIPE)
    path = saved(_cut(source, 1), recipe=RECIPE)
    with kvcellar.open(path, identity="m", mode="a") as stored:
        for step in [*steps, tokens]:
            stored.append(_cut(source, step), make_ids(step))
        assert path.read_bytes() != bulk.read_bytes()
        before = stored.info()
        after = stored.compact()
        assert after.file_bytes < before.file_bytes
        assert (after.tokens, after.commits) == (tokens, 1)
        assert path.read_bytes() == bulk.read_bytes()
        stored.append(make_cache(tokens=tokens + 1, dtype=torch.bfloat16), make_ids(tokens + 1))  # it stays a writer
        assert len(stored) == tokens + 1
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["a.kvc", "bulk.kvc"]


def test_many_appends_do_not_pile_up_dead_bytes(make_cache: Callable, make_ids: Callable, saved: Callable) -> None:
    source = make_cache(layers=1, heads=1, width=2, tokens=120)
    path = saved(_cut(source, 1), recipe=RECIPE)
    with kvcellar.open(path, identity="m", mode="a") as stored:
        for tokens in range(2, 121):
            info = stored.append(_cut(source, tokens), make_ids(tokens))
            assert info.file_bytes <= 2 * info.live_bytes or info.commits == 1
        assert same_bits(pairs(stored.restore().cache), source)


def test_readers_keep_their_state_while_another_appends(
    make_cache: Callable, make_ids: Callable, saved: Callable
) -> None:
    source = make_cache()
    path = saved(_cut(source, 10), recipe=RECIPE)
    with kvcellar.open(path, identity="m") as before, kvcellar.open(path, identity="m", mode="a") as writer:
        writer.append(source, make_ids(40))
        assert len(before) == 10
        assert same_bits(pairs(before.restore().cache), _cut(source, 10))
        writer.compact()
        assert same_bits(pairs(before.restore().cache), _cut(source, 10))
        with kvcellar.open(path, identity="m") as after:
            assert same_bits(pairs(after.restore().cache), source)


def test_append_a_row_of_a_batch(make_cache: Callable, make_ids: Callable, saved: Callable) -> None:
    rows = [make_ids(40, seed) for seed in range(3)]
    batch = make_cache(batch=3)
    path = saved(_cut(batch, 10), rows[2][:10], row=2, recipe=RECIPE)
    with kvcellar.open(path, identity="m", mode="a") as stored:
        with pytest.raises(TokensMismatch):
            stored.append(batch, rows, row=1)
        stored.append(batch, rows, row=2)
        assert same_bits(pairs(stored.restore().cache), [(k[2:3], v[2:3]) for k, v in batch])


def _turn(stored: Any, ids: list[int]) -> list[int]:
    """Restore, generate 7 tokens behind `ids` and append them; the last one is not in the cache yet."""
    restored = stored.restore(prompt=ids)
    out = generate(llama(), ids, restored.cache, new=7)
    assert out == generate(llama(), ids, new=7)
    stored.append(restored.cache, out[:-1])
    return out


def test_a_conversation_kept_in_one_archive(tmp_path: Path) -> None:
    ids = prompt(20)
    first = prefill(llama(), ids)
    kvcellar.save(tmp_path / "a.kvc", first, tokens=ids, model=llama(), recipe=RECIPE)
    with kvcellar.open(tmp_path / "a.kvc", model=llama(), mode="a") as stored:
        for turn in range(3):
            ids = _turn(stored, [*ids, *prompt(3, seed=turn + 1)])
            assert stored.tokens.tolist() == ids[:-1]
        assert stored.verify().ok
        assert same_bits(_cut(pairs(stored.restore().cache), 20), pairs(first))
    with kvcellar.open(tmp_path / "a.kvc", model=llama()) as again:
        restored = again.restore(prompt=ids)
        assert restored.matched == len(ids) - 1
        follow = logits(llama(), restored.cache, ids[-1:])
    assert torch.allclose(follow, logits(llama(), prefill(llama(), ids[:-1]), ids[-1:]), atol=1e-3)
