"""ZAYA1's values: renames, stacks and splits against hand-written NumPy."""

import re

import numpy as np
import pytest

from ckptkit.core.layouts import Layout
from ckptkit.core.schema import Model
from ckptkit.errors import LayoutError
from ckptkit.models.zaya import SCHEMA
from tests.models.arrays import Arrays, gathered, numbered, on_rank, scattered, to_canonical, to_family
from tests.models.zaya_model import bound, config_of, plain, tensors_of, tiny

# Tiny sizes: hidden 32, heads 4 and 2 of 8 channels, 4 experts of 24, vocabulary 64.
Q, K, WIDTH = 32, 16, 24

_ATTENTION = {
    "input_layernorm.weight": "input_norm.weight",
    "self_attn.o_proj.weight": "self_attn.o_proj.weight",
    "self_attn.qkv_proj.q_proj.weight": "self_attn.qkv.linear_q.weight",
    "self_attn.qkv_proj.k_proj.weight": "self_attn.qkv.linear_k.weight",
    "self_attn.qkv_proj.v_proj_current.weight": "self_attn.qkv.val_proj1.weight",
    "self_attn.qkv_proj.v_proj_delayed.weight": "self_attn.qkv.val_proj2.weight",
    "self_attn.qkv_proj.conv_qk_depthwise.weight": "self_attn.qkv.conv_qk.0.weight",
    "self_attn.qkv_proj.conv_qk_depthwise.bias": "self_attn.qkv.conv_qk.0.bias",
    "self_attn.qkv_proj.conv_qk_grouped.weight": "self_attn.qkv.conv_qk.1.weight",
    "self_attn.qkv_proj.conv_qk_grouped.bias": "self_attn.qkv.conv_qk.1.bias",
    "self_attn.qk_norm.temp": "self_attn.qkv.temp",
}
_EXPERTS = {
    "post_attention_layernorm.weight": "input_norm.weight",
    "mlp.gate.down_proj.weight": "zaya_block.router.down_proj.weight",
    "mlp.gate.down_proj.bias": "zaya_block.router.down_proj.bias",
    "mlp.gate.router_states_scale": "zaya_block.router.router_states_scale",
    "mlp.gate.balancing_biases": "zaya_block.router.balancing_biases",
    "mlp.gate.router_mlp.norm.weight": "zaya_block.router.rmsnorm_eda.weight",
    "mlp.gate.router_mlp.fc1.weight": "zaya_block.router.router_mlp.0.weight",
    "mlp.gate.router_mlp.fc1.bias": "zaya_block.router.router_mlp.0.bias",
    "mlp.gate.router_mlp.fc2.weight": "zaya_block.router.router_mlp.2.weight",
    "mlp.gate.router_mlp.fc2.bias": "zaya_block.router.router_mlp.2.bias",
    "mlp.gate.router_mlp.out_proj.weight": "zaya_block.router.router_mlp.4.weight",
}


def original(tensors: Arrays, layers: int) -> Arrays:
    """The original layout, by hand: rename, shift the residual scales by one half-layer, unstack experts in numeric order."""
    found: Arrays = {}
    for key, value in tensors.items():
        if key in ("model.embed_tokens.weight", "lm_head.weight"):
            found[key] = value
        elif key == "model.norm.weight":
            found["model.final_norm.weight"] = value
        elif match := re.fullmatch(r"model\.input_(hidden_states_\w+)", key):
            found[f"model.layers.0.res_scale.{match[1]}"] = value
        elif match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", key):
            layer, rest = int(match[1]), match[2]
            if rest in _ATTENTION:
                found[f"model.layers.{2 * layer}.{_ATTENTION[rest]}"] = value
            elif rest in _EXPERTS:
                found[f"model.layers.{2 * layer + 1}.{_EXPERTS[rest]}"] = value
            elif rest.startswith("post_attention_residual_scale."):
                found[f"model.layers.{2 * layer + 1}.res_scale.{rest.split('.')[1]}"] = value
            elif rest.startswith("post_mlp_residual_scale."):
                home = f"model.layers.{2 * layer + 2}" if layer < layers - 1 else "model"
                found[f"{home}.res_scale.{rest.split('.')[1]}"] = value
            else:
                number = {"mlp.experts.gate_up_proj": 1, "mlp.experts.down_proj": 2}[rest]
                block = f"model.layers.{2 * layer + 1}.zaya_block.experts.local_experts"
                for expert in range(value.shape[0]):
                    found[f"{block}.{expert}.linear_fc{number}.weight"] = value[expert]
    return found


@pytest.fixture(scope="module")
def model() -> Model:
    return bound(tiny())


