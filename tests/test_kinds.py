"""Layers that do not hold every token: sliding windows with their true length, and layers without a cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DummyLayer, DynamicSlidingWindowLayer, StaticSlidingWindowLayer

import kvcellar
from kvcellar.errors import InvalidInput, TokensMismatch, UnsupportedCache
from kvcellar.recipe import EXACT, Recipe
from models import bits, generate, llama, logits, mistral, pairs, prefill, prompt, same_bits

WINDOW = 16
SMALL = Recipe(**{**{k: getattr(EXACT, k) for k in ("name", "symbols")}, "block": 12})


def _keep(path: Path, cache: Any, ids: list[int], **more: Any) -> Path:
    kvcellar.save(path, cache, tokens=ids, identity="m", recipe=SMALL, **more)
    return path


def _next(model: Any, cache: Any, ids: list[int]) -> torch.Tensor:
    """Logits of three more tokens, fed as two and one."""
    first = logits(model, cache, ids[:2])
    return torch.cat([first, logits(model, cache, ids[2:])])


@pytest.mark.parametrize("tokens", [1, 12, 14, 15, 16, 17, 40, 100])
def test_field_g01_a_sliding_cache_goes_on_as_if_never_archived(tokens: int, tmp_path: Path) -> None:
    model, ids = mistral(WINDOW), prompt(tokens + 3)
    cache = prefill(model, ids[:tokens])
    path = _keep(tmp_path / "a.kvc", cache, ids[:tokens])
    with kvcellar.open(path, identity="m") as stored:
        assert len(stored) == tokens
        assert stored.verify().ok
        assert [run["kind"] for run in stored.info().geometry] == ["sliding"]
        assert stored.info().geometry[0]["window"] == WINDOW
        restored = stored.restore()
    assert restored.matched == restored.next_position == tokens
    assert all(isinstance(layer, DynamicSlidingWindowLayer) for layer in restored.cache.layers)
    assert restored.cache.get_seq_length() == tokens
    assert same_bits(pairs(restored.cache), pairs(cache))
    assert torch.equal(_next(model, restored.cache, ids[tokens:]), _next(model, cache, ids[tokens:]))


def test_only_the_window_is_stored(tmp_path: Path) -> None:
    """50 times the tokens, but of each layer one window: the ids are what grows."""
    model = mistral(WINDOW)
    sizes = [
        _keep(tmp_path / f"{n}.kvc", prefill(model, prompt(n)), prompt(n)).stat().st_size - 400 * -(-n // 12)
        for n in (40, 400)
    ]
    assert sizes[1] < sizes[0] + 400


@pytest.mark.parametrize(
    "steps", [(20, 21, 22, 23, 24, 25, 26, 40), (5, 40, 41, 120), (30, 31), (12, 24, 36), (1, 2, 3)]
)
def test_appending_to_a_sliding_cache(steps: tuple[int, ...], tmp_path: Path) -> None:
    model, ids = mistral(WINDOW), prompt(steps[-1] + 3)
    cache = prefill(model, ids[: steps[0]])
    path = _keep(tmp_path / "a.kvc", cache, ids[: steps[0]])
    for before, after in itertools.pairwise(steps):
        logits(model, cache, ids[before:after])
        with kvcellar.open(path, identity="m", mode="a") as stored:
            stored.append(cache, ids[:after])
            if after == steps[-1]:
                stored.compact()
            assert stored.verify().ok
    with kvcellar.open(path, identity="m") as stored:
        restored = stored.restore().cache
    assert same_bits(pairs(restored), pairs(cache))
    assert torch.equal(_next(model, restored, ids[-3:]), _next(model, cache, ids[-3:]))


def test_prefixes_can_be_restored_where_their_windows_are_stored(tmp_path: Path) -> None:
    model, ids = mistral(WINDOW), prompt(60)
    cache = prefill(model, ids[:30])
    path = _keep(tmp_path / "a.kvc", cache, ids[:30])
    for after in (35, 40):  # tokens 15…39 are stored now
        logits(model, cache, ids[after - 5 : after])
        with kvcellar.open(path, identity="m", mode="a") as stored:
            stored.append(cache, ids[:after])
    with kvcellar.open(path, identity="m") as stored:
        for n in (30, 33, 40, 0):
            restored, whole = (
                stored.restore(n).cache,
                prefill(model, ids[:n]) if n else DynamicCache(config=model.config),
            )
            got, expected = _next(model, restored, ids[n : n + 3]), _next(model, whole, ids[n : n + 3])
            assert torch.allclose(got, expected, atol=1e-5)
        for n in (1, 20, 29):
            with pytest.raises(InvalidInput, match=f"first {n} tokens cannot be restored.* has 0 tokens"):
                stored.restore(n)
        with pytest.raises(InvalidInput, match="whole or as a prefix"):
            stored.restore([0, 1, 38, 39])
        found = stored.restore(prompt=ids[:34])
        assert found.matched == 33
        assert generate(model, ids[:34], found.cache) == generate(model, ids[:34])
        assert stored.restore(prompt=ids[:20]).matched == 0
        keys, values = stored.read(1, 20, 35)
        assert keys.shape == values.shape == (2, 15, 16)
        with pytest.raises(InvalidInput, match=r"layer 1.* holds 15…20"):
            stored.read(1, 5, 20)


def test_a_gap_between_two_windows_is_not_bridged(tmp_path: Path) -> None:
    model, ids = mistral(WINDOW), prompt(100)
    cache = prefill(model, ids[:14])
    path = _keep(tmp_path / "a.kvc", cache, ids[:14])
    logits(model, cache, ids[14:80])  # tokens 14…64 fall out of the window unseen
    with kvcellar.open(path, identity="m", mode="a") as stored:
        stored.append(cache, ids[:80])
    with kvcellar.open(path, identity="m") as stored:
        assert torch.equal(_next(model, stored.restore().cache, ids[80:83]), _next(model, cache, ids[80:83]))
        assert stored.restore(12).matched == 12  # a sealed block; what the tail held went with the gap
        with pytest.raises(InvalidInput, match="longest shorter prefix"):
            stored.restore(60)


def test_windows_shorter_than_a_block_and_layers_of_both_kinds(tmp_path: Path) -> None:
    sliding, full = prefill(mistral(WINDOW), prompt(40)), prefill(llama(), prompt(40))
    mixed = DynamicCache()
    mixed.layers = [sliding.layers[0], full.layers[0], sliding.layers[1], sliding.layers[2]]
    path = _keep(tmp_path / "a.kvc", mixed, prompt(40))
    with kvcellar.open(path, identity="m") as stored:
        restored = stored.restore().cache
        assert same_bits(pairs(restored), pairs(mixed))
        assert [type(layer).__name__ for layer in restored.layers] == [type(layer).__name__ for layer in mixed.layers]
        keys, _ = stored.read(1, 3, 30)
        assert torch.equal(bits(keys), bits(full.layers[0].keys[0, :, 3:30]))
        only = stored.restore(layers=[1]).cache
        assert only.layers[1].keys.shape[2] == 40
    mixed.layers[1] = prefill(llama(), prompt(39)).layers[0]
    with pytest.raises(InvalidInput, match="layer 1 holds 39 keys"):
        _keep(tmp_path / "b.kvc", mixed, prompt(40))


@pytest.mark.parametrize("tokens", [10, 15, 16, 40])
def test_static_sliding_layers_in_and_out(tokens: int, tmp_path: Path) -> None:
    model, ids = mistral(WINDOW), prompt(tokens + 3)
    static = prefill(model, ids[:tokens], StaticCache(config=model.config, max_cache_len=64))
    assert isinstance(static.layers[0], StaticSlidingWindowLayer)
    dynamic = prefill(model, ids[:tokens])
    path = _keep(tmp_path / "a.kvc", static, ids[:tokens])
    with kvcellar.open(path, identity="m") as stored:
        restored = stored.restore().cache
        assert torch.allclose(_next(model, restored, ids[tokens:]), _next(model, dynamic, ids[tokens:]), atol=1e-5)
        target = StaticCache(config=model.config, max_cache_len=64)
        assert stored.restore(into=target).cache is target
    got, expected = _next(model, target, ids[tokens:]), _next(model, static, ids[tokens:])
    assert torch.allclose(got, expected, atol=1e-5)


def test_a_static_cache_that_never_slides_is_a_full_one(tmp_path: Path) -> None:
    model, ids = mistral(64), prompt(43)
    static = prefill(model, ids[:40], StaticCache(config=model.config, max_cache_len=50))
    with kvcellar.open(_keep(tmp_path / "a.kvc", static, ids[:40]), identity="m") as stored:
        assert stored.info().geometry[0]["kind"] == "full"
        restored = stored.restore().cache
    assert torch.allclose(_next(model, restored, ids[40:]), _next(model, prefill(model, ids[:40]), ids[40:]), atol=1e-5)


def test_restoring_into_a_cache_of_the_callers(tmp_path: Path) -> None:
    model, ids = llama(), prompt(43)
    path = _keep(tmp_path / "a.kvc", prefill(model, ids[:40]), ids[:40])
    expected = _next(model, prefill(model, ids[:40]), ids[40:])
    with kvcellar.open(path, identity="m") as stored:
        for target in (DynamicCache(), DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=64)):
            restored = stored.restore(into=target)
            assert restored.cache is target
            assert torch.allclose(_next(model, target, ids[40:]), expected, atol=1e-5)
            with pytest.raises(InvalidInput, match="holds 43 tokens already"):
                stored.restore(into=target)
        small = StaticCache(model.config, max_cache_len=39)
        with pytest.raises(InvalidInput, match="room for 39 tokens, 40"):
            stored.restore(into=small)
        assert small.get_seq_length() == 0
        with pytest.raises(InvalidInput, match="30 of 40 tokens"):
            stored.restore(list(range(10, 40)), into=DynamicCache())
        with pytest.raises(InvalidInput, match="expected a transformers cache"):
            stored.restore(into=[])
        failing = DynamicCache()
        real, calls = failing.update, []

        def update(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            return real(*arguments)

        failing.update = update  # type: ignore[method-assign]
        with pytest.raises(RuntimeError):
            stored.restore(into=failing)
        assert failing.get_seq_length() == 0


def test_another_window_is_refused(tmp_path: Path) -> None:
    path = _keep(tmp_path / "a.kvc", prefill(mistral(WINDOW), prompt(40)), prompt(40))
    with kvcellar.open(path, identity="m") as stored:
        with pytest.raises(InvalidInput, match="slides over 16 tokens, that of into over 8"):
            stored.restore(into=DynamicCache(config=mistral(8).config))
        with pytest.raises(InvalidInput, match="15 of 40 tokens"):
            stored.restore(into=DynamicCache())
    with (
        kvcellar.open(path, identity="m", mode="a") as stored,
        pytest.raises(InvalidInput, match="sliding"),
    ):
        stored.append(prefill(llama(), prompt(41)), prompt(41))


def test_layers_without_a_cache_of_their_own(tmp_path: Path, make_cache: Callable) -> None:
    source = prefill(llama(), prompt(40))
    source.layers[1] = DummyLayer()
    with kvcellar.open(_keep(tmp_path / "a.kvc", source, prompt(40)), identity="m", mode="a") as stored:
        restored = stored.restore().cache
        assert isinstance(restored.layers[1], DummyLayer)
        assert restored.get_seq_length() == 40
        assert [run["kind"] for run in stored.info().geometry] == ["full", "none", "full"]
        assert stored.read(1, 0, 40)[0].numel() == 0
        longer = prefill(llama(), prompt(60))
        longer.layers[1] = DummyLayer()
        stored.append(longer, prompt(60))
        stored.compact()
        assert len(stored) == 60
        # The first 40 tokens are those saved first: a longer prefill may give them another last bit.
        expected = [
            torch.cat([old, new[:, :, 40:]], dim=2) for old, new in zip(pairs(source)[2], pairs(longer)[2], strict=True)
        ]
        assert same_bits(pairs(stored.restore(layers=[2]).cache)[2:], [tuple(expected)])
    empty = DynamicCache()
    empty.layers = [DummyLayer(), DummyLayer()]
    with pytest.raises(InvalidInput, match="empty"):
        _keep(tmp_path / "b.kvc", empty, [])


def test_field_g08_keys_and_values_of_unequal_shape(tmp_path: Path) -> None:
    pair = (torch.randn(1, 1, 33, 192), torch.randn(1, 1, 33, 128))
    latent = torch.randn(1, 1, 33, 576)
    heads = (torch.randn(1, 4, 33, 16), torch.randn(1, 2, 33, 24))
    path = _keep(tmp_path / "a.kvc", [pair, (latent, None), (latent, latent[..., :0]), heads], prompt(33))
    with kvcellar.open(path, identity="m") as stored:
        shapes = [(run["key"]["heads"], run["key"]["width"], run["value"]["width"]) for run in stored.info().geometry]
        assert shapes == [(1, 192, 128), (1, 576, 0), (4, 16, 24)]
        for layer, (keys, values) in enumerate([pair, (latent, latent[..., :0]), (latent, latent[..., :0]), heads]):
            k, v = stored.read(layer, 0, 33)
            assert torch.equal(bits(k), bits(keys[0]))
            assert v.shape == values[0].shape
            assert torch.equal(v, values[0])
        assert [tuple(layer.keys.shape) for layer in stored.restore().cache.layers][1] == (1, 1, 33, 576)


def test_recipes_that_code_layers_together_refuse_layers_that_slide(tmp_path: Path) -> None:
    from toystages import exact

    for cache in (prefill(mistral(WINDOW), prompt(40)),):
        with pytest.raises(UnsupportedCache, match=r"layer 0 is a sliding layer.*use recipe 'exact'"):
            kvcellar.save(tmp_path / "a.kvc", cache, tokens=prompt(40), identity="m", recipe=exact())
    assert not list(tmp_path.iterdir())


def test_field_g02_a_padded_row_is_the_row_alone(tmp_path: Path) -> None:
    for model in (llama(), mistral(WINDOW), mistral(8)):
        long, short = prompt(24), prompt(10, seed=1)
        mask = torch.tensor([[1] * 24, [0] * 14 + [1] * 10])
        rows = torch.tensor([long, [0] * 14 + short])
        cache = DynamicCache(config=model.config)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            model(rows, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True)
        for tokens in (rows, short):
            path = _keep(tmp_path / "a.kvc", cache, tokens, row=1, attention_mask=mask)
            with kvcellar.open(path, identity="m") as stored:
                assert stored.tokens.tolist() == short
                restored = stored.restore().cache
            alone = prefill(model, short)
            assert restored.get_seq_length() == 10
            assert torch.allclose(_next(model, restored, [5, 6, 7]), _next(model, alone, [5, 6, 7]), atol=1e-5)
        with pytest.raises(TokensMismatch, match="attention_mask="):
            _keep(tmp_path / "b.kvc", cache, short, row=1)
    for bad in ([1, 0] * 12, [0] * 24, [1] * 23):
        with pytest.raises(InvalidInput, match="attention_mask"):
            _keep(tmp_path / "b.kvc", cache, rows, row=1, attention_mask=bad)
    right = torch.tensor([[1] * 24, [1] * 10 + [0] * 14])
    with pytest.raises(UnsupportedCache, match="pads behind the row"):
        _keep(tmp_path / "b.kvc", cache, rows, row=1, attention_mask=right)


def test_positions_the_model_was_told(tmp_path: Path) -> None:
    """A padded row whose positions counted the pads goes on at its own position."""
    model, short = llama(), prompt(10, seed=1)
    rows, mask = torch.tensor([[0] * 14 + short]), torch.tensor([[0] * 14 + [1] * 10])
    cache = DynamicCache()
    with torch.no_grad():
        model(rows, attention_mask=mask, position_ids=torch.arange(24)[None], cache=cache, use_cache=True)
    path = _keep(tmp_path / "a.kvc", cache, short, attention_mask=mask, positions=range(24))
    with kvcellar.open(path, identity="m", mode="a") as stored:
        restored = stored.restore()
        assert (restored.matched, restored.next_position) == (10, 24)
        assert restored.cache.get_seq_length() == 24
        again = stored.restore(4)
        assert (again.matched, again.next_position) == (4, 18)
        alone = prefill(model, short)
        got, expected = _next(model, restored.cache, [5, 6, 7]), _next(model, alone, [5, 6, 7])
        assert torch.allclose(got, expected, atol=1e-4)  # distances are the same
        more = [
            (torch.cat([k, k[:, :, :3]], 2), torch.cat([v, v[:, :, :3]], 2)) for k, v in pairs(stored.restore().cache)
        ]
        stored.append(more, [*short, 5, 6, 7])
        assert stored.info().next_position == 27
        stored.compact()
        assert stored.restore().next_position == 27
    with pytest.raises(InvalidInput, match="one by one"):
        _keep(tmp_path / "b.kvc", cache, short, attention_mask=mask, positions=[0, 2, *range(3, 11)])


def test_field_g43_a_declared_next_position_is_carried(
    tmp_path: Path, make_cache: Callable, make_ids: Callable
) -> None:
    path = tmp_path / "a.kvc"
    kvcellar.save(path, make_cache(tokens=30), tokens=make_ids(30), identity="m", recipe=SMALL, next_position=12)
    with kvcellar.open(path, identity="m", mode="a") as stored:
        restored = stored.restore()
        assert (restored.matched, restored.next_position) == (30, 12)
        assert restored.cache.get_seq_length() == 30
        with pytest.raises(InvalidInput, match=r"only the whole archive.*position 12 after 30"):
            stored.restore(20)
        for n in (33, 40):
            stored.append(make_cache(tokens=n), make_ids(n))
            assert stored.info().next_position == stored.restore().next_position == n - 18
        stored.compact()
        assert stored.restore().next_position == 22
    with kvcellar.open(path, identity="m") as stored:
        assert stored.restore().next_position == 22
        assert same_bits(pairs(stored.restore().cache), make_cache(tokens=40))


def test_field_g43_a_multimodal_model_must_say_its_next_position(tmp_path: Path) -> None:
    from models import new_llama

    model = new_llama()
    cache, ids = prefill(model, prompt(10)), prompt(10)
    model.config.rope_parameters = {**model.config.rope_parameters, "mrope_section": [2, 3, 3]}
    with pytest.raises(InvalidInput, match="next_position="):
        kvcellar.save(tmp_path / "a.kvc", cache, tokens=ids, model=model)
    kvcellar.save(tmp_path / "a.kvc", cache, tokens=ids, model=model, next_position=7)
    with kvcellar.open(tmp_path / "a.kvc", model=model) as stored:
        assert stored.restore().next_position == 7
