"""Archives of reduced caches: what comes back, what is refused, and that no part of one is ever misread."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvcellar
from clitools import run
from kvcellar import KVCache, LayerKV, Recipe
from kvcellar.archive.block import DENSE, SLOTS, BlockHead
from kvcellar.archive.format import MAGIC, REDUCED, checksum
from kvcellar.archive.reader import ArchiveReader
from kvcellar.archive.writer import NewBlock, write_archive
from kvcellar.errors import (
    DamagedArchive,
    InvalidInput,
    InvalidRecipe,
    KVCellarError,
    NewerFormat,
    TokensMismatch,
    UnsupportedCache,
)
from kvcellar.frontends.reduce import prefill_reduced, reduce_cache
from kvcellar.frontends.weighted import WeightedCache, use_ragged_attention
from kvcellar.recipe import EXACT, PRESETS
from kvcellar.reduce.weighted import REDUCERS
from kvcellar.slots import SlotCoder, decode_slots, encode_slots, head_of, stacked
from kvcellar.store.local import LocalStore
from models import bits, generate, llama, logits, new_llama, prefill, prompt

LENGTH = 100
IDS = prompt(LENGTH)
MORE = prompt(LENGTH + 6)[LENGTH:]
BLOCK = Recipe(name="exact", symbols={"id": "byteplanes-zstd/1"}, block=32)
GOLDEN = Path(__file__).parent / "golden" / "v1.0-reduced-bf16.kvc"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def kept(tokens: int, seed: int, dtype: torch.dtype = torch.float32, layers: int = 2) -> KVCache:
    """A reduced cache of any bits: every head has its own number of slots, at its own tokens."""
    rng = np.random.default_rng([tokens, seed])

    def side(slots: int, width: int) -> torch.Tensor:
        size = {2: (np.int16, 1 << 15), 4: (np.int32, 1 << 31)}[dtype.itemsize]
        words = rng.integers(-size[1], size[1], (slots, width)).astype(size[0])
        return torch.from_numpy(words).view(dtype)

    def head() -> tuple[torch.Tensor, ...]:
        slots = int(rng.integers(1, tokens + 1))
        positions = np.sort(rng.choice(tokens, slots, replace=False))
        weights = torch.from_numpy(rng.normal(size=slots).astype(np.float32))
        return side(slots, 6), side(slots, 4), torch.from_numpy(positions), weights

    return KVCache(tuple(stacked([head(), head()], tokens) for _ in range(layers)), tokens)


def half() -> WeightedCache:
    """50 of 100 tokens of the shared model's cache."""
    return reduce_cache(prefill(llama(), IDS), budget=50, model=llama(), method="random", sinks=2, recent=6)


def reader_of(path: Path) -> ArchiveReader:
    store, name = LocalStore.at(path)
    return ArchiveReader(store.open_reader(name))


def layers_in(path: Path) -> list[LayerKV]:
    """What the file holds, in this test's identity or any other."""
    with reader_of(path) as reader:
        return decode_slots(SlotCoder(reader.manifest.recipe, reader.manifest.geometry), reader)


def same(one: KVCache | list[LayerKV], other: KVCache | list[LayerKV]) -> bool:
    """Whether two reduced caches have the same slots, bit for bit, whatever their pads."""
    layers = [x.layers if isinstance(x, KVCache) else x for x in (one, other)]
    return all(
        a.length == b.length
        and all(
            torch.equal(bits(x) if x.is_floating_point() else x, bits(y) if y.is_floating_point() else y)
            for head in range(len(a.keys))
            for x, y in zip(head_of(a, head), head_of(b, head), strict=True)
        )
        for a, b in zip(*layers, strict=True)
    )


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    kvcellar.save(tmp_path / "a.kvc", half(), tokens=IDS, model=llama(), recipe=BLOCK)
    return tmp_path / "a.kvc"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 150),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(DTYPES),
    block=st.sampled_from([1, 32, 512]),
)
def test_every_bit_comes_back(tmp_path: Path, tokens: int, seed: int, dtype: torch.dtype, block: int) -> None:
    kv, path = kept(tokens, seed, dtype), tmp_path / "a.kvc"
    info = kvcellar.save(path, kv, tokens=range(tokens), identity="m", recipe=replace(BLOCK, block=block))
    assert same(layers_in(path), kv)
    counts = [len(head_of(layer, head)[2]) for layer in kv.layers for head in range(2)]
    assert (info.tokens, info.slots, info.next_position) == (tokens, sum(counts), tokens)
    with kvcellar.open(path) as archive:
        assert archive.verify().ok
        assert archive.tokens.tolist() == list(range(tokens))


