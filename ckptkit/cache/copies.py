"""Copies of one shard, wherever they lie: a mapped slot, a peer's slot, durable storage. Read from several threads at once.

None is trusted. `digests_of` proves a `.digests` file by its content digest, which the protocol knows for every shard; with it `fill` takes leaves from
the first copy that has them right.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import xxhash

from ckptkit.cache.fetch import Peers
from ckptkit.cache.hashing import leaf_digest, leaf_range, leaves_in
from ckptkit.cache.messages import Version
from ckptkit.core.catalog import LEAF
from ckptkit.errors import CkptError, CorruptionError, StoreError
from ckptkit.formats.native_columns import file_name
from ckptkit.formats.native_digests import RankDigests
from ckptkit.formats.native_manifest import digests_name, extras_name
from ckptkit.stores.base import Store

T = TypeVar("T")
Arrived = Callable[[int], None]
_GONE = (404, 410, 416)
"""What a peer answers that has no such shard any more."""


class Copy(ABC):
    """One copy of a shard. `where` is for messages, `kind` for metrics: `slot`, `peer` or `durable`."""

    where: str
    kind: str

    @abstractmethod
    def small(self, what: str) -> bytes:
        """The content of its `digests` or `extras`. Raises StoreError or FormatError."""

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview, arrived: Arrived) -> None:
        """Fill `buffer` with bytes of the rank file; `arrived` may be told how many are there already. Raises StoreError or FormatError."""


class MappedCopy(Copy):
    """A slot of this node, mapped; its small files come from `load`."""

    kind = "slot"

    def __init__(self, view: memoryview, load: Callable[[str], bytes], where: str) -> None:
        self.view, self._load, self.where = view, load, where

    def small(self, what: str) -> bytes:
        return self._load(what)

    def read_into(self, offset: int, buffer: memoryview, arrived: Arrived) -> None:
        buffer[:] = self.view[offset : offset + buffer.nbytes]


class PeerCopy(Copy):
    """A slot of another node."""

    kind = "peer"

    def __init__(self, peers: Peers, address: str, version: Version, rank: int) -> None:
        self._peers, self._address = peers, address
        self._path = f"/v1/shards/{version.epoch}/{version.step}/{version.inc}/{rank}"
        self.where = f"{address}, rank {rank} of {version}"

    def small(self, what: str) -> bytes:
        return self._peers.get(self._address, f"{self._path}/{what}")

    def read_into(self, offset: int, buffer: memoryview, arrived: Arrived) -> None:
        self._peers.read_into(self._address, f"{self._path}/data", offset, buffer, arrived)


class DurableCopy(Copy):
    """A rank file of a durable step."""

    kind = "durable"

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._name = store, file_name(rank)
        self.where = f"{store.url}/{self._name}"

    def small(self, what: str) -> bytes:
        return self._store.read({"digests": digests_name, "extras": extras_name}[what](self._name))

    def read_into(self, offset: int, buffer: memoryview, arrived: Arrived) -> None:
        with self._store.open(self._name) as reader:
            reader.readinto(offset, buffer)


def digests_of(copies: Sequence[Copy], digest: str) -> tuple[bytes, RankDigests]:
    """The `.digests` of a rank file with this content digest (hex), from the first copy that has it.

    Raises CorruptionError that names every copy, StoreError where one of them was not reached.
    """

    def load(copy: Copy) -> tuple[bytes, RankDigests]:
        data = copy.small("digests")
        found = RankDigests.parse(copy.where, data)
        if found.content.hex() != digest:
            raise CorruptionError(f"the digests at {copy.where} are of another save", file=copy.where)
        return data, found

    return _first(copies, load, "digests")


def extras_of(copies: Sequence[Copy], digests: RankDigests) -> bytes:
    """The `.extras` that the digests name, from the first copy that has it. Raises as `digests_of`."""

    def load(copy: Copy) -> bytes:
        data = copy.small("extras")
        if xxhash.xxh3_128_digest(data) != digests.extras:
            raise CorruptionError(f"the extras at {copy.where} differ from their digest", file=copy.where)
        return data

    return _first(copies, load, "extras")


def _first(copies: Sequence[Copy], load: Callable[[Copy], T], what: str) -> T:
    faults: list[CkptError] = []
    for copy in copies:
        try:
            return load(copy)
        except CkptError as error:
            faults.append(error)
    raise none_right(f"no copy has its {what}", faults)


def none_right(what: str, faults: Sequence[CkptError]) -> CkptError:
    """The error of a shard that no copy gives: corrupt only where every copy was read."""
    text = f"{what}: {'; '.join(map(str, faults)) or 'there is none'}"
    late = any(isinstance(fault, StoreError) and fault.facts.get("code") not in _GONE for fault in faults)
    return StoreError(text) if late else CorruptionError(text)


def wrong_leaves(digests: RankDigests, start: int, data: memoryview) -> Iterator[int]:
    """Leaves wholly inside `data`, which are the bytes from `start` on, that differ from their digests; -1 for the header."""
    check = _Check(digests, start, data)
    check.arrived(data.nbytes)
    yield from check.wrong


class _Check:
    """Compares whole leaves inside `data` as they arrive, while they are in the processor's cache."""

    def __init__(self, digests: RankDigests, start: int, data: memoryview) -> None:
        self.wrong: list[int] = []
        self._digests, self._start, self._data = digests, start, data
        self._leaves = leaves_in(digests, start, start + data.nbytes)
        self._leaf = next(self._leaves, None)

    def arrived(self, nbytes: int) -> None:
        """The first `nbytes` are there."""
        while self._leaf is not None:
            low, high = (at - self._start for at in leaf_range(self._digests, self._leaf))
            if high > nbytes:
                return
            if low >= 0 and xxhash.xxh3_128_digest(self._data[low:high]) != leaf_digest(
                self._digests, self._leaf
            ):
                self.wrong.append(self._leaf)
            self._leaf = next(self._leaves, None)


