"""Writing files from first byte to last, for folders that take no other order (remote stores).

Tasks come in the order of the files' offsets, and only so far apart (`executor.Window`). A slab that is complete before its
turn is copied and waits. Computed fields follow the data that they depend on, and are filled in as they pass.
"""

import threading
from collections.abc import Sequence
from heapq import heappop, heappush

from ckptkit.core.destination import Fixup
from ckptkit.engine.digests import crc32
from ckptkit.engine.mover import Slab
from ckptkit.engine.schedule import Schedule
from ckptkit.engine.sources import Sources
from ckptkit.engine.writer import Outputs, Writer


class _File:
    """One file's turn."""

    __slots__ = ("busy", "fields", "lock", "next", "waiting")

    def __init__(self, start: int, fixups: Sequence[Fixup]) -> None:
        self.lock = threading.Lock()
        self.busy = False  # whether a thread is writing
        self.next = start
        self.waiting: dict[int, tuple[Slab, bytearray]] = {}  # by start
        self.fields = Fields(fixups)


class Fields:
    """The computed fields of one file whose bytes pass in order.

    Raises ValueError for a field that lies before the end of what it is computed from.
    """

    def __init__(self, fixups: Sequence[Fixup]) -> None:
        self._fixups = sorted(fixups, key=lambda fixup: fixup.start)
        for fixup in self._fixups:
            if fixup.kind != "crc32" or min(fixup.offsets) < fixup.stop:
                raise ValueError(f"{fixup} cannot be filled in as bytes pass")
        self._first = 0  # of the fix-ups that are not computed yet; their ranges are disjoint
        self._crc = 0
        self._known: list[tuple[int, bytes]] = []  # a heap of fields that are still to pass

    def fill(self, start: int, data: memoryview) -> None:
        """Take the bytes from `start` on into account, then fill in the fields that lie among them."""
        stop = start + data.nbytes
        while self._first < len(self._fixups) and self._fixups[self._first].start < stop:
            fixup = self._fixups[self._first]
            self._crc = crc32(data[max(fixup.start - start, 0) : fixup.stop - start], self._crc)
            if fixup.stop > stop:
                break
            value = self._crc.to_bytes(4, "little")
            for offset in fixup.offsets:
                heappush(self._known, (offset, value))
            self._first, self._crc = self._first + 1, 0
        while self._known and self._known[0][0] < stop:
            offset, value = heappop(self._known)
            inside = value[: stop - offset]
            data[offset - start : offset - start + len(inside)] = inside
            if len(inside) < len(value):
                heappush(self._known, (stop, value[len(inside) :]))
                break


class OrderedWriter(Writer):
    """As `Writer`, with the slabs of each file written in order."""

    def __init__(self, sources: Sources, schedule: Schedule, stop: threading.Event, outputs: Outputs) -> None:
        super().__init__(sources, schedule, stop, outputs)
        files, (start, _) = schedule.slabs.file(schedule.order), schedule.slabs.bounds(schedule.order)
        first: dict[int, int] = {}
        self._slabs_left: dict[int, int] = {}
        for file, at in zip(files.tolist(), start.tolist(), strict=True):
            first.setdefault(file, at)
            self._slabs_left[file] = self._slabs_left.get(file, 0) + 1
        fixups = outputs.destination.fixups
        self._files = {file: _File(at, fixups.get(file, ())) for file, at in first.items()}

    def finish(self, slab: Slab, data: memoryview) -> None:
        file = self._files[slab.file]
        with file.lock:
            if file.busy or slab.start != file.next:
                file.waiting[slab.start] = slab, bytearray(data)
                return
            file.busy = True
        while True:
            file.fields.fill(slab.start, data)
            super().finish(slab, data)
            with self._lock:
                self._slabs_left[slab.file] -= 1
            with file.lock:
                file.next = slab.stop
                found = file.waiting.pop(slab.stop, None)
                if found is None:
                    file.busy = False
                    return
            slab, data = found[0], memoryview(found[1])

    def ready(self, segments: list[int]) -> tuple[list[int], list[int]]:
        """Segments of files all of whose slabs are written, and the others."""
        whole = [s for s in segments if not self._slabs_left[self.outputs.locate(s)[0]]]
        return whole, [s for s in segments if self._slabs_left[self.outputs.locate(s)[0]]]
