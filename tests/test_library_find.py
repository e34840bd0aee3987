"""`find`: the longest stored prefix within one identity and namespace (field cases G15 and G48 among them)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvcellar
from kvcellar.errors import ArchiveNotFound, InvalidInput

Store = Callable[..., Path]


@pytest.fixture
def store(make_cache: Callable, saved: Callable) -> Store:
    """Save a small cache of the given ids as `name`.kvc."""

    def save(name: str, ids: list[int], **settings: object) -> Path:
        return saved(make_cache(layers=1, tokens=len(ids)), ids, f"{name}.kvc", **settings)

    return save


def _find(folder: Path, ids: Any, **settings: object) -> Any:
    return kvcellar.find(folder, ids, **{"identity": "m", **settings})


def test_field_g15_longest_prefix_and_where_it_ends(store: Store, tmp_path: Path) -> None:
    common = list(range(1, 51))
    path = store("a", [*common, 7, 8, 9])
    found = _find(tmp_path, [*common, *range(60, 71)])
    assert found.path == str(path)
    assert found.matched == 50
    assert found.reason == "token 50: stored 7, prompt 60"
    with kvcellar.open(path, identity="m") as stored:
        assert stored.restore(prompt=[*common, *range(60, 71)]).matched == 50


def test_field_g48_the_longest_valid_prefix_is_chosen(store: Store, tmp_path: Path, make_ids: Callable) -> None:
    ids = make_ids(60)
    for name, tokens in (("a", 25), ("b", 40), ("c", 10)):  # the longest is neither the first name nor the last
        store(name, ids[:tokens])
    store("diverging", [*ids[:5], *(token + 1 for token in ids[5:])])
    found = _find(tmp_path, ids[:45])
    assert (Path(found.path).name, found.matched) == ("b.kvc", 40)
    assert found.reason == "token 40: the archive ends here"
    (tmp_path / "b.kvc").unlink()
    assert Path(_find(tmp_path, ids[:45]).path).name == "a.kvc"
    assert _find(tmp_path, ids[:45]).matched == 25
    for other in ("other", "M"):
        assert _find(tmp_path, ids[:45], identity=other).path is None


def test_field_g48_equal_ids_under_another_identity_are_never_chosen(
    store: Store, tmp_path: Path, make_ids: Callable
) -> None:
    ids = make_ids(30)
    store("long", ids, identity="other")
    store("short", ids[:5])
    found = _find(tmp_path, ids)
    assert (Path(found.path).name, found.matched) == ("short.kvc", 5)
    assert Path(_find(tmp_path, ids, identity="other").path).name == "long.kvc"


def test_namespaces_do_not_see_each_other(store: Store, tmp_path: Path, make_ids: Callable) -> None:
    ids = make_ids(30)
    store("a", ids, namespace="tenant a")
    nothing = _find(tmp_path, ids, identity="nobody")
    for namespace in ("", "tenant b"):
        assert _find(tmp_path, ids, namespace=namespace) == nothing
    assert _find(tmp_path, ids, namespace="tenant a").matched == 30


def test_reasons(store: Store, tmp_path: Path, make_ids: Callable) -> None:
    ids = make_ids(30)
    store("a", ids)
    assert _find(tmp_path, ids[:12]).reason == "token 12: the prompt ends here, the archive goes on to 30"
    assert _find(tmp_path, ids[:12]).matched == 12
    assert _find(tmp_path, ids).reason == "token 30: the archive ends here and so does the prompt"
    assert _find(tmp_path, [ids[0] + 1]) == (
        None,
        0,
        f"token 0: stored {ids[0]}, prompt {ids[0] + 1} (nothing matches)",
    )
    assert _find(tmp_path, []).matched == 0


@pytest.mark.parametrize("form", [np.array, torch.tensor, lambda ids: torch.tensor([ids]), tuple])
def test_prompts_of_every_form(store: Store, tmp_path: Path, make_ids: Callable, form: Callable) -> None:
    store("a", make_ids(30))
    assert _find(tmp_path, form(make_ids(45))).matched == 30


def test_nothing_to_find(tmp_path: Path) -> None:
    assert _find(tmp_path, [1, 2]).path is None
    with pytest.raises(ArchiveNotFound, match="no folder"):
        _find(tmp_path / "absent", [1, 2])
    with pytest.raises(InvalidInput, match="text"):
        _find(tmp_path, "a prompt")


def test_what_cannot_be_read_is_passed_over_aloud(store: Store, tmp_path: Path, make_ids: Callable) -> None:
    ids = make_ids(30)
    store("good", ids[:7])
    damaged = store("cut", ids)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    flipped = store("flipped", ids)
    data = bytearray(flipped.read_bytes())
    data[60] ^= 1  # in the manifest
    flipped.write_bytes(data)
    with pytest.warns(UserWarning, match="passed over") as caught:
        found = _find(tmp_path, ids)
    assert (Path(found.path).name, found.matched) == ("good.kvc", 7)
    messages = sorted(str(warning.message) for warning in caught)
    assert len(messages) == 2
    assert messages[0].startswith("passed over cut.kvc: damaged archive")
    assert messages[1].startswith("passed over flipped.kvc: damaged archive: manifest")
    assert caught[0].filename == __file__


def test_archives_of_a_later_recipe_are_passed_over_aloud(
    store: Store, tmp_path: Path, make_ids: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = make_ids(30)
    store("good", ids[:7])
    with monkeypatch.context() as later:
        later.setattr("kvcellar.recipe.RECIPE_VERSION", 2)
        recipe = kvcellar.Recipe(name="later", symbols={"id": "byteplanes-zstd/1"}, version=2)
        store("later", ids, recipe=recipe)
    with pytest.warns(UserWarning, match=r"passed over later\.kvc"):
        assert _find(tmp_path, ids).matched == 7


def test_other_files_are_passed_over_in_silence(store: Store, tmp_path: Path, make_ids: Callable) -> None:
    ids = make_ids(30)
    path = store("good", ids[:7])
    (tmp_path / "zip.kvc").write_bytes(b"PK\x03\x04")
    (tmp_path / "good.kvc.bak").write_bytes(path.read_bytes()[:-5])
    (tmp_path / "notes.txt").write_text("words")
    (tmp_path / "folder.kvc").mkdir()
    store("elsewhere", ids, namespace="tenant b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _find(tmp_path, ids).matched == 7
