"""The source while it is read: open files, bytes checked at first read, and whether anything changed meanwhile."""

import resource
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, NoReturn, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ckptkit.core.catalog import LEAF, Catalog, Checksum, Leaves
from ckptkit.engine.checks import FileChecks, LeafChecks, RangeChecks
from ckptkit.engine.executor import usable_cpus
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


class Sources:
    """The files of a source catalog.

    Args:
        verify: Whether bytes are compared with digests and checksums, where there are any.
        sums: Checksums that the files state of themselves.
    """

    def __init__(
        self, store: Store, catalog: Catalog, *, verify: bool, sums: Iterable[Checksum] = ()
    ) -> None:
        self.store, self.catalog, self.verify = store, catalog, verify
        self._sums: dict[str, list[Checksum]] = defaultdict(list)
        for one in sums if verify else ():
            self._sums[one.path].append(one)
        self.files: OpenFiles[Reader] = OpenFiles(lambda number: store.open(catalog.files[number].path))
        self._lock = threading.Lock()
        self._checks: dict[int, FileChecks | None] = {}
        self.identities: dict[int, str] = {}

    def checks(self, number: int) -> FileChecks | None:
        """What a file's bytes are compared with, and how far; None where there is nothing to compare."""
        if not self.verify:
            return None
        if number in self._checks:
            return self._checks[number]
        with self._lock:
            if number not in self._checks:
                self._checks[number] = self._make_checks(number)
            return self._checks[number]

    def _make_checks(self, number: int) -> FileChecks | None:
        file = self.catalog.files[number]
        leaves = None if self.catalog.leaves is None else self.catalog.leaves(number)
        if leaves is not None:
            return LeafChecks(leaves, partial(self._wrong_leaf, number, leaves))
        if file.path in self._sums:
            return RangeChecks(file.data_start, file.size, self._sums[file.path])
        return None

    @property
    def checked(self) -> int:
        """Leaves that were compared with their digests."""
        return sum(found.done.count(1) for found in self._checks.values() if isinstance(found, LeafChecks))

    def judge_sums(self) -> None:
        """Compare the checksums of everything that was read, and of all that is small, with what the files state.

        Raises CorruptionError for the first that differs.
        """
        known = {self.catalog.files[number].path: found for number, found in self._checks.items()}

        def judge(path: str) -> None:
            checks = known.get(path) or RangeChecks(0, 0, self._sums[path])
            if isinstance(checks, RangeChecks):
                with self.store.open(path) as reader:
                    checks.judge(reader)

        with ThreadPoolExecutor(usable_cpus(), "sums") as pool:
            list(pool.map(judge, self._sums))

    def note_identities(self, numbers: npt.NDArray[np.integer]) -> None:
        """Remember what the files are now. Raises FormatError when one differs from when its header was read."""
        self.store.refresh()
        for number in numbers.tolist():
            path = self.catalog.files[number].path
            self.identities[number] = self.store.identity(path)
            known = self.catalog.identities.get(path)
            if known is not None and known != self.identities[number]:
                self._raise_changed(path)

    def check_unchanged(self) -> None:
        """Raise FormatError when a file is no longer what `note_identities` saw."""
        self.store.refresh()
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

    def _wrong_leaf(self, number: int, leaves: Leaves, leaf: int, digest: bytes, entry: int) -> NoReturn:
        path, expected = self.catalog.files[number].path, leaves.digests[leaf].tobytes()
        raise CorruptionError(
            f"leaf {leaf} of {path} in {self.catalog.where} ({self.describe(entry, leaves, leaf)}): xxh3 is "
            f"{digest.hex()}, its digest file says {expected.hex()}. The file changed after it was written; load "
            "another copy or an earlier step, or repair it",
            file=path,
            leaf=leaf,
            expected=expected.hex(),
            found=digest.hex(),
        )

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
