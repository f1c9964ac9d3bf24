"""Shards: which rank of a layout stores which run of which local tensor.

Weights that several ranks hold are stored once, dealt out evenly; optimizer state follows the ZeRO rule. The result is a
catalog whose entries have a rank (as `file`) but no offsets yet: formats place them.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from ckptkit.core import zero
from ckptkit.core.boxes import Ints
from ckptkit.core.catalog import ITEMSIZE, ROLE_CODE, Catalog, Entries, File
from ckptkit.core.dtypes import TABLE, DType
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.core.names import Names, Placement, StoredNames
from ckptkit.core.schema import STATE_ROLES, Tensor
from ckptkit.errors import LayoutError

CHUNK = 1 << 16
"""Replicated tensors are not cut into runs of fewer elements than this."""


def deal(shapes: Sequence[tuple[int, ...]], ranks: int, load: Sequence[int] | None = None) -> zero.Cut:
    """Share replicated tensors out over the ranks that hold them, balanced by elements.

    Large tensors are cut in equal runs of about an eighth of a rank's share; runs are dealt largest first to the rank
    with the least. With one rank nothing is cut.

    Args:
        load: What each rank has already, in elements; nothing unless given.
    """
    sizes = [prod(shape) for shape in shapes]
    chunk = sum(sizes) if ranks == 1 else max(CHUNK, -(-sum(sizes) // (8 * ranks)))
    runs = []
    for tensor, size in enumerate(sizes):
        count = max(1, -(-size // max(chunk, 1)))
        edges = [size * k // count for k in range(count + 1)]
        runs += [(tensor, a, b) for a, b in pairwise(edges)]
    least = [(0 if load is None else int(load[rank]), rank) for rank in range(ranks)]
    heapq.heapify(least)
    owner = np.zeros(len(runs), np.int64)
    for index in sorted(range(len(runs)), key=lambda k: (runs[k][1] - runs[k][2], k)):
        total, rank = least[0]
        owner[index] = rank
        heapq.heapreplace(least, (total + runs[index][2] - runs[index][1], rank))
    columns = np.asarray(runs, np.int64).reshape(-1, 3)
    return zero.Cut(columns[:, 0], owner, columns[:, 1], columns[:, 2])


def shards(
    names: Names | StoredNames,
    layout: Layout,
    held: Mapping[tuple[str, str], DType],
    tensors: Mapping[str, Tensor],
    *,
    where: str = "destination",
    pad: bool = True,
) -> Catalog:
    """The destination catalog of a layout: every `(tensor, role)` of `held`, in that dtype, on the ranks that store it.

    Args:
        names: The family whose local tensors are stored, in its module order.
        held: What to store. A local tensor made of several canonical ones needs the same roles and dtypes for all.
        tensors: Canonical tensors.
        pad: Whether rules may pad an axis (a vocabulary).

    Raises:
        LayoutError: the layout does not fit the model, or a local tensor's parts differ in role or dtype.
    """
    roles_of: dict[str, dict[str, DType]] = defaultdict(dict)
    for (tensor, role), dtype in held.items():
        roles_of[tensor][role] = dtype
    placements = [
        p for p in names.placements(layout, pad) if any(s.tensor in roles_of for s in p.local.segments)
    ]
    roles = [_common_roles(p.local, roles_of) for p in placements]
    shapes = [p.local.shape for p in placements]
    groups = _Groups(layout, placements)
    load = np.zeros(layout.world, np.int64)  # bytes dealt to each rank: many small deals balance together
    parts: list[Entries] = []
    for role, code in ROLE_CODE.items():
        having = [k for k, has in enumerate(roles) if role in has]
        if not having:
            continue
        dtypes = np.zeros(len(placements), np.uint8)
        dtypes[having] = [roles[k][role].code for k in having]

        def add(
            local: Ints, rank: Ints, first: Ints, last: Ints, role: int, dtypes: npt.NDArray[np.uint8]
        ) -> None:
            parts.append(
                Entries(rank, local, np.full(len(local), role, np.uint8), dtypes[local], first, last)
            )

        state = role in STATE_ROLES
        is_cut = layout.zero > 0 and (state or layout.zero == 3) and role != "buffer"
        # Kinds of optimizer have buffers of their own. An empty tensor has an entry, but no run.
        kinds: dict[frozenset[str], list[int]] = defaultdict(list)
        by_ranks: dict[bytes, list[int]] = defaultdict(list)
        for k in having:
            if not is_cut or 0 in shapes[k]:
                by_ranks[placements[k].ranks.tobytes()].append(k)
            else:
                kinds[frozenset(roles[k]).intersection(STATE_ROLES)].append(k)
        for members in kinds.values():
            for local, rank, first, last in groups.cut(members):
                add(local, rank, first, last, code, dtypes)
        for members in by_ranks.values():
            ranks = placements[members[0]].ranks
            width = TABLE[dtypes[members[0]]].itemsize
            cut = deal([shapes[k] for k in members], len(ranks), (load[ranks] // width).tolist())
            local = np.asarray(members)[cut.tensor]
            np.add.at(load, ranks[cut.rank], (cut.last - cut.first) * ITEMSIZE[dtypes[local]])
            add(local, ranks[cut.rank], cut.first, cut.last, code, dtypes)
    return Catalog(
        format="",
        where=where,
        tensors=tensors,
        locals=[p.local for p in placements],
        files=[File("", rank=rank) for rank in range(layout.world)],
        entries=Entries.concat(parts),
        layout=layout,
        model=names.model if isinstance(names, Names) else None,
        names=names.name,
    )


class _Groups:
    """The data-parallel group of every model-parallel coordinate, on the dense and on the expert mesh."""

    def __init__(self, layout: Layout, placements: Sequence[Placement]) -> None:
        self.layout = layout
        self.placements = placements
        dense, expert = layout.dense, layout.expert
        self.group_of = {
            False: dense["pp"] * layout.tp + dense["tp"],
            True: (expert["pp"] * layout.ep + expert["ep"]) * layout.etp + expert["etp"],
        }
        self.size = {False: layout.cp * layout.dp, True: layout.edp}
        self.rank_at: dict[bool, Ints] = {}
        for on_experts, mesh in ((False, dense), (True, expert)):
            group = self.group_of[on_experts]
            self.rank_at[on_experts] = np.zeros((int(group.max()) + 1, self.size[on_experts]), np.int64)
            self.rank_at[on_experts][group, mesh["shard"]] = np.arange(layout.world)
        self._holding: dict[tuple[bool, int], list[int]] = {}
        self._cuts: dict[tuple[int, tuple[tuple[int, ...], ...]], zero.Cut] = {}

    def holding(self, placement: Placement) -> list[int]:
        """The groups that hold a local tensor. Placements of one stage and coordinate share their array of ranks."""
        key = placement.expert, id(placement.ranks)
        if key not in self._holding:
            self._holding[key] = np.unique(self.group_of[placement.expert][placement.ranks]).tolist()
        return self._holding[key]

    def cut(self, members: Sequence[int]) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
        """Columns (placement, rank, first, last) of the runs of some placements; equal runs of replicas come once."""
        for expert in (False, True):
            inside: dict[int, list[int]] = defaultdict(list)
            for k in members:
                if self.placements[k].expert == expert:
                    for group in self.holding(self.placements[k]):
                        inside[group].append(k)
            columns = []
            for group, mine in inside.items():
                cut = self._rule(tuple(self.placements[k].local.shape for k in mine), self.size[expert])
                rank = self.rank_at[expert][group][cut.rank]
                columns.append((np.asarray(mine)[cut.tensor], rank, cut.first, cut.last))
            if columns:
                local, rank, first, last = (np.concatenate(c) for c in zip(*columns, strict=True))
                yield _once(local, rank, first, last)

    def _rule(self, shapes: tuple[tuple[int, ...], ...], ranks: int) -> zero.Cut:
        """The cut of a group's buffer; groups of alike tensors (experts) share it."""
        key = ranks, shapes
        if key not in self._cuts:
            layout = self.layout
            self._cuts[key] = (
                zero.rows(shapes, ranks) if layout.zero == 3 else zero.cut(layout.rule, shapes, ranks)
            )
        return self._cuts[key]


