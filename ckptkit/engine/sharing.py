"""Files shared with an earlier checkpoint: what did not change between two steps lies on the disk once.

A destination file whose bytes are those of a file of the base is replaced by a hard link to it, or by a clone where links cannot be. That they are equal is
known from digests; that the base still has these bytes is looked at before, since a link to damaged bytes would be worse than a copy of good ones.
"""

import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ckptkit.core.catalog import LEAF, Catalog, Leaves
from ckptkit.core.copies import Copies
from ckptkit.core.destination import Destination
from ckptkit.core.plan import Plan
from ckptkit.engine.digests import digest
from ckptkit.engine.fingerprinting import Prints, Sums
from ckptkit.engine.grids import Grid
from ckptkit.engine.sources import Sources
from ckptkit.engine.unchanged import unchanged_files
from ckptkit.engine.writer import Outputs
from ckptkit.errors import CkptError
from ckptkit.stores.base import Store
from ckptkit.stores.durable import UnfinishedFolder


class Base:
    """A checkpoint with digests, on a local file system, whose files may be shared."""

    def __init__(self, store: Store, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog
        self._numbers = {file.path: number for number, file in enumerate(catalog.files)}

    def leaves(self, path: str, size: int) -> Leaves | None:
        """The digests of a file of this path and size; None where the base has no such file."""
        number = self._numbers.get(path)
        if number is None or self._catalog.leaves is None or self._catalog.files[number].size != size:
            return None
        try:
            return self._catalog.leaves(number)
        except CkptError:
            return None  # what cannot be known to be equal is not shared

    def local_path(self, path: str) -> str | None:
        return self._store.local_path(path)


def share_unchanged(base: Base, plan: Plan, copies: Copies, sources: Sources, outputs: Outputs) -> list[int]:
    """Share files that are known to be the base's before anything is written: a source file as it is, with the base's digests.

    Gives the numbers of destination files that are done.
    """
    if sources.catalog.leaves is None:
        return []
    destination = outputs.destination
    known = {}
    for number, source in unchanged_files(plan, destination, copies):
        leaves = sources.catalog.leaves(source)
        if leaves is not None and not outputs.done[outputs.segments_of(number)].any():
            known[number] = leaves
    grid = Grid(outputs.sizes, outputs.origins, LEAF)
    prints: Prints | None = None
    if known and destination.fingerprints:
        prints = Prints(destination.catalog, grid, np.isin(grid.file(np.arange(grid.cells)), list(known)))

    def parts(number: int, leaf: int, view: memoryview) -> Sums:
        if prints is None:
            return {}
        offset = int(outputs.origins[number]) + leaf * LEAF
        return prints.of(int(grid.cell(np.asarray(number), np.asarray(offset))), offset, view)

    return [number for number, leaves in known.items() if _share(base, outputs, number, leaves, parts)]


def share_written(base: Base, outputs: Outputs, numbers: Sequence[int]) -> list[int]:
    """Share files that turned out to be the base's after they were written. Gives their numbers."""
    found = []
    for number in numbers:
        leaves = outputs.leaves(number)
        if leaves is not None and _share(base, outputs, number, leaves, lambda number, leaf, view: {}):
            found.append(number)
    return found


def _share(
    base: Base, outputs: Outputs, number: int, leaves: Leaves, parts: Callable[[int, int, memoryview], Sums]
) -> bool:
    """Share one file that should have these leaves; False where it is not the base's, or cannot be shared.

    `parts` gives what a leaf adds to fingerprints.
    """
    destination, expected = outputs.destination, leaves.digests
    file = destination.catalog.files[number]
    theirs, path = base.leaves(file.path, file.size), base.local_path(file.path)
    if theirs is None or path is None or not isinstance(outputs.folder, UnfinishedFolder):
        return False
    if not theirs.data_start == leaves.data_start == file.data_start or not np.array_equal(
        theirs.digests, expected
    ):
        return False
    sums = []
    try:
        for leaf, view in _leaves(path, file.data_start, file.size, _header(destination, number)):
            if digest(view) != expected[leaf].tobytes():
                return False
            segment = int(outputs.segment(number, file.data_start + leaf * LEAF))
            sums.append((segment, parts(number, leaf, view)))
    except (OSError, ValueError):
        return False
    if not outputs.folder.share(file.path, path):
        return False
    for segment, part in sums:
        outputs.add_prints(segment, part)
    outputs.unsynced.discard(number)  # what was written there is gone
    for leaf in range(len(expected)):
        outputs.set_digest(number, leaf, expected[leaf].tobytes())
    return True


def _header(destination: Destination, number: int) -> bytes:
    start = destination.catalog.files[number].data_start
    head = bytearray(start)
    for literal in destination.literals.get(number, ()):
        if literal.offset < start:
            part = literal.data[: start - literal.offset]
            head[literal.offset : literal.offset + len(part)] = part
    return bytes(head)


def _leaves(path: str, start: int, size: int, header: bytes) -> Iterator[tuple[int, memoryview]]:
    """Every leaf of a file. Raises ValueError where its header is another, or it ends early."""
    buffer = memoryview(bytearray(LEAF))
    with open(path, "rb") as file:
        if file.read(start) != header or os.fstat(file.fileno()).st_size != size:
            raise ValueError("another header")
        for leaf, offset in enumerate(range(start, size, LEAF)):
            view = buffer[: min(LEAF, size - offset)]
            if file.readinto(view) != len(view):
                raise ValueError("ends early")
            yield leaf, view
