"""Recipes and identities are names for ever: their bytes, digests and what is refused (field cases G19 and G20)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcellar
from kvcellar import Identity, Recipe
from kvcellar.errors import ArchiveNotFound, IdentityMismatch, InvalidInput, InvalidRecipe
from kvcellar.identity import MAX_LABEL, frame
from kvcellar.recipe import EXACT, MAX_BLOCK, MAX_JSON, Window, canonical_json, find_recipe, strict_json

# New bytes need a new recipe version or stage id: never edit these, they are what older files say.
EXACT_JSON = (
    b'{"block":512,"name":"exact","predict":null,"quantize":null,"reduce":null,'
    b'"symbols":{"id":"byteplanes-zstd/1"},"transform":null,"version":1,"window":null}'
)
EXACT_DIGEST = "bfe7e4266a31199d4204c978c459544b2b2f840643f880bdd2c5fd3510deb013"
NAMED_DIGESTS = {
    "a/b": "b7e8f24294aedb0bfd16e427145a2243dcc289306952bea01c7eea8759dc3aa9",
    "Llama 模型": "92bace18db69e5a9b9fed1fae79e1d83233b0798abd0ea664eb007112247d075",
}
FULL = Recipe(
    name="full",
    reduce={"id": "r/1", "keep": 0.5},
    predict={"id": "p/1"},
    transform={"id": "t/1", "bases": ["k", "v"]},
    quantize={"id": "q/1", "step": 0.25, "per": {"layer": None}},
    symbols={"id": "s/1", "on": True},
    block=7,
    window=Window(sinks=4, recent=32),
)


def test_the_bytes_of_the_exact_recipe() -> None:
    assert canonical_json(EXACT.to_json()) == EXACT_JSON
    assert EXACT.digest.hex() == EXACT_DIGEST
    assert find_recipe("exact") is EXACT


@pytest.mark.parametrize("recipe", [EXACT, FULL], ids=["exact", "full"])
def test_recipes_survive_json(recipe: Recipe) -> None:
    text = json.dumps(recipe.to_json(), indent=2)
    again = Recipe.from_json(strict_json(text))
    assert again == recipe
    assert again.digest == recipe.digest
    assert canonical_json(again.to_json()) == canonical_json(recipe.to_json())
    assert Recipe.from_json(dict(reversed(recipe.to_json().items()))).digest == recipe.digest
    assert find_recipe(recipe.to_json()) == recipe
    assert find_recipe(recipe) is recipe


def test_every_field_is_in_the_digest() -> None:
    changed = [
        {**FULL.to_json(), key: value}
        for key, value in {
            "name": "other",
            "reduce": None,
            "predict": {"id": "p/2"},
            "transform": {"id": "t/1", "bases": ["v", "k"]},
            "quantize": {"id": "q/1", "step": 0.5, "per": {"layer": None}},
            "symbols": {"id": "s/1", "on": 1},
            "block": 8,
            "window": {"sinks": 4, "recent": 31},
        }.items()
    ]
    assert len({FULL.digest, *(Recipe.from_json(value).digest for value in changed)}) == 9


@pytest.mark.parametrize("key", sorted(FULL.to_json()))
def test_missing_keys_are_named(key: str) -> None:
    value = {name: item for name, item in FULL.to_json().items() if name != key}
    with pytest.raises(InvalidRecipe, match=rf"missing \['{key}'\]"):
        Recipe.from_json(value)


def test_unknown_keys_are_named() -> None:
    with pytest.raises(InvalidRecipe, match=r"unknown \['level', 'q'\]"):
        Recipe.from_json({**FULL.to_json(), "q": 1, "level": 3})


BAD = {
    "version": [0, 2, "1", None, True, 1.0],
    "name": ["", None, 5, "x" * 201, ["exact"]],
    "block": [0, -1, MAX_BLOCK + 1, 2.0, "8", None, True],
    "symbols": [None, "byteplanes-zstd/1", {}, {"id": 5}, {"id": None}, ["id"], {"ID": "s/1"}],
    "reduce": ["r/1", {}, {"id": 5}, [], 0, False],
    "predict": ["p/1", {}, {"id": 5}],
    "transform": ["t/1", {}, {"id": 5}],
    "quantize": ["q/1", {}, {"id": 5}],
    "window": [
        {},
        {"sinks": 4},
        {"sinks": 4, "recent": 32, "more": 1},
        {"sinks": -1, "recent": 32},
        {"sinks": 4, "recent": MAX_BLOCK + 1},
        {"sinks": 4.0, "recent": 32},
        {"sinks": True, "recent": 32},
        [4, 32],
        36,
        "4+32",
    ],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_bad_values_are_refused(key: str, value: Any) -> None:
    with pytest.raises(InvalidRecipe):
        Recipe.from_json({**FULL.to_json(), key: value})


@pytest.mark.parametrize("counts", [(-1, 32), (4, MAX_BLOCK + 1), (True, 32), (4, 32.0)])
def test_bad_windows_are_refused_without_json_too(counts: tuple) -> None:
    with pytest.raises(InvalidRecipe):
        Recipe(name="x", symbols={"id": "s/1"}, window=Window(*counts))


@pytest.mark.parametrize("window", ["4+32", {"sinks": 4, "recent": 32}, (4, 32)])
def test_what_is_no_window(window: Any) -> None:
    with pytest.raises(InvalidRecipe):
        Recipe(name="x", symbols={"id": "s/1"}, window=window)


@pytest.mark.parametrize("value", [None, [], "exacter", 5, b"exact", [["name", "exact"]]])
def test_what_is_no_recipe(value: Any) -> None:
    with pytest.raises(InvalidRecipe):
        find_recipe(value)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a": {"b": 1, "b": 1}}',
        '{"a": NaN}',
        "[Infinity]",
        "[-Infinity]",
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        "[1, ]",
        "",
        " " * (MAX_JSON + 1),
        b"\xff",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_json_that_two_readers_could_read_differently(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (whatever kind)
        strict_json(text)


def test_canonical_json_has_one_form() -> None:
    assert canonical_json({"b": 1, "a": [1.5, None, "ü"]}) == '{"a":[1.5,null,"ü"],"b":1}'.encode()
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))


def test_named_identities_are_names_for_ever() -> None:
    assert {name: Identity.named(name).digest for name in NAMED_DIGESTS} == NAMED_DIGESTS


KEYS = """
import json, sys
from kvcellar.identity import Identity, frame
from kvcellar.recipe import EXACT, Recipe, canonical_json
names = ["a/b", "Llama 模型", "m"]
full = Recipe.from_json(json.loads(sys.argv[1]))
print([Identity.named(name).digest for name in names], EXACT.digest.hex(), full.digest.hex())
print(frame("t", ["", "x"]).hex(), canonical_json(full.to_json()), hash("salted") % 1000)
"""


def test_field_g19_keys_are_the_same_in_every_process() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", KEYS, json.dumps(FULL.to_json())],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONUTF8": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2", "77", "4294967295")
    ]
    keys = {output.rpartition(" ")[0] for output in outputs}
    assert len(keys) == 1
    assert EXACT_DIGEST in keys.pop()
    assert len({output.rpartition(" ")[2] for output in outputs}) > 1  # the seeds did differ


MODEL_KEY = """
import sys
sys.path.insert(0, sys.argv[1])
from models import new_llama
from kvcellar.frontends.fingerprint import identity_of_model
print(identity_of_model(new_llama()).digest)
"""


def test_field_g19_a_model_has_one_key_in_every_process() -> None:
    from kvcellar.frontends.fingerprint import identity_of_model
    from models import llama

    done = subprocess.run(
        [sys.executable, "-c", MODEL_KEY, str(Path(__file__).parent)],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == identity_of_model(llama()).digest


NAMES = [
    "a/b",
    "a-SEP-b",
    "a_b",
    "a\\b",
    "a",
    "A/B",
    "a/B",
    "a/b ",
    "a\0b",
    "a\nb",
    "../x",
    "CON",
    "con",
    "x" * 240,
    "x" * 239 + "y",
    "é",
    "e\u0301",
    "模型/一",
    "🦙",
    "\u202ea",
    "None",
    "null",
]


def test_field_g20_names_are_told_apart_exactly() -> None:
    assert len({Identity.named(name).digest for name in NAMES}) == len(NAMES)
    assert len({Identity.named(name) for name in NAMES}) == len(NAMES)
    assert all(len(Identity.named(name).digest) == 64 for name in NAMES)


@pytest.mark.parametrize("where", ["identity", "namespace"])
def test_field_g20_every_name_can_be_stored(make_cache: Callable, saved: Callable, tmp_path: Path, where: str) -> None:
    source = make_cache(layers=1, heads=1, width=4, tokens=3)
    paths = {name: saved(source, [1, 2, 3], f"{i}.kvc", **{where: name}) for i, name in enumerate(NAMES)}
    for name, path in paths.items():
        found = kvcellar.find(tmp_path, [1, 2, 3], **{"identity": "m", where: name})
        assert found.path == str(path), name
        with kvcellar.open(path, **{"identity": "m", where: name}) as stored:
            assert stored.restore().matched == 3
        other = NAMES[NAMES.index(name) - 1]
        with pytest.raises((IdentityMismatch, ArchiveNotFound)):
            kvcellar.open(path, **{"identity": "m", where: other})


def test_field_g20_long_names(make_cache: Callable, saved: Callable) -> None:
    name = "x" * (MAX_LABEL + 1)
    assert Identity.named(name + "y") != Identity.named(name)
    with kvcellar.open(saved(make_cache(), identity=name), identity=name) as stored:
        assert stored.restore().matched == 40
        assert len(stored.info().identity["label"]) == MAX_LABEL
    with kvcellar.open(saved(make_cache(), namespace="n" * 1024), namespace="n" * 1024) as stored:
        assert len(stored) == 40
    with pytest.raises(InvalidInput, match="1024"):
        saved(make_cache(), namespace="n" * 1025)


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_framing_is_injective(one: list[bytes], other: list[bytes]) -> None:
    assert (frame("t", one) == frame("t", other)) == (one == other)


def test_framing_by_example() -> None:
    lists = [[], [""], ["", ""], ["ab"], ["a", "b"], ["a", "", "b"], ["a\0b"], [b"\x01" + bytes(7), "a"]]
    assert len({frame(tag, fields) for tag in ("t", "tt", "") for fields in lists}) == 3 * len(lists)
    assert frame("t", ["é"]) == frame("t", ["é".encode()])
    assert frame("a", ["b"]) == bytes([1, *bytes(7)]) + b"a" + bytes([1, *bytes(7)]) + b"b"


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "Model", "digest": "0" * 64},
        {"kind": "", "digest": "0" * 64},
        {"kind": "name", "digest": "0" * 63},
        {"kind": "name", "digest": "0" * 63 + "A"},
        {"kind": "name", "digest": ""},
        {"kind": "name", "digest": "0" * 64, "label": "x" * (MAX_LABEL + 1)},
    ],
)
def test_what_is_no_identity(fields: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        Identity(**fields)


def test_labels_take_no_part_in_equality() -> None:
    assert Identity("name", "0" * 64, "one") == Identity("name", "0" * 64, "two")
    assert Identity("name", "0" * 64) != Identity("name", "1" * 64)
    assert str(Identity.named("a/b")) == "a/b (name b7e8f24294ae)"
    assert Identity(**Identity.named("a/b").to_json()) == Identity.named("a/b")
    assert Identity.of("m") == Identity.of(Identity.named("m"))
