"""Moving a snapshot: from live tensors to a host buffer that looks like the rank's file.

Made once for a plan, used at every save. Bytes of a device go one of two ways:

- *direct*: whole leaves (1 MiB of the file) that lie inside one tensor, copied from where they are by the copy engine, and digested
  where they are by one kernel;
- *packed*: all other leaves, of which the device makes a few MiB at a time in a small ring, digested in the same pass, from where
  the copy engine takes them.

Tensors on the CPU are copied one by one. Leaves that hold any of them, or gaps beside them, have no digest from here:
the host computes it from the buffer.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckptkit.core.catalog import LEAF
from ckptkit.hooks.buffers import HostBuffer
from ckptkit.hooks.parts import HostCopies, Part, Piece
from ckptkit.kernels.digest import as_bytes
from ckptkit.kernels.pack import PackPlan, digest_in_place, expand, pack, unpack, upload

RING = 16 * LEAF
"""Bytes of one half of the ring."""

SHIFTED = 256 << 10
"""Longer parts whose bytes lie otherwise in a 16-byte word than in the file go directly; the host digests their leaves."""

CLONES = 16 * LEAF
"""Most bytes of tensors that are copied on the device before the trainer goes on (buffers, balancing biases)."""

I64 = npt.NDArray[np.int64]


class Ring:
    """Two halves of a small room on a device, through which packed leaves pass in turns."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.nbytes = nbytes
        self._halves = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def half(self, number: int, nbytes: int) -> torch.Tensor:
        """The first bytes of a half."""
        return self._halves[number][:nbytes]


