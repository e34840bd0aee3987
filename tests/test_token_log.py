"""Recipe `tokens`: a cache kept as its token ids alone, and computed again by the model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kvcellar
from kvcellar import errors, tokens_recipe
from kvcellar.archive.format import MAGIC
from kvcellar.frontends import tokenreplay
from kvcellar.frontends.tokenfiles import TokenArchive
from kvcellar.language.blocks import Segment, blocks_of
from kvcellar.language.checks import check_blocks, distances
from kvcellar.language.tokenlog import TokenLog, _sum
from models import VOCABULARY, llama, logits, mistral, new_llama, pairs, prefill, prompt, same_bits

CODED = tokens_recipe(model_coded=True)


def said(model: object, tokens: int = 60) -> list[int]:
    """Ids that the model finds probable, so that coding them under it pays."""
    given = torch.tensor([prompt(2)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        out = model.generate(  # type: ignore[attr-defined]
            given, attention_mask=torch.ones_like(given), max_new_tokens=tokens - 2, do_sample=True, pad_token_id=0
        )
    return out[0].tolist()


def one_by_one(model: object, ids: list[int]) -> object:
    cache = prefill(model, ids[:1])
    for token in ids[1:]:
        prefill(model, [token], cache)
    return cache


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.kvc"


def save(path: Path, cache: object, ids: list[int], **settings: object) -> kvcellar.frontends.library.ArchiveInfo:
    return kvcellar.save(path, cache, tokens=ids, **{"model": llama(), "recipe": "tokens", **settings})


def test_a_log_gives_back_ids_and_the_cache_bit_by_bit(path: Path) -> None:
    ids = prompt(300)
    cache = prefill(llama(), ids)
    info = save(path, cache, ids)
    assert info.file_bytes == path.stat().st_size < 600 < info.raw_bytes / 100
    assert (info.recipe, info.tokens, info.next_position) == ("tokens", 300, 300)
    with kvcellar.open(path) as archive:
        assert isinstance(archive, TokenArchive)
        assert archive.tokens.tolist() == ids
        assert archive.verify()
    with kvcellar.open(path, model=llama()) as archive:
        restored = archive.restore()
    assert restored.replay.exact
    assert (restored.matched, restored.next_position) == (300, 300)
    assert same_bits(pairs(restored.cache), pairs(cache))
    assert torch.equal(logits(llama(), restored.cache, [5]), logits(llama(), cache, [5]))


@pytest.mark.parametrize("chunk", [64, 1])
def test_the_steps_in_which_a_cache_was_computed_are_taken_again(path: Path, chunk: int) -> None:
    ids, cache = prompt(150), None
    for at in range(0, 150, chunk):
        cache = prefill(llama(), ids[at : at + chunk], cache)
    save(path, cache, ids, recipe=tokens_recipe(chunk=chunk))
    with kvcellar.open(path, model=llama()) as archive:
        restored = archive.restore()
    assert restored.replay.exact
    assert same_bits(pairs(restored.cache), pairs(cache))


def test_another_schedule_is_reported_with_its_distance_and_hardly_another_model(path: Path) -> None:
    ids = prompt(300)
    cache = one_by_one(llama(), ids)
    save(path, cache, ids, recipe=tokens_recipe(chunk=512))
    with kvcellar.open(path, model=llama()) as archive:
        restored = archive.restore()
    found = restored.replay
    assert [(b.start, b.stop) for b in found.blocks] == [(0, 256), (256, 300)]
    if not found.exact:  # whether kernels for one row and for many differ is the machine's affair
        assert 0 < found.distance < 1e-4
    original, replayed = (
        torch.log_softmax(logits(llama(), c, prompt(20, seed=1)).double(), -1) for c in (cache, restored.cache)
    )
    assert float((original.exp() * (original - replayed)).sum(-1).mean()) < 1e-4


def test_a_changed_cache_is_told_by_its_checksums_and_its_distance(path: Path) -> None:
    ids = prompt(300)
    cache = prefill(llama(), ids)
    cache.layers[1].values[0, 0, 270, 3] += 1e-3
    save(path, cache, ids)
    with kvcellar.open(path, model=llama()) as archive:
        first, second = archive.restore().replay.blocks
    assert first.exact
    assert not second.exact
    assert 0 < second.distance < 1e-3


def test_sketches_estimate_the_distance() -> None:
    ids = prompt(200)
    kv = kvcellar.frontends.transformers.take_cache(prefill(llama(), ids))
    ratios = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        layers = tuple(
            replace(layer, keys=layer.keys + 0.01 * torch.randn(layer.keys.shape, generator=generator))
            for layer in kv.layers
        )
        blocks = blocks_of([Segment(200, 64)], 256)
        ((exact, found),) = distances(replace(kv, layers=layers), blocks, check_blocks(kv, blocks, 8))
        missed = sum(float((a.keys - b.keys).double().square().sum()) for a, b in zip(layers, kv.layers, strict=True))
        norm = sum(float(x.double().square().sum()) for layer in layers for x in (layer.keys, layer.values))
        assert not exact
        ratios.append(found / (missed / norm) ** 0.5)
    assert 0.8 < np.sqrt(np.mean(np.square(ratios))) < 1.2
    assert 0.3 < min(ratios) < max(ratios) < 2.5


def test_prefixes_and_prompts_are_replayed_as_far_as_they_go(path: Path) -> None:
    ids = prompt(300)
    save(path, prefill(llama(), ids), ids)
    with kvcellar.open(path, model=llama()) as archive:
        assert archive.restore(prompt=[*ids[:100], 7, 7, 7]).matched == 100
        assert archive.restore(prompt=ids).matched == 299
        cut = archive.restore(positions=280)
        assert cut.cache.get_seq_length() == 280
        assert [block.stop for block in cut.replay.blocks] == [256]
        assert archive.restore(positions=0).cache.get_seq_length() == 0
        few = archive.restore(layers=[1], dtype="bfloat16")
        assert few.cache.layers[1].keys.dtype == torch.bfloat16
        with pytest.raises(errors.InvalidInput, match="first token on"):
            archive.restore(positions=[3, 4])
        with pytest.raises(errors.InvalidInput, match="no numbers"):
            archive.read(0, 0, 1)


def test_sliding_layers_are_checked_by_their_windows(path: Path) -> None:
    model, ids = mistral(16), prompt(60)
    save(path, prefill(model, ids), ids, model=model)
    with kvcellar.open(path, model=model) as archive:
        replay = archive.restore().replay
    assert replay.exact
    assert len(replay.blocks) == 2


@pytest.mark.parametrize("keep", [False, True])
def test_ids_coded_under_the_model_come_back_with_its_cache(path: Path, keep: bool) -> None:
    ids = said(llama())
    cache = one_by_one(llama(), ids)
    save(path, cache, ids, recipe=tokens_recipe(model_coded=True, keep_ids=keep))
    with kvcellar.open(path, model=llama()) as archive:
        if not keep:
            with pytest.raises(errors.InvalidInput, match="under the model"):
                archive.tokens  # noqa: B018
        done = []
        restored = archive.restore(progress=lambda n, total: done.append((n, total)))
        assert archive.tokens.tolist() == ids
    assert done == [(n, 60) for n in range(1, 61)]  # one pass gives both
    assert restored.replay.exact
    assert restored.replay.schedule == (Segment(60, 1),)
    assert same_bits(pairs(restored.cache), pairs(cache))


def test_a_coded_log_of_a_prefilled_cache_is_replayed_as_it_was_computed(path: Path) -> None:
    ids = said(llama(), 120)
    cache = prefill(llama(), ids)
    save(path, cache, ids, recipe=CODED)
    with kvcellar.open(path, model=llama()) as archive:
        restored = archive.restore()
    assert restored.replay.exact
    assert same_bits(pairs(restored.cache), pairs(cache))


def test_the_coded_stream_takes_the_entropy_of_the_model(path: Path) -> None:
    ids = said(llama(), 200)
    save(path, prefill(llama(), ids), ids, recipe=CODED)
    found = torch.log_softmax(logits(llama(), prefill(llama(), ids[:1]), ids[1:]).double(), -1)
    first = torch.log_softmax(logits(llama(), None or kvcellar_cache(), ids[:1]).double(), -1)
    surprise = -float(first[0, ids[1]]) - float(found[torch.arange(198), torch.tensor(ids[2:])].sum())
    log = TokenLog.unpack(path.read_bytes(), "a")
    assert log.coded is not None
    assert log.ids is None
    assert path.stat().st_size <= 1.02 * surprise / np.log(2) / 8 + 64, "the whole file, header and checks included"


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_coded_file_of_few_tokens_takes_no_more_than_64_bytes(path: Path, tokens: int) -> None:
    """So few that they say nothing: what is left is header, checks, and the first token, which counts 0 bits."""
    ids = [5]
    while len(ids) < tokens:
        ids.append(int(logits(llama(), kvcellar_cache(), ids)[-1].argmax()))
    save(path, one_by_one(llama(), ids), ids, recipe=CODED)
    log = TokenLog.unpack(path.read_bytes(), "a")
    assert (log.tokens, log.ids) == (tokens, None)
    assert log.sketches.shape == (1, 2)
    assert path.stat().st_size <= 64


def kvcellar_cache() -> object:
    from transformers import DynamicCache

    return DynamicCache(config=llama().config)


def test_an_improbable_text_is_kept_packed(path: Path) -> None:
    cache, ids = prefill(llama(), [3]), [3]
    for _ in range(80):
        ids.append(int(logits(llama(), cache, ids[-1:])[-1].argmin()))
    save(path, one_by_one(llama(), ids), ids, recipe=CODED)
    log = TokenLog.unpack(path.read_bytes(), "a")
    assert log.coded is None
    assert log.ids is not None
    assert len(log.ids) <= 7 * len(ids) / 8 + 2
    with kvcellar.open(path, model=llama()) as archive:
        assert archive.tokens.tolist() == ids


def test_another_runtime_is_refused_unless_ids_are_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = said(llama())
    cache = prefill(llama(), ids)
    for keep in (False, True):
        save(path, cache, ids, recipe=tokens_recipe(model_coded=True, keep_ids=keep))
        with monkeypatch.context() as patch, kvcellar.open(path, model=llama()) as archive:
            patch.setattr(tokenreplay, "runtime_id", lambda model: b"else")
            if keep:
                assert archive.restore().matched == 60
                continue
            with pytest.raises(errors.RuntimeMismatch, match=b"else".hex()):
                archive.restore()


def test_numbers_that_differ_under_the_same_runtime_id_never_give_a_wrong_text(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = said(llama())
    save(path, prefill(llama(), ids), ids, recipe=CODED)
    other = new_llama(seed=1)
    monkeypatch.setattr(tokenreplay, "runtime_id", lambda model: TokenLog.unpack(path.read_bytes(), "a").runtime)
    with kvcellar.open(path, identity="other", allow_mismatch=True, replay_with=other) as archive:
        with pytest.raises(errors.DamagedArchive):
            archive.restore()
        with pytest.raises(errors.InvalidInput):
            archive.tokens  # noqa: B018


def test_threads_and_attention_are_part_of_the_runtime() -> None:
    from kvcellar.language.runtime import runtime_id

    here = runtime_id(llama())
    assert here == runtime_id(llama())
    assert here != runtime_id(llama("eager"))
    try:
        torch.set_num_threads(2)
        assert here != runtime_id(llama())
    finally:
        torch.set_num_threads(1)


OTHER_PROCESS = """
import sys
import kvcellar
from models import llama
for path in sys.argv[1:]:
    with kvcellar.open(path, model=llama()) as archive:
        restored = archive.restore()
        print(restored.replay.exact, *archive.tokens)
