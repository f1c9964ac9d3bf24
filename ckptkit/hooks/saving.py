"""Saving: the life of one save, from the step's end to a whole step.

    requested   the trainer's thread took what others than the optimizer change, noted versions, and went on
    copied      all bytes are in the buffer; the optimizer may step (the fence)
    staged      nothing was changed meanwhile, replicas agree
    written     this rank's part is durable, or sealed in the cache
    committed   the step is whole on all ranks

Copies run on one thread, everything after them on another; both live as long as the checkpointer.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch

from ckptkit.errors import CkptError, CorruptionError, StoreError
from ckptkit.hooks.buffers import HostBuffer
from ckptkit.hooks.device import DeviceStreams, copy_rate
from ckptkit.hooks.meeting import Meeting
from ckptkit.hooks.moving import Snapshot, Streams
from ckptkit.hooks.optimizers import numbers_of
from ckptkit.hooks.parts import parts_of
from ckptkit.hooks.planning import SavePlan
from ckptkit.hooks.table import Table
from ckptkit.hooks.targets import Filled, Skip, Target
from ckptkit.hooks.twins import Twins, Verdict, line_of

Event = Callable[[Mapping[str, Any]], None]
Finish = Callable[["Save"], bytes]
"""Gives the rank's extras, once the numbers of a save are known."""


class Save:
    """One save.

    Attributes:
        copied: Set when the optimizer may step: on a CPU when all is copied, on a device when all copies are enqueued.
        error: Why it failed, or None.
        result: Of everything after the copy.
        numbers: What optimizers keep beside arrays, by optimizer.
        stall_s: How long the trainer waited at the fence, where that can be told.
    """

    def __init__(self, step: int, buffer: HostBuffer, key: str, pin: bool) -> None:
        self.step, self.buffer, self.key, self.pin = step, buffer, key, pin
        self.copied = threading.Event()
        self.judged = False
        self.lock = threading.Lock()
        self.marks: list[int] = []
        self.error: BaseException | None = None
        self.numbers: list[dict[str, dict[str, Any]]] = []
        self.digests: np.ndarray | None = None
        self.ready: Any = None
        self.done: Any = None
        self.result: Future[None] = Future()
        self.began = time.perf_counter()
        self.copy_s = 0.0
        self.stall_s = 0.0
        self.device_copy_s: float | None = None

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error


