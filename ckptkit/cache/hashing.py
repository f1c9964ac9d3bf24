"""Digests of slots: computed, compared, by a pool of threads (`xxhash` lets go of Python's lock for a leaf).

A rank file in a slot says itself where its data starts: the first eight bytes are the length of its header.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.cache.throttle import Throttle
from ckptkit.core.catalog import LEAF
from ckptkit.errors import CorruptionError, FormatError
from ckptkit.formats.native_digests import RankDigests, leaf_count
from ckptkit.formats.native_header import PAGE

_PART = 64
"""Leaves that a thread takes at once."""


def data_start(view: memoryview, used: int) -> int:
    """Where the data of a rank file of `used` bytes starts. Raises FormatError where this is no such file."""
    start = 8 + int.from_bytes(view[:8], "little") if used >= 8 else 0
    if not PAGE <= start <= used or start % PAGE:
        raise FormatError(f"the slot holds no rank file: its header would end at byte {start} of {used}")
    return start


class Hashing:
    """A pool that digests leaves.

    Args:
        threads: Its size.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="digest")

    def leaves(
        self, view: memoryview, start: int, used: int, throttle: Throttle | None = None
    ) -> npt.NDArray[np.uint8]:
        """The digests of all leaves of `view[start:used]`, `[leaves, 16]`."""
        count = leaf_count(used - start)
        found = np.empty((count, 16), np.uint8)

        def part(first: int) -> None:
            last = min(first + _PART, count)
            if throttle is not None:
                throttle.take((last - first) * LEAF)
            digests = b"".join(
                xxhash.xxh3_128_digest(view[start + k * LEAF : min(start + (k + 1) * LEAF, used)])
                for k in range(first, last)
            )
            found[first:last] = np.frombuffer(digests, np.uint8).reshape(-1, 16)

        for _ in self._pool.map(part, range(0, count, _PART)):
            pass
        return found

    def bad_leaves(
        self, view: memoryview, digests: RankDigests, throttle: Throttle | None = None
    ) -> tuple[int, ...]:
        """Leaves of a rank file that differ from their digests; -1 for its header."""
        used = digests.data_start + digests.data_size
        found = self.leaves(view, digests.data_start, used, throttle)
        bad = np.flatnonzero((found != digests.leaves).any(axis=1)).tolist()
        header = xxhash.xxh3_128_digest(view[: digests.data_start])
        return tuple(bad) if header == digests.header else (-1, *bad)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def leaf_range(digests: RankDigests, leaf: int) -> tuple[int, int]:
    """The bytes `[start, stop)` of a rank file that a digest covers; leaf -1 is the header."""
    if leaf < 0:
        return 0, digests.data_start
    start = digests.data_start + leaf * LEAF
    return start, min(start + LEAF, digests.data_start + digests.data_size)


def leaf_digest(digests: RankDigests, leaf: int) -> bytes:
    """What a leaf's digest should be; leaf -1 is the header."""
    return digests.header if leaf < 0 else digests.leaves[leaf].tobytes()


def leaves_in(digests: RankDigests, start: int, stop: int) -> Iterator[int]:
    """Leaves that share a byte with `[start, stop)` of the rank file; -1 for the header."""
    if start < digests.data_start:
        yield -1
    first = max(start - digests.data_start, 0) // LEAF
    last = leaf_count(min(stop, digests.data_start + digests.data_size) - digests.data_start)
    yield from range(first, max(last, first))


def check_given(given: RankDigests, expected: RankDigests) -> None:
    """Raise CorruptionError where digests that a trainer gave differ from those of the bytes in its slot."""
    facts = ("data_start", "data_size", "extras", "index", "world", "rank", "step", "epoch", "incarnation")
    for name in facts:
        if getattr(given, name) != getattr(expected, name):
            raise CorruptionError(
                f"the digests given with the shard are of another one: {name} is {getattr(given, name)!r}, not "
                f"{getattr(expected, name)!r}"
            )
    if given.header != expected.header:
        raise CorruptionError("the header of the rank file changed between digest and slot", leaf=-1)
    bad = np.flatnonzero((given.leaves != expected.leaves).any(axis=1))
    if len(bad):
        raise CorruptionError(
            f"leaf {int(bad[0])} (and {len(bad) - 1} more) changed between the device's digest and the slot: a tensor was written "
            "during the copy, or the copy is faulty",
            leaf=int(bad[0]),
        )
