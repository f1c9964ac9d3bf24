"""Megatron's training arguments: the model's configuration and the layout in them, and the same written.

A checkpoint carries its run's `args` (an `argparse.Namespace`). For the models whose schemas are known they become a
configuration as Transformers has it; arguments that mean another model give none, and the user gives one.

Source: Megatron-LM, `megatron/training/arguments.py`.
"""

from collections.abc import Mapping
from typing import Any

from ckptkit.core.layouts import Layout
from ckptkit.core.schema import Model
from ckptkit.errors import LayoutError
from ckptkit.formats.standins import Global, Opaque


def fields_of(args: Any) -> dict[str, Any]:
    """The arguments by name; empty where there are none."""
    if isinstance(args, Opaque) and args.is_a("Namespace", "SimpleNamespace"):
        return args.attributes
    return args if isinstance(args, dict) else {}


def _whole(args: Mapping[str, Any], name: str, default: int = 1) -> int:
    value = args.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def layout_of(args: Mapping[str, Any], warnings: list[str]) -> Layout | None:
    """The layout of the run, or None where the arguments do not tell."""
    if "tensor_model_parallel_size" not in args:
        return None
    tp, pp = _whole(args, "tensor_model_parallel_size"), _whole(args, "pipeline_model_parallel_size")
    cp = _whole(args, "context_parallel_size")
    ranks = _whole(args, "world_size", tp * pp * cp * _whole(args, "data_parallel_size"))
    order = {"order": "tp-cp-ep-pp-dp"} if args.get("use_tp_pp_dp_mapping") else {}
    try:
        return Layout(
            tp=tp,
            pp=pp,
            vpp=_whole(args, "virtual_pipeline_model_parallel_size"),
            ep=_whole(args, "expert_model_parallel_size"),
            # Megatron cuts experts as it cuts everything else, unless it is told otherwise.
            etp=_whole(args, "expert_tensor_parallel_size", tp if args.get("num_experts") else 1),
            cp=cp,
            dp=max(1, ranks // (tp * pp * cp)),
            zero=1 if args.get("use_distributed_optimizer") else 0,
            rule="megatron",
            stages=_stages(args, pp),
            **order,
        )
    except LayoutError as error:
        warnings.append(f"the run's arguments give no layout: {error}")
        return None


def _stages(args: Mapping[str, Any], pp: int) -> tuple[int, ...] | None:
    """Layers of each stage where they are not even. Raises LayoutError for a layout given as text."""
    if pp == 1:
        return None
    if args.get("pipeline_model_parallel_layout") is not None:
        raise LayoutError(
            "pipeline_model_parallel_layout places layers one by one; give the stages with --source-layout"
        )
    first, last = args.get("decoder_first_pipeline_num_layers"), args.get("decoder_last_pipeline_num_layers")
    layers = _whole(args, "num_layers", 0)
    if (first is None and last is None) or not layers:
        return None
    named = (first is not None) + (last is not None)
    rest, left = pp - named, layers - (first or 0) - (last or 0)
    if rest and left % rest:
        raise LayoutError(f"{left} layers do not divide over {rest} stages")
    middle = (left // rest,) * rest if rest else ()
    return (*((first,) if first is not None else ()), *middle, *((last,) if last is not None else ()))


def config_of(args: Mapping[str, Any], warnings: list[str]) -> dict[str, Any] | None:
    """A configuration in Transformers' terms, or None where the arguments mean a model that no schema covers."""
    plain = (
        args.get("swiglu")
        and args.get("normalization") == "RMSNorm"
        and args.get("position_embedding_type", "rope") == "rope"
        and not args.get("multi_latent_attention")
    )
    if not plain or "hidden_size" not in args or "num_layers" not in args:
        return None
    heads = _whole(args, "num_attention_heads")
    grouped = args.get("group_query_attention")
    vocab = args.get("vocab_size")
    if not isinstance(vocab, int) or vocab <= 0:
        vocab = args.get("padded_vocab_size")
        warnings.append(
            "the run's arguments give the vocabulary with its padding only, so that padding counts as part of it; give the "
            "model's config.json with --config for the true size"
        )
    config: dict[str, Any] = {
        "num_hidden_layers": args["num_layers"],
        "hidden_size": args["hidden_size"],
        "intermediate_size": args.get("ffn_hidden_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(args, "num_query_groups", heads) if grouped else heads,
        "head_dim": args.get("kv_channels"),
        "vocab_size": vocab,
        "max_position_embeddings": args.get("max_position_embeddings"),
        "rms_norm_eps": args.get("norm_epsilon", 1e-5),
        "rope_theta": float(args.get("rotary_base", 10000)),
        "hidden_act": "silu",
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "torch_dtype": "bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else "float32",
    }
    bias, norms = bool(args.get("add_bias_linear")), bool(args.get("qk_layernorm"))
    if not args.get("num_experts"):
        kind = "qwen3" if norms else "qwen2" if args.get("add_qkv_bias") and not bias else "llama"
        return {
            **config,
            "model_type": kind,
            **({"attention_bias": True, "mlp_bias": True} if bias else {}),
        }
    config["num_experts_per_tok"] = args.get("moe_router_topk", 2)
    width = args.get("moe_ffn_hidden_size") or args.get("ffn_hidden_size")
    shared = args.get("moe_shared_expert_intermediate_size")
    if not norms and not shared and not args.get("add_qkv_bias"):
        return {
            **config,
            "model_type": "mixtral",
            "num_local_experts": args["num_experts"],
            "intermediate_size": width,
        }
    config.update(num_experts=args["num_experts"], moe_intermediate_size=width)
    config["mlp_only_layers"] = _dense_layers(args)
    if norms and not shared:
        return {**config, "model_type": "qwen3_moe"}
    return {
        **config,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": shared or 0,
        "qkv_bias": bool(args.get("add_qkv_bias")),
    }


def _dense_layers(args: Mapping[str, Any]) -> list[int]:
    """Layers without experts: `moe_layer_freq` is a period, or says so for every layer."""
    layers, freq = args["num_layers"], args.get("moe_layer_freq", 1)
    if isinstance(freq, list):
        return [i for i, routed in enumerate(freq) if not routed]
    return [i for i in range(layers) if isinstance(freq, int) and freq > 1 and i % freq]


def args_of(carried: Any, model: Model | None, layout: Layout) -> Opaque:
    """Arguments for a new checkpoint: those of the source where it has some, with this layout and this model's sizes.

    Only what Megatron compares or takes over on loading is made here; a run has its own arguments for the rest.
    """
    fields = dict(fields_of(carried))
    fields.update(_sizes(model) if model is not None and not fields else {})
    fields.update(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        context_parallel_size=layout.cp,
        data_parallel_size=layout.dp,
        world_size=layout.world,
        use_distributed_optimizer=layout.zero > 0,
    )
    first, last = _ends(layout.stages)
    for name, value in (
        ("decoder_first_pipeline_num_layers", first),
        ("decoder_last_pipeline_num_layers", last),
        ("pipeline_model_parallel_layout", None),
    ):
        if value is not None or name in fields:
            fields[name] = value
    return Opaque(Global("argparse", "Namespace"), (), fields, True)


def _ends(stages: tuple[int, ...] | None) -> tuple[int | None, int | None]:
    """Layers of the first and the last stage, where those between are alike and these are not."""
    if stages is None or len(set(stages)) == 1 or len(set(stages[1:-1])) > 1:
        return None, None
    return stages[0], stages[-1]


def _sizes(model: Model) -> dict[str, Any]:
    """A configuration's sizes as arguments."""
    config = model.config
    kind = config.get("model_type")
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    experts = config.get("num_local_experts") or config.get("num_experts")
    made = {
        "num_layers": config.get("num_hidden_layers", model.layers),
        "hidden_size": config.get("hidden_size"),
        "ffn_hidden_size": config.get("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "group_query_attention": groups is not None and groups != heads,
        "kv_channels": config.get("head_dim"),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "norm_epsilon": config.get("rms_norm_eps"),
        "rotary_base": config.get("rope_theta"),
        "vocab_size": config.get("vocab_size"),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "add_bias_linear": config.get("mlp_bias"),
        "qk_layernorm": True if kind in ("qwen3", "qwen3_moe") else None,
        "add_qkv_bias": True if model.flags.get("qkv_bias") else None,
        "num_experts": experts,
        "moe_router_topk": config.get("num_experts_per_tok"),
        "moe_ffn_hidden_size": config.get("moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": config.get("shared_expert_intermediate_size"),
        "bf16": config.get("torch_dtype", config.get("dtype")) == "bfloat16",
    }
    routed = model.flags.get("routed")
    if isinstance(routed, frozenset) and len(routed) < model.layers:
        made["moe_layer_freq"] = [int(i in routed) for i in range(model.layers)]
    return {name: value for name, value in made.items() if value is not None}
