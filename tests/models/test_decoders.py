"""Llama, Mistral, Qwen, Mixtral: names as Transformers saves them, Megatron's interleaved and fused matrices by loops."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors import safe_open

from ckptkit.core.layouts import Layout
from ckptkit.core.schema import Model
from ckptkit.errors import LayoutError
from ckptkit.models import find
from tests.models.arrays import Arrays, gathered, numbered, on_rank, scattered, to_canonical, to_family

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 4}),
    "mistral": ("Mistral", {"head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "moe_intermediate_size": 12, "decoder_sparse_step": 2, "head_dim": 16},
    ),
}


def bound(config: dict[str, Any]) -> Model:
    schema = find(config)
    assert schema is not None
    return schema.bind(config)


@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Files as `save_pretrained` writes them; modules as `state_dict` names them, in its order."""
    kind, changes = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    module = getattr(transformers, f"{kind}ForCausalLM")(config)
    module.save_pretrained(tmp_path)
    model = bound(json.loads((tmp_path / "config.json").read_text()))

    with safe_open(tmp_path / "model.safetensors", "np") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    state = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    in_memory = "stacked" if "stacked" in model.families else "transformers"

    files = {key: local.shape for key, local in model.names("transformers").unpadded().items()}
    modules = [(key, local.shape) for key, local in model.names(in_memory).unpadded().items()]
    assert files == saved
    assert modules == list(state.items())


@pytest.mark.parametrize("case", CASES)
def test_families_are_views_of_the_same_elements(case: str) -> None:
    """Every family, unsharded or merged from the ranks of a layout, gives all elements back."""
    kind, changes = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    model = bound(json.loads(config.to_json_string()))
    canonical = numbered(model)

    for family in model.families:
        back = to_canonical(model, family, to_family(model, family, canonical))
        assert all(np.array_equal(back[name], canonical[name]) for name in canonical)
        placed = model.names(family).placements(Layout.parse("tp=2,pp=3,ep=2,dp=2"))
        values, times = scattered(((p.local, gathered(p.local, canonical)) for p in placed), model)
        assert all((count >= 1).all() for count in times.values())
        assert all(np.array_equal(values[name], canonical[name]) for name in canonical)


def attention_rows(heads: int, groups: int, width: int) -> tuple[Model, Arrays]:
    """A one-layer Llama whose query, key and value rows hold 1000, 2000 and 3000 plus their number."""
    config = {
        **SMALL, "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 2, "attention_bias": True,
        "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": width,
    }  # fmt: skip
    model = bound(config)
    arrays = to_family(model, "transformers", numbered(model))
    for start, part in ((1000, "q"), (2000, "k"), (3000, "v")):
        name = f"model.layers.0.self_attn.{part}_proj"
        rows = start + np.arange(len(arrays[f"{name}.bias"]), dtype=np.float64)
        arrays[f"{name}.bias"] = rows
        arrays[f"{name}.weight"] = np.stack([rows, -rows], axis=1)
    return model, to_canonical(model, "transformers", arrays)


def interleaved(heads: int, groups: int, width: int) -> list[int]:
    """Megatron's rows by a loop: for each group its queries, its key, its value."""
    rows: list[int] = []
    each = heads // groups
    for group in range(groups):
        for head in range(group * each, (group + 1) * each):
            rows += [1000 + head * width + d for d in range(width)]
        rows += [2000 + group * width + d for d in range(width)]
        rows += [3000 + group * width + d for d in range(width)]
    return rows


