"""Keys of training states: what each means, under the prefixes that trainers use."""

import pytest

from ckptkit.core.boxes import Box
from ckptkit.core.local import LocalTensor, Segment
from ckptkit.errors import LayoutError
from ckptkit.formats.chunks import plain_local
from ckptkit.formats.optimizer_groups import (
    canonical_groups,
    family_groups,
    kind_of,
    merge_flat,
    step_of,
    torch_fields,
)
from ckptkit.formats.stored_keys import Keys, sort_keys

NAMES = ["model.layers.0.w", "state.x", "lm_head.weight"]


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("model.", "optimizer."),
        ("", "optimizer."),
        ("", ""),
        ("app.model.", "app.optim."),
        ("state_dict.", "optimizer_state.0."),
        ("module.", "optimizers."),
    ],
)
def test_every_prefix_is_told_from_the_names(model: str, optimizer: str) -> None:
    """Names of the optimizer's state are those of weights, whatever stands before either, and whatever dots they have."""
    tensors = [f"{model}{name}" for name in NAMES]
    tensors += [
        f"{optimizer}state.{name}.{slot}" for name in NAMES for slot in ("exp_avg", "exp_avg_sq", "step")
    ]
    objects = [f"{optimizer}param_groups.0.{field}" for field in ("lr", "params")]

    found = sort_keys(tensors, [*objects, "lr_scheduler.last_epoch"], {})

    assert found.weights == {name: model + name for name in NAMES}
    assert set(found.state) == {(name, role) for name in NAMES for role in ("exp_avg", "exp_avg_sq")}
    assert set(found.steps) == set(NAMES)
    assert found.groups == {"0": {field: f"{optimizer}param_groups.0.{field}" for field in ("lr", "params")}}
    assert found.other == ["lr_scheduler.last_epoch"]
    assert (found.model_prefix, found.optimizer_prefix) == (model, optimizer)


def test_groups_of_parameters_have_their_names() -> None:
    """The flattened form has one group a parameter, whose name has dots and may begin with a number."""
    found = sort_keys(
        [], ["optimizer.param_groups.0.weight.lr", "optimizer.param_groups.layers.1.bias.lr"], {}
    )

    assert set(found.groups) == {"0.weight", "layers.1.bias"}


def test_nesting_tells_a_prefix_from_a_name() -> None:
    """`model.w` is the weight `w` of `model`, or a weight called `model.w`: the recorded path says which."""
    nested = sort_keys(["model.w"], [], {"model.w": ("model", "w")})
    flat = sort_keys(["model.w"], [], {"model.w": ("model.w",)})

    assert nested.weights == {"w": "model.w"} and flat.weights == {"model.w": "model.w"}


def test_a_known_model_tells_its_prefix() -> None:
    """Names of the model's family win over what nothing else can tell."""
    found = sort_keys(["model.model.w"], [], {}, known={"model.w"})

    assert found.weights == {"model.w": "model.model.w"}


def test_wrappers_are_no_part_of_a_name() -> None:
    """Compiled, checkpointed and FSDP-wrapped modules have the names of what they wrap."""
    assert Keys().clean("_orig_mod.a._fsdp_wrapped_module.b._checkpoint_wrapped_module.c") == "a.b.c"
    assert Keys().clean("not_orig_mod.x") == "not_orig_mod.x"


def test_state_of_trainers_is_no_weight() -> None:
    """torchtitan keeps counters as tensors beside weights."""
    found = sort_keys(["train_state.step", "w"], ["dataloader.dp_rank_0"], {})

    assert set(found.weights) == {"w"} and found.other == ["train_state.step", "dataloader.dp_rank_0"]


@pytest.mark.parametrize(
    ("hyper", "roles", "kind"),
    [
        ({"betas": [0.9, 0.99]}, {"exp_avg", "exp_avg_sq"}, "adamw"),
        ({"momentum": 0.9, "dampening": 0}, {"momentum"}, "sgd"),
        ({"momentum": 0.95, "ns_steps": 5}, {"momentum"}, "muon"),
        ({"lr": 1.0}, {"momentum"}, "muon"),
        ({"lr": 1.0}, set(), "adamw"),
    ],
)
def test_kinds_are_told_by_state_and_fields(hyper: dict[str, object], roles: set[str], kind: str) -> None:
    """A group says what it is by what it keeps."""
    assert kind_of(hyper, roles) == kind


def test_steps_that_differ_in_a_group_are_kept_apart() -> None:
    """A parameter that was frozen for a while has a step of its own, and keeps it."""
    locals_ = {name: plain_local(name, (2,)) for name in "ab"}
    [group] = canonical_groups(
        [({"lr": 0.1}, ["a", "b"])], {"a": 5.0, "b": 3.0}, {"a": {"exp_avg"}}, locals_, []
    )

    assert (group["step"], group["steps"], group["tensors"]) == (5, {"b": 3}, ["a", "b"])
    assert [step_of(group, locals_[name]) for name in "ab"] == [5.0, 3.0]


def test_equal_groups_of_parameters_are_one() -> None:
    """Flattened groups with the same fields were one group of the trainer."""
    fields = {"lr": 0.1, "weight_decay": 0.0}

    found = merge_flat({"a": fields, "b": {**fields, "weight_decay": 0.1}, "c": dict(fields)})

    assert found == [(fields, ["a", "c"]), ({**fields, "weight_decay": 0.1}, ["b"])]


def test_a_fused_name_of_two_groups_is_refused() -> None:
    """One parameter of a family cannot be in two groups of an optimizer."""
    box = Box((0,), (2,))
    fused = LocalTensor(
        "qk", (4,), (Segment("q", box, (0,), (1,), (0,)), Segment("k", box, (0,), (1,), (2,)))
    )

    with pytest.raises(LayoutError, match="joins parameters of 2 optimizer groups"):
        family_groups([{"tensors": ["q"]}, {"tensors": ["k"]}], [fused])


def test_fields_that_are_absent_become_torchs_defaults() -> None:
    """A loader asks for every field of its optimizer; pairs are tuples there."""
    fields = torch_fields({"kind": "adamw", "lr": 0.5, "betas": [0.8, 0.9], "tensors": ["a"], "step": 3})

    assert fields["lr"] == 0.5 and fields["betas"] == (0.8, 0.9) and fields["amsgrad"] is False
    assert not {"kind", "tensors", "step"} & fields.keys()
