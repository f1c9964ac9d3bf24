"""What ZeRO's partitions hold: which run of which parameter lies where in the flat tensors of a rank.

Stages 1 and 2: the parameters of a group lie one after the other in one flat tensor, whose equal parts the ranks own. The order
is the group's own, or one that balances gradients (`round_robin_gradients`), and there may be gaps; `param_slice_mappings` tells
where a rank's part of each parameter starts, and the parts of a parameter follow each other in the order of ranks.

Stage 3: every parameter alone is padded to a multiple of the ranks and cut in equal runs; a rank's runs lie one after the other.
Groups may be cut in sub-groups. What lies behind the end of a parameter is not defined.

Sources: DeepSpeed 0.19, `runtime/zero/stage_1_and_2.py`, `stage3.py`, `utils/zero_to_fp32.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckptkit.errors import CoverageError, FormatError
from ckptkit.formats.deepspeed_folder import StateFile
from ckptkit.formats.plain import scalar
from ckptkit.formats.standins import Opaque, StoredTensor
from ckptkit.formats.stored_keys import SLOTS

STATE = "optimizer_state_dict"
EXPERT_NAME = re.compile(r"(.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,6})(\..+)")
_GROUP = re.compile(r"ep_size_(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Run:
    """Elements `[first, last)` of one rank's parameter at element `start` of a flat tensor."""

    name: str
    role: str
    file: StateFile
    tensor: StoredTensor
    start: int
    first: int
    last: int


@dataclass
class Found:
    """What the partitions of one model-parallel rank hold.

    Attributes:
        groups: Hyper-parameters (as in the file) and names of each group.
        steps: By name.
        unknown: Slots of no known meaning.
    """

    runs: list[Run] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)
    steps: dict[str, float] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)

    def slots(
        self, file: StateFile, slots: Mapping[str, Any], length: int
    ) -> tuple[list[tuple[str, StoredTensor]], float | None]:
        """Flat tensors of an optimizer's state by role, and the step."""
        flat, step = [], None
        for name, value in slots.items():
            if name == "step":
                step = scalar(file.plain(value))
            elif name in SLOTS and isinstance(value, StoredTensor):
                flat.append((SLOTS[name], flat_tensor(file, value, name, length)))
            else:
                self.unknown.add(str(name))
        return flat, step


def flat_tensor(file: StateFile, value: Any, what: str, length: int = 0) -> StoredTensor:
    """A tensor of one dimension and at least `length` elements. Raises FormatError for anything else."""
    if not isinstance(value, StoredTensor) or len(value.shape) != 1 or not value.contiguous:
        raise FormatError(f"{file.path}: {what} is no flat tensor", file=file.path)
    if value.shape[0] < length:
        raise FormatError(
            f"{file.path}: {what} has {value.shape[0]} elements, but its parameters come to {length}. It is truncated",
            file=file.path,
        )
    return value


def shapes_of(file: StateFile, name: str = "param_shapes") -> list[dict[str, tuple[int, ...]]]:
    """Shapes by name, group by group, as model states list them. Raises FormatError for anything else."""
    value = file.value.get(name)
    groups = [value] if isinstance(value, dict) else value
    if value is None:
        return []
    if not isinstance(groups, list) or any(
        not isinstance(group, dict)
        or any(
            not isinstance(k, str) or not isinstance(v, tuple) or any(type(n) is not int or n < 0 for n in v)
            for k, v in group.items()
        )
        for group in groups
    ):
        raise FormatError(f"{file.path}: {name} are no shapes by name", file=file.path)
    return [{key: tuple(shape) for key, shape in group.items()} for group in groups]


def read_stage12(
    files: Sequence[StateFile], shapes: Sequence[Mapping[str, tuple[int, ...]]], sizes: Mapping[str, int]
) -> Found:
    """The partitions of stages 1 and 2.

    Args:
        files: Of every data-parallel rank, in order.
        shapes: By group, of what the ranks' model states list.
        sizes: Elements of each parameter, by its global name.

    Raises:
        FormatError, CoverageError: parts overlap, leave a gap or lie outside their flat tensor.
    """
    found = Found()
    states = [file.field(STATE, dict) for file in files]
    masters = [
        file.field("single_partition_of_fp32_groups", list, state)
        for file, state in zip(files, states, strict=True)
    ]
    count = len(masters[0])
    groups, _ = _base(files[0], states[0], count)
    for number in range(count):
        names: dict[str, None] = {}
        width = _expert_width(files[0], groups[number])
        for ep in range(width):
            done: dict[tuple[str, str], int] = {}
            ranks = range(ep, len(files), width)
            for shard, d in enumerate(ranks):
                file, state = files[d], states[d]
                if len(masters[d]) != count:
                    raise FormatError(
                        f"{file.path} has {len(masters[d])} groups, {files[0].path} has {count}",
                        file=file.path,
                    )
                parts = _parts(file, state, number, shapes, masters[d][number], shard)
                if width > 1:
                    parts = _global_names(parts, ep)
                _check_parts(file, parts)
                end = max((start + numel for _, numel, start in parts), default=0)
                flat = [("master", flat_tensor(file, masters[d][number], f"fp32 group {number}", end))]
                more, step = found.slots(file, _base(file, state, count)[1][number], end)
                for role, tensor in [*flat, *more]:
                    for name, numel, start in parts:
                        if name not in sizes:
                            raise FormatError(
                                f"{file.path} has state of {name}, which is no parameter of the model states",
                                file=file.path,
                            )
                        first = done.get((name, role), 0)
                        found.runs.append(Run(name, role, file, tensor, start, first, first + numel))
                        done[name, role] = first + numel
                names.update(dict.fromkeys(name for name, _, _ in parts))
                if step is not None:
                    found.steps.update((name, step) for name, _, _ in parts)
            _check_whole(done, sizes, files[0])
        found.groups.append((groups[number], list(names)))
    return found


