"""The fitted split of residual stages: where they go, what entries are fitted to, codes, and what is refused.

A little over 300 lines, since all of it builds on one small metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch import Tensor

import kvcellar
from kvcellar import stages
from kvcellar.errors import InvalidInput, InvalidRecipe, ProfileMismatch
from kvcellar.metric import Metric, loss_metric
from kvcellar.profile import Profile
from kvcellar.quantize import rvqkernels, rvqsplit
from kvcellar.quantize.coefficients import flatten
from kvcellar.quantize.rvq import ResidualVQ
from kvcellar.recipe import Recipe, Window
from kvcellar.stages import Grade
from test_rvq import bound, calibration, error, plain, small_cache, through

METRIC: dict[int, list[float]] = {0: [9.0, 0.01, 0.01, 0.01, 0.0], 1: [0.01, 0.01, 0.01, 0.01, 0.01]}
"""Of each layer how dear errors of its two key and three value heads are."""


def metric_of(layer: int) -> Tensor:
    """Of a head only the first half of its numbers matters much."""
    costs = [[c] * (w // 2) + [c / 100] * (w // 2) for c, w in zip(METRIC[layer], [8, 8, 6, 6, 6], strict=True)]
    return torch.diag(torch.tensor([number for head in costs for number in head]))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """What rope/1 would fit on layers that turn nothing, with the metric above instead of a model's."""
    monkeypatch.setattr(rvqsplit, "loss_metric", lambda *_: Metric([metric_of(0), metric_of(1)], []))
    turns = {"inv_freq": np.zeros((2, 1), np.float32), "pairs": np.zeros(2, np.int32), "layout": np.zeros(2, np.int32)}
    return {f"transform.{name}": value for name, value in turns.items()}


SPLIT: dict[str, Any] = {"stages": 3, "entries": 16}


def rows_of(seed: int) -> Tensor:
    """Both layers of a cache, (T, C)."""
    return torch.cat([flatten([kv.keys, kv.values.float()]) for kv in small_cache(150, seed).layers], dim=1)


def test_stages_go_where_errors_are_dear(told: dict[str, np.ndarray]) -> None:
    made = calibration()
    tensors = ResidualVQ(**SPLIT).fit(made, told)
    counts = tensors["stages"]
    assert counts.dtype == np.uint8
    assert counts.sum() == 3 * 2 * 3, "three value heads in each of two layers"
    assert counts[0] == max(counts) > 4
    assert counts[4] == 0, "a head whose errors cost nothing"
    assert counts[5:].sum() >= 1
    for i, (keys, values) in enumerate((counts[5 * i : 5 * i + 2], counts[5 * i + 2 : 5 * i + 5]) for i in range(2)):
        assert tensors[f"key.{i}"].shape == (keys.sum(), 16, 8)
        assert tensors[f"value.{i}"].shape == (values.sum(), 16, 6)
        assert tensors[f"key.{i}.mean"].shape == (2, 8)
        assert tensors[f"value.{i}.root"].shape == (3, 6, 6)
    coder, both, x = bound(ResidualVQ(**SPLIT), made.geometry, tensors), range(2), rows_of(99)
    y = through(coder, x, both)
    assert error(x[:, :8], y[:, :8]) < error(x[:, 8:16], y[:, 8:16])
    assert torch.equal(y[:, 28:34], torch.from_numpy(tensors["value.0.mean"][2]).float().expand(150, 6))
    assert coder.layout(both, Grade.COARSE) == [(18, np.uint8)]


def test_the_split_costs_less_than_equal_stages(told: dict[str, np.ndarray]) -> None:
    made, both, x = calibration(), range(2), rows_of(99)
    f = torch.block_diag(metric_of(0), metric_of(1))
    fixed = ResidualVQ(entries=16, key_stages=3, value_stages=3)
    cost = []
    for coder, state in ((ResidualVQ(**SPLIT), told), (fixed, told)):
        lost = x - through(bound(coder, made.geometry, coder.fit(made, state)), x, both)
        cost.append(float(((lost @ f) * lost).sum()))
        assert coder.layout(both, Grade.COARSE)[0][0] <= (18 if coder.total else 30)
    assert cost[0] < 0.5 * cost[1], "with three fifths of the codes"


