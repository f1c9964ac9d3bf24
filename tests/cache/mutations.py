"""Ways to break the protocol, each a patch of the real code: the tests show that every one of them is found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from ckptkit.cache import events as ev
from ckptkit.cache import restore
from ckptkit.cache.coordinator import Coordinator
from ckptkit.cache.messages import Inventory, Record, SlotRecord, Version, Vote
from ckptkit.cache.node import Node
from ckptkit.cache.restoring import Restoring
from ckptkit.cache.saves import Saves
from ckptkit.cache.slots import SlotTable

Patches = dict[tuple[Any, str], Any]


def commit_without_one_vote() -> Patches:
    real = Coordinator._vote

    def vote(self: Coordinator, vote: Vote, now: float) -> list[Any]:
        effects = real(self, vote, now)
        ballot = self.ballots.get(vote.step)
        if ballot is not None and len(ballot.missing) == 1:
            effects += self._commit(self.epoch.version(vote.step), ballot, now)
        return effects

    return {(Coordinator, "_vote"): vote}


def vote_counted_for_another_node() -> Patches:
    real = Coordinator._vote

    def vote(self: Coordinator, vote: Vote, now: float) -> list[Any]:
        ballot = self.ballots.get(vote.step)
        if ballot is not None and vote.node not in ballot.missing and ballot.missing:
            ballot.missing.pop()
            if not ballot.missing:
                return self._commit(self.epoch.version(vote.step), ballot, now)
        return real(self, vote, now)

    return {(Coordinator, "_vote"): vote}


def decision_told_before_it_is_stored() -> Patches:
    real = Coordinator._publish
    return {(Coordinator, "_publish"): lambda self, record, now: real(self, record, now)[::-1]}


def protected_version_evicted() -> Patches:
    def evictable(self: SlotTable, slot: int, record: Record | None) -> bool:
        return self[slot].state == "SEALED" and not self.refs[slot]

    return {(SlotTable, "evictable"): evictable}


def abort_frees_a_slot_that_is_being_written() -> Patches:
    real = Node._take_record

    def take(self: Node, record: Record, now: float) -> list[Any]:
        effects = real(self, record, now)
        for found in self.table:
            if (
                found.state == "WRITING"
                and not found.writer_done
                and found.version
                and self.doomed(found.version)
            ):
                effects.append(ev.WriteSlot(self.table.free(found.slot)))
        return effects

    return {(Node, "_take_record"): take}


def epoch_stored_after_the_answer() -> Patches:
    real = Node._join

    def join(self: Node, *args: Any) -> list[Any]:
        effects = real(self, *args)
        first = [e for e in effects if isinstance(e, ev.WriteEpoch)]
        return [e for e in effects if not isinstance(e, ev.WriteEpoch)] + first

    return {(Node, "_join"): join}


def quarantined_slot_reused() -> Patches:
    return {(SlotTable, "quarantine"): SlotTable.free}


def order_of_records_ignored() -> Patches:
    real = Node._take_record

    def take(self: Node, record: Record, now: float) -> list[Any]:
        if self.record is not None and record.dseq < self.record.dseq and self._of_epoch(self.record):
            self.record = None
        return real(self, record, now)

    return {(Node, "_take_record"): take}


def copies_reported_before_they_are_verified() -> Patches:
    def holding(self: SlotTable, version: Version) -> list[SlotRecord]:
        return [r for r in self if r.state in ("WRITING", "SEALED") and r.version == version]

    return {(SlotTable, "holding"): holding}


def restore_mixes_incarnations() -> Patches:
    real = restore._gather

    def gather(*args: Any) -> Any:
        mixed: dict[Any, Any] = {}
        first: dict[tuple[int, int], Version] = {}
        for (version, world, index), ranks in real(*args).items():
            name = first.setdefault((version.epoch, version.step), version)
            for rank, places in ranks.items():
                mixed.setdefault((name, world, index), {}).setdefault(rank, {}).update(places)
        return mixed

    return {(restore, "_gather"): gather}


def keep_before_all_copies() -> Patches:
    real = Coordinator._holding

    def holding(self: Coordinator, held: Any, now: float) -> list[Any]:
        if self._copying is not None and len(self._copying.missing) > 1:
            effects = real(self, held, now)
            if self._copying is not None and len(self._copying.missing) == 1:
                self._copying.missing.clear()
                effects += real(self, held, now)
            return effects
        return real(self, held, now)

    return {(Coordinator, "_holding"): holding}


def vote_before_the_slot_is_stored() -> Patches:
    real = Saves.hashed

    def hashed(self: Saves, *args: Any) -> list[Any]:
        return sorted(real(self, *args), key=lambda effect: not isinstance(effect, ev.Send))

    return {(Saves, "hashed"): hashed}


def slot_handed_out_before_it_is_stored() -> Patches:
    real = Saves.begin

    def begin(self: Saves, *args: Any) -> list[Any]:
        return sorted(real(self, *args), key=lambda effect: isinstance(effect, ev.WriteSlot))

    return {(Saves, "begin"): begin}


def no_fence() -> Patches:
    return {(Node, "_of_epoch"): lambda self, message: message is not None and self.epoch is not None}


def torn_slot_taken_for_sealed() -> Patches:
    real = SlotTable.recovered.__func__  # type: ignore[attr-defined]

    def recovered(cls: type[SlotTable], stored: Any, expected: SlotTable) -> SlotTable:
        taken = [
            replace(r, state="SEALED", digest="0" * 32, index_hash="1d" * 16)
            if r.state == "WRITING" and not r.writer_done
            else r
            for r in stored
        ]
        return real(cls, taken, expected)

    return {(SlotTable, "recovered"): classmethod(recovered)}


def manifest_before_all_shards() -> Patches:
    real = Coordinator._write_manifest

    def write(self: Coordinator, now: float) -> list[Any]:
        if len(self._drained) == len(self.epoch.ranks) - 1:
            self._drained |= set(self.epoch.ranks)
        return real(self, now)

    return {(Coordinator, "_write_manifest"): write}


def drained_version_not_protected() -> Patches:
    real = Record.supersedes
    return {(Record, "supersedes"): lambda self, version, own=True: real(self, version, own=False)}


def restore_without_a_late_member() -> Patches:
    real = Restoring.choose

    def choose(self: Restoring, now: float) -> list[Any]:
        if self.choosing and now >= self.deadline:
            self._inventories |= {node: Inventory(node, ()) for node in self.waiting}
        return real(self, now)

    return {(Restoring, "choose"): choose}


def inventory_counted_before_its_node_has_joined() -> Patches:
    real = Restoring.inventory

    def inventory(self: Restoring, node: str, found: Inventory | None, now: float) -> list[Any]:
        epoch = self.c.epoch
        return real(self, node, found and replace(found, epoch=epoch.epoch, inc=epoch.inc), now)

    return {(Restoring, "inventory"): inventory}


def copy_out_of_reach_taken_for_bad() -> Patches:
    real = Restoring.report
    return {(Restoring, "report"): lambda self, report, now: real(self, replace(report, late=False), now)}


def committed_step_given_up_at_once() -> Patches:
    return {(Restoring, "_missed"): lambda self, choice: None}


@contextmanager
def broken(mutation: Callable[[], Patches]) -> Iterator[None]:
    """The protocol with one of them."""
    patches = [patch.object(owner, name, value) for (owner, name), value in mutation().items()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()
