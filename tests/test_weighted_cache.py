"""Reduced caches in transformers: weights reach the attention, positions go on, what cannot work is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, Cache, DynamicCache

from kvcellar.cache import LayerKV
from kvcellar.errors import InvalidInput, UnsupportedCache
from kvcellar.frontends.transformers import take_cache
from kvcellar.frontends.weighted import (
    RAGGED,
    WeightedCache,
    ragged_attention,
    use_ragged_attention,
    weighted_cache,
)
from models import generate, llama, logits, mistral, new_llama, pairs, prefill, prompt
from zoo import MODELS, Model

LENGTH = 40
REGISTERED_BY_IMPORT = RAGGED in AttentionInterface._global_mapping  # all tests are collected before one of them runs
NEXT = prompt(60)[LENGTH:]
SLOTS = torch.arange(LENGTH)
NOT_REDUCED = {
    "Mistral",  # every layer slides
    "Gemma3n text",  # layers without keys of their own
    "Gemma4 text",
    "Gemma2",  # transformers gives them no attention that takes a bias
    "GPT-OSS",
    "BLOOM",
    "GPT-NeoX",  # their attention does not hand its arguments to the cache
    "Falcon",
    "Falcon, ALiBi",
}


@pytest.fixture(scope="module")
def ragged_model() -> Any:
    model = new_llama()
    use_ragged_attention(model)
    return model


def held(length: int = LENGTH) -> list[LayerKV]:
    """The layers of a full cache of the shared model."""
    return list(take_cache(prefill(llama(), prompt(length))).layers)


def chosen(kv: LayerKV, kept: torch.Tensor, weights: torch.Tensor | None = None, length: int = LENGTH) -> LayerKV:
    """The slots `kept` (H, S) of each head."""
    at = kept[..., None]
    return LayerKV(
        kv.keys.gather(1, at.expand(-1, -1, kv.keys.shape[2])),
        kv.values.gather(1, at.expand(-1, -1, kv.values.shape[2])),
        positions=kept,
        log_weights=torch.zeros(kept.shape) if weights is None else weights,
        length=length,
    )


def random_slots(kv: LayerKV, slots: int, seed: int, weighted: bool = True) -> LayerKV:
    """As many slots of each head, other ones in each, with weights from 1/2 to 4."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(kv.slots, generator=generator)[:slots].sort().values for _ in kv.keys]
    weights = torch.rand(len(rows), slots, generator=generator) * 2.1 - 0.7
    return chosen(kv, torch.stack(rows), weights if weighted else None)


def reduced(slots: int = 12, seed: int = 0) -> WeightedCache:
    layers = [random_slots(kv, slots, seed + i) for i, kv in enumerate(held())]
    return weighted_cache(layers, llama(), length=LENGTH)


class Copies(DynamicCache):
    """The layers of full attention of `cache` with each token `times` over, positions going on as before."""

    def __init__(self, cache: Cache, times: torch.Tensor):
        super().__init__()
        self.layers = copy.deepcopy(cache.layers)
        self.length, self.before = cache.get_seq_length(), int(times.sum())
        for layer in self.layers:
            if not layer.is_sliding:
                layer.keys, layer.values = (x.repeat_interleave(times, 2) for x in (layer.keys, layer.values))

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    get_seq_length = get_query_offset

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self.layers[layer_idx].is_sliding:
            return super().get_mask_sizes(query_length, layer_idx)
        return self.before + query_length, self.length - self.before


@pytest.mark.parametrize("queries", [1, 5])
@settings(max_examples=10, deadline=None)
@given(times=st.lists(st.integers(1, 4), min_size=3, max_size=12))
def test_a_slot_of_weight_w_answers_as_w_copies(queries: int, times: list[int]) -> None:
    full = prefill(llama(), prompt(len(times)))
    count = torch.tensor(times)
    slots, weights = torch.arange(len(times)).expand(2, -1), count.float().log().expand(2, -1)
    layers = [chosen(kv, slots, weights, len(times)) for kv in take_cache(full).layers]
    got = logits(llama(), weighted_cache(layers, llama(), length=len(times)), NEXT[:queries])
    where = torch.arange(len(times), len(times) + queries)[None]
    expected = logits(llama(), Copies(full, count), NEXT[:queries], position_ids=where)
    assert torch.allclose(got, expected, rtol=0, atol=1e-6 * float(expected.abs().max()) * 4)


