"""Copies between nodes: offers, pulls, what is held, repair of bad leaves, release under pressure.

Pull only: the owner of a shard offers it to its clique, the receiver fetches and verifies, and tells the coordinator what it holds. The
version that is being copied (`cand`) and the one that has its copies (`keep`) are offered again until every target has them.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptkit.cache.events import (
    CancelPull,
    Effect,
    Note,
    Pressure,
    Pulled,
    PullProgress,
    PullShard,
    ReleaseMemory,
    Repaired,
    RepairSlot,
    Scrubbed,
    Send,
    SlotReady,
    StateChanged,
    WriteSlot,
)
from ckptkit.cache.messages import (
    DURABLE,
    CopyLost,
    Holding,
    Offer,
    OfferAnswer,
    Sealed,
    Shard,
    SlotRecord,
    Version,
)
from ckptkit.cache.placement import Cliques
from ckptkit.cache.restore import homes, nearest
from ckptkit.cache.slots import REPLICA, own_lane, shard_of

if TYPE_CHECKING:
    from ckptkit.cache.node import Node

LONG_AGO = float("-inf")
REFRESH = 30
"""After how many times `resend_s` a target that has a copy is asked whether it still has."""


@dataclass(slots=True)
class Told:
    """What a target was told of one shard, and what it said."""

    sent: float = LONG_AGO
    have: bool = False


@dataclass
class Replication:
    """The part of a `Node` that makes and keeps copies. It reads and changes the node's slots."""

    node: "Node"
    told: dict[tuple[Version, int, str], Told] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cliques: Cliques | None = None
        self._homes: tuple[int, tuple[int, ...]] | None = None
        self._held_sent = self._landed = LONG_AGO
        self._held_cand: Version | None = None
        self._pressure = 0

    @property
    def cliques(self) -> Cliques:
        """Those of the present epoch."""
        epoch = self.node.epoch
        assert epoch is not None
        if self._cliques is None:
            self._cliques = Cliques(epoch.domains, epoch.copies)
        return self._cliques

    def new_epoch(self) -> None:
        self._cliques, self._homes, self._held_sent, self._held_cand = None, None, LONG_AGO, None
        self.told.clear()

    def recover(self) -> list[Effect]:
        """Go on with the pulls that were under way."""
        return [
            PullShard(r.slot, r.seq, shard_of(r), self._sources(shard_of(r)), r.bitmap)
            for r in self.node.table if r.state == "WRITING" and r.writer is None
        ]  # fmt: skip

    # --- events -----------------------------------------------------------------------------------------------------------

    def handle(
        self, event: Pulled | PullProgress | Scrubbed | Repaired | Pressure | SlotReady, now: float
    ) -> list[Effect]:
        table = self.node.table
        match event:
            case Pressure(level, release):
                self._pressure = level
                return self._release(release) if level >= 2 else []
            case SlotReady(slot):
                table.unready.discard(slot)
                return []
        found = table[event.slot]
        if found.seq != event.seq:
            return []
        match event:
            case Pulled():
                pulling = found.state == "WRITING" and found.writer is None
                return self._pulled(found, event, now) if pulling else []
            case PullProgress():
                pulling = found.state == "WRITING" and found.writer is None
                return [WriteSlot(table.note(found.slot, bitmap=event.bitmap))] if pulling else []
            case Scrubbed():
                return self._scrubbed(found, event) if found.state == "SEALED" else []
            case Repaired():
                return self._repaired(found, event, now) if found.state == "SEALED" else []

    def received(self, message: Offer | OfferAnswer | CopyLost, now: float) -> list[Effect]:
        match message:
            case Offer():
                return self._offered(message)
            case OfferAnswer():
                told = self.told.get((message.version, message.rank, message.node))
                if told is not None:
                    told.have = message.outcome == "have"
                return []
            case CopyLost():
                told = self.told.get((message.version, message.rank, message.node))
                if told is not None:
                    told.have, told.sent = False, LONG_AGO
                return []

    def new_record(self, now: float) -> list[Effect]:
        """Give up what no one wants any more; start copying what is wanted now."""
        record = self.node.record
        assert record is not None
        effects: list[Effect] = [
            CancelPull(r.slot, r.seq)
            for r in self.node.table
            if r.state == "WRITING"
            and r.writer is None
            and r.version is not None
            and record.supersedes(r.version, own=r.lane != REPLICA)
        ]
        wanted = (record.keep, record.cand)
        self.told = {key: told for key, told in self.told.items() if key[0] in wanted}
        if record.cand != self._held_cand:
            self._held_cand = record.cand
            effects += self._hold(now)
        return effects + self._offer(now)

    def tick(self, now: float) -> list[Effect]:
        if not self.node.trains:
            return []
        due = now - self._held_sent >= self.node.settings.resend_s
        return (self._hold(now) if due else []) + self._offer(now) + self._land_again(now)

    # --- as owner ---------------------------------------------------------------------------------------------------------

    def _offer(self, now: float) -> list[Effect]:
        node = self.node
        effects: list[Effect] = []
        epoch, record = node.epoch, node.record
        assert epoch is not None and record is not None
        targets = self.cliques.targets(node.name)
        for version in dict.fromkeys(v for v in (record.cand, record.keep) if v is not None):
            for rank in self._answers_for(version) if targets else ():
                found = node.table.find(version, rank)
                if found is None:
                    continue
                for target in targets:
                    told = self.told.setdefault((version, rank, target), Told())
                    if now - told.sent >= node.settings.resend_s * (REFRESH if told.have else 1):
                        told.sent = now
                        effects.append(
                            Send(target, Offer(epoch.epoch, epoch.inc, node.name, shard_of(found)))
                        )
        return effects

    def _answers_for(self, version: Version) -> tuple[int, ...]:
        """The shards of a version that this node offers."""
        epoch, decision = self.node.epoch, self.node.restore
        assert epoch is not None
        if (version.epoch, version.inc) == (epoch.epoch, epoch.inc):
            return epoch.ranks[self.node.name]
        if decision is None or decision.version != version:
            return ()
        if self._homes is None or self._homes[0] != decision.attempt:
            own = (rank for rank, node in enumerate(homes(decision.sources, epoch)) if node == self.node.name)
            self._homes = (decision.attempt, tuple(own))
        return self._homes[1]

    # --- as receiver ------------------------------------------------------------------------------------------------------

    def _offered(self, offer: Offer) -> list[Effect]:
        shard, table, record = offer.shard, self.node.table, self.node.record
        if record is None or not self.node.trains or record.supersedes(shard.version, own=False):
            return []
        if (held := table.find(shard.version, shard.rank)) is not None:
            return [self._answer(offer, "have" if held.digest == shard.digest else "full")]
        if any(r.state == "WRITING" and r.version == shard.version and r.rank == shard.rank for r in table):
            return [self._answer(offer, "pulling")]
        slot = None if self._pressure else table.pick_replica(shard.version, record)
        if slot is None:
            return [self._answer(offer, "full")]
        return [*self._pull(slot, shard, (offer.node, *self._sources(shard))), self._answer(offer, "pulling")]

    def _answer(self, offer: Offer, outcome: str) -> Send:
        answer = OfferAnswer(
            offer.epoch, offer.inc, self.node.name, offer.shard.version, offer.shard.rank, outcome
        )
        return Send(offer.node, answer)

    def _pull(self, slot: int, shard: Shard, sources: tuple[str, ...]) -> list[Effect]:
        begun = self.node.table.begin(slot, self.node.record, shard, None)
        return [WriteSlot(begun), PullShard(slot, begun.seq, shard, tuple(dict.fromkeys(sources)))]

    def _pulled(self, found: SlotRecord, event: Pulled, now: float) -> list[Effect]:
        table, epoch = self.node.table, self.node.epoch
        if event.reason:
            facts = (("rank", found.rank), ("reason", event.reason))
            return [WriteSlot(table.free(found.slot)), Note("pull_failed", facts)]
        sealed = table.seal(found.slot, found.digest, event.used)
        effects: list[Effect] = [WriteSlot(sealed), StateChanged()]
        if epoch is None or sealed.version is None or not self.node.trains:
            return effects
        if sealed.world == epoch.world and (owner := epoch.members[sealed.rank].node) != self.node.name:
            answer = OfferAnswer(epoch.epoch, epoch.inc, self.node.name, sealed.version, sealed.rank, "have")
            effects.append(Send(owner, answer))
        return effects + (self._hold(now) if sealed.version == self._held_cand else [])

    def _hold(self, now: float) -> list[Effect]:
        """Tell the coordinator which shards of `cand` are here."""
        epoch, cand = self.node.epoch, self._held_cand
        self._held_sent = now
        if epoch is None or cand is None:
            return []
        seals = tuple(Sealed(r.rank, r.digest) for r in self.node.table.holding(cand))
        return (
            [Send(epoch.coordinator, Holding(epoch.epoch, epoch.inc, self.node.name, cand, seals))]
            if seals
            else []
        )

    def land(self) -> list[Effect]:
        """Fetch the shards of a restore that belong to this node's ranks and are not here, where there is room for them."""
        node = self.node
        effects: list[Effect] = []
        epoch, decision = node.epoch, node.restore
        assert epoch is not None and decision is not None
        if decision.version is None:
            return []
        own = epoch.ranks[node.name]
        for rank in self._answers_for(decision.version):
            found = [
                r for r in node.table if (r.version, r.rank, r.state) == (decision.version, rank, "WRITING")
            ]
            if found or node.table.find(decision.version, rank) is not None:
                continue
            if decision.world == epoch.world:
                slot = node.table.pick(own_lane(own.index(rank)), node.record)
            else:
                slot = node.table.pick_replica(decision.version, node.record)
            if slot is not None:
                shard = Shard(
                    decision.version, rank, decision.world, decision.index_hash, 0, decision.digests[rank]
                )
                effects += self._pull(slot, shard, nearest(decision.sources[rank], node.name, self.cliques))
        return effects

    def _land_again(self, now: float) -> list[Effect]:
        """Fetch what failed to land, as long as the restored version is one that has to have its copies."""
        decision, record = self.node.restore, self.node.record
        wanted = (record.newest, record.keep, record.cand) if record is not None else ()
        if decision is None or decision.version is None or decision.version not in wanted:
            return []
        if now - self._landed < self.node.settings.resend_s:
            return []
        self._landed = now
        return self.land()

    def _sources(self, shard: Shard) -> tuple[str, ...]:
        """Where a copy may be: its owner, this node's clique, durable storage."""
        epoch = self.node.epoch
        if epoch is None:
            return (DURABLE,)
        owner = (epoch.members[shard.rank].node,) if shard.world == epoch.world else ()
        found = (*owner, *self.cliques.mates(self.node.name), DURABLE)
        return tuple(source for source in dict.fromkeys(found) if source != self.node.name)

    # --- bad bytes and short memory -----------------------------------------------------------------------------------------

    def _scrubbed(self, found: SlotRecord, event: Scrubbed) -> list[Effect]:
        table = self.node.table
        if not event.bad_leaves:
            return [] if found.verified else [WriteSlot(table.note(found.slot, verified=True))]
        if found.strikes:
            return self._gone(table.retire(found.slot), found, "bad memory")
        damaged = table.note(found.slot, damaged=True, verified=False)
        shard = shard_of(found)
        repair = RepairSlot(found.slot, found.seq, shard, event.bad_leaves, self._sources(shard))
        return [WriteSlot(damaged), Note("hash_mismatch", (("where", "scrub"),)), repair]

    def _repaired(self, found: SlotRecord, event: Repaired, now: float) -> list[Effect]:
        table = self.node.table
        if event.outcome == "ok":
            sound = table.note(found.slot, damaged=False, verified=True, strikes=found.strikes + 1)
            return [
                WriteSlot(sound),
                StateChanged(),
                *(self._hold(now) if found.version == self._held_cand else []),
            ]
        if event.outcome == "still_bad":
            return self._gone(table.retire(found.slot), found, "bad memory")
        return self._gone(found, found, "bad leaves, and no good copy was reached")

    def _release(self, count: int) -> list[Effect]:
        """Give back copies of others' shards that no one reads: free and superseded ones first, `keep` last."""
        node = self.node
        effects: list[Effect] = []
        order: list[tuple[int, int]] = []
        for slot in node.table.lanes.get(REPLICA, ()):
            found = node.table[slot]
            if slot in node.table.unready or node.table.refs[slot] or found.state not in ("FREE", "SEALED"):
                continue
            cost = 0 if found.state == "FREE" or node.table.evictable(slot, node.record) else 1
            if cost and node.record is not None and found.version == node.record.keep:
                cost = 2
            order.append((cost, slot))
        for cost, slot in sorted(order)[:count]:
            found = node.table[slot]
            freed = node.table.free(slot)
            node.table.unready.add(slot)
            effects += self._gone(freed, found, "memory pressure") if cost else [WriteSlot(freed)]
            effects.append(ReleaseMemory(slot))
        return effects

    def _gone(self, record: SlotRecord, lost: SlotRecord, reason: str) -> list[Effect]:
        """Store that a copy is no more, and tell who counted on it."""
        epoch = self.node.epoch
        effects: list[Effect] = [WriteSlot(record), StateChanged()]
        if epoch is None or lost.version is None:
            return effects
        message = CopyLost(epoch.epoch, epoch.inc, self.node.name, lost.version, lost.rank, reason)
        to = {epoch.coordinator} | ({epoch.members[lost.rank].node} if lost.world == epoch.world else set())
        return [*effects, *(Send(other, message) for other in sorted(to))]
