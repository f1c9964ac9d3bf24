"""Schedules: in which order slabs are assembled, and from which blocks.

A *slab* is a cell of a destination file, assembled in one buffer and written once. A *block* is a cell of a source file,
read once and given to every slab that needs it. A *task* is a list of slabs that one worker assembles together:
slabs are ordered by where their first byte comes from, so that files which share source blocks advance in
lock-step, and a task is cut where its slabs would exceed their share of memory. Slabs of a task are finished and
their buffers used again as soon as their last block has passed; so most tasks hold a few at a time.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.core.copies import Copies
from ckptkit.engine.grids import Grid
from ckptkit.engine.split import Nests, Strides, nests, split_destination, split_source

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Schedule:
    """Work in order.

    Attributes:
        copies, strides: What parts refer to by row.
        slabs, blocks: The grids of the destination and the source.
        parts: Nests, sorted by task, then block in the order of need.
        src_end: One past the last source byte of each part.
        flat: Whether a part is one run of bytes on both sides.
        task: First part of each task, and the number of parts at the end.
        order: Slabs in the order of tasks; `task_slab` is the first of each task in it.
        covered: Destination bytes that parts fill, by slab.
        last: The last part of each slab, or -1 for slabs without any.
    """

    copies: Copies
    strides: Strides
    slabs: Grid
    blocks: Grid
    parts: Nests
    src_end: I64
    flat: npt.NDArray[np.bool_]
    task: I64
    order: I64
    task_slab: I64
    covered: I64
    last: I64

    @property
    def tasks(self) -> int:
        return len(self.task) - 1


def make_schedule(
    copies: Copies,
    slabs: Grid,
    blocks: Grid,
    wanted: npt.NDArray[np.bool_],
    task_bytes: int,
    *,
    only_used: bool = False,
) -> Schedule:
    """Order the assembly of slabs.

    Args:
        copies: What to move.
        slabs: Grid of the destination files; `blocks`: of the source files.
        wanted: By slab: whether it is still to be made.
        task_bytes: Slabs of a task have no more bytes than this together (but at least one slab).
        only_used: Leave out slabs that no copy touches.
    """
    strides = Strides(copies)
    parts = split_destination(nests(copies, strides), strides, slabs, copies.dst_file)
    parts = parts.take(np.flatnonzero(wanted[parts.slab]))
    # Where each slab's first byte comes from.
    anchor = np.full(slabs.cells, -1, np.int64)
    order = np.lexsort((parts.dst, parts.slab))
    first = order[np.flatnonzero(np.diff(parts.slab[order], prepend=-1))]
    anchor[parts.slab[first]] = blocks.cell(copies.src_file[parts.row[first]], parts.src[first])
    covered = np.bincount(
        parts.slab, parts.shape.prod(axis=1) * strides.dst_unit[parts.row], minlength=slabs.cells
    ).astype(np.int64)
    parts = split_source(parts, strides, blocks, copies.src_file)
    if only_used:
        wanted = wanted & (anchor >= 0)
    chosen = np.flatnonzero(wanted)
    ordered = chosen[np.lexsort((chosen, anchor[chosen]))]
    task_slab = _cut_tasks(slabs, ordered, task_bytes)
    place = np.zeros(slabs.cells, np.int64)
    place[ordered] = np.arange(len(ordered))
    task_of = np.searchsorted(task_slab, place[parts.slab], side="right") - 1
    parts, task_of = _in_order(parts, task_of, place)
    span = ((parts.shape - 1) * strides.src[parts.row]).sum(axis=1)
    last = np.full(slabs.cells, -1, np.int64)
    last[parts.slab] = np.arange(len(parts))  # the last assignment stays
    return Schedule(
        copies=copies,
        strides=strides,
        slabs=slabs,
        blocks=blocks,
        parts=parts,
        src_end=parts.src + span + strides.src_unit[parts.row],
        flat=(parts.shape[:, :-1] == 1).all(axis=1) & ~strides.cast[parts.row],
        task=np.searchsorted(task_of, np.arange(len(task_slab))),
        order=ordered,
        task_slab=task_slab,
        covered=covered,
        last=last,
    )


def _cut_tasks(slabs: Grid, ordered: I64, task_bytes: int) -> I64:
    """The first slab of each task, and the number of slabs at the end."""
    start, stop = slabs.bounds(ordered)
    number = (np.cumsum(stop - start) - 1) // task_bytes
    return np.concatenate([np.flatnonzero(np.diff(number, prepend=-1)), [len(ordered)]]).astype(np.int64)


def _in_order(parts: Nests, task: I64, place: I64) -> tuple[Nests, I64]:
    """Parts by task, block in order of first need, and source address; with the task of each."""
    order = np.lexsort((parts.block, task))
    new = (np.diff(task[order], prepend=-1) != 0) | (np.diff(parts.block[order], prepend=-1) != 0)
    start = np.flatnonzero(new)
    need = np.zeros(len(order), np.int64)
    if len(start):
        earliest = np.minimum.reduceat(place[parts.slab[order]], start)
        need[order] = earliest[np.cumsum(new) - 1]
    final = np.lexsort((parts.src, parts.block, need, task))
    return parts.take(final), task[final]
