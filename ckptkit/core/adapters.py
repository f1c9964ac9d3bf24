"""Adapters: LoRA tensors beside a model's weights, declared by the views of the weights that they adapt.

A matrix `W [out, in]` gets `lora_A [rank, in]` and `lora_B [out, rank]`. Which axes are `out` and `in` follows from the name that a
family gives the matrix, so that adapters are cut as the matrix is: `lora_A` with a row-parallel one, `lora_B` with a column-parallel
one, both by experts. A *site* is what one `lora_A` serves: one projection, or several that a family holds as one matrix.

    layers.3.attn.q.lora_A             lora_8 hidden                     one projection
    layers.3.mlp.gate_up.0.lora_B      ffn lora_8                        one half of a gated matrix
    layers.3.attn.q+k+v.lora_A         lora_8 hidden                     one for three, adapted as one matrix
    layers.3.attn.q+k+v.q.lora_B       kv_head group head_dim lora_8     the rows of one of the three
    layers.3.experts.gate_up.lora_A    expert lora_4 hidden              one for each expert
    lm_head.lora_saved                 vocab hidden                      a trained copy of a weight

The axis `lora_<rank>` is whole on every rank. Names in files are those of peft, or those of Megatron-Bridge (`Family.adapters`):
there a matrix that holds several projections has an adapter of its own for each (`adapter_q`, `adapter_gate`).

Sources: peft, `tuners/lora/layer.py`; Megatron-Bridge, `peft/canonical_lora.py` and `models/conversion/peft_bridge.py`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptkit.core.schema import Declare, Family, Model, Name, Schema
from ckptkit.core.templates import fill, layers_of
from ckptkit.core.views import View
from ckptkit.errors import LayoutError

SAVED = "lora_saved"

KINDS: dict[str, tuple[str, ...]] = {
    "lora_A": ("rank", "in"),
    "lora_B": ("out", "rank"),
    "lora_embedding_A": ("rank", "out"),
    "lora_embedding_B": ("in", "rank"),
    "lora_magnitude": ("out",),
    "lora_B_bias": ("out",),
}
"""Kinds of adapter tensors, and what their dimensions are. The rows of an embedding are looked up: they are its input."""

_SPELLED: dict[str, dict[str, str]] = {
    "peft": {
        "lora_A": "lora_A.weight",
        "lora_B": "lora_B.weight",
        "lora_embedding_A": "lora_embedding_A",
        "lora_embedding_B": "lora_embedding_B",
        "lora_magnitude": "lora_magnitude_vector",
        "lora_B_bias": "lora_B.bias",
    },
    "megatron": {"lora_A": "adapter.linear_in.weight", "lora_B": "adapter.linear_out.weight"},
}
_OWN = {"gate_up": ("gate", "up")}
"""What the indices of an axis are called where each has an adapter of its own."""

_CANONICAL = re.compile(r".+\.(lora_saved|" + "|".join(KINDS) + ")")
_RANK = re.compile(r"lora_([1-9][0-9]{0,6})")
_HOMES = ("first", "layer", "last")


@dataclass(frozen=True, slots=True)
class Site:
    """What one `lora_A` serves. Names are templates; axes outermost first.

    Attributes:
        name: What the names of its tensors begin with.
        parts: The canonical tensors that are adapted together.
        picked: Axes of these of which it is one index.
        batch: Axes that matrices are stacked along.
        outs: Of each part, the axes of its rows.
        ins: The axes of the columns.
        stacked: Whether the matrices of `batch` are one parameter, not modules of their own.
    """

    name: str
    parts: tuple[str, ...]
    picked: frozenset[tuple[str, str]]
    batch: tuple[str, ...]
    outs: tuple[tuple[str, ...], ...]
    ins: tuple[str, ...]
    stacked: bool

    def tensor(self, kind: str, part: str) -> str:
        """The canonical tensor of a kind that serves a part: its own where it has rows, else that of all."""
        if "out" not in KINDS[kind] or len(self.parts) == 1:
            return f"{self.name}.{kind}"
        return f"{self.name}.{_last(part)}.{kind}"

    def axes(self, kind: str, part: str, rank: int) -> tuple[str, ...]:
        """The axes of that tensor."""
        groups = {"rank": (f"lora_{rank}",), "in": self.ins, "out": self.outs[self.parts.index(part)]}
        return (*self.batch, *(axis for group in KINDS[kind] for axis in groups[group]))


@dataclass(frozen=True, slots=True)
class Slot:
    """What a stored adapter name could be.

    Attributes:
        tensors: The canonical tensors that it is made of.
        axis: The dimension that is the rank (times `share`, where experts are in it too); -1 where none is.
    """

    tensors: tuple[str, ...]
    axis: int
    share: int = 1

    def rank(self, name: str, shape: tuple[int, ...]) -> int:
        """The rank that a stored shape says; 0 where there is none. Raises LayoutError for a shape that has no rank."""
        if self.axis < 0:
            return 0
        size = shape[self.axis] if self.axis < len(shape) else 0
        if size < 1 or size % self.share:
            raise LayoutError(f"{name} has shape {shape}, which says no rank of an adapter", tensor=name)
        return size // self.share


@dataclass(frozen=True, slots=True)
class _Line:
    """An adapter's name beside a weight's: its view, by rank, and the canonical tensors in it (templates)."""

    key: str
    view: Callable[[int], str]
    tensors: tuple[str, ...]
    axis: int
    stacked: bool = False
    rows: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """What an adapter's tensor is of one that is for a part only: all of it, or one index of an axis of its own."""

    tensor: str
    axis: int = -1
    index: int = 0


