"""turboquant-torch, nexusquant-kv and kakeyalattice: quantizers that give a cache back and pack nothing.

Their bytes are nominal: what their numbers would take if packed at the rate the package itself states.
"""

from __future__ import annotations

import math
import time
from typing import Any

from kvcellar.frontends.bench.outside_peers.serve import Answer, Message, answer, read_pairs, serve, write_pairs

Pairs = list[tuple[Any, Any]]
SCALE_BITS = 16


def load() -> Any:
    import kakeyalattice  # type: ignore[import-not-found]  # noqa: F401
    import nexusquant  # type: ignore[import-not-found]  # noqa: F401
    import torch
    import turboquant  # type: ignore[import-not-found]  # noqa: F401

    methods = {"turboquant": turboquantized, "nexusquant": nexusquantized, "kakeyalattice": latticed}

    def code(message: Message) -> Answer:
        with torch.inference_mode():
            pairs, said = methods[message["peer"]](read_pairs(message["cache"]), message["options"], message["model"])
        write_pairs(message["out"], pairs)
        return said

    return code


def turboquantized(pairs: Pairs, options: dict[str, Any], model: dict[str, Any]) -> tuple[Pairs, Answer]:
    """As `TurboQuantDynamicCache(bit_width).compress_all()`: keys with the 1-bit residual code, values without."""
    from turboquant import TurboQuantKVCache

    heads, tokens, width = pairs[0][0].shape
    coder = TurboQuantKVCache(width, bit_width=options["bits"], residual_length=0)
    started = time.perf_counter()
    coded = [coder.compress(keys[None].float(), values[None].float()) for keys, values in pairs]
    middle = time.perf_counter()
    back = [
        (coder.decompress_keys(c)[0].to(k.dtype), coder.decompress_values(c)[0].to(v.dtype))
        for c, (k, v) in zip(coded, pairs, strict=True)
    ]
    restored = time.perf_counter()
    vectors = heads * tokens * len(pairs)
    nbytes = coder.key_quantizer.memory_bytes(vectors) + coder.value_quantizer.memory_bytes(vectors)
    note = "nominal: bits + 32 bits of norm a vector, as the package's memory_bytes counts"
    return back, answer(nbytes, middle - started, restored - middle, note)


def nexusquantized(pairs: Pairs, options: dict[str, Any], model: dict[str, Any]) -> tuple[Pairs, Answer]:
    """`compress_kv_cache(mode="quant_only")`: keys without their rotary turn, Hadamard, E8; gives half precision."""
    from nexusquant import compress_kv_cache
    from transformers import DynamicCache

    heads, tokens, width = pairs[0][0].shape
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(pairs):
        cache.update(keys[None], values[None], layer)
    bits = {"key_bits": options["key_bits"], "value_bits": options["value_bits"]}
    started = time.perf_counter()
    compress_kv_cache(cache, mode="quant_only", head_dim=width, rope_base=model["rope_theta"], **bits)
    ended = time.perf_counter()
    back = [
        (layer.keys[0].to(k.dtype), layer.values[0].to(v.dtype))
        for layer, (k, v) in zip(cache.layers, pairs, strict=True)
    ]
    bits_per_token = sum(bits.values()) * width + 2 * SCALE_BITS
    nbytes = math.ceil(len(pairs) * heads * tokens * bits_per_token / 8)
    return back, answer(nbytes, ended - started, None, "nominal: bits + a 16-bit scale a vector, not entropy-coded")


def latticed(pairs: Pairs, options: dict[str, Any], model: dict[str, Any]) -> tuple[Pairs, Answer]:
    """The E8 codec of `KakeyaLatticeCache(variant="e8")`, over every vector."""
    from kakeyalattice import V15KakeyaZamirE8GPU

    heads, tokens, width = pairs[0][0].shape
    codec = V15KakeyaZamirE8GPU(D=width, q_range=options["q_range"], device="cpu")
    started = time.perf_counter()
    back = [(codec.roundtrip(k.float()).to(k.dtype), codec.roundtrip(v.float()).to(v.dtype)) for k, v in pairs]
    ended = time.perf_counter()
    nbytes = math.ceil(2 * len(pairs) * heads * tokens * codec.bits_per_token_per_head / 8)
    return back, answer(nbytes, ended - started, None, "nominal: the codec's own bits a vector, with norm and maximum")


if __name__ == "__main__":
    serve(load, "turboquant-torch", "nexusquant-kv", "kakeyalattice")
