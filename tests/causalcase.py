"""Profiles of `causal/1` made of integers alone, for caches of any geometry."""

from __future__ import annotations

import numpy as np

from kvcellar.geometry import Geometry
from kvcellar.profile import Profile
from kvcellar.symbols.causalstate import BLOCK, Layer

SEEN, EMBEDDING, BEFORE = 1, 4, 2
SETTINGS = {"id": "causal/1", "seen": SEEN, "embedding": EMBEDDING, "before": BEFORE}
VOCABULARY = 64


def _hashed(count: int, seed: int, reach: int) -> np.ndarray:
    """Integers from −reach to reach by a multiplicative hash."""
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64(seed << 20)) * np.uint64(0x9E3779B97F4A7C15)
    found: np.ndarray = (mixed >> np.uint64(40)).astype(np.int64) % (2 * reach + 1) - reach
    return found


def profile_for(geometry: Geometry, pairs: int, layout: int = 0) -> Profile:
    """Weights of no use but small ones, `pairs` turned in each key head."""
    layers, seen, embedding, before = geometry.layers, SEEN, EMBEDDING, BEFORE
    tensors: dict[str, np.ndarray] = {
        "table": _hashed(VOCABULARY * embedding, 1, 127).astype(np.int8).reshape(VOCABULARY, embedding),
        "turns": np.array([[(1 << 61) // (3**j) for j in range(max(1, pairs))]] * len(layers), np.int64),
        "pairs": np.full(len(layers), pairs, np.int32),
        "layout": np.full(len(layers), layout, np.int32),
    }
    for i, layer in enumerate(layers):
        c = layer.numbers_per_token
        f = embedding + before + sum(each.numbers_per_token for each in layers[max(0, i - seen) : i])
        blocks = -(-f // BLOCK) + -(-c // BLOCK)
        made = {
            "weights": _hashed(c * f, 2 + i, 127).astype(np.int8).reshape(c, f),
            "within": _hashed(c * (c - 1) // 2, 30 + i, 127).astype(np.int8),
            "factors": np.abs(_hashed(c * blocks, 60 + i, 12)).astype(np.int32).reshape(c, blocks),
            "mean": _hashed(c, 90 + i, 1 << 26),
            "spread": (64 * 20 + _hashed(c, 120 + i, 16)).astype(np.int16),
            "exponent": np.zeros(c, np.int16),
        }
        assert tuple(made) == Layer.FIELDS
        tensors |= {f"{name}.{i}": value for name, value in made.items()}
    return Profile({f"symbols.{name}": tensor for name, tensor in tensors.items()}, {"arithmetic": "integers"})
