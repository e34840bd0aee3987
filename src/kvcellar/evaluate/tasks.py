"""Tasks with one right answer that only the context knows, generated from a seed: what a cache must not forget.

Five kinds, after the probes of long-context tests (needle in a haystack; RULER, arXiv 2404.06654, whose wording this
does not use): one or several facts in filler text, a table of random keys and values, chains of variables, and a
list in which one row deviates. Questions are plain beginnings of the sentence that the answer ends, since models
too small to follow an instruction can still continue a text.

A context is filled up to a budget in tokens, counted by the caller's `encode`, never above it. Depth is the share of
the other tokens that stand before the asked fact: 0 at the start, 1 at the end. Filler comes from documents the
caller passes, cut into pieces of at most 1/25 of the budget, so that depth is met within about 3 %; a piece that
holds a word of the task is left out, so that an answer stands in the context exactly once. Keep depths below 1 by
more than the window that ∅ keeps, or ∅ sees the answer too. Same arguments, same tasks. No torch, no file, no hub.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..errors import InvalidInput

Encode = Callable[[str], Sequence[int]]

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
DISTRACTORS = 4
FACTS = 4
HOPS = 1
_PIECES = 25


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_CITIES = _listed(
    "Paris London Madrid Berlin Vienna Lisbon Dublin Warsaw Prague Athens Oslo Stockholm Helsinki Budapest Rome Cairo "
    "Nairobi Tokyo Beijing Delhi Mumbai Bangkok Jakarta Sydney Toronto Chicago Boston Denver Houston Seattle"
)
WORDS = _listed(
    "apple bread bridge butter camera candle castle chair cheese church clock cloud coffee copper cotton desert "
    "diamond doctor dragon eagle engine feather flower forest garden ghost glass guitar hammer honey horse hotel "
    "island jacket jungle kitchen ladder lemon letter lion market medal mirror monkey mountain mouse museum needle "
    "night ocean orange paper pepper piano pilot planet pocket potato prince queen rabbit river rocket salmon salt "
    "school shirt silver snake spider spoon statue stone storm sugar summer sword table temple tiger tower train "
    "turtle valley violin wagon whale wheat window winter wolf zebra"
)
"""Answers and distractors: nouns, none within another, one token each for most vocabularies, so that none share any."""
_RELATIONS = ("secret word", "lucky charm", "first prize", "hidden treasure", "code name", "festival gift")
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")


@dataclass(frozen=True)
class Task:
    """A context to be cached, and a question fed behind it, which the answer follows after one space.

    `distractors` are other answers of the same form, against which the margin is taken; `depth` is as asked for
    (None when not known). `question` brings its own line break and ends without a space.
    """

    kind: str
    context: str
    question: str
    answer: str
    distractors: tuple[str, ...]
    depth: float | None
    id: str


class Body(NamedTuple):
    """What a kind writes: the Task without its kind, depth and id."""

    context: str
    question: str
    answer: str
    distractors: tuple[str, ...]


class Haystack(NamedTuple):
    """What a kind is given: the filler's documents, how tokens are counted, and how many there may be."""

    documents: Sequence[str]
    encode: Encode
    budget: int

    def count(self, text: str) -> int:
        return len(self.encode(text))


def generate(
    kind: str,
    documents: Sequence[str],
    encode: Encode,
    *,
    budget: int,
    count: int,
    seed: int = 0,
    depths: Sequence[float] = DEPTHS,
) -> list[Task]:
    """`count` tasks of one of `KINDS`, with contexts of at most `budget` tokens, going round the `depths`.

    Raises InvalidInput for an unknown kind, a depth outside [0, 1], a budget too small for the facts, and documents
    too short to fill it (the two kinds of rows alone need none).
    """
    if kind not in KINDS:
        raise InvalidInput(f"task kind {kind!r}; expected one of {', '.join(KINDS)}")
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise InvalidInput(f"depths {tuple(depths)}; expected at least one, each from 0 to 1")
    hay, made = Haystack(documents, encode, budget), []
    for index in range(count):
        depth = depths[index % len(depths)]
        body = KINDS[kind](hay, random.Random(f"kvcellar-task/1 {kind} {seed} {index}"), depth)
        made.append(Task(kind, *body, depth=depth, id=f"{kind}-{budget}-{seed}-{index}"))
    return made


