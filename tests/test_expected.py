"""The expected predictor: candidates in one pass and one by one, and what assisted generation leaves for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import models
from kvcellar.errors import InvalidInput, UnsupportedCache
from kvcellar.frontends.expected import CandidateCache, candidate_caches
from kvcellar.predict.expected import candidates, expectation, fewer


@contextmanager
def _calls(model: Any) -> Iterator[list[int]]:
    """How many tokens each forward pass of `model` reads."""
    seen: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        seen.append(int(ids.shape[1]))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def test_probabilities_are_renormalised() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.1, 0.3, 0.1]]))
    ids, weights = candidates(logits, 2)
    assert ids.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.625, 0.375]]))
    four = candidates(logits, 4)
    torch.testing.assert_close(fewer(*four, 2)[1], weights)
    sides = torch.arange(8.0).reshape(2, 1, 2, 2)
    torch.testing.assert_close(expectation(weights, sides)[0, 0], 0.625 * sides[0, 0, 0] + 0.375 * sides[0, 0, 1])


@pytest.mark.parametrize(("k", "at_once"), [(1, 640), (4, 640), (4, 9), (20, 50)])
def test_a_tree_pass_is_every_candidate_read_alone(k: int, at_once: int) -> None:
    model, ids, span = models.llama(), models.prompt(30, 3), range(12, 24)
    with _calls(model) as calls:
        found = candidate_caches(model, ids, span, k, at_once=at_once)
    steps = -(-len(span) // max(1, at_once // k))
    assert (found.calls, found.prefix_calls, len(calls)) == (steps, 1, steps + 1)
    assert sum(calls) == span.stop - 1 + k * len(span)
    expected = found.expected()
    for i in (12, 17, 23):
        logits = models.logits(model, models.prefill(model, ids[: i - 1]), ids[i - 1 : i])[-1]
        best, weights = logits.topk(k).indices, logits.topk(k).values.softmax(0)
        assert found.ids[i - 12].tolist() == best.tolist()
        alone = [models.pairs(models.prefill(model, [*ids[:i], int(t)])) for t in best]
        for layer, kv in enumerate(expected):
            for side, mine in enumerate((kv.keys, kv.values)):
                mean = sum(w * each[layer][side][0, :, -1] for w, each in zip(weights, alone, strict=True))
                torch.testing.assert_close(mine[:, i - 12], mean, rtol=1e-4, atol=1e-5)
    assert found.hits().tolist() == [ids[i] in found.ids[i - 12].tolist() for i in span]


def test_the_token_that_came_is_foreseen_exactly() -> None:
    model = models.llama()
    ids = models.generate(model, models.prompt(10, 4), new=20)
    held = models.pairs(models.prefill(model, ids))
    found = candidate_caches(model, ids, range(10, 30), 1)
    assert found.hits().all()
    for (keys, values), kv in zip(held, found.expected(), strict=True):
        torch.testing.assert_close(kv.keys, keys[0, :, 10:30], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kv.values, values[0, :, 10:30], rtol=1e-4, atol=1e-5)
    more = candidate_caches(model, ids, range(10, 30), 4)
    for one, other in zip(more.expected(1), found.expected(), strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-5)


def test_a_draft_model_says_what_is_likely_and_the_model_what_its_cache_is() -> None:
    model, draft, ids = models.llama(), models.new_llama(seed=7, num_hidden_layers=1), models.prompt(20, 5)
    with _calls(draft) as asked, _calls(model) as calls:
        found = candidate_caches(model, ids, range(8, 20), 3, draft=draft)
    assert (len(asked), len(calls), found.prefix_calls) == (1, 2, 2)
    own = candidate_caches(draft, ids, range(8, 20), 3)
    assert torch.equal(found.ids, own.ids)
    alone = models.pairs(models.prefill(model, [*ids[:9], int(found.ids[1, 2])]))
    torch.testing.assert_close(found.layers[2].keys[:, 5], alone[2][0][0, :, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("span", "k", "message"),
    [
        (range(4), 1, "from 1 on"),
        (range(5, 5), 1, "from 1 on"),
        (range(5, 99), 1, "from 1 on"),
        (range(2, 9, 2), 1, "from 1 on"),
        (range(5, 9), 0, "1 to 20"),
        (range(5, 9), 21, "1 to 20"),
        (range(5, 9), True, "1 to 20"),
    ],
)
def test_what_cannot_be_foreseen_is_refused(span: range, k: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        candidate_caches(models.llama(), models.prompt(20), span, k)


def test_sliding_layers_are_refused() -> None:
    with pytest.raises(UnsupportedCache, match="layer 0"):
        candidate_caches(models.mistral(8), models.prompt(30), range(20, 30), 2)


def _assisted(cache: Any, ids: list[int], draft: Any) -> tuple[list[int], list[int], list[int]]:
    """What assisted generation gives, and the tokens that each pass of model and draft reads."""
    model, given = models.llama(), torch.tensor([ids])
    with _calls(model) as calls, _calls(draft) as drafted:
        out = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            assistant_model=draft,
            cache=cache,
            max_new_tokens=40,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0].tolist(), calls, drafted


def _almost(model: Any) -> Any:
    """A draft that mostly agrees with `model`."""
    draft = models.new_llama()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return draft


def test_assisted_generation_leaves_its_candidates_for_no_further_call() -> None:
    model, draft, ids = models.llama(), _almost(models.llama()), models.prompt(12, 6)
    plain = _assisted(models.DynamicCache(config=model.config), ids, draft)
    cache = CandidateCache(prompt=len(ids), config=model.config)
    kept = _assisted(cache, ids, draft)
    assert kept == plain  # the same text by the same passes, of model and draft
    text, accepted, rejected = kept[0], sorted(cache.accepted), sorted(cache.rejected)
    assert accepted
    assert rejected
    assert not set(accepted) & set(rejected)
    assert all(len(ids) <= i < len(text) for i in (*accepted, *rejected))
    held, own = models.pairs(cache), models.pairs(models.prefill(model, text[:-1]))
    for i in accepted:  # the cache itself has what the candidate gave
        torch.testing.assert_close(held[2][0][:, :, i], own[2][0][:, :, i], rtol=1e-4, atol=1e-5)
    agreed = 0
    for i in rejected:
        alone = {t: models.pairs(models.prefill(model, [*text[:i], t])) for t in range(models.VOCABULARY)}
        keys = cache.rejected[i][0].keys[:, 0]
        near = [t for t, pairs in alone.items() if torch.allclose(pairs[0][0][0, :, -1], keys, rtol=1e-4, atol=1e-5)]
        assert len(near) == 1  # some other token's cache, right behind the right prefix …
        assert near[0] != text[i]
        for layer, kv in enumerate(cache.rejected[i]):  # … in every layer
            torch.testing.assert_close(kv.values[:, 0], alone[near[0]][layer][1][0, :, -1], rtol=1e-4, atol=1e-5)
        agreed += 1
    assert agreed == len(rejected)
