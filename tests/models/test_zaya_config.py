"""ZAYA1's configurations: four eras, one meaning."""

from typing import Any

import pytest
from transformers import ZayaConfig

from ckptkit.errors import FormatError, LayoutError
from ckptkit.models.zaya import SCHEMA
from ckptkit.models.zaya_config import to_hub, to_transformers
from tests.models.zaya_model import TINY, config_of, plain

# config.json of Zyphra/ZAYA1-8B before it moved to Transformers' layout.
LEGACY: dict[str, Any] = {
    "activation_func": "swiglu",
    "activation_func_fp8_input_store": False,
    "add_bias_linear": False,
    "architectures": ["ZayaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bias_activation_fusion": True,
    "bos_token_id": 2,
    "cca": True,
    "dtype": "bfloat16",
    "eos_token_id": 106,
    "ffn_hidden_size": 4096,
    "gated_linear_unit": True,
    "hidden_size": 2048,
    "head_dim": 128,
    "kv_channels": 128,
    "lm_head_bias": False,
    "mamba_cache_dtype": "float32",
    "max_position_embeddings": 131072,
    "model_type": "zaya",
    "moe_router_topk": 1,
    "norm_epsilon": 1e-05,
    "normalization": "RMSNorm",
    "num_attention_heads": 8,
    "num_experts": 16,
    "num_hidden_layers": 80,
    "num_key_value_heads": 2,
    "num_query_groups": 2,
    "pad_token_id": 0,
    "partial_rotary_factor": 0.5,
    "residual_in_fp32": True,
    "rope_scaling": False,
    "rope_theta": 5000000,
    "scale_residual_merge": True,
    "sliding_window": None,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 262272,
    "zaya_mlp_expansion": 256,
    "zaya_use_eda": True,
    "zaya_use_mod": True,
    "zaya_high_prec": True,
}

# The ZAYA1-base era: a list entry for each half-layer; two of the other numbers mean something else.
BASE: dict[str, Any] = {
    **{
        k: v
        for k, v in LEGACY.items()
        if k not in ("head_dim", "kv_channels", "num_experts", "ffn_hidden_size")
    },
    "zaya_layers": ["a", 16] * 40,
    "num_hidden_layers": 120,
    "num_attention_heads": 16,
    "cca_num_q_heads": [8, 0] * 40,
    "num_query_groups_list": [2, 0] * 40,
    "ffn_hidden_size_list": [0, 4096] * 40,
    "zaya_mlp_expansion": [0, 256] * 40,
    "rope_theta": 1000000,
}

# The intermediate layout of the first port to Transformers.
FOLDED: dict[str, Any] = {
    **{
        k: v
        for k, v in TINY.items()
        if k not in ("layer_types", "moe_intermediate_size", "router_hidden_size")
    },
    "model_type": "zaya",
    "intermediate_size": 48,
    "zaya_mlp_expansion": 16,
    "norm_epsilon": 1e-5,
    "num_experts_per_tok": 1,
    "partial_rotary_factor": 0.5,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}

_SCALED = {"rope_type": "linear", "rope_theta": 5e6, "partial_rotary_factor": 0.5, "factor": 4.0}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ["hybrid"] * 3, "sliding_window": None},
        {"layer_types": ["hybrid"] * 3, "sliding_window": 7},
        {"layer_types": ["hybrid_sliding"] * 3, "sliding_window": 1},
        {"tie_word_embeddings": False, "attention_bias": True, "lm_head_bias": True},
        {"rope_parameters": {"hybrid": _SCALED}},
        {"rms_norm_eps": 1e-6, "eos_token_id": [1, 2], "cca_time0": 3, "attention_dropout": 0.1},
    ],
    ids=["tiny", "no window", "unused window", "window 1", "biases", "scaled rotary", "other"],
)
def test_transformers_to_original_and_back_changes_nothing(changes: dict) -> None:
    """Every field comes back, and Transformers makes the same configuration of it."""
    config = {"architectures": ["ZayaForCausalLM"], **plain(config_of(**changes))}

    back = to_transformers(to_hub(config))

    assert back == config
    assert ZayaConfig.from_dict(back).to_dict() == ZayaConfig.from_dict(config).to_dict()


def test_original_to_transformers_and_back_changes_nothing() -> None:
    """Fields without a counterpart are carried under their own names."""
    back = to_hub(to_transformers(LEGACY))

    added = {"hidden_act", "clamp_temp", "fused_add_norm", "cca_time0", "cca_time1"}
    assert {key: back[key] for key in LEGACY} == LEGACY
    assert set(back) - set(LEGACY) <= added


def test_published_configuration_is_that_of_transformers() -> None:
    """The legacy 8B file means the defaults of `ZayaConfig`, which loads what we write."""
    config = ZayaConfig.from_dict(to_transformers(LEGACY))

    expected, found = ZayaConfig().to_dict(), config.to_dict()
    same = set(expected) - {"architectures", "dtype", "transformers_version", "rope_parameters"}
    assert {key: found[key] for key in same} == {key: expected[key] for key in same}
    assert found["rope_parameters"]["hybrid"] == expected["rope_parameters"]["hybrid"]
    assert found["mamba_cache_dtype"] == "float32"