def is_canonical(name: str) -> bool:
    """Whether a canonical tensor is an adapter's."""
    return _CANONICAL.fullmatch(name) is not None


def ranks_of(tensors: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, int]:
    """The adapters among canonical tensors (name, axes) with their ranks: what `with_adapters` takes."""
    found = {}
    for name, axes in tensors:
        if is_canonical(name):
            ranks = [int(match[1]) for axis in axes if (match := _RANK.fullmatch(axis))]
            found[name] = ranks[0] if ranks else 0
    return found


def possible(model: Model, family: str) -> dict[str, Slot]:
    """Every adapter name that a family could have beside the names of `model`, with what it would be."""
    model = model.base
    sites, experts = _sites(model.schema), model.sizes.get("expert", 0)
    found: dict[str, Slot] = {}
    if family == "canonical":
        schema = model.schema
        for declare, layer, _ in model.sections(schema.first, schema.layer, schema.last):
            index = {"i": layer, "last": model.layers - 1}
            found[fill(f"{declare.name}.{SAVED}", index)] = Slot(
                (fill(f"{declare.name}.{SAVED}", index),), -1
            )
            for site in sites.values():
                for kind in KINDS if declare.name in site.parts else ():
                    name, axes = (
                        fill(site.tensor(kind, declare.name), index),
                        site.axes(kind, declare.name, 1),
                    )
                    found[name] = Slot((name,), axes.index("lora_1") if "lora_1" in axes else -1)
        return found
    lines = next(f for f in model.schema.families if f.name == family)
    for line, layer, _ in model.sections(lines.first, lines.layer, lines.last):
        for made in _beside(lines, line, sites):
            for e in range(experts) if "{e}" in made.key else (-1,):
                index = {"i": layer, "last": model.layers - 1, "e": e}
                tensors = tuple(fill(tensor, index) for tensor in made.tensors)
                found.setdefault(
                    fill(made.key, index), Slot(tensors, made.axis, experts if made.stacked else 1)
                )
    return found


