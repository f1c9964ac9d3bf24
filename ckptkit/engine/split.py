"""Splitting strided copies at borders of the destination and of the source, all rows at once.

A copy is a nest of loops around a run; here the run is one more loop, over *units*: bytes, or elements where values are
cast, since no border may go through an element whose value is computed. A border on one side cuts the nest, in the
order in which that side's addresses grow, into at most `2 * loops - 1` smaller nests.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.core.catalog import ITEMSIZE
from ckptkit.core.copies import Copies
from ckptkit.engine.grids import Grid

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Nests:
    """Columns of copies as nests of loops over units. Offsets in bytes.

    Attributes:
        row: The copy (a position in `Copies`) that each nest is a part of.
        shape: Loop lengths `[nests, loops]`, the units last.
        src, dst: Offsets of the first unit in its file.
        slab, block: Cells of the destination's and the source's grid, once split.
    """

    row: I64
    shape: I64
    src: I64
    dst: I64
    slab: I64
    block: I64

    def __len__(self) -> int:
        return len(self.row)

    def take(self, index: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> "Nests":
        return Nests(*(getattr(self, name)[index] for name in self.__slots__))

    @staticmethod
    def concat(one: "Nests", other: "Nests") -> "Nests":
        return Nests(*(np.concatenate([getattr(one, name), getattr(other, name)]) for name in one.__slots__))


class Strides:
    """What all nests of a copy share, by row: strides of its loops and bytes of its units, on both sides.

    `kind` is a number that rows share whose strides, units and types are equal.
    """

    __slots__ = ("cast", "dst", "dst_unit", "kind", "src", "src_unit")

    def __init__(self, copies: Copies) -> None:
        self.cast = copies.src_dtype != copies.dst_dtype
        self.src_unit: I64 = np.where(self.cast, ITEMSIZE[copies.src_dtype], 1)
        self.dst_unit: I64 = np.where(self.cast, ITEMSIZE[copies.dst_dtype], 1)
        self.src: I64 = np.column_stack([copies.src_strides, self.src_unit])
        self.dst: I64 = np.column_stack([copies.dst_strides, self.dst_unit])
        types = np.column_stack([copies.src_dtype, copies.dst_dtype]).astype(np.int64)
        self.kind: I64 = _number(np.column_stack([self.src, self.dst, types]))


def _number(rows: I64) -> I64:
    """Equal rows get equal numbers."""
    order = np.lexsort(rows.T)
    new = np.zeros(len(rows), np.int64)
    new[1:] = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
    number = np.empty(len(rows), np.int64)
    number[order] = np.cumsum(new)
    return number


def nests(copies: Copies, strides: Strides) -> Nests:
    """Every copy as one nest, in no cell yet."""
    units = copies.dst_run // strides.dst_unit
    count = len(copies)
    none = np.full(count, -1, np.int64)
    shape = np.column_stack([copies.shape, units]).astype(np.int64)
    found = Nests(np.arange(count), shape, copies.src, copies.dst, none, none)
    return found.take(np.flatnonzero((shape > 0).all(axis=1)))


def split_destination(parts: Nests, strides: Strides, grid: Grid, file: npt.NDArray[np.integer]) -> Nests:
    """Cut nests at the cells of the destination's `grid`; `file` is by row.

    An element that is cast and straddles a border belongs to both cells, each of which keeps its bytes of it.
    """
    unit, file = strides.dst_unit[parts.row], file[parts.row]
    span = ((parts.shape - 1) * strides.dst[parts.row]).sum(axis=1) + unit
    which, cell, whole = _expand(grid.cell(file, parts.dst), grid.cell(file, parts.dst + span - 1))
    done = parts.take(which[whole])
    done.slab = cell[whole]
    rest, cell = parts.take(which[~whole]), cell[~whole]
    rest.slab = cell
    start, stop = grid.bounds(cell)
    stride = strides.dst[rest.row]
    low = _count_below(rest.shape, stride, start - rest.dst - strides.dst_unit[rest.row] + 1)
    high = _count_below(rest.shape, stride, stop - rest.dst)
    return Nests.concat(done, _cut(rest, strides, rest.shape, low, high, None))


def split_source(parts: Nests, strides: Strides, grid: Grid, file: npt.NDArray[np.integer]) -> Nests:
    """Cut nests at the cells of the source's `grid`; `file` is by row. A unit belongs to the cell where it starts."""
    file = file[parts.row]
    span = ((parts.shape - 1) * strides.src[parts.row]).sum(axis=1)
    which, cell, whole = _expand(grid.cell(file, parts.src), grid.cell(file, parts.src + span))
    done = parts.take(which[whole])
    done.block = cell[whole]
    rest, cell = parts.take(which[~whole]), cell[~whole]
    rest.block = cell
    start, stop = grid.bounds(cell)
    stride = strides.src[rest.row]
    # Loops in the order of source addresses; those of one step may stand anywhere.
    order = np.argsort(np.where(rest.shape > 1, -stride, 0), axis=1, kind="stable")
    shape, stride = np.take_along_axis(rest.shape, order, 1), np.take_along_axis(stride, order, 1)
    low, high = _count_below(shape, stride, start - rest.src), _count_below(shape, stride, stop - rest.src)
    return Nests.concat(done, _cut(rest, strides, shape, low, high, np.argsort(order, axis=1, kind="stable")))


