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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptkit.core.schema import Declare, Family, Model, Name
from ckptkit.core.sites import KINDS, SAVED, all_sites, beside
from ckptkit.core.templates import fill, layers_of
from ckptkit.errors import LayoutError

_CANONICAL = re.compile(r".+\.(lora_saved|" + "|".join(KINDS) + ")")
_RANK = re.compile(r"lora_([1-9][0-9]{0,6})")


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
    sites, experts = all_sites(model.schema), model.sizes.get("expert", 0)
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
        for made in beside(lines, line, sites):
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
    schema, sites = model.schema, all_sites(model.schema)
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
            for new in beside(family, line, sites):
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
    sites = all_sites(model.base.schema)
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
