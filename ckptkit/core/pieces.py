"""Pieces: which canonical boxes the stored arrays of a checkpoint hold, as columns.

A *segment* is the affine map from one canonical tensor to one local tensor; a *piece* is a canonical box of a segment that
lies in an entry (a stored local tensor, or one run of it). All work is on whole columns: a large checkpoint has millions of
pieces. Boxes are 32 bits wide unless an axis needs more, and are padded with axes `0:1` to the widest tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.core.boxes import ranges
from ckptkit.core.local import LocalTensor, cut_strided
from ckptkit.errors import FormatError

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
BoxBounds = npt.NDArray[np.signedinteger]


class Segments:
    """Columns of affine maps, one row a segment of a local tensor, sorted by local tensor."""

    __slots__ = ("base", "local", "start", "stop", "strides", "tensor")

    def __init__(self, local: U32, tensor: U32, base: I64, strides: I64, start: I64, stop: I64) -> None:
        self.local, self.tensor, self.base, self.strides = local, tensor, base, strides
        self.start, self.stop = start, stop

    def __len__(self) -> int:
        return len(self.local)

    @property
    def empty(self) -> npt.NDArray[np.bool_]:
        """Whether a segment holds no element (a rank that has nothing but padding)."""
        found: npt.NDArray[np.bool_] = np.any(self.start >= self.stop, axis=1)
        return found


class Pieces:
    """Columns of pieces: `segment`, `entry` (u32) and a canonical box `lo`, `hi` (`[pieces, axes]`)."""

    __slots__ = ("entry", "hi", "lo", "segment")

    def __init__(self, segment: U32, entry: U32, lo: BoxBounds, hi: BoxBounds) -> None:
        self.segment, self.entry, self.lo, self.hi = segment, entry, lo, hi

    def __len__(self) -> int:
        return len(self.segment)

    def take(self, index: npt.NDArray[Any]) -> "Pieces":
        return Pieces(self.segment[index], self.entry[index], self.lo[index], self.hi[index])

    @property
    def volume(self) -> I64:
        """Elements of each piece."""
        size = np.ones(len(self), np.int64)
        for axis in range(self.lo.shape[1]):
            size *= self.hi[:, axis] - self.lo[:, axis]
        return size


def affine_maps(shapes: Mapping[str, tuple[int, ...]], locals: Sequence[LocalTensor], where: str) -> Segments:
    """The segments of local tensors; canonical tensors are numbered in the order of `shapes`.

    Raises:
        FormatError: a segment is of an unknown tensor, leaves it, or leaves its local tensor.
    """
    number = {name: (index, shape) for index, (name, shape) in enumerate(shapes.items())}
    width = max(map(len, shapes.values()), default=0)
    limits, local, tensor, base, strides, start, stop, sizes = [], [], [], [], [], [], [], []
    for index, item in enumerate(locals):
        size = item.size
        for segment in item.segments:
            known = number.get(segment.tensor)
            if known is None or len(known[1]) != len(segment.box.start):
                axes = "no tensor of it" if known is None else f"a tensor of {len(known[1])} axes"
                raise FormatError(
                    f"{where}: {item.key!r} holds {segment.box} of {segment.tensor}, which is {axes}",
                    tensor=segment.tensor,
                )
            origin, steps = segment.flat(item.shape)
            pad = width - len(steps)
            local.append(index)
            sizes.append(size)
            tensor.append(known[0])
            base.append(origin)
            strides.append((*steps, *(0,) * pad))
            start.append((*segment.box.start, *(0,) * pad))
            stop.append((*segment.box.stop, *(1,) * pad))
            limits.append((*known[1], *(1,) * pad))
    count = len(local)
    found = Segments(
        np.asarray(local, np.uint32),
        np.asarray(tensor, np.uint32),
        np.asarray(base, np.int64),
        np.asarray(strides, np.int64).reshape(count, width),
        np.asarray(start, np.int64).reshape(count, width),
        np.asarray(stop, np.int64).reshape(count, width),
    )
    outside = np.any(found.stop > np.asarray(limits, np.int64).reshape(count, width), axis=1)
    outside |= np.any(found.strides < 0, axis=1)
    lowest = found.base + (found.start * found.strides).sum(axis=1)
    highest = found.base + ((found.stop - 1) * found.strides).sum(axis=1)
    outside |= ~found.empty & ((lowest < 0) | (highest >= np.asarray(sizes, np.int64)))
    for row in np.flatnonzero(outside)[:1]:
        item = locals[local[row]]
        segment = item.segments[int(row) - local.index(local[row])]
        raise FormatError(
            f"{where}: {item.key!r} {item.shape} cannot hold {segment.box} of {segment.tensor} "
            f"{shapes[segment.tensor]} where it says",
            tensor=segment.tensor,
            box=str(segment.box),
        )
    return found


def cut_entries(
    segments: Segments, sizes: I64, local: U32, first: I64, last: I64, box_type: type[np.signedinteger]
) -> Pieces:
    """The pieces of every entry: the run `[first, last)` of a local tensor. Sorted by entry, then segment.

    Args:
        sizes: Elements of each local tensor.
        local, first, last: Columns of the entries.
        box_type: Type of the bounds.
    """
    first_of = np.searchsorted(segments.local, np.arange(len(sizes) + 1))
    count_of = np.diff(first_of)
    full = (first == 0) & (last == sizes[local])
    whole = np.flatnonzero(full)
    owner, segment = ranges(first_of[local[whole]], count_of[local[whole]])
    keep = ~segments.empty[segment]
    owner, segment = owner[keep], segment[keep]
    bounds = segments.start.astype(box_type), segments.stop.astype(box_type)
    parts = [(segment, whole[owner], bounds[0][segment], bounds[1][segment])]
    run = np.flatnonzero(~full & (first < last))
    if len(run):
        parts += _cut_runs(segments, first_of, run, local[run], first[run], last[run], box_type)
    segment_, entry_ = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    order = np.argsort(entry_.astype(np.int64) << 32 | segment_, kind="stable")
    lo, hi = (np.concatenate([part[k] for part in parts]) for k in (2, 3))
    del parts
    return Pieces(segment_[order].astype(np.uint32), entry_[order].astype(np.uint32), lo[order], hi[order])


def _cut_runs(
    segments: Segments,
    first_of: I64,
    entry: I64,
    local: U32,
    first: I64,
    last: I64,
    box_type: type[np.signedinteger],
) -> Iterator[tuple[I64, I64, BoxBounds, BoxBounds]]:
    """Columns (segment, entry, lo, hi) of runs. Equal runs of one local tensor (of several roles) are cut once."""
    order = np.lexsort((last, first, local))
    local, first, last = local[order], first[order], last[order]
    new = np.ones(len(order), bool)
    new[1:] = (local[1:] != local[:-1]) | (first[1:] != first[:-1]) | (last[1:] != last[:-1])
    member = np.flatnonzero(new)  # where each distinct run begins in `order`
    repeats = np.diff(np.append(member, len(order)))
    local, first, last = local[member], first[member], last[member]
    runs_of = np.searchsorted(local, np.arange(len(first_of)))
    for group in _alike(segments, np.unique(local), first_of):
        row = group[0]
        here = segments.local[group]
        which, run = ranges(runs_of[here], runs_of[here + np.uint32(1)] - runs_of[here])
        origin = int(segments.base[row] + (segments.start[row] * segments.strides[row]).sum())
        sizes = tuple(map(int, segments.stop[row] - segments.start[row]))
        strides = tuple(map(int, segments.strides[row]))
        owner, lo, hi = cut_strided(sizes, strides, origin, first[run], last[run])
        mine = group[which[owner]]
        start = segments.start[mine]
        lo, hi = (lo + start).astype(box_type), (hi + start).astype(box_type)
        box, position = ranges(member[run[owner]], repeats[run[owner]])
        yield mine[box], entry[order[position]], lo[box], hi[box]


def _alike(segments: Segments, locals: U32, first_of: I64) -> Iterator[I64]:
    """Groups of the (non-empty) segments of some local tensors that differ in nothing but the tensor and box start."""
    _, rows = ranges(first_of[locals], first_of[locals + np.uint32(1)] - first_of[locals])
    rows = rows[~segments.empty[rows]]
    if not len(rows):
        return
    start, strides = segments.start[rows], segments.strides[rows]
    origin = segments.base[rows] + (start * strides).sum(axis=1)
    geometry = np.column_stack([origin, strides, segments.stop[rows] - start])
    order = np.lexsort(geometry.T)
    ordered = geometry[order]
    edge = np.flatnonzero(np.any(ordered[1:] != ordered[:-1], axis=1)) + 1
    yield from np.split(rows[order], edge)
