"""Running a plan: from proven copies to a folder in place.

Order of events: the source's identities are noted; replicas are compared; the unfinished folder is opened or taken over;
slabs are assembled, and segments become durable as they complete; computed fields are filled in; the source is looked at
again; small files are written, the marker last; the folder is renamed. Up to the rename nobody can take the result for a
checkpoint, and after it the result is whole.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit import stores
from ckptkit.core.catalog import LEAF, Checksum
from ckptkit.core.copies import Copies, copies_into, replica_pairs
from ckptkit.core.destination import Destination, Written
from ckptkit.core.dtypes import TABLE
from ckptkit.core.plan import Plan
from ckptkit.engine.convert import check_cast
from ckptkit.engine.executor import run_tasks
from ckptkit.engine.grids import Grid
from ckptkit.engine.journal import Durable, Journal, plan_hash
from ckptkit.engine.mover import Mover, Worker
from ckptkit.engine.ordered import OrderedWriter
from ckptkit.engine.parts import files_of, share_of
from ckptkit.engine.replicas import Comparer
from ckptkit.engine.schedule import Schedule, make_schedule
from ckptkit.engine.shapes import Shape, choose_shape
from ckptkit.engine.sharing import Base, share_unchanged, share_written
from ckptkit.engine.sources import Sources
from ckptkit.engine.syncer import Syncer
from ckptkit.engine.unchanged import copy_unchanged
from ckptkit.engine.ways import Way
from ckptkit.engine.writer import Outputs, Writer
from ckptkit.errors import CkptError, InterruptedRunError, StoreError, UsageError
from ckptkit.stores.base import Store
from ckptkit.stores.folder import Folder
from ckptkit.stores.parts import Part, PartFolder

Progress = Callable[[int, int], None]


@dataclass
class RunResult:
    """What a run did.

    Attributes:
        written: Every file of the destination's catalog (or of the part), in its order.
        committed: Whether the destination is in place. A part may have to wait for others, `waiting_for`.
        bytes_in: Read from the source by this run; more than `bytes_out` where blocks had to be read twice.
        bytes_out: Bytes of the destination, small files included.
        reused_bytes: Of these, durable since an earlier run that was interrupted.
        cloned_bytes: Of these, shared with the source's files by the file system.
        shared_bytes: Of these, hard-linked to files of the base (some of them after they were written).
        compared_bytes: Bytes of replicas that were compared.
        overflows: Finite values that a cast by this run made infinite or NaN.
        checked_leaves: Leaves of the source that were compared with their digests.
        direct: Whether writes bypassed the page cache at the end.
        threads: As chosen.
        seconds: Wall-clock time.
        notes: What a user should know (work of an earlier run that was thrown away, ...).
    """

    written: list[Written] = field(default_factory=list)
    committed: bool = True
    waiting_for: list[int] = field(default_factory=list)
    bytes_in: int = 0
    bytes_out: int = 0
    reused_bytes: int = 0
    cloned_bytes: int = 0
    shared_bytes: int = 0
    compared_bytes: int = 0
    overflows: int = 0
    checked_leaves: int = 0
    direct: bool = False
    threads: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def run(
    plan: Plan,
    destination: Destination,
    source_store: Store,
    target: str,
    *,
    threads: int | None = None,
    memory: int = 256 << 20,
    direct: bool | str = "auto",
    replicas: str = "check",
    restart: bool = False,
    overwrite: bool = False,
    part: Part | None = None,
    base: Base | None = None,
    progress: Progress | None = None,
    verify_source: bool = True,
    sums: Iterable[Checksum] = (),
    sync_every_s: float = 1.0,
) -> RunResult:
    """Write the destination of `plan` at `target`, which appears whole or not at all.

    A run that was interrupted goes on when it is called again with the same plan and an unchanged source: segments that
    were durable are kept. The result is the same, bit for bit, as that of a run in one go.

    Args:
        plan: From `make_plan(source, destination.catalog)`.
        destination: Laid out: every file has a path, a size and a data start.
        source_store: Holds the files of `plan.source`.
        target: Path of a folder that does not exist, is empty, or may be replaced (`overwrite`).
        threads: Workers; chosen by CPUs, cgroup and file system unless given.
        memory: Bytes of buffers, for all workers together.
        direct: Whether writes bypass the page cache: True, False, or `auto` (on a disk whatever is faster; see `ckptkit.engine.ways`).
        replicas: `check` compares pieces that hold the same elements; `first` takes the first.
        restart: Forget what an interrupted run left.
        part: Write only this part's share of the files, beside other processes that write theirs; whichever of them
            is the last puts the folder in place. Local destinations only, which all of them see.
        base: An earlier checkpoint, on the file system of `target`, whose files are shared where they are equal.
        progress: Called on this thread about ten times a second with bytes done and in all.
        verify_source: Compare every leaf that is read with its digest, where the source has digests. Files that are
            copied whole are checked too; their digests are taken over.
        sums: Checksums that the source's files state of themselves: those of ranges that are read are compared.
        sync_every_s: At most about so much work is lost when the machine stops.

    Raises:
        UsageError: an argument that makes no sense.
        LayoutError: the plan asks for a cast that cannot be.
        FormatError, ShardMissingError, CorruptionError: the source is unusable, changed, or disagrees with itself. What
            was written is removed.
        StoreError: the destination failed. What is durable is kept for the next call.
        InterruptedRunError: KeyboardInterrupt; likewise.
    """
    if replicas not in ("check", "first"):
        raise UsageError(f"replicas={replicas!r}: choose check or first")
    if direct not in (True, False, "auto"):
        raise UsageError(f"direct={direct!r}: choose True, False or 'auto'")
    if part is not None and (overwrite or stores.local_path(target) is None):
        raise UsageError("parts are written to a local path (a shared file system) that does not exist yet")
    began = time.monotonic()
    stores.check_target(target, overwrite)
    copies = copies_into(plan)
    _check_casts(copies)
    pairs = replica_pairs(plan) if replicas == "check" else None
    sources = Sources(source_store, plan.source, verify=verify_source, sums=sums)
    job = _Job(
        plan,
        destination,
        sources,
        target,
        copies,
        threads,
        memory,
        direct,
        progress or (lambda done, total: None),
        part,
        base,
    )
    try:
        used = [copies.src_file] + ([pairs.src_file, pairs.dst_file] if pairs is not None else [])
        sources.note_identities(np.unique(np.concatenate(used)))
        if pairs is not None and len(pairs):
            job.compare(share_of(pairs, part))
        job.write(restart, overwrite, sync_every_s)
    except KeyboardInterrupt:
        done = (
            f"{job.durable_bytes:,} of {job.total:,} bytes are durable"
            if job.total
            else "nothing was written"
        )
        raise InterruptedRunError(
            f"interrupted; {done}. Run the same command to go on (or with --restart to start over)",
            file=target,
        ) from None
    finally:
        sources.close()
    job.result.seconds = time.monotonic() - began
    return job.result


class _Job:
    """One call of `run`."""

    def __init__(
        self,
        plan: Plan,
        destination: Destination,
        sources: Sources,
        target: str,
        copies: Copies,
        threads: int | None,
        memory: int,
        direct: bool | str,
        progress: Progress,
        part: Part | None,
        base: Base | None,
    ) -> None:
        self.part, self.base = part, base
        self.plan, self.destination, self.sources, self.target = plan, destination, sources, target
        self.copies, self.threads, self.memory, self.direct = copies, threads, memory, direct
        self.progress = progress
        self.result = RunResult()
        self.stop = threading.Event()
        sizes = np.asarray([file.size for file in destination.catalog.files], np.int64)
        self.every_byte = int(sizes.sum())
        self.mine = np.ones(len(sizes), bool) if part is None else files_of(sizes, part)
        self.total = int(sizes[self.mine].sum())
        self.durable_bytes = 0
        self.blocks = _source_grid(sources)

    def compare(self, pairs: Copies) -> None:
        """Compare replicas. Raises CorruptionError for the first pair that differs."""
        shape = self._shape(direct=False)
        shape = replace(shape, task=min(shape.task, 8 * LEAF))
        slabs = _source_grid(self.sources)
        every = np.ones(slabs.cells, bool)
        comparer = Comparer(
            self.sources,
            make_schedule(pairs, slabs, self.blocks, every, shape.task, only_used=True, fold=False),
            self.stop,
        )
        self._run(comparer, shape, lambda: None)
        self.result.compared_bytes = comparer.compared

    def write(self, restart: bool, overwrite: bool, sync_every_s: float) -> None:
        """Write, commit, and fill in the result."""
        plan = plan_hash(self.copies, self.destination)
        source = xxhash.xxh3_128_hexdigest(repr(sorted(self.sources.identities.items())).encode())
        notes = self.result.notes
        # The source is part of the name, so that work on another version of it is never taken up.
        name = xxhash.xxh3_64_hexdigest((plan + source).encode())[:12]
        folder: Folder
        if self.part is not None:
            self.copies = self.copies.take(np.flatnonzero(self.mine[self.copies.dst_file]))
            folder = PartFolder(stores.local_path(self.target) or "", name, self.part, note=notes.append)
        else:
            room = self.memory - self.memory // 3
            folder = stores.create_folder(
                self.target, name, overwrite=overwrite, note=notes.append, memory=room
            )
        try:
            self._write(folder, Journal(folder, plan, source), restart, sync_every_s)
        except (StoreError, KeyboardInterrupt):
            raise  # what is durable stays, for the next call
        except CkptError:
            folder.discard()
            raise
        finally:
            folder.close()

    def _write(self, folder: Folder, journal: Journal, restart: bool, sync_every_s: float) -> None:
        result, destination = self.result, self.destination
        way = Way(None if folder.direct else False) if self.direct == "auto" else Way(bool(self.direct))
        outputs = Outputs(folder, destination, way)
        durable = None if restart or not folder.resumed else self._durable(folder, journal)
        if folder.resumed and durable is None:
            folder.restart()
        # The fresh journal must not vouch for files that are gone and are written anew.
        durable = outputs.restore(durable or [])
        shape = self._shape(direct=way.possible, ordered=folder.ordered)
        try:
            try:
                folder.check_space(self.every_byte)
            except StoreError:
                if not durable:
                    folder.discard()
                raise
            journal.start(durable)
            shared: list[int] = []
            if self.base is not None:
                shared = share_unchanged(self.base, self.plan, self.copies, self.sources, outputs)
                self._keep(outputs, journal, shared)
                result.shared_bytes = sum(int(outputs.sizes[number]) for number in shared)
            cloned = copy_unchanged(self.plan, destination, self.copies, self.sources, outputs)
            outputs.sync(cloned)
            self._keep(outputs, journal, cloned)
            result.cloned_bytes = sum(int(outputs.sizes[number]) for number in cloned)
            self._assemble(outputs, journal, shape, sync_every_s)
            if result.overflows:
                result.notes.append(
                    f"{result.overflows:,} finite values lie beyond the range of the type they were cast to, and became "
                    "infinite or NaN; choose a wider --dtype to keep them"
                )
            result.direct, result.threads = way.direct, shape.threads
            if self.base is not None:
                left = sorted(set(np.flatnonzero(self.mine).tolist()) - {*shared, *outputs.fixups})
                late = share_written(self.base, outputs, left)
                result.shared_bytes += sum(int(outputs.sizes[number]) for number in late)
            if isinstance(folder, PartFolder):
                self._end_part(folder, journal, outputs)
            else:
                self.sources.judge_sums()
                self._commit(folder, outputs)
        finally:
            outputs.files.close()

    def _durable(self, folder: Folder, journal: Journal) -> list[Durable] | None:
        """What is durable of the files to be written, whoever wrote it."""
        if not isinstance(folder, PartFolder):
            return journal.read()
        return [row for row in journal.read_all(folder.logs()) if self.mine[row.file]]

    def _keep(self, outputs: Outputs, journal: Journal, numbers: list[int]) -> None:
        """Tell the journal of files that are durable as a whole."""
        segments = [s for number in numbers for s in outputs.segments_of(number)]
        if segments:
            journal.append(outputs.durable(segment) for segment in segments)
            outputs.done[segments] = True

    def _commit(self, folder: Folder, outputs: Outputs) -> None:
        """Fill in what is computed, and put the folder in place."""
        outputs.apply_fixups()
        outputs.sync_all()
        self.sources.check_unchanged()
        written = outputs.result()
        small = list(self.destination.finish(written))
        for path, content in small[:-1]:
            folder.write_small(path, content)
        self.result.bytes_out = self.total + sum(len(content) for _, content in small)
        if self.part is None:
            self.result.written = written
        outputs.files.close()
        folder.commit(small[-1] if small else None)

    def _end_part(self, folder: PartFolder, journal: Journal, outputs: Outputs) -> None:
        """Say that this part is done; put the folder in place if it was the last."""
        result = self.result
        outputs.sync(np.flatnonzero(self.mine & (outputs.sizes == 0)).tolist() + list(outputs.unsynced))
        self.sources.judge_sums()
        self.sources.check_unchanged()
        result.written = [w for w, mine in zip(outputs.result(), self.mine, strict=True) if mine]
        result.bytes_out = self.total
        outputs.files.close()
        folder.mark_done()
        with folder.last():
            if folder.gone:
                return
            result.waiting_for = folder.missing()
            result.committed = not result.waiting_for
            if not result.committed:
                return
            whole = Outputs(folder, self.destination, outputs.way)
            try:
                whole.restore(journal.read_all(folder.logs()))
                if not whole.done.all():
                    raise StoreError(
                        f"all parts of {self.target} are done, but not all of what they wrote is there any more: run every part again",
                        file=self.target,
                    )
                self._commit(folder, whole)
            finally:
                whole.files.close()

    def _assemble(self, outputs: Outputs, journal: Journal, shape: Shape, sync_every_s: float) -> None:
        """Write every slab that is not durable yet."""
        result = self.result
        slabs, wanted, schedule = self._schedule(outputs, shape)
        start, stop = slabs.bounds(np.arange(slabs.cells))
        base = int((stop - start)[~wanted & self.mine[slabs.file(np.arange(slabs.cells))]].sum())
        result.reused_bytes = self.durable_bytes = reused = base - result.cloned_bytes - result.shared_bytes
        kind = OrderedWriter if outputs.folder.ordered else Writer
        writer = kind(self.sources, schedule, self.stop, outputs)
        syncer = Syncer(writer, journal, self.stop, sync_every_s)
        syncer.start()
        try:
            self._run(writer, shape, lambda: self.progress(base + writer.done_bytes, self.total))
        finally:
            # What is complete is worth keeping, whatever happened.
            error = syncer.end()
            self.durable_bytes = reused + syncer.bytes
        if error is not None:
            raise error
        self.progress(base + writer.done_bytes, self.total)

    def _schedule(self, outputs: Outputs, shape: Shape) -> tuple[Grid, npt.NDArray[np.bool_], Schedule]:
        """The slabs of a size, which of them are to be written, and in which order."""
        slabs = Grid(outputs.sizes, outputs.origins, LEAF)
        files = slabs.file(np.arange(slabs.cells))
        start, _ = slabs.bounds(np.arange(slabs.cells))
        wanted = ~outputs.done[outputs.segment(files, start)] & self.mine[files]
        waves = None
        if outputs.folder.ordered:
            left = np.zeros(len(outputs.sizes), bool)
            left[files[wanted]] = True
            at_once = outputs.folder.open_files(outputs.sizes[left].tolist())
            waves = (np.cumsum(left) - 1) // at_once
        schedule = make_schedule(self.copies, slabs, self.blocks, wanted, shape.task, waves=waves)
        return slabs, wanted, schedule

    def _shape(self, *, direct: bool, ordered: bool = False) -> Shape:
        readers = self.sources.store.readers
        return choose_shape(self.total, self.threads, self.memory, readers, direct=direct, ordered=ordered)

    def _run(self, mover: Mover, shape: Shape, tick: Callable[[], None]) -> None:
        workers = [Worker(LEAF) for _ in range(min(shape.threads, max(mover.schedule.tasks, 1)))]
        try:
            run_tasks(
                mover.schedule.tasks,
                len(workers),
                lambda task, number: mover.run_task(task, workers[number]),
                self.stop,
                tick,
                window=shape.window,
            )
        finally:
            self.result.bytes_in += sum(worker.bytes_in for worker in workers)
            self.result.overflows += sum(worker.overflows for worker in workers)
            self.result.checked_leaves = self.sources.checked


def _check_casts(copies: Copies) -> None:
    cast = copies.src_dtype != copies.dst_dtype
    for source, destination in set(
        zip(copies.src_dtype[cast].tolist(), copies.dst_dtype[cast].tolist(), strict=True)
    ):
        check_cast(TABLE[source], TABLE[destination])


def _source_grid(sources: Sources) -> Grid:
    files = sources.catalog.files
    sizes: npt.NDArray[np.int64] = np.asarray([file.size for file in files], np.int64)
    return Grid(sizes, np.asarray([file.data_start for file in files], np.int64), LEAF)
