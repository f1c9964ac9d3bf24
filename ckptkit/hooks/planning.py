"""Planning a save: who stores what, laid out once for all saves of a layout.

Every rank describes what it holds as the columns of a native index. Rank 0 puts the descriptions together, deals what several ranks hold
out over them by bytes, places every entry as a native checkpoint does, and gives all ranks the index. From it each rank knows its own
file: the header, and where each of its tensors goes.
"""

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from ckptkit.core.catalog import ITEMSIZE, ROLES, Catalog, Entries, Extras, File
from ckptkit.core.dtypes import TABLE
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor
from ckptkit.core.schema import Tensor
from ckptkit.core.shards import deal
from ckptkit.errors import CkptError, LayoutError, UsageError
from ckptkit.formats.native import NativeFormat
from ckptkit.formats.native_columns import Columns, file_name
from ckptkit.formats.native_header import Headers
from ckptkit.formats.native_index import index_bytes, parse_index
from ckptkit.formats.native_manifest import about, coordinate_name
from ckptkit.hooks.holdings import Holding, Places, catalog_of
from ckptkit.hooks.meeting import Meeting, rebuilt, split_ranks


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes of this rank's file: elements `[first, last)` of a holding (counted from its own first) at `offset` in the file."""

    holding: int
    first: int
    last: int
    offset: int


@dataclass(frozen=True)
class Replicas:
    """Holdings that the same ranks hold, all of them; their values must be equal. `holdings` come in the same order on each."""

    name: str
    ranks: tuple[int, ...]
    holdings: tuple[int, ...]


@dataclass(frozen=True)
class SavePlan:
    """What this rank writes at every save.

    Attributes:
        layout: World and mesh of the run.
        coordinate: Of this rank, as extras are keyed.
        index, index_hash: The content of `index.npz`, and its digest in hex.
        header: All bytes of this rank's file before its data; they do not change from save to save.
        size: Bytes of this rank's file.
        largest: Bytes of the largest file of any rank.
        total: Bytes of all files.
        moves: Sorted by offset.
        replicas: What this rank shares with others.
        about: What rank 0's extras say of the checkpoint.
        groups: Canonical tensors of each optimizer group, over all ranks.
    """

    layout: Layout
    coordinate: str
    index: bytes
    index_hash: str
    header: bytes
    size: int
    largest: int
    total: int
    moves: tuple[Move, ...]
    replicas: tuple[Replicas, ...]
    about: Mapping[str, Any]
    groups: list[list[str]]
    rank: int

    @property
    def path(self) -> str:
        """This rank's file."""
        return file_name(self.rank)


def make_save_plan(
    meeting: Meeting,
    holdings: Sequence[Holding],
    places: Places,
    layout: Layout,
    groups: list[list[str]],
    tag: str,
    *,
    distrusted: frozenset[int] = frozenset(),
) -> SavePlan:
    """Plan the saves of all ranks together. Every rank calls it.

    Args:
        tag: Names this plan among all of the run.
        distrusted: Ranks whose replicas are not saved where another rank has them too.

    Raises:
        UsageError: ranks describe different models or layouts; names the ranks and what differs.
        StoreError: a rank did not arrive in time.
    """
    catalog = catalog_of(holdings, places, meeting.rank, f"rank {meeting.rank}", data_start=8)
    data = index_bytes(Columns.of(catalog))
    mine = {
        "layout": str(layout), "names": places.names, "schema": places.model.schema.id if places.model is not None else None,
        "config": xxhash.xxh3_128_hexdigest(json.dumps(places.model.config, sort_keys=True, default=str).encode())
        if places.model is not None else None,
        "groups": groups, "description": xxhash.xxh3_128_hexdigest(data),
    }  # fmt: skip
    if meeting.world > 1:
        # Replicas say the same; who says it first sends it.
        name = f"{tag}/described/{mine['description']}"
        if not meeting.there(name):
            meeting.flag(name, zlib.compress(data, 1))
    said = json.dumps(mine).encode()
    if meeting.lead:
        try:
            every = [json.loads(one) for one in meeting.collect(tag, said)]
            result = _decide(meeting, every, data, places, layout, tag, distrusted)
        except CkptError as error:
            meeting.publish(
                f"{tag}/plan", _packed({"error": {"kind": type(error).__name__, "message": str(error)}}, b"")
            )
            raise
        meeting.publish(f"{tag}/plan", result)
    else:
        meeting.post(tag, said)
        result = meeting.read(f"{tag}/plan", meeting.timeout_s + 5.0)
    head, index = _unpacked(result)
    if "error" in head:
        raise rebuilt(head["error"])
    return _own(
        meeting, layout, parse_index("index", index), index, head, parse_index("own", data), places, tag
    )


def _packed(head: Mapping[str, Any], index: bytes) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + zlib.compress(index, 1)


def _unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), zlib.decompress(data[8 + size :])


