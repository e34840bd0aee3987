"""Rotary positions off and on again, exactly as Llama turns them, and a cache as one matrix of token vectors.

Llama (transformers ``apply_rotary_pos_emb``) turns the pair (x_j, x_{j+D/2}) by position · inv_freq_j:
k' = k·cos + half(k)·sin with half(x) = (−x₂, x₁). The rotation is orthogonal, so turning by the negative angle undoes
it; both angles come from float32 frequencies times float32 positions, as the model computes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Pairs = list[tuple[Tensor, Tensor]]


def frequencies(model: Any) -> Tensor:
    """The model's rotary frequencies, float32 (D/2,). Raises ValueError for any rope but the default one."""
    kind = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
    rotary = model.model.rotary_emb
    if kind != "default" or getattr(rotary, "attention_scaling", 1.0) != 1.0:
        raise ValueError(f"rope {kind} cannot be undone here; expected default")
    return rotary.inv_freq.detach().float().cpu().clone()


def turned(keys: Tensor, inv_freq: Tensor, *, back: bool, first: int = 0) -> Tensor:
    """Keys (..., T, D) at positions first..first+T−1, rotated, or un-rotated with `back`; float32 of the same shape."""
    positions = torch.arange(first, first + keys.shape[-2], dtype=torch.float32)
    angles = torch.outer(positions, inv_freq).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    x = keys.float()
    one, two = x.chunk(2, dim=-1)
    half = torch.cat((-two, one), dim=-1)
    return x * cos - half * sin if back else x * cos + half * sin


def matrices(pairs: Pairs, inv_freq: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Pre-RoPE keys and values of tokens start..stop−1, each float32 (T, L·H·D): all layers and heads of a token.

    `pairs` holds (1, H, T, D) per layer, positions from 0.
    """
    keys = [turned(k[0, :, start:stop], inv_freq, back=True, first=start) for k, _ in pairs]
    return _rows(keys), _rows([v[0, :, start:stop].float() for _, v in pairs])


def layers(keys: Tensor, values: Tensor, inv_freq: Tensor, shape: tuple[int, int, int], start: int) -> Pairs:
    """Inverse of `matrices` for shape (L, H, D): float32 (1, H, T, D) per layer, keys rotated again."""
    turn = turned(_heads(keys, shape), inv_freq, back=False, first=start)
    return [(k[None], v[None]) for k, v in zip(turn, _heads(values, shape), strict=True)]


def _rows(per_layer: list[Tensor]) -> Tensor:
    x = torch.stack(per_layer)  # (L, H, T, D)
    return x.permute(2, 0, 1, 3).flatten(1).contiguous()


def _heads(rows: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return rows.reshape(len(rows), *shape).permute(1, 2, 0, 3)
