"""Files of DeepSpeed as they are laid out: model states, and the flat partitions of ZeRO-1 and ZeRO-3.

The inverse of `ckptkit.formats.deepspeed_runs`, with DeepSpeed's own cut: groups apart, padded to twice the ranks (stages 1, 2),
every parameter alone (stage 3).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from ckptkit.core.boxes import row_major_strides
from ckptkit.core.catalog import ROLE_CODE, Catalog, Entries, File
from ckptkit.core.destination import Fixup, Literal
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.local import LocalTensor
from ckptkit.core.schema import STATE_ROLES
from ckptkit.core.zero import cut_flat
from ckptkit.formats.deepspeed_runs import EXPERT_NAME
from ckptkit.formats.deepspeed_state import VERSION, WEIGHTS, Group, State, step_value
from ckptkit.formats.standins import Global, Opaque, Ordered, Size, Storage, StoredTensor
from ckptkit.formats.stored_keys import SLOT_OF
from ckptkit.formats.torch_zip_writer import skeleton

F32 = BY_NAME["float32"]


@dataclass(frozen=True, slots=True)
class Member:
    """One name of a model-parallel rank: the number of its local tensor, and what is stored of it, by role."""

    number: int
    item: LocalTensor
    held: Mapping[str, DType]

    @property
    def name(self) -> str:
        return self.item.key

    @property
    def weight(self) -> str:
        """The role of its weights: param, buffer, or none."""
        return next((role for role in ("param", "buffer") if role in self.held), "")


class Draft:
    """A `.pt` file before its bytes have a place."""

    def __init__(self, path: str, rank: int) -> None:
        self.path, self.rank = path, rank
        self.value: Any = None
        self.sizes: list[int] = []
        self.rows: list[
            tuple[int, int, int, int, int, int, int]
        ] = []  # storage, byte in it, and an entry's columns

    def tensor(self, dtype: DType, shape: tuple[int, ...]) -> StoredTensor:
        """A new tensor with a storage of its own."""
        strides = row_major_strides(tuple(max(n, 1) for n in shape))
        storage = Storage(str(len(self.sizes)), dtype, prod(shape) * dtype.itemsize)
        self.sizes.append(storage.nbytes)
        return StoredTensor(storage, dtype, 0, shape, strides)

    def put(self, into: StoredTensor, at: int, member: Member, role: str, first: int, last: int) -> None:
        """Elements `[first, last)` of a member lie at element `at` of a tensor."""
        row = (member.number, ROLE_CODE[role], into.dtype.code, first, last)
        self.rows.append((int(into.storage.key), at * into.dtype.itemsize, *row))

    def whole(self, member: Member, role: str) -> StoredTensor:
        """A tensor that is all of a member."""
        made = self.tensor(member.held[role], member.item.shape)
        self.put(made, 0, member, role, 0, member.item.size)
        return made


def members_of(shards: Catalog, items: Iterable[tuple[int, LocalTensor]], *, weights: bool) -> list[Member]:
    """What is stored of local tensors, given with their numbers.

    Args:
        weights: Whether what is trained has its low-precision weights stored, too; where the source has none they are made
            from the fp32 copies.
    """
    roles: dict[str, dict[str, DType]] = {}
    for (tensor, role), dtype in shards.held.items():
        roles.setdefault(tensor, {})[role] = dtype
    found = []
    for number, item in items:
        held = dict(roles[item.segments[0].tensor])
        if any(role in STATE_ROLES for role in held):
            # The flat fp32 groups are the parameters of DeepSpeed's optimizer; without them there is no state.
            held["master"] = F32
            if "param" not in held and weights:
                held["param"] = model_dtype(shards)
        found.append(Member(number, item, held))
    return found


def model_dtype(shards: Catalog) -> DType:
    """What the module's weights were in training, where the source has their fp32 copies only."""
    kept = shards.extras.common.get("deepspeed")
    config = kept.get("model", {}).get("ds_config") if isinstance(kept, dict) else None
    for name, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        part = config.get(name) if isinstance(config, dict) else None
        if isinstance(part, dict) and part.get("enabled") is True:
            return BY_NAME[dtype]
    return BY_NAME["float32" if config else "bfloat16"]


@dataclass
class Laid:
    """Files and entries, laid out."""

    files: list[File] = field(default_factory=list)
    entries: Entries = field(default_factory=lambda: Entries.concat([]))
    literals: dict[int, Sequence[Literal]] = field(default_factory=dict)
    fixups: dict[int, Sequence[Fixup]] = field(default_factory=dict)


