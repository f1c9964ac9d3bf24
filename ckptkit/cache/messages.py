"""What nodes, ranks and the coordinator say to each other, and what is stored: values without behavior.

A **version** is one save of one incarnation of the job. Two incarnations never share one, even where both took the same epoch,
since the random `inc` is a part of it. Every message carries the epoch of its sender; whoever has accepted a newer one refuses it.
All types are strict JSON (`codec`): numbers bounded, names by pattern, lists of limited length; none holds a path.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from ckptkit.cache.codec import AtMost, Between, Matching, message

MAX_RANKS = 1 << 16
MAX_BANS = 1000
MAX_SOURCES = 64
DURABLE = "@durable"
"""Where a shard lies that is read from durable storage; no node can have this name."""

Count = Annotated[int, Between(0, 2**53 - 1)]
Rank = Annotated[int, Between(0, MAX_RANKS - 1)]
World = Annotated[int, Between(1, MAX_RANKS)]
SlotId = Annotated[int, Between(0, 9999)]
Copies = Annotated[int, Between(0, 16)]
Inc = Annotated[str, Matching("[0-9a-f]{32}", "incarnation of 32 hex digits")]
Digest = Annotated[str, Matching("[0-9a-f]{32}", "digest of 32 hex digits")]
NodeId = Annotated[str, Matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", "node id")]
Source = Annotated[str, Matching(r"@durable|[A-Za-z0-9][A-Za-z0-9._-]{0,127}", "node id or @durable")]
Domain = Annotated[str, Matching(r"[A-Za-z0-9._:/-]{0,127}", "failure domain")]
Address = Annotated[str, Matching(r"[A-Za-z0-9.:\[\]_-]{1,255}:[0-9]{1,5}", "host:port")]
Reason = Annotated[str, AtMost(1000)]
LaneName = Annotated[str, Matching("replica|own/[0-9]{1,4}", "lane")]


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """One save. Ordered by epoch, then step: a later incarnation outranks an earlier one, whatever its step."""

    epoch: Count
    step: Count
    inc: Inc

    def __str__(self) -> str:
        return f"step {self.step} of epoch {self.epoch}"


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """A process that cannot be confused with a later one of the same number: `starttime` as in /proc/PID/stat."""

    pid: Count
    starttime: Count


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a version. `digest` is the content digest of its rank file."""

    version: Version
    rank: Rank
    world: World
    index_hash: Digest
    used: Count
    digest: Digest


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of an epoch, and the daemon of its node."""

    rank: Rank
    node: NodeId
    address: Address
    domain: Domain = ""


@dataclass(frozen=True)
class Epoch:
    """One incarnation of the job. `members` are all ranks 0..world-1, in order; rank 0's node coordinates.

    `copies` is k, on how many further nodes each shard is kept; `fresh` allows a start without a checkpoint where some exists.
    """

    epoch: Count
    inc: Inc
    members: Annotated[tuple[Member, ...], AtMost(MAX_RANKS)]
    copies: Copies = 1
    fresh: bool = False

    @property
    def world(self) -> int:
        return len(self.members)

    @property
    def coordinator(self) -> str:
        return self.members[0].node

    @cached_property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each node, ascending."""
        found: dict[str, list[int]] = {}
        for member in self.members:
            found.setdefault(member.node, []).append(member.rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    @cached_property
    def addresses(self) -> dict[str, str]:
        return {member.node: member.address for member in self.members}

    @cached_property
    def domains(self) -> dict[str, str]:
        return {member.node: member.domain for member in self.members}

    def version(self, step: int) -> Version:
        return Version(self.epoch, step, self.inc)

    @property
    def problem(self) -> str:
        """Why this cannot be an epoch, empty where it can."""
        if not self.members or [member.rank for member in self.members] != list(range(self.world)):
            return "members must be the ranks 0, 1, … in order"
        places: dict[str, tuple[str, str]] = {}
        for member in self.members:
            if places.setdefault(member.node, (member.address, member.domain)) != (
                member.address,
                member.domain,
            ):
                return f"node {member.node} has two addresses or domains"
        return ""


@dataclass(frozen=True, slots=True)
class Ban:
    """Versions that no restore takes: (epoch, step) from low to high, both included."""

    low_epoch: Count
    low_step: Count
    high_epoch: Count
    high_step: Count

    def covers(self, version: Version) -> bool:
        place = (version.epoch, version.step)
        return (self.low_epoch, self.low_step) <= place <= (self.high_epoch, self.high_step)


@dataclass(frozen=True, slots=True)
class Mark:
    """That in `epoch` a trainer called a restored version bad."""

    version: Version
    epoch: Count


@message
class Bans:
    """All bans and marks that a node knows, the oldest forgotten beyond `MAX_BANS`."""

    bans: Annotated[tuple[Ban, ...], AtMost(MAX_BANS)] = ()
    marks: Annotated[tuple[Mark, ...], AtMost(MAX_BANS)] = ()

    def hard(self, version: Version) -> bool:
        """Whether the operator banned it."""
        return any(ban.covers(version) for ban in self.bans)

    def soft(self, version: Version) -> bool:
        """Whether trainers of two epochs called it bad: avoided while there is another one."""
        return len({mark.epoch for mark in self.marks if mark.version == version}) >= 2

    def union(self, other: "Bans") -> "Bans":
        bans, marks = dict.fromkeys(self.bans + other.bans), dict.fromkeys(self.marks + other.marks)
        return Bans(tuple(bans)[-MAX_BANS:], tuple(marks)[-MAX_BANS:])


# --- from the coordinator -------------------------------------------------------------------------------------------------


@message
class Record:
    """All that the coordinator has decided in its epoch. The one with the highest `dseq` replaces every other.

    It is the decision of every save as well: a version is committed when it is `newest`; one of this epoch that is below `newest` without
    having been it, at or below `floor`, or in `aborted`, is not and never will be.

    Attributes:
        restored: What the epoch started from; ranks train once they see the first record. None: from nothing.
        newest: The newest committed version.
        keep: The newest one of which every shard lay on k further nodes.
        cand: The one that is being copied to k further nodes now.
        drain: The one that is being written to durable storage now.
        durable: The newest one of which this epoch saw a manifest.
        floor, aborted: Steps of this epoch.
        degraded: Copies of `cand` took too long; what is newer than `keep` lies on one node each.
    """

    epoch: Count
    inc: Inc
    dseq: Count
    restored: Version | None = None
    newest: Version | None = None
    keep: Version | None = None
    cand: Version | None = None
    drain: Version | None = None
    durable: Version | None = None
    floor: Annotated[int, Between(-1, 2**53 - 1)] = -1
    aborted: Annotated[tuple[Count, ...], AtMost(256)] = ()
    degraded: bool = False
    bans: Bans = Bans()

    @property
    def acknowledged(self) -> tuple[Version, ...]:
        """What was told to be committed or durable, and is protected."""
        return tuple(dict.fromkeys(v for v in (self.newest, self.keep, self.durable) if v is not None))

    def rejects(self, version: Version) -> bool:
        """Whether a version of this record's epoch is decided, and not committed."""
        if (version.epoch, version.inc) != (self.epoch, self.inc) or version == self.newest:
            return False
        if version in (self.keep, self.cand, self.drain):
            return False
        if version.step <= self.floor or version.step in self.aborted:
            return True
        return self.newest is not None and version < self.newest

    def supersedes(self, version: Version, *, own: bool = True) -> bool:
        """Whether no one will ask for the version again, so that its slots may be used for others.

        A drain reads from the nodes of the shards' ranks (`own`) only: other nodes' copies are not held for it, since the pool
        has room for those of `keep` and `cand`.
        """
        if self.bans.hard(version):
            return True
        if version in (self.newest, self.keep, self.cand) or (own and version == self.drain):
            return False
        if version.epoch < self.epoch or self.rejects(version):
            return True
        return self.newest is not None and version < self.newest


@message
class Place:
    """Where a node is."""

    node: NodeId
    address: Address


Places = Annotated[tuple[Place, ...], AtMost(4096)]


@message
class RestoreDecision:
    """What all ranks of an epoch restore, or `error`. `sources[p]` are the places of shard p, unordered
    (`restore.nearest` orders them for a node), `digests[p]` its digest.

    `keep` becomes that of the first record, should all ranks succeed. `excluded` failed in earlier attempts; `passed_over` says why these, and others that
    were committed, are not restored. `former` says where sources are that are no members: a node that
    has lost its memory does not know them.
    """

    epoch: Count
    inc: Inc
    attempt: Count
    version: Version | None = None
    world: Count = 0
    index_hash: Annotated[str, Matching("([0-9a-f]{32})?", "digest or nothing")] = ""
    sources: Annotated[tuple[Annotated[tuple[Source, ...], AtMost(MAX_SOURCES)], ...], AtMost(MAX_RANKS)] = ()
    digests: Annotated[tuple[Digest, ...], AtMost(MAX_RANKS)] = ()
    keep: Version | None = None
    excluded: Annotated[tuple[Version, ...], AtMost(1000)] = ()
    passed_over: Annotated[tuple[Reason, ...], AtMost(1001)] = ()
    error: Reason = ""
    former: Places = ()


# --- between nodes, and to the coordinator; all carry the sender ----------------------------------------------------------


@message
class Sealed:
    """One shard of a vote or report."""

    rank: Rank
    digest: Digest


Seals = Annotated[tuple[Sealed, ...], AtMost(4096)]


@message
class Vote:
    """What a node says of its own ranks' shards of one version: all are sealed, or `refusal` says why they will not be."""

    epoch: Count
    inc: Inc
    node: NodeId
    step: Count
    index_hash: Annotated[str, Matching("([0-9a-f]{32})?", "digest or nothing")] = ""
    seals: Seals = ()
    refusal: Reason = ""


@message
class Holding:
    """Every verified shard of one version that a node has, of whichever rank."""

    epoch: Count
    inc: Inc
    node: NodeId
    version: Version
    seals: Seals


@message
class CopyLost:
    """A node no longer has a shard that it had reported."""

    epoch: Count
    inc: Inc
    node: NodeId
    version: Version
    rank: Rank
    reason: Reason = ""


@message
class Poll:
    """A node asks for what it may have missed: it has record `dseq` of this epoch (0: none) and restore `attempt` (0: none)."""

    epoch: Count
    inc: Inc
    node: NodeId
    dseq: Count
    attempt: Count


@message
class Offer:
    """`node` has this shard and asks the receiver to pull a copy."""

    epoch: Count
    inc: Inc
    node: NodeId
    shard: Shard


@message
class OfferAnswer:
    """`outcome` is `have`, `pulling`, or `full`; the offer is made again until it is `have`."""

    epoch: Count
    inc: Inc
    node: NodeId
    version: Version
    rank: Rank
    outcome: Annotated[str, Matching("have|pulling|full", "outcome of an offer")]


@message
class RestoreReport:
    """All ranks of a node have loaded what was decided, or one could not (`failure`; `late`: trying again may help)."""

    epoch: Count
    inc: Inc
    node: NodeId
    attempt: Count
    failure: Reason = ""
    late: bool = False


@message
class DrainReport:
    """A node's own shards of `version` are durable, or writing them fails at present and is tried again."""

    epoch: Count
    inc: Inc
    node: NodeId
    version: Version
    failure: Reason = ""


@message
class DrainRequest:
    """Write the newest committed version to durable storage, whatever the interval."""

    epoch: Count
    inc: Inc
    node: NodeId


@message
class BanRequest:
    """The operator's bans and the trainers' marks, to be known everywhere."""

    epoch: Count
    inc: Inc
    node: NodeId
    bans: Bans


@message
class Inventory:
    """Every readable shard of a node. It may be of any epoch; readers verify what they take.

    `hashing` counts those that are whole, but whose digests are still being computed: they will be there soon.
    `former` are the members of epochs before this one that the node remembers: they may have shards, too. `epoch` and `inc` are those that it has
    accepted, `committed` what it knows to have been committed or durable.
    """

    node: NodeId
    shards: Annotated[tuple[Shard, ...], AtMost(100_000)]
    hashing: Count = 0
    bans: Bans = Bans()
    former: Places = ()
    epoch: Count = 0
    inc: Annotated[str, Matching("([0-9a-f]{32})?", "incarnation or nothing")] = ""
    committed: Annotated[tuple[Version, ...], AtMost(8)] = ()


ToNode = Record | RestoreDecision | Offer | OfferAnswer | CopyLost | BanRequest
ToCoordinator = Vote | Holding | CopyLost | Poll | RestoreReport | DrainReport | DrainRequest | BanRequest
PeerMessage = ToNode | ToCoordinator

TO_NODE: tuple[type, ...] = (Record, RestoreDecision, Offer, OfferAnswer, CopyLost, BanRequest)
TO_COORDINATOR: tuple[type, ...] = (
    Vote, Holding, CopyLost, Poll, RestoreReport, DrainReport, DrainRequest, BanRequest,
)  # fmt: skip


# --- stored ---------------------------------------------------------------------------------------------------------------


@message
class SlotRecord:
    """What is known of one slot, stored beside its bytes. `state` is one of `slots.STATES`.

    Attributes:
        seq: Counts the uses of the slot, so that an answer about an earlier use is told apart.
        writer: The rank's process that writes it, None where the daemon itself does (a copy pulled from a peer).
        writer_done: Sealed by its writer; only digests are missing.
        verified: Its digests were checked since the daemon started.
        strikes: How often a leaf was found bad and repaired.
        damaged: A leaf is bad and no good copy was found: it counts as no copy.
        bitmap: Verified 64 MiB ranges of a pull, hex.
    """

    slot: SlotId
    lane: LaneName
    state: Annotated[str, Matching("FREE|WRITING|SEALED|QUARANTINED|RETIRED", "slot state")] = "FREE"
    seq: Count = 0
    version: Version | None = None
    rank: Rank = 0
    world: World = 1
    index_hash: Annotated[str, Matching("([0-9a-f]{32})?", "digest or nothing")] = ""
    used: Count = 0
    digest: Annotated[str, Matching("([0-9a-f]{32})?", "digest or nothing")] = ""
    writer: Owner | None = None
    writer_done: bool = False
    verified: bool = False
    strikes: Count = 0
    damaged: bool = False
    bitmap: Annotated[str, Matching("[0-9a-f]*", "bitmap"), AtMost(65536)] = ""


@message
class CoordinatorRecord:
    """What the coordinator stores: its decisions. One file, replaced as a whole before any of it is told."""

    epoch: Count
    inc: Inc
    restore: RestoreDecision | None = None
    record: Record | None = None
