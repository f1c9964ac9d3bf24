"""Collecting garbage in a run: old steps, and what killed writers left.

What is kept errs on the side of keeping. Steps are ordered by (epoch, step) of their names, as everywhere; times only tell whether an
unfinished folder is abandoned.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ckptkit import stores
from ckptkit.errors import StoreError, UsageError
from ckptkit.formats import registry
from ckptkit.ops import runs
from ckptkit.ops.bans import ban_of, read_bans
from ckptkit.ops.reports import Progress, Report, count_text, duration_text, nbytes_text
from ckptkit.stores.durable import UNFINISHED
from ckptkit.stores.removal import idle_s, in_use, remove_folder

__all__ = ["GcReport", "GcRow", "gc"]


@dataclass(frozen=True)
class GcRow:
    """One folder of the run, and why it is kept or removed."""

    name: str
    path: str
    step: int
    epoch: int
    state: str
    nbytes: int
    why: str


@dataclass
class GcReport(Report):
    """What was removed (or would be, with `dry_run`), what was kept, and why; oldest first.

    Attributes:
        freed: Bytes of what was removed. Files that other steps share by hard links free their room with the last of them.
    """

    run: str
    dry_run: bool = False
    removed: list[GcRow] = field(default_factory=list)
    kept: list[GcRow] = field(default_factory=list)
    freed: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        verb = "would remove" if self.dry_run else "removed"
        lines = [f"{verb} {row.name}: {row.why}" for row in self.removed]
        lines += [f"kept {row.name}: {row.why}" for row in self.kept]
        total = f"{verb} {count_text(len(self.removed), 'folder')}, {nbytes_text(self.freed)}"
        return "\n".join([*lines, *self.notes, total])


def gc(
    run: str,
    *,
    keep_last: int,
    keep_every: int | None = None,
    pins: Sequence[int] = (),
    abandoned_s: float = 24 * 3600.0,
    quick: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> GcReport:
    """Remove old steps of a run, and folders that killed writers left.

    Never removed: the newest whole step; anything newer than it; steps of an earlier epoch that are higher than the lowest
    step of the newest epoch (a run that was started anew by mistake must not age out the real one); what a writer holds.

    Args:
        run: The run's folder.
        keep_last: How many of the newest whole steps stay; at least 1.
        keep_every: Whole steps that are multiples of this stay too.
        pins: Step numbers that stay.
        abandoned_s: An unfinished folder that no writer holds is abandoned when nothing changed in it for so long.
        quick: Trust that the newest step is whole by its structure; else its bytes are compared with their digests first.
        dry_run: Only say what would be removed.

    Raises:
        UsageError: a number that makes no sense, or a pin that the run does not have.
        FormatError, StoreError: `run` holds no step, or is no folder.
    """
    if keep_last < 1:
        raise UsageError(f"--keep-last {keep_last}: at least the newest whole step stays")
    if keep_every is not None and keep_every < 1:
        raise UsageError(f"--keep-every {keep_every}: give a number of steps, at least 1")
    began = time.monotonic()
    newest = runs.newest(run, quick=quick, progress=progress)
    report = GcReport(run, dry_run)
    bans = read_bans(run)
    rows = [
        replace(row, state="banned") if row.state == "whole" and ban_of(bans, row.epoch, row.step) else row
        for row in runs.steps(run).steps
    ]
    there = {row.step for row in rows}
    unknown = sorted(set(pins) - there)
    if unknown:
        raise UsageError(f"--pin {unknown[0]}: {run} has no step {unknown[0]}")
    if newest.step is None:
        report.notes.append(
            f"no step of {run} is whole, so nothing is removed: {'; '.join(newest.reasons())}"
        )
        report.kept = [_row(row, "no step is whole") for row in rows]
        report.seconds = time.monotonic() - began
        return report
    top = newest.step
    committed = [row for row in rows if not row.temporary]
    whole = [row for row in committed if row.state == "whole"]
    upto = [row for row in whole if (row.epoch, row.step) <= (top.epoch, top.step)]
    last = {row.name for row in upto[-keep_last:]}
    oldest = upto[-keep_last:][0]
    floor = min(row.step for row in committed if row.epoch == top.epoch)
    for row in rows:
        if row.temporary:
            why, remove = _abandoned(row, abandoned_s)
        else:
            why = _why(row, top, last, oldest, floor, keep_every, pins)
            remove = not why
            why = why or f"older than the {keep_last} newest"
        if not remove:
            report.kept.append(_row(row, why))
            continue
        if not dry_run:
            _remove(row)
        report.removed.append(_row(row, why))
        report.freed += row.nbytes
    report.seconds = time.monotonic() - began
    return report


def _why(
    row: runs.StepInfo,
    top: runs.StepInfo,
    last: set[str],
    oldest: runs.StepInfo,
    floor: int,
    keep_every: int | None,
    pins: Sequence[int],
) -> str:
    """Why a step is kept; empty where it is not."""
    if row.name == top.name:
        return "the newest whole step"
    if (row.epoch, row.step) > (top.epoch, top.step):
        return f"newer than the newest whole step ({row.state})"
    if row.step in pins:
        return "pinned"
    if row.name in last:
        return "one of the newest"
    if row.epoch < top.epoch and row.step > floor:
        return f"of an earlier epoch, but beyond step {floor} of the present one: remove it yourself if nobody needs it"
    if row.state != "whole":
        newer = (row.epoch, row.step) > (oldest.epoch, oldest.step)
        return f"{row.state}, among steps that are kept: look at it, or remove it yourself" if newer else ""
    if keep_every is not None and row.step % keep_every == 0:
        return f"a multiple of {keep_every}"
    return ""


def _abandoned(row: runs.StepInfo, abandoned_s: float) -> tuple[str, bool]:
    """Why an unfinished folder is kept or removed, and whether it is."""
    match = UNFINISHED.fullmatch(row.name)
    replaced = match is not None and bool(match["replaced"])
    if replaced and not stores.is_folder(f"{os.path.dirname(row.path)}/{match['name'] if match else ''}"):
        return "a whole step that a writer was replacing when it stopped: rename it", False
    if in_use(row.path):
        return "a writer is at work on it", False
    idle = idle_s(row.path)
    if idle < abandoned_s:
        return f"unfinished, but changed {duration_text(idle)} ago", False
    return "its writer was stopped", True


def _remove(row: runs.StepInfo) -> None:
    marker = None
    if not row.temporary:
        format = registry.looks_like(stores.open_store(row.path))
        marker = format.marker if format is not None else None
    try:
        remove_folder(row.path, marker)
    except StoreError as error:
        raise StoreError(f"{error}. What is left of it is not whole; run gc again", file=row.path) from error


def _row(row: runs.StepInfo, why: str) -> GcRow:
    return GcRow(row.name, row.path, row.step, row.epoch, row.state, row.nbytes, why)
