"""Model configurations to make synthetic checkpoints of: published sizes, and small ones of the same kind."""

from collections.abc import Mapping
from typing import Any

_ZAYA: dict[str, Any] = {
    # ZAYA1-8B, as `ZayaConfig` of Transformers 5.24 has it by default.
    "architectures": ["ZayaForCausalLM"],
    "model_type": "zaya",
    "vocab_size": 262272,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "moe_intermediate_size": 2048,
    "num_experts": 16,
    "num_experts_per_tok": 1,
    "router_hidden_size": 256,
    "cca_time0": 2,
    "cca_time1": 2,
    "attention_bias": False,
    "lm_head_bias": False,
    "attention_dropout": 0.0,
    "layer_types": None,
    "sliding_window": None,
    "rope_parameters": {
        "hybrid": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
        "hybrid_sliding": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    },
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 106,
    "dtype": "bfloat16",
}

_LLAMA: dict[str, Any] = {
    # Llama 3.1 8B.
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}

_MIXTRAL: dict[str, Any] = {
    # Mixtral 8x7B.
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1000000.0,
    "dtype": "bfloat16",
}

_QWEN_MOE: dict[str, Any] = {
    # Qwen3-30B-A3B.
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "rope_theta": 1000000.0,
    "dtype": "bfloat16",
}

_TINY: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}

PRESETS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "zaya": ("zaya", _ZAYA),
    "zaya-8b": ("zaya", _ZAYA),
    "zaya-1gb": (
        "zaya",
        {
            **_ZAYA,
            "vocab_size": 65536,
            "hidden_size": 1024,
            "num_hidden_layers": 8,
            "moe_intermediate_size": 1024,
        },
    ),
    "zaya-tiny": (
        "zaya",
        {
            **_ZAYA,
            **_TINY,
            "moe_intermediate_size": 96,
            "num_experts": 8,
            "router_hidden_size": 32,
            "eos_token_id": 1,
        },
    ),
    "llama": ("llama", _LLAMA),
    "llama-8b": ("llama", _LLAMA),
    "llama-tiny": ("llama", {**_LLAMA, **_TINY, "intermediate_size": 176}),
    "mixtral": ("mixtral", _MIXTRAL),
    "mixtral-8x7b": ("mixtral", _MIXTRAL),
    "mixtral-tiny": ("mixtral", {**_MIXTRAL, **_TINY, "intermediate_size": 96, "num_local_experts": 4}),
    "qwen_moe": ("qwen_moe", _QWEN_MOE),
    "qwen-30b-a3b": ("qwen_moe", _QWEN_MOE),
    "qwen-moe-tiny": (
        "qwen_moe",
        {**_QWEN_MOE, **_TINY, "intermediate_size": 176, "moe_intermediate_size": 48, "num_experts": 8},
    ),
}
"""Name to a schema's name and a whole configuration."""