def ring_nbytes(data_size: int) -> int:
    """How large a half is worth being for a file."""
    return min(RING, -(-data_size // LEAF) * LEAF)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Neighbouring packed leaves: what the device makes of them, and where they go in the file."""

    plan: PackPlan
    offset: int
    leaf: int


class Snapshot:
    """The copies of one plan from one device (or the CPU), ready to run.

    Nothing of it waits for a device, and tables of direct leaves are made when they are first needed: after their copies have begun.

    Args:
        data_start: Of the rank's file; leaves count from there.
        packs: Whether small tensors are packed by the device; the CPU copies them one by one, unless a test asks.
        ring: What packed leaves pass through; one of its own unless given.

    Attributes:
        device: Where most bytes are.
        device_leaves: Leaves whose digests the device gives, in the order of `digests`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        device: torch.device,
        data_start: int,
        data_size: int,
        *,
        packs: bool | None = None,
        ring: Ring | None = None,
    ) -> None:
        self.device = device
        self.data_start, self.data_size = data_start, data_size
        self._ring = ring
        packs = device.type == "cuda" if packs is None else packs
        here: list[Part] = []
        others: list[Part] = []
        for part in parts:
            fits = packs and part.source.device == device and part.source.is_contiguous()
            if fits and part.nbytes > SHIFTED:
                fits = (part.source.data_ptr() - (part.offset - data_start)) % 16 == 0
            (here if fits else others).append(part)
        late = [part for part in here if part.late]
        if sum(part.nbytes for part in late) > CLONES:
            # An average of the whole model: copied straight, while the trainer's stream waits.
            others += late
            here, late = [part for part in here if not part.late], []
        self._clones = _Clones(late, device)
        self.late = HostCopies([(part.source, part.offset) for part in others if part.late])
        self.rest = HostCopies([(part.source, part.offset) for part in others if not part.late])
        self._divide([self._clones.of.get(id(part), part) for part in here], others)

    def _divide(self, here: Sequence[Part], others: Sequence[Part]) -> None:
        """Which leaves go directly, which are packed, which are the host's."""
        raws = [as_bytes(part.source) for part in here]
        start = np.array([part.offset for part in here], np.int64) - self.data_start
        stop = start + np.array([raw.numel() for raw in raws], np.int64)
        address = np.array([raw.data_ptr() for raw in raws], np.int64)

        def cut(which: I64, low: I64, high: I64) -> list[Piece]:
            found = []
            columns = (which, low - start[which], high - low, low + self.data_start)
            for k, at, size, offset in zip(*(column.tolist() for column in columns), strict=True):
                raw = raws[k]
                found.append((raw if size == raw.numel() else raw[at : at + size], offset))
            return found

        # Whole leaves inside one tensor; the short last leaf of the file is one.
        first, last = -(-start // LEAF), np.where(stop == self.data_size, -(-stop // LEAF), stop // LEAF)
        whole = ((address - start) % 16 == 0) & (first < last)
        low = np.where(whole, first * LEAF, stop)
        high = np.where(whole, np.minimum(last * LEAF, stop), stop)
        which = np.flatnonzero(whole)
        self.direct = HostCopies(cut(which, low[which], high[which]))
        leaves = expand(first[which], last[which])[1]
        self.direct_count = len(leaves)
        # What is left of them, cut at the edges of leaves.
        begin = np.concatenate([start, np.maximum(high, start)])
        end = np.concatenate([np.minimum(low, stop), stop])
        row, leaf = expand(begin // LEAF, np.where(begin < end, -(-end // LEAF), 0))
        low, high = np.maximum(begin[row], leaf * LEAF), np.minimum(end[row], (leaf + 1) * LEAF)
        order = np.argsort(low, kind="stable")
        row, leaf, low, high = row[order] % max(len(here), 1), leaf[order], low[order], high[order]
        alone = self._touched(others)[leaf]
        self.alone = HostCopies(cut(row[alone], low[alone], high[alone]))
        packed = cut(row[~alone], low[~alone], high[~alone])
        most = self._ring.nbytes if self._ring is not None else ring_nbytes(self.data_size)
        self.chunks = list(self._chunks(packed, leaf[~alone], most))
        if self.chunks and self._ring is None:
            self._ring = Ring(self.device, most)
        ranges = [np.arange(chunk.leaf, chunk.leaf + chunk.plan.leaf_count) for chunk in self.chunks]
        self.device_leaves = np.concatenate([leaves, *ranges])
        count = len(self.device_leaves)
        self.digests = torch.empty(count, 16, dtype=torch.uint8, device=self.device) if count else None

    def _touched(self, parts: Sequence[Part]) -> npt.NDArray[np.bool_]:
        """Which leaves hold bytes of some parts."""
        found = np.zeros(-(-self.data_size // LEAF), bool)
        for part in parts:
            first = (part.offset - self.data_start) // LEAF
            found[first : -(-(part.offset + part.nbytes - self.data_start) // LEAF)] = True
        return found

    def _chunks(self, packed: Sequence[Piece], leaves: I64, most: int) -> Iterator[_Chunk]:
        """Neighbouring leaves in chunks of at most so many bytes; `leaves`: of each piece, ascending."""
        bounds: list[list[int]] = []
        for leaf in np.unique(leaves).tolist():
            if bounds and leaf == bounds[-1][1] and (leaf + 1 - bounds[-1][0]) * LEAF <= most:
                bounds[-1][1] = leaf + 1
            else:
                bounds.append([leaf, leaf + 1])
        for first, last in bounds:
            low, high = np.searchsorted(leaves, [first, last]).tolist()
            start = first * LEAF + self.data_start
            size = min(last * LEAF, self.data_size) - first * LEAF
            offsets = [offset - start for _, offset in packed[low:high]]
            plan = PackPlan([raw for raw, _ in packed[low:high]], offsets, size)
            yield _Chunk(plan, start, first)

    @cached_property
    def direct_plan(self) -> PackPlan | None:
        """What is digested where it is: the direct pieces, each from a leaf's edge on."""
        raws = [raw for raw, _ in self.direct.pieces]
        if not raws:
            return None
        counts = -(-np.array([raw.numel() for raw in raws]) // LEAF)
        return PackPlan(raws, ((np.cumsum(counts) - counts) * LEAF).tolist())

    @property
    def extra_device_bytes(self) -> int:
        """Memory on the device that saves need."""
        if self.device.type != "cuda":
            return 0
        plans = [chunk.plan for chunk in self.chunks] + ([self.direct_plan] if self.direct_plan else [])
        ring = 2 * self._ring.nbytes if self._ring is not None else 0
        tables = sum(plan.table_nbytes for plan in plans)
        return ring + self._clones.nbytes + 16 * len(self.device_leaves) + tables

    def prepare(self, buffer: HostBuffer) -> None:
        """Make a buffer's views beforehand, so that a save does not."""
        for copies in (self.late, self.rest, self.alone, self.direct):
            copies.views(buffer)

    def copy_late(self, buffer: HostBuffer) -> None:
        """Take what others than the optimizer change. On the trainer's stream; on a CPU, now."""
        self._clones.run()
        self.late.run(buffer, non_blocking=self.device.type == "cuda")

    def run(self, buffer: HostBuffer, streams: "Streams") -> None:
        """Enqueue (on a CPU: do) all other copies, and the digests. `digests` are valid when the copies are done."""
        if self.digests is not None and self.direct_plan is not None:
            digest_in_place(self.direct_plan, self.digests[: self.direct_count])
        streams.copy(self.direct, buffer)
        streams.copy(self.alone, buffer)
        at = self.direct_count
        for number, chunk in enumerate(self.chunks):
            assert self._ring is not None and self.digests is not None
            half = self._ring.half(number % 2, chunk.plan.nbytes)
            streams.before_pack(number % 2)
            pack(chunk.plan, half, self.digests[at : at + chunk.plan.leaf_count])
            streams.copy_packed(number % 2, half, buffer, chunk.offset)
            at += chunk.plan.leaf_count
        self.rest.run(buffer)

    def load(self, buffer: HostBuffer, expected: npt.NDArray[np.uint8], streams: "Streams") -> torch.Tensor:
        """The other way: fill the tensors from a buffer, and compare what arrived with the file's digests `[leaves, 16]`.

        Returns:
            bool `[len(device_leaves)]` on the device: whether each leaf is what its digest says. Valid when the streams are done.
        """
        streams.fill(self.direct, buffer)
        (wanted,) = upload([expected[self.device_leaves]], self.device)
        good = []
        at = self.direct_count
        for number, chunk in enumerate(self.chunks):
            assert self._ring is not None
            half = self._ring.half(number % 2, chunk.plan.nbytes)
            streams.fill_packed(number % 2, half, buffer, chunk.offset)
            good.append(unpack(chunk.plan, half, wanted[at : at + chunk.plan.leaf_count]))
            streams.after_unpack(number % 2)
            at += chunk.plan.leaf_count
        if self.direct_plan is not None:
            assert self.digests is not None
            direct = self.digests[: self.direct_count]
            streams.before_check()
            digest_in_place(self.direct_plan, direct)
            good.insert(0, (direct == wanted[: self.direct_count]).all(1))
        return torch.cat(good) if good else torch.ones(0, dtype=torch.bool, device=self.device)


class _Clones:
    """Copies on the device of what others than the optimizer change, taken before the trainer goes on."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._sources = [part.source for part in parts]
        self._targets = [torch.empty_like(part.source) for part in parts]
        self.nbytes = sum(part.nbytes for part in parts) if device.type == "cuda" else 0
        self.of = {
            id(part): Part(target, part.offset) for part, target in zip(parts, self._targets, strict=True)
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
