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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np

from ckptkit.core import zero
from ckptkit.core.catalog import ROLE_CODE, Entries
from ckptkit.core.dtypes import DType
from ckptkit.core.local import LocalTensor
from ckptkit.core.schema import Model, Tensor
from ckptkit.errors import CoverageError, FormatError
from ckptkit.formats.chunks import Locals, plain_local, plain_tensor
from ckptkit.formats.dcp_items import Wanted, locate
from ckptkit.formats.dcp_metadata import Index, Stored
from ckptkit.formats.megatron_buffers import SLOTS, Buffer, Group, lay_as
from ckptkit.formats.megatron_keys import Address, StoredKeys
from ckptkit.stores.base import Store

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
_OBJECT = re.compile(
    r"(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.param_state/shard_0_1"
)

_Table = Mapping[tuple[int, ...], tuple[str, Address]]


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

    known: list[tuple[str, str, Stored, _Table]] = field(default_factory=list)
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
            table: _Table = {(): (of, Address(of))}
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

    def table(self, table: _Table, key: str, shape: tuple[int, ...], bound: dict[str, LocalTensor]) -> str:
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


@dataclass
class Rows:
    """Entries as they are found."""

    locals: Locals = field(default_factory=Locals)
    rows: list[tuple[int, int, int, int, int, int, int]] = field(default_factory=list)

    def adder(self, file: int) -> Callable[[LocalTensor, str, DType, int], None]:
        """Adds whole local tensors of one file."""

        def add(local: LocalTensor, role: str, dtype: DType, offset: int) -> None:
            number = self.locals.exact(local)
            self.rows.append((file, number, ROLE_CODE[role], dtype.code, 0, local.size, offset))

        return add

    def entries(self) -> Entries:
        file, local, role, dtype, first, last, offset = np.asarray(self.rows, np.int64).reshape(-1, 7).T
        return Entries(file, local, role, dtype, first, last, offset)


def add_known(rows: Rows, store: Store, index: Index, found: Sorted, file_of: Mapping[str, int]) -> None:
    """Entries of every chunk of named tensors. Raises CoverageError where the chunks of a tensor leave a gap."""
    wanted: list[Wanted] = []
    parts: list[tuple[str, Stored, _Table, tuple[int, ...], tuple[int, ...], int]] = []
    for key, role, stored, table in found.known:
        check_tiling(key, stored)
        shape = true_shape(index, key, stored)
        name = next(iter(table.values()))[0]
        code = ROLE_CODE[
            found.tensors[found.bound[name].segments[0].tensor].kind if role == "param" else role
        ]
        held = False
        for chunk in stored.chunks:
            if chunk.item is None:
                continue
            if 0 in chunk.sizes:
                if 0 in stored.shape and not held:
                    held = True
                    for name, _ in table.values():
                        local = rows.locals.whole(found.bound[name])
                        rows.rows.append(
                            (
                                file_of[chunk.item.path],
                                local,
                                code,
                                stored.dtype.code,
                                0,
                                0,
                                chunk.item.offset,
                            )
                        )
                continue
            wanted.append(Wanted(key, chunk.item, stored.dtype, chunk.sizes))
            parts.append((key, stored, table, shape, chunk.start, code))
    for want, (key, stored, table, shape, start, code), place in zip(
        wanted, parts, locate(store, wanted), strict=True
    ):
        file, dtype = file_of[want.item.path], stored.dtype
        if len(shape) != len(stored.shape):
            name, box, sizes, first = _block(key, stored, table, shape, start)
            number, begin, _ = rows.locals.chunk(found.bound[name], box, sizes)
            first += begin
            rows.rows.append((file, number, code, dtype.code, first, first + want.sizes[-1], place.offset))
            continue
        lead = len(next(iter(table.values()))[1].sizes)
        inner = prod(want.sizes[lead:])
        for count, step in enumerate(product(*(range(n) for n in want.sizes[:lead]))):
            at = tuple(a + b for a, b in zip(start, step, strict=False))
            if at not in table:
                raise FormatError(f"{key!r} has a layer or expert {at} that this model lacks", tensor=key)
            name, address = table[at]
            own = list(start[lead:])
            if address.half == 1:
                own[0] += found.bound[name].shape[0] // 2
            strides = place.strides[lead:] if place.strides is not None else None
            skip = (
                count * inner
                if place.strides is None
                else sum(a * b for a, b in zip(step, place.strides, strict=False))
            )
            number, first, last = rows.locals.chunk(found.bound[name], tuple(own), want.sizes[lead:], strides)
            rows.rows.append(
                (file, number, code, dtype.code, first, last, place.offset + skip * dtype.itemsize)
            )


