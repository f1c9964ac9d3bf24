"""Boxes and intervals: axis-aligned regions of a tensor, and row-major runs cut into them.

Bounds are half-open, in elements. A box knows no dtype, file or rank. The array functions work on
many intervals at once, since a large checkpoint has millions.
"""

from dataclasses import dataclass
from math import prod
from typing import Self

import numpy as np
import numpy.typing as npt

from ckptkit.errors import LayoutError

Ints = npt.NDArray[np.int64]

MAX_ELEMENTS = 1 << 58
"""Elements of one tensor: byte offsets of the widest type stay below 2^63."""


def check_shape(shape: tuple[int, ...], what: str) -> None:
    """Raise LayoutError unless sizes are at least 0 and no stride or size of the array leaves 64 bits."""
    if any(size < 0 for size in shape) or prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise LayoutError(
            f"{what} cannot have shape {shape}: sizes are at least 0, and a tensor has at most "
            f"{MAX_ELEMENTS} elements"
        )


@dataclass(frozen=True, slots=True)
class Box:
    """The region `start[d] <= index[d] < stop[d]` for every axis `d`."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise LayoutError(f"box has {len(self.start)} starts but {len(self.stop)} stops")
        for axis, (lo, hi) in enumerate(zip(self.start, self.stop, strict=True)):
            if not 0 <= lo <= hi:
                raise LayoutError(f"box needs 0 <= start <= stop, but axis {axis} is {lo}:{hi}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """The box that holds all of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements: 1 for a scalar (no axes), 0 for an empty box."""
        return prod(self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """The common region, or None where the boxes share no element. Both have the same rank."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        if any(lo >= hi for lo, hi in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def __str__(self) -> str:
        """As errors print it: `[0:2, 5, 0:8]`; an axis of one element shows its index."""
        parts = (
            f"{lo}" if hi == lo + 1 else f"{lo}:{hi}" for lo, hi in zip(self.start, self.stop, strict=True)
        )
        return f"[{', '.join(parts)}]"


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous row-major array."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def ranges(begin: Ints, count: Ints) -> tuple[Ints, Ints]:
    """All numbers of the ranges `[begin[k], begin[k] + count[k])`, one range after the other: `(k, number)`."""
    owner = np.repeat(np.arange(len(count), dtype=np.int64), count)
    skipped = np.cumsum(count) - count
    return owner, np.arange(len(owner), dtype=np.int64) + (begin - skipped)[owner]


def interval_boxes(shape: tuple[int, ...], first: Ints, last: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut row-major intervals `[first[k], last[k])` of an array of `shape` into boxes.

    Each interval gives at most `2 * len(shape) - 1` boxes, in row-major order of their first element
    within an interval. Empty intervals give none. Intervals lie inside the array.

    Returns:
        `(owner, lo, hi)`: the interval `k` each box belongs to, and its bounds, `[boxes, axes]`.
    """
    rank = len(shape)
    owner = np.flatnonzero(first < last).astype(np.int64)
    a, b = first[owner].astype(np.int64), last[owner].astype(np.int64)
    if rank == 0:
        return owner, np.zeros((len(owner), 0), np.int64), np.zeros((len(owner), 0), np.int64)
    prefix = np.zeros((len(owner), 0), np.int64)
    done: list[tuple[Ints, Ints, Ints]] = []

    def emit(who: Ints, fixed: Ints, lo: Ints, hi: Ints) -> None:
        """Boxes with `fixed` leading indices, `[lo, hi)` on the next axis, and all of the rest."""
        depth = fixed.shape[1]
        starts = np.zeros((len(who), rank), np.int64)
        stops = np.broadcast_to(np.asarray(shape, np.int64), (len(who), rank)).copy()
        starts[:, :depth], stops[:, :depth] = fixed, fixed + 1
        starts[:, depth], stops[:, depth] = lo, hi
        done.append((who, starts, stops))

    for depth in range(rank):
        inner = prod(shape[depth + 1 :])
        if depth == rank - 1:
            emit(owner, prefix, a, b)
            break
        row_a, rest_a = np.divmod(a, inner)
        row_b, rest_b = np.divmod(b, inner)
        same = (row_a == row_b) & ((rest_a > 0) | (rest_b > 0))
        head = ~same & (rest_a > 0)
        tail = ~same & (rest_b > 0)
        body_lo = row_a + head
        body = ~same & (body_lo < row_b)
        emit(owner[body], prefix[body], body_lo[body], row_b[body])
        owner, prefix, a, b = (
            np.concatenate([owner[same], owner[head], owner[tail]]),
            np.concatenate(
                [
                    np.column_stack([prefix[same], row_a[same]]),
                    np.column_stack([prefix[head], row_a[head]]),
                    np.column_stack([prefix[tail], row_b[tail]]),
                ]
            ),
            np.concatenate([rest_a[same], rest_a[head], np.zeros(int(tail.sum()), np.int64)]),
            np.concatenate([rest_b[same], np.full(int(head.sum()), inner, np.int64), rest_b[tail]]),
        )
        if not len(owner):
            break
    who = np.concatenate([part[0] for part in done])
    lo = np.concatenate([part[1] for part in done])
    hi = np.concatenate([part[2] for part in done])
    order = np.lexsort((*(lo[:, axis] for axis in reversed(range(rank))), who))
    return who[order], lo[order], hi[order]


def elements_below(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, limits: Ints) -> Ints:
    """How many elements of a strided array lie at an address below each of `limits`.

    Element `c` lies at `offset + sum(c * strides)`. Axes must be nested: sorted by descending stride, the
    array of the inner axes ends before the next step of the outer one. Then address order is
    row-major order, and the answer is a row-major position.
    """
    total = prod(shape)
    rest = np.asarray(limits, np.int64) - offset
    count = np.zeros(len(rest), np.int64)
    open_ = rest > 0  # limits not yet known to lie between two elements or before the first
    count_left = total
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size == 0:
            return np.zeros(len(rest), np.int64)
        count_left //= size
        reach = sum((n - 1) * s for n, s in zip(shape[axis + 1 :], strides[axis + 1 :], strict=True)) + 1
        # The last index whose first element is below the limit.
        digit = np.minimum(np.maximum(rest - 1, 0) // stride, size - 1) if stride else np.zeros_like(rest)
        left = rest - digit * stride
        beyond = open_ & (left >= reach)
        count = np.where(open_, count + digit * count_left, count)
        count = np.where(beyond, count + count_left, count)
        open_ = open_ & ~beyond
        rest = left
    return np.where(open_, count + 1, count)
