"""ZAYA1: hybrid layers of compressed convolutional attention (CCA) and a routed mixture of experts.

Families of names:

- `transformers`: `ZayaForCausalLM` of Transformers 5.24; a layer holds attention and experts.
- `hub`: the original layout of Zyphra/ZAYA1-base and -8B-legacy: twice as many layers, even ones attention, odd
  ones experts, one tensor for each expert. Residual scales belong to the half-layer that reads them.
- `megatron`: the same half-layers in Megatron-style names (the trainer itself is not public): a padded vocabulary, a copy
  of a tied output layer on the last stage; `megatron_grouped`: experts as in grouped linear layers.
- `folded`: an intermediate layout of the first Transformers port, still found in converted folders.

Axes that need a word: `tap0`, `tap1` are the kernels of the depthwise and the grouped convolution; `conv_in` the
channels of one head that a grouped filter reads; `v_row` the rows of each value projection (half of all key-value channels:
the first half of the key-value heads sees the current token, the rest the one before); `router_class` counts
experts and one more, which skips.

Sources: `modeling_zaya.py` of Transformers 5.24, and its `convert_zaya_weights_to_hf.py`.
"""

from collections.abc import Mapping
from typing import Any

from ckptkit.core.schema import Declare, Family, Name, Schema
from ckptkit.errors import LayoutError
from ckptkit.models import zaya_config
from ckptkit.models.fields import truth, whole
from ckptkit.models.megatron import grouped

_SCALES = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    heads, kv = whole(config, "num_attention_heads"), whole(config, "num_key_value_heads")
    head_dim, experts = whole(config, "head_dim"), whole(config, "num_experts")
    router = whole(config, "router_hidden_size")
    if not kv or heads % kv or kv * head_dim % 2:
        raise LayoutError(
            f"ZAYA needs attention heads ({heads}) divisible by key-value heads ({kv}) and an even number of key-value "
            f"channels ({kv} x {head_dim})"
        )
    return {
        "layers": whole(config, "num_hidden_layers"),
        "vocab": whole(config, "vocab_size"),
        "hidden": whole(config, "hidden_size"),
        "head": heads,
        "kv_head": kv,
        "head_dim": head_dim,
        "conv_in": head_dim,
        "tap0": whole(config, "cca_time0", default=2),
        "tap1": whole(config, "cca_time1", default=2),
        "v_row": kv * head_dim // 2,
        "expert": experts,
        "gate_up": 2,
        "expert_ffn": whole(config, "moe_intermediate_size"),
        "router_hidden": router,
        "router_inner": router,
        "router_class": experts + 1,
    }


def _flags(config: Mapping[str, Any]) -> dict[str, bool]:
    return {
        "tied": truth(config, "tie_word_embeddings", True),
        "attention_bias": truth(config, "attention_bias"),
        "head_bias": truth(config, "lm_head_bias"),
    }


def _vector(name: str, axes: str, when: str = ":", only_if: str = "") -> Declare:
    """Norms, scales and biases: AdamW without weight decay."""
    return Declare(name, axes, decay=False, when=when, only_if=only_if)


def _matrix(name: str, axes: str) -> Declare:
    return Declare(name, axes, optimizer="muon")


_ATTN = "layers.{i}.attn."
_ROUTER = "layers.{i}.router."
_EXPERTS = "layers.{i}.experts."

