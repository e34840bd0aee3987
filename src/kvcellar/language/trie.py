"""A radix trie over the token ids of stored sessions, whose edges carry log2 P_M.

Method: the probabilistic language trie of "Sequential KV Cache Compression via Probabilistic Language Tries"
(arXiv 2604.15356). A prefix is a cell as wide as the model M finds it probable; each token contracts the cell it stands
in. For sequences s, s′ with the longest common prefix s∧s′ the paper prints

    d_T(s, s′) = −log2 P_M(s∧s′)

which is no distance: d_T(s, s) = −log2 P_M(s), not 0, and it grows the more two sequences share. It is the depth of the
smallest cell that holds both, and `cell_depth` is its name here. Beside it stands the distance that it makes:

    u(s, s′) = 0 if s = s′, else 2^(−d_T(s, s′)) = P_M(s∧s′)

which is an ultrametric, u(a, c) ≤ max(u(a, b), u(b, c)), since of the three common prefixes the two shortest are equal.
Nearest is the session of the deepest common cell. Cells that hold a given sequence lie within each other, so that is
the session with the longest common prefix, whether or not probabilities are known; of several, the first by name.

P_M is that of a causal model: log2 P(t_i | t_0 … t_{i−1}) for each token. The first token is given to such a model, not
foretold by it; callers say 0 bits for it, and all probabilities are conditional on it. Tokens whose probability nobody
told are unknown (NaN): a depth that needs them is NaN, and what is known of it a lower bound. No number is made up.

How we differ: the paper has no data structure. Here an edge is a range of one pool of tokens, so splitting copies none.
"""

from __future__ import annotations

from array import array

import numpy as np
from jaxtyping import Float32, UInt32

from ..errors import InvalidInput
from .cells import MAX_TOKENS, Cell, Kinship, Neighbour, checked_ids, checked_log2_probs, common_prefix, known

_ROOT = 0
_NONE = -1


