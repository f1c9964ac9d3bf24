"""Plans as reports: what a reshard would do, before it does it."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptkit import stores
from ckptkit.core.catalog import ITEMSIZE, LEAF, ROLE_CODE, ROLES, Catalog
from ckptkit.core.copies import copies_into
from ckptkit.engine.grids import Grid
from ckptkit.engine.schedule import make_schedule
from ckptkit.ops.checks import obstacle
from ckptkit.ops.dropping import DropRow
from ckptkit.ops.folding import fold_names
from ckptkit.ops.preparing import Job, Options, prepare
from ckptkit.ops.probing import read_rate, write_rate
from ckptkit.ops.reports import Progress, Report, count_text, duration_text, nbytes_text

__all__ = ["CastRow", "DropRow", "PlanReport", "plan", "report_on"]

_MOST_PAIRS = 2_000_000
"""Plans of more pairs are not scheduled just to tell how much is read twice."""


@dataclass(frozen=True)
class CastRow:
    """Tensors whose values change dtype or role on the way; `lossy` where bits may be lost."""

    what: str
    count: int
    source: str
    destination: str
    lossy: bool


@dataclass
class PlanReport(Report):
    """What `reshard` with the same arguments would do.

    Attributes:
        source, destination: `url`, `format`, `layout`, `world`, `files`, `nbytes` of each.
        bytes_in, bytes_out: Bytes to read (headers left out) and to write (the format's small files left out).
        over_read: Bytes read per byte needed, at least 1.
        pieces_in, pieces_out, pairs, elements: The proof: `elements` of `pieces_out` are covered once by `pairs`.
        replicas: Pairs of source pieces that hold the same elements, compared (`replicas_checked`) or not.
        casts, drops: What changes, and what is left behind.
        ties: Tied tensors, stored once.
        padding_in, padding_out: Bytes of padding.
        unverified: What cannot be verified on the way (a source without digests).
        memory: Bytes of buffers that the run holds at most.
        free: Free bytes at the destination, None where unknown; `fits` whether that is enough.
        seconds: Estimated time, None without a probe; `read_rate`, `write_rate` in bytes/s from the probe.
        largest_rank, mean_rank: Bytes of the fullest destination rank, and of the mean.
        notes: Which step was taken, what stands in the way, and the like.
    """

    source: dict[str, Any]
    destination: dict[str, Any]
    bytes_in: int = 0
    bytes_out: int = 0
    over_read: float = 1.0
    pieces_in: int = 0
    pieces_out: int = 0
    pairs: int = 0
    elements: int = 0
    replicas: int = 0
    replicas_checked: bool = True
    casts: list[CastRow] = field(default_factory=list)
    drops: list[DropRow] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    padding_in: int = 0
    padding_out: int = 0
    unverified: list[str] = field(default_factory=list)
    memory: int = 0
    free: int | None = None
    fits: bool = True
    seconds: float | None = None
    read_rate: float | None = None
    write_rate: float | None = None
    largest_rank: int = 0
    mean_rank: float = 0.0
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        a, b = self.source, self.destination
        sides = f"{a['url']} ({a['format']} {a['layout']}) to {b['url']} ({b['format']} {b['layout']})"
        size = f"{nbytes_text(self.bytes_in)} in, {nbytes_text(self.bytes_out)} out, {count_text(b['files'], 'file')}"
        lines = [
            f"{sides}: {size}",
            f"proven: {self.elements:,} elements of {count_text(self.pieces_out, 'piece')}, each covered once",
        ]
        lines += [
            f"cast: {row.what}, {row.source} to {row.destination}{' (loses bits)' if row.lossy else ''}"
            for row in self.casts
        ]
        lines += [f"left behind: {row.what}: {row.why}" for row in self.drops]
        lines += [f"not verified: {text}" for text in self.unverified]
        if self.seconds is not None:
            lines.append(f"about {duration_text(self.seconds)}")
        return "\n".join([*lines, *self.notes])


def plan(
    src: str, dst: str, *, probe: bool = True, progress: Progress | None = None, **options: Any
) -> PlanReport:
    """Plan a reshard and prove it; nothing is written (but a probe file, removed at once, with `probe`).

    Takes every option of `ckptkit.ops.reshard`. Drops that lack their flag are listed with `allowed=False`; they raise only
    in `reshard`.
    """
    return report_on(prepare(src, dst, Options(**options)), probe=probe)


def report_on(job: Job, *, probe: bool, schedule: bool = True) -> PlanReport:
    """The report on a job. `schedule` finds out what is read twice; else `bytes_in` is what is needed."""
    source, found = job.source, job.destination.catalog
    made = job.plan
    elements = made.elements
    out = sum(file.size for file in found.files)
    needed, read = _bytes_in(job, schedule)
    report = PlanReport(
        source=_side(source.url, source.catalog),
        destination=_side(job.target, found),
        bytes_in=read,
        bytes_out=out,
        over_read=read / needed if needed else 1.0,
        pieces_in=len(made.source_pieces),
        pieces_out=len(found.pieces),
        pairs=len(made.src),
        elements=elements,
        replicas=len(made.replicas[0]),
        replicas_checked=job.options.replicas == "check",
        casts=_casts(job),
        drops=list(job.drops),
        ties=_ties(source.catalog),
        padding_in=_padding(source.catalog),
        padding_out=_padding(found),
        unverified=_unverified(job),
        memory=job.options.memory,
        free=stores.free_bytes(job.target),
        notes=list(job.notes),
    )
    report.fits = report.free is None or out <= report.free
    ranks: dict[int, int] = defaultdict(int)
    for file in found.files:
        ranks[file.rank] += file.size
    report.largest_rank = max(ranks.values(), default=0)
    report.mean_rank = sum(ranks.values()) / max(len(ranks), 1)
    blocked = obstacle(job.target, job.options.overwrite)
    if blocked:
        report.notes.append(blocked)
    if not report.fits:
        report.notes.append(
            f"the destination has {nbytes_text(report.free or 0)} free, {nbytes_text(out)} are needed"
        )
    if probe:
        report.read_rate = read_rate(source)
        report.write_rate = write_rate(job.target, report.notes)
        if report.read_rate and report.write_rate:
            report.seconds = read / report.read_rate + out / report.write_rate
    return report


def _side(url: str, catalog: Catalog) -> dict[str, Any]:
    layout = catalog.layout
    return {
        "url": url,
        "format": catalog.format,
        "layout": str(layout) if layout is not None else "",
        "world": layout.world if layout is not None else 1,
        "files": len(catalog.files),
        "nbytes": sum(file.size for file in catalog.files),
    }


def _bytes_in(job: Job, schedule: bool) -> tuple[int, int]:
    """Bytes that are needed of the source, and bytes that a run reads."""
    needed = _needed(job)
    if not schedule or not 0 < len(job.plan.src) <= _MOST_PAIRS:
        return needed, needed
    copies = copies_into(job.plan)
    files, out = job.source.catalog.files, job.destination.catalog.files

    def grid(of: Any, cell: int) -> Grid:
        sizes = np.asarray([file.size for file in of], np.int64)
        return Grid(sizes, np.asarray([file.data_start for file in of], np.int64), cell)

    slabs, blocks = grid(out, 4 * LEAF), grid(files, LEAF)
    # A worker's share of the buffers, as the engine cuts tasks.
    share = max(job.options.memory // 4, 4 * LEAF)
    found = make_schedule(copies, slabs, blocks, np.ones(slabs.cells, bool), min(share, 64 << 20))
    task = np.repeat(np.arange(found.tasks), np.diff(found.task))
    block = found.parts.block
    first = np.flatnonzero((np.diff(task, prepend=-1) != 0) | (np.diff(block, prepend=-1) != 0))
    low = np.minimum.reduceat(found.parts.src, first)
    high = np.maximum.reduceat(found.src_end, first)
    if job.source.catalog.leaves is not None:
        # The first time that a leaf is read it is read whole, for its digest.
        _, fresh = np.unique(block[first], return_index=True)
        start, stop = blocks.bounds(block[first][fresh])
        low[fresh] = np.minimum(low[fresh], start)
        high[fresh] = np.maximum(high[fresh], stop)
    return needed, int((high - low).sum())


def _needed(job: Job) -> int:
    """Bytes of the source's elements that the destination holds, in the source's dtypes."""
    target, held = job.destination.catalog, job.source.catalog.held
    width = np.zeros((len(target.tensors), len(ROLES)), np.int64)
    number = {name: place for place, name in enumerate(target.tensors)}
    for (tensor, role), origin in job.plan.key_source.items():
        width[number[tensor], ROLE_CODE[role]] = held[origin].itemsize
    return int((target.pieces.volume * width.reshape(-1)[target.piece_key]).sum())


def _casts(job: Job) -> list[CastRow]:
    grouped: dict[tuple[str, str, str, str, bool], list[str]] = defaultdict(list)
    for cast in job.plan.casts:
        key = (cast.role, cast.from_role, cast.source.name, cast.destination.name, not cast.lossless)
        grouped[key].append(cast.tensor)
    rows = []
    for (role, from_role, source, destination, lossy), names in grouped.items():
        patterns = fold_names(names)
        of = patterns[0] if len(patterns) == 1 else f"{patterns[0]} and {len(patterns) - 1} more patterns"
        made = f"{role} from {from_role}" if from_role != role else role
        rows.append(CastRow(f"{made} of {of}", len(names), source, destination, lossy))
    return rows


def _ties(catalog: Catalog) -> list[str]:
    if catalog.model is None or not catalog.model.flags.get("tied"):
        return []
    return ["the output head is the embedding: stored once"]


def _padding(catalog: Catalog) -> int:
    """Bytes of entries that hold no element."""
    pieces, entries = catalog.pieces, catalog.entries
    real = int((pieces.volume * ITEMSIZE[entries.dtype[pieces.entry]]).sum())
    return int(entries.nbytes.sum()) - real


def _unverified(job: Job) -> list[str]:
    found = []
    source = job.source
    if source.catalog.leaves is None and source.format is not None and not source.states_checksums:
        found.append(
            f"{job.source.catalog.format} has no digests: a changed byte of the source cannot be noticed"
        )
    if len(job.plan.replicas[0]) and job.options.replicas == "first":
        found.append(f"{len(job.plan.replicas[0]):,} replicas are not compared (--replicas first)")
    return found
