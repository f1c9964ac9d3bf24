"""Parts: bytes of live tensors and where they lie in a rank's file, and copies of them one by one."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ckptkit.core.boxes import interval_boxes
from ckptkit.hooks.buffers import HostBuffer, segments
from ckptkit.hooks.holdings import Holding
from ckptkit.hooks.planning import Move

Piece = tuple[torch.Tensor, int]
"""A part's tensor and offset."""


class Part(NamedTuple):
    """Bytes that are one range of the file, and of one registration.

    Attributes:
        source: A live tensor or a part of one; of any strides on the CPU.
        offset: Where it goes in the file.
        late: Whether others than the optimizer change it.
    """

    source: torch.Tensor
    offset: int
    late: bool = False

    @property
    def nbytes(self) -> int:
        return int(self.source.nbytes)


def parts_of(
    moves: Sequence[Move], holdings: Sequence[Holding], tensors: Sequence[torch.Tensor]
) -> list[Part]:
    """Moves of a plan as parts, sorted by offset. A run of a tensor that is not contiguous becomes a few boxes."""
    found: list[Part] = []
    for move in moves:
        tensor, late = tensors[move.holding], not holdings[move.holding].fenced
        item = tensor.element_size()
        for at, nbytes in segments(move.offset, (move.last - move.first) * item):
            first = move.first + (at - move.offset) // item
            last = first + nbytes // item
            if last - first == tensor.numel():
                views = [tensor]
            elif tensor.is_contiguous():
                views = [tensor.view(-1)[first:last]]
            else:
                _, low, high = interval_boxes(tuple(tensor.shape), np.asarray([first]), np.asarray([last]))
                views = [
                    tensor[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]
                    for lo, hi in zip(low.tolist(), high.tolist(), strict=True)
                ]
            for view in views:
                found.append(Part(view, at, late))
                at += view.nbytes
    return found


class HostCopies:
    """Pieces that are copied one by one: all of a CPU's, and those of a device that have no better way."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = list(pieces)
        self._sources = [source for source, _ in pieces]
        self._targets: dict[int, list[torch.Tensor]] = {}

    def run(self, buffer: HostBuffer, *, non_blocking: bool = False) -> None:
        """Copy everything. One call into torch, which lets other threads run."""
        if self.pieces:
            torch._foreach_copy_(self.views(buffer), self._sources, non_blocking=non_blocking)

    def fill(self, buffer: HostBuffer, *, non_blocking: bool = False) -> None:
        """The other way: from the buffer into the tensors."""
        if self.pieces:
            torch._foreach_copy_(self._sources, self.views(buffer), non_blocking=non_blocking)

    def views(self, buffer: HostBuffer) -> list[torch.Tensor]:
        """Where the pieces lie in a buffer; made once."""
        found = self._targets.get(id(buffer))
        if found is None:
            found = self._targets[id(buffer)] = _views(buffer.tensor, self.pieces) if self.pieces else []
        return found


def _views(room: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Where pieces lie; one call cuts the room, since a cut takes longer than the call that copies it."""
    begin = np.array([offset for _, offset in pieces], np.int64)
    edges = np.unique(np.concatenate([begin, begin + [source.nbytes for source, _ in pieces]]))
    cuts = room[edges[0] : edges[-1]].split(np.diff(edges).tolist())
    found = []
    for k, (source, _) in zip(np.searchsorted(edges, begin).tolist(), pieces, strict=True):
        flat = source.dtype == torch.uint8 and source.dim() == 1
        found.append(cuts[k] if flat else cuts[k].view(source.dtype).view(source.shape))
    return found
