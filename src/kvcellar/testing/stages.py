"""What every stage must do with ordinary and with awkward numbers.

    class TestMyRecipe(RecipeConformance):
        recipe = Recipe(name="mine", quantize={"id": "mine/1"}, symbols={"id": …})

A case a recipe does not support is skipped with the reason `unsupported` gives, never silently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from ..cache import KVCache, LayerKV, allocate, torch_dtype
from ..errors import DamagedArchive, UnsupportedCache
from ..geometry import DTYPES
from ..pipeline import Pipeline
from ..profile import Profile
from ..quantize.bits import bits
from ..recipe import Recipe
from ..stages import SymbolCoder
from ..tokens import Tokens

LAYERS, HEADS, WIDTH = 3, 2, 16
CASES = (
    *("normal", "zeros", "negative_zero", "constant", "tiny_among_zeros", "subnormal", "largest", "zero_channel"),
    *("outlier_channel", "one_nan", "one_inf", "all_inf"),
)
NOT_FINITE = frozenset({"one_nan", "one_inf", "all_inf"})
TOKENS = (1, 2, 15, 16, 17, 100)


def numbers(case: str, tokens: int, dtype: str, seed: int = 0) -> Tensor:
    """The numbers of a named case, (HEADS, tokens, WIDTH)."""
    shape = (HEADS, tokens, WIDTH)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    info = torch.finfo(torch_dtype(dtype))
    if case in ("zeros", "tiny_among_zeros", "negative_zero"):
        x = torch.zeros(shape) * (-1 if case == "negative_zero" else 1)
        x[0, 0, 0] = 1e-6 if case == "tiny_among_zeros" else x[0, 0, 0]
    elif case in ("constant", "largest", "subnormal", "all_inf"):
        value = {"constant": 3.25, "largest": info.max, "subnormal": info.tiny / 4, "all_inf": float("inf")}[case]
        x = torch.full(shape, value)
    elif case == "zero_channel":
        x[:, :, 3] = 0
    elif case == "outlier_channel":
        x[:, :, 5] += 600
    elif case in ("one_nan", "one_inf"):
        x[0, tokens // 2, 1] = float(case.removeprefix("one_"))
    return x.to(torch_dtype(dtype))


class RecipeConformance:
    """Holds a whole recipe, encoder and decoder, to the contract of a stage."""

    recipe: ClassVar[Recipe]
    profile: ClassVar[Profile | None] = None

    def unsupported(self, case: str, dtype: str, tokens: int) -> str | None:
        """Why the recipe cannot take a case, or None."""
        return None

    def round_trip(self, cache: KVCache) -> KVCache:
        """`cache` through encoder and decoder, the parts being all that passes between them."""
        tokens = Tokens.following(np.arange(len(cache), dtype=np.int64), 0)
        parts = Pipeline(self.recipe, cache.geometry, self.profile).encode(cache, tokens)
        decoder = Pipeline(self.recipe, cache.geometry, self.profile)
        out = allocate(cache.geometry, dict.fromkeys(range(LAYERS), len(cache)))
        decoder.decode(range(len(parts)), [[memoryview(part) for part in parts]], [tokens], out)
        return KVCache(tuple(out[i] for i in range(LAYERS)))

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("case", CASES)
    def test_round_trip(self, case: str, dtype: str, tokens: int) -> None:
        if reason := self.unsupported(case, dtype, tokens):
            pytest.skip(reason)
        sides = [numbers(case, tokens, dtype, seed) for seed in range(2 * LAYERS)]
        cache = KVCache(tuple(LayerKV(k, v) for k, v in zip(sides[::2], sides[1::2], strict=True)))
        lossless = Pipeline(self.recipe, cache.geometry, self.profile).lossless
        if case in NOT_FINITE and not lossless:
            with pytest.raises(UnsupportedCache, match="not finite"):
                self.round_trip(cache)
            return
        restored = self.round_trip(cache)
        for before, after in zip(cache.layers, restored.layers, strict=True):
            for x, y in ((before.keys, after.keys), (before.values, after.values)):
                assert y.dtype == x.dtype
                assert y.shape == x.shape
                if lossless:
                    assert np.array_equal(bits(x), bits(y))
                else:
                    assert y.isfinite().all()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_same_input_same_bytes(self, dtype: str) -> None:
        layers = tuple(
            LayerKV(numbers("normal", 20, dtype, i), numbers("normal", 20, dtype, -i)) for i in range(LAYERS)
        )
        cache = KVCache(layers)
        encode = [Pipeline(self.recipe, cache.geometry, self.profile).encode for _ in range(2)]
        first, second = (e(cache, Tokens.following(np.arange(20, dtype=np.int64), 0)) for e in encode)
        assert first == second


class SymbolCoderConformance(ABC):
    """Holds a symbol coder of (H, T, D) arrays to its contract."""

    dtypes: ClassVar[tuple[str, ...]] = ("uint16", "uint32")

    @abstractmethod
    def coder(self) -> SymbolCoder:
        """A coder as a pipeline would build it."""

    def arrays(self, kind: str, shape: tuple[int, int, int], dtype: str) -> list[np.ndarray]:
        top = int(np.iinfo(dtype).max)
        rng = np.random.default_rng(7)
        make: dict[str, Callable[[], np.ndarray]] = {
            "random": lambda: rng.integers(0, top, shape, endpoint=True),
            "skewed": lambda: rng.geometric(0.3, shape),
            "zeros": lambda: np.zeros(shape),
            "top": lambda: np.full(shape, top),
            "ramp": lambda: np.arange(int(np.prod(shape))).reshape(shape) % (top + 1),
        }
        return [make[kind]().astype(dtype), make[kind]().astype(dtype)]

    @pytest.mark.parametrize("shape", [(2, 0, 8), (1, 1, 1), (2, 1, 64), (3, 17, 5), (2, 40, 16)])
    @pytest.mark.parametrize("kind", ["random", "skewed", "zeros", "top", "ramp"])
    def test_round_trip_and_bounds(self, kind: str, shape: tuple[int, int, int]) -> None:
        for dtype in self.dtypes:
            arrays = self.arrays(kind, shape, dtype)
            part = self.coder().encode(arrays, range(1))
            assert sum(a.nbytes for a in arrays) <= self.coder().max_expansion * len(part)
            out = [np.empty_like(a) for a in arrays]
            self.coder().decode([part], [out], [range(1)])
            assert all(np.array_equal(a, b) for a, b in zip(arrays, out, strict=True))

    def test_every_truncation_is_noticed(self) -> None:
        for dtype in self.dtypes:
            arrays = self.arrays("skewed", (2, 20, 8), dtype)
            part = self.coder().encode(arrays, range(1))
            for length in range(len(part)):
                with pytest.raises(DamagedArchive):
                    self.coder().decode([part[:length]], [[np.empty_like(a) for a in arrays]], [range(1)])
