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
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import InvalidInput
from .batched import Heads, concatenated, reduce_heads
from .matching import STEPS
from .tokens import Reducer, Weighted, joined

Summary = Weighted | None
"""None stands for no tokens at all: what is before the first chunk."""
Tokens = TypeVar("Tokens")
Where = tuple[int, ...]
NODE, BEFORE, LAST = 0, 1, 2


def end_of(where: Where) -> int:
    """The chunk before which a place in the tree ends: (NODE, level, index) or (BEFORE or LAST, chunk)."""
    return (where[2] + 1) << where[1] if where[0] == NODE else where[1]


class Merging(ABC, Generic[Tokens]):
    """What makes summaries."""

    @abstractmethod
    def join(self, earlier: Tokens, later: Tokens) -> Tokens:
        """Both, one behind the other."""

    @abstractmethod
    def reduced_all(self, jobs: Sequence[tuple[Tokens, Where]]) -> list[Tokens]:
        """Each set of tokens in at most K; its place in the tree makes the seed. All those of a level in one call."""


def _generator(seed: int, *where: int) -> torch.Generator:
    digest = hashlib.sha256(repr((seed, *where)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


@dataclass(frozen=True)
class Merge(Merging[Weighted]):
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
        _require_room(self.keep)

    def join(self, earlier: Weighted, later: Weighted) -> Weighted:
        return joined([earlier, later])

    def reduced_all(self, jobs: Sequence[tuple[Weighted, Where]]) -> list[Weighted]:
        return [self._reduced(tokens, where) for tokens, where in jobs]

    def _reduced(self, tokens: Weighted, where: Where) -> Weighted:
        if len(tokens) <= self.keep:
            return tokens
        generator = _generator(self.seed, *where)
        return self.reducer.reduce(tokens, self.keep, self.queries, self.scale, generator, self.rest)


@dataclass(frozen=True)
class HeadsMerge(Merging[Heads]):
    """`Merge` for all heads of a layer at once, and all places of one shape in one call (`batched.py`).

    `queries` are asked of everything, or `asked[c]` of what ends before chunk c: queries of tokens before chunk c are
    as causal. A head's own number makes its seed, too. `steps` as in `reduce_heads`. Raises InvalidInput where `keep`
    is not positive.
    """

    reducer: Reducer
    keep: int
    scale: float
    queries: Float[Tensor, "heads queries key_width"] | None = None
    asked: Mapping[int, Tensor] = field(default_factory=dict)
    rest: Heads | None = None
    seed: int = 0
    steps: int = STEPS

    def __post_init__(self) -> None:
        _require_room(self.keep)

    def join(self, earlier: Heads, later: Heads) -> Heads:
        return concatenated([earlier, later], 1)

    def reduced_all(self, jobs: Sequence[tuple[Heads, Where]]) -> list[Heads]:
        found = [tokens for tokens, _ in jobs]
        for size in sorted({len(tokens) for tokens in found if len(tokens) > self.keep}):
            same = [i for i, tokens in enumerate(found) if len(tokens) == size]
            heads = found[same[0]].count
            places = [jobs[i][1] for i in same]
            queries = [x for x in map(self._queries, places) if x is not None]
            reduced = reduce_heads(
                self.reducer,
                concatenated([found[i] for i in same], 0),
                self.keep,
                torch.cat(queries) if queries else None,
                self.scale,
                [_generator(self.seed, head, *place) for place in places for head in range(heads)],
                None if self.rest is None else concatenated([self.rest] * len(same), 0),
                steps=self.steps,
            )
            for number, i in enumerate(same):
                found[i] = reduced.heads(slice(number * heads, (number + 1) * heads))
        return found

    def _queries(self, where: Where) -> Tensor | None:
        return self.queries if self.queries is not None else self.asked.get(end_of(where))


def _require_room(keep: int) -> None:
    if keep < 1:
        raise InvalidInput(f"{keep} tokens to keep; expected at least 1")


def scan(chunks: Sequence[Tokens], merge: Merging[Tokens]) -> list[Tokens | None]:
    """For each chunk the summary of all before it, None for the first.

    `chunks` are the tokens of each chunk; one with more than `keep` is reduced on its own first. The last stands before
    none.
    """
    levels = [merge.reduced_all([(tokens, (NODE, 0, i)) for i, tokens in enumerate(chunks[:-1])])]
    while len(levels[-1]) > 1:
        below, level = levels[-1], len(levels)
        pairs = enumerate(zip(below[::2], below[1::2], strict=False))
        levels.append(merge.reduced_all([(merge.join(*pair), (NODE, level, i)) for i, pair in pairs]))
    before: list[Tokens | None] = [None]
    for level in range(len(levels) - 1, -1, -1):
        # `before` are those of nodes of the level above; a left child has its parent's, a right one its sibling too
        above, nodes = before, levels[level]
        before = [above[i // 2] if i % 2 == 0 else nodes[i - 1] for i in range(-(-len(chunks) >> level))]
        joint = [(i, earlier) for i in range(1, len(before), 2) if (earlier := above[i // 2]) is not None]
        jobs = [(merge.join(earlier, nodes[i - 1]), (BEFORE, i << level)) for i, earlier in joint]
        for (i, _), summary in zip(joint, merge.reduced_all(jobs), strict=True):
            before[i] = summary
    return before if chunks else []


class Buckets(Generic[Tokens]):
    """A binary counter of summaries: one node for every digit 1 of the number of chunks so far."""

    def __init__(self, merge: Merging[Tokens]) -> None:
        self._merge = merge
        self._nodes: list[tuple[int, Tokens]] = []  # (level, node), levels descend
        self.chunks = 0

    def push(self, chunk: Tokens) -> None:
        """One chunk more; amortised one reduction of a chunk and one of 2K tokens."""
        level, (node,) = 0, self._merge.reduced_all([(chunk, (NODE, 0, self.chunks))])
        while self._nodes and self._nodes[-1][0] == level:
            _, left = self._nodes.pop()
            level += 1
            where = (NODE, level, self.chunks >> level)
            (node,) = self._merge.reduced_all([(self._merge.join(left, node), where)])
        self._nodes.append((level, node))
        self.chunks += 1

    def ends(self) -> list[int]:
        """Before which chunks the nodes end; a merge later on ends at one of these or at a chunk to come."""
        found, chunk = [], 0
        for level, _ in self._nodes:
            chunk += 1 << level
            found.append(chunk)
        return found

    def held(self) -> list[Tokens]:
        """The nodes from the earliest on, nothing merged any further: O(K log chunks) tokens."""
        return [node for _, node in self._nodes]

    def before(self) -> Tokens | None:
        """What stands before the next chunk in at most K tokens, as `scan` has it."""
        earlier: Tokens | None = None
        for end, (_, node) in zip(self.ends(), self._nodes, strict=True):
            if earlier is not None:
                (node,) = self._merge.reduced_all([(self._merge.join(earlier, node), (BEFORE, end))])
            earlier = node
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
    found: list[Summary] = scan([body[i : i + chunk] for i in range(0, len(body), chunk)], merge)
    if first is None:
        return found
    return [first if summary is None else joined([first, summary]) for summary in found]
