"""Keys without their rotary turn: found by asking models of many kinds, undone, put back."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.calibrate import Calibration, Sample
from kvcellar.errors import InvalidInput, InvalidRecipe, ProfileMismatch, ProfileMissing, UnsupportedCache
from kvcellar.frontends.transformers import take_cache
from kvcellar.geometry import NO_LAYER, Geometry, LayerGeometry, SideGeometry
from kvcellar.identity import Identity
from kvcellar.profile import Profile
from kvcellar.rope import HALF, INTERLEAVED, Rope, Turn, turned
from models import new_llama, prefill
from zoo import MODELS

ZOO = {model.name: model for model in MODELS}
TURNS = {
    "Llama": [(6, HALF)] * 3,
    "Llama, linear": [(6, HALF)] * 3,
    "Llama, yarn": [(6, HALF)] * 3,
    "Llama, llama3": [(6, HALF)] * 3,
    "Qwen2": [(6, HALF)] * 3,
    "Gemma3 text": [(8, HALF)] * 3,
    "Gemma4 text": [(8, HALF), (16, HALF), (0, HALF), (0, HALF)],
    "GPT-NeoX": [(3, HALF)] * 3,
    "Cohere": [(6, INTERLEAVED)] * 3,
    "Cohere2": [(6, INTERLEAVED), (0, HALF), (6, INTERLEAVED)],
    "GLM-4": [(3, INTERLEAVED)] * 3,
    "SmolLM3": [(6, HALF), (0, HALF), (6, HALF)],
    "Llama-4 text": [(8, INTERLEAVED), (8, INTERLEAVED), (0, HALF)],
    "GPT-2": [(0, HALF)] * 3,
    "BLOOM": [(0, HALF)] * 3,
}


@cache
def built(name: str) -> Any:
    return ZOO[name].build()


def calibration(model: Any, tokens: int = 12) -> Calibration:
    """One sample: the same token again and again."""
    kv = take_cache(prefill(model, [5] * tokens))
    sample = Sample(np.full(tokens, 5), "test", lambda: kv)
    return Calibration(Identity.named("test"), kv.geometry, [sample], model=model)


def fitted(made: Calibration) -> Rope:
    profile = Profile({f"transform.{name}": value for name, value in Rope().fit(made, {}).items()}, {})
    rope = Rope()
    rope.bind(made.geometry, profile)
    return rope


@pytest.mark.parametrize("name", TURNS)
def test_the_model_says_how_it_turns(name: str) -> None:
    rope = fitted(calibration(built(name)))
    assert [(len(turn.frequencies) // 4, turn.layout) for turn in rope.turns] == TURNS[name]


@pytest.mark.parametrize("name", [name for name in TURNS if name not in ("GPT-2", "Llama-4 text")])
def test_keys_of_one_token_are_equal_without_their_turn(name: str) -> None:
    """What enters the first layer is the same at every position, so its keys must be."""
    made = calibration(built(name))
    (sample,) = made.samples
    first = sample.load().layers[0]
    kept = torch.arange(12 - first.slots, 12)
    flat = fitted(made).forward([first.keys, first.values], range(1), kept)
    width = first.keys.shape[0] * first.keys.shape[2]
    torch.testing.assert_close(flat[:, :width], flat[:1, :width].expand(first.slots, width), rtol=1e-4, atol=1e-5)
    if TURNS[name][0][0]:
        assert not torch.allclose(first.keys[:, 0], first.keys[:, -1], atol=1e-2), "else the case tests nothing"


def test_each_rope_of_a_model_is_found() -> None:
    first, second, third = (turn.frequencies for turn in fitted(calibration(built("Gemma3 text"))).turns)
    assert first == third != second


def test_a_model_in_bfloat16_is_understood() -> None:
    model = new_llama(dtype=torch.bfloat16)
    rope = fitted(calibration(model))
    assert [turn.layout for turn in rope.turns] == [HALF] * 3
    assert all(len(turn.frequencies) // 4 == 8 for turn in rope.turns)


def test_a_bias_that_dwarfs_the_rest_hides_no_turn() -> None:
    model = new_llama(dtype=torch.bfloat16, attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.zero_()[7] = 300  # the slowest pair of the first head
    assert all(len(turn.frequencies) // 4 == 8 for turn in fitted(calibration(model)).turns)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Llama, dynamic", "'dynamic' turns keys by the text's length"),
        ("Llama, longrope", "'longrope' turns keys by the text's length"),
        ("Phi-3", "'longrope' turns keys by the text's length"),
        ("GPT-J", "layer 0 turns its keys in a way that is not known here"),
    ],
)
def test_what_cannot_be_undone_is_refused(name: str, words: str) -> None:
    with pytest.raises(UnsupportedCache, match=words):
        Rope().fit(calibration(built(name)), {})


def test_fitting_needs_a_model() -> None:
    made = calibration(built("Llama"))
    with pytest.raises(InvalidInput, match="calibrate with a model"):
        Rope().fit(Calibration(made.identity, made.geometry, made.samples), {})


def frequencies(pairs: int) -> np.ndarray:
    return (1e4 ** -(np.arange(pairs) / max(1, pairs))).astype(np.float32)


def plain(x: np.ndarray, pairs: int, layout: int, positions: np.ndarray) -> np.ndarray:
    """`x` (H, T, D) turned, as complex numbers in float64."""
    at = np.arange(pairs)
    a, b = (at, at + pairs) if layout == HALF else (2 * at, 2 * at + 1)
    turn = (x[..., a] + 1j * x[..., b]) * np.exp(1j * positions[:, None] * frequencies(pairs).astype(np.float64))
    out = x.copy()
    out[..., a], out[..., b] = turn.real, turn.imag
    return out


@given(
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(0, 5),
    st.sampled_from([HALF, INTERLEAVED]),
    st.lists(st.integers(0, 9000), max_size=6),
)
@settings(max_examples=50, deadline=None)
def test_turning_is_what_complex_numbers_do(
    heads: int, width: int, pairs: int, layout: int, positions: list[int]
) -> None:
    pairs = min(pairs, width // 2)
    x = torch.randn(heads, len(positions), width, generator=torch.Generator().manual_seed(0))
    where = np.array(positions, np.int64)
    turn = Turn(frequencies(pairs).tobytes(), layout)
    there, again = torch.empty_like(x), torch.empty_like(x)
    turned(x, turn, where.tobytes(), there, back=False)
    expected = plain(x.double().numpy(), pairs, layout, where)
    np.testing.assert_allclose(there.numpy(), expected, atol=3e-3)  # a float32 angle of 9,000 is 5e-4 off
    turned(there, turn, where.tobytes(), again, back=True)
    torch.testing.assert_close(again, x, rtol=1e-5, atol=1e-5)


def bound(geometry: Geometry, **changed: Any) -> Rope:
    layers = len(geometry)
    tensors = {
        "inv_freq": np.tile(frequencies(4), (layers, 1)),
        "pairs": np.minimum(4, [layer.key.width // 2 for layer in geometry.layers]).astype(np.int32),
        "layout": np.zeros(layers, np.int32),
    }
    rope = Rope()
    kept = {name: value for name, value in {**tensors, **changed}.items() if value is not None}
    rope.bind(geometry, Profile({f"transform.{name}": value for name, value in kept.items()}, {}))
    return rope


def shape(key: int = 8, value: int = 8) -> LayerGeometry:
    return LayerGeometry(SideGeometry(2, key, "float32"), SideGeometry(3, value, "float32"))


@pytest.mark.parametrize("sides", [[(8, 8)], [(8, 0)], [(10, 3), (8, 8)], [(7, 1)]])
def test_forward_and_inverse(sides: list[tuple[int, int]]) -> None:
    rope = bound(Geometry((NO_LAYER, *(shape(k, v) for k, v in sides))))
    group = [torch.randn(h, 5, w).half() for k, v in sides for h, w in ((2, k), (3, v))]
    positions, layers = torch.tensor([3, 4, 5, 900, 901]), range(1, 1 + len(sides))
    flat = rope.forward([t.float() for t in group], layers, positions)
    assert flat.shape == (5, sum(2 * k + 3 * v for k, v in sides))
    assert flat.dtype == torch.float32
    for before, after in zip(group, rope.inverse(flat, group, layers, positions), strict=True):
        torch.testing.assert_close(after, before.float(), rtol=1e-5, atol=1e-5)
    late = rope.forward([t[:, 3:].float() for t in group], layers, positions[3:])
    assert torch.equal(flat[3:], late), "a token's coefficients do not depend on its neighbours"


@pytest.mark.parametrize(
    "change",
    [
        {"inv_freq": None},
        {"pairs": None},
        {"inv_freq": frequencies(4)},
        {"inv_freq": np.tile(frequencies(4), (3, 1))},
        {"inv_freq": np.full((2, 4), np.nan, np.float32)},
        {"inv_freq": np.ones((2, 4))},
        {"pairs": np.array([4, 5], np.int32)},
        {"pairs": np.array([4, -1], np.int32)},
        {"pairs": np.array([4], np.int32)},
        {"layout": np.array([0, 2], np.int32)},
        {"layout": np.array([0, 0], np.int64)},
        {"inv_freq": np.ones((2, 9), np.float32), "pairs": np.array([9, 1], np.int32)},
    ],
)
def test_profiles_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ProfileMismatch):
        bound(Geometry((shape(), shape())), **change)


def test_no_profile_and_no_settings() -> None:
    with pytest.raises(ProfileMissing):
        Rope().bind(Geometry((shape(),)), None)
    with pytest.raises(InvalidRecipe):
        Rope(theta=10000)


def test_a_cache_moves_by_turning() -> None:
    """Field case G36's reference: layer 0 of a fragment at other positions is its keys turned on."""
    model = new_llama()
    twice = take_cache(prefill(model, [9, 8, 7, 6] * 2))
    rope = fitted(calibration(model))
    keys, values = twice.layers[0].keys, twice.layers[0].values
    flat = rope.forward([keys[:, :4], values[:, :4]], range(1), torch.arange(4))
    moved, _ = rope.inverse(flat, [keys[:, :4], values[:, :4]], range(1), torch.arange(4, 8))
    torch.testing.assert_close(moved, keys[:, 4:], rtol=1e-4, atol=1e-5)
