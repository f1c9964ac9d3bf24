"""A reshard by several processes that one call starts and watches: as Ray tasks."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ckptkit import stores
from ckptkit.engine.digests import digest
from ckptkit.engine.parts import durable_bytes
from ckptkit.engine.ray_executor import run_parts
from ckptkit.errors import CorruptionError, StoreError, UsageError
from ckptkit.ops.checks import obstacle
from ckptkit.ops.planning import report_on
from ckptkit.ops.preparing import Job, Options, prepare
from ckptkit.ops.reports import Progress
from ckptkit.ops.resharding import ReshardResult, execute
from ckptkit.ops.sources import open
from ckptkit.stores.parts import Part


@dataclass(frozen=True)
class _Part:
    """What a worker is told: the same arguments as one process, and it plans by itself. Paths must mean the same everywhere."""

    src: str
    dst: str
    options: Mapping[str, Any]

    def __call__(self, number: int, count: int) -> Mapping[str, Any]:
        began = time.monotonic()
        job = prepare(self.src, self.dst, Options(**{**self.options, "part": Part(number, count)}))
        result = execute(job, None, began)
        plain = (
            "bytes_read",
            "bytes_written",
            "bytes_reused",
            "bytes_shared",
            "files",
            "committed",
            "digests",
            "notes",
        )
        return {name: getattr(result, name) for name in plain}


def reshard_on_ray(
    job: Job, src: str, workers: int, progress: Progress | None, began: float
) -> ReshardResult:
    """Run a job as `workers` parts on Ray, and check that what is in place is what they say they wrote.

    Raises as `execute`, and UsageError where Ray is not installed or the destination is no local path.
    """
    if workers < 1:
        raise UsageError(f"--workers {workers}: at least one is needed")
    if stores.local_path(job.target) is None or job.options.part is not None or job.options.overwrite:
        raise UsageError(
            "--engine ray writes to a local (shared) path that is free, and divides the work itself: no --part"
        )
    job.refuse_silent_loss()
    blocked = obstacle(job.target, overwrite=False)
    if blocked:
        raise StoreError(blocked, file=job.target)
    total = sum(file.size for file in job.destination.catalog.files)
    options = {f.name: getattr(job.options, f.name) for f in fields(job.options) if f.name != "part"}
    parts = run_parts(
        _Part(src, job.target, options),
        workers,
        done=lambda: durable_bytes(job.target, job.destination),
        total=total,
        progress=progress,
        cpus=float(job.options.threads or 1),
    )
    digests = {path: text for part in parts for path, text in part["digests"].items()}
    _check(job, digests)
    notes = list(dict.fromkeys(note for part in parts for note in part["notes"]))
    return ReshardResult(
        url=job.target,
        plan=report_on(job, probe=False, schedule=False),
        bytes_read=sum(part["bytes_read"] for part in parts),
        bytes_written=sum(part["bytes_written"] for part in parts),
        bytes_reused=sum(part["bytes_reused"] for part in parts),
        bytes_shared=sum(part["bytes_shared"] for part in parts),
        files=sum(part["files"] for part in parts),
        seconds=time.monotonic() - began,
        checked=True,
        digests=digests,
        notes=notes,
    )


def _check(job: Job, digests: Mapping[str, str]) -> None:
    """The digests that workers computed are those that lie at the destination. Raises CorruptionError."""
    catalog = open(job.target, format=job.format.name).catalog
    if catalog.leaves is None:
        return
    for number, file in enumerate(catalog.files):
        leaves = catalog.leaves(number)
        told = digests.get(file.path)
        if told is not None and leaves is not None and digest(leaves.digests.tobytes()).hex() != told:
            raise CorruptionError(
                f"{file.path} of {job.target} is not what its worker says it wrote; remove it and run again",
                file=file.path,
            )
