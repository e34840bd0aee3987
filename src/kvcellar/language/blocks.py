"""How a sequence was read, and the ranges of its tokens that are checked. No torch, as in all that looks at a log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """`tokens` that a model read in steps of `chunk` tokens, the last of which may be shorter."""

    tokens: int
    chunk: int


def blocks_of(segments: Sequence[Segment], block: int) -> list[range]:
    """The checked ranges of tokens: every segment in steps of `block` tokens."""
    found, start = [], 0
    for tokens, _ in segments:
        found += [range(at, min(at + block, start + tokens)) for at in range(start, start + tokens, block)]
        start += tokens
    return found
