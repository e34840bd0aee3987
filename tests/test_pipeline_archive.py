"""Recipes with a predictor, a transform and a quantizer on the whole way: save, open, read, append, restore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import kvcellar
from kvcellar import stages
from kvcellar.archive.reader import ArchiveReader
from kvcellar.errors import InvalidRecipe
from models import pairs, same_bits
from toystages import STEP, TRANSFORM, exact, lossy

LAYERS, BLOCK = 5, 8
RECIPES = {
    "predicted": lossy(block=BLOCK),
    "transformed": lossy(transform=TRANSFORM, block=BLOCK),
    "rounded": lossy(predict=None, block=BLOCK),
    "exact": exact(block=BLOCK),
}


@pytest.fixture
def read_groups(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The layer groups whose parts were read from a file."""
    seen: set[int] = set()
    original = ArchiveReader.read_parts

    def watched(reader: ArchiveReader, block: object, groups: Sequence[int], buffer: object = None) -> object:
        seen.update(groups)
        return original(reader, block, groups, buffer)

    monkeypatch.setattr(ArchiveReader, "read_parts", watched)
    return seen


def _worst(left: list, right: list) -> float:
    sides = [(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)]
    return max((a.double() - b.double()).abs().max().item() for a, b in sides)


@pytest.mark.parametrize("name", RECIPES)
def test_saved_and_restored(make_cache: Callable, saved: Callable, name: str) -> None:
    source, recipe = make_cache(layers=LAYERS), RECIPES[name]
    path = saved(source, recipe=recipe)
    with kvcellar.open(path, identity="m") as stored:
        assert stored.manifest.recipe == recipe
        assert stored.info().recipe_json == recipe.to_json()
        assert stored.verify().ok
        restored = pairs(stored.restore().cache)
    if name == "exact":
        assert same_bits(restored, source)
    else:
        bound = STEP / (4 if name == "transformed" else 2)
        assert bound / 2 < _worst(restored, source) <= bound * (1 + 1e-4)


@pytest.mark.parametrize("name", RECIPES)
def test_any_part_equals_the_same_part_of_the_whole(make_cache: Callable, saved: Callable, name: str) -> None:
    path = saved(make_cache(layers=LAYERS, dtype=torch.bfloat16), recipe=RECIPES[name])
    rng = np.random.default_rng(1)
    with kvcellar.open(path, identity="m") as stored:
        whole = pairs(stored.restore().cache)
        for start, stop in [(0, 40), (8, 16), *np.sort(rng.integers(0, 41, (12, 2)), axis=1).tolist()]:
            layer = int(rng.integers(LAYERS))
            part = stored.read(layer, start, stop)
            assert same_bits([part], [tuple(side[0, :, start:stop] for side in whole[layer])]), (layer, start, stop)
        chosen = stored.restore(layers=[1, 4], positions=[3, 8, 9, 39]).cache.layers
        for layer in (1, 4):
            cut = tuple(side[:, :, [3, 8, 9, 39]] for side in whole[layer])
            assert same_bits([(chosen[layer].keys, chosen[layer].values)], [cut])


@pytest.mark.parametrize(
    ("name", "layer", "groups"),
    [
        ("predicted", 4, {0, 1, 2}),
        ("predicted", 2, {0, 1}),
        ("predicted", 1, {0}),
        ("exact", 4, {0, 1, 2}),
        ("rounded", 4, {4}),
    ],
)
def test_reading_a_layer_reads_the_groups_it_needs(
    make_cache: Callable, saved: Callable, read_groups: set[int], name: str, layer: int, groups: set[int]
) -> None:
    path = saved(make_cache(layers=LAYERS), recipe=RECIPES[name])
    with kvcellar.open(path) as stored:
        read_groups.clear()
        stored.read(layer, 10, 20)
    assert read_groups == groups


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("lengths", [[3, 5, 8, 9, 23, 40], [8, 16, 40], [20, 21, 24, 37]])
def test_appended_equals_saved_at_once(
    make_cache: Callable, make_ids: Callable, saved: Callable, name: str, lengths: list[int]
) -> None:
    def cut(tokens: int) -> list:
        return [(keys[:, :, :tokens], values[:, :, :tokens]) for keys, values in make_cache(layers=LAYERS)]

    bulk = saved(cut(lengths[-1]), name="bulk.kvc", recipe=RECIPES[name])
    path = saved(cut(lengths[0]), recipe=RECIPES[name])
    with kvcellar.open(path, identity="m", mode="a") as stored:
        before = pairs(stored.restore().cache)
        for tokens in lengths[1:]:
            stored.append(cut(tokens), make_ids(tokens))
            after = pairs(stored.restore().cache)
            held = before[0][0].shape[2]
            assert same_bits([(k[:, :, :held], v[:, :, :held]) for k, v in after], before)  # stored is stored
            before = after
        stored.compact()
        assert same_bits(pairs(stored.restore().cache), before)
    assert path.read_bytes() == bulk.read_bytes()


def test_positions_of_later_blocks_reach_the_predictor(
    make_cache: Callable, make_ids: Callable, saved: Callable
) -> None:
    recipe = lossy(predict={"id": "test-tokens/1"}, block=BLOCK)
    source = make_cache()
    path = saved([(k[:, :, :13], v[:, :, :13]) for k, v in source], recipe=recipe)
    with kvcellar.open(path, identity="m", mode="a") as stored:
        stored.append(source, make_ids(40))
        restored = pairs(stored.restore().cache)
    assert _worst(restored, source) <= STEP / 2 * (1 + 1e-3)


def test_a_file_with_unknown_stages_says_which(
    make_cache: Callable, saved: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(make_cache(layers=LAYERS), recipe=RECIPES["predicted"])
    monkeypatch.delitem(stages._STAGES, ("predict", "test-shallower/1"))
    with kvcellar.open(path, identity="m") as stored:
        assert stored.info().tokens == 40
        assert stored.verify().ok
        with pytest.raises(InvalidRecipe, match="unknown predict stage 'test-shallower/1'"):
            stored.restore()
        with pytest.raises(InvalidRecipe, match="unknown predict stage 'test-shallower/1'"):
            stored.read(0, 0, 1)


def test_a_recipe_goes_in_as_json_too(make_cache: Callable, saved: Callable, tmp_path: Path) -> None:
    source = make_cache(layers=LAYERS)
    as_object = saved(source, name="object.kvc", recipe=RECIPES["transformed"])
    as_json = saved(source, name="json.kvc", recipe=RECIPES["transformed"].to_json())
    assert as_object.read_bytes() == as_json.read_bytes()
    assert as_object.stat().st_size < saved(source, name="exact.kvc").stat().st_size / 2