"""


def test_both_codes_are_read_in_another_process(tmp_path: Path) -> None:
    ids = said(llama())
    cache = prefill(llama(), ids)
    paths = [tmp_path / "free.kvc", tmp_path / "coded.kvc"]
    for path, recipe in zip(paths, (tokens_recipe(), CODED), strict=True):
        save(path, cache, ids, recipe=recipe)
    command = [sys.executable, "-c", OTHER_PROCESS, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 2 * f"True {' '.join(map(str, ids))}\n"


def test_an_interrupted_replay_leaves_nothing_and_can_start_again(path: Path) -> None:
    ids = prompt(40)
    save(path, prefill(llama(), ids), ids, recipe=tokens_recipe(chunk=8))
    into = kvcellar_cache()

    def stop(done: int, total: int) -> None:
        if done >= 16:
            raise KeyboardInterrupt

    with kvcellar.open(path, model=llama()) as archive:
        with pytest.raises(KeyboardInterrupt):
            archive.restore(into=into, progress=stop)
        assert into.get_seq_length() == 0  # type: ignore[attr-defined]
        assert archive.restore(into=into).cache is into
        assert into.get_seq_length() == 40  # type: ignore[attr-defined]


def test_an_interrupted_save_leaves_the_file_before(path: Path) -> None:
    ids = said(llama())
    save(path, prefill(llama(), ids), ids)
    before = path.read_bytes()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(path, prefill(llama(), ids), ids, recipe=CODED, progress=stop)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["a.kvc"]


def test_a_log_grows_and_every_part_is_replayed_as_it_was_read(path: Path) -> None:
    ids = prompt(120)
    cache = prefill(llama(), ids[:70])
    save(path, cache, ids[:70])
    prefill(llama(), ids[70:], cache)
    with kvcellar.open(path, model=llama(), mode="a") as archive:
        info = archive.append(cache, ids)
        assert info.tokens == len(archive) == 120
        assert archive.append(cache, ids).tokens == 120
        with pytest.raises(errors.TokensMismatch, match="part at 5"):
            archive.append(cache, [*ids[:5], 1 + ids[5] % 100, *ids[6:]])
    with kvcellar.open(path, model=llama()) as archive:
        restored = archive.restore()
        with pytest.raises(errors.InvalidInput, match="mode='a'"):
            archive.append(cache, ids)
    assert restored.replay.exact
    assert same_bits(pairs(restored.cache), pairs(cache))


def test_a_coded_log_says_why_it_does_not_grow(path: Path) -> None:
    ids = said(llama())
    cache = prefill(llama(), ids)
    save(path, cache, ids, recipe=CODED)
    with (
        kvcellar.open(path, model=llama(), mode="a") as archive,
        pytest.raises(errors.InvalidInput, match="under the model"),
    ):
        archive.append(cache, ids)


def test_find_counts_logs(tmp_path: Path) -> None:
    ids = said(llama())
    save(tmp_path / "exact.kvc", prefill(llama(), ids[:20]), ids[:20], recipe="exact")
    save(tmp_path / "log.kvc", prefill(llama(), ids[:50]), ids[:50])
    found = kvcellar.find(tmp_path, ids, model=llama())
    assert found.path is not None
    assert (Path(found.path).name, found.matched) == ("log.kvc", 50)
    assert kvcellar.find(tmp_path, ids, identity="another").path is None
    save(tmp_path / "log.kvc", prefill(llama(), ids), ids, recipe=CODED)
    with pytest.warns(UserWarning, match="under the model"):
        found = kvcellar.find(tmp_path, ids, model=llama())
    assert found.path is not None
    assert Path(found.path).name == "exact.kvc"


def test_a_log_is_in_the_trie_with_its_probabilities(tmp_path: Path) -> None:
    ids, bits = said(llama())[:50], np.full(50, -0.5)
    kvcellar.save(
        tmp_path / "log.kvc", prefill(llama(), ids), tokens=ids, model=llama(), recipe="tokens", log2_probs=bits
    )
    sessions = kvcellar.Sessions(tmp_path, model=llama())
    sessions.refresh()
    assert sessions.trie.names() == ["log.kvc"]
    near = kvcellar.nearest(tmp_path, [*ids, 1], model=llama())
    assert near is not None
    assert (near.matched, near.tokens, near.kinship.cell.depth) == (50, 50, 25)
    (trie_file,) = (path for path in tmp_path.iterdir() if path.suffix == ".trie")
    with pytest.raises(errors.NotAnArchive):
        kvcellar.open(trie_file)


def test_a_coded_log_tells_the_trie_nothing(tmp_path: Path) -> None:
    ids = said(llama())
    bits = np.full(len(ids), -0.5)
    kvcellar.save(tmp_path / "log.kvc", prefill(llama(), ids), tokens=ids, model=llama(), recipe=CODED, log2_probs=bits)
    assert [path.name for path in tmp_path.iterdir()] == ["log.kvc"]


def test_a_coded_log_of_another_model_is_no_remark(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    ids = said(llama())
    save(tmp_path / "log.kvc", prefill(llama(), ids), ids, recipe=CODED)
    assert kvcellar.find(tmp_path, ids, identity="another").path is None
    assert not [each for each in recwarn if "passed over" in str(each.message)]


def test_a_phrase_is_found_in_a_log(path: Path) -> None:
    ids = prompt(60)
    save(path, prefill(llama(), ids), ids)
    with kvcellar.open(path) as archive:
        assert [hit.start for hit in archive.search(ids[20:24])] == [20]


def test_without_a_model_it_says_what_is_needed(path: Path) -> None:
    ids = prompt(20)
    save(path, prefill(llama(), ids), ids)
    with kvcellar.open(path) as archive, pytest.raises(errors.MissingIdentity, match=r"model=.*LlamaForCausalLM"):
        archive.restore()
    with kvcellar.open(path) as archive, pytest.raises(errors.IdentityMismatch):
        archive.restore(model=new_llama(seed=1))
    with pytest.raises(errors.IdentityMismatch):
        kvcellar.open(path, model=new_llama(seed=1))


def test_ids_outside_the_vocabulary_are_refused_before_the_model_runs(path: Path) -> None:
    ids = prompt(20)
    cache = prefill(llama(), ids)
    with pytest.raises(errors.TokensMismatch, match=f"0…{VOCABULARY - 1}"):
        save(path, cache, [*ids[:-1], VOCABULARY])
    kvcellar.save(path, cache, tokens=[*ids[:-1], VOCABULARY], identity="m", recipe="tokens")
    with kvcellar.open(path, identity="m", replay_with=llama()) as archive, pytest.raises(errors.TokensMismatch):
        archive.restore()


def test_one_token_and_none(path: Path) -> None:
    cache = prefill(llama(), [7])
    for recipe in ("tokens", CODED):
        save(path, cache, [7], recipe=recipe)
        with kvcellar.open(path, model=llama()) as archive:
            assert archive.restore().replay.exact
            assert archive.tokens.tolist() == [7]
    with pytest.raises(errors.InvalidInput, match="empty"):
        save(path, kvcellar_cache(), [])


def test_what_cannot_be_replayed_is_refused(path: Path) -> None:
    ids = prompt(20)
    cache = prefill(llama(), ids)
    with pytest.raises(errors.InvalidInput, match="position 0"):
        save(path, cache, ids, positions=list(range(5, 25)))
    with pytest.raises(errors.InvalidInput, match="next_position"):
        save(path, cache, ids, next_position=30)
    with pytest.raises(errors.InvalidRecipe, match="model="):
        save(path, cache, ids, model=None, identity="m", recipe=CODED)
    for symbols in ({"chunk": 0}, {"chunk": "8"}, {"model_coded": 1}, {"order": 3}):
        recipe = kvcellar.Recipe(name="tokens", symbols={"id": "tokens/1", **symbols})
        with pytest.raises(errors.InvalidRecipe, match="tokens/1"):
            save(path, cache, ids, recipe=recipe)
    path.write_bytes(b"something else")
    with pytest.raises(errors.NotAnArchive):
        save(path, cache, ids)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    ids, path = said(llama()), tmp_path_factory.mktemp("log") / "a.kvc"
    save(path, prefill(llama(), ids), ids, recipe=tokens_recipe(model_coded=True, keep_ids=True), namespace="ours")
    return path.read_bytes()


def test_every_cut_and_every_flipped_bit_is_noticed(packed: bytes) -> None:
    assert packed[:4] not in (MAGIC[:4],)
    for stop in range(len(packed)):
        with pytest.raises((errors.DamagedArchive, errors.NotAnArchive)):
            TokenLog.unpack(packed[:stop], "a")
    for bit in range(8 * len(packed)):
        data = bytearray(packed)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises((errors.DamagedArchive, errors.NotAnArchive)):
            TokenLog.unpack(bytes(data), "a")


def test_forged_lengths_are_refused_before_anything_is_made(packed: bytes) -> None:
    body = packed[:-4]
    for at in range(4, len(body)):
        for value in (0, 1, 0x7F, 0x80, 0xFF):
            forged = body[:at] + bytes([value]) + body[at + 1 :]
            forged += _sum(forged).to_bytes(4, "little")
            try:
                log = TokenLog.unpack(forged, "a")
                log.token_ids()
            except (errors.DamagedArchive, errors.NewerFormat, errors.InvalidInput):
                pass


def test_a_log_of_another_namespace_looks_like_none(path: Path, packed: bytes) -> None:
    path.write_bytes(packed)
    with pytest.raises(errors.ArchiveNotFound):
        kvcellar.open(path)
    with kvcellar.open(path, namespace="ours") as archive:
        assert len(archive) == 60


def test_what_takes_archives_with_blocks_says_what_this_is(path: Path) -> None:
    ids = prompt(20)
    save(path, prefill(llama(), ids), ids)
    with pytest.raises(errors.NotAnArchive, match="token log"):
        kvcellar.recompress(path, path, recipe="exact")


def test_an_exact_archive_becomes_the_log_that_save_would_have_made(tmp_path: Path) -> None:
    ids, source, out = prompt(400), tmp_path / "a.kvc", tmp_path / "b.kvc"
    cache = prefill(llama(), ids)
    save(source, cache, ids, recipe="exact")
    made = kvcellar.recompress(source, out, recipe="tokens")
    kvcellar.save(tmp_path / "saved.kvc", cache, tokens=ids, identity=_whose(source), recipe="tokens")
    assert out.read_bytes() == (tmp_path / "saved.kvc").read_bytes()
    assert (made.info.recipe, made.info.tokens, made.lost_to) == ("tokens", 400, ())
    assert made.info.file_bytes == out.stat().st_size
    kvcellar.recompress(source, out, recipe=CODED, replay_with=llama())
    with kvcellar.open(out, model=llama()) as archive:
        restored = archive.restore()
    assert restored.replay.exact, "with the model at hand the steps are found that give the cache back"
    assert same_bits(pairs(restored.cache), pairs(cache))


def test_a_lossy_archive_becomes_a_log_only_with_its_model(tmp_path: Path) -> None:
    ids, source, out = prompt(80), tmp_path / "a.kvc", tmp_path / "b.kvc"
    save(source, prefill(llama(), ids), ids, recipe="turbo-4")
    with pytest.raises(errors.ModelMissing, match=r"turbo-4.*replay_with"):
        kvcellar.recompress(source, out, recipe="tokens")
    assert not out.exists()
    made = kvcellar.recompress(source, out, recipe="tokens", replay_with=llama())
    assert made.lost_to == ()
    with kvcellar.open(out, model=llama()) as archive:
        restored = archive.restore()
    assert restored.replay.exact
    assert same_bits(pairs(restored.cache), pairs(prefill(llama(), ids)))


def _whose(path: Path) -> kvcellar.Identity:
    with kvcellar.open(path) as archive:
        return archive.manifest.identity


def test_probabilities_told_to_an_append_go_into_the_trie(tmp_path: Path) -> None:
    ids, path = prompt(30), tmp_path / "log.kvc"
    kvcellar.save(
        path, prefill(llama(), ids[:20]), tokens=ids[:20], model=llama(), recipe="tokens", log2_probs=[-1] * 20
    )
    cache = prefill(llama(), ids)
    with kvcellar.open(path, model=llama(), mode="a") as archive:
        tail = [(k[:, :, 20:], v[:, :, 20:]) for k, v in pairs(cache)]
        with pytest.raises(errors.InvalidInput, match="log2"):
            archive.append(tail, ids[20:], start=20, log2_probs=[-2] * 9)
        archive.append(tail, ids[20:], start=20, log2_probs=[-2] * 10)
    near = kvcellar.nearest(tmp_path, ids, model=llama())
    assert near is not None
    assert near.kinship.cell.depth == 20 + 2 * 10


GOLDEN = Path(__file__).parent / "golden" / "v1.0-tokens.kvc"


def test_the_golden_log_is_written_again_and_read(path: Path) -> None:
    """Written by `KVCELLAR_WRITE_GOLDEN=1`, as tests/test_golden.py says."""
    import os

    from test_golden import golden_cache, golden_ids

    ids = golden_ids(50) + golden_ids(30)
    keys = [(torch.cat([k, k[:, :, :30]], 2), torch.cat([v, v[:, :, :30]], 2)) for k, v in golden_cache(torch.bfloat16)]
    finite = [tuple(torch.nan_to_num(x.float(), 1, 2, 3).clamp(-9, 9).bfloat16() for x in pair) for pair in keys]
    recipe = tokens_recipe(chunk=32)
    kvcellar.save(path, finite, tokens=ids, identity="golden", recipe=recipe)
    if os.environ.get("KVCELLAR_WRITE_GOLDEN") == "1":
        GOLDEN.write_bytes(path.read_bytes())
    assert path.read_bytes() == GOLDEN.read_bytes()
    with kvcellar.open(GOLDEN, identity="golden") as archive:
        assert archive.tokens.tolist() == ids