@pytest.mark.parametrize(("heads", "groups", "width"), [(8, 4, 4), (16, 2, 4), (4, 4, 8), (6, 1, 2)])
def test_qkv_is_interleaved_by_group(heads: int, groups: int, width: int) -> None:
    """Weight and bias, unsharded, against the loop; and each of Transformers' tensors has only its own thousands."""
    model, canonical = attention_rows(heads, groups, width)

    megatron = to_family(model, "megatron", canonical)
    back = to_family(model, "transformers", to_canonical(model, "megatron", megatron))

    expected = interleaved(heads, groups, width)
    at = "decoder.layers.0.self_attention.linear_qkv"
    assert megatron[f"{at}.weight"][:, 0].tolist() == expected
    assert megatron[f"{at}.bias"].tolist() == expected
    for thousand, part in ((1, "q"), (2, "k"), (3, "v")):
        assert set(back[f"model.layers.0.self_attn.{part}_proj.bias"] // 1000) == {thousand}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_qkv_rows_split_evenly_even_above_the_groups(tp: int) -> None:
    """Sixteen query heads, two groups: ranks hold equal shares of the interleaved rows, and together all of them."""
    model, canonical = attention_rows(16, 2, 4)
    at = "decoder.layers.0.self_attention.linear_qkv"
    expected = interleaved(16, 2, 4)

    held = [on_rank(model, "megatron", f"tp={tp}", rank, canonical) for rank in range(tp)]

    for rank in range(tp):
        share = len(expected) // tp
        mine = expected[rank * share : (rank + 1) * share]
        assert held[rank][f"{at}.bias"].tolist() == mine
        assert held[rank][f"{at}.weight"][:, 1].tolist() == [-row for row in mine]
    placed = model.names("megatron").placements(Layout(tp=tp))
    values, times = scattered(((p.local, gathered(p.local, canonical)) for p in placed), model)
    assert all((count >= 1).all() for count in times.values())
    assert all(np.array_equal(values[name], canonical[name]) for name in canonical)


def test_qkv_rows_that_do_not_divide_are_refused() -> None:
    """16 ranks cannot share 40 rows, nor 32 ranks 16 heads; the error says what divides."""
    model, _ = attention_rows(16, 2, 2)

    with pytest.raises(LayoutError, match=r"tp=16 does not divide the 40 rows of .*linear_qkv.weight"):
        list(model.names("megatron").placements(Layout(tp=16)))
    with pytest.raises(
        LayoutError, match=r"tp=32 leaves 16 ranks, .* axis group, which has 8; .* divides 16"
    ):
        list(model.names("megatron").placements(Layout(tp=32)))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_gate_and_up_are_halves_that_split_on_their_own(tp: int) -> None:
    """Row r of the 64 holds r: rank k has its share of the 32 gate rows, then its share of the 32 up rows."""
    model = bound(
        {
            **SMALL,
            "model_type": "llama",
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "intermediate_size": 32,
        }
    )
    arrays = to_family(model, "transformers", numbered(model))
    for start, part in ((0, "gate"), (32, "up")):
        rows = start + np.arange(32, dtype=np.float64)
        arrays[f"model.layers.0.mlp.{part}_proj.weight"] = np.repeat(rows[:, None], 32, axis=1)
    canonical = to_canonical(model, "transformers", arrays)

    for rank in range(tp):
        held = on_rank(model, "megatron", f"tp={tp}", rank, canonical)
        share = 32 // tp
        gate = list(range(rank * share, (rank + 1) * share))
        assert held["decoder.layers.0.mlp.linear_fc1.weight"][:, 0].tolist() == gate + [32 + r for r in gate]


def test_twelve_grouped_experts_are_numbered_not_sorted() -> None:
    """weight10 is expert 10: contents by number, gate then up, 12 experts' three matrices each."""
    model = bound({**SMALL, "model_type": "mixtral", "num_local_experts": 12})
    canonical = numbered(model)

    grouped = to_family(model, "megatron_grouped", canonical)
    files = to_family(model, "transformers", to_canonical(model, "megatron_grouped", grouped))

    names = [key for key in files if key.startswith("model.layers.1.block_sparse_moe.experts.")]
    assert len(names) == 12 * 3
    for expert in range(12):
        at = f"model.layers.1.block_sparse_moe.experts.{expert}"
        gate, up = np.split(grouped[f"decoder.layers.1.mlp.experts.linear_fc1.weight{expert}"], 2)
        assert np.array_equal(files[f"{at}.w1.weight"], gate)
        assert np.array_equal(files[f"{at}.w3.weight"], up)
        down = grouped[f"decoder.layers.1.mlp.experts.linear_fc2.weight{expert}"]
        assert np.array_equal(files[f"{at}.w2.weight"], down)


def test_stacked_experts_are_one_block_each() -> None:
    """Element (expert, out, in) of the stack is element (out, in) of that expert's own matrix, for sizes that differ."""
    model = bound(
        {**SMALL, "model_type": "mixtral", "num_local_experts": 3, "hidden_size": 8, "intermediate_size": 6}
    )
    files = to_family(model, "transformers", numbered(model))
    for expert in range(3):
        for name, rows in (("w1", 6), ("w3", 6), ("w2", 8)):
            out, into = np.indices((rows, 8 if rows == 6 else 6))
            files[f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight"] = (
                10000.0 * expert + 100 * out + into
            )

    stacked = to_family(model, "stacked", to_canonical(model, "transformers", files))

    down = stacked["model.layers.0.mlp.experts.down_proj"]
    assert [[int(down[e, o, i]) for o, i in ((0, 1), (7, 5))] for e in range(3)] == [
        [10000 * e + 1, 10000 * e + 705] for e in range(3)
    ]
    gate_up = stacked["model.layers.0.mlp.experts.gate_up_proj"]
    assert gate_up.shape == (3, 12, 8)
    assert np.array_equal(gate_up[2, :6], gate_up[2, 6:]) and gate_up[2, 5, 7] == 20507


def test_module_order_of_single_and_grouped_experts() -> None:
    """Single modules hold both matrices of an expert; grouped layers all first matrices, then all second ones."""
    model = bound({**SMALL, "model_type": "mixtral", "num_local_experts": 2})

    single = [key for key in model.names("megatron").whole if "layers.0.mlp.experts" in key]
    grouped = [key for key in model.names("megatron_grouped").whole if "layers.0.mlp.experts" in key]

    assert [key.split("experts.", 1)[1].removesuffix(".weight") for key in single] == [
        "local_experts.0.linear_fc1", "local_experts.0.linear_fc2",
        "local_experts.1.linear_fc1", "local_experts.1.linear_fc2",
    ]  # fmt: skip
    assert [key.split("experts.", 1)[1] for key in grouped] == [
        "linear_fc1.weight0", "linear_fc1.weight1", "linear_fc2.weight0", "linear_fc2.weight1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_attention_heads": "4"}, "num_attention_heads='4', which must be a whole number"),
        ({"num_key_value_heads": 3}, "4 attention heads and 3 key-value heads"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1, which must be true or false"),
        ({"model_type": "mixtral"}, "lacks num_local_experts or num_experts"),
        ({"model_type": "qwen3_moe", "num_experts": 2, "moe_intermediate_size": 4, "mlp_only_layers": 1}, "mlp_only_layers=1"),
    ],
)  # fmt: skip
def test_configurations_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    """The error names the field and what was found."""
    with pytest.raises(LayoutError, match=message):
        bound({**SMALL, "model_type": "llama", **changes})
