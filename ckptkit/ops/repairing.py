"""Repair of native checkpoints: damaged parts are made again from what is left, or from another copy.

A rank file that is damaged is written anew beside the old one: its good leaves as they are, the bad ones assembled from the other
copy, which may have any format and layout. It takes the old one's place only if its digest is the one that was written down when
the checkpoint was; so repair never changes what a checkpoint holds, and may be killed and run again at any time.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Event

import numpy as np
import numpy.typing as npt

from ckptkit import stores
from ckptkit.core.boxes import ranges
from ckptkit.core.catalog import ITEMSIZE, LEAF, Catalog, Entries, File
from ckptkit.core.copies import copies_into
from ckptkit.core.plan import make_plan
from ckptkit.engine.digests import digest
from ckptkit.engine.executor import run_tasks, usable_cpus
from ckptkit.engine.fill import fill
from ckptkit.engine.sources import Sources
from ckptkit.errors import CkptError, StoreError, UsageError
from ckptkit.formats.native_manifest import INDEX, NAME, digests_name, extras_name
from ckptkit.formats.native_repair import Remains, remains
from ckptkit.ops.reports import Progress, Report, count_text
from ckptkit.ops.sources import Source, open
from ckptkit.stores.durable import OutFile, sync_folder, write_fault

__all__ = ["RepairReport", "repair"]


@dataclass
class RepairReport(Report):
    """What was wrong, what was repaired, and what is left.

    Attributes:
        found, repaired, left: Sentences that name file and leaves.
        source: The other copy, where one was given.
        leaves_checked: Leaves that were compared with their digests.
        bytes_written: In this run.
        exit_code: 0 when the checkpoint is whole now; 1 when something is left.
    """

    url: str
    source: str = ""
    dry_run: bool = False
    found: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    leaves_checked: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 1 if self.left or (self.dry_run and self.found) else 0

    def summary(self) -> str:
        lines = [f"repaired: {text}" for text in self.repaired] + [f"left: {text}" for text in self.left]
        head = f"{self.url}: {count_text(len(self.found), 'fault')} found"
        return "\n".join([head, *lines, *self.notes])


def repair(
    path: str,
    *,
    source: str | None = None,
    rebuild_manifest: bool = False,
    model: str | None = None,
    config: str | Mapping[str, object] | None = None,
    threads: int | None = None,
    memory: int = 256 << 20,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RepairReport:
    """Read every byte of a native checkpoint, and mend what is not as it was written.

    Args:
        path: The checkpoint's own folder (one step of a run), on a local file system.
        source: Another copy of the same values, in any format and layout, or a run's step. Index, digest files and headers
            are repaired without one; data is not.
        rebuild_manifest: Make a manifest that is lost of the ranks' digest files, all of which must be there and agree. That every
            rank was written is then certain; that the writer meant to commit is your word.
        model, config: Of `source`, as `ckptkit.ops.open` takes them.
        dry_run: Only say what is wrong.

    Raises:
        UsageError: `path` is no local folder.
        FormatError: it is no native checkpoint, or too much of it is lost to tell what it was.
        StoreError: it cannot be written.
    """
    began = time.monotonic()
    folder = stores.local_path(path)
    if folder is None or not os.path.isdir(folder):
        raise UsageError(f"{path}: give the local folder of one checkpoint (RUN/step-00001200.e3)")
    folder = os.path.abspath(folder)
    report = RepairReport(folder, dry_run=dry_run)
    left = remains(stores.open_store(folder), rebuild_manifest=rebuild_manifest)
    report.found += left.problems
    other = None if source is None else open(source, model=model, config=config)
    report.source = other.url if other is not None else ""
    bad = _look(left, report, threads, progress)
    if dry_run:
        report.seconds = time.monotonic() - began
        return report
    _Mender(folder, left, bad, other, report, threads, memory).run()
    report.seconds = time.monotonic() - began
    return report


@dataclass
class _State:
    """The data of one rank file as it is: digests of its leaves, and which are not what they should be."""

    leaves: npt.NDArray[np.uint8]
    wrong: list[int]
    rewrite: bool


def _look(
    left: Remains, report: RepairReport, threads: int | None, progress: Progress | None
) -> list[_State]:
    """Read every leaf that is there; several files at a time."""
    total = sum(rank.listed.size for rank in left.ranks)
    read = [0] * len(left.ranks)
    states: dict[int, _State] = {}

    def one(number: int, worker: int) -> None:
        def tell(nbytes: int) -> None:
            read[number] += nbytes

        states[number] = _look_at(left, number, tell)

    def tick() -> None:
        if progress is not None:
            progress(sum(read), total)

    run_tasks(len(left.ranks), min(threads or usable_cpus(), len(left.ranks)), one, Event(), tick)
    tick()
    for number, rank in enumerate(left.ranks):
        wrong, found = states[number].wrong, states[number].leaves
        report.leaves_checked += int(found.any(axis=1).sum())
        if wrong and rank.nbytes == rank.listed.size:
            some = ", ".join(map(str, wrong[:8])) + (", …" if len(wrong) > 8 else "")
            known = rank.digests is not None
            what = f"leaves {some}" if known else "data (which leaf, its digest file would say)"
            report.found.append(f"{rank.listed.path}: {what} changed after it was written")
    return [states[number] for number in range(len(left.ranks))]


def _look_at(left: Remains, number: int, tell: Callable[[int], None]) -> _State:
    """The leaves of one rank file. What is not there has zeros for a digest."""
    rank = left.ranks[number]
    size = rank.listed.size - rank.data_start
    count = -(-size // LEAF)
    found = np.zeros((count, 16), np.uint8)
    there = rank.nbytes == rank.listed.size
    view = memoryview(bytearray(LEAF))
    if rank.nbytes:
        with left.store.open(rank.listed.path) as reader:
            head = bytearray(min(rank.data_start, rank.nbytes))
            reader.readinto(0, memoryview(head))
            there &= bytes(head) == rank.header
            for leaf in range(count):
                start = rank.data_start + leaf * LEAF
                part = view[: min(LEAF, rank.listed.size - start)]
                if start + len(part) > rank.nbytes:
                    break
                reader.readinto(start, part)
                found[leaf] = np.frombuffer(digest(part), np.uint8)
                tell(len(part))
    if rank.digests is not None:
        wrong = np.flatnonzero((found != rank.digests.leaves).any(axis=1)).tolist()
    else:
        wrong = [] if left.is_right(number, found) else list(range(count))
    return _State(found, wrong, not there or bool(wrong))


class _Mender:
    """Repairs the parts of one checkpoint: small files, rank files, last the manifest."""

    def __init__(
        self,
        folder: str,
        left: Remains,
        states: Sequence[_State],
        other: Source | None,
        report: RepairReport,
        threads: int | None,
        memory: int,
    ) -> None:
        self.folder, self.left, self.states, self.other = folder, left, states, other
        self.report, self.threads, self.memory = report, threads, memory

    def run(self) -> None:
        left, report = self.left, self.report
        for name in os.listdir(self.folder):
            if name.startswith(".rank-") and name.endswith(".repair"):
                os.unlink(os.path.join(self.folder, name))  # of a repair that was killed
        if left.index_lost:
            self._put(INDEX, left.index)
        for number, (rank, state) in enumerate(zip(left.ranks, self.states, strict=True)):
            if rank.extras is None:
                self._extras(number)
            whole = not state.rewrite or self._rewrite(number, state)
            if whole and rank.digests is None:
                self._put(digests_name(rank.listed.path), left.new_digests(number, state.leaves).to_bytes())
        if left.rebuilt and not report.left:
            self._put(NAME, left.manifest.to_bytes())
            report.notes.append(
                f"{NAME} was made anew: where the checkpoint came from (lineage) and its fingerprints are no longer known"
            )
        elif left.rebuilt:
            report.left.append(f"{NAME}: not made while something else is left")

    def _put(self, name: str, content: bytes) -> None:
        stores.write_file(self.folder, name, content)
        self.report.bytes_written += len(content)
        self.report.repaired.append(name)

    def _extras(self, number: int) -> None:
        """Extras are taken over from a native copy that has the same ones."""
        listed = self.left.ranks[number].listed
        name = extras_name(listed.path)
        if self.other is not None and self.other.store.exists(name):
            data = self.other.store.read(name)
            if len(data) and _hex(data) == listed.extras:
                self._put(name, data)
                return
        self.report.left.append(f"{name}: only a native copy of the same step and layout has it (--from)")

    def _rewrite(self, number: int, state: _State) -> bool:
        """Write one rank file anew beside the old one, and put it in its place if it is right."""
        rank, left, report = self.left.ranks[number], self.left, self.report
        listed = rank.listed
        if state.wrong and self.other is None:
            report.left.append(
                f"{listed.path}: {count_text(len(state.wrong), 'leaf')} of data need another copy (--from)"
            )
            return False
        temporary = os.path.join(self.folder, f".{listed.path}.repair")
        out = OutFile(temporary, listed.size, direct=False, memory=False)
        try:
            out.write(0, memoryview(rank.header))
            self._keep(number, state, out)
            try:
                if state.wrong:
                    self._assemble(number, state, out)
            except StoreError:
                raise
            except CkptError as error:
                report.left.append(f"{listed.path}: {error}")
                return False
            if not left.is_right(number, state.leaves):
                report.left.append(self._differs(number, state))
                return False
            out.sync()
            try:
                os.rename(temporary, os.path.join(self.folder, listed.path))
                sync_folder(self.folder)
            except OSError as error:
                raise write_fault(listed.path, "put in place", error) from error
        finally:
            out.close()
            if os.path.lexists(temporary):
                os.unlink(temporary)
        report.bytes_written += listed.size
        what = f"{_leaves(state.wrong)} from the other copy" if state.wrong else "its header"
        report.repaired.append(f"{listed.path}: {what}")
        return True

    def _keep(self, number: int, state: _State, out: OutFile) -> None:
        """Take over the leaves that are right."""
        rank = self.left.ranks[number]
        good = sorted(set(range(len(state.leaves))) - set(state.wrong))
        if not good:
            return
        view = memoryview(bytearray(LEAF))
        with self.left.store.open(rank.listed.path) as reader:
            for leaf in good:
                start = rank.data_start + leaf * LEAF
                part = view[: min(LEAF, rank.listed.size - start)]
                reader.readinto(start, part)
                state.leaves[leaf] = np.frombuffer(digest(part), np.uint8)
                out.write(start, part)

    def _assemble(self, number: int, state: _State, out: OutFile) -> None:
        """Make the leaves that are wrong from the other copy: a reshard of just these. Raises as planning and reading do."""
        assert self.other is not None
        start = self.left.ranks[number].data_start
        size = self.left.ranks[number].listed.size - start
        zeros = bytes(LEAF)
        for leaf in state.wrong:  # padding is zeros
            part = memoryview(zeros)[: min(LEAF, size - leaf * LEAF)]
            out.write(start + leaf * LEAF, part)
            state.leaves[leaf] = np.frombuffer(digest(part), np.uint8)
        target = _part(self.left.catalog(), number, state.wrong, size)

        def put(file: int, offset: int, data: memoryview) -> None:
            state.leaves[offset // LEAF] = np.frombuffer(digest(data), np.uint8)
            out.write(start + offset, data)

        if not len(target.entries):
            return
        plan = make_plan(self.other.catalog, target)
        sources = Sources(self.other.store, self.other.catalog, verify=True)
        try:
            copies = copies_into(plan)
            fill(
                copies, sources, np.asarray([size]), put, threads=self.threads, memory=self.memory, slab=LEAF
            )
        finally:
            sources.close()

    def _differs(self, number: int, state: _State) -> str:
        rank = self.left.ranks[number]
        assert self.other is not None or not state.wrong
        where = ""
        if rank.digests is not None:
            off = [k for k in state.wrong if state.leaves[k].tobytes() != rank.digests.leaves[k].tobytes()]
            where = f" (leaves {', '.join(map(str, off[:8]))})"
        return (
            f"{rank.listed.path}: {self.other.url if self.other else 'what is left'} holds other values than were written here{where}; "
            "another step, or damaged too"
        )


def _part(catalog: Catalog, file: int, leaves: Sequence[int], size: int) -> Catalog:
    """A destination of one file's data alone, with those parts of its entries that lie in some leaves."""
    entries = catalog.entries
    mine = np.flatnonzero((entries.file == file) & (entries.last > entries.first))
    at, nbytes = entries.offset[mine], entries.nbytes[mine]
    low, high = at // LEAF, (at + nbytes - 1) // LEAF
    which, leaf = ranges(low, high - low + 1)
    keep = np.isin(leaf, np.asarray(leaves, np.int64))
    entry, leaf = mine[which[keep]], leaf[keep]
    item: npt.NDArray[np.int64] = ITEMSIZE[entries.dtype[entry]]
    start = entries.offset[entry]
    skipped: npt.NDArray[np.int64] = np.maximum(leaf * LEAF - start, 0) // item
    first = entries.first[entry] + skipped
    reach: npt.NDArray[np.int64] = ((leaf + 1) * LEAF - start) // item
    last = np.minimum(entries.first[entry] + reach, entries.last[entry])
    rows = Entries(
        np.zeros(len(entry), np.int64), entries.local[entry], entries.role[entry], entries.dtype[entry], first, last,
        start + skipped * item,
    )  # fmt: skip
    return Catalog(
        format=catalog.format, where=catalog.where, tensors=catalog.tensors, locals=catalog.locals,
        files=[replace(File(catalog.files[file].path, size))], entries=rows, layout=catalog.layout, model=catalog.model,
        names=catalog.names,
    )  # fmt: skip


def _leaves(numbers: Sequence[int]) -> str:
    return f"{len(numbers):,} {'leaf' if len(numbers) == 1 else 'leaves'}"


def _hex(data: bytes) -> str:
    return digest(data).hex()