_LAYER = (
    _vector(_ATTN + "norm", "hidden"),
    _matrix(_ATTN + "q", "head head_dim hidden"),
    _vector(_ATTN + "q_bias", "head head_dim", only_if="attention_bias"),
    _matrix(_ATTN + "k", "kv_head head_dim hidden"),
    _vector(_ATTN + "k_bias", "kv_head head_dim", only_if="attention_bias"),
    _matrix(_ATTN + "v_current", "v_row hidden"),
    _vector(_ATTN + "v_current_bias", "v_row", only_if="attention_bias"),
    _matrix(_ATTN + "v_delayed", "v_row hidden"),
    _vector(_ATTN + "v_delayed_bias", "v_row", only_if="attention_bias"),
    Declare(_ATTN + "conv0_q", "head head_dim tap0"),
    Declare(_ATTN + "conv0_k", "kv_head head_dim tap0"),
    _vector(_ATTN + "conv0_q_bias", "head head_dim"),
    _vector(_ATTN + "conv0_k_bias", "kv_head head_dim"),
    Declare(_ATTN + "conv1_q", "head head_dim conv_in tap1"),
    Declare(_ATTN + "conv1_k", "kv_head head_dim conv_in tap1"),
    _vector(_ATTN + "conv1_q_bias", "head head_dim"),
    _vector(_ATTN + "conv1_k_bias", "kv_head head_dim"),
    _vector(_ATTN + "temp", "kv_head"),
    _matrix(_ATTN + "out", "hidden head head_dim"),
    _vector(_ATTN + "out_bias", "hidden", only_if="attention_bias"),
    *(_vector(f"{_ATTN}merge.{x}", "hidden") for x in _SCALES),
    _vector("layers.{i}.moe.norm", "hidden"),
    _matrix(_ROUTER + "down", "router_hidden hidden"),
    _vector(_ROUTER + "down_bias", "router_hidden"),
    _vector(_ROUTER + "states_scale", "router_hidden", when="1:"),
    _vector(_ROUTER + "norm", "router_hidden"),
    _matrix(_ROUTER + "fc1", "router_inner router_hidden"),
    _vector(_ROUTER + "fc1_bias", "router_inner"),
    _matrix(_ROUTER + "fc2", "router_inner router_hidden"),
    _vector(_ROUTER + "fc2_bias", "router_inner"),
    _matrix(_ROUTER + "out", "router_class router_inner"),
    Declare(_ROUTER + "balancing", "router_class", kind="buffer", keep_fp32=True),
    _matrix(_EXPERTS + "gate_up", "expert gate_up expert_ffn hidden"),
    _matrix(_EXPERTS + "down", "expert hidden expert_ffn"),
    *(_vector(f"layers.{{i}}.moe.merge.{x}", "hidden") for x in _SCALES),
)


def _attention(to: str, names: Mapping[str, str]) -> dict[str, tuple[Name, ...]]:
    """Lines of the CCA tensors below `to`, by the canonical part of their name."""
    convs = {
        "conv0": "[{0}.conv0_q: head head_dim | {0}.conv0_k: kv_head head_dim] () tap0",
        "conv1": "[{0}.conv1_q: head head_dim | {0}.conv1_k: kv_head head_dim] conv_in tap1",
    }
    bias = "[{0}.{1}_q_bias: head head_dim | {0}.{1}_k_bias: kv_head head_dim]"
    rows = {"q": "(head head_dim)", "k": "(kv_head head_dim)", "v_current": "v_row", "v_delayed": "v_row"}
    at = _ATTN.removesuffix(".")
    lines: dict[str, tuple[Name, ...]] = {}
    for part, row in rows.items():
        name = to + names[part]
        lines[part] = (
            Name(f"{name}.weight", f"{at}.{part}: {row} hidden"),
            Name(f"{name}.bias", f"{at}.{part}_bias: {row}", only_if="attention_bias"),
        )
    for part, view in convs.items():
        name = to + names[part]
        lines[part] = (
            Name(f"{name}.weight", view.replace("{0}", at)),
            Name(f"{name}.bias", bias.replace("{0}", at).replace("{1}", part)),
        )
    return lines


def _output(name: str) -> tuple[Name, ...]:
    return (
        Name(f"{name}.weight", f"{_ATTN}out: hidden (head head_dim)"),
        Name(f"{name}.bias", f"{_ATTN}out_bias: hidden", only_if="attention_bias"),
    )


def _linear(name: str, tensor: str, axes: str) -> tuple[Name, ...]:
    return Name(f"{name}.weight", f"{tensor}: {axes}"), Name(
        f"{name}.bias", f"{tensor}_bias: {axes.split()[0]}"
    )


def _scales(to: str, tensor: str, when: str = ":") -> tuple[Name, ...]:
    return tuple(Name(f"{to}.{x}", f"{tensor}.{x}: hidden", when=when) for x in _SCALES)


