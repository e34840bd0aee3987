"""A document's queries, turned to where later ones will stand.

What a model asks depends on the text and on the position it is asked from: rotary queries (RoPE, Su et al. 2021) meet a
key at the distance between both. Those to come stand behind the whole document, those it has asked stood within it. So
each is turned by the difference d of positions, R(d) R(p) q = R(p + d) q, to a place of its own behind the document.
As sample queries for `matching`, all of a document's tokens turned this way do better than its last ones as they were
asked; best without its first few dozen, which had nothing behind them to ask about. Ours. Tried on: CPU.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from ..errors import InvalidInput
from ..rope import Turn, turned

HORIZON = 384


def asked_later(
    queries: Float[Tensor, "heads queries width"],
    positions: Int64[Tensor, " queries"],
    turn: Turn,
    start: int,
    *,
    horizon: int = HORIZON,
    seed: int = 0,
) -> Float32[Tensor, "heads queries width"]:
    """`queries`, rotated at `positions`, as they would be asked at random positions `start`…`start + horizon − 1`.

    `turn` is how the layer turns (`rope.turns_of`); one that does not turn gets its queries back. Raises InvalidInput
    for numbers of positions that do not fit, and a horizon under 1.
    """
    if len(positions) != queries.shape[1] or horizon < 1:
        raise InvalidInput(
            f"{queries.shape[1]} queries at {len(positions)} positions, horizon {horizon}; expected a position each, "
            "and a horizon of at least 1"
        )
    generator = torch.Generator().manual_seed(seed)
    goal = start + torch.randint(0, horizon, (len(positions),), generator=generator)
    out = torch.empty(queries.shape, dtype=torch.float32)
    turned(queries.float(), turn, (goal - positions).numpy().tobytes(), out, back=False)
    return out
