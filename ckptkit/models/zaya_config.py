"""ZAYA1 configurations: four eras of `config.json`, one plain form.

The plain form is what Transformers 5.24 (`ZayaConfig`) reads. The others:

- original (8B-legacy): `num_hidden_layers` counts half-layers, `ffn_hidden_size` counts gate and up together,
  `swa_layers` counts earlier tokens only, names differ (`norm_epsilon`, `zaya_mlp_expansion`, `moe_router_topk`, ...);
- base: as the original, but with one entry for each half-layer in lists (`zaya_layers`, `cca_num_q_heads`, ...), beside which
  `num_hidden_layers` and `num_attention_heads` mean something else;
- folded: of the first Transformers port, folded layers but original names.

Fields without a counterpart stay under their own names in every form, since `ZayaConfig` keeps fields that it does not know.
Fields that the original code needs but Transformers has fixed (`zaya_use_eda`, ...) are added for it and, where they have
that value, taken away again: a plain configuration comes back equal.
"""

from collections.abc import Mapping
from typing import Any

from ckptkit.errors import FormatError, LayoutError
from ckptkit.models.fields import whole

_RENAMED = {
    "norm_epsilon": "rms_norm_eps",
    "zaya_mlp_expansion": "router_hidden_size",
    "moe_router_topk": "num_experts_per_tok",
}

_PLAIN_ONLY = ("moe_intermediate_size", "router_hidden_size")
_ORIGINAL_ONLY = (
    "ffn_hidden_size", "ffn_hidden_size_list", "zaya_layers", "zaya_mlp_expansion", "norm_epsilon", "moe_router_topk",
    "swa_layers",
)  # fmt: skip

_FIXED: dict[str, Any] = {
    "cca": True,
    "activation_func": "swiglu",
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "scale_residual_merge": True,
    "residual_in_fp32": True,
    "zaya_use_mod": True,
    "zaya_use_eda": True,
    "zaya_high_prec": True,
    "clamp_temp": False,
    "fused_add_norm": False,
    "rope_scaling": False,
}
"""Fields of the original code that Transformers has fixed, as it has them."""

_SHAPING = ("cca", "activation_func", "gated_linear_unit", "add_bias_linear", "scale_residual_merge", "zaya_use_mod",
            "zaya_use_eda")  # fmt: skip
"""Those of them that decide which tensors there are: with another value this is another model."""

_THETA, _SLIDING_THETA, _PARTIAL = 5_000_000.0, 10_000.0, 0.5
_FOLDED_TYPES = {"full_attention": "hybrid", "sliding_attention": "hybrid_sliding"}
_TYPES = {**_FOLDED_TYPES, "hybrid": "hybrid", "hybrid_sliding": "hybrid_sliding"}


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of any era in the plain form.

    Raises:
        FormatError: it has fields of two eras, whose meanings contradict each other, or describes another kind of model.
        LayoutError: a field is missing or makes no sense.
    """
    ours = [name for name in _PLAIN_ONLY if config.get(name) is not None]
    theirs = [name for name in _ORIGINAL_ONLY if config.get(name) is not None]
    types = config.get("layer_types") or []
    if any(str(kind).startswith("hybrid") for kind in types):
        ours.append("layer_types")
    if ours and theirs:
        raise FormatError(
            f"the configuration mixes two eras of ZAYA: {', '.join(ours)} belong to Transformers, where a layer is attention "
            f"and experts, {', '.join(theirs)} to the original layout, where a layer is one of them; so that "
            f"num_hidden_layers={config.get('num_hidden_layers')!r} may mean either. Keep the fields of one era",
            fields=[*ours, *theirs],
        )
    if not theirs:
        return dict(config)
    if any(name in _FOLDED_TYPES for name in config.get("rope_parameters") or {}):
        return _from_folded(config)
    return _from_original(config)


def to_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as `ZayaConfig` of Transformers reads it. Raises as `plain`, or when that cannot say it."""
    found = plain(config)
    if found.get("clamp_temp"):
        raise FormatError(
            "the configuration has clamp_temp=true (key scales are clamped and exponentiated), which the model in "
            "Transformers does not do: it would give other logits. Convert to the hub layout instead",
            field="clamp_temp",
        )
    if found.get("num_experts_per_tok", 1) != 1:
        raise FormatError(
            f"the configuration has num_experts_per_tok={found['num_experts_per_tok']!r}; the model in Transformers takes "
            "one expert for each token",
            field="num_experts_per_tok",
        )
    found.setdefault("architectures", ["ZayaForCausalLM"])
    return found


