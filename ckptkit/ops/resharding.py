"""Resharding: one checkpoint to another layout, format or family of names."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit import stores
from ckptkit.core.catalog import Checksum
from ckptkit.core.layouts import Layout
from ckptkit.engine.digests import digest
from ckptkit.engine.run import RunResult, run
from ckptkit.engine.sharing import Base
from ckptkit.errors import CkptError, CorruptionError, StoreError, UsageError
from ckptkit.ops.checks import obstacle
from ckptkit.ops.planning import PlanReport, report_on
from ckptkit.ops.preparing import Job, Options, prepare
from ckptkit.ops.reports import Progress, Report, count_text, duration_text, nbytes_text
from ckptkit.ops.sources import open
from ckptkit.stores.durable import tidy
from ckptkit.stores.parts import Part

ENGINES = ("threads", "ray")


@dataclass
class ReshardResult(Report):
    """What was done.

    Attributes:
        url: The destination.
        plan: The plan that was run (also with `dry_run`, when nothing else is set).
        dry_run: Whether nothing was written.
        bytes_read, bytes_written: In this run.
        bytes_reused: Durable since an interrupted run with the same arguments, or cloned.
        bytes_shared: Hard-linked to files of the base; neither written nor reused.
        files: Files of the destination.
        seconds: Wall-clock time, checks included.
        checked: Whether the destination was opened again and its structure found whole.
        part: `2/4` where only a part was to be written; `files` and bytes are then the part's.
        committed: Whether the destination is in place; `waiting_for` lists the parts that are not done.
        digests: Path to the xxh3-128 of the leaf digests, of files that this run wrote in a format that has such.
    """

    url: str
    plan: PlanReport
    dry_run: bool = False
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_reused: int = 0
    bytes_shared: int = 0
    files: int = 0
    seconds: float = 0.0
    checked: bool = False
    part: str = ""
    committed: bool = True
    waiting_for: list[int] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        if self.dry_run:
            return self.plan.summary()
        if not self.committed:
            waits = ", ".join(map(str, self.waiting_for))
            return f"part {self.part} of {self.url} is done; it is put in place when parts {waits} are"
        return (
            f"{self.url}: {count_text(self.files, 'file')}, {nbytes_text(self.bytes_written + self.bytes_reused + self.bytes_shared)} in "
            f"{duration_text(self.seconds)}, opened again and whole"
        )


def reshard(
    src: str,
    dst: str,
    *,
    to: str | None = None,
    layout: str | Layout | None = None,
    like: str | None = None,
    names: str | None = None,
    from_format: str | None = None,
    source_layout: str | Layout | None = None,
    model: str | None = None,
    config: str | Mapping[str, Any] | None = None,
    dtype: str | None = None,
    only: Sequence[str] = (),
    drop: Sequence[str] = (),
    drop_optimizer: bool = False,
    drop_extras: bool = False,
    master_from_param: bool = False,
    max_shard_size: int = 5_000_000_000,
    threads: int | None = None,
    memory: int = 256 << 20,
    replicas: str = "check",
    dry_run: bool = False,
    restart: bool = False,
    overwrite: bool = False,
    base: str | None = None,
    part: str | Part | None = None,
    engine: str = "threads",
    workers: int = 4,
    fingerprint: bool | None = None,
    rename: str | Mapping[str, str] | None = None,
    rename_back: str | Mapping[str, str] | None = None,
    fill_missing: bool = False,
    progress: Progress | None = None,
) -> ReshardResult:
    """Write the checkpoint at `src` to `dst` in another format, layout or family of names.

    Args:
        src: As `ckptkit.ops.open` takes it.
        dst: A path that does not exist yet (or `overwrite`). It appears whole or not at all.
        to: Destination format; the source's unless given.
        layout: Destination layout. Unless given: the source's where the format holds ranks, else one rank.
        like: Another checkpoint, whose format, layout and names are taken where not given.
        names: Family of names, where the format leaves it open.
        from_format, source_layout, model, config: Override what is detected of the source. Files beside a
            configuration that is given as a folder (a tokenizer) are carried along.
        dtype: Cast parameters and buffers, except those that stay float32. Optimizer state keeps its dtype.
        only: Globs over canonical names, destination names or `name/role`; the rest is left behind.
        drop: Globs likewise, of what is left behind.
        drop_optimizer: Allow that optimizer state, groups and other training state are left behind.
        drop_extras: Allow that extras which the destination cannot hold are left behind.
        master_from_param: Make missing masters from parameters of lower precision.
        max_shard_size: Bytes of a weight file, in formats that have no ranks.
        threads, memory: Workers and bytes of buffers.
        replicas: `check` compares equal pieces of the source, `first` takes the first.
        dry_run: Plan only.
        restart: Forget an interrupted run of the same arguments, which is continued otherwise.
        overwrite: Replace `dst`; the old one goes only after the new one is whole.
        base: An earlier native checkpoint on the same file system: rank files that are equal to its are hard-linked to them.
        part: `K/N` or `slurm`: write only this share of the files, beside other processes with the same arguments and the
            other parts; the last one puts `dst` in place. Any may be killed and started again. A part of what is in place
            already is done.
        engine: `threads` of this process, or `ray`: `workers` parts as Ray tasks, each with `threads` of its own (extra
            `ckptkit[ray]`). Paths must mean the same on all nodes.
        fingerprint: Store fingerprints of all tensors, where the format has a place for them. Unless given: where the
            destination is no file system in memory, since they cost about half as much CPU time as all the rest.
        rename, rename_back: Rules for names of a model without a schema (`ckptkit.ops.renaming`): a file, or pattern to name;
            read from left to right, or from right to left.
        fill_missing: Take chunks that a zarr array of other writers lacks as its fill value. A loss looks the same.
        progress: Called with bytes done and in all.

    Raises:
        UsageError: arguments that make no sense, or something would be lost without its flag; lists it.
        LayoutError: the layout does not fit the model.
        FormatError, CoverageError, CorruptionError, UnsafeError: the source is unusable.
        StoreError: the destination is (no space, no permission).
        InterruptedRunError: stopped; the same call goes on.
    """
    options = Options(
        to=to,
        layout=layout,
        like=like,
        names=names,
        from_format=from_format,
        source_layout=source_layout,
        model=model,
        config=config,
        dtype=dtype,
        only=only,
        drop=drop,
        drop_optimizer=drop_optimizer,
        drop_extras=drop_extras,
        master_from_param=master_from_param,
        max_shard_size=max_shard_size,
        threads=threads,
        memory=memory,
        replicas=replicas,
        restart=restart,
        overwrite=overwrite,
        base=base,
        part=part,
        fingerprint=fingerprint,
        rename=rename,
        rename_back=rename_back,
        fill_missing=fill_missing,
    )
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine!r}: choose {' or '.join(ENGINES)}")
    began = time.monotonic()
    job = prepare(src, dst, options)
    if dry_run:
        report = report_on(job, probe=False)
        return ReshardResult(job.target, report, dry_run=True, notes=list(job.notes))
    if engine == "ray":
        from ckptkit.ops.distributing import reshard_on_ray

        return reshard_on_ray(job, src, workers, progress, began)
    return execute(job, progress, began)


def execute(job: Job, progress: Progress | None, began: float) -> ReshardResult:
    """Run a job, then open what it wrote and check that it is what was planned.

    Raises as `reshard`, and CorruptionError where the destination is not what was planned.
    """
    job.refuse_silent_loss()
    part = Part.parse(job.options.part) if isinstance(job.options.part, str) else job.options.part
    blocked = obstacle(job.target, job.options.overwrite)
    if blocked:
        if part is not None and _in_place(job):
            return _others_did(job, part, began)
        raise StoreError(blocked, file=job.target)
    sums = job.source.checksums  # before the report, which would look at the first of them by itself
    report = report_on(job, probe=False, schedule=False)
    try:
        done = _run(job, part, sums, progress)
    except StoreError:
        if part is None or not _in_place(job):
            raise
        return _others_did(job, part, began)  # while this part was being prepared
    report.over_read = max(1.0, done.bytes_in / report.bytes_in) if report.bytes_in else 1.0
    report.bytes_in = done.bytes_in
    if done.committed:
        check_written(job)
    return ReshardResult(
        url=job.target,
        plan=report,
        bytes_read=done.bytes_in,
        bytes_written=done.bytes_out - done.reused_bytes - done.cloned_bytes - done.shared_bytes,
        bytes_reused=done.reused_bytes + done.cloned_bytes,
        bytes_shared=done.shared_bytes,
        files=len(done.written),
        seconds=time.monotonic() - began,
        checked=done.committed,
        part=str(part or ""),
        committed=done.committed,
        waiting_for=done.waiting_for,
        digests={
            w.path: digest(w.leaves.digests.tobytes()).hex() for w in done.written if w.leaves is not None
        },
        notes=[*job.notes, *done.notes],
    )


def _run(job: Job, part: Part | None, sums: list[Checksum], progress: Progress | None) -> RunResult:
    return run(
        job.plan,
        job.destination,
        job.source.store,
        job.target,
        threads=job.options.threads,
        memory=job.options.memory,
        replicas=job.options.replicas,
        restart=job.options.restart,
        overwrite=job.options.overwrite,
        part=part,
        base=_base(job),
        progress=progress,
        sums=sums,
    )


def _base(job: Job) -> Base | None:
    """The checkpoint whose files may be shared. Raises UsageError where none can be."""
    if job.options.base is None:
        return None
    if not job.destination.digests or stores.local_path(job.target) is None:
        raise UsageError(
            "--base shares files of native checkpoints in local folders: give --to native and a path"
        )
    found = open(job.options.base)
    if found.catalog.leaves is None or stores.local_path(found.url) is None:
        raise UsageError(
            f"--base {found.url} is {found.catalog.format}: only native checkpoints in local folders can be shared"
        )
    return Base(found.store, found.catalog)


def _in_place(job: Job) -> bool:
    """Whether what is at the destination is what all parts of this job together write: the same files and step."""
    wanted = job.destination.catalog
    try:
        found = open(job.target, format=job.format.name)
    except CkptError:
        return False
    sizes = {file.path: file.size for file in found.catalog.files}
    same = sizes == {file.path: file.size for file in wanted.files}
    return same and found.catalog.step in (None, wanted.step)


def _others_did(job: Job, part: Part, began: float) -> ReshardResult:
    """The result of a part of what is in place already."""
    tidy(job.target)
    note = f"{job.target} is there already, whole: all parts were done before"
    report = report_on(job, probe=False, schedule=False)
    seconds = time.monotonic() - began
    return ReshardResult(
        job.target, report, part=str(part), checked=True, seconds=seconds, notes=[*job.notes, note]
    )


def check_written(job: Job) -> None:
    """Open the destination as any reader would. Raises CorruptionError where it is not what was planned."""
    wanted = job.destination.catalog
    try:
        found = open(job.target, format=job.format.name)
        for problem in job.format.problems(found.store, found.catalog):
            raise problem
    except CkptError as error:
        raise CorruptionError(
            f"{job.target} was written, but cannot be opened again: {error}. Check the disk, then run again with --overwrite",
            file=job.target,
        ) from error
    held = {key[1]: 0 for key in wanted.held}
    for (_, role), dtype in wanted.held.items():
        held[role] += dtype.itemsize
    again = {key[1]: 0 for key in found.catalog.held}
    for (_, role), dtype in found.catalog.held.items():
        again[role] += dtype.itemsize
    if held != again or len(wanted.held) != len(found.catalog.held):
        raise CorruptionError(
            f"{job.target} was written with {len(wanted.held)} arrays, but opens with {len(found.catalog.held)}. Check the "
            "disk, then run again with --overwrite",
            file=job.target,
        )
