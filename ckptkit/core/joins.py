"""Overlaps of two sets of boxes, millions at a time.

Boxes have a key (a tensor and role); only boxes of one key can overlap. Per key the sweep runs on the axis with the
fewest candidates, counted exactly before any is made, since one fixed axis goes quadratic on cuts of the others. Where
even that axis has many (a fine grid against another), the second best one is cut into slabs first.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ckptkit.core.boxes import ranges

I64 = npt.NDArray[np.int64]
I8 = npt.NDArray[np.int8]

BLOCK = 1 << 21
"""Candidates held at a time."""

MANY = 32
"""Candidates a box from which on slabs are worth their copies of boxes."""

WIDE = 8
"""Copies a box, on average, from which on they are not."""

_NEVER = 1 << 40


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


def overlaps(left: BoxSet, right: BoxSet, block: int = BLOCK, many: int = MANY) -> Iterator[tuple[I64, I64]]:
    """Every pair of one box of `left` and one of `right` that share an element, in blocks `(left, right)`.

    No box may be empty. Within all blocks together each pair appears once; order is arbitrary. A block comes from at most
    `block` candidates. Keys with more than `many` candidates a box are cut into slabs.
    """
    if not len(left) or not len(right):
        return
    if not left.lo.shape[1]:  # scalars: boxes of one key are equal
        yield from _sweep(left, right, _Line(left.key, left.key + 1), _Line(right.key, right.key + 1), block)
        return
    axis, second, candidates = sweep_axes(left, right)
    count = np.bincount(left.key, minlength=len(axis)) + np.bincount(right.key, minlength=len(axis))
    crowded = (second >= 0) & (candidates > many * count)
    if crowded.any():
        i, j = np.flatnonzero(crowded[left.key]), np.flatnonzero(crowded[right.key])
        parts = np.minimum(candidates // np.maximum(count, 1), count)
        for a, b in _by_slabs(left.take(i), right.take(j), second, parts, block):
            yield i[a], j[b]
        i, j = np.flatnonzero(~crowded[left.key]), np.flatnonzero(~crowded[right.key])
        for a, b in overlaps(left.take(i), right.take(j), block, _NEVER):
            yield i[a], j[b]
        return
    left_axis, right_axis = axis[left.key], axis[right.key]
    lines = _Line.of(
        left.key, _pick(left.lo, left_axis), _pick(left.hi, left_axis),
        right.key, _pick(right.lo, right_axis), _pick(right.hi, right_axis),
    )  # fmt: skip
    yield from _sweep(left, right, *lines, block)


def _by_slabs(left: BoxSet, right: BoxSet, axes: I8, parts: I64, block: int) -> Iterator[tuple[I64, I64]]:
    """The pairs of `overlaps`, with each key cut on one axis into about as many slabs as `parts` says.

    A box is in every slab it meets; a pair counts in the slab where the later of the two begins.
    """
    left_axis, right_axis = axes[left.key], axes[right.key]
    a, b = _Line.of(
        left.key, _pick(left.lo, left_axis), _pick(left.hi, left_axis),
        right.key, _pick(right.lo, right_axis), _pick(right.hi, right_axis),
    )  # fmt: skip
    # Slabs begin where every so many boxes of `left` begin; the first of a key begins before all boxes.
    order = np.argsort(a.lo)
    key = left.key[order]
    place = np.arange(len(key)) - np.searchsorted(key, key)
    share = place * parts[key] // np.bincount(left.key, minlength=len(axes))[key]
    new = np.ones(len(key), bool)
    new[1:] = (key[1:] != key[:-1]) | (share[1:] != share[:-1])
    edges = a.lo[order][new]
    keys, at = np.unique(key[new], return_index=True)
    for line, side in ((b, right), (a, left)):
        lowest = np.full(len(axes), np.iinfo(np.int64).max)
        np.minimum.at(lowest, side.key, line.lo)
        edges[at] = np.minimum(edges[at], lowest[keys])
    left_first, right_first = (np.searchsorted(edges, line.lo, side="right") - 1 for line in (a, b))
    left_count, right_count = (
        np.searchsorted(edges, line.hi - 1, side="right") - first
        for line, first in ((a, left_first), (b, right_first))
    )
    if left_count.sum() + right_count.sum() > WIDE * (len(left) + len(right)):
        yield from overlaps(
            left, right, block, _NEVER
        )  # boxes as wide as the tensor: slabs would not part them
        return
    (i, left_slab), (j, right_slab) = ranges(left_first, left_count), ranges(right_first, right_count)
    cut_left, cut_right = (
        BoxSet(left_slab, left.lo[i], left.hi[i]),
        BoxSet(right_slab, right.lo[j], right.hi[j]),
    )
    for x, y in overlaps(cut_left, cut_right, block, _NEVER):
        mine = left_slab[x] == np.maximum(left_first[i[x]], right_first[j[y]])
        yield i[x[mine]], j[y[mine]]


def _sweep(left: BoxSet, right: BoxSet, a: "_Line", b: "_Line", block: int) -> Iterator[tuple[I64, I64]]:
    """The pairs of `overlaps` among boxes whose intervals on a line overlap: those of `left` and of `right`."""
    # Each overlapping pair starts either in the right box, or strictly before it.
    order = np.argsort(a.lo)
    yield from _expand(left, right, order, _starts(a.lo[order], b.lo, b.hi), False, block)
    order = np.argsort(b.lo)
    yield from _expand(left, right, order, _starts(b.lo[order], a.lo + 1, a.hi), True, block)


class _Line:
    """Intervals of all keys on one line, each key on a stretch of its own: `[lo, hi)`."""

    __slots__ = ("hi", "lo")

    def __init__(self, lo: I64, hi: I64) -> None:
        self.lo, self.hi = lo, hi

    @classmethod
    def of(
        cls, key: I64, lo: I64, hi: I64, other_key: I64, other_lo: I64, other_hi: I64
    ) -> tuple["_Line", "_Line"]:
        """The intervals of two sides on one common line."""
        length = max(int(hi.max()), int(other_hi.max())) + 1
        if length * (max(int(key.max()), int(other_key.max())) + 1) >= 1 << 62:
            # Only the order of bounds matters, so that their ranks serve as well.
            bounds = np.unique(np.concatenate([lo, hi, other_lo, other_hi]))
            lo, hi, other_lo, other_hi = (np.searchsorted(bounds, b) for b in (lo, hi, other_lo, other_hi))
            length = len(bounds) + 1
        base, other_base = key * length, other_key * length
        return cls(base + lo, base + hi), cls(other_base + other_lo, other_base + other_hi)


def sweep_axes(left: BoxSet, right: BoxSet) -> tuple[I8, I8, I64]:
    """For each key the axis to sweep on, the second best (-1 where no other helps), and the candidates of the first.

    Candidates are counted only where there is a choice, else 0.
    """
    keys = int(max(left.key.max(), right.key.max())) + 1
    width = left.lo.shape[1]
    best, second = np.zeros(keys, np.int8), np.full(keys, -1, np.int8)
    # Only an axis that is cut on both sides tells candidates apart.
    cut = np.zeros((width, keys), bool)
    for d in range(width):
        cut[d] = _is_cut(left, d, keys) & _is_cut(right, d, keys)
    choices = cut.sum(axis=0)
    best[choices == 1] = np.argmax(cut[:, choices == 1], axis=0)
    contested = choices > 1
    counts = np.full((width, keys), np.iinfo(np.int64).max)
    if not contested.any():
        return best, second, np.zeros(keys, np.int64)
    left_in, right_in = np.flatnonzero(contested[left.key]), np.flatnonzero(contested[right.key])
    for d in range(width):
        i, j = left_in[cut[d][left.key[left_in]]], right_in[cut[d][right.key[right_in]]]
        if not len(i) or not len(j):
            continue
        a, b = _Line.of(
            left.key[i], left.lo[i, d], left.hi[i, d], right.key[j], right.lo[j, d], right.hi[j, d]
        )
        count = np.zeros(keys, np.int64)
        np.add.at(count, right.key[j], _starts(np.sort(a.lo), b.lo, b.hi)[1])
        np.add.at(count, left.key[i], _starts(np.sort(b.lo), a.lo + 1, a.hi)[1])
        counts[d] = np.where(cut[d] & contested, count, counts[d])
    order = np.argsort(counts, axis=0, kind="stable")
    best[contested], second[contested] = order[0][contested], order[1][contested]
    return best, second, np.where(contested, counts.min(axis=0), 0)


def _is_cut(boxes: BoxSet, axis: int, keys: int) -> npt.NDArray[np.bool_]:
    """For each key, whether its boxes start at more than one place of the axis."""
    some = np.zeros(keys, np.int64)
    some[boxes.key] = boxes.lo[:, axis]  # the start of any one box of the key
    found = np.zeros(keys, bool)
    found[boxes.key[some[boxes.key] != boxes.lo[:, axis]]] = True
    return found


def _pick(columns: npt.NDArray[np.signedinteger], axis: I8) -> I64:
    return np.take_along_axis(columns, axis[:, None].astype(np.intp), 1)[:, 0].astype(np.int64)


def _starts(ordered: I64, first: I64, last: I64) -> tuple[I64, I64]:
    """For each `[first, last)`, the stretch of sorted values inside: `(begin, count)`."""
    begin = np.searchsorted(ordered, first)
    return begin, np.maximum(np.searchsorted(ordered, last) - begin, 0)


def _expand(
    left: BoxSet, right: BoxSet, order: I64, stretch: tuple[I64, I64], flipped: bool, block: int
) -> Iterator[tuple[I64, I64]]:
    """Turn stretches of `order` into pairs, block by block, and keep those that overlap on every axis.

    Stretches belong to the boxes of `right`, and `order` to those of `left`; the reverse when `flipped`.
    """
    begin, count = stretch
    owners = np.flatnonzero(count)
    ends = np.cumsum(count[owners])
    starts = ends - count[owners]
    total = int(ends[-1]) if len(ends) else 0
    for first in range(0, total, block):
        last = min(first + block, total)
        a, b = int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(ends, last)) + 1
        skipped = np.maximum(first - starts[a:b], 0)
        taken = np.minimum(last - starts[a:b], ends[a:b] - starts[a:b]) - skipped
        owner, place = ranges(begin[owners[a:b]] + skipped, taken)
        mine, other = owners[a:b][owner], order[place]
        i, j = (mine, other) if flipped else (other, mine)
        keep = np.ones(len(i), bool)
        for d in range(left.lo.shape[1]):
            keep &= (left.lo[i, d] < right.hi[j, d]) & (right.lo[j, d] < left.hi[i, d])
        yield i[keep], j[keep]
