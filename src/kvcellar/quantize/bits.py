"""`quantize: null`, the bit-exact residual: q = bits(x) − bits(p) mod 2^w, and back.

A float's bits are read as an unsigned integer of its width, never converted, so NaN payloads, −0 and subnormals
survive. With a predictor, p is rounded to the stored dtype first; it must be exact across machines (rule D2).

Tried on: CPU. Tensors on other devices are brought over by the front end before they get here.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..residual import Place, Residual

_SIGNED = {2: torch.int16, 4: torch.int32}
_UNSIGNED = {2: np.uint16, 4: np.uint32}


def bits(x: Float[Tensor, "heads tokens width"]) -> np.ndarray:
    """The bits of `x` (float16, bfloat16 or float32, CPU) as uint16 or uint32, sharing its memory."""
    size = x.element_size()
    return x.detach().view(_SIGNED[size]).numpy().view(_UNSIGNED[size])


class BitExact(Residual):
    lossless = True

    def encode(self, x: list[Tensor], p: list[Tensor] | None, at: Place) -> list[np.ndarray]:
        if p is None:
            return [bits(tensor) for tensor in x]
        return [bits(a) - bits(b.to(a.dtype)) for a, b in zip(x, p, strict=True)]

    def buffers(self, out: list[Tensor]) -> list[np.ndarray]:
        """The arrays the symbol coder decodes into: those of `out` itself, so that nothing is copied."""
        return [bits(tensor) for tensor in out]

    def decode(self, symbols: list[np.ndarray], p: list[Tensor] | None, out: list[Tensor], at: Place) -> None:
        if p is not None:
            for array, tensor, predicted in zip(symbols, out, p, strict=True):
                array += bits(predicted.to(tensor.dtype))