def test_entries_are_fitted_to_what_errors_cost(told: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(x: Tensor, which: slice) -> float:
        coder = ResidualVQ(stages=1, entries=16)
        coder = bound(coder, calibration().geometry, coder.fit(calibration(), told))
        return float((x - through(coder, x, range(2)))[:, which].square().sum())

    x = rows_of(99)
    found = [lost(x, slice(0, 4)), lost(x, slice(4, 8))]
    monkeypatch.setattr(rvqsplit, "root", lambda metric, spread, shrink: torch.eye(len(metric)))
    assert found[0] < 0.9 * lost(x, slice(0, 4)), "the numbers that matter"
    assert found[1] > lost(x, slice(4, 8)), "at the expense of those that do not"


def test_codes_of_a_split_are_the_nearest_in_cost(told: dict[str, np.ndarray]) -> None:
    made, x = calibration(), rows_of(99)
    tensors = ResidualVQ(**SPLIT).fit(made, told)
    coder = bound(ResidualVQ(**SPLIT), made.geometry, tensors)
    (codes,) = coder.quantize(x, range(2), Grade.COARSE)
    root = tensors["key.0.root"][0].astype(np.float64)
    turned = (x[:, :8].numpy() - tensors["key.0.mean"][0].astype(np.float64)) @ root
    books = tensors["key.0"][: tensors["stages"][0]].astype(np.float64) @ root
    expected, _ = plain(turned, books)
    assert (codes[:, : len(books)] == expected).all(1).mean() > 0.98, "others are as near to two entries"


def test_sums_are_added_in_the_order_of_stages() -> None:
    rng = np.random.default_rng(0)
    count = np.array([0, 1, 3, 4, 7, 9], np.int64)
    books = rng.standard_normal((24, 16, 10)).astype(np.float32)
    bases, codes = rng.standard_normal((6, 10)).astype(np.float32), rng.integers(0, 16, (20, 24)).astype(np.uint8)
    x = np.full((20, 65), np.nan, np.float32)
    rvqkernels.rvq_decode(codes, 0, np.cumsum(count) - count, count, bases, books, 3, x)
    at = 0
    for head, number in enumerate(count):
        total = np.tile(bases[head], (20, 1))
        for stage in range(at, at + number):
            total = total + books[stage][codes[:, stage]]
        assert np.array_equal(x[:, 3 + 10 * head : 13 + 10 * head], total), head
        at += number
    assert np.isnan(x[:, [0, 1, 2, 63, 64]]).all()


UNEVEN = np.array([3, 1, 2, 0, 1, 1, 2, 3, 1, 4], np.uint8)


def drawn(counts: np.ndarray) -> dict[str, np.ndarray]:
    """A profile's tensors with these stages and entries drawn at random."""
    rng, found = np.random.default_rng(0), {"stages": counts}
    for i in range(2):
        for side, heads, width, at in (("key", 2, 8, 5 * i), ("value", 3, 6, 5 * i + 2)):
            shapes = {"": (int(counts[at : at + heads].sum()), 16, width), ".mean": (heads, width)}
            shapes[".root"] = heads, width, width
            found |= {
                f"{side}.{i}{what}": rng.standard_normal(shape).astype(np.float16) for what, shape in shapes.items()
            }
    return found


def test_a_column_of_a_split_belongs_to_one_head() -> None:
    both, x = range(2), rows_of(99)
    coder = bound(ResidualVQ(**SPLIT), calibration().geometry, drawn(UNEVEN))
    (codes,) = coder.quantize(x, both, Grade.COARSE)
    before, seen, first = coder.dequantize([codes], both, Grade.COARSE), [], 0
    sides = [
        (layer, side, head, width)
        for layer in both
        for side, heads, width in (("key", 2, 8), ("value", 3, 6))
        for head in range(heads)
    ]
    for count, (layer, side, head, width) in zip(UNEVEN, sides, strict=True):
        for stage in range(count):
            _, column = coder.column(both, layer, side, head, stage)
            changed = codes.copy()
            changed[:, column] = (changed[:, column] + 1) % 16
            moved = (coder.dequantize([changed], both, Grade.COARSE) != before).any(0).nonzero().flatten()
            assert first <= moved.min() <= moved.max() < first + width
            seen.append(column)
        with pytest.raises(
            InvalidInput, match=f"no stage {count} of layer {layer}, {side}, head {head}: it has {count}"
        ):
            coder.column(both, layer, side, head, int(count))
        first += width
    assert seen == list(range(18))


def test_stages_fitted_in_several_rounds_are_those_of_one(tmp_path: Path) -> None:
    def head(folder: Path | None) -> rvqsplit.Head:
        place, kept = rvqsplit.Place(0, "key", 0), calibration(folder).kept
        return rvqsplit.Head(place, 16, lambda: rows_of(99)[:, :8], metric_of(0)[:8, :8].contiguous(), kept, {})

    once, several = head(tmp_path), head(None)
    once.extend(4)
    for number in (1, 2, 4):
        several.extend(number)
    for kept in tmp_path.glob("*"):  # of those that are on disk one is lost
        if "book" in load_file(kept) and np.array_equal(load_file(kept)["book"], once.books[2]):
            kept.unlink()
    again = head(tmp_path)
    again.extend(4)
    for other in (several, again):
        assert all(np.array_equal(a, b) for a, b in zip(once.books, other.books, strict=True))
        assert once.costs == other.costs


def test_a_split_codes_the_same_in_runs_and_again(told: dict[str, np.ndarray], tmp_path: Path) -> None:
    made, x = calibration(tmp_path), rows_of(98)
    tensors = ResidualVQ(**SPLIT).fit(made, told)
    again = ResidualVQ(**SPLIT).fit(calibration(), told)
    assert all(np.array_equal(tensors[name], again[name]) for name in again)
    profile = Profile({f"quantize.{name}": value for name, value in tensors.items()}, {})
    coder = ResidualVQ(**SPLIT, beam=3)
    coder.bind(made.geometry, Profile.unpack(profile.pack()))
    whole = coder.quantize(x, range(2), Grade.COARSE)[0]
    parts = [coder.quantize(run, range(2), Grade.COARSE)[0] for run in torch.split(x, 37)]
    assert np.array_equal(whole, np.concatenate(parts))
    wide = torch.full((2, 68), 3e38)
    assert through(coder, wide, range(2)).isfinite().all()


def test_a_split_goes_on_where_it_stopped(
    told: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ResidualVQ(**SPLIT).fit(calibration(tmp_path), told)
    monkeypatch.setattr(rvqsplit, "kmeans", None)
    again = ResidualVQ(**SPLIT).fit(calibration(tmp_path), told)
    fewer = ResidualVQ(**{**SPLIT, "stages": 1}).fit(calibration(tmp_path), told)
    assert all(np.array_equal(again[name], whole[name]) for name in whole)
    first = fewer["stages"][0]
    assert 1 <= first < whole["stages"][0]
    assert np.array_equal(fewer["key.0"][:first], whole["key.0"][:first])


def known(layer: int, gains: Sequence[float]) -> rvqsplit.Head:
    """A head whose stages are fitted already."""
    head = rvqsplit.Head(rvqsplit.Place(layer, "key", 0), 16, torch.Tensor, torch.eye(2), lambda *_: {}, {})
    head.costs = [sum(gains[i:]) for i in range(len(gains) + 1)]
    return head


@given(st.lists(st.lists(st.floats(0, 100), min_size=4, max_size=4), min_size=1, max_size=5), st.data())
@settings(max_examples=60, deadline=None)
def test_no_other_allotment_gains_more(gains: list[list[float]], data: st.DataObject) -> None:
    gains = [sorted(each, reverse=True) for each in gains]
    heads = [known(i % 2, each) for i, each in enumerate(gains)]
    least = {0: 1, 1: 1}
    total = data.draw(st.integers(min(2, len(heads)), 4 * len(heads)))
    counts = rvqsplit.allotted(heads, least, total, 4)
    assert sum(counts) == total
    assert all(
        sum(c for c, h in zip(counts, heads, strict=True) if h.place.layer == i) >= 1 for i in {0, 1 % len(heads)}
    )

    def gained(counts: Sequence[int]) -> float:
        return sum(sum(each[:count]) for each, count in zip(gains, counts, strict=True))

    others = (c for c in product(range(5), repeat=len(heads)) if sum(c) == total)
    allowed = [c for c in others if sum(c[::2]) >= 1 and (len(c) == 1 or sum(c[1::2]) >= 1)]
    assert gained(counts) == pytest.approx(max(map(gained, allowed)))


def test_stages_that_cannot_be_given_are_refused() -> None:
    heads = [known(i, [1.0] * 4) for i in range(2)]
    for least, total in (({0: 1, 1: 1}, 1), ({0: 1, 1: 1}, 9), ({0: 5, 1: 1}, 8)):
        with pytest.raises(InvalidRecipe, match="stages for 2 heads"):
            rvqsplit.allotted(heads, least, total, 4)


@pytest.mark.parametrize(
    "bad",
    [{"stages": 0}, {"stages": 33}, {"stages": 6.0}, {"stages": 6, "key_stages": 4}, {"stages": 6, "pooled": True}],
)
def test_wrong_settings_of_a_split_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecipe):
        stages.build("quantize", {"id": ResidualVQ.id, **bad})


def test_a_split_needs_rope_and_a_model(told: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRecipe, match="behind rope/1"):
        ResidualVQ(**SPLIT).fit(calibration(), {})
    monkeypatch.setattr(rvqsplit, "loss_metric", loss_metric)
    with pytest.raises(InvalidInput, match="calibrate with a model"):
        ResidualVQ(**SPLIT).fit(calibration(), told)


def test_hostile_splits_are_refused() -> None:
    good, counts, geometry = drawn(UNEVEN), UNEVEN, calibration().geometry
    bound(ResidualVQ(**SPLIT), geometry, good)
    empty = drawn(np.array([6, 6, 6, 0, 0, 0, 0, 0, 0, 0], np.uint8))
    moved = np.array([2, 1, 2, 0, 1, 2, 2, 3, 1, 4], np.uint8)
    beyond = drawn(np.array([17, 0, 0, 0, 0, 1, 0, 0, 0, 0], np.uint8))
    changes: list[dict[str, np.ndarray | None]] = [
        {"stages": None},
        {"stages": counts.astype(np.int32)},
        {"stages": counts[:-1]},
        {"stages": counts[None]},
        {"stages": np.r_[counts[:-1], counts[-1:] + 1]},
        {"stages": np.r_[counts[:-1], np.uint8([255])]},
        {"stages": moved},
        {**empty},
        {**beyond},
        {"key.0": good["key.0"][:-1]},
        {"key.0": good["key.0"].astype(np.float32)},
        {"value.1.mean": None},
        {"value.1.mean": good["value.1.mean"][:, :-1]},
        {"value.0.root": good["value.0.root"][:2]},
        {"value.0.root": np.full_like(good["value.0.root"], np.nan)},
    ]
    for change in changes:
        tensors = {name: value for name, value in {**good, **change}.items() if value is not None}
        with pytest.raises(ProfileMismatch):
            bound(ResidualVQ(**SPLIT), geometry, tensors)


def test_an_archive_of_a_split_is_searched_by_its_codes(told: dict[str, np.ndarray], tmp_path: Path) -> None:
    made = calibration()
    split = {f"quantize.{name}": value for name, value in ResidualVQ(**SPLIT).fit(made, told).items()}
    recipe = Recipe(
        "split",
        transform={"id": "rope/1"},
        quantize={"id": "rvq/1", **SPLIT},
        symbols={"id": "map/1"},
        block=32,
        window=Window(4, 8),
    )
    pairs = [(kv.keys[None], kv.values[None]) for kv in small_cache(90, 99).layers]
    profile, path = Profile({**told, **split}, {}), tmp_path / "split.kvc"
    kvcellar.save(path, pairs, tokens=range(90), identity="m", recipe=recipe, profile=profile)
    count = int(split["quantize.stages"][0])
    with kvcellar.open(path, identity="m", profile=profile) as archive:
        keys, _ = archive.read(0, 4, 82)
        codes = [archive.codes(0, "key", 0, stage)[4:82] for stage in range(count)]
        with pytest.raises(InvalidInput, match="no stage 0 of layer 0, value, head 2: it has 0"):
            archive.codes(0, "value", 2, 0)
    books = split["quantize.key.0"].astype(np.float32)
    total = split["quantize.key.0.mean"][0] + sum(books[i][code] for i, code in enumerate(codes))
    np.testing.assert_allclose(keys[0].float().numpy(), total, rtol=1e-2, atol=1e-2)
