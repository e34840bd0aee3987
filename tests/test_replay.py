"""Recipes that run the model's first layers again: what is not stored, what comes back, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvcellar
import models
from kvcellar.archive.reader import ArchiveReader
from kvcellar.cache import KVCache, LayerKV
from kvcellar.calibrate import Calibration, Sample, fit_profile
from kvcellar.errors import (
    DamagedArchive,
    IdentityMismatch,
    InvalidInput,
    InvalidRecipe,
    ModelMissing,
    ProfileMismatch,
    UnsupportedCache,
)
from kvcellar.frontends.bench.sizes import coarse_bytes
from kvcellar.frontends.fingerprint import identity_of_model
from kvcellar.frontends.recompress import recompress
from kvcellar.frontends.replayer import CHUNK, Replayer
from kvcellar.frontends.transformers import take_cache
from kvcellar.pipeline import Pipeline
from kvcellar.profile import Profile
from kvcellar.recipe import CELLAR, Recipe, Window, find_recipe, replaying
from kvcellar.replayed import Replayed
from kvcellar.stages import Grade
from kvcellar.store.local import LocalStore
from kvcellar.tokens import Tokens

LAYERS, WINDOW, TOKENS = 5, 96, 75
STEP = 0.4
QUANTIZE = {"id": "deadzone/1", "step": STEP, "fine_step": 0.01, "keep": 0.02}
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def recipe(layers: int = 2, step: float = 0.4, per_group: int = 2) -> Recipe:
    return Recipe(
        name=f"behind-{layers}",
        predict={"id": "replay/1", "layers": layers, "layers_per_group": per_group, "rank": 24},
        transform={"id": "klt/1", "layers_per_group": per_group, "coefficients": 100, "first_layer": layers + 1},
        quantize={**QUANTIZE, "step": step},
        symbols={"id": "adaptive/1"},
        block=16,
        window=Window(2, 6),
    )


@cache
def model() -> Any:
    return models.new_llama(num_hidden_layers=LAYERS)


@cache
def calibration() -> Calibration:
    samples = []
    for seed in range(6):
        ids = models.prompt(WINDOW, seed)
        held = take_cache(models.prefill(model(), ids))
        samples.append(Sample(np.array(ids, np.int64), "toy", partial(_same, held)))
    geometry = samples[0].load().geometry
    return Calibration(
        identity_of_model(model()),
        geometry,
        samples,
        model=model(),
        replayer=partial(_replayer, geometry=geometry),
    )


def _same(held: KVCache) -> KVCache:
    return held


def _replayer(layers: int, *, geometry: Any) -> Replayer:
    return Replayer(model(), layers, geometry)


@cache
def profile(layers: int = 2) -> Profile:
    return fit_profile(recipe(layers), calibration())


@cache
def text() -> tuple[list[int], KVCache]:
    ids = models.prompt(TOKENS, 50)
    return ids, take_cache(models.prefill(model(), ids))


def saved(path: Path, chosen: Recipe | None = None, steps: tuple[int, ...] = (TOKENS,)) -> Pairs:
    """What an archive restores to that was saved with the first of `steps` tokens and appended to up to the others."""
    chosen = chosen or recipe()
    known = profile(int((chosen.predict or {})["layers"]))
    ids, held = text()
    first, *later = steps
    kvcellar.save(path, held.tokens(0, first), tokens=ids[:first], model=model(), recipe=chosen, profile=known)
    with kvcellar.open(path, model=model(), profile=known, mode="a") as archive:
        for stop in later:
            archive.append(held.tokens(0, stop), ids[:stop])
    with kvcellar.open(path, model=model(), profile=known) as archive:
        return models.pairs(archive.restore().cache)


def lost(restored: Pairs, layers: range, rows: slice = slice(None)) -> float:
    """Share of the energy of keys and values that a restore lost, in some layers and tokens."""
    error = energy = 0.0
    for i in layers:
        for x, y in zip((text()[1].layers[i].keys, text()[1].layers[i].values), restored[i], strict=True):
            error += float((x - y[0])[:, rows].square().sum())
            energy += float(x[:, rows].square().sum())
    return error / energy


# The replay


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_replay_gives_what_a_whole_forward_caches(layers: int) -> None:
    ids, held = text()
    told = Replayer(model(), layers, held.geometry)(np.array(ids))
    assert len(told.layers) == layers + 1
    for known, kv in zip(told.layers, held.layers, strict=False):
        torch.testing.assert_close(known.keys, kv.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(known.values, kv.values, rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        states = model()(torch.tensor([ids]), output_hidden_states=True).hidden_states[layers][0]
    torch.testing.assert_close(told.hidden, states, rtol=1e-5, atol=1e-5)


def test_a_replay_runs_no_deeper_layer_and_leaves_the_model_as_it_was() -> None:
    ids, held = text()
    own, ran = models.new_llama(num_hidden_layers=LAYERS), []
    for i, layer in enumerate(own.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, i=i: ran.append(i))
    before = models.generate(own, ids[:8])
    hooks = [len(layer._forward_pre_hooks) for layer in own.model.layers]
    ran.clear()
    Replayer(own, 2, held.geometry)(np.array(ids))
    assert ran == [0, 1]
    assert [len(layer._forward_pre_hooks) for layer in own.model.layers] == hooks
    assert models.generate(own, ids[:8]) == before


def test_a_long_sequence_is_replayed_in_chunks() -> None:
    ids = np.tile(np.array(text()[0]), -(-(CHUNK + 40) // TOKENS))[: CHUNK + 40]
    own = models.new_llama(num_hidden_layers=3, max_position_embeddings=2048)
    geometry = take_cache(models.prefill(own, ids[:4].tolist())).geometry
    told, whole = Replayer(own, 1, geometry)(ids), take_cache(models.prefill(own, ids.tolist()))
    torch.testing.assert_close(told.layers[1].values, whole.layers[1].values, rtol=1e-3, atol=1e-4)


def test_a_prefix_of_what_was_replayed_is_not_run_again() -> None:
    ids, held = np.array(text()[0]), text()[1]
    own = models.new_llama(num_hidden_layers=LAYERS)
    replayer, ran = Replayer(own, 2, held.geometry), []
    own.model.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
    whole = replayer(ids)
    part = replayer(ids[:20])
    assert len(ran) == 1
    assert torch.equal(part.hidden, whole.hidden[:20])
    replayer(ids[::-1].copy())
    assert len(ran) == 2


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (lambda: models.new_llama(num_hidden_layers=3), UnsupportedCache),
        (lambda: models.new_llama(num_hidden_layers=LAYERS, num_key_value_heads=4), UnsupportedCache),
        (lambda: torch.nn.Linear(2, 2), UnsupportedCache),
    ],
)
def test_a_model_of_another_shape_is_refused(other: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Replayer(other(), 2, text()[1].geometry)(np.array(text()[0]))


@pytest.mark.parametrize("ids", [[1, -1], [models.VOCABULARY], [1 << 40]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidInput, match="the model knows"):
        Replayer(model(), 2, text()[1].geometry)(np.array(ids))


# The recipe


def test_replayed_layers_take_no_bytes_and_come_back_as_computed(tmp_path: Path) -> None:
    restored = saved(tmp_path / "a.kvc")
    assert lost(restored, range(3)) < 1e-9
    assert 0 < lost(restored, range(3, 5), slice(2, -6)) < 0.8
    assert lost(restored, range(3, 5), slice(-6, None)) < lost(restored, range(3, 5), slice(2, -6)) / 3
    store, name = LocalStore.at(tmp_path / "a.kvc")
    with ArchiveReader(store.open_reader(name)) as reader:
        assert {len(block.head.parts) for block in reader.blocks(0, TOKENS)} == {1}
        assert reader.manifest.recipe.predict == recipe().predict


def test_more_replayed_layers_take_fewer_bytes(tmp_path: Path) -> None:
    sizes = []
    for layers in (1, 2, 3):
        saved(tmp_path / "a.kvc", recipe(layers))
        sizes.append(coarse_bytes(tmp_path / "a.kvc", profile(layers))[0])
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < 0.75 * sizes[0]


def test_deeper_layers_are_foreseen_from_the_state_of_their_own_token() -> None:
    ids, held = np.array(text()[0]), text()[1]
    told = Replayer(model(), 2, held.geometry)(ids)
    others = Replayed(told.hidden.roll(1, 0), tuple(LayerKV(kv.keys, kv.values.roll(1, 1)) for kv in told.layers))
    pipeline = Pipeline(recipe(step=1e6), held.geometry, profile())
    missed = []
    for each in (told, others):
        tokens = Tokens.following(ids, 0)._replace(replayed=each)
        _, back = pipeline.quantize(held.layers, tokens, Grade.COARSE, restore=True)  # no residual at this step
        missed.append(sum(float((back[i].values - held.layers[i].values).square().sum()) for i in (3, 4)))
    values = [held.layers[i].values for i in (3, 4)]
    spread = sum(float((v - v.mean(dim=1, keepdim=True)).square().sum()) for v in values)
    assert missed[0] < 0.92 * spread
    assert missed[0] < 0.92 * missed[1]


@pytest.mark.parametrize("steps", [(1, 75), (30, 31, 32, 50, 75), (*range(10, 75, 7), 75)])
def test_an_archive_that_grew_restores_as_one_saved_at_once(tmp_path: Path, steps: tuple[int, ...]) -> None:
    at_once, grown = saved(tmp_path / "bulk.kvc"), saved(tmp_path / "grown.kvc", steps=steps)
    for one, other in zip(at_once, grown, strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
    with kvcellar.open(tmp_path / "grown.kvc", model=model(), profile=profile(), mode="a") as archive:
        archive.compact()
        assert archive.info().file_bytes == pytest.approx((tmp_path / "bulk.kvc").stat().st_size, rel=0.02)
        after = [archive.read(i, 0, TOKENS) for i in range(LAYERS)]
    for (keys, values), (k, v) in zip(at_once, after, strict=True):
        torch.testing.assert_close(keys[0], k, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(values[0], v, rtol=1e-3, atol=1e-3)


def test_a_restored_cache_goes_on_and_is_appended_to(tmp_path: Path) -> None:
    ids, held = text()
    saved(tmp_path / "a.kvc", steps=(50,))
    with kvcellar.open(tmp_path / "a.kvc", model=model(), profile=profile(), mode="a") as archive:
        grown = archive.restore().cache
        models.logits(model(), grown, ids[50:])
        archive.append(grown, ids)  # deeper layers read a lossy cache; those that are replayed do not
        restored = models.pairs(archive.restore().cache)
    assert lost(restored, range(3)) < 1e-9
    assert len(held) == restored[0][0].shape[2]


def test_parts_are_restored_alone(tmp_path: Path) -> None:
    whole = saved(tmp_path / "a.kvc")
    with kvcellar.open(tmp_path / "a.kvc", model=model(), profile=profile()) as archive:
        for layer in range(LAYERS):
            for x, y in zip(archive.read(layer, 20, 40), whole[layer], strict=True):
                torch.testing.assert_close(x, y[0][:, 20:40], rtol=1e-4, atol=1e-4)
        some: Any = archive.restore(positions=[3, 40, 41]).cache
        for x, y in zip(models.pairs(some)[4], whole[4], strict=True):
            torch.testing.assert_close(x, y[:, :, [3, 40, 41]], rtol=1e-4, atol=1e-4)
        only: Any = archive.restore(layers=[1]).cache
        torch.testing.assert_close(only.layers[1].keys, whole[1][0], rtol=1e-4, atol=1e-4)


def test_one_machine_gives_one_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        saved(tmp_path / f"{name}.kvc")
    assert (tmp_path / "a.kvc").read_bytes() == (tmp_path / "b.kvc").read_bytes()


def test_noise_in_the_replay_moves_restored_values_by_no_more_than_itself(tmp_path: Path) -> None:
    """Rule D3: another kernel or thread count changes last bits of a state, and no symbol is read by them."""
    ids, held = np.array(text()[0]), text()[1]
    told = Replayer(model(), 2, held.geometry)(ids)
    generator = torch.Generator().manual_seed(0)
    ulp = torch.finfo(torch.float32).eps

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 4 * ulp * (2 * torch.rand(x.shape, generator=generator) - 1))

    other = Replayed(noisy(told.hidden), tuple(LayerKV(noisy(kv.keys), noisy(kv.values)) for kv in told.layers))
    pipeline = Pipeline(recipe(), held.geometry, profile())
    tokens = [Tokens.following(ids, 0)._replace(replayed=each) for each in (told, other)]
    parts = pipeline.encode(held, tokens[0])
    backs = []
    for each in tokens:
        out = [LayerKV(torch.empty_like(kv.keys), torch.empty_like(kv.values)) for kv in held.layers]
        pipeline.decode([0], [[memoryview(part) for part in parts]], [each], dict(enumerate(out)))
        backs.append(out)
    for i, (one, two) in enumerate(zip(*backs, strict=True)):
        for x, y in ((one.keys, two.keys), (one.values, two.values)):
            assert float((x - y).abs().max()) < 1e-3 * STEP * float(x.std()), f"layer {i}"
    same = pipeline.encode(held, tokens[1])
    unlike = sum(a != b for part, again in zip(parts, same, strict=True) for a, b in zip(part, again, strict=False))
    assert unlike <= 0.02 * sum(map(len, parts))


def test_a_bfloat16_cache_comes_back_in_bfloat16(tmp_path: Path) -> None:
    own = models.new_llama(num_hidden_layers=LAYERS, dtype=torch.bfloat16)
    ids = text()[0]
    held = take_cache(models.prefill(own, ids))
    samples = [Sample(np.array(ids, np.int64), "toy", lambda: held)]
    known = Calibration(
        identity_of_model(own),
        held.geometry,
        samples,
        model=models.new_llama(num_hidden_layers=LAYERS),
        replayer=lambda layers: Replayer(own, layers, held.geometry),
    )
    fitted = fit_profile(recipe(), known)
    path = tmp_path / "a.kvc"
    kvcellar.save(path, held, tokens=ids, model=own, recipe=recipe(), profile=fitted)
    with kvcellar.open(path, model=own, profile=fitted) as archive:
        restored = archive.restore().cache
    assert models.same_bits(models.pairs(restored)[:3], [(kv.keys[None], kv.values[None]) for kv in held.layers[:3]])


# What is refused


def test_without_the_model_nothing_is_restored_and_the_error_says_what_is_needed(tmp_path: Path) -> None:
    saved(tmp_path / "a.kvc")
    identity = identity_of_model(model())
    with kvcellar.open(tmp_path / "a.kvc", identity=identity, profile=profile()) as archive:
        assert archive.tokens.tolist() == text()[0]
        assert archive.verify().ok
        for call in (archive.restore, lambda: archive.read(0, 0, 3), lambda: archive.read(4, 0, 3)):
            with pytest.raises(ModelMissing, match=r"2 decoder layers .* replay_with="):
                call()
    with kvcellar.open(tmp_path / "a.kvc", identity=identity, replay_with=model(), profile=profile()) as archive:
        assert archive.restore().matched == TOKENS
    with pytest.raises(ModelMissing):
        kvcellar.save(
            tmp_path / "b.kvc", text()[1], tokens=text()[0], identity=identity, recipe=recipe(), profile=profile()
        )
    assert not (tmp_path / "b.kvc").exists()
    with pytest.raises(ModelMissing):
        recompress(tmp_path / "a.kvc", tmp_path / "b.kvc", recipe="exact", source_profile=profile())
    assert not (tmp_path / "b.kvc").exists()


def test_recompressing_to_and_from_it_runs_the_model(tmp_path: Path) -> None:
    ids, held = text()
    a, b, c = (tmp_path / f"{name}.kvc" for name in "abc")
    kvcellar.save(a, held, tokens=ids, model=model(), recipe="exact")
    with pytest.raises(ModelMissing, match="2 decoder layers"):
        recompress(a, b, recipe=recipe(), profile=profile())
    assert not b.exists()
    made = recompress(a, b, recipe=recipe(), profile=profile(), replay_with=model())
    assert made.lost_to == (recipe().name,)
    expected = saved(c)
    assert b.read_bytes() == c.read_bytes()
    recompress(b, a, recipe="exact", source_profile=profile(), replay_with=model())
    with kvcellar.open(a, model=model()) as archive:
        assert models.same_bits(models.pairs(archive.restore().cache), expected)
    other = models.new_llama(1, num_hidden_layers=LAYERS)
    with pytest.raises(UnsupportedCache, match="not this model's own"):
        recompress(a, b, recipe=recipe(), profile=profile(), replay_with=other)
    assert b.read_bytes() == c.read_bytes()


def test_a_grown_one_is_compacted_by_recompressing(tmp_path: Path) -> None:
    a, b, c = (tmp_path / f"{name}.kvc" for name in "abc")
    saved(a, steps=(7, 30, TOKENS))
    with pytest.raises(ModelMissing):
        recompress(a, b, recipe=recipe(), profile=profile())
    made = recompress(a, b, recipe=recipe(), profile=profile(), replay_with=model())
    assert made.copied
    saved(c)
    assert b.read_bytes() == c.read_bytes()


def test_another_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a.kvc")
    other = models.new_llama(1, num_hidden_layers=LAYERS)
    with pytest.raises(IdentityMismatch):
        kvcellar.open(tmp_path / "a.kvc", model=other, profile=profile())


@pytest.mark.parametrize("edit", ["layer", "token", "nan", "shifted"])
def test_a_cache_that_is_not_the_models_own_is_refused(tmp_path: Path, edit: str) -> None:
    ids, held = text()
    layers = [LayerKV(kv.keys.clone(), kv.values.clone()) for kv in held.layers]
    if edit == "layer":
        layers[2].values.mul_(1.05)
    elif edit == "token":
        layers[1].keys[:, 40] = layers[1].keys[:, 41]
    elif edit == "nan":
        layers[0].values[0, 3, 1] = float("nan")
    else:
        ids = [*ids[1:], 5]
    with pytest.raises(UnsupportedCache, match="model's replay computes"):
        kvcellar.save(
            tmp_path / "a.kvc", KVCache(tuple(layers)), tokens=ids, model=model(), recipe=recipe(), profile=profile()
        )
    assert not (tmp_path / "a.kvc").exists()


def test_an_appended_cache_that_is_not_the_models_own_leaves_the_archive_as_it_was(tmp_path: Path) -> None:
    ids, held = text()
    saved(tmp_path / "a.kvc", steps=(50,))
    before = (tmp_path / "a.kvc").read_bytes()
    layers = tuple(LayerKV(kv.keys * 1.2, kv.values) for kv in held.layers)
    with kvcellar.open(tmp_path / "a.kvc", model=model(), profile=profile(), mode="a") as archive:
        with pytest.raises(UnsupportedCache, match="layer 0: the keys"):
            archive.append(KVCache(layers), ids)
        assert len(archive) == 50
    with kvcellar.open(tmp_path / "a.kvc", model=model(), profile=profile()) as archive:
        assert archive.restore().matched == 50
    assert (tmp_path / "a.kvc").read_bytes()[: len(before)] == before


def test_positions_that_jump_are_refused(tmp_path: Path) -> None:
    ids, held = text()
    with pytest.raises(InvalidInput, match="one by one"):
        kvcellar.save(
            tmp_path / "a.kvc", held, tokens=ids, model=model(), recipe=recipe(), profile=profile(), next_position=90
        )


def test_damage_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path / "a.kvc")
    data = (tmp_path / "a.kvc").read_bytes()
    store, name = LocalStore.at(tmp_path / "a.kvc")
    with ArchiveReader(store.open_reader(name)) as reader:
        places = [block.body_offset + block.head.body_length // 2 for block in reader.blocks(0, TOKENS)]
    for place in places:
        (tmp_path / "b.kvc").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with (
            kvcellar.open(tmp_path / "b.kvc", model=model(), profile=profile()) as archive,
            pytest.raises(DamagedArchive),
        ):
            archive.restore()


@pytest.mark.parametrize("settings", [{"layers": 0}, {"layers": 1.5}, {"layers": 2, "rank": 0}, {"layers": True}, {}])
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecipe):
        Pipeline(replace(recipe(), predict={"id": "replay/1", **settings}), text()[1].geometry, profile())


@pytest.mark.parametrize("first", [0, 2, 4, True, -1])
def test_stages_that_begin_at_different_layers_are_refused(first: int) -> None:
    transform = {**(recipe().transform or {}), "first_layer": first}
    with pytest.raises((InvalidRecipe, ProfileMismatch)):
        Pipeline(replace(recipe(), transform=transform), text()[1].geometry, profile())


def test_a_replay_of_all_layers_leaves_nothing_to_store() -> None:
    with pytest.raises(InvalidInput, match="leave none"):
        fit_profile(recipe(4), calibration())


def test_a_profile_for_another_width_is_refused() -> None:
    tensors = {k: v for k, v in profile().tensors.items() if k != "predict.down.0"}
    with pytest.raises(ProfileMismatch, match=r"predict\.down\.0"):
        Pipeline(recipe(), text()[1].geometry, Profile(tensors, {}))
    pipeline = Pipeline(recipe(), text()[1].geometry, profile())
    told = Replayer(model(), 2, text()[1].geometry)(np.array(text()[0]))
    narrow = Replayed(told.hidden[:, :10], told.layers)
    tokens = Tokens.following(np.array(text()[0]), 0)
    with pytest.raises(ProfileMismatch, match="64 numbers, not 10"):
        pipeline.encode(text()[1], tokens._replace(replayed=narrow))
    with pytest.raises(InvalidInput, match="a replay of 2 layers"):
        pipeline.encode(text()[1], tokens._replace(replayed=Replayed(told.hidden, told.layers[:2])))


def test_the_named_recipes() -> None:
    five = find_recipe("replay-5")
    assert five == replaying(5) == Recipe.from_json(five.to_json())
    assert five.predict == {"id": "replay/1", "layers": 5, "layers_per_group": 10}
    assert replace(find_recipe("replay-0"), name="cellar") == CELLAR[0]
    for name in ("replay-", "replay-x", "replay-12345", "replay--1"):
        with pytest.raises(InvalidRecipe, match="unknown recipe"):
            find_recipe(name)
