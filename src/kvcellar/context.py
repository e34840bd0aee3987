"""What a stage may look at beside its numbers: the tokens, their grade, and what is restored so far."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from .replayed import Replayed

LOOKBACK = 3
"""How many ids before each token a predictor is told."""


class Grade(StrEnum):
    """How closely a token is coded: fine while it is a sink or recent, coarse ever after (`window.py`)."""

    COARSE = "coarse"
    FINE = "fine"


class Context:
    """What encoder and decoder both know at a point of the loop.

    `tokens` and `positions` int64 (T,) of the tokens of one grade in a block; `earlier` int64 (T, LOOKBACK), the ids of
    the tokens one, two, … before each, −1 where those are not of its block; and `restored`: for each layer group so far
    its restored tensors (H, T, D) in the stored dtype; and for a recipe that wants it what the model's replay tells of
    the tokens, `replayed`. Predictors may look at nothing else.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        earlier: np.ndarray,
        grade: Grade = Grade.COARSE,
        replayed: Replayed | None = None,
    ):
        self.tokens, self.positions, self.earlier = tokens, positions, earlier
        self.grade, self.replayed = grade, replayed
        self.restored: list[list[Tensor]] = []

    @property
    def follows(self) -> np.ndarray:
        """bool (T,): whether a row stands for the token right behind that of the row before, in the same sealed block.

        Never of fine tokens: they keep their symbols when the tokens before them become coarse.
        """
        found = np.zeros(len(self.positions), bool)
        if self.grade is Grade.COARSE:
            found[1:] = (np.diff(self.positions) == 1) & (self.earlier[1:, 0] >= 0)
        return found

    def push(self, group: list[Tensor]) -> None:
        self.restored.append(group)
