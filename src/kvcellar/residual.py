"""The middle of the closed loop: exact (`quantize/bits.py`), or lossy (`quantize/coefficients.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from .stages import Grade


class Place(NamedTuple):
    """Where the loop is: a group's layers, its tokens' positions int64 (T,), their grade.

    The encoder alone may be told their `surprisal`, bits float64 (T,), NaN for unknown.
    """

    layers: range
    positions: Tensor
    grade: Grade
    surprisal: np.ndarray | None = None


class Residual(ABC):
    """The middle of the closed loop: x against its prediction p, as integers and back."""

    lossless: ClassVar[bool]

    @abstractmethod
    def encode(self, x: list[Tensor], p: list[Tensor] | None, at: Place) -> list[np.ndarray]:
        """Symbol arrays of a group."""

    @abstractmethod
    def decode(self, symbols: list[np.ndarray], p: list[Tensor] | None, out: list[Tensor], at: Place) -> None:
        """Fill `out` from the symbols and the prediction."""

    def surprisal(self, symbols: list[np.ndarray]) -> np.ndarray | None:
        """What a group's symbols say of its tokens' surprisal, bits (T,), if anything."""
        return None
