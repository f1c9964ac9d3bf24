"""Copying: every file of a checkpoint as it is, through the machinery of a reshard.

To the engine a file is an array of bytes. So a copy is resumed, cloned where the file system can, bounded in memory and put in
place like every other destination, and the source's digests are compared as its bytes pass.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptkit import stores
from ckptkit.core.boxes import Box
from ckptkit.core.catalog import Catalog, Entries, File, Leaves
from ckptkit.core.destination import Destination
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.local import LocalTensor, Segment
from ckptkit.core.plan import make_plan
from ckptkit.core.schema import Tensor
from ckptkit.engine.run import run
from ckptkit.errors import CkptError, CorruptionError, StoreError, UsageError
from ckptkit.ops.checks import check_apart, obstacle
from ckptkit.ops.reports import Progress, Report, count_text, duration_text, nbytes_text
from ckptkit.ops.sources import Source, open
from ckptkit.stores.base import Store

__all__ = ["CopyResult", "copy"]


@dataclass
class CopyResult(Report):
    """What was copied.

    Attributes:
        url, source, format: What is there now, what it is a copy of, and of which format both are.
        files: Files of the copy.
        bytes_written: By this run; `bytes_cloned` are shared with the source by the file system, `bytes_reused` were durable since
            an interrupted run.
        leaves_checked: Leaves of the source that were compared with their digests on the way.
        not_checked: What could not be compared, as sentences.
    """

    url: str
    source: str
    format: str
    files: int = 0
    bytes_written: int = 0
    bytes_cloned: int = 0
    bytes_reused: int = 0
    leaves_checked: int = 0
    not_checked: list[str] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        total = self.bytes_written + self.bytes_cloned + self.bytes_reused
        return (
            f"{self.url}: {count_text(self.files, 'file')}, {nbytes_text(total)} in {duration_text(self.seconds)}, "
            "opened again and whole"
        )


def copy(
    src: str,
    dst: str,
    *,
    format: str | None = None,
    threads: int | None = None,
    memory: int = 256 << 20,
    restart: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> CopyResult:
    """Write the checkpoint at `src` to `dst` as it is: same format, same layout, same bytes.

    Args:
        src: As `ckptkit.ops.open` takes it. What is no whole checkpoint is not copied.
        dst: A path or URL that does not exist yet (or `overwrite`). It appears whole or not at all.
        format: Of the source, where it is not detected.
        threads, memory, restart, overwrite, progress: As `ckptkit.ops.reshard`.

    Raises:
        UsageError, StoreError, FormatError, InterruptedRunError: as `reshard`.
        CorruptionError: a byte of the source is not what its digest says, or of the copy not what the source's is. Nothing was put
            in place, or the message says so.
    """
    began = time.monotonic()
    source = open(src, format=format)
    if stores.is_weight_file(source.url):
        raise UsageError(f"{source.url} is one file, not a folder; copy it as any file")
    target = stores.destination(dst)
    check_apart(source.url, target)
    blocked = obstacle(target, overwrite)
    if blocked:
        raise StoreError(blocked, file=target)
    assert source.format is not None, "what is opened from a store has a format"
    marker = source.format.marker
    whole, laid = _as_bytes(source, marker)
    last = [(marker, source.store.read(marker))] if marker is not None else []
    destination = Destination(laid, finish=lambda written: last)
    done = run(
        make_plan(whole, laid),
        destination,
        source.store,
        target,
        threads=threads,
        memory=memory,
        restart=restart,
        overwrite=overwrite,
        progress=progress,
        sums=source.checksums,
    )
    _check(source, target)
    not_checked = []
    if whole.leaves is None and not source.checksums:
        not_checked.append(f"bytes against digests: {source.format.name} has none")
    return CopyResult(
        url=target,
        source=source.url,
        format=source.format.name,
        files=len(laid.files) + len(last),
        bytes_written=done.bytes_out - done.reused_bytes - done.cloned_bytes,
        bytes_cloned=done.cloned_bytes,
        bytes_reused=done.reused_bytes,
        leaves_checked=done.checked_leaves,
        not_checked=not_checked,
        seconds=time.monotonic() - began,
        notes=[*source.notes, *done.notes],
    )


def _as_bytes(source: Source, marker: str | None) -> tuple[Catalog, Catalog]:
    """Every file but the marker as an array of bytes: where it is, and where it goes."""
    store, known = source.store, {file.path: n for n, file in enumerate(source.catalog.files)}
    paths = [path for path in store.files() if path != marker]
    sizes = [store.size(path) for path in paths]
    starts = [source.catalog.files[known[path]].data_start if path in known else 0 for path in paths]
    given = source.catalog.leaves

    def leaves(number: int) -> Leaves | None:
        place = known.get(paths[number])
        return given(place) if given is not None and place is not None else None

    return (
        _catalog(source.url, paths, sizes, starts, store, leaves if given is not None else None),
        _catalog("copy", paths, sizes, [0] * len(paths), None, None),
    )


def _catalog(
    where: str,
    paths: Sequence[str],
    sizes: Sequence[int],
    starts: Sequence[int],
    store: Store | None,
    leaves: object,
) -> Catalog:
    count = len(paths)
    numbers = list(range(count))
    return Catalog(
        format="files",
        where=where,
        tensors={path: Tensor(path, ("byte",), (size,)) for path, size in zip(paths, sizes, strict=True)},
        locals=[
            LocalTensor(path, (size,), (Segment(path, Box((0,), (size,)), (0,), (1,), (0,)),))
            for path, size in zip(paths, sizes, strict=True)
        ],
        files=[File(path, size, start) for path, size, start in zip(paths, sizes, starts, strict=True)],
        # Offsets count from where leaves do, so that each block that is read is a leaf.
        entries=Entries(
            numbers,
            numbers,
            [0] * count,
            [BY_NAME["uint8"].code] * count,
            [0] * count,
            sizes,
            [-s for s in starts],
        ),
        leaves=leaves,  # type: ignore[arg-type]
        identities={path: store.identity(path) for path in paths} if store is not None else None,
    )


def _check(source: Source, target: str) -> None:
    """Open the copy, and compare its small files with what they say of themselves. Raises CorruptionError."""
    assert source.format is not None
    try:
        found = open(target, format=source.format.name)
        for problem in source.format.problems(found.store, found.catalog):
            raise problem
    except CkptError as error:
        raise CorruptionError(
            f"{target} was written, but cannot be opened again: {error}. `ckptkit verify {source.url}` says whether the source is "
            "whole; then copy again with --overwrite",
            file=target,
        ) from error
