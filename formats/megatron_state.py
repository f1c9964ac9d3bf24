"""What a Megatron checkpoint holds beside tensors: the common state, RNG states by coordinate, optimizer groups.

Iteration and groups become canonical; RNG states become states by mesh coordinate; arguments, scheduler and the rest travel
as they are, and are written back. What Megatron has no place for goes in one text called `ckptkit`, which it does not look at.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.core.schema import Tensor
from ckptkit.errors import FormatError, LayoutError
from ckptkit.formats.dcp_items import load_objects
from ckptkit.formats.dcp_metadata import Index
from ckptkit.formats.megatron_args import args_of, fields_of, layout_of
from ckptkit.formats.megatron_groups import Optimizer, canonical, chain
from ckptkit.formats.plain import from_plain, own_json, scalar, to_plain
from ckptkit.formats.standins import StoredTensor
from ckptkit.formats.torch_zip import open_archive
from ckptkit.stores.base import Store

OURS = "ckptkit"
COMMON = "common.pt"
_COMMON_OBJECT = re.compile(r"common_state/shard_0_1")
_RNG = re.compile(r"rng_state/shard_(\d+)\.(\d+)_(\d+)\.(\d+)")
_GROUPS = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.optimizer/shard_0_1")
_SCALER = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.grad_scaler/shard_0_1")
_DISTRIBUTED = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\..*(?:per_bucket_numel|per_bucket_numel_unpadded|param_state)/shard_0_1"
)
RNG = "megatron_rng"
EXTRA_STATE = "._extra_state/"
"""In the key of what a module keeps beside its parameters: scales of FP8 kernels, and nothing otherwise."""
_OWN = ("optimizer", "iteration", OURS, "content_metadata", "rng_state")


@dataclass
class State:
    """The common state: values as pickles have them, and how to read the small tensors among them."""

    fields: dict[str, Any]
    content: Callable[[StoredTensor], bytes]

    @property
    def args(self) -> dict[str, Any]:
        return fields_of(self.fields.get("args"))

    @property
    def note(self) -> dict[str, Any] | None:
        """What ckptkit noted, or None where another program wrote this."""
        text = self.fields.get(OURS)
        if text is None:
            return None
        return own_json(text, f"the note {OURS!r} of the checkpoint", optimizers=list, flat=list)

    def layout(self, warnings: list[str]) -> Layout | None:
        """The layout that the checkpoint was written in, where it tells."""
        note = self.note
        if note is not None and "layout" in note:
            try:
                return Layout.parse(note["layout"])
            except LayoutError as error:
                raise FormatError(f"the note {OURS!r} of the checkpoint has no layout: {error}") from None
        return layout_of(self.args, warnings)

    def plain(self, value: Any) -> Any:
        return to_plain(value, self.content)


def read_common(store: Store, index: Index) -> State:
    """`common.pt`, or the object that newer versions keep instead.

    Raises:
        FormatError: there is neither, or it holds no dictionary.
    """
    if store.exists(COMMON):
        path, start, size = COMMON, 0, None
    else:
        key = next((key for key in index.objects if _COMMON_OBJECT.fullmatch(key)), None)
        if key is None:
            raise FormatError(
                f"{store.url} has no {COMMON} and no common state among its objects: it is incomplete",
                file=COMMON,
            )
        path, start, size = index.objects[key]
    with store.open(path) as reader:
        archive = open_archive(reader, path, start, size)
        value = _unwrapped(archive.value)
        if not isinstance(value, dict) or any(type(key) not in (str, int) for key in value):
            raise FormatError(f"{path} of {store.url} holds no dictionary of state", file=path)
        # Tensors of the common state are few and small; the file is closed once they are read.
        known: dict[StoredTensor, bytes] = {}
        to_plain(value, lambda tensor: known.setdefault(tensor, archive.content(tensor)))
    return State(value, known.__getitem__)


def _unwrapped(value: Any) -> Any:
    """Objects of `torch_dist` lie in a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


@dataclass
class Objects:
    """Objects by what they are, as plain values."""

    rng: dict[str, Any]
    groups: list[dict[str, Any]]
    scalers: dict[str, Any]
    other: dict[str, Any]


def read_objects(store: Store, index: Index) -> Objects:
    """Load what is neither tensor nor common state. Flat state is not loaded, nor empty extra states of modules kept."""
    wanted = {
        key: item
        for key, item in index.objects.items()
        if not _COMMON_OBJECT.fullmatch(key) and not _DISTRIBUTED.fullmatch(key)
    }
    values = {key: _unwrapped(value) for key, value in load_objects(store, wanted).items()}
    found = Objects({}, [], {}, {})
    first: dict[int, tuple[int, Any]] = {}
    for key, value in values.items():
        groups, scaler = _GROUPS.fullmatch(key), _SCALER.fullmatch(key)
        if _RNG.fullmatch(key):
            found.rng[key] = value
        elif groups:
            # Groups are the same in every model-parallel group.
            place = int(groups[1] or 0), int(groups[2])
            if place[0] not in first or place[1] < first[place[0]][0]:
                first[place[0]] = (place[1], value)
        elif scaler:
            found.scalers.setdefault(scaler[1] or "0", value)
        elif value is not None or EXTRA_STATE not in key:
            found.other[key] = value
    for _, (_, value) in sorted(first.items()):
        found.groups += _param_groups(value)
    return found


