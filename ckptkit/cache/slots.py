"""The slots of a node: who may write one, what it holds, when it may be used again.

    FREE ──begin──► WRITING ──digests computed──► SEALED ──begin, where no one wants its version──► WRITING
                      │ torn, aborted ─► FREE
                      │ owner fenced, alive ─► QUARANTINED ─ owner exited ─► FREE
    any ─ a leaf bad again after its repair ─► RETIRED

COMMITTED, DRAINED and EVICTABLE are views, computed from the coordinator's record when they are asked for and never stored: a
stored mark may be wrong by the time it is read. Every change gives a new `SlotRecord`, to be stored before anything that depends on it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckptkit.cache.messages import Owner, Record, Shard, SlotRecord, Version

REPLICA = "replica"


def own_lane(local_rank: int) -> str:
    return f"own/{local_rank}"


class SlotTable:
    """All slots of one node, by number.

    Args:
        records: One for each slot, as stored or new. Slots and lanes are fixed from here on.
        slot_bytes: Capacity of each.

    Attributes:
        refs: Readers of each slot.
        unready: Slots whose memory is not allocated and populated; none of them is handed out.
        lanes: The slots of each lane.
    """

    def __init__(self, records: Iterable[SlotRecord], slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._records = {record.slot: record for record in records}
        self.unready: set[int] = set()
        self.refs = dict.fromkeys(self._records, 0)
        self.lanes: dict[str, tuple[int, ...]] = {}
        for slot, record in sorted(self._records.items()):
            self.lanes[record.lane] = (*self.lanes.get(record.lane, ()), slot)

    def __getitem__(self, slot: int) -> SlotRecord:
        return self._records[slot]

    def get(self, slot: int) -> SlotRecord | None:
        return self._records.get(slot)

    def __contains__(self, slot: int) -> bool:
        return slot in self._records

    def __iter__(self) -> Iterator[SlotRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    @classmethod
    def layout(cls, own: dict[int, int], replicas: int, slot_bytes: int) -> "SlotTable":
        """New, free slots: `own[local_rank]` for each rank of the node, and a pool for copies of others' shards."""
        lanes = [own_lane(rank) for rank, count in sorted(own.items()) for _ in range(count)] + [
            REPLICA
        ] * replicas
        return cls((SlotRecord(slot, lane) for slot, lane in enumerate(lanes)), slot_bytes)

    # --- what may be used -----------------------------------------------------------------------------------------------

    def evictable(self, slot: int, record: Record | None) -> bool:
        """Whether a new version may overwrite it: sealed, read by no one, and its version superseded or aborted."""
        found = self._records[slot]
        if found.state != "SEALED" or self.refs[slot] or found.version is None or record is None:
            return False
        return record.supersedes(found.version, own=found.lane != REPLICA)

    def pick(self, lane: str, record: Record | None) -> int | None:
        """A free slot of the lane, else its oldest evictable one, else None."""
        oldest: tuple[Version, int] | None = None
        for slot in self.lanes.get(lane, ()):
            found = self._records[slot]
            if slot in self.unready:
                continue
            if found.state == "FREE":
                return slot
            if self.evictable(slot, record):
                assert found.version is not None
                if oldest is None or (found.version, slot) < oldest:
                    oldest = (found.version, slot)
        return None if oldest is None else oldest[1]

    def pick_replica(self, version: Version, record: Record | None) -> int | None:
        """A slot for a copy of another node's shard.

        One version takes at most half of the lane: `keep` and `cand` both find room, also where placement changed in between and old
        copies lie beside new ones.
        """
        lane = self.lanes.get(REPLICA, ())
        taken = sum(self._records[slot].version == version for slot in lane)
        return self.pick(REPLICA, record) if 2 * taken < len(lane) else None

    def view(self, slot: int, record: Record | None) -> str:
        """The state for people: `SEALED` is told apart as COMMITTED, DRAINED or EVICTABLE by the record."""
        found = self._records[slot]
        if found.state != "SEALED" or record is None or found.version is None:
            return found.state
        if record.supersedes(found.version, own=found.lane != REPLICA):
            return "EVICTABLE"
        if found.version == record.durable:
            return "DRAINED"
        return "COMMITTED" if found.version in (record.newest, record.keep, record.cand) else "SEALED"

    # --- what is there --------------------------------------------------------------------------------------------------

    def find(self, version: Version, rank: int) -> SlotRecord | None:
        """A sound sealed copy of this shard."""
        for found in self._records.values():
            if (
                found.state == "SEALED"
                and found.version == version
                and found.rank == rank
                and not found.damaged
            ):
                return found
        return None

    def holding(self, version: Version) -> list[SlotRecord]:
        """Every sound sealed slot of a version."""
        return [
            r
            for r in self._records.values()
            if r.state == "SEALED" and r.version == version and not r.damaged
        ]

    def shards(self) -> tuple[Shard, ...]:
        return tuple(shard_of(r) for r in self._records.values() if r.state == "SEALED" and not r.damaged)

    def written_by(self, owner: Owner) -> list[SlotRecord]:
        """Slots that the process may still be writing to."""
        return [
            r for r in self._records.values()
            if r.writer == owner and ((r.state == "WRITING" and not r.writer_done) or r.state == "QUARANTINED")
        ]  # fmt: skip

    # --- transitions: each gives the record to be stored ------------------------------------------------------------------

    def begin(self, slot: int, record: Record | None, shard: Shard, writer: Owner | None) -> SlotRecord:
        """Start writing a shard into a slot that `pick` gave. `writer` None: the daemon pulls it."""
        found = self._records[slot]
        assert found.state == "FREE" or self.evictable(slot, record), f"slot {slot} is in use"
        return self._put(
            SlotRecord(
                slot, found.lane, "WRITING", found.seq + 1, shard.version, shard.rank, shard.world, shard.index_hash,
                shard.used, shard.digest, writer, strikes=found.strikes,
            )
        )  # fmt: skip

    def written(self, slot: int, used: int, index_hash: str) -> SlotRecord:
        """The writer is done; digests are still missing."""
        found = self._records[slot]
        assert found.state == "WRITING" and not found.writer_done
        return self._put(replace(found, used=used, index_hash=index_hash, writer_done=True))

    def seal(self, slot: int, digest: str, used: int = 0) -> SlotRecord:
        """Digests are there. `used` where the size becomes known only now."""
        found = self._records[slot]
        assert found.state == "WRITING"
        found = replace(found, used=used or found.used)
        return self._put(
            replace(
                found,
                state="SEALED",
                digest=digest,
                writer_done=True,
                verified=True,
                bitmap="",
                damaged=False,
            )
        )

    def free(self, slot: int) -> SlotRecord:
        """Forget what it holds. The caller knows that no one writes to it."""
        found = self._records[slot]
        return self._put(SlotRecord(slot, found.lane, "FREE", found.seq + 1, strikes=found.strikes))

    def quarantine(self, slot: int) -> SlotRecord:
        found = self._records[slot]
        assert found.state == "WRITING" and not found.writer_done and found.writer is not None
        return self._put(replace(found, state="QUARANTINED"))

    def retire(self, slot: int) -> SlotRecord:
        return self._put(replace(self._records[slot], state="RETIRED"))

    def note(self, slot: int, *, bitmap: str | None = None, verified: bool | None = None, damaged: bool | None = None,
             strikes: int | None = None) -> SlotRecord:  # fmt: skip
        """Change what is known of the bytes, not the state."""
        found = self._records[slot]
        return self._put(
            replace(
                found,
                bitmap=found.bitmap if bitmap is None else bitmap,
                verified=found.verified if verified is None else verified,
                damaged=found.damaged if damaged is None else damaged,
                strikes=found.strikes if strikes is None else strikes,
            )
        )

    def _put(self, record: SlotRecord) -> SlotRecord:
        self._records[record.slot] = record
        return record

    @classmethod
    def recovered(cls, stored: Iterable[SlotRecord], expected: "SlotTable") -> "SlotTable":
        """The table after a restart of the daemon: `expected` (new, free slots) with what is still known of them.

        A slot without a readable record, or one of another lane, is free: its bytes prove nothing without it.
        """
        table = cls(expected, expected.slot_bytes)
        for record in stored:
            if record.slot in table and table[record.slot].lane == record.lane:
                table._records[record.slot] = replace(record, verified=False)
        return table


def shard_of(record: SlotRecord) -> Shard:
    """The shard that a slot in use holds, or will hold."""
    assert record.version is not None
    return Shard(record.version, record.rank, record.world, record.index_hash, record.used, record.digest)
