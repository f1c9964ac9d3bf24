"""Chunks: boxes of a family's tensor, and strided storage, as local tensors of their own.

Formats that carry global shapes store a tensor in chunks, cut along any of its dimensions. A dimension may merge several
canonical axes or join several tensors, so a chunk of one is not one canonical box; these functions keep the two apart.
"""

from itertools import product

import numpy as np

from ckptkit.core.boxes import Box, Ints, elements_below, interval_boxes
from ckptkit.core.local import LocalTensor, Segment


def clip(local: LocalTensor, box: Box) -> LocalTensor:
    """The part of `local` inside `box` (in its own dimensions), as a local tensor of the box's shape.

    A segment whose dimension is cut within a merged axis gives several.
    """
    segments: list[Segment] = []
    for segment in local.segments:
        if segment.box.size == 0:
            continue
        choices = []
        for dim in range(len(local.shape)):
            axes = _axes_of(segment, dim)
            nest = tuple(segment.box.shape[a] for a in axes)
            steps = tuple(segment.step[a] for a in axes)
            bounds = np.asarray([box.start[dim], box.stop[dim]], np.int64) - segment.origin[dim]
            below = elements_below(nest, steps, 0, bounds)
            _, lo, hi = interval_boxes(nest, below[:1], below[1:])
            choices.append([(axes, lo[k].tolist(), hi[k].tolist()) for k in range(len(lo))])
        for combination in product(*choices):
            start, stop = list(segment.box.start), list(segment.box.stop)
            origin = [o - b for o, b in zip(segment.origin, box.start, strict=True)]
            for dim, (axes, lo_, hi_) in enumerate(combination):
                for a, first, last in zip(axes, lo_, hi_, strict=True):
                    start[a], stop[a] = segment.box.start[a] + first, segment.box.start[a] + last
                    origin[dim] += segment.step[a] * first
            segments.append(
                Segment(
                    segment.tensor, Box(tuple(start), tuple(stop)), segment.dim, segment.step, tuple(origin)
                )
            )
    return LocalTensor(local.key, box.shape, tuple(segments))


def strided(local: LocalTensor, strides: tuple[int, ...], span: int) -> LocalTensor:
    """`local` stored with `strides` (in elements, 0 where it repeats) instead of row-major, over `span` elements.

    The result has one dimension, the storage; elements between the strides are padding.
    """
    segments = []
    for segment in local.segments:
        dim = tuple(0 if d >= 0 else -1 for d in segment.dim)
        step = tuple(s * strides[d] if d >= 0 else 0 for s, d in zip(segment.step, segment.dim, strict=True))
        origin = sum(o * s for o, s in zip(segment.origin, strides, strict=True))
        segments.append(Segment(segment.tensor, segment.box, dim, step, (origin,)))
    return LocalTensor(local.key, (span,), tuple(segments))


def images(local: LocalTensor, tensor: str, box: Box) -> list[Box]:
    """Where the elements of a canonical box lie in `local`: disjoint boxes in its dimensions."""
    found: list[Box] = []
    for segment in local.segments:
        common = segment.box.overlap(box) if segment.tensor == tensor else None
        if common is None:
            continue
        spans = []
        for dim in range(len(local.shape)):
            axes = _axes_of(segment, dim)
            at = np.asarray([segment.origin[dim]], np.int64)
            run = 1
            for a in reversed(axes):
                count, step = common.shape[a], segment.step[a]
                at = at + (common.start[a] - segment.box.start[a]) * step
                if count == 1:
                    continue
                if step == run and len(at) == 1:
                    run *= count
                else:
                    at = (np.arange(count, dtype=np.int64)[:, None] * step + at[None, :]).ravel()
            spans.append(_joined(at, run))
        for combination in product(*spans):
            found.append(Box(tuple(lo for lo, _ in combination), tuple(hi for _, hi in combination)))
    return found


def _axes_of(segment: Segment, dim: int) -> list[int]:
    """The axes merged in one dimension, outermost first. An axis of one element goes where its step puts it."""
    axes = [a for a, d in enumerate(segment.dim) if d == dim]
    return sorted(axes, key=lambda a: (-segment.step[a], a))


def _joined(start: Ints, length: int) -> list[tuple[int, int]]:
    """Intervals of equal length, those that touch made one."""
    start = np.sort(start)
    first = np.flatnonzero(np.diff(start, prepend=start[0] - length - 1) != length)
    last = np.append(first[1:], len(start)) - 1
    return [(int(start[i]), int(start[j]) + length) for i, j in zip(first, last, strict=True)]
