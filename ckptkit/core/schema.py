"""Schemas: a model family as data.

A schema declares canonical tensors with named axes, how axes split over mesh axes, and for every family of
names (Transformers, Megatron, ...) which view of which canonical tensor each name is, in module order. Binding a
schema to a model's configuration gives a `Model`, whose `names` say what each rank of a layout holds
(`ckptkit.core.names`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from ckptkit.core.boxes import check_shape
from ckptkit.core.names import Names, Placement, StoredNames
from ckptkit.core.rules import Rule
from ckptkit.core.templates import fill, layers_of
from ckptkit.errors import CkptError, FormatError, LayoutError

__all__ = [
    "OPTIMIZER_ROLES",
    "STATE_ROLES",
    "Declare",
    "Family",
    "Flags",
    "Model",
    "Name",
    "Names",
    "Placement",
    "Schema",
    "StoredNames",
    "Tensor",
]

OPTIMIZER_ROLES: dict[str, tuple[str, ...]] = {
    "adamw": ("master", "exp_avg", "exp_avg_sq"),
    "muon": ("master", "momentum"),
    "none": (),
}
"""The state that each kind of optimizer keeps for a parameter, in the order files hold it."""

STATE_ROLES = ("master", "exp_avg", "exp_avg_sq", "momentum", "ema", "state")
"""Every role that is optimizer-side state (the rest: `param`, `buffer`)."""


MAX_LAYERS = 1 << 16

_ADAPTER = re.compile(r"\.(?:lora_|modules_to_save\.)")


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

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise LayoutError(f"{self.name} has axes {self.axes}, but shape {self.shape}", tensor=self.name)
        check_shape(self.shape, self.name)

    @property
    def is_expert(self) -> bool:
        return "expert" in self.axes

    @property
    def part(self) -> str:
        """`adapter` for what LoRA adds beside a model (`ckptkit.core.adapters`), else `base`. Stored names tell it too."""
        return "adapter" if _ADAPTER.search(self.name) else "base"


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

    `rows` names an axis: where the tensor-parallel degree exceeds it, ranks hold equal shares of the rows (dimension 0) of
    the whole, wherever these cut its axes, as Megatron does with `linear_qkv`.
    """

    key: str
    view: str
    when: str = ":"
    only_if: str = ""
    copy: bool = False
    rows: str = ""


Line = TypeVar("Line", Declare, Name)

Flags = Mapping[str, bool | frozenset[int]]
"""What a configuration switches on: for all layers, or for some."""


@dataclass(frozen=True)
class Family:
    """One naming of the model's tensors: what is on the first stage, in each layer, on the last stage.

    The order is module order; ZeRO buffers and pipeline ownership follow it. `adapters` says how names of adapters are spelled:
    as peft does, or as `megatron`.
    """

    name: str
    first: tuple[Name, ...] = ()
    layer: tuple[Name, ...] = ()
    last: tuple[Name, ...] = ()
    adapters: str = "peft"


@dataclass(frozen=True)
class Schema:
    """A model family, declared.

    Attributes:
        id: `name@version`; part of the native format, since canonical names and axes are.
        first, layer, last: Canonical tensors, in module order.
        rules: Axis to how it splits, as `ckptkit.core.rules` reads it: `"tp"`, `"tp:replicate"`, `"tp:pad=128"`, ...
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
        try:
            plain = self.reads_config(config)
            sizes = self.sizes(plain)
            flags = self.flags(plain)
        except KeyError as missing:
            raise LayoutError(f"model {self.id}: the configuration lacks {missing}") from None
        except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
            if isinstance(error, CkptError):
                raise
            raise LayoutError(f"model {self.id}: the configuration makes no sense: {error}") from error
        for axis, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise LayoutError(f"model {self.id}: the configuration gives axis {axis} the size {size!r}")
        if max(sizes["layers"], sizes.get("expert", 0)) > MAX_LAYERS:
            raise LayoutError(f"model {self.id}: more than {MAX_LAYERS} layers or experts are not supported")
        model = Model(self, plain, sizes, flags)
        _ = model.tensors  # declared now, so that sizes which no tensor can have are told here
        return model


class Model:
    """A schema bound to one configuration: canonical tensors with sizes, and its families of names.

    Attributes:
        base: The model without adapters (`ckptkit.core.adapters`); itself where it has none.
    """

    def __init__(
        self,
        schema: Schema,
        config: dict[str, Any],
        sizes: dict[str, int],
        flags: Flags,
        base: "Model | None" = None,
    ) -> None:
        self.base = base or self
        self.schema = schema
        self.config = config
        self.sizes = sizes
        self.layers = sizes["layers"]
        self.flags = dict(flags)
        self.rules = {axis: Rule.parse(axis, rule) for axis, rule in schema.rules.items()}
        self._names: dict[str, Names] = {}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Canonical tensors by name, in module order."""
        found: dict[str, Tensor] = {}
        for declare, layer, _ in self.sections(self.schema.first, self.schema.layer, self.schema.last):
            axes = tuple(declare.axes.split())
            name = fill(declare.name, {"i": layer, "last": self.layers - 1})
            if name in found:
                raise LayoutError(f"model {self.schema.id} declares {name} twice")
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

    def names(self, family: str = "canonical") -> Names:
        """The naming called `family`. Raises LayoutError that lists the known ones."""
        if family not in self._names:
            known = {f.name: f for f in (_canonical(self.schema), *self.schema.families)}
            if family not in known:
                raise LayoutError(
                    f"model {self.schema.id} has no names {family!r}; it has {', '.join(known)}"
                )
            self._names[family] = Names(self, known[family])
        return self._names[family]

    def sections(
        self, first: Sequence[Line], layer: Sequence[Line], last: Sequence[Line]
    ) -> Iterator[tuple[Line, int, str]]:
        """Every line that applies to this configuration, with its layer and its home (first, layer or last).

        A line of the first home counts as layer 0, one of the last as the last layer.
        """
        end = self.layers - 1
        for line in first:
            if self.applies(line, 0):
                yield line, 0, "first"
        for i in range(self.layers):
            for line in layer:
                if self.applies(line, i) and i in layers_of(line.when, self.layers):
                    yield line, i, "layer"
        for line in last:
            if self.applies(line, end):
                yield line, end, "last"

    def applies(self, line: Declare | Name, layer: int) -> bool:
        """Whether the configuration has a line in a layer, its `when` apart."""
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
        if len(tied) > 1 and not self._mean_the_same(tied, stored & known[best]):
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

    def _mean_the_same(self, families: Sequence[str], keys: set[str]) -> bool:
        """Whether names are the same views in several families, so that it makes no difference which one is taken."""
        meanings = set()
        for family in families:
            names = self.names(family)
            held = {**names.copies, **names.whole}
            meanings.add(tuple(held[key].segments if key in held else () for key in sorted(keys)))
        return len(meanings) == 1

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


def _canonical(schema: Schema) -> Family:
    """Canonical names as a family: each tensor is itself."""

    def lines(declares: tuple[Declare, ...]) -> tuple[Name, ...]:
        return tuple(Name(d.name, f"{d.name}: {d.axes}", d.when, d.only_if) for d in declares)

    return Family("canonical", lines(schema.first), lines(schema.layer), lines(schema.last))


def _some(keys: Iterable[str], most: int = 3) -> str:
    ordered = sorted(keys)
    return ", ".join(ordered[:most]) + (", ..." if len(ordered) > most else "")
