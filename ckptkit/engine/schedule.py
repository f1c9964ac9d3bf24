"""Schedules: in which order slabs are assembled, and from which blocks.

A *slab* is a cell of a destination file, assembled in one buffer and written once. A *block* is a cell of a source file,
read once and given to every slab that needs it. A *task* is a list of slabs that one worker assembles together:
slabs are ordered by where their first byte comes from, so that files which share source blocks advance in
lock-step (where files must be written in order: by their own offsets, a few files at a time), and a task is cut where its slabs would exceed their share of memory. Slabs of a task are finished and
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
        repeat, src_step, dst_step: How often a part comes, and by how much further each time.
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
    repeat: I64
    src_step: I64
    dst_step: I64
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
    fold: bool = True,
    waves: I64 | None = None,
) -> Schedule:
    """Order the assembly of slabs.

    Args:
        copies: What to move.
        slabs: Grid of the destination files; `blocks`: of the source files.
        wanted: By slab: whether it is still to be made.
        task_bytes: Slabs of a task have no more bytes than this together (but at least one slab).
        only_used: Leave out slabs that no copy touches.
        fold: Make one part of neighbours that continue each other or come at equal distances; it then stands for
            several copies, and has the row of the first.
        waves: A number for each destination file, where files must be written from first byte to last: those of one wave
            advance together, by their own offsets, after those of earlier waves.
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
    if waves is None:
        ordered = chosen[np.lexsort((chosen, anchor[chosen]))]
    else:
        file, (start, _) = slabs.file(chosen), slabs.bounds(chosen)
        ordered = chosen[np.lexsort((file, start, waves[file]))]
    task_slab = _cut_tasks(slabs, ordered, task_bytes)
    place = np.zeros(slabs.cells, np.int64)
    place[ordered] = np.arange(len(ordered))
    task_of = np.searchsorted(task_slab, place[parts.slab], side="right") - 1
    parts, task_of = _in_order(parts, task_of, place)
    one = np.ones(len(parts), np.int64)
    repeat, src_step, dst_step = one, 0 * one, 0 * one
    if fold and len(parts) > 1:
        parts, task_of = _join(parts, strides, task_of)
        parts, task_of, repeat, src_step, dst_step = _fold(parts, strides, task_of)
    span = ((parts.shape - 1) * strides.src[parts.row]).sum(axis=1) + (repeat - 1) * src_step
    last = np.full(slabs.cells, -1, np.int64)
    last[parts.slab] = np.arange(len(parts))  # the last assignment stays
    return Schedule(
        copies=copies,
        strides=strides,
        slabs=slabs,
        blocks=blocks,
        parts=parts,
        repeat=repeat,
        src_step=src_step,
        dst_step=dst_step,
        src_end=parts.src + span + strides.src_unit[parts.row],
        flat=_flat(parts, strides) & (repeat == 1),
        task=np.searchsorted(task_of, np.arange(len(task_slab))),
        order=ordered,
        task_slab=task_slab,
        covered=covered,
        last=last,
    )


def _flat(parts: Nests, strides: Strides) -> npt.NDArray[np.bool_]:
    return (parts.shape[:, :-1] == 1).all(axis=1) & ~strides.cast[parts.row]


def _together(parts: Nests, task: I64) -> npt.NDArray[np.bool_]:
    """Whether each part but the first has the task, slab and block of the one before it."""
    found: npt.NDArray[np.bool_] = (
        (np.diff(task) == 0) & (np.diff(parts.slab) == 0) & (np.diff(parts.block) == 0)
    )
    return found


def _join(parts: Nests, strides: Strides, task: I64) -> tuple[Nests, I64]:
    """Make one run of runs that follow each other on both sides (tensors in the same order in both)."""
    flat, nbytes = _flat(parts, strides), parts.shape[:, -1]
    goes_on = flat[1:] & flat[:-1] & _together(parts, task)
    goes_on &= (np.diff(parts.src) == nbytes[:-1]) & (np.diff(parts.dst) == nbytes[:-1])
    start = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    found = parts.take(start)
    found.shape[:, -1] = np.add.reduceat(nbytes, start)
    # A part that is no run alone keeps its own units.
    return found, task[start]


def _fold(parts: Nests, strides: Strides, task: I64) -> tuple[Nests, I64, I64, I64, I64]:
    """Make one part of equal ones at equal distances (experts of a stack, rows of a table)."""
    src_gap, dst_gap = np.diff(parts.src), np.diff(parts.dst)
    alike = _together(parts, task) & (np.diff(strides.kind[parts.row]) == 0)
    alike &= (np.diff(parts.shape, axis=0) == 0).all(axis=1) & (src_gap > 0)
    # A gap continues a series when it equals the one before it and both join equal parts.
    same_gap = alike[1:] & alike[:-1] & (np.diff(src_gap) == 0) & (np.diff(dst_gap) == 0)
    # Maximal series of gaps; those of one gap are left alone. Two series may share a part, which goes to the first.
    goes_on = np.concatenate([[False], same_gap])  # by gap
    first_gap = np.flatnonzero(alike & ~goes_on)
    last_gap = np.flatnonzero(alike & ~np.concatenate([goes_on[1:], [False]]))
    begin, count = first_gap, last_gap - first_gap + 2  # parts of each series
    shared = np.concatenate([[False], begin[1:] < (begin + count)[:-1]])
    begin, count = begin + shared, count - shared
    long = count > 2
    begin, count = begin[long], count[long]
    keep = np.ones(len(parts), bool)
    inside = np.repeat(begin, count - 1) + 1 + _within(count - 1)
    keep[inside] = False
    repeat = np.ones(len(parts), np.int64)
    repeat[begin] = count
    src_step, dst_step = np.zeros(len(parts), np.int64), np.zeros(len(parts), np.int64)
    src_step[begin], dst_step[begin] = src_gap[begin], dst_gap[begin]
    return parts.take(np.flatnonzero(keep)), task[keep], repeat[keep], src_step[keep], dst_step[keep]


def _within(count: I64) -> I64:
    """0, 1, … for each of several counts, one after the other."""
    return np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)


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
