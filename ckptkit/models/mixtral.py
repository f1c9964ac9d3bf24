"""Mixtral: Mistral's attention, and eight experts instead of the MLP.

Families:

- `transformers`: the names of files, of every release: `block_sparse_moe`, one tensor for each expert's `w1` (gate), `w3` (up)
  and `w2` (down). `save_pretrained` of Transformers 5 still writes them.
- `stacked`: the parameters of the module in memory since Transformers 5, with all experts in one.
- `megatron`, `megatron_grouped`: Megatron-LM's GPT with experts as single modules, or as grouped linear layers.
"""

from collections.abc import Mapping
from typing import Any

from ckptkit.core.schema import Declare, Family, Name, Schema
from ckptkit.models import decoder
from ckptkit.models.fields import whole
from ckptkit.models.megatron import grouped

_HF, _MEGATRON = "model.layers.{i}.", "decoder.layers.{i}."
_MOE = "layers.{i}.moe."
_EXPERTS = "layers.{i}.experts."
_ROUTER = _MOE + "router: expert_class hidden"


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    experts = whole(config, "num_local_experts", "num_experts")
    return {
        **decoder.sizes(config),
        "expert": experts,
        "expert_class": experts,  # the router's rows: on every rank, whatever rank holds an expert
        "expert_ffn": whole(config, "intermediate_size"),
    }


_MEGATRON_FAMILY = Family(
    "megatron",
    decoder.MEGATRON_FIRST,
    (
        *decoder.megatron_attention(_MEGATRON + "self_attention."),
        Name(_MEGATRON + "pre_mlp_layernorm.weight", _MOE + "norm: hidden"),
        Name(_MEGATRON + "mlp.router.weight", _ROUTER),
        *decoder.megatron_experts(_MEGATRON + "mlp.experts."),
    ),
    decoder.MEGATRON_LAST,
    adapters="megatron",
)

SCHEMA = Schema(
    id="mixtral@1",
    model_types=("mixtral",),
    first=decoder.EMBED,
    layer=(
        *decoder.attention(),
        Declare(_MOE + "norm", "hidden", decay=False),
        Declare(_MOE + "router", "expert_class hidden"),
        *decoder.experts(),
    ),
    last=decoder.LAST,
    rules={**decoder.RULES, "expert": "ep", "expert_ffn": "etp"},
    families=(
        Family(
            "transformers",
            decoder.TRANSFORMERS_FIRST,
            (
                *decoder.transformers_attention(_HF + "self_attn."),
                Name(_HF + "block_sparse_moe.gate.weight", _ROUTER),
                *decoder.single_experts(_HF + "block_sparse_moe.experts.", "w1", "w3", "w2"),
                Name(_HF + "input_layernorm.weight", "layers.{i}.attn.norm: hidden"),
                Name(_HF + "post_attention_layernorm.weight", _MOE + "norm: hidden"),
            ),
            decoder.TRANSFORMERS_LAST,
        ),
        Family(
            "stacked",
            decoder.TRANSFORMERS_FIRST,
            (
                *decoder.transformers_attention(_HF + "self_attn."),
                Name(_HF + "mlp.gate.weight", _ROUTER),
                *decoder.stacked_experts(_HF + "mlp.experts."),
                Name(_HF + "input_layernorm.weight", "layers.{i}.attn.norm: hidden"),
                Name(_HF + "post_attention_layernorm.weight", _MOE + "norm: hidden"),
            ),
            decoder.TRANSFORMERS_LAST,
        ),
        _MEGATRON_FAMILY,
        grouped(_MEGATRON_FAMILY),
    ),
    sizes=_sizes,
    flags=decoder.flags,
    harmless=decoder.HARMLESS,
)
