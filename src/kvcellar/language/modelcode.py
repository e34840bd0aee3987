"""Token ids under a language model: as many bits as the text surprises it (`coded/1`).

Method. Arithmetic coding (Rissanen & Langdon 1979) with the model's next-token distribution, by which a text takes
Σ −log2 P(t | what is before t) bits: Theorem 1 of the paper on language tries (arXiv 2604.15356), whose bound this is.
Logits become integers once: x is rounded to (max − x) in 1/256 nat, an integer table gives 2²⁸·e^(−that) + 1, and from
there on all is integer arithmetic. The distribution itself is floats that only the same machine computes again: encoder
and decoder run the very same steps, one token a time, and the file is bound to its runtime (`runtime`).

We differ from the paper, which leaves open how a decoder finds the encoder's numbers again. Bytes:
docs/language-tokens.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from jaxtyping import Float32, Int64

from ..errors import DamagedArchive, InvalidInput, TokensMismatch

PART = "model-coded ids"
Step = Callable[[int], np.ndarray]
"""Feeds one token to the model and gives the logits, float32 (vocabulary,), of the next."""
_RESOLUTION, _SCALE = 256, 28
_WHOLE, _LEAST, _BYTES = 1 << 64, 1 << 56, 8


@lru_cache(maxsize=1)
def _exponentials() -> np.ndarray:
    """⌊2²⁸·e^(−n/256)⌋ + 1, int64, until only the 1 is left; by integers alone, so that every machine has the same."""
    one = 1 << 128
    term = inverse = one
    for n in range(1, 40):
        term = term // (_RESOLUTION * n)
        inverse += term
    found, power = [], one
    while power >> (128 - _SCALE):
        found.append((power >> (128 - _SCALE)) + 1)
        power = power * one // inverse
    return np.array([*found, 1], np.int64)


def frequencies(logits: Float32[np.ndarray, " vocabulary"]) -> Int64[np.ndarray, " vocabulary"]:
    """Integer frequencies of all tokens, each at least 1. Raises InvalidInput for NaN and for no finite one."""
    highest = float(logits.max(initial=-np.inf))
    if not np.isfinite(highest) or np.isnan(logits).any():
        raise InvalidInput(f"the model's logits reach {highest}: no distribution to code under")
    table = _exponentials()
    below = np.minimum((highest - logits.astype(np.float64)) * _RESOLUTION + 0.5, len(table) - 1)
    return np.asarray(table[below.astype(np.int64)], np.int64)


def encode_under(ids: Int64[np.ndarray, " tokens"], vocabulary: int, step: Step, limit: int) -> bytes | None:
    """The stream of ids int64 (T,), T ≥ 1, of a model with so large a `vocabulary`; None once it passes `limit` bytes.

    `step` is called for every id in order, for the last one too, so that what the model remembers is complete; after
    None it was called for the first ones only. Raises TokensMismatch for ids outside the vocabulary.
    """
    require_vocabulary(ids, vocabulary)
    low, span, out = 0, _WHOLE, bytearray()
    start, frequency, total = int(ids[0]), 1, vocabulary
    for t in range(len(ids)):
        if t:
            cumulative = np.cumsum(frequencies(step(int(ids[t - 1]))))
            total, token = int(cumulative[-1]), int(ids[t])
            start = int(cumulative[token - 1]) if token else 0
            frequency = int(cumulative[token]) - start
        unit = span // total
        low, span = low + unit * start, unit * frequency
        if low >= _WHOLE:
            low -= _WHOLE
            _carry(out)
        while span < _LEAST:
            out.append(low >> 56)
            low, span = (low << 8) % _WHOLE, span << 8
        if len(out) > limit:
            return None
    step(int(ids[-1]))
    for count in range(_BYTES + 1):  # the shortest end all of whose continuations lie in the interval's low end
        cut = 8 * (_BYTES - count)
        end = -(-low >> cut) << cut
        if end < low + span:
            if end >= _WHOLE:
                end -= _WHOLE
                _carry(out)
            out += end.to_bytes(_BYTES, "big")[:count]
            break
    return bytes(out)


def decode_under(stream: bytes | memoryview, tokens: int, vocabulary: int, step: Step) -> Int64[np.ndarray, " tokens"]:
    """The `tokens` ≥ 1 ids of a stream; `step` is called as `encode_under` did. Raises DamagedArchive.

    Under another model, or numbers that differ in their last bits, it gives other ids: compare their checksum.
    """
    at, code, span = _BYTES, int.from_bytes(bytes(stream[:_BYTES]).ljust(_BYTES, b"\0"), "big"), _WHOLE
    ids = np.zeros(tokens, np.int64)
    for t in range(tokens):
        cumulative = np.cumsum(frequencies(step(int(ids[t - 1])))) if t else np.arange(1, vocabulary + 1)
        unit = span // int(cumulative[-1])
        target = code // unit
        if target >= int(cumulative[-1]):
            raise DamagedArchive(PART, f"token {t} lies outside the distribution: the stream is not this model's")
        token = int(np.searchsorted(cumulative, target, side="right"))
        start = int(cumulative[token - 1]) if token else 0
        ids[t], code, span = token, code - unit * start, unit * (int(cumulative[token]) - start)
        while span < _LEAST:
            code, span = (code << 8) | (stream[at] if at < len(stream) else 0), span << 8
            at += 1
        if at > len(stream) + _BYTES + 1:
            raise DamagedArchive(PART, f"{len(stream)} bytes end before token {t} of {tokens} does")
    step(int(ids[-1]))
    return ids


def require_vocabulary(ids: Int64[np.ndarray, " tokens"], vocabulary: int) -> None:
    """Raise TokensMismatch unless every id is one of so many."""
    if ids.size and int(ids.max()) >= vocabulary:
        raise TokensMismatch(f"token id {int(ids.max())}; the model's vocabulary has ids 0…{vocabulary - 1}")


def _carry(out: bytearray) -> None:
    """Add one to the number that the bytes are."""
    at = len(out) - 1
    while out[at] == 255:
        out[at] = 0
        at -= 1
    out[at] += 1
