"""TurboQuant: the rotation and the levels bit for bit, the stage's errors, its outliers, what it refuses."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcellar import stages
from kvcellar.cache import torch_dtype
from kvcellar.errors import DamagedArchive, InvalidRecipe
from kvcellar.geometry import FULL, Geometry, LayerGeometry, SideGeometry
from kvcellar.quantize import turbo
from kvcellar.quantize.bits import bits
from kvcellar.quantize.coefficients import flatten
from kvcellar.quantize.lloydmax import boundaries, levels
from kvcellar.quantize.rotation import rotation, splitmix64
from kvcellar.quantize.turbo import TurboQuant
from kvcellar.stages import Grade

ONE = range(1)
WIDTHS = (64, 80, 96, 112, 128, 192, 256)


def geometry(key: int, value: int = 0, heads: int = 1, dtype: str = "float32", layers: int = 1) -> Geometry:
    sides = SideGeometry(heads, key, dtype), SideGeometry(heads, value, dtype)
    return Geometry((LayerGeometry(*sides, FULL),) * layers)


def stage(shape: Geometry, **settings: Any) -> TurboQuant:
    made = TurboQuant(**{"bits": 4, **settings})
    made.bind(shape, None)
    return made


def random(tokens: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def through(x: Tensor, grade: Grade = Grade.COARSE, **settings: Any) -> Tensor:
    """Vectors (T, D) of one head there and back."""
    coder = stage(geometry(x.shape[1]), **settings)
    return coder.dequantize(coder.quantize(x, ONE, grade), ONE, grade)


def relative(x: Tensor, y: Tensor) -> float:
    return float((((x - y) ** 2).sum(1) / (x**2).sum(1)).mean())


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.astype("<f4").tobytes()).hexdigest()[:16]


# The rotation and the levels are part of the format.


def test_splitmix64_gives_the_published_numbers() -> None:
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]


@pytest.mark.parametrize(
    ("width", "seed", "stream", "expected"),
    [
        (1, 0, 0, "c68830a25204a09f"),
        (5, 0, 0, "5fb047619c3e5d1e"),
        (64, 0, 0, "5f93f84cb94596f7"),
        (64, 7, 1, "8bf3cf92097dcff1"),
        (80, 0, 0, "0a3a52c09c7ce77e"),
        (128, 0, 0, "a4aa1ba28cf82ade"),
        (256, 0, 0, "565d2ba2885df327"),
    ],
)
def test_the_rotation_is_this_one_on_every_machine(width: int, seed: int, stream: int, expected: str) -> None:
    assert digest(rotation(width, seed, stream)) == expected


@pytest.mark.parametrize(
    ("width", "count", "expected"),
    [
        (64, 2, "dad4d4e33fc00ff2"),
        (64, 4, "2cee15fe5d530e25"),
        (80, 4, "06edd8deb77fb19a"),
        (128, 3, "82e5956fe79f42f7"),
        (128, 8, "c4ea34d7480817b4"),
    ],
)
def test_the_levels_are_these_on_every_machine(width: int, count: int, expected: str) -> None:
    assert digest(levels(width, count)) == expected


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64, 80, 96, 127, 256])
def test_the_rotation_is_orthonormal_and_spreads(width: int) -> None:
    matrix = rotation(width, 0).astype(np.float64)
    assert np.abs(matrix.T @ matrix - np.eye(width)).max() < 1e-6
    assert np.abs(matrix @ matrix.T - np.eye(width)).max() < 1e-6
    if width >= 64:
        structured = np.concatenate([np.eye(width), np.ones((1, width)) / np.sqrt(width)])
        spread = np.abs(structured @ matrix) * np.sqrt(width)
        assert spread.max() < 4.5, "a coordinate beyond 4.5 standard deviations"
        assert (spread**4).mean(axis=1).max() < 6, "a heavy tail: 3 for a Gaussian"


def test_levels_are_the_published_ones_for_a_gaussian() -> None:
    np.testing.assert_allclose(levels(4096, 2)[2:], [0.4528, 1.510], atol=1e-3)  # Max 1960, table 1
    np.testing.assert_allclose(levels(4096, 3)[4:], [0.2451, 0.7560, 1.344, 2.152], atol=2e-3)


@pytest.mark.parametrize(("width", "count"), [(3, 2), (16, 3), (64, 4), (128, 8)])
def test_levels_are_means_of_their_cells(width: int, count: int) -> None:
    direction = random(400_000 // width, width).double()
    x = (direction / direction.square().mean(1, keepdim=True).sqrt()).flatten().numpy()
    of = levels(width, count)
    assert np.array_equal(of, -of[::-1])
    cells = np.digitize(x, boundaries(of))
    means = np.array([x[cells == cell].mean() if (cells == cell).sum() > 500 else np.nan for cell in range(len(of))])
    assert np.nanmax(np.abs(means - of)) < 0.01


# Errors.


@pytest.mark.parametrize(("count", "most"), [(2, 0.1175), (3, 0.0345), (4, 0.0080), (5, 0.0020), (8, 5e-5)])
def test_error_stays_below_that_of_the_best_scalar_levels(count: int, most: float) -> None:
    x = random(2000, 64)
    assert relative(x, through(x, bits=count)) < most


def test_scales_are_rounded_to_the_nearest_of_nine_bits() -> None:
    x = ((1 + np.arange(4001) / 4001) * 2.0 ** np.arange(-120, 120, 8)[:, None]).astype(np.float32)
    relative_error = np.abs(turbo._unpack(turbo._pack(x)).astype(np.float64) / x - 1)
    assert 0.9 * 2**-9 < relative_error.max() <= 2**-9
    ends = np.array([[0, 1e-45, np.finfo(np.float32).max]], np.float32)
    assert turbo._pack(ends).tolist() == [[0, 0, 0xFEFF]]


def test_field_g28_every_width_is_as_good() -> None:
    errors = [relative(x, through(x)) for x in (random(500, width) for width in WIDTHS)]
    assert max(errors) < 1.5**2 * min(errors)


def test_a_wide_side_is_cut_into_pieces() -> None:
    x = random(200, 576) * torch.cat([torch.full((192,), 100.0), torch.ones(384)])
    y = through(x)
    assert relative(x[:, 192:], y[:, 192:]) < 0.01, "pieces have scales of their own"


SPECIAL = {
    "zeros": torch.zeros(5, 64),
    "negative zeros": -torch.zeros(5, 64),
    "constant": torch.full((5, 64), 3.25),
    "one among zeros": torch.zeros(5, 64).index_fill_(1, torch.tensor([9]), 1e-8),
    "half's largest": torch.full((5, 64), 65504.0) * random(5, 64).sign(),
    "float's largest": torch.full((5, 64), torch.finfo(torch.float32).max),
    "subnormal": torch.full((5, 64), 1e-42) * random(5, 64).sign(),
    "zero channel": random(5, 64).index_fill_(1, torch.tensor([3]), 0),
    "one large": torch.zeros(5, 64).index_fill_(1, torch.tensor([0]), 3e38),
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("how", [{}, {"bits": 2, "outliers": 0}, {"qjl": True}, {"bits": 8}])
def test_field_g26_finite_in_finite_out(name: str, how: dict[str, Any]) -> None:
    x = SPECIAL[name]
    y = through(x, **how)
    assert y.isfinite().all()
    if name == "subnormal":
        assert y.abs().max() <= 1e-40
    elif how.get("qjl") is None:
        assert ((x - y).double() ** 2).sum() <= 0.2 * (x.double() ** 2).sum()
    if name == "one among zeros" and how.get("outliers", 8):
        torch.testing.assert_close(y, x, rtol=1e-4, atol=0)


def variation(keys: Tensor, back: Tensor, queries: Tensor) -> float:
    a, b = ((queries @ k.T / k.shape[1] ** 0.5).softmax(1) for k in (keys, back))
    return float((a - b).abs().sum(1).max() / 2)


def test_field_g27_extreme_key_channels() -> None:
    keys, queries = random(128, 64), random(32, 64, 1)
    keys[:, 5] += 600
    keys[:, 40] -= 300
    assert variation(keys, through(keys, outliers=0), queries) > 0.5, "else the case tests nothing"
    assert variation(keys, through(keys), queries) < 0.1


@pytest.mark.parametrize("width", [64, 128])
def test_field_g27_biases_that_turn_with_the_position(width: int) -> None:
    """Biases of three rotary pairs, as large as each other, so that none stands out by itself."""
    half = width // 2
    keys = random(300, width)
    for channel in (1, half - 5, half - 2):
        keys[:, channel] += 100
        keys[:, channel + half] -= 90
    angles = torch.outer(torch.arange(300.0), 1e6 ** -(torch.arange(half) / half)).repeat(1, 2)
    keys = keys * angles.cos() + torch.cat([-keys[:, half:], keys[:, :half]], 1) * angles.sin()
    queries = random(32, width, 1)
    assert variation(keys, through(keys, outliers=0), queries) > 0.4, "else the case tests nothing"
    assert variation(keys, through(keys), queries) < 0.1


def test_ordinary_vectors_leave_the_slots_empty() -> None:
    coder = stage(geometry(64))
    codes, scales, *slots = coder.quantize(random(2000, 64), ONE, Grade.COARSE)
    assert codes.any()
    assert scales.all()
    assert len(slots) == 8
    assert not any(slot.any() for slot in slots)


def test_a_sketch_takes_the_bias_out_of_inner_products() -> None:
    x = random(3000, 64)
    kept = {qjl: ((through(x, bits=3, qjl=qjl) * x).sum(1) / (x * x).sum(1)).mean() for qjl in (False, True)}
    assert kept[False] < 0.98
    assert abs(kept[True] - 1) < 0.002


def test_fine_is_nearly_exact() -> None:
    x = random(500, 64)
    assert relative(x, through(x, Grade.FINE, bits=2, qjl=True)) < 5e-5
    assert relative(x, through(x, Grade.FINE, bits=2, fine_bits=4)) > 1e-3


# The same symbols however they are made.


def plain(x: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and restored vectors in float64, one stretch after the other, without outliers."""
    turn, of = rotation(x.shape[1], 0).astype(np.float64), levels(x.shape[1], count).astype(np.float64)
    turned = x / np.sqrt((x * x).mean(1, keepdims=True)) @ turn
    best = np.full(len(x), np.inf)
    codes, back = np.empty(x.shape, int), np.empty(x.shape)
    for stretch in (0.75, 0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15):
        found = np.digitize(turned / stretch, boundaries(of.astype(np.float32)))
        scale = (of[found] * turned).sum(1, keepdims=True) / (of[found] ** 2).sum(1, keepdims=True)
        error = ((turned - scale * of[found]) ** 2).sum(1)
        better = error < best
        best[better], codes[better], back[better] = error[better], found[better], (scale * of[found])[better]
    return codes, back @ turn.T * np.sqrt((x * x).mean(1, keepdims=True))


