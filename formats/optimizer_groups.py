"""Optimizer groups: between torch's `param_groups` and the canonical ones.

A canonical group is `{kind, step, tensors: [canonical names], ...hyper-parameters}`. In torch a group lists names of a family,
and the step is a scalar of every parameter; `steps` keeps those that differ from their group's.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptkit.core.local import LocalTensor
from ckptkit.errors import FormatError, LayoutError

OURS = ("kind", "step", "steps", "tensors")
"""Fields of a canonical group that are no hyper-parameters."""

_COMMON = {"maximize": False, "foreach": None, "capturable": False, "differentiable": False}
DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, **_COMMON, "fused": None,
        "decoupled_weight_decay": True,
    },
    "muon": {
        "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315),
        "eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None,
    },
}  # fmt: skip
"""What torch's own optimizers have in a group; a loader misses a field that is absent."""


def kind_of(hyper: Mapping[str, Any], roles: set[str]) -> str:
    """The kind of optimizer that a group belongs to: as its state tells, else its hyper-parameters."""
    if "exp_avg" in roles or "betas" in hyper:
        return "adamw"
    if "ns_steps" in hyper or "ns_coefficients" in hyper:
        return "muon"
    if "dampening" in hyper:
        return "sgd"
    return "muon" if "momentum" in roles or "momentum" in hyper else "adamw"


def canonical_groups(
    groups: Sequence[tuple[Mapping[str, Any], Sequence[str]]],
    steps: Mapping[str, float],
    roles: Mapping[str, set[str]],
    locals_: Mapping[str, LocalTensor],
    warnings: list[str],
) -> list[dict[str, Any]]:
    """Canonical groups of `(hyper-parameters, names)`.

    Args:
        steps: Steps of each name, where stored.
        roles: Optimizer roles that each name has.
        locals_: What each name is made of. Names without one (of parameters that are not stored) are left out.
    """
    found = []
    for hyper, names in groups:
        held = [name for name in names if name in locals_]
        if len(held) < len(names):
            warnings.append(
                f"an optimizer group lists {len(names) - len(held)} parameters that are not stored, such as "
                f"{next(n for n in names if n not in locals_)}"
            )
        kind = kind_of(hyper, set().union(*(roles.get(name, set()) for name in held)))
        counted = {name: steps[name] for name in held if name in steps}
        step = max(counted.values(), default=hyper.get("step"))
        group: dict[str, Any] = {"kind": kind, "step": _whole(step) if step is not None else None}
        group["tensors"] = list(dict.fromkeys(s.tensor for name in held for s in locals_[name].segments))
        uneven = {name: _whole(n) for name, n in counted.items() if n != step}
        if uneven:
            group["steps"] = {s.tensor: n for name, n in uneven.items() for s in locals_[name].segments}
        group.update((field, value) for field, value in hyper.items() if field not in OURS)
        found.append(group)
    return found


def merge_flat(groups: Mapping[str, Mapping[str, Any]]) -> list[tuple[dict[str, Any], list[str]]]:
    """One group a parameter (flattened): those with equal hyper-parameters made one, in order of their first."""
    found: list[tuple[dict[str, Any], list[str]]] = []
    for name, hyper in groups.items():
        same = next((names for known, names in found if known == hyper), None)
        if same is None:
            found.append((dict(hyper), [name]))
        else:
            same.append(name)
    return found


def family_groups(
    groups: Iterable[Any], locals_: Iterable[LocalTensor]
) -> list[tuple[dict[str, Any], list[str]]]:
    """Canonical groups as `(group, names of the family)`, names in the order of `locals_`.

    Raises:
        LayoutError: a name is made of tensors of different groups.
        FormatError: a group is not what it should be.
    """
    listed = list(groups)
    of: dict[str, int] = {}
    for number, group in enumerate(listed):
        if not isinstance(group, dict) or not isinstance(group.get("tensors"), list):
            raise FormatError("the optimizer groups of the source list no tensors")
        of.update((tensor, number) for tensor in group["tensors"])
    names: list[list[str]] = [[] for _ in listed]
    for item in locals_:
        numbers = {of[s.tensor] for s in item.segments if s.tensor in of}
        if len(numbers) > 1:
            raise LayoutError(
                f"{item.key} joins parameters of {len(numbers)} optimizer groups, which one name cannot have; choose other "
                "names, or leave the optimizer behind (--drop-optimizer)",
                tensor=item.key,
            )
        if numbers:
            names[numbers.pop()].append(item.key)
    return [(group, list(dict.fromkeys(names[number]))) for number, group in enumerate(listed)]


def torch_fields(group: Mapping[str, Any]) -> dict[str, Any]:
    """A canonical group's hyper-parameters as torch has them: what it lacks is torch's default, pairs are tuples."""
    fields = {**DEFAULTS.get(group.get("kind", ""), {}), **{k: v for k, v in group.items() if k not in OURS}}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def step_of(group: Mapping[str, Any], item: LocalTensor) -> float | None:
    """The step of one name: its group's, unless its own is kept apart."""
    own = (
        group.get("steps", {}).get(item.segments[0].tensor) if isinstance(group.get("steps"), dict) else None
    )
    step = own if own is not None else group.get("step")
    return float(step) if isinstance(step, int | float) else None


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
