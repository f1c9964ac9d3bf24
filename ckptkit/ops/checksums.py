"""Checksums that files state of themselves (those of zips), against the bytes as they are now."""

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from ckptkit.core.catalog import Checksum
from ckptkit.engine.checks import wrong_sum
from ckptkit.engine.digests import crc32
from ckptkit.engine.executor import usable_cpus
from ckptkit.errors import CkptError
from ckptkit.ops.digesting import DigestCheck, Fault, structure_fault
from ckptkit.stores.base import Reader, Store

_BLOCK = 1 << 20
"""Bytes read at a time by each thread: they stay in a CPU's cache."""

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


def _compare(reader: Reader, one: Checksum) -> Fault | None:
    found = 0
    block = memoryview(bytearray(min(_BLOCK, one.stop - one.start)))
    for at in range(one.start, one.stop, _BLOCK):
        part = block[: min(_BLOCK, one.stop - at)]
        reader.readinto(at, part)
        found = crc32(part, found)
    if found == one.crc32:
        return None
    return Fault("digest", wrong_sum(one, found), file=one.path)
