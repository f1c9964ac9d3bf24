"""Lines that many decoders declare alike: grouped-query attention, a gated MLP, embedding and head.

Axes: `kv_head` key-value heads, `group` query heads for each of them, `head_dim` channels of a head, `gate_up` the two halves
of a gated MLP's first matrix, `ffn` its width. Canonical names start with `layers.{i}.attn.` and `layers.{i}.mlp.`.

Megatron-style names follow Megatron-LM (`megatron/core/models/gpt`) with Transformer Engine, which keeps a layer's
norms with the linear layers that follow them (`linear_qkv.layer_norm_weight`).
"""

from collections.abc import Mapping
from typing import Any

from ckptkit.core.schema import Declare, Name
from ckptkit.models.fields import heads, truth, whole

_ATTN = "layers.{i}.attn."

RULES = {
    "vocab": "tp:pad=128",
    "kv_head": "tp:replicate",
    "group": "tp:inner=kv_head",
    "ffn": "tp",
}

HARMLESS = (r"rotary_emb\.inv_freq$", r"\.attention\.(masked_)?bias$", r"_extra_state")
"""Rotary frequencies and masks that older files carry, and the state of Transformer Engine's kernels."""

EMBED = (Declare("embed", "vocab hidden"),)
LAST = (
    Declare("norm", "hidden", decay=False),
    Declare("lm_head", "vocab hidden", only_if="!tied"),
)


def sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Axes of embedding and attention, and `layers`."""
    return {
        "layers": whole(config, "num_hidden_layers"),
        "vocab": whole(config, "vocab_size"),
        "gate_up": 2,
        **heads(config),
    }


def flags(config: Mapping[str, Any]) -> dict[str, bool]:
    """`tied`, and which biases and norms attention has in a model type."""
    kind = config.get("model_type")
    bias = truth(config, "attention_bias")
    return {
        "tied": truth(config, "tie_word_embeddings"),
        "qkv_bias": bias or kind == "qwen2" or (kind == "qwen2_moe" and truth(config, "qkv_bias", True)),
        "out_bias": bias,
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
    }


def attention() -> tuple[Declare, ...]:
    """The canonical tensors of attention and the norm before it."""
    return (
        Declare(_ATTN + "norm", "hidden", decay=False),
        Declare(_ATTN + "q", "kv_head group head_dim hidden"),
        Declare(_ATTN + "q_bias", "kv_head group head_dim", decay=False, only_if="qkv_bias"),
        Declare(_ATTN + "k", "kv_head head_dim hidden"),
        Declare(_ATTN + "k_bias", "kv_head head_dim", decay=False, only_if="qkv_bias"),
        Declare(_ATTN + "v", "kv_head head_dim hidden"),
        Declare(_ATTN + "v_bias", "kv_head head_dim", decay=False, only_if="qkv_bias"),
        Declare(_ATTN + "out", "hidden kv_head group head_dim"),
        Declare(_ATTN + "out_bias", "hidden", decay=False, only_if="out_bias"),
        Declare(_ATTN + "q_norm", "head_dim", decay=False, only_if="qk_norm"),
        Declare(_ATTN + "k_norm", "head_dim", decay=False, only_if="qk_norm"),
    )


def transformers_attention(to: str) -> tuple[Name, ...]:
    """Attention in Transformers' names below `to` (`model.layers.{i}.self_attn.`)."""
    return (
        Name(to + "q_proj.weight", _ATTN + "q: (kv_head group head_dim) hidden"),
        Name(to + "q_proj.bias", _ATTN + "q_bias: (kv_head group head_dim)", only_if="qkv_bias"),
        Name(to + "k_proj.weight", _ATTN + "k: (kv_head head_dim) hidden"),
        Name(to + "k_proj.bias", _ATTN + "k_bias: (kv_head head_dim)", only_if="qkv_bias"),
        Name(to + "v_proj.weight", _ATTN + "v: (kv_head head_dim) hidden"),
        Name(to + "v_proj.bias", _ATTN + "v_bias: (kv_head head_dim)", only_if="qkv_bias"),
        Name(to + "o_proj.weight", _ATTN + "out: hidden (kv_head group head_dim)"),
        Name(to + "o_proj.bias", _ATTN + "out_bias: hidden", only_if="out_bias"),
        Name(to + "q_norm.weight", _ATTN + "q_norm: head_dim", only_if="qk_norm"),
        Name(to + "k_norm.weight", _ATTN + "k_norm: head_dim", only_if="qk_norm"),
    )