@pytest.mark.parametrize("queries", [1, 5])
def test_a_merged_pair_is_two_tokens_to_1e_6(queries: int) -> None:
    """The attention alone, with no model around it to enlarge a difference."""
    generator = torch.Generator().manual_seed(0)
    key, value, query = (torch.randn(1, 2, n, 8, generator=generator) for n in (9, 9, queries))
    bias = torch.zeros(1, 2, 1, 9)
    bias[..., 2] = torch.tensor(2.0).log()
    twice = torch.tensor([0, 1, 2, 2, 3, 4, 5, 6, 7, 8])
    merged = ragged_attention(torch.nn.Module(), query, key, value, None, position_bias=bias)[0]
    apart = ragged_attention(torch.nn.Module(), query, key[:, :, twice], value[:, :, twice], None)[0]
    assert torch.allclose(merged, apart, rtol=0, atol=1e-6)


@pytest.mark.parametrize("queries", [1, 5])
@settings(max_examples=8, deadline=None)
@given(slots=st.lists(st.integers(1, LENGTH), min_size=3, max_size=3), seed=st.integers(0, 9))
def test_padded_equals_ragged(ragged_model: Any, queries: int, slots: list[int], seed: int) -> None:
    layers = [random_slots(kv, count, seed) for kv, count in zip(held(), slots, strict=True)]
    padded = weighted_cache(layers, llama(), length=LENGTH)
    ragged = weighted_cache(layers, ragged_model, length=LENGTH, ragged=True)
    assert padded.slots == max(slots)
    assert [layer.slots for layer in ragged.layers] == slots
    for step in range(2):  # and again behind what was added
        new = NEXT[step * queries : (step + 1) * queries]
        assert torch.allclose(logits(llama(), padded, new), logits(ragged_model, ragged, new), atol=2e-5)


def test_pads_lie_between_heads_of_one_layer_too() -> None:
    """A slot of log-weight −inf is none, whatever numbers it holds."""
    layers = [random_slots(kv, 9, 3) for kv in held()]
    noisy = []
    for kv in layers:
        pad = torch.full((2, 3, kv.keys.shape[2]), 1e4)
        noisy.append(
            replace(
                kv,
                keys=torch.cat([pad, kv.keys], 1),
                values=torch.cat([pad, kv.values], 1),
                positions=torch.cat([torch.zeros(2, 3, dtype=torch.int64), kv.positions], 1),
                log_weights=torch.cat([torch.full((2, 3), -float("inf")), kv.log_weights], 1),
            )
        )
    one, other = (weighted_cache(x, llama(), length=LENGTH) for x in (layers, noisy))
    assert torch.allclose(logits(llama(), one, NEXT), logits(llama(), other, NEXT), atol=2e-5)


@pytest.mark.parametrize("weights", [True, False])
def test_keeping_everything_is_the_full_cache(weights: bool) -> None:
    layers = held()
    if weights:
        layers = [chosen(kv, torch.arange(LENGTH).expand(2, -1)) for kv in layers]
    same = weighted_cache(layers, llama(), length=LENGTH)
    assert torch.equal(logits(llama(), same, NEXT), logits(llama(), prefill(llama(), prompt(LENGTH)), NEXT))


def test_weights_change_what_the_model_says() -> None:
    """Or the tests above would hold for a cache that ignores them."""
    layers = [random_slots(kv, 12, 1) for kv in held()]
    plain = [replace(kv, log_weights=torch.zeros_like(kv.log_weights)) for kv in layers]
    one, other = (logits(llama(), weighted_cache(x, llama(), length=LENGTH), NEXT[:5]) for x in (layers, plain))
    assert float((one - other).abs().max()) > 1e-2


def test_field_g07_half_of_a_hundred_tokens_go_on_at_position_100() -> None:
    """Field case G07: the logical position is not the number of slots."""
    ids = prompt(103)
    layers = [random_slots(kv, 50, 0) for kv in held(100)]
    layers = [replace(kv, length=100) for kv in layers]
    cache = weighted_cache(layers, llama(), length=100)
    assert (cache.get_seq_length(), cache.slots) == (100, 50)
    seen = []
    hook = llama().model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"].tolist()), with_kwargs=True
    )
    try:
        answer = generate(llama(), ids, copy.deepcopy(cache), new=2)
    finally:
        hook.remove()
    assert seen == [[[100, 101, 102]], [[103]]]
    assert answer[:103] == ids
    expected = logits(llama(), cache, ids[100:])[-1].argmax()
    assert answer[103] == int(expected)
    assert (cache.get_seq_length(), cache.slots) == (103, 53)


