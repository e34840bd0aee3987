"""Summaries of everything before a chunk: a prefix scan for a whole prompt, a binary counter while a text grows.

Chunks are leaves of a binary tree. A node stands for its leaves in K tokens, reduced from its children's 2K (*merge and
reduce*). What stands before chunk c is the nodes of the binary digits of c, from the largest to the smallest, each
joined to what came before and reduced to K again:

    c = 13 = 8 + 4 + 1:   before(13) = merge(merge(node[0:8], node[8:12]), node[12:13])

`scan` gets all of these at once, level by level, up the tree and down again (Blelloch 1990); `Buckets` keeps just the
nodes of the digits, O(K log c) tokens, and merges when asked. Both make the same nodes with the same seeds, so they
agree to the bit. Nothing before chunk c depends on c or on what follows: causality is exact, provided that the queries
a reducer is given are, too.

Source: the scheme is that of "The risk of KV cache compression" (Haverbeck et al. 2026); which nodes are merged in
which order is ours. Error grows with the number of merges on a token's way, about log c. Tried on: CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import InvalidInput
from .tokens import Reducer, Weighted, joined

Summary = Weighted | None
"""None stands for no tokens at all: what is before the first chunk."""


@dataclass(frozen=True)
class Merge:
    """How two summaries become one of at most `keep` tokens, on `queries` that must not depend on the text itself
    beyond the tokens merged; `rest` are tokens that every query sees beside them, such as sinks.

    Raises InvalidInput where `keep` is not positive.
    """

    reducer: Reducer
    keep: int
    scale: float
    queries: Float[Tensor, "queries key_width"] | None = None
    rest: Weighted | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise InvalidInput(f"{self.keep} tokens to keep; expected at least 1")

    def reduced(self, tokens: Weighted, *where: int) -> Weighted:
        """`tokens` in at most `keep`; `where` in the tree makes the seed."""
        if len(tokens) <= self.keep:
            return tokens
        digest = hashlib.sha256(repr((self.seed, *where)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return self.reducer.reduce(tokens, self.keep, self.queries, self.scale, generator, self.rest)

    def __call__(self, earlier: Summary, later: Summary, *where: int) -> Summary:
        if earlier is None or later is None:
            return later if earlier is None else earlier
        return self.reduced(joined([earlier, later]), *where)


NODE, BEFORE = 0, 1


def _node(merge: Merge, level: int, index: int, left: Weighted, right: Weighted) -> Weighted:
    """The node of 2^level chunks from `index` · 2^level on."""
    return merge.reduced(joined([left, right]), NODE, level, index)


def _before(merge: Merge, earlier: Summary, node: Weighted, chunk: int) -> Summary:
    """What stands before `chunk`, from what stands before `node`, the last before `chunk`."""
    return merge(earlier, node, BEFORE, chunk)


def scan(chunks: Sequence[Weighted], merge: Merge) -> list[Summary]:
    """For each chunk the summary of all before it, None for the first.

    `chunks` are the tokens of each chunk; one with more than `keep` is reduced on its own first.
    """
    levels = [[merge.reduced(tokens, NODE, 0, i) for i, tokens in enumerate(chunks)]]
    while len(levels[-1]) > 1:
        below, level = levels[-1], len(levels)
        pairs = zip(below[::2], below[1::2], strict=False)
        levels.append([_node(merge, level, i, left, right) for i, (left, right) in enumerate(pairs)])
    before: list[Summary] = [None]
    for level in range(len(levels) - 1, -1, -1):
        # `before` are those of nodes of the level above; a left child has its parent's, a right one its sibling too
        nodes = levels[level]
        before = [
            before[i // 2] if i % 2 == 0 else _before(merge, before[i // 2], nodes[i - 1], i << level)
            for i in range(-(-len(chunks) >> level))
        ]
    return before if chunks else []


class Buckets:
    """A binary counter of summaries: one node for every digit 1 of the number of chunks so far."""

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self._nodes: list[tuple[int, Weighted]] = []  # (level, node), levels descend
        self.chunks = 0

    def push(self, chunk: Weighted) -> None:
        """One chunk more; amortised one reduction of a chunk and one of 2K tokens."""
        level, node = 0, self._merge.reduced(chunk, NODE, 0, self.chunks)
        while self._nodes and self._nodes[-1][0] == level:
            _, left = self._nodes.pop()
            level += 1
            node = _node(self._merge, level, self.chunks >> level, left, node)
        self._nodes.append((level, node))
        self.chunks += 1

    @property
    def slots(self) -> int:
        """Tokens held."""
        return sum(len(node) for _, node in self._nodes)

    def held(self) -> Summary:
        """All nodes side by side: nothing merged any further, O(K log chunks) tokens."""
        return joined([node for _, node in self._nodes]) if self._nodes else None

    def before(self) -> Summary:
        """What stands before the next chunk in at most K tokens, as `scan` has it."""
        earlier: Summary = None
        chunk = 0
        for level, node in self._nodes:
            chunk += 1 << level
            earlier = _before(self._merge, earlier, node, chunk)
        return earlier


def prefix_summaries(
    head: Weighted,
    chunk: int,
    keep: int,
    reducer: Reducer,
    *,
    sinks: int = 4,
    queries: Float[Tensor, "queries key_width"] | None = None,
    scale: float,
    seed: int = 0,
) -> list[Summary]:
    """For each chunk of `chunk` tokens of a prompt's head what its queries see of all before: sinks and summary.

    The first `sinks` tokens stay as they are and belong to no chunk's summary; `keep` counts them. The first chunk
    begins after them and sees them alone (None without sinks). Together with the tokens of its own chunk up to itself
    that is all a query sees, so attention takes O(chunk + keep) memory a query.

    Raises InvalidInput where `keep` has no room beside the sinks or `chunk` is not positive.
    """
    if chunk < 1 or sinks < 0 or keep <= sinks:
        raise InvalidInput(f"chunks of {chunk}, {keep} to keep, {sinks} sinks; expected chunk ≥ 1 and keep > sinks ≥ 0")
    first = head[:sinks] if sinks else None
    merge = Merge(reducer, keep - sinks, scale, queries, first, seed)
    body = head[sinks:]
    found = scan([body[i : i + chunk] for i in range(0, len(body), chunk)], merge)
    if first is None:
        return found
    return [first if summary is None else joined([first, summary]) for summary in found]