@pytest.mark.parametrize("width", [1, 3, 5, 64, 80])
def test_kernels_do_what_the_plain_form_says(width: int) -> None:
    x = random(300, width)
    coder = stage(geometry(width), bits=3, outliers=0)
    symbols = coder.quantize(x, ONE, Grade.COARSE)
    codes, back = plain(x.double().numpy(), 3)
    same = (codes == symbols[0]).all(1)
    assert same.mean() > 0.99, "others lie on a boundary"
    restored = coder.dequantize(symbols, ONE, Grade.COARSE).numpy()
    np.testing.assert_allclose(restored[same], back[same], rtol=1e-5, atol=0.004 * np.abs(back).max())


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([16, 64, 80]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_field_g29_bulk_and_append_make_the_same_symbols(runs: list[int], width: int, qjl: bool) -> None:
    shape = geometry(width, width // 2, heads=2)
    x = random(sum(runs), 3 * width)
    x[:, 3] *= 100
    coder = stage(shape, qjl=qjl)
    for grade in Grade:
        whole = coder.quantize(x, ONE, grade)
        parts = [coder.quantize(run, ONE, grade) for run in torch.split(x, runs)]
        assert all(np.array_equal(a, np.concatenate(b)) for a, b in zip(whole, zip(*parts, strict=True), strict=True))
        back = coder.dequantize(whole, ONE, grade)
        rows = torch.cat([coder.dequantize([a[t : t + 1] for a in whole], ONE, grade) for t in range(len(x))])
        assert torch.equal(back, rows)


def test_field_g30_threads_and_global_seeds_change_nothing() -> None:
    x, threads = random(64, 64), torch.get_num_threads()
    made = []
    try:
        for count in (1, 8):
            torch.set_num_threads(count)
            torch.manual_seed(count)
            np.random.seed(count)
            made.append(stage(geometry(64)).quantize(x, ONE, Grade.COARSE))
    finally:
        torch.set_num_threads(threads)
    assert all(np.array_equal(a, b) for a, b in zip(*made, strict=True))
    other = stage(geometry(64), seed=1).quantize(x, ONE, Grade.COARSE)
    assert (other[0] != made[0][0]).mean() > 0.5, "the seed is what chooses the rotation"


# Layout, exact layers, unequal sides.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("grade", Grade)
def test_field_g45_exact_layers_keep_every_bit(dtype: str, grade: Grade) -> None:
    shape = geometry(16, 8, heads=3, dtype=dtype, layers=3)
    x = [(random(20, 3 * w, w).reshape(20, 3, w) * 1e-3).transpose(0, 1).to(torch_dtype(dtype)) for w in (16, 8)]
    x[0][0, :4, 0] = torch.tensor([-0.0, torch.finfo(x[0].dtype).tiny / 2, torch.finfo(x[0].dtype).max, 0.0])
    coder = stage(shape, bits=3, exact_layers=[0, 2])
    flat = flatten([t.float() for t in x])
    for layer in range(3):
        where = range(layer, layer + 1)
        back = coder.dequantize(coder.quantize(flat, where, grade), where, grade)
        same = np.array_equal(bits(back.to(x[0].dtype)[None]), bits(flat.to(x[0].dtype)[None]))
        assert same == (layer != 1)


@pytest.mark.parametrize("grade", Grade)
@pytest.mark.parametrize("how", [{}, {"qjl": True}, {"exact_layers": [1]}, {"outliers": 0}, {"outliers": 5}])
def test_symbols_have_the_layout_that_is_promised(grade: Grade, how: dict[str, Any]) -> None:
    sides = [(3, 64, 2, 32), (1, 40, 1, 0), (2, 300, 2, 7)]
    shape = Geometry(
        tuple(LayerGeometry(SideGeometry(h, d, "float32"), SideGeometry(g, w, "float16")) for h, d, g, w in sides)
    )
    coder = stage(shape, **how)
    x = random(12, sum(h * d + g * w for h, d, g, w in sides))
    x[3] *= torch.randn(x.shape[1]).exp() ** 4
    symbols = coder.quantize(x, range(3), grade)
    assert [(a.shape, a.dtype) for a in symbols] == [((12, n), np.dtype(t)) for n, t in coder.layout(range(3), grade)]
    back = coder.dequantize(symbols, range(3), grade)
    assert back.shape == x.shape
    assert relative(x, back) < 0.02
    alone = np.concatenate([coder.dequantize([a[t : t + 1] for a in symbols], range(3), grade) for t in range(12)])
    assert np.array_equal(alone, back)


def test_keys_and_values_may_have_different_bits() -> None:
    coder = stage(geometry(64, 64), key_bits=4, value_bits=2)
    x = random(200, 128)
    y = coder.dequantize(coder.quantize(x, ONE, Grade.COARSE), ONE, Grade.COARSE)
    assert relative(x[:, :64], y[:, :64]) < 0.01 < 0.1 < relative(x[:, 64:], y[:, 64:])


def test_no_tokens_and_no_numbers() -> None:
    coder = stage(geometry(64))
    empty = coder.dequantize(coder.quantize(torch.empty(0, 64), ONE, Grade.COARSE), ONE, Grade.COARSE)
    assert empty.shape == (0, 64)
    nothing = LayerGeometry(SideGeometry(1, 0, "float32"), SideGeometry(1, 0, "float32"), "none")
    coder = stage(Geometry((*geometry(64).layers, nothing)))
    assert coder.layout(range(1, 2), Grade.COARSE) == []
    assert (
        coder.dequantize(coder.quantize(torch.empty(0, 0), range(1, 2), Grade.FINE), range(1, 2), Grade.FINE).numel()
        == 0
    )


# What is refused.


@pytest.mark.parametrize("bad", [{"bits": 1}, {"bits": 9}, {"bits": True}, {"bits": 4.0}, {"key_bits": 0}])
@pytest.mark.parametrize(
    "more", [{}, {"seed": -1}, {"outliers": 17}, {"qjl": 1}, {"exact_layers": "all"}, {"depth": 3}]
)
def test_wrong_settings_are_refused(bad: dict[str, Any], more: dict[str, Any]) -> None:
    for wrong in (bad, {"bits": 4, **more} if more else bad):
        with pytest.raises(InvalidRecipe):
            stages.build("quantize", {"id": TurboQuant.id, "bits": 4, **wrong})


@pytest.mark.parametrize("layer", [2, -1, 0.5, True, [0]])
def test_exact_layers_must_exist(layer: Any) -> None:
    with pytest.raises(InvalidRecipe):
        stages.build("quantize", {"id": TurboQuant.id, "bits": 4, "exact_layers": [layer]}).bind(
            geometry(8, layers=2), None
        )


def test_a_transform_of_another_width_is_refused() -> None:
    with pytest.raises(InvalidRecipe, match="got 32 coefficients a token; expected 64"):
        stage(geometry(64)).quantize(random(3, 32), ONE, Grade.COARSE)


@pytest.mark.parametrize(
    ("array", "value"),
    [(0, 8), (0, 255), (1, 0xFEFF + 1), (2, 0xFFFF), (3, 60), (4, 0x7F80), (4, 0xFFC1)],
)
def test_symbols_that_were_never_written_are_noticed(array: int, value: int) -> None:
    coder = stage(geometry(60), bits=3, qjl=array == 2, outliers=1)
    x = random(10, 60)
    x[:, 7] = 1000
    symbols = coder.quantize(x, ONE, Grade.COARSE)
    if array > 2 or array == 2:
        assert len(symbols) == (5 if array == 2 else 4)
    target = symbols[array if array < 3 else array - 1]
    target[4, 0] = value
    with pytest.raises(DamagedArchive):
        coder.dequantize(symbols, ONE, Grade.COARSE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_exact_numbers_that_are_not_finite_are_noticed(dtype: str) -> None:
    coder = stage(geometry(8, dtype=dtype), exact_layers=[0])
    symbols = coder.quantize(random(3, 8), ONE, Grade.FINE)
    symbols[0][1, -1] = 0x7FC0 if dtype != "float16" else 0x7E00
    with pytest.raises(DamagedArchive):
        coder.dequantize(symbols, ONE, Grade.FINE)


@given(st.integers(0, 2**32), st.booleans(), st.sampled_from(list(Grade)))
@settings(max_examples=60, deadline=None)
def test_whatever_symbols_hold_is_finite_or_noticed(seed: int, qjl: bool, grade: Grade) -> None:
    coder, rng = stage(geometry(64, 30, heads=2), qjl=qjl), np.random.default_rng(seed)
    symbols = [
        rng.integers(0, rng.choice([2, 16, 30, 65000, 65536]), (7, columns)).astype(dtype)
        for columns, dtype in coder.layout(ONE, grade)
    ]
    with contextlib.suppress(DamagedArchive):
        assert coder.dequantize(symbols, ONE, grade).isfinite().all()
