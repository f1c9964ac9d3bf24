"""Names: which local tensors the ranks of a layout hold, by one family's naming of a model.

A family's lines, in module order, become placements: every distinct local tensor with the ranks that hold it. Dense
tensors lie on the mesh `tp x cp x dp x pp`, those with an `expert` axis on `etp x ep x edp x pp`; pipeline ownership follows
the line's home.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckptkit.core.boxes import Box
from ckptkit.core.clips import clip
from ckptkit.core.layouts import Layout
from ckptkit.core.local import LocalTensor, Segment, Span
from ckptkit.core.templates import fill
from ckptkit.core.views import View
from ckptkit.errors import LayoutError

if TYPE_CHECKING:
    from ckptkit.core.schema import Family, Model, Tensor


@dataclass(frozen=True, slots=True)
class Placement:
    """A distinct local tensor of a layout and the ranks that hold it (more than one: replicas)."""

    local: LocalTensor
    ranks: npt.NDArray[np.int64]
    order: int  # position in module order, over the whole model
    expert: bool


@dataclass(frozen=True, slots=True)
class _Line:
    """One name of the whole model, resolved as far as the layout does not matter."""

    key: str
    view: View
    index: dict[str, int]
    tensors: dict[str, str]
    expert: bool
    layer: int
    home: str  # first, layer or last
    order: int
    copy: bool
    rows: str


_Group = tuple[dict[str, Span], list[dict[str, int]]]
"""Spans of a view's axes, and the mesh coordinates of one stage that have them."""


