"""One node: the calls of its ranks, votes, fencing, its part of restores and drains. Copies are `replication`'s.

A node never waits for the coordinator: what it has to say it says again until the record shows the effect. What the record says is
applied when a slot is wanted, never kept in a slot.
"""

from dataclasses import dataclass, field

from ckptkit.cache.draining import Draining
from ckptkit.cache.events import (
    Abort,
    Answer,
    Begin,
    Called,
    CloseSession,
    Drained,
    Effect,
    EpochAccepted,
    Hashed,
    HashSlot,
    Join,
    KillOwner,
    Lease,
    Loaded,
    MarkBad,
    NodeEvent,
    Operator,
    OwnerExited,
    Pressure,
    Pulled,
    PullProgress,
    Received,
    Refuse,
    Repaired,
    Scrubbed,
    Seal,
    Send,
    SessionClosed,
    SlotReady,
    StateChanged,
    Tick,
    WatchOwner,
    WriteBans,
    WriteEpoch,
    WriteSlot,
)
from ckptkit.cache.messages import (
    BanRequest,
    Bans,
    CopyLost,
    Epoch,
    Inventory,
    Mark,
    Offer,
    OfferAnswer,
    Owner,
    Poll,
    Record,
    RestoreDecision,
    RestoreReport,
    SlotRecord,
    ToNode,
    Version,
)
from ckptkit.cache.replication import Replication
from ckptkit.cache.saves import Saves, Session
from ckptkit.cache.settings import Settings
from ckptkit.cache.slots import SlotTable, own_lane

LONG_AGO = float("-inf")