class LanguageTrie:
    """Token sequences by name, and what the model of all of them finds probable. One model, one trie.

    Tokens are ids in 0…`vocabulary` − 1, integers (T,), at least one. Not for several threads at once.
    """

    def __init__(self, vocabulary: int = MAX_TOKENS) -> None:
        if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or not 1 <= vocabulary <= MAX_TOKENS:
            raise InvalidInput(f"a vocabulary of {vocabulary!r} tokens; expected 1…{MAX_TOKENS}")
        self.vocabulary = vocabulary
        self._pool, self._pool_log2 = np.empty(1024, np.uint32), np.empty(1024, np.float32)
        self._used = 0
        self.wasted_tokens = 0  # of those in the pool, how many no session leads to any more
        # Node by node: its edge's range in the pool, what is known of it, and what hangs on the node.
        self._start, self._length, self._parent = array("q"), array("q"), array("q")
        self._bits, self._unknown = array("d"), array("q")
        self._first = array("q")  # the session at or below it whose name comes first
        self._children: list[dict[int, int] | None] = []
        self._here: dict[int, list[int]] = {}  # sessions that end at a node
        self._free: list[int] = []
        self._names: list[str | None] = []
        self._end = array("q")  # node of each session
        self._by_name: dict[str, int] = {}
        self._free_sessions: list[int] = []
        self._node(_NONE, 0, 0)

    def __len__(self) -> int:
        """Sessions."""
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def names(self) -> list[str]:
        """Names of all sessions."""
        return list(self._by_name)

    @property
    def pooled_tokens(self) -> int:
        """Tokens held: those of a shared prefix once, those of discarded sessions still."""
        return self._used

    def add(self, name: str, tokens: object, log2_probs: object = None) -> None:
        """Hold `tokens` as session `name`, in place of what had that name.

        Args:
            log2_probs: floats (T,), log2 P_M(t_i | t_0 … t_{i−1}): finite, at most 0; NaN where not known. Where a
                prefix is there already, what is known of it stays, and what was unknown is filled in.

        Raises InvalidInput.
        """
        ids = self._checked(tokens)
        if not len(ids):
            raise InvalidInput(f"session {name!r} has no token; expected at least one")
        logs = None if log2_probs is None else checked_log2_probs(log2_probs, len(ids))
        node = self._insert(ids, logs)
        former = self._by_name.pop(name, None)
        if self._free_sessions:
            session = self._free_sessions.pop()
            self._names[session], self._end[session] = name, node
        else:
            session = len(self._names)
            self._names.append(name)
            self._end.append(node)
        self._by_name[name] = session
        self._here.setdefault(node, []).append(session)
        while node != _NONE and not self._comes_before(self._first[node], name):
            self._first[node] = session
            node = self._parent[node]
        if former is not None:
            self._drop(former)

    def discard(self, name: str) -> None:
        """Forget session `name`, if it is there."""
        session = self._by_name.pop(name, None)
        if session is not None:
            self._drop(session)

    def tokens_of(self, name: str) -> UInt32[np.ndarray, " T"]:
        """Token ids of a session. Raises InvalidInput for a name that is not there."""
        return np.concatenate([self._pool[at] for at in self._edges(name)])

    def log2_probs_of(self, name: str) -> Float32[np.ndarray, " T"]:
        """log2 P_M of a session's tokens, each given those before; NaN where not known. Raises InvalidInput."""
        return np.concatenate([self._pool_log2[at] for at in self._edges(name)])

    def longest_prefix(self, tokens: object) -> tuple[int, str | None]:
        """How many of the first `tokens` (none is allowed) a session begins with, and the first such session by name.

        (0, None) when no session shares the first token. Raises InvalidInput.
        """
        node, _, length, _ = self._walk(self._checked(tokens))
        return (length, self._names[self._first[node]]) if length else (0, None)

    def nearest(self, tokens: object) -> Neighbour | None:
        """The session of the deepest cell that holds `tokens` too; None when none shares the first token.

        Raises InvalidInput.
        """
        ids = self._checked(tokens)
        where = node, inside, length, _ = self._walk(ids)
        if not length:
            return None
        here = [] if inside or length < len(ids) else self._here.get(node, [])  # sessions of just these tokens
        name = min((str(self._names[session]) for session in here), default=str(self._names[self._first[node]]))
        return Neighbour(name, Kinship(self._cell(where, length), bool(here)))

    def cell(self, tokens: object) -> Cell:
        """The cell of a sequence. Tokens that no session has there are unknown. Raises InvalidInput."""
        ids = self._checked(tokens)
        return self._cell(self._walk(ids), len(ids))

    def _cell(self, where: tuple[int, int, int, tuple[float, int]], tokens: int) -> Cell:
        """The cell of `tokens` tokens, of which those lead to `where` that are in the trie."""
        node, inside, length, (bits, unknown) = where
        more, missing = known(self._pool_log2[self._start[node] : self._start[node] + inside])
        return Cell(tokens, unknown + missing + tokens - length, bits + more)

    def kinship(self, first: object, second: object) -> Kinship:
        """What two sequences, each token ids or the name of a session, have in common. Raises InvalidInput."""
        one, other = (
            self.tokens_of(each) if isinstance(each, str) else self._checked(each) for each in (first, second)
        )
        common = common_prefix(one, other)
        return Kinship(self.cell(one[:common]), common == len(one) == len(other))

    def cell_depth(self, first: object, second: object) -> float:
        """−log2 P_M(s∧s′) in bits, NaN when that is not known; sequences as in `kinship`."""
        return self.kinship(first, second).cell.depth

    def _checked(self, tokens: object) -> UInt32[np.ndarray, " T"]:
        return checked_ids(tokens, self.vocabulary)

    def _comes_before(self, session: int, name: str) -> bool:
        return session != _NONE and str(self._names[session]) <= name

    def _edges(self, name: str) -> list[slice]:
        """Ranges of the pool that spell a session, first token first."""
        if name not in self._by_name:
            raise InvalidInput(f"no session {name!r} among the {len(self)} in the trie")
        node, found = self._end[self._by_name[name]], []
        while node != _ROOT:
            found.append(slice(self._start[node], self._start[node] + self._length[node]))
            node = self._parent[node]
        return found[::-1]

    def _walk(self, ids: np.ndarray) -> tuple[int, int, int, tuple[float, int]]:
        """The node where `ids` lead: the last one reached or, `inside` > 0 tokens of its edge matching, entered.

        Then the tokens that matched, and bits and unknown tokens of all edges passed whole.
        """
        node, at, bits, unknown, asked = _ROOT, 0, 0.0, 0, ids.tolist()
        raw, pool, lengths, children = ids.tobytes(), self._pool, self._length, self._children
        while at < len(asked):
            below = children[node]
            child = below.get(asked[at]) if below else None
            if child is None:
                break
            length = lengths[child]
            if length > 1:
                start = self._start[child]
                if pool[start : start + length].tobytes() != raw[4 * at : 4 * (at + length)]:
                    inside = common_prefix(pool[start : start + length], ids[at:])
                    return child, inside, at + inside, (bits, unknown)
            node, at = child, at + length
            bits += self._bits[node]
            unknown += self._unknown[node]
        return node, 0, at, (bits, unknown)

    def _insert(self, ids: np.ndarray, logs: np.ndarray | None) -> int:
        """The node of `ids`, made where it is not there."""
        node, inside, at, _ = self._walk(ids)
        if inside:
            node = self._split(node, inside)
        if logs is not None:
            self._learn(node, logs[:at])
        if at == len(ids):
            return node
        start, count = self._used, len(ids) - at
        self._room(count)
        self._pool[start : start + count] = ids[at:]
        self._pool_log2[start : start + count] = np.nan if logs is None else logs[at:]
        self._used += count
        return self._node(node, start, count)

    def _room(self, count: int) -> None:
        """Room for `count` more tokens in the pool. New room is not touched, so it takes no memory yet."""
        if self._used + count > len(self._pool):
            size = max(self._used + count, len(self._pool) * 3 // 2)
            for name in ("_pool", "_pool_log2"):
                old = getattr(self, name)
                new = np.empty(size, old.dtype)
                new[: self._used] = old[: self._used]
                setattr(self, name, new)

    def _node(self, parent: int, start: int, length: int) -> int:
        """A new node below `parent`, which may have another child of that first token: it is replaced."""
        node = self._free.pop() if self._free else len(self._start)
        if node == len(self._start):
            for field in (self._start, self._length, self._parent, self._unknown, self._first):
                field.append(0)
            self._bits.append(0.0)
            self._children.append(None)
        self._start[node], self._length[node], self._parent[node], self._first[node] = start, length, parent, _NONE
        self._sum(node)
        if parent != _NONE:
            self._adopt(parent, node)
        return node

    def _adopt(self, parent: int, node: int) -> None:
        children = self._children[parent] = self._children[parent] or {}
        children[int(self._pool[self._start[node]])] = node

    def _split(self, node: int, length: int) -> int:
        """A new node for the first `length` tokens of a node's edge, between it and its parent."""
        upper = self._node(self._parent[node], self._start[node], length)
        self._first[upper] = self._first[node]
        self._start[node] += length
        self._length[node] -= length
        self._parent[node] = upper
        self._adopt(upper, node)
        self._sum(node)
        return upper

    def _sum(self, node: int) -> None:
        start = self._start[node]
        self._bits[node], self._unknown[node] = known(self._pool_log2[start : start + self._length[node]])

    def _learn(self, node: int, logs: np.ndarray) -> None:
        """Fill in what is not known yet of the path to `node`, whose tokens have the log2 probabilities `logs`."""
        at = len(logs)
        while node != _ROOT:
            start, length = self._start[node], self._length[node]
            at -= length
            if self._unknown[node]:
                held, told = self._pool_log2[start : start + length], logs[at : at + length]
                held[:] = np.where(np.isnan(held), told, held)
                self._sum(node)
            node = self._parent[node]

    def _drop(self, session: int) -> None:
        """Take a session, no longer among the names, off its node, and what then leads nowhere with it."""
        node = self._end[session]
        self._here[node].remove(session)
        if not self._here[node]:
            del self._here[node]
        while node != _NONE:
            parent, children, here = self._parent[node], self._children[node], self._here.get(node)
            if node != _ROOT and not children and here is None:
                siblings = self._children[parent] or {}
                del siblings[int(self._pool[self._start[node]])]
                self._children[node] = None
                self.wasted_tokens += self._length[node]
                self._free.append(node)
            elif self._first[node] == session:
                below = [self._first[child] for child in (children or {}).values()] + (here or [])
                self._first[node] = min(below, key=lambda each: str(self._names[each]), default=_NONE)
            node = parent
        self._names[session] = None
        self._free_sessions.append(session)
