"""A tiny ZAYA1 in Transformers, with every parameter and buffer random, and the tensors and configuration it saves."""

import json
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import ZayaConfig, ZayaForCausalLM

from ckptkit.core.schema import Model
from ckptkit.models.zaya import SCHEMA

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    "sliding_window": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "router_hidden_size": 16,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def config_of(**changes: Any) -> ZayaConfig:
    return ZayaConfig(**{**TINY, **changes})


def plain(config: Any) -> dict[str, Any]:
    """The configuration as `config.json` has it."""
    found: dict[str, Any] = json.loads(config.to_json_string())
    return found


def random_model(config: ZayaConfig, seed: int = 0) -> ZayaForCausalLM:
    """Vectors around 1 where they scale, around 0 where they add, so that each of them shows in the logits."""
    torch.manual_seed(seed)
    model = ZayaForCausalLM(config).eval()
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name:
                continue
            centre = 1.0 if value.dim() == 1 and not name.endswith(("bias", "biases")) else 0.0
            spread = 0.3 if value.dim() > 1 else 0.1
            value.copy_(centre + spread * torch.randn_like(value))
        for layer in model.model.layers:
            layer.mlp.gate.balancing_biases[-1] -= (
                0.1  # about half of the tokens skip, in two of three layers most
            )
    return model


@cache
def tiny() -> ZayaForCausalLM:
    return random_model(config_of())


def tensors_of(model: ZayaForCausalLM) -> dict[str, np.ndarray]:
    """What a file of the model holds: all of its state, a tied head once."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return {key: value.numpy().copy() for key, value in state.items()}


def bound(model: ZayaForCausalLM) -> Model:
    return SCHEMA.bind(plain(model.config))


TOKENS = torch.tensor([[5, 9, 33, 60, 2, 17, 40, 41, 5, 9, 11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 63]])


def logits_with(config: ZayaConfig, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Logits of a model that has loaded these tensors; none may be missing or unknown."""
    model = ZayaForCausalLM(config).eval()
    state = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in tensors.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        found: np.ndarray = model(TOKENS).logits.numpy()
    return found
