"""The fields of token logs: geometries in a few bytes, and what no cache has is refused before anything is made."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.archive.manifest import Manifest
from kvcellar.errors import DamagedArchive, IdentityMismatch, InvalidInput, UnsupportedCache
from kvcellar.geometry import FULL, MAX_LAYERS, NO_LAYER, SLIDING, Geometry, LayerGeometry, SideGeometry
from kvcellar.identity import Identity, require_same
from kvcellar.language import fields
from kvcellar.recipe import EXACT


def side(heads: int = 3, width: int = 64, dtype: str = "bfloat16") -> SideGeometry:
    return SideGeometry(heads, width, dtype)


ALIKE = LayerGeometry(side(), side())
UNEQUAL = LayerGeometry(side(1, 576), side(1, 0), FULL)
MIXED = LayerGeometry(side(8, 128, "float16"), side(4, 256, "float32"))
WINDOW = LayerGeometry(side(4, 256), side(4, 256), SLIDING, 512)


def read(data: bytes) -> Geometry:
    cursor = fields.Cursor(data, 0)
    found = cursor.geometry()
    assert cursor.at == len(data)
    return found


@pytest.mark.parametrize(
    ("layers", "size"),
    [
        ([ALIKE] * 30, 6),
        ([LayerGeometry(side(8, 128), side(8, 128))] * 80, 7),
        ([WINDOW] * 5 + [ALIKE] + ([WINDOW] * 5 + [ALIKE]) * 3 + [WINDOW] * 2, 2 + 7 + 4),
        ([UNEQUAL, MIXED], 2 + 7 + 8),
        ([ALIKE] * 20 + [NO_LAYER] * 15, 2 + 4 + 4),
        ([ALIKE], 6),
        ([ALIKE] * MAX_LAYERS, 7),
    ],
    ids=["alike", "wide", "every sixth", "all different", "shared", "one", "most"],
)
def test_geometries_come_back_from_so_many_bytes(layers: list[LayerGeometry], size: int) -> None:
    shape = Geometry(tuple(layers))
    packed = fields.geometry(shape)
    assert read(packed) == shape
    assert len(packed) == size


@given(st.lists(st.sampled_from([ALIKE, UNEQUAL, MIXED, WINDOW, NO_LAYER]), min_size=1, max_size=40))
def test_any_order_of_layers_comes_back(layers: list[LayerGeometry]) -> None:
    if all(layer is NO_LAYER for layer in layers):
        layers = [*layers, ALIKE]
    shape = Geometry(tuple(layers))
    assert read(fields.geometry(shape)) == shape


def test_every_cut_of_a_geometry_is_an_error() -> None:
    packed = fields.geometry(Geometry((WINDOW, MIXED, UNEQUAL)))
    for stop in range(len(packed)):
        with pytest.raises(ValueError, match="bytes"):
            fields.Cursor(packed[:stop], 0).geometry()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\x00\x01\x01\x7f\x03\x40", "0 layers"),
        (fields.number(MAX_LAYERS + 1) + b"\x01\x01\x7f\x03\x40", "layers"),
        (fields.number(1 << 62) + b"\x01\x01\x7f\x03\x40", "layers"),
        (b"\x1e\x00\x01\x7f\x03\x40", "without a run"),
        (b"\x1e\x7f\x01\x7f\x03\x40", "127 things"),
        (b"\x1e\x01\x00\x7f\x03\x40", "run of 0"),
        (b"\x1e\x01\x1f\x7f\x03\x40", "run of 31"),
        (b"\x1e\x01\x1e\x7c\x03\x40", "kind"),
        (b"\x1e\x01\x1e\x71\x03\x40", "kind"),
        (b"\x1e\x01\x1e\x4d\x03\x40", "kind"),
        (b"\x1e\x01\x1e\xfd\x03\x40", "kind"),
        (b"\x1e\x01\x1e" + b"\xff" * 10, "kind"),
        (b"\x1e\x01\x1e\x7d" + b"\xff" * 10, "63 bits"),
    ],
)
def test_what_no_geometry_is_is_refused(data: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fields.Cursor(data, 0).geometry()


@pytest.mark.parametrize("heads_and_width", [b"\x00\x40", b"\x03\x00", b"\x80\x80\x04\x40"])
def test_layers_that_no_cache_has_are_refused(heads_and_width: bytes) -> None:
    with pytest.raises(UnsupportedCache):
        fields.Cursor(b"\x1e\x01\x1e\x7d" + heads_and_width, 0).geometry()


def test_half_a_digest_stands_for_the_whole_one() -> None:
    whole = Identity("model", "0123456789abcdef" * 4, "m")
    half = replace(whole, digest=whole.digest[:32])
    for one, other in ((whole, half), (half, whole), (half, half), (whole, whole)):
        assert one.same(other)
        require_same(one, other, "a")
    for other in (
        replace(whole, kind="name"),
        replace(half, digest="f" + half.digest[1:]),
        replace(whole, digest=whole.digest[:31] + "0" + whole.digest[32:]),
    ):
        assert not half.same(other)
        with pytest.raises(IdentityMismatch):
            require_same(half, other, "a")
    assert not whole.same(replace(whole, digest=whole.digest[:63] + "0"))
    for digits in (0, 16, 31, 33, 63, 128):
        with pytest.raises(InvalidInput, match="64 lower-case"):
            Identity("model", "a" * digits)


def test_an_archive_with_blocks_has_a_whole_digest() -> None:
    half = Manifest(EXACT, Identity("model", "ab" * 16), Geometry((ALIKE,)))
    with pytest.raises(InvalidInput, match="32 hex digits"):
        half.pack()
    whole = replace(half, identity=Identity("model", "ab" * 32))
    forged = whole.pack().replace(b"ab" * 32, b"ab" * 16)
    assert Manifest.unpack(whole.pack()) == whole
    with pytest.raises(DamagedArchive, match="32 hex digits"):
        Manifest.unpack(forged)
