"""`restore` and `read`: prompts, positions, layers, dtypes, and that models go on from them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvcellar
from kvcellar.errors import InvalidInput, UnsupportedCache
from models import generate, llama, logits, pairs, prefill, prompt, same_bits

IDS = prompt(40)
NEW = prompt(5, seed=1)
KEPT = [*range(4), *range(11, 13), *range(20, 40)]


@pytest.fixture
def of_llama(tmp_path: Path) -> Path:
    """40 tokens of the shared Llama, in blocks of 16."""
    recipe = {**kvcellar.Recipe(name="r", symbols={"id": "byteplanes-zstd/1"}).to_json(), "block": 16}
    kvcellar.save(tmp_path / "a.kvc", prefill(llama(), IDS), tokens=IDS, model=llama(), recipe=recipe)
    return tmp_path / "a.kvc"


def _other(token: int) -> int:
    return token % 127 + 1 if token != 127 else 1


@pytest.mark.parametrize(
    ("given", "matched"),
    [
        (IDS + NEW, 40),
        (IDS, 39),
        (IDS[:17], 16),
        (IDS[:16], 15),
        ([*IDS[:23], _other(IDS[23]), *IDS[24:]], 23),
        ([*IDS[:16], _other(IDS[16]), *NEW], 16),
        ([*IDS[:39], _other(IDS[39])], 39),
        ([_other(IDS[0]), *IDS[1:]], 0),
        (IDS[:1], 0),
    ],
)
def test_a_prompt_gets_its_longest_stored_prefix(of_llama: Path, given: list[int], matched: int) -> None:
    with kvcellar.open(of_llama, model=llama()) as stored:
        restored = stored.restore(prompt=given)
    assert restored.matched == restored.cache.get_seq_length() == matched
    assert len(restored.cache.layers) == 3
    if matched:
        whole = pairs(prefill(llama(), IDS))
        assert same_bits(pairs(restored.cache), [(k[:, :, :matched], v[:, :, :matched]) for k, v in whole])
    assert generate(llama(), given, restored.cache, new=6) == generate(llama(), given, new=6)


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor, lambda ids: torch.tensor([ids]), lambda i: [i]])
def test_prompts_of_every_form(of_llama: Path, form: Callable) -> None:
    with kvcellar.open(of_llama, model=llama()) as stored:
        assert stored.restore(prompt=form(IDS[:9])).matched == 8


@pytest.mark.parametrize("given", [[], "text", b"bytes", [1.0, 2.0], [-1, 2], 5, torch.zeros(1, 0, dtype=torch.int64)])
def test_what_is_no_prompt_is_refused(of_llama: Path, given: object) -> None:
    with kvcellar.open(of_llama, model=llama()) as stored, pytest.raises(InvalidInput, match="prompt"):
        stored.restore(prompt=given)


def test_prompt_and_positions_together_are_refused(of_llama: Path) -> None:
    with kvcellar.open(of_llama, model=llama()) as stored, pytest.raises(InvalidInput, match="not both"):
        stored.restore(prompt=IDS, positions=3)


@pytest.mark.parametrize(
    ("positions", "chosen"),
    [
        (None, range(40)),
        (0, range(0)),
        (17, range(17)),
        (40, range(40)),
        (np.int64(17), range(17)),
        (range(15, 33), range(15, 33)),
        (range(3, 3), range(0)),
        (slice(-5, None), range(35, 40)),
        (slice(None, None, 7), range(0, 40, 7)),
        ([39, 0, 16, 15], [0, 15, 16, 39]),
        ([], range(0)),
        ({5}, [5]),
        (np.array([1, 20]), [1, 20]),
        (torch.tensor([1, 20]), [1, 20]),
        (iter([2, 3]), [2, 3]),
    ],
)
def test_positions_choose_tokens(of_llama: Path, positions: object, chosen: range | list[int]) -> None:
    whole = pairs(prefill(llama(), IDS))
    with kvcellar.open(of_llama, model=llama()) as stored:
        restored = stored.restore(positions=positions)
    assert restored.matched == len(chosen)
    prefix = list(chosen) == list(range(len(chosen)))
    assert restored.cache.get_seq_length() == (len(chosen) if prefix else 40)
    if len(chosen):
        cut = [(keys[:, :, list(chosen)], values[:, :, list(chosen)]) for keys, values in whole]
        assert same_bits(pairs(restored.cache), cut)


@pytest.mark.parametrize("positions", [41, -1, [40], [0, 400], range(30, 41), [-1], [0.5], "12", 2.5])
def test_positions_that_are_not_there_are_refused(of_llama: Path, positions: object) -> None:
    with kvcellar.open(of_llama, model=llama()) as stored, pytest.raises(InvalidInput):
        stored.restore(positions=positions)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_selected_positions_give_the_logits_of_a_masked_full_cache(of_llama: Path, attention: str) -> None:
    model = llama(attention)
    full = prefill(llama(), IDS)
    mask = torch.full((1, 1, 5, 45), float("-inf"))
    mask[..., KEPT] = 0.0
    for row in range(5):
        mask[..., row, 40 : 41 + row] = 0.0
    expected = logits(model, copy.deepcopy(full), NEW, attention_mask=mask)
    with kvcellar.open(of_llama, model=llama()) as stored:
        found = logits(model, stored.restore(positions=KEPT).cache, NEW)
    assert torch.allclose(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, logits(model, copy.deepcopy(full), NEW), atol=1e-2)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generate_goes_on_at_the_right_position(of_llama: Path, attention: str) -> None:
    model = llama(attention)
    seen: list[int] = []

    def look(_module: object, given: tuple, named: dict) -> None:
        seen.extend(named["position_ids"][0].tolist() if "position_ids" in named else given[1][0].tolist())

    with kvcellar.open(of_llama, model=llama()) as stored:
        generated, stepped = (stored.restore(positions=KEPT).cache for _ in range(2))
    hook = model.model.rotary_emb.register_forward_pre_hook(look, with_kwargs=True)
    try:
        found = generate(model, IDS + NEW, generated, new=6)
    finally:
        hook.remove()
    assert seen == list(range(40, 50))
    assert generated.get_seq_length() == 50
    assert generated.layers[0].keys.shape[2] == len(KEPT) + 10
    by_hand, feed = IDS + NEW, NEW
    for _ in range(6):
        feed = [int(logits(model, stepped, feed)[-1].argmax())]
        by_hand = by_hand + feed
    assert found == by_hand


def test_selected_positions_behave_like_a_cache(of_llama: Path) -> None:
    with kvcellar.open(of_llama, model=llama()) as stored:
        cache = stored.restore(positions=KEPT).cache
    alone = logits(llama(), copy.deepcopy(cache), NEW)
    cache.batch_repeat_interleave(2)
    assert cache.layers[2].values.shape[:3] == (2, 2, len(KEPT))
    both = llama()(input_ids=torch.tensor([NEW, NEW[::-1]]), cache=cache).logits
    assert torch.allclose(both[0], alone, atol=1e-5)
    assert not torch.allclose(both[1], alone, atol=1e-2)
    assert not cache.is_croppable


def test_selected_positions_are_forgotten_by_reset(of_llama: Path) -> None:
    with kvcellar.open(of_llama, model=llama()) as stored:
        cache = stored.restore(positions=KEPT).cache
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(logits(llama(), cache, NEW), logits(llama(), DynamicCache(), NEW))


def test_selected_positions_are_not_saved_again(of_llama: Path, tmp_path: Path) -> None:
    with kvcellar.open(of_llama, model=llama(), mode="a") as stored:
        cache = stored.restore(positions=KEPT).cache
        for ids in ([IDS[i] for i in KEPT], IDS):
            with pytest.raises(UnsupportedCache, match=r"layer 0 .*selected positions"):
                kvcellar.save(tmp_path / "b.kvc", cache, tokens=ids, model=llama())
            with pytest.raises(UnsupportedCache, match=r"layer 0 .*selected positions"):
                stored.append(cache, ids)
    assert not (tmp_path / "b.kvc").exists()


def test_layers_choose_layers(of_llama: Path) -> None:
    whole = pairs(prefill(llama(), IDS))
    with kvcellar.open(of_llama, model=llama()) as stored:
        restored = stored.restore(layers=[2, 0, 2])
        assert restored.matched == 40
        layers = restored.cache.layers
        assert same_bits([(layers[i].keys, layers[i].values) for i in (0, 2)], [whole[0], whole[2]])
        assert len(layers) == 3
        assert not layers[1].is_initialized
        part = stored.restore(layers=[1], positions=range(15, 18)).cache.layers[1]
        assert same_bits([(part.keys, part.values)], [tuple(side[:, :, 15:18] for side in whole[1])])
        by_prompt = stored.restore(layers=[1], prompt=IDS[:8])
        assert by_prompt.matched == 7
        assert by_prompt.cache.layers[1].keys.shape[2] == 7


@pytest.mark.parametrize("layers", [[3], [-1], [0, 7], ["a"], [0.5], [None], 1])
def test_layers_that_are_not_there_are_refused(of_llama: Path, layers: object) -> None:
    with kvcellar.open(of_llama, model=llama()) as stored, pytest.raises(InvalidInput):
        stored.restore(layers=layers)


def test_dtype_converts_by_value(make_cache: Callable, saved: Callable) -> None:
    source = make_cache(dtype=torch.bfloat16)
    source[1][0][0, 0, 0, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    with kvcellar.open(saved(source), identity="m") as stored:
        for name, dtype in (("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)):
            for asked in (name, dtype):
                found = pairs(stored.restore(dtype=asked).cache)
                expected = [(keys.to(dtype), values.to(dtype)) for keys, values in source]
                assert same_bits(found, expected)


def test_a_number_that_does_not_fit_is_refused(make_cache: Callable, saved: Callable) -> None:
    source = make_cache(dtype=torch.bfloat16)
    source[2][1][0, 1, 39, 15] = -70000.0
    with kvcellar.open(saved(source), identity="m") as stored:
        with pytest.raises(InvalidInput, match=r"layer 2: 70144 does not fit torch.float16; stored as torch.bfloat16"):
            stored.restore(dtype=torch.float16)
        assert stored.restore(dtype=torch.float16, layers=[0, 1]).matched == 40
        assert stored.restore(dtype=torch.float16, positions=39).matched == 39


@pytest.mark.parametrize("dtype", ["int8", "half", "float64x", 5, torch.int8, torch.int64, torch.bool])
def test_dtypes_no_cache_can_have_are_refused(make_cache: Callable, saved: Callable, dtype: object) -> None:
    with kvcellar.open(saved(make_cache()), identity="m") as stored, pytest.raises(InvalidInput):
        stored.restore(dtype=dtype)


def test_device_cpu(of_llama: Path) -> None:
    with kvcellar.open(of_llama, model=llama()) as stored:
        for device in ("cpu", torch.device("cpu")):
            restored = stored.restore(device=device).cache
            assert restored.layers[0].keys.device.type == "cpu"
            assert same_bits(pairs(restored), pairs(prefill(llama(), IDS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_read_gives_one_layer_as_stored(make_cache: Callable, saved: Callable, dtype: torch.dtype) -> None:
    source = make_cache(dtype=dtype, width=8, heads=3)
    with kvcellar.open(saved(source)) as stored:
        for start, stop in ((0, 40), (7, 8), (0, 0), (40, 40)):
            keys, values = stored.read(1, start, stop)
            assert keys.shape == values.shape == (3, stop - start, 8)
            assert same_bits([(keys, values)], [tuple(side[0, :, start:stop] for side in source[1])])
        for layer, start, stop in ((0, 3, 2), (0, -1, 2), (0, 0, 41), (3, 0, 1), (-1, 0, 1)):
            with pytest.raises(InvalidInput):
                stored.read(layer, start, stop)
