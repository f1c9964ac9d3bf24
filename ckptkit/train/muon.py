"""Muon: momentum, then Newton-Schulz on whole matrices, wherever their parts lie.

    buf <- lerp(buf, g, 1 - mu);  u = lerp(g, buf, mu);  p <- p (1 - lr wd) - lr' NS(u)

The update u is known where the momentum is: on each rank a section of a flat buffer (ZeRO-1), of its heads' rows or columns
(TP). A matrix is worked on by the rank that has most of it: others send it their runs, whatever their number, and get
theirs of the result back, in one all-to-all each way. The rule and its constants are those of `torch.optim.Muon`; a
stack of experts is a stack of matrices.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from ckptkit.core.boxes import Box
from ckptkit.kernels.newton_schulz import newton_schulz
from ckptkit.train.collectives import exchange
from ckptkit.train.flat import Buffer, Run
from ckptkit.train.parallel import Group

BATCH = 1 << 27
"""Matrices of one shape are worked on together up to so many elements."""


@dataclass
class _Part:
    """A box of a matrix as one or more ranks hold it: `runs[rank]` are elements [first, last) of the box, at an offset."""

    box: Box
    runs: dict[int, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class _Matrix:
    """One matrix: its shape, the canonical shape that boxes refer to, and the parts that ranks hold."""

    shape: tuple[int, int]
    canonical: tuple[int, ...]
    parts: dict[str, _Part] = field(default_factory=dict)
    worker: int = 0


class Orthogonalizer:
    """Newton-Schulz of all matrices of a buffer.

    Args:
        buffer: Of Muon's parameters on this rank.
        group: The ranks whose runs make whole matrices together, this one among them.
        runs: What every rank of the group updates, in the group's order; all ranks must give the same.
        dtype: Of the products' operands.
        kernels: Which form of the kernel; None to choose by device.
    """

    def __init__(
        self,
        buffer: Buffer,
        group: Group,
        runs: Sequence[Sequence[Run]],
        shapes: dict[str, tuple[int, ...]],
        tensors: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        kernels: str | None,
    ) -> None:
        self.group, self.dtype, self.kernels = group, dtype, kernels
        self.matrices = _matrices(runs, shapes, tensors)
        _deal(self.matrices, group.size)
        self.section = buffer.master.numel()
        # What this rank sends to each worker, and what it gets from each rank, in one order known to all.
        self.sends: list[list[slice]] = [[] for _ in range(group.size)]
        self.gets: list[list[tuple[_Part, int, int]]] = [[] for _ in range(group.size)]
        self.mine = [matrix for matrix in self.matrices if matrix.worker == group.index]
        for matrix in self.matrices:
            for part in matrix.parts.values():
                for rank, held in part.runs.items():
                    for first, last, offset in held:
                        if rank == group.index:
                            self.sends[matrix.worker].append(slice(offset, offset + last - first))
                        if matrix.worker == group.index:
                            self.gets[rank].append((part, first, last))

    def __call__(self, update: torch.Tensor) -> torch.Tensor:
        """The orthogonalised update, of this rank's section as `update` [section] is of it; in `dtype`."""
        out = torch.zeros(self.section, dtype=self.dtype, device=update.device)
        sent = [sum(s.stop - s.start for s in to) for to in self.sends]
        received = [sum(last - first for _, first, last in rank) for rank in self.gets]
        flat = _cat([update[s] for to in self.sends for s in to], update)
        if self.group.size > 1:
            flat = exchange(flat, sent, received, self.group)
        boxes: dict[int, torch.Tensor] = {}
        at = 0
        for part, first, last in (get for rank in self.gets for get in rank):
            arrived = flat[at : at + last - first]
            at += last - first
            if len(arrived) == part.box.size:
                boxes[id(part)] = arrived
                continue
            if id(part) not in boxes:
                boxes[id(part)] = flat.new_empty(part.box.size)
            boxes[id(part)][first:last] = arrived
        done = self._orthogonalise(boxes)
        results = [done[id(part)][first:last] for rank in self.gets for part, first, last in rank]
        flat = _cat(results, out)
        if self.group.size > 1:
            flat = exchange(flat, received, sent, self.group)
        at = 0
        for s in (s for to in self.sends for s in to):
            out[s] = flat[at : at + s.stop - s.start]
            at += s.stop - s.start
        return out

    def _orthogonalise(self, boxes: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Whole matrices from their boxes (by part), worked on, and cut again."""
        by_shape: dict[tuple[int, int], list[_Matrix]] = defaultdict(list)
        for matrix in self.mine:
            by_shape[matrix.shape].append(matrix)
        done: dict[int, torch.Tensor] = {}
        for shape, alike in by_shape.items():
            count = max(1, BATCH // prod(shape))
            for first in range(0, len(alike), count):
                batch = alike[first : first + count]
                stack = torch.stack([_assemble(matrix, boxes) for matrix in batch])
                result = newton_schulz(stack, dtype=self.dtype, backend=self.kernels)
                for matrix, whole in zip(batch, result, strict=True):
                    canonical = whole.reshape(matrix.canonical)
                    for part in matrix.parts.values():
                        done[id(part)] = canonical[_slices(part.box)].reshape(-1)
        return done


def _assemble(matrix: _Matrix, boxes: dict[int, torch.Tensor]) -> torch.Tensor:
    parts = list(matrix.parts.values())
    if len(parts) == 1 and parts[0].box.shape == matrix.canonical:
        return boxes[id(parts[0])].view(matrix.shape)
    whole = boxes[id(parts[0])].new_empty(matrix.canonical)
    for part in parts:
        whole[_slices(part.box)] = boxes[id(part)].view(part.box.shape)
    return whole.view(matrix.shape)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.start, box.stop))


def _cat(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts) if parts else like.new_empty(0)


def _matrices(
    runs: Sequence[Sequence[Run]], shapes: dict[str, tuple[int, ...]], tensors: dict[str, tuple[int, ...]]
) -> list[_Matrix]:
    """The matrices that runs of all ranks make up. A local tensor of three axes is a stack, one matrix an expert.

    Args:
        runs: Of each rank.
        shapes: Whole (unsharded) shape of each local name.
        tensors: Shape of each canonical tensor.
    """
    found: dict[tuple[str, int], _Matrix] = {}
    for rank, theirs in enumerate(runs):
        for run in theirs:
            (segment,) = run.item.local.segments
            assert list(segment.dim) == sorted(segment.dim), "matrices keep the order of canonical axes"
            stacked = len(run.item.local.shape) == 3
            box = segment.box
            canonical = tensors[segment.tensor][stacked:]
            size = prod(run.item.local.shape[stacked:])
            inner = Box(box.start[stacked:], box.stop[stacked:])
            for number in range(run.first // size, -(-run.last // size)):
                which = box.start[0] + number if stacked else 0
                matrix = found.setdefault(
                    (segment.tensor, which),
                    _Matrix((shapes[run.item.key][-2], shapes[run.item.key][-1]), canonical),
                )
                part = matrix.parts.setdefault(str(inner), _Part(inner))
                first, last = max(run.first, number * size), min(run.last, (number + 1) * size)
                part.runs[rank].append(
                    (first - number * size, last - number * size, run.offset + first - run.first)
                )
    return list(found.values())


def _deal(matrices: Sequence[_Matrix], ranks: int) -> None:
    """Give each matrix, largest first, to the rank that holds most of it; of equals to the one with the least so far."""
    load = [0] * ranks
    for matrix in sorted(matrices, key=lambda m: -prod(m.shape)):
        held = [0] * ranks
        for part in matrix.parts.values():
            for rank, theirs in part.runs.items():
                held[rank] += sum(last - first for first, last, _ in theirs)
        matrix.worker = min(range(ranks), key=lambda rank: (-held[rank], load[rank], rank))
        load[matrix.worker] += prod(matrix.shape) * min(matrix.shape)
