"""Caches reduced in memory and while a long prompt is read: what stays, what is asked, and what is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvcellar
from kvcellar.errors import InvalidInput, UnsupportedCache
from kvcellar.frontends.queries import EARLIEST, Queries, collect_queries, later, own_queries, turns_or_none
from kvcellar.frontends.reduce import prefill_reduced, reduce_cache
from kvcellar.frontends.transformers import take_cache
from kvcellar.frontends.weighted import WeightedCache, WeightedLayer, use_ragged_attention
from kvcellar.reduce.tokens import Reducer, Weighted, scaled
from kvcellar.slots import head_of, stacked
from models import generate, llama, logits, mistral, new_llama, prefill, prompt
from zoo import BY_NAME

LENGTH = 80
IDS = prompt(LENGTH)
SMALL = {"sinks": 2, "recent": 6}


@dataclass(frozen=True)
class Latest(Reducer):
    """The last tokens of the middle."""

    id: ClassVar[str] = "latest/1"

    def reduce(self, tokens: Weighted, keep: int, *others: Any) -> Weighted:
        return tokens[len(tokens) - keep :]


@dataclass(frozen=True)
class Even(Reducer):
    """Every so many tokens, each with its share of the weight."""

    id: ClassVar[str] = "even/1"

    def reduce(self, tokens: Weighted, keep: int, *others: Any) -> Weighted:
        return scaled(tokens[torch.linspace(0, len(tokens) - 1, keep).long()], tokens.total)


@dataclass(frozen=True)
class MostAsked(Reducer):
    """The tokens with the most attention of the queries; `seen` keeps what it was asked with."""

    id: ClassVar[str] = "most-asked/1"
    needs_queries: ClassVar[bool] = True
    seen: ClassVar[list[tuple[torch.Tensor, float]]] = []

    def reduce(self, tokens: Weighted, keep: int, queries: torch.Tensor | None, scale: float, *others: Any) -> Weighted:
        assert queries is not None
        self.seen.append((queries, scale))
        mass = tokens.logits(queries, scale).softmax(dim=1).sum(dim=0)
        return tokens[mass.topk(keep).indices.sort().values]


def full() -> Any:
    return prefill(llama(), IDS)


def reduced(budget: Any = 0.5, method: Reducer = Even(), **more: Any) -> WeightedCache:
    return reduce_cache(full(), budget=budget, model=llama(), method=method, **{**SMALL, **more})


@settings(max_examples=15, deadline=None)
@given(budget=st.one_of(st.integers(8, 2 * LENGTH), st.floats(0.01, 1)))
def test_a_budget_counts_sinks_and_recent_tokens(budget: float | int) -> None:
    cache = reduced(budget)
    wanted = min(LENGTH, budget if isinstance(budget, int) else max(8, budget * LENGTH))
    assert wanted <= cache.slots < wanted + 1
    assert cache.get_seq_length() == LENGTH
    for layer, whole in zip(cache.layers, full().layers, strict=True):
        positions = layer.positions[0]
        assert positions[:, :2].tolist() == [[0, 1]] * 2
        assert positions[:, -6:].tolist() == [list(range(LENGTH - 6, LENGTH))] * 2
        at = positions[0]
        assert torch.equal(layer.keys[0, 0], whole.keys[0, 0, at])
        assert torch.equal(layer.values[0, 0], whole.values[0, 0, at])
        weight = layer.log_weights.exp().sum(dim=2)
        total = LENGTH if cache.slots > 8 else 8  # with no room for the middle there is nothing to carry its weight
        assert torch.allclose(weight, torch.full_like(weight, total), rtol=1e-5)


def test_the_cache_that_is_reduced_stays_as_it_is() -> None:
    cache = full()
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    reduce_cache(cache, budget=20, model=llama(), method=MostAsked(), tokens=IDS, **SMALL)
    assert cache.get_seq_length() == LENGTH
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


def test_everything_kept_says_the_same() -> None:
    more = prompt(LENGTH + 8)[LENGTH:]
    assert torch.equal(logits(llama(), reduced(1.0), more), logits(llama(), full(), more))


def test_weights_are_worth_their_while() -> None:
    """With the shares of the tokens left out, the distribution is nearer to the full cache's than without."""
    more = prompt(LENGTH + 20)[LENGTH:]
    truth = logits(llama(), full(), more).log_softmax(-1)

    def distance(cache: WeightedCache) -> float:
        other = logits(llama(), cache, more).log_softmax(-1)
        return float((truth.exp() * (truth - other)).sum(-1).mean())

    assert distance(reduced(24)) < distance(reduced(24, Latest()))