def test_base_era_counts_by_its_lists() -> None:
    """80 half-layers and 8 query heads, whatever num_hidden_layers=120 and num_attention_heads=16 say."""
    config = to_transformers(BASE)

    sizes = SCHEMA.bind(BASE).sizes
    assert sizes == SCHEMA.bind(LEGACY).sizes
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["head_dim"]) == (40, 8, 128)
    assert config["rope_parameters"]["hybrid"]["rope_theta"] == 1_000_000
    assert not {"zaya_layers", "cca_num_q_heads", "ffn_hidden_size_list"} & set(config)


def test_intermediate_layout_means_the_same_as_transformers() -> None:
    """Folded layers under original names: the sizes and layer types of the tiny model."""
    config = to_transformers(FOLDED)

    assert SCHEMA.bind(FOLDED).sizes == SCHEMA.bind(plain(config_of())).sizes
    expected = plain(config_of())
    assert {key: config[key] for key in ("layer_types", "sliding_window", "rope_parameters")} == {
        key: expected[key] for key in ("layer_types", "sliding_window", "rope_parameters")
    }


def test_windows_count_the_current_token_in_transformers_only() -> None:
    """A window of 4 tokens is 3 earlier ones in the original, on the attention half-layers."""
    config = to_hub(plain(config_of()))

    assert config["swa_layers"] == [0, 0, 3, 0, 0, 0]
    assert config["num_hidden_layers"] == 6
    assert config["ffn_hidden_size"] == 48
    assert config["swa_rotary_base"] == 10_000


@pytest.mark.parametrize("lists", [{"swa_layers": [0, 0, 4096, 0]}, {"swa_layers": [0, 4096]}])
def test_windows_are_read_for_each_half_layer_or_each_layer(lists: dict) -> None:
    """Both lengths are found in configurations."""
    config = to_transformers({**LEGACY, "num_hidden_layers": 4, **lists})

    assert config["layer_types"] == ["hybrid", "hybrid_sliding"]
    assert config["sliding_window"] == 4097


@pytest.mark.parametrize("theirs", [LEGACY, {"zaya_mlp_expansion": 16}, {"swa_layers": [0, 0, 3, 0, 0, 0]}])
def test_configuration_merged_by_hand_is_refused(theirs: dict) -> None:
    """Fields of both eras contradict each other: whether 6 layers are 6 or 3 cannot be known."""
    merged = {**theirs, **plain(config_of())}

    with pytest.raises(FormatError, match="mixes two eras of ZAYA") as caught:
        SCHEMA.bind(merged)

    assert "moe_intermediate_size" in caught.value.fields


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"zaya_use_mod": False}, FormatError, "zaya_use_mod=False"),
        ({"zaya_use_eda": False}, FormatError, "zaya_use_eda=False"),
        ({"scale_residual_merge": False}, FormatError, "scale_residual_merge=False"),
        ({"num_hidden_layers": 81}, LayoutError, "81 half-layers"),
        ({"num_hidden_layers": "80"}, LayoutError, "num_hidden_layers='80'"),
        ({"ffn_hidden_size": 4097}, LayoutError, "ffn_hidden_size=4097"),
        ({"num_query_groups": 4}, LayoutError, "one number of key-value heads"),
        ({"kv_channels": 64}, LayoutError, "two sizes of a head"),
        ({"rope_theta": None}, LayoutError, "lacks rope_theta"),
        ({"hidden_size": None}, LayoutError, "lacks hidden_size"),
        ({"swa_layers": [0, 0, 8, 0, 16] + [0] * 75}, FormatError, "windows of 8, 16 tokens"),
        ({"swa_layers": [8, 0]}, LayoutError, "2 swa_layers for 80 half-layers"),
        ({"zaya_layers": ["a", 16, "a"]}, LayoutError, "3 half-layers"),
        ({"zaya_layers": ["a", "a", 16, 16]}, FormatError, "do not alternate"),
        ({"zaya_layers": ["a", 16, "a", 8]}, FormatError, "different zaya_layers"),
        ({"num_attention_heads": 7}, LayoutError, "divisible by key-value heads"),
        ({"layer_types": ["mamba"] * 40}, LayoutError, "layer type 'mamba'"),
    ],
)
def test_configurations_of_another_model_or_none_are_refused(
    changes: dict, error: type[Exception], message: str
) -> None:
    """The error names the field; nothing is guessed."""
    with pytest.raises(error, match=message):
        SCHEMA.bind({**LEGACY, **changes})


def test_what_transformers_cannot_do_is_not_written_for_it() -> None:
    """Clamped key scales give other logits there, other activations there have no original: both are refused by name."""
    with pytest.raises(FormatError, match="clamp_temp"):
        to_transformers({**LEGACY, "clamp_temp": True})
    with pytest.raises(FormatError, match="num_experts_per_tok=2"):
        to_transformers({**LEGACY, "moe_router_topk": 2})
    with pytest.raises(FormatError, match="hidden_act='gelu'"):
        to_hub({**plain(config_of()), "hidden_act": "gelu"})

    assert to_hub({**LEGACY, "clamp_temp": True})["clamp_temp"] is True


def test_both_layouts_of_one_model_bind_alike() -> None:
    """Three folded layers and their six half-layers are the same canonical tensors."""
    config = plain(config_of())

    ours, theirs = SCHEMA.bind(config), SCHEMA.bind(to_hub(config))

    assert ours.tensors == theirs.tensors
    assert ours.config.keys() - {"architectures"} == theirs.config.keys() - {"architectures"}