def with_adapters(model: Model, found: Mapping[str, int]) -> Model:
    """The model with adapters beside its weights.

    Args:
        found: Canonical tensors of adapters to their ranks; copies of weights (`lora_saved`) to 0.

    Raises:
        LayoutError: the model has no place for one of them; names it.
    """
    if not found:
        return model.base
    model = model.base
    schema, sites = model.schema, _sites(model.schema)
    flags: dict[str, bool | frozenset[int]] = dict(model.flags)

    def ranked(tensors: Sequence[str], layers: Iterable[int], what: str) -> Iterator[tuple[int, str]]:
        """Each rank that all of some tensors have in some layers, and a flag for these."""
        by_rank: dict[int, set[int]] = defaultdict(set)
        for layer in layers:
            index = {"i": layer, "last": model.layers - 1}
            ranks = {found.get(fill(tensor, index)) for tensor in tensors}
            rank = ranks.pop()
            if rank is not None and not ranks:
                by_rank[rank].add(layer)
        for rank, members in sorted(by_rank.items()):
            flag = f"{what}@{rank}"
            flags[flag] = frozenset(members)
            yield rank, flag

    def applied(line: Declare | Name, home: str) -> list[int]:
        layers = {"first": [0], "last": [model.layers - 1]}.get(
            home, list(layers_of(line.when, model.layers))
        )
        return [layer for layer in layers if model.applies(line, layer)]

    def declares(home: str) -> tuple[Declare, ...]:
        base: tuple[Declare, ...] = getattr(schema, home)
        made = []
        for declare in base:
            layers = applied(declare, home)
            for _, flag in ranked([f"{declare.name}.{SAVED}"], layers, f"{declare.name}.{SAVED}"):
                made.append(replace(declare, name=f"{declare.name}.{SAVED}", kind="param", only_if=flag))
            for site in sites.values():
                for kind in KINDS if declare.name in site.parts else ():
                    tensor = site.tensor(kind, declare.name)
                    if any(tensor == known.name for known in made):
                        continue
                    for rank, flag in ranked([tensor], layers, tensor):
                        axes = " ".join(site.axes(kind, declare.name, rank))
                        made.append(Declare(tensor, axes, when=declare.when, only_if=flag))
        return (*base, *made)

    def names(family: Family, home: str) -> tuple[Name, ...]:
        made: list[Name] = []
        for line in getattr(family, home):
            made.append(line)
            layers = applied(line, home)
            for new in _beside(family, line, sites):
                for rank, flag in ranked(
                    new.tensors, layers, f"{family.name} {new.key} {' '.join(new.tensors)}"
                ):
                    made.append(Name(new.key, new.view(rank), line.when, flag, rows=new.rows))
        return tuple(made)

    families = tuple(
        replace(
            family, first=names(family, "first"), layer=names(family, "layer"), last=names(family, "last")
        )
        for family in schema.families
    )
    extended = replace(
        schema,
        first=declares("first"),
        layer=declares("layer"),
        last=declares("last"),
        families=families,
    )
    sizes = {**model.sizes, **{f"lora_{rank}": rank for rank in found.values() if rank}}
    adapted = Model(extended, model.config, sizes, flags, model)
    strange = [name for name in found if name not in adapted.tensors]
    if strange:
        raise LayoutError(f"{schema.id} has no matrix that {strange[0]} could adapt", tensor=strange[0])
    return adapted


def apart(model: Model, tensors: Collection[str]) -> dict[str, list[Share]]:
    """Adapters that serve several projections together, as adapters of each: what some families of names need.

    `lora_A` is then the same for each, and each has its rows of `lora_B`. Tensors that no finer sites take are left out.
    """
    sites = _sites(model.base.schema)
    found: dict[str, list[Share]] = {}
    for site in sites.values():
        finer = [
            t
            for t in sites.values()
            if t.name != site.name and len(t.parts) == 1 and t.parts[0] in site.parts and t.picked >= site.picked
            and set(t.ins) == set(site.ins) and set(t.batch) == set(site.batch)
        ]  # fmt: skip
        for layer in range(model.layers) if finer else ():
            index = {"i": layer, "last": model.layers - 1}
            for kind, part in ((kind, part) for kind in KINDS for part in site.parts):
                name = fill(site.tensor(kind, part), index)
                if name not in tensors or name in found:
                    continue
                found[name] = []
                for one in finer:
                    if "out" in KINDS[kind] and one.parts[0] != part:
                        continue
                    axes, cut = site.axes(kind, part, 1), dict(one.picked - site.picked)
                    taken = [axis for axis in axes if axis in cut]
                    if len(taken) > 1 or tuple(a for a in axes if a not in cut) != one.axes(
                        kind, one.parts[0], 1
                    ):
                        continue
                    place, at = (axes.index(taken[0]), int(cut[taken[0]])) if taken else (-1, 0)
                    found[name].append(Share(fill(one.tensor(kind, one.parts[0]), index), place, at))
    return {name: shares for name, shares in found.items() if shares}


def _last(tensor: str) -> str:
    return tensor.rpartition(".")[2]


def _sites(schema: Schema) -> dict[str, Site]:
    """Every site that a name of any family makes, by name; the first family that has it says what are rows and columns."""
    declared = {declare.name for home in _HOMES for declare in getattr(schema, home)}
    found: dict[str, Site] = {}
    for family in schema.families:
        for line in (*family.first, *family.layer, *family.last):
            site = _site(line)
            if site is not None and declared.issuperset(site.parts):
                found.setdefault(site.name, site)
    return found


