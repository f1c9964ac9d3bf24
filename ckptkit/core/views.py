"""Views: how a family's tensor is made of canonical ones.

A view is written as a pattern, in the spirit of einops. Each dimension of the family's tensor is an axis or a
group of axes; a group may end in alternatives that lie one after the other:

    attn.q: (head head_dim) hidden                                     two axes merged in one dimension
    mlp.gate_up: gate_up=0 ffn hidden                                  one index of an axis
    [conv.q: head head_dim | conv.k: kv_head head_dim] tap             two tensors, concatenated
    (kv_head [q: group head_dim | k: head_dim | v: head_dim]) hidden   interleaved by KV head

Localised to the axis ranges that one rank holds, a view becomes segments: affine maps from canonical
indices to positions in the rank's local tensor. Everything after that (ZeRO cuts, file regions, copies)
is arithmetic on segments.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from ckptkit.core.boxes import Box, Ints, elements_below, interval_boxes, row_major_strides
from ckptkit.errors import LayoutError

_TOKEN = re.compile(r"\s*(?:([()\[\]|])|([A-Za-z_][\w.{}+\-*]*)\s*(:|=\s*([\w{}]+))?)")


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
class Part:
    """One of the tensors that make a family tensor, and its own axes in the dimension that is split."""

    tensor: str
    axes: tuple[str, ...]


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
        sizes = self.box.shape
        offset = base + sum(lo * s for lo, s in zip(self.box.start, strides, strict=True))
        axes = sorted(range(len(sizes)), key=lambda a: (-strides[a], a) if strides[a] else (-(1 << 62), a))
        nest = tuple(sizes[a] for a in axes)
        steps = tuple(strides[a] for a in axes)
        owner, lo, hi = interval_boxes(
            nest, elements_below(nest, steps, offset, first), elements_below(nest, steps, offset, last)
        )
        back = np.argsort(axes) if axes else np.zeros(0, np.int64)
        start = np.asarray(self.box.start, np.int64)
        return owner, lo[:, back] + start, hi[:, back] + start


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One rank's tensor of a family: a name, a shape, and the canonical boxes that fill it.

    Elements that no segment covers are padding; a segment's box is empty where a rank holds nothing but padding.
    """

    key: str
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def real_size(self) -> int:
        """Elements that are not padding."""
        return sum(segment.box.size for segment in self.segments)


