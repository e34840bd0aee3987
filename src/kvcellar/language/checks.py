"""What a token log keeps of the cache that it does not store: per block a checksum, and a sketch.

The checksum says whether a replayed block is the original bit by bit. The sketch says how far it is: m sums
s_j = Σ σ_j(t)·τ_j(c)·x(t, c) over the block's tokens t and all numbers c of a token, with random signs σ and τ, so that
the mean of (s_j − s'_j)² is an estimate of ‖x − x'‖² (the tensor form of Alon, Matias & Szegedy 1996). With two sums it
is a rough one, within a factor of about two most times: enough to tell rounding from another text. Sums are float64 and
kept as float32; whether a block is exact is for the checksum alone to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from ..cache import KVCache, LayerKV
from ..geometry import SLIDING

_WORD = (1 << 64) - 1


class Checks(NamedTuple):
    """Checksums uint32 (blocks,) and sketches float32 (blocks, m); the last block is the windows, if layers slide."""

    sums: np.ndarray
    sketches: np.ndarray


def check_blocks(kv: KVCache, blocks: Sequence[range], sketches: int, *, start: int = 0) -> Checks:
    """Checksums and `sketches` sums of blocks of a cache whose first token is token `start` of its sequence.

    Layers of full attention count block by block; those that slide, as a whole, in one more block behind.
    """
    full = [(i, layer) for i, layer in enumerate(kv.layers) if not layer.window and not layer.empty]
    sliding = [(i, layer) for i, layer in enumerate(kv.layers) if layer.window]
    made = []
    for block in blocks:
        cut = [(i, layer.tokens(block.start - start, block.stop - start)) for i, layer in full]
        made.append(_check(cut, [block.start] * len(cut), sketches))
    if any(layer.kind == SLIDING for layer in kv.geometry.layers):
        made.append(_check(sliding, [start + layer.first for _, layer in sliding], sketches))
    sums = np.array([total for total, _, _ in made], np.uint32)
    return Checks(sums, np.array([s for _, s, _ in made], np.float32).reshape(len(made), sketches))


def distances(kv: KVCache, blocks: Sequence[range], stored: Checks) -> Iterator[tuple[bool, float]]:
    """For each block of `kv` whether it is exact, and else about how far it is: ‖x − x'‖ / ‖x'‖, both all numbers."""
    sketches = stored.sketches.shape[1]
    full = [(i, layer) for i, layer in enumerate(kv.layers) if not layer.window and not layer.empty]
    jobs = [([(i, layer.tokens(b.start, b.stop)) for i, layer in full], [b.start] * len(full)) for b in blocks]
    if len(stored.sums) > len(blocks):
        sliding = [(i, layer) for i, layer in enumerate(kv.layers) if layer.window]
        jobs.append((sliding, [layer.first for _, layer in sliding]))
    for (layers, starts), total, before in zip(jobs, stored.sums, stored.sketches, strict=True):
        found, sketch, norm = _check(layers, starts, sketches)
        if found == int(total):
            yield True, 0.0
        else:
            missed = float(np.mean((sketch - before.astype(np.float64)) ** 2)) if sketches else float("nan")
            yield False, float(np.sqrt(missed) / max(norm, 1e-300))


def _check(
    layers: Sequence[tuple[int, LayerKV]], starts: Sequence[int], sketches: int
) -> tuple[int, np.ndarray, float]:
    """Checksum, sketch float64 (m,) and norm of some layers' numbers, whose first tokens are `starts`."""
    digest, sketch, norm = xxhash.xxh3_64(), np.zeros(sketches), 0.0
    for (index, layer), start in zip(layers, starts, strict=True):
        for side, x in enumerate((layer.keys, layer.values)):
            heads, tokens, width = x.shape
            digest.update(f"{index} {side} {start} {heads} {tokens} {width}".encode())
            if not x.numel():
                continue
            digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            by_token = x.double().numpy().transpose(1, 0, 2).reshape(tokens, heads * width)
            over_tokens = _signs(0, start, tokens, sketches).T @ by_token
            sketch += (over_tokens * _signs(2 * index + side + 1, 0, heads * width, sketches).T).sum(axis=1)
            norm += float(np.vdot(by_token, by_token))
    return digest.intdigest() & 0xFFFFFFFF, sketch, float(np.sqrt(norm))


def _signs(stream: int, start: int, count: int, sketches: int) -> np.ndarray:
    """±1, float64 (count, m), of numbers `start` … of a stream: bits of splitmix64 (Steele, Lea & Flood 2014)."""
    first = (stream * 0xD1342543DE82EF95 + start * 0x9E3779B97F4A7C15) & _WORD
    with np.errstate(over="ignore"):
        z = np.uint64(first) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return 1.0 - 2.0 * (z[:, None] >> np.arange(sketches, dtype=np.uint64) & np.uint64(1)).astype(np.float64)