def _expand(first: I64, last: I64) -> tuple[I64, I64, npt.NDArray[np.bool_]]:
    """Each nest once per cell from `first` to `last`: the nest, the cell, and whether it lies whole in that cell."""
    count = last - first + 1
    which = np.repeat(np.arange(len(first)), count)
    cell = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + first[which]
    return which, cell, (count == 1)[which]


def _cut(parts: Nests, strides: Strides, shape: I64, low: I64, high: I64, back: I64 | None) -> Nests:
    """The part of each nest between two positions, as nests.

    Args:
        shape: Loop lengths in the order in which positions count; `back` restores the nests' own order.
    """
    owner, start, length = _intervals(shape, low, high)
    if back is not None:
        start = np.take_along_axis(start, back[owner], 1)
        length = np.take_along_axis(length, back[owner], 1)
    found = parts.take(owner)
    found.shape = length
    found.src = found.src + (start * strides.src[found.row]).sum(axis=1)
    found.dst = found.dst + (start * strides.dst[found.row]).sum(axis=1)
    return found


def _count_below(shape: I64, strides: I64, limit: I64) -> I64:
    """How many units of each nest start at an address below `limit`; loops are nested, outermost first."""
    rest = limit.copy()
    count = np.zeros(len(rest), np.int64)
    open_ = rest > 0
    inner = np.prod(shape, axis=1)
    reach = ((shape - 1) * strides).sum(axis=1) + 1
    for axis in range(shape.shape[1]):
        size, stride = shape[:, axis], np.maximum(strides[:, axis], 1)
        inner = inner // size
        reach = reach - (size - 1) * strides[:, axis]
        digit = np.minimum(np.maximum(rest - 1, 0) // stride, size - 1)
        rest = rest - digit * strides[:, axis]
        beyond = open_ & (rest >= reach)
        count += np.where(open_, digit * inner, 0) + np.where(beyond, inner, 0)
        open_ &= ~beyond
    # What is open still has stopped on a unit itself, which starts below the limit.
    return count + open_


def _intervals(shape: I64, first: I64, last: I64) -> tuple[I64, I64, I64]:
    """Row-major intervals `[first, last)` of arrays of different shapes, as boxes: `(owner, start, length)`."""
    rank = shape.shape[1]
    inner = np.ones_like(shape)
    for axis in range(rank - 2, -1, -1):
        inner[:, axis] = inner[:, axis + 1] * shape[:, axis + 1]
    owner = np.flatnonzero(first < last)
    a, b = first[owner], last[owner]
    prefix = np.zeros((len(owner), 0), np.int64)
    done: list[tuple[I64, I64, I64]] = []

    def emit(who: I64, fixed: I64, low: I64, high: I64) -> None:
        """Boxes with `fixed` leading indices, `[low, high)` on the next axis, and all of the rest."""
        depth = fixed.shape[1]
        start = np.zeros((len(who), rank), np.int64)
        length = shape[who]
        start[:, :depth], length[:, :depth] = fixed, 1
        start[:, depth], length[:, depth] = low, high - low
        done.append((who, start, length))

    for depth in range(rank):
        if depth == rank - 1:
            emit(owner, prefix, a, b)
            break
        unit = inner[owner, depth]
        row_a, rest_a = np.divmod(a, unit)
        row_b, rest_b = np.divmod(b, unit)
        same = (row_a == row_b) & ((rest_a > 0) | (rest_b > 0))
        head, tail = ~same & (rest_a > 0), ~same & (rest_b > 0)
        body_low = row_a + head
        body = ~same & (body_low < row_b)
        emit(owner[body], prefix[body], body_low[body], row_b[body])
        none = np.zeros(int(tail.sum()), np.int64)
        prefix = np.concatenate(
            [
                np.column_stack([prefix[same], row_a[same]]),
                np.column_stack([prefix[head], row_a[head]]),
                np.column_stack([prefix[tail], row_b[tail]]),
            ]
        )
        a, b = (
            np.concatenate([rest_a[same], rest_a[head], none]),
            np.concatenate([rest_b[same], unit[head], rest_b[tail]]),
        )
        owner = np.concatenate([owner[same], owner[head], owner[tail]])
        if not len(owner):
            break
    return (
        np.concatenate([part[0] for part in done]),
        np.concatenate([part[1] for part in done]),
        np.concatenate([part[2] for part in done]),
    )
