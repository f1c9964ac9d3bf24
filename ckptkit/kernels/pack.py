"""Packing: many tensors into one buffer whose leaves are digested as they pass, and back with a check.

A `PackPlan` is made once for tensors that stay where they are (parameters, optimizer state) and used every save. It
sorts the buffer's leaves, and then 1 KiB blocks, by where their bytes lie:

- a *whole* leaf lies inside one tensor: one address says all;
- a *ragged* leaf has an address for each of its blocks. A block that holds parts of several tensors, a gap, or a
  tensor whose bytes are shifted against the buffer's by no multiple of 16, has its address in a small *staging*
  buffer, filled by *fragments* (runs of at most 1 KiB) beforehand, or emptied by them afterwards.

Gaps are zeros. Tables cost 8 bytes a ragged block (0.8%) and stay on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ckptkit.errors import UsageError
from ckptkit.kernels import dispatch
from ckptkit.kernels.digest import BLOCK_NBYTES, LEAF_NBYTES, as_bytes, leaf_count, leaf_digests_torch


@dataclass(frozen=True)
class Fragments:
    """Runs that pass through staging, all of one alignment; columns of equal length, on the device."""

    outer: torch.Tensor  # int64: addresses in the tensors
    staged: torch.Tensor  # int64: addresses in the staging buffer that `pack` reads
    unstaged: torch.Tensor  # int64: addresses in the staging buffer that `unpack` writes
    sizes: torch.Tensor  # int32: bytes, at most 1,024


class PackPlan:
    """Where each tensor's bytes lie in the packed buffer.

    Args:
        tensors: Contiguous tensors of one device, kept alive and in place as long as the plan is used.
        offsets: The byte of the buffer at which each begins; they must not overlap.
        nbytes: Size of the buffer; default: the end of the last tensor.
        leaf_nbytes: Bytes that share one digest, a multiple of 1,024.

    Raises:
        UsageError: Nothing to pack, tensors on several devices, overlap, or a tensor past the buffer's end.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        offsets: Sequence[int],
        nbytes: int | None = None,
        leaf_nbytes: int = LEAF_NBYTES,
    ) -> None:
        if not tensors or len(tensors) != len(offsets):
            raise UsageError(
                f"pack needs tensors, each with an offset: {len(tensors)} and {len(offsets)} given"
            )
        self.device = tensors[0].device
        if any(tensor.device != self.device for tensor in tensors):
            raise UsageError("tensors of one pack lie on one device")
        order = np.argsort(np.asarray(offsets), kind="stable")
        self.parts = [as_bytes(tensors[i]) for i in order.tolist()]
        start = np.asarray(offsets, np.int64)[order]
        stop = start + np.array([part.numel() for part in self.parts])
        self.offsets: list[int] = start.tolist()
        self.nbytes = int(stop.max()) if nbytes is None else nbytes
        wrong = (start < 0) | (stop > self.nbytes) | (start < np.concatenate([[0], stop[:-1]]))
        if wrong.any():
            at = int(wrong.argmax())
            raise UsageError(
                f"tensor {order[at]} would take bytes {start[at]} to {stop[at]} of a buffer of {self.nbytes}: "
                "it overlaps another or leaves the buffer"
            )
        self.leaf_nbytes = leaf_nbytes
        self.leaf_count = leaf_count(self.nbytes, leaf_nbytes)
        self._tabulate(np.array([part.data_ptr() for part in self.parts]), start, stop)

    def _tabulate(self, address: np.ndarray, start: np.ndarray, stop: np.ndarray) -> None:
        """Builds the tables; see the module's description."""
        leaf, block = self.leaf_nbytes, BLOCK_NBYTES
        per_leaf = leaf // block
        direct = (address - start) % 16 == 0
        # Leaves inside one tensor. The buffer's last leaf counts as whole when its short length is covered.
        first = np.where(direct, -(-start // leaf), 0)
        last = np.where(direct, np.where(stop == self.nbytes, -(-stop // leaf), stop // leaf), 0)
        last = np.maximum(first, last)
        tensor, whole = expand(first, last)
        # Blocks of the other leaves: those before a tensor's whole leaves, and those after them.
        cut, rest = first * per_leaf, last * per_leaf
        empty = last == first
        low, high = start // block, -(-stop // block)
        owner, number = expand(
            np.concatenate([low, np.where(empty, 0, np.maximum(low, rest))]),
            np.concatenate([np.where(empty, high, np.minimum(cut, high)), np.where(empty, 0, high)]),
        )
        owner %= len(start)
        begin = np.maximum(number * block, start[owner])
        end = np.minimum((number + 1) * block, stop[owner])
        filled = begin < end
        owner, number, begin, end = owner[filled], number[filled], begin[filled], end[filled]
        ragged = np.setdiff1d(np.arange(self.leaf_count), whole)
        rows = np.full(self.leaf_count, -1)
        rows[ragged] = np.arange(len(ragged))
        slot = rows[number // per_leaf] * per_leaf + number % per_leaf
        table = np.zeros(len(ragged) * per_leaf, np.int64)
        sole = direct[owner] & (begin == number * block)
        sole &= end == np.minimum((number + 1) * block, self.nbytes)
        table[slot[sole]] = address[owner[sole]] + begin[sole] - start[owner[sole]]
        # Every other block of a ragged leaf is staged, gaps too.
        in_data = (ragged[:, None] * per_leaf + np.arange(per_leaf)).reshape(-1) * block < self.nbytes
        staged = np.flatnonzero((table == 0) & in_data)
        self.staging = torch.zeros(2 * len(staged) * block + 16, dtype=torch.uint8, device=self.device)
        place = np.zeros(len(table), np.int64)
        place[staged] = self.staging.data_ptr() + np.arange(len(staged)) * block
        back = len(staged) * block
        outer = address[owner[~sole]] + begin[~sole] - start[owner[~sole]]
        inner = place[slot[~sole]] + begin[~sole] % block
        sizes = end[~sole] - begin[~sole]
        mixed = outer | inner | sizes | 8
        width = mixed & -mixed
        widths = np.unique(width).tolist()
        self.blocks_in, self.blocks_out, self.whole, self.whole_at, self.ragged, *columns = upload(
            [
                np.where(place, place, table).reshape(len(ragged), per_leaf),
                np.where(place, place + back, table).reshape(len(ragged), per_leaf),
                whole.astype(np.int32),
                address[tensor] + whole * leaf - start[tensor],
                ragged.astype(np.int32),
                *(
                    column[width == w]
                    for w in widths
                    for column in (outer, inner, inner + back, sizes.astype(np.int32))
                ),
            ],
            self.device,
        )
        self.fragments = {w: Fragments(*columns[4 * k : 4 * k + 4]) for k, w in enumerate(widths)}

    @property
    def table_nbytes(self) -> int:
        """Bytes of the device that the tables take."""
        columns = [self.staging, self.blocks_in, self.blocks_out, self.whole, self.whole_at, self.ragged]
        columns += [c for f in self.fragments.values() for c in (f.outer, f.staged, f.unstaged, f.sizes)]
        return sum(column.nbytes for column in columns)

    def check(self, buffer: torch.Tensor, digests: torch.Tensor) -> None:
        """Raises UsageError where a buffer or its digests do not fit the plan."""
        self._check("the packed buffer", buffer, (self.nbytes,))
        self.check_digests(digests)

    def check_digests(self, digests: torch.Tensor) -> None:
        """Raises UsageError where digests do not fit the plan."""
        self._check("the digests", digests, (self.leaf_count, 16))

    def _check(self, what: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise UsageError(f"{what} must be contiguous uint8 of shape {shape}")
        if tensor.device != self.device or tensor.data_ptr() % 16:
            raise UsageError(f"{what} must lie on {self.device}, at a multiple of 16 bytes")


def upload(columns: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Columns as tensors on a device, sent as one by way of pinned memory: the host waits for no copy that is under way there."""
    sizes = [-(-column.nbytes // 16) * 16 for column in columns]
    ends = np.cumsum(sizes).tolist()
    room = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    flat = room.numpy()
    for column, size, end in zip(columns, sizes, ends, strict=True):
        flat[end - size : end - size + column.nbytes] = (
            np.ascontiguousarray(column).reshape(-1).view(np.uint8)
        )
    there = room.to(device, non_blocking=True)
    return [
        there[end - size : end - size + column.nbytes].view(_TYPES[column.dtype.str]).reshape(column.shape)
        for column, size, end in zip(columns, sizes, ends, strict=True)
    ]


_TYPES = {"<i8": torch.int64, "<i4": torch.int32, "|u1": torch.uint8}


def expand(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All (row, value) with first[row] <= value < last[row]; a row whose last is not above its first has none."""
    counts = np.maximum(last - first, 0)
    row = np.repeat(np.arange(len(first)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + first[row]


def pack(plan: PackPlan, out: torch.Tensor, digests: torch.Tensor, backend: str | None = None) -> None:
    """Fills `out` with the tensors of `plan`, gaps zero, and `digests` with its leaves' XXH3-128, in one pass.

    Args:
        plan: What lies where.
        out: uint8 [plan.nbytes].
        digests: uint8 [plan.leaf_count, 16].
        backend: See `ckptkit.kernels.dispatch`.
    """
    plan.check(out, digests)
    dispatch.choose("pack", plan.device, backend)(plan, out, digests)


def unpack(
    plan: PackPlan, packed: torch.Tensor, digests: torch.Tensor, backend: str | None = None
) -> torch.Tensor:
    """Fills the tensors of `plan` from `packed` and compares its leaves with `digests`, in one pass.

    Returns:
        bool [plan.leaf_count] on the device: False where a leaf has not the digest expected. Tensors that touch
        such a leaf hold its bytes and must not be used.
    """
    plan.check(packed, digests)
    good: torch.Tensor = dispatch.choose("unpack", plan.device, backend)(plan, packed, digests)
    return good


def digest_in_place(plan: PackPlan, digests: torch.Tensor, backend: str | None = None) -> None:
    """Fills `digests` with the XXH3-128 of the leaves that `pack` would write, without writing them.

    Args:
        plan: What would lie where.
        digests: uint8 [plan.leaf_count, 16].
        backend: See `ckptkit.kernels.dispatch`.
    """
    plan.check_digests(digests)
    dispatch.choose("digest_in_place", plan.device, backend)(plan, digests)


def pack_torch(plan: PackPlan, out: torch.Tensor, digests: torch.Tensor) -> None:
    """`pack` by copies, then a pass for the digests."""
    out.zero_()
    for at, part in zip(plan.offsets, plan.parts, strict=True):
        out[at : at + part.numel()] = part
    digests.copy_(leaf_digests_torch(out, plan.leaf_nbytes))


def unpack_torch(plan: PackPlan, packed: torch.Tensor, digests: torch.Tensor) -> torch.Tensor:
    """`unpack` by copies, then a pass for the digests."""
    for at, part in zip(plan.offsets, plan.parts, strict=True):
        part.copy_(packed[at : at + part.numel()])
    return (leaf_digests_torch(packed, plan.leaf_nbytes) == digests).all(1)


def digest_in_place_torch(plan: PackPlan, digests: torch.Tensor) -> None:
    """`digest_in_place` a leaf at a time: one leaf of memory."""
    leaf = plan.leaf_nbytes
    room = torch.empty(min(leaf, plan.nbytes), dtype=torch.uint8, device=plan.device)
    part = 0
    for number in range(plan.leaf_count):
        low, high = number * leaf, min((number + 1) * leaf, plan.nbytes)
        while part < len(plan.parts) and plan.offsets[part] + plan.parts[part].numel() <= low:
            part += 1
        at = part
        inside = (
            plan.offsets[at] <= low and high <= plan.offsets[at] + plan.parts[at].numel()
            if at < len(plan.parts)
            else False
        )
        if inside:
            data = plan.parts[at][low - plan.offsets[at] : high - plan.offsets[at]]
        else:
            data = room[: high - low].zero_()
            while at < len(plan.parts) and plan.offsets[at] < high:
                start, bytes_ = plan.offsets[at], plan.parts[at]
                a, b = max(low, start), min(high, start + bytes_.numel())
                data[a - low : b - low] = bytes_[a - start : b - start]
                at += 1
        digests[number] = leaf_digests_torch(data, leaf)[0]
