"""What all tests share: small caches that are the same on every run, and named dimensions checked while they run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from jaxtyping import install_import_hook

SOURCE = Path(__file__).parent.parent / "src"
# Only modules that name dimensions: compiled kernels cannot be wrapped, and a front end must meet wrong types itself.
TYPED = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in sorted(SOURCE.rglob("*.py"))
    if "from jaxtyping import" in path.read_text(encoding="utf-8")
]
install_import_hook(TYPED, "beartype.beartype")  # before any module of kvcellar is imported

import kvcellar  # noqa: E402

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _make_cache(
    layers: int = 3,
    heads: int = 2,
    tokens: int = 40,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    batch: int = 1,
) -> Pairs:
    """(keys, values) per layer, each (B, H, T, D).

    A token's numbers do not depend on how many tokens follow, so a shorter cache is a prefix of a longer one.
    Channels differ in scale and sign, as those of real caches do.
    """

    def side(layer: int, which: int) -> torch.Tensor:
        rng = np.random.default_rng([seed, layer, which])
        mean = rng.normal(size=(batch, heads, 1, width)) * 2.0 ** rng.integers(-4, 5, (batch, heads, 1, width))
        noise = rng.normal(size=(tokens, batch, heads, width)).transpose(1, 2, 0, 3)
        return torch.from_numpy(mean * (1 + noise / 4)).to(dtype)

    return [(side(layer, 0), side(layer, 1)) for layer in range(layers)]


def _make_ids(n: int, seed: int = 0) -> list[int]:
    """n token ids; fewer ids are a prefix of more."""
    ids: list[int] = np.random.default_rng([seed, 7]).integers(0, 50_000, n).tolist()
    return ids


@pytest.fixture(scope="session")
def make_cache() -> Callable[..., Pairs]:
    return _make_cache


@pytest.fixture(scope="session")
def make_ids() -> Callable[..., list[int]]:
    return _make_ids


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For thousands of tiny restores: no threads and no checks of dimensions, which would be most of the time."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Save a cache as `name` in the test's folder under identity "m"; gives the path. Ids by default from make_ids."""

    def save(cache: Pairs, tokens: list[int] | None = None, name: str = "a.kvc", **settings: object) -> Path:
        ids = _make_ids(cache[0][0].shape[2]) if tokens is None else tokens
        kvcellar.save(tmp_path / name, cache, tokens=ids, **{"identity": "m", **settings})
        return tmp_path / name

    return save
