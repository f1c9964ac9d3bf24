"""The tensors of a `torch_dist` checkpoint as entries: chunks cut by layer and expert, flattened blocks, and flat buckets."""

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
from ckptkit.errors import CoverageError, FormatError
from ckptkit.formats.chunks import Locals
from ckptkit.formats.dcp_items import Wanted, locate
from ckptkit.formats.dcp_metadata import Index, Stored
from ckptkit.formats.megatron_buffers import SLOTS, Buffer, Group, lay_as
from ckptkit.formats.megatron_tensors import Sorted, Table, true_shape
from ckptkit.stores.base import Store

_OBJECT = re.compile(
    r"(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.param_state/shard_0_1"
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
    parts: list[tuple[str, Stored, Table, tuple[int, ...], tuple[int, ...], int]] = []
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
    key: str, stored: Stored, table: Table, shape: tuple[int, ...], start: tuple[int, ...]
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
