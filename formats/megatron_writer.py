"""What a `torch_dist` checkpoint is written with: where names go, the optimizers' common state, and empty extra states."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ckptkit.core.catalog import ROLES, Catalog, Entries
from ckptkit.core.dtypes import TABLE, DType
from ckptkit.core.local import LocalTensor
from ckptkit.core.names import Names
from ckptkit.core.schema import STATE_ROLES
from ckptkit.formats import model_config
from ckptkit.formats.chunks import Cut, plain_local
from ckptkit.formats.distcp_writer import ItemWriter
from ckptkit.formats.megatron_groups import Optimizer
from ckptkit.formats.megatron_keys import Address, StoredKeys
from ckptkit.formats.megatron_state import EXTRA_STATE


def tied(names: Names) -> dict[str, str]:
    """Further names of tied tensors, and the names that they copy."""
    first = {s.tensor: key for key, item in names.whole.items() for s in item.segments}
    return {key: first[item.segments[0].tensor] for key, item in names.copies.items()}


def whole_names(shards: Catalog) -> dict[str, LocalTensor]:
    """The family's whole tensors, by name, without padding."""
    if shards.model is None:
        return {item.key: plain_local(item.key, item.shape) for item in shards.locals}
    names = shards.model.names(shards.names)
    return {**names.copies, **names.unpadded()}


def optimizer_roles(shards: Catalog) -> dict[str, set[str]]:
    """The optimizer roles that each name has."""
    entries: Entries = shards.entries
    found: dict[str, set[str]] = {}
    pairs = np.unique(entries.local.astype(np.int64) * len(ROLES) + entries.role)
    for local, role in zip(*(part.tolist() for part in np.divmod(pairs, len(ROLES))), strict=True):
        if ROLES[role] in STATE_ROLES:
            found.setdefault(shards.locals[local].key, set()).add(ROLES[role])
    return found


def small_files(shards: Catalog, taken: set[str]) -> Iterator[tuple[str, bytes]]:
    """Files that are carried along. The configuration is in Transformers' terms: Megatron itself has arguments instead."""
    view = copy.copy(shards)
    view.names = "transformers"
    yield from model_config.small_files(view, taken)


def extra_states(forms: Mapping[tuple[str, str], Address]) -> dict[str, None]:
    """The empty extra state of every module that may ask for one: Megatron refuses to load without."""
    found: dict[str, None] = {}
    for (_, role), address in forms.items():
        module, dot, last = address.key.rpartition(".")
        if role != "param" or not dot or last != "weight":
            continue
        index = ".".join(map(str, address.index)) or "0"
        shard = f"{EXTRA_STATE}shard_{index}_{'.'.join(map(str, address.sizes)) or '1'}"
        found[module + shard] = None
        parent, _, name = module.rpartition(".")
        if name == "linear_proj":  # attention itself has one too, and no parameter
            found[f"{parent}.core_attention{shard}"] = None
    return found


def tied_copies(shards: Catalog, roles: Mapping[str, set[str]]) -> set[str]:
    """Tied names that are left out: Megatron stores the tensor once, under its first name."""
    if shards.model is None:
        return set()
    stored = {item.key for item in shards.locals}
    origin = tied(shards.model.names(shards.names))
    return {k for k, o in origin.items() if o in stored and roles.get(k, set()) <= roles.get(o, set())}


def write_boxes(
    writer: ItemWriter, cut: Cut, forms: Mapping[tuple[str, str], Address], roles: Mapping[str, set[str]],
    copies: set[str],
) -> None:  # fmt: skip
    """Every box, in the order of ranks, roles and the model."""
    entries = cut.entries
    for k in np.lexsort((entries.first, entries.local, entries.role, entries.file)).tolist():
        name, role = cut.locals[int(entries.local[k])].key, ROLES[entries.role[k]]
        if name in copies:
            continue
        address = forms[name, role]
        key = address.key
        if role in STATE_ROLES:
            key = f"optimizer.state.{_slot(role, roles[name])}.{key}"
        lead = (1,) * len(address.sizes)
        writer.box(
            int(entries.file[k]), k, key, TABLE[entries.dtype[k]], (*address.sizes, *cut.shapes[name]),
            (*address.index, *cut.start[k]), (*lead, *cut.sizes[k]),
        )  # fmt: skip


def choose_forms(cut: Cut, keys: StoredKeys | None) -> dict[tuple[str, str], Address]:
    """Where each name is stored: with its layer and expert as indices where every one of them is there, and alike."""
    entries = cut.entries
    held: dict[tuple[str, str], DType] = {}
    for local, role, dtype in zip(
        entries.local.tolist(), entries.role.tolist(), entries.dtype.tolist(), strict=True
    ):
        held[cut.locals[local].key, ROLES[role]] = TABLE[dtype]
    if keys is None:
        return {(name, role): Address(name) for name, role in held}
    groups: dict[tuple[str, str], list[str]] = {}
    for name, role in held:
        for address in keys.written(name):
            groups.setdefault((address.key, role), []).append(name)
    found = {}
    for name, role in held:
        for address in keys.written(name):
            names = groups[address.key, role]
            alike = {(held[n, role], cut.shapes[n]) for n in names}
            if not address.sizes or (len(names) == len(keys.by_key[address.key]) and len(alike) == 1):
                found[name, role] = address
                break
    return found


def _slot(role: str, roles: set[str]) -> str:
    """What Megatron calls a role: optimizers that are not distributed call the fp32 copy by another name."""
    if role == "master":
        return "fp32_param" if "momentum" in roles else "param"
    return "momentum_buffer" if role == "momentum" else role


def optimizer_state(optimizers: list[Optimizer]) -> dict[str, Any]:
    """The optimizers' part of the common state."""
    made: list[dict[str, Any]] = []
    for one in optimizers:
        groups = [fields for fields, _ in one.groups]
        state: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if one.kind == "adamw":
            state["param_state_sharding_type"] = "fully_reshardable"
        made.append(state)
    if not made:
        return {}
    return {"optimizer": made[0] if len(made) == 1 else dict(enumerate(made))}
