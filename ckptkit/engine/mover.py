"""Moving: one task's blocks are read once each and given to the slabs that need them.

Runs that are contiguous on both sides are read straight into the slab; everything else passes through a scratch block,
from where numpy copies it with strides, a whole run as one item. Buffers stay small enough for the CPU's cache where the
schedule makes slabs of a leaf, so a byte is digested, moved and written while it is hot.
"""

import mmap
import threading

import numpy as np
import numpy.typing as npt

from ckptkit.core.catalog import LEAF
from ckptkit.engine.checks import FileChecks
from ckptkit.engine.convert import convert, overflows
from ckptkit.engine.schedule import Schedule
from ckptkit.engine.sources import Sources
from ckptkit.stores.base import Reader

PAGE = 4096
GUARD = PAGE
"""Bytes before and after a slab, where elements that straddle its border may reach."""

_SCRATCH = LEAF + 64  # a block, and the rest of an element that starts in it
_HELD = 16  # source files that a task keeps open at a time
Bytes = npt.NDArray[np.uint8]


class Stopped(Exception):
    """The run is to stop: an error elsewhere, or the user."""


class Buffer:
    """A slab's room: page-aligned, with guards."""

    __slots__ = ("array", "data", "memory", "view")

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes + 2 * GUARD)
        self.view = memoryview(self.memory)
        self.array: Bytes = np.frombuffer(self.memory, np.uint8)


class Worker:
    """What one thread owns: its scratch block and its free buffers."""

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.scratch = Buffer(_SCRATCH)
        self.free: list[Buffer] = []
        self.bytes_in = 0
        self.overflows = 0
        self.open: dict[int, Buffer] = {}
        self.sources: dict[int, _Held] = {}

    def take(self) -> Buffer:
        return self.free.pop() if self.free else Buffer(self.slab_bytes)


class _Held:
    """A source file while a task uses it."""

    __slots__ = ("checks", "file", "reader")

    def __init__(self, file: int, reader: Reader, checks: FileChecks | None) -> None:
        self.file, self.reader, self.checks = file, reader, checks


class Slab:
    """What a slab is: its file, its range and how many of its bytes copies fill."""

    __slots__ = ("covered", "file", "number", "start", "stop")

    def __init__(self, number: int, file: int, start: int, stop: int, covered: int) -> None:
        self.number, self.file, self.start, self.stop, self.covered = number, file, start, stop, covered


