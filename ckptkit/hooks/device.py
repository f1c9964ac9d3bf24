"""Copies from and to a GPU: side streams, events, and bouncing where memory cannot be registered.

Everything is enqueued on streams of our own, after what the trainer's stream has done so far; the trainer's stream waits for the
end of it only at the optimizer's next step. `torch.cuda` serves CUDA and ROCm.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ckptkit.core.catalog import LEAF
from ckptkit.hooks.buffers import HostBuffer, segments
from ckptkit.hooks.moving import Streams
from ckptkit.hooks.parts import HostCopies

BOUNCE = 64 * LEAF
"""Bytes of one of the two pinned buffers that copies bounce through."""


class DeviceStreams(Streams):
    """The copy engine's stream and the stream that packs for it, of one device.

    Args:
        bounce: Whether host buffers are not registered.
    """

    def __init__(self, device: torch.device, bounce: bool) -> None:
        self.device = device
        self.copies = torch.cuda.Stream(device)
        self.packs = torch.cuda.Stream(device)
        self._packed = [torch.cuda.Event(), torch.cuda.Event()]
        self._taken = [torch.cuda.Event(), torch.cuda.Event()]
        self._bounce = (
            [torch.empty(BOUNCE, dtype=torch.uint8, pin_memory=True) for _ in range(2)] if bounce else []
        )
        self._arrived = [torch.cuda.Event(), torch.cuda.Event()]
        self._due: list[tuple[int, torch.Tensor, int] | None] = [None, None]
        self._next = 0

    def begin(self) -> None:
        self.packs.wait_stream(torch.cuda.current_stream(self.device))
        self.copies.wait_stream(self.packs)

    def end(self) -> None:
        for stream in (self.copies, self.packs):
            stream.synchronize()

    def packing(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.packs)

    def copy(self, copies: HostCopies, buffer: HostBuffer) -> None:
        """Device to host, on the copy stream."""
        with torch.cuda.stream(self.copies):
            if not self._bounce:
                copies.run(buffer, non_blocking=True)
                return
            for source, offset in copies.pieces:
                raw = source.reshape(-1).view(torch.uint8)
                for at in range(0, raw.numel(), BOUNCE):
                    self._through(raw[at : at + BOUNCE], buffer, offset + at)

    def before_pack(self, half: int) -> None:
        self.packs.wait_event(self._taken[half])

    def copy_packed(self, half: int, packed: torch.Tensor, buffer: HostBuffer, offset: int) -> None:
        self._packed[half].record(self.packs)
        self.copies.wait_event(self._packed[half])
        with torch.cuda.stream(self.copies):
            if self._bounce:
                self._through(packed, buffer, offset)
            else:
                for start, size in segments(offset, packed.numel()):
                    source = packed[start - offset : start - offset + size]
                    buffer.tensor[start : start + size].copy_(source, non_blocking=True)
            self._taken[half].record(self.copies)

    def fill(self, copies: HostCopies, buffer: HostBuffer) -> None:
        """Host to device, on the copy stream."""
        with torch.cuda.stream(self.copies):
            copies.fill(buffer, non_blocking=True)

    def fill_packed(self, half: int, packed: torch.Tensor, buffer: HostBuffer, offset: int) -> None:
        self.copies.wait_event(self._packed[half])
        with torch.cuda.stream(self.copies):
            for start, size in segments(offset, packed.numel()):
                source = buffer.tensor[start : start + size]
                packed[start - offset : start - offset + size].copy_(source, non_blocking=True)
            self._taken[half].record(self.copies)
        self.packs.wait_event(self._taken[half])

    def after_unpack(self, half: int) -> None:
        self._packed[half].record(self.packs)

    def before_check(self) -> None:
        self.packs.wait_stream(self.copies)

    def _through(self, source: torch.Tensor, buffer: HostBuffer, offset: int) -> None:
        """By way of a pinned buffer: while the device fills one, the host empties the other."""
        which, self._next = self._next, 1 - self._next
        self._empty(which, buffer)
        self._bounce[which][: source.numel()].copy_(source, non_blocking=True)
        self._arrived[which].record(self.copies)
        self._due[which] = (source.numel(), self._bounce[which], offset)

    def _empty(self, which: int, buffer: HostBuffer) -> None:
        due, self._due[which] = self._due[which], None
        if due is not None:
            nbytes, pinned, offset = due
            self._arrived[which].synchronize()
            buffer.tensor[offset : offset + nbytes].copy_(pinned[:nbytes])

    def drain(self, buffer: HostBuffer) -> None:
        """Empty both bounce buffers; the older one first."""
        for which in (self._next, 1 - self._next):
            self._empty(which, buffer)

    @property
    def extra_host_bytes(self) -> int:
        return sum(one.numel() for one in self._bounce)


def numbered(device: torch.device) -> torch.device:
    """A device as tensors on it name theirs: `cuda` alone is unequal to the `cuda:0` that it means."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def copy_rate(device: torch.device, buffer: HostBuffer, seconds: float = 0.2) -> float:
    """Bytes a second from the device to a buffer, as measured now; 0 where it cannot be told."""
    size = min(64 * LEAF, buffer.nbytes)
    if device.type != "cuda" or size < LEAF:
        return 0.0
    source = torch.empty(size, dtype=torch.uint8, device=device)
    if buffer.mode == "registered":
        target = buffer.tensor[:size]
    else:
        target = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    saved = target.clone() if buffer.mode == "registered" else None
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        done += size
    rate = done / (time.perf_counter() - began)
    if saved is not None:
        target.copy_(saved)
    return rate


def events(device: torch.device, count: int) -> Sequence[Any]:
    """Events with times, of a device."""
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]
