"""The tensors of a `torch_dist` checkpoint as entries: keys sorted by what they mean, chunks cut by layer and expert.

    decoder.layers.mlp.linear_fc2.weight                            weights
    optimizer.state.<slot>.<key of the weight>                      state like the weights: fully reshardable, or not distributed
    optimizer.distributed.dp_group_idx_<g>.gbuf_idx_<b>.dtype_(torch.bfloat16, torch.float32).bucket_idx_<k>.<slot>
                                                                    state in flat buckets
    optimizer.distributed.dp_group_idx_<g>.param_state/shard_0_1    state as in `distrib_optim.pt`, one object

Before megatron-core 0.16 the first kind of state could also be *flattened*: each rank's block of a tensor is a row of a tensor
`[blocks…, elements of a block]` that ZeRO cut on its last axis, the metadata having the true shape.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from ckptkit.core.dtypes import DType
from ckptkit.core.local import LocalTensor
from ckptkit.core.schema import Model, Tensor
from ckptkit.errors import FormatError
from ckptkit.formats.chunks import plain_local, plain_tensor
from ckptkit.formats.dcp_metadata import Index, Stored
from ckptkit.formats.megatron_keys import Address, StoredKeys

ROLE_OF = {
    "param": "master", "fp32_param": "master", "master_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum", "ema": "ema",
}  # fmt: skip
"""Slots of state, and the roles they are."""

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<slot>\w+)\.(?P<key>.+)")
_BUCKET = re.compile(
    r"(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)"
    r"\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<slot>\w+)"
)

Table = Mapping[tuple[int, ...], tuple[str, Address]]


@dataclass
class Sorted:
    """Tensors by what they are.

    Attributes:
        known: Key, role, stored tensor, and names by index of its leading axes.
        buckets: `(chain, group, buffer, slot)` to the tensors of its buckets, in order.
        bound: Names and what they are, padded as stored.
        shapes: Whole stored shape by name, of weights.
        dtypes: Element type by name, of weights.
        roles: Optimizer roles by name.
    """

    known: list[tuple[str, str, Stored, Table]] = field(default_factory=list)
    buckets: dict[tuple[int, int, int, str], dict[int, tuple[str, Stored]]] = field(default_factory=dict)
    bound: dict[str, LocalTensor] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    dtypes: dict[str, DType] = field(default_factory=dict)
    roles: dict[str, set[str]] = field(default_factory=dict)

    def shapes(self, model: Model, names: str) -> dict[str, tuple[int, ...]]:
        """Whole shapes of tensors that are not padded as the model's rules would pad them."""
        usual = model.names(names).whole
        return {
            key: item.shape
            for key, item in self.bound.items()
            if key not in usual or usual[key].shape != item.shape
        }


def sort_tensors(
    index: Index, model: Model | None, keys: StoredKeys | None, names: str, where: str, warnings: list[str]
) -> Sorted:
    """Tell what every tensor is.

    Raises:
        FormatError: keys or shapes do not belong to the model; lists them.
    """
    found = Sorted(tensors=model.tensors if model is not None else {})
    plain: dict[str, Tensor] = {}
    problems: list[str] = []
    unknown: list[str] = []
    fit = _Fit(model, names) if model is not None else None
    for key, stored in index.tensors.items():
        bucket, state = _BUCKET.fullmatch(key), _STATE.fullmatch(key)
        if bucket:
            place = int(bucket["chain"] or 0), int(bucket["group"]), int(bucket["buffer"]), bucket["slot"]
            found.buckets.setdefault(place, {})[int(bucket["bucket"])] = (key, stored)
            continue
        role = ROLE_OF.get(state["slot"], "") if state else "param"
        of = state["key"] if state else key
        if not role:
            unknown.append(key)
            continue
        shape = true_shape(index, key, stored)
        if keys is None or fit is None:
            if of in found.bound and found.bound[of].shape != shape:
                problems.append(f"{key} has shape {shape}, not that of its parameter")
                continue
            found.bound[of] = plain_local(of, shape)
            plain[of] = plain_tensor(of, shape)
            table: Table = {(): (of, Address(of))}
        else:
            named = keys.by_key.get(of)
            if named is None:
                if model is not None and model.schema.is_harmless(of):
                    warnings.append(f"{key} is made anew by every module and was left out")
                else:
                    problems.append(f"{key} is none of this model's")
                continue
            problem = fit.table(named, key, shape, found.bound)
            if problem:
                problems.append(problem)
                continue
            table = named
        found.known.append((key, role, stored, table))
        for name, _ in table.values():
            if role == "param":
                found.dtypes[name] = stored.dtype
            else:
                found.roles.setdefault(name, set()).add(role)
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        what = f"the model of its configuration ({model.schema.id})" if model is not None else "one model"
        raise FormatError(
            f"{where} does not hold {what}: {'; '.join(problems[:5])}{more}. Give the right --config, or the files again"
        )
    if unknown:
        warnings.append(
            f"{len(unknown)} optimizer tensors of unknown meaning were left out, such as {unknown[0]}"
        )
    if model is None:
        found.tensors = plain
    return found


