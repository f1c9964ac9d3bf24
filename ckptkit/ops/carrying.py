"""Extras on a change of layout or format: what is kept, and what is left behind and why."""

from collections.abc import Set as AbstractSet
from typing import Any

from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.layouts import Layout
from ckptkit.core.schema import STATE_ROLES
from ckptkit.formats.base import Format
from ckptkit.ops.dropping import DropRow

_OPTIMIZER_EXTRAS = ("groups", "scheduler", "loss_scale", "scaler", "optimizer")
"""Common extras that mean nothing without optimizer state."""

_KEY_STYLE = "torch_keys"
"""How a trainer names its state, which says nothing to a format that has no such keys: no loss."""


def carry(
    source: Catalog,
    layout: Layout,
    format: Format,
    kept: AbstractSet[str],
    *,
    drop_optimizer: bool,
    drop_extras: bool,
) -> tuple[Extras, list[DropRow]]:
    """The destination's extras, and rows for what it does not get.

    Common extras and loader states (by sample) are kept. States of mesh coordinates (RNG) are kept where both layouts have the
    axes of the coordinate in equal sizes, since elsewhere no rank has that coordinate's stream; else they are
    dropped, and a trainer seeds them anew from (seed, step, coordinate). Files are carried in every format.

    Args:
        kept: Canonical tensors that the destination holds; optimizer groups list no others.
        drop_optimizer: Allows that training state is left behind: groups, schedule, and where the format holds no extras
            at all also step, RNG and loader states.
        drop_extras: Allows that extras are left behind where the format holds none.
    """
    extras = source.extras
    found = Extras(files=extras.files)
    rows: list[DropRow] = []
    if not format.extras:
        allowed = drop_optimizer or drop_extras
        # One flag is enough: whoever leaves the optimizer behind does not go on training from there.
        trained = "groups" in extras.common or any(role in STATE_ROLES for _, role in source.held)
        flag = "--drop-optimizer" if trained else "--drop-extras"
        names = [
            *(name for name in extras.common if name != _KEY_STYLE),
            *(["per-rank states"] if extras.by_coordinate else []),
        ]
        names += ["loader states"] if extras.by_sample else []
        for name in names:
            rows.append(DropRow(f"extras: {name}", 1, 0, f"{format.name} holds no extras", flag, allowed))
        return found, rows
    for name, value in extras.common.items():
        if drop_optimizer and name in _OPTIMIZER_EXTRAS:
            rows.append(DropRow(f"extras: {name}", 1, 0, "asked for", "--drop-optimizer"))
        else:
            found.common[name] = _groups(value, kept) if name == "groups" else value
    found.by_sample = list(extras.by_sample)
    lost = 0
    for coordinate, state in extras.by_coordinate.items():
        if has_coordinate(coordinate, source.layout, layout):
            found.by_coordinate[coordinate] = state
        else:
            lost += 1
    if lost:
        why = f"layout {layout} has no such coordinates; they are seeded anew from (seed, step, coordinate)"
        rows.append(DropRow("extras: per-rank states", lost, 0, why))
    return found, rows


def _groups(groups: Any, kept: AbstractSet[str]) -> Any:
    """Optimizer groups without tensors that are left behind; groups that end up empty go."""
    if not isinstance(groups, list):
        return groups
    found = []
    for group in groups:
        if not isinstance(group, dict) or "tensors" not in group:
            found.append(group)
            continue
        tensors = [name for name in group["tensors"] if name in kept]
        if not tensors and group["tensors"]:
            continue
        left = {**group, "tensors": tensors}
        if isinstance(group.get("steps"), dict):
            left["steps"] = {name: step for name, step in group["steps"].items() if name in kept}
        found.append(left)
    return found


def has_coordinate(coordinate: str, source: Layout | None, layout: Layout | None) -> bool:
    """Whether every mesh axis that a coordinate names (`tp=0,pp=1`) has one size in both layouts."""
    if source is None or layout is None:
        return False
    axes = [part.partition("=")[0].strip() for part in coordinate.split(",") if part]
    return all(hasattr(layout, axis) and getattr(source, axis) == getattr(layout, axis) for axis in axes)
