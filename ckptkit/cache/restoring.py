"""The coordinator's part in a restore: what is restored is decided from what nodes and durable storage hold.

No rank trains before all members have restored, so nothing is decided before all of them have said what they hold: one that is late is waited for, and
named. Its answer counts once it has accepted this epoch, since until then processes of an earlier one may still seal shards there, and an earlier
coordinator may commit them. Only what is no member (nodes of earlier epochs, durable storage) may be given up after `inventory_s`.

A version that some node knows to be committed is passed over only for a reason, which is kept in the decision: ranks found it bad, its shards
could not be read in `TRIES` attempts, or some shard has no copy where anyone answered until the time was over.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptkit.cache.events import AskInventories, Broadcast, DurableListed, Effect, ListDurable, Note
from ckptkit.cache.messages import (
    CoordinatorRecord,
    Inventory,
    Place,
    RestoreDecision,
    RestoreReport,
    Version,
)
from ckptkit.cache.restore import Choice, choose, missing

if TYPE_CHECKING:
    from ckptkit.cache.coordinator import Coordinator

TRIES = 3
"""Attempts to read a version whose copies are there, before an older one is taken."""
MOST_NAMED = 8


class Restoring:
    """The part of a `Coordinator` that decides what its epoch restores.

    Attributes:
        decision: What ranks restore by, None before there is one.
        deadline: Until when answers of others than members are waited for.
        known: Versions that were committed or durable, as far as any node has told.
    """

    def __init__(self, coordinator: "Coordinator", stored: CoordinatorRecord | None, now: float) -> None:
        self.c = coordinator
        same = stored is not None and (stored.epoch, stored.inc) == (
            coordinator.epoch.epoch,
            coordinator.epoch.inc,
        )
        self.decision = stored.restore if stored is not None and same else None
        self.choosing = self.decision is None
        self.known: set[Version] = set()
        if stored is not None and not same and stored.record is not None:
            self.known.update(stored.record.acknowledged)
        self._excluded = self.decision.excluded if self.decision else ()
        self._reasons = self.decision.passed_over if self.decision else ()
        self._tries: dict[Version, int] = {}
        self._inventories: dict[str, Inventory] = {}
        self._former: set[str] = set()
        self._silent: set[str] = set()  # former members that were asked and did not answer
        self._durable: DurableListed | None = None
        self._loaded: set[str] = set()
        self.deadline = now + coordinator.settings.inventory_s

    @property
    def done(self) -> bool:
        """Whether all members have restored what was decided."""
        return not self.choosing and self._loaded == set(self.c.epoch.ranks)

    def ask(self, now: float) -> list[Effect]:
        """Begin to find out what there is."""
        self._inventories.clear()
        self._silent.clear()
        self._durable, self.choosing = None, True
        self.deadline = now + self.c.settings.inventory_s
        return [AskInventories(self.c.epoch), ListDurable()]

    # --- answers ----------------------------------------------------------------------------------------------------------

    def inventory(self, node: str, found: Inventory | None, now: float) -> list[Effect]:
        epoch = self.c.epoch
        if not self.choosing:
            return []
        if found is None or (node in epoch.ranks and (found.epoch, found.inc) != (epoch.epoch, epoch.inc)):
            if node not in epoch.ranks and node not in self._inventories:
                self._silent.add(node)
            return self.choose(now)
        self._inventories[node] = found
        self.c.bans = self.c.bans.union(found.bans)
        self.known.update(found.committed)
        return self._learn(found.former) + self.choose(now)

    def listed(self, found: DurableListed, now: float) -> list[Effect]:
        self._durable = found
        self.c.bans = self.c.bans.union(found.bans)
        return self._learn(found.former) + self.choose(now)

    def _learn(self, places: Iterable[Place]) -> list[Effect]:
        """Ask nodes that were members before, and of whom nobody had told yet."""
        new = {place.node for place in places} - set(self.c.epoch.ranks) - self._former
        self._former |= new
        return [AskInventories(self.c.epoch, tuple(sorted(new)))] if new and self.choosing else []

    def tick(self, now: float) -> list[Effect]:
        """Ask those again who have not answered, or have more to show soon."""
        if not self.choosing:
            return []
        due = (set(self.c.epoch.ranks) | self._former) - set(self._inventories) | self._hashing()
        asked: list[Effect] = [AskInventories(self.c.epoch, tuple(sorted(due)))] if due else []
        return asked + self.choose(now)

    @property
    def waiting(self) -> list[str]:
        """Members who have not said yet what they hold."""
        return sorted(set(self.c.epoch.ranks) - set(self._inventories)) if self.choosing else []

    def _hashing(self) -> set[str]:
        return {node for node, inventory in self._inventories.items() if inventory.hashing}

    # --- the choice -------------------------------------------------------------------------------------------------------

    def choose(self, now: float) -> list[Effect]:
        """Decide what is restored, once what may matter is there, or time is up for what is not a member's."""
        if not self.choosing:
            return []
        overdue = now >= self.deadline
        if waiting := self.waiting:
            if not overdue:
                return []
            self.deadline = now + self.c.settings.inventory_s
            return [
                Note("restore_waits", (("nodes", ", ".join(waiting[:MOST_NAMED])), ("count", len(waiting))))
            ]
        listed = self._durable is not None and not self._durable.failure
        asked = self._former <= set(self._inventories) | self._silent
        if not overdue and (not listed or not asked or self._hashing()):
            return []
        durable = self._durable.shards if self._durable else ()
        choice = choose(self._inventories, durable, self.c.bans, self._excluded, self.c.cliques)
        missed = self._missed(choice)
        if missed is not None and not overdue and self._unheard():
            return []
        return self._decide(choice, missed)

    def _missed(self, choice: Choice | None) -> Version | None:
        """The newest version that was committed, and would be passed over although nobody found it bad."""
        newest, bans = choice.version if choice else None, self.c.bans
        return max(
            (
                version for version in self.known
                if (newest is None or version > newest) and version not in self._excluded
                and not bans.hard(version) and not bans.soft(version)
            ), default=None,
        )  # fmt: skip

    def _decide(self, choice: Choice | None, missed: Version | None) -> list[Effect]:
        epoch, before = self.c.epoch, self.decision
        why = f"{missed} was committed and is passed over: {self._lacks(missed)}"[:900] if missed else ""
        made = RestoreDecision(
            epoch.epoch, epoch.inc, before.attempt + 1 if before else 1, excluded=self._excluded,
            passed_over=(*self._reasons, why) if why else self._reasons,
        )  # fmt: skip
        if choice is None:
            made = replace(made, error="" if epoch.fresh else self._why_none(why))
        else:
            made = replace(
                made, version=choice.version, world=choice.world, index_hash=choice.index_hash, sources=choice.sources,
                digests=choice.digests, keep=choice.keep,
            )  # fmt: skip
        self.decision, self.choosing = made, False
        self._loaded.clear()
        notes = [Note("restore_passed_over", (("reason", reason),)) for reason in made.passed_over]
        return [self.c.stored(), Broadcast(made), *notes]

    def _lacks(self, version: Version) -> str:
        """What a version needs that is not there, and who may have it."""
        durable = self._durable.shards if self._durable else ()
        gone = missing(self._inventories, durable, version)
        if gone is None:
            lacks = "no shard of it is on any node that answered"
        else:
            more = f" and {len(gone) - MOST_NAMED} more" if len(gone) > MOST_NAMED else ""
            lacks = f"no node that answered has shard {', '.join(map(str, gone[:MOST_NAMED]))}{more}"
        return "; ".join([lacks, *self._unheard()])

    def _unheard(self) -> list[str]:
        """Who did not answer."""
        found = []
        if silent := sorted(self._former - set(self._inventories)):
            found.append(f"nodes {', '.join(silent[:MOST_NAMED])}, members before, did not answer")
        if self._durable is None or self._durable.failure:
            why = self._durable.failure if self._durable else "no answer"
            found.append(f"the durable storage cannot be listed: {why}")
        return found

    def _why_none(self, missed: str) -> str:
        """Why there is nothing to restore although there may have been, empty where there never was."""
        if missed:
            return f"no whole checkpoint: {missed}"[:1000]
        if self._durable is None or self._durable.failure:
            return f"no whole checkpoint in memory, and {self._unheard()[-1]}"[:1000]
        seen = {shard.version for inventory in self._inventories.values() for shard in inventory.shards}
        seen |= {shard.version for shard in self._durable.shards}
        if seen:
            return f"no whole checkpoint that may be restored; parts or bad copies of {len(seen)} exist, newest {max(seen)}"
        return ""

    # --- its end ----------------------------------------------------------------------------------------------------------

    def report(self, report: RestoreReport, now: float) -> list[Effect]:
        """How a node fared. A version that could not be read is tried again; one that was read and is bad is not."""
        decision = self.decision
        if decision is None or report.attempt != decision.attempt or decision.error or self.choosing:
            return []
        if not report.failure:
            self._loaded.add(report.node)
            return []
        facts = (("attempt", report.attempt), ("node", report.node), ("reason", report.failure))
        if (version := decision.version) is not None:
            tries = self._tries[version] = self._tries.get(version, 0) + 1
            if not report.late or tries >= TRIES:
                why = f"{version} is passed over: node {report.node}: {report.failure}"
                self._excluded, self._reasons = (*self._excluded, version), (*self._reasons, why[:900])
        return [*self.ask(now), Note("restore_failed", facts)]
