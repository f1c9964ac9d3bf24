"""Checksums that files state of themselves (those of zips), against the bytes as they are now."""

import random
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import numpy as np
import numpy.typing as npt

from ckptkit.core.copies import copies_into
from ckptkit.core.plan import Plan
from ckptkit.engine.executor import usable_cpus
from ckptkit.errors import CkptError, CorruptionError
from ckptkit.formats.base import Checksum
from ckptkit.ops.digesting import DigestCheck, Fault, structure_fault
from ckptkit.stores.base import Reader, Store

_BLOCK = 1 << 20
"""Bytes read at a time by each thread: they stay in a CPU's cache."""

_SMALL = 1 << 16
"""Members of fewer bytes are always checked."""

_BATCH = 64
"""Ranges of one file that a thread checks before it takes others."""


def check_sums(
    store: Store, sums: Iterable[Checksum], *, share: float = 1.0, threads: int | None = None
) -> DigestCheck:
    """Read every range (or a random share) and compare its CRC-32 with what the file says."""
    result = DigestCheck(0, 0, 0, [])
    try:
        listed = list(sums)
    except CkptError as error:
        result.faults.append(structure_fault(error))
        return result
    result.leaves = len(listed)
    if share < 1:
        listed = [one for one in listed if random.random() < share] or listed[:1]
    batches = []
    for _, group in groupby(listed, key=lambda one: one.path):
        members = list(group)
        batches += [members[at : at + _BATCH] for at in range(0, len(members), _BATCH)]

    def check(batch: list[Checksum]) -> list[Fault]:
        try:
            with store.open(batch[0].path) as reader:
                return [fault for one in batch if (fault := _compare(reader, one)) is not None]
        except CkptError as error:
            return [structure_fault(error)]

    with ThreadPoolExecutor(threads or usable_cpus()) as pool:
        for faults in pool.map(check, batches):
            result.faults += faults
    result.checked = len(listed)
    result.nbytes = sum(one.stop - one.start for one in listed)
    return result


def check_sums_read(
    store: Store, sums: Iterable[Checksum], plan: Plan, *, threads: int | None = None
) -> None:
    """Compare what a plan reads with the checksums of its files, since bytes that are written get new digests.

    Members that no copy reads are left out, but for small ones: extras are among them.

    Raises CorruptionError for the first range that differs.
    """
    copies = copies_into(plan)
    spans: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
    for number, file in enumerate(plan.source.files):
        mine = copies.src_file == number
        order = np.argsort(copies.src[mine])
        spans[file.path] = copies.src[mine][order], np.maximum.accumulate(copies.src_end[mine][order])

    def read(one: Checksum) -> bool:
        if one.stop - one.start <= _SMALL:
            return True
        if one.path not in spans:
            return False
        starts, ends = spans[one.path]
        before = int(np.searchsorted(starts, one.stop))  # copies that begin before the range ends
        return before > 0 and int(ends[before - 1]) > one.start

    for fault in check_sums(store, filter(read, sums), threads=threads).faults:
        raise CorruptionError(fault.what, file=fault.file)


def _compare(reader: Reader, one: Checksum) -> Fault | None:
    found = 0
    block = memoryview(bytearray(min(_BLOCK, one.stop - one.start)))
    for at in range(one.start, one.stop, _BLOCK):
        part = block[: min(_BLOCK, one.stop - at)]
        reader.readinto(at, part)
        found = zlib.crc32(part, found)
    if found == one.crc32:
        return None
    return Fault(
        "digest",
        f"{one.what} (bytes {one.start}:{one.stop} of {one.path}) has the CRC-32 {found:08x}, but its zip says "
        f"{one.crc32:08x}: it changed after it was written. Restore it from another copy",
        file=one.path,
    )
