"""Schemas: a model family as data, and the tensors each rank of a layout holds.

A schema declares canonical tensors with named axes, how axes split over mesh axes, and for every family of
names (Transformers, Megatron, ...) which view of which canonical tensor each name is, in module order. Binding a
schema to a model's configuration gives a `Model`; `Names.placements` gives every distinct local tensor of a layout and
the ranks that hold it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.core.boxes import Box
from ckptkit.core.layouts import Layout
from ckptkit.core.views import LocalTensor, Segment, Span, View
from ckptkit.errors import FormatError, LayoutError

OPTIMIZER_ROLES: dict[str, tuple[str, ...]] = {
    "adamw": ("master", "exp_avg", "exp_avg_sq"),
    "muon": ("master", "momentum"),
    "none": (),
}
"""The state that each kind of optimizer keeps for a parameter, in the order files hold it."""

STATE_ROLES = ("master", "exp_avg", "exp_avg_sq", "momentum", "ema")
"""Every role that is optimizer-side state (the rest: `param`, `buffer`)."""

_VARIABLE = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A canonical tensor of a bound model.

    Attributes:
        name: Canonical name, for example `layers.3.attn.q`.
        axes, shape: Named axes and their sizes.
        kind: `param` or `buffer`.
        optimizer: `adamw`, `muon` or `none`.
        decay: Whether weight decay applies (groups of optimizers are split by it).
        keep_fp32: Stays float32 whatever dtype the rest is cast to.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str = "param"
    optimizer: str = "adamw"
    decay: bool = True
    keep_fp32: bool = False

    @property
    def is_expert(self) -> bool:
        return "expert" in self.axes


@dataclass(frozen=True, slots=True)
class Declare:
    """Declaration of canonical tensors: one line of a schema.

    `name` may contain `{i}` (the layer). `when` filters layers: `i > 0` is written `"1:"`.
    """

    name: str
    axes: str
    kind: str = "param"
    optimizer: str = "adamw"
    decay: bool = True
    keep_fp32: bool = False
    when: str = ":"
    only_if: str = ""  # a flag of the configuration that must hold (see Schema.flags), or `!flag`


@dataclass(frozen=True, slots=True)
class Name:
    """One line of a family: a name and the view it is.

    Both may use `{i}` (layer), `{i-1}`, `{2i}`, `{2i+1}`, ... (arithmetic on it), `{last}` (the last layer), and `{e}`
    (an expert; the view then fixes `expert={e}`). `when` limits the layers, as a slice: `"1:"`.

    Neighbouring lines whose keys agree up to `{e}` are the parameters of one expert's module: they take turns, expert
    by expert. A `copy` is a further name of a tensor that an earlier line names (a tied output layer): ranks hold it only
    where pipeline stages keep it apart from the first; a reader accepts it anywhere (`Names.copies`).
    """

    key: str
    view: str
    when: str = ":"
    only_if: str = ""
    copy: bool = False


Flags = Mapping[str, bool | frozenset[int]]
"""What a configuration switches on: for all layers, or for some."""


@dataclass(frozen=True)
class Family:
    """One naming of the model's tensors: what is on the first stage, in each layer, on the last stage.

    The order is module order; ZeRO buffers and pipeline ownership follow it.
    """

    name: str
    first: tuple[Name, ...] = ()
    layer: tuple[Name, ...] = ()
    last: tuple[Name, ...] = ()


@dataclass(frozen=True)
class Schema:
    """A model family, declared.

    Attributes:
        id: `name@version`; part of the native format, since canonical names and axes are.
        first, layer, last: Canonical tensors, in module order.
        rules: Axis to mesh axis: `"tp"`, `"tp:replicate"` (repeat when the degree exceeds the size), `"tp:pad=128"`,
            `"tp:inner=kv_head"` (takes what remains of the degree when it exceeds that axis).
        families: Namings; `canonical` is added by itself.
        sizes: Configuration to axis sizes; also gives `layers`.
        flags: Configuration to the flags that `only_if` names: true or false, or the layers in which they hold.
        model_types: Values of `model_type` in a Transformers configuration that this schema covers.
        configs: Family name to a function `(config) -> config` that writes the configuration in that family's terms.
        reads_config: Turns any family's configuration into the one `sizes` understands; identity unless given.
        harmless: Patterns of stored names that mean nothing here, such as buffers that every library makes anew: a
            checkpoint is whole with and without them.
    """

    id: str
    first: tuple[Declare, ...]
    layer: tuple[Declare, ...]
    last: tuple[Declare, ...]
    rules: Mapping[str, str]
    families: tuple[Family, ...]
    sizes: Callable[[Mapping[str, Any]], dict[str, int]]
    flags: Callable[[Mapping[str, Any]], Flags] = lambda config: {}
    model_types: tuple[str, ...] = ()
    configs: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    reads_config: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    harmless: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.id.split("@")[0]

    def is_harmless(self, key: str) -> bool:
        """Whether a stored name is one of those that a checkpoint may have or lack."""
        return any(re.search(pattern, key) for pattern in self.harmless)

    def bind(self, config: Mapping[str, Any]) -> "Model":
        """The model of one configuration (any family's). Raises LayoutError that names a bad or missing field."""
        plain = self.reads_config(config)
        try:
            sizes = self.sizes(plain)
            flags = self.flags(plain)
        except KeyError as missing:
            raise LayoutError(f"model {self.id}: the configuration lacks {missing}") from None
        for axis, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise LayoutError(f"model {self.id}: the configuration gives axis {axis} the size {size!r}")
        return Model(self, plain, sizes, flags)


class Model:
    """A schema bound to one configuration: canonical tensors with sizes, and its families of names."""

    def __init__(self, schema: Schema, config: dict[str, Any], sizes: dict[str, int], flags: Flags) -> None:
        self.schema = schema
        self.config = config
        self.sizes = sizes
        self.layers = sizes["layers"]
        self.flags = dict(flags)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Canonical tensors by name, in module order."""
        found: dict[str, Tensor] = {}
        for declare, layer in self._sections(self.schema.first, self.schema.layer, self.schema.last):
            axes = tuple(declare.axes.split())
            name = _fill(declare.name, _variables(layer, self.layers))
            shape = tuple(self.size_of(axis) for axis in axes)
            found[name] = Tensor(
                name, axes, shape, declare.kind, "none" if declare.kind == "buffer" else declare.optimizer,
                declare.decay, declare.keep_fp32,
            )  # fmt: skip
        return found

    def size_of(self, axis: str) -> int:
        try:
            return self.sizes[axis]
        except KeyError:
            raise LayoutError(
                f"model {self.schema.id}: the configuration gives no size for axis {axis}"
            ) from None

    @property
    def families(self) -> tuple[str, ...]:
        return ("canonical", *(family.name for family in self.schema.families))

    @lru_cache(maxsize=None)  # noqa: B019  (a model lives as long as the run that reads it)
    def names(self, family: str = "canonical") -> "Names":
        """The naming called `family`. Raises LayoutError that lists the known ones."""
        if family == "canonical":
            return Names(self, _canonical(self.schema))
        for known in self.schema.families:
            if known.name == family:
                return Names(self, known)
        raise LayoutError(
            f"model {self.schema.id} has no names {family!r}; it has {', '.join(self.families)}"
        )

    def _sections(
        self, first: Sequence[Any], layer: Sequence[Any], last: Sequence[Any]
    ) -> Iterator[tuple[Any, int]]:
        """Every line that applies to this configuration, with its layer (first: 0, last: the last layer)."""
        end = self.layers - 1
        for line in first:
            if self._applies(line, 0):
                yield line, 0
        for i in range(self.layers):
            for line in layer:
                if self._applies(line, i) and i in _layers(line.when, self.layers):
                    yield line, i
        for line in last:
            if self._applies(line, end):
                yield line, end

    def _applies(self, line: Any, layer: int) -> bool:
        if not line.only_if:
            return True
        value = self.flags[line.only_if.removeprefix("!")]
        holds = value if isinstance(value, bool) else layer in value
        return holds != line.only_if.startswith("!")

    def family_of(self, keys: Iterable[str], where: str = "the checkpoint") -> str:
        """The family whose names a checkpoint's stored names are.

        The family that knows most of them wins. A name may be missing or unknown: whether the checkpoint is whole is
        for its reader to say.

        Raises:
            FormatError: no family knows them, two know equally many, or some belong to another family only.
        """
        stored = {key for key in keys if not self.schema.is_harmless(key)}
        known = {family.name: self.names(family.name).keys for family in self.schema.families}
        count = {name: len(stored & theirs) for name, theirs in known.items()}
        best = max(count, key=lambda name: count[name])
        if not count[best]:
            raise FormatError(
                f"{where}: none of its {len(stored)} tensors has a name of {self.schema.id} "
                f"({_some(stored)}); its families are {', '.join(known)}{self._prefix_hint(stored, known)}"
            )
        tied = sorted(name for name in count if count[name] == count[best])
        if len(tied) > 1:
            raise FormatError(
                f"{where}: its names are {' as much as '.join(tied)} names of {self.schema.id} "
                f"({_some(stored)}); it holds too little to tell which, give the names to use",
                families=tied,
            )
        for name, theirs in known.items():
            strangers = (stored & theirs) - known[best]
            if strangers:
                raise FormatError(
                    f"{where} mixes names of two families of {self.schema.id}: {best} ({_some(stored & known[best])}) "
                    f"and {name} ({_some(strangers)}); it was merged by hand or holds two models, keep one",
                    families=[best, name],
                )
        return best

    def _prefix_hint(self, stored: set[str], known: Mapping[str, frozenset[str]]) -> str:
        """Names the prefix that trainers put before (`module.`) or leave off, where that explains the names."""
        heads = {key.split(".")[0] + "." for key in stored}
        for name, theirs in known.items():
            for head in sorted(heads):
                if len({key.removeprefix(head) for key in stored} & theirs) * 2 > len(stored):
                    return f"; without the prefix {head!r} they are names of {name}"
            for head in sorted({key.split(".")[0] + "." for key in theirs}):
                if len({head + key for key in stored} & theirs) * 2 > len(stored):
                    return f"; with the prefix {head!r} they would be names of {name}"
        return ""


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
    layer: int  # -1 first, -2 last
    order: int
    copy: bool


_Group = tuple[dict[str, Span], list[dict[str, int]]]
"""Spans of a view's axes, and the mesh coordinates of one stage that have them."""


class Names:
    """One family's names of a bound model: which local tensors each rank of a layout holds."""

    def __init__(self, model: Model, family: Family) -> None:
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
        first, last = set(map(id, self.family.first)), set(map(id, self.family.last))
        view_of = lru_cache(maxsize=None)(View.parse)
        sections = model._sections(self.family.first, self.family.layer, self.family.last)
        # Lines without an expert each make a group of their own.
        for (i, module), group in groupby(
            sections, lambda item: (item[1], _expert_module(item[0].key) or id(item[0]))
        ):
            base = _variables(i, model.layers)
            members = [line for line, _ in group]
            for e in experts if isinstance(module, str) else (-1,):
                index = {**base, "e": e} if e >= 0 else base
                for line in members:
                    view = view_of(line.view)
                    key = _fill(line.key, index)
                    tensors = {part.tensor: _fill(part.tensor, base) for part in view.parts}
                    for tensor in tensors.values():
                        if tensor not in model.tensors:
                            raise LayoutError(
                                f"names {self.name} of {model.schema.id}: {key} uses unknown tensor {tensor}"
                            )
                    layer = -1 if id(line) in first else -2 if id(line) in last else i
                    lines.append(_Line(key, view, index, tensors, layer, len(lines), line.copy))
        return lines

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
        for line in self._lines:
            if line.copy and layout.pp == 1:
                continue
            stage = (
                0 if line.layer == -1 else layout.pp - 1 if line.layer == -2 else int(stage_of[line.layer])
            )
            part = line.view.parts[0]
            expert = model.tensors[line.tensors[part.tensor]].is_expert
            e = line.index.get("e", -1)
            known = groups.get((line.view.text, expert, e))
            if known is None:
                every = groups.get((line.view.text, expert, -1))
                if every is None:
                    every = groups[line.view.text, expert, -1] = list(self._groups(line, layout, expert, pad))
                known = [g for g in every if e < 0 or g[0]["expert"].start <= e < g[0]["expert"].stop]
                groups[line.view.text, expert, e] = known
            for spans, meshes in known:
                axes = {p.tensor: model.tensors[line.tensors[p.tensor]].axes for p in line.view.parts}
                local = line.view.localise(line.key, axes, spans, line.index, line.tensors)
                if local is None:
                    continue
                where = (stage, id(meshes))  # groups keeps every list of meshes alive
                ranks = ranks_at.get(where)
                if ranks is None:
                    ranks = ranks_at[where] = _ranks(layout, expert, stage, meshes)
                yield Placement(local, ranks, line.order, expert)

    def _groups(self, line: _Line, layout: Layout, expert: bool, pad: bool) -> Iterator[_Group]:
        """Mesh coordinates of one stage, grouped by the spans they give this view's axes."""
        model = self.model
        axes = {axis for p in line.view.parts for axis in line.view.axes_of(p)}
        degrees = {"etp": layout.etp, "ep": layout.ep} if expert else {"tp": layout.tp}
        meshes: list[dict[str, int]] = [{}]
        for axis, degree in degrees.items():
            meshes = [{**mesh, axis: c} for mesh in meshes for c in range(degree)]
        grouped: dict[tuple[Span, ...], list[dict[str, int]]] = {}
        order = sorted(axes)
        for mesh in meshes:
            spans = tuple(self._span(axis, mesh, degrees, pad) for axis in order)
            grouped.setdefault(spans, []).append(mesh)
        for spans, members in grouped.items():
            yield dict(zip(order, spans, strict=True)), members

    def _span(self, axis: str, mesh: Mapping[str, int], degrees: Mapping[str, int], pad: bool) -> Span:
        size = self.model.size_of(axis)
        rule = self.model.schema.rules.get(axis, "")
        mesh_axis, _, option = rule.partition(":")
        if not rule or mesh_axis not in degrees:
            return Span(0, size, size)
        degree, c = degrees[mesh_axis], mesh[mesh_axis]
        if option.startswith("inner="):
            outer = self.model.size_of(option.removeprefix("inner="))
            if degree <= outer:
                return Span(0, size, size)
            degree //= outer
            c %= degree
        full = size
        if option.startswith("pad=") and pad:
            unit = int(option.removeprefix("pad=")) * degree
            full = -(-size // unit) * unit
        elif option == "replicate" and degree > size > 0 and degree % size == 0:
            c = c * size // degree
            return Span(c, c + 1, size)
        if full % degree:
            raise LayoutError(
                f"{mesh_axis}={degree} does not divide axis {axis} of {self.model.schema.id}, which has {size}; "
                f"choose a degree that divides {size}"
            )
        share = full // degree
        return Span(c * share, (c + 1) * share, size)


class StoredNames:
    """Names of a checkpoint whose model is unknown: each stored tensor is itself.

    Serves the layouts that need no model: one rank, data parallel, and `zero=3`.
    """

    name = "stored"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
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


def _canonical(schema: Schema) -> Family:
    """Canonical names as a family: each tensor is itself."""

    def lines(declares: tuple[Declare, ...]) -> tuple[Name, ...]:
        return tuple(Name(d.name, f"{d.name}: {d.axes}", d.when, d.only_if) for d in declares)

    return Family("canonical", lines(schema.first), lines(schema.layer), lines(schema.last))


def _expert_module(key: str) -> str:
    """What a name template has before the expert's number: equal for the parameters of one expert's module."""
    return key.partition("{e}")[0] if "{e}" in key else ""


def _some(keys: Iterable[str], most: int = 3) -> str:
    ordered = sorted(keys)
    return ", ".join(ordered[:most]) + (", ..." if len(ordered) > most else "")


def _layers(when: str, layers: int) -> range:
    start, _, stop = when.partition(":")
    return range(*slice(int(start) if start else None, int(stop) if stop else None).indices(layers))


def _variables(layer: int, layers: int) -> dict[str, int]:
    return {"i": layer, "last": layers - 1}


def _fill(template: str, index: Mapping[str, int]) -> str:
    """Replace `{i}`, `{2i+1}`, `{last}`, `{e}` in a template."""

    def value(match: re.Match[str]) -> str:
        text = match.group(1)
        if text in index:
            return str(index[text])
        sum_ = re.fullmatch(r"(\d*)([a-z]+)([+-]\d+)?", text)
        if sum_ is None or sum_.group(2) not in index:
            raise LayoutError(f"template {template!r}: {{{text}}} is no variable")
        return str(int(sum_.group(1) or 1) * index[sum_.group(2)] + int(sum_.group(3) or 0))

    return _VARIABLE.sub(value, template) if "{" in template else template
