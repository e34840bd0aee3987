"""Prompts read through the tree: at once and chunk by chunk the same, causal to the bit, exact while there is room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

import kvcellar
from kvcellar.errors import InvalidInput, UnsupportedCache
from kvcellar.frontends.tree import TREE, prefill_tree, tree_attention
from kvcellar.frontends.treeplan import METHOD, plan_for
from kvcellar.frontends.treestream import TreeStream
from models import bits, generate, llama, logits, mistral, new_llama, prefill, prompt

SMALL: dict[str, Any] = {"chunk": 16, "keep": 20, "sinks": 2, "recent": 5}
METHODS = st.sampled_from(["random", METHOD, "streaming"])


@torch.no_grad()
def read(ids: list[int], model: Any = None, **choices: Any) -> tuple[torch.Tensor, Any]:
    """All logits (T, vocabulary) of one pass through the tree, and what it leaves."""
    model = llama() if model is None else model
    with tree_attention(model, plan_for(model, **{**SMALL, **choices})) as run:
        found = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return found, run.cache(model)


def parts(cache: Any) -> list[tuple[torch.Tensor, ...]]:
    return [(layer.keys, layer.values, layer.log_weights, layer.positions) for layer in cache.layers]


@settings(max_examples=8, deadline=None)
@given(method=METHODS, length=st.integers(1, 140), sinks=st.integers(0, 3), recent=st.integers(0, 20), data=st.data())
def test_at_once_is_what_chunk_by_chunk_gives(
    method: Any, length: int, sinks: int, recent: int, data: st.DataObject
) -> None:
    choices = {"method": method, "chunk": 13, "keep": 26, "sinks": sinks, "recent": recent, "seed": 3}
    ids = prompt(length, seed=1)
    at_once, left = read(ids, **choices)
    stream, found = TreeStream(llama(), **choices), []
    while stream.length < length:
        count = data.draw(st.integers(1, length - stream.length))
        found.append(stream.read(ids[stream.length : stream.length + count], all_logits=True))
    torch.testing.assert_close(torch.cat(found), at_once, atol=2e-3, rtol=1e-3)
    grown = stream.cache()
    assert grown.get_seq_length() == left.get_seq_length() == length
    assert grown.slots == left.slots == min(length, 26)
    for one, other in zip(parts(grown), parts(left), strict=True):
        assert torch.equal(one[3], other[3])  # the same tokens stay
        for a, b in zip(one[:3], other[:3], strict=True):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-2)


@settings(max_examples=10, deadline=None)
@given(method=METHODS, at=st.integers(1, 99), token=st.integers(1, 127))
def test_a_later_token_changes_no_earlier_logit(method: Any, at: int, token: int) -> None:
    ids = prompt(100, seed=2)
    other = [*ids[:at], (ids[at] + token) % 128, *ids[at + 1 :]]
    before, after = (read(each, method=method)[0] for each in (ids, other))
    assert torch.equal(bits(before[:at]), bits(after[:at]))
    if other != ids:
        assert not torch.equal(before[at:], after[at:])


@pytest.mark.parametrize("method", ["balanced", {"id": "matching", "mass": 0.5}, "scissorhands"])
def test_methods_that_work_head_by_head_do_as_well(method: Any) -> None:
    ids = prompt(70, seed=2)
    at_once, left = read(ids, method=method)
    stream = TreeStream(llama(), **SMALL, method=method)
    torch.testing.assert_close(stream.read(ids, all_logits=True), at_once, atol=2e-3, rtol=1e-3)
    for one, other in zip(parts(stream.cache()), parts(left), strict=True):
        assert torch.equal(one[3], other[3])
    after = read([*ids[:50], 1, *ids[51:]], method=method)[0]
    assert torch.equal(bits(at_once[:50]), bits(after[:50]))


def test_later_tokens_do_hear_of_earlier_ones() -> None:
    """Across chunks, through the summaries alone."""
    ids = prompt(100, seed=2)
    other = [*ids[:10], (ids[10] + 1) % 128, *ids[11:]]
    for method in ("random", METHOD):
        before, after = (read(each, method=method, sinks=0)[0] for each in (ids, other))
        assert (before[90:] - after[90:]).abs().max() > 1e-3


@pytest.mark.parametrize("length", [1, 2, 3, 18, 19, 40, 64])
def test_with_room_for_all_it_is_the_models_own_prefill(length: int) -> None:
    ids = prompt(length)
    full = DynamicCache(config=llama().config)
    found, cache = read(ids, keep=64)
    torch.testing.assert_close(found, logits(llama(), full, ids), atol=2e-4, rtol=1e-4)
    for mine, own in zip(cache.layers, full.layers, strict=True):
        torch.testing.assert_close(mine.keys, own.keys, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values, own.values, atol=2e-4, rtol=1e-4)
    assert generate(llama(), prompt(length + 1), cache) == generate(llama(), prompt(length + 1))


def test_the_cache_is_sinks_summary_and_recent_tokens() -> None:
    ids = prompt(101)
    _, cache = read(ids)
    for layer in cache.layers:
        assert layer.positions.shape == (1, 2, 20)
        assert layer.positions[0, :, :2].tolist() == [[0, 1]] * 2
        assert layer.positions[0, :, -5:].tolist() == [list(range(96, 101))] * 2
        assert bool((layer.positions.diff() > 0).all())
        assert not layer.log_weights[0, :, :2].any()
        assert not layer.log_weights[0, :, -5:].any()
    _, cache = read(ids, method="random")
    for layer in cache.layers:
        assert layer.log_weights.exp().sum(dim=2).tolist() == [pytest.approx([101, 101], rel=1e-4)]


def test_the_first_layer_keeps_the_prompts_own_keys() -> None:
    """Nothing before it was summarised, so its keys are the model's own at the positions kept."""
    ids = prompt(101)
    own = prefill(llama(), ids).layers[0]
    layer = read(ids, method="random")[1].layers[0]
    expected = own.keys[0, torch.arange(2)[:, None], layer.positions[0]]
    torch.testing.assert_close(layer.keys[0], expected, atol=1e-5, rtol=1e-5)