def test_generating_goes_on_behind_all_tokens() -> None:
    ids = prompt(LENGTH + 3)
    cache = reduced(20)
    answer = generate(llama(), ids, cache)
    assert answer[: len(ids)] == ids
    assert cache.get_seq_length() == len(ids) + 4
    assert cache.slots == 20 + 3 + 4


def test_the_documents_own_queries_are_those_of_its_prefill() -> None:
    """One pass over the last tokens gives what the whole prefill asked, after the rotation."""
    asked: dict[int, torch.Tensor] = {}

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        x = kwargs["hidden_states"]
        query = module.q_proj(x).view(*x.shape[:-1], -1, module.head_dim).transpose(1, 2)
        asked[module.layer_idx] = apply_rotary_pos_emb(query, query, *kwargs["position_embeddings"])[0][0]

    hooks = [x.self_attn.register_forward_pre_hook(hook, with_kwargs=True) for x in llama().model.layers]
    cache = full()
    for each in hooks:
        each.remove()
    own = own_queries(llama(), take_cache(cache), torch.tensor(IDS).numpy(), 16)
    assert sorted(own.layers) == [0, 1, 2]
    for index, queries in own.layers.items():
        assert torch.allclose(queries, asked[index][:, -16:], atol=1e-5)
        assert own.scales[index] == 0.25
    assert llama().config._attn_implementation == "sdpa"


def test_queries_collected_in_chunks_are_the_last_ones() -> None:
    with collect_queries(llama(), 24) as whole:
        prefill(llama(), IDS)
    with collect_queries(llama(), 24) as chunked:
        cache = DynamicCache()
        for start in range(0, LENGTH, 16):
            logits(llama(), cache, IDS[start : start + 16])
    for index, queries in whole.layers.items():
        assert queries.shape == (4, 24, 16)
        assert torch.allclose(queries, chunked.layers[index], atol=1e-5)


def test_query_heads_meet_the_kv_head_they_read() -> None:
    MostAsked.seen.clear()
    with collect_queries(llama(), 10) as queries:
        cache = full()
    reduce_cache(cache, budget=20, model=llama(), method=MostAsked(), queries=queries, **SMALL)
    assert len(MostAsked.seen) == 3 * 2
    for number, (seen, scale) in enumerate(MostAsked.seen):
        layer, head = divmod(number, 2)
        assert torch.equal(seen, queries.layers[layer][2 * head : 2 * head + 2].flatten(0, 1))
        assert scale == 0.25


@pytest.mark.parametrize("name", ["Granite", "Qwen3", "GPT-2", "Phi", "Cohere"])
def test_other_architectures_are_asked_alike(name: str) -> None:
    """What their attention made of the queries is what the reducer is told: it picks what they look at most."""
    model = BY_NAME[name].build()
    ids = prompt(40)
    cache = reduce_cache(prefill(model, ids), budget=20, model=model, method=MostAsked(), tokens=ids, **SMALL)
    assert cache.get_seq_length() == 40
    seen = logits(model, cache, ids[:2])
    assert torch.isfinite(seen).all()
    if name == "Granite":
        assert MostAsked.seen[-1][1] == pytest.approx(0.2)


def test_a_head_may_have_its_own_budget() -> None:
    budget = [[10, 20], [30, 12], [8, 40]]
    padded, ragged = reduced(budget), reduced(budget, ragged=True)
    for layer, counts in zip(padded.layers, budget, strict=True):
        assert layer.slots == 40
        assert (layer.log_weights[0] > -torch.inf).sum(dim=1).tolist() == counts
    assert [layer.slots for layer in ragged.layers] == [20, 30, 40]
    model, more = new_llama(), prompt(LENGTH + 4)[LENGTH:]
    use_ragged_attention(model)
    ragged.config = model.config
    assert torch.allclose(logits(llama(), padded, more), logits(model, ragged, more), atol=2e-5)
    again = reduce_cache(padded, budget=8, model=llama(), method=Even(), **SMALL)
    assert again.slots == 8
    assert not (again.layers[0].log_weights == -torch.inf).any()


def test_what_is_reduced_may_be_reduced_again() -> None:
    first = reduced(40)
    logits(llama(), first, prompt(LENGTH + 10)[LENGTH:])
    second = reduce_cache(first, budget=20, model=llama(), method=Even(), **SMALL)
    assert (second.get_seq_length(), second.slots) == (LENGTH + 10, 20)
    for layer in second.layers:
        assert float(layer.log_weights.exp().sum(dim=2).mean()) == pytest.approx(LENGTH + 10, rel=1e-5)
        assert layer.positions[0, 0, -6:].tolist() == list(range(LENGTH + 4, LENGTH + 10))