def _router(to: str, norm: str, steps: tuple[str, str, str]) -> tuple[Name, ...]:
    """Lines of a router below `to`; `steps` are the names of its three linear layers."""
    fc1, fc2, out = steps
    return (
        Name(f"{to}.router_states_scale", f"{_ROUTER}states_scale: router_hidden", when="1:"),
        Name(f"{to}.balancing_biases", f"{_ROUTER}balancing: router_class"),
        *_linear(f"{to}.down_proj", f"{_ROUTER}down", "router_hidden hidden"),
        Name(f"{to}.{norm}.weight", f"{_ROUTER}norm: router_hidden"),
        *_linear(f"{to}.router_mlp.{fc1}", f"{_ROUTER}fc1", "router_inner router_hidden"),
        *_linear(f"{to}.router_mlp.{fc2}", f"{_ROUTER}fc2", "router_inner router_hidden"),
        Name(f"{to}.router_mlp.{out}.weight", f"{_ROUTER}out: router_class router_inner"),
    )


def _stacked_experts(to: str) -> tuple[Name, ...]:
    return (
        Name(f"{to}.gate_up_proj", f"{_EXPERTS}gate_up: expert (gate_up expert_ffn) hidden"),
        Name(f"{to}.down_proj", f"{_EXPERTS}down: expert hidden expert_ffn"),
    )


def _single_experts(to: str) -> tuple[Name, ...]:
    return (
        Name(f"{to}.{{e}}.linear_fc1.weight", f"{_EXPERTS}gate_up: expert={{e}} (gate_up expert_ffn) hidden"),
        Name(f"{to}.{{e}}.linear_fc2.weight", f"{_EXPERTS}down: expert={{e}} hidden expert_ffn"),
    )


def _head(name: str) -> tuple[Name, ...]:
    return (
        Name(f"{name}.weight", "lm_head: vocab hidden", only_if="!tied"),
        Name(f"{name}.weight", "embed: vocab hidden", only_if="tied", copy=True),
        Name(f"{name}.bias", "lm_head_bias: vocab", only_if="head_bias"),
    )


_INPUT = (
    Name("model.input_hidden_states_scale", "input.hidden_states_scale: hidden"),
    Name("model.input_hidden_states_bias", "input.hidden_states_bias: hidden"),
    Name("model.embed_tokens.weight", "embed: vocab hidden"),
)


def _transformers() -> Family:
    to = "model.layers.{i}."
    parts = {
        "q": "q_proj", "k": "k_proj", "v_current": "v_proj_current", "v_delayed": "v_proj_delayed",
        "conv0": "conv_qk_depthwise", "conv1": "conv_qk_grouped",
    }  # fmt: skip
    attention = _attention(to + "self_attn.qkv_proj.", parts)
    layer = (
        *_output(to + "self_attn.o_proj"),
        *(line for lines in attention.values() for line in lines),
        Name(to + "self_attn.qk_norm.temp", _ATTN + "temp: kv_head"),
        *_router(to + "mlp.gate", "router_mlp.norm", ("fc1", "fc2", "out_proj")),
        *_stacked_experts(to + "mlp.experts"),
        Name(to + "input_layernorm.weight", _ATTN + "norm: hidden"),
        Name(to + "post_attention_layernorm.weight", "layers.{i}.moe.norm: hidden"),
        *_scales(to + "post_attention_residual_scale", _ATTN + "merge"),
        *_scales(to + "post_mlp_residual_scale", "layers.{i}.moe.merge"),
    )
    return Family(
        "transformers", _INPUT, layer, (Name("model.norm.weight", "norm: hidden"), *_head("lm_head"))
    )


