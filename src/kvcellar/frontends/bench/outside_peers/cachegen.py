"""LMCache's CacheGen: real bytes, encoded chunk by chunk as LMCache stores them and decoded from those bytes.

Bins are those of the package's own `CacheGenConfig` for the model, or `bins` everywhere. Payload is the entropy-coded
numbers and their scales; the rest of the bytes are the tables of each chunk, lengths, and pickle.
"""

from __future__ import annotations

import time
from typing import Any

from kvcellar.frontends.bench.outside_peers.serve import Answer, Message, answer, read_pairs, serve, write_pairs


def load() -> Any:
    import torch
    from lmcache.storage_backend.serde import (  # type: ignore[import-not-found]
        cachegen_basics,
        cachegen_decoder,
        cachegen_encoder,
    )

    serializer = cachegen_encoder.CacheGenSerializer

    def bins_of(message: Message) -> tuple[torch.Tensor, torch.Tensor]:
        """Bins per layer, (L,) float32, of keys and of values."""
        config = cachegen_basics.CacheGenConfig.from_model_name(message["model"]["folder"])
        keys, values = serializer.make_key_bins(None, config), serializer.make_value_bins(None, config)
        if bins := message["options"].get("bins"):
            return torch.full_like(keys, bins), torch.full_like(values, bins)
        return keys, values

    def decode(data: bytes, key_bins: torch.Tensor, value_bins: torch.Tensor) -> torch.Tensor:
        """(2, L, T, H·D) float32: keys and values of one chunk."""
        coded = cachegen_basics.CacheGenGPUEncoderOutput.from_bytes(data)
        layers, tokens, _ = coded.max_tensors_key.shape
        room = torch.zeros((tokens, coded.cdf.shape[0] * coded.cdf.shape[1]), dtype=torch.uint8)
        keys, values = cachegen_decoder.decode_function_gpu(coded.cdf, coded.data_chunks, layers, tokens, room)
        return torch.stack(
            [
                cachegen_decoder.do_dequantize(keys, key_bins, coded.max_tensors_key),
                cachegen_decoder.do_dequantize(values, value_bins, coded.max_tensors_value),
            ]
        )

    def code(message: Message) -> Answer:
        pairs, (key_bins, value_bins) = read_pairs(message["cache"]), bins_of(message)
        heads, tokens, width = pairs[0][0].shape
        chunk = message["options"]["chunk"]
        kv = torch.stack([torch.stack(pair) for pair in pairs]).permute(0, 1, 3, 2, 4).contiguous()  # L 2 T H D
        started = time.perf_counter()
        coded, payload = [], 0
        for start in range(0, tokens, chunk):
            piece = kv[:, :, start : start + chunk].contiguous()
            output = cachegen_encoder.encode_function(piece, None, key_bins, value_bins, piece.shape[2])
            coded.append(output.to_bytes())
            payload += sum(part.bytestream.nbytes for part in output.data_chunks)
            payload += output.max_tensors_key.nbytes + output.max_tensors_value.nbytes
        middle = time.perf_counter()
        back = torch.cat([decode(data, key_bins, value_bins) for data in coded], dim=2)
        back = back.reshape(2, len(pairs), tokens, heads, width).transpose(2, 3).to(kv.dtype)
        restored = time.perf_counter()
        write_pairs(message["out"], list(zip(back[0], back[1], strict=True)))
        nbytes, note = sum(map(len, coded)), f"real bytes, chunks of {chunk} tokens, each with its tables"
        return answer(nbytes, middle - started, restored - middle, note, payload_nbytes=payload)

    return code


if __name__ == "__main__":
    serve(load, "lmcache")