def _param_groups(value: Any) -> list[dict[str, Any]]:
    """The groups inside an optimizer's state, however deep it keeps them."""
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("param_groups"), list):
        step = value["state"].get("common_step") if isinstance(value.get("state"), dict) else None
        groups = [
            {**g, "step": scalar(g["step"])} if isinstance(g.get("step"), dict) else g
            for g in value["param_groups"]
            if isinstance(g, dict)
        ]
        return [{**g, "step": scalar(step)} if "step" not in g and step is not None else g for g in groups]
    if "optimizer" in value:
        return _param_groups(value["optimizer"])
    return []


def optimizers_of(value: Any) -> list[dict[str, Any]]:
    """The optimizers of a common or legacy state, as plain values: one, a list, or a dictionary by number."""
    if isinstance(value, dict) and value.get("$") == "dict":  # numbered keys
        return [v for _, v in value["v"] if isinstance(v, dict)]
    if isinstance(value, list):
        return [v for v in value if isinstance(v, dict)]
    return [value] if isinstance(value, dict) else []


def read_extras(
    state: State,
    objects: Objects,
    bound: Mapping[str, LocalTensor],
    roles: Mapping[str, set[str]],
    tensors: Mapping[str, Tensor],
    warnings: list[str],
) -> Extras:
    """Extras of a checkpoint, whoever wrote it."""
    note = state.note
    found = Extras(by_coordinate=rng_states(objects.rng))
    if note is not None:
        found.common = note.get("common", {})
        found.by_coordinate.update(note.get("by_coordinate", {}))
        found.by_sample = note.get("by_sample", [])
        return found
    optimizers = optimizers_of(state.plain(state.fields.get("optimizer")))
    groups = [g for o in optimizers for g in _param_groups(o)] or objects.groups
    step = state.fields.get("iteration")
    if isinstance(step, int):
        found.common["step"] = step
    if groups:
        found.common["groups"] = canonical(groups, bound, roles, tensors, warnings)
    rest = {
        str(key): state.plain(value)
        for key, value in state.fields.items()
        if key not in _OWN and not isinstance(key, int)
    }
    scalers = {str(k): o["grad_scaler"] for k, o in enumerate(optimizers) if "grad_scaler" in o}
    kept = {"common": rest, "grad_scalers": {**objects.scalers, **scalers}, "objects": objects.other}
    kept = {name: value for name, value in kept.items() if value}
    if kept:
        found.common["megatron"] = kept
    return found


def rng_states(objects: Mapping[str, Any]) -> dict[str, Any]:
    """RNG states by coordinate; one for all replicas, or one each."""
    found = {}
    for key, value in objects.items():
        match = _RNG.fullmatch(key)
        assert match is not None, "the caller sorted the keys"
        found.update(rng_of(int(match[2]), int(match[1]), value))
    return found


def rng_of(tp: int, pp: int, value: Any) -> dict[str, Any]:
    """One model-parallel coordinate's list of states."""
    if not isinstance(value, list) or len(value) == 1:
        return {f"tp={tp},pp={pp}": {RNG: value}}
    return {f"tp={tp},pp={pp},dp={dp}": {RNG: [one]} for dp, one in enumerate(value)}


def rng_lists(extras: Extras, layout: Layout) -> tuple[dict[tuple[int, int], Any], dict[str, Any]]:
    """RNG states as Megatron has them, by `(pp, tp)`, and the states by coordinate that are none of these.

    Empty where a coordinate has no state: Megatron takes all or none.
    """
    found: dict[tuple[int, int], Any] = {}
    used: list[str] = []
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            one = f"tp={tp},pp={pp}"
            keys = [one] if one in extras.by_coordinate else [f"{one},dp={dp}" for dp in range(layout.dp)]
            states = [extras.by_coordinate.get(key) for key in keys]
            if not all(isinstance(state, dict) and set(state) == {RNG} for state in states):
                return {}, dict(extras.by_coordinate)
            found[pp, tp] = from_plain([one for state in states if state for one in state[RNG]])
            used += keys
    return found, {key: value for key, value in extras.by_coordinate.items() if key not in used}


@dataclass
class Written:
    """What extras come to: the common state, and objects by key."""

    common: dict[str, Any]
    objects: dict[str, Any]
    optimizers: list[Optimizer]


def write_extras(
    shards: Catalog,
    whole: Mapping[str, LocalTensor],
    roles: Mapping[str, set[str]],
    facts: Mapping[str, Any],
) -> Written:
    """The common state for `shards`, optimizers left to the caller, and RNG and other objects.

    Args:
        whole: Names and what they are.
        roles: Optimizer roles of each name.
        facts: What is known of the origin; kept beside.
    """
    extras, layout = shards.extras, shards.layout or Layout()
    kept = extras.common.get("megatron")
    kept = kept if isinstance(kept, dict) else {}
    rest = from_plain(kept.get("common", {}))
    rng, by_coordinate = rng_lists(extras, layout)
    step = extras.common.get("step")
    common: dict[str, Any] = {
        "args": args_of(rest.pop("args", None), shards.model, layout),
        "checkpoint_version": rest.pop("checkpoint_version", 3.0),
        "iteration": step if isinstance(step, int) else 0,
        **rest,
    }
    objects: dict[str, Any] = {
        f"rng_state/shard_{pp}.{tp}_{layout.pp}.{layout.tp}": value for (pp, tp), value in rng.items()
    }
    objects.update((key, from_plain(value)) for key, value in kept.get("objects", {}).items())
    note = {
        "common": extras.common,
        "by_coordinate": by_coordinate,
        "by_sample": extras.by_sample,
        "layout": str(layout),
        "facts": dict(facts),
    }
    common[OURS] = json.dumps({k: v for k, v in note.items() if v or k == "common"}, sort_keys=True)
    optimizers = chain(shards, whole, roles)
    return Written(common, objects, optimizers)
