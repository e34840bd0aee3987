"""`save` and `open`: whose cache it is, what is refused, and what happens to the file that was there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kvcellar
from kvcellar.errors import (
    ArchiveClosed,
    ArchiveNotFound,
    IdentityMismatch,
    InvalidInput,
    MissingIdentity,
    NotAnArchive,
    StorageError,
    TokensMismatch,
)
from kvcellar.frontends.fingerprint import identity_of_model
from models import llama, logits, new_llama, pairs, prefill, prompt, same_bits

IDS = prompt(40)


@pytest.fixture
def of_llama(tmp_path: Path) -> Path:
    """40 tokens of the shared Llama."""
    kvcellar.save(tmp_path / "llama.kvc", prefill(llama(), IDS), tokens=IDS, model=llama())
    return tmp_path / "llama.kvc"


def test_save_reports_what_it_wrote(make_cache: Callable, make_ids: Callable, tmp_path: Path) -> None:
    info = kvcellar.save(tmp_path / "a.kvc", make_cache(), tokens=make_ids(40), identity="m", namespace="n")
    with kvcellar.open(tmp_path / "a.kvc", namespace="n") as stored:
        assert stored.info() == info
        assert stored.path == str(tmp_path / "a.kvc")
        assert len(stored) == info.tokens == info["tokens"] == 40
        assert stored.tokens.tolist() == make_ids(40)
        assert stored.tokens.dtype == "int64"
        assert (info.recipe, info.namespace, info.layers) == ("exact", "n", 3)
        assert info.identity["label"] == "m"


def test_another_model_is_refused_with_both_sides(of_llama: Path) -> None:
    other = new_llama()
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight[3, 5] *= 1.01
    mine, theirs = identity_of_model(llama()), identity_of_model(other)
    with pytest.raises(IdentityMismatch) as caught:
        kvcellar.open(of_llama, model=other)
    assert f"expected {mine}, got {theirs}" in str(caught.value)
    assert mine.digest[:12] != theirs.digest[:12]
    with kvcellar.open(of_llama, model=new_llama()) as stored:  # the same weights in another object
        assert stored.restore().matched == 40


@pytest.mark.parametrize("change", ["rope_parameters", "rms_norm_eps", "buffer", "dtype"])
def test_identity_covers_what_shapes_the_cache(change: str) -> None:
    if change == "rope_parameters":
        other = new_llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    elif change == "rms_norm_eps":
        other = new_llama(rms_norm_eps=1e-3)
    elif change == "buffer":
        other = new_llama()
        other.model.register_buffer("shift", torch.ones(1))
    else:
        other = new_llama(dtype=torch.bfloat16)
    assert identity_of_model(other) != identity_of_model(llama())


def test_identity_covers_names_and_shapes_of_equal_bytes() -> None:
    models = [new_llama() for _ in range(4)]
    for model, name, shape in zip(models, ("a", "b", "a", "a"), ((2, 3), (2, 3), (3, 2), (2, 3)), strict=True):
        model.model.register_buffer(name, torch.arange(6.0).reshape(shape))
    keys = [identity_of_model(model) for model in models]
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3


def test_identity_leaves_out_what_shapes_no_number() -> None:
    other = new_llama(attention="eager", use_cache=False, bos_token_id=5, name_or_path="elsewhere")
    assert identity_of_model(other) == identity_of_model(llama())


def test_identity_notices_weights_changed_in_place() -> None:
    model = new_llama()
    before = identity_of_model(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[7, 7] += 0.5
    assert identity_of_model(model) != before
    with torch.no_grad():
        model.model.embed_tokens.weight[7, 7] -= 0.5
    assert identity_of_model(model) == identity_of_model(llama())


def test_model_and_name_never_agree(of_llama: Path, make_cache: Callable, saved: Callable) -> None:
    digest = identity_of_model(llama()).digest
    assert kvcellar.Identity("model", digest) != kvcellar.Identity("name", digest)
    for name in (digest, identity_of_model(llama()).label):
        with pytest.raises(IdentityMismatch):
            kvcellar.open(of_llama, identity=name)
    with pytest.raises(IdentityMismatch):
        kvcellar.open(saved(make_cache(), identity=digest), model=llama())
    with kvcellar.open(of_llama, identity=kvcellar.Identity("model", digest)) as stored:
        assert stored.restore().matched == 40


def test_allow_mismatch_restores_across_models(of_llama: Path) -> None:
    expected = pairs(prefill(llama(), IDS))
    for who in ({"model": new_llama(seed=1)}, {"identity": "other"}):
        with kvcellar.open(of_llama, **who, allow_mismatch=True) as stored:
            assert same_bits(pairs(stored.restore().cache), expected)
        with pytest.raises(IdentityMismatch):
            kvcellar.open(of_llama, **who)


def test_without_identity_only_looking_is_allowed(of_llama: Path, tmp_path: Path) -> None:
    with kvcellar.open(of_llama, mode="a") as stored:
        assert len(stored) == 40
        assert stored.verify().ok
        assert stored.read(0, 0, 1)[0].shape == (2, 1, 16)
        with pytest.raises(MissingIdentity, match="model= or identity="):
            stored.restore()
        longer = prefill(llama(), IDS)
        logits(llama(), longer, [1])
        with pytest.raises(MissingIdentity, match="model= or identity="):
            stored.append(longer, [*IDS, 1])
        assert len(stored) == 40
    with pytest.raises(MissingIdentity):
        kvcellar.save(tmp_path / "b.kvc", longer, tokens=[*IDS, 1])
    with pytest.raises(MissingIdentity):
        kvcellar.find(tmp_path, IDS)
    assert not (tmp_path / "b.kvc").exists()


def test_model_and_identity_together_are_refused(of_llama: Path, tmp_path: Path) -> None:
    both = {"model": llama(), "identity": identity_of_model(llama())}
    for call in (
        lambda: kvcellar.open(of_llama, **both),
        lambda: kvcellar.save(tmp_path / "b.kvc", prefill(llama(), IDS), tokens=IDS, **both),
        lambda: kvcellar.find(tmp_path, IDS, **both),
    ):
        with pytest.raises(InvalidInput, match="not both"):
            call()


@pytest.mark.parametrize("who", [{"model": "llama"}, {"identity": ""}, {"identity": 5}, {"identity": b"m"}])
def test_what_is_no_identity_is_refused(make_cache: Callable, make_ids: Callable, tmp_path: Path, who: dict) -> None:
    with pytest.raises(InvalidInput):
        kvcellar.save(tmp_path / "a.kvc", make_cache(), tokens=make_ids(40), **who)


@pytest.mark.parametrize("where", ["identity", "namespace"])
def test_text_that_utf8_cannot_write_is_refused_by_name(make_cache: Callable, saved: Callable, where: str) -> None:
    with pytest.raises(InvalidInput):
        saved(make_cache(), **{where: "a\udc80"})


def test_another_namespace_looks_like_nothing(make_cache: Callable, saved: Callable, tmp_path: Path) -> None:
    path, absent = saved(make_cache(), namespace="tenant a"), tmp_path / "absent.kvc"
    with pytest.raises(ArchiveNotFound) as missing:
        kvcellar.open(absent, identity="m", namespace="tenant b")
    for namespace in ("tenant b", "", "Tenant A", "tenant a ", "tenant"):
        for mode in ("r", "a"):
            with pytest.raises(ArchiveNotFound) as caught:
                kvcellar.open(path, identity="m", namespace=namespace, mode=mode)
            assert str(caught.value) == str(missing.value).replace(str(absent), str(path))
            assert caught.value.errno == missing.value.errno
    with kvcellar.open(path, identity="m", namespace="tenant a", mode="a") as stored:  # no lock was left behind
        assert stored.info().namespace == "tenant a"


def test_ids_that_do_not_fit_the_cache(make_cache: Callable, make_ids: Callable, tmp_path: Path) -> None:
    def save(ids: object, **settings: object) -> None:
        kvcellar.save(tmp_path / "a.kvc", make_cache(), tokens=ids, identity="m", **settings)

    with pytest.raises(TokensMismatch, match=r"40 tokens, 41 .* last token is not in the cache yet"):
        save(make_ids(41))
    with pytest.raises(TokensMismatch, match=r"40 tokens, 33 .* pads give attention_mask="):
        save(make_ids(33))
    with pytest.raises(TokensMismatch, match="40 tokens, 45 token ids") as caught:
        save(make_ids(45))
    assert "last token" not in str(caught.value)
    with pytest.raises(InvalidInput, match="text"):
        save("a" * 40)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda ids: [-1, *ids[1:]], id="negative"),
        pytest.param(lambda ids: [1 << 32, *ids[1:]], id="beyond 32 bits"),
        pytest.param(lambda ids: [1 << 80, *ids[1:]], id="beyond 64 bits"),
        pytest.param(lambda ids: [float(i) for i in ids], id="floats"),
        pytest.param(lambda ids: torch.tensor(ids, dtype=torch.float32), id="float tensor"),
        pytest.param(lambda ids: torch.tensor(ids, dtype=torch.bfloat16), id="bfloat16 tensor"),
        pytest.param(lambda ids: [True] * len(ids), id="booleans"),
        pytest.param(lambda ids: [str(i) for i in ids], id="list of text"),
        pytest.param(lambda ids: b"a" * len(ids), id="bytes"),
        pytest.param(lambda ids: None, id="none"),
        pytest.param(lambda ids: {"input_ids": ids}, id="tokenizer output"),
        pytest.param(lambda ids: [[ids]], id="3-D"),
        pytest.param(lambda ids: [ids, ids[1:]], id="ragged"),
    ],
)
def test_what_are_no_token_ids_is_refused(
    make_cache: Callable, make_ids: Callable, tmp_path: Path, change: Callable
) -> None:
    with pytest.raises(InvalidInput):
        kvcellar.save(tmp_path / "a.kvc", make_cache(), tokens=change(make_ids(40)), identity="m")


def test_the_largest_id_is_kept(make_cache: Callable, make_ids: Callable, saved: Callable) -> None:
    ids = [(1 << 32) - 1, 0, *make_ids(38)]
    with kvcellar.open(saved(make_cache(), ids)) as stored:
        assert stored.tokens.tolist() == ids


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_one_row_of_a_batch(make_cache: Callable, make_ids: Callable, saved: Callable, two_dimensional: bool) -> None:
    batch, rows = make_cache(batch=3), [make_ids(40, seed) for seed in range(3)]
    for row in range(3):
        ids = torch.tensor(rows) if two_dimensional else rows[row]
        with kvcellar.open(saved(batch, ids, f"{row}.kvc", row=row), identity="m") as stored:
            assert stored.tokens.tolist() == rows[row]
            expected = [(keys[row : row + 1], values[row : row + 1]) for keys, values in batch]
            assert same_bits(pairs(stored.restore().cache), expected)
    for row in (3, -1):
        with pytest.raises(InvalidInput, match=f"row {row} of a batch of 3"):
            saved(batch, rows[0], row=row)


def test_a_file_that_is_no_archive_is_never_replaced(make_cache: Callable, saved: Callable, tmp_path: Path) -> None:
    foreign = tmp_path / "a.kvc"
    for content in (b"PK\x03\x04 somebody's work", b"x", b"\x89KVD\r\n\x1a\n"):
        foreign.write_bytes(content)
        with pytest.raises(NotAnArchive, match="left as it is"):
            saved(make_cache())
        assert foreign.read_bytes() == content
        with pytest.raises(NotAnArchive):
            kvcellar.open(foreign)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.kvc"]


def test_folders_and_places_without_a_folder(make_cache: Callable, saved: Callable, tmp_path: Path) -> None:
    (tmp_path / "folder.kvc").mkdir()
    for name in ("folder.kvc", "no/such/folder.kvc"):
        with pytest.raises(StorageError, match=r"folder"):
            saved(make_cache(), name=name)
    with pytest.raises(StorageError):
        kvcellar.open(tmp_path / "folder.kvc")
    with pytest.raises(ArchiveNotFound):
        kvcellar.open(tmp_path / "no" / "such.kvc")


def test_replacing_leaves_open_readers_what_they_had(make_cache: Callable, make_ids: Callable, saved: Callable) -> None:
    old, new = make_cache(), make_cache(tokens=20, seed=1)
    path = saved(old)
    with kvcellar.open(path, identity="m") as before:
        saved(new, make_ids(20, seed=1))
        assert len(before) == 40
        assert same_bits(pairs(before.restore().cache), old)
        with kvcellar.open(path, identity="m") as after:
            assert after.tokens.tolist() == make_ids(20, seed=1)
            assert same_bits(pairs(after.restore().cache), new)


def test_a_closed_archive_says_so(make_cache: Callable, saved: Callable) -> None:
    path = saved(make_cache())
    with kvcellar.open(path, identity="m", mode="a") as stored:
        pass
    stored.close()  # twice does no harm
    for use in (
        lambda: len(stored),
        lambda: stored.tokens,
        lambda: stored.manifest,
        lambda: stored.restore(),
        lambda: stored.read(0, 0, 1),
        lambda: stored.append(make_cache(), [1] * 40),
        lambda: stored.compact(),
        lambda: stored.info(),
        lambda: stored.verify(),
    ):
        with pytest.raises(ArchiveClosed, match=r"a\.kvc is closed"):
            use()


def test_modes(make_cache: Callable, saved: Callable) -> None:
    path = saved(make_cache())
    for mode in ("w", "", "ra", None):
        with pytest.raises(InvalidInput, match="'r' or 'a'"):
            kvcellar.open(path, mode=mode)