class Mover:
    """Runs the tasks of a schedule. Subclasses say what happens to a slab before and after.

    Args:
        sources: Where blocks come from.
        schedule: What to do.
        stop: Set when the run is to end early; tasks then raise Stopped.
    """

    direct = True
    """Whether runs may be read straight into a slab."""

    def __init__(self, sources: Sources, schedule: Schedule, stop: threading.Event) -> None:
        self.sources, self.schedule, self.stop = sources, schedule, stop

    def begin(self, slab: Slab, buffer: Buffer) -> None:
        """Prepare a buffer before parts are moved into it."""
        raise NotImplementedError

    def finish(self, slab: Slab, data: memoryview) -> None:
        """Use a slab that is complete. `data` is borrowed."""
        raise NotImplementedError

    def put(self, target: Bytes, source: Bytes, row: int) -> None:
        """Bring bytes in place; both have the same shape and item size."""
        np.copyto(target, source)

    def run_task(self, task: int, worker: Worker) -> None:
        """Assemble and finish every slab of one task."""
        schedule = self.schedule
        slabs = self._slabs(task)
        first, last = int(schedule.task[task]), int(schedule.task[task + 1])
        parts = schedule.parts
        block = parts.block[first:last]
        slab_of = parts.slab[first:last]
        ends = np.flatnonzero(np.diff(block, append=-1)) + 1
        complete = schedule.last[slab_of] == np.arange(first, last)
        begin = 0
        numbers = block[ends - 1] if len(ends) else block
        starts, stops = schedule.blocks.bounds(numbers)
        files = schedule.blocks.file(numbers)
        reader = _TaskParts(schedule, first, last)
        done_at = np.flatnonzero(complete).tolist()
        done_slab = slab_of[complete].tolist()
        due = 0
        try:
            for end, file, start, stop in zip(
                ends.tolist(), files.tolist(), starts.tolist(), stops.tolist(), strict=True
            ):
                if self.stop.is_set():
                    raise Stopped
                self._block(reader, begin, end, self._hold(file, worker), start, stop, slabs, worker)
                while due < len(done_at) and done_at[due] < end:
                    self._finish(slabs.pop(done_slab[due]), worker)
                    due += 1
                begin = end
            for slab in list(slabs.values()):  # those without any part: headers, padding
                self._finish(slab, worker)
        finally:
            worker.free.extend(worker.open.values())
            worker.open.clear()
            self._release(worker)

    def _hold(self, file: int, worker: Worker) -> _Held:
        held = worker.sources.get(file)
        if held is None:
            if len(worker.sources) >= _HELD:
                self._release(worker)
            held = _Held(file, self.sources.files.take(file), self.sources.checks(file))
            worker.sources[file] = held
        return held

    def _release(self, worker: Worker) -> None:
        while worker.sources:
            self.sources.files.give(worker.sources.popitem()[0])

    def _slabs(self, task: int) -> dict[int, Slab]:
        schedule = self.schedule
        numbers = schedule.order[schedule.task_slab[task] : schedule.task_slab[task + 1]]
        start, stop = schedule.slabs.bounds(numbers)
        columns = (numbers, schedule.slabs.file(numbers), start, stop, schedule.covered[numbers])
        return {row[0]: Slab(*row) for row in zip(*(c.tolist() for c in columns), strict=True)}

    def _open(self, slab: Slab, worker: Worker) -> Buffer:
        buffer = worker.open.get(slab.number)
        if buffer is None:
            buffer = worker.open[slab.number] = worker.take()
            self.begin(slab, buffer)
        return buffer

    def _finish(self, slab: Slab, worker: Worker) -> None:
        buffer = self._open(slab, worker)
        self.finish(slab, buffer.view[GUARD : GUARD + slab.stop - slab.start])
        worker.free.append(worker.open.pop(slab.number))

    def _block(
        self,
        parts: "_TaskParts",
        begin: int,
        end: int,
        held: _Held,
        start: int,
        stop: int,
        slabs: dict[int, Slab],
        worker: Worker,
    ) -> None:
        """Read one block and move parts `[begin, end)`, which all come from it."""
        checks, leaf = held.checks, -1
        if checks is not None:
            leaf = checks.due(start)
            if leaf >= 0:
                stop = min(stop, checks.stop)
        if self.direct and parts.readable_directly(begin, end, held.reader.small_run):
            self._read_direct(parts, begin, end, held, start, stop, leaf, slabs, worker)
            return
        low, high = parts.extent(begin, end)
        if leaf >= 0:
            low, high = start, max(high, stop)
        view = worker.scratch.view[: high - low]
        held.reader.readinto(low, view)
        worker.bytes_in += high - low
        if leaf >= 0:
            assert checks is not None
            checks.see(leaf, [view[: stop - start]], parts.entry(begin))
        for part in range(begin, end):
            slab = slabs[parts.slab[part]]
            self._move(parts, part, self._open(slab, worker), slab.start, worker, low)

    def _read_direct(
        self,
        parts: "_TaskParts",
        begin: int,
        end: int,
        held: _Held,
        start: int,
        stop: int,
        leaf: int,
        slabs: dict[int, Slab],
        worker: Worker,
    ) -> None:
        """Read runs straight into their slabs; with a leaf to check, what lies between them goes to scratch."""
        views: list[memoryview] = []  # consecutive bytes of the source
        first = position = start if leaf >= 0 else parts.src[begin]
        for part in range(begin, end):
            low, high = parts.src[part], parts.src_end[part]
            if low > position:
                if leaf >= 0:
                    views.append(worker.scratch.view[position - start : low - start])
                else:
                    held.reader.scatter(first, views)
                    worker.bytes_in += position - first
                    views, first = [], low
            slab = slabs[parts.slab[part]]
            at = GUARD + parts.dst[part] - slab.start
            buffer = worker.open.get(slab.number) or self._open(slab, worker)
            views.append(buffer.view[at : at + high - low])
            position = high
        if leaf >= 0 and position < stop:
            views.append(worker.scratch.view[position - start : stop - start])
            position = stop
        held.reader.scatter(first, views)
        worker.bytes_in += position - first
        if leaf >= 0:
            assert held.checks is not None
            held.checks.see(leaf, views, parts.entry(begin))

    def _move(
        self, parts: "_TaskParts", part: int, buffer: Buffer, slab_start: int, worker: Worker, low: int
    ) -> None:
        scratch = worker.scratch
        src = parts.src[part] - low
        dst = GUARD + parts.dst[part] - slab_start
        if parts.flat[part]:
            nbytes = parts.src_end[part] - parts.src[part]
            self.put(buffer.array[dst : dst + nbytes], scratch.array[src : src + nbytes], parts.row[part])
            return
        shape, src_strides, dst_strides, src_item, dst_item, cast = parts.nest(part)
        source: Bytes = np.ndarray(shape, src_item, scratch.memory, src, src_strides)
        if cast is not None:
            bits = np.ascontiguousarray(source)
            made = convert(bits, *cast)
            worker.overflows += overflows(bits, cast[0], made, cast[1])
            source = made.reshape(shape)
        target: Bytes = np.ndarray(shape, dst_item, buffer.memory, dst, dst_strides)
        self.put(target, source, parts.row[part])


