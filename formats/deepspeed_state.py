"""What a DeepSpeed checkpoint holds beside tensors: steps, optimizer groups, loss scaler, scheduler, the client's own state.

Steps and groups become canonical; everything else is kept as it is under `deepspeed` and written back. What DeepSpeed has no
place for goes in one text called `ckptkit` among the model states, where DeepSpeed takes it for state of the client.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.errors import FormatError, LayoutError
from ckptkit.formats.deepspeed_folder import StateFile
from ckptkit.formats.optimizer_groups import (
    DEFAULTS,
    canonical_groups,
    family_groups,
    kind_of,
    step_of,
    torch_fields,
)
from ckptkit.formats.plain import TensorValue, from_plain, own_json, scalar
from ckptkit.formats.standins import Global, Opaque

OURS = "ckptkit"
WEIGHTS = "ckptkit_weights"
VERSION = "0.19.8"
"""The version of DeepSpeed whose form is written."""

UNIVERSAL_INFO = "universal_checkpoint_info"
_TENSORS = (
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "global_steps", "ds_version", UNIVERSAL_INFO, OURS, WEIGHTS,
)  # fmt: skip
"""Fields of model states that describe this save, and are written anew."""

SCALER = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


def note_of(file: StateFile) -> dict[str, Any] | None:
    """What ckptkit noted, or None where another program wrote this."""
    text = file.value.get(OURS)
    if text is None:
        return None
    return own_json(text, f"the note {OURS!r} of {file.path}", file.path)


def layout_of(note: Mapping[str, Any], where: str) -> Layout | None:
    """The layout that a note tells."""
    if "layout" not in note:
        return None
    try:
        return Layout.parse(note["layout"])
    except LayoutError as error:
        raise FormatError(f"the note {OURS!r} of {where} has no layout: {error}", file=where) from None


def read_extras(
    model: StateFile,
    scaler: Mapping[str, Any] | None,
    groups: Sequence[tuple[Mapping[str, Any], Sequence[str]]],
    steps: Mapping[str, float],
    roles: Mapping[str, set[str]],
    bound: Mapping[str, LocalTensor],
    warnings: list[str],
) -> Extras:
    """Extras of a checkpoint, whoever wrote it.

    Args:
        model: The first rank's model states.
        scaler: Plain fields of the optimizer's state that belong to no tensor.
        groups: Plain hyper-parameters and names.
    """
    note = note_of(model)
    if note is not None:
        return Extras(note.get("common", {}), note.get("by_coordinate", {}), note.get("by_sample", []))
    found = Extras()
    step = model.value.get("global_steps")
    if type(step) is int:
        found.common["step"] = step
    if groups:
        simple = [
            ({name: _simple(v) for name, v in hyper.items() if name != "step"}, names)
            for hyper, names in groups
        ]
        told = {
            name: float(number)
            for hyper, names in groups
            if (number := scalar(hyper.get("step"))) is not None
            for name in names
        }
        found.common["groups"] = canonical_groups(simple, {**told, **steps}, roles, bound, warnings)
    kept: dict[str, Any] = {
        "model": {
            str(name): model.plain(value) for name, value in model.value.items() if name not in _TENSORS
        }
    }
    if scaler:
        kept["scaler"] = dict(scaler)
    found.common["deepspeed"] = kept
    return found


def _simple(value: Any) -> Any:
    """Tuples of hyper-parameters are lists in canonical groups, scalar tensors are numbers."""
    if isinstance(value, dict) and value.get("$") == "tuple":
        return [_simple(part) for part in value["v"]]
    number = scalar(value)
    return number if isinstance(value, dict) and number is not None else value


@dataclass
class Group:
    """One group of the optimizer to write: its fields, and the names and steps of what it trains."""

    fields: dict[str, Any]
    names: list[str]
    step: float | None


@dataclass
class State:
    """What extras come to.

    Attributes:
        model: Fields of the model states, without those that describe tensors.
        scaler: Fields of the optimizer's state.
        sub_group_size: Elements after which stage 3 begins another flat tensor.
        groups: Of what is trained.
    """

    model: dict[str, Any]
    scaler: dict[str, Any]
    sub_group_size: int
    groups: list[Group] = field(default_factory=list)


def write_extras(
    shards: Catalog, layout: Layout, trained: Mapping[str, tuple[LocalTensor, set[str]]]
) -> State:
    """What the extras of `shards` come to.

    Args:
        trained: Names with optimizer state: what they are, and their roles.

    Raises:
        LayoutError: parameters of one group have different steps, which DeepSpeed cannot hold.
    """
    extras = shards.extras
    kept = extras.common.get("deepspeed")
    kept = kept if isinstance(kept, dict) else {}
    step = extras.common.get("step")
    note = {
        "common": extras.common,
        "by_coordinate": extras.by_coordinate,
        "by_sample": extras.by_sample,
        "layout": str(layout),
    }
    model: dict[str, Any] = {
        "lr_scheduler": None, "data_sampler": None, "random_ltd": None, "skipped_steps": 0, "global_samples": 0,
        "ds_config": {}, **_fields(kept.get("model")),
    }  # fmt: skip
    model.update(
        global_steps=step if isinstance(step, int) else 0,
        ds_version=VERSION,
        dp_world_size=layout.cp * layout.dp,
        mp_world_size=layout.tp,
        checkpoint_parallel_dimensions={"pp_degree": 1, "tp_degree": layout.tp},
    )
    model[OURS] = json.dumps({k: v for k, v in note.items() if v or k == "common"}, sort_keys=True)
    if layout.tp == 1:
        # How parts of other ranks join is told by patterns of names, which need a TP of more than one.
        model[UNIVERSAL_INFO] = {"universal_checkpoint_version": 0.2}
    scaler = {
        "loss_scaler": Opaque(
            Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
            state={"cur_scale": 1.0, "dynamic": False},
            new=True,
        ),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 0.0,
        **_fields(kept.get("scaler")),
    }
    return State(model, scaler, _sub_group_size(model["ds_config"]), list(_groups(shards, trained)))


def _fields(value: Any) -> dict[str, Any]:
    found = from_plain(value if isinstance(value, dict) else {})
    return found if isinstance(found, dict) else {}


def _sub_group_size(config: Any) -> int:
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    size = zero.get("sub_group_size") if isinstance(zero, dict) else None
    return int(size) if isinstance(size, int | float) and size >= 1 else 1_000_000_000


def _groups(shards: Catalog, trained: Mapping[str, tuple[LocalTensor, set[str]]]) -> Iterable[Group]:
    """The source's groups, and one for each kind of what they do not list; each has state of one kind."""
    listed = family_groups(shards.extras.common.get("groups") or (), [item for item, _ in trained.values()])
    taken = {name for _, names in listed for name in names}
    rest: dict[str, list[str]] = {}
    for name, (_, roles) in trained.items():
        if name not in taken:
            rest.setdefault(kind_of({}, roles), []).append(name)
    for kind, names in rest.items():
        listed.append(({"kind": kind, "step": shards.extras.common.get("step"), **DEFAULTS[kind]}, names))
    for group, names in listed:
        # One flat tensor for each slot: parameters with other slots cannot lie in it.
        alike: dict[frozenset[str], list[str]] = {}
        for name in names:
            alike.setdefault(frozenset(trained[name][1] | {"master"}), []).append(name)
        for members in alike.values():
            steps = {step_of(group, trained[name][0]) for name in members}
            if len(steps) > 1:
                raise LayoutError(
                    f"{members[0]} and others of its optimizer group are at steps {sorted(map(str, steps))}; DeepSpeed keeps one "
                    "step a group. Leave the optimizer behind (--drop-optimizer)",
                    tensor=members[0],
                )
            fields = {name: from_plain(value) for name, value in torch_fields(group).items()}
            if fields.get("moe"):
                fields["name"] = "ep_size_1"  # every rank has all experts
            yield Group(fields, members, steps.pop())


def step_value(step: float | None) -> TensorValue:
    """A step as torch's optimizers keep it."""
    try:
        return TensorValue(BY_NAME["float32"], (), struct.pack("<f", step or 0.0))
    except OverflowError:
        raise LayoutError(f"step {step} is no float32") from None
