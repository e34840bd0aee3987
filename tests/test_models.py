"""Every kind of model in `zoo`: a restored cache goes on bit for bit like the one that was never archived."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DummyLayer

import kvcellar
from kvcellar.errors import InvalidInput, UnsupportedCache
from kvcellar.recipe import EXACT, Recipe
from models import bits, generate, llama, logits, pairs, prefill, prompt, same_bits
from zoo import BY_NAME, DEVICES, MODELS, PROMPT, QUANTIZED, REFUSED, STATIC, Model, own_cache

ROOT = Path(__file__).parent.parent
BLOCKS_OF_12 = Recipe(name=EXACT.name, symbols=EXACT.symbols, block=12)
IDS = prompt(PROMPT + 5)
STEPS = (20, 30, PROMPT)


def _same(restored: Any, source: Any) -> bool:
    """Layer for layer of one class, with one length and the same bits."""
    return (
        [type(layer) for layer in restored.layers] == [type(layer) for layer in source.layers]
        and _lengths(restored) == _lengths(source)
        and same_bits(_held(restored), _held(source))
    )


def _lengths(cache: Any) -> list[int]:
    return [layer.get_seq_length() for layer in cache.layers if not isinstance(layer, DummyLayer)]


def _held(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [pair for pair in pairs(cache) if pair[0] is not None]


def _goes_on(model: Any, cache: Any, ids: list[int]) -> torch.Tensor:
    """Logits of four more tokens, fed as three and one."""
    return torch.cat([logits(model, cache, ids[:3]), logits(model, cache, ids[3:4])])


def _archived(model: Any, path: Path, tokens: int = PROMPT) -> Any:
    """The cache of `tokens` tokens after `path` was saved from it."""
    cache = prefill(model, IDS[:tokens])
    kvcellar.save(path, cache, tokens=IDS[:tokens], model=model)
    return cache


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_a_restored_cache_goes_on_as_if_never_archived(entry: Model, tmp_path: Path) -> None:
    """Saved at once, and saved and appended in steps; restored for a model built anew, whole and as a prefix."""
    model, anew = entry.build(), entry.build()
    cache, held = DynamicCache(config=model.config), {}
    for before, after in zip((0, *STEPS), STEPS, strict=False):
        logits(model, cache, IDS[before:after])
        held[after] = copy.deepcopy(cache)
        if not before:
            kvcellar.save(tmp_path / "steps.kvc", cache, tokens=IDS[:after], model=model, recipe=BLOCKS_OF_12)
        else:
            with kvcellar.open(tmp_path / "steps.kvc", model=model, mode="a") as stored:
                stored.append(cache, IDS[:after])
    kvcellar.save(tmp_path / "once.kvc", cache, tokens=IDS[:PROMPT], model=model)
    with kvcellar.open(tmp_path / "once.kvc", model=anew) as stored:
        once = stored.restore().cache
    with kvcellar.open(tmp_path / "steps.kvc", model=anew) as stored:
        whole, part = stored.restore().cache, stored.restore(30).cache
        if stored.manifest.geometry.sliding_runs:
            with pytest.raises(InvalidInput, match="first 4 tokens cannot be restored"):
                stored.restore(4)
        else:
            four = _held(stored.restore(4).cache)
            assert same_bits(four, [(k[:, :, :4], v[:, :, :4]) for k, v in _held(cache)])
    assert _same(once, cache)
    assert _same(whole, cache)
    assert _same(part, held[30])
    ids = IDS[: PROMPT + 1]
    assert generate(anew, ids, whole, new=4) == generate(model, ids, copy.deepcopy(cache), new=4)
    expected = _goes_on(model, cache, IDS[PROMPT:])
    assert torch.equal(_goes_on(anew, once, IDS[PROMPT:]), expected)
    assert torch.equal(_goes_on(anew, part, IDS[30:]), _goes_on(model, held[30], IDS[30:]))
    assert expected.std() > 0.5, "a model that says the same whatever it read proves nothing"


def test_keys_under_a_dynamic_rope_are_kept_as_they_were_cached(tmp_path: Path) -> None:
    """Its rotation depends on the length at that time; a restore brings back those keys, not those of a new prefill."""
    entry = BY_NAME["Llama, dynamic"]
    model = entry.build()
    cache = _archived(model, tmp_path / "a.kvc", 30)
    logits(model, cache, IDS[30:PROMPT])
    with kvcellar.open(tmp_path / "a.kvc", model=entry.build(), mode="a") as stored:
        stored.append(cache, IDS[:PROMPT])
        restored = stored.restore().cache
    assert _same(restored, cache)
    at_once = prefill(entry.build(), IDS[:PROMPT])
    assert not torch.allclose(at_once.layers[0].keys, restored.layers[0].keys, atol=0.1)
    assert torch.allclose(at_once.layers[0].values, restored.layers[0].values, atol=1e-5)
    expected = _goes_on(model, cache, IDS[PROMPT:])
    read_more = entry.build()
    prefill(read_more, prompt(60))  # its rope now remembers 60 positions, whatever cache comes next
    assert not torch.allclose(_goes_on(read_more, copy.deepcopy(restored), IDS[PROMPT:]), expected, atol=1e-2)
    assert torch.equal(_goes_on(entry.build(), restored, IDS[PROMPT:]), expected)


def test_a_cache_that_knows_no_windows_keeps_every_token(tmp_path: Path) -> None:
    """DynamicCache() without a config: what slides is then the mask alone."""
    model = BY_NAME["Gemma3 text"].build()
    cache = prefill(model, IDS[:PROMPT], DynamicCache())
    kvcellar.save(tmp_path / "a.kvc", cache, tokens=IDS[:PROMPT], model=model)
    with kvcellar.open(tmp_path / "a.kvc", model=model) as stored:
        assert stored.manifest.geometry.uniform
        restored, part = stored.restore().cache, stored.restore(4).cache
    assert _same(restored, cache)
    assert torch.equal(_goes_on(model, restored, IDS[PROMPT:]), _goes_on(model, cache, IDS[PROMPT:]))
    expected = _goes_on(model, prefill(model, IDS[:4]), IDS[4:])
    assert torch.allclose(_goes_on(model, part, IDS[4:]), expected, atol=1e-5)


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.name)
@pytest.mark.filterwarnings("ignore")
def test_field_g10_state_that_is_no_key_is_refused_by_name(entry: Model, tmp_path: Path) -> None:
    """Also where the attention layers come first, so that a cache cut short would look whole."""
    model = entry.build()
    cache = own_cache(model, IDS[:PROMPT])
    kvcellar.save(tmp_path / "a.kvc", prefill(llama(), IDS), tokens=IDS, model=llama())
    before = (tmp_path / "a.kvc").read_bytes()
    for name in ("a.kvc", "b.kvc"):
        with pytest.raises(UnsupportedCache, match=entry.refused):
            kvcellar.save(tmp_path / name, cache, tokens=IDS[:PROMPT], model=model)
    with (
        kvcellar.open(tmp_path / "a.kvc", identity="m", allow_mismatch=True, mode="a") as stored,
        pytest.raises(UnsupportedCache, match=entry.refused),
    ):
        stored.append(cache, IDS[:PROMPT])
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.kvc", before)]


def test_field_g36_cross_attention_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    with torch.no_grad():
        model = T5ForConditionalGeneration(config).eval()
        ids = torch.tensor([IDS])
        cache = model(input_ids=ids, decoder_input_ids=ids[:, :12], use_cache=True).cache
    with pytest.raises(UnsupportedCache, match="EncoderDecoderCache: cross-attention"):
        kvcellar.save(tmp_path / "a.kvc", cache, tokens=IDS[:12], model=model)
    assert not list(tmp_path.iterdir())


def test_field_g36_a_fragment_stays_where_it_was(tmp_path: Path) -> None:
    """The same 12 tokens twice: the second time keys have another phase, and no restore moves them to the front."""
    twice = IDS[:12] * 2
    source = prefill(llama(), twice)
    kvcellar.save(tmp_path / "a.kvc", source, tokens=twice, model=llama())
    with kvcellar.open(tmp_path / "a.kvc", model=llama()) as stored:
        second = stored.restore(range(12, 24))
        (keys, values), (first, same) = stored.read(0, 12, 24), stored.read(0, 0, 12)
        with pytest.raises(InvalidInput, match="12 of 24 tokens"):
            stored.restore(range(12, 24), into=DynamicCache())
    assert torch.equal(bits(keys), bits(source.layers[0].keys[0, :, 12:]))
    assert torch.equal(second.cache.layers[0].keys[0], keys)
    assert not torch.allclose(keys, first, atol=0.1)
    assert torch.allclose(values, same, atol=1e-6)
    assert second.next_position == second.cache.get_seq_length() == 24


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_field_g03_a_prefix_has_just_the_length_asked_for(tokens: int, tmp_path: Path) -> None:
    source = _archived(llama(), tmp_path / "a.kvc", 3)
    with kvcellar.open(tmp_path / "a.kvc", model=llama()) as stored:
        restored = stored.restore(tokens)
        for beyond in (-1, -3, 4, 5, 1 << 40):
            with pytest.raises(InvalidInput, match=f"first {beyond} tokens of an archive of 3"):
                stored.restore(beyond)
        for index in (-1, 3):
            with pytest.raises(InvalidInput):
                stored.restore([0, index])
    assert restored.matched == restored.next_position == restored.cache.get_seq_length() == tokens
    if tokens:
        assert same_bits(pairs(restored.cache), [(k[:, :, :tokens], v[:, :, :tokens]) for k, v in pairs(source)])
    else:
        assert all(layer.keys is None for layer in restored.cache.layers)
    expected = logits(llama(), prefill(llama(), IDS[:tokens]) if tokens else DynamicCache(), IDS[tokens : tokens + 3])
    assert torch.allclose(logits(llama(), restored.cache, IDS[tokens : tokens + 3]), expected, atol=1e-5)


@pytest.mark.parametrize("name", STATIC)
def test_restoring_into_a_static_cache(name: str, tmp_path: Path) -> None:
    model = BY_NAME[name].build()
    dynamic = _archived(model, tmp_path / "a.kvc")
    static, filled = (StaticCache(config=model.config, max_cache_len=64) for _ in range(2))
    prefill(model, IDS[:PROMPT], static)
    with kvcellar.open(tmp_path / "a.kvc", model=model) as stored:
        assert stored.restore(into=filled).cache is filled
    assert filled.get_seq_length() == PROMPT
    ids = IDS[: PROMPT + 1]
    found = generate(model, ids, copy.deepcopy(filled))
    assert found == generate(model, ids, copy.deepcopy(dynamic))
    got = _goes_on(model, filled, IDS[PROMPT:])
    # Keys and values of deeper layers may differ in the last bit: what filled `static` attended over other shapes.
    assert torch.allclose(got, _goes_on(model, static, IDS[PROMPT:]), atol=1e-5)
    assert torch.allclose(got, _goes_on(model, dynamic, IDS[PROMPT:]), atol=1e-4)


@pytest.mark.parametrize("name", QUANTIZED)
def test_restoring_into_a_quantized_cache(name: str, tmp_path: Path) -> None:
    """It quantizes what it is given, as it would have quantized the prefill's."""
    model = BY_NAME[name].build()
    exact = _archived(model, tmp_path / "a.kvc")
    prefilled, filled = (QuantizedCache(backend="fp8", config=model.config) for _ in range(2))
    prefill(model, IDS[:PROMPT], prefilled)
    with kvcellar.open(tmp_path / "a.kvc", model=model) as stored:
        assert stored.restore(into=filled).cache is filled
    got = _goes_on(model, filled, IDS[PROMPT:])
    assert torch.equal(got, _goes_on(model, prefilled, IDS[PROMPT:]))
    assert not torch.equal(got, _goes_on(model, exact, IDS[PROMPT:])), "nothing was quantized"


