"""Bitwise equality of what two checkpoints hold, whatever their layouts and formats."""

from collections.abc import Mapping
from threading import Lock

import numpy as np

from ckptkit.core.boxes import Box
from ckptkit.core.dtypes import DType
from ckptkit.core.plan import Key
from ckptkit.ops.digesting import Fault
from ckptkit.ops.folding import fold_names
from ckptkit.ops.reports import Progress, count_text
from ckptkit.ops.sources import Source
from ckptkit.ops.streaming import Chunk, visit
from ckptkit.ops.values import differing, is_number, numbers


def common(source: Source, other: Source) -> tuple[dict[Key, DType], list[Fault], list[str]]:
    """What can be compared bit by bit; faults where the two hold different things; what is left out, and why."""
    ours, theirs = source.catalog, other.catalog
    a, b = ours.held, theirs.held
    faults: list[Fault] = []
    skipped: list[str] = []
    for here, there, mine, yours in ((a, b, source, other), (b, a, other, source)):
        lacking: dict[str, list[str]] = {}
        for name, role in here.keys() - there.keys():
            lacking.setdefault(role, []).append(name)
        for role, names in sorted(lacking.items()):
            order = {name: place for place, name in enumerate(mine.catalog.tensors)}
            names.sort(key=order.__getitem__)
            some = ", ".join(fold_names(names)[:6])
            if role not in ("param", "buffer") and not any(r == role for _, r in there):
                skipped.append(f"{role} of {count_text(len(names), 'tensor')}: {yours.url} has none")
            else:
                faults.append(Fault("against", f"{yours.url} has no {role} of {some}", tensor=names[0]))
    wanted: dict[Key, DType] = {}
    for key in ours.held:
        if key not in b or key[0] not in theirs.tensors:
            continue
        name, role = key
        if ours.tensors[name].shape != theirs.tensors[name].shape:
            what = f"{name} has shape {ours.tensors[name].shape}, in {other.url} {theirs.tensors[name].shape}"
            faults.append(Fault("against", what, tensor=name))
        elif a[key] is not b[key]:
            faults.append(
                Fault("against", f"{name}/{role} is {a[key]}, in {other.url} {b[key]}", tensor=name)
            )
        else:
            wanted[key] = a[key]
    return wanted, faults, skipped


def unequal(
    sides: list[Source],
    wanted: Mapping[Key, DType],
    threads: int | None,
    memory: int,
    progress: Progress | None,
    *,
    nan_equals_nan: bool = False,
) -> dict[Key, tuple[int, Box]]:
    """For each key that differs: how many elements, and the first as a box."""
    counts: dict[Key, int] = {}
    first: dict[Key, int] = {}
    lock = Lock()

    def look(chunk: Chunk) -> None:
        dtype = wanted[chunk.key]
        a, b = chunk.bits
        where = differing(a, b, dtype.itemsize)
        if nan_equals_nan and len(where) and is_number(dtype):
            where = where[~(np.isnan(numbers(a, dtype)[where]) & np.isnan(numbers(b, dtype)[where]))]
        if len(where):
            with lock:
                counts[chunk.key] = counts.get(chunk.key, 0) + len(where)
                at = chunk.first + int(where[0])
                first[chunk.key] = min(first.get(chunk.key, at), at)

    visit(sides, wanted, look, threads=threads, memory=memory, progress=progress)
    found = {}
    for key in sorted(counts):
        shape = sides[0].catalog.tensors[key[0]].shape
        index = tuple(int(i) for i in np.unravel_index(first[key], shape)) if shape else ()
        found[key] = (counts[key], Box(index, tuple(i + 1 for i in index)))
    return found
