"""Checks before a reshard: that source and destination lie apart, and that the source is whole."""

import os
from collections.abc import Mapping
from typing import Any

from ckptkit import stores
from ckptkit.core.schema import OPTIMIZER_ROLES
from ckptkit.errors import CoverageError, StoreError, UsageError
from ckptkit.formats import registry
from ckptkit.ops.folding import fold_names
from ckptkit.ops.sources import Source
from ckptkit.stores.folder import UNFINISHED_MARK


def check_apart(source: str, target: str) -> None:
    """Raise UsageError where source and destination are one folder, or one lies in the other."""
    if "://" not in source and not os.path.exists(source):
        return  # values that exist only while they are read
    a, b = stores.real(source), stores.real(target)
    if a == b:
        raise UsageError(f"source and destination are both {a}; write to another folder, then move it")
    for inner, outer, what in ((b, a, "destination"), (a, b, "source")):
        if inner.startswith(outer.rstrip("/") + "/"):
            raise UsageError(f"the {what} {inner} lies inside {outer}; choose a folder beside it")


def obstacle(target: str, overwrite: bool) -> str:
    """Why a destination cannot be put in place, or an empty text."""
    try:
        stores.check_target(target, overwrite)
    except StoreError as error:
        return str(error)
    # Whoever mistypes a path must not lose a folder of something else.
    if overwrite and not stores.is_empty(target):
        store = stores.open_store(target)
        if not store.exists(UNFINISHED_MARK) and registry.looks_like(store) is None:
            return f"{target} is no checkpoint, so --overwrite does not replace it; remove it yourself, or choose another path"
    return ""


def check_complete(source: Source) -> None:
    """Raise CoverageError where the source lacks a tensor of its model, or a part of an optimizer's state."""
    catalog = source.catalog
    held = catalog.held
    if catalog.model is not None and not is_partial(catalog.facts):
        names = {tensor for tensor, role in held if role in ("param", "buffer", "master")}
        # An adapter is whole without the weights that it adapts.
        parts = {catalog.tensors[name].part for name in names} or {"base"}
        absent = [
            name
            for name, tensor in catalog.model.tensors.items()
            if name not in names and tensor.part in parts
        ]
        if absent:
            raise CoverageError(
                f"{source.url} lacks {len(absent)} tensors of {catalog.model.schema.id}: "
                f"{', '.join(fold_names(absent)[:8])}. A shard is missing, or the configuration belongs to another model",
                tensor=absent[0],
            )
    groups = catalog.extras.common.get("groups")
    for group in groups if isinstance(groups, list) else ():
        members = [name for name in group.get("tensors", ()) if name in catalog.tensors]
        for role in OPTIMIZER_ROLES.get(group.get("kind", ""), ()):
            lacking = [name for name in members if (name, role) not in held]
            if lacking and len(lacking) < len(members):
                raise CoverageError(
                    f"{source.url}: {role} of {', '.join(fold_names(lacking)[:8])} is missing, though the {group['kind']} "
                    "group lists it and has it of other tensors",
                    tensor=lacking[0],
                )


def is_partial(facts: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is known to hold only a part of its model, since someone asked for that."""
    lineage = facts.get("lineage", ())
    return "partial" in facts or any("partial" in r for r in lineage if isinstance(r, dict))
