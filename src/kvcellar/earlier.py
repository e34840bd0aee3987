"""The ids before each token, as far as a prediction may look back at them."""

from __future__ import annotations

import numpy as np

from .stages import LOOKBACK


def earlier_ids(
    ids: np.ndarray, start: int = 0, block: int | None = None, known: np.ndarray | None = None
) -> np.ndarray:
    """Ids int64 (T, LOOKBACK) of the tokens before each of `ids`, the first of which has index `start`; −1 for none.

    They are looked for among the tokens of a sealed block (of `block` tokens, all by default) only, whether it is
    sealed already or not, so that what is predicted from them stays when it is. `known` are the ids right before.
    """
    known = np.empty(0, np.int64) if known is None else known
    index = start + np.arange(len(ids))
    line = np.concatenate([np.full(LOOKBACK, -1), known, ids])[-len(ids) - LOOKBACK :] if len(ids) else ids
    found = np.full((len(ids), LOOKBACK), -1, np.int64)
    for back in range(1, LOOKBACK + 1):
        same = index >= back if block is None else (index - back) // block == index // block
        found[same, back - 1] = line[LOOKBACK - back : len(line) - back][same]
    return found
