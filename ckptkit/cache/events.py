"""What happens to the state machines (events), and what they ask for (effects).

`handle(event, now)` of `Node` or `Coordinator` gives effects **in the order in which they must be performed**. A `Write…` effect is done when
the file has been renamed into place; nothing after it in any list may happen before, and a write that fails ends the daemon (it recovers
from what is stored). Other effects may be started without waiting for their end, which comes back as an event where one is named.
"""

from dataclasses import dataclass
from typing import Annotated

from ckptkit.cache.codec import Between, message
from ckptkit.cache.messages import (
    Bans,
    CoordinatorRecord,
    Count,
    Digest,
    Epoch,
    Inventory,
    Owner,
    PeerMessage,
    Place,
    Rank,
    Reason,
    Shard,
    SlotId,
    SlotRecord,
    Version,
)

LocalRank = Annotated[int, Between(0, 4095)]

# --- calls of a rank on its daemon's socket; the shell builds them with `codec.build` ------------------------------------


@message
class Join:
    """Take part in an epoch as `rank`. Answered by `Lease`, or 409 with the highest epoch known."""

    epoch: Epoch
    rank: Rank
    local_rank: LocalRank
    bytes_max: Count


@message
class Begin:
    """A slot for this rank's shard of `step`. Answered by `Begun`; 429 busy, 413 too big, 425 before the restore ended, 409.

    A rank that gets 429 has skipped the step, and all ranks with it, unless it says `wait`: then it asks again.
    """

    step: Count
    nbytes: Count
    wait: bool = False


@message
class Seal:
    """The slot holds the whole shard. The shell stores extras and given digests, and has the index, before it says so.

    Answered 200 at once; digests are computed (and compared with given ones) afterwards. 409 where the save was aborted.
    """

    slot: SlotId
    used: Count
    index_hash: Digest


@message
class Abort:
    """The rank gives up this slot, and writes to it no more."""

    slot: SlotId


@message
class Loaded:
    """The rank has loaded and verified what restore `attempt` decided, or could not (`failure`).

    `late`: some copy was not reached, so that it may succeed when tried again.
    """

    attempt: Count
    failure: Reason = ""
    late: bool = False


@message
class MarkBad:
    """What was restored turned out bad (a loss that is not finite, soon after)."""

    version: Version


TrainerCall = Join | Begin | Seal | Abort | Loaded | MarkBad


# --- events of a node -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Called:
    """A rank's call. `session` is the connection's number, never used twice; `owner` the process behind it."""

    session: int
    owner: Owner
    call: TrainerCall


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The connection ended. The process may live, write to its slots, and come back."""

    session: int


@dataclass(frozen=True, slots=True)
class OwnerExited:
    """The process is gone (its pidfd said so, or /proc has another starttime): it writes nothing any more."""

    owner: Owner


@dataclass(frozen=True, slots=True)
class Received:
    """A peer's message, decoded. Answer the request 409 where the effects hold `Refuse`, else 200."""

    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Hashed:
    """End of `HashSlot`. `digest` is empty where the bytes do not match the digests given by the trainer, or cannot be read."""

    slot: int
    seq: int
    digest: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pulled:
    """End of `PullShard`: every leaf, digest file, extras and index are here and verified, or not (`reason`).

    `used` is the size of the data; only a restore's pulls do not know it before.
    """

    slot: int
    seq: int
    reason: str = ""
    used: int = 0


@dataclass(frozen=True, slots=True)
class PullProgress:
    """Ranges of a pull that were verified, hex; stored so that a restarted daemon goes on from there."""

    slot: int
    seq: int
    bitmap: str


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """The scrubber read the slot: fine, or leaves differ from their digests."""

    slot: int
    seq: int
    bad_leaves: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Repaired:
    """End of `RepairSlot`. `outcome`: `ok` (re-read and right), `no_source` (no good copy was reached) or `still_bad` (bad memory)."""

    slot: int
    seq: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Drained:
    """End of `DrainVersion`, or (`failure`) a failed try; the shell goes on trying until `CancelDrain`."""

    version: Version
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Memory is short: 0 no longer, 1 take no new copies, 2 release `release` copies too."""

    level: int
    release: int = 0


@dataclass(frozen=True, slots=True)
class SlotReady:
    """The slot's memory is allocated and populated (again): it may be used."""

    slot: int


