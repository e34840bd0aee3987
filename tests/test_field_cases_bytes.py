"""Field cases about what lies in the file: G11, G18, G23, G37, G38, G40, G46 (shared/FIELD_CASES.md)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import LinearAttentionLayer

import kvcellar
from kvcellar.errors import IdentityMismatch, InvalidInput, InvalidRecipe, UnsupportedCache
from kvcellar.frontends.fingerprint import identity_of_model
from models import bits, llama, new_llama, pairs, prefill, prompt, same_bits

IDS = prompt(40)


def _info(path: Path) -> Any:
    with kvcellar.open(path) as stored:
        return stored.info()


def _raw_bytes(cache: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return sum(side.nbytes for pair in cache for side in pair)


def test_field_g11_every_dtype_comes_back_bit_for_bit(make_cache: Callable, saved: Callable) -> None:
    extremes = {
        torch.bfloat16: [70000.0, -70000.0, 1e-30, -0.0],
        torch.float16: [65504.0, -65504.0, 6e-8, -0.0],
        torch.float32: [3.4e38, 1e-45, -1e-30, -0.0],
    }
    source = []
    for seed, (dtype, numbers) in enumerate(extremes.items()):
        ((keys, values),) = make_cache(layers=1, seed=seed, dtype=dtype)
        keys[0, 0, 3, :4] = torch.tensor(numbers, dtype=dtype)
        values[0, 1, 39, -4:] = torch.tensor(numbers, dtype=dtype)
        source.append((keys, values))
    path = saved(source)
    with kvcellar.open(path, identity="m") as stored:
        assert same_bits(pairs(stored.restore().cache), source)
        dtypes = [run["key"]["dtype"] for run in stored.info().geometry]
        assert dtypes == ["bfloat16", "float16", "float32"]


def test_field_g11_keys_and_values_of_different_dtypes(make_cache: Callable, saved: Callable) -> None:
    ((keys, values),) = make_cache(layers=1)
    source = [(keys.bfloat16(), values.half()), (keys.half(), values.float())]
    with kvcellar.open(saved(source), identity="m") as stored:
        assert same_bits(pairs(stored.restore().cache), source)


def test_field_g11_no_range_is_lost_by_converting(make_cache: Callable, saved: Callable) -> None:
    source = make_cache(layers=2, dtype=torch.bfloat16)
    source[1][1][0, 0, 7, 3] = 70000.0
    with kvcellar.open(saved(source), identity="m") as stored:
        with pytest.raises(InvalidInput, match=r"layer 1: .*float16"):
            stored.restore(dtype="float16")
        assert stored.restore(dtype="float32").cache.layers[1].values[0, 0, 7, 3] == 70144.0  # 70000 in bfloat16


def test_field_g18_bits_are_never_read_as_another_dtype(make_cache: Callable, saved: Callable) -> None:
    source = make_cache(dtype=torch.bfloat16)
    source[0][0][0, 0, 0, 0] = 0.1621
    with kvcellar.open(saved(source), identity="m") as stored:
        converted = pairs(stored.restore(dtype="float16").cache)
        assert all(side.dtype == torch.float16 for pair in converted for side in pair)
        assert same_bits(converted, [(keys.half(), values.half()) for keys, values in source])
        assert abs(converted[0][0][0, 0, 0, 0].item() - 0.1621) < 0.001
        assert stored.restore().cache.layers[0].keys.dtype == torch.bfloat16


def test_field_g18_equal_words_of_another_dtype_do_not_extend(
    make_cache: Callable, make_ids: Callable, saved: Callable
) -> None:
    longer = make_cache(tokens=41, dtype=torch.bfloat16)
    reinterpreted = [tuple(bits(side).view(torch.float16) for side in pair) for pair in longer]
    with kvcellar.open(saved(make_cache(dtype=torch.bfloat16)), identity="m", mode="a") as stored:
        with pytest.raises(InvalidInput, match=r"'float16'.*'bfloat16'"):
            stored.append(reinterpreted, make_ids(41))
        assert len(stored) == 40


def test_field_g18_the_resolved_dtype_is_part_of_the_model(tmp_path: Path) -> None:
    model = new_llama(dtype=torch.bfloat16)
    kvcellar.save(tmp_path / "a.kvc", prefill(model, IDS), tokens=IDS, model=model)
    model.config.dtype = "auto"  # what the config says is not what the weights are
    kvcellar.open(tmp_path / "a.kvc", model=model).close()
    with pytest.raises(IdentityMismatch, match=r"bfloat16 .*, float16 "):
        kvcellar.open(tmp_path / "a.kvc", model=new_llama(dtype=torch.float16))


def test_field_g18_equal_words_of_another_dtype_are_another_model() -> None:
    model, other = new_llama(dtype=torch.bfloat16), new_llama(dtype=torch.float16)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        theirs.data = mine.data.view(torch.float16)
    assert identity_of_model(model) != identity_of_model(other)


def test_field_g23_a_failed_entry_fails_and_the_others_stay(tmp_path: Path) -> None:
    good, bad = prefill(llama(), IDS), prefill(llama(), IDS)
    recurrent = LinearAttentionLayer()
    recurrent.update_conv_state(torch.randn(1, 8, 4))
    bad.layers[0] = recurrent
    for name, model, cache in (("a", llama(), good), ("b", llama(), bad), ("c", llama(), good)):
        if cache is bad:
            with pytest.raises(UnsupportedCache, match=r"layer 0 \(LinearAttentionLayer\)"):
                kvcellar.save(tmp_path / f"{name}.kvc", cache, tokens=IDS, model=model)
        else:
            kvcellar.save(tmp_path / f"{name}.kvc", cache, tokens=IDS, model=model)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.kvc", "c.kvc"]
    for name in ("a", "c"):
        with kvcellar.open(tmp_path / f"{name}.kvc", model=llama()) as stored:
            assert stored.verify().ok
            assert same_bits(pairs(stored.restore().cache), pairs(good))


def test_field_g23_one_bad_layer_among_good_ones_is_named(make_cache: Callable, saved: Callable) -> None:
    source = make_cache(layers=4)
    path = saved(source)
    before = path.read_bytes()
    source[2] = tuple(side.double() for side in source[2])
    with pytest.raises(UnsupportedCache, match=r"layer 2.*float64"):
        saved(source)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("tokens", [4, 40, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_field_g37_ratios_are_those_of_the_real_bytes(
    make_cache: Callable, saved: Callable, tokens: int, dtype: torch.dtype
) -> None:
    source = make_cache(tokens=tokens, dtype=dtype)
    path = saved(source)
    info, on_disk = _info(path), path.stat().st_size
    numbers = sum(side.numel() for pair in source for side in pair)
    assert info.file_bytes == on_disk
    assert info.raw_bytes == _raw_bytes(source)
    assert info.ratio_raw == pytest.approx(_raw_bytes(source) / on_disk)
    assert info.ratio_16bit == pytest.approx(2 * numbers / on_disk)
    assert info.bytes_per_token == pytest.approx(on_disk / tokens)


def test_field_g37_four_tokens_may_grow_and_info_says_so(make_cache: Callable, saved: Callable) -> None:
    source = make_cache(layers=1, tokens=4, heads=1, width=8, dtype=torch.bfloat16)
    path = saved(source)
    info = _info(path)
    assert path.stat().st_size > _raw_bytes(source)
    assert info.ratio_raw < 1
    assert info.ratio_16bit < 1


def test_field_g37_unsupported_settings_fail(make_cache: Callable, saved: Callable, tmp_path: Path) -> None:
    recipe = {**kvcellar.Recipe(name="g37", symbols={"id": "byteplanes-zstd/1", "level": 3}).to_json()}
    for refused in ("smallest", recipe, {**recipe, "symbols": {"id": "nothing/1"}}):
        with pytest.raises(InvalidRecipe):
            saved(make_cache(), recipe=refused)
    assert not list(tmp_path.iterdir())


def test_field_g38_a_row_of_a_batch_costs_one_row(make_cache: Callable, saved: Callable) -> None:
    batch = make_cache(batch=8, tokens=64)
    view = [tuple(side[5:6] for side in pair) for pair in batch]
    alone = saved([tuple(side.clone() for side in pair) for pair in view], name="alone.kvc").read_bytes()
    assert saved(view, name="view.kvc").read_bytes() == alone
    assert saved(batch, name="row.kvc", row=5).read_bytes() == alone
    assert saved(batch, name="other.kvc", row=4).read_bytes() != alone


def test_field_g38_unfilled_slots_are_not_saved(saved: Callable) -> None:
    static = prefill(llama(), IDS[:10], StaticCache(config=llama().config, max_cache_len=1024))
    assert static.layers[0].keys.shape[2] == 1024
    dynamic = prefill(llama(), IDS[:10])
    sizes = [saved(cache, IDS[:10], name).stat().st_size for cache, name in ((static, "s.kvc"), (dynamic, "d.kvc"))]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    with kvcellar.open(saved(static, IDS[:10]), identity="m") as stored:
        assert len(stored) == 10
        assert same_bits(pairs(stored.restore().cache), [(k[:, :, :10], v[:, :, :10]) for k, v in pairs(static)])


@pytest.mark.parametrize("zero", [0, 4, 9])
def test_field_g38_a_token_of_zeros_is_a_token(make_cache: Callable, saved: Callable, zero: int) -> None:
    source = make_cache(tokens=10)
    for side in (side for pair in source for side in pair):
        side[:, :, zero] = 0.0
    static = StaticCache(config=llama().config, max_cache_len=1024)
    for layer, (keys, values) in enumerate(source):
        static.update(keys, values, layer)
    for cache, name in ((source, "list.kvc"), (static, "static.kvc")):
        with kvcellar.open(saved(cache, IDS[:10], name), identity="m") as stored:
            assert len(stored) == 10
            assert same_bits(pairs(stored.restore().cache), source)


def test_field_g40_all_forms_give_the_same_file(make_cache: Callable, make_ids: Callable, saved: Callable) -> None:
    source = make_cache()
    dynamic = DynamicCache()
    for layer, (keys, values) in enumerate(source):
        dynamic.update(keys, values, layer)
    forms = {
        "tuples": tuple(tuple(pair) for pair in source),
        "lists": [list(pair) for pair in source],
        "triples": [(keys, values, None) for keys, values in source],
        "old": SimpleNamespace(key_cache=[k for k, _ in source], value_cache=[v for _, v in source]),
        "dynamic": dynamic,
        "own": kvcellar.KVCache(tuple(kvcellar.LayerKV(k[0], v[0]) for k, v in source)),
    }
    files = {name: saved(cache, make_ids(40), f"{name}.kvc").read_bytes() for name, cache in forms.items()}
    assert len(set(files.values())) == 1, {name: len(data) for name, data in files.items()}
    assert files["own"] != saved(make_cache(seed=1)).read_bytes()


WITHOUT_TRANSFORMERS = """
import sys

