"""What a distributed checkpoint holds beside weights and moments: steps, groups, and the trainer's own objects.

Read into extras and written back under the same keys. Optimizer groups and the step become canonical; `dataloader.dp_rank_<n>`
becomes loader state by sample; every other object is kept as it is. What torch has no place for (states by coordinate, the
layout) travels in one object called `ckptkit`, a JSON text, which trainers do not look at.
"""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.errors import LayoutError
from ckptkit.formats.dcp_metadata import Index, Item
from ckptkit.formats.optimizer_groups import (
    canonical_groups,
    family_groups,
    merge_flat,
    step_of,
    torch_fields,
)
from ckptkit.formats.peft_names import in_file, spell
from ckptkit.formats.plain import TensorValue, from_plain, own_json, scalar
from ckptkit.formats.stored_keys import Keys

OURS = "ckptkit"
KEYS = "torch_keys"
"""Common extra: how a trainer names its state (`Convention`). No state itself."""
OBJECTS = "torch_objects"
"""Common extra: every other object, as `[key, path, value]`."""
_LOADER = re.compile(r"dataloader\.dp_rank_(\d+)")
_STEPS = ("step", "train_state.step", "iteration", "global_step")
Path = tuple[str | int, ...]


@dataclass
class Convention:
    """How a trainer names its state; kept, so that what came from it can be written for it again.

    Attributes:
        model_prefix, optimizer_prefix: What keys begin with.
        flat: Whether optimizer groups are by parameter.
        wrapped, adapter: Whether peft wraps the model, and its adapter's name (in memory; none in its files).
    """

    model_prefix: str = "model."
    optimizer_prefix: str = "optimizer."
    flat: bool = False
    wrapped: bool = False
    adapter: str = ""

    def __post_init__(self) -> None:
        self._spelled: Mapping[str, str] = {}

    def plain(self) -> dict[str, Any]:
        """The fields, as JSON."""
        return {
            f: getattr(self, f) for f in ("model_prefix", "optimizer_prefix", "flat", "wrapped", "adapter")
        }

    def spell(self, shards: Catalog) -> None:
        """Learn how the names in `shards` are spelled where peft wraps the model."""
        if self.wrapped:
            names = [item.key for item in shards.locals]
            whole = shards.model.names(shards.names).keys if shards.model is not None else ()
            spelled = spell(names, self.adapter, whole) if self.adapter else in_file(names, whole)
            self._spelled = spelled

    def weight(self, name: str) -> tuple[str, Path]:
        """Key and path of a weight."""
        name = self._spelled.get(name, name)
        return self.model_prefix + name, (*_parts(self.model_prefix), name)

    def state(self, name: str, slot: str) -> tuple[str, Path]:
        name = self._spelled.get(name, name)
        key = f"state.{name}.{slot}"
        parts: Path = (key,) if self.flat else ("state", name, slot)
        return self.optimizer_prefix + key, (*_parts(self.optimizer_prefix), *parts)

    def members(self, names: Sequence[str]) -> list[str]:
        """The list of an optimizer group's parameters."""
        return [self._spelled.get(name, name) for name in names]

    def group(self, which: int | str, name: str) -> tuple[str, Path]:
        which = self._spelled.get(which, which) if isinstance(which, str) else which
        key = f"param_groups.{which}.{name}"
        parts: Path = (key,) if self.flat else ("param_groups", which, name)
        return self.optimizer_prefix + key, (*_parts(self.optimizer_prefix), *parts)


def _parts(prefix: str) -> Path:
    return tuple(prefix.removesuffix(".").split(".")) if prefix else ()


@dataclass(frozen=True)
class Origin:
    """How a checkpoint of ours was written: its layout, and the facts that go with it (`partial`, lineage, epoch)."""

    layout: Layout | None
    facts: dict[str, Any]


@dataclass
class State:
    """What extras come to in a distributed checkpoint: `(key, path, value)` of objects, and of scalar tensors."""

    convention: Convention
    objects: list[tuple[str, Path, Any]] = field(default_factory=list)
    scalars: list[tuple[str, Path, TensorValue]] = field(default_factory=list)


def wanted_objects(index: Index, keys: Keys, warnings: list[str]) -> dict[str, Item]:
    """Where everything lies that is neither weight nor moment: objects, and tensors in one chunk."""
    wanted: dict[str, Item] = {}
    for key in keys.extras:
        item = index.objects.get(key)
        if item is None:
            chunks = [chunk for chunk in index.tensors[key].chunks if chunk.item is not None]
            if len(chunks) != 1 or chunks[0].sizes != index.tensors[key].shape:
                warnings.append(
                    f"{key!r} is a tensor in {len(chunks)} chunks that belongs to no parameter; it was left out"
                )
                continue
            item = chunks[0].item
        if item is not None:
            wanted[key] = item
    return wanted