class Names:
    """One family's names of a bound model: which local tensors each rank of a layout holds."""

    def __init__(self, model: "Model", family: "Family") -> None:
        self.model = model
        self.family = family

    @property
    def name(self) -> str:
        return self.family.name

    @cached_property
    def _lines(self) -> list[_Line]:
        lines: list[_Line] = []
        model = self.model
        experts = range(model.sizes.get("expert", 0))
        view_of = cache(View.parse)
        sections = model.sections(self.family.first, self.family.layer, self.family.last)
        # Lines without an expert each make a group of their own.
        for (i, module), group in groupby(
            sections, lambda item: (item[1], _expert_module(item[0].key) or id(item[0]))
        ):
            base = {"i": i, "last": model.layers - 1}
            members = list(group)
            for e in experts if isinstance(module, str) else (-1,):
                index = {**base, "e": e} if e >= 0 else base
                for line, _, home in members:
                    view = view_of(line.view)
                    key = fill(line.key, index)
                    tensors = {part.tensor: fill(part.tensor, base) for part in view.parts}
                    expert = self._is_expert(key, tensors)
                    lines.append(
                        _Line(key, view, index, tensors, expert, i, home, len(lines), line.copy, line.rows)
                    )
        seen: set[str] = set()
        for known in lines:
            if known.key in seen:
                raise LayoutError(f"names {self.name} of {model.schema.id}: {known.key} is there twice")
            seen.add(known.key)
        return lines

    def _is_expert(self, key: str, tensors: Mapping[str, str]) -> bool:
        """Whether a name's tensors live on the expert mesh. Raises LayoutError when unknown, or on both meshes."""
        model = self.model
        found = set()
        for tensor in tensors.values():
            if tensor not in model.tensors:
                raise LayoutError(
                    f"names {self.name} of {model.schema.id}: {key} uses unknown tensor {tensor}"
                )
            found.add(model.tensors[tensor].is_expert)
        if len(found) > 1:
            raise LayoutError(
                f"names {self.name} of {model.schema.id}: {key} joins tensors with and without an expert axis, "
                "which live on different meshes"
            )
        return found.pop()

    @cached_property
    def keys(self) -> frozenset[str]:
        """Every name of the family, copies included."""
        return frozenset(line.key for line in self._lines)

    @cached_property
    def whole(self) -> dict[str, LocalTensor]:
        """Every name of the family unsharded, in module order."""
        return {p.local.key: p.local for p in self.placements(Layout())}

    @cached_property
    def copies(self) -> dict[str, LocalTensor]:
        """Further names of tensors that `whole` names already, unsharded and unpadded: replicas where they are stored."""
        staged = self.placements(Layout(pp=2), pad=False)
        return {p.local.key: p.local for p in staged if self._lines[p.order].copy}

    def unpadded(self) -> dict[str, LocalTensor]:
        """As `whole`, but without the padding that a rule asks for (a vocabulary as published)."""
        return {p.local.key: p.local for p in self.placements(Layout(), pad=False)}

    def placements(self, layout: Layout, pad: bool = True) -> Iterator[Placement]:
        """Every distinct local tensor of `layout` with the ranks that hold it, in module order.

        Raises:
            LayoutError: an axis does not divide by its mesh axis, or stage sizes do not fit the model.
        """
        model = self.model
        stage_of = layout.stage_of_layers(model.layers)
        ranks_at: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        groups: dict[tuple[str, bool, int], list[_Group]] = {}
        forms: dict[tuple[object, ...], LocalTensor | None] = {}
        for line in self._lines:
            if line.copy and layout.pp == 1:
                continue
            stage = {"first": 0, "last": layout.pp - 1}.get(line.home)
            if stage is None:
                stage = int(stage_of[line.layer])
            if line.rows and layout.tp > model.size_of(line.rows):
                yield from self._by_rows(line, layout, stage, pad)
                continue
            e = line.index.get("e", -1)
            known = groups.get((line.view.text, line.expert, e))
            if known is None:
                every = groups.get((line.view.text, line.expert, -1))
                if every is None:
                    every = list(self._groups(line, layout, pad))
                    groups[line.view.text, line.expert, -1] = every
                by_e = [axis for axis, index in line.view.fixed if index == "{e}"]
                known = [g for g in every if all(g[0][axis].start <= e < g[0][axis].stop for axis in by_e)]
                groups[line.view.text, line.expert, e] = known
            axes = {p.tensor: model.tensors[line.tensors[p.tensor]].axes for p in line.view.parts}
            fixed = tuple(line.index.get(index[1:-1]) for _, index in line.view.fixed)
            for spans, meshes in known:
                # Layers repeat each other: a local tensor is worked out once, then gets other names.
                alike = (line.view.text, id(spans), fixed, *axes.values())
                if alike not in forms:
                    forms[alike] = line.view.localise(line.key, axes, spans, line.index, line.tensors)
                form = forms[alike]
                if form is None:
                    continue
                where = (stage, id(meshes))  # groups keeps every list of meshes, and all spans, alive
                ranks = ranks_at.get(where)
                if ranks is None:
                    ranks = ranks_at[where] = _ranks(layout, line.expert, stage, meshes)
                tensors = [line.tensors[part.tensor] for part in line.view.parts]
                yield Placement(form.renamed(line.key, tensors), ranks, line.order, line.expert)

    def _by_rows(self, line: _Line, layout: Layout, stage: int, pad: bool) -> Iterator[Placement]:
        """Equal shares of the rows of the whole tensor, one a tensor-parallel coordinate."""
        ((spans, _),) = self._groups(line, Layout(), pad)
        axes = {p.tensor: self.model.tensors[line.tensors[p.tensor]].axes for p in line.view.parts}
        whole = line.view.localise(line.key, axes, spans, line.index, line.tensors)
        assert whole is not None, "one rank holds every index"
        rows, rest = whole.shape[0], whole.shape[1:]
        if rows % layout.tp:
            raise LayoutError(
                f"model {self.model.schema.id}: tp={layout.tp} does not divide the {rows} rows of {line.key}; "
                f"choose a degree that divides {rows}, or at most {self.model.size_of(line.rows)}",
                axis=line.rows,
            )
        share = rows // layout.tp
        for c in range(layout.tp):
            box = Box((c * share, *(0 for _ in rest)), ((c + 1) * share, *rest))
            yield Placement(clip(whole, box), _ranks(layout, False, stage, [{"tp": c}]), line.order, False)

    def _groups(self, line: _Line, layout: Layout, pad: bool) -> Iterator[_Group]:
        """Mesh coordinates of one stage, grouped by the spans they give this view's axes."""
        axes = {axis for p in line.view.parts for axis in line.view.axes_of(p)}
        degrees = {"etp": layout.etp, "ep": layout.ep} if line.expert else {"tp": layout.tp}
        meshes: list[dict[str, int]] = [{}]
        for axis, degree in degrees.items():
            meshes = [{**mesh, axis: c} for mesh in meshes for c in range(degree)]
        grouped: dict[tuple[Span, ...], list[dict[str, int]]] = {}
        order = sorted(axes)
        for mesh in meshes:
            spans = tuple(self._span(axis, mesh, degrees, pad) for axis in order)
            grouped.setdefault(spans, []).append(mesh)
        # Each tensor by itself: alternatives of one view (queries, keys) may well be cut by axes of their own.
        for part in line.view.parts:
            where = [order.index(axis) for axis in sorted(line.view.axes_of(part))]
            held = {tuple(spans[k] for k in where) for spans in grouped}
            cut = [order[k] for k in where if len({spans[k] for spans in grouped}) > 1]
            if len(held) != prod(len({spans[k] for spans in grouped}) for k in where):
                raise LayoutError(
                    f"model {self.model.schema.id}: {line.key} would be cut along {' and '.join(cut)} by one mesh axis, and "
                    f"parts of it would be on no rank; one of them needs the rule inner={cut[0]}",
                    axis=cut[0],
                )
        for spans, members in grouped.items():
            yield dict(zip(order, spans, strict=True)), members

    def _span(self, axis: str, mesh: Mapping[str, int], degrees: Mapping[str, int], pad: bool) -> Span:
        rule = self.model.rules.get(axis)
        if rule is None or rule.mesh_axis not in degrees:
            size = self.model.size_of(axis)
            return Span(0, size, size)
        try:
            return rule.span(self.model.size_of, degrees[rule.mesh_axis], mesh[rule.mesh_axis], pad)
        except LayoutError as error:
            raise LayoutError(f"model {self.model.schema.id}: {error}", axis=axis) from None