def needle_single(hay: Haystack, rng: random.Random, depth: float) -> Body:
    """One fact in filler text; the distractors are words that stand nowhere."""
    return _needles(hay, rng, depth, facts=1)


def needle_multi(hay: Haystack, rng: random.Random, depth: float) -> Body:
    """Several facts of one form in filler text, one of them asked; the distractors are what the others say."""
    return _needles(hay, rng, depth, facts=FACTS)


def _needles(hay: Haystack, rng: random.Random, depth: float, *, facts: int) -> Body:
    cities, words = rng.sample(_CITIES, facts), rng.sample(WORDS, max(facts, DISTRACTORS + 1))
    stems = [f"The {a} of {city} is" for a, city in zip(rng.sample(_RELATIONS, facts), cities, strict=True)]
    places = [depth, *(rng.uniform(0.05, 0.9) for _ in stems[1:])]
    lines = [f"{stem} {word}." for stem, word in zip(stems, words, strict=False)]
    context = _woven(hay, rng, list(zip(places, lines, strict=True)), reserved=[*cities, *words])
    return Body(context, f"\n{stems[0]}", words[0], tuple(words[1:facts] if facts > 1 else words[1:]))


def key_value(hay: Haystack, rng: random.Random, depth: float) -> Body:
    """A table of random keys and words that fills the budget; the distractors are other rows' words.

    Keys and the answer stand there once, other words as often as chance has it.
    """
    answer, *others = rng.sample(WORDS, len(WORDS))
    keys = _keys(rng, answer)
    key = next(keys)
    rows = (f"{other}: {rng.choice(others)}" for other in keys)
    context = _arranged(hay, "Keys and their values:", rows, [(depth, f"{key}: {answer}")], "\n")
    used = sorted({row.partition(": ")[2] for row in context.splitlines()[1:]} - {answer})
    return Body(context, f"\n{key}:", answer, tuple(rng.sample(used, min(DISTRACTORS, len(used)))))


def variables(hay: Haystack, rng: random.Random, depth: float) -> Body:
    """Two chains of assignments in filler text, x1 = lemon, x2 = x1; asked is the last variable of one of them.

    `depth` is that of the asked chain's word; its other assignments follow, evenly up to 0.95 of the context. The
    other chain's word is the first distractor.
    """
    names, words = rng.sample("abcdfghkmnpqrstuvwxyz", 2), rng.sample(WORDS, DISTRACTORS + 1)
    facts = []
    for chain, (name, word) in enumerate(zip(names, words, strict=False)):
        first = depth if chain == 0 else rng.uniform(0.05, 0.8)
        for hop in range(HOPS + 1):
            place = first + max(0.0, 0.95 - first) * hop / (HOPS + 1)
            facts.append((place, f"{name}{hop + 1} = {f'{name}{hop}' if hop else word}"))
    reserved = [*(f"{name}{hop + 1}" for name in names for hop in range(HOPS + 1)), *words]
    context = _woven(hay, rng, facts, reserved=reserved)
    return Body(context, f"\nThe value of {names[0]}{HOPS + 1} is", words[0], tuple(words[1:]))


def repeated(hay: Haystack, rng: random.Random, depth: float) -> Body:
    """A list whose rows all say the same but one, which is asked; the first distractor is what all others say."""
    usual, answer, *others = rng.sample(WORDS, DISTRACTORS + 1)
    keys = _keys(rng, answer)
    stem = f"Box {next(keys)} holds"
    rows = (f"Box {key} holds {usual}." for key in keys)
    context = _arranged(hay, "What each box holds:", rows, [(depth, f"{stem} {answer}.")], "\n")
    return Body(context, f"\n{stem}", answer, (usual, *others))


KINDS: dict[str, Callable[[Haystack, random.Random, float], Body]] = {
    "needle_single": needle_single,
    "needle_multi": needle_multi,
    "key_value": key_value,
    "variables": variables,
    "repeated": repeated,
}


