"""Run folders: their steps, and which one is the newest whole one.

A step folder has a name of `NAMES`, read in full, so that `step-100.tmp` and `step-100-backup` are nothing. Folders that a
writer has not renamed yet (`.step-100.ID.unfinished`) are listed and never taken. Order is by (epoch, step) of the name; times
are never used, since clocks differ and copies change them.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ckptkit import stores
from ckptkit.core.catalog import Catalog
from ckptkit.errors import CkptError, FormatError, ShardMissingError, StoreError
from ckptkit.formats import registry
from ckptkit.formats.base import Format
from ckptkit.ops.bans import ban_of, read_bans
from ckptkit.ops.reports import Progress, Report, nbytes_text
from ckptkit.ops.sizes import total_nbytes
from ckptkit.stores.base import Store
from ckptkit.stores.durable import UNFINISHED
from ckptkit.stores.folder import UNFINISHED_MARK

NAMES = tuple(
    re.compile(pattern)
    for pattern in (
        r"step-(?P<step>[0-9]+)(?:\.e(?P<epoch>[0-9]+))?",  # ckptkit
        r"step_(?P<step>[0-9]+)",
        r"checkpoint-(?P<step>[0-9]+)",  # Transformers' Trainer
        r"iter_(?P<step>[0-9]+)",  # Megatron-LM
        r"global_step(?P<step>[0-9]+)",  # DeepSpeed
    )
)


@dataclass(frozen=True)
class StepInfo:
    """One step folder of a run.

    Attributes:
        name: Folder name, for example `step-00001200.e3`.
        path: Its path or URL.
        step, epoch: From the name; epoch 0 where it has none.
        state: `whole`, `unfinished`, `corrupt`, or (in `newest`) `banned`.
        why: What is missing or wrong (which rank), empty for `whole`.
        temporary: Whether it is a folder that a writer has not renamed yet.
        age_s: Seconds since it was last changed, by the store's clock.
        nbytes, files: Size of all files, and how many.
        format, layout: Detected, empty where unknown. `layout` is what `--layout` takes.
    """

    name: str
    path: str
    step: int
    epoch: int
    state: str
    why: str = ""
    temporary: bool = False
    age_s: float = 0.0
    nbytes: int = 0
    files: int = 0
    format: str = ""
    layout: str = ""


@dataclass
class Steps(Report):
    """`steps` sorted from the oldest to the newest (epoch, step); temporaries after their step."""

    run: str
    steps: list[StepInfo] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def summary(self) -> str:
        lines = [
            f"{s.name}  {nbytes_text(s.nbytes)}  {s.format}  {s.layout}  {s.state}  {s.why}"
            for s in self.steps
        ]
        return "\n".join([*(line.rstrip() for line in lines), *self.warnings]) or f"{self.run} holds no step"


@dataclass
class Newest(Report):
    """The newest whole step of a run.

    Attributes:
        path: Its path, or None where no step is whole.
        step: Its row, or None.
        passed_over: Newer steps that are not whole, newest first, each with its `why`.
        exit_code: 0, or 1 where no step is whole.
    """

    run: str
    path: str | None
    step: StepInfo | None
    passed_over: list[StepInfo] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 0 if self.path is not None else 1

    def reasons(self) -> list[str]:
        """A line for each step that was passed over."""
        return [f"{step.name} was passed over: {step.state}, {step.why}" for step in self.passed_over]

    def summary(self) -> str:
        head = self.path if self.path is not None else f"no step of {self.run} is whole"
        return "\n".join([head, *self.reasons()])


def step_folders(run: str) -> list[tuple[int, int, str]]:
    """`(epoch, step, folder name)` of every step of a run, oldest first. Raises StoreError where it is no folder."""
    found = []
    for name in stores.folders(run):
        number = _number(name)
        if number is not None:
            found.append((*number, name))
    return sorted(found)


def has_steps(run: str) -> bool:
    """Whether a run holds a step, whole or not; False too where there is no such folder. Raises StoreError where the store does not answer."""
    return stores.is_folder(run) and bool(step_folders(run))


def steps(run: str) -> Steps:
    """Every step folder of a run, by structure: names, markers, sizes and headers; no tensor bytes.

    Raises StoreError where `run` is no folder.
    """
    looked = (_look_again(run, name, epoch, step) for epoch, step, name in step_folders(run))
    rows = [row for row in looked if row is not None]
    for name in stores.folders(run):
        match = UNFINISHED.fullmatch(name)
        number = _number(match["name"]) if match else None
        if number is not None:
            row, _ = _measure(run, name, *number)
            rows.append(
                replace(
                    row, state="unfinished", why="its writer has not ended, or was stopped", temporary=True
                )
            )
    rows.sort(key=lambda row: (row.epoch, row.step, row.temporary, row.name))
    warnings = _skews(rows)
    itself = "" if rows else _itself(run)
    if itself:
        warnings.append(f"{run} holds no step{itself}")
    return Steps(run, [replace(row, age_s=max(row.age_s, 0.0)) for row in rows], warnings)


def newest(
    run: str, *, quick: bool = False, progress: Progress | None = None, without: Collection[str] = ()
) -> Newest:
    """The step with the highest (epoch, step) that is whole, and why newer ones were passed over.

    Args:
        without: Names of folders that are not looked at (whoever asks has tried them).
        quick: Trust structure (marker, sizes, headers); else every leaf of the candidate is read and compared with its digest,
            where the format has digests.

    Raises:
        FormatError: the folder holds no step at all, or its list of bans cannot be understood.
        StoreError: `run` is no folder.
    """
    candidates = step_folders(run)
    if not candidates:
        raise FormatError(
            f"{run} holds no step (folders such as step-00001200.e3){_itself(run) or '; nothing was ever committed there'}",
            file=run,
        )
    passed: list[StepInfo] = []
    bans = read_bans(run)
    for epoch, step, name in reversed(candidates):
        if name in without:
            continue
        row = _look_again(run, name, epoch, step)
        if row is None:
            continue
        banned = ban_of(bans, epoch, step)
        if banned is not None:
            passed.append(replace(row, state="banned", why=banned.why))
            continue
        if row.state == "whole" and not quick:
            row = _read(row, progress)
        if row.state == "whole":
            return Newest(run, row.path, row, passed)
        passed.append(row)
    return Newest(run, None, None, passed)


def latest(run: str, *, quick: bool = False) -> str:
    """The path of the newest whole step. Raises FormatError where there is none; says what was passed over."""
    found = newest(run, quick=quick)
    if found.path is None:
        raise FormatError(found.summary(), file=run)
    return found.path


def _itself(run: str) -> str:
    """What to say where a checkpoint was given instead of the run that holds it."""
    format = registry.looks_like(stores.open_store(run))
    return f", but it is a {format.name} checkpoint itself; its run is the folder above it" if format else ""


def _number(name: str) -> tuple[int, int] | None:
    """`(epoch, step)` of a folder name, or None where it is no step's."""
    for pattern in NAMES:
        match = pattern.fullmatch(name)
        if match:
            parts = match.groupdict()
            return int(parts.get("epoch") or 0), int(parts["step"])
    return None