def test_a_restored_cache_goes_on_as_the_saved_one(stored: Path) -> None:
    """Field case G07: 50 of 100 tokens are stored, and the next one has position 100."""
    with kvcellar.open(stored, model=llama()) as archive:
        restored = archive.restore()
        assert len(archive) == 100
        assert archive.info().slots_per_head == 50
    assert (restored.matched, restored.next_position) == (100, 100)
    cache = restored.cache
    assert isinstance(cache, WeightedCache)
    assert (cache.get_seq_length(), cache.slots) == (100, 50)
    assert cache.reduction == {"id": "random/1", "keep": 50}
    for mine, saved in zip(cache.layers, half().layers, strict=True):
        assert torch.equal(mine.log_weights, saved.log_weights)
        assert torch.equal(mine.positions, saved.positions)
    assert torch.equal(logits(llama(), cache, MORE), logits(llama(), half(), MORE))


def test_a_prompt_that_goes_on_is_generated_from(stored: Path) -> None:
    ids = IDS + MORE
    with kvcellar.open(stored, model=llama()) as archive:
        cache = archive.restore(prompt=ids).cache
    assert generate(llama(), ids, cache) == generate(llama(), ids, half())
    assert kvcellar.find(stored.parent, ids, model=llama()).matched == 100


def test_what_went_on_can_be_saved_again(stored: Path) -> None:
    with kvcellar.open(stored, model=llama()) as archive:
        cache = archive.restore().cache
    logits(llama(), cache, MORE)
    info = kvcellar.save(stored, cache, tokens=IDS + MORE, model=llama())
    assert (info.tokens, info.slots_per_head, info.recipe) == (106, 56, "exact, reduced")
    with kvcellar.open(stored, model=llama()) as archive:
        again = archive.restore().cache
    assert torch.equal(logits(llama(), again, MORE), logits(llama(), cache, MORE))


def test_layers_with_their_own_budgets_and_other_dtypes(tmp_path: Path) -> None:
    model = new_llama(dtype=torch.bfloat16)
    budget = [[20, 30], [40, 20], [100, 25]]
    cache = reduce_cache(
        prefill(model, IDS), budget=budget, model=model, method="random", sinks=2, recent=6, ragged=True
    )
    kvcellar.save(tmp_path / "a.kvc", cache, tokens=IDS, model=model)
    with kvcellar.open(tmp_path / "a.kvc", model=model) as archive:
        restored = archive.restore().cache
        assert archive.restore(dtype="float32").cache.layers[0].keys.dtype == torch.float32
    assert restored.slots == 100
    assert restored.reduction == {"id": "random/1", "keep": budget}
    padded = logits(model, restored, MORE)
    use_ragged_attention(model)
    assert torch.allclose(padded, logits(model, cache, MORE), atol=0.2)