def true_shape(index: Index, key: str, stored: Stored) -> tuple[int, ...]:
    """A tensor's shape: that of the metadata where it is stored flattened. Raises FormatError for one that makes no sense."""
    more = index.attributes.get("mcore_data")
    of = more.get(key) if isinstance(more, dict) else None
    shape = of.get("nd_reformulated_orig_global_shape") if isinstance(of, dict) else None
    if shape is None or len(stored.shape) == len(shape):
        return stored.shape
    grid = stored.shape[:-1]
    if (
        not isinstance(shape, tuple | list)
        or len(shape) != len(grid)
        or any(type(n) is not int or n < 0 for n in shape)
        or any(not g or n % g for n, g in zip(shape, grid, strict=True))
        or prod(shape) != prod(stored.shape)
    ):
        raise FormatError(f"{key!r} is stored as {stored.shape}, which is no flattened form of {shape}")
    return tuple(shape)


class _Fit:
    """Names as what is stored under them: padded as it was."""

    def __init__(self, model: Model, names: str) -> None:
        family = model.names(names)
        self.model = model
        self.unpadded = {**family.copies, **family.unpadded()}

    def table(self, table: Table, key: str, shape: tuple[int, ...], bound: dict[str, LocalTensor]) -> str:
        """Bind the names of a stored tensor; what is wrong with it, or an empty text."""
        sizes = next(iter(table.values()))[1].sizes
        own = shape[len(sizes) :]
        if shape[: len(sizes)] != sizes:
            what = f"{sizes} first, one a layer or expert"
            return f"{key} has shape {shape}, whose first axes should be {what}"
        for name, address in table.values():
            full = (2 * own[0], *own[1:]) if address.half >= 0 and own else own
            item = padded(self.model, self.unpadded[name], full)
            if item is None:
                return f"{key} has shape {shape}, but {name} has {self.unpadded[name].shape}"
            known = bound.setdefault(name, item)
            if known.shape != item.shape:
                return f"{key} has shape {shape}, but {name} is stored as {known.shape} elsewhere"
        return ""


def padded(model: Model, item: LocalTensor, shape: tuple[int, ...]) -> LocalTensor | None:
    """A whole tensor with padding up to `shape`, or None where its rules allow none there."""
    if shape == item.shape:
        return item
    if len(shape) != len(item.shape) or not shape:
        return None
    if shape[1:] != item.shape[1:] or shape[0] < item.shape[0] or not rule_pads(model, item):
        return None
    return LocalTensor(item.key, shape, item.segments)


def rule_pads(model: Model, item: LocalTensor) -> bool:
    """Whether the first dimension of a whole tensor is one that a rule pads (a vocabulary)."""
    return bool(item.shape) and all(
        any(
            model.rules[axis].pad
            for axis, dim in zip(model.tensors[s.tensor].axes, s.dim, strict=True)
            if dim == 0 and axis in model.rules
        )
        for s in item.segments
    )