def test_original_layout_equals_the_table_by_hand(model: Model) -> None:
    """Transformers to hub, tensor by tensor, bit by bit."""
    tensors = tensors_of(tiny())

    found = to_family(model, "hub", to_canonical(model, "transformers", tensors))

    expected = original(tensors, layers=3)
    assert found.keys() == expected.keys()
    for key in expected:
        assert np.array_equal(found[key], expected[key]), key


@pytest.mark.parametrize("family", ["hub", "megatron", "megatron_grouped", "folded", "canonical"])
def test_there_and_back_is_the_identity(model: Model, family: str) -> None:
    """Any family's names give back every tensor of Transformers, bit for bit."""
    tensors = tensors_of(tiny())

    there = to_family(model, family, to_canonical(model, "transformers", tensors))
    back = to_family(model, "transformers", to_canonical(model, family, there))

    assert back.keys() == tensors.keys()
    assert all(np.array_equal(back[key], tensors[key]) for key in tensors)


def test_experts_stack_in_numeric_order() -> None:
    """Expert 10 comes after expert 9, not after expert 1, with twelve of them."""
    model = SCHEMA.bind(plain(config_of(num_experts=12)))
    canonical = numbered(model)

    hub = to_family(model, "hub", canonical)
    stack = to_family(model, "transformers", canonical)["model.layers.1.mlp.experts.gate_up_proj"]

    block = "model.layers.3.zaya_block.experts.local_experts"
    for expert in range(12):
        assert np.array_equal(stack[expert], hub[f"{block}.{expert}.linear_fc1.weight"])
    grouped = to_family(model, "megatron_grouped", canonical)
    assert np.array_equal(grouped["decoder.layers.3.mlp.experts.linear_fc1.weight10"], stack[10])