def _base(
    file: StateFile, state: Mapping[str, Any], count: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Groups of the wrapped optimizer, and each one's state; the elastic form has a list of states and no groups."""
    base = state.get("base_optimizer_state")
    if isinstance(base, list) and len(base) == count and all(isinstance(slots, dict) for slots in base):
        step = state.get("base_optimizer_state_step")
        more = {} if step is None else {"step": step}
        return [{} for _ in base], [{**more, **slots} for slots in base]
    groups = file.field("param_groups", list, base)
    by_id = file.field("state", dict, base)
    if len(groups) != count or any(
        not isinstance(g, dict) or not isinstance(g.get("params"), list) for g in groups
    ):
        raise FormatError(
            f"{file.path} has {count} flat groups, but its optimizer has {len(groups)}", file=file.path
        )
    ids = [next((n for n in group["params"] if type(n) is int), None) for group in groups]
    slots_ = [by_id.get(number, {}) for number in ids]
    if any(not isinstance(slots, dict) for slots in slots_):
        raise FormatError(f"{file.path}: the state of a group is no dictionary", file=file.path)
    return [{k: v for k, v in group.items() if k != "params"} for group in groups], slots_


def _parts(
    file: StateFile,
    state: Mapping[str, Any],
    number: int,
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    master: Any,
    shard: int,
) -> list[tuple[str, int, int]]:
    """`(name, elements, start)` of a rank's part of each parameter: as the file tells, else by the order of shapes.

    With `round_robin_gradients` the mappings tell the places of the order without it, unless parameters are aligned: a fault of
    DeepSpeed, by which its own `ds_to_universal` mixes parameters up. The shapes of the model states are in the true order.
    """
    mappings = state.get("param_slice_mappings")
    balanced = round_robin(file.value.get("ds_config"))
    if mappings is not None and (not balanced or _aligned(state, number)):
        if (
            not isinstance(mappings, list)
            or number >= len(mappings)
            or not isinstance(mappings[number], dict)
        ):
            raise FormatError(f"{file.path}: param_slice_mappings has no group {number}", file=file.path)
        return [(name, *_address(file, name, value)) for name, value in mappings[number].items()]
    if number >= len(shapes):
        raise FormatError(
            f"{file.path} does not tell where parameters lie, and the model states list none for group {number}",
            file=file.path,
        )
    paddings = state.get("group_paddings")
    pad = paddings[number] if isinstance(paddings, list) and number < len(paddings) else 0
    length = flat_tensor(file, master, f"fp32 group {number}").shape[0] + (pad if type(pad) is int else 0)
    parts, at = [], 0
    for name, shape in shapes[number].items():
        size = prod(shape)
        lo, hi = max(at, shard * length), min(at + size, (shard + 1) * length)
        if lo < hi:
            parts.append((name, hi - lo, lo - shard * length))
        at += size
    return parts


def round_robin(config: Any) -> bool:
    """Whether a run orders the parameters of stages 1 and 2 so that gradients are balanced."""
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and zero.get("round_robin_gradients") is True


def _aligned(state: Mapping[str, Any], number: int) -> bool:
    paddings = state.get("param_alignment_paddings")
    group = paddings[number] if isinstance(paddings, list) and number < len(paddings) else None
    return isinstance(group, list) and any(group)


def _address(file: StateFile, name: Any, value: Any) -> tuple[int, int]:
    """Elements and start of a `fragment_address`."""
    fields = value.attributes if isinstance(value, Opaque) else {}
    if isinstance(value, Opaque) and len(value.args) == 2:
        fields = dict(zip(("numel", "start"), value.args, strict=True))
    numel, start = fields.get("numel"), fields.get("start")
    if type(name) is not str or type(numel) is not int or type(start) is not int or numel < 0 or start < 0:
        raise FormatError(f"{file.path}: the place of {str(name)[:80]!r} is none", file=file.path)
    return numel, start


def _check_parts(file: StateFile, parts: Sequence[tuple[str, int, int]]) -> None:
    """Raise FormatError where two parts of one flat tensor overlap."""
    end, before = 0, ""
    for name, numel, start in sorted(parts, key=lambda part: (part[2], part[1])):
        if numel and start < end:
            raise FormatError(
                f"{file.path}: {before} and {name} overlap at element {start}", file=file.path, tensor=name
            )
        end, before = max(end, start + numel), name


def _check_whole(done: Mapping[tuple[str, str], int], sizes: Mapping[str, int], file: StateFile) -> None:
    for (name, role), size in done.items():
        if size != sizes[name]:
            raise CoverageError(
                f"{role} of {name} has {size} of {sizes[name]} elements in the files of all ranks ({file.path}, …): "
                "one of another save is among them. Use another copy",
                tensor=name,
            )


def _expert_width(file: StateFile, group: Mapping[str, Any]) -> int:
    """Expert-parallel degree of a group: 1 for one that is not of experts."""
    if not group.get("moe"):
        return 1
    match = _GROUP.fullmatch(str(group.get("name")))
    if match is None or not int(match[1]):
        raise FormatError(
            f"{file.path} has a group of experts {str(group.get('name'))[:40]!r}, which does not tell how many ranks share them",
            file=file.path,
        )
    return int(match[1])


def _global_names(parts: Sequence[tuple[str, int, int]], ep: int) -> list[tuple[str, int, int]]:
    """Names of a rank's own experts, which count from 0 on every rank, as those of the whole model."""
    matches = [EXPERT_NAME.fullmatch(name) for name, _, _ in parts]
    count = 1 + max((int(match[2]) for match in matches if match), default=-1)
    return [
        (f"{m[1]}{ep * count + int(m[2])}{m[3]}" if m else name, numel, start)
        for m, (name, numel, start) in zip(matches, parts, strict=True)
    ]


def read_stage3(files: Sequence[StateFile], shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> Found:
    """The partitions of stage 3, of every data-parallel rank in order.

    Raises:
        FormatError: the flat tensors do not hold what `shapes` come to.
    """
    found = Found()
    ranks = len(files)
    for d, file in enumerate(files):
        state = file.field(STATE, dict)
        if state.get("ds_zero_partition_groups") is not None:
            raise FormatError(
                f"{file.path} has experts that DeepSpeed itself placed (AutoEP), whose partitions are not read. Gather the "
                "weights with zero_to_fp32.py",
                file=file.path,
            )
        flats = [
            flat_tensor(file, flat, f"fp32 group {k}")
            for k, flat in enumerate(file.field("fp32_flat_groups", list, state))
        ]
        inner = file.field(STATE, dict, state)
        groups, by_id = file.field("param_groups", list, inner), file.field("state", dict, inner)
        group_of = [
            g
            for g, group in enumerate(groups)
            for _ in (group.get("params") if isinstance(group, dict) else None) or ()
        ]
        if len(group_of) != len(flats):
            raise FormatError(
                f"{file.path} has {len(flats)} flat groups, but its optimizer has {len(group_of)}",
                file=file.path,
            )
        if d == 0:
            found.groups = [({k: v for k, v in g.items() if k != "params"}, []) for g in groups]
        slots = []
        for k, flat in enumerate(flats):
            held = by_id.get(k, {})
            slots.append(found.slots(file, held if isinstance(held, dict) else {}, flat.shape[0]))
        at = _Cursor(file, flats)
        for name, shape in ((n, s) for group in shapes for n, s in group.items()):
            size = prod(shape)
            run = -(-size // ranks)
            k, start = at.take(name, run)
            first, last = min(d * run, size), min((d + 1) * run, size)
            if first < last or (not size and not d):
                for role, tensor in [("master", flats[k]), *slots[k][0]]:
                    found.runs.append(Run(name, role, file, tensor, start, first, last))
            if d == 0:
                found.groups[group_of[k]][1].append(name)
                if (step := slots[k][1]) is not None:
                    found.steps[name] = step
        at.end()
    return found


class _Cursor:
    """Goes through the flat tensors of a rank, parameter by parameter."""

    def __init__(self, file: StateFile, flats: Sequence[StoredTensor]) -> None:
        self.file, self.flats = file, flats
        self.group = self.at = 0

    def take(self, name: str, count: int) -> tuple[int, int]:
        """The flat tensor that the next `count` elements are in, and where."""
        while self.group < len(self.flats) and count and self.at == self.flats[self.group].shape[0]:
            self.group, self.at = self.group + 1, 0
        if self.group >= len(self.flats) or self.at + count > self.flats[self.group].shape[0]:
            raise FormatError(
                f"{self.file.path}: the flat groups end inside {name}; the parameters of its model states are others, or it "
                "is truncated",
                file=self.file.path,
                tensor=name,
            )
        start, self.at = self.at, self.at + count
        return self.group, start

    def end(self) -> None:
        left = sum(flat.shape[0] for flat in self.flats[self.group :]) - self.at
        if left:
            raise FormatError(
                f"{self.file.path}: {left} elements of the flat groups belong to no parameter of its model states",
                file=self.file.path,
            )
