"""`recompress`: the same tokens under another recipe, through real files, from the file alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcellar
import models
import toystages
from kvcellar import Identity, tail
from kvcellar.cache import LayerKV
from kvcellar.decode import decode_blocks
from kvcellar.errors import ArchiveNotFound, InvalidInput, NotAnArchive, ProfileMissing, UnsupportedCache
from kvcellar.frontends.recompress import THEN, recompress
from kvcellar.recipe import EXACT, TURBO, Recipe, Window
from models import same_bits
from test_cellar import _profile, _recipe, _text

SMALL_EXACT = replace(EXACT, block=16, name="small-exact")
TOY = toystages.lossy(block=24, window=Window(2, 5))
TURBO_4, _, TURBO_2 = (replace(recipe, block=16, window=Window(2, 6)) for recipe in TURBO)
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _values(path: Path, **settings: Any) -> Pairs:
    with kvcellar.open(path, **settings) as archive:
        return [archive.read(i, 0, len(archive)) for i in range(len(archive.manifest.geometry))]


def _grown(path: Path, cache: Pairs, ids: Sequence[int], steps: Sequence[int], recipe: Recipe) -> Path:
    """An archive saved with the first of `steps` tokens and appended to up to each of the others."""
    for number, stop in enumerate(steps):
        part = [(k[:, :, :stop], v[:, :, :stop]) for k, v in cache]
        if not number:
            kvcellar.save(path, part, tokens=ids[:stop], identity="m", recipe=recipe)
            continue
        with kvcellar.open(path, identity="m", mode="a") as archive:
            archive.append(part, ids[:stop])
    return path


@pytest.mark.parametrize("steps", [[90], [1, 90], [30, 31, 32, 50, 90], [*range(10, 90, 7), 90]])
@pytest.mark.parametrize("recipe", [TOY, TURBO_4, replace(EXACT, block=7, name="sevens")], ids=lambda r: r.name)
def test_from_exact_it_is_the_file_that_save_would_have_made(
    make_cache: Callable, make_ids: Callable, tmp_path: Path, steps: list[int], recipe: Recipe
) -> None:
    cache, ids = make_cache(tokens=90, width=64), make_ids(90)
    source = _grown(tmp_path / "a.kvc", cache, ids, steps, SMALL_EXACT)
    kvcellar.save(tmp_path / "saved.kvc", cache, tokens=ids, identity="m", recipe=recipe)
    made = recompress(source, tmp_path / "b.kvc", recipe=recipe)
    assert (tmp_path / "b.kvc").read_bytes() == (tmp_path / "saved.kvc").read_bytes()
    assert made.lost_to == (() if recipe.quantize is None else (recipe.name,))
    assert (made.bytes_before, made.recipe_before) == (source.stat().st_size, "small-exact")
    assert made.info.file_bytes == (tmp_path / "b.kvc").stat().st_size
    assert not made.copied


def test_what_an_archive_says_of_its_tokens_stays(make_cache: Callable, tmp_path: Path) -> None:
    source, out, who = tmp_path / "a.kvc", tmp_path / "b.kvc", Identity("model", "ab" * 32, "a model, 1.5B")
    kvcellar.save(
        *(source, make_cache(tokens=40, width=64)),
        tokens=range(7, 47),
        identity=who,
        namespace="mine",
        positions=range(100, 140),
        next_position=500,
    )
    with pytest.raises(ArchiveNotFound):
        recompress(source, out, recipe=TURBO_4)
    assert not out.exists()
    recompress(source, out, recipe=TURBO_4, namespace="mine")
    with kvcellar.open(out, identity=who, namespace="mine") as archive:
        assert archive.tokens.tolist() == list(range(7, 47))
        assert archive.manifest.identity.label == "a model, 1.5B"
        assert archive._open().first_position == 100
        restored = archive.restore()
        assert (restored.matched, restored.next_position) == (40, 500)
        with pytest.raises(InvalidInput, match="positions in between"):
            archive.restore(positions=10)


def test_two_lossy_recipes_add_up_and_the_file_says_so(make_cache: Callable, saved: Callable, tmp_path: Path) -> None:
    cache = make_cache(tokens=90, width=64)
    source = saved(cache, recipe=TURBO_4)
    made = recompress(source, tmp_path / "b.kvc", recipe=TURBO_2)
    assert made.info.recipe == "turbo-4 → turbo-2"
    assert made.lost_to == ("turbo-4", "turbo-2")
    kept = [(k[None], v[None]) for k, v in _values(source)]
    kvcellar.save(tmp_path / "by-hand.kvc", kept, tokens=range(90), identity="m", recipe=TURBO_2)
    assert same_bits(_values(tmp_path / "b.kvc"), _values(tmp_path / "by-hand.kvc"))
    back = recompress(tmp_path / "b.kvc", tmp_path / "c.kvc", recipe="exact")
    assert (back.info.recipe, back.lost_to) == ("turbo-4 → turbo-2 → exact", ("turbo-4", "turbo-2"))
    assert same_bits(_values(tmp_path / "c.kvc"), _values(tmp_path / "b.kvc"))
    again = recompress(tmp_path / "c.kvc", tmp_path / "d.kvc", recipe=TURBO_4)
    assert again.info.recipe == "turbo-4 → turbo-2 → turbo-4"
    with kvcellar.open(tmp_path / "d.kvc", identity="m", mode="a") as archive:  # it grows like any other
        longer = make_cache(tokens=95, width=64)
        archive.append([(k[:, :, 90:], v[:, :, 90:]) for k, v in longer], range(90, 95), start=90)
        assert archive.info().recipe == again.info.recipe


def test_a_history_too_long_for_the_name_loses_its_oldest_part(
    make_cache: Callable, saved: Callable, tmp_path: Path
) -> None:
    path = saved(make_cache(tokens=20, width=64), recipe=TURBO_4)
    for number in range(4):
        recompress(path, path, recipe=replace(TURBO_2, name=f"{number}" * 90, block=16 + number))
    with kvcellar.open(path) as archive:
        assert archive.manifest.recipe.name == THEN.join(["…", "2" * 90, "3" * 90])


@pytest.mark.parametrize("recipe", [TURBO_4, TOY, SMALL_EXACT], ids=lambda r: r.name)
def test_under_its_own_recipe_nothing_is_coded_again(
    make_cache: Callable, make_ids: Callable, tmp_path: Path, recipe: Recipe
) -> None:
    source = _grown(tmp_path / "a.kvc", make_cache(tokens=90, width=64), make_ids(90), [20, 21, 40, 90], recipe)
    made = recompress(source, tmp_path / "b.kvc", recipe=replace(recipe, name="called otherwise"))
    assert made.copied
    assert made.info.recipe == recipe.name
    assert made.info.commits == 1
    assert same_bits(_values(source), _values(tmp_path / "b.kvc"))


def test_it_may_replace_its_own_source(make_cache: Callable, saved: Callable, tmp_path: Path) -> None:
    path = saved(make_cache(tokens=90, width=64))
    expected = recompress(path, tmp_path / "b.kvc", recipe=TURBO_4)
    made = recompress(path, path, recipe=TURBO_4)
    assert path.read_bytes() == (tmp_path / "b.kvc").read_bytes()
    assert made.bytes_before == expected.bytes_before > made.info.file_bytes


def test_whatever_fails_leaves_what_was_there(make_cache: Callable, saved: Callable, tmp_path: Path) -> None:
    cache = make_cache(tokens=90, width=64)
    cache[2][1][0, 1, 80, 3] = torch.inf  # in the last block, when others are written already
    source, out = saved(cache), saved(make_cache(tokens=9), name="b.kvc")
    foreign = tmp_path / "notes.txt"
    foreign.write_text("not an archive")
    before = out.read_bytes()
    for target, recipe, error in ((out, TURBO_4, UnsupportedCache), (foreign, EXACT, NotAnArchive)):
        with pytest.raises(error):
            recompress(source, target, recipe=recipe)
    with pytest.raises(UnsupportedCache, match="not finite"):
        recompress(source, source, recipe=TURBO_4)
    with pytest.raises(NotAnArchive):
        recompress(foreign, out, recipe=TURBO_4)
    with pytest.raises(ArchiveNotFound):
        recompress(tmp_path / "none.kvc", out, recipe=TURBO_4)
    assert out.read_bytes() == before
    assert foreign.read_text() == "not an archive"
    assert same_bits(_values(source), [(k[0], v[0]) for k, v in cache])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.kvc", "b.kvc", "notes.txt"]


def test_sliding_layers_stay_and_refuse_a_lossy_recipe(tmp_path: Path) -> None:
    model, ids = models.mistral(12), models.prompt(50)
    source, out = tmp_path / "a.kvc", tmp_path / "b.kvc"
    kvcellar.save(source, models.prefill(model, ids[:30]), tokens=ids[:30], identity="m")
    with kvcellar.open(source, identity="m", mode="a") as archive:
        archive.append(models.prefill(model, ids), ids)
    with pytest.raises(UnsupportedCache, match="sliding"):
        recompress(source, out, recipe=TURBO_4)
    assert not out.exists()
    recompress(source, out, recipe=SMALL_EXACT)
    caches = []
    for path in (source, out):
        with kvcellar.open(path, identity="m") as archive:
            caches.append(archive.restore().cache)
    assert same_bits(*map(models.pairs, caches))
    following = [models.logits(model, cache, [5, 6, 7]) for cache in caches]
    assert torch.equal(*following)


def test_each_block_is_decoded_once_and_few_at_a_time(
    make_cache: Callable, saved: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[range] = []

    def counting(pipeline: Any, reader: Any, wanted: Mapping[int, Sequence[range]], replay: Any) -> dict[int, LayerKV]:
        asked.extend(span for span in wanted[0] if span)
        return decode_blocks(pipeline, reader, wanted, replay)

    monkeypatch.setattr(tail, "decode_blocks", counting)
    source = saved(make_cache(tokens=500), recipe=replace(EXACT, block=32))
    told: list[int] = []
    recompress(source, tmp_path / "b.kvc", recipe=replace(EXACT, block=16), progress=told.append)
    assert asked == [range(i, min(i + 32, 500)) for i in range(0, 500, 32)]
    assert told == [16] * 31 + [4]
    asked.clear()
    recompress(source, tmp_path / "b.kvc", recipe=replace(EXACT, block=64))
    assert asked == [range(i, min(i + 64, 500)) for i in range(0, 500, 64)]


def test_cellar_needs_its_profile_and_shares_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    ids, cache = _text()
    exact, coarse, finer = (tmp_path / name for name in ("a.kvc", "b.kvc", "c.kvc"))
    kvcellar.save(exact, cache, tokens=ids, identity="m")
    with pytest.raises(ProfileMissing):
        recompress(exact, coarse, recipe=_recipe())
    recompress(exact, coarse, recipe=_recipe(), profile=_profile(), embed_profile=True)
    kvcellar.save(finer, cache, tokens=ids, identity="m", recipe=_recipe(), profile=_profile(), embed_profile=True)
    assert coarse.read_bytes() == finer.read_bytes()
    made = recompress(
        coarse, finer, recipe=replace(_recipe(1.0), name="coarser")
    )  # no profile anywhere but in the file
    assert made.info.profile == _profile().id
    assert made.info.profile_bytes
    assert made.lost_to == (_recipe().name, "coarser")
    assert recompress(finer, finer, recipe=_recipe(1.0)).copied
    turbo = recompress(finer, tmp_path / "d.kvc", recipe="exact")
    assert (turbo.info.profile, turbo.info.profile_bytes) == (None, 0)
    assert same_bits(_values(finer), _values(tmp_path / "d.kvc"))
