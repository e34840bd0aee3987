"""Tiny random models of many kinds, the same on every run. Nothing here contacts a hub.

`MODELS` can be archived; `REFUSED` keep state that cannot be. `benchmarks/modelpage.py` makes docs/models.md of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from models import VOCABULARY, prefill

WINDOW = 16
PROMPT = 40  # past every window, and past the positions that a scaled rope was trained on
_TRAINED = 32
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,  # wide, so that what a model says depends on every token it attends to
}
_SLIDING = {"sliding_window": WINDOW}
_MIXED = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_WIDE = {"head_dim": 16}  # not hidden_size / num_attention_heads
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED_KEYS = {
    **_WIDE,
    **_SLIDING,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
_LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_DEEPSEEK = {
    **_LATENT,
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2}
_RECURRENT_BEHIND = ["full_attention", "linear_attention", "linear_attention"]


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_LONG = _rope(
    "longrope",
    factor=4.0,
    original_max_position_embeddings=_TRAINED,
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    long_factor=[1.0, 2.0, 3.0, 5.0, 8.0, 12.0],
)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=_TRAINED)
_LLAMA3 = _rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=_TRAINED
)
_DYNAMIC = {**_rope("dynamic", factor=4.0), "max_position_embeddings": _TRAINED}
_HALF_ROTARY = _rope("default", partial_rotary_factor=0.5)


@dataclass(frozen=True)
class Model:
    """A model of transformers: what it is here for, its class, and what its tiny config sets beside `_SHAPE`.

    `refused` is what the error says of a model that cannot be archived.
    """

    name: str
    trait: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""

    def build(self) -> Any:
        """A new model; every build has the same numbers."""
        kind = getattr(transformers, self.kind)
        config = kind.config_class(**{**_SHAPE, **self.settings})
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, None)  # so that no random token ends a text, or has an embedding of zeros
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return kind(config).eval()


MODELS: tuple[Model, ...] = (
    Model("Llama", "rope type default", "LlamaForCausalLM"),
    Model("Llama, linear", "rope type linear", "LlamaForCausalLM", _rope("linear", factor=4.0)),
    Model("Llama, dynamic", "rope type dynamic", "LlamaForCausalLM", _DYNAMIC),
    Model("Llama, yarn", "rope type yarn", "LlamaForCausalLM", _YARN),
    Model("Llama, llama3", "rope type llama3", "LlamaForCausalLM", _LLAMA3),
    Model("Llama, longrope", "rope type longrope", "LlamaForCausalLM", _LONG),
    Model("Mistral", "every layer slides", "MistralForCausalLM", _SLIDING),
    Model("Ministral", "layers of both kinds", "MinistralForCausalLM", {**_MIXED, **_WIDE}),
    Model("Mixtral", "mixture of experts", "MixtralForCausalLM", _LOCAL_EXPERTS),
    Model("Qwen2", "key bias", "Qwen2ForCausalLM"),
    Model(
        "Qwen2, sliding",
        "key bias, upper layers slide",
        "Qwen2ForCausalLM",
        {**_SLIDING, "use_sliding_window": True, "max_window_layers": 1},
    ),
    Model(
        "Qwen2-MoE",
        "mixture of experts, one shared",
        "Qwen2MoeForCausalLM",
        {**_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    Model("Qwen3", "normed queries and keys", "Qwen3ForCausalLM", _WIDE),
    Model("Qwen3-MoE", "normed queries and keys, mixture of experts", "Qwen3MoeForCausalLM", {**_WIDE, **_EXPERTS}),
    Model("Gemma", "one KV head", "GemmaForCausalLM", {**_WIDE, "num_key_value_heads": 1}),
    Model("Gemma2", "layers of both kinds, softcap", "Gemma2ForCausalLM", {**_WIDE, **_SLIDING}),
    Model("Gemma3 text", "layers of both kinds, a rope each", "Gemma3ForCausalLM", {**_WIDE, **_MIXED}),
    Model(
        "Gemma3n text",
        "upper layers read the keys of lower ones",
        "Gemma3nForCausalLM",
        {**_SHARED_KEYS, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
    ),
    Model(
        "Gemma4 text",
        "upper layers read the keys of lower ones, two head widths",
        "Gemma4ForCausalLM",
        {**_SHARED_KEYS, "global_head_dim": 32},
    ),
    Model("GPT-2", "learned positions", "GPT2LMHeadModel"),
    Model("GPT-BigCode", "learned positions, one KV head", "GPTBigCodeForCausalLM"),
    Model("GPT-J", "partial interleaved rotary", "GPTJForCausalLM", {"rotary_dim": 4}),
    Model("GPT-NeoX", "partial rotary", "GPTNeoXForCausalLM", _HALF_ROTARY),
    Model(
        "GPT-OSS", "layers of both kinds, attention sinks", "GptOssForCausalLM", {**_WIDE, **_MIXED, **_LOCAL_EXPERTS}
    ),
    Model("Phi", "partial rotary", "PhiForCausalLM", _HALF_ROTARY),
    Model("Phi-3", "longrope", "Phi3ForCausalLM", {**_LONG, "original_max_position_embeddings": _TRAINED}),
    Model("OLMo", "norms without weights", "OlmoForCausalLM"),
    Model("OLMo2", "norms behind the layers", "Olmo2ForCausalLM"),
    Model("OLMo3", "layers of both kinds", "Olmo3ForCausalLM", _MIXED),
    Model("OLMoE", "mixture of experts", "OlmoeForCausalLM", _EXPERTS),
    Model("DeepSeek-V2", "latent attention", "DeepseekV2ForCausalLM", _DEEPSEEK),
    Model("DeepSeek-V3", "latent attention, mixture of experts", "DeepseekV3ForCausalLM", _DEEPSEEK),
    Model("MiniCPM3", "latent attention", "MiniCPM3ForCausalLM", _LATENT),
    Model("Cohere", "interleaved rotary", "CohereForCausalLM", {"logit_scale": 1.0}),
    Model("Cohere2", "layers of both kinds, full ones unrotated", "Cohere2ForCausalLM", {**_MIXED, "logit_scale": 1.0}),
    Model("Granite", "scaled attention", "GraniteForCausalLM", {"attention_multiplier": 0.2}),
    Model("GLM-4", "partial interleaved rotary", "Glm4ForCausalLM", {"head_dim": 12, "pad_token_id": 0}),
    Model("Falcon", "one KV head", "FalconForCausalLM"),
    Model("Falcon, ALiBi", "one KV head, ALiBi", "FalconForCausalLM", {"alibi": True}),
    Model("BLOOM", "ALiBi", "BloomForCausalLM"),
    Model("OPT", "learned positions with an offset", "OPTForCausalLM", {"word_embed_proj_dim": 48, "ffn_dim": 64}),
    Model("StableLM", "partial rotary", "StableLmForCausalLM", {"hidden_size": 64}),
    Model("StarCoder2", "biases everywhere", "Starcoder2ForCausalLM", {"sliding_window": None}),
    Model("SmolLM3", "some layers unrotated", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    Model("EXAONE-4", "layers of both kinds, full ones unrotated", "Exaone4ForCausalLM", _MIXED),
    Model(
        "Llama-4 text",
        "attention in chunks",
        "Llama4ForCausalLM",
        {
            **_WIDE,
            **_LOCAL_EXPERTS,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
            "no_rope_layers": [1, 1, 0],
        },
    ),
)

_STATE = r"layer {} \({}\) is a layer with recurrent state"
REFUSED: tuple[Model, ...] = (
    Model(
        "Mamba",
        "recurrent",
        "MambaForCausalLM",
        {"state_size": 8},
        _STATE.format(0, "LinearAttentionLayer"),
    ),
    Model(
        "Jamba",
        "attention, then Mamba",
        "JambaForCausalLM",
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 0,
            "num_experts": 2,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
        },
        _STATE.format(1, "LinearAttentionLayer"),
    ),
    Model(
        "Bamba",
        "attention, then Mamba-2",
        "BambaForCausalLM",
        {**_MAMBA, "attn_layer_indices": [0]},
        _STATE.format(1, "LinearAttentionLayer"),
    ),
    Model(
        "Falcon-H1",
        "attention beside Mamba-2 in each layer",
        "FalconH1ForCausalLM",
        {**_MAMBA, "head_dim": 12, "mamba_d_ssm": 96},
        _STATE.format(0, "LinearAttentionAndFullAttentionLayer"),
    ),
    Model(
        "Qwen3-Next",
        "attention, then gated delta nets",
        "Qwen3NextForCausalLM",
        {
            **_WIDE,
            **_EXPERTS,
            "layer_types": _RECURRENT_BEHIND,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        _STATE.format(1, "LinearAttentionLayer"),
    ),
    Model(
        "LFM2",
        "attention, then convolutions",
        "Lfm2ForCausalLM",
        {"layer_types": ["full_attention", "conv", "conv"]},
        _STATE.format(1, "LinearAttentionLayer"),
    ),
    Model(
        "RecurrentGemma",
        "attention, then recurrent blocks whose state lies in the model",
        "RecurrentGemmaForCausalLM",
        {
            "head_dim": 12,
            "lru_width": 48,
            "attention_window_size": WINDOW,
            "block_types": ["attention", "recurrent", "recurrent"],
        },
        _STATE.format(1, "LinearAttentionLayer"),
    ),
    Model(
        "MiniMax",
        "attention, then lightning attention whose state lies beside the layers",
        "MiniMaxForCausalLM",
        {**_LOCAL_EXPERTS, "layer_types": _RECURRENT_BEHIND},
        "MiniMaxCache keeps linear_cache beside its layers",
    ),
    Model(
        "DeepSeek-V3.2",
        "latent attention with an index",
        "DeepseekV32ForCausalLM",
        {**_DEEPSEEK, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 8},
        r"layer 0 \(DynamicIndexedLayer\) is an indexed-attention layer",
    ),
)

# Which of them are also restored into other caches, and joined to batches; the page says so.
STATIC = (
    "Llama",
    "Mistral",
    "Gemma3 text",
    "Gemma3n text",
    "GPT-OSS",
    "GPT-NeoX",
    "DeepSeek-V3",
    "Llama-4 text",
    "OPT",
)
QUANTIZED = ("Llama", "Qwen3", "GPT-2")
BATCHED = ("Llama", "Mistral", "Gemma3 text", "Gemma3n text", "DeepSeek-V3", "GPT-2", "BLOOM", "Llama-4 text", "OPT")
DEVICES = ("Llama", "Gemma3 text", "Gemma3n text")
BY_NAME = {model.name: model for model in MODELS}


def own_cache(model: Any, ids: list[int]) -> Any:
    """The cache of `ids` that the model makes for itself, or that generate() makes for it."""
    with torch.no_grad():
        cache = model(torch.tensor([ids]), use_cache=True).get("cache")
    return prefill(model, ids) if cache is None else cache
