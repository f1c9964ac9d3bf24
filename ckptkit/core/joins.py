"""Overlaps of two sets of boxes, millions at a time.

Boxes have a key (a tensor and role); only boxes of one key can overlap. Per key the sweep runs on the axis with the
fewest candidates, counted exactly before any is made, since one fixed axis goes quadratic on cuts of the others.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Boxes = npt.NDArray[np.signedinteger]

BLOCK = 1 << 21
"""Candidates held at a time."""


class BoxSet:
    """Columns: `key`, `lo`, `hi`; `key` values are small non-negative numbers."""

    __slots__ = ("hi", "key", "lo")

    def __init__(
        self, key: I64, lo: npt.NDArray[np.signedinteger], hi: npt.NDArray[np.signedinteger]
    ) -> None:
        self.key, self.lo, self.hi = key, lo, hi

    def __len__(self) -> int:
        return len(self.key)

    def take(self, index: npt.NDArray[np.integer]) -> "BoxSet":
        return BoxSet(self.key[index], self.lo[index], self.hi[index])


def overlaps(left: BoxSet, right: BoxSet) -> Iterator[tuple[I64, I64]]:
    """Every pair of one box of `left` and one of `right` that share an element, in blocks `(left, right)`.

    No box may be empty. Within all blocks together each pair appears once; order is arbitrary.
    """
    if not len(left) or not len(right):
        return
    axis = sweep_axes(left, right)
    width = left.lo.shape[1]
    if width == 0:
        left_lo = np.zeros(len(left), np.int64)
        right_lo = np.zeros(len(right), np.int64)
        left_hi, right_hi = left_lo + 1, right_lo + 1
    else:
        left_axis, right_axis = axis[left.key], axis[right.key]
        left_lo, left_hi = _pick(left.lo, left_axis), _pick(left.hi, left_axis)
        right_lo, right_hi = _pick(right.lo, right_axis), _pick(right.hi, right_axis)
    left_base, right_base = left.key << 32, right.key << 32
    left_order, right_order = np.argsort(left_base + left_lo), np.argsort(right_base + right_lo)
    # Each overlapping pair starts either in the right box, or strictly before it.
    yield from _expand(
        left, right, left_order, right_order,
        _starts(left_base + left_lo, left_order, right_base + right_lo, right_base + right_hi), False,
    )  # fmt: skip
    yield from _expand(
        left, right, left_order, right_order,
        _starts(right_base + right_lo, right_order, left_base + left_lo + 1, left_base + left_hi), True,
    )  # fmt: skip


def sweep_axes(left: BoxSet, right: BoxSet) -> npt.NDArray[np.int8]:
    """The axis to sweep on, for each key."""
    keys = int(max(left.key.max(), right.key.max())) + 1
    width = left.lo.shape[1]
    best = np.zeros(keys, np.int8)
    # Only an axis that is cut on both sides tells candidates apart.
    cut = np.zeros((width, keys), bool)
    for d in range(width):
        cut[d] = _is_cut(left, d, keys) & _is_cut(right, d, keys)
    choices = cut.sum(axis=0)
    best[choices == 1] = np.argmax(cut[:, choices == 1], axis=0) if width else 0
    contested = choices > 1
    if contested.any():
        fewest = np.full(keys, np.iinfo(np.int64).max)
        left_in, right_in = np.flatnonzero(contested[left.key]), np.flatnonzero(contested[right.key])
        for d in range(width):
            here_l = left_in[cut[d][left.key[left_in]]]
            here_r = right_in[cut[d][right.key[right_in]]]
            if not len(here_l) or not len(here_r):
                continue
            base_l, base_r = left.key[here_l] << 32, right.key[here_r] << 32
            lo_l, lo_r = np.sort(base_l + left.lo[here_l, d]), np.sort(base_r + right.lo[here_r, d])
            first = np.searchsorted(lo_l, base_r + right.hi[here_r, d]) - np.searchsorted(
                lo_l, base_r + right.lo[here_r, d]
            )
            second = np.searchsorted(lo_r, base_l + left.hi[here_l, d]) - np.searchsorted(
                lo_r, base_l + left.lo[here_l, d] + 1
            )
            count = np.bincount(right.key[here_r], first, keys) + np.bincount(
                left.key[here_l], np.maximum(second, 0), keys
            )
            better = cut[d] & contested & (count < fewest)
            best[better], fewest[better] = d, count[better]
    return best


def _is_cut(boxes: BoxSet, axis: int, keys: int) -> npt.NDArray[np.bool_]:
    low = np.full(keys, np.iinfo(np.int64).max)
    high = np.full(keys, -1)
    np.minimum.at(low, boxes.key, boxes.lo[:, axis])
    np.maximum.at(high, boxes.key, boxes.lo[:, axis])
    return high > low


def _pick(columns: npt.NDArray[np.signedinteger], axis: npt.NDArray[np.int8]) -> I64:
    return np.take_along_axis(columns, axis[:, None].astype(np.intp), 1)[:, 0].astype(np.int64)


def _starts(values: I64, order: I64, first: I64, last: I64) -> tuple[I64, I64]:
    """For each `[first, last)`, the stretch of sorted `values` that starts inside: `(begin, count)`."""
    ordered = values[order]
    begin = np.searchsorted(ordered, first)
    return begin, np.maximum(np.searchsorted(ordered, last) - begin, 0)


def _expand(
    left: BoxSet, right: BoxSet, left_order: I64, right_order: I64, stretch: tuple[I64, I64], flipped: bool
) -> Iterator[tuple[I64, I64]]:
    """Turn stretches into pairs, block by block, and keep those that overlap on every axis."""
    begin, count = stretch
    order = right_order if flipped else left_order
    owners = np.flatnonzero(count)
    ends = np.cumsum(count[owners])
    total = int(ends[-1]) if len(ends) else 0
    position = 0
    while position < total:
        # Whole owners per block, unless one owner alone exceeds it.
        a = int(np.searchsorted(ends, position, side="right"))
        b = int(np.searchsorted(ends, position + BLOCK, side="right"))
        if b <= a:
            b = a + 1
        start = int(ends[a - 1]) if a else 0
        who = owners[a:b]
        n = count[who]
        mine = np.repeat(who, n)
        within = np.arange(len(mine)) - np.repeat(np.cumsum(n) - n, n)
        other = order[np.repeat(begin[who], n) + within]
        i, j = (mine, other) if flipped else (other, mine)
        keep = np.ones(len(i), bool)
        for d in range(left.lo.shape[1]):
            keep &= (left.lo[i, d] < right.hi[j, d]) & (right.lo[j, d] < left.hi[i, d])
        yield i[keep], j[keep]
        position = start + len(mine)
