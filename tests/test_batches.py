"""Batches: rows joined, selected, repeated, reordered, searched with beams and saved one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DummyLayer

import kvcellar
from kvcellar.cache import Restored
from kvcellar.errors import InvalidInput, UnsupportedCache
from kvcellar.frontends.batch import Batch, batch
from models import generate, llama, logits, mistral, pairs, prefill, prompt, same_bits
from zoo import BATCHED, BY_NAME

LENGTHS = (40, 9, 23, 16)
ROWS = [prompt(n, seed=n) for n in LENGTHS]
NEW = [prompt(5, seed=100 + n) for n in LENGTHS]
SLIDING = partial(mistral, 16)


@pytest.fixture
def restored(tmp_path: Path) -> Callable[..., list[Restored]]:
    """Caches of `rows` of tokens, each through an archive of its own."""

    def restore(model: Any, rows: list[list[int]] = ROWS) -> list[Restored]:
        found = []
        for index, ids in enumerate(rows):
            kvcellar.save(tmp_path / f"{index}.kvc", prefill(model, ids), tokens=ids, identity="m")
            with kvcellar.open(tmp_path / f"{index}.kvc", identity="m") as stored:
                found.append(stored.restore())
        return found

    return restore


@torch.no_grad()
def _forward(model: Any, joined: Batch, new: list[list[int]]) -> torch.Tensor:
    return model(**joined.forward_inputs(new), use_cache=True).logits


def _grown(joined: Batch, by: int) -> Batch:
    """The batch after a forward of `by` tokens."""
    mask = joined.attention_mask
    return Batch(joined.cache, torch.cat([mask, mask.new_ones(len(mask), by)], dim=1))


@torch.no_grad()
def _generated(model: Any, inputs: dict[str, Any], **more: Any) -> list[list[int]]:
    """The tokens behind the prompts."""
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **more}
    return model.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", BATCHED)
def test_each_row_of_a_batch_says_what_it_says_alone(name: str, restored: Callable) -> None:
    model = BY_NAME[name].build()
    alone = restored(model)
    joined = batch(alone)
    assert joined.attention_mask.sum(1).tolist() == list(LENGTHS)
    assert joined.attention_mask.shape == (4, 40)
    assert joined.cache.get_seq_length() == 40
    three = _forward(model, joined, [ids[:3] for ids in NEW])
    two = _forward(model, _grown(joined, 3), [ids[3:] for ids in NEW])
    for row, (one, ids) in enumerate(zip(alone, NEW, strict=True)):
        expected = torch.cat([logits(model, one.cache, ids[:3]), logits(model, one.cache, ids[3:])])
        assert torch.allclose(torch.cat([three[row], two[row]]), expected, atol=1e-5, rtol=0), row


def test_eager_attention_is_told_of_the_pads_too(restored: Callable) -> None:
    alone = restored(llama())
    found = _forward(llama("eager"), batch(alone), NEW)
    for row, (one, ids) in enumerate(zip(alone, NEW, strict=True)):
        assert torch.allclose(found[row], logits(llama("eager"), one.cache, ids), atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3 text", "GPT-2", "BLOOM"])
def test_generate_goes_on_in_every_row(name: str, restored: Callable) -> None:
    model = BY_NAME[name].build()
    prompts = [ids + new for ids, new in zip(ROWS, NEW, strict=True)]
    found = _generated(model, batch(restored(model)).generate_inputs(prompts))
    assert found == [generate(model, ids, new=6)[len(ids) :] for ids in prompts]
    assert len({tuple(tokens) for tokens in found}) == 4


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BLOOM"])
def test_prompts_with_unequal_numbers_of_new_tokens(name: str, restored: Callable) -> None:
    model = BY_NAME[name].build()
    prompts = [ids + new[:n] for ids, new, n in zip(ROWS, NEW, (1, 5, 2, 3), strict=True)]
    inputs = batch(restored(model)).generate_inputs(prompts)
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (4, 45)
    kept = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    assert [ids[mask.bool()].tolist() for ids, mask in kept] == prompts
    assert _generated(model, inputs) == [generate(model, ids, new=6)[len(ids) :] for ids in prompts]


def test_rows_of_batches_and_rows_of_nothing(restored: Callable, tmp_path: Path) -> None:
    """A row may be a batch itself, or what a prompt got that matched nothing."""
    alone = restored(llama())
    two = prefill(llama(), [ROWS[2], ROWS[2][::-1]])
    with kvcellar.open(tmp_path / "0.kvc", identity="m") as stored:
        nothing = stored.restore(prompt=[127, *ROWS[0]])
    assert nothing.matched == 0
    joined = batch([nothing, two, alone[1]])
    assert joined.attention_mask.sum(1).tolist() == [0, 23, 23, 9]
    found = _forward(llama(), joined, NEW)
    sources = [DynamicCache(), prefill(llama(), ROWS[2]), prefill(llama(), ROWS[2][::-1]), alone[1].cache]
    for row, (source, ids) in enumerate(zip(sources, NEW, strict=True)):
        assert torch.allclose(found[row], logits(llama(), source, ids), atol=1e-5), row


def test_joining_copies(restored: Callable) -> None:
    alone = restored(llama())
    before = copy.deepcopy(pairs(alone[0].cache))
    joined = batch(alone[:1])
    for keys, values in pairs(joined.cache):
        keys.zero_()
        values.zero_()
    assert same_bits(pairs(alone[0].cache), before)


def test_field_g04_rows_keep_their_own_tokens_cold_and_hot(tmp_path: Path) -> None:
    """3 rows, 100 stored and 5 appended tokens: selected, repeated and reordered rows are those of their source."""
    model, rows = llama(), [prompt(105, seed=seed) for seed in (1, 2, 3)]
    source = prefill(model, [ids[:100] for ids in rows])
    for row, ids in enumerate(rows):
        kvcellar.save(tmp_path / f"{row}.kvc", source, tokens=ids[:100], row=row, identity="m")
    logits(model, source, [ids[100:] for ids in rows])
    found = []
    for row, ids in enumerate(rows):
        with kvcellar.open(tmp_path / f"{row}.kvc", identity="m", mode="a") as stored:
            stored.append(source, ids, row=row)
            found.append(stored.restore())
    operations: list[tuple[Callable[[Any], object], list[int]]] = [
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    ]
    for operation, order in operations:
        cache = batch(found).cache
        operation(cache)
        for part in (slice(0, 100), slice(100, 105)):
            got = [(k[:, :, part], v[:, :, part]) for k, v in pairs(cache)]
            assert same_bits(got, [(k[order][:, :, part], v[order][:, :, part]) for k, v in pairs(source)]), order
        new = [prompt(2, seed=9)] * len(order)
        said = _forward(model, Batch(cache, torch.ones(len(order), 105, dtype=torch.int64)), new)
        for row, index in enumerate(order):
            assert torch.allclose(said[row], logits(model, copy.deepcopy(found[index].cache), new[0]), atol=1e-5)


@pytest.mark.parametrize("shared", [llama, SLIDING], ids=["Llama", "Mistral"])
def test_beam_search_from_a_restored_cache(shared: Callable, restored: Callable) -> None:
    model, ids = shared(), ROWS[0] + NEW[0]
    given = torch.tensor([ids])

    def search(cache: Any) -> list[list[int]]:
        inputs = {"input_ids": given, "attention_mask": torch.ones_like(given)}
        if cache is not None:
            cache.batch_repeat_interleave(3)
            inputs["cache"] = cache
        return _generated(model, inputs, num_beams=3, num_return_sequences=3)

    found = search(restored(model, ROWS[:1])[0].cache)
    assert found == search(prefill(model, ROWS[0])) == search(None)
    assert len({tuple(beam) for beam in found}) == 3


@pytest.mark.parametrize("shared", [llama, SLIDING], ids=["Llama", "Mistral"])
def test_rows_of_a_batch_are_saved_one_by_one(shared: Callable, restored: Callable, tmp_path: Path) -> None:
    """Behind a batch's own forward, every row goes into an archive without its pads, and out again."""
    model = shared()
    alone = restored(model)
    joined = batch(alone)
    _forward(model, joined, NEW)
    mask = _grown(joined, 5).attention_mask
    again = []
    for row, (ids, new) in enumerate(zip(ROWS, NEW, strict=True)):
        path = tmp_path / f"again{row}.kvc"
        kvcellar.save(path, joined.cache, tokens=ids + new, row=row, attention_mask=mask, identity="m")
        with kvcellar.open(path, identity="m") as stored:
            assert stored.tokens.tolist() == ids + new
            again.append(stored.restore())
        logits(model, alone[row].cache, new)
        kept, expected = pairs(again[row].cache), pairs(alone[row].cache)
        for side, other in zip((x for pair in kept for x in pair), (x for pair in expected for x in pair), strict=True):
            assert torch.allclose(side, other, atol=1e-5)
    assert torch.equal(batch(again).attention_mask, mask)