@pytest.mark.parametrize("name", DEVICES)
def test_field_g14_each_layer_lands_on_its_device(name: str, tmp_path: Path) -> None:
    """The meta device stands for a second one: it needs no hardware."""
    model = BY_NAME[name].build()
    source = _archived(model, tmp_path / "a.kvc")
    with kvcellar.open(tmp_path / "a.kvc", model=model) as stored:
        for into in (None, DynamicCache(config=model.config)):
            cache = stored.restore(device={0: "cpu", 1: torch.device("meta")}, into=into).cache
            assert [k.device.type for k, _ in _held(cache)] == ["cpu", "meta", "cpu"][: len(_held(cache))]
            assert [v.device.type for _, v in _held(cache)] == [k.device.type for k, _ in _held(cache)]
            assert [layer.device.type for layer in cache.layers[:2]] == ["cpu", "meta"]
            assert same_bits(_held(cache)[:1], _held(source)[:1])
        cache.batch_select_indices(torch.tensor([0, 0]))
        assert [len(k) for k, _ in _held(cache)] == [2] * len(_held(cache))
        for nowhere in ("nonsense", {1: "nonsense"}, "cuda:99"):
            target = DynamicCache(config=model.config)
            with pytest.raises(InvalidInput, match="cannot be put on device"):
                stored.restore(device=nowhere, into=target)
            assert target.get_seq_length() == 0


