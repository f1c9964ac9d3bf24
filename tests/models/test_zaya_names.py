"""ZAYA1's names: all of them, in Transformers' order, with its shapes; who owns what under pipeline stages."""

import re
from math import prod

import numpy as np
import pytest
import torch
from transformers import ZayaConfig, ZayaForCausalLM

from ckptkit.core.layouts import Layout
from ckptkit.core.schema import Model
from ckptkit.models.zaya import SCHEMA
from tests.models.arrays import numbered, on_rank, scattered, to_family
from tests.models.zaya_model import bound, config_of, plain, tensors_of, tiny


@pytest.fixture(scope="module")
def full() -> Model:
    """The 8.3B model, by its published configuration."""
    return SCHEMA.bind(plain(ZayaConfig()))


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False}, {"attention_bias": True, "lm_head_bias": True}, {"cca_time0": 3}],
    ids=["tied", "untied", "biases", "kernel 3"],
)
def test_names_order_and_shapes_are_those_of_state_dict(changes: dict) -> None:
    """Whatever the configuration switches on, names are the module's, in the module's order."""
    model = ZayaForCausalLM(config_of(**changes))

    names = bound(model).names("transformers").unpadded()

    expected = {key: value.shape for key, value in tensors_of(model).items()}
    assert [(key, local.shape) for key, local in names.items()] == list(expected.items())


def test_full_size_names_and_shapes_are_those_of_transformers(full: Model) -> None:
    """The same at 8.3B, where layers and experts have two digits."""
    with torch.device("meta"):
        state = ZayaForCausalLM(ZayaConfig()).state_dict()
    del state["lm_head.weight"]

    names = full.names("transformers").unpadded()

    assert {key: local.shape for key, local in names.items()} == {k: tuple(v.shape) for k, v in state.items()}


def test_full_size_counts(full: Model) -> None:
    """The published totals: 8.84 B parameters, of which 8.30 B are no embedding; 1283 and 2483 tensors."""
    params = {t.name: prod(t.shape) for t in full.tensors.values() if t.kind == "param"}
    buffers = [t for t in full.tensors.values() if t.kind == "buffer"]

    assert sum(params.values()) == 8_840_488_784
    assert sum(params.values()) - params["embed"] == 8_303_355_728
    assert sum(n for name, n in params.items() if ".experts." in name) == 8_053_063_680
    assert sum(n for name, n in params.items() if ".router." in name) == 26_439_424
    assert [b.shape for b in buffers] == [(17,)] * 40
    counts = {family: len(full.names(family).whole) for family in full.families}
    assert counts["transformers"] == counts["folded"] == 1283
    assert counts["hub"] == counts["megatron"] == counts["megatron_grouped"] == 2483


def test_optimizer_groups_at_full_size(full: Model) -> None:
    """Muon takes the matrices (each expert is one), AdamW the embedding, convolutions and vectors, nobody the buffers."""
    by_kind: dict[str, list] = {"muon": [], "adamw": [], "none": []}
    for tensor in full.tensors.values():
        by_kind[tensor.optimizer].append(tensor)

    matrices = sum(tensor.shape[0] if tensor.is_expert else 1 for tensor in by_kind["muon"])

    assert sum(prod(t.shape) for t in by_kind["muon"]) == 8_289_167_360
    assert matrices == 1_640
    assert sum(prod(t.shape) for t in by_kind["adamw"]) == 551_321_424
    assert {t.kind for t in by_kind["none"]} == {"buffer"}
    decayed = {re.sub(r"\d+", "N", t.name, count=1) for t in by_kind["adamw"] if t.decay}
    assert decayed == {"embed", *(f"layers.N.attn.conv{n}_{part}" for n in (0, 1) for part in "qk")}


def test_balancing_biases_alone_stay_float32(full: Model) -> None:
    """bfloat16 is too coarse for small updates of the balancing biases; everything else may be cast."""
    kept = [tensor.name for tensor in full.tensors.values() if tensor.keep_fp32]

    assert kept == [f"layers.{i}.router.balancing" for i in range(40)]


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "attention_bias": True}])
def test_every_family_holds_every_element_once(changes: dict) -> None:
    """The names of a family, unsharded, tile the canonical tensors: nothing twice, nothing left out."""
    model = SCHEMA.bind(plain(config_of(**changes)))
    canonical = numbered(model)

    for family in model.families:
        whole = model.names(family).unpadded()
        arrays = to_family(model, family, canonical)
        values, times = scattered(((whole[key], arrays[key]) for key in whole), model)

        assert all((count == 1).all() for count in times.values()), family
        assert all((values[name] == canonical[name]).all() for name in canonical), family


