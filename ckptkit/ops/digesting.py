"""Leaves against their digests: the bytes of a checkpoint as they are now, compared with what was written."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event, Lock

import numpy as np
import xxhash

from ckptkit.core.catalog import LEAF, ROLES, Catalog, Leaves
from ckptkit.engine.executor import run_tasks, usable_cpus
from ckptkit.errors import CkptError
from ckptkit.ops.folding import fold_names
from ckptkit.ops.reports import Progress
from ckptkit.stores.base import Store

_UNIT = 16
"""Leaves that a thread reads from one file before it takes the next."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: `kind` is structure, digest, coverage, replica, master or against."""

    kind: str
    what: str
    file: str = ""
    tensor: str = ""
    box: str = ""


@dataclass
class DigestCheck:
    """What `check_leaves` found: leaves there are, leaves and bytes that were compared, and faults."""

    leaves: int
    checked: int
    nbytes: int
    faults: list[Fault]


def structure_fault(error: CkptError) -> Fault:
    """An error of a reader, as a fault."""
    facts = error.facts
    return Fault(
        "structure",
        str(error),
        str(facts.get("file", "")),
        str(facts.get("tensor", "")),
        str(facts.get("box", "")),
    )


def check_leaves(
    store: Store,
    catalog: Catalog,
    *,
    share: float = 1.0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> DigestCheck:
    """Read every leaf (or a random share) of every file that has digests, and compare.

    One leaf is held by each thread at a time. Files are read in order, each by one thread in stretches.
    """
    result = DigestCheck(0, 0, 0, [])
    known: dict[int, Leaves] = {}
    for number in range(len(catalog.files)) if catalog.leaves is not None else ():
        assert catalog.leaves is not None
        try:
            leaves = catalog.leaves(number)
        except CkptError as error:
            result.faults.append(structure_fault(error))
            continue
        if leaves is not None:
            known[number] = leaves
            result.leaves += len(leaves.digests)
    units = list(_units(known, share))
    total = sum(len(leaves) for _, leaves in units) * LEAF
    count = max(1, min(threads or usable_cpus(), len(units)))
    buffers = [memoryview(bytearray(LEAF)) for _ in range(count)]
    lock = Lock()

    def read(task: int, worker: int) -> None:
        number, wanted = units[task]
        leaves, path = known[number], catalog.files[number].path
        bad: list[Fault] = []
        nbytes = checked = 0
        try:
            with store.open(path) as reader:
                for leaf in wanted:
                    view = buffers[worker][: min(LEAF, leaves.size - leaf * LEAF)]
                    reader.readinto(leaves.data_start + leaf * LEAF, view)
                    found, expected = xxhash.xxh3_128_digest(view), leaves.digests[leaf].tobytes()
                    nbytes, checked = nbytes + len(view), checked + 1
                    if found != expected:
                        bad.append(_leaf_fault(catalog, number, leaves, leaf, found, expected))
        except CkptError as error:
            bad.append(structure_fault(error))
        with lock:
            result.faults += bad
            result.nbytes += nbytes
            result.checked += checked

    def tick() -> None:
        if progress is not None:
            progress(min(result.checked * LEAF, total), total)

    run_tasks(len(units), count, read, Event(), tick)
    tick()
    result.faults.sort(key=lambda fault: (fault.file, fault.what))
    return result


def _units(known: dict[int, Leaves], share: float) -> Iterator[tuple[int, Sequence[int]]]:
    if share >= 1:
        for number, leaves in known.items():
            for start in range(0, len(leaves.digests), _UNIT):
                yield number, range(start, min(start + _UNIT, len(leaves.digests)))
        return
    sizes = [(number, len(leaves.digests)) for number, leaves in known.items()]
    total = sum(size for _, size in sizes)
    wanted = sorted(
        random.SystemRandom().sample(range(total), min(total, max(1, round(total * share)))) if total else ()
    )
    base = position = 0
    for number, size in sizes:
        mine = []
        while position < len(wanted) and wanted[position] < base + size:
            mine.append(wanted[position] - base)
            position += 1
        base += size
        for start in range(0, len(mine), _UNIT):
            yield number, mine[start : start + _UNIT]


def _leaf_fault(
    catalog: Catalog, number: int, leaves: Leaves, leaf: int, found: bytes, expected: bytes
) -> Fault:
    entries, path = catalog.entries, catalog.files[number].path
    low, high = leaf * LEAF, min((leaf + 1) * LEAF, leaves.size)
    inside = (entries.file == number) & (entries.offset < high) & (entries.offset + entries.nbytes > low)
    which = np.flatnonzero(inside).tolist()
    names = list(
        dict.fromkeys(
            f"{segment.tensor}/{ROLES[entries.role[k]]}"
            for k in which
            for segment in catalog.locals[int(entries.local[k])].segments
        )
    )
    folded = fold_names(names)
    holds = (
        ", ".join(folded[:12]) + (f" and {len(folded) - 12} more" if len(folded) > 12 else "")
    ) or "padding"
    what = (
        f"leaf {leaf} of {path} (bytes {leaves.data_start + low}:{leaves.data_start + high}, of {holds}): xxh3 is "
        f"{found.hex()}, its digest file says {expected.hex()}. It changed after it was written; load another copy or an "
        "earlier step"
    )
    return Fault("digest", what, path, names[0].rpartition("/")[0] if len(names) == 1 else "")
