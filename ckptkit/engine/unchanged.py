"""Whole files that do not change: shared with the source by the file system where it can.

A destination file that equals a source file byte for byte (frozen weights, a layout that is the same for some ranks) is
cloned (`FICLONE`: XFS, Btrfs, bcachefs, some network file systems): no data moves, and the clone is
independent of the source. Where the file system cannot clone, files are written like all others, since a copy in the
kernel is buffered and slower than direct writes; their bytes pass through memory for the digests anyway.
"""

from collections.abc import Callable, Iterator

import numpy as np

from ckptkit.core.catalog import LEAF
from ckptkit.core.copies import Copies
from ckptkit.core.destination import Destination
from ckptkit.core.plan import Plan
from ckptkit.engine.checks import LeafChecks
from ckptkit.engine.digests import digest
from ckptkit.engine.fingerprinting import Prints
from ckptkit.engine.grids import Grid
from ckptkit.engine.sources import Sources
from ckptkit.engine.writer import Outputs
from ckptkit.stores.base import Reader
from ckptkit.stores.system import clone


def unchanged_files(plan: Plan, destination: Destination, copies: Copies) -> list[tuple[int, int]]:
    """`(destination file, source file)` of files whose data are one source file's data at the same offsets.

    Literals and padding are not compared yet.
    """
    same = (
        (copies.src == copies.dst)
        & (copies.src_dtype == copies.dst_dtype)
        & (copies.src_run == copies.dst_run)
    )
    same &= ((copies.shape == 1) | (copies.src_strides == copies.dst_strides)).all(axis=1)
    files = len(destination.catalog.files)
    rows = np.bincount(copies.dst_file, minlength=files)
    good = np.bincount(copies.dst_file, same, minlength=files)
    low, high = np.full(files, np.iinfo(np.int64).max), np.full(files, -1)
    np.minimum.at(low, copies.dst_file, copies.src_file)
    np.maximum.at(high, copies.dst_file, copies.src_file)
    found = []
    for number in np.flatnonzero((rows > 0) & (rows == good) & (low == high)).tolist():
        source = int(low[number])
        size = destination.catalog.files[number].size
        if size == plan.source.files[source].size and number not in destination.fixups:
            found.append((number, source))
    return found


def copy_unchanged(
    plan: Plan,
    destination: Destination,
    copies: Copies,
    sources: Sources,
    outputs: Outputs,
    clone: Callable[[int, int], bool] = clone,
) -> list[int]:
    """Clone what can be cloned; gives the numbers of the destination files that are done.

    Args:
        clone: Makes the second of two open files share the bytes of the first; gives False where that is impossible.
    """
    done: list[int] = []
    if outputs.folder.ordered:  # remote: there is no file to share with
        return done
    same = unchanged_files(plan, destination, copies)
    grid = Grid(outputs.sizes, outputs.origins, LEAF)
    prints: Prints | None = None
    if same and destination.fingerprints:
        chosen = np.isin(grid.file(np.arange(grid.cells)), [number for number, _ in same])
        prints = Prints(destination.catalog, grid, chosen)
    for number, source in same:
        path = sources.store.local_path(plan.source.files[source].path)
        size = int(outputs.sizes[number])
        first = outputs.segment(number, 0)
        if path is None or size < LEAF or outputs.done[first]:
            continue
        reader, out = sources.files.take(source), outputs.files.take(number)
        try:
            if not _others_equal(copies, destination, reader, number, size):
                continue
            with open(path, "rb") as file:
                cloned = clone(file.fileno(), out.fileno())
            if not cloned:
                return done
            outputs.unsynced.add(number)
            for offset, view in _take_digests(sources, outputs, reader, number, source, size):
                if prints is not None:
                    cell = int(grid.cell(np.asarray(number), np.asarray(offset)))
                    outputs.add_prints(int(outputs.segment(number, offset)), prints.of(cell, offset, view))
        finally:
            sources.files.give(source)
            outputs.files.give(number)
        done.append(number)
    return done


def _others_equal(copies: Copies, destination: Destination, reader: Reader, number: int, size: int) -> bool:
    """Whether what no copy covers (literals, padding) has the same bytes in the source file."""
    mine = np.flatnonzero(copies.dst_file == number)
    if int((copies.shape[mine].prod(axis=1) * copies.dst_run[mine]).sum()) > size:
        return False
    expected = [(literal.offset, literal.data) for literal in destination.literals.get(number, ())]
    covered = [(o, o + len(d)) for o, d in expected]
    for row in mine.tolist():
        if (copies.shape[row] != 1).any():
            return False
        covered.append((int(copies.dst[row]), int(copies.dst_end[row])))
    position = 0
    for low, high in [*sorted(covered), (size, size)]:
        while position < low:
            step = min(low - position, LEAF)
            expected.append((position, bytes(step)))
            position += step
        position = max(position, high)
    for offset, data in expected:
        found = bytearray(len(data))
        reader.readinto(offset, memoryview(found))
        if found != data:
            return False
    return True


def _take_digests(
    sources: Sources, outputs: Outputs, reader: Reader, number: int, source: int, size: int
) -> Iterator[tuple[int, memoryview]]:
    """Check the source's leaves, if they are to be checked, and give the clone its digests.

    Gives every leaf, with its offset; the buffer is used again.
    """
    checks = sources.checks(source)
    want = outputs.destination.digests
    if checks is None and not want:
        return
    origin = int(outputs.origins[number]) if want or checks is None else checks.start
    entry = int(np.flatnonzero(sources.catalog.entries.file == source)[0])
    buffer = memoryview(bytearray(LEAF))
    for leaf, offset in enumerate(range(origin, size, LEAF)):
        view = buffer[: min(LEAF, size - offset)]
        reader.readinto(offset, view)
        value = digest(view)
        if isinstance(checks, LeafChecks) and checks.start == origin:
            checks.compare(leaf, value, entry)
        elif checks is not None and checks.due(offset) >= 0:
            checks.see(checks.due(offset), [view], entry)
        if want:
            outputs.set_digest(number, leaf, value)
        yield offset, view
