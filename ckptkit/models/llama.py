"""Dense decoders: Llama, Mistral, Qwen2 (biases of queries, keys, values), Qwen3 (norms of queries and keys).

Families: `transformers` (`LlamaForCausalLM` and its kin, files and modules alike) and `megatron` (Megatron-LM's GPT
with Transformer Engine).
"""

from collections.abc import Mapping
from typing import Any

from ckptkit.core.schema import Declare, Family, Name, Schema
from ckptkit.models import decoder
from ckptkit.models.fields import truth, whole

_HF, _MEGATRON = "model.layers.{i}.", "decoder.layers.{i}."
_MLP = "layers.{i}.mlp."


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    return {**decoder.sizes(config), "ffn": whole(config, "intermediate_size")}


def _flags(config: Mapping[str, Any]) -> dict[str, bool]:
    return {**decoder.flags(config), "mlp_bias": truth(config, "mlp_bias")}


_BIASES = (
    Name(_HF + "mlp.gate_proj.bias", _MLP + "gate_up_bias: gate_up=0 ffn", only_if="mlp_bias"),
    Name(_HF + "mlp.up_proj.bias", _MLP + "gate_up_bias: gate_up=1 ffn", only_if="mlp_bias"),
    Name(_HF + "mlp.down_proj.bias", _MLP + "down_bias: hidden", only_if="mlp_bias"),
)
_MEGATRON_BIASES = (
    Name(_MEGATRON + "mlp.linear_fc1.bias", _MLP + "gate_up_bias: (gate_up ffn)", only_if="mlp_bias"),
    Name(_MEGATRON + "mlp.linear_fc2.bias", _MLP + "down_bias: hidden", only_if="mlp_bias"),
)


def _with_biases(weights: tuple[Name, ...], biases: tuple[Name, ...]) -> tuple[Name, ...]:
    """Each weight followed by its bias, as modules hold them."""
    return tuple(line for pair in zip(weights, biases, strict=True) for line in pair)


SCHEMA = Schema(
    id="llama@1",
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    first=decoder.EMBED,
    layer=(
        *decoder.attention(),
        Declare(_MLP + "norm", "hidden", decay=False),
        *decoder.mlp(),
        Declare(_MLP + "gate_up_bias", "gate_up ffn", decay=False, only_if="mlp_bias"),
        Declare(_MLP + "down_bias", "hidden", decay=False, only_if="mlp_bias"),
    ),
    last=decoder.LAST,
    rules=decoder.RULES,
    families=(
        Family(
            "transformers",
            decoder.TRANSFORMERS_FIRST,
            (
                *decoder.transformers_attention(_HF + "self_attn."),
                *_with_biases(decoder.transformers_mlp(_HF + "mlp."), _BIASES),
                Name(_HF + "input_layernorm.weight", "layers.{i}.attn.norm: hidden"),
                Name(_HF + "post_attention_layernorm.weight", _MLP + "norm: hidden"),
            ),
            decoder.TRANSFORMERS_LAST,
        ),
        Family(
            "megatron",
            decoder.MEGATRON_FIRST,
            (
                *decoder.megatron_attention(_MEGATRON + "self_attention."),
                Name(_MEGATRON + "mlp.linear_fc1.layer_norm_weight", _MLP + "norm: hidden"),
                *_with_biases(decoder.megatron_mlp(_MEGATRON + "mlp."), _MEGATRON_BIASES),
            ),
            decoder.MEGATRON_LAST,
            adapters="megatron",
        ),
    ),
    sizes=_sizes,
    flags=_flags,
    harmless=decoder.HARMLESS,
)