def widen(digests: RankDigests, start: int, stop: int) -> tuple[int, int]:
    """The smallest range of whole leaves around `[start, stop)`."""
    if start >= stop:
        return start, stop
    first, end = digests.data_start, digests.data_start + digests.data_size
    low = 0 if start < first else first + (start - first) // LEAF * LEAF
    high = first if stop <= first else min(first + -(-(stop - first) // LEAF) * LEAF, end)
    return low, high


def fill(
    copies: Sequence[Copy],
    digests: RankDigests,
    start: int,
    buffer: memoryview,
    *,
    told: Callable[[Copy, int, str], None] = lambda copy, leaf, why: None,
) -> Copy:
    """Fill `buffer` with whole leaves from `start` on, every one as its digest says.

    The first copy is read, and its bad leaves once more; then the leaves that are still bad, or all where a copy fails, are taken from the next.

    Args:
        told: Called for every copy that failed and every leaf that was bad (leaf -2 for the whole copy).

    Returns:
        The copy that gave most.

    Raises:
        CorruptionError: some leaf is right in no copy; names all of them. StoreError where one of them was not reached.
    """
    stop = start + buffer.nbytes
    due: list[tuple[int, int]] = [(start, stop)]
    most: Copy | None = None
    faults: list[CkptError] = []
    for copy in copies:
        for _ in range(2):  # a second time, since a flip may have happened on the way
            bad: list[int] = []
            try:
                for low, high in due:
                    part = buffer[low - start : high - start]
                    check = _Check(digests, low, part)
                    copy.read_into(low, part, check.arrived)
                    check.arrived(part.nbytes)
                    bad += check.wrong
            except CkptError as error:
                told(copy, -2, str(error))
                faults.append(error)
                break
            most = most or copy
            for leaf in bad:
                told(copy, leaf, "differs from its digest")
            due = [leaf_range(digests, leaf) for leaf in bad]
            if not due:
                return most
        else:
            differ = f"{copy.where}: {len(due)} leaves differ, the first at byte {due[0][0]}"
            faults.append(CorruptionError(differ))
    raise none_right(f"no copy has bytes {due[0][0]}:{due[-1][1]} right", faults)