def _decide(
    meeting: Meeting,
    every: Sequence[Mapping[str, Any]],
    own: bytes,
    places: Places,
    layout: Layout,
    tag: str,
    distrusted: frozenset[int],
) -> bytes:
    """On rank 0: the index of all ranks, and who shares what with whom."""
    for what in ("layout", "names", "schema", "config"):
        said = split_ranks([one[what] for one in every])
        if len(said) > 1:
            raise UsageError(
                f"ranks register differently: {what} is "
                + ", but ".join(
                    f"{value} on rank{'s' if len(r) > 1 else ''} {_some(r)}" for value, r in said.items()
                )
            )
    if layout.world != meeting.world:
        raise LayoutError(f"layout {layout} has {layout.world} ranks, but {meeting.world} registered")
    counts = split_ranks([len(one["groups"]) for one in every])
    if len(counts) > 1:
        raise UsageError(f"ranks have different numbers of optimizer groups: {counts}")
    merged = _Merged()
    described: dict[str, Columns] = {every[0]["description"]: parse_index("rank 0", own)}
    for rank, one in enumerate(every):
        key = one["description"]
        if key not in described:
            data = zlib.decompress(meeting.read(f"{tag}/described/{key}"))
            described[key] = parse_index(f"rank {rank}", data)
        merged.add(rank, key, described[key])
    shards, sets = merged.dealt(layout, distrusted)
    shards.model, shards.names = places.model, places.names
    for number, (_, rows) in enumerate(sets):
        meeting.publish(f"{tag}/shared/{number}", _rows_bytes(rows))
    destination = NativeFormat().lay_out(shards)
    index = index_bytes(Columns.of(destination.catalog))
    groups = [
        list(dict.fromkeys(name for one in every for name in one["groups"][number]))
        for number in range(len(every[0]["groups"]))
    ]
    alone = meeting.world == 1
    return _packed({"replicas": [] if alone else [ranks for ranks, _ in sets], "groups": groups}, index)


def _rows_bytes(rows: np.ndarray) -> bytes:
    return zlib.compress(np.ascontiguousarray(rows, "<i8").tobytes(), 1)


