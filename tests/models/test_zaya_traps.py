"""Known ways to convert ZAYA1 wrongly: each loads without an error and gives other logits, and our schema does none."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import ZayaForCausalLM

from ckptkit.core.schema import Family, Name, Schema
from ckptkit.models.zaya import SCHEMA
from tests.models.arrays import Arrays, on_rank, scattered, to_canonical, to_family
from tests.models.zaya_model import (
    TOKENS,
    bound,
    config_of,
    logits_with,
    plain,
    random_model,
    tensors_of,
    tiny,
)


@cache
def right_logits() -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = tiny()(TOKENS).logits.numpy()
    return found


def mutated(family: str, change: Callable[[Name], Name]) -> Schema:
    """The schema with some lines of one family changed."""

    def changed(known: Family) -> Family:
        if known.name != family:
            return known
        first, layer, last = (tuple(map(change, lines)) for lines in (known.first, known.layer, known.last))
        return replace(known, first=first, layer=layer, last=last)

    return replace(SCHEMA, families=tuple(map(changed, SCHEMA.families)))


def read_original(schema: Schema) -> Arrays:
    """The tiny model's original files, as `schema` reads them into Transformers' names; what it misses stays as it was."""
    model = schema.bind(plain(tiny().config))
    files = to_family(bound(tiny()), "hub", to_canonical(bound(tiny()), "transformers", tensors_of(tiny())))
    names = model.names("hub").unpadded()
    values, times = scattered(((names[key], files[key]) for key in names if key in files), model)
    fresh = to_canonical(model, "transformers", tensors_of(ZayaForCausalLM(config_of())))
    merged = {name: np.where(times[name] > 0, values[name], fresh[name]) for name in values}
    return to_family(model, "transformers", merged)


def test_the_schema_as_it_is_gives_the_same_logits() -> None:
    """Through the original names and back: bit for bit the same model."""
    logits = logits_with(config_of(), read_original(SCHEMA))

    assert np.array_equal(logits, right_logits())


def _swap_values(line: Name) -> Name:
    swapped = line.key.replace("val_proj1", "#").replace("val_proj2", "val_proj1").replace("#", "val_proj2")
    return replace(line, key=swapped)


def _scales_one_layer_late(line: Name) -> Name:
    return replace(line, view=line.view.replace("layers.{i-1}.moe.merge", "layers.{i}.moe.merge"))


def _scales_one_half_layer_late(line: Name) -> Name:
    if "merge." not in line.view:
        return line
    view = line.view.replace("{i}.attn.merge", "#").replace("{i-1}.moe.merge", "{i-1}.attn.merge")
    return replace(
        line, view=view.replace("{last}.moe.merge", "{last}.attn.merge").replace("#", "{i}.moe.merge")
    )


def _bias_as_scale(line: Name) -> Name:
    swapped = line.key.replace("states_scale", "#").replace("states_bias", "states_scale")
    return replace(line, key=swapped.replace("#", "states_bias")) if ".res_scale." in line.key else line


def _up_before_gate(line: Name) -> Name:
    if "linear_fc1" not in line.key:
        return line
    return replace(line, view=line.view.replace("(gate_up expert_ffn)", "(expert_ffn gate_up)"))


def _norms_of_the_other_half(line: Name) -> Name:
    halves = {"layers.{i}.attn.norm: hidden": "layers.{i}.moe.norm: hidden"}
    halves |= {there: here for here, there in halves.items()}
    return replace(line, view=halves.get(line.view, line.view))


def _key_channels_first(line: Name) -> Name:
    if "conv_qk" not in line.key:
        return line
    inside, _, rest = line.view.removeprefix("[").partition("]")
    q, k = inside.split(" | ")
    return replace(line, view=f"[{k} | {q}]{rest}")


def _transposed_router(line: Name) -> Name:
    view = line.view.replace("fc1: router_inner router_hidden", "fc1: router_hidden router_inner")
    return replace(line, view=view)


@pytest.mark.parametrize(
    "change",
    [
        _swap_values,
        _scales_one_layer_late,
        _scales_one_half_layer_late,
        _bias_as_scale,
        _up_before_gate,
        _norms_of_the_other_half,
        _key_channels_first,
        _transposed_router,
    ],
    ids=lambda change: change.__name__.strip("_"),
)
def test_a_trapped_schema_loads_and_gives_other_logits(change: Callable[[Name], Name]) -> None:
    """Each of these passes every check of names and shapes; only values tell."""
    schema = mutated("hub", change)
    assert schema != SCHEMA

    logits = logits_with(config_of(), read_original(schema))

    assert np.isfinite(logits).all()
    assert np.abs(logits - right_logits()).max() > 1e-3


def merged_plainly(layout: str, key: str) -> np.ndarray:
    """The parts of a Megatron tensor, concatenated rank by rank as if its rows were cut in one piece."""
    model = bound(tiny())
    canonical = to_canonical(model, "transformers", tensors_of(tiny()))
    return np.concatenate([on_rank(model, "megatron", layout, rank, canonical)[key] for rank in range(2)])


@pytest.mark.parametrize(
    ("layout", "theirs", "ours"),
    [
        ("tp=2", "self_attention.qkv.conv_qk.0.weight", "self_attn.qkv_proj.conv_qk_depthwise.weight"),
        ("tp=2", "self_attention.qkv.conv_qk.0.bias", "self_attn.qkv_proj.conv_qk_depthwise.bias"),
        ("tp=2", "self_attention.qkv.conv_qk.1.weight", "self_attn.qkv_proj.conv_qk_grouped.weight"),
        ("tp=2", "self_attention.qkv.conv_qk.1.bias", "self_attn.qkv_proj.conv_qk_grouped.bias"),
    ],
)
def test_convolutions_merged_in_one_piece_give_other_logits(layout: str, theirs: str, ours: str) -> None:
    """The shape is right, the channels are not: query and key parts interleave."""
    tensors = tensors_of(tiny())

    tensors[f"model.layers.1.{ours}"] = merged_plainly(layout, f"decoder.layers.2.{theirs}")

    assert np.abs(logits_with(config_of(), tensors) - right_logits()).max() > 1e-4


def test_experts_merged_in_one_piece_give_other_logits() -> None:
    """Gate and up are cut each on their own: plain concatenation puts half of up between the halves of gate."""
    tensors = tensors_of(tiny())

    for expert in range(4):
        key = f"decoder.layers.3.mlp.experts.local_experts.{expert}.linear_fc1.weight"
        tensors["model.layers.1.mlp.experts.gate_up_proj"][expert] = merged_plainly("etp=2,dp=2", key)

    assert np.abs(logits_with(config_of(), tensors) - right_logits()).max() > 1e-3


def test_experts_stacked_by_sorted_names_give_other_logits() -> None:
    """Sorted as text, local_experts.10 comes before local_experts.2."""
    model = random_model(config_of(num_experts=12))
    schema = bound(model)
    hub = to_family(schema, "hub", to_canonical(schema, "transformers", tensors_of(model)))
    tensors = tensors_of(model)
    for layer in range(3):
        for number, name in ((1, "gate_up_proj"), (2, "down_proj")):
            block = f"model.layers.{2 * layer + 1}.zaya_block.experts.local_experts."
            keys = sorted(key for key in hub if key.startswith(block) and f"fc{number}" in key)
            tensors[f"model.layers.{layer}.mlp.experts.{name}"] = np.stack([hub[key] for key in keys])

    wrong = logits_with(model.config, tensors)

    right = logits_with(model.config, to_family(schema, "transformers", to_canonical(schema, "hub", hub)))
    with torch.no_grad():
        assert np.array_equal(right, model(TOKENS).logits.numpy())
    assert np.abs(wrong - right).max() > 1e-3


def test_balancing_biases_in_bfloat16_choose_other_experts() -> None:
    """Biases around 6.8 that differ by thousandths collapse in bfloat16; the schema keeps this tensor in float32."""
    model = random_model(config_of())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.balancing_biases.copy_(6.8 + 0.02 * torch.arange(5).float() % 0.03)
    tensors = tensors_of(model)
    rounded = {
        key: torch.from_numpy(value).bfloat16().float().numpy() if "balancing" in key else value
        for key, value in tensors.items()
    }

    right, wrong = logits_with(model.config, tensors), logits_with(model.config, rounded)

    assert np.abs(right - wrong).max() > 1e-3
    assert all(t.keep_fp32 for t in bound(model).tensors.values() if "balancing" in t.name)


def test_tokens_do_skip_their_experts() -> None:
    """The class that skips is chosen for some tokens of the tiny model and not for others, so that tests see both."""
    model = random_model(config_of())
    weights: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda module, inputs: weights.append(inputs[2]))

    with torch.no_grad():
        logits = model(TOKENS).logits.numpy()

    skipped = int((torch.cat(weights) == 0).sum())
    assert np.array_equal(logits, right_logits())
    assert 10 < skipped < torch.cat(weights).numel() - 10