def to_hub(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as the original code reads it (the 8B-legacy era). Raises as `plain`."""
    found = plain(config)
    layers = whole(found, "num_hidden_layers")
    types = found.pop("layer_types", None) or ["hybrid"] * layers
    if len(types) != layers:
        raise LayoutError(
            f"the configuration has {len(types)} layer_types for {layers} layers", field="layer_types"
        )
    for theirs, name in _RENAMED.items():
        if name in found:
            found[theirs] = found.pop(name)
    if found.get("hidden_act", "silu") != "silu":
        raise FormatError(
            f"the configuration has hidden_act={found['hidden_act']!r}; the original layout knows silu only (swiglu)",
            field="hidden_act",
        )
    found["num_hidden_layers"] = 2 * layers
    found["ffn_hidden_size"] = 2 * whole(found, "moe_intermediate_size")
    del found["moe_intermediate_size"]
    found["num_query_groups"] = whole(found, "num_key_value_heads")
    found["kv_channels"] = whole(found, "head_dim")
    if "hybrid_sliding" in types:
        # The original counts the tokens before the current one; Transformers counts that one, too.
        window = whole(found, "sliding_window")
        if window > 1:
            found["swa_layers"] = [
                size for kind in types for size in (window - 1 if kind == "hybrid_sliding" else 0, 0)
            ]
            found["sliding_window"] = None
        else:  # there, a window of 0 means none
            back = {ours: theirs for theirs, ours in _FOLDED_TYPES.items()}
            found["layer_types"] = [back[kind] for kind in types for _ in range(2)]
    _write_rope(found, types)
    for name, value in _FIXED.items():
        found.setdefault(name, value)
    found.setdefault("architectures", ["ZayaForCausalLM"])
    return found


def _from_original(config: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for name in _SHAPING:
        if found.get(name, _FIXED[name]) != _FIXED[name]:
            raise FormatError(
                f"the configuration has {name}={found[name]!r}: a kind of ZAYA with other tensors, which no schema here "
                f"describes (it needs {_FIXED[name]!r})",
                field=name,
            )
    halves = found.pop("zaya_layers", None)
    count = len(halves) if halves is not None else whole(found, "num_hidden_layers")
    if halves is not None:
        _check_alternating(halves)
        found["num_experts"] = _only(halves[1::2], "zaya_layers")
    if count % 2:
        raise LayoutError(
            f"the configuration has {count} half-layers: attention and experts alternate, so that there is an even number",
            field="num_hidden_layers",
        )
    layers = count // 2
    head_dim = _head_dim(found)
    ffn = found.pop("ffn_hidden_size_list", None)
    both = _entry(found.pop("ffn_hidden_size", None) if ffn is None else ffn, "ffn_hidden_size", odd=True)
    found.pop("ffn_hidden_size", None)
    if both % 2:
        raise LayoutError(f"the configuration has ffn_hidden_size={both}: gate and up make an even number")
    query = found.pop("cca_num_q_heads", None)
    groups = found.pop("num_query_groups_list", None)
    kv = [
        value
        for value in (groups, found.pop("num_query_groups", None), found.get("num_key_value_heads"))
        if value is not None
    ]
    kv_heads = {_entry(value, "num_key_value_heads") for value in kv}
    if len(kv_heads) != 1:
        raise LayoutError(
            f"the configuration must give one number of key-value heads (num_key_value_heads, num_query_groups), it gives "
            f"{sorted(kv_heads) or 'none'}",
            field="num_key_value_heads",
        )
    for theirs, name in _RENAMED.items():
        value = found.pop(theirs, None)
        if value is not None:
            found[name] = _entry(value, theirs, odd=True) if theirs == "zaya_mlp_expansion" else value
    found.pop("kv_channels", None)
    found |= {
        "num_hidden_layers": layers,
        "num_attention_heads": _entry(
            found.get("num_attention_heads") if query is None else query, "num_attention_heads"
        ),
        "num_key_value_heads": kv_heads.pop(),
        "head_dim": head_dim,
        "moe_intermediate_size": both // 2,
    }
    types, window = _windows(found, layers)
    found |= {"layer_types": types, "sliding_window": window}
    _read_rope(found, types)
    for name, value in _FIXED.items():
        if name in found and found[name] == value:
            del found[name]
    return found


def _from_folded(config: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for theirs, name in _RENAMED.items():
        if found.get(theirs) is not None:
            found[name] = found.pop(theirs)
    both = whole(found, "intermediate_size", "ffn_hidden_size")
    for name in ("intermediate_size", "ffn_hidden_size", "partial_rotary_factor"):
        found.pop(name, None)
    found["moe_intermediate_size"] = both // 2
    found["layer_types"] = _hybrid(
        found.get("layer_types") or ["full_attention"] * whole(found, "num_hidden_layers")
    )
    found["rope_parameters"] = {
        _TYPES.get(kind, kind): value for kind, value in found["rope_parameters"].items()
    }
    return found


def _windows(found: dict[str, Any], layers: int) -> tuple[list[str], int | None]:
    """Layer types and the sliding window of an original configuration, whose fields are taken out."""
    given, swa = found.pop("layer_types", None), found.pop("swa_layers", None)
    window = found.get("sliding_window")
    for name, values in (("layer_types", given), ("swa_layers", swa)):
        if values is not None and len(values) not in (layers, 2 * layers):
            raise LayoutError(
                f"the configuration has {len(values)} {name} for {2 * layers} half-layers", field=name
            )
    if swa is not None:
        sizes = [int(size) for size in (swa[::2] if len(swa) == 2 * layers else swa)]
        used = {size for size in sizes if size}
        if len(used) > 1:
            raise FormatError(
                f"the configuration has windows of {', '.join(map(str, sorted(used)))} tokens in swa_layers; Transformers has "
                "one window for all layers",
                field="swa_layers",
            )
        if used:
            window = used.pop() + 1 if window is None else window
        if given is None:
            return ["hybrid_sliding" if size else "hybrid" for size in sizes], window
    if given is not None:
        return _hybrid(given[::2] if len(given) == 2 * layers else given), window
    return ["hybrid"] * layers, window


def _hybrid(types: list[str]) -> list[str]:
    for kind in types:
        if kind not in _TYPES:
            raise LayoutError(f"the configuration has the layer type {kind!r}; known: {', '.join(_TYPES)}")
    return [_TYPES[kind] for kind in types]


def _read_rope(found: dict[str, Any], types: list[str]) -> None:
    """Replace the original's rotary fields by `rope_parameters`, which win where they are given."""
    theta = _first(found, "rope_theta", "rotary_base")
    sliding = _first(found, "swa_rotary_base")
    partial = _first(found, "partial_rotary_factor", "rope_pct")
    scaling = found.pop("rope_scaling", None)
    if found.get("rope_parameters"):
        return
    base = {"rope_type": "default", "partial_rotary_factor": _PARTIAL if partial is None else partial}
    if theta is None:
        raise LayoutError("the configuration lacks rope_theta", field="rope_theta")
    hybrid = {**base, "rope_theta": theta}
    if isinstance(scaling, Mapping):
        hybrid |= {("rope_type" if name == "type" else name): value for name, value in scaling.items()}
    found["rope_parameters"] = {"hybrid": hybrid}
    if sliding is not None or "hybrid_sliding" in types:
        value = _SLIDING_THETA if sliding is None else sliding
        found["rope_parameters"]["hybrid_sliding"] = {**base, "rope_theta": value}


def _write_rope(found: dict[str, Any], types: list[str]) -> None:
    """Replace `rope_parameters` by the original's rotary fields, where those say the same."""
    rope = found.pop("rope_parameters", None)
    if not rope:
        return
    nested = any(name in rope for name in ("hybrid", "hybrid_sliding"))
    hybrid = rope.get("hybrid", {}) if nested else rope
    sliding = rope.get("hybrid_sliding", {})
    if not isinstance(hybrid, Mapping) or not isinstance(sliding, Mapping):
        raise LayoutError(
            "the configuration's rope_parameters need an entry for each layer type", field="rope_parameters"
        )
    fields = {
        "rope_theta": hybrid.get("rope_theta", _THETA),
        "partial_rotary_factor": hybrid.get("partial_rotary_factor"),
    }
    if "hybrid_sliding" in rope:
        fields["swa_rotary_base"] = sliding.get("rope_theta")
    found |= {name: value for name, value in fields.items() if value is not None}
    back = dict(fields)
    _read_rope(back, types)
    if back["rope_parameters"] != rope:
        found["rope_parameters"] = (
            rope  # scaled, or other shares of each head: the original has no field for that
        )


def _first(found: dict[str, Any], *names: str) -> Any:
    """The first of these fields that is set; all are taken out."""
    values = [found.pop(name, None) for name in names]
    return next((value for value in values if value is not None), None)


def _check_alternating(halves: list[Any]) -> None:
    if any(kind != "a" for kind in halves[::2]) or any(not isinstance(kind, int) for kind in halves[1::2]):
        raise FormatError(
            "the configuration's zaya_layers do not alternate attention ('a') and experts (their number): "
            f"{halves[:6]!r}; no schema here describes that model",
            field="zaya_layers",
        )


def _head_dim(config: Mapping[str, Any]) -> int:
    given = {
        name: whole(config, name) for name in ("kv_channels", "head_dim") if config.get(name) is not None
    }
    if len(set(given.values())) > 1:
        raise LayoutError(f"the configuration gives two sizes of a head: {given}", field="head_dim")
    if given:
        return next(iter(given.values()))
    # The base era counts heads of the hidden size in num_attention_heads, and query heads in cca_num_q_heads.
    count = whole(config, "num_attention_heads")
    if config.get("cca_num_q_heads") is None or not count:
        raise LayoutError("the configuration lacks kv_channels or head_dim", field="head_dim")
    return whole(config, "hidden_size") // count


def _entry(value: Any, name: str, odd: bool = False) -> int:
    """A number, or the one that a list with an entry for each half-layer repeats on attention (or expert) halves."""
    if isinstance(value, list):
        value = _only(value[1 if odd else 0 :: 2], name)
    return whole({name: value}, name)


def _only(values: list[Any], name: str) -> int:
    if len(set(values)) != 1:
        raise FormatError(
            f"the configuration gives the layers different {name}: {sorted(set(map(str, values)))}; no schema here describes "
            "that model",
            field=name,
        )
    return whole({name: values[0]}, name)