def _folded() -> Family:
    to = "model.layers.{i}."
    parts = {
        "q": "linear_q", "k": "linear_k", "v_current": "val_proj1", "v_delayed": "val_proj2",
        "conv0": "conv_qk_depthwise", "conv1": "conv_qk_grouped",
    }  # fmt: skip
    attention = _attention(to + "self_attn.qkv_proj.", parts)
    layer = (
        Name(to + "self_attn.temp", _ATTN + "temp: kv_head"),
        *_output(to + "self_attn.o_proj"),
        *(line for lines in attention.values() for line in lines),
        Name(to + "input_norm.weight", _ATTN + "norm: hidden"),
        *_router(to + "zaya_block.router", "rmsnorm_eda", ("fc1", "fc2", "out_proj")),
        *_stacked_experts(to + "zaya_block.experts"),
        Name(to + "post_attention_norm.weight", "layers.{i}.moe.norm: hidden"),
        *_scales(to + "post_attention_res_scale", _ATTN + "merge"),
        *_scales(to + "post_mlp_res_scale", "layers.{i}.moe.merge"),
    )
    return Family(
        "folded", _INPUT, layer, (Name("model.final_norm.weight", "norm: hidden"), *_head("lm_head"))
    )


def _half_layers(name: str, top: str, norm: str, attention: str, out: str, moe: str) -> Family:
    """Half-layer `2i` is attention, `2i+1` experts; each starts with the residual scales of the half before it."""
    even, odd = f"{top}.layers.{{2i}}.", f"{top}.layers.{{2i+1}}."
    parts = {
        "q": "linear_q", "k": "linear_k", "v_current": "val_proj1", "v_delayed": "val_proj2",
        "conv0": "conv_qk.0", "conv1": "conv_qk.1",
    }  # fmt: skip
    cca = _attention(f"{even}{attention}.qkv.", parts)
    layer = (
        *_scales(even + "res_scale", "layers.{i-1}.moe.merge", when="1:"),
        Name(f"{even}{norm}.weight", _ATTN + "norm: hidden"),
        Name(f"{even}{attention}.qkv.temp", _ATTN + "temp: kv_head"),
        *(line for lines in cca.values() for line in lines),
        *_output(f"{even}{attention}.{out}"),
        *_scales(odd + "res_scale", _ATTN + "merge"),
        Name(f"{odd}{norm}.weight", "layers.{i}.moe.norm: hidden"),
        *_router(f"{odd}{moe}.router", "rmsnorm_eda", ("0", "2", "4")),
        *_single_experts(f"{odd}{moe}.experts.local_experts"),
    )
    embed, final, head = {
        "model": ("model.embed_tokens", "model.final_norm", "lm_head"),
        "decoder": ("embedding.word_embeddings", "decoder.final_layernorm", "output_layer"),
    }[top]
    first = (
        Name(f"{embed}.weight", "embed: vocab hidden"),
        *(Name(f"{top}.layers.0.res_scale.{x}", f"input.{x}: hidden") for x in _SCALES[:2]),
    )
    last = (
        *_scales(f"{top}.res_scale", "layers.{last}.moe.merge"),
        Name(f"{final}.weight", "norm: hidden"),
        *_head(head),
    )
    return Family(name, first, layer, last, adapters="megatron" if top == "decoder" else "peft")


_MEGATRON = _half_layers("megatron", "decoder", "input_layernorm", "self_attention", "linear_proj", "mlp")

SCHEMA = Schema(
    id="zaya@1",
    model_types=("zaya",),
    first=(
        Declare("embed", "vocab hidden"),
        _vector("input.hidden_states_scale", "hidden"),
        _vector("input.hidden_states_bias", "hidden"),
    ),
    layer=_LAYER,
    last=(
        _vector("norm", "hidden"),
        Declare("lm_head", "vocab hidden", only_if="!tied"),
        _vector("lm_head_bias", "vocab", only_if="head_bias"),
    ),
    # Routers, norms and scales have no rule: every rank of a stage holds them. So do the value projections, since key-value
    # heads see whole projections (current or delayed token), not a share of both.
    rules={
        "head": "tp",
        "kv_head": "tp:replicate",
        "vocab": "tp:pad=128",
        "expert": "ep",
        "expert_ffn": "etp",
    },
    families=(
        _transformers(),
        _half_layers("hub", "model", "input_norm", "self_attn", "o_proj", "zaya_block"),
        _MEGATRON,
        grouped(_MEGATRON),
        _folded(),
    ),
    sizes=_sizes,
    flags=_flags,
    configs={"transformers": zaya_config.to_transformers, "hub": zaya_config.to_hub},
    reads_config=zaya_config.plain,
    harmless=(r"rotary_emb\..*inv_freq$", r"_extra_state"),
)
