"""All peers, on the same cache: what they keep, in bytes, and what comes back.

Those here run in this environment, and their bytes are those the method really holds: compressed buffers, or the
packed tensors with scales and zero points of transformers' quantized caches. The others run in environments of their
own (`outside.py`). A peer whose package or environment is missing raises MissingExtra.

What is judged is a prefix that was saved, so transformers' caches quantize that and nothing behind it. `…-through`
reads the continuation through the same cache, as `generate` would with it: fp8 codes each new token with the scale of
the prefix, the others code everything anew whenever 128 tokens have come. That is more harm for the same bytes; it is
there to be set beside figures that were measured so (`benchmarks/peers_validation.py`).
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import zstandard
from torch import Tensor

from ...errors import MissingExtra
from ...quantize.bits import bits
from ..transformers import dequantized
from .coded import Coded as Coded
from .outside import OUTSIDE, Outside

GROUP = 64
THROUGH_NOTE = "the continuation is quantized, too, as its tokens come"


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(f"this peer needs the package {package}, which is not installed")


def _bytes_codec(encode: Callable[[np.ndarray], bytes], decode: Callable[[bytes], bytes]) -> Callable[..., Coded]:
    """A lossless codec of byte strings as a peer: one buffer per layer and side."""

    def run(cache: Any, config: Any) -> Coded:
        sides = [side for layer in cache.layers for side in (layer.keys, layer.values)]
        started = time.perf_counter()
        coded = [encode(np.ascontiguousarray(bits(side[0]))) for side in sides]
        middle = time.perf_counter()
        for side, data in zip(sides, coded, strict=True):
            bits(side[0])[...] = np.frombuffer(decode(data), bits(side[0]).dtype).reshape(side.shape[1:])
        return Coded(cache, sum(map(len, coded)), middle - started, time.perf_counter() - middle)

    return run


def _zstd(cache: Any, config: Any) -> Coded:
    compressor, decompressor = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    return _bytes_codec(lambda x: compressor.compress(x.tobytes()), decompressor.decompress)(cache, config)


def _blosc2(cache: Any, config: Any) -> Coded:
    _require("blosc2")
    import blosc2

    def encode(x: np.ndarray) -> bytes:
        options = {"codec": blosc2.Codec.ZSTD, "filters": [blosc2.Filter.SHUFFLE], "typesize": x.itemsize, "clevel": 1}
        coded: bytes = blosc2.compress2(x, **options)
        return coded

    return _bytes_codec(encode, blosc2.decompress2)(cache, config)


def _quantized(backend: str, package: str | None, *, through: bool = False, **options: Any) -> Callable[..., Coded]:
    """transformers' QuantizedCache, read back dequantized; with `through` the cache itself, which codes what follows.

    Its backends take whole groups of tokens only: the last `T mod GROUP` go into the full-precision residual, as they
    do while generating, and are counted as that.
    """

    def run(cache: Any, config: Any) -> Coded:
        if package:
            _require(package)
        from transformers import DynamicCache, QuantizedCache

        quantized = QuantizedCache(backend, config, **options)
        started = time.perf_counter()
        for index, layer in enumerate(cache.layers):
            whole = layer.keys.shape[2] // GROUP * GROUP
            quantized.update(layer.keys[:, :, :whole], layer.values[:, :, :whole], index)
            if whole < layer.keys.shape[2]:
                quantized.update(layer.keys[:, :, whole:], layer.values[:, :, whole:], index)
        save_s = time.perf_counter() - started
        held = sum(
            _held((layer._quantized_keys, layer._quantized_values, layer.keys, layer.values))
            for layer in quantized.layers
        )
        if through:
            return Coded(quantized, held, save_s, None, note=THROUGH_NOTE)
        middle = time.perf_counter()
        back = DynamicCache()
        for index, layer in enumerate(quantized.layers):
            back.update(*(side.to(cache.layers[index].keys.dtype) for side in dequantized(layer)), index)
        return Coded(back, held, save_s, time.perf_counter() - middle)

    return run


def _held(value: Any) -> int:
    """Bytes of every tensor inside a quantized value: packed numbers, scales, zero points."""
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)  # a tensor subclass made of plain ones
        return value.nbytes if flatten is None else sum(_held(getattr(value, name)) for name in flatten()[0])
    if isinstance(value, dict):
        return sum(map(_held, value.values()))
    return sum(map(_held, value)) if isinstance(value, (list, tuple)) else 0


_QUANTO = "quanto", "optimum.quanto"
QUANTIZED: dict[str, Callable[..., Callable[..., Coded]]] = {
    "hf-fp8": partial(_quantized, "fp8", None),
    "hf-hqq4": partial(_quantized, "hqq", "hqq", nbits=4, axis_key=1, axis_value=1),
    "hf-quanto4": partial(_quantized, *_QUANTO, nbits=4, axis_key=0, axis_value=0),
    "hf-quanto2-axis0": partial(_quantized, *_QUANTO, nbits=2, axis_key=0, axis_value=0),
    "hf-quanto2-axis-1": partial(_quantized, *_QUANTO, nbits=2, axis_key=-1, axis_value=-1),
}
THROUGH = {f"{name}-through": make(through=True) for name, make in QUANTIZED.items()}
PEERS: dict[str, Callable[..., Coded]] = {
    "zstd-3": _zstd,
    "blosc2": _blosc2,
    **{name: make() for name, make in QUANTIZED.items()},
    **THROUGH,
    **OUTSIDE,
}


def coded_by(
    name: str, cache: Any, config: Any, *, tokens: Sequence[int] | None = None, following: Sequence[int] | None = None
) -> Coded:
    """What the peer `name` makes of `cache`, (H, T, D) a layer and side, whose `tokens` (T,) `following` continues.

    A peer that runs the model itself answers with logits where `following` is given. Raises MissingExtra when it is
    not here, KVCellarError when it fails.
    """
    peer = PEERS[name]
    if isinstance(peer, Outside):
        return peer(cache, config, tokens=tokens, following=following)
    return peer(cache, config)


def gives_cache(name: str) -> bool:
    """Whether what the peer `name` keeps can be asked by a model here, and is the prefix's alone."""
    peer = PEERS[name]
    return name not in THROUGH and (not isinstance(peer, Outside) or peer.gives_cache)
