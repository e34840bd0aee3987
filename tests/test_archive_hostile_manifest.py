"""Manifests made to mislead: nesting, duplicates, wrong types. Right checksums do not make them believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import kvcellar
from archives import SMALL
from hostile import CACHE, IDS, TOKENS, Forger, require_refused, taken
from kvcellar.errors import InvalidRecipe

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "manifest"),
        (b"{", "manifest"),
        (b"[]", "keys"),
        (b'"text"', "keys"),
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 50_000, "nested"),
        (b'{"recipe":1,"recipe":2}', "duplicate"),
        (b'{"a":NaN}', "NaN"),
        (b"\xff\xfe{}", "manifest"),
        (b"[" + b"1," * (1 << 19) + b"1]", "bytes of JSON"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_manifests_that_are_no_manifest(text: bytes, words: str, tmp_path: Path) -> None:
    forger = Forger()
    forger.manifest_bytes = text
    require_refused(forger.build(), words, tmp_path)


@pytest.mark.parametrize("where", ["whole", "recipe", "setting", "geometry"])
def test_nesting_of_any_depth_is_refused(where: str, tmp_path: Path) -> None:
    """Just under the parser's limit as well: what can be parsed is printed and hashed later, deeper in the stack."""
    forger = Forger()
    honest = forger.manifest_bytes.decode()
    for depth in [*range(10, 900, 50), *range(900, 1010)]:
        nested = "[" * depth + "]" * depth
        value = json.loads(honest)
        if where == "recipe":
            value["recipe"] = "NESTED"
        elif where == "setting":
            value["recipe"]["symbols"]["more"] = "NESTED"
        elif where == "geometry":
            value["geometry"][0]["key"]["heads"] = "NESTED"
        text = nested if where == "whole" else json.dumps(value).replace('"NESTED"', nested)
        forger.manifest_bytes = text.encode()
        found = taken(forger.build(), tmp_path)
        assert found.complaints, f"depth {depth}"
        assert found.contents is None, f"depth {depth}"


def _set(*path: object, to: object) -> Callable[[dict], None]:
    def change(value: dict) -> None:
        for key in path[:-1]:
            value = value[key]  # type: ignore[index]
        value[path[-1]] = to  # type: ignore[index]

    return change


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("geometry",), []),
        (("geometry",), 7),
        (("geometry", 0, "layers"), 0),
        (("geometry", 0, "layers"), 10**9),
        (("geometry", 0, "layers"), True),
        (("geometry", 0, "kind"), "sliding"),
        (("geometry", 0, "key", "heads"), 0),
        (("geometry", 0, "key", "heads"), 1.0),
        (("geometry", 0, "key", "heads"), True),
        (("geometry", 0, "value", "width"), 4.0),
        (("geometry", 0, "value", "width"), "4"),
        (("geometry", 0, "value", "dtype"), "float64"),
        (("geometry", 0, "value", "dtype"), ["float16"]),
        (("geometry", 0, "value", "more"), 1),
        (("identity",), None),
        (("identity", "kind"), "other"),
        (("identity", "digest"), "00"),
        (("identity", "digest"), ["0"] * 64),
        (("identity", "label"), "x" * 5000),
        (("identity", "label"), ["label"]),
        (("namespace",), "x" * 2000),
        (("namespace",), None),
        (("profile",), {"id": "zz"}),
        (("profile",), {"id": "0" * 64, "embedded": True}),
        (("profile",), {"id": "0" * 64, "embedded": 1}),
        (("more",), 1),
        (("recipe", "block"), 8.0),
        (("recipe", "block"), 10**6),
        (("recipe", "name"), "\ud800"),
        (("recipe", "window"), {"sinks": -1, "recent": 2}),
        (("recipe", "symbols"), None),
        (("recipe", "symbols", "id"), "nobody/1"),
        (("recipe", "symbols", "more"), 1),
        (("recipe", "quantize"), {"id": "nobody/1"}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_manifests_with_a_wrong_value(path: tuple, to: object, tmp_path: Path) -> None:
    forger = Forger()
    forger.json(_set(*path, to=to))
    found = taken(forger.build(), tmp_path)
    assert found.complaints
    assert found.contents is None


@pytest.mark.parametrize("version", [0, 2, 10**30])
def test_a_recipe_of_another_version_is_named(version: int, tmp_path: Path) -> None:
    forger = Forger()
    forger.json(_set("recipe", "version", to=version))
    (tmp_path / "a.kvc").write_bytes(forger.build())
    with pytest.raises(InvalidRecipe, match=f"version {version}"):
        kvcellar.open(tmp_path / "a.kvc")


def test_find_passes_over_what_it_cannot_read(saved: Callable, tmp_path: Path) -> None:
    forger = Forger()
    good = saved(CACHE, IDS, recipe=SMALL, name="good.kvc")
    (good.parent / "damaged.kvc").write_bytes(forger.build()[:-1])
    forger.json(_set("recipe", "version", to=2))
    (good.parent / "newer.kvc").write_bytes(forger.build())
    with pytest.warns(UserWarning, match="passed over") as warned:
        found = kvcellar.find(good.parent, IDS, identity="m")
    assert (found.path, found.matched) == (str(good), TOKENS)
    assert len(warned) == 2
