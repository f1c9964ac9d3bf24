"""Fetching shards into slots: copies for other nodes, and landings of a restore. Also the repair of bad leaves.

Ranges of 64 MiB go over several connections from the socket straight into the slot; every leaf is compared as it arrives. What was verified is
noted in a bitmap that outlives the daemon. Fetching yields to saves and keeps to a rate.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import xxhash

from ckptkit.cache.copies import Copy, digests_of, extras_of, fill, wrong_leaves
from ckptkit.cache.events import Pulled, PullProgress, PullShard, Repaired, RepairSlot
from ckptkit.cache.hashing import leaf_digest, leaf_range
from ckptkit.cache.messages import Version
from ckptkit.cache.throttle import Gate, Throttle
from ckptkit.cache.tmpfs import Tmpfs
from ckptkit.core.catalog import LEAF
from ckptkit.errors import CkptError, CorruptionError
from ckptkit.formats.native_digests import RankDigests

_NOTE_BYTES = 1 << 30
"""Progress is stored after this much."""


class CancelledError(CkptError):
    """Nobody wants the copy any more."""


@dataclass
class _Job:
    effect: PullShard
    copies: Sequence[Copy]
    cancelled: threading.Event = field(default_factory=threading.Event)


class Puller:
    """Fetches shards, the oldest request first, two at a time.

    Args:
        slot_bytes: Capacity of slots.
        conns: Connections for one shard.
        request: Bytes of one request; a multiple of a leaf.
        gate: Closed while ranks save.
        index: Makes sure that an index is here, fetching it from peers; raises CkptError.
        done: Told events, from another thread.
        mismatch, moved: For metrics: a leaf that differed; bytes that came.
    """

    def __init__(
        self, tmpfs: Tmpfs, *, conns: int, request: int, throttle: Throttle, gate: Gate, patience_s: float,
        index: Callable[[str, Sequence[str], Version], None], done: Callable[[Pulled | PullProgress | Repaired], None],
        mismatch: Callable[[], None], moved: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._tmpfs, self._conns, self._request = tmpfs, conns, request
        self._throttle, self._gate, self._patience_s = throttle, gate, patience_s
        self._index, self._done, self._mismatch, self._moved = index, done, mismatch, moved
        self.slot_bytes = 0
        self._jobs: dict[tuple[int, int], _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="pull")
        self._ranges = ThreadPoolExecutor(2 * conns, thread_name_prefix="range")
        self._closed = False

    def pull(self, effect: PullShard, copies: Sequence[Copy]) -> None:
        """Begin a pull; ends in `Pulled`."""
        job = _Job(effect, copies)
        with self._lock:
            if self._closed:
                return
            self._jobs[effect.slot, effect.seq] = job
            self._waiting.append(job)
        self._workers.submit(self._next)

    def cancel(self, slot: int, seq: int) -> None:
        job = self._jobs.get((slot, seq))
        if job is not None:
            job.cancelled.set()

    def close(self) -> None:
        """Stop; pulls under way end without an event, and go on when the daemon starts again."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
        for job in list(self._jobs.values()):
            job.cancelled.set()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._ranges.shutdown(wait=True, cancel_futures=True)

    def _next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            job = self._waiting.popleft()
        effect, reason, used = job.effect, "", 0
        try:
            used = self._run(job)
        except CkptError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001  (a slot must never stay WRITING because of a fault of ours)
            reason = f"{type(error).__name__}: {error}"
        self._jobs.pop((effect.slot, effect.seq), None)
        if not self._closed:
            self._done(Pulled(effect.slot, effect.seq, reason[:900], used))

    def _run(self, job: _Job) -> int:
        """Fetch a shard; gives the size of its rank file. Raises CkptError."""
        effect = job.effect
        raw, digests = digests_of(job.copies, effect.shard.digest)
        version = effect.shard.version
        ours = (
            digests.rank,
            digests.world,
            digests.index.hex(),
            digests.step,
            digests.epoch,
            digests.incarnation.hex(),
        )
        theirs = (
            effect.shard.rank, effect.shard.world, effect.shard.index_hash, version.step, version.epoch, version.inc,
        )  # fmt: skip
        if ours != theirs:
            raise CorruptionError(
                f"the digests of rank {effect.shard.rank} of {version} are of another shard"
            )
        used = digests.data_start + digests.data_size
        if used > self.slot_bytes:
            raise CorruptionError(f"{used} bytes do not fit into a slot of {self.slot_bytes}")
        extras = extras_of(job.copies, digests)
        self._index(effect.shard.index_hash, effect.sources, version)
        with self._tmpfs.mapped(effect.slot, self.slot_bytes, writable=True) as view:
            self._ranges_of(job, digests, view)
        self._tmpfs.write_side(effect.slot, "extras", extras)
        self._tmpfs.write_side(effect.slot, "digests", raw)
        return used

    def _ranges_of(self, job: _Job, digests: RankDigests, view: memoryview) -> None:
        used = digests.data_start + digests.data_size
        count = max(1, -(-digests.data_size // self._request))
        done = bytearray(-(-count // 8))
        known = bytes.fromhex(job.effect.bitmap)[: len(done)] if job.effect.bitmap else b""
        lock = threading.Lock()
        unsaved = 0

        def one(number: int) -> None:
            nonlocal unsaved
            low = 0 if number == 0 else digests.data_start + number * self._request
            high = min(digests.data_start + (number + 1) * self._request, used)
            part = view[low:high]
            if not (
                number // 8 < len(known)
                and known[number // 8] >> number % 8 & 1
                and _right(digests, low, high, view)
            ):
                self._may_go_on(job)
                self._throttle.take(high - low)
                fill(job.copies, digests, low, part, told=self._told)
                self._moved(high - low)
            with lock:
                done[number // 8] |= 1 << number % 8
                unsaved += high - low
                if unsaved >= _NOTE_BYTES and not self._closed:
                    unsaved = 0
                    self._done(PullProgress(job.effect.slot, job.effect.seq, done.hex()))

        pending = deque(range(count))
        running: set[Future[None]] = set()
        try:
            while pending or running:
                while pending and len(running) < self._conns:
                    running.add(self._ranges.submit(one, pending.popleft()))
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
        except BaseException:
            job.cancelled.set()
            wait(running)
            raise

    def _may_go_on(self, job: _Job) -> None:
        """Wait while ranks save, but not for ever: one that hangs must not end all copying."""
        if job.cancelled.is_set():
            raise CancelledError("the copy is not wanted any more")
        self._gate.wait(self._patience_s)
        if job.cancelled.is_set():
            raise CancelledError("the copy is not wanted any more")

    def _told(self, copy: Copy, leaf: int, why: str) -> None:
        if leaf != -2:
            self._mismatch()

    # ── repair ───────────────────────────────────────────────────────────────────────────────────────────────

    def repair(self, effect: RepairSlot, copies: Sequence[Copy]) -> None:
        """Replace bad leaves; ends in `Repaired`."""
        if not self._closed:
            self._workers.submit(self._repair, effect, copies)

    def _repair(self, effect: RepairSlot, copies: Sequence[Copy]) -> None:
        try:
            outcome = self._replace(effect, copies)
        except Exception:  # noqa: BLE001  (whatever it is, the copy stays unusable)
            outcome = "no_source"
        if not self._closed:
            self._done(Repaired(effect.slot, effect.seq, outcome))

    def _replace(self, effect: RepairSlot, copies: Sequence[Copy]) -> str:
        raw, digests = self._own_digests(effect, copies)
        again = False
        with self._tmpfs.mapped(effect.slot, self.slot_bytes, writable=True) as view:
            for leaf in effect.bad_leaves:
                low, high = leaf_range(digests, leaf)
                data = memoryview(bytearray(high - low))
                fill(copies, digests, low, data)
                view[low:high] = data
                again |= xxhash.xxh3_128_digest(view[low:high]) != leaf_digest(digests, leaf)
        self._tmpfs.write_side(effect.slot, "digests", raw)
        if again:
            return "still_bad"
        try:
            sound = xxhash.xxh3_128_digest(self._tmpfs.read_side(effect.slot, "extras")) == digests.extras
        except CkptError:
            sound = False
        if not sound:
            self._tmpfs.write_side(effect.slot, "extras", extras_of(copies, digests))
        return "ok"

    def _own_digests(self, effect: RepairSlot, copies: Sequence[Copy]) -> tuple[bytes, RankDigests]:
        """The slot's digests, or a peer's where they are what was damaged."""
        try:
            raw = self._tmpfs.read_side(effect.slot, "digests")
            found = RankDigests.parse(f"slot {effect.slot}", raw)
            if found.content.hex() == effect.shard.digest:
                return raw, found
        except CkptError:
            pass
        return digests_of(copies, effect.shard.digest)


def _right(digests: RankDigests, low: int, high: int, view: memoryview) -> bool:
    return next(wrong_leaves(digests, low, view[low:high]), None) is None


assert _NOTE_BYTES % LEAF == 0