def megatron_attention(to: str) -> tuple[Name, ...]:
    """Attention in Megatron's names below `to` (`decoder.layers.{i}.self_attention.`).

    Rows of `linear_qkv` go group by group: the queries of a key-value head, its key, its value. Where the tensor-parallel
    degree exceeds the groups, ranks hold equal shares of these rows (`megatron/core/transformer/attention.py`).
    """
    parts = "{0}q{1}: group head_dim | {0}k{1}: head_dim | {0}v{1}: head_dim"
    weight = f"(kv_head [{parts.format(_ATTN, '')}]) hidden"
    bias = f"(kv_head [{parts.format(_ATTN, '_bias')}])"
    return (
        Name(to + "linear_proj.weight", _ATTN + "out: hidden (kv_head group head_dim)"),
        Name(to + "linear_proj.bias", _ATTN + "out_bias: hidden", only_if="out_bias"),
        Name(to + "linear_qkv.layer_norm_weight", _ATTN + "norm: hidden"),
        Name(to + "linear_qkv.weight", weight, rows="kv_head"),
        Name(to + "linear_qkv.bias", bias, only_if="qkv_bias", rows="kv_head"),
        Name(to + "q_layernorm.weight", _ATTN + "q_norm: head_dim", only_if="qk_norm"),
        Name(to + "k_layernorm.weight", _ATTN + "k_norm: head_dim", only_if="qk_norm"),
    )


def mlp(part: str = "mlp", ffn: str = "ffn", only_if: str = "") -> tuple[Declare, ...]:
    """The canonical tensors of a gated MLP `layers.{i}.{part}` and its width `ffn`."""
    name = f"layers.{{i}}.{part}."
    return (
        Declare(name + "gate_up", f"gate_up {ffn} hidden", only_if=only_if),
        Declare(name + "down", f"hidden {ffn}", only_if=only_if),
    )


def transformers_mlp(to: str, part: str = "mlp", ffn: str = "ffn", only_if: str = "") -> tuple[Name, ...]:
    """A gated MLP in Transformers' names below `to` (`model.layers.{i}.mlp.`)."""
    name = f"layers.{{i}}.{part}."
    return (
        Name(to + "gate_proj.weight", f"{name}gate_up: gate_up=0 {ffn} hidden", only_if=only_if),
        Name(to + "up_proj.weight", f"{name}gate_up: gate_up=1 {ffn} hidden", only_if=only_if),
        Name(to + "down_proj.weight", f"{name}down: hidden {ffn}", only_if=only_if),
    )


def megatron_mlp(to: str, part: str = "mlp", ffn: str = "ffn", only_if: str = "") -> tuple[Name, ...]:
    """A gated MLP in Megatron's names below `to`: gate and up are one matrix, and each half splits on its own."""
    name = f"layers.{{i}}.{part}."
    return (
        Name(to + "linear_fc1.weight", f"{name}gate_up: (gate_up {ffn}) hidden", only_if=only_if),
        Name(to + "linear_fc2.weight", f"{name}down: hidden {ffn}", only_if=only_if),
    )


_EXPERTS = "layers.{i}.experts."


def experts(only_if: str = "") -> tuple[Declare, ...]:
    """The canonical tensors of routed experts: `expert` axis, width `expert_ffn`."""
    return (
        Declare(_EXPERTS + "gate_up", "expert gate_up expert_ffn hidden", only_if=only_if),
        Declare(_EXPERTS + "down", "expert hidden expert_ffn", only_if=only_if),
    )


def single_experts(to: str, gate: str, up: str, down: str, only_if: str = "") -> tuple[Name, ...]:
    """Experts as modules of their own below `to`, with these names of their three matrices."""
    first = _EXPERTS + "gate_up: expert={e} gate_up="
    return (
        Name(f"{to}{{e}}.{gate}.weight", f"{first}0 expert_ffn hidden", only_if=only_if),
        Name(f"{to}{{e}}.{up}.weight", f"{first}1 expert_ffn hidden", only_if=only_if),
        Name(f"{to}{{e}}.{down}.weight", _EXPERTS + "down: expert={e} hidden expert_ffn", only_if=only_if),
    )


def stacked_experts(to: str, only_if: str = "") -> tuple[Name, ...]:
    """All experts in one parameter, as modules of Transformers 5 have them."""
    return (
        Name(to + "gate_up_proj", _EXPERTS + "gate_up: expert (gate_up expert_ffn) hidden", only_if=only_if),
        Name(to + "down_proj", _EXPERTS + "down: expert hidden expert_ffn", only_if=only_if),
    )


def megatron_experts(to: str, only_if: str = "") -> tuple[Name, ...]:
    """Experts below `to` (`decoder.layers.{i}.mlp.experts.`), numbered over all ranks."""
    fc1 = _EXPERTS + "gate_up: expert={e} (gate_up expert_ffn) hidden"
    fc2 = _EXPERTS + "down: expert={e} hidden expert_ffn"
    return (
        Name(to + "local_experts.{e}.linear_fc1.weight", fc1, only_if=only_if),
        Name(to + "local_experts.{e}.linear_fc2.weight", fc2, only_if=only_if),
    )


TRANSFORMERS_FIRST = (Name("model.embed_tokens.weight", "embed: vocab hidden"),)
MEGATRON_FIRST = (Name("embedding.word_embeddings.weight", "embed: vocab hidden"),)


def last(norm: str, head: str) -> tuple[Name, ...]:
    """Final norm and head; a tied head is a copy of the embedding."""
    return (
        Name(norm, "norm: hidden"),
        Name(head, "lm_head: vocab hidden", only_if="!tied"),
        Name(head, "embed: vocab hidden", only_if="tied", copy=True),
    )


TRANSFORMERS_LAST = last("model.norm.weight", "lm_head.weight")
MEGATRON_LAST = last("decoder.final_layernorm.weight", "output_layer.weight")
