"""Qwen2-MoE and Qwen3-MoE: routed experts in some or all layers, with a shared expert in Qwen2-MoE.

Families:

- `transformers`: the names of files: one tensor for each expert's `gate_proj`, `up_proj`, `down_proj`.
- `stacked`: the parameters of the module in memory since Transformers 5, with all experts in one.
- `megatron`, `megatron_grouped`: Megatron-LM's GPT with experts as single modules, or as grouped linear layers.

Layers without experts (`mlp_only_layers`, `decoder_sparse_step`) have a dense MLP.
"""

from collections.abc import Mapping
from typing import Any

from ckptkit.core.schema import Declare, Family, Flags, Name, Schema
from ckptkit.errors import LayoutError
from ckptkit.models import decoder
from ckptkit.models.fields import whole
from ckptkit.models.megatron import grouped

_HF, _MEGATRON = "model.layers.{i}.", "decoder.layers.{i}."
_MLP, _MOE = "layers.{i}.mlp.", "layers.{i}.moe."
_ROUTER = _MOE + "router: expert_class hidden"
_SHARED = {"part": "shared", "ffn": "shared_ffn", "only_if": "shared"}


def _experts(config: Mapping[str, Any]) -> int:
    return whole(config, "num_experts", "num_local_experts")


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    found = {
        **decoder.sizes(config),
        "ffn": whole(config, "intermediate_size"),
        "expert": _experts(config),
        "expert_class": _experts(config),
        "expert_ffn": whole(config, "moe_intermediate_size"),
    }
    if config.get("model_type") == "qwen2_moe":
        found["shared_ffn"] = whole(config, "shared_expert_intermediate_size")
    return found


def _flags(config: Mapping[str, Any]) -> Flags:
    layers = range(whole(config, "num_hidden_layers"))
    dense = config.get("mlp_only_layers") or []
    every = whole(config, "decoder_sparse_step", default=1)
    if not isinstance(dense, list) or not every:
        raise LayoutError(
            f"the configuration has mlp_only_layers={dense!r} and decoder_sparse_step={every}; "
            "these are a list of layers and a number above 0"
        )
    routed = frozenset(i for i in layers if i not in dense and _experts(config) and (i + 1) % every == 0)
    none: frozenset[int] = frozenset()
    with_shared = config.get("model_type") == "qwen2_moe"
    return {
        **decoder.flags(config),
        "routed": routed,
        "shared": routed if with_shared else none,
        "router_first": routed if with_shared else none,
        "router_last": none if with_shared else routed,
    }


def _norms(to: str) -> tuple[Name, ...]:
    return (
        Name(to + "input_layernorm.weight", "layers.{i}.attn.norm: hidden"),
        Name(to + "post_attention_layernorm.weight", _MLP + "norm: hidden"),
    )


def _shared_expert() -> tuple[Name, ...]:
    return (
        *decoder.transformers_mlp(_HF + "mlp.shared_expert.", **_SHARED),
        Name(_HF + "mlp.shared_expert_gate.weight", "layers.{i}.shared.gate: () hidden", only_if="shared"),
    )


def _router(flag: str) -> Name:
    """The router: before the experts in Qwen2-MoE, after them in Qwen3-MoE."""
    return Name(_HF + "mlp.gate.weight", _ROUTER, only_if=flag)


_STACKED = decoder.stacked_experts(_HF + "mlp.experts.", only_if="routed")


def _in_transformers(name: str, experts: tuple[Name, ...]) -> Family:
    layer = (
        *decoder.transformers_attention(_HF + "self_attn."),
        _router("router_first"),
        *experts,
        _router("router_last"),
        *_shared_expert(),
        *decoder.transformers_mlp(_HF + "mlp.", only_if="!routed"),
        *_norms(_HF),
    )
    return Family(name, decoder.TRANSFORMERS_FIRST, layer, decoder.TRANSFORMERS_LAST)


_MEGATRON_FAMILY = Family(
    "megatron",
    decoder.MEGATRON_FIRST,
    (
        *decoder.megatron_attention(_MEGATRON + "self_attention."),
        Name(_MEGATRON + "pre_mlp_layernorm.weight", _MLP + "norm: hidden", only_if="routed"),
        Name(_MEGATRON + "mlp.router.weight", _ROUTER, only_if="routed"),
        *decoder.megatron_experts(_MEGATRON + "mlp.experts.", only_if="routed"),
        *decoder.megatron_mlp(_MEGATRON + "mlp.shared_experts.", **_SHARED),
        Name(
            _MEGATRON + "mlp.shared_experts.gate_weight",
            "layers.{i}.shared.gate: () hidden",
            only_if="shared",
        ),
        Name(_MEGATRON + "mlp.linear_fc1.layer_norm_weight", _MLP + "norm: hidden", only_if="!routed"),
        *decoder.megatron_mlp(_MEGATRON + "mlp.", only_if="!routed"),
    ),
    decoder.MEGATRON_LAST,
    adapters="megatron",
)

SCHEMA = Schema(
    id="qwen_moe@1",
    model_types=("qwen2_moe", "qwen3_moe"),
    first=decoder.EMBED,
    layer=(
        *decoder.attention(),
        Declare(_MLP + "norm", "hidden", decay=False),
        *decoder.mlp(only_if="!routed"),
        Declare(_MOE + "router", "expert_class hidden", only_if="routed"),
        *decoder.experts(only_if="routed"),
        *decoder.mlp(**_SHARED),
        Declare("layers.{i}.shared.gate", "hidden", only_if="shared"),
    ),
    last=decoder.LAST,
    rules={**decoder.RULES, "shared_ffn": "tp", "expert": "ep", "expert_ffn": "etp"},
    families=(
        _in_transformers(
            "transformers",
            decoder.single_experts(
                _HF + "mlp.experts.", "gate_proj", "up_proj", "down_proj", only_if="routed"
            ),
        ),
        _in_transformers("stacked", _STACKED),
        _MEGATRON_FAMILY,
        grouped(_MEGATRON_FAMILY),
    ),
    sizes=_sizes,
    flags=_flags,
    harmless=decoder.HARMLESS,
)
