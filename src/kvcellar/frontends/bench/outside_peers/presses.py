"""kvpress: tokens dropped while the model reads the prefix. Needs transformers before 5.3, so it runs the model itself.

The model computes in float32, as the bench's own does; what is kept is held in the dtype of the cache that was given,
at its own positions. Presses that give each head a different number
of tokens (KVzip) only mask: their bytes are those of what is not masked, which no kernel here saves.
"""

from __future__ import annotations

import time
from typing import Any

from kvcellar.frontends.bench.outside_peers.serve import Answer, Message, answer, serve, write_pairs

PIECE = 16  # kvpress looks for one key that every query of a call rejects; over many queries there may be none


def load() -> Any:
    import kvpress  # type: ignore[import-not-found]
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, DynamicCache

    from kvcellar.frontends.cli.models import fits_memory

    models: dict[str, Any] = {}

    def model_in(folder: str) -> Any:
        if folder not in models:
            models.clear()
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
            models[folder] = model.float() if fits_memory(model, torch.float32, share=0.5) else model
        return models[folder]

    def press_of(options: dict[str, Any]) -> Any:
        press = getattr(kvpress, options["press"])(compression_ratio=1 - options["kept"])
        return kvpress.MergingPress(press=press) if options.get("merging") else press

    def masked_in(model: Any) -> int:
        """How many (head, token) keys are masked, over all layers."""
        found = (getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers)
        return sum(len(indices[0]) for indices in found if indices is not None)

    def read(model: Any, cache: Any, prefix: int, following: list[int], piece: int) -> torch.Tensor:
        """Logits (n − 1, V) for tokens 1…n−1 of `following`, which stand behind `prefix` tokens, `piece` at a time."""
        pieces = []
        for start in range(0, len(following), piece):
            ids = torch.tensor([following[start : start + piece]])
            positions = torch.arange(prefix + start, prefix + start + ids.shape[1])[None]
            pieces.append(model(ids, past_key_values=cache, position_ids=positions, use_cache=True).logits[0])
        return torch.cat(pieces)[:-1]

    def code(message: Message) -> Answer:
        torch.manual_seed(0)  # some presses sketch with random numbers
        model, press = model_in(message["model"]["folder"]), press_of(message["options"])
        given = load_file(message["cache"])
        tokens, held_as = given["tokens"][None], given["k0"].dtype
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
        cache = DynamicCache()
        with torch.inference_mode():
            started = time.perf_counter()
            with press(model):
                model.model(input_ids=tokens, past_key_values=cache)
            save_s = time.perf_counter() - started
            for layer in cache.layers:
                layer.keys, layer.values = (side.to(held_as).to(model.dtype) for side in (layer.keys, layer.values))
            pairs = [(layer.keys[0].to(held_as), layer.values[0].to(held_as)) for layer in cache.layers]
            masked, width = masked_in(model), pairs[0][0].shape[2]
            held = sum(keys.shape[0] * keys.shape[1] for keys, _ in pairs) - masked
            kept = held / sum(keys.shape[0] * tokens.shape[1] for keys, _ in pairs)
            nbytes = held * width * 2 * pairs[0][0].element_size()
            pairs = [(keys.clone(), values.clone()) for keys, values in pairs]  # reading masks and grows the cache
            following, read_now = message.get("following"), {}
            if following:
                piece = PIECE if masked else len(following)
                read_now["logits"] = read(model, cache, tokens.shape[1], following, piece)
        write_pairs(message["out"], [] if masked else pairs, **read_now)
        note = "nominal: only masked, bytes of what is not masked" if masked else "bytes of the keys and values kept"
        return answer(nbytes, save_s, None, f"{note}; save_s includes the prefill", kept=kept)

    return code


if __name__ == "__main__":
    serve(load, "kvpress", "transformers")
