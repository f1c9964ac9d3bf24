"""Shards: which rank of a layout stores which run of which local tensor.

Weights that several ranks hold are stored once, dealt out evenly; optimizer state follows the ZeRO rule. The result is a
catalog whose entries have a rank (as `file`) but no offsets yet: formats place them.
"""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ckptkit.core import zero
from ckptkit.core.catalog import ROLE_CODE, Catalog, Entries, File
from ckptkit.core.dtypes import DType
from ckptkit.core.layouts import Layout
from ckptkit.core.schema import STATE_ROLES, Names, Placement, StoredNames, Tensor
from ckptkit.errors import LayoutError

CHUNK = 1 << 16
"""Replicated tensors are not cut into runs of fewer elements than this."""


def deal(shapes: Sequence[tuple[int, ...]], ranks: int) -> zero.Cut:
    """Share replicated tensors out over the ranks that hold them, balanced by elements.

    Large tensors are cut in equal runs of about an eighth of a rank's share; runs are dealt largest first to the rank
    with the least. With one rank nothing is cut.
    """
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    chunk = sum(sizes) if ranks == 1 else max(CHUNK, -(-sum(sizes) // (8 * ranks)))
    runs = []
    for tensor, size in enumerate(sizes):
        count = max(1, -(-size // max(chunk, 1)))
        edges = [size * k // count for k in range(count + 1)]
        runs += [(tensor, a, b) for a, b in zip(edges, edges[1:], strict=False)]
    load = [(0, rank) for rank in range(ranks)]
    owner = np.zeros(len(runs), np.int64)
    for index in sorted(range(len(runs)), key=lambda k: (runs[k][1] - runs[k][2], k)):
        total, rank = load[0]
        owner[index] = rank
        heapq.heapreplace(load, (total + runs[index][2] - runs[index][1], rank))
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
    roles = [_common_roles(p, roles_of) for p in placements]
    shapes = [p.local.shape for p in placements]
    parts: list[Entries] = []

    def add(local: np.ndarray, role: str, rank: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
        dtype = np.asarray([roles[index][role].code for index in local], np.uint8)
        parts.append(Entries(rank, local, np.full(len(local), ROLE_CODE[role]), dtype, first, last))

    for role in ROLE_CODE:
        having = [k for k, has in enumerate(roles) if role in has]
        state = role in STATE_ROLES
        cut_state = layout.zero and (state or layout.zero == 3) and role != "buffer"
        dealt = [
            k for k in having if not cut_state or 0 in shapes[k]
        ]  # empty tensors have an entry, but no run
        having = [k for k in having if cut_state and 0 not in shapes[k]]
        if layout.zero == 3:
            _cut_groups(layout, placements, having, shapes, role, add, lambda s, n: zero.rows(s, n))
        else:
            # Kinds of optimizer have buffers of their own.
            kinds: dict[frozenset[str], list[int]] = defaultdict(list)
            for k in having:
                kinds[frozenset(r for r in roles[k] if r in STATE_ROLES)].append(k)
            for members in kinds.values():
                _cut_groups(
                    layout, placements, members, shapes, role, add, lambda s, n: zero.cut(layout.rule, s, n)
                )
        by_ranks: dict[bytes, list[int]] = defaultdict(list)
        for k in dealt:
            by_ranks[placements[k].ranks.tobytes()].append(k)
        for members in by_ranks.values():
            ranks = placements[members[0]].ranks
            cut = deal([shapes[k] for k in members], len(ranks))
            add(np.asarray(members)[cut.tensor], role, ranks[cut.rank], cut.first, cut.last)
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


def _cut_groups(layout, placements, members, shapes, role, add, rule) -> None:  # type: ignore[no-untyped-def]
    """Cut tensors over the data-parallel group of every model-parallel coordinate, dropping equal runs of replicas."""
    for expert in (False, True):
        mesh = layout.expert if expert else layout.dense
        if expert:
            group_of = mesh["pp"] * (layout.ep * layout.etp) + mesh["ep"] * layout.etp + mesh["etp"]
        else:
            group_of = mesh["pp"] * layout.tp + mesh["tp"]
        size = layout.edp if expert else layout.cp * layout.dp
        rank_at = np.zeros((int(group_of.max()) + 1, size), np.int64)
        rank_at[group_of, mesh["shard"]] = np.arange(layout.world)
        inside: dict[int, list[int]] = defaultdict(list)
        for k in members:
            if placements[k].expert == expert:
                for group in np.unique(group_of[placements[k].ranks]):
                    inside[int(group)].append(k)
        columns = []
        cuts: dict[tuple[tuple[int, ...], ...], zero.Cut] = {}
        for group, list_ in inside.items():
            signature = tuple(shapes[k] for k in list_)
            cut = cuts.get(signature)
            if cut is None:
                cut = cuts[signature] = rule(signature, size)
            columns.append((np.asarray(list_)[cut.tensor], rank_at[group][cut.rank], cut.first, cut.last))
        if not columns:
            continue
        local, rank, first, last = (np.concatenate(c) for c in zip(*columns, strict=True))
        # The same run in several groups (a norm on every tensor-parallel rank) is stored once; owners take turns.
        order = np.lexsort((rank, last, first, local))
        same = np.zeros(len(order), bool)
        for column in (local, first, last):
            column_ = column[order]
            same[1:] = (
                (column_[1:] == column_[:-1]) if column is local else same[1:] & (column_[1:] == column_[:-1])
            )
        start = np.flatnonzero(~same)
        count = np.diff([*start, len(order)])
        keep = order[start + local[order[start]] % count]
        add(local[keep], role, rank[keep], first[keep], last[keep])


def _common_roles(placement: Placement, roles_of: Mapping[str, Mapping[str, DType]]) -> Mapping[str, DType]:
    """Roles of a local tensor; its canonical parts must agree."""
    local = placement.local
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