class Refuse:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "transformers":
            raise ImportError("transformers is not installed")

sys.meta_path.insert(0, Refuse())
import kvcellar
from kvcellar.archive.info import describe, verify
from kvcellar.archive.reader import ArchiveReader
from kvcellar.store.local import LocalStore

store, name = LocalStore.at(sys.argv[1])
with ArchiveReader(store.open_reader(name)) as reader:  # what `kvcellar info` does
    assert describe(reader).tokens == 40
    assert verify(reader).ok
with kvcellar.open(sys.argv[1], identity="m") as stored:
    assert stored.info().tokens == 40
    assert stored.verify().ok
    keys, values = stored.read(2, 5, 20)
    assert keys.shape == values.shape == (2, 15, 16)
    kvcellar.save(sys.argv[1] + ".again", [(keys[None], values[None])], tokens=stored.tokens[5:20], identity="m")
    try:
        stored.restore()
    except kvcellar.errors.MissingExtra as error:
        print(error)
assert "transformers" not in sys.modules
"""


def test_field_g40_files_are_read_without_transformers(make_cache: Callable, saved: Callable) -> None:
    path = saved(make_cache())
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRANSFORMERS, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'kvcellar[hf]'" in done.stdout


def test_field_g46_sizes_come_from_tensors(tmp_path: Path) -> None:
    model = new_llama(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    source = prefill(model, IDS)
    info = kvcellar.save(tmp_path / "a.kvc", source, tokens=IDS, model=model)
    assert info.raw_bytes == _raw_bytes(pairs(source)) == 3 * 2 * 40 * 2 * 32 * 4
    assert info.raw_bytes_per_token * 40 == info.raw_bytes
    assert info.geometry[0]["key"] == {"heads": 2, "width": 32, "dtype": "float32"}


def test_field_g46_layers_of_different_shapes(make_cache: Callable, saved: Callable) -> None:
    shapes = [(8, 32), (8, 32), (2, 64), (8, 32)]
    source = [make_cache(layers=1, heads=heads, width=width)[0] for heads, width in shapes]
    source[3] = tuple(side.half() for side in source[3])
    with kvcellar.open(saved(source), identity="m") as stored:
        assert stored.info().raw_bytes == _raw_bytes(source)
        assert [run["layers"] for run in stored.info().geometry] == [2, 1, 1]
        assert same_bits(pairs(stored.restore().cache), source)
