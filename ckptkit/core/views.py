"""Views: how a family's tensor is made of canonical ones.

A view is written as a pattern, in the spirit of einops. Each dimension of the family's tensor is an axis or a
group of axes; a group may end in alternatives that lie one after the other:

    attn.q: (head head_dim) hidden                                     two axes merged in one dimension
    mlp.gate_up: gate_up=0 ffn hidden                                  one index of an axis
    [conv.q: head head_dim | conv.k: kv_head head_dim] tap             two tensors, concatenated
    (kv_head [q: group head_dim | k: head_dim | v: head_dim]) hidden   interleaved by KV head

Localised to the axis ranges that one rank holds, a view becomes segments: affine maps from canonical
indices to positions in the rank's local tensor (`ckptkit.core.local`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ckptkit.core.boxes import Box
from ckptkit.core.local import LocalTensor, Segment, Span
from ckptkit.errors import LayoutError

__all__ = ["LocalTensor", "Part", "Segment", "Span", "View"]

_TOKEN = re.compile(r"\s*(?:([()\[\]|])|([A-Za-z_][\w.{}+\-]*)\s*(:|=\s*([0-9]{1,9}\b|\{\w+\}))?)")


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that make a family tensor, and its own axes in the dimension that is split."""

    tensor: str
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A parsed pattern. `dims[d]` are the axes merged in dimension `d`, outermost first."""

    dims: tuple[tuple[str, ...], ...]
    split: int  # the dimension that ends in the parts (a single tensor without own axes may stand anywhere)
    parts: tuple[Part, ...]
    fixed: tuple[tuple[str, str], ...]  # axis and index (a number, or a variable such as {e})
    text: str

    @classmethod
    def parse(cls, text: str) -> "View":
        """Read a pattern (module docstring). Raises LayoutError that shows where it stops making sense."""
        return _Parser(text).view()

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
            LayoutError: a part's tensor has an axis that the pattern lacks, or the reverse; a fixed index lies
                past its axis.
        """
        picked: dict[str, int] = {}
        for axis, text in self.fixed:
            value = int(text) if text.isdecimal() else index.get(text[1:-1], -1)
            if value < 0:
                raise LayoutError(
                    f"view {self.text!r}: {axis}={text} uses no known variable ({', '.join(index)})"
                )
            if value >= spans[axis].size:
                raise LayoutError(
                    f"view {self.text!r} takes {axis}={value}, but {axis} has {spans[axis].size}"
                )
            if not spans[axis].start <= value < spans[axis].stop:
                return None
            picked[axis] = value
        length = {axis: span.length for axis, span in spans.items()}
        part_sizes = [prod(length[a] for a in part.axes) for part in self.parts]
        joined = sum(
            part_sizes
        )  # elements of the alternatives at one index of the axes before them; 1 without any
        shape = tuple(
            prod(length[a] for a in group) * (joined if dim == self.split else 1)
            for dim, group in enumerate(self.dims)
        )
        segments = []
        before = 0
        for part, part_size in zip(self.parts, part_sizes, strict=True):
            dim_of: dict[str, int] = {}
            step_of: dict[str, int] = {}
            for dim, group in enumerate(self.dims):
                step = 1
                if dim == self.split:
                    for axis in reversed(part.axes):
                        dim_of[axis], step_of[axis] = dim, step
                        step *= length[axis]
                    step = joined
                for axis in reversed(group):
                    dim_of[axis], step_of[axis] = dim, step
                    step *= length[axis]
            order = axes[part.tensor]
            if set(order) != dim_of.keys() | picked.keys():
                raise LayoutError(f"view {self.text!r}: {part.tensor} has axes {order}, the pattern does not")
            bounds = [(picked[a], picked[a] + 1) if a in picked else spans[a].real for a in order]
            box = Box(tuple(lo for lo, _ in bounds), tuple(hi for _, hi in bounds))
            segments.append(
                Segment(
                    tensors[part.tensor],
                    box,
                    tuple(dim_of.get(a, -1) for a in order),
                    tuple(step_of.get(a, 0) for a in order),
                    tuple(before if d == self.split else 0 for d in range(len(shape))),
                )
            )
            before += part_size
        return LocalTensor(key, shape, tuple(segments))


class _Parser:
    """Reads one pattern from left to right. The last token is always `end`, so that looking ahead is safe."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [*_tokens(text), ("end", "the end", "")]
        self.position = 0
        self.dims: list[tuple[str, ...]] = []
        self.parts: list[Part] = []
        self.fixed: list[tuple[str, str]] = []
        self.split = 0

    def view(self) -> View:
        while self._kind != "end":
            kind, name, index = self.tokens[self.position]
            if kind == "axis":
                self.dims.append(tuple(self._axes(1)))
            elif kind == "tensor":
                self._single_source()
                self.parts.append(Part(name, ()))
                self.position += 1
            elif kind == "fixed":
                self.fixed.append((name, index))
                self.position += 1
            elif name == "[":
                self._alternatives()
                self.dims.append(())
            elif name == "(":
                self.position += 1
                group = self._axes()
                if self._name == "[":
                    self._alternatives()
                self._expect(")")
                self.dims.append(tuple(group))
            else:
                raise LayoutError(f"view {self.text!r}: {name!r} does not belong there")
        if not self.parts:
            raise LayoutError(f"view {self.text!r} names no tensor")
        view = View(tuple(self.dims), self.split, tuple(self.parts), tuple(self.fixed), self.text)
        for part in self.parts:
            axes = view.axes_of(part)
            for axis in axes:
                if axes.count(axis) > 1:
                    raise LayoutError(f"view {self.text!r} names axis {axis} twice")
        return view

    @property
    def _kind(self) -> str:
        return self.tokens[self.position][0]

    @property
    def _name(self) -> str:
        return self.tokens[self.position][1]

    def _expect(self, sign: str) -> None:
        if self._kind != "sign" or self._name != sign:
            raise LayoutError(f"view {self.text!r}: expected {sign}, found {self._name!r}")
        self.position += 1

    def _axes(self, most: int | None = None) -> list[str]:
        axes: list[str] = []
        while self._kind == "axis" and (most is None or len(axes) < most):
            axes.append(self._name)
            self.position += 1
        return axes

    def _single_source(self) -> None:
        if self.parts:
            raise LayoutError(
                f"view {self.text!r}: only one tensor or one [ ] is possible; {self._name!r} is too much"
            )

    def _alternatives(self) -> None:
        self._single_source()
        self.split = len(self.dims)
        self._expect("[")
        while True:
            if self._kind != "tensor":
                raise LayoutError(
                    f"view {self.text!r}: each alternative in [] starts with `tensor:`, found {self._name!r}"
                )
            name = self._name
            self.position += 1
            self.parts.append(Part(name, tuple(self._axes())))
            if self._name != "|":
                self._expect("]")
                return
            self.position += 1


def _tokens(text: str) -> list[tuple[str, str, str]]:
    """`(kind, name, index)` of each token; kind is axis, tensor, fixed or sign."""
    found: list[tuple[str, str, str]] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise LayoutError(f"view {text!r}: cannot read {text[position:].lstrip()!r}")
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