def test_rows_that_do_not_fit_together_are_refused(restored: Callable, tmp_path: Path) -> None:
    alone = restored(llama())
    fits = alone[0]
    other = BY_NAME["Llama"].build()
    narrow = prefill(other, ROWS[1])
    half = DynamicCache([(k.half(), v.half()) for k, v in pairs(alone[1].cache)])
    far = DynamicCache([(k.to("meta"), v.to("meta")) for k, v in pairs(alone[1].cache)])
    short = DynamicCache(pairs(alone[1].cache)[:2])
    shared = copy.deepcopy(alone[1].cache)
    shared.layers[1] = DummyLayer()
    unlike = r"row 1, layer \d is .*; expected .*, as in other rows"
    for row, message in (
        (narrow, unlike),
        (half, unlike),
        (far, unlike),
        (prefill(mistral(16), ROWS[1]), unlike),
        (shared, "row 1, layer 1 is DummyLayer"),
        (short, "row 1 has 2 layers, others 3"),
        ([], "row 1 is a list"),
        (None, "row 1 is a NoneType"),
    ):
        with pytest.raises(InvalidInput, match=message):
            batch([fits, row])
    with pytest.raises(InvalidInput, match=r"window 16; expected .*window 8"):
        batch([prefill(mistral(8), ROWS[0]), prefill(mistral(16), ROWS[1])])
    for nothing in ([], [DynamicCache(config=llama().config)]):
        with pytest.raises(InvalidInput, match="no row holds a token"):
            batch(nothing)
    with kvcellar.open(tmp_path / "0.kvc", identity="m") as stored:
        with pytest.raises(UnsupportedCache, match=r"row 1: layers hold \[0, 40\] tokens"):
            batch([fits, stored.restore(layers=[0])])
        with pytest.raises(InvalidInput, match="row 1 holds 2 tokens and goes on at position 40"):
            batch([fits, stored.restore([3, 5])])
        with pytest.raises(UnsupportedCache, match="row 1, layer 0 is a SelectedLayer"):
            batch([fits, stored.restore([3, 5]).cache])
        static = stored.restore(into=StaticCache(config=llama().config, max_cache_len=64))
    with pytest.raises(UnsupportedCache, match="row 1, layer 0 is a StaticLayer"):
        batch([fits, static])


def test_ids_that_do_not_fit_the_batch_are_refused(restored: Callable) -> None:
    joined = batch(restored(llama())[:2])
    for bad in ([[1, 2], [3]], [[], []], [[1, 2]], [[1], [2], [3]], [1, 2], [[1.5], [2]], "ab"):
        with pytest.raises(InvalidInput):
            joined.forward_inputs(bad)
    with pytest.raises(InvalidInput, match=r"prompts of \[40, 10\] tokens, rows that hold \[40, 9\]"):
        joined.generate_inputs([ROWS[0], [*ROWS[1], 5]])
    sliding = batch(restored(mistral(16))[:2])
    with pytest.raises(InvalidInput, match=r"prompts with \[1, 2\] new tokens; where layers slide"):
        sliding.generate_inputs([[*ROWS[0], 5], [*ROWS[1], 5, 6]])