@dataclass
class Node:
    """The state of one node's daemon. Make it with `start`; call `handle` for every event.

    Attributes:
        name: Its id among the members.
        table: Its slots. To be read only.
        epoch: The newest epoch that it has accepted.
        record: The coordinator's newest record; right after a new epoch, still that of the one before.
        restore: What the present epoch restores, once decided.
        bans: All that it has heard of.
    """

    name: str
    table: SlotTable
    epoch: Epoch | None
    bans: Bans
    settings: Settings
    record: Record | None = None
    restore: RestoreDecision | None = None
    sessions: dict[int, Session] = field(default_factory=dict)
    owners: dict[int, Owner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.saves = Saves(self)
        self.replication = Replication(self)
        self.draining = Draining(self)
        self._loaded: dict[int, tuple[str, bool]] = {}
        self._reported = self._polled = LONG_AGO
        self._fenced: dict[Owner, float] = {}

    @classmethod
    def start(
        cls, name: str, table: SlotTable, epoch: Epoch | None, bans: Bans, settings: Settings, now: float,
        record: Record | None = None,
    ) -> tuple["Node", list[Effect]]:  # fmt: skip
        """The node at the start of its daemon, from what is stored (empty and free where nothing is), or with another table (`record`: its last).

        Slots that a rank was writing stay reserved for it until it comes back or exits; digests and pulls that were under way begin again.
        """
        node = cls(name, table, epoch, bans, settings, record)
        return node, node._recover(now)

    # --- what the shell reads ---------------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """Whether the restore of the present epoch has ended, so that ranks may train."""
        return self.epoch is not None and self._of_epoch(self.record)

    @property
    def saving(self) -> bool:
        """Whether a rank is writing to a slot: replication yields meanwhile."""
        return any(r.state == "WRITING" and r.writer is not None and not r.writer_done for r in self.table)

    def inventory(self) -> Inventory:
        hashing = sum(r.state == "WRITING" and r.writer_done for r in self.table)
        epoch, inc = (self.epoch.epoch, self.epoch.inc) if self.epoch is not None else (0, "")
        known = self.record.acknowledged if self.record is not None else ()
        return Inventory(
            self.name, self.table.shards(), hashing, self.bans, epoch=epoch, inc=inc, committed=known
        )

    def acquire(self, version: Version, rank: int) -> SlotRecord | None:
        """Hold a copy of this shard for reading; it is not overwritten before `release`. None: there is none."""
        if (found := self.table.find(version, rank)) is not None:
            self.table.refs[found.slot] += 1
        return found

    def release(self, slot: int) -> None:
        assert self.table.refs[slot] > 0, f"slot {slot} was released more often than held"
        self.table.refs[slot] -= 1

    # --- events -----------------------------------------------------------------------------------------------------------

    def handle(self, event: NodeEvent, now: float) -> list[Effect]:
        """What to do about it, in this order (`events`)."""
        match event:
            case Called():
                return self._called(event, now)
            case SessionClosed(session):
                self.sessions.pop(session, None)
                return []
            case OwnerExited(owner):
                return self._exited(owner, now)
            case Received(message):
                return self._received(message, now)  # type: ignore[arg-type]
            case Hashed():
                return self.saves.hashed(event, now)
            case Pulled() | PullProgress() | Scrubbed() | Repaired() | Pressure() | SlotReady():
                return self.replication.handle(event, now)
            case Drained():
                return self.draining.ended(event, now)
            case Operator(drain, bans):
                effects = self._ban(bans) if bans else []
                return effects + (self.draining.want(now) if drain else [])
            case Tick():
                return self._tick(now)

    def _called(self, event: Called, now: float) -> list[Effect]:
        session, call = event.session, event.call
        if isinstance(call, Join):
            return self._join(session, event.owner, call, now)
        who = self.sessions.get(session)
        if who is None:
            return [Answer(session, 409, "this connection has joined no epoch, or a later one has begun")]
        match call:
            case Begin():
                return self.saves.begin(session, who, call, now)
            case Seal():
                return self.saves.seal(session, who, call, now)
            case Abort(slot):
                return self.saves.give_up(session, who, slot, now)
            case Loaded(attempt, failure, late):
                if self.restore is None or attempt != self.restore.attempt:
                    return [Answer(session, 409, "another attempt of the restore is on")]
                self._loaded.setdefault(who.rank, (failure, late))
                return [Answer(session, 200), *self._report(now)]
            case MarkBad(version):
                assert self.epoch is not None
                mark = Mark(version, self.epoch.epoch)
                return [*self._ban(Bans(marks=(mark,))), Answer(session, 200)]

    # --- epochs -----------------------------------------------------------------------------------------------------------

    def _join(self, session: int, owner: Owner, call: Join, now: float) -> list[Effect]:
        epoch = call.epoch
        problem = epoch.problem or (
            ""
            if call.rank in epoch.ranks.get(self.name, ())
            else f"rank {call.rank} is not on node {self.name}"
        )
        lane = own_lane(call.local_rank)
        if not problem and lane not in self.table.lanes:
            problem = f"there are no slots for local rank {call.local_rank}"
        if problem:
            return [Answer(session, 422, problem)]
        effects: list[Effect] = []
        if self.epoch is None or epoch.epoch > self.epoch.epoch:
            effects = self._accept(epoch, now)
        elif (epoch.epoch, epoch.inc) != (self.epoch.epoch, self.epoch.inc):
            return [Answer(session, 409, f"epoch {self.epoch.epoch} is taken; begin a higher one")]
        elif epoch != self.epoch:
            return [
                Answer(session, 409, "the members differ from those that an earlier rank of this epoch gave")
            ]
        if (holder := self.owners.setdefault(call.rank, owner)) != owner:
            return [
                Answer(
                    session,
                    409,
                    f"rank {call.rank} is process {holder.pid}; a restarted rank needs a new epoch",
                )
            ]
        self.sessions[session] = Session(call.rank, call.local_rank, owner)
        slots = tuple(slot for slot in self.table.lanes[lane] if self.table[slot].state != "RETIRED")
        return [*effects, Lease(session, lane, slots)]

    def _accept(self, epoch: Epoch, now: float) -> list[Effect]:
        """Take part in a new epoch, and nothing else of an earlier one."""
        effects: list[Effect] = [WriteEpoch(epoch)]
        effects += [CloseSession(session, "FENCED") for session in self.sessions]
        self.epoch, self.restore = epoch, None
        for held in (self.sessions, self.owners, self._loaded):
            held.clear()
        self.saves.new_epoch()
        self._reported = self._polled = LONG_AGO
        effects += self._quarantine(now)
        effects += self.draining.new_epoch()
        self.replication.new_epoch()
        return [*effects, EpochAccepted(epoch), StateChanged()]

    def _quarantine(self, now: float) -> list[Effect]:
        """Set aside what processes of earlier epochs may still be writing to, until they are gone."""
        effects: list[Effect] = []
        for found in self.table:
            if found.writer is None or found.writer_done or found.version is None:
                continue
            if found.state == "QUARANTINED" or (found.state == "WRITING" and not self.current(found.version)):
                if found.state == "WRITING":
                    effects.append(WriteSlot(self.table.quarantine(found.slot)))
                self._fenced.setdefault(found.writer, now)
                effects.append(WatchOwner(found.writer))
        return effects

    def _exited(self, owner: Owner, now: float) -> list[Effect]:
        self._fenced.pop(owner, None)
        effects: list[Effect] = [WriteSlot(self.table.free(r.slot)) for r in self.table.written_by(owner)]
        self.sessions = {key: who for key, who in self.sessions.items() if who.owner != owner}
        for rank, holder in self.owners.items():
            if holder == owner:
                effects += self.saves.exited(rank, now)
        return effects

    def _recover(self, now: float) -> list[Effect]:
        effects = self._quarantine(now)
        for found in self.table:
            if found.version is None or found.state not in ("WRITING", "SEALED"):
                continue
            if found.state == "WRITING" and found.writer is not None:
                if found.writer_done:
                    effects.append(HashSlot(found.slot, found.seq))
                else:
                    effects.append(WatchOwner(found.writer))
                    self.owners[found.rank] = found.writer
            if self.current(found.version) and self.mine(found):
                self.saves.recovered(found)
        return effects + self.replication.recover()

    # --- from the coordinator ---------------------------------------------------------------------------------------------

    def _received(self, message: ToNode, now: float) -> list[Effect]:
        if self.epoch is None or not self._of_epoch(message):
            return [Refuse(409, f"epoch {self.epoch.epoch if self.epoch else 0} is on")]
        match message:
            case Record():
                return self._take_record(message, now)
            case RestoreDecision():
                return self._take_restore(message, now)
            case BanRequest():
                return self._ban(message.bans, tell=False)
            case Offer() | OfferAnswer() | CopyLost():
                if message.node not in self.epoch.ranks:
                    return [Refuse(403, f"node {message.node} is no member")]
                return self.replication.received(message, now)

    def _take_record(self, record: Record, now: float) -> list[Effect]:
        if self.record is not None and self._of_epoch(self.record) and record.dseq <= self.record.dseq:
            return []
        self.record = record
        effects = self._ban(record.bans, tell=False)
        self.saves.new_record()
        effects += self.replication.new_record(now)
        effects += self.draining.new_record(now)
        return [*effects, StateChanged()]

    def _take_restore(self, decision: RestoreDecision, now: float) -> list[Effect]:
        if self.restore is not None and decision.attempt <= self.restore.attempt:
            return []
        self.restore = decision
        self._loaded.clear()
        return [*self.replication.land(), StateChanged()]

    def _report(self, now: float) -> list[Effect]:
        """Say how the node's ranks fared with the restore, once that is known."""
        if self.trains or self.restore is None or self.epoch is None:
            return []
        # A failure that trying again will not mend first.
        failures = sorted((late, rank, why) for rank, (why, late) in self._loaded.items() if why)
        late, _, failure = failures[0] if failures else (False, 0, "")
        if not failure and len(self._loaded) < len(self.epoch.ranks[self.name]):
            return []
        self._reported = now
        report = RestoreReport(
            self.epoch.epoch, self.epoch.inc, self.name, self.restore.attempt, failure, late
        )
        return [Send(self.epoch.coordinator, report)]

    def _ban(self, bans: Bans, *, tell: bool = True) -> list[Effect]:
        joined = self.bans.union(bans)
        if joined == self.bans:
            return []
        self.bans = joined
        effects: list[Effect] = [WriteBans(joined)]
        if tell and self.epoch is not None:
            me = (self.epoch.epoch, self.epoch.inc, self.name)
            effects.append(Send(self.epoch.coordinator, BanRequest(*me, joined)))
        return effects

    # --- time -------------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.settings.kill_zombies:
            due = [owner for owner, since in self._fenced.items() if now - since >= self.settings.zombie_s]
            effects += [KillOwner(owner) for owner in due]
        if self.epoch is None:
            return effects
        again = now - self.settings.resend_s
        effects += self.saves.tick(now)
        if self._reported <= again:
            effects += self._report(now)
        effects += self.draining.tick(now)
        effects += self.replication.tick(now)
        waits = self.saves.open or not self.trains or self.draining.wanted
        if now - self._polled >= (self.settings.resend_s if waits else self.settings.idle_poll_s):
            self._polled = now
            dseq = self.record.dseq if self.record is not None and self.trains else 0
            attempt = self.restore.attempt if self.restore else 0
            me = (self.epoch.epoch, self.epoch.inc, self.name)
            effects.append(Send(self.epoch.coordinator, Poll(*me, dseq, attempt)))
        return effects

    # --- small questions --------------------------------------------------------------------------------------------------

    def _of_epoch(self, message: ToNode | None) -> bool:
        return (
            message is not None and self.epoch is not None
            and (message.epoch, message.inc) == (self.epoch.epoch, self.epoch.inc)
        )  # fmt: skip

    def current(self, version: Version) -> bool:
        return self.epoch is not None and (version.epoch, version.inc) == (self.epoch.epoch, self.epoch.inc)

    def mine(self, found: SlotRecord) -> bool:
        """Whether it is an own shard of one of this node's ranks."""
        return (
            self.epoch is not None
            and found.lane != "replica"
            and found.rank in self.epoch.ranks.get(self.name, ())
        )

    def doomed(self, version: Version) -> bool:
        """Whether a version of this epoch is aborted or superseded."""
        return self.record is not None and self._of_epoch(self.record) and self.record.supersedes(version)

    def decided(self, version: Version) -> bool:
        assert self.record is not None
        newest = self.record.newest
        return self.doomed(version) or (newest is not None and version <= newest)
