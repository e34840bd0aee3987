"""A model's identity: SHA-256 over what its caches depend on.

Every parameter and persistent buffer (sorted by name, with dtype, shape and bytes), and the config fields that shape
a cache: all that differ from their class's defaults, but for names, token ids, dropout and the like. Works on any
object with transformers' `config`, `named_parameters`, `named_buffers` and `state_dict`; imports no transformers.

Tried on: CPU, transformers 5.24. Parameters on other devices are copied to the CPU one by one.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash

from ..errors import InvalidInput, UnsupportedCache
from ..identity import MODEL, Identity, frame
from ..recipe import canonical_json

# Config fields that no number in a cache depends on.
_NEUTRAL = frozenset(
    (
        "_attn_implementation",
        "_model_name_or_path",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "attn_pdrop",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    )
)

_known_models: weakref.WeakKeyDictionary[Any, tuple[str, Identity]] = weakref.WeakKeyDictionary()


def identity_of_model(model: Any) -> Identity:
    """SHA-256 over a model's cache-shaping config and every parameter (sorted by name, dtype, shape, bytes).

    The digest of a model object is kept and used again while an xxh3-128 over the same bytes stays the same, which
    is an order of magnitude faster. Raises InvalidInput for anything without config and parameters, or with
    parameters that are not in memory.
    """
    model = getattr(model, "_orig_mod", model)
    if not hasattr(model, "config") or not hasattr(model, "state_dict"):
        raise InvalidInput(f"model is a {type(model).__name__}; expected a transformers model (or pass identity=)")
    quick = xxhash.xxh3_128()
    _feed(model, quick.update)
    known = _known_models.get(model)
    if known is not None and known[0] == quick.hexdigest():
        return known[1]
    digest = hashlib.sha256()
    _feed(model, digest.update)
    identity = Identity(MODEL, digest.hexdigest(), _label(model))
    _known_models[model] = quick.hexdigest(), identity
    return identity


def _text_config(model: Any) -> tuple[Any, Any]:
    config: Any = getattr(getattr(model, "_orig_mod", model), "config", None)
    return config, config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def require_every_layer(model: Any, layers: int) -> None:
    """Raise UnsupportedCache when a cache of so many `layers` ends before the model does.

    Its last layers may keep state elsewhere. Layers without a cache by design may be missing.
    """
    _, text = _text_config(model)
    shared, kinds = getattr(text, "kv_sharing_modes", None) or [], getattr(text, "layer_types", None) or []
    for index in range(layers, getattr(text, "num_hidden_layers", None) or 0):
        kind = kinds[index] if index < len(kinds) else "attention"
        if kind not in ("moe", "mlp") and (index >= len(shared) or shared[index] != "reuse"):
            raise UnsupportedCache(f"layer {index} of {type(model).__name__} ({kind}) is not in the cache")


def require_plain_positions(model: Any) -> None:
    """Raise InvalidInput for a model whose positions cannot be told from the number of tokens (multimodal RoPE)."""
    config, text = _text_config(model)
    for each in (config, text):
        for name in ("rope_parameters", "rope_scaling"):
            if "mrope_section" in (getattr(each, name, None) or {}):
                raise InvalidInput(
                    f"{type(model).__name__} gives images fewer positions than tokens: pass next_position=, "
                    "the position of the token to come (the number of tokens, when there was text alone)"
                )


def _feed(model: Any, update: Callable[[Any], object]) -> None:
    update(frame("kvcellar-model/1", [canonical_json(_shaping_config(model.config))]))
    if adapters := _adapters(model):
        update(frame("adapters", [canonical_json(adapters)]))
    buffers = {name for name, _ in model.named_buffers()}
    tensors = dict(model.named_parameters())
    tensors |= {name: x for name, x in model.state_dict().items() if name in buffers}
    for name in sorted(tensors):
        x = tensors[name].detach()
        if x.is_meta:
            raise InvalidInput(f"parameter {name} is not in memory (meta device); its bytes cannot be hashed")
        update(frame("parameter", [name, str(x.dtype), ",".join(map(str, x.shape))]))
        update(memoryview(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))


def _shaping_config(config: Any) -> dict[str, Any]:
    """What the config says beyond its class's defaults, without what no cache depends on. JSON types only."""
    difference = config.to_diff_dict()
    return {key: _plain(value) for key, value in difference.items() if key not in _NEUTRAL}


def _adapters(model: Any) -> list[Any]:
    """What layers with adapters (PEFT) say beside their parameters: how strong, active, switched off, merged in."""
    fields = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters")
    return [
        [name, *(_plain(getattr(layer, field, None)) for field in fields)]
        for name, layer in model.named_modules()
        if hasattr(layer, "_active_adapter")
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if key not in _NEUTRAL}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    exact = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if exact else str(value)


def _label(model: Any) -> str:
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    count = sum(p.numel() for p in model.parameters())
    return f"{type(model).__name__}, {count / 1e6:.4g}M parameters, {'+'.join(dtypes)}"
