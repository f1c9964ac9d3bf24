"""A model of checkpoints that really makes every array: what core computes by arithmetic, done by NumPy on the whole.

A `Toy` declares tensors, namings and rules as plain data. `World` gives each rank its local tensors by slicing, padding,
transposing, reshaping and concatenating whole arrays, and cuts them for ZeRO by laying flat buffers out element by element.
Only `Toy.schema` and `Form.text` know ckptkit: they write the same declaration in its words.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import Any

import numpy as np

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.core.layouts import Layout
from ckptkit.core.schema import OPTIMIZER_ROLES, Declare, Family, Model, Name, Schema

PAD = 0
"""What padding holds; no element has this value."""


class Impossible(Exception):
    """The layout does not fit, says the oracle."""


@dataclass(frozen=True)
class Rule:
    """`tp`, `ep` or `etp`, and at most one option."""

    mesh: str
    replicate: bool = False
    pad: int = 0
    inner: str = ""

    @property
    def text(self) -> str:
        option = "replicate" if self.replicate else f"pad={self.pad}" if self.pad else ""
        option = f"inner={self.inner}" if self.inner else option
        return f"{self.mesh}:{option}" if option else self.mesh


@dataclass(frozen=True)
class Bundle:
    """Tensors with common axes, which a family may join. `parts` are `(own axes, canonical order of all axes)`."""

    number: int
    home: str
    parts: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    kind: str
    optimizer: str
    dtypes: tuple[str, ...]

    def tensor(self, part: int, layer: int | str = "{i}") -> str:
        where = f"layers.{layer}." if self.home == "layer" else f"{self.home}."
        return f"{where}b{self.number}.p{part}"

    @property
    def roles(self) -> dict[str, DType]:
        roles = ("buffer",) if self.kind == "buffer" else ("param", *OPTIMIZER_ROLES[self.optimizer])
        return {role: dtype_named(dtype) for role, dtype in zip(roles, self.dtypes, strict=False)}


@dataclass(frozen=True)
class Form:
    """How a family names a bundle.

    Attributes:
        dims: Common axes merged in each dimension.
        split: The dimension to which the parts' own axes are appended.
        parts: The parts joined in one name (several), or the one part.
        fixed: An axis of which each name holds one index, or "".
        bracket: Whether a single part is written with brackets.
    """

    dims: tuple[tuple[str, ...], ...]
    split: int
    parts: tuple[int, ...]
    fixed: str = ""
    bracket: bool = False

    def text(self, bundle: Bundle, layer: str, index: str) -> str:
        """The pattern that ckptkit reads."""
        tensors = [(bundle.tensor(p, layer), bundle.parts[p][0]) for p in self.parts]
        words = [f"{self.fixed}={index}"] if self.fixed else []
        if len(tensors) > 1 or self.bracket:
            inner = " | ".join(f"{tensor}: {' '.join(axes)}" for tensor, axes in tensors)
            for number, axes_ in enumerate(self.dims):
                group = " ".join(axes_)
                if number == self.split:
                    words.append(f"({group} [{inner}])" if group else f"[{inner}]")
                else:
                    words.append(f"({group})")
            return " ".join(words)
        (tensor, own), *_ = tensors
        for number, axes_ in enumerate(self.dims):
            axes_ = (*axes_, *own) if number == self.split else axes_
            words.append(axes_[0] if len(axes_) == 1 else f"({' '.join(axes_)})")
        return f"{tensor}: {' '.join(words)}"

    def array(self, bundle: Bundle, parts: Mapping[int, np.ndarray]) -> np.ndarray:
        """The family's tensor, from the parts' arrays in canonical axis order with `fixed` taken out."""
        made = []
        lead = after = ()  # type: tuple[int, ...]
        for part in self.parts:
            own, order = bundle.parts[part]
            array = parts[part]
            axes = [axis for axis in order if axis != self.fixed]
            size = dict(zip(axes, array.shape, strict=True))
            before = [axis for dim in self.dims[: self.split + 1] for axis in dim]
            behind = [axis for dim in self.dims[self.split + 1 :] for axis in dim]
            array = array.transpose([axes.index(axis) for axis in (*before, *own, *behind)])
            lead = tuple(prod(size[a] for a in dim) for dim in self.dims[: self.split + 1])
            after = tuple(prod(size[a] for a in dim) for dim in self.dims[self.split + 1 :])
            made.append(array.reshape(*lead, prod(size[a] for a in own), *after))
        if not self.dims:
            return made[0].reshape(())
        joined = np.concatenate(made, axis=self.split + 1)
        return joined.reshape(*lead[:-1], lead[-1] * joined.shape[self.split + 1], *after)


@dataclass(frozen=True)
class ToyFamily:
    """Forms by bundle; `shifted` bundles of layer i are named by layer i + 1, the last one by the last stage."""

    name: str
    forms: Mapping[int, tuple[Form, ...]]
    shifted: frozenset[int] = frozenset()
    copied: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Local:
    """A name that some rank holds: which form of which bundle, and where it lives."""

    key: str
    bundle: Bundle
    form: Form
    layer: int  # of the tensor; -1 outside layers
    index: int  # of the fixed axis; -1 without
    home: str
    home_layer: int
    copy: bool = False


@dataclass(frozen=True)
class Toy:
    """A model, declared."""

    sizes: Mapping[str, int]
    rules: Mapping[str, Rule]
    layers: int
    bundles: tuple[Bundle, ...]
    families: tuple[ToyFamily, ...]

    def schema(self) -> Schema:
        def declares(home: str) -> tuple[Declare, ...]:
            return tuple(
                Declare(b.tensor(p), " ".join(order), kind=b.kind, optimizer=b.optimizer)
                for b in self.bundles
                if b.home == home
                for p, (_, order) in enumerate(b.parts)
            )

        return Schema(
            id="toy@1",
            first=declares("first"),
            layer=declares("layer"),
            last=declares("last"),
            rules={axis: rule.text for axis, rule in self.rules.items()},
            families=tuple(self._family(family) for family in self.families),
            sizes=lambda config: dict(config),
        )

    @cached_property
    def model(self) -> Model:
        return self.schema().bind({**self.sizes, "layers": self.layers})

    def _family(self, family: ToyFamily) -> Family:
        lines: dict[str, list[Name]] = {"first": [], "layer": [], "last": []}
        for home, found in lines.items():
            for b in self.bundles:
                shifted = b.number in family.shifted
                if b.home == home and not shifted:
                    found += self._lines(b, family, "{i}", "{i}", ":")
                elif home == "layer" and shifted:
                    found += self._lines(b, family, "{i}", "{i-1}", "1:")
                elif home == "last" and shifted:
                    found += self._lines(b, family, "end", "{last}", ":")
                elif home == "last" and b.number in family.copied:
                    found += self._lines(b, family, "copy", "{i}", ":", copy=True)
        first, layer, last = (tuple(found) for found in lines.values())
        return Family(family.name, first, layer, last)

    def _lines(
        self, bundle: Bundle, family: ToyFamily, place: str, layer: str, when: str, copy: bool = False
    ) -> list[Name]:
        found = []
        for f, form in enumerate(family.forms[bundle.number]):
            head = f"{place}.b{bundle.number}"
            if form.fixed == "expert":
                found.append(Name(f"{head}.{{e}}.f{f}", form.text(bundle, layer, "{e}"), when, "", copy))
            elif form.fixed:
                for index in range(self.sizes[form.fixed]):
                    text = form.text(bundle, layer, str(index))
                    found.append(Name(f"{head}.n{index}.f{f}", text, when, "", copy))
            else:
                found.append(Name(f"{head}.f{f}", form.text(bundle, layer, ""), when, "", copy))
        return found

    def locals(self, family: ToyFamily) -> Iterator[Local]:
        """Every name of a family, in module order."""

        def names(
            b: Bundle, place: object, layer: int, home: str, at: int, copy: bool = False
        ) -> Iterator[Local]:
            forms = list(enumerate(family.forms[b.number]))
            head = f"{place}.b{b.number}"
            if any(form.fixed == "expert" for _, form in forms):  # then all of them: expert by expert
                for e in range(self.sizes["expert"]):
                    for f, form in forms:
                        yield Local(f"{head}.{e}.f{f}", b, form, layer, e, home, at, copy)
                return
            for f, form in forms:
                for index in range(self.sizes[form.fixed]) if form.fixed else (-1,):
                    number = f".n{index}" if form.fixed else ""
                    yield Local(f"{head}{number}.f{f}", b, form, layer, index, home, at, copy)

        for b in self.bundles:
            if b.home == "first":
                yield from names(b, 0, -1, "first", 0)
        for i in range(self.layers):
            for b in self.bundles:
                if b.home == "layer" and b.number not in family.shifted:
                    yield from names(b, i, i, "layer", i)
                elif b.home == "layer" and i:
                    yield from names(b, i, i - 1, "layer", i)
        for b in self.bundles:
            if b.home == "last":
                yield from names(b, self.layers - 1, -1, "last", 0)
            elif b.number in family.shifted:
                yield from names(b, "end", self.layers - 1, "last", 0)
            elif b.number in family.copied:
                yield from names(b, "copy", -1, "last", 0, copy=True)

    @cached_property
    def truth(self) -> dict[tuple[str, str], np.ndarray]:
        """Every canonical tensor and role as an array of values that are unique (but for wrap-around), and never PAD."""
        found = {}
        count = 1
        for b in self.bundles:
            for layer in range(self.layers) if b.home == "layer" else (-1,):
                for p, (_, order) in enumerate(b.parts):
                    shape = tuple(self.sizes[axis] for axis in order)
                    for role, dtype in b.roles.items():
                        values = (np.arange(count, count + prod(shape)) % 65521 + 1).reshape(shape)
                        found[b.tensor(p, layer), role] = values.astype(dtype.name)
                        count += prod(shape)
        return found

    @property
    def held(self) -> dict[tuple[str, str], DType]:
        return {key: dtype_named(array.dtype.name) for key, array in self.truth.items()}


@dataclass
class World:
    """What every rank of a layout holds of one family, by brute force.

    Raises Impossible (when built) where the layout does not fit the toy.
    """

    toy: Toy
    family: ToyFamily
    layout: Layout
    ranks: list[dict[str, Local]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Every question is asked many times.
        for name in ("coordinate", "group", "array", "runs", "_spans"):
            setattr(self, name, cache(getattr(self, name)))
        self._stage = self._stages()
        for rank in range(self.layout.world):
            dense = self.coordinate(rank, expert=False)
            mine = {}
            for local in self.toy.locals(self.family):
                if local.copy and self.layout.pp == 1:
                    continue
                stage = {"first": 0, "last": self.layout.pp - 1, "layer": -1}[local.home]
                stage = self._stage[local.home_layer] if stage < 0 else stage
                if stage == dense["pp"] and self._spans(local, rank) is not None:
                    mine[local.key] = local
            self.ranks.append(mine)

    def coordinate(self, rank: int, expert: bool) -> dict[str, int]:
        """Megatron's rule: the first axis of the order changes fastest."""
        layout = self.layout
        edp = layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)
        sizes = {"tp": layout.tp, "cp": layout.cp, "ep": 1, "dp": layout.dp, "pp": layout.pp}
        if expert:
            sizes = {"tp": layout.etp, "cp": 1, "ep": layout.ep, "dp": edp, "pp": layout.pp}
        found = {}
        for axis in layout.order.split("-"):
            found[axis] = rank % sizes[axis]
            rank //= sizes[axis]
        return found

    def group(self, rank: int, expert: bool) -> list[int]:
        """The ranks that share this one's shards, in the order of their data (and context) parallel coordinates."""
        mine = self.coordinate(rank, expert)
        same = [
            r
            for r in range(self.layout.world)
            if all(self.coordinate(r, expert)[a] == mine[a] for a in ("tp", "ep", "pp"))
        ]
        inner = [axis for axis in self.layout.order.split("-") if axis in ("cp", "dp")]
        return sorted(same, key=lambda r: [self.coordinate(r, expert)[a] for a in reversed(inner)])

    def _stages(self) -> list[int]:
        layout, layers = self.layout, self.toy.layers
        if layout.stages is not None:
            if sum(layout.stages) != layers:
                raise Impossible
            return [stage for stage, count in enumerate(layout.stages) for _ in range(count)]
        if layout.vpp > 1:
            if layers % (layout.pp * layout.vpp):
                raise Impossible
            chunk = layers // (layout.pp * layout.vpp)
            return [stage for _ in range(layout.vpp) for stage in range(layout.pp) for _ in range(chunk)]
        found: list[int] = []
        for stage in range(layout.pp):
            found += [stage] * (layers // layout.pp + (stage < layers % layout.pp))
        return found

    def _spans(self, local: Local, rank: int) -> dict[str, tuple[int, int]] | None:
        """What a rank holds of each axis of a name: `[start, stop)`, past the size where padded; None without a share."""
        expert = is_expert(local.bundle)
        mesh = self.coordinate(rank, expert)
        degrees = {"ep": self.layout.ep, "etp": self.layout.etp} if expert else {"tp": self.layout.tp}
        at = {"ep": mesh["ep"], "etp": mesh["tp"]} if expert else {"tp": mesh["tp"]}
        found = {}
        for part in local.form.parts:
            for axis in local.bundle.parts[part][1]:
                size, rule = self.toy.sizes[axis], self.toy.rules.get(axis)
                if rule is None or rule.mesh not in degrees:
                    found[axis] = 0, size
                else:
                    found[axis] = self._cut(size, rule, degrees[rule.mesh], at[rule.mesh])
        if local.form.fixed:
            start, stop = found[local.form.fixed]
            if not start <= local.index < stop:
                return None
            found[local.form.fixed] = local.index, local.index + 1
        return found

    def _cut(self, size: int, rule: Rule, degree: int, at: int) -> tuple[int, int]:
        if rule.inner:
            outer = self.toy.sizes[rule.inner]
            if degree <= outer or outer == 0:
                return 0, size
            if degree % outer:
                raise Impossible
            degree, at = degree // outer, at % (degree // outer)
        if rule.pad:
            while size % (rule.pad * degree):
                size += 1
        if rule.replicate and size and degree % size == 0 and degree > size:
            owners = [index for index in range(size) for _ in range(degree // size)]
            return owners[at], owners[at] + 1
        if size % degree:
            raise Impossible
        return at * (size // degree), (at + 1) * (size // degree)

    def array(self, rank: int, key: str, role: str) -> np.ndarray:
        """One rank's local tensor, with PAD where it has no element."""
        local = self.ranks[rank][key]
        spans = self._spans(local, rank)
        assert spans is not None
        parts = {}
        for part in local.form.parts:
            array = self.toy.truth[local.bundle.tensor(part, local.layer), role]
            order = local.bundle.parts[part][1]
            for d, axis in enumerate(order):
                start, stop = spans[axis]
                wide = [(0, 0)] * array.ndim
                wide[d] = (0, max(0, stop - array.shape[d]))
                array = np.pad(array, wide, constant_values=PAD).take(np.arange(start, stop), axis=d)
            if local.form.fixed:
                array = array.squeeze(order.index(local.form.fixed))
            parts[part] = array
        return local.form.array(local.bundle, parts)

    def runs(self, rank: int, role: str) -> set[tuple[str, int, int]]:
        """The runs `(key, first, last)` that the ZeRO stage gives to a rank, for a role that it cuts."""
        found: set[tuple[str, int, int]] = set()
        for expert in (False, True):
            group = self.group(rank, expert)
            me = group.index(rank)
            kinds: dict[frozenset[str], list[tuple[str, tuple[int, ...]]]] = {}
            for key, local in self.ranks[rank].items():
                shape = self.array(rank, key, next(iter(local.bundle.roles))).shape
                if is_expert(local.bundle) == expert and role in local.bundle.roles and 0 not in shape:
                    kind = frozenset(local.bundle.roles) - {"param"}
                    kinds.setdefault(kind, []).append((key, shape))
            for members in kinds.values():
                if self.layout.zero == 3:
                    for key, shape in members:
                        found |= _rows(key, shape, len(group), me)
                else:
                    found |= _flat(members, len(group), me, self.layout.rule)
        return found

    def is_cut(self, role: str) -> bool:
        """Whether the layout's ZeRO stage cuts a role."""
        if role == "buffer" or not self.layout.zero:
            return False
        return role != "param" or self.layout.zero == 3


def is_expert(bundle: Bundle) -> bool:
    return any("expert" in order for _, order in bundle.parts)


def _rows(key: str, shape: tuple[int, ...], ranks: int, me: int) -> set[tuple[str, int, int]]:
    """FSDP2's rule: chunks of equal rows, as many ranks as it takes."""
    if not shape:
        return {(key, 0, 1)} if me == 0 else set()
    chunk = 1
    while chunk * ranks < shape[0]:
        chunk += 1
    mine = [row for row in range(shape[0]) if row // chunk == me]
    width = prod(shape[1:])
    return {(key, mine[0] * width, (mine[-1] + 1) * width)} if mine else set()


def _flat(
    members: list[tuple[str, tuple[int, ...]]], ranks: int, me: int, rule: str
) -> set[tuple[str, int, int]]:
    """The runs of one rank in a flat buffer, laid out element by element: slots are (key, element) or None."""
    if rule == "whole":
        load = [0] * ranks
        mine = set()
        for key, shape in sorted(
            members, key=lambda member: -prod(member[1])
        ):  # stable: ties in module order
            owner = load.index(min(load))
            load[owner] += prod(shape)
            if owner == me:
                mine.add((key, 0, prod(shape)))
        return mine
    slots: list[tuple[str, int] | None] = []
    for key, shape in reversed(members) if rule == "megatron" else members:
        while rule == "megatron" and len(slots) % 64:
            slots.append(None)
        slots += [(key, element) for element in range(prod(shape))]
    unit = {"even": [ranks], "deepspeed": [2 * ranks], "megatron": [ranks, 128]}[rule]
    while any(len(slots) % n for n in unit):
        slots.append(None)
    share = len(slots) // ranks
    elements: dict[str, list[int]] = {}
    for slot in slots[me * share : (me + 1) * share]:
        if slot is not None:
            elements.setdefault(slot[0], []).append(slot[1])
    for mine_ in elements.values():
        assert mine_ == list(range(mine_[0], mine_[-1] + 1))
    return {(key, mine_[0], mine_[-1] + 1) for key, mine_ in elements.items()}


def box_values(array: np.ndarray, lo: Any, hi: Any) -> np.ndarray:
    """A box of an array, flat in row-major order."""
    return array[tuple(slice(int(a), int(b)) for a, b in zip(lo, hi, strict=True))].reshape(-1)