def test_what_was_added_is_kept_with_its_position() -> None:
    cache = reduced(12)
    before = cache.layers[1].kept()
    logits(llama(), cache, NEXT[:3])
    after = cache.layers[1].kept()
    assert after.length == LENGTH + 3
    assert torch.equal(after.positions[:, :12], before.positions)
    assert after.positions[:, 12:].tolist() == [[LENGTH, LENGTH + 1, LENGTH + 2]] * 2
    assert not after.log_weights[:, 12:].any()
    again = weighted_cache([layer.kept() for layer in cache.layers], llama(), length=LENGTH + 3)
    assert torch.equal(logits(llama(), again, NEXT[3:6]), logits(llama(), cache, NEXT[3:6]))


def of_two_rows() -> WeightedCache:
    """A batch of two different reductions."""
    one, other = reduced(12, 0), reduced(12, 50)
    for a, b in zip(one.layers, other.layers, strict=True):
        for name in ("keys", "values", "log_weights", "positions"):
            setattr(a, name, torch.cat([getattr(a, name), getattr(b, name)]))
    return one


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [50, 50, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 50, 50]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [50]),
    ],
)
def test_weights_move_with_their_rows(change: Callable[[Cache], None], rows: list[int]) -> None:
    cache = of_two_rows()
    change(cache)
    got = llama()(input_ids=torch.tensor([NEXT[:4]] * len(rows)), cache=cache, use_cache=True).logits
    for row, seed in enumerate(rows):
        assert torch.allclose(got[row], logits(llama(), reduced(12, seed), NEXT[:4]), atol=2e-5)


def test_beam_search() -> None:
    """As with a full cache, and reordered with its weights."""

    def beams(cache: Cache) -> list[int]:
        cache.batch_repeat_interleave(4)  # as any cache that is given to beam search
        settings = {"max_new_tokens": 6, "num_beams": 4, "do_sample": False, "pad_token_id": 0}
        answer: list[int] = llama().generate(torch.tensor([prompt(LENGTH + 1)]), cache=cache, **settings)[0].tolist()
        return answer

    whole = weighted_cache([chosen(kv, SLOTS.expand(2, -1)) for kv in held()], llama(), length=LENGTH)
    assert beams(whole) == beams(prefill(llama(), prompt(LENGTH)))
    assert len(beams(reduced(30))) == LENGTH + 7


def test_it_cannot_be_cropped() -> None:
    cache = reduced()
    assert not cache.is_croppable
    with pytest.raises(UnsupportedCache, match="cannot go back"):
        cache.crop(-1)


def test_reset_makes_it_an_empty_cache() -> None:
    cache = reduced()
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(logits(llama(), cache, NEXT), logits(llama(), DynamicCache(), NEXT))


@pytest.mark.parametrize("attention", ["eager", "flex_attention", "flash_attention_2"])
def test_attention_that_cannot_apply_weights_is_refused(attention: str) -> None:
    model = new_llama()
    cache = reduced()
    cache.config = copy.deepcopy(model.config)
    cache.config._attn_implementation_internal = attention
    before = [layer.slots for layer in cache.layers]
    with pytest.raises(UnsupportedCache, match=f"{attention}.*Expected one of sdpa, {RAGGED}"):
        logits(llama(), cache, NEXT)
    assert [layer.slots for layer in cache.layers] == before


def test_eager_is_refused_when_the_model_is_switched_later() -> None:
    model = new_llama()
    cache = weighted_cache([random_slots(kv, 12, 0) for kv in held()], model, length=LENGTH)
    again = copy.deepcopy(cache)
    assert torch.equal(logits(model, copy.deepcopy(again), NEXT), logits(model, copy.deepcopy(cache), NEXT))
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedCache, match="ignores the weights"):
        logits(model, again, NEXT)
    with pytest.raises(UnsupportedCache, match="ignores the weights"):
        logits(model, cache, NEXT)