@dataclass(frozen=True, slots=True)
class Operator:
    """A request of the operator, or SIGTERM, on this node: `drain` or bans."""

    drain: bool = False
    bans: Bans | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes. At least every second while an epoch is on."""


NodeEvent = (
    Called | SessionClosed | OwnerExited | Received | Hashed | Pulled | PullProgress | Scrubbed | Repaired | Drained | Pressure
    | SlotReady | Operator | Tick
)  # fmt: skip


# --- events of the coordinator --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InventoryArrived:
    """A node's inventory, or None: it could not be had."""

    node: str
    inventory: Inventory | None


@dataclass(frozen=True, slots=True)
class DurableListed:
    """Shards of every durable version with a manifest, the durable bans, and where members of the last epochs were. Without a durable URL: empty. `failure`: not reachable."""

    shards: tuple[Shard, ...] = ()
    bans: Bans = Bans()  # noqa: RUF009
    failure: str = ""
    former: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class ManifestWritten:
    """End of `WriteManifest`; with a `failure` nothing is visible."""

    version: Version
    failure: str = ""


CoordinatorEvent = Received | InventoryArrived | DurableListed | ManifestWritten | Tick


# --- effects --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteSlot:
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class WriteEpoch:
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class WriteBans:
    bans: Bans


@dataclass(frozen=True, slots=True)
class WriteCoordinator:
    record: CoordinatorRecord


@dataclass(frozen=True, slots=True)
class EpochAccepted:
    """Drop the coordinator of an earlier epoch; make one (`Coordinator.start`) where this node is the epoch's coordinator."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Lease:
    """Answer to `Join`: hand out the lane's slots, by number."""

    session: int
    lane: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Begun:
    session: int
    slot: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Any other answer to a call, with a code of HTTP."""

    session: int
    code: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Say `reason` to the rank and close the connection."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The peer's message was not taken: answer it with this code."""

    code: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Send:
    """To the daemon `to` (perhaps this one); `to` is a member of the epoch. May be lost, late, twice."""

    to: str
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Broadcast:
    """To all members' daemons, this one too."""

    message: PeerMessage


@dataclass(frozen=True, slots=True)
class HashSlot:
    """Compute the leaf digests (compare with given ones), write the digest file. Ends in `Hashed`."""

    slot: int
    seq: int


@dataclass(frozen=True, slots=True)
class PullShard:
    """Fetch digests, extras, index where missing, and data into the slot; ranges in `bitmap` are re-checked, not fetched. Ends in `Pulled`."""

    slot: int
    seq: int
    shard: Shard
    sources: tuple[str, ...]
    bitmap: str = ""


@dataclass(frozen=True, slots=True)
class CancelPull:
    """No one wants this copy any more. `Pulled` with a reason says that nothing writes to the slot now."""

    slot: int
    seq: int


@dataclass(frozen=True, slots=True)
class RepairSlot:
    """Replace bad leaves from one of the sources, re-read them. Ends in `Repaired`."""

    slot: int
    seq: int
    shard: Shard
    bad_leaves: tuple[int, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """Give the free slot's memory back to the system. It is not used again before `SlotReady`."""

    slot: int


@dataclass(frozen=True, slots=True)
class WatchOwner:
    """Say `OwnerExited` when this process is gone (at once, where it is)."""

    owner: Owner


@dataclass(frozen=True, slots=True)
class KillOwner:
    """End this process of a fenced epoch, if it still runs as the same user."""

    owner: Owner


@dataclass(frozen=True, slots=True)
class DrainVersion:
    """Write these slots' shards to durable storage, in the background, until it is done. Ends in `Drained`."""

    version: Version
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelDrain:
    version: Version


@dataclass(frozen=True, slots=True)
class StateChanged:
    """`record`, `restore` or the slots' states changed: look again at what waits for them."""


@dataclass(frozen=True, slots=True)
class Note:
    """For logs and metrics. Names and facts are listed in the README."""

    name: str
    facts: tuple[tuple[str, str | int | float], ...] = ()


@dataclass(frozen=True, slots=True)
class AskInventories:
    """Fetch the inventories of these nodes (empty: all members), once each. Ends in `InventoryArrived` for each."""

    epoch: Epoch
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ListDurable:
    """List durable versions that have a manifest; retry until it succeeds. Ends in `DurableListed`, also for each failure."""


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Check every durable shard and that no later epoch is claimed, write the manifest, read it back. Ends in `ManifestWritten`."""

    version: Version


Effect = (
    WriteSlot | WriteEpoch | WriteBans | WriteCoordinator | EpochAccepted | Lease | Begun | Answer | CloseSession | Refuse | Send | Broadcast
    | HashSlot | PullShard | CancelPull | RepairSlot | ReleaseMemory | WatchOwner | KillOwner | DrainVersion | CancelDrain | StateChanged
    | Note | AskInventories | ListDurable | WriteManifest
)  # fmt: skip