def test_generate_goes_on_behind_the_prompt() -> None:
    ids = prompt(100)
    cache = kvcellar.prefill_tree(llama(), ids[:-1], **SMALL)
    assert cache.get_seq_length() == 99
    assert cache.slots == 20
    assert cache.reduction["id"] == "matching/1"
    stream = TreeStream(llama(), **SMALL)
    stream.read(ids[:-1])
    assert generate(llama(), ids, cache) == generate(llama(), ids, stream.cache())


def test_decoding_token_by_token_forgets_as_it_goes() -> None:
    """A stream holds one chunk of tokens as they are, whatever the length of the text."""
    stream = TreeStream(llama(), **SMALL, method="random")
    for token in prompt(150):
        stream.read([token])
        held = [layer.keys.shape[2] for layer in stream._cache.layers]
        assert max(held) <= 20 + 16
        assert all(sum(map(len, layer.buckets.held())) <= 18 * 4 for layer in stream._layers)
    assert stream.cache().get_seq_length() == 150


def test_attention_never_sees_more_than_a_chunk_and_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvcellar.frontends.tree as module

    sizes = []
    real = module.scaled_dot_product_attention

    def watched(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sizes.append((query.shape[2], key.shape[2]))
        return real(query, key, *args, **kwargs)

    monkeypatch.setattr(module, "scaled_dot_product_attention", watched)
    read(prompt(300))
    assert len(sizes) == 3 * 19
    assert max(sizes) == (18, 18)  # the first chunk, with its sinks
    assert max(keys for _, keys in sizes) == 20 + 16


def test_queries_of_another_text_are_taken() -> None:
    ids = prompt(100)
    with kvcellar.collect_queries(llama(), 30) as queries:
        prefill(llama(), prompt(60, seed=9))
    found, cache = read(ids, queries=queries)
    assert not torch.equal(found, read(ids)[0])
    listed = [queries.layers[i] for i in range(3)]
    assert torch.equal(read(ids, queries=listed)[0], found)
    with pytest.raises(InvalidInput, match="queries of 2 layers; expected some of layer 2"):
        read(ids, queries=listed[:2])
    with pytest.raises(InvalidInput, match="expected as many heads"):
        read(ids, queries=[x[:3] for x in listed])
    assert cache.slots == 20


def test_the_model_gets_its_attention_back() -> None:
    model = new_llama()
    assert TREE not in AttentionInterface._global_mapping or model.config._attn_implementation == "sdpa"
    told = []
    prefill_tree(model, prompt(50), **SMALL, progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert model.config._attn_implementation == "sdpa"
    assert AttentionMaskInterface()[TREE] is not None
    with pytest.raises(InvalidInput, match="0 tokens"):
        prefill_tree(model, [], **SMALL)
    with pytest.raises(RuntimeError), tree_attention(model, plan_for(model, **SMALL)):
        raise RuntimeError
    assert model.config._attn_implementation == "sdpa"
    ids = torch.tensor([prompt(5)])
    assert torch.equal(model(ids).logits, llama()(ids).logits)


def test_bfloat16_and_any_prompt_form() -> None:
    model = new_llama(dtype=torch.bfloat16)
    ids = prompt(90)
    cache = prefill_tree(model, torch.tensor([ids]), **SMALL)
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    assert len(generate(model, [*ids, 5], cache)) == 96


def test_what_cannot_be_read_so_is_refused() -> None:
    with pytest.raises(UnsupportedCache, match="slid"):
        prefill_tree(mistral(16), prompt(40), **SMALL)
    assert mistral(16).config._attn_implementation == "sdpa"
    with pytest.raises(UnsupportedCache, match="slid"):
        TreeStream(mistral(16), **SMALL, method="random").read(prompt(40))
    for wrong in ({"chunk": 0}, {"keep": 7}, {"sinks": -1}):
        with pytest.raises(InvalidInput, match="chunks of"):
            prefill_tree(llama(), prompt(40), **{**SMALL, **wrong})
    with pytest.raises(InvalidInput, match="2 sequences"), tree_attention(llama(), plan_for(llama(), **SMALL)):
        llama()(torch.tensor([prompt(5)] * 2), use_cache=False)
    pads = torch.tensor([[0, 1, 1]])
    with pytest.raises(UnsupportedCache, match="pads"), tree_attention(llama(), plan_for(llama(), **SMALL)):
        llama()(torch.tensor([prompt(3)]), attention_mask=pads, use_cache=False)
    stream = TreeStream(llama(), **SMALL)
    with pytest.raises(InvalidInput, match="no tokens were read"):
        stream.cache()
    with pytest.raises(InvalidInput, match="0 tokens to read"):
        stream.read([])