def lay(drafts: Iterable[Draft]) -> Laid:
    """Decide the place of every byte."""
    found = Laid()
    rows = []
    for number, draft in enumerate(drafts):
        made = skeleton(draft.value, draft.sizes)
        found.files.append(File(draft.path, made.size, 0, draft.rank))
        found.literals[number], found.fixups[number] = made.literals, made.fixups
        rows += [
            (number, local, role, dtype, first, last, made.data[storage] + at)
            for storage, at, local, role, dtype, first, last in draft.rows
        ]
    found.entries = Entries(*np.asarray(rows, np.int64).reshape(-1, 7).T)
    return found


def model_states(draft: Draft, members: Sequence[Member], state: State, shapes: Sequence[Ordered]) -> None:
    """Model states of stages 0 to 2: every weight of a model-parallel rank."""
    draft.value = {
        "module": Ordered(
            (m.name, draft.whole(m, m.weight))
            for m in members
            if m.weight and not EXPERT_NAME.fullmatch(m.name)
        ),
        "buffer_names": [m.name for m in members if m.weight == "buffer"],
        "optimizer": None,
        "param_shapes": list(shapes) if shapes else None,
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        **state.model,
    }


def experts(
    prefix: str, mp: int, rank: int, members: Sequence[Member], states: dict[str, Any]
) -> list[Draft]:
    """Files of DeepSpeed-MoE's experts, one each; layers count from 0 in the order of modules. None for other models.

    Args:
        states: The model states without experts; what it says of them is put right.
    """
    layers: dict[str, int] = {}
    found: dict[tuple[int, int], Draft] = {}
    for m in members:
        match = EXPERT_NAME.fullmatch(m.name)
        if match is None or not m.weight:
            continue
        place = layers.setdefault(match[1], len(layers)), int(match[2])
        if place not in found:
            path = f"{prefix}layer_{place[0]}_expert_{place[1]}_mp_rank_{mp:02d}_model_states.pt"
            found[place] = Draft(path, rank)
            found[place].value = {}
        found[place].value[m.name] = found[place].whole(m, m.weight)
    if not found:
        return []
    states["num_experts"] = [1 + max(e for n, e in found if n == layer) for layer in layers.values()]
    return [found[place] for place in sorted(found)]


def shapes_of(groups: Sequence[Group], members: Mapping[str, Member]) -> list[Ordered]:
    """Shapes by name, group by group."""
    return [Ordered((n, Size(members[n].item.shape)) for n in group.names) for group in groups]


