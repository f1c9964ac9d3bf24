"""Filling: running a plan into memory that lies somewhere, instead of a folder.

The destination's files are only addresses: each slab is assembled as for a file, with every source leaf checked when it is first
read, and then handed to a sink, which puts its bytes where they belong (live tensors, a device, a slot).
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.core.catalog import LEAF
from ckptkit.core.copies import Copies
from ckptkit.engine.executor import run_tasks, usable_cpus
from ckptkit.engine.grids import Grid
from ckptkit.engine.mover import GUARD, Buffer, Mover, Slab, Worker
from ckptkit.engine.schedule import Schedule, make_schedule
from ckptkit.engine.sources import Sources

Sink = Callable[[int, int, memoryview], None]
"""Takes a file's number, an offset and the bytes from there on, which are borrowed. Called from several threads."""


@dataclass(frozen=True, slots=True)
class Filled:
    """What `fill` did: bytes read of the source, leaves compared with their digests, values that a cast made infinite."""

    bytes_in: int
    checked_leaves: int
    overflows: int


class _Filler(Mover):
    """Gives every slab to a sink. Bytes that no copy fills (padding) are zeros."""

    def __init__(self, sources: Sources, schedule: Schedule, stop: threading.Event, sink: Sink) -> None:
        super().__init__(sources, schedule, stop)
        self._sink = sink

    def begin(self, slab: Slab, buffer: Buffer) -> None:
        size = slab.stop - slab.start
        if slab.covered < size:
            buffer.array[GUARD : GUARD + size] = 0

    def finish(self, slab: Slab, data: memoryview) -> None:
        self._sink(slab.file, slab.start, data)


def fill(
    copies: Copies,
    sources: Sources,
    sizes: npt.NDArray[np.int64],
    sink: Sink,
    *,
    threads: int | None = None,
    memory: int = 256 << 20,
    slab: int = LEAF,
) -> Filled:
    """Run copies into memory.

    Args:
        copies: Of a proven plan, or some of them.
        sources: The plan's source; opened with `verify`, every leaf is compared with its digest when it is first read.
        sizes: Bytes of each destination file.
        sink: Where assembled bytes go. Slabs without any copy are not assembled.
        memory: Bytes of buffers, for all workers together.
        slab: Bytes that are assembled at once.

    Raises:
        CorruptionError, FormatError, ShardMissingError, StoreError: as reading the source does. Some of the bytes were
            given to the sink.
    """
    stop = threading.Event()
    count = max(1, min(threads or usable_cpus(), memory // (4 * slab), 32))
    slabs = Grid(sizes, np.zeros(len(sizes), np.int64), slab)
    files = sources.catalog.files
    starts = np.asarray([file.data_start for file in files], np.int64)
    blocks = Grid(np.asarray([file.size for file in files], np.int64), starts, LEAF)
    share = max(memory // count - 2 * LEAF, slab)
    small = max(slab, -(-int(sizes.sum()) // (count * 4)))
    schedule = make_schedule(
        copies, slabs, blocks, np.ones(slabs.cells, bool), max(slab, min(share, small)), only_used=True
    )  # fmt: skip
    filler = _Filler(sources, schedule, stop, sink)
    workers = [Worker(slab) for _ in range(min(count, max(schedule.tasks, 1)))]
    run_tasks(schedule.tasks, len(workers), lambda task, number: filler.run_task(task, workers[number]), stop)
    return Filled(
        sum(worker.bytes_in for worker in workers),
        sources.checked,
        sum(worker.overflows for worker in workers),
    )
