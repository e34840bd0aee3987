"""What the exact recipe is measured against, on the same bytes: blosc2, zstd, a safetensors file, plain copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import safetensors.torch
import torch
import zstandard

from realcache import Pairs, tensors

SHUFFLED_ZSTD = {"typesize": 2, "codec": blosc2.Codec.ZSTD, "filters": [blosc2.Filter.SHUFFLE]}
SETTINGS: dict[str, dict[str, Any]] = {
    "clevel 1": {**SHUFFLED_ZSTD, "clevel": 1},
    "clevel 5": {**SHUFFLED_ZSTD, "clevel": 5},
    "defaults": {},  # shuffle and zstd as well, clevel 5, but for numbers of 8 bytes
}


@dataclass(frozen=True)
class Blosc2:
    """One way to keep `raw` with blosc2: its pieces, compressed."""

    name: str
    pieces: tuple[bytes, ...]
    threads: int

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))

    def decode(self) -> list[bytes]:
        return [blosc2.decompress2(piece, nthreads=self.threads) for piece in self.pieces]


def blosc2_ways(raw: np.ndarray, layers: int) -> list[Blosc2]:
    """Shuffle + zstd at each setting, as one buffer and per layer, to be decoded on all threads and on one."""
    ways = []
    for setting, options in SETTINGS.items():
        for cut, count in (("whole", 1), ("per layer", layers)):
            pieces = tuple(blosc2.compress2(piece, **options) for piece in np.split(raw, count))
            for threads in sorted({blosc2.nthreads, 1}, reverse=True):
                ways.append(Blosc2(f"blosc2 {setting}, {cut}, {threads} thread{'s' * (threads > 1)}", pieces, threads))
    return ways


def require_exact(ways: list[Blosc2], raw: np.ndarray) -> None:
    for way in ways:
        if b"".join(way.decode()) != raw.tobytes():
            raise SystemExit(f"{way.name} does not give its bytes back")


def blosc2_into(way: Blosc2, like: np.ndarray) -> Callable[[], object]:
    """The same decode into memory that is there already, which no restore can have: what allocation costs it."""
    targets = np.split(np.empty_like(like), len(way.pieces))

    def decode() -> None:
        for piece, target in zip(way.pieces, targets, strict=True):
            blosc2.decompress2(piece, dst=target, nthreads=way.threads)

    decode()
    return decode


def zstd_size(raw: np.ndarray, level: int = 3) -> int:
    return len(zstandard.ZstdCompressor(level=level).compress(raw.tobytes()))


def safetensors_read(pairs: Pairs, path: Path) -> Callable[[], object]:
    """Reading a plain file of the same tensors; each is copied, since loading alone may only map the file."""
    safetensors.torch.save_file(tensors(pairs), path)
    return lambda: {name: x.clone() for name, x in safetensors.torch.load_file(path).items()}


def cloned(pairs: Pairs) -> Callable[[], object]:
    """memcpy into fresh memory: no restore that gives tensors of their own can be faster."""
    return lambda: [x.clone() for pair in pairs for x in pair]


def copied(pairs: Pairs) -> Callable[[], object]:
    """memcpy into memory that is there already."""
    targets = [torch.zeros_like(x) for pair in pairs for x in pair]

    def copy() -> None:
        for target, x in zip(targets, (x for pair in pairs for x in pair), strict=True):
            target.copy_(x)

    return copy