def _site(line: Name) -> Site | None:
    """The site of a matrix that is adapted as it is named, or None for what is no matrix."""
    view = View.parse(line.view)
    picked = frozenset((axis, index) for axis, index in view.fixed if index.isdecimal())
    batch = tuple(axis for axis, index in view.fixed if not index.isdecimal())
    stacked = len(view.dims) == 3 and not batch and not line.key.endswith(".weight")
    if line.copy or not (stacked or (len(view.dims) == 2 and line.key.endswith(".weight"))):
        return None
    rows = 1 if stacked else 0
    if len(view.parts) > 1 and view.split != rows:
        return None
    parts = tuple(part.tensor for part in view.parts)
    name = "+".join([parts[0], *map(_last, parts[1:])]) + "".join(f".{index}" for _, index in sorted(picked))
    outs = tuple((*view.dims[rows], *part.axes) for part in view.parts)
    return Site(name, parts, picked, view.dims[0] if stacked else batch, outs, view.dims[rows + 1], stacked)


def _beside(family: Family, line: Name, sites: Mapping[str, Site]) -> Iterator[_Line]:
    """The adapter names beside a weight's name."""
    if family.adapters == "peft" and not line.copy:
        stem, _, end = line.key.rpartition(".")
        parts = View.parse(line.view).parts
        view = _renamed(line.view, {part.tensor: f"{part.tensor}.{SAVED}" for part in parts})
        tensors = tuple(f"{part.tensor}.{SAVED}" for part in parts)
        yield _Line(f"{stem}.modules_to_save.{end}", lambda rank: view, tensors, -1, rows=line.rows)
    own = _site(line)
    for site in sites.values() if own is not None else ():
        assert own is not None
        if set(site.ins) != set(own.ins) or set(site.batch) != set(own.batch):
            continue
        alike = site.parts == own.parts and site.picked == own.picked
        inside = set(site.parts) <= set(own.parts) and site.picked >= own.picked
        stem = line.key.removesuffix(".weight")
        if alike:
            yield from _names_at(family, line, own, site, stem)
        elif inside and family.adapters == "megatron" and len(site.parts) == 1:
            labels = [_last(site.parts[0])] if len(own.parts) > 1 else []
            labels += [_OWN[axis][int(i)] for axis, i in sorted(site.picked - own.picked) if axis in _OWN]
            if len(labels) == 1:
                of = own.outs[own.parts.index(site.parts[0])]
                mine = tuple(axis for axis in of if axis not in {a for a, _ in site.picked - own.picked})
                one = replace(own, parts=site.parts, picked=site.picked, outs=(mine,))
                for made in _names_at(family, line, one, site, stem):
                    yield replace(
                        made, key=made.key.replace(".adapter.", f".adapter.adapter_{labels[0]}."), rows=""
                    )


def _names_at(family: Family, line: Name, own: Site, site: Site, stem: str) -> Iterator[_Line]:
    """Names of all kinds for a site, at the matrix `own` or the part of it that the site is."""
    outer = View.parse(line.view).dims[1 if own.stacked else 0]
    for kind, spelled in _SPELLED[family.adapters].items():
        if own.stacked and kind not in ("lora_A", "lora_B"):
            continue
        dims = KINDS[kind]
        tensors = tuple(dict.fromkeys(site.tensor(kind, part) for part in own.parts))
        fixed = [] if own.stacked else [f"{axis}={{e}}" for axis in own.batch]
        if len(tensors) > 1:
            inner = [
                f"{tensor}: {' '.join(outs[len(outer) :])}"
                for tensor, outs in zip(tensors, own.outs, strict=True)
            ]
            rows, head = f"({' '.join(outer)} [{' | '.join(inner)}])", ""
        else:
            rows, head = f"({' '.join(own.outs[0])})", f"{tensors[0]}: "

        def view(
            rank: int,
            dims: Sequence[str] = dims,
            head: str = head,
            fixed: Sequence[str] = fixed,
            rows: str = rows,
        ) -> str:
            ranks = [f"lora_{rank}"]
            if own.stacked:  # peft keeps experts in the rank's dimension: outermost in A, innermost in B
                ranks = [*own.batch, *ranks] if dims[0] == "rank" else [*ranks, *own.batch]
            groups = {"rank": f"({' '.join(ranks)})", "in": f"({' '.join(own.ins)})", "out": rows}
            return head + " ".join([*fixed, *(groups[dim] for dim in dims)])

        axis = dims.index("rank") if "rank" in dims else -1
        yield _Line(
            f"{stem}.{spelled}", view, tensors, axis, own.stacked, line.rows if dims[0] == "out" else ""
        )


def _renamed(view: str, names: Mapping[str, str]) -> str:
    """A view of other tensors with the same axes."""
    for old, new in names.items():
        view = re.sub(rf"(?<![\w.]){re.escape(old)}\s*:", f"{new}:", view)
    return view
