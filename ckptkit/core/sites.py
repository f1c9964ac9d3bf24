"""Sites: where a model's matrices can have LoRA adapters, and the names that these have in a family.

All follows from the names of weights: a name of two dimensions that ends in `.weight` is a matrix (rows, columns); one of three that
does not is a parameter with a matrix for each index of the first, as experts are.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptkit.core.schema import Family, Name, Schema
from ckptkit.core.views import View

HOMES = ("first", "layer", "last")
SAVED = "lora_saved"
"""The kind of a trained copy of a weight."""

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
        return f"{self.name}.{last_part(part)}.{kind}"

    def axes(self, kind: str, part: str, rank: int) -> tuple[str, ...]:
        """The axes of that tensor."""
        groups = {"rank": (f"lora_{rank}",), "in": self.ins, "out": self.outs[self.parts.index(part)]}
        return (*self.batch, *(axis for group in KINDS[kind] for axis in groups[group]))


@dataclass(frozen=True, slots=True)
class Beside:
    """An adapter's name beside a weight's: its view, by rank, and the canonical tensors in it (templates)."""

    key: str
    view: Callable[[int], str]
    tensors: tuple[str, ...]
    axis: int
    stacked: bool = False
    rows: str = ""


def last_part(tensor: str) -> str:
    return tensor.rpartition(".")[2]


def all_sites(schema: Schema) -> dict[str, Site]:
    """Every site that a name of any family makes, by name; the first family that has it says what are rows and columns."""
    declared = {declare.name for home in HOMES for declare in getattr(schema, home)}
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
    name = "+".join([parts[0], *map(last_part, parts[1:])]) + "".join(
        f".{index}" for _, index in sorted(picked)
    )
    outs = tuple((*view.dims[rows], *part.axes) for part in view.parts)
    return Site(name, parts, picked, view.dims[0] if stacked else batch, outs, view.dims[rows + 1], stacked)


def beside(family: Family, line: Name, sites: Mapping[str, Site]) -> Iterator[Beside]:
    """The adapter names beside a weight's name."""
    stem, dot, end = line.key.rpartition(".")
    if family.adapters == "peft" and dot and not line.copy:
        parts = View.parse(line.view).parts
        view = _renamed(line.view, {part.tensor: f"{part.tensor}.{SAVED}" for part in parts})
        tensors = tuple(f"{part.tensor}.{SAVED}" for part in parts)
        yield Beside(f"{stem}.modules_to_save.{end}", lambda rank: view, tensors, -1, rows=line.rows)
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
            labels = [last_part(site.parts[0])] if len(own.parts) > 1 else []
            labels += [_OWN[axis][int(i)] for axis, i in sorted(site.picked - own.picked) if axis in _OWN]
            if len(labels) == 1:
                of = own.outs[own.parts.index(site.parts[0])]
                mine = tuple(axis for axis in of if axis not in {a for a, _ in site.picked - own.picked})
                one = replace(own, parts=site.parts, picked=site.picked, outs=(mine,))
                for made in _names_at(family, line, one, site, stem):
                    yield replace(
                        made, key=made.key.replace(".adapter.", f".adapter.adapter_{labels[0]}."), rows=""
                    )


def _names_at(family: Family, line: Name, own: Site, site: Site, stem: str) -> Iterator[Beside]:
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
        yield Beside(
            f"{stem}.{spelled}", view, tensors, axis, own.stacked, line.rows if dims[0] == "out" else ""
        )


def _renamed(view: str, names: Mapping[str, str]) -> str:
    """A view of other tensors with the same axes."""
    for old, new in names.items():
        view = re.sub(rf"(?<![\w.]){re.escape(old)}\s*:", f"{new}:", view)
    return view
