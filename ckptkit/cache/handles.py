"""What a client gets from its daemon, and gives to it: values, and slots mapped into memory."""

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Skipped:
    """Why a save, or a part of it, does not happen. False as a condition.

    `reason` is one of `busy` (no slot is free: replication or drain lags), `too_big`, `away` (no daemon), `fenced` (a newer incarnation
    of the job runs), `aborted` (another rank's part failed, or it took too long), `restoring` (before the restore of all ranks has ended),
    `stale` (slots were replaced), `refused`.
    """

    reason: str
    detail: str = ""

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files with which ranks fetch from peers: the job's CA, this node's certificate and key."""

    ca: str
    cert: str
    key: str


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a daemon says of itself.

    Attributes:
        node: Its id, unique in the job.
        address: `host:port` where peers reach it. Ranks tell each other at the start: it is half of a `Member`.
        domain: Failure domain (rack, power), empty where none was given.
        max_epoch: The highest epoch that it has seen; the next one must be above those of all nodes.
        url: Where steps are drained to, empty for nowhere.
        tls: None where nodes talk in clear.
        protocol, version: Of the messages, and of the daemon's ckptkit.
    """

    node: str
    address: str
    domain: str
    max_epoch: int
    job: str
    url: str
    tls: TlsFiles | None
    protocol: int
    version: str


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of an epoch and the daemon of its node, as `NodeInfo` names it."""

    rank: int
    node: str
    address: str
    domain: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "node": self.node, "address": self.address, "domain": self.domain}


class Slot:
    """Shared memory for one rank file.

    Attributes:
        number: Its name in the daemon.
        nbytes: Capacity.
        buffer: All of it, writable, page-aligned. Valid until the client is closed; register it with the device once. Write only between
            `begin` and `seal` of this slot.
    """

    __slots__ = ("_map", "buffer", "identity", "nbytes", "number")

    def __init__(self, number: int, nbytes: int, fd: int, *, writable: bool = True) -> None:
        found = os.fstat(fd)
        self.identity = (found.st_dev, found.st_ino)
        self.number, self.nbytes = number, nbytes
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, access)
        self.buffer = memoryview(self._map)

    def close(self) -> None:
        """Unmap, where no array looks at the buffer any more; else whoever holds the last one does."""
        with suppress(BufferError):
            self.buffer.release()
            self._map.close()


@dataclass(frozen=True)
class Lane:
    """The slots of one rank, for one epoch.

    Attributes:
        slots: All of them, mapped and populated. `begin` gives one of these.
        slot_bytes: Capacity of each.
    """

    epoch: int
    inc: str
    rank: int
    slots: tuple[Slot, ...]
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class ShardSource:
    """One copy of a shard. `kind` is `slot` (`place`: its number, on this node), `peer` (`place`: `host:port`) or `durable`
    (`place`: URL of the step)."""

    kind: str
    node: str
    place: str


@dataclass(frozen=True)
class Located:
    """The version that all ranks restore, and where each of its shards is.

    `ckptkit.cache.store.LocatedStore(client, located)` makes a store of it, which `formats.native` reads.

    Attributes:
        attempt: Counts from 1; a failed attempt is followed by one with an older version or fewer sources.
        epoch, step, inc: The version. `step` is completed optimizer steps.
        world, index_hash: Of the layout in which it was saved, which may not be today's.
        sources: For each shard (saved rank) its copies, the nearest to this node first.
        digests: For each shard the content digest of its rank file, in hex.
        url: The step's folder in durable storage where it is there too, else empty.
        passed_over: Newer versions that are not whole, and why, newest first.
    """

    attempt: int
    epoch: int
    step: int
    inc: str
    world: int
    index_hash: str
    sources: tuple[tuple[ShardSource, ...], ...]
    digests: tuple[str, ...]
    url: str = ""
    passed_over: tuple[str, ...] = field(default=())


def default_socket(job: str) -> str:
    """Where the daemon of a job listens unless its configuration says otherwise; `CKPTKIT_CACHE_SOCKET` overrules."""
    given = os.environ.get("CKPTKIT_CACHE_SOCKET")
    if given:
        return given
    root = os.environ.get("CKPTKIT_CACHE_ROOT") or f"/dev/shm/ckptkit-{os.getuid()}"
    return os.path.join(root, job, "daemon.sock")


def located_from(plain: Mapping[str, Any]) -> Located:
    """A decision as the daemon tells it."""
    return Located(
        attempt=plain["attempt"], epoch=plain["epoch"], step=plain["step"], inc=plain["inc"], world=plain["world"],
        index_hash=plain["index_hash"], digests=tuple(plain["digests"]), url=plain.get("url", ""), passed_over=tuple(plain.get("passed_over", ())),
        sources=tuple(
            tuple(ShardSource(s["kind"], s["node"], s["place"]) for s in shard) for shard in plain["sources"]
        ),
    )  # fmt: skip