class _Merged:
    """The holdings of all ranks as rows: local tensor, role, dtype, run, and the ranks that hold it."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[Tensor, int]] = {}
        self.locals: dict[LocalTensor, int] = {}
        self.rows: dict[tuple[int, int, int, int, int], list[int]] = {}
        self._known: dict[str, list[tuple[int, int, int, int, int]]] = {}

    def add(self, rank: int, key: str, columns: Columns) -> None:
        """Add what one rank describes. Raises UsageError where it contradicts an earlier rank."""
        rows = self._known.get(key)
        if rows is None:
            for tensor in columns.tensors:
                known, by = self.tensors.setdefault(tensor.name, (tensor, rank))
                if known != tensor:
                    raise UsageError(
                        f"ranks register differently: {tensor.name} has shape {known.shape} on rank {by} and {tensor.shape} on "
                        f"rank {rank}",
                        tensor=tensor.name,
                    )
            numbers = [self.locals.setdefault(local, len(self.locals)) for local in columns.locals()]
            entries = columns.entries
            local = np.asarray(numbers, np.int64)[entries.local] if len(entries) else np.zeros(0, np.int64)
            listed = (local, entries.role, entries.dtype, entries.first, entries.last)
            rows = self._known[key] = list(zip(*(column.tolist() for column in listed), strict=True))
        for row in rows:
            self.rows.setdefault(row, []).append(rank)

    def dealt(
        self, layout: Layout, distrusted: frozenset[int]
    ) -> tuple[Catalog, list[tuple[list[int], np.ndarray]]]:
        """The catalog of all files, not placed yet; and the sets of ranks that share holdings, each with rows (local, role, first, last)."""
        self._check_dtypes()
        table = np.asarray(list(self.rows), np.int64).reshape(-1, 5)
        local, role, dtype, first, last = table.T
        holders = list(self.rows.values())
        by_ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for row, ranks in enumerate(holders):
            by_ranks[tuple(ranks)].append(row)
        load = np.zeros(layout.world, np.int64)
        parts: list[Entries] = []

        def put(rows: np.ndarray, rank: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
            parts.append(Entries(rank, local[rows], role[rows], dtype[rows], a, b))
            np.add.at(load, rank, (b - a) * ITEMSIZE[dtype[rows]])

        for alone, listed in by_ranks.items():
            if len(alone) == 1:
                rows = np.asarray(listed)
                put(rows, np.full(len(rows), alone[0]), first[rows], last[rows])
        for holders_, listed in sorted(by_ranks.items(), key=lambda item: -len(item[0])):
            if len(holders_) == 1:
                continue
            members = np.asarray(listed)
            for width in np.unique(ITEMSIZE[dtype[members]]).tolist():
                rows = members[ITEMSIZE[dtype[members]] == width]
                owners = np.asarray([rank for rank in holders_ if rank not in distrusted] or holders_)
                cut = deal(
                    [(int(last[r] - first[r]),) for r in rows], len(owners), (load[owners] // width).tolist()
                )
                mine = rows[cut.tensor]
                put(mine, owners[cut.rank], first[mine] + cut.first, first[mine] + cut.last)
        locals_ = list(self.locals)
        catalog = Catalog(
            format="", where="the run", tensors={name: tensor for name, (tensor, _) in self.tensors.items()}, locals=locals_,
            files=[File("", rank=rank) for rank in range(layout.world)], entries=Entries.concat(parts), layout=layout,
            extras=Extras(),
        )  # fmt: skip
        shared = [
            (list(several), table[np.asarray(listed)][:, [0, 1, 3, 4]])
            for several, listed in by_ranks.items()
            if len(several) > 1
        ]
        return catalog, shared

    def _check_dtypes(self) -> None:
        """One dtype for each tensor and role. Raises UsageError that names the ranks."""
        of: dict[tuple[str, int], tuple[int, int]] = {}
        locals_ = list(self.locals)
        for (local, role, dtype, _, _), ranks in self.rows.items():
            for segment in locals_[local].segments:
                known, by = of.setdefault((segment.tensor, role), (dtype, ranks[0]))
                if known != dtype:
                    raise UsageError(
                        f"ranks register differently: {segment.tensor} ({ROLES[role]}) is {TABLE[known]} on rank {by} and "
                        f"{TABLE[dtype]} on rank {ranks[0]}",
                        tensor=segment.tensor,
                    )


def _own(
    meeting: Meeting,
    layout: Layout,
    columns: Columns,
    index: bytes,
    head: Mapping[str, Any],
    own: Columns,
    places: Places,
    tag: str,
) -> SavePlan:
    """This rank's part of the plan."""
    rank, model = meeting.rank, places.model
    schema, config = (model.schema.id, model.config) if model is not None else (None, None)
    common = {"world": layout.world, "layout": str(layout), "names": places.names, "schema": schema}
    headers = Headers(columns, _gaps(columns), common, NativeFormat.header_limit)
    start, size = int(columns.data_starts[rank]), int(columns.sizes[rank])
    header = headers.text(rank)
    assert len(header) == start, f"a header of {len(header)} bytes where the index has {start}"
    # Which holding an entry is part of: both sides in the one form that an index gives local tensors.
    number_of = {local: k for k, local in enumerate(columns.locals())}
    entries = own.entries
    mine = [number_of[local] for local in own.locals()]
    runs: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    held = zip(
        entries.local.tolist(),
        entries.role.tolist(),
        entries.first.tolist(),
        entries.last.tolist(),
        strict=True,
    )
    for holding, (local, role, first, last) in enumerate(held):
        runs[mine[local], role].append((first, last, holding))
    moves: list[Move] = []
    all_ = columns.entries
    for row in np.flatnonzero(all_.file == rank).tolist():
        a, b = int(all_.first[row]), int(all_.last[row])
        for first, last, holding in runs[int(all_.local[row]), int(all_.role[row])]:
            if first <= a and b <= last:
                moves.append(Move(holding, a - first, b - first, start + int(all_.offset[row])))
                break
        else:
            raise AssertionError(f"rank {rank} is to store a run that it does not hold")
    shared = []
    for number, ranks in enumerate(head["replicas"]):
        if rank in ranks:
            rows = np.frombuffer(zlib.decompress(meeting.read(f"{tag}/shared/{number}")), "<i8").reshape(
                -1, 4
            )
            which = {(*key, first, last): h for key, listed in runs.items() for first, last, h in listed}
            shared.append(
                Replicas(str(number), tuple(ranks), tuple(which[tuple(row)] for row in rows.tolist()))
            )
    plan = SavePlan(
        rank=rank, layout=layout, coordinate=coordinate_name(layout, rank), index=index, index_hash=xxhash.xxh3_128_hexdigest(index),
        header=header, size=size, largest=int(columns.sizes.max()), total=int(columns.sizes.sum()),
        moves=tuple(sorted(moves, key=lambda move: move.offset)), replicas=tuple(shared),
        about=about(layout, places.names, schema, config), groups=head["groups"],
    )  # fmt: skip
    return plan


def _gaps(columns: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Padding between entries, as columns file, offset, nbytes: what `Headers` takes."""
    entries = columns.entries  # sorted by file and offset
    start, end = entries.offset, entries.offset + entries.nbytes
    same = np.ones(len(entries), bool)
    same[:1] = False
    same[1:] = entries.file[1:] == entries.file[:-1]
    before = np.where(same, np.concatenate([[0], end[:-1]]) if len(end) else end, 0)
    gap = np.flatnonzero(start > before)
    return entries.file[gap].astype(np.int64), before[gap].astype(np.int64), (start - before)[gap]


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
