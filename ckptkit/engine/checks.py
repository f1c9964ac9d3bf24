"""What is known of a source file's bytes, compared while blocks of it pass.

A file has digests of its leaves (the native format), or states checksums of some of its ranges (the members of a zip), or
neither. Both are looked at in *cells* of `LEAF` bytes from where the file's data starts, each of which counts once,
however often it is read. A leaf is judged at once; a range when all of its cells were seen.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence

from ckptkit.core.catalog import LEAF, Checksum, Leaves
from ckptkit.engine import checksums
from ckptkit.engine.digests import Hasher, crc32, digest
from ckptkit.errors import CorruptionError
from ckptkit.stores.base import Reader

SMALL = 1 << 16
"""Ranges of fewer bytes are judged even if nothing was read of them: extras are among them."""


class FileChecks(ABC):
    """Checks of one source file.

    Attributes:
        start, stop: Of the bytes that cells cover.
        done: A byte a cell: whether it was seen.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.done = bytearray(max(-(-(stop - start) // LEAF), 0))

    def due(self, start: int) -> int:
        """The cell that starts at byte `start`, if it is still to be seen; else -1."""
        cell, rest = divmod(start - self.start, LEAF)
        return cell if not rest and 0 <= cell < len(self.done) and not self.done[cell] else -1

    @abstractmethod
    def see(self, cell: int, views: Sequence[memoryview], entry: int) -> None:
        """Take a whole cell, in consecutive views; `entry` is what it was read for, for messages.

        Raises CorruptionError.
        """


class LeafChecks(FileChecks):
    """Digests of a file's leaves.

    Args:
        fail: Raises for `(leaf, its digest as found, entry)`.
    """

    def __init__(self, leaves: Leaves, fail: Callable[[int, bytes, int], None]) -> None:
        super().__init__(leaves.data_start, leaves.data_start + leaves.size)
        self._expected = leaves.digests.tobytes()
        self._fail = fail

    def see(self, cell: int, views: Sequence[memoryview], entry: int) -> None:
        if len(views) == 1:
            found = digest(views[0])
        else:
            hasher = Hasher()
            for view in views:
                hasher.update(view)
            found = hasher.digest()
        self.compare(cell, found, entry)

    def compare(self, leaf: int, found: bytes, entry: int) -> None:
        """Compare the digest of a leaf. Raises CorruptionError."""
        if found != self._expected[16 * leaf : 16 * leaf + 16]:
            self._fail(leaf, found, entry)
        self.done[leaf] = 1


class RangeChecks(FileChecks):
    """Checksums that a file states of ranges of itself, which do not overlap."""

    def __init__(self, start: int, stop: int, sums: Sequence[Checksum]) -> None:
        super().__init__(start, stop)
        self._sums = sorted(sums, key=lambda one: one.start)
        self._starts = [one.start for one in self._sums]
        # By range, its parts seen: from where, up to where and their checksum. One part a cell, whoever saw it.
        self._parts: list[dict[int, tuple[int, int]]] = [{} for _ in self._sums]

    def see(self, cell: int, views: Sequence[memoryview], entry: int) -> None:
        self._add(self.start + cell * LEAF, views)
        self.done[cell] = 1

    def _add(self, start: int, views: Sequence[memoryview]) -> None:
        """Take the parts of all ranges that lie in consecutive bytes from `start` on."""
        stop = start + sum(view.nbytes for view in views)
        for number in range(max(bisect_right(self._starts, start) - 1, 0), len(self._sums)):
            one = self._sums[number]
            low, high = max(one.start, start), min(one.stop, stop)
            if one.start >= stop:
                break
            if low < high:
                found, at = 0, start
                for view in views:
                    part = view[max(low - at, 0) : max(high - at, 0)]
                    if part.nbytes:
                        found = crc32(part, found)
                    at += view.nbytes
                self._parts[number][low] = high, found

    def judge(self, reader: Reader) -> None:
        """Compare every range of which something was seen, or which is small; what was not seen of it is read now.

        Raises CorruptionError for the first that differs.
        """
        block = memoryview(bytearray(LEAF))
        for one, parts in zip(self._sums, self._parts, strict=True):
            if not parts and one.stop - one.start > SMALL:
                continue
            at = one.start
            while at < one.stop:
                if at not in parts:
                    end = min([low for low in parts if low > at], default=one.stop)
                    view = block[: min(end - at, LEAF)]
                    reader.readinto(at, view)
                    parts[at] = at + view.nbytes, crc32(view)
                at = parts[at][0]
            found = checksums.total(one.start, one.stop, [(low, *part) for low, part in parts.items()])
            if found != one.crc32:
                raise CorruptionError(wrong_sum(one, found), file=one.path)


def wrong_sum(one: Checksum, found: int) -> str:
    """What to tell about a range whose checksum differs."""
    return (
        f"{one.what} (bytes {one.start}:{one.stop} of {one.path}) has the CRC-32 {found:08x}, but its zip says "
        f"{one.crc32:08x}: it changed after it was written. Restore it from another copy"
    )
