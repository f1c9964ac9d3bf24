"""A self-test of the way that snapshots take: registration, copies both ways with digests, and their overlap with compute, on this device."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ckptkit.core.catalog import LEAF
from ckptkit.engine.digests import digest
from ckptkit.errors import CkptError
from ckptkit.hooks.buffers import HostBuffer
from ckptkit.hooks.device import DeviceStreams, numbered
from ckptkit.hooks.moving import Snapshot, Streams
from ckptkit.hooks.parts import Part

START = 4096


@dataclass(frozen=True)
class Measure:
    """One line: whether bytes and digests are right (None where it cannot run here), and rates in bytes a second."""

    name: str
    passed: bool | None
    rate: float = 0.0
    note: str = ""

    def line(self) -> str:
        """For people."""
        state = {True: "ok", False: "WRONG", None: "not here"}[self.passed]
        rate = f" {self.rate / 1e9:.1f} GB/s" if self.rate else ""
        return f"{state:8} {self.name}{rate}" + (f" ({self.note})" if self.note else "")


def run(device_name: str | None = None) -> list[Measure]:
    """Check and measure."""
    device = numbered(torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu")))
    found: list[Measure] = []
    for measure in (_ways, _overlap):
        try:
            found += measure(device)
        except (CkptError, RuntimeError) as error:
            found.append(Measure(measure.__name__.strip("_"), False, note=str(error).splitlines()[0][:200]))
    return found


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ways(device: torch.device) -> Iterator[Measure]:
    """Large tensors copied directly, small ones packed; into registered memory and by bouncing; and back."""
    gpu = device.type == "cuda"
    big, count, each = (64 * LEAF, 4096, 24 << 10) if gpu else (2 * LEAF, 64, 3000)
    tensors = [torch.randint(0, 256, (big,), dtype=torch.uint8, device=device)]
    tensors += [torch.randint(0, 256, (each,), dtype=torch.uint8, device=device) for _ in range(count)]
    parts, at = [], START
    for tensor in tensors:
        parts.append(Part(tensor, at))
        at += tensor.numel()
    size = at - START
    truth = torch.cat([tensor.cpu() for tensor in tensors])
    for name, keep, bounce in (
        ("snapshot, large tensors", slice(0, 1), False),
        ("snapshot, small tensors", slice(1, None), False),
        ("snapshot, all", slice(0, None), False),
        ("snapshot, bouncing", slice(0, None), True),
    ):
        if bounce and not gpu:
            yield Measure(name, None, note="no device")
            continue
        buffer = HostBuffer.own(at)
        mode = "bounce" if bounce else buffer.register(device)
        streams: Streams = DeviceStreams(device, mode == "bounce") if gpu else Streams()
        chosen = parts[keep]
        snapshot = Snapshot(chosen, device, START, size, packs=True)
        seconds = min(_timed(device, partial(_save, snapshot, buffer, streams)) for _ in range(3))
        nbytes = sum(part.nbytes for part in chosen)
        good = _same(buffer, truth, chosen) and _digested(snapshot, buffer, size)
        yield Measure(name, good, nbytes / seconds, mode if gpu else "")
        if name == "snapshot, all":
            yield _back(snapshot, buffer, streams, chosen, size, device)
        buffer.close()


def _save(snapshot: Snapshot, buffer: HostBuffer, streams: Streams) -> None:
    if isinstance(streams, DeviceStreams):
        with torch.cuda.stream(streams.packs):
            snapshot.run(buffer, streams)
        streams.copies.synchronize()
        streams.packs.synchronize()
        streams.drain(buffer)
    else:
        snapshot.run(buffer, streams)


def _back(
    snapshot: Snapshot,
    buffer: HostBuffer,
    streams: Streams,
    parts: list[Part],
    size: int,
    device: torch.device,
) -> Measure:
    data = buffer.memory[START : START + size]
    leaves = b"".join(digest(data[a : a + LEAF]) for a in range(0, size, LEAF))
    expected = np.frombuffer(leaves, np.uint8).reshape(-1, 16)
    kept = [part.source.clone() for part in parts]
    good = torch.zeros(1, dtype=torch.bool)

    def restore() -> None:
        nonlocal good
        if isinstance(streams, DeviceStreams):
            with torch.cuda.stream(streams.packs):
                good = snapshot.load(buffer, expected, streams).cpu()
        else:
            good = snapshot.load(buffer, expected, streams)

    for part in parts:
        part.source.zero_()
    seconds = min(_timed(device, restore) for _ in range(3))
    same = all(torch.equal(part.source, before) for part, before in zip(parts, kept, strict=True))
    return Measure(
        "restore, digests checked", same and bool(good.all()), sum(p.nbytes for p in parts) / seconds
    )


def _same(buffer: HostBuffer, truth: torch.Tensor, parts: list[Part]) -> bool:
    low, high = parts[0].offset, parts[-1].offset + parts[-1].nbytes
    return torch.equal(buffer.tensor[low:high], truth[low - START : high - START])


def _digested(snapshot: Snapshot, buffer: HostBuffer, size: int) -> bool:
    if snapshot.digests is None:
        return True
    rows = zip(snapshot.device_leaves.tolist(), snapshot.digests.cpu().numpy(), strict=True)
    data = buffer.memory[START : START + size]
    return all(row.tobytes() == digest(data[leaf * LEAF : (leaf + 1) * LEAF]) for leaf, row in rows)


def _timed(device: torch.device, call: Callable[[], None]) -> float:
    _sync(device)
    began = time.perf_counter()
    call()
    _sync(device)
    return time.perf_counter() - began


def _overlap(device: torch.device) -> Iterator[Measure]:
    """How much a copy slows matmuls beside it, as a share of the copy's time: 0 is perfect, 1 is none."""
    name = "overlap with compute"
    if device.type != "cuda":
        yield Measure(name, None, note="no device")
        return
    buffer = HostBuffer.own(1 << 30)
    mode = buffer.register(device)
    if mode != "registered":
        yield Measure(name, None, note="host memory cannot be registered")
        return
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    side = torch.cuda.Stream(device)

    def work() -> None:
        for _ in range(60):
            torch.mm(x, x)

    def both() -> None:
        with torch.cuda.stream(side):
            buffer.tensor.copy_(source, non_blocking=True)
        work()

    def copy() -> None:
        buffer.tensor.copy_(source, non_blocking=True)

    alone, copying = (min(_timed(device, call) for _ in range(3)) for call in (work, copy))
    together = min(_timed(device, both) for _ in range(3))
    lost = max(0.0, together - max(alone, copying)) / min(alone, copying)
    yield Measure(name, lost < 0.5, (1 << 30) / copying, f"{lost:.0%} of the shorter is lost when both run")
    buffer.close()