@pytest.mark.parametrize("method", ["random/1", "streaming/1", "snapkv/1"])
def test_a_recipe_reduces_while_it_saves(method: str, tmp_path: Path) -> None:
    recipe = replace(EXACT, name="tenth", reduce={"id": method, "keep": 0.1, "sinks": 2, "recent": 6, "seed": 3})
    info = kvcellar.save(tmp_path / "a.kvc", prefill(llama(), IDS), tokens=IDS, model=llama(), recipe=recipe)
    assert (info.slots_per_head, info.recipe) == (10, "tenth")
    assert info.recipe_json["reduce"]["id"] == method
    with kvcellar.open(tmp_path / "a.kvc", model=llama()) as archive:
        restored = archive.restore().cache
    expected = reduce_cache(
        prefill(llama(), IDS), budget=0.1, model=llama(), method=method, sinks=2, recent=6, seed=3, tokens=IDS
    )
    assert torch.equal(logits(llama(), restored, MORE), logits(llama(), expected, MORE))


@pytest.mark.parametrize("method", REDUCERS)
def test_what_any_method_makes_can_be_saved(method: str, tmp_path: Path) -> None:
    """Reduced in several steps, so that slots that stand for many are reduced again."""
    model = new_llama(dtype=torch.bfloat16)
    cache = prefill_reduced(model, IDS, budget=24, method=method, chunk=30, sinks=2, recent=6)
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    kvcellar.save(tmp_path / "a.kvc", cache, tokens=IDS, model=model)
    with kvcellar.open(tmp_path / "a.kvc", model=model) as archive:
        restored = archive.restore().cache
    assert restored.slots == cache.slots == 24
    assert torch.equal(logits(model, restored, MORE), logits(model, cache, MORE))


def test_by_identity_the_model_is_named_beside(tmp_path: Path) -> None:
    recipe = replace(EXACT, reduce={"id": "random/1", "keep": 50})
    path, cache = tmp_path / "a.kvc", prefill(llama(), IDS)
    kvcellar.save(path, cache, tokens=IDS, identity="m", recipe=recipe, reduce_with=llama())
    with kvcellar.open(path, identity="m", config=llama().config) as archive:
        assert archive.restore().cache.slots == 50


def test_info_prints_tokens_and_slots_apart(stored: Path) -> None:
    outcome = run("info", stored)
    assert "tokens     100 in 4 blocks" in outcome.out
    assert "slots      50.0 a head, 50.0% of the tokens (300 in all): reduced" in outcome.out
    assert run("info", "--json", stored).json["slots"] == 300


# --- what is refused


def refused_by(path: Path, **request: Any) -> str:
    with kvcellar.open(path, model=llama()) as archive, pytest.raises(InvalidInput) as error:
        archive.restore(**request)
    return str(error.value)


def test_only_the_whole_is_restored(stored: Path) -> None:
    assert "restored as a whole" in refused_by(stored, positions=99)
    assert "restored as a whole" in refused_by(stored, positions=[1, 2])
    assert "restored as a whole" in refused_by(stored, layers=[0, 1, 2])
    assert "restored as a whole" in refused_by(stored, into=kvcellar.reduce_cache)
    assert "shares 100 of its 100 tokens" in refused_by(stored, prompt=IDS)
    assert "shares 50 of its 100 tokens" in refused_by(stored, prompt=IDS[:50] + [3] * 50)
    with kvcellar.open(stored, model=llama()) as archive:
        assert archive.restore(100).matched == 100


def test_without_a_model_nothing_could_apply_the_weights(tmp_path: Path) -> None:
    kvcellar.save(tmp_path / "a.kvc", kept(30, 0), tokens=range(30), identity="m")
    with kvcellar.open(tmp_path / "a.kvc", identity="m") as archive, pytest.raises(InvalidInput, match="with model="):
        archive.restore()


@pytest.mark.parametrize(
    "request_",
    [
        lambda archive: archive.compact(),
        lambda archive: archive.read(0, 0, 10),
        lambda archive: archive.codes(0),
    ],
)
def test_what_needs_every_token_is_refused(request_: Callable[[Any], object], stored: Path) -> None:
    before = stored.read_bytes()
    with kvcellar.open(stored, model=llama(), mode="a") as archive, pytest.raises(KVCellarError) as error:
        request_(archive)
    assert "reduces tokens" in str(error.value)
    assert stored.read_bytes() == before


