"""A version that a restore has located, as a store: it looks like the folder of a native step, whose files come from wherever they are nearest.

`formats.native` reads it and the engine reshards from it like from any folder. Rank files come from a slot of this node (mapped), from
peers (ranged HTTP), or from durable storage. Every leaf that is read is compared with its digest here; one that is wrong, or a copy that fails, is replaced
by the next copy without the reader noticing, and counted. Reads are widened to whole leaves, except that the bytes around are thrown away.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from ckptkit import stores
from ckptkit.cache.client import CacheClient, Located, Slot
from ckptkit.cache.copies import Copy, DurableCopy, MappedCopy, PeerCopy, digests_of, extras_of, fill, widen
from ckptkit.cache.fetch import Caller, Peers, client_context
from ckptkit.cache.messages import Version
from ckptkit.errors import FormatError, ShardMissingError
from ckptkit.formats.native_columns import file_name
from ckptkit.formats.native_digests import RankDigests
from ckptkit.formats.native_manifest import INDEX, NAME, Manifest, digests_name, extras_name
from ckptkit.stores.base import Reader, Store


class LocatedStore(Store):
    """The store of one located version. Close it when everything was read: slots of this node are held until then.

    Attributes:
        bytes_from: Bytes of rank files by where they came from: `slot`, `peer`, `durable`.
        faults: What was wrong with copies that were passed over.

    Raises:
        RefusedError, AwayError: another attempt is on, or the daemon is gone.
        CkptError: the manifest cannot be put together.
    """

    parallel = 16

    def __init__(self, client: CacheClient, located: Located, *, timeout_s: float = 15.0) -> None:
        self.client, self.located = client, located
        self.url = f"cache:{located.epoch}-{located.step}"
        self.bytes_from: Counter[str] = Counter()
        self.faults: list[str] = []
        self._opened = time.monotonic()
        self.version = Version(located.epoch, located.step, located.inc)
        tls, lane = client.info().tls, client.lane
        caller = Caller(client.info().job, lane.epoch if lane else 0, lane.inc if lane else "0" * 32)
        context = client_context(tls.ca, tls.cert, tls.key) if tls is not None else None
        self._peers = Peers(caller, context, timeout_s * client.scale)
        self._durable: dict[str, Store] = {}
        self._mapped: dict[int, Slot] = {}
        self._copies: dict[int, list[Copy]] = {}
        self._digests: dict[int, tuple[bytes, RankDigests]] = {}
        self._lock = threading.RLock()
        self._small = {NAME: client.manifest(located), INDEX: client.index(located)}
        self.manifest = Manifest.parse(f"{self.url}/{NAME}", self._small[NAME])
        self._ranks = {file.path: rank for rank, file in enumerate(self.manifest.files)}
        self._sides = {
            make(file_name(rank)): (rank, what)
            for rank in range(located.world) for what, make in (("digests", digests_name), ("extras", extras_name))
        }  # fmt: skip

    # ── as a store ───────────────────────────────────────────────────────────────────────────────────────────

    def files(self) -> Sequence[str]:
        return sorted([*self._small, *self._ranks, *self._sides])

    def exists(self, path: str) -> bool:
        return path in self._small or path in self._ranks or path in self._sides

    def size(self, path: str) -> int:
        rank = self._ranks.get(path)
        return self.manifest.files[rank].size if rank is not None else len(self._content(path))

    def identity(self, path: str) -> str:
        """Files of a version never change; another copy of one is the same file."""
        return f"{self.version.epoch}-{self.version.step}-{self.version.inc}-{path}"

    def open(self, path: str) -> Reader:
        rank = self._ranks.get(path)
        return (
            _Small(self._content(path))
            if rank is None
            else _RankFile(self, rank, self.manifest.files[rank].size)
        )

    def _content(self, path: str) -> bytes:
        if path in self._small:
            return self._small[path]
        if path not in self._sides:
            raise ShardMissingError(f"{self.url} has no {path}", file=path)
        rank, what = self._sides[path]
        raw, digests = self.digests(rank)
        if what == "digests":
            return raw
        self._small[path] = extras_of(self.copies(rank), digests)
        return self._small[path]

    # ── shards ───────────────────────────────────────────────────────────────────────────────────────────────

    def mapped(self, rank: int) -> memoryview | None:
        """The bytes of a rank file in a slot of this node, read-only, where there is one; not compared with digests. Valid until `close`."""
        for copy in self.copies(rank):
            if isinstance(copy, MappedCopy):
                return copy.view
        return None

    def digests(self, rank: int) -> tuple[bytes, RankDigests]:
        """The `.digests` of a shard, proved by the digest that the restore decided on. Raises CorruptionError where no copy has it."""
        with self._lock:
            if rank not in self._digests:
                raw, found = digests_of(self.copies(rank), self.located.digests[rank])
                file, v = self.manifest.files[rank], self.version
                if (found.data_start + found.data_size, found.rank, found.step, found.epoch) != (
                    file.size,
                    rank,
                    v.step,
                    v.epoch,
                ):
                    raise FormatError(
                        f"{file.path} of {self.url} is of another save than the manifest", file=file.path
                    )
                self._digests[rank] = raw, found
            return self._digests[rank]

    def copies(self, rank: int) -> list[Copy]:
        """The copies of a shard, the nearest first. Ones that cannot be opened are left out, and noted."""
        with self._lock:
            if rank not in self._copies:
                found: list[Copy] = []
                for source in self.located.sources[rank]:
                    try:
                        found.append(self._copy(rank, source.kind, source.place))
                    except Exception as error:  # noqa: BLE001  (the next copy may do)
                        self.faults.append(f"{source.kind} {source.place}: {error}")
                self._copies[rank] = found
            return self._copies[rank]

    def _copy(self, rank: int, kind: str, place: str) -> Copy:
        if kind == "slot":
            number = int(place)
            slot = self._mapped.setdefault(number, self.client.map(number))
            return MappedCopy(slot.buffer, lambda what: self.client.side(number, what), f"slot {number}")
        if kind == "peer":
            return PeerCopy(self._peers, place, self.version, rank)
        if place not in self._durable:
            self._durable[place] = stores.open_store(place)
        return DurableCopy(self._durable[place], rank)

    def read_leaves(self, rank: int, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with whole leaves, each right. Raises CorruptionError where some leaf is right in no copy."""
        _, digests = self.digests(rank)
        copy = fill(self.copies(rank), digests, start, buffer, told=self._told)
        with self._lock:
            self.bytes_from[copy.kind] += buffer.nbytes

    def _told(self, copy: Copy, leaf: int, why: str) -> None:
        what = "" if leaf == -2 else f"leaf {leaf} "
        with self._lock:
            self.faults.append(f"{copy.where}: {what}{why}")

    def close(self) -> None:
        """Let go of slots and connections, and tell the daemon where the bytes came from."""
        self._peers.close()
        mismatches = sum("differs from its digest" in fault for fault in self.faults)
        facts = {f"restore_bytes_{kind}": float(count) for kind, count in self.bytes_from.items()}
        for kind, _ in self.bytes_from.most_common(1):
            facts[f"restore_seconds_{kind}"] = time.monotonic() - self._opened
        self.client.note(**facts, restore_mismatch=float(mismatches))
        for number in list(self._mapped):
            del self._mapped[number]
            self.client.unmap(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Small(Reader):
    def __init__(self, content: bytes) -> None:
        self._content, self.size = content, len(content)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        data = self._content[offset : offset + buffer.nbytes]
        if len(data) != buffer.nbytes:
            raise FormatError(f"bytes {offset}:{offset + buffer.nbytes} of a file of {self.size} are needed")
        buffer.cast("B")[:] = data

    def close(self) -> None:
        pass


class _RankFile(Reader):
    def __init__(self, store: LocatedStore, rank: int, size: int) -> None:
        self._store, self._rank, self.size = store, rank, size

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`. Only what has to be read beyond it goes through memory of its own."""
        view = buffer.cast("B")
        stop = offset + view.nbytes
        if stop > self.size:
            name = file_name(self._rank)
            raise FormatError(
                f"{name} ends at byte {self.size}, but bytes {offset}:{stop} are needed", file=name
            )
        if not view.nbytes:
            return
        _, digests = self._store.digests(self._rank)
        low, high = widen(digests, offset, stop)
        if (low, high) == (offset, stop):
            self._store.read_leaves(self._rank, offset, view)
            return
        inner_low, inner_high = _inner(digests, offset, stop)
        if inner_low < inner_high:
            self._store.read_leaves(self._rank, inner_low, view[inner_low - offset : inner_high - offset])
        else:
            inner_low = inner_high = stop
        for edge_low, edge_high in ((offset, inner_low), (inner_high, stop)):
            if edge_low < edge_high:
                wide_low, wide_high = widen(digests, edge_low, edge_high)
                wide = memoryview(bytearray(wide_high - wide_low))
                self._store.read_leaves(self._rank, wide_low, wide)
                view[edge_low - offset : edge_high - offset] = wide[
                    edge_low - wide_low : edge_high - wide_low
                ]

    def close(self) -> None:
        pass


def _inner(digests: RankDigests, start: int, stop: int) -> tuple[int, int]:
    """The largest range of whole leaves inside `[start, stop)`; empty where there is none."""
    low, high = widen(digests, start, start + 1)
    first = start if low == start else high
    low, high = widen(digests, stop - 1, stop)
    last = stop if high == stop else low
    return (first, last) if first < last else (stop, stop)
