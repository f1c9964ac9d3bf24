"""Plans: which source piece gives which part of which destination piece, with the proof that nothing is missing.

A plan keeps pairs of piece numbers; boxes are recomputed where they are needed (`ckptkit.core.copies`). The proof:
the chosen source pieces are disjoint, and for each destination piece the volumes of its overlaps with them add up to its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from ckptkit.core.boxes import Box, ranges
from ckptkit.core.catalog import ROLE_CODE, ROLES, Catalog
from ckptkit.core.dtypes import DType
from ckptkit.core.joins import BoxSet, overlaps
from ckptkit.core.pieces import Pieces
from ckptkit.core.replicas import disjoint, shared_tensors
from ckptkit.errors import CoverageError, LayoutError

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
Key = tuple[str, str]
"""A canonical tensor's name and a role."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Values that change their dtype or role on the way."""

    tensor: str
    role: str
    from_role: str
    source: DType
    destination: DType

    @property
    def lossless(self) -> bool:
        """Whether the bits come back when cast the other way."""
        exact = {
            ("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64"),
            ("bfloat16", "float64"), ("float16", "float64"),
        }  # fmt: skip
        return self.source is self.destination or (self.source.name, self.destination.name) in exact


@dataclass(frozen=True, slots=True)
class Drop:
    """Source values that do not reach the destination, and why."""

    tensor: str
    role: str
    nbytes: int
    why: str


@dataclass
class Plan:
    """The copies from `source` to `destination`.

    Attributes:
        src, dst: Parallel columns: positions in `source_pieces` and `destination.pieces`, sorted by `dst`.
        source_pieces: Disjoint pieces of the source (replicas and overlaps removed).
        replicas: Pairs `(kept, other)` of positions in `source.pieces` whose boxes overlap: they must hold equal values.
        key_source: For each destination key, the source key that its values come from.
        casts, drops: What changes and what is left behind.
        elements: Elements of the destination, all of which are copied.
    """

    source: Catalog
    destination: Catalog
    src: U32
    dst: U32
    source_pieces: Pieces
    replicas: tuple[U32, U32]
    key_source: dict[Key, Key]
    casts: list[Cast] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    elements: int = 0

    @property
    def lossless(self) -> bool:
        return not self.drops and all(cast.lossless for cast in self.casts)

    def pairs_into(self, files: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """Positions in `src` and `dst` of the pairs that fill some destination files, file by file."""
        order, bounds = self._by_file
        begin = bounds[files]
        return order[ranges(begin, bounds[files + 1] - begin)[1]]

    @cached_property
    def _by_file(self) -> tuple[U32, I64]:
        """Pairs ordered by destination file, and where each file's begin."""
        file = self.destination.entries.file[self.destination.pieces.entry[self.dst]]
        order = np.argsort(file, kind="stable").astype(np.uint32)
        return order, np.searchsorted(file[order], np.arange(len(self.destination.files) + 1))


def resolve(
    source: Mapping[Key, DType], wanted: Mapping[Key, DType], *, master_from_param: bool = False
) -> dict[Key, Key]:
    """Which source key each wanted key is made from (design: roles resolve by rule).

    A parameter comes from the parameter, else from its master copy; and from the master copy also where more bits are
    wanted than the parameter has, since widening what was rounded only appends zeros. A master copy comes from the
    master, else from a float32 parameter, else from any parameter when `master_from_param`.

    Raises:
        CoverageError: a wanted key has no source.
    """
    found: dict[Key, Key] = {}
    missing: list[Key] = []
    for (tensor, role), dtype in wanted.items():
        options = [(tensor, role)]
        if role == "param":
            param = source.get((tensor, "param"))
            wider = param is not None and dtype.is_float and dtype.itemsize > param.itemsize
            options.insert(0 if wider else 1, (tensor, "master"))
        elif role == "master":
            param = source.get((tensor, "param"))
            if param is not None and (param.name == "float32" or master_from_param):
                options.append((tensor, "param"))
        origin = next((option for option in options if option in source), None)
        if origin is None:
            missing.append((tensor, role))
        else:
            found[tensor, role] = origin
    if missing:
        tensor, role = missing[0]
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        hint = ""
        if role == "master" and (tensor, "param") in source:
            hint = "; its parameter is there in lower precision: --master-from-param makes the master from it"
        raise CoverageError(
            f"the source has no {role} of {tensor}{more}{hint}", tensor=tensor, missing=missing
        )
    return found


def make_plan(source: Catalog, destination: Catalog, *, master_from_param: bool = False) -> Plan:
    """Cover every piece of `destination` with pieces of `source`, and prove it.

    Raises:
        CoverageError: an element of the destination has no source; names tensor, box and files.
        LayoutError: a tensor has another shape in the two.
    """
    held = source.held
    wanted = destination.held
    key_source = resolve(held, wanted, master_from_param=master_from_param)
    for tensor in dict.fromkeys(name for name, _ in wanted):
        ours, theirs = source.tensors[tensor], destination.tensors[tensor]
        if ours.shape != theirs.shape:
            raise LayoutError(
                f"{tensor} has shape {ours.shape} in {source.where} and {theirs.shape} in {destination.where}",
                tensor=tensor,
            )
    numbers = {key: number for number, key in enumerate(dict.fromkeys(key_source.values()))}
    source_key = _keys(source, numbers)
    target_key = _keys(destination, {key: numbers[key_source[key]] for key in wanted})
    width = max(source.width, destination.width)
    kept, replicas = disjoint(source, source_key, shared_tensors(source))
    left = BoxSet(_keys_of(source, kept, numbers), _widen(kept.lo, width, 0), _widen(kept.hi, width, 1))
    target = destination.pieces
    right = BoxSet(target_key, _widen(target.lo, width, 0), _widen(target.hi, width, 1))
    volume = target.volume
    got = np.zeros(len(target), np.int64)
    src_parts, dst_parts = [], []
    for i, j in overlaps(left, right):
        size = np.ones(len(i), np.int64)
        for d in range(width):
            size *= np.minimum(left.hi[i, d], right.hi[j, d]) - np.maximum(left.lo[i, d], right.lo[j, d])
        np.add.at(got, j, size)
        src_parts.append(i.astype(np.uint32))
        dst_parts.append(j.astype(np.uint32))
    src = np.concatenate(src_parts) if src_parts else np.zeros(0, np.uint32)
    dst = np.concatenate(dst_parts) if dst_parts else np.zeros(0, np.uint32)
    short = np.flatnonzero(got != volume)
    if len(short):
        _raise_gap(source, destination, int(short[0]), len(short), int(got[short[0]]), int(volume[short[0]]))
    order = np.argsort(dst, kind="stable")
    plan = Plan(
        source, destination, src[order], dst[order], kept, replicas, key_source, elements=int(volume.sum())
    )
    for key, origin in key_source.items():
        if origin[1] != key[1] or held[origin] is not wanted[key]:
            plan.casts.append(Cast(key[0], key[1], origin[1], held[origin], wanted[key]))
    stored = np.zeros(len(numbers), np.int64)
    np.add.at(stored, left.key, kept.volume)
    plan.drops = _drops(plan, volume, {key: int(stored[number]) for key, number in numbers.items()})
    return plan


def _keys(catalog: Catalog, numbers: Mapping[Key, int]) -> I64:
    """The number of each piece's key; -1 for keys without one."""
    return _keys_of(catalog, catalog.pieces, numbers)


def _keys_of(catalog: Catalog, pieces: Pieces, numbers: Mapping[Key, int]) -> I64:
    table = np.full((len(catalog.tensors), len(ROLES)), -1, np.int64)
    position = {name: index for index, name in enumerate(catalog.tensors)}
    for (tensor, role), number in numbers.items():
        table[position[tensor], ROLE_CODE[role]] = number
    return table[catalog.segments.tensor[pieces.segment], catalog.entries.role[pieces.entry]]


def _widen(columns: npt.NDArray[np.signedinteger], width: int, fill: int) -> npt.NDArray[np.signedinteger]:
    if columns.shape[1] == width:
        return columns
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])), constant_values=fill)


