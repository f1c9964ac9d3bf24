"""Writing this node's shards of a version to durable storage, in the background.

Bytes go from the slot to the store in pieces that are compared with their digests on the way. A rank's `.digests` is written after its other
files, so that a restarted daemon knows which ranks are done. Failures are tried again, for ever, until the version is no longer wanted.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ckptkit.cache.copies import wrong_leaves
from ckptkit.cache.durable import DurableRun
from ckptkit.cache.events import Drained, Scrubbed
from ckptkit.cache.logs import Log
from ckptkit.cache.messages import SlotRecord, Version
from ckptkit.cache.throttle import Throttle
from ckptkit.cache.tmpfs import Tmpfs
from ckptkit.core.catalog import LEAF
from ckptkit.errors import CkptError, CorruptionError, InterruptedRunError, ShardMissingError, StoreError
from ckptkit.formats.native import step_dir
from ckptkit.formats.native_columns import file_name
from ckptkit.formats.native_digests import RankDigests
from ckptkit.formats.native_manifest import INDEX, digests_name, extras_name

_PIECE = 8 << 20
_AT_ONCE = 4
"""Ranks that are written at the same time."""


@dataclass
class _Job:
    version: Version
    records: Sequence[SlotRecord]
    began: float = field(default_factory=time.monotonic)
    stop: threading.Event = field(default_factory=threading.Event)


class Drainer:
    """Drains of one node, one version at a time.

    Args:
        done: Told `Drained` at the end and for every failure, and `Scrubbed` where a slot's bytes are bad; from another thread.
        over: Told the records of a drain that has ended, however it did.
        moved, mismatch: For metrics: bytes written; a leaf that differed.
        pause_s: First and longest pause between tries.
    """

    def __init__(
        self, tmpfs: Tmpfs, run: DurableRun, throttle: Throttle, log: Log, *, done: Callable[[Drained | Scrubbed], None],
        over: Callable[[Sequence[SlotRecord], float], None], moved: Callable[[int], None], mismatch: Callable[[], None],
        pause_s: tuple[float, float] = (1.0, 60.0),
    ) -> None:  # fmt: skip
        self._tmpfs, self._run, self._throttle, self._log = tmpfs, run, throttle, log
        self._done, self._over, self._moved, self._mismatch = done, over, moved, mismatch
        self._pause_s = pause_s
        self._job: _Job | None = None
        self._thread: threading.Thread | None = None

    def drain(self, version: Version, records: Sequence[SlotRecord]) -> None:
        """Begin. The slots are held by whoever calls, until `over` is told."""
        before, thread = self._job, self._thread
        if before is not None:
            before.stop.set()
        self._job = _Job(version, records)
        self._thread = threading.Thread(
            target=self._keep_trying, args=(self._job, thread), name="drain", daemon=True
        )
        self._thread.start()

    def cancel(self, version: Version) -> None:
        if self._job is not None and self._job.version == version:
            self._job.stop.set()

    def close(self) -> None:
        """Stop within a piece; what is whole stays and is not written again."""
        if self._job is not None:
            self._job.stop.set()
        if self._thread is not None:
            self._thread.join()

    def _keep_trying(self, job: _Job, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        pause, longest = self._pause_s
        try:
            while not job.stop.is_set():
                try:
                    self._write(job)
                except InterruptedRunError:
                    return
                except CkptError as error:
                    self._log(
                        "drain failed",
                        step=job.version.step,
                        epoch=job.version.epoch,
                        reason=str(error),
                        again_in_s=pause,
                    )
                    self._done(Drained(job.version, str(error)[:900]))
                    job.stop.wait(pause)
                    pause = min(2 * pause, longest)
                    continue
                self._done(Drained(job.version))
                return
        finally:
            self._over(job.records, time.monotonic() - job.began)

    def _write(self, job: _Job) -> None:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="drain") as pool:
            futures = [pool.submit(self._rank, job, record) for record in job.records]
            faults = [fault for future in futures if (fault := future.exception()) is not None]
        if faults:
            raise (
                faults[0]
                if isinstance(faults[0], CkptError)
                else StoreError(f"{type(faults[0]).__name__}: {faults[0]}")
            ) from faults[0]

    def _rank(self, job: _Job, record: SlotRecord) -> None:
        folder, name = self._run.folder, file_name(record.rank)
        step = step_dir(job.version.step, job.version.epoch)
        raw = self._tmpfs.read_side(record.slot, "digests")
        digests = RankDigests.parse(f"slot {record.slot}", raw)
        if record.rank == 0:
            index = self._tmpfs.read_index(record.index_hash)
            if index is None:
                raise StoreError(f"the index {record.index_hash} is not on this node")
            if folder.size(f"{step}/{INDEX}") != len(index):
                folder.write_small(f"{step}/{INDEX}", index)
        try:
            if (
                folder.read(f"{step}/{digests_name(name)}") == raw
                and folder.size(f"{step}/{name}") == record.used
            ):
                return  # by the daemon that ran before
        except ShardMissingError:
            pass
        with self._tmpfs.mapped(record.slot, record.used) as view:
            folder.write_file(f"{step}/{name}", record.used, self._pieces(job, record, digests, view))
        folder.write_small(f"{step}/{extras_name(name)}", self._tmpfs.read_side(record.slot, "extras"))
        folder.write_small(f"{step}/{digests_name(name)}", raw)

    def _pieces(
        self, job: _Job, record: SlotRecord, digests: RankDigests, view: memoryview
    ) -> Iterator[memoryview]:
        """The rank file in pieces of whole leaves, each compared before it is written, the next while one is written. Raises CorruptionError."""
        ends = [*range(digests.data_start + _PIECE, record.used, _PIECE), record.used]
        ranges = list(zip([0, *ends[:-1]], ends, strict=True))

        def check(low: int, high: int) -> tuple[int, ...]:
            return tuple(wrong_leaves(digests, low, view[low:high]))

        with ThreadPoolExecutor(1, thread_name_prefix="drain-check") as checker:
            checked = checker.submit(check, *ranges[0])
            for (low, high), after in zip(ranges, [*ranges[1:], None], strict=True):
                if job.stop.is_set():
                    raise InterruptedRunError("the drain was stopped")
                bad = checked.result()
                if bad:
                    self._mismatch()
                    self._done(Scrubbed(record.slot, record.seq, bad))
                    raise CorruptionError(
                        f"leaf {bad[0]} of rank {record.rank} in slot {record.slot} differs from its digest"
                    )
                if after is not None:
                    checked = checker.submit(check, *after)
                self._throttle.take(high - low)
                yield view[low:high]
                self._moved(high - low)


assert _PIECE % LEAF == 0
