"""Replicas: pieces that hold the same elements must hold the same bytes.

Every pair is a copy that would change nothing, so the comparison is a schedule like any other, whose slabs are
cells of the other replica's file. Bytes are compared as they are: NaN equals itself, and 0.0 differs from -0.0.
"""

import threading

import numpy as np

from ckptkit.core.copies import Copies
from ckptkit.engine.mover import GUARD, Buffer, Bytes, Mover, Slab
from ckptkit.engine.schedule import Schedule
from ckptkit.engine.sources import Sources
from ckptkit.errors import CorruptionError


class Comparer(Mover):
    """Fills each slab from the other replica's file, then compares every part with the kept one."""

    direct = False

    def __init__(self, sources: Sources, schedule: Schedule, stop: threading.Event) -> None:
        super().__init__(sources, schedule, stop)
        self.compared = 0
        self._lock = threading.Lock()

    def begin(self, slab: Slab, buffer: Buffer) -> None:
        view = buffer.view[GUARD : GUARD + slab.stop - slab.start]
        reader = self.sources.files.take(slab.file)
        try:
            reader.readinto(slab.start, view)
        finally:
            self.sources.files.give(slab.file)
        checks = self.sources.checks(slab.file)
        leaf = -1 if checks is None else checks.due(slab.start)
        if checks is not None and leaf >= 0:
            checks.see(leaf, [view[: checks.stop - slab.start]], self._entry(slab))

    def _entry(self, slab: Slab) -> int:
        """An entry of the slab's file that a pair refers to, for messages."""
        copies = self.schedule.copies
        inside = (copies.dst_file == slab.file) & (copies.dst < slab.stop) & (copies.dst_end > slab.start)
        return int(copies.dst_entry[np.flatnonzero(inside)[0]])

    def put(self, target: Bytes, source: Bytes, row: int) -> None:
        if not np.array_equal(_plain(target), _plain(source)):
            raise unequal(self.sources, self.schedule.copies, row)

    def finish(self, slab: Slab, data: memoryview) -> None:
        with self._lock:
            self.compared += data.nbytes


def _plain(array: Bytes) -> Bytes:
    """An array whose items numpy can compare fast: unsigned integers where there are any of that width."""
    width = array.dtype.itemsize
    if array.dtype.kind == "V":
        if width in (1, 2, 4, 8):
            return array.view(f"u{width}")
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return array


def unequal(sources: Sources, copies: Copies, row: int) -> CorruptionError:
    """The error for a pair of replicas that differ."""
    catalog = sources.catalog
    kept, other = int(copies.src_entry[row]), int(copies.dst_entry[row])
    pieces = catalog.pieces
    piece = int(np.flatnonzero(pieces.entry == kept)[0])
    files = catalog.files
    one, two = files[int(copies.src_file[row])].path, files[int(copies.dst_file[row])].path
    return CorruptionError(
        f"{catalog.where}: two copies of the same elements differ: {catalog.describe_piece(piece)}, and "
        f"{catalog.describe_entry(other)}. One of them is damaged or stale; `ckptkit diff --by rank` shows which ranks "
        "disagree, and --replicas first takes the first",
        file=one,
        other=two,
    )