def test_a_sliding_layer_stays_beside_the_others() -> None:
    model = BY_NAME["Ministral"].build()
    ids = prompt(50)
    cache = reduce_cache(prefill(model, ids[:40]), budget=1.0, model=model, method=Even(), **SMALL)
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds == ["DynamicSlidingWindowLayer", "WeightedLayer", "DynamicSlidingWindowLayer"]
    assert torch.allclose(logits(model, cache, ids[40:]), logits(model, prefill(model, ids[:40]), ids[40:]), atol=1e-5)
    small = reduce_cache(cache, budget=12, model=model, method=Even(), **SMALL)
    assert small.layers[1].slots == 12
    assert small.get_seq_length() == 50
    with pytest.raises(UnsupportedCache, match="give queries"):
        reduce_cache(prefill(model, ids), budget=12, model=model, method=MostAsked(), tokens=ids, **SMALL)
    with collect_queries(model) as queries:
        whole = prefill(model, ids)
    asked = reduce_cache(whole, budget=12, model=model, method=MostAsked(), queries=queries, **SMALL)
    assert asked.layers[1].slots == 12


@settings(max_examples=12, deadline=None)
@given(budget=st.integers(8, 60), chunk=st.integers(1, 60), length=st.integers(1, LENGTH))
def test_a_long_prompt_never_holds_more_than_budget_and_chunk(budget: int, chunk: int, length: int) -> None:
    held: list[int] = []

    def watch(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        layer = kwargs["cache"].layers[module.layer_idx]
        held.append(layer.keys.shape[2])

    told: list[tuple[int, int]] = []
    hooks = [x.self_attn.register_forward_hook(watch, with_kwargs=True) for x in llama().model.layers]
    try:
        cache = prefill_reduced(
            llama(),
            IDS[:length],
            budget=budget,
            method=MostAsked(),
            chunk=chunk,
            progress=lambda done, slots: told.append((done, slots)),
            **SMALL,
        )
    finally:
        for each in hooks:
            each.remove()
    assert max(held) <= budget + chunk
    assert cache.get_seq_length() == length
    assert cache.slots == min(length, budget)
    assert [done for done, _ in told] == [*range(chunk, length, chunk), length]
    assert max(slots for _, slots in told) <= max(budget, min(chunk, length))
    assert isinstance(cache, WeightedCache)
    assert isinstance(cache.layers[0], WeightedLayer)
    assert llama().config._attn_implementation == "sdpa"


@pytest.mark.parametrize("chunk", [7, 80, 200])
def test_a_budget_for_everything_is_the_plain_prefill(chunk: int) -> None:
    cache = prefill_reduced(llama(), IDS, budget=1.0, method=Even(), chunk=chunk, **SMALL)
    more = prompt(LENGTH + 5)[LENGTH:]
    assert torch.allclose(logits(llama(), cache, more), logits(llama(), full(), more), atol=1e-5)


def test_a_prompt_in_chunks_is_generated_from() -> None:
    ids = prompt(120)
    cache = prefill_reduced(llama(), torch.tensor([ids[:-1]]), budget=0.5, method=Even(), chunk=16, **SMALL)
    assert cache.reduction == {"id": "even/1", "keep": 0.5}
    answer = generate(llama(), ids, cache)
    assert answer[:120] == ids
    assert cache.slots == 60 + 5


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (0.0, "over 0 up to 1|lies over 0"),
        (1.5, "lies over 0"),
        (float("nan"), "lies over 0"),
        (7, "at least the 8 sinks"),
        (True, "a fraction of the tokens or their number"),
        ("half", "budget"),
        ([[10, 10]], "heads a layer"),
        ([[10], [10], [10]], "heads a layer"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(budget: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        reduced(budget)


def test_missing_or_foreign_queries_are_refused() -> None:
    with pytest.raises(InvalidInput, match="give tokens="):
        reduced(20, MostAsked())
    with pytest.raises(InvalidInput, match="79 token ids for a cache of 80"):
        reduced(20, MostAsked(), tokens=IDS[1:])
    with pytest.raises(InvalidInput, match="queries of 1 layers"):
        reduced(20, MostAsked(), queries=[torch.zeros(4, 3, 16)])
    with pytest.raises(InvalidInput, match="expected 2 heads"):
        reduced(20, MostAsked(), queries=[torch.zeros(2, 3, 16)] * 3)
    with collect_queries(llama()) as nothing:
        pass
    with pytest.raises(InvalidInput, match="layer 0 has asked nothing"):
        reduced(20, MostAsked(), queries=nothing)
    with pytest.raises(InvalidInput, match="at least one of each"):
        prefill_reduced(llama(), [], budget=20, method=Even())


def test_caches_that_cannot_be_reduced_are_refused() -> None:
    latent = BY_NAME["DeepSeek-V3"].build()
    with pytest.raises(UnsupportedCache, match="latent"):
        reduce_cache(prefill(latent, IDS), budget=20, model=latent, method=Even(), **SMALL)
    with pytest.raises(UnsupportedCache, match="only sliding"):
        reduce_cache(prefill(mistral(16), IDS), budget=20, model=mistral(16), method=Even(), **SMALL)
    shared = BY_NAME["Gemma3n text"].build()
    with pytest.raises(UnsupportedCache, match="no keys of its own"):
        reduce_cache(prefill(shared, prompt(40)), budget=20, model=shared, method=Even(), **SMALL)


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_tiny_contexts_keep_something(tokens: int) -> None:
    """Field case G12."""
    cache = reduce_cache(prefill(llama(), IDS[:tokens]), budget=0.01, model=llama(), method=Even(), **SMALL)
    assert cache.slots == min(tokens, 8)
    assert cache.get_seq_length() == tokens


def test_heads_of_different_lengths_are_padded() -> None:
    one = (torch.ones(3, 4), torch.ones(3, 2), torch.arange(3), torch.zeros(3))
    layer = stacked([one, tuple(x[:1] for x in one)], 9)
    assert layer.keys.shape == (2, 3, 4)
    assert layer.positions is not None
    assert layer.positions.tolist() == [[0, 1, 2], [0, -1, -1]]
    assert layer.log_weights is not None
    assert layer.log_weights.tolist() == [[0.0, 0.0, 0.0], [0.0, -torch.inf, -torch.inf]]
    assert [len(x) for x in head_of(layer, 1)] == [1, 1, 1, 1]


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent / "docs" / "reduced-caches.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"model": llama(), "ids": torch.tensor([prompt(160)])}
    scope |= {"longer_ids": torch.tensor([prompt(170)]), "long_ids": torch.tensor([prompt(200)])}
    llama().generation_config.max_new_tokens = 3
    try:
        with torch.inference_mode():
            exec(compile(code, "reduced-caches.md", "exec"), scope)
    finally:
        llama().generation_config.max_new_tokens = None
    assert scope["restored"].matched == 160
    assert (scope["small"].get_seq_length(), scope["small"].slots) == (202, 67)


def test_the_package_can_be_called() -> None:
    held = prefill(llama(), IDS)
    by_call = kvcellar.reduce(held, budget=40, model=llama(), method="streaming", **SMALL)
    expected = reduce_cache(held, budget=40, model=llama(), method="streaming", **SMALL)
    for one, other in zip(by_call.layers, expected.layers, strict=True):
        assert torch.equal(one.keys, other.keys)


def test_queries_turned_to_later_positions_are_what_the_same_tokens_ask_there() -> None:
    model, kv = llama(), take_cache(prefill(llama(), IDS))
    ids = np.array(IDS)
    asked = own_queries(model, kv, ids, last=LENGTH)
    turns = turns_or_none(model, kv, ids)
    moved = later(asked, turns, LENGTH)
    cut = EARLIEST if LENGTH >= 2 * EARLIEST else LENGTH // 2
    for index, queries in moved.layers.items():
        assert queries.shape[1] == LENGTH - cut
        assert torch.allclose(queries.norm(dim=2), asked.layers[index][:, cut:].norm(dim=2), rtol=1e-4)
        assert not torch.allclose(queries, asked.layers[index][:, cut:], atol=1e-3)
    assert later(asked, None, LENGTH) is asked


@pytest.mark.parametrize(("method", "count", "moves"), [("matching", LENGTH, True), ("snapkv", 32, False)])
def test_a_method_is_given_the_queries_it_wants(
    monkeypatch: pytest.MonkeyPatch, method: str, count: int, moves: bool
) -> None:
    from kvcellar.frontends import reduce as front

    seen: list[int] = []
    moved: list[Queries] = []

    def noted(model: Any, kv: Any, ids: Any, last: int) -> Queries:
        found = own_queries(model, kv, ids, last=last)
        seen.append(next(iter(found.layers.values())).shape[1])
        return found

    def turned(queries: Queries, *others: Any) -> Queries:
        moved.append(queries)
        return later(queries, *others)

    monkeypatch.setattr(front, "own_queries", noted)
    monkeypatch.setattr(front, "later", turned)
    reduce_cache(prefill(llama(), IDS), budget=40, model=llama(), method=method, tokens=IDS, **SMALL)
    assert seen == [count]
    assert bool(moved) is moves