def test_layers_of_different_lengths_need_our_attention(ragged_model: Any) -> None:
    layers = [random_slots(kv, 5 + index, 0) for index, kv in enumerate(held())]
    cache = weighted_cache(layers, llama(), length=LENGTH, ragged=True)
    with pytest.raises(UnsupportedCache, match="hold 5, 6, 7 slots"):
        logits(llama(), cache, NEXT)
    cache = weighted_cache(layers, ragged_model, length=LENGTH, ragged=True)
    with pytest.raises(UnsupportedCache, match="mask of ones"):
        logits(ragged_model, cache, NEXT[:1], attention_mask=torch.tensor([[0] + [1] * LENGTH]))
    ids = prompt(LENGTH + 2)
    padded = weighted_cache(layers, llama(), length=LENGTH)
    assert generate(ragged_model, ids, cache) == generate(llama(), ids, padded)


def test_our_attention_reads_plain_caches_as_sdpa_does(ragged_model: Any) -> None:
    ids = prompt(30)
    assert torch.allclose(logits(ragged_model, DynamicCache(), ids), logits(llama(), DynamicCache(), ids), atol=2e-5)
    assert generate(ragged_model, ids) == generate(llama(), ids)


def test_a_model_that_hides_its_arguments_is_refused() -> None:
    cache = reduced()
    new = torch.zeros(1, 2, 1, 16)
    with pytest.raises(UnsupportedCache, match="does not hand"):
        cache.update(new, new, 0)
    with pytest.raises(UnsupportedCache, match="position bias already"):
        cache.update(new, new, 0, kwargs={"position_bias": new})
    assert cache.layers[0].slots == 12


def test_layers_that_all_slide_stay_whole() -> None:
    cache = take_cache(prefill(mistral(16), prompt(LENGTH)))
    with pytest.raises(UnsupportedCache, match="only sliding"):
        weighted_cache(cache.layers, mistral(16), length=LENGTH)


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.name)
def test_every_kind_of_model_applies_the_weights_or_is_refused(kind: Model) -> None:
    """No model may read a reduced cache and leave its weights out. Sliding layers stay beside reduced ones."""
    model = kind.build()
    cache = prefill(model, prompt(LENGTH))
    times = torch.tensor([1, 3] * (LENGTH // 2))
    layers = [
        kv if kv.window or kv.empty else chosen(kv, *(x.expand(len(kv.keys), -1) for x in (SLOTS, times.float().log())))
        for kv in take_cache(cache).layers
    ]
    try:
        got = logits(model, weighted_cache(layers, model, length=LENGTH), NEXT[:3])
    except UnsupportedCache:
        assert kind.name in NOT_REDUCED
        return
    assert kind.name not in NOT_REDUCED
    copies = Copies(cache, times)
    expected = logits(model, copies, NEXT[:3], position_ids=torch.arange(LENGTH, LENGTH + 3)[None])
    assert torch.allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_weights": None}, "12 slots for 40 tokens"),
        ({"log_weights": torch.full((2, 12), float("nan"))}, "no number"),
        ({"log_weights": torch.full((2, 12), float("inf"))}, "infinite"),
        ({"log_weights": torch.full((2, 12), -float("inf"))}, "a whole head"),
    ],
)
def test_weights_that_mean_nothing_are_refused(change: dict[str, Any], message: str) -> None:
    layers = [replace(random_slots(kv, 12, 0), **change) for kv in held()]
    with pytest.raises(InvalidInput, match=message):
        weighted_cache(layers, llama(), length=LENGTH)


def test_more_slots_than_tokens_are_refused() -> None:
    layers = [random_slots(kv, 12, 0) for kv in held()]
    with pytest.raises(InvalidInput, match="12 slots for 11 tokens"):
        weighted_cache(layers, llama(), length=11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision(dtype: torch.dtype) -> None:
    """What the model says is as near to single precision as its other arithmetic is."""
    model = new_llama(dtype=dtype)
    layers = [layer.kept() for layer in reduced(12).layers]
    half = weighted_cache(layers, model, length=LENGTH, dtype=dtype)
    assert pairs(half)[0][0].dtype == dtype
    got, expected = logits(model, half, NEXT[:5]), logits(llama(), reduced(12), NEXT[:5])
    assert torch.corrcoef(torch.stack([got.float().flatten(), expected.flatten()]))[0, 1] > 0.999


def test_importing_registers_nothing() -> None:
    assert not REGISTERED_BY_IMPORT
