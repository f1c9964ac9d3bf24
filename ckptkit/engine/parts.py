"""Shares of a destination: which files a part writes, and how far all parts are."""

import json
import os

import numpy as np
import numpy.typing as npt

from ckptkit.core.copies import Copies
from ckptkit.core.destination import Destination
from ckptkit.engine.writer import SEGMENT
from ckptkit.stores.parts import Part, logs_of


def files_of(sizes: npt.NDArray[np.int64], part: Part) -> npt.NDArray[np.bool_]:
    """Whether each file is the part's: stretches of neighbours of about equal bytes, each file in exactly one part.

    Neighbours, since ranks that follow each other read the same source blocks.
    """
    middle = np.cumsum(sizes) - sizes / 2
    total = max(int(sizes.sum()), 1)
    of = np.minimum((middle * part.count / total).astype(np.int64), part.count - 1)
    found: npt.NDArray[np.bool_] = of == part.number - 1
    return found


def share_of(pairs: Copies, part: Part | None) -> Copies:
    """The replicas that a part compares; all of them without one."""
    if part is None:
        return pairs
    return pairs.take(slice(*(len(pairs) * k // part.count for k in (part.number - 1, part.number))))


def durable_bytes(target: str, destination: Destination) -> int:
    """Bytes of a destination that its parts have made durable so far, as their logs say; all of them once it is in place."""
    files = destination.catalog.files
    if os.path.isdir(target):
        return sum(file.size for file in files)
    segments: set[tuple[int, int]] = set()
    for log in logs_of(target):
        for line in log.split(b"\n")[1:-1]:
            try:
                row = json.loads(line)
                segments.add((int(row["file"]), int(row["segment"])))
            except (ValueError, KeyError, TypeError):
                break
    total = 0
    for number, segment in segments:
        file = files[number]
        origin = min(file.data_start, file.size) if destination.digests else 0
        data = segment - (origin > 0)
        total += origin if data < 0 else min(SEGMENT, file.size - origin - data * SEGMENT)
    return total