class StoredNames:
    """Names of a checkpoint whose model is unknown: each stored tensor is itself.

    Serves the layouts that need no model: one rank, data parallel, and `zero=3`.
    """

    name = "stored"

    def __init__(self, tensors: "Mapping[str, Tensor]") -> None:
        self.tensors = dict(tensors)

    @cached_property
    def whole(self) -> dict[str, LocalTensor]:
        """Every tensor unsharded."""
        return {p.local.key: p.local for p in self.placements(Layout())}

    def unpadded(self) -> dict[str, LocalTensor]:
        return self.whole

    def placements(self, layout: Layout, pad: bool = True) -> Iterator[Placement]:
        """Every tensor whole, held by every rank. Raises LayoutError for a layout that needs a model."""
        for name in ("tp", "pp", "vpp", "ep", "etp"):
            if getattr(layout, name) > 1:
                raise LayoutError(
                    f"{name}={getattr(layout, name)} needs to know what the tensors are, and no schema fits this "
                    "checkpoint; give one with --model, or use a layout of dp and zero=3 only"
                )
        ranks = np.arange(layout.world, dtype=np.int64)
        for order, (name, tensor) in enumerate(self.tensors.items()):
            box = Box.whole(tensor.shape)
            axes = len(tensor.shape)
            segment = Segment(name, box, tuple(range(axes)), (1,) * axes, (0,) * axes)
            yield Placement(LocalTensor(name, tensor.shape, (segment,)), ranks, order, False)


def _ranks(
    layout: Layout, expert: bool, stage: int, meshes: Iterable[Mapping[str, int]]
) -> npt.NDArray[np.int64]:
    """Ranks of one stage at any of some mesh coordinates, ordered by their index among replicas."""
    mesh = layout.expert if expert else layout.dense
    held = np.zeros(layout.world, bool)
    for coordinate in meshes:
        here = mesh["pp"] == stage
        for axis, value in coordinate.items():
            here = here & (mesh[axis] == value)
        held |= here
    return np.flatnonzero(held).astype(np.int64)


def _expert_module(key: str) -> str:
    """What a name template has before the expert's number: equal for the parameters of one expert's module."""
    return key.partition("{e}")[0] if "{e}" in key else ""
