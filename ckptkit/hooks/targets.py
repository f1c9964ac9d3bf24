"""Targets: how a filled buffer becomes part of a step. Straight to the run's URL, or into a slot of the node's cache.

Methods but `take` run on a thread of their own, beside the training.
"""

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.cache.client import CacheClient, Lane, Skipped
from ckptkit.cache.durable import DurableRun
from ckptkit.cache.messages import Version
from ckptkit.core.catalog import LEAF
from ckptkit.engine.digests import digest
from ckptkit.engine.executor import usable_cpus
from ckptkit.errors import CkptError, CorruptionError, StoreError
from ckptkit.formats.native import step_dir
from ckptkit.formats.native_digests import RankDigests
from ckptkit.formats.native_manifest import INDEX, digests_name, extras_name
from ckptkit.hooks.buffers import HostBuffer
from ckptkit.hooks.meeting import Meeting
from ckptkit.hooks.planning import SavePlan

CHUNK = 16 * LEAF
"""Bytes that are handed to the store at once."""


_SKIPPED = "skipped: "


class Skip(Exception):
    """A save that does not happen, and why; no error."""


@dataclass(frozen=True)
class Filled:
    """A buffer that was copied into, and what belongs to it.

    Attributes:
        found: Digests that the device computed, of `leaves`; None where it computed none.
        extras: The content of the rank's `.extras`.
        key: Names this save among all of the run.
        failed: Why this rank's part is not to be used; the others are told, so that nobody waits for it.
    """

    plan: SavePlan
    buffer: HostBuffer
    step: int
    found: npt.NDArray[np.uint8] | None
    leaves: npt.NDArray[np.int64]
    extras: bytes
    pin: bool
    key: str
    failed: BaseException | None = None


class Target(ABC):
    """Where saves go.

    Attributes:
        epoch, inc: Of this start of the run.
        levels: Whether levels below 3 (durable) mean something.
    """

    epoch: int
    inc: str
    levels: bool = False

    @abstractmethod
    def prepare(self, plan: SavePlan) -> Sequence[HostBuffer]:
        """Get ready for saves of a plan; gives the buffers that there will be. Raises StoreError."""

    @abstractmethod
    def take(self, step: int, nbytes: int, timeout_s: float) -> HostBuffer:
        """A buffer to copy into, at once where `timeout_s` is 0. Raises Skip where there is none."""

    @abstractmethod
    def give(self, buffer: HostBuffer, step: int, why: str) -> None:
        """A buffer back whose save failed."""

    @abstractmethod
    def finish(self, filled: Filled) -> None:
        """Make a filled buffer part of the step, and the step whole once all ranks have.

        Raises CkptError where the step did not become whole, Skip where a rank had no buffer. The buffer is the target's again.
        """

    @abstractmethod
    def decline(self, step: int, key: str, why: str) -> None:
        """Tell the others that this rank had no buffer."""

    @abstractmethod
    def wait(self, step: int, level: int, timeout_s: float) -> bool:
        """Whether a finished step reached a level in time."""

    @abstractmethod
    def close(self, drain: bool) -> None: ...


