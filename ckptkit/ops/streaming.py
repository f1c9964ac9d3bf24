"""Streaming: the canonical tensors of one or more checkpoints, chunk by chunk, whatever their layout and format.

All tensors are laid one after the other in one virtual file, and that file is assembled slab by slab with the plan and
the mover that a reshard uses, but never written. Checkpoints that are visited together have the same virtual file, so
that equal tensors give equal bytes. Memory is bounded by slabs; a source block that several slabs need may be read again.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ckptkit.core.boxes import Box
from ckptkit.core.catalog import ITEMSIZE, LEAF, ROLE_CODE, ROLES, Catalog, Entries, File
from ckptkit.core.copies import copies_into, replica_pairs
from ckptkit.core.dtypes import DType
from ckptkit.core.layouts import Layout
from ckptkit.core.names import StoredNames
from ckptkit.core.plan import Key, Plan, make_plan
from ckptkit.core.schema import Tensor
from ckptkit.core.shards import shards
from ckptkit.core.views import LocalTensor, Segment
from ckptkit.engine.executor import run_tasks, usable_cpus
from ckptkit.engine.grids import Grid
from ckptkit.engine.mover import Buffer, Mover, Slab, Worker
from ckptkit.engine.replicas import Comparer
from ckptkit.engine.schedule import make_schedule
from ckptkit.engine.sources import Sources
from ckptkit.ops.random_store import numpy_type
from ckptkit.ops.reports import Progress
from ckptkit.ops.sources import Source

SLAB = 4 << 20
_ALIGN = 64
"""Tensors start at multiples of this in the virtual file, so that no element straddles two slabs."""

Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements `[first, last)`, in row-major order, of a canonical tensor in one role.

    `bits` has the bytes of each checkpoint, in the order in which they were given; borrowed until the call returns.
    """

    key: Key
    first: int
    last: int
    bits: tuple[Bits, ...]