def test_the_page_of_models_is_current() -> None:
    spec = importlib.util.spec_from_file_location("modelpage", ROOT / "benchmarks" / "modelpage.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert page.PAGE.read_text(encoding="utf-8") == page.made(page.written_for()), "python benchmarks/modelpage.py"


def test_recurrent_layers_behind_the_end_of_a_cache_are_refused(tmp_path: Path) -> None:
    """RecurrentGemma keeps its state in the model: a DynamicCache() made without its config ends before them."""
    (entry,) = (each for each in REFUSED if each.name == "RecurrentGemma")
    model = entry.build()
    cache = prefill(model, IDS[:PROMPT], DynamicCache())
    assert len(cache.layers) == 1
    with pytest.raises(UnsupportedCache, match=r"layer 1 of RecurrentGemmaForCausalLM \(linear_attention\)"):
        kvcellar.save(tmp_path / "a.kvc", cache, tokens=IDS[:PROMPT], model=model)
    shared = BY_NAME["Gemma3n text"].build()
    cache = prefill(shared, IDS[:PROMPT], DynamicCache())
    assert len(cache.layers) == 2
    kvcellar.save(tmp_path / "a.kvc", cache, tokens=IDS[:PROMPT], model=shared)
    with kvcellar.open(tmp_path / "a.kvc", model=shared) as stored:
        restored = stored.restore().cache
        for unknown in ({7: "cpu"}, {-1: "cpu"}, {"model.layers.0": "cpu"}):
            with pytest.raises(InvalidInput, match="layers"):
                stored.restore(device=unknown)
    assert torch.equal(_goes_on(shared, restored, IDS[PROMPT:]), _goes_on(shared, cache, IDS[PROMPT:]))