def _block(
    key: str, stored: Stored, table: _Table, shape: tuple[int, ...], start: tuple[int, ...]
) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
    """Name, box and first element of a run of a flattened block."""
    sizes = tuple(n // g for n, g in zip(shape, stored.shape[:-1], strict=True))
    box = tuple(a * n for a, n in zip(start[:-1], sizes, strict=True))
    lead = len(next(iter(table.values()))[1].sizes)
    if sizes[:lead] != (1,) * lead:
        raise FormatError(f"{key!r} is flattened over layers or experts, which is not known", tensor=key)
    if box[:lead] not in table:
        raise FormatError(f"{key!r} has a layer or expert {box[:lead]} that this model lacks", tensor=key)
    name, address = table[box[:lead]]
    own = list(box[lead:])
    if address.half == 1:
        own[0] += shape[lead]
    return name, tuple(own), sizes[lead:], start[-1]


def check_tiling(key: str, tensor: Stored) -> None:
    """Volumes must add up. A gap that an overlap hides is found when a plan proves its cover."""
    have, want = sum(prod(chunk.sizes) for chunk in tensor.chunks), prod(tensor.shape)
    if have < want:
        raise CoverageError(
            f"{key} has {want} elements, but its chunks hold {have}: a rank's part is missing. Use another copy",
            tensor=key,
        )
    if have > want:
        raise FormatError(
            f"{key} has {want} elements, but its chunks hold {have}: they overlap. It was not written by one save",
            tensor=key,
        )


def add_buckets(
    rows: Rows,
    store: Store,
    found: Sorted,
    buffers: Mapping[Group, Sequence[Buffer]],
    file_of: Mapping[str, int],
) -> None:
    """Entries of state in flat buckets.

    Raises:
        FormatError: the buckets are not those of this model and layout.
    """
    wanted: list[Wanted] = []
    cuts: list[tuple[Buffer, int, int, int, int, list[int]]] = []
    for (chain, group, number, slot), buckets in found.buckets.items():
        what = f"the optimizer's buffer {number} of group {group}"
        if slot not in SLOTS:
            continue
        if sorted(buckets) != list(range(len(buckets))):
            raise FormatError(f"{what} lacks bucket {min(set(range(len(buckets))) - set(buckets))}")
        buffer = _buffer_of(buffers, chain, group, number, what)
        unpadded = [buckets[k][1].shape[0] if buckets[k][1].shape else 1 for k in range(len(buckets))]
        laid = lay_as([item.size for item in buffer.members], unpadded, what)
        for k in range(len(buckets)):
            key, stored = buckets[k]
            check_tiling(key, stored)
            members = [m for m, bucket in enumerate(laid.bucket) if bucket == k]
            start = np.asarray([laid.offset[m] for m in members], np.int64)
            size = np.asarray([buffer.members[m].size for m in members], np.int64)
            chunks = [c for c in stored.chunks if c.item is not None and 0 not in c.sizes]
            spans = [(n, c.start[0], c.start[0] + c.sizes[0]) for n, c in enumerate(chunks)]
            cut = zero.cut_flat(start, size, spans)
            role = ROLE_CODE[SLOTS[slot]]
            for t, n, first, last in zip(
                cut.tensor.tolist(), cut.rank.tolist(), cut.first.tolist(), cut.last.tolist(), strict=True
            ):
                chunk = chunks[n]
                assert chunk.item is not None
                wanted.append(Wanted(key, chunk.item, stored.dtype, chunk.sizes))
                skip = laid.offset[members[t]] + first - chunk.start[0]
                cuts.append((buffer, members[t], role, first, last, [skip, stored.dtype.code]))
    places = locate(store, wanted)
    for want, (buffer, member, role, first, last, (skip, dtype)), place in zip(
        wanted, cuts, places, strict=True
    ):
        local = rows.locals.exact(buffer.members[member])
        offset = place.offset + skip * want.dtype.itemsize
        rows.rows.append((file_of[want.item.path], local, role, dtype, first, last, offset))


def _buffer_of(
    buffers: Mapping[Group, Sequence[Buffer]], chain: int, group: int, number: int, what: str
) -> Buffer:
    """The buffer of a key. A chain has the dense parameters first, then the experts."""
    held = buffers.get(Group(chain > 0, group), ())
    if number >= len(held):
        raise FormatError(
            f"{what} is there, but the parameters of this model and layout make no such buffer. Give the layout and "
            "configuration that it was saved with (--source-layout, --config)"
        )
    return held[number]


def flat_objects(index: Index) -> Iterable[tuple[Group, str]]:
    """Objects that hold flat state, and whose it is."""
    for key in index.objects:
        match = _OBJECT.fullmatch(key)
        if match:
            yield Group(int(match["chain"] or 0) > 0, int(match["group"])), key