def test_tensor_parallel_two_cuts_heads_and_both_chunks_of_the_convolutions(model: Model) -> None:
    """Rank r has half of the query channels and half of the key channels of a convolution, not half of its rows."""
    tensors = tensors_of(tiny())
    canonical = to_canonical(model, "transformers", tensors)
    old = original(tensors, layers=3)
    at = "self_attn.qkv"

    for rank in range(2):
        held = on_rank(model, "megatron", "tp=2", rank, canonical)
        q = slice(rank * Q // 2, (rank + 1) * Q // 2)
        k = slice(Q + rank * K // 2, Q + (rank + 1) * K // 2)
        for layer in (0, 2, 4):
            ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.{at}"
            for conv in ("conv_qk.0.weight", "conv_qk.0.bias", "conv_qk.1.weight", "conv_qk.1.bias"):
                whole = old[f"{theirs}.{conv}"]
                assert np.array_equal(held[f"{ours}.qkv.{conv}"], np.concatenate([whole[q], whole[k]]))
            assert np.array_equal(held[f"{ours}.qkv.linear_q.weight"], old[f"{theirs}.linear_q.weight"][q])
            keys = slice(rank * K // 2, (rank + 1) * K // 2)
            assert np.array_equal(held[f"{ours}.qkv.linear_k.weight"], old[f"{theirs}.linear_k.weight"][keys])
            assert np.array_equal(held[f"{ours}.qkv.temp"], old[f"{theirs}.temp"][rank : rank + 1])
            for value in ("val_proj1.weight", "val_proj2.weight"):
                assert np.array_equal(held[f"{ours}.qkv.{value}"], old[f"{theirs}.{value}"])
            out = old[f"model.layers.{layer}.self_attn.o_proj.weight"]
            assert np.array_equal(held[f"{ours}.linear_proj.weight"], out[:, q])


def test_tensor_parallel_leaves_norms_scales_and_routers_whole(model: Model) -> None:
    """Every rank of a stage has all of what has no head, no expert and no vocabulary."""
    old = original(tensors_of(tiny()), layers=3)
    canonical = to_canonical(model, "transformers", tensors_of(tiny()))

    held = on_rank(model, "megatron", "tp=2,ep=2", 1, canonical)

    for name in ("rmsnorm_eda.weight", "balancing_biases", "router_mlp.4.weight", "router_states_scale"):
        assert np.array_equal(
            held[f"decoder.layers.3.mlp.router.{name}"], old[f"model.layers.3.zaya_block.router.{name}"]
        )
    assert np.array_equal(
        held["decoder.layers.3.res_scale.residual_bias"], old["model.layers.3.res_scale.residual_bias"]
    )
    assert np.array_equal(held["decoder.final_layernorm.weight"], old["model.final_norm.weight"])


def test_expert_parallel_deals_experts_in_runs_and_expert_tensor_parallel_cuts_gate_and_up(
    model: Model,
) -> None:
    """Rank k of ep=2 owns experts 2k and 2k+1 by their global numbers; etp=2 takes half of gate and half of up."""
    old = original(tensors_of(tiny()), layers=3)
    canonical = to_canonical(model, "transformers", tensors_of(tiny()))
    layout = Layout.parse("ep=2,etp=2,dp=4")

    for rank in range(4):
        held = on_rank(model, "megatron", str(layout), rank, canonical)
        ep, etp = int(layout.expert["ep"][rank]), int(layout.expert["etp"][rank])
        mine = {int(n) for key in held for n in re.findall(r"local_experts\.(\d+)\.", key)}
        assert mine == {2 * ep, 2 * ep + 1}
        half = slice(etp * WIDTH // 2, (etp + 1) * WIDTH // 2)
        for expert in mine:
            ours = f"decoder.layers.3.mlp.experts.local_experts.{expert}"
            theirs = f"model.layers.3.zaya_block.experts.local_experts.{expert}"
            fc1, fc2 = old[f"{theirs}.linear_fc1.weight"], old[f"{theirs}.linear_fc2.weight"]
            gate, up = fc1[:WIDTH][half], fc1[WIDTH:][half]
            assert np.array_equal(held[f"{ours}.linear_fc1.weight"], np.concatenate([gate, up]))
            assert np.array_equal(held[f"{ours}.linear_fc2.weight"], fc2[:, half])


def test_key_value_heads_repeat_above_their_number(model: Model) -> None:
    """With tp=4 and two key-value heads, neighbours share one: its rows, its convolution, its temperature."""
    canonical = to_canonical(model, "transformers", tensors_of(tiny()))
    old = original(tensors_of(tiny()), layers=3)
    conv = old["model.layers.0.self_attn.qkv.conv_qk.1.weight"]

    for rank in range(4):
        held = on_rank(model, "megatron", "tp=4", rank, canonical)
        head = rank // 2
        at = "decoder.layers.0.self_attention.qkv."
        keys = slice(head * 8, head * 8 + 8)
        assert np.array_equal(
            held[at + "linear_k.weight"], old["model.layers.0.self_attn.qkv.linear_k.weight"][keys]
        )
        assert np.array_equal(held[at + "temp"], old["model.layers.0.self_attn.qkv.temp"][head : head + 1])
        rows = np.concatenate([conv[rank * 8 : rank * 8 + 8], conv[Q + head * 8 : Q + head * 8 + 8]])
        assert np.array_equal(held[at + "conv_qk.1.weight"], rows)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp=8", "tp=8 does not divide axis head, which has 4"),
        ("tp=3", "tp=3 does not divide axis (head|kv_head)"),
        ("ep=8,dp=8", "ep=8 does not divide axis expert, which has 4"),
        ("etp=5,dp=5", "etp=5 does not divide axis expert_ffn, which has 24"),
        ("pp=2:2/2", "add up to 4, the model has 3 layers"),
    ],
)
def test_layouts_that_cannot_be_are_refused(model: Model, layout: str, message: str) -> None:
    """A degree that would cut a head, an expert or a layer names the axis, and what would fit."""
    with pytest.raises(LayoutError, match=message):
        list(model.names("megatron").placements(Layout.parse(layout)))


def test_padding_rows_are_zero_and_dropped_on_the_way_back(model: Model) -> None:
    """64 words over tp=2 are padded to 256 rows: the last rank holds padding only, and the way back drops it."""
    canonical = to_canonical(model, "transformers", tensors_of(tiny()))
    embedding = canonical["embed"]

    held = [on_rank(model, "megatron", "tp=2", rank, canonical) for rank in range(2)]

    first, second = (rank["embedding.word_embeddings.weight"] for rank in held)
    assert first.shape == second.shape == (128, 32)
    assert np.array_equal(first[:64], embedding) and not first[64:].any() and not second.any()


@pytest.mark.parametrize(
    "layout", ["tp=2,pp=2,ep=2,dp=2", "tp=4,pp=3", "pp=2:2/1,ep=4,etp=2,dp=8", "tp=2,cp=2,ep=4,pp=3"]
)
@pytest.mark.parametrize("family", ["megatron", "transformers", "canonical"])
def test_the_ranks_of_a_layout_hold_every_element(model: Model, layout: str, family: str) -> None:
    """Merged over ranks, the local tensors give the model back; replicas agree because they come from one place."""
    canonical = numbered(model)
    placements = list(model.names(family).placements(Layout.parse(layout)))

    values, times = scattered(((p.local, gathered(p.local, canonical)) for p in placements), model)

    assert all((count >= 1).all() for count in times.values())
    assert all(np.array_equal(values[name], canonical[name]) for name in canonical)
    held = {rank for p in placements for rank in p.ranks.tolist()}
    assert held == set(range(Layout.parse(layout).world))