@dataclass(frozen=True, slots=True)
class View:
    """A parsed pattern. `dims[d]` are the axes merged in dimension `d`, outermost first."""

    dims: tuple[tuple[str, ...], ...]
    split: int  # the dimension that ends in the parts
    parts: tuple[Part, ...]
    fixed: tuple[tuple[str, str], ...]  # axis and index (a number, or a variable such as {e})
    text: str

    @classmethod
    def parse(cls, text: str) -> "View":
        """Read a pattern (module docstring). Raises LayoutError that shows where it stops making sense."""
        tokens = [*_tokens(text), ("end", "the end", "")]
        dims: list[tuple[str, ...]] = []
        fixed: list[tuple[str, str]] = []
        parts: list[Part] = []
        split = 0
        position = 0

        def alternatives() -> None:
            nonlocal position, split
            position += 1
            split = len(dims)
            while True:
                kind, name, _ = tokens[position]
                if kind != "tensor":
                    raise LayoutError(
                        f"view {text!r}: each alternative in [] starts with `tensor:`, found {name!r}"
                    )
                position += 1
                axes = []
                while tokens[position][0] == "axis":
                    axes.append(tokens[position][1])
                    position += 1
                parts.append(Part(name, tuple(axes)))
                if tokens[position][1] == "|":
                    position += 1
                    continue
                if tokens[position][1] != "]":
                    raise LayoutError(f"view {text!r}: expected | or ], found {tokens[position][1]!r}")
                position += 1
                return

        while tokens[position][0] != "end":
            kind, name, index = tokens[position]
            if kind == "tensor" and not parts:
                parts.append(Part(name, ()))
                position += 1
            elif kind == "fixed":
                fixed.append((name, index))
                position += 1
            elif kind == "axis":
                dims.append((name,))
                position += 1
            elif name == "[":
                alternatives()
                dims.append(())
            elif name == "(":
                position += 1
                group = []
                while tokens[position][0] == "axis":
                    group.append(tokens[position][1])
                    position += 1
                if tokens[position][1] == "[":
                    alternatives()
                if tokens[position][1] != ")":
                    raise LayoutError(f"view {text!r}: expected ), found {tokens[position][1]!r}")
                position += 1
                dims.append(tuple(group))
            else:
                raise LayoutError(f"view {text!r}: {name!r} does not belong there")
        if not parts:
            raise LayoutError(f"view {text!r} names no tensor")
        return cls(tuple(dims), split, tuple(parts), tuple(fixed), text)

    def axes_of(self, part: Part) -> tuple[str, ...]:
        """The canonical axes that one part's tensor has, in no particular order."""
        names = [axis for dim in self.dims for axis in dim]
        return (*names, *part.axes, *(axis for axis, _ in self.fixed))

    def localise(
        self,
        key: str,
        axes: Mapping[str, tuple[str, ...]],
        spans: Mapping[str, Span],
        index: Mapping[str, int],
        tensors: Mapping[str, str],
    ) -> LocalTensor | None:
        """The local tensor of a rank that holds `spans`, or None when a fixed index lies outside them.

        Args:
            key: Name of the local tensor.
            axes: Canonical axis order of each part's tensor (by its name in the pattern).
            spans: The rank's part of each axis.
            index: Values of the variables that `fixed` uses.
            tensors: Full canonical name of each part's tensor.

        Raises:
            LayoutError: a part's tensor has an axis that the pattern lacks, or the reverse.
        """
        picked: dict[str, int] = {}
        for axis, text in self.fixed:
            value = int(text) if text.isdigit() else index[text.strip("{}")]
            if not spans[axis].start <= value < spans[axis].stop:
                return None
            picked[axis] = value
        length = {axis: span.length for axis, span in spans.items()}
        part_sizes = [prod(length[a] for a in part.axes) for part in self.parts]
        concatenated = len(self.parts) > 1
        shape = []
        for dim, group in enumerate(self.dims):
            size = prod(length[a] for a in group)
            shape.append(size * sum(part_sizes) if concatenated and dim == self.split else size)
        segments = []
        before = 0
        for part, part_size in zip(self.parts, part_sizes, strict=True):
            dim_of: dict[str, int] = {}
            step_of: dict[str, int] = {}
            for dim, group in enumerate(self.dims):
                step = 1
                inner = part.axes if dim == self.split else ()
                for axis in reversed(inner):
                    dim_of[axis], step_of[axis] = dim, step
                    step *= length[axis]
                if concatenated and dim == self.split:
                    step = sum(part_sizes)
                for axis in reversed(group):
                    dim_of[axis], step_of[axis] = dim, step
                    step *= length[axis]
            order = axes[part.tensor]
            if set(order) != dim_of.keys() | picked.keys() or len(order) != len(dim_of) + len(picked):
                raise LayoutError(f"view {self.text!r}: {part.tensor} has axes {order}, the pattern does not")
            bounds = [(picked[a], picked[a] + 1) if a in picked else spans[a].real for a in order]
            box = Box(tuple(lo for lo, _ in bounds), tuple(hi for _, hi in bounds))
            segments.append(
                Segment(
                    tensors[part.tensor],
                    box,
                    tuple(dim_of.get(a, -1) for a in order),
                    tuple(step_of.get(a, 0) for a in order),
                    tuple(before if concatenated and d == self.split else 0 for d in range(len(shape))),
                )
            )
            before += part_size
        return LocalTensor(key, tuple(shape), tuple(segments))


def _tokens(text: str) -> list[tuple[str, str, str]]:
    """`(kind, name, index)` of each token; kind is axis, tensor, fixed or sign."""
    found: list[tuple[str, str, str]] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise LayoutError(f"view {text!r}: cannot read {text[position:]!r}")
        sign, name, mark, index = match.groups()
        if sign:
            found.append(("sign", sign, ""))
        elif mark == ":":
            found.append(("tensor", name, ""))
        elif mark:
            found.append(("fixed", name, index))
        else:
            found.append(("axis", name, ""))
        position = match.end()
    return found