def visit(
    sources: Sequence[Source],
    held: Mapping[Key, DType],
    work: Callable[[Chunk], None],
    *,
    tensors: Mapping[str, Tensor] | None = None,
    threads: int | None = None,
    memory: int = 256 << 20,
    progress: Progress | None = None,
) -> None:
    """Call `work` with every chunk of `held`, from several threads at once, in no particular order.

    Args:
        held: What to visit, each in the dtype in which its bits are wanted; values are cast where they are stored otherwise.
        tensors: Canonical tensors; those of the first source unless given.

    Raises:
        CoverageError: a source lacks elements of `held`.
        LayoutError: a tensor has another shape in a source, or cannot be cast.
    """
    target = _virtual(sources[0].catalog, held, tensors)
    if not len(target.entries):
        return
    stop = threading.Event()
    lanes = [_Lane(source, target, stop) for source in sources]
    slabs = target.files[0].size // SLAB
    count = max(1, min(threads or usable_cpus(), slabs, memory // (2 * SLAB * len(lanes))))
    hands = [[_Hand() for _ in lanes] for _ in range(count)]
    starts = target.entries.offset
    ends = starts + target.entries.nbytes
    items = ITEMSIZE[target.entries.dtype].tolist()
    roles = [ROLES[code] for code in target.entries.role]
    names = [target.locals[local].key for local in target.entries.local.tolist()]
    done = [0] * count

    def one(slab: int, number: int) -> None:
        data = [lane.fill(slab, hand) for lane, hand in zip(lanes, hands[number], strict=True)]
        low = slab * SLAB
        first = int(np.searchsorted(ends, low, side="right"))
        last = int(np.searchsorted(starts, low + SLAB, side="left"))
        for entry in range(first, last):
            at = int(starts[entry])
            begin, end = max(at, low), min(int(ends[entry]), low + SLAB)
            bits = tuple(part[begin - low : end - low] for part in data)
            item = items[entry]
            work(Chunk((names[entry], roles[entry]), (begin - at) // item, (end - at) // item, bits))
        done[number] += SLAB * len(lanes)

    def tick() -> None:
        if progress is not None:
            progress(sum(done), slabs * SLAB * len(lanes))

    try:
        run_tasks(slabs, count, one, stop, tick)
        tick()
    finally:
        for lane in lanes:
            lane.close()


def read_box(source: Source, tensor: Tensor, role: str, box: Box) -> npt.NDArray[np.generic]:
    """The elements of a box as an array of its shape, in the numpy (or ml_dtypes) type of the dtype it is stored in."""
    dtype = source.catalog.held[tensor.name, role]
    out = np.zeros(box.size * dtype.itemsize, np.uint8)
    if box.size:
        axes = len(tensor.shape)
        segment = Segment(tensor.name, box, tuple(range(axes)), (1,) * axes, (0,) * axes)
        one = [0]
        target = Catalog(
            format="",
            where="memory",
            tensors={tensor.name: tensor},
            locals=[LocalTensor(tensor.name, box.shape, (segment,))],
            files=[File("box", -(-len(out) // SLAB) * SLAB)],
            entries=Entries(one, one, [ROLE_CODE[role]], [dtype.code], one, [box.size], one),
        )
        lane = _Lane(source, target, threading.Event())
        hand = _Hand()
        try:
            for slab in range(target.files[0].size // SLAB):
                part = out[slab * SLAB : (slab + 1) * SLAB]
                part[:] = lane.fill(slab, hand)[: len(part)]
        finally:
            lane.close()
    return out.view(numpy_type(dtype.name)).reshape(box.shape)


def prove(source: Source) -> Plan:
    """The plan that gathers everything the source holds: the proof that pieces cover every tensor.

    Raises:
        CoverageError: an element lies nowhere; names tensor, box and files.
    """
    return make_plan(source.catalog, _virtual(source.catalog, source.catalog.held, None))


def compare_replicas(source: Source, plan: Plan, threads: int | None = None) -> int:
    """Compare pieces of the source that hold the same elements, and return how many bytes that were.

    Raises:
        CorruptionError: two differ; names both files.
    """
    pairs = replica_pairs(plan)
    files = source.catalog.files
    sizes = np.asarray([file.size for file in files], np.int64)
    grid = Grid(sizes, np.asarray([file.data_start for file in files], np.int64), LEAF)
    schedule = make_schedule(pairs, grid, grid, np.ones(grid.cells, bool), LEAF, only_used=True)
    stop = threading.Event()
    comparer = Comparer(Sources(source.store, source.catalog, verify=False), schedule, stop)
    workers = [Worker(LEAF) for _ in range(threads or usable_cpus())]
    try:
        run_tasks(
            schedule.tasks, len(workers), lambda task, number: comparer.run_task(task, workers[number]), stop
        )
    finally:
        comparer.sources.close()
    return comparer.compared


def only_roles(source: Source, roles: Sequence[str]) -> Source:
    """The source as if it held these roles alone, so that others are made from them."""
    catalog = source.catalog
    keep = np.isin(catalog.entries.role, [ROLE_CODE[role] for role in roles])
    part = Catalog(
        format=catalog.format,
        where=catalog.where,
        tensors=catalog.tensors,
        locals=catalog.locals,
        files=catalog.files,
        entries=catalog.entries.take(np.flatnonzero(keep)),
        layout=catalog.layout,
        model=catalog.model,
        names=catalog.names,
        identities=catalog.identities,
    )
    return replace(source, catalog=part)


def _virtual(source: Catalog, held: Mapping[Key, DType], tensors: Mapping[str, Tensor] | None) -> Catalog:
    """The virtual file: every tensor whole, one after the other."""
    known = source.tensors if tensors is None else tensors
    wanted = {
        name: known[name] for name in dict.fromkeys(name for name, _ in held) if 0 not in known[name].shape
    }
    kept = {key: dtype for key, dtype in held.items() if key[0] in wanted}
    target = shards(StoredNames(wanted), Layout(), kept, wanted, where="memory", pad=False)
    sizes = -(-target.entries.nbytes // _ALIGN) * _ALIGN
    target.entries.offset[:] = np.cumsum(sizes) - sizes
    target.files[0].size = -(-int(sizes.sum()) // SLAB) * SLAB
    return target


class _Hand:
    """What one thread needs for one lane."""

    def __init__(self) -> None:
        self.worker = Worker(SLAB)
        self.data = np.empty(SLAB, np.uint8)


class _Lane(Mover):
    """One checkpoint, assembled slab by slab."""

    def __init__(self, source: Source, target: Catalog, stop: threading.Event) -> None:
        plan = make_plan(source.catalog, target)
        files = source.catalog.files
        sizes = np.asarray([file.size for file in files], np.int64)
        starts = np.asarray([file.data_start for file in files], np.int64)
        slabs = Grid(np.asarray([target.files[0].size], np.int64), np.zeros(1, np.int64), SLAB)
        schedule = make_schedule(
            copies_into(plan), slabs, Grid(sizes, starts, LEAF), np.ones(slabs.cells, bool), SLAB
        )
        # Every slab has the same size, so that each is a task of its own.
        self._task_of = {
            int(schedule.order[first]): task for task, first in enumerate(schedule.task_slab[:-1])
        }
        self._hand = threading.local()
        super().__init__(Sources(source.store, source.catalog, verify=False), schedule, stop)

    def fill(self, slab: int, hand: _Hand) -> Bits:
        """The bytes of one slab; they stay in `hand` until its next fill."""
        self._hand.data = hand.data
        self.run_task(self._task_of[slab], hand.worker)
        return hand.data

    def begin(self, slab: Slab, buffer: Buffer) -> None:
        """Padding between tensors is never looked at."""

    def finish(self, slab: Slab, data: memoryview) -> None:
        self._hand.data[:] = np.frombuffer(data, np.uint8)

    def close(self) -> None:
        self.sources.close()