def _raise_gap(source: Catalog, destination: Catalog, piece: int, count: int, got: int, volume: int) -> None:
    pieces = destination.pieces
    tensor = destination.tensor_list[int(destination.segments.tensor[pieces.segment[piece]])]
    axes = len(tensor.shape)
    box = Box(tuple(map(int, pieces.lo[piece][:axes])), tuple(map(int, pieces.hi[piece][:axes])))
    more = f" (and {count - 1} more pieces)" if count > 1 else ""
    raise CoverageError(
        f"{source.where} holds {got} of the {volume} elements of {destination.describe_piece(piece)}{more}. "
        "A shard is missing or incomplete; `ckptkit verify` on the source names it",
        tensor=tensor.name,
        box=str(box),
    )


def _drops(plan: Plan, volume: I64, stored: Mapping[Key, int]) -> list[Drop]:
    """Source keys that nothing is made from, and those of which the destination has only a part.

    `volume` is that of each destination piece, `stored` the elements that the source has of each key in use.
    """
    source, destination = plan.source, plan.destination
    position = {name: number for number, name in enumerate(destination.tensors)}
    covered = np.zeros(len(position) * len(ROLES), np.int64)
    key = destination.piece_key
    shared = shared_tensors(destination)
    again = shared[destination.segments.tensor[destination.pieces.segment]]
    np.add.at(covered, key[~again], volume[~again])
    if again.any():
        once, _ = disjoint(destination, np.where(again, key, -1), shared)
        tensor = destination.segments.tensor[once.segment].astype(np.int64)
        np.add.at(covered, tensor * len(ROLES) + destination.entries.role[once.entry], once.volume)
    most: dict[Key, int] = {}
    for (name, role), origin in plan.key_source.items():
        reached = int(covered[position[name] * len(ROLES) + ROLE_CODE[role]])
        most[origin] = max(reached, most.get(origin, 0))
    drops = []
    for (name, role), dtype in source.held.items():
        key_ = name, role
        if key_ not in most:
            size = prod(source.tensors[name].shape)
            drops.append(Drop(name, role, size * dtype.itemsize, "not asked for"))
        elif stored[key_] > most[key_]:
            lost = stored[key_] - most[key_]
            drops.append(Drop(name, role, lost * dtype.itemsize, "the destination has room for a part only"))
    return drops