def test_it_is_not_coded_again(stored: Path) -> None:
    for recipe in ("exact", "turbo-4", replace(EXACT, reduce={"id": "random/1", "keep": 0.5})):
        with pytest.raises(InvalidRecipe, match="reduces tokens"):
            kvcellar.recompress(stored, stored.with_name("b.kvc"), recipe=recipe)
    assert not stored.with_name("b.kvc").exists()


def test_it_takes_no_more_tokens(stored: Path) -> None:
    more = prefill(llama(), IDS + MORE)
    with (
        kvcellar.open(stored, model=llama(), mode="a") as archive,
        pytest.raises(InvalidInput, match="takes no more tokens"),
    ):
        archive.append(more, IDS + MORE)


def test_a_reduced_cache_is_not_appended_to_a_dense_archive(tmp_path: Path) -> None:
    kvcellar.save(tmp_path / "a.kvc", prefill(llama(), IDS[:50]), tokens=IDS[:50], model=llama())
    with (
        kvcellar.open(tmp_path / "a.kvc", model=llama(), mode="a") as archive,
        pytest.raises(UnsupportedCache, match="reduced cache"),
    ):
        archive.append(half(), IDS)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "exact"])
def test_lossy_recipes_do_not_take_slots(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRecipe, match="Use recipe 'exact'"):
        kvcellar.save(tmp_path / "a.kvc", half(), tokens=IDS, model=llama(), recipe=name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("reduce", "more", "message"),
    [
        ({"id": "random/1"}, {}, "keep is missing"),
        ({"id": "nothing/1", "keep": 50}, {}, "unknown method 'nothing/1'"),
        ({"id": "random/1", "keep": 50, "colour": 1}, {}, "refuses its settings"),
        ({"id": "random/1", "keep": 3}, {}, "cannot reduce this cache: budget of 3"),
        ({"id": "random/1", "keep": "all"}, {}, "budget"),
        ({"id": "random/1", "keep": 50, "sinks": "x"}, {}, "cannot reduce this cache"),
        ({"id": "random/1", "keep": 50}, {"model": None, "identity": "m"}, "needs model="),
    ],
)
def test_recipes_that_cannot_reduce_say_why(reduce: Any, more: Any, message: str, tmp_path: Path) -> None:
    recipe = replace(EXACT, reduce=reduce)
    with pytest.raises(InvalidRecipe, match=message):
        kvcellar.save(
            tmp_path / "a.kvc", prefill(llama(), IDS), tokens=IDS, **{"model": llama(), "recipe": recipe, **more}
        )