def leaf_table(plan: SavePlan, buffer: HostBuffer, threads: int) -> npt.NDArray[np.uint8]:
    """Digests of a buffer's leaves, as the host reads them: `[leaves, 16]`."""
    start = len(plan.header)
    data = buffer.memory[start : plan.size]
    count = -(-(plan.size - start) // LEAF)
    out = bytearray(16 * count)

    def some(first: int) -> None:
        for leaf in range(first, min(first + 64, count)):
            out[16 * leaf : 16 * leaf + 16] = digest(data[leaf * LEAF : (leaf + 1) * LEAF])

    if count <= 64 or threads <= 1:
        for first in range(0, count, 64):
            some(first)
    else:
        with ThreadPoolExecutor(threads, "ckptkit-digest") as pool:
            list(pool.map(some, range(0, count, 64)))
    return np.frombuffer(bytes(out), np.uint8).reshape(count, 16)


def check_digests(
    plan: SavePlan,
    host: npt.NDArray[np.uint8],
    found: npt.NDArray[np.uint8] | None,
    leaves: npt.NDArray[np.int64],
) -> None:
    """Raise CorruptionError where the device and the host read different bytes."""
    if found is None:
        return
    wrong = np.flatnonzero(np.any(host[leaves] != found, axis=1))
    if len(wrong):
        leaf = int(leaves[wrong[0]])
        raise CorruptionError(
            f"leaf {leaf} of {plan.path} (and {len(wrong) - 1} more) arrived in memory otherwise than the device digested it: it was "
            "changed while it was copied, or the copy went wrong",
            leaf=leaf,
        )


def digests_of(
    plan: SavePlan, leaves: npt.NDArray[np.uint8], extras: bytes, step: int, epoch: int, inc: str
) -> RankDigests:
    """The content of a rank's `.digests`."""
    return RankDigests(
        data_start=len(plan.header), data_size=plan.size - len(plan.header), header=xxhash.xxh3_128_digest(plan.header),
        extras=xxhash.xxh3_128_digest(extras), index=bytes.fromhex(plan.index_hash), world=plan.layout.world, rank=plan.rank,
        step=step, epoch=epoch, incarnation=bytes.fromhex(inc), leaves=leaves,
    )  # fmt: skip


class UrlTarget(Target):
    """Straight to the URL: every rank writes its files into the step's folder; rank 0 makes it whole when all are durable.

    Args:
        buffers: How many saves may be under way.
        claim: `(epoch, inc)` of this start.
    """

    def __init__(self, run: DurableRun, meeting: Meeting, claim: tuple[int, str], buffers: int = 2) -> None:
        self.run, self.meeting = run, meeting
        self.epoch, self.inc = claim
        self._count = buffers
        self._free: list[HostBuffer] = []
        self._all: list[HostBuffer] = []
        self._freed = threading.Condition()
        self._threads = max(1, min(4, usable_cpus()))

    def prepare(self, plan: SavePlan) -> Sequence[HostBuffer]:
        with self._freed:
            for buffer in self._all:
                buffer.close()
            self._all = [HostBuffer.own(plan.size) for _ in range(self._count)]
            self._free = list(self._all)
        return self._all

    def take(self, step: int, nbytes: int, timeout_s: float) -> HostBuffer:
        with self._freed:
            if not self._freed.wait_for(lambda: bool(self._free), timeout_s):
                raise Skip("every buffer is still being written; the store is slower than the interval")
            return self._free.pop(0)

    def give(self, buffer: HostBuffer, step: int, why: str) -> None:
        with self._freed:
            if buffer in self._all:
                self._free.append(buffer)
            self._freed.notify()

    def finish(self, filled: Filled) -> None:
        failed = filled.failed
        why = "" if failed is None else f"{type(failed).__name__}: {failed}"
        try:
            if not why:
                self._write(filled)
        except CkptError as error:
            failed, why = error, f"{type(error).__name__}: {error}"
        finally:
            self.give(filled.buffer, filled.step, why)
        told = self._agree(filled.step, filled.key, why, filled.pin)
        if failed is not None:
            raise failed
        if told.startswith(_SKIPPED):
            raise Skip(told.removeprefix(_SKIPPED))
        if told:
            raise StoreError(told)

    def decline(self, step: int, key: str, why: str) -> None:
        self._agree(step, key, _SKIPPED + why, False)

    def _agree(self, step: int, key: str, why: str, pin: bool) -> str:
        """Whether every rank has written; rank 0 then makes the step whole. Gives why not, the same on all ranks."""

        def commit(said: Sequence[str]) -> str:
            failed = {rank: text for rank, text in enumerate(said) if text}
            skipped = {rank: text for rank, text in failed.items() if text.startswith(_SKIPPED)}
            if failed:
                rank, text = next(iter((skipped if len(skipped) == len(failed) else failed).items()))
                if skipped and len(skipped) == len(failed):
                    return f"{_SKIPPED}rank {rank}: {text.removeprefix(_SKIPPED)}"
                rank, text = next((r, t) for r, t in failed.items() if r not in skipped)
                more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
                return f"step {step} is not whole: rank {rank} failed ({text}){more}"
            if pin:
                self.run.pin(step_dir(step, self.epoch))
            writer = self.epoch, self.inc
            self.run.write_manifest(Version(self.epoch, step, self.inc), self.meeting.world, writer)
            return ""

        return str(self.meeting.agree(key, why, commit))

    def _write(self, filled: Filled) -> None:
        plan, buffer, step = filled.plan, filled.buffer, filled.step
        host = leaf_table(plan, buffer, self._threads)
        check_digests(plan, host, filled.found, filled.leaves)
        name, folder = step_dir(step, self.epoch), self.run.folder

        def chunks() -> Iterator[memoryview]:
            for at in range(0, plan.size, CHUNK):
                yield buffer.memory[at : min(at + CHUNK, plan.size)]

        folder.write_file(f"{name}/{plan.path}", plan.size, chunks())
        folder.write_small(f"{name}/{extras_name(plan.path)}", filled.extras)
        if self.meeting.lead:
            folder.write_small(f"{name}/{INDEX}", plan.index)
        digests = digests_of(plan, host, filled.extras, step, self.epoch, self.inc)
        folder.write_small(f"{name}/{digests_name(plan.path)}", digests.to_bytes())

    def wait(self, step: int, level: int, timeout_s: float) -> bool:
        return True  # what is finished is durable

    def close(self, drain: bool) -> None:
        for buffer in self._all:
            buffer.close()
        self._all, self._free = [], []
        self.run.close()


class CacheTarget(Target):
    """The cache of the node: the daemon hashes, commits across nodes, replicates and drains.

    Args:
        durable_every: Steps that are multiples of this are drained; None leaves it to the daemon's configuration.
        join: Joins an epoch; takes the bytes of the largest rank file, epoch, incarnation and whether it starts from nothing.
    """

    levels = True

    def __init__(
        self,
        client: CacheClient,
        meeting: Meeting,
        claim: tuple[int, str],
        join: Any,
        durable_every: int | None,
    ) -> None:
        self.client, self.meeting, self.durable_every = client, meeting, durable_every
        self.epoch, self.inc = claim
        self._join = join
        self._buffers: dict[int, HostBuffer] = {}
        self._lane: Lane | None = None
        self._index_hash = ""
        self.fresh = False

    def prepare(self, plan: SavePlan) -> Sequence[HostBuffer]:
        if self._lane is None or self._lane.slot_bytes < plan.size:
            for buffer in self._buffers.values():
                buffer.close()
            self._lane = self._join(plan.largest, self.epoch, self.inc, self.fresh)
            self._buffers = {slot.number: HostBuffer(slot.buffer, slot) for slot in self._lane.slots}
        for buffer in self._buffers.values():
            buffer.prepared = False
        self._index_hash = self.client.put_index(plan.index)
        return list(self._buffers.values())

    def rejoin(self, claim: tuple[int, str]) -> None:
        """Leave this epoch for a new one, which starts from nothing; `prepare` follows."""
        self.epoch, self.inc = claim
        self.fresh, self._lane = True, None
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers = {}

    def buffer_of(self, number: int) -> HostBuffer | None:
        """The buffer of a slot, where it is one of this rank's and registered."""
        found = self._buffers.get(number)
        return found if found is not None and found.mode == "registered" else None

    def take(self, step: int, nbytes: int, timeout_s: float) -> HostBuffer:
        until = time.monotonic() + timeout_s
        while True:
            # The last try is one that the other ranks hear of when it fails.
            slot = self.client.begin(step, nbytes, wait=time.monotonic() < until)
            if not isinstance(slot, Skipped):
                return self._buffers[slot.number]
            if slot.reason not in ("busy", "away") or time.monotonic() > until:
                raise Skip(f"{slot.reason}: {slot.detail}" if slot.detail else slot.reason)
            time.sleep(0.02)

    def give(self, buffer: HostBuffer, step: int, why: str) -> None:
        self.client.abort(buffer.slot, step=step, why=why[:500])

    def finish(self, filled: Filled) -> None:
        plan, step = filled.plan, filled.step
        if filled.failed is not None:
            self.give(filled.buffer, step, str(filled.failed))
            raise filled.failed
        count = -(-(plan.size - len(plan.header)) // LEAF)
        digests = None
        if filled.found is not None and len(filled.leaves):
            whole = len(filled.leaves) == count
            table = np.empty((count, 16), np.uint8) if whole else leaf_table(plan, filled.buffer, 1).copy()
            table[filled.leaves] = filled.found
            digests = digests_of(plan, table, filled.extras, step, self.epoch, self.inc).to_bytes()
        slot = filled.buffer.slot
        skipped = self.client.seal(slot, plan.size, self._index_hash, digests, filled.extras, step=step)
        if skipped is not None:
            why = f"the cache did not take step {step}: {skipped.reason} {skipped.detail}".rstrip()
            # What a daemon or another rank was too busy for is skipped here, too: it must not end the run when it happens often.
            raise Skip(why) if skipped.reason in ("aborted", "away") else StoreError(why)
        if filled.pin and self.meeting.lead:
            self.client.request("pin", epoch=self.epoch, step=step)
        if self.durable_every and step % self.durable_every == 0:
            self._drain(step, self.meeting.timeout_s)

    def _drain(self, step: int, timeout_s: float) -> None:
        """Ask the daemon to make a step durable, once it is committed."""
        if self.client.wait(step, 1, timeout_s):
            with suppress(StoreError):  # a daemon that is away hears of it at the next
                self.client.request("drain")

    def decline(self, step: int, key: str, why: str) -> None:
        """The coordinator hears from the daemons that not all ranks sealed."""

    def wait(self, step: int, level: int, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        if level == 3:
            self._drain(step, timeout_s)
        return self.client.wait(step, level, max(until - time.monotonic(), 0.0))

    def close(self, drain: bool) -> None:
        if self.meeting.lead and drain:
            self.client.finish()
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()
        self.client.close()


def probe(run: DurableRun) -> None:
    """Find out now whether the run's URL can be written: a small file is written, read back and removed.

    Raises StoreError or UsageError that says why not.
    """
    name = f".probe-{os.getpid()}-{time.monotonic_ns():x}"
    content = json.dumps({"probe": name}).encode()
    run.folder.write_small(name, content)
    try:
        if run.folder.read(name) != content:
            raise StoreError(f"{run.url} gives back other bytes than it was given", file=name)
    finally:
        with suppress(StoreError):
            run.folder.remove(name)
