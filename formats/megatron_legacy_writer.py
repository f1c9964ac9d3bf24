"""Laying out a legacy Megatron checkpoint: every rank's weights, training state and optimizer state, before any byte moves."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckptkit.core.catalog import ROLE_CODE, ROLES, Catalog, File
from ckptkit.core.destination import Fixup, Literal
from ckptkit.core.dtypes import BY_NAME, TABLE, DType
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.core.schema import STATE_ROLES
from ckptkit.errors import LayoutError
from ckptkit.formats.chunks import plain_local
from ckptkit.formats.megatron_args import fields_of
from ckptkit.formats.megatron_buffers import SLOTS, Buffer, Group, buffers, lay, local_order
from ckptkit.formats.megatron_entries import Rows
from ckptkit.formats.megatron_groups import Optimizer
from ckptkit.formats.megatron_keys import Numbered, number_names, spellings
from ckptkit.formats.megatron_parts import FLAT, STATE, Held, Part, held_by, parts_of
from ckptkit.formats.megatron_state import OURS, rng_lists, write_extras
from ckptkit.formats.megatron_tensors import rule_pads
from ckptkit.formats.plain import TensorValue, from_plain
from ckptkit.formats.standins import Ordered, Storage, StoredTensor
from ckptkit.formats.torch_zip_writer import skeleton

_ADAM = frozenset(SLOTS.values())
_SLOT_OF = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer"}
_FLOAT = BY_NAME["float32"]
_Roles = Mapping[str, Mapping[str, DType]]


@dataclass
class LaidOut:
    """What was decided: entries, files, and the bytes that are known."""

    rows: Rows = field(default_factory=Rows)
    files: list[File] = field(default_factory=list)
    literals: dict[int, Sequence[Literal]] = field(default_factory=dict)
    fixups: dict[int, Sequence[Fixup]] = field(default_factory=dict)


class _Zip:
    """A file of `torch.save` as it is put together: its storages, and what lies in them."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.inside: list[tuple[int, int, LocalTensor, str, DType]] = []

    def tensor(self, dtype: DType, shape: tuple[int, ...]) -> StoredTensor:
        """A tensor with a storage of its own."""
        nbytes = prod(shape) * dtype.itemsize
        self.sizes.append(nbytes)
        strides = [1] * len(shape)
        for axis in range(len(shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
        storage = Storage(str(len(self.sizes) - 1), dtype, nbytes)
        return StoredTensor(storage, dtype, 0, shape, tuple(strides))

    def whole(self, item: Held, role: str, dtype: DType) -> StoredTensor:
        """A rank's tensor, all of it."""
        self.inside.append((len(self.sizes), 0, item.local, role, dtype))
        return self.tensor(dtype, item.local.shape)

    def finish(self, laid: LaidOut, path: str, rank: int, value: Any, root: str) -> None:
        made = skeleton(value, self.sizes, root=root)
        number = len(laid.files)
        laid.files.append(File(path, made.size, 0, rank))
        laid.literals[number], laid.fixups[number] = made.literals, made.fixups
        for storage, offset, local, role, dtype in self.inside:
            local_number = laid.rows.locals.exact(local)
            laid.rows.rows.append(
                (
                    number,
                    local_number,
                    ROLE_CODE[role],
                    dtype.code,
                    0,
                    local.size,
                    made.data[storage] + offset,
                )
            )


@dataclass(frozen=True)
class _Run:
    """What the arguments that a source carries say of its modules.

    Attributes:
        local: Whether norms are modules of their own (`--transformer-impl local`), with names and an order that follow.
        order: Module order, where it is not the family's.
        shapes: Whole shapes of tensors with another padding than the model's rule gives.
    """

    local: bool = False
    order: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def of(shards: Catalog, layout: Layout) -> "_Run":
        if shards.model is None:
            return _Run()
        kept = shards.extras.common.get("megatron")
        args = fields_of(from_plain(((kept or {}).get("common") or {}).get("args")))
        names = shards.model.names(shards.names)
        unit = args.get("make_vocab_size_divisible_by")
        shapes = {}
        if isinstance(unit, int) and unit > 0:
            for name, item in {**names.copies, **names.unpadded()}.items():
                rows = -(-item.shape[0] // (unit * layout.tp)) * unit * layout.tp if item.shape else 0
                if rows and rule_pads(shards.model, item):
                    shapes[name] = (rows, *item.shape[1:])
        local = args.get("transformer_impl") == "local"
        numbered = number_names(shards.model, shards.names)
        return _Run(local, tuple(local_order(names, numbered)) if local else (), shapes)

    def spelled(self, item: Held, numbered: Mapping[str, Numbered]) -> Held:
        rest = numbered[item.name].rest
        other = spellings(rest) if self.local and ".layer_norm_" in rest else []
        return replace(item, key=item.key.removesuffix(rest) + other[0]) if other else item


def lay_out_parts(shards: Catalog, prefix: str, facts: Mapping[str, Any]) -> LaidOut:
    """Lay out every rank's files below `prefix`.

    Raises:
        LayoutError: the layout has no such folders, or a role has no place in this format.
    """
    layout = shards.layout or Layout()
    roles = _roles(shards)
    parts = parts_of(layout)
    run = _Run.of(shards, layout)
    held, whole, dtypes = _held(shards, layout, parts, roles, run)
    extras = write_extras(shards, whole, {n: set(r) & set(STATE_ROLES) for n, r in roles.items()}, facts)
    rng, _ = rng_lists(shards.extras, layout)
    flat = [_is_flat(one, layout, roles) for one in extras.optimizers]
    buffered = _buffers(shards, layout, extras.optimizers, flat, dtypes, run)
    partly = _partly_flat(extras.optimizers, flat, dtypes)
    laid = LaidOut()
    for number, part in enumerate(parts):
        mine = held[part.folder]
        file = _Zip()
        value = dict(extras.common)
        for chunk in range(layout.vpp):
            name = "model" if layout.vpp == 1 else f"model{chunk}"
            value[name] = Ordered(
                [
                    (item.key, file.whole(item, role, roles[item.name][role]))
                    for item in mine
                    for role in ("param", "buffer")
                    if item.chunk == chunk and role in roles[item.name]
                ]
            )
        made, names = _optimizers(extras.optimizers, flat, mine, roles, file)
        if made:
            value["optimizer"] = made[0] if len(made) == 1 else made
        if (part.pp, part.tp) in rng:
            value["rng_state"] = rng[part.pp, part.tp]
        note = json.loads(extras.common[OURS]) if number == 0 else {"layout": str(layout)}
        if any(names):
            note["optimizers"] = names
        if number == 0 and partly:
            note["flat"] = partly
        value[OURS] = json.dumps(note, sort_keys=True)
        file.finish(laid, f"{prefix}{part.folder}/{STATE}", part.ranks[0], value, "model_optim_rng")
        _flat_file(laid, part, extras.optimizers, flat, buffered, f"{prefix}{part.folder}/{FLAT}")
    return laid


def _roles(shards: Catalog) -> dict[str, dict[str, DType]]:
    """Roles and dtypes by name. Raises LayoutError for a role without a place."""
    entries = shards.entries
    found: dict[str, dict[str, DType]] = {item.key: {} for item in shards.locals}
    for local, role, dtype in set(
        zip(entries.local.tolist(), entries.role.tolist(), entries.dtype.tolist(), strict=True)
    ):
        found[shards.locals[local].key][ROLES[role]] = TABLE[dtype]
        if ROLES[role] == "ema":
            raise LayoutError(
                f"{shards.locals[local].key}: megatron-legacy has no place for ema; drop it with --drop '*/ema'"
            )
    return {name: roles for name, roles in found.items() if roles}


def _held(
    shards: Catalog, layout: Layout, parts: Sequence[Part], roles: _Roles, run: "_Run"
) -> tuple[dict[str, list[Held]], dict[str, LocalTensor], dict[str, DType]]:
    """What every folder holds; names and what they are; element types of trained names."""
    if shards.model is None:
        whole = {item.key: plain_local(item.key, item.shape) for item in shards.locals if item.key in roles}
        held = {part.folder: [Held(n, n, 0, item, False) for n, item in whole.items()] for part in parts}
        return held, whole, {}
    names = shards.model.names(shards.names)
    known = {**names.copies, **names.unpadded()}
    numbered = number_names(shards.model, shards.names)
    held = held_by(names, numbered, layout, parts, run.shapes, run.order)
    held = {
        folder: [run.spelled(item, numbered) for item in items if item.name in roles]
        for folder, items in held.items()
    }
    dtypes = {
        name: has.get("param", has.get("master", _FLOAT))
        for name, has in roles.items()
        if "buffer" not in has
    }
    return held, {name: known[name] for name in numbered if name in roles}, dtypes


def _is_flat(one: Optimizer, layout: Layout, roles: _Roles) -> bool:
    """Whether an optimizer's state goes into flat buffers: where ZeRO cuts it, and it is Adam's in float32."""
    names = [name for _, members in one.groups for name in members]
    return (
        layout.zero > 0
        and one.kind == "adamw"
        and bool(names)
        and all(
            roles[n].keys() >= _ADAM
            and all(roles[n][r] is _FLOAT for r in _ADAM)
            and "momentum" not in roles[n]
            for n in names
        )
    )


def _partly_flat(
    optimizers: Sequence[Optimizer], flat: Sequence[bool], dtypes: Mapping[str, DType]
) -> list[str]:
    """The names in flat buffers, where those are not all that no other optimizer trains."""
    members = [[name for _, names in one.groups for name in names] for one in optimizers]
    inside = {name for names, is_flat in zip(members, flat, strict=True) if is_flat for name in names}
    outside = {name for names, is_flat in zip(members, flat, strict=True) if not is_flat for name in names}
    return sorted(inside) if inside and inside != dtypes.keys() - outside else []


def _buffers(
    shards: Catalog, layout: Layout, optimizers: Sequence[Optimizer], flat: Sequence[bool],
    dtypes: Mapping[str, DType], run: "_Run",
) -> dict[Group, list[Buffer]]:  # fmt: skip
    if shards.model is None or not any(flat):
        return {}
    names = shards.model.names(shards.names)
    trained = {
        name: dtypes[name]
        for one, is_flat in zip(optimizers, flat, strict=True)
        if is_flat
        for _, members in one.groups
        for name in members
    }
    return buffers(names, number_names(shards.model, shards.names), layout, trained, run.shapes, run.order)


def _optimizers(
    optimizers: Sequence[Optimizer], flat: Sequence[bool], mine: Sequence[Held], roles: _Roles, file: _Zip
) -> tuple[list[dict[str, Any]], list[list[list[str]]]]:
    """The optimizers of one rank, and the names in each of their groups where state is not flat."""
    by_name = {item.name: item for item in mine}
    made: list[dict[str, Any]] = []
    listed: list[list[list[str]]] = []
    for one, is_flat in zip(optimizers, flat, strict=True):
        if is_flat:
            made.append({"optimizer": {"param_groups": [fields for fields, _ in one.groups]}})
            listed.append([])
            continue
        state: dict[int, dict[str, Any]] = {}
        groups, mains, names = [], [], []
        for fields, members in one.groups:
            here = [name for name in by_name if name in set(members)]
            ids = list(range(len(state), len(state) + len(here)))
            for index, name in zip(ids, here, strict=True):
                step = TensorValue(_FLOAT, (), _float32(fields["step"]))
                slots: dict[str, Any] = {"step": step} if one.kind == "adamw" else {}
                for role, slot in _SLOT_OF.items():
                    if role in roles[name]:
                        slots[slot] = file.whole(by_name[name], role, roles[name][role])
                state[index] = slots
            groups.append({**fields, "params": ids})
            mains.append(
                [
                    file.whole(by_name[name], "master", roles[name]["master"])
                    for name in here
                    if "master" in roles[name]
                ]
            )
            names.append(here)
        made.append({"optimizer": {"state": state, "param_groups": groups}, "fp32_from_fp16_params": mains})
        listed.append(names)
    return made, listed


def _float32(value: Any) -> bytes:
    return struct.pack("<f", float(value))


def _flat_file(
    laid: LaidOut, part: Part, optimizers: Sequence[Optimizer], flat: Sequence[bool],
    buffered: Mapping[Group, Sequence[Buffer]], path: str,
) -> None:  # fmt: skip
    """The flat state of the groups that this folder is the first rank of; no file where there is none."""
    file = _Zip()
    states: list[Any] = []
    for one, is_flat in zip(optimizers, flat, strict=True):
        group = part.expert if one.expert else part.dense
        if not is_flat or group is None or group not in buffered:
            states.append(None)
            continue
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, buffer in enumerate(buffered[group]):
            laid_out = lay([item.size for item in buffer.members], buffer.alone)
            tensors: dict[str, Any] = {}
            for slot, role in SLOTS.items():
                for item, offset in zip(buffer.members, laid_out.flat, strict=True):
                    file.inside.append((len(file.sizes), offset * _FLOAT.itemsize, item, role, _FLOAT))
                tensors[slot] = file.tensor(_FLOAT, (laid_out.total,))
            state[number] = {(buffer.dtype, _FLOAT): {**tensors, "numel_unpadded": laid_out.total}}
        states.append(state)
    if not file.sizes:
        return
    file.finish(laid, path, part.ranks[0], states[0] if len(states) == 1 else states, "distrib_optim")