def test_other_input_that_does_not_fit(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.kvc", half()

    def refused(error: type[KVCellarError], message: str, cache: Any = cache, **more: Any) -> None:
        with pytest.raises(error, match=message):
            kvcellar.save(path, cache, **{"tokens": IDS, "model": llama(), **more})

    refused(TokensMismatch, "stands for 100 tokens, 50 token ids", tokens=IDS[:50])
    refused(InvalidInput, "reduced already", recipe=replace(EXACT, reduce={"id": "random/1", "keep": 0.5}))
    refused(InvalidInput, "have their own", positions=range(100))
    refused(InvalidInput, "have their own", attention_mask=[1] * 100)
    refused(InvalidInput, "next_position", next_position=120)
    named = {"model": None, "identity": "m", "tokens": range(30)}
    kv = kept(30, 0)
    first = kv.layers[0]
    wrong = {
        "two slots at one position": replace(first, positions=torch.zeros_like(first.positions)),
        "positions 0…29": replace(first, positions=first.positions + 30),
        "finite": replace(first, log_weights=first.log_weights.where(first.positions < 0, float("nan"))),
        "expected some": replace(first, log_weights=torch.full_like(first.log_weights, -torch.inf)),
    }
    for message, layer in wrong.items():
        refused(InvalidInput, message, KVCache((layer, kv.layers[1]), 30), **named)
    with pytest.raises(InvalidInput, match="standing for 29 tokens"):
        KVCache((replace(first, length=29), kv.layers[1]), 30)
    with pytest.raises(InvalidInput, match="expected four times the same"):
        KVCache((replace(first, positions=first.positions[0]), kv.layers[1]), 30)
    with pytest.raises(InvalidInput, match="layer 0 holds"):
        KVCache((replace(first, positions=None), kv.layers[1]), 30)
    assert len(KVCache(kv.layers)) == 30
    with pytest.raises(UnsupportedCache, match="stand for all 30"):
        kv.tokens(0, 10)
    assert not list(tmp_path.iterdir())


# --- bytes


def header(flags: int) -> bytes:
    head = struct.pack("<8sHHIQ", MAGIC, 1, 0, flags, 0)
    return head + struct.pack("<Q", checksum(head))


def test_readers_without_this_feature_take_it_for_a_newer_file(stored: Path, tmp_path: Path) -> None:
    """They refuse any flag they do not know; a reader of this version does the same with the next one."""
    data = stored.read_bytes()
    assert data[:32] == header(REDUCED)
    assert REDUCED != 0
    for flags, error in {0: DamagedArchive, REDUCED | 1: NewerFormat, REDUCED | 4: NewerFormat}.items():
        stored.write_bytes(header(flags) + data[32:])
        with pytest.raises(error):
            kvcellar.open(stored)
    kvcellar.save(stored, prefill(llama(), IDS), tokens=IDS, model=llama())
    data = stored.read_bytes()
    assert data[:32] == header(0)
    stored.write_bytes(header(REDUCED) + data[32:])
    with pytest.raises(DamagedArchive, match="contradict"):
        kvcellar.open(stored)


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    """Whatever bit is flipped, what comes back is what was saved, or nothing."""
    kv, path = kept(20, 1, torch.float16, layers=1), tmp_path / "a.kvc"
    kvcellar.save(path, kv, tokens=range(20), identity="m", recipe=replace(BLOCK, block=8))
    data = path.read_bytes()
    noticed = 0
    for at in range(0, len(data), 3):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        try:
            assert same(layers_in(path), kv)
        except KVCellarError:
            noticed += 1
    assert noticed > len(data) // 6


class Forged:
    """A reduced archive of one layer, whose blocks can be altered with their checksums made right."""

    def __init__(self, folder: Path) -> None:
        self.path, self.kv = folder / "a.kvc", kept(20, 1, torch.float16, layers=1)
        kvcellar.save(self.path, self.kv, tokens=range(20), identity="m", recipe=replace(BLOCK, block=8))
        with reader_of(self.path) as reader:
            self.manifest = reader.manifest
            self.heads = [block.head for block in reader.blocks(0, 20)]
            self.parts = [bytes(reader.read_parts(block, [0])[0]) for block in reader.blocks(0, 20)]

    def refused(self, message: str) -> None:
        blocks = [
            NewBlock(replace(head, parts=((len(part), checksum(part)),)), [part])
            for head, part in zip(self.heads, self.parts, strict=True)
        ]
        with LocalStore(self.path.parent).replacing(self.path.name) as pending:
            write_archive(pending, self.manifest, blocks)
        with pytest.raises(DamagedArchive, match=message):
            layers_in(self.path)


def test_forged_parts_are_refused(tmp_path: Path) -> None:
    def altered(change: Callable[[bytearray], None], block: int = 0) -> Forged:
        forged = Forged(tmp_path)
        part = bytearray(forged.parts[block])
        change(part)
        forged.parts[block] = bytes(part)
        return forged

    def weight(value: float) -> Callable[[bytearray], None]:
        return lambda part: part.__setitem__(slice(2, 6), struct.pack("<f", value))

    altered(lambda part: part.clear()).refused("0 bytes for 2 heads")
    altered(lambda part: part.__delitem__(slice(3, None))).refused("3 bytes for")
    altered(lambda part: part.__setitem__(0, part[0] ^ 1)).refused("block 0")
    altered(lambda part: part.__setitem__(0, 0x10), block=2).refused("slots behind the 4 tokens")
    altered(weight(float("nan"))).refused("no finite numbers")
    altered(weight(-float("inf"))).refused("no finite numbers")
    altered(lambda part: part.append(1)).refused("left over")


def test_forged_heads_are_refused(tmp_path: Path) -> None:
    for change, message in [
        ({"slots": 0}, "slots, its head says 0"),
        ({"slots": 1 << 60}, "its head says"),
        ({"kind": DENSE, "slots": None}, "kind 0"),
    ]:
        forged = Forged(tmp_path)
        forged.heads[1] = replace(forged.heads[1], **change)
        forged.refused(message)
    forged = Forged(tmp_path)
    packed = replace(forged.heads[0], kind=SLOTS).pack()
    with pytest.raises(DamagedArchive):
        BlockHead.unpack(packed[:-1], "it")
    with pytest.raises(DamagedArchive, match="unknown block kind 2"):
        BlockHead.unpack(b"\2" + packed[1:], "it")


def test_a_head_without_slots_in_any_block_is_refused(tmp_path: Path) -> None:
    forged = Forged(tmp_path)
    one, other = (head_of(forged.kv.layers[0], head) for head in (0, 1))
    coder, ids = SlotCoder(forged.manifest.recipe, forged.manifest.geometry), np.arange(20)
    blocks = list(encode_slots(coder, forged.manifest, forged.kv, ids))
    spans = [range(head.start, head.start + head.count) for head in forged.heads]
    nothing = tuple(x[:0] for x in other)
    coded = [coder.encode([one, nothing], span, 0) for span in spans]
    assert len(blocks) == len(coded) == 3
    forged.parts = [part for part, _ in coded]
    forged.heads = [replace(head, slots=count) for head, (_, count) in zip(forged.heads, coded, strict=True)]
    forged.refused("layer 0 has a head without slots")


def test_repair_gives_all_or_nothing(stored: Path) -> None:
    data = stored.read_bytes()
    with reader_of(stored) as reader:
        index, block = reader.commit.index, reader.block(1).body_offset
    damaged = bytearray(data)
    damaged[index + 50] ^= 1
    stored.write_bytes(damaged)
    report = kvcellar.repair(stored)
    assert report.complete
    assert report.out is not None
    assert same(layers_in(Path(report.out)), [layer.kept() for layer in half().layers])
    damaged = bytearray(data)
    damaged[block] ^= 1
    stored.write_bytes(damaged)
    with pytest.raises(DamagedArchive, match="only as a whole"):
        kvcellar.repair(stored, stored.with_name("b.kvc"))
    assert not stored.with_name("b.kvc").exists()


def test_golden_bytes(tmp_path: Path) -> None:
    """Written only with KVCELLAR_WRITE_GOLDEN=1, as the others are (test_golden.py)."""
    kv, path = kept(40, 7, torch.bfloat16), tmp_path / "a.kvc"
    kvcellar.save(path, kv, tokens=range(1000, 1040), identity="golden", recipe=BLOCK)
    if os.environ.get("KVCELLAR_WRITE_GOLDEN") == "1":
        GOLDEN.write_bytes(path.read_bytes())
    assert path.read_bytes() == GOLDEN.read_bytes()
    assert same(layers_in(GOLDEN), kv)


def test_saving_tells_how_far_the_reduction_is(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    recipe = {**EXACT.to_json(), "name": "half", "reduce": {"id": "streaming/1", "keep": 0.5, "sinks": 2, "recent": 6}}
    kvcellar.save(
        tmp_path / "a.kvc",
        prefill(llama(), IDS),
        tokens=IDS,
        model=llama(),
        recipe=recipe,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 3), (2, 3), (3, 3)]
