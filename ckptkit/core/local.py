"""Local tensors: what one rank holds of a family's tensor, as affine maps from canonical indices.

Whatever a view merges, permutes, concatenates or interleaves, a canonical box lies in a rank's row-major local tensor at
an origin and one stride an axis. Everything after that (ZeRO cuts, file regions, copies) is arithmetic on these maps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ckptkit.core.boxes import Box, Ints, check_shape, elements_below, interval_boxes, row_major_strides
from ckptkit.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Span:
    """The part of one axis that a rank holds: `[start, stop)` of an axis with `size` real elements.

    A span past `size` is padding: it takes room in the local tensor but holds no element.
    """

    start: int
    stop: int
    size: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def real(self) -> tuple[int, int]:
        """The span without its padding."""
        return min(self.start, self.size), min(self.stop, self.size)


@dataclass(frozen=True, slots=True)
class Segment:
    """An affine map from a canonical box to a local tensor.

    Element `c` of `box` lies at local index `origin[d] + sum(step[a] * (c[a] - box.start[a]))`, summed over
    the axes `a` whose `dim[a]` is `d`.
    """

    tensor: str
    box: Box
    dim: tuple[int, ...]
    step: tuple[int, ...]
    origin: tuple[int, ...]

    def flat(self, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """`(base, strides)`: element `c` is at flat position `base + sum(c * strides)` of a local `shape`.

        `c` are canonical (global) indices, so `base` may be negative.
        """
        rows = row_major_strides(shape)
        strides = tuple(
            step * rows[dim] if dim >= 0 else 0 for dim, step in zip(self.dim, self.step, strict=True)
        )
        base = sum(o * r for o, r in zip(self.origin, rows, strict=True))
        return base - sum(lo * s for lo, s in zip(self.box.start, strides, strict=True)), strides

    def cut(self, shape: tuple[int, ...], first: Ints, last: Ints) -> tuple[Ints, Ints, Ints]:
        """The canonical boxes of this segment inside flat runs `[first[k], last[k])` of a local `shape`.

        Returns `(owner, lo, hi)` as `interval_boxes` does, in canonical indices.
        """
        base, strides = self.flat(shape)
        start = np.asarray(self.box.start, np.int64)
        origin = base + sum(lo * s for lo, s in zip(self.box.start, strides, strict=True))
        owner, lo, hi = cut_strided(self.box.shape, strides, origin, first, last)
        return owner, lo + start, hi + start


def cut_strided(
    sizes: tuple[int, ...], strides: tuple[int, ...], origin: int, first: Ints, last: Ints
) -> tuple[Ints, Ints, Ints]:
    """The boxes of a strided array (of `sizes`, from flat position `origin` on) inside flat runs `[first[k], last[k])`.

    Axes may come in any order, but must nest: each ends before the next step of a longer stride, as in every view.

    Returns `(owner, lo, hi)` as `interval_boxes` does, in indices of the array.

    Raises:
        LayoutError: the axes do not nest.
    """
    # An axis of stride 0 has one element (a fixed index); it comes first, where it changes nothing.
    axes = sorted(range(len(sizes)), key=lambda a: (-strides[a], a) if strides[a] else (-(1 << 62), a))
    nest = tuple(sizes[a] for a in axes)
    steps = tuple(strides[a] for a in axes)
    reach = 1
    for size, step in zip(reversed(nest), reversed(steps), strict=True):
        if size > 1 and step < reach:
            raise LayoutError(f"an array of {sizes} with strides {strides} has no runs: its axes do not nest")
        reach += (size - 1) * step if size else 0
    owner, lo, hi = interval_boxes(
        nest, elements_below(nest, steps, origin, first), elements_below(nest, steps, origin, last)
    )
    back = np.argsort(axes) if axes else np.zeros(0, np.int64)
    return owner, lo[:, back], hi[:, back]


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One rank's tensor of a family: a name, a shape, and the canonical boxes that fill it.

    Elements that no segment covers are padding; a segment's box is empty where a rank holds nothing but padding.
    """

    key: str
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        check_shape(self.shape, self.key)
        dims = len(self.shape)
        for segment in self.segments:
            axes = len(segment.box.start)
            if (len(segment.dim), len(segment.step), len(segment.origin)) != (axes, axes, dims) or (
                axes and not -1 <= min(segment.dim) <= max(segment.dim) < dims
            ):
                raise LayoutError(
                    f"{self.key} {self.shape} cannot hold {segment.box} of {segment.tensor}: "
                    f"dimensions {segment.dim}, steps {segment.step} and origin {segment.origin} do not fit"
                )

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def real_size(self) -> int:
        """Elements that are not padding."""
        return sum(segment.box.size for segment in self.segments)

    def renamed(self, key: str, tensors: Sequence[str]) -> "LocalTensor":
        """The same shape and boxes under another key, with one canonical tensor for each segment."""
        segments = tuple(
            segment if segment.tensor == tensor
            else Segment(tensor, segment.box, segment.dim, segment.step, segment.origin)
            for segment, tensor in zip(self.segments, tensors, strict=True)
        )  # fmt: skip
        return LocalTensor(key, self.shape, segments)
