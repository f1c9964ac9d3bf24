"""Where a Megatron-style name lies in a checkpoint: its layer and expert as parts of a name, or as indices of leading axes.

A module's name is `decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight`. In a `torch_dist` checkpoint it is

    decoder.layers.mlp.experts.experts.linear_fc1.weight       [3, 1]   layers alike: an axis of layers, one of experts
    decoder.layers.3.mlp.experts.experts.linear_fc1.weight     [1]      layers that differ
    decoder.layers.3.mlp.experts.experts.1.linear_fc1.weight            single experts; `_w` and `_v` are gate and up

All of this follows from a family's templates, whatever the model. Source: Megatron-LM, `transformer_block.py`,
`moe/experts.py` and `mlp.py` (`sharded_state_dict`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ckptkit.core.schema import Model, Name
from ckptkit.core.templates import fill

_LOCAL = "local_experts.{e}."
_FUSED = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
"""Norms that Transformer Engine keeps with the linear layer after them, and their names without it."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """A family's name taken apart: `prefix + number + "." + rest`, `{e}` of `rest` standing for the expert.

    `number` is the layer in the family's own numbering, or -1 outside layers; `expert` is -1 for other parameters. `layer` is
    the canonical layer and `home` the line's home (first, layer, last), which tell the pipeline stage.
    """

    name: str
    prefix: str
    number: int
    rest: str
    expert: int
    layer: int
    home: str

    def local(self, number: int, expert: int) -> str:
        """The name with another layer and expert, as one rank numbers them."""
        head = f"{self.prefix}{number}." if self.number >= 0 else self.prefix
        return head + self.rest.replace("{e}", str(expert))


@dataclass(frozen=True, slots=True)
class Address:
    """A place in a stored tensor: at `index` of the leading axes, whose sizes are `sizes`.

    `half` is 0 or 1 where the stored tensor is that half of the name's rows, else -1.
    """

    key: str
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    half: int = -1


def number_names(model: Model, family: str) -> dict[str, Numbered]:
    """Every name of a family, taken apart by its templates."""
    lines = next(f for f in model.schema.families if f.name == family)
    # `{2i+1}` tells where the layer's number is; names without a template may have one too (`layers.0.` of a first stage).
    prefixes = {
        line.key.partition("{")[0] for line in lines.layer if _layer_variable(line) and _heads_a_layer(line)
    }
    found: dict[str, Numbered] = {}
    for line, layer, home in model.sections(lines.first, lines.layer, lines.last):
        experts = range(model.sizes.get("expert", 0)) if "{e}" in line.key else (-1,)
        marked = fill(line.key.replace("{e}", "\0"), {"i": layer, "last": model.layers - 1})
        prefix, number, rest = marked, -1, ""
        for head in prefixes:
            match = re.fullmatch(re.escape(head) + r"(\d+)\.(.+)", marked)
            if match:
                prefix, number, rest = head, int(match[1]), match[2]
        for e in experts:
            if number < 0:
                prefix, rest = "", marked
            name = marked.replace("\0", str(e))
            found[name] = Numbered(name, prefix, number, rest.replace("\0", "{e}"), e, layer, home)
    return found


def _layer_variable(line: Name) -> bool:
    return re.search(r"\{\d*i[+-]?\d*\}", line.key) is not None


def _heads_a_layer(line: Name) -> bool:
    """Whether the layer's number is a whole part of the name."""
    head, _, tail = line.key.partition("{")
    return (not head or head.endswith(".")) and tail.partition("}")[2].startswith(".")


class StoredKeys:
    """The keys under which a family's names are stored in `torch_dist`."""

    def __init__(self, model: Model, family: str) -> None:
        self.names = number_names(model, family)
        self.layers = 1 + max((n.number for n in self.names.values()), default=-1)
        self.experts = 1 + max((n.expert for n in self.names.values()), default=-1)

    def addresses(self, name: str) -> Iterator[Address]:
        """Every form in which a name may be stored, the most usual one first."""
        parts = self.names[name]
        rests: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [(parts.rest, (), ())]
        if parts.expert >= 0:
            together = parts.rest.replace(_LOCAL, "experts.").replace("{e}.", "").replace("{e}", "")
            alone = parts.rest.replace(_LOCAL, "experts.{e}.").replace("{e}", str(parts.expert))
            rests = [(together, (parts.expert,), (self.experts,)), (alone, (), ())]
            own = parts.rest.replace("{e}", str(parts.expert))
            rests += [(own, (), ())] if own != alone else []
        else:
            rests += [(other, (), ()) for other in spellings(parts.rest)]
        for rest, index, sizes in rests:
            if parts.number >= 0:
                yield Address(parts.prefix + rest, (parts.number, *index), (self.layers, *sizes))
                yield Address(f"{parts.prefix}{parts.number}.{rest}", index, sizes)
            else:
                yield Address(parts.prefix + rest, index, sizes)

    @cached_property
    def by_key(self) -> dict[str, dict[tuple[int, ...], tuple[str, Address]]]:
        """For every key in any form: index of the leading axes to the name and its address.

        Names of the family come before other spellings of them.
        """
        found: dict[str, dict[tuple[int, ...], tuple[str, Address]]] = {}
        forms = {name: list(self.addresses(name)) for name in self.names}
        for place in range(max(map(len, forms.values()), default=0)):
            for name, addresses in forms.items():
                for address in addresses[place : place + 1]:
                    found.setdefault(address.key, {}).setdefault(address.index, (name, address))
        for key, table in list(found.items()):
            for half, letter in enumerate("wv"):
                if key.endswith(("linear_fc1.weight", "linear_fc1.bias")):
                    split = {
                        index: (name, Address(f"{key}_{letter}", index, a.sizes, half))
                        for index, (name, a) in table.items()
                    }
                    found.setdefault(f"{key}_{letter}", split)
        return found

    @cached_property
    def alike(self) -> bool:
        """Whether every layer has the same names, so that layers become an axis."""
        by_layer: dict[int, set[str]] = {}
        for parts in self.names.values():
            if parts.number >= 0:
                by_layer.setdefault(parts.number, set()).add(parts.rest)
        return bool(by_layer) and all(rests == by_layer[0] for rests in by_layer.values())

    def written(self, name: str) -> list[Address]:
        """The forms that a writer prefers, best first; the last one always serves."""
        forms = list(self.addresses(name))
        if self.names[name].number >= 0 and not self.alike:
            forms = [a for a in forms if len(a.sizes) == (1 if self.names[name].expert >= 0 else 0)]
            return [*forms[:1], *(a for a in self.addresses(name) if not a.sizes)]
        return [*forms[:1], *(a for a in forms if not a.sizes)]


def spellings(rest: str) -> list[str]:
    """Other names of a norm: with the linear layer after it, or as a module of its own."""
    found = [plain + rest.removeprefix(fused) for fused, plain in _FUSED if rest.startswith(fused)]
    return [*found, *(fused + rest.removeprefix(plain) for fused, plain in _FUSED if rest.startswith(plain))]
