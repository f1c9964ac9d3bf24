"""Megatron's optimizers and their parameter groups: from and to canonical groups.

A run has one optimizer, or a chain of them: for dense parameters, for experts, and for those that Muon trains. A group says
`wd_mult`, `lr_mult`, `is_expert_parallel` and `is_decoupled_lr`, which together tell it from others; which parameters it has is
not stored, but the rule of the run: none of one dimension and no bias decays.

Source: megatron-core 0.16.1, `optimizer/__init__.py` (`_get_param_groups`) and `optimizer/optimizer.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.catalog import Catalog
from ckptkit.core.local import LocalTensor
from ckptkit.core.schema import Tensor
from ckptkit.formats.optimizer_groups import (
    DEFAULTS,
    canonical_groups,
    family_groups,
    kind_of,
    torch_fields,
)
from ckptkit.formats.plain import from_plain

_EMBEDDINGS = ("word_embeddings.weight", "output_layer.weight")


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight decay applies to a module's parameter, as Megatron decides it."""
    return len(shape) > 1 and not name.endswith(".bias")


def canonical(
    groups: Sequence[Mapping[str, Any]],
    bound: Mapping[str, LocalTensor],
    roles: Mapping[str, set[str]],
    tensors: Mapping[str, Tensor],
    warnings: list[str],
) -> list[dict[str, Any]]:
    """Canonical groups of Megatron's, whose members are found by its rules.

    Args:
        groups: Those of all optimizers, as plain values.
        bound: Names and what they are.
        roles: Optimizer roles that each name has; names without one are not trained.
    """
    fields = [{k: _listed(v) for k, v in g.items() if k != "params"} for g in groups]
    members: list[list[str]] = [[] for _ in fields]
    lost: list[str] = []
    told = any(g.get("is_expert_parallel") for g in fields)  # not without expert parallelism
    for name, item in bound.items():
        if not roles.get(name):
            continue
        kind = kind_of({}, roles[name])
        fits = [
            k
            for k, f in enumerate(fields)
            if kind_of(f, set()) == kind
            and (not told or bool(f.get("is_expert_parallel")) == is_expert(item, tensors))
        ]
        fits = fits or [k for k, f in enumerate(fields) if kind_of(f, set()) == kind]
        fits = [k for k in fits if decaying(fields[k]) == decays(name, item.shape)] or fits
        away = name.endswith(_EMBEDDINGS)
        fits = [k for k in fits if bool(fields[k].get("is_decoupled_lr")) == away] or fits
        (members[fits[0]] if fits else lost).append(name)
    if lost:
        warnings.append(
            f"{len(lost)} trained parameters fit none of the run's optimizer groups, such as {lost[0]}; no group lists them"
        )
    listed = [(f, m) for f, m in zip(fields, members, strict=True) if m or not lost]
    return canonical_groups(listed, {}, roles, bound, warnings)


def _listed(value: Any) -> Any:
    """Pairs as canonical groups have them."""
    if isinstance(value, dict) and value.get("$") == "tuple":
        return [_listed(part) for part in value["v"]]
    return value


def decaying(group: Mapping[str, Any]) -> bool:
    """Whether weight decay applies to a group."""
    multiple = group.get("wd_mult", group.get("pre_wd_mult", group.get("weight_decay", 1.0)))
    return not isinstance(multiple, int | float) or multiple != 0


def is_expert(item: LocalTensor, tensors: Mapping[str, Tensor]) -> bool:
    return bool(item.segments) and tensors[item.segments[0].tensor].is_expert


@dataclass
class Optimizer:
    """One optimizer of the chain: the fields of each of its groups, and the names that it trains."""

    kind: str
    expert: bool
    groups: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)


def chain(
    shards: Catalog, whole: Mapping[str, LocalTensor], roles: Mapping[str, set[str]]
) -> list[Optimizer]:
    """The optimizers that train the names of `whole`: each kind apart, and experts where they are on ranks of their own.

    Names that no group of the source lists get a group with torch's defaults.
    """
    groups = shards.extras.common.get("groups") or ()
    listed = family_groups(groups, [item for name, item in whole.items() if roles.get(name)])
    taken = {name for _, names in listed for name in names}
    rest: dict[tuple[str, bool], list[str]] = {}
    for name, item in whole.items():
        if roles.get(name) and name not in taken:
            rest.setdefault((kind_of({}, roles[name]), decays(name, item.shape)), []).append(name)
    step = shards.extras.common.get("step")
    for (kind, decaying), names in rest.items():
        fields = {"kind": kind, "step": step, **DEFAULTS[kind]}
        listed.append(({**fields, **({} if decaying else {"weight_decay": 0.0})}, names))
    found: dict[tuple[str, bool], Optimizer] = {}
    apart = shards.layout is not None and shards.layout.ep > 1
    for group, names in listed:
        for expert in (False, True):
            mine = [n for n in names if (apart and is_expert(whole[n], shards.tensors)) is expert]
            # An empty group is kept where it tells something; where all its members went to the other side it does not.
            if mine or not (names or expert):
                kind = str(group.get("kind") or "adamw")
                made = found.setdefault((kind, expert), Optimizer(kind, expert))
                made.groups.append((_fields(group, expert), mine))
    return [found[key] for key in sorted(found, key=lambda key: (key[0] != "adamw", key[0], key[1]))]


def _fields(group: Mapping[str, Any], expert: bool) -> dict[str, Any]:
    """A group's fields as Megatron has them: torch's, and what it tells groups apart by."""
    fields = {name: from_plain(value) for name, value in torch_fields(group).items()}
    decay, rate = fields.get("weight_decay"), fields.get("lr", 0.0)
    fields.setdefault("wd_mult", 0.0 if decay == 0 else 1.0)
    fields.setdefault("lr_mult", 1.0)
    fields.setdefault("is_decoupled_lr", False)
    fields.setdefault("default_config", True)
    fields.setdefault("max_lr", rate)
    fields.setdefault("min_lr", None)
    fields["is_expert_parallel"] = expert
    fields["step"] = group.get("step") or 0
    return fields