def test_router_state_scale_is_absent_in_the_first_layer_only() -> None:
    """The first layer has no earlier router state; a later stage's first layer has."""
    model = bound(tiny())

    found = [key for key in model.names("hub").keys if key.endswith("router_states_scale")]
    second_stage = on_rank(model, "megatron", "pp=3", 1, numbered(model))

    assert sorted(found) == [f"model.layers.{n}.zaya_block.router.router_states_scale" for n in (3, 5)]
    assert "decoder.layers.3.mlp.router.router_states_scale" in second_stage


def test_residual_scales_change_their_stage_with_the_names() -> None:
    """Transformers keeps the scales after the experts with their layer; the half-layer that reads them has them elsewhere."""
    model = bound(tiny())
    canonical = numbered(model)

    ours = [on_rank(model, "transformers", "pp=3", stage, canonical) for stage in range(3)]
    theirs = [on_rank(model, "megatron", "pp=3", stage, canonical) for stage in range(3)]

    for part in ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias"):
        for layer in range(2):
            made = ours[layer][f"model.layers.{layer}.post_mlp_residual_scale.{part}"]
            read = theirs[layer + 1][f"decoder.layers.{2 * layer + 2}.res_scale.{part}"]
            assert np.array_equal(made, read)
        assert np.array_equal(
            ours[2][f"model.layers.2.post_mlp_residual_scale.{part}"], theirs[2][f"decoder.res_scale.{part}"]
        )
    assert np.array_equal(
        ours[0]["model.input_hidden_states_scale"],
        theirs[0]["decoder.layers.0.res_scale.hidden_states_scale"],
    )
    assert "decoder.layers.0.res_scale.residual_scale" not in theirs[0]


def test_layers_split_over_uneven_stages_in_pairs_of_half_layers() -> None:
    """Both half-layers of a layer live on its stage; embedding first, final norm last."""
    model = bound(tiny())
    canonical = numbered(model)

    first, second = (on_rank(model, "megatron", "pp=2:1/2", stage, canonical) for stage in range(2))

    layers = [
        {int(n) for key in held for n in re.findall(r"layers\.(\d+)\.", key)} for held in (first, second)
    ]
    assert layers == [{0, 1}, {2, 3, 4, 5}]
    assert "embedding.word_embeddings.weight" in first and "decoder.final_layernorm.weight" in second


def test_tied_head_is_a_copy_on_the_last_stage_only() -> None:
    """One stage shares the embedding; several keep a copy, which readers accept anywhere."""
    model = bound(tiny())
    canonical = numbered(model)

    alone = on_rank(model, "megatron", "pp=1", 0, canonical)
    first, last = (on_rank(model, "megatron", "pp=2", stage, canonical) for stage in range(2))

    assert "output_layer.weight" not in alone | first
    assert np.array_equal(last["output_layer.weight"], first["embedding.word_embeddings.weight"])
    assert set(model.names("megatron").copies) == {"output_layer.weight"}
    assert set(model.names("transformers").copies) == {"lm_head.weight"}


def test_untied_head_is_a_tensor_of_its_own() -> None:
    """Without tying, the head is on the last stage with its own values, and there are no copies."""
    model = SCHEMA.bind(plain(config_of(tie_word_embeddings=False)))
    canonical = numbered(model)

    last = on_rank(model, "megatron", "pp=2", 1, canonical)

    assert np.array_equal(last["output_layer.weight"][:64], canonical["lm_head"])
    assert model.names("megatron").copies == {}


@pytest.mark.parametrize(("tp", "rows"), [(1, 262272), (2, 262400), (4, 262656), (8, 263168)])
def test_vocabulary_is_padded_to_128_rows_a_rank(full: Model, tp: int, rows: int) -> None:
    """As Megatron-LM pads: to a multiple of 128 times the tensor-parallel degree; the hub's rows stay as they are."""
    shapes = [
        p.local.shape
        for p in full.names("megatron").placements(Layout(tp=tp))
        if p.local.key == "embedding.word_embeddings.weight"
    ]

    assert shapes == [(rows // tp, 2048)] * tp
    assert full.names("hub").unpadded()["model.embed_tokens.weight"].shape == (262272, 2048)