def read_extras(
    values: dict[str, Any],
    paths: Mapping[str, Path],
    keys: Keys,
    locals_: Mapping[str, LocalTensor],
    warnings: list[str],
) -> tuple[Extras, Origin]:
    """Extras of a training state, and what is known of how it was written where it was one of ours.

    Args:
        values: Plain values (`ckptkit.formats.plain`) of `keys.extras`. Taken over.
        paths: Where keys came from in the nested state.
        locals_: Stored names of the family, in the order of the model.
    """
    ours = _own(values.pop(OURS, None))
    groups = _groups(keys, values, locals_, warnings)
    found = Extras(common=ours.get("common", {}), by_coordinate=ours.get("by_coordinate", {}))
    found.by_sample = ours.get("by_sample", [])
    if "groups" in ours and _members(ours["groups"]) == _members(groups):
        groups = ours["groups"]
    if groups or "groups" in ours:
        found.common["groups"] = groups
    others = {key: values[key] for key in keys.other if key in values}
    if not found.by_sample:
        found.by_sample = _by_sample(others)
    if "step" not in found.common:
        stated = [scalar(others[key]) for key in _STEPS if key in others]
        step = next((s for s in stated if s is not None), None)
        if step is None:
            step = max((g["step"] for g in groups if isinstance(g.get("step"), int)), default=None)
        if step is not None:
            found.common["step"] = int(step)
    flat = bool(keys.groups) and not all(which.isdigit() for which in keys.groups)
    convention = Convention(
        keys.model_prefix, keys.optimizer_prefix if keys.state or keys.groups else "optimizer.", flat,
        keys.wrapped, keys.adapter,
    )  # fmt: skip
    if convention != Convention():
        found.common[KEYS] = convention.plain()
    if others:
        found.common[OBJECTS] = [[key, list(paths.get(key, (key,))), value] for key, value in others.items()]
    layout = ours.get("layout")
    return found, Origin(Layout.parse(layout) if isinstance(layout, str) else None, ours.get("facts", {}))


def _own(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    return own_json(value, f"the object {OURS!r} of the checkpoint", groups=list)


def _groups(
    keys: Keys, values: Mapping[str, Any], locals_: Mapping[str, LocalTensor], warnings: list[str]
) -> list[dict[str, Any]]:
    """Canonical groups, from groups by number or by parameter."""
    roles: dict[str, set[str]] = {}
    for name, role in keys.state:
        roles.setdefault(name, set()).add(role)
    steps = {name: scalar(values[key]) for name, key in keys.steps.items() if key in values}
    counted = {name: step for name, step in steps.items() if step is not None}
    numbered = {which: fields for which, fields in keys.groups.items() if which.isdigit()}
    listed: list[tuple[dict[str, Any], list[str]]] = []
    for which in sorted(numbered, key=int):
        fields = {name: _simple(values[key]) for name, key in numbered[which].items() if key in values}
        names = fields.pop("params", None)
        if not isinstance(names, list):
            names = []
        listed.append((fields, [keys.clean(name) for name in names if isinstance(name, str)]))
    flat = {
        which: {name: _simple(values[key]) for name, key in fields.items() if key in values}
        for which, fields in keys.groups.items()
        if which not in numbered
    }
    # Parameters in the order of the model, not of the metadata.
    ordered = {
        name: flat[name]
        for name in [*(n for n in locals_ if n in flat), *(n for n in flat if n not in locals_)]
    }
    for fields in ordered.values():
        fields.pop("params", None)
    return canonical_groups([*listed, *merge_flat(ordered)], counted, roles, locals_, warnings)


def _simple(value: Any) -> Any:
    """Tuples of hyper-parameters are lists in canonical groups, scalar tensors are numbers."""
    if isinstance(value, dict) and value.get("$") == "tuple":
        return [_simple(part) for part in value["v"]]
    number = scalar(value)
    return number if isinstance(value, dict) and number is not None else value


def _members(groups: Sequence[Any]) -> set[str]:
    return {name for group in groups if isinstance(group, dict) for name in group.get("tensors", ())}


def _by_sample(others: dict[str, Any]) -> list[Any]:
    """Loader states, taken out of the other objects where there is one for every rank."""
    ranks = {int(match[1]): key for key in others if (match := _LOADER.fullmatch(key))}
    if not ranks or sorted(ranks) != list(range(len(ranks))):
        return []
    return [others.pop(ranks[n]) for n in range(len(ranks))]


def write_extras(
    shards: Catalog, names: Mapping[str, LocalTensor], trained: set[str], facts: Mapping[str, Any]
) -> State:
    """What the extras of `shards` come to.

    Args:
        names: Local tensors of the family, by name.
        trained: Names that have moments: each gets a step.
        facts: What is known of the origin; kept beside.
    """
    common = dict(shards.extras.common)
    style, objects = common.pop(KEYS, None) or {}, common.pop(OBJECTS, None) or ()
    state = State(Convention(*(style.get(f, d) for f, d in Convention().plain().items())))
    state.convention.spell(shards)
    groups = common.pop("groups", None)
    conv = state.convention
    for number, (group, members) in enumerate(family_groups(groups or (), names.values())):
        for name in members:
            step = step_of(group, names[name])
            if step is not None and name in trained:
                key, path = conv.state(name, "step")
                state.scalars.append((key, path, TensorValue(BY_NAME["float32"], (), _float32(step))))
        fields = {name: from_plain(value) for name, value in torch_fields(group).items()}
        for which in members if conv.flat else [number]:
            for name, value in fields.items():
                state.objects.append((*conv.group(which, name), value))
        if not conv.flat:
            state.objects.append((*conv.group(number, "params"), conv.members(members)))
    for key, path, value in objects:
        state.objects.append((key, tuple(path), from_plain(value)))
    mine: dict[str, Any] = {"common": common, "layout": str(shards.layout or Layout())}
    loader = shards.extras.by_sample
    if loader and (style or objects):
        for rank, value in enumerate(loader):
            key = f"dataloader.dp_rank_{rank}"
            state.objects.append((key, ("dataloader", f"dp_rank_{rank}"), from_plain(value)))
    elif loader:
        mine["by_sample"] = loader
    if shards.extras.by_coordinate:
        mine["by_coordinate"] = shards.extras.by_coordinate
    if groups is not None:
        mine["groups"] = groups
    if facts:
        mine["facts"] = dict(facts)
    state.objects.append((OURS, (OURS,), json.dumps(mine, sort_keys=True)))
    return state


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        raise LayoutError(f"step {value} is no float32") from None