def partition_12(
    draft: Draft, rank: int, ranks: int, members: Mapping[str, Member], state: State, stage: int, config: Any
) -> None:
    """The optimizer's state of one data-parallel rank, stages 1 and 2."""
    masters, slots, paddings, mappings = [], {}, [], []
    for number, group in enumerate(state.groups):
        sizes = np.asarray([members[name].item.size for name in group.names], np.int64)
        starts, total = np.cumsum(sizes) - sizes, int(sizes.sum())
        length = -(-total // (2 * ranks)) * 2  # a rank's part of the group, padded to twice the ranks
        lean = min(length, max(0, total - rank * length))
        cut = cut_flat(starts, sizes, [(rank, rank * length, (rank + 1) * length)])
        flat = {"master": draft.tensor(F32, (lean,))}
        kept = members[group.names[0]].held if group.names else {}
        flat.update(
            (role, draft.tensor(kept[role], (length,)))
            for role in SLOT_OF
            if role in kept and role != "master"
        )
        places = Ordered()
        for k, first, last in zip(cut.tensor.tolist(), cut.first.tolist(), cut.last.tolist(), strict=True):
            member = members[group.names[k]]
            at = int(starts[k]) + first - rank * length
            places[member.name] = _address(last - first, at)
            for role, tensor in flat.items():
                draft.put(tensor, at, member, role, first, last)
        _empty(draft, [members[n] for n in group.names], flat)
        masters.append(flat.pop("master"))
        slots[number] = {"step": step_value(group.step), **{SLOT_OF[role]: t for role, t in flat.items()}}
        paddings.append(length - lean)
        mappings.append(places)
    draft.value = {
        "optimizer_state_dict": {
            **state.scaler,
            "base_optimizer_state": {
                "state": slots,
                "param_groups": [{**g.fields, "params": [k]} for k, g in enumerate(state.groups)],
            },
            "single_partition_of_fp32_groups": masters,
            "zero_stage": zero_stage(stage),
            "group_paddings": paddings,
            "param_alignment_paddings": [[0] * len(group.names) for group in state.groups],
            "partition_count": [ranks] * len(state.groups),
            "ds_version": VERSION,
            "param_slice_mappings": mappings,
        },
        "ds_config": config,
        "ds_version": VERSION,
    }


def model_states_3(
    draft: Draft,
    rank: int,
    ranks: int,
    members: Sequence[Member],
    trained: Mapping[str, Member],
    state: State,
) -> None:
    """Model states of stage 3: buffers, runs of what is not trained, and shapes.

    DeepSpeed makes the low-precision weights of what it trains from the fp32 copy. Where the source has such weights, their
    runs lie in a field of our own, so that nothing is lost.
    """
    module, frozen, fragments, weights = Ordered(), Ordered(), Ordered(), Ordered()
    for m in members:
        if m.weight == "buffer":
            module[m.name] = draft.whole(m, "buffer")
            continue
        size = m.item.size
        run = -(-size // ranks)
        first, last = min(rank * run, size), min((rank + 1) * run, size)
        dtype = m.held.get("param") or F32
        module[m.name] = draft.tensor(dtype, (0,))
        if m.name in trained:
            if "param" in m.held:
                weights[m.name] = draft.tensor(dtype, (last - first,))
                draft.put(weights[m.name], 0, m, "param", first, last)
        else:
            frozen[m.name] = Size(m.item.shape)
            fragments[m.name] = draft.tensor(dtype, (run,))
            draft.put(fragments[m.name], 0, m, "param", first, last)
    draft.value = {
        "module": module,
        "buffer_names": [m.name for m in members if m.weight == "buffer"],
        "optimizer": None,
        "param_shapes": shapes_of(state.groups, trained),
        "frozen_param_shapes": frozen,
        "shared_params": {},
        "frozen_param_fragments": fragments,
        **state.model,
        **({WEIGHTS: weights} if weights else {}),
    }


def partition_3(
    draft: Draft, rank: int, ranks: int, members: Mapping[str, Member], state: State, config: Any
) -> None:
    """The optimizer's state of one rank, stage 3."""
    flats: list[StoredTensor] = []
    slots: dict[int, dict[str, Any]] = {}
    groups = []
    for group in state.groups:
        numbers = []
        for names in _sub_groups(group.names, members, ranks, state.sub_group_size):
            runs = [-(-members[name].item.size // ranks) for name in names]
            kept = members[names[0]].held
            flat = {"master": draft.tensor(F32, (sum(runs),))}
            flat.update(
                (role, draft.tensor(kept[role], (sum(runs),)))
                for role in SLOT_OF
                if role in kept and role != "master"
            )
            at = 0
            for name, run in zip(names, runs, strict=True):
                size = members[name].item.size
                first, last = min(rank * run, size), min((rank + 1) * run, size)
                if first < last:
                    for role, tensor in flat.items():
                        draft.put(tensor, at, members[name], role, first, last)
                at += run
            if rank == 0:
                _empty(draft, [members[n] for n in names], flat)
            number = len(flats)
            flats.append(flat.pop("master"))
            slots[number] = {
                "step": step_value(group.step),
                **{SLOT_OF[role]: t for role, t in flat.items()},
            }
            numbers.append(number)
        groups.append({**group.fields, "params": numbers})
    draft.value = {
        "optimizer_state_dict": {
            "zero_stage": zero_stage(3),
            **{name: value for name, value in state.scaler.items() if name != "clip_grad"},
            "partition_count": ranks,
            "optimizer_state_dict": {"state": slots, "param_groups": groups},
            "fp32_flat_groups": flats,
        },
        "ds_config": config,
        "ds_version": VERSION,
    }


def _sub_groups(
    names: Sequence[str], members: Mapping[str, Member], ranks: int, limit: int
) -> list[list[str]]:
    """A group cut where a rank's runs reach `limit` elements."""
    runs = [-(-members[name].item.size // ranks) for name in names]
    if sum(runs) <= limit:
        return [list(names)] if names else []
    found: list[list[str]] = [[]]
    held = 0
    for name, run in zip(names, runs, strict=True):
        found[-1].append(name)
        held += run
        if held >= limit:
            found.append([])
            held = 0
    return [part for part in found if part]


def _empty(draft: Draft, members: Sequence[Member], flat: Mapping[str, StoredTensor]) -> None:
    """Parameters without elements have their place, too."""
    for member in members:
        if not member.item.size:
            for role, tensor in flat.items():
                draft.put(tensor, 0, member, role, 0, 0)


def balanced_order(names: Sequence[str], ranks: int) -> list[str]:
    """Every `ranks`-th of a group's parameters, beginning with the first, then beginning with the second, …"""
    return [name for k in range(ranks) for name in names[k::ranks]]


def _address(numel: int, start: int) -> Opaque:
    cls = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    return Opaque(cls, state={"numel": numel, "start": start}, new=True)


def zero_stage(stage: int) -> Opaque:
    return Opaque(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))
