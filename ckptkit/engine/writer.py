"""Writing slabs: literals and padding before, digests and checksums while the bytes are hot, segments for the journal.

A *segment* is 64 MiB of a file's data (or all of its header): the unit that the journal knows. It enters the journal once
its slabs are written and the file was synced, which a thread of its own does about once a second.
"""

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from ckptkit.core.catalog import LEAF, Leaves
from ckptkit.core.destination import Destination, Fixup, Written
from ckptkit.engine import checksums
from ckptkit.engine.digests import crc32, digest
from ckptkit.engine.fingerprinting import Prints, Sums, named, total
from ckptkit.engine.grids import Grid
from ckptkit.engine.journal import Durable, Journal
from ckptkit.engine.mover import GUARD, Buffer, Mover, Slab
from ckptkit.engine.schedule import Schedule
from ckptkit.engine.sources import OpenFiles, Sources
from ckptkit.engine.ways import Way
from ckptkit.stores.folder import FileWriter, Folder

SEGMENT = 64 << 20
_SYNCS = 8


class Outputs:
    """The files being written, and what is known of their bytes.

    Attributes:
        files: Open files, by number.
        way: Whether slabs bypass the page cache.
        segments: Grid of segments, with all of a header in one.
        unsynced: Files written to since they were last synced.
    """

    def __init__(self, folder: Folder, destination: Destination, way: Way) -> None:
        self.folder, self.destination, self.way = folder, destination, way
        catalog = destination.catalog
        self.sizes = np.asarray([file.size for file in catalog.files], np.int64)
        # Without digests cells start at the file's first byte, which is aligned as direct writes need it.
        starts = [file.data_start if destination.digests else 0 for file in catalog.files]
        self.origins = np.minimum(np.asarray(starts, np.int64), self.sizes)
        self.files: OpenFiles[FileWriter] = OpenFiles(
            lambda n: folder.file(
                catalog.files[n].path, catalog.files[n].size, way.possible and self.sizes[n] >= LEAF
            )
        )
        self._starts: list[int] = self.origins.tolist()
        heads = (self.origins > 0).astype(np.int64)
        self._first = np.concatenate([[0], np.cumsum(heads + -(-(self.sizes - self.origins) // SEGMENT))])
        self.segments = int(self._first[-1])
        self.unsynced: set[int] = set()
        self._digests: dict[int, bytearray] = {}  # by file: 16 bytes a leaf
        self.sums: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)  # by segment
        self.prints: dict[int, Sums] = {}  # by segment
        self._lock = threading.Lock()
        # In an ordered folder they are filled in on the way (`ckptkit.engine.ordered`).
        fixups = {} if folder.ordered else destination.fixups
        self.fixups = {n: sorted(f, key=lambda x: (x.start, x.stop)) for n, f in fixups.items() if f}
        self._fixup_starts = {n: [f.start for f in fixups] for n, fixups in self.fixups.items()}
        self.done = np.zeros(self.segments, bool)

    def segment(
        self, file: npt.NDArray[np.integer] | int, start: npt.NDArray[np.integer] | int
    ) -> npt.NDArray[np.int64]:
        """The segment that holds the byte `start` of a file, numbered through all files."""
        origin = self.origins[file]
        inside = (origin > 0) + (start - origin) // SEGMENT
        return self._first[file] + np.where(start < origin, 0, inside)

    def locate(self, segment: int) -> tuple[int, int]:
        """`(file, number in the file)` of a segment."""
        file = int(np.searchsorted(self._first, segment, side="right")) - 1
        return file, segment - int(self._first[file])

    def segments_of(self, file: int) -> range:
        """All segments of a file."""
        return range(int(self._first[file]), int(self._first[file + 1]))

    def segment_bytes(self, segment: int) -> int:
        file, number = self.locate(segment)
        origin, size = int(self.origins[file]), int(self.sizes[file])
        data = number - int(origin > 0)
        return origin if data < 0 else min(SEGMENT, size - origin - data * SEGMENT)

    def leaf_range(self, file: int, number: int) -> tuple[int, int]:
        """Leaves of a segment of a file, which is given by its number in the file."""
        data = number - int(self.origins[file] > 0)
        if data < 0 or not self.destination.digests:
            return 0, 0
        per = SEGMENT // LEAF
        return data * per, min((data + 1) * per, self.leaf_count(file))

    def leaf_count(self, file: int) -> int:
        return int(-(-(self.sizes[file] - self.origins[file]) // LEAF))

    def _table(self, file: int) -> bytearray:
        found = self._digests.get(file)
        if found is None:
            with self._lock:
                found = self._digests.setdefault(file, bytearray(16 * self.leaf_count(file)))
        return found

    def set_digest(self, file: int, leaf: int, value: bytes) -> None:
        self._table(file)[16 * leaf : 16 * leaf + 16] = value

    def restore(self, durable: list[Durable]) -> list[Durable]:
        """Take over segments that a former run made durable; gives those that still are."""
        held = []
        for row in durable:
            if self.folder.file_size(self.destination.catalog.files[row.file].path) != self.sizes[row.file]:
                continue  # the journal outlived the file: it is written again
            segment = int(self._first[row.file]) + row.segment
            first, last = self.leaf_range(row.file, row.segment)
            if last > first:
                self._table(row.file)[16 * first : 16 * last] = row.digests
            self.sums[segment] = list(row.sums)
            self.prints[segment] = dict(row.prints)
            self.done[segment] = True
            held.append(row)
        if self.folder.ordered:  # a file is whole or it is written again
            file = np.repeat(np.arange(len(self.sizes)), np.diff(self._first))
            whole = np.bincount(file, self.done, len(self.sizes)) == np.diff(self._first)
            self.done &= whole[file]
            held = [row for row in held if whole[row.file]]
        return held

    def durable(self, segment: int) -> Durable:
        """The journal's line for a segment."""
        file, number = self.locate(segment)
        first, last = self.leaf_range(file, number)
        digests = bytes(self._table(file)[16 * first : 16 * last]) if last > first else b""
        prints = tuple(self.prints.get(segment, {}).items())
        return Durable(file, number, digests, tuple(self.sums.get(segment, ())), prints)

    def record(self, slab: Slab, data: memoryview, segment: int) -> None:
        """Compute what depends on a slab's bytes."""
        fixups = self.fixups.get(slab.file)
        if fixups:
            first = max(bisect_right(self._fixup_starts[slab.file], slab.start) - 1, 0)
            found = []
            for number in range(first, len(fixups)):
                fixup = fixups[number]
                low, high = max(fixup.start, slab.start), min(fixup.stop, slab.stop)
                if fixup.start >= slab.stop:
                    break
                if low < high:
                    found.append((number, low, high, crc32(data[low - slab.start : high - slab.start])))
            if found:
                with self._lock:
                    self.sums[segment].extend(found)
        origin = self._starts[slab.file]
        if self.destination.digests and slab.start >= origin:
            table = self._table(slab.file)
            at = 16 * ((slab.start - origin) // LEAF)
            for offset in range(0, slab.stop - slab.start, LEAF):
                table[at : at + 16] = digest(data[offset : offset + LEAF])
                at += 16

    def add_prints(self, segment: int, sums: Sums) -> None:
        """Add a cell's parts of fingerprints to those of its segment."""
        if sums:
            with self._lock:
                self.prints[segment] = total([self.prints.get(segment, {}), sums])

    def apply_fixups(self) -> None:
        """Write every computed field, and digest the leaves they lie in again. All slabs must be written."""
        parts: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for segment, sums in self.sums.items():
            file, _ = self.locate(segment)
            for number, low, high, crc in sums:
                parts[file, number].append((low, high, crc))
        for file, fixups in self.fixups.items():
            out = self.files.take(file)
            try:
                touched = set()
                for number, fixup in enumerate(fixups):
                    value = self._value(fixup, parts.get((file, number), []))
                    for offset in fixup.offsets:
                        out.write(offset, memoryview(value))
                        self.unsynced.add(file)
                        touched |= {offset, offset + len(value) - 1}
                if self.destination.digests:
                    self._digest_again(out, file, touched)
            finally:
                self.files.give(file)

    @staticmethod
    def _value(fixup: Fixup, parts: list[tuple[int, int, int]]) -> bytes:
        if fixup.kind != "crc32":
            raise ValueError(f"there is no fix-up of kind {fixup.kind!r}")
        return checksums.total(fixup.start, fixup.stop, parts).to_bytes(4, "little")

    def _digest_again(self, out: FileWriter, file: int, offsets: set[int]) -> None:
        origin = self._starts[file]
        for leaf in {(offset - origin) // LEAF for offset in offsets if offset >= origin}:
            data = out.read(origin + leaf * LEAF, min(LEAF, out.size - origin - leaf * LEAF))
            self.set_digest(file, leaf, digest(data))

    def sync_all(self) -> None:
        """Make every file durable, those without any byte included."""
        empty = np.flatnonzero(self.sizes == 0).tolist()
        self.sync([*self.unsynced, *empty])

    def sync(self, numbers: Iterable[int]) -> None:
        """Make files durable, several at a time: file systems write their journal once for all who wait for it."""
        wanted = list(set(numbers))
        if len(wanted) == 1:
            self._sync(wanted[0])
        elif wanted:
            with ThreadPoolExecutor(min(len(wanted), _SYNCS), "sync") as pool:
                list(pool.map(self._sync, wanted))

    def _sync(self, number: int) -> None:
        # Before the sync: what is written from here on counts as not synced.
        self.unsynced.discard(number)
        file = self.files.take(number)
        try:
            file.sync()
        except BaseException:
            self.unsynced.add(number)
            raise
        finally:
            self.files.give(number)

    def leaves(self, number: int) -> Leaves | None:
        """The digests of a file that is written; None where the destination asks for none."""
        if not self.destination.digests:
            return None
        start = int(self.origins[number])
        table = np.frombuffer(bytes(self._table(number)), np.uint8).reshape(-1, 16)
        return Leaves(start, self.destination.catalog.files[number].size - start, table)

    def result(self) -> list[Written]:
        """What was written, file by file."""
        found = []
        catalog = self.destination.catalog
        parts: dict[int, list[Sums]] = defaultdict(list)
        for segment, sums in self.prints.items():
            parts[self.locate(segment)[0]].append(sums)
        for number, file in enumerate(catalog.files):
            prints = None
            if self.destination.fingerprints:
                prints = named(catalog, total(parts[number]))
            found.append(Written(file.path, file.size, self.leaves(number), prints))
        return found


class Writer(Mover):
    """Assembles the destination's slabs and writes them."""

    def __init__(self, sources: Sources, schedule: Schedule, stop: threading.Event, outputs: Outputs) -> None:
        super().__init__(sources, schedule, stop)
        self.outputs = outputs
        self.complete: list[int] = []  # segments whose slabs are all written, not yet in the journal
        self._literals = _literals_by_slab(outputs.destination, schedule.slabs)
        slabs = schedule.order
        start, _ = schedule.slabs.bounds(slabs)
        self._segment_of = np.full(schedule.slabs.cells, -1, np.int64)
        self._segment_of[slabs] = outputs.segment(schedule.slabs.file(slabs), start)
        self._left = np.bincount(self._segment_of[slabs], minlength=outputs.segments).tolist()
        self._prints: Prints | None = None
        if outputs.destination.fingerprints:
            self._prints = Prints(outputs.destination.catalog, schedule.slabs, self._segment_of >= 0)
        self._lock = threading.Lock()
        self.done_bytes = 0

    def begin(self, slab: Slab, buffer: Buffer) -> None:
        literals = self._literals.get(slab.number, ())
        size = slab.stop - slab.start
        if slab.covered + sum(len(data) for _, data in literals) < size:
            buffer.array[GUARD : GUARD + size] = 0
        for offset, data in literals:
            buffer.view[GUARD + offset : GUARD + offset + len(data)] = data

    def finish(self, slab: Slab, data: memoryview) -> None:
        outputs = self.outputs
        segment = int(self._segment_of[slab.number])
        outputs.record(slab, data, segment)
        if self._prints is not None:
            outputs.add_prints(segment, self._prints.of(slab.number, slab.start, data))
        out = outputs.files.take(slab.file)
        try:
            out.write(slab.start, data, outputs.way.direct)
        finally:
            outputs.files.give(slab.file)
        outputs.unsynced.add(slab.file)
        with self._lock:
            self.done_bytes += slab.stop - slab.start
            self._left[segment] -= 1
            if not self._left[segment]:
                self.complete.append(segment)

    def ready(self, segments: list[int]) -> tuple[list[int], list[int]]:
        """Of complete segments, those that can be made durable, and the others."""
        return segments, []

    def make_durable(self, journal: Journal) -> int:
        """Sync the files of complete segments, then tell the journal. Gives their bytes."""
        with self._lock:
            segments, self.complete = self.ready(self.complete)
        if not segments:
            return 0
        files = {self.outputs.locate(segment)[0] for segment in segments}
        self.outputs.sync(files & self.outputs.unsynced)
        journal.append(self.outputs.durable(segment) for segment in segments)
        return sum(self.outputs.segment_bytes(segment) for segment in segments)


def _literals_by_slab(destination: Destination, slabs: Grid) -> dict[int, list[tuple[int, memoryview]]]:
    """Literals cut at slabs: by slab, `(offset in the slab, bytes)`."""
    found: dict[int, list[tuple[int, memoryview]]] = defaultdict(list)
    for file, literals in destination.literals.items():
        for literal in literals:
            if not literal.data:
                continue
            data, stop = memoryview(literal.data), literal.offset + len(literal.data)
            first, last = slabs.cell(
                np.asarray([file, file]), np.asarray([literal.offset, stop - 1])
            ).tolist()
            start, end = slabs.bounds(np.arange(first, last + 1))
            for cell, low, high in zip(range(first, last + 1), start.tolist(), end.tolist(), strict=True):
                a, b = max(low, literal.offset), min(high, stop)
                found[cell].append((a - low, data[a - literal.offset : b - literal.offset]))
    return found
