"""The sound archives that the fuzzer damages, and what each has ever held."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import kvcellar
from kvcellar import KVCache, LayerKV, Recipe
from kvcellar.frontends.archive import Archive
from kvcellar.profile import Profile

MANY = "appended again and again"
PROFILE = Profile({"w": np.arange(6, dtype=np.float32)}, {"text": "any"})
Pairs = list[tuple[Tensor, Tensor]]


class Case(NamedTuple):
    """An archive's bytes, all it holds (token ids, then keys and values of each layer), the lengths it has had."""

    name: str
    data: bytes
    contents: list[Tensor]
    states: tuple[int, ...]
    windows: tuple[int, ...]  # of each layer, 0 where it holds all tokens


def cases() -> list[Case]:
    """Archives of several geometries, dtypes, block lengths and histories, a few kB each; the same on every run."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    uneven = [_layer(1, 8, 40, brain, 1), (_layer(2, 4, 40, half, 2)[0], _layer(1, 6, 40, single, 3)[1])]
    flat = [(torch.zeros(1, 2, 70, 16, dtype=brain), torch.ones(1, 2, 70, 16, dtype=brain))]
    noise = torch.randint(-(2**15), 2**15, (2, 1, 1, 21, 4), dtype=torch.int16, generator=_generator(4)).view(half)
    three = [_layer(1, 8, 24, half, seed) for seed in (5, 6, 7)]
    return [
        _case("raw planes", [(noise[0], noise[1])], 8, [21]),
        _case("two layers, appended", [_layer(2, 4, 36, single, 8)] * 2, 16, [5, 20, 27, 36]),
        _case("unequal layers, embedded profile", [*uneven, uneven[0]], 16, [40], embed=True),
        _case("constants", flat, 32, [70]),
        _case("appended within a block", three, 8, [2, 5, 7, 12, 24]),
        _case("sliding and full layers", three, 8, [3, 9, 12, 20, 24], windows=[0, 6, 11]),
        _case("one token", [_layer(1, 4, 1, brain, 9)], 8, [1]),
        _case(MANY, [_layer(1, 4, 68, half, 10)], 128, list(range(1, 69))),
    ]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _layer(heads: int, width: int, tokens: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values (1, H, T, D) whose channels have a scale of their own, so that planes are coded."""
    mean, drift = (torch.randn(2, 1, heads, n, width, generator=_generator(seed)) for n in (1, tokens))
    sides = (4 * mean * (1 + drift / 8)).to(dtype)
    return sides[0], sides[1]


def _case(
    name: str, cache: Pairs, block: int, states: Sequence[int], *, embed: bool = False, windows: Sequence[int] = ()
) -> Case:
    """An archive of `cache`, saved and appended to up to each of `states`; a layer with a window is a sliding one."""
    ids = torch.randint(0, 50_000, (states[-1],), generator=_generator(len(name))).tolist()
    recipe = Recipe(name="fuzzed", symbols={"id": "byteplanes-zstd/1"}, block=block)
    profile = PROFILE if embed else None

    def first(tokens: int) -> KVCache:
        layers = []
        for (keys, values), window in zip(cache, windows or [0] * len(cache), strict=True):
            begin = max(0, tokens - window + 1) if window else 0
            sides = keys[0, :, begin:tokens], values[0, :, begin:tokens]
            layers.append(LayerKV(*sides, window=window, first=begin))
        return KVCache(tuple(layers))

    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder, "a.kvc"), states[0]
        settings = {"identity": "m", "recipe": recipe, "profile": profile, "embed_profile": embed}
        kvcellar.save(path, first(start), tokens=ids[:start], **settings)
        with kvcellar.open(path, identity="m", mode="a") as archive:
            for tokens in states[1:]:
                archive.append(first(tokens), ids[:tokens])
        data = path.read_bytes()
    held = [torch.tensor(ids), *(side[0] for pair in cache for side in pair)]
    return Case(name, data, held, tuple(states), tuple(windows or [0] * len(cache)))


def contents(archive: Archive) -> list[Tensor]:
    """Token ids (T,), then keys and values (H, T, D) of each layer; of a sliding layer its last tokens."""
    sides = archive.restore().cache.layers
    return [torch.from_numpy(archive.tokens), *(side[0] for layer in sides for side in (layer.keys, layer.values))]


def prefix_of(held: list[Tensor], case: Case, *, whole: bool) -> bool:
    """Whether these are the first tokens of the archive bit for bit; with `whole`, as many as it once had."""
    tokens = len(held[0])
    if len(held) != len(case.contents) or (whole and tokens not in case.states) or tokens > case.states[-1]:
        return False
    if not same(held[0], case.contents[0][:tokens]):
        return False
    begins = [max(0, tokens - window + 1) if window else 0 for window in case.windows for _ in range(2)]
    expected = [side[:, begin:tokens] for side, begin in zip(case.contents[1:], begins, strict=True)]
    return all(same(a, b) for a, b in zip(held[1:], expected, strict=True))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
