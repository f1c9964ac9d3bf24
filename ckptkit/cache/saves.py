"""The saves of a node's own ranks: from `begin` to the node's vote, and until the step is decided."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptkit.cache.events import (
    Answer,
    Begin,
    Begun,
    Effect,
    Hashed,
    HashSlot,
    Note,
    Seal,
    Send,
    StateChanged,
    WriteSlot,
)
from ckptkit.cache.messages import Owner, Sealed, Shard, SlotRecord, Vote
from ckptkit.cache.slots import own_lane

if TYPE_CHECKING:
    from ckptkit.cache.node import Node

LONG_AGO = float("-inf")


@dataclass(frozen=True, slots=True)
class Session:
    """One connection of a rank that has joined the present epoch."""

    rank: int
    local_rank: int
    owner: Owner


@dataclass(slots=True)
class Save:
    """A step of the present epoch that some local rank began and that is not decided. `refusal`: it cannot become whole."""

    refusal: str = ""
    sent: float = LONG_AGO


@dataclass
class Saves:
    """The part of a `Node` that its ranks' saves go through. `open` are the undecided ones, by step."""

    node: "Node"
    open: dict[int, Save] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._last_step: dict[int, int] = {}
        self._gone: set[int] = set()

    def new_epoch(self) -> None:
        self.open.clear()
        self._last_step.clear()
        self._gone.clear()

    def recovered(self, found: SlotRecord) -> None:
        """A slot of the present epoch was found after a restart."""
        assert found.version is not None
        self.open.setdefault(found.version.step, Save())
        self._last_step[found.rank] = max(found.version.step, self._last_step.get(found.rank, -1))

    def exited(self, rank: int, now: float) -> list[Effect]:
        """A rank is gone: what it has not sealed will not become whole, nor will later saves of this epoch."""
        effects: list[Effect] = []
        self._gone.add(rank)
        for step in list(self.open):
            if not self.in_hand(step, rank):
                effects += self.refuse(step, f"rank {rank} exited", now)
        return effects

    def new_record(self) -> None:
        epoch = self.node.epoch
        assert epoch is not None
        for step in list(self.open):
            if self.node.decided(epoch.version(step)):
                del self.open[step]

    def tick(self, now: float) -> list[Effect]:
        """Say again what is not decided."""
        effects: list[Effect] = []
        for step, save in list(self.open.items()):
            if now - save.sent >= self.node.settings.resend_s:
                effects += self.vote(step, now)
        return effects

    def begin(self, session: int, who: Session, call: Begin, now: float) -> list[Effect]:
        if not self.node.trains:
            return [Answer(session, 425, "the restore has not ended")]
        assert self.node.epoch is not None and self.node.record is not None
        version = self.node.epoch.version(call.step)
        for found in self.node.table.written_by(who.owner):
            if found.version == version and found.state == "WRITING":
                return [Begun(session, found.slot)]  # asked again, since the answer got lost
        if call.wait and self.node.table.pick(own_lane(who.local_rank), self.node.record) is None:
            return [Answer(session, 429, "no free slot")]
        if call.step <= self._last_step.get(who.rank, -1):
            return [Answer(session, 409, f"rank {who.rank} is past step {call.step}")]
        self._last_step[who.rank] = call.step
        effects: list[Effect] = []
        for step in list(self.open):
            if step < call.step and not self.in_hand(step, who.rank):
                effects += self.refuse(step, f"rank {who.rank} skipped it", now)
        if self.node.decided(version):
            return [*effects, Answer(session, 409, "the save was aborted")]
        save = self.open.setdefault(call.step, Save())
        if lost := [rank for rank in self._gone if not self.in_hand(call.step, rank)]:
            effects += self.refuse(call.step, f"rank {min(lost)} exited", now)
        if save.refusal:
            return [*effects, Answer(session, 409, f"the save was given up: {save.refusal}")]
        if call.nbytes > self.node.table.slot_bytes:
            problem = f"{call.nbytes} bytes do not fit into slots of {self.node.table.slot_bytes}"
            return [*effects, *self.refuse(call.step, problem, now), Answer(session, 413, problem)]
        slot = self.node.table.pick(own_lane(who.local_rank), self.node.record)
        if slot is None:
            return [
                *effects,
                *self.refuse(call.step, "no free slot", now),
                Answer(session, 429, "no free slot"),
            ]
        shard = Shard(version, who.rank, self.node.epoch.world, "", call.nbytes, "")
        begun = self.node.table.begin(slot, self.node.record, shard, who.owner)
        return [*effects, WriteSlot(begun), Begun(session, slot)]

    def seal(self, session: int, who: Session, call: Seal, now: float) -> list[Effect]:
        found = self.node.table.get(call.slot)
        if (
            found is None
            or found.writer != who.owner
            or found.version is None
            or not self.node.current(found.version)
        ):
            return [Answer(session, 409, f"slot {call.slot} is not this rank's to seal")]
        if found.state == "SEALED" or (found.state == "WRITING" and found.writer_done):
            return [Answer(session, 200)]
        if found.state != "WRITING":
            return [Answer(session, 409, f"slot {call.slot} is {found.state}")]
        if self.node.doomed(found.version):
            return [WriteSlot(self.node.table.free(call.slot)), Answer(session, 409, "the save was aborted")]
        if call.used > self.node.table.slot_bytes:
            freed = WriteSlot(self.node.table.free(call.slot))
            return [
                freed,
                *self.refuse(found.version.step, "larger than its slot", now),
                Answer(session, 413),
            ]
        written = self.node.table.written(call.slot, call.used, call.index_hash)
        return [WriteSlot(written), Answer(session, 200), HashSlot(written.slot, written.seq)]

    def give_up(self, session: int, who: Session, slot: int, now: float) -> list[Effect]:
        found = self.node.table.get(slot)
        if found is None or found not in self.node.table.written_by(who.owner) or found.state != "WRITING":
            return [Answer(session, 409, f"slot {slot} is not being written by this rank")]
        assert found.version is not None
        freed = WriteSlot(self.node.table.free(slot))
        return [
            freed,
            *self.refuse(found.version.step, f"rank {who.rank} gave it up", now),
            Answer(session, 200),
        ]

    def hashed(self, event: Hashed, now: float) -> list[Effect]:
        found = self.node.table[event.slot]
        if (found.seq, found.state, found.writer_done) != (event.seq, "WRITING", True):
            return []
        assert found.version is not None
        current = self.node.current(found.version)
        if not event.digest:
            effects: list[Effect] = [
                WriteSlot(self.node.table.free(event.slot)),
                Note("hash_mismatch", (("where", "seal"),)),
            ]
            return effects + (
                self.refuse(found.version.step, event.reason or "digests differ", now) if current else []
            )
        if current and self.node.doomed(found.version):
            return [WriteSlot(self.node.table.free(event.slot))]
        effects = [WriteSlot(self.node.table.seal(event.slot, event.digest)), StateChanged()]
        return effects + (self.vote(found.version.step, now) if current else [])

    def vote(self, step: int, now: float) -> list[Effect]:
        """Say that the node has its part of a step, or that it will not; nothing while that is open."""
        save = self.open.get(step)
        if save is None or not self.node.trains:
            return []
        assert self.node.epoch is not None
        me = (self.node.epoch.epoch, self.node.epoch.inc, self.node.name)
        if save.refusal:
            vote = Vote(*me, step, refusal=save.refusal)
        else:
            own = [
                self.node.table.find(self.node.epoch.version(step), rank)
                for rank in self.node.epoch.ranks[self.node.name]
            ]
            parts = [found for found in own if found is not None]
            if len(parts) < len(own):
                return []
            if len({found.index_hash for found in parts}) > 1:
                return self.refuse(step, "ranks have different indexes", now)
            seals = tuple(Sealed(found.rank, found.digest) for found in parts)
            vote = Vote(*me, step, parts[0].index_hash, seals)
        save.sent = now
        return [Send(self.node.epoch.coordinator, vote)]

    def refuse(self, step: int, reason: str, now: float) -> list[Effect]:
        if self.node.epoch is None or self.node.doomed(self.node.epoch.version(step)):
            return []
        save = self.open.setdefault(step, Save())
        if save.refusal:
            return []
        save.refusal = reason[:1000]
        return [*self.vote(step, now), Note("save_refused", (("step", step), ("reason", reason)))]

    def in_hand(self, step: int, rank: int) -> bool:
        """Whether the rank's shard of a step is being written, hashed or sealed."""
        assert self.node.epoch is not None
        version = self.node.epoch.version(step)
        return any(
            r.version == version and r.rank == rank and r.state in ("WRITING", "SEALED") and self.node.mine(r)
            for r in self.node.table
        )