def _keys(rng: random.Random, answer: str) -> Iterator[str]:
    """Words of three open syllables that mean nothing, no two the same; the answer is in none of them."""
    seen = {""}
    while len(seen) <= len(_SYLLABLES) ** 3 // 2:
        key = "".join(rng.choices(_SYLLABLES, k=3))
        if key not in seen and answer not in key:
            seen.add(key)
            yield key


def _woven(hay: Haystack, rng: random.Random, facts: Sequence[tuple[float, str]], reserved: Sequence[str]) -> str:
    """Filler with the facts at their depths, each on a line of its own; no filler holds a reserved word."""
    return _arranged(hay, "", _filler(hay, rng, reserved), facts, " ")


def _filler(hay: Haystack, rng: random.Random, reserved: Sequence[str]) -> Iterator[str]:
    """Pieces of sentences from a random place of a random document on, then of the others, in a random order."""
    limit = max(1, hay.budget // _PIECES)
    order = rng.sample(range(len(hay.documents)), len(hay.documents))
    start: float | None = rng.random() / 2
    for document in order:
        sentences = re.split(r"(?<=[.!?:;])\s+", " ".join(hay.documents[document].split()))
        for sentence in sentences[int(start * len(sentences)) :] if start else sentences:
            for piece in _cut(sentence, hay, limit):
                if piece and not any(word in piece for word in reserved):
                    yield piece
        start = None


def _cut(sentence: str, hay: Haystack, limit: int) -> Iterator[str]:
    """A sentence in halves of halves, at spaces, until each has at most `limit` tokens or is one word."""
    words = sentence.split(" ")
    if len(words) == 1 or (len(words) <= 2 * limit and hay.count(sentence) <= limit):
        yield sentence
        return
    for half in (words[: len(words) // 2], words[len(words) // 2 :]):
        yield from _cut(" ".join(half), hay, limit)


def _arranged(hay: Haystack, title: str, pieces: Iterator[str], facts: Sequence[tuple[float, str]], joint: str) -> str:
    """Title, pieces and facts within the budget, each fact where its depth says. Raises InvalidInput when they end."""
    facts = sorted(facts)
    own = [hay.count(f"\n{text}\n") for _, text in facts]
    room = hay.budget - sum(own) - (hay.count(f"{title}\n") if title else 0)
    if room <= 0:
        raise InvalidInput(f"a budget of {hay.budget:,} tokens; the facts of the task alone have {hay.budget - room:,}")
    chosen, sizes, used = [], [], 0
    for piece in pieces:
        size = hay.count(f"{joint}{piece}")
        if used + size > room:
            break
        chosen.append(piece)
        sizes.append(size)
        used += size
    else:
        raise InvalidInput(f"the documents give {used:,} tokens of filler; {room:,} are needed")
    while chosen:
        text = _joined(title, chosen, _places(facts, own, sizes), joint)
        if hay.count(text) <= hay.budget:
            return text
        chosen.pop()
        sizes.pop()
    raise InvalidInput(f"a budget of {hay.budget:,} tokens leaves no room for filler beside the facts")


def _places(facts: Sequence[tuple[float, str]], own: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, str]]:
    """(pieces before it, text) of each fact; `facts` are in order of depth, `own` and `sizes` are in tokens."""
    total, earlier, places = sum(own) + sum(sizes), 0, []
    for (depth, text), size in zip(facts, own, strict=True):
        places.append((_nearest(sizes, depth * (total - size) - earlier), text))
        earlier += size
    return places


def _nearest(sizes: Iterable[int], tokens: float) -> int:
    """How many of the pieces together come nearest to `tokens`."""
    sums = [0, *accumulate(sizes)]
    after = min(bisect_left(sums, tokens), len(sums) - 1)
    return after - 1 if after and tokens - sums[after - 1] < sums[after] - tokens else after


def _joined(title: str, pieces: Sequence[str], places: Sequence[tuple[int, str]], joint: str) -> str:
    parts, done = [title] if title else [], 0
    for place, text in places:
        parts += [joint.join(pieces[done:place]), text]
        done = place
    return "\n".join(part for part in [*parts, joint.join(pieces[done:])] if part)