def _once(local: Ints, rank: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """The same run in several groups (a norm on every tensor-parallel rank) is stored once; owners take turns."""
    order = np.lexsort((rank, last, first, local))
    local, rank, first, last = local[order], rank[order], first[order], last[order]
    new = np.ones(len(order), bool)
    new[1:] = (local[1:] != local[:-1]) | (first[1:] != first[:-1]) | (last[1:] != last[:-1])
    start = np.flatnonzero(new)
    count = np.diff(np.append(start, len(order)))
    keep = start + local[start] % count
    return local[keep], rank[keep], first[keep], last[keep]


def _common_roles(local: LocalTensor, roles_of: Mapping[str, Mapping[str, DType]]) -> Mapping[str, DType]:
    """Roles of a local tensor; its canonical parts must agree."""
    first = roles_of.get(local.segments[0].tensor, {})
    for segment in local.segments[1:]:
        other = roles_of.get(segment.tensor, {})
        if other != first:
            raise LayoutError(
                f"{local.key} is made of {local.segments[0].tensor} ({_roles(first)}) and {segment.tensor} "
                f"({_roles(other)}), which are not stored alike; take both or neither (--only), in one dtype",
                tensor=local.key,
            )
    return first


def _roles(roles: Mapping[str, DType]) -> str:
    return ", ".join(f"{role} {dtype}" for role, dtype in roles.items()) or "absent"