def _measure(run: str, name: str, epoch: int, step: int) -> tuple[StepInfo, Store]:
    """Size and age of a folder, and the store, which has listed it."""
    path = f"{run.rstrip('/')}/{name}"
    store = stores.open_store(path)
    files = store.files()
    nbytes = total_nbytes(store, files)
    row = StepInfo(name, path, step, epoch, "", age_s=store.age_s(), nbytes=nbytes, files=len(files))
    return row, store


def _look_again(run: str, name: str, epoch: int, step: int) -> StepInfo | None:
    """As `_look`, while retention or another writer may be at work: None for a folder that is gone meanwhile."""
    try:
        return _look(run, name, epoch, step)
    except (StoreError, ShardMissingError):
        path = f"{run.rstrip('/')}/{name}"
        if not stores.is_folder(path):
            return None
        try:
            return _look(run, name, epoch, step)
        except ShardMissingError:
            return StepInfo(name, path, step, epoch, "unfinished", "it changes while it is looked at")


def _look(run: str, name: str, epoch: int, step: int) -> StepInfo:
    """A step folder by structure."""
    row, store = _measure(run, name, epoch, step)
    format: Format | None = None
    if store.exists(UNFINISHED_MARK):  # remote: it has its name already
        return replace(row, state="unfinished", why="its writer has not ended, or was stopped")
    try:
        format = registry.detect(store)
        if format.marker is not None and not store.exists(format.marker):
            return replace(row, state="unfinished", why=unfinished(row.path, format), format=format.name)
        catalog: Catalog = format.read(store)
        why = format.uncommitted(stores.open_store(run, deep=False), name)
        if why:
            return replace(row, state="unfinished", why=why, format=format.name)
    except StoreError:
        raise
    except CkptError as error:
        if format is None:
            what = "it is empty" if not row.files else "it holds no commit record of a known format"
            return replace(row, state="unfinished", why=what)
        incomplete = isinstance(error, ShardMissingError) and format.marker is None
        return replace(
            row, state="unfinished" if incomplete else "corrupt", why=_line(error), format=format.name
        )
    layout = str(catalog.layout) if catalog.layout is not None else ""
    return replace(row, state="whole", format=format.name, layout=layout)


def _read(row: StepInfo, progress: Progress | None) -> StepInfo:
    """A whole step after its bytes were compared with their digests."""
    from ckptkit.ops.verifying import check_bytes

    faults = check_bytes(row.path, progress=progress)
    if not faults:
        return row
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return replace(row, state="corrupt", why=f"{faults[0]}{more}")


def unfinished(path: str, format: Format) -> str:
    """What a folder without its marker lacks: which ranks, where that can be told."""
    store = stores.open_store(path)
    missing = format.missing_ranks(store)
    if not missing:
        return f"{format.marker} is missing, which is written last"
    some = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
    return f"{format.marker} is missing, and so {'is rank' if len(missing) == 1 else 'are ranks'} {some}"


def _line(error: CkptError) -> str:
    return " ".join(str(error).split())


def _skews(rows: list[StepInfo]) -> list[str]:
    """Warnings where the times of folders and the order of steps contradict each other; order never uses times."""
    found = [
        f"{r.name} was changed {-r.age_s:.0f} s in the future: clocks differ" for r in rows if r.age_s < -60
    ]
    done = [row for row in rows if not row.temporary]
    for before, after in pairwise(done):
        if after.age_s > before.age_s + 60:
            found.append(
                f"{after.name} is older than {before.name} by its time; the order of steps is by number"
            )
    return found
