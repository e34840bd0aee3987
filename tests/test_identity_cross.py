"""A cache under another model, adapter or dtype: refused by default, with both sides in the message, and never found.

Beside tests/test_library.py (what a fingerprint covers) and tests/test_recipe_identity.py (names and keys).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcellar
from kvcellar.errors import ArchiveNotFound, IdentityMismatch
from kvcellar.frontends.fingerprint import identity_of_model
from models import llama, new_llama, pairs, prefill, prompt, same_bits

IDS = prompt(24)


class LowRank(nn.Module):
    """A linear layer with an adapter beside it, named as PEFT names them: base + B·A."""

    def __init__(self, base: nn.Linear, rank: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        for side in (self.lora_A, self.lora_B):
            side["default"].weight.data = torch.randn(side["default"].weight.shape, generator=generator) / 4
        self.scaling, self.merged_adapters = {"default": 1.0}, []
        self._active_adapter, self._disable_adapters = ["default"], False

    def forward(self, x: Tensor) -> Tensor:
        strength = 0.0 if self._disable_adapters else self.scaling["default"]
        return self.base_layer(x) + strength * self.lora_B["default"](self.lora_A["default"](x))

    def merged(self) -> nn.Linear:
        self.base_layer.weight.data += self.lora_B["default"].weight.data @ self.lora_A["default"].weight.data
        return self.base_layer


def _adapted(seed: int = 0) -> Any:
    model = new_llama()
    attention = model.model.layers[1].self_attn
    attention.k_proj = LowRank(attention.k_proj, rank=2, seed=seed)
    return model


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Any:
    model = new_llama()
    with torch.no_grad():
        weight = model.get_parameter(name)
        weight.copy_(change(weight))
    return model


def _nudged(weight: Tensor) -> Tensor:
    weight = weight.clone()
    weight[3, 5] *= 1.01
    return weight


# Models that take the same ids as the shared Llama and give caches of the same shape, all but the last other numbers.
OTHERS: dict[str, Callable[[], Any]] = {
    "one number of a value projection": lambda: _changed("model.layers.2.self_attn.v_proj.weight", _nudged),
    "one number of an MLP": lambda: _changed("model.layers.0.mlp.up_proj.weight", _nudged),
    "one number of the embeddings": lambda: _changed("model.embed_tokens.weight", _nudged),
    "two heads swapped": lambda: _changed("model.layers.0.self_attn.k_proj.weight", lambda w: w.roll(16, 0)),
    "another seed": lambda: new_llama(seed=1),
    "rope theta": lambda: new_llama(rope_parameters={"rope_type": "default", "rope_theta": 20_000.0}),
    "rope type": lambda: new_llama(rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}),
    "activation": lambda: new_llama(hidden_act="gelu"),
    "bfloat16": lambda: new_llama(dtype=torch.bfloat16),
    "float32 by way of bfloat16": lambda: new_llama(dtype=torch.bfloat16).float(),
    "an adapter": _adapted,
    "an adapter that adds nothing": lambda: _without_effect(_adapted()),
}


def _without_effect(model: Any) -> Any:
    model.model.layers[1].self_attn.k_proj.lora_B["default"].weight.data.zero_()
    return model


@cache
def _other(name: str) -> Any:
    return OTHERS[name]()


def _refused_with_both_sides(path: Path, theirs: Any, mine: Any) -> None:
    before = path.read_bytes()
    for mode in ("r", "a"):
        with pytest.raises(IdentityMismatch) as caught:
            kvcellar.open(path, model=theirs, mode=mode)
        told = str(caught.value)
        assert f"expected {identity_of_model(mine)}, got {identity_of_model(theirs)}" in told
        assert "allow_mismatch" in told
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", OTHERS)
def test_field_g17_models_that_differ_refuse_each_others_caches(name: str, tmp_path: Path) -> None:
    mine, theirs = llama(), _other(name)
    for who, other, file in ((mine, theirs, "mine.kvc"), (theirs, mine, "theirs.kvc")):
        source = prefill(who, IDS)
        kvcellar.save(tmp_path / file, source, tokens=IDS, model=who)
        _refused_with_both_sides(tmp_path / file, other, who)
        found = kvcellar.find(tmp_path, IDS, model=who)
        assert (found.path, found.matched) == (str(tmp_path / file), len(IDS)), "of two with the same ids, its own"
        with kvcellar.open(tmp_path / file, model=who) as archive:
            assert same_bits(pairs(archive.restore().cache), pairs(source))
    (tmp_path / "mine.kvc").unlink()
    assert kvcellar.find(tmp_path, IDS, model=mine).path is None


def test_all_these_models_differ_from_one_another() -> None:
    identities = [identity_of_model(_other(name)) for name in OTHERS]
    assert len({identity.digest for identity in identities}) == len(OTHERS)


def test_adapters_are_part_of_the_model(tmp_path: Path) -> None:
    """Each its own identity; the same one again is the same; changed in place it is another."""
    first, again, other = _adapted(), _adapted(), _adapted(seed=1)
    assert identity_of_model(first) == identity_of_model(again)
    assert identity_of_model(first) != identity_of_model(other)
    kvcellar.save(tmp_path / "a.kvc", prefill(first, IDS), tokens=IDS, model=first)
    kvcellar.open(tmp_path / "a.kvc", model=again).close()
    _refused_with_both_sides(tmp_path / "a.kvc", other, first)
    again.model.layers[1].self_attn.k_proj.lora_A["default"].weight.data[0, 0] += 0.125
    _refused_with_both_sides(tmp_path / "a.kvc", again, first)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("scaling", {"default": 2.0}), ("_disable_adapters", True), ("_active_adapter", []), ("merged_adapters", ["x"])],
)
def test_how_an_adapter_is_used_is_part_of_the_model(setting: str, value: Any, tmp_path: Path) -> None:
    """These are no parameters, and no config of the model says them."""
    model, other = _adapted(), _adapted()
    setattr(other.model.layers[1].self_attn.k_proj, setting, value)
    kvcellar.save(tmp_path / "a.kvc", prefill(model, IDS), tokens=IDS, model=model)
    _refused_with_both_sides(tmp_path / "a.kvc", other, model)


def test_a_merged_adapter_is_a_plain_model_of_the_merged_weights() -> None:
    model = _adapted()
    attention = model.model.layers[1].self_attn
    merged = attention.k_proj.merged()
    attention.k_proj = merged
    plain = _changed("model.layers.1.self_attn.k_proj.weight", lambda _: merged.weight)
    assert identity_of_model(model) == identity_of_model(plain)
    assert identity_of_model(model) != identity_of_model(llama())


def test_a_model_from_disk_is_the_model_that_was_saved(tmp_path: Path) -> None:
    """Whatever transformers writes into its config beside."""
    llama().save_pretrained(tmp_path / "model")
    again = type(llama()).from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert identity_of_model(again) == identity_of_model(llama())
    kvcellar.save(tmp_path / "a.kvc", prefill(llama(), IDS), tokens=IDS, model=llama())
    with kvcellar.open(tmp_path / "a.kvc", model=again) as archive:
        assert archive.restore().matched == len(IDS)
    half = type(llama()).from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert identity_of_model(half) == identity_of_model(new_llama(dtype=torch.bfloat16))
    with pytest.raises(IdentityMismatch, match=r"expected .*float32 \(model .*, got .*bfloat16 \(model "):
        kvcellar.open(tmp_path / "a.kvc", model=half)


def test_field_g35_a_namespace_parts_even_equal_models_and_ids(tmp_path: Path) -> None:
    """The same answer as for a prompt that was never stored, in every way of asking."""
    kvcellar.save(tmp_path / "a.kvc", prefill(llama(), IDS), tokens=IDS, model=llama(), namespace="tenant a")
    never_stored = kvcellar.find(tmp_path, prompt(24, seed=9), model=llama(), namespace="tenant b")
    assert kvcellar.find(tmp_path, IDS, model=llama(), namespace="tenant b") == never_stored
    assert never_stored.path is None
    told = []
    for path in (tmp_path / "a.kvc", tmp_path / "b.kvc"):
        for mode in ("r", "a"):
            with pytest.raises(ArchiveNotFound) as caught:
                kvcellar.open(path, model=llama(), namespace="tenant b", mode=mode, allow_mismatch=True)
            told.append((type(caught.value), caught.value.errno, str(caught.value).replace(str(path), "…")))
    assert len(set(told)) == 1
    assert kvcellar.find(tmp_path, IDS, model=llama(), namespace="tenant a").matched == len(IDS)
