"""Profiles: named by their content, and found as argument, inside the file, or under $KVCELLAR_HOME."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvcellar
from kvcellar import Profile
from kvcellar.errors import DamagedArchive, ProfileMismatch, ProfileMissing
from models import pairs
from toystages import STEP, lossy

RECIPE = lossy(predict={"id": "test-profile/1"}, block=16)


def _profile(shift: float = 0.0) -> Profile:
    level = np.arange(6, dtype=np.float32).reshape(3, 2) + shift
    return Profile({"level": level, "unused": np.zeros(3, np.int8)}, {"texts": ["abc"], "arithmetic": "float32/1"})


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty $KVCELLAR_HOME."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("KVCELLAR_HOME", str(folder))
    return folder


def _assert_restores(path: Path, source: list, profile: Profile | None = None) -> None:
    with kvcellar.open(path, identity="m", profile=profile) as stored:
        restored = pairs(stored.restore().cache)
    for one, other in zip(restored, source, strict=True):
        assert all((a - b).abs().max() <= STEP / 2 * (1 + 1e-3) for a, b in zip(one, other, strict=True))


def test_given_as_argument(make_cache: Callable, saved: Callable) -> None:
    source = make_cache()
    path = saved(source, recipe=RECIPE, profile=_profile())
    _assert_restores(path, source, _profile())
    with kvcellar.open(path) as stored:
        assert stored.info().profile == stored.manifest.profile == _profile().id
        assert stored.info().profile_bytes is None  # its size is not known here


def test_embedded_in_the_file(make_cache: Callable, saved: Callable) -> None:
    source = make_cache()
    plain = saved(source, name="plain.kvc", recipe=RECIPE, profile=_profile())
    path = saved(source, recipe=RECIPE, profile=_profile(), embed_profile=True)
    _assert_restores(path, source)
    with kvcellar.open(path) as stored:
        assert stored.info().profile == _profile().id
        assert stored.info().profile_bytes == len(_profile().pack())
        assert stored.read(2, 3, 9)[0].shape == (2, 6, 16)
    assert path.stat().st_size > plain.stat().st_size + len(_profile().pack())


def test_found_by_its_hash(make_cache: Callable, saved: Callable, home: Path) -> None:
    source = make_cache()
    path = saved(source, recipe=RECIPE, profile=_profile())
    assert _profile().save() == home / "profiles" / f"{_profile().id}.safetensors"
    _assert_restores(path, source)
    assert [entry.name for entry in (home / "profiles").iterdir()] == [f"{_profile().id}.safetensors"]


def test_without_kvcellar_home_the_cache_folder_is_used(
    make_cache: Callable, saved: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVCELLAR_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = make_cache()
    path = saved(source, recipe=RECIPE, profile=_profile())
    assert _profile().save().parent == tmp_path / "cache" / "kvcellar" / "profiles"
    _assert_restores(path, source)


def test_missing(make_cache: Callable, saved: Callable, home: Path) -> None:
    path = saved(make_cache(), recipe=RECIPE, profile=_profile())
    _profile(shift=1.0).save()
    with kvcellar.open(path, identity="m", mode="a") as stored:
        for use in (lambda: stored.restore(), lambda: stored.read(0, 0, 1), lambda: stored.compact()):
            with pytest.raises(ProfileMissing, match=_profile().id) as caught:
                use()
            assert str(home) in str(caught.value)
        assert stored.info().tokens == 40
        assert stored.verify().ok


def test_missing_when_saving(make_cache: Callable, saved: Callable, tmp_path: Path) -> None:
    for embed in (False, True):
        with pytest.raises(ProfileMissing):
            saved(make_cache(), recipe=RECIPE, embed_profile=embed)
    assert not list(tmp_path.iterdir())


def test_another_profile_is_refused(make_cache: Callable, saved: Callable, home: Path) -> None:
    other = _profile(shift=1.0)
    for embed in (False, True):
        path = saved(make_cache(), recipe=RECIPE, profile=_profile(), embed_profile=embed)
        with kvcellar.open(path, identity="m", profile=other) as stored, pytest.raises(ProfileMismatch) as caught:
            stored.restore()
        assert other.id in str(caught.value)
        assert f"expected {_profile().id}" in str(caught.value)
    path = saved(make_cache(), recipe=RECIPE, profile=_profile())
    _profile().save().write_bytes(other.pack())
    with kvcellar.open(path, identity="m") as stored, pytest.raises(ProfileMismatch, match=other.id):
        stored.restore()


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}", b"{" * 4000])
def test_damaged_containers_are_refused(make_cache: Callable, saved: Callable, content: bytes) -> None:
    path = saved(make_cache(), recipe=RECIPE, profile=_profile())
    _profile().save().write_bytes(content)
    with kvcellar.open(path, identity="m") as stored, pytest.raises(ProfileMismatch, match="damaged"):
        stored.restore()


def test_a_damaged_embedded_profile_is_noticed(make_cache: Callable, saved: Callable) -> None:
    source = make_cache()
    path = saved(source, recipe=RECIPE, profile=_profile(), embed_profile=True)
    data = bytearray(path.read_bytes())
    data[data.index(_profile().pack()) + 100] ^= 1
    path.write_bytes(data)
    with kvcellar.open(path, identity="m") as stored:
        with pytest.raises(DamagedArchive, match="profile at byte"):
            stored.restore()
        assert "profile" in stored.verify().problems[0][0]
    _assert_restores(path, source, _profile())  # the one given is used instead


def test_append_and_compact_keep_the_profile(make_cache: Callable, make_ids: Callable, saved: Callable) -> None:
    source = make_cache()
    first = [(k[:, :, :10], v[:, :, :10]) for k, v in source]
    settings = {"recipe": RECIPE, "profile": _profile(), "embed_profile": True}
    bulk, path = saved(source, name="bulk.kvc", **settings), saved(first, **settings)
    with kvcellar.open(path, identity="m", mode="a") as stored:
        stored.append(source, make_ids(40))
        stored.compact()
    assert path.read_bytes() == bulk.read_bytes()
    _assert_restores(path, source)


def test_the_id_is_of_the_content() -> None:
    profile = _profile()
    level = profile.tensors["level"]
    same = [
        Profile(dict(reversed(profile.tensors.items())), dict(reversed(profile.metadata.items()))),
        Profile({**profile.tensors, "level": level.astype(">f4")}, profile.metadata),
        Profile({**profile.tensors, "level": np.asfortranarray(level)}, profile.metadata),
        Profile({**profile.tensors, "level": np.repeat(level, 2, axis=0)[::2]}, profile.metadata),
        Profile.unpack(profile.pack()),
        Profile.unpack(Profile({**profile.tensors, "level": level.astype(">f4")}, profile.metadata).pack()),
    ]
    assert {other.id for other in same} == {profile.id}
    assert len(profile.id) == 64
    different = [
        _profile(shift=1.0),
        Profile({**profile.tensors, "level": level.astype(np.float64)}, profile.metadata),
        Profile({**profile.tensors, "level": level.view(np.int32)}, profile.metadata),
        Profile({**profile.tensors, "level": level.reshape(2, 3)}, profile.metadata),
        Profile({"level2": level, "unused": profile.tensors["unused"]}, profile.metadata),
        Profile({"level": level}, profile.metadata),
        Profile(profile.tensors, {**profile.metadata, "texts": ["abd"]}),
    ]
    assert len({profile.id, *(other.id for other in different)}) == 8
    assert profile.nbytes == 27


def test_shapes_survive_the_container() -> None:
    tensors = {"scalar": np.array(3.0), "one": np.array([3.0]), "none": np.zeros((0, 4), np.int16)}
    profile = Profile(tensors, {})
    shapes = {name: tensor.shape for name, tensor in Profile.unpack(profile.pack()).tensors.items()}
    assert shapes == {"scalar": (), "one": (1,), "none": (0, 4)}
    assert Profile({"x": tensors["scalar"]}, {}).id != Profile({"x": tensors["one"]}, {}).id
