"""The way out of the lossy loop in one pass: coefficients turned, bounded, rounded and laid where they belong.

Coefficients are rows, one a token; a cache is (H, T, D) in a dtype of its own, and mostly a view into a longer one. In
tensor operations the way between them is a temporary for each step. Here a compiled loop (`placingkernels.py`) reads a
row once and writes it once. Products and sums are those of `rope.turned`, each rounded to float32, where torch may fuse
the two: keys differ from the plain way by that rounding, values not at all. Numbers are rounded to the cache's dtype
to nearest, half to even, as torch does it. Where tensors are such that the loop cannot write into them, nothing is
written and the caller goes the plain way. Tried on: CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from .geometry import HALF

_KINDS = {torch.float32, torch.float16, torch.bfloat16}


class Angles(NamedTuple):
    """Cosines and sines float32 (T, R/2) of the turns of one layer's keys, and the layout of the pairs they turn."""

    cos: np.ndarray
    sin: np.ndarray
    layout: int


def place(
    coefficients: Float32[Tensor, "tokens coefficients"],
    out: Sequence[Float[Tensor, "_heads tokens _width"]],
    turns: Sequence[Angles | None],
) -> bool:
    """Fill the tensors `out` with the rows' columns, one tensor after the other, each turned by its `turns` if given.

    What would round beyond a dtype's largest number becomes that number. Gives False, and leaves `out` as it was, when
    a tensor is not of float32, float16 or bfloat16 in this machine's memory with a head's numbers side by side, or
    when rows and tensors differ in their numbers.
    """
    sizes = [t.shape[0] * t.shape[2] for t in out]
    if not (
        coefficients.is_contiguous()
        and coefficients.shape[1] == sum(sizes)
        and len(turns) == len(out)
        and all(fits(t, len(coefficients)) for t in out)
    ):
        return False
    from . import placingkernels as kernels  # compiled code loads slowly: not with the package

    x, column = coefficients.numpy(), 0
    for tensor, size, turn in zip(out, sizes, turns, strict=True):
        if tensor.numel():
            heads, _, width = tensor.shape
            cos, sin, layout = turn or unturned(len(x))
            where = column, heads, width, tensor.stride(0), tensor.stride(1)
            if tensor.dtype == torch.float32:
                kernels.place_float32(x, cos, sin, layout, *where, _memory(tensor).numpy().view(np.uint32))
            else:
                kernels.place_16(x, cos, sin, layout, *where, *words(tensor))
        column += size
    return True


def words(tensor: Float[Tensor, "_heads tokens _width"]) -> tuple[bool, np.ndarray]:
    """Of a tensor of 16 bits: whether it is of bfloat16, and uint16 (N,) from its first to its last number."""
    return tensor.dtype == torch.bfloat16, _memory(tensor).view(torch.int16).numpy().view(np.uint16)


def fits(tensor: Float[Tensor, "_heads tokens _width"], tokens: int) -> bool:
    """Whether a loop can write so many tokens into a tensor."""
    return (
        tensor.dtype in _KINDS
        and tensor.device.type == "cpu"
        and tensor.shape[1] == tokens
        and (tensor.stride(2) == 1 or tensor.shape[2] <= 1)
    )


def _memory(tensor: Tensor) -> Tensor:
    """What lies between the first and the last number of (H, T, D), (N,)."""
    heads, tokens, width = tensor.shape
    length = (heads - 1) * tensor.stride(0) + (tokens - 1) * tensor.stride(1) + width
    return tensor.as_strided((length,), (1,))


@lru_cache(8)
def unturned(tokens: int) -> Angles:
    """For a loop that takes angles in any case: without pairs, so nothing is turned."""
    nothing = np.empty((tokens, 0), np.float32)
    return Angles(nothing, nothing, HALF)