class Saver:
    """Copies registered tensors into buffers, and hands these to a target.

    Args:
        compare: Whether replicas are compared.
        event: Told what happens.
    """

    def __init__(
        self, table: Table, meeting: Meeting, target: Target, *, compare: bool, event: Event
    ) -> None:
        self.table, self.meeting, self.target = table, meeting, target
        self.compare, self.event = compare, event
        self.device = table.device
        self.active: Save | None = None
        self.last: Save | None = None
        self.rate = 0.0
        self.mode = "host"
        self._copier = ThreadPoolExecutor(1, "ckptkit-copy")
        self._finisher = ThreadPoolExecutor(1, "ckptkit-save")
        self._streams: Streams = Streams()

    def adopt(self, plan: SavePlan) -> None:
        """Use a plan from now on: buffers, registrations, tables. Raises StoreError."""
        self.plan = plan
        self.buffers = list(self.target.prepare(plan))
        on_device = self.device.type == "cuda"
        if on_device:
            modes = {buffer.register(self.device) for buffer in self.buffers}
            self.mode = "bounce" if "bounce" in modes else "registered"
            self._streams = DeviceStreams(self.device, self.mode == "bounce")
            self.rate = copy_rate(self.device, self.buffers[0]) if self.buffers else 0.0
        self.shared = bool(self.compare and self.meeting.world > 1)
        self.retable()

    def retable(self) -> None:
        """Make anew what depends on where tensors are."""
        tensors = self.table.tensors
        known = [t if t is not None else torch.empty(0) for t in tensors]
        there = [move for move in self.plan.moves if tensors[move.holding] is not None]
        parts = parts_of(there, self.table.holdings, known)
        start = len(self.plan.header)
        self.snapshot = Snapshot(parts, self.device, start, self.plan.size - start)
        self.twins = Twins(self.plan.replicas if self.compare else (), self.table.holdings, tensors)
        self._filled = sorted((part.offset, part.offset + part.nbytes) for part in parts)
        for buffer in self.buffers:
            buffer.prepared = False
            self.snapshot.prepare(buffer)

    def _prepare(self, buffer: HostBuffer) -> None:
        """Header, and zeros where no copy goes."""
        header = torch.frombuffer(bytearray(self.plan.header), dtype=torch.uint8)
        buffer.tensor[: len(header)].copy_(header)
        at = len(header)
        for low, high in self._filled:
            if low > at:
                buffer.tensor[at:low].zero_()
            at = max(at, high)
        buffer.tensor[at : self.plan.size].zero_()
        buffer.prepared = True

    # ── the trainer's thread ─────────────────────────────────────────────────────────────────────────────────

    def start(self, step: int, finish: Finish, *, pin: bool = False, key: str, wait_s: float) -> Save:
        """Begin a save of the registered tensors as they are now.

        Raises:
            Skip: there is no free buffer.
            UsageError: a registered tensor was replaced.
        """
        self.fence()
        if self.table.refresh():
            self.retable()
        try:
            buffer = self.target.take(step, self.plan.size, wait_s)
        except Skip as skip:
            self._finisher.submit(self._decline, step, key, str(skip))
            raise
        try:
            if not buffer.prepared:
                self._prepare(buffer)
            save = Save(step, buffer, key, pin)
            self.snapshot.copy_late(buffer)
            if self.device.type == "cuda":
                save.ready = torch.cuda.Event()
                save.ready.record(torch.cuda.current_stream(self.device))
            save.marks = self.table.marks
        except BaseException:
            self.target.give(buffer, step, "not begun")
            raise
        self.active = self.last = save
        # The thread that waits comes first: the one that works would keep Python from this thread meanwhile.
        save.result = self._finisher.submit(self._finish, save, finish)
        self._copier.submit(self._copy, save)
        return save

    def fence(self) -> float:
        """Wait until the optimizer may change what is being saved; gives the seconds that took.

        On a device only the trainer's stream waits.
        """
        save, self.active = self.active, None
        if save is None:
            return 0.0
        began = time.perf_counter()
        save.copied.wait()
        self._judge(save)
        if save.done is not None and save.error is None:
            torch.cuda.current_stream(self.device).wait_event(save.done)
        save.stall_s = time.perf_counter() - began
        return save.stall_s

    def _judge(self, save: Save) -> None:
        """Once for a save, when all is copied or at the fence, whichever comes first: whether anything changed meanwhile."""
        with save.lock:
            if not save.judged:
                save.judged = True
                if save.error is None:
                    try:
                        self.table.check_unchanged(save.marks)
                    except CorruptionError as error:
                        save.fail(error)

    # ── threads of our own ───────────────────────────────────────────────────────────────────────────────────

    def _copy(self, save: Save) -> None:
        try:
            if self.device.type == "cuda":
                self._copy_from_device(save)
            else:
                self.snapshot.run(save.buffer, self._streams)
                self.twins.digest()
                save.numbers = [numbers_of(view)() for view in self.table.views]
                self._judge(save)
                if self.snapshot.digests is not None:
                    save.digests = self.snapshot.digests.numpy().copy()
        except BaseException as error:  # noqa: BLE001  (told to the trainer by way of the save)
            save.fail(error)
        finally:
            save.copy_s = time.perf_counter() - save.began
            save.copied.set()

    def _copy_from_device(self, save: Save) -> None:
        streams = self._streams
        assert isinstance(streams, DeviceStreams)
        for stream in (streams.packs, streams.copies):
            stream.wait_event(save.ready)
        began = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        began.record(streams.copies)
        with torch.cuda.device(self.device), torch.cuda.stream(streams.packs):
            self.twins.digest()
            self.snapshot.run(save.buffer, streams)
            fetches = [numbers_of(view) for view in self.table.views]
            streams.copies.wait_stream(streams.packs)
            ended.record(streams.copies)
        save.done = ended
        save.copied.set()  # the trainer's stream waits for the event; this thread waits for the bytes
        ended.synchronize()
        streams.drain(save.buffer)
        self._judge(save)
        save.device_copy_s = began.elapsed_time(ended) / 1e3
        save.numbers = [fetch() for fetch in fetches]
        if self.snapshot.digests is not None:
            save.digests = self.snapshot.digests.cpu().numpy().copy()

    def _finish(self, save: Save, finish: Finish) -> None:
        error: BaseException | None = None
        try:
            self._end(save, finish)
        except BaseException as failure:
            error = failure
            save.fail(failure)
            raise
        finally:
            self.on_end(save, error)  # before whoever waits for the save goes on

    def _end(self, save: Save, finish: Finish) -> None:
        save.copied.wait()
        if save.done is not None:
            # The copy thread drains bounce buffers after it let the trainer go on.
            self._copier.submit(lambda: None).result()
        verdict = Verdict()
        try:
            if self.shared:
                verdict = self._compare(save)
        except CkptError as error:
            save.fail(error)
        self._hand_over(save, finish, verdict)

    def _compare(self, save: Save) -> Verdict:
        found = self.twins.compare(self.meeting, f"{save.key}/twins")
        if found.differing:
            self.event({"event": "differing", "step": save.step, "lines": found.differing, "odd": found.odd})
        return found

    def _decline(self, step: int, key: str, why: str) -> None:
        """Take part in what the other ranks wait for, without anything to save."""
        with suppress(CkptError):
            if self.shared:
                Twins((), (), ()).compare(self.meeting, f"{key}/twins")
            self.target.decline(step, key, why)

    def _hand_over(self, save: Save, finish: Finish, verdict: Verdict) -> None:
        error = save.error
        extras = b""
        if error is None:
            try:
                extras = finish(save)
            except CkptError as fault:
                error = fault
        if verdict.differing and self.on_differing(verdict) and error is None:
            error = CorruptionError(line_of(verdict), ranks=list(verdict.odd))
        self.event(
            {"event": "staged" if error is None else "failed", "step": save.step, "why": str(error or "")}
        )
        leaves = self.snapshot.device_leaves
        self.target.finish(
            Filled(self.plan, save.buffer, save.step, save.digests, leaves, extras, save.pin, save.key, error)
        )
        self.event({"event": "committed" if not self.target.levels else "written", "step": save.step})

    on_end: Callable[[Save, BaseException | None], None] = staticmethod(lambda save, error: None)
    """Told when a save has ended, and how."""

    on_differing: Callable[[Verdict], bool] = staticmethod(lambda verdict: False)
    """Whether a save whose replicas differ fails."""

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────

    def wait(self, timeout_s: float) -> None:
        """Wait for the last save. Raises what it failed with, StoreError where it takes longer."""
        save = self.last
        if save is None:
            return
        try:
            save.result.result(timeout_s)
        except TimeoutError:
            if save.result.done():
                raise
            raise StoreError(f"the save of step {save.step} took longer than {timeout_s:g} s") from None

    def drain(self, timeout_s: float) -> None:
        """Let the last save end, however it ends, before the plan changes."""
        self.fence()
        if self.last is not None:
            wait([self.last.result], timeout_s)

    def close(self) -> None:
        """End the threads, after what they have begun."""
        with suppress(CkptError) if self.active is None else nullcontext():
            self.fence()
        self._copier.shutdown()
        self._finisher.shutdown()
