"""The source while it is read: open files, leaf digests checked at first read, and whether anything changed meanwhile."""

import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ckptkit.core.catalog import LEAF, Catalog, Leaves
from ckptkit.errors import CorruptionError, FormatError
from ckptkit.stores.base import Reader, Store


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class OpenFiles(Generic[T]):
    """Open files, shared by threads; the longest unused is closed first when there are many.

    Several such sets may be in use, so each keeps to a small share of the descriptors that the process may have.
    """

    def __init__(self, open_: Callable[[int], T]) -> None:
        self._open = open_
        self._limit = max(8, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8, 1024))
        self._files: OrderedDict[int, list] = OrderedDict()  # number: [file, users]
        self._lock = threading.Lock()

    def take(self, number: int) -> T:
        """The open file of this number; `give` it back."""
        with self._lock:
            held = self._files.get(number)
            if held is None:
                held = self._files[number] = [self._open(number), 0]
                self._shrink()
            else:
                self._files.move_to_end(number)
            held[1] += 1
            return held[0]

    def give(self, number: int) -> None:
        with self._lock:
            self._files[number][1] -= 1

    def _shrink(self) -> None:
        if len(self._files) > self._limit:
            unused = [n for n, (_, users) in self._files.items() if not users]
            for number in unused[: len(self._files) - self._limit]:
                if number != next(reversed(self._files)):
                    self._files.pop(number)[0].close()

    def close(self) -> None:
        with self._lock:
            while self._files:
                self._files.popitem()[1][0].close()


class FileChecks:
    """The digests of one source file, and which of its leaves were compared.

    Attributes:
        leaves: As the catalog gives them; leaf `k` starts at `start + k * LEAF`.
        start, stop: Of the bytes that have digests.
        done: A byte a leaf: whether it was compared.
    """

    __slots__ = ("done", "expected", "leaves", "start", "stop")

    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves
        self.start, self.stop = leaves.data_start, leaves.data_start + leaves.size
        self.expected = leaves.digests.tobytes()
        self.done = bytearray(len(leaves.digests))

    def due(self, start: int) -> int:
        """The leaf that starts at byte `start`, if it is still to be compared; else -1."""
        leaf, rest = divmod(start - self.start, LEAF)
        return leaf if not rest and 0 <= leaf < len(self.done) and not self.done[leaf] else -1


class Sources:
    """The files of a source catalog.

    Args:
        verify: Whether leaves are compared with their digests where the catalog has any.
    """

    def __init__(self, store: Store, catalog: Catalog, *, verify: bool) -> None:
        self.store, self.catalog = store, catalog
        self.verify = verify and catalog.leaves is not None
        self.files: OpenFiles[Reader] = OpenFiles(lambda number: store.open(catalog.files[number].path))
        self._lock = threading.Lock()
        self._checks: dict[int, FileChecks | None] = {}
        self.identities: dict[int, str] = {}

    def checks(self, number: int) -> FileChecks | None:
        """A file's digests and which of its leaves were compared so far; None where there is nothing to compare."""
        if not self.verify:
            return None
        if number in self._checks:
            return self._checks[number]
        with self._lock:
            if number not in self._checks:
                assert self.catalog.leaves is not None
                found = self.catalog.leaves(number)
                self._checks[number] = None if found is None else FileChecks(found)
            return self._checks[number]

    @property
    def checked(self) -> int:
        """Leaves that were compared with their digests."""
        return sum(found.done.count(1) for found in self._checks.values() if found is not None)

    def note_identities(self, numbers: npt.NDArray[np.integer]) -> None:
        """Remember what the files are now. Raises FormatError when one differs from when its header was read."""
        for number in numbers.tolist():
            path = self.catalog.files[number].path
            self.identities[number] = self.store.identity(path)
            known = self.catalog.identities.get(path)
            if known is not None and known != self.identities[number]:
                self._raise_changed(path)

    def check_unchanged(self) -> None:
        """Raise FormatError when a file is no longer what `note_identities` saw."""
        for number, known in self.identities.items():
            path = self.catalog.files[number].path
            if self.store.identity(path) != known:
                self._raise_changed(path)

    def _raise_changed(self, path: str) -> None:
        raise FormatError(
            f"{path} of {self.catalog.where} changed while it was read, so the result would be a mixture. Nothing was "
            "put in place; run again when nothing writes to the source",
            file=path,
        )

    def check_leaf(self, number: int, checks: FileChecks, leaf: int, digest: bytes, entry: int) -> None:
        """Compare the digest of a leaf just read; `entry` is what it was read for, for the message.

        Raises CorruptionError.
        """
        expected = checks.expected[16 * leaf : 16 * leaf + 16]
        if digest != expected:
            path = self.catalog.files[number].path
            raise CorruptionError(
                f"leaf {leaf} of {path} in {self.catalog.where} ({self.describe(entry, checks.leaves, leaf)}): xxh3 is "
                f"{digest.hex()}, its digest file says {expected.hex()}. The file changed after it was written; load "
                "another copy or an earlier step, or repair it",
                file=path,
                leaf=leaf,
                expected=expected.hex(),
                found=digest.hex(),
            )
        checks.done[leaf] = 1

    def describe(self, entry: int, leaves: Leaves, leaf: int) -> str:
        """The piece of an entry that lies in a leaf."""
        catalog = self.catalog
        pieces = catalog.pieces
        mine = np.flatnonzero(pieces.entry == entry)
        if not len(mine):
            return catalog.describe_entry(entry)
        # Pieces of an entry are sorted by segment; the first that reaches into the leaf is named.
        e, segments = catalog.entries, catalog.segments
        item = int(e.nbytes[entry]) // max(int(e.last[entry] - e.first[entry]), 1)
        start = catalog.files[int(e.file[entry])].data_start + int(e.offset[entry])
        low = leaves.data_start + leaf * LEAF
        for piece in mine.tolist():
            segment = pieces.segment[piece]
            strides, lo, hi = segments.strides[segment], pieces.lo[piece], pieces.hi[piece]
            first = (
                start + (int(segments.base[segment]) + int((lo * strides).sum()) - int(e.first[entry])) * item
            )
            last = first + int(((hi - lo - 1) * strides).sum()) * item
            if first < low + LEAF and last >= low:
                return catalog.describe_piece(piece)
        return catalog.describe_piece(int(mine[0]))

    def close(self) -> None:
        self.files.close()
