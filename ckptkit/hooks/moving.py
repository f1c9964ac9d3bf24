"""Moving a snapshot: from live tensors to a host buffer that looks like the rank's file.

Made once for a plan, used at every save. Bytes of a device go one of two ways:

- *direct*: whole leaves (1 MiB of the file) that lie inside one tensor, copied from where they are by the copy engine, and digested
  where they are by one kernel;
- *packed*: all other leaves, of which the device makes a few MiB at a time in a small ring, digested in the same pass, from where
  the copy engine takes them.

Tensors on the CPU are copied one by one. Leaves that hold any of them, or gaps beside them, have no digest from here:
the host computes it from the buffer.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptkit.core.boxes import interval_boxes
from ckptkit.core.catalog import LEAF
from ckptkit.hooks.buffers import HostBuffer, segments
from ckptkit.hooks.holdings import Holding
from ckptkit.hooks.planning import Move
from ckptkit.kernels.pack import PackPlan, digest_in_place, pack, unpack

RING = 16 * LEAF
"""Bytes of one half of the ring."""

SHIFTED = 256 << 10
"""Longer parts whose bytes lie otherwise in a 16-byte word than in the file go directly; the host digests their leaves."""

CLONES = 16 * LEAF
"""Most bytes of tensors that are copied on the device before the trainer goes on (buffers, balancing biases)."""


@dataclass(frozen=True, slots=True)
class Part:
    """Contiguous bytes of a live tensor, and where they go in the file."""

    source: torch.Tensor  # uint8 or, on the CPU, of the tensor's type and any strides
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    late: bool  # changed by others than the optimizer


def parts_of(
    moves: Sequence[Move], holdings: Sequence[Holding], tensors: Sequence[torch.Tensor]
) -> list[Part]:
    """Moves of a plan as parts, sorted by offset. A run of a tensor that is not contiguous becomes a few boxes."""
    found: list[Part] = []
    for move in moves:
        holding, tensor = holdings[move.holding], tensors[move.holding]
        item = tensor.element_size()
        late = not holding.fenced
        whole = move.first == 0 and move.last == tensor.numel()
        if tensor.is_contiguous():
            view = tensor if whole else tensor.view(-1)[move.first : move.last]
            found.append(Part(view, move.offset, view.numel() * item, tuple(view.shape), late))
        elif whole:
            found.append(Part(tensor, move.offset, tensor.numel() * item, tuple(tensor.shape), late))
        else:
            ends = np.asarray([move.first]), np.asarray([move.last])
            _, low, high = interval_boxes(tuple(tensor.shape), *ends)
            at = move.offset
            for lo, hi in zip(low.tolist(), high.tolist(), strict=True):
                view = tensor[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]
                found.append(Part(view, at, view.numel() * item, tuple(view.shape), late))
                at += view.numel() * item
    return [part for part in found if part.nbytes]


class HostCopies:
    """Parts that are copied one by one: all of a CPU's, and those of a device that have no better way."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self._sources = [part.source for part in parts]
        self._targets: dict[int, list[torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.parts)

    def run(self, buffer: HostBuffer, *, non_blocking: bool = False) -> None:
        """Copy everything. One call into torch, which lets other threads run."""
        if self.parts:
            torch._foreach_copy_(self._views(buffer), self._sources, non_blocking=non_blocking)

    def prepare(self, buffer: HostBuffer) -> None:
        """Make the views of a buffer beforehand, so that a save does not."""
        if self.parts:
            self._views(buffer)

    def fill(self, buffer: HostBuffer, *, non_blocking: bool = False) -> None:
        """The other way: from the buffer into the tensors."""
        if self.parts:
            torch._foreach_copy_(self._sources, self._views(buffer), non_blocking=non_blocking)

    def _views(self, buffer: HostBuffer) -> list[torch.Tensor]:
        found = self._targets.get(id(buffer))
        if found is None:
            found = self._targets[id(buffer)] = [
                buffer.tensor[part.offset : part.offset + part.nbytes]
                .view(part.source.dtype)
                .view(part.shape)
                for part in self.parts
            ]
        return found


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Neighbouring packed leaves: what the device makes of them, and where they go in the file."""

    plan: PackPlan
    offset: int
    leaf: int


class Snapshot:
    """The copies of one plan from one device (or the CPU), ready to run.

    Args:
        data_start: Of the rank's file; leaves count from there.
        packs: Whether small tensors are packed by the device; the CPU copies them one by one, unless a test asks.

    Attributes:
        device: Where most bytes are.
        device_leaves: Leaves whose digests the device gives, in the order of `digests`.
        extra_device_bytes: Memory on the device that saves need.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        device: torch.device,
        data_start: int,
        data_size: int,
        *,
        packs: bool | None = None,
        ring: int = RING,
    ) -> None:
        self.device = device
        self.data_start, self.data_size = data_start, data_size
        packs = device.type == "cuda" if packs is None else packs
        here: list[Part] = []
        others: list[Part] = []
        for part in parts:
            fits = packs and part.source.device == device and part.source.is_contiguous()
            if fits and part.nbytes > SHIFTED:
                fits = (part.source.data_ptr() - (part.offset - data_start)) % 16 == 0
            (here if fits else others).append(part)
        late = [part for part in here if part.late]
        cloned = sum(part.nbytes for part in late) <= CLONES
        if not cloned:  # an average of the whole model: copied straight, while the trainer's stream waits
            others += late
            here = [part for part in here if not part.late]
        self._clones = _Clones([part for part in here if part.late], device)
        here = [self._clones.of.get(id(part), part) for part in here]
        self.late = HostCopies([part for part in others if part.late])
        self.rest = HostCopies([part for part in others if not part.late])
        self._divide(here, others, ring)

    def _divide(self, here: Sequence[Part], others: Sequence[Part], ring: int) -> None:
        """Which leaves go directly, which are packed, which are the host's."""
        leaves = -(-self.data_size // LEAF)
        host = np.zeros(leaves, bool)
        for part in others:
            first = (part.offset - self.data_start) // LEAF
            host[first : -(-(part.offset + part.nbytes - self.data_start) // LEAF)] = True
        direct: list[tuple[torch.Tensor, int]] = []  # whole leaves: bytes and offset in the file
        ragged: list[tuple[torch.Tensor, int]] = []
        alone: list[Part] = []
        for part in here:
            raw = part.source.reshape(-1).view(torch.uint8)
            start, stop = part.offset - self.data_start, part.offset - self.data_start + part.nbytes
            first, last = -(-start // LEAF), (-(-stop // LEAF) if stop == self.data_size else stop // LEAF)
            aligned = raw.data_ptr() % 16 == (start % 16) and first < last
            low, high = (first * LEAF, min(last * LEAF, stop)) if aligned else (stop, stop)
            if low < high:
                direct.append((raw[low - start : high - start], low + self.data_start))
            for a, b in ((start, min(low, stop)), (max(high, start), stop)):
                if a < b:
                    ragged.append((raw[a - start : b - start], a + self.data_start))
        packed: list[tuple[torch.Tensor, int]] = []
        for raw, offset in ragged:
            at = 0
            while at < raw.numel():  # at the edges of leaves
                leaf = (offset + at - self.data_start) // LEAF
                size = min(raw.numel() - at, (leaf + 1) * LEAF - (offset + at - self.data_start))
                piece = raw[at : at + size]
                if host[leaf]:
                    alone.append(Part(piece, offset + at, size, (size,), False))
                else:
                    packed.append((piece, offset + at))
                at += size
        self.alone = HostCopies(alone)
        self._direct = [
            Part(raw[start - offset : start - offset + size], start, size, (size,), False)
            for raw, offset in direct
            for start, size in segments(offset, raw.numel())
        ]
        self.direct = HostCopies(self._direct)
        self.direct_plan: PackPlan | None = None
        self.chunks: list[_Chunk] = []
        order: list[int] = []
        if direct:
            at, offsets = 0, []
            for raw, offset in direct:  # the short last leaf of the file comes last, since offsets ascend
                offsets.append(at)
                at += -(-raw.numel() // LEAF) * LEAF
                first = (offset - self.data_start) // LEAF
                order += range(first, first - (-raw.numel() // LEAF))
            self.direct_plan = PackPlan([raw for raw, _ in direct], offsets)
        for chunk in self._chunks(packed, ring):
            self.chunks.append(chunk)
            order += range(chunk.leaf, chunk.leaf + chunk.plan.leaf_count)
        self.device_leaves = np.asarray(order, np.int64)
        halves = max((chunk.plan.nbytes for chunk in self.chunks), default=0)
        empty = torch.empty
        self._ring = (
            [empty(halves, dtype=torch.uint8, device=self.device) for _ in range(2)] if halves else []
        )
        self.digests = empty(len(order), 16, dtype=torch.uint8, device=self.device) if order else None
        tables = [chunk.plan for chunk in self.chunks] + ([self.direct_plan] if self.direct_plan else [])
        used = 2 * halves + self._clones.nbytes + 16 * len(order) + sum(map(_table_bytes, tables))
        self.extra_device_bytes = used if self.device.type == "cuda" else 0

    def _chunks(self, packed: Sequence[tuple[torch.Tensor, int]], ring: int) -> list[_Chunk]:
        found = []
        leaf_of = {id(piece): (offset - self.data_start) // LEAF for piece, offset in packed}
        batch: list[tuple[torch.Tensor, int]] = []
        first = last = -1

        def close() -> None:
            if batch:
                start = first * LEAF
                size = min((last + 1) * LEAF, self.data_size) - start
                offsets = [offset - self.data_start - start for _, offset in batch]
                plan = PackPlan([piece for piece, _ in batch], offsets, size)
                found.append(_Chunk(plan, start + self.data_start, first))

        for piece, offset in packed:
            leaf = leaf_of[id(piece)]
            if batch and (leaf > last + 1 or (leaf + 1 - first) * LEAF > ring):
                close()
                batch = []
            if not batch:
                first = leaf
            last = leaf
            batch.append((piece, offset))
        close()
        return found

    def prepare(self, buffer: HostBuffer) -> None:
        """Make a buffer's views beforehand."""
        for copies in (self.late, self.rest, self.alone, self.direct):
            copies.prepare(buffer)

    def copy_late(self, buffer: HostBuffer) -> None:
        """Take what others than the optimizer change. On the trainer's stream; on a CPU, now."""
        self._clones.run()
        self.late.run(buffer, non_blocking=self.device.type == "cuda")

    def run(self, buffer: HostBuffer, streams: "Streams") -> None:
        """Enqueue (on a CPU: do) all other copies, and the digests. `digests` are valid when the copies are done."""
        if self.digests is not None and self.direct_plan is not None:
            digest_in_place(self.direct_plan, self.digests[: self.direct_plan.leaf_count])
        streams.copy(self.direct, buffer)
        streams.copy(self.alone, buffer)
        at = self.direct_plan.leaf_count if self.direct_plan is not None else 0
        for number, chunk in enumerate(self.chunks):
            half = self._ring[number % 2][: chunk.plan.nbytes]
            assert self.digests is not None
            streams.before_pack(number % 2)
            pack(chunk.plan, half, self.digests[at : at + chunk.plan.leaf_count])
            streams.copy_packed(number % 2, half, buffer, chunk.offset)
            at += chunk.plan.leaf_count
        self.rest.run(buffer)

    def wanted(self, expected: torch.Tensor) -> torch.Tensor:
        """What `load` compares with: those of a file's digests, uint8 `[leaves, 16]` on the CPU, that the device will see."""
        return expected[torch.from_numpy(self.device_leaves)].to(self.device)

    def load(self, buffer: HostBuffer, wanted: torch.Tensor, streams: "Streams") -> torch.Tensor:
        """The other way: fill the tensors from a buffer, and compare what arrived with the file's digests (see `wanted`).

        Returns:
            bool `[len(device_leaves)]` on the device: whether each leaf is what its digest says. Valid when the streams are done.
        """
        streams.fill(self.direct, buffer)
        good = []
        count = self.direct_plan.leaf_count if self.direct_plan is not None else 0
        at = count
        for number, chunk in enumerate(self.chunks):
            half = self._ring[number % 2][: chunk.plan.nbytes]
            streams.fill_packed(number % 2, half, buffer, chunk.offset)
            good.append(unpack(chunk.plan, half, wanted[at : at + chunk.plan.leaf_count].contiguous()))
            streams.after_unpack(number % 2)
            at += chunk.plan.leaf_count
        if self.direct_plan is not None:
            assert self.digests is not None
            streams.before_check()
            digest_in_place(self.direct_plan, self.digests[:count])
            good.insert(0, (self.digests[:count] == wanted[:count]).all(1))
        return torch.cat(good) if good else torch.ones(0, dtype=torch.bool, device=self.device)


class _Clones:
    """Copies on the device of what others than the optimizer change, taken before the trainer goes on."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._sources = [part.source for part in parts]
        self._targets = [torch.empty_like(part.source) for part in parts]
        self.nbytes = sum(part.nbytes for part in parts) if device.type == "cuda" else 0
        self.of = {
            id(part): Part(target, part.offset, part.nbytes, part.shape, False)
            for part, target in zip(parts, self._targets, strict=True)
        }

    def run(self) -> None:
        if self._sources:
            torch._foreach_copy_(self._targets, self._sources)


class Streams:
    """How copies are enqueued. On a CPU they are done at once; `ckptkit.hooks.device` has the form for devices."""

    def begin(self) -> None:
        """What is enqueued next comes after what the trainer's stream has done."""

    def end(self) -> None:
        """Wait for all that was enqueued."""

    def making_tables(self) -> AbstractContextManager[Any]:
        """Where tables are sent to the device, without waiting for copies that are under way."""
        return nullcontext()

    def packing(self) -> AbstractContextManager[Any]:
        """Where kernels run."""
        return nullcontext()

    def copy(self, copies: HostCopies, buffer: HostBuffer) -> None:
        copies.run(buffer)

    def before_pack(self, half: int) -> None:
        """Wait until a half of the ring may be written again."""

    def copy_packed(self, half: int, packed: torch.Tensor, buffer: HostBuffer, offset: int) -> None:
        buffer.tensor[offset : offset + packed.numel()].copy_(packed)

    def fill(self, copies: HostCopies, buffer: HostBuffer) -> None:
        copies.fill(buffer)

    def fill_packed(self, half: int, packed: torch.Tensor, buffer: HostBuffer, offset: int) -> None:
        """Host to a half of the ring, before it is unpacked."""
        packed.copy_(buffer.tensor[offset : offset + packed.numel()])

    def after_unpack(self, half: int) -> None:
        """A half of the ring may be filled again when what was enqueued so far is done."""

    def before_check(self) -> None:
        """What is enqueued next reads tensors that were filled."""


def _table_bytes(plan: PackPlan) -> int:
    columns: list[Any] = [
        plan.staging,
        plan.blocks_in,
        plan.blocks_out,
        plan.whole,
        plan.whole_at,
        plan.ragged,
    ]
    columns += [
        column for f in plan.fragments.values() for column in (f.outer, f.staged, f.unstaged, f.sizes)
    ]
    return sum(column.numel() * column.element_size() for column in columns)
