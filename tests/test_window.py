"""The fine window: which tokens are fine, and that an archive is the same however it grew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcellar
from kvcellar.archive.block import BlockHead
from kvcellar.archive.reader import ArchiveReader
from kvcellar.decode import stored_symbols
from kvcellar.errors import DamagedArchive, InvalidRecipe, UnsupportedCache
from kvcellar.pipeline import Pipeline
from kvcellar.recipe import Window
from kvcellar.store.local import LocalStore
from models import same_bits
from toystages import FINER, STEP, TRANSFORM, lossy

SINKS, RECENT, BLOCK = 2, 5, 8
WINDOW = Window(sinks=SINKS, recent=RECENT)
RECIPES = {
    "predicted": lossy(window=WINDOW, block=BLOCK),
    "transformed": lossy(window=WINDOW, block=BLOCK, transform=TRANSFORM),
    "from tokens": lossy(window=WINDOW, block=BLOCK, predict={"id": "test-earlier/1"}),
    "alone": lossy(window=WINDOW, block=BLOCK, predict=None),
    "no window": lossy(block=BLOCK),
}
LAYERS = 5


def _save(path: Path, cache: list, ids: list[int], recipe: kvcellar.Recipe, cuts: list[int]) -> None:
    """Save the tokens before the first cut, append up to the others."""

    def upto(n: int) -> list:
        return [(k[:, :, :n], v[:, :, :n]) for k, v in cache]

    kvcellar.save(path, upto(cuts[0]), tokens=ids[: cuts[0]], identity="m", recipe=recipe)
    with kvcellar.open(path, identity="m", mode="a") as archive:
        for cut in cuts[1:]:
            archive.append(upto(cut), ids[:cut])


def _restored(path: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with kvcellar.open(path, identity="m") as archive:
        return [archive.read(layer, 0, len(archive)) for layer in range(LAYERS)]


def _errors(path: Path, cache: list) -> torch.Tensor:
    """Largest error of each token."""
    pairs = [
        (x[0], y) for pair, layer in zip(cache, _restored(path), strict=True) for x, y in zip(pair, layer, strict=True)
    ]
    return torch.stack([(x.float() - y.float()).abs().amax(dim=(0, 2)) for x, y in pairs]).amax(dim=0)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "no window"])
@pytest.mark.parametrize("cuts", [[40], [1, 40], [6, 7, 8, 9, 39, 40], [*range(1, 41)]])
def test_sinks_and_recent_tokens_are_fine_and_no_others(
    make_cache: Callable, make_ids: Callable, tmp_path: Path, name: str, cuts: list[int]
) -> None:
    cache, ids = make_cache(layers=LAYERS, tokens=40), make_ids(40)
    _save(tmp_path / "a.kvc", cache, ids, RECIPES[name], cuts)
    errors = _errors(tmp_path / "a.kvc", cache)
    fine = np.r_[:SINKS, 40 - RECENT : 40]
    assert errors[fine].max() <= STEP / FINER / 2 * (1 + 1e-3)
    coarse = np.setdiff1d(np.arange(40), fine)
    assert errors[coarse].min() > 2 * STEP / FINER
    assert errors[coarse].max() <= (STEP + STEP / FINER) / 2 * (1 + 1e-3)


@settings(deadline=None, max_examples=25)
@given(data=st.data(), name=st.sampled_from(sorted(RECIPES)))
def test_the_same_values_however_it_grew_and_the_same_bytes_once_compacted(
    tmp_path_factory: pytest.TempPathFactory, make_cache: Callable, make_ids: Callable, data: Any, name: str
) -> None:
    total = data.draw(st.integers(1, 45))
    cuts = sorted(data.draw(st.sets(st.integers(1, total), max_size=12)) | {total})
    cache, ids, folder = make_cache(layers=LAYERS, tokens=total), make_ids(total), tmp_path_factory.mktemp("w")
    _save(folder / "bulk.kvc", cache, ids, RECIPES[name], [total])
    _save(folder / "grown.kvc", cache, ids, RECIPES[name], cuts)
    assert same_bits(_restored(folder / "bulk.kvc"), _restored(folder / "grown.kvc"))
    with kvcellar.open(folder / "grown.kvc", identity="m", mode="a") as archive:
        archive.compact()
    assert (folder / "grown.kvc").read_bytes() == (folder / "bulk.kvc").read_bytes()


def test_what_is_coarse_is_never_quantized_again(make_cache: Callable, make_ids: Callable, tmp_path: Path) -> None:
    """float16 rounds what is restored, so that quantizing it anew would move symbols now and then."""
    cache, ids = make_cache(layers=LAYERS, tokens=60, dtype=torch.float16), make_ids(60)
    recipe = lossy(window=WINDOW, block=BLOCK, predict=None, quantize={"id": "test-coarse/1", "step": 0.3})
    _save(tmp_path / "a.kvc", cache, ids, recipe, [*range(20, 60, 3), 60])
    with kvcellar.open(tmp_path / "a.kvc", identity="m", mode="a") as archive:
        before = [archive.read(i, 0, 60) for i in range(LAYERS)]
        for _ in range(5):
            archive.compact()
        assert same_bits(before, [archive.read(i, 0, 60) for i in range(LAYERS)])


def test_blocks_say_which_tokens_are_coarse(make_cache: Callable, make_ids: Callable, tmp_path: Path) -> None:
    cache, ids = make_cache(layers=LAYERS, tokens=30), make_ids(30)
    _save(tmp_path / "a.kvc", cache, ids, RECIPES["alone"], [30])
    store, name = LocalStore.at(tmp_path / "a.kvc")
    with ArchiveReader(store.open_reader(name)) as reader:
        heads = [block.head for block in reader.blocks(0, 30)]
        assert [(head.count, head.coarse_tokens, head.sealed) for head in heads] == [
            (8, range(2, 8), True),
            (8, range(8), True),
            (8, range(8), True),
            (6, range(1), False),
        ]
        symbols = stored_symbols(Pipeline(RECIPES["alone"], reader.manifest.geometry), reader, 0, 30)
        assert symbols.is_coarse.sum() == 30 - SINKS - RECENT
    packed = heads[0].pack()
    assert BlockHead.unpack(packed, "head").coarse_tokens == range(2, 8)
    assert len(replace(heads[0], coarse=None).pack()) == len(packed) - 8


@pytest.mark.parametrize("span", [range(3, 2), range(9), range(8)])
def test_a_head_with_an_impossible_span_is_damaged(
    make_cache: Callable, make_ids: Callable, tmp_path: Path, span: range
) -> None:
    _save(tmp_path / "a.kvc", make_cache(layers=1, tokens=30), make_ids(30), RECIPES["alone"], [30])
    store, name = LocalStore.at(tmp_path / "a.kvc")
    with ArchiveReader(store.open_reader(name)) as reader:
        head = reader.block(0).head
    packed = head.pack()
    right = b"\x02\0\0\0\x08\0\0\0"
    assert packed.count(right) == 1
    forged = packed.replace(right, span.start.to_bytes(4, "little") + span.stop.to_bytes(4, "little"))
    with pytest.raises(DamagedArchive, match="coarse"):
        BlockHead.unpack(forged, "head")


def test_reading_a_few_tokens_equals_reading_all(make_cache: Callable, make_ids: Callable, tmp_path: Path) -> None:
    cache, ids = make_cache(layers=LAYERS, tokens=40), make_ids(40)
    _save(tmp_path / "a.kvc", cache, ids, RECIPES["predicted"], [9, 20, 23, 31, 40])
    whole = _restored(tmp_path / "a.kvc")
    with kvcellar.open(tmp_path / "a.kvc", identity="m") as archive:
        for layer, start, stop in ((0, 0, 1), (4, 1, 3), (2, 30, 40), (3, 33, 36), (1, 39, 40)):
            part = archive.read(layer, start, stop)
            assert same_bits([part], [tuple(side[:, start:stop] for side in whole[layer])])


def test_numbers_that_are_not_finite_are_refused_with_their_place(
    make_cache: Callable, make_ids: Callable, tmp_path: Path
) -> None:
    cache = make_cache(layers=2, tokens=20)
    cache[1][1][0, 0, 13, 2] = float("nan")
    with pytest.raises(UnsupportedCache, match="layer 1 values at position 13 are not finite"):
        kvcellar.save(tmp_path / "a.kvc", cache, tokens=make_ids(20), identity="m", recipe=RECIPES["alone"])
    assert not list(tmp_path.iterdir())


def test_half_precision_stays_finite(make_cache: Callable, make_ids: Callable, tmp_path: Path) -> None:
    cache = make_cache(layers=1, tokens=20, dtype=torch.float16)
    cache[0][0][0, 0, 3, :] = 65504.0  # rounding to multiples of 1,000 goes to 66,000
    recipe = lossy(predict=None, block=BLOCK, quantize={"id": "test-coarse/1", "step": 1000.0})
    kvcellar.save(tmp_path / "a.kvc", cache, tokens=make_ids(20), identity="m", recipe=recipe)
    with kvcellar.open(tmp_path / "a.kvc", identity="m") as archive:
        assert archive.read(0, 3, 4)[0][0].eq(65504).all()


def test_a_window_too_large_for_a_block_head() -> None:
    with pytest.raises(InvalidRecipe, match="too large"):
        lossy(window=Window(sinks=4, recent=65530), block=256)