class _TaskParts:
    """The parts of one task as plain Python values, which a loop reads ten times faster than array elements."""

    __slots__ = ("_nests", "_schedule", "dst", "first", "flat", "row", "slab", "src", "src_end")

    def __init__(self, schedule: Schedule, first: int, last: int) -> None:
        parts = schedule.parts
        self._schedule, self.first = schedule, first
        self.slab: list[int] = parts.slab[first:last].tolist()
        self.row: list[int] = parts.row[first:last].tolist()
        self.src: list[int] = parts.src[first:last].tolist()
        self.src_end: list[int] = schedule.src_end[first:last].tolist()
        self.dst: list[int] = parts.dst[first:last].tolist()
        self.flat: list[bool] = schedule.flat[first:last].tolist()
        self._nests: dict[int, tuple] = {}
        strided = np.flatnonzero(~schedule.flat[first:last])
        if len(strided):
            row = parts.row[first + strided]
            at = first + strided
            # The outermost loop is the repeat, which most parts have once.
            shape = np.column_stack([schedule.repeat[at], parts.shape[at]])
            src = np.column_stack([schedule.src_step[at], schedule.strides.src[row]])
            dst = np.column_stack([schedule.dst_step[at], schedule.strides.dst[row]])
            columns = (shape, src, dst)
            self._nests = dict(
                zip(strided.tolist(), zip(*(c.tolist() for c in columns), strict=True), strict=True)
            )

    def entry(self, part: int) -> int:
        return int(self._schedule.copies.src_entry[self.row[part]])

    def extent(self, begin: int, end: int) -> tuple[int, int]:
        return min(self.src[begin:end]), max(self.src_end[begin:end])

    def readable_directly(self, begin: int, end: int, small_run: int) -> bool:
        """Whether all parts are runs, disjoint in the source, and large enough (`small_run`) for a read each."""
        if end - begin == 1:
            return self.flat[begin]
        if not all(self.flat[begin:end]):
            return False
        if (
            end - begin > 4
            and sum(self.src_end[begin:end]) - sum(self.src[begin:end]) < (end - begin) * small_run
        ):
            return False
        return all(self.src_end[k] <= self.src[k + 1] for k in range(begin, end - 1))

    def nest(self, part: int) -> tuple:
        """Arguments of the two strided arrays: shape, strides and item type of each side, and the cast if any.

        Without a cast a whole run is one item, so that numpy's inner loop runs over runs, not over bytes.
        """
        shape, src, dst = self._nests[part]
        strides, copies = self._schedule.strides, self._schedule.copies
        row = self.row[part]
        if strides.cast[row]:
            cast = int(copies.src_dtype[row]), int(copies.dst_dtype[row])
            return shape, src, dst, f"V{strides.src_unit[row]}", f"V{strides.dst_unit[row]}", cast
        item = f"V{shape[-1]}"
        loops = [axis for axis, size in enumerate(shape[:-1]) if size > 1]
        return (
            [shape[axis] for axis in loops],
            [src[axis] for axis in loops],
            [dst[axis] for axis in loops],
            item,
            item,
            None,
        )
