"""Which family a checkpoint's names belong to, and names that mean nothing."""

from collections.abc import Callable, Iterable

import pytest

from ckptkit.core.schema import Model
from ckptkit.errors import FormatError
from ckptkit.models import find, named, schemas
from ckptkit.models.zaya import SCHEMA
from tests.models.zaya_model import config_of, plain

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "zaya": plain(config_of()),
    "llama": {**_SMALL, "model_type": "llama"},
    "mixtral": {**_SMALL, "model_type": "mixtral", "num_local_experts": 4},
    "qwen_moe": {**_SMALL, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 12},
}


@pytest.fixture(scope="module")
def model() -> Model:
    return SCHEMA.bind(plain(config_of()))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_recognised_by_its_names(name: str) -> None:
    """Whole checkpoints, of every model and family."""
    schema = find(CONFIGS[name])
    assert schema is named(name) is schemas()[name]
    model = schema.bind(CONFIGS[name])

    for family in schema.families:
        assert model.family_of(model.names(family.name).whole) == family.name


def test_a_missing_or_unknown_name_does_not_hide_the_family(model: Model) -> None:
    """Whether a checkpoint is whole is not decided here."""
    keys = [*model.names("hub").whole][:-20]

    assert model.family_of([*keys, "model.layers.1.zaya_block.experts.weight_scale"]) == "hub"


def test_rotary_buffers_and_kernel_states_are_harmless(model: Model) -> None:
    """Names that libraries make anew; a weight is not one of them."""
    harmless = ["model.rotary_emb.hybrid_inv_freq", "model.rotary_emb.hybrid_sliding_original_inv_freq"]
    harmless += ["decoder.layers.0.self_attention.linear_proj._extra_state"]

    assert all(model.schema.is_harmless(key) for key in harmless)
    assert not any(model.schema.is_harmless(k) for f in model.families for k in model.names(f).keys)
    assert model.family_of([*harmless, *model.names("transformers").whole]) == "transformers"
    llama = find(CONFIGS["llama"])
    assert llama is not None
    assert llama.is_harmless("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not llama.is_harmless("model.layers.0.self_attn.q_proj.weight")


def _hub_and_more(model: Model) -> Iterable[str]:
    return [*model.names("hub").whole, "model.layers.0.mlp.experts.gate_up_proj"]


def _shared_names(model: Model) -> Iterable[str]:
    """One name of two families, for different tensors: they number half-layers and layers."""
    return ["model.layers.1.input_norm.weight"]


def _with_prefix(model: Model) -> Iterable[str]:
    return [f"module.{key}" for key in model.names("hub").whole]


def _without_prefix(model: Model) -> Iterable[str]:
    return [key.removeprefix("model.") for key in model.names("transformers").whole]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (_hub_and_more, "mixes names of two families of zaya@1: hub .* and transformers"),
        (_shared_names, "its names are (folded|hub) as much as .* names of zaya@1 .*too little to tell"),
        (_with_prefix, "without the prefix 'module.' they are names of hub"),
        (_without_prefix, "with the prefix 'model.' they would be names of transformers"),
        (lambda model: ["h.0.attn.c_attn.weight"], r"none of its 1 tensors has a name of zaya@1 \(h.0.attn"),
        (lambda model: [], "none of its 0 tensors"),
    ],
)
def test_names_that_say_nothing_certain_are_refused(
    model: Model, keys: Callable[[Model], Iterable[str]], message: str
) -> None:
    """The error names both families, or the prefix that would explain the names."""
    with pytest.raises(FormatError, match=message):
        model.family_of(keys(model), "run/step-3")


def test_unknown_model_types_have_no_schema() -> None:
    """A configuration of another model is not taken for one of ours."""
    assert find({"model_type": "gpt_neox"}) is None and find({}) is None


def test_names_that_several_families_mean_alike_are_taken(model: Model) -> None:
    """It does not matter then which of them it is."""
    found = model.family_of(["model.embed_tokens.weight"])

    assert "model.embed_tokens.weight" in model.names(found).whole
