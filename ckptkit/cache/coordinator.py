"""The coordinator: one for each epoch, on rank 0's node. Votes and reports in, one growing `Record` out.

Its whole memory is a `CoordinatorRecord`, stored before any of it is told. Everything else (votes that are not complete, who holds
which copy, reports of a restore) is said again by the nodes until it has had its effect, so that a restart loses nothing. A version is
decided by one write: COMMIT makes it `newest` and thereby decides all before it.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median

from ckptkit.cache.events import (
    Broadcast,
    CoordinatorEvent,
    DurableListed,
    Effect,
    InventoryArrived,
    ManifestWritten,
    Note,
    Received,
    Refuse,
    Send,
    Tick,
    WriteCoordinator,
    WriteManifest,
)
from ckptkit.cache.messages import (
    BanRequest,
    Bans,
    CoordinatorRecord,
    CopyLost,
    DrainReport,
    DrainRequest,
    Epoch,
    Holding,
    Poll,
    Record,
    RestoreDecision,
    RestoreReport,
    ToCoordinator,
    Version,
    Vote,
)
from ckptkit.cache.placement import Cliques
from ckptkit.cache.restore import safe
from ckptkit.cache.restoring import Restoring
from ckptkit.cache.settings import Settings

MOST_ABORTED = 128


@dataclass(slots=True)
class Ballot:
    """Votes for one step: who is missing, and since when."""

    index_hash: str
    started: float
    missing: set[str]


@dataclass(slots=True)
class Copying:
    """Who holds which shard of `cand`. `missing` are the ranks whose copies are not done."""

    since: float
    missing: set[int]
    holders: dict[tuple[int, str], set[str]] = field(default_factory=dict)


class Coordinator:
    """Decides saves, level 2, drains and the restore of one epoch. Use `start`, then `handle` for every event.

    Attributes:
        epoch: Its members never change.
        restore: The decision that ranks restore by, None before there is one.
        record: None until all ranks have restored.
    """

    def __init__(
        self, epoch: Epoch, stored: CoordinatorRecord | None, settings: Settings, now: float
    ) -> None:
        self.epoch, self.settings = epoch, settings
        self.cliques = Cliques(epoch.domains, epoch.copies)
        before = stored
        if stored is None or (stored.epoch, stored.inc) != (epoch.epoch, epoch.inc):
            stored = CoordinatorRecord(epoch.epoch, epoch.inc)
        self.record = stored.record
        self.restoring = Restoring(self, before, now)
        self.bans = self.record.bans if self.record else Bans()
        self.ballots: dict[int, Ballot] = {}
        self._latencies: deque[float] = deque(maxlen=32)
        self._copying: Copying | None = None
        self._begin_copying(now)
        self._drained: set[str] = set()
        self._drain_fails: float | None = None
        self._drain_due = self._writing_manifest = False
        self._manifest_at = now

    @classmethod
    def start(
        cls, epoch: Epoch, stored: CoordinatorRecord | None, settings: Settings, now: float
    ) -> tuple["Coordinator", list[Effect]]:
        """The coordinator of `epoch`, new or after a restart of its daemon (`stored`: what it wrote last, of whatever epoch)."""
        made = cls(epoch, stored, settings, now)
        if made.record is not None:
            return made, [Broadcast(made.record)]
        if made.restore is not None:
            return made, [Broadcast(made.restore)]
        return made, made.restoring.ask(now)

    @property
    def restore(self) -> RestoreDecision | None:
        return self.restoring.decision

    def handle(self, event: CoordinatorEvent, now: float) -> list[Effect]:
        """What to do about it, in this order (`events`)."""
        match event:
            case Received(message):
                return self._received(message, now)  # type: ignore[arg-type]
            case InventoryArrived(node, inventory):
                return self.restoring.inventory(node, inventory, now)
            case DurableListed():
                return self.restoring.listed(event, now)
            case ManifestWritten():
                return self._manifest(event, now)
            case Tick():
                return self._tick(now)

    def _received(self, message: ToCoordinator, now: float) -> list[Effect]:
        if (message.epoch, message.inc) != (self.epoch.epoch, self.epoch.inc):
            return [Refuse(409, f"epoch {self.epoch.epoch} is on")]
        if message.node not in self.epoch.ranks:
            return [Refuse(403, f"node {message.node} is no member of epoch {self.epoch.epoch}")]
        match message:
            case Vote():
                return self._vote(message, now)
            case Holding():
                return self._holding(message, now)
            case CopyLost():
                return self._lost(message)
            case Poll():
                return self._poll(message)
            case RestoreReport():
                return self._report(message, now)
            case DrainReport():
                return self._drain_report(message, now)
            case DrainRequest():
                return self._drain_request()
            case BanRequest():
                return self._ban(message.bans)

    # --- saves ------------------------------------------------------------------------------------------------------------

    def decided(self, version: Version) -> bool:
        """Whether it is committed or never will be."""
        assert self.record is not None
        newest = self.record.newest
        return self.record.rejects(version) or (newest is not None and version <= newest)

    def _vote(self, vote: Vote, now: float) -> list[Effect]:
        if self.record is None:
            return [Refuse(425, "the restore has not ended")]
        version = self.epoch.version(vote.step)
        if self.decided(version):
            return [Send(vote.node, self.record)]
        if vote.refusal or self.bans.hard(version):
            return self._abort([vote.step], vote.refusal or "banned", vote.node)
        if tuple(seal.rank for seal in vote.seals) != self.epoch.ranks[vote.node]:
            return [Refuse(422, f"a vote of {vote.node} is of its own ranks")]
        ballot = self.ballots.get(vote.step)
        if ballot is None:
            ballot = self.ballots[vote.step] = Ballot(vote.index_hash, now, set(self.epoch.ranks))
        if ballot.index_hash != vote.index_hash:
            return self._abort([vote.step], "ranks have different indexes", vote.node)
        ballot.missing.discard(vote.node)
        return [] if ballot.missing else self._commit(version, ballot, now)

    def _commit(self, version: Version, ballot: Ballot, now: float) -> list[Effect]:
        assert self.record is not None
        self._latencies.append(now - ballot.started)
        self.ballots = {step: other for step, other in self.ballots.items() if step > version.step}
        aborted = tuple(step for step in self.record.aborted if step > version.step)
        cand = self.record.cand
        if cand is None or cand.epoch != version.epoch:  # this epoch's own saves lie where its copies go
            cand = version
        record = replace(self.record, newest=version, aborted=aborted, cand=cand)
        notes: list[Effect] = [Note("commit", (("step", version.step), ("seconds", now - ballot.started)))]
        if self.settings.drain_every and version.step % self.settings.drain_every == 0:
            if record.drain is None or self._drain_fails is not None:
                record = self._draining(record, version)
            else:
                notes.append(Note("drain_skipped", (("step", version.step),)))
        return self._publish(record, now) + notes

    def _abort(self, steps: list[int], reason: str, node: str = "") -> list[Effect]:
        assert self.record is not None
        for step in steps:
            self.ballots.pop(step, None)
        aborted, floor = sorted({*self.record.aborted, *steps}), self.record.floor
        if len(aborted) > MOST_ABORTED:
            floor = aborted[-MOST_ABORTED // 2]
            aborted = [step for step in aborted if step > floor]
            self.ballots = {step: ballot for step, ballot in self.ballots.items() if step > floor}
        record = replace(self.record, aborted=tuple(aborted), floor=floor)
        facts = (("step", steps[-1]), ("reason", reason), ("node", node))
        return [*self._publish(record, None), Note("abort", facts)]

    def _late(self, now: float) -> list[int]:
        limit = self.settings.vote_s
        if self._latencies:
            limit = max(limit, 4 * median(self._latencies))
        return [step for step, ballot in self.ballots.items() if now - ballot.started >= limit]

    # --- copies -----------------------------------------------------------------------------------------------------------

    def _begin_copying(self, now: float) -> None:
        cand = self.record.cand if self.record else None
        missing = set(range(self.epoch.world))
        if self.restore is not None and cand == self.restore.version:
            missing = {
                rank for rank, places in enumerate(self.restore.sources) if not safe(places, self.cliques)
            }
        self._copying = Copying(now, missing) if cand else None

    def _holding(self, held: Holding, now: float) -> list[Effect]:
        if self.record is None or self._copying is None or held.version != self.record.cand:
            return []
        for seal in held.seals:
            holders = self._copying.holders.setdefault((seal.rank, seal.digest), set())
            holders.add(held.node)
            if seal.rank in self._copying.missing and self.cliques.replicated(holders):
                self._copying.missing.discard(seal.rank)
        if self._copying.missing:
            return []
        cand, newest = self.record.cand, self.record.newest
        following = newest if newest != cand else None
        note = Note("level2", (("step", held.version.step), ("seconds", now - self._copying.since)))
        return [*self._publish(replace(self.record, keep=cand, cand=following, degraded=False), now), note]

    def _lost(self, lost: CopyLost) -> list[Effect]:
        if self.record is None:
            return []
        note = Note("copy_lost", (("step", lost.version.step), ("rank", lost.rank), ("node", lost.node)))
        if self._copying and lost.version == self.record.cand:
            for (rank, _), holders in self._copying.holders.items():
                if rank == lost.rank:
                    holders.discard(lost.node)
                    if not self.cliques.replicated(holders):
                        self._copying.missing.add(rank)
        if lost.version == self.record.keep and not self.record.degraded:
            return [*self._publish(replace(self.record, degraded=True), None), note]
        return [note]

    # --- the restore ------------------------------------------------------------------------------------------------------

    def _report(self, report: RestoreReport, now: float) -> list[Effect]:
        if self.record is not None:
            return [Send(report.node, self.record)]
        effects = self.restoring.report(report, now)
        if not self.restoring.done or self.restore is None:
            return effects
        version, keep = self.restore.version, self.restore.keep
        cand = version if version != keep else None
        record = Record(
            self.epoch.epoch,
            self.epoch.inc,
            0,
            restored=version,
            newest=version,
            keep=keep,
            cand=cand,
            bans=self.bans,
        )
        return self._publish(record, now)

    # --- durable ----------------------------------------------------------------------------------------------------------

    def _draining(self, record: Record, version: Version) -> Record:
        self._drained.clear()
        self._drain_fails, self._writing_manifest = None, False
        return replace(record, drain=version)

    def _drain_request(self) -> list[Effect]:
        record = self.record
        if record is None or record.newest is None or record.newest in (record.drain, record.durable):
            return []
        if record.newest.epoch != self.epoch.epoch and (
            self.restore is None or self.restore.world != self.epoch.world
        ):
            return [
                Note("drain_refused", (("step", record.newest.step), ("reason", "saved in another layout")))
            ]
        if record.drain is not None and self._drain_fails is None:
            self._drain_due = True
            return []
        return self._publish(self._draining(record, record.newest), None)

    def _drain_report(self, report: DrainReport, now: float) -> list[Effect]:
        if self.record is None or report.version != self.record.drain:
            return [Send(report.node, self.record)] if self.record else []
        if report.failure:
            self._drain_fails = now if self._drain_fails is None else self._drain_fails
            return [Note("drain_failed", (("node", report.node), ("reason", report.failure)))]
        self._drained.add(report.node)
        self._drain_fails = None
        return self._write_manifest(now)

    def _write_manifest(self, now: float) -> list[Effect]:
        record = self.record
        if (
            record is None
            or record.drain is None
            or self._writing_manifest
            or self._drained != set(self.epoch.ranks)
        ):
            return []
        self._writing_manifest, self._manifest_at = True, now
        return [WriteManifest(record.drain)]

    def _manifest(self, event: ManifestWritten, now: float) -> list[Effect]:
        record = self.record
        if record is None or event.version != record.drain:
            return []
        self._writing_manifest = False
        if event.failure:
            self._drain_fails = now if self._drain_fails is None else self._drain_fails
            return [Note("drain_failed", (("node", "coordinator"), ("reason", event.failure)))]
        record = replace(record, drain=None, durable=event.version)
        if self._drain_due and record.newest != event.version and record.newest is not None:
            record = self._draining(record, record.newest)
        self._drain_due = False
        return [*self._publish(record, None), Note("durable", (("step", event.version.step),))]

    # --- everything else --------------------------------------------------------------------------------------------------

    def _poll(self, poll: Poll) -> list[Effect]:
        effects: list[Effect] = []
        if self.restore is not None and poll.attempt < self.restore.attempt:
            effects.append(Send(poll.node, self.restore))
        if self.record is not None and poll.dseq < self.record.dseq:
            effects.append(Send(poll.node, self.record))
        return effects

    def _ban(self, bans: Bans) -> list[Effect]:
        joined = self.bans.union(bans)
        if joined == self.bans:
            return []
        self.bans = joined
        return self._publish(replace(self.record, bans=joined), None) if self.record else []

    def _tick(self, now: float) -> list[Effect]:
        if self.record is None:
            return self.restoring.tick(now)
        effects: list[Effect] = []
        if late := self._late(now):
            effects += self._abort(late, "votes are missing")
        if self._copying and now - self._copying.since >= self.settings.replica_s:
            cand = self.record.newest
            if cand != self.record.cand or not self.record.degraded:
                effects += self._publish(replace(self.record, cand=cand, degraded=True), now)
                effects.append(Note("replica_degraded"))
        record = self.record
        failing = self._drain_fails is not None and now - self._drain_fails >= self.settings.replica_s
        if failing and record.newest is not None and record.newest not in (record.drain, record.durable):
            # Its slots are wanted for saves; when the store comes back, the newest step is worth most.
            effects.append(Note("drain_skipped", (("step", record.drain.step if record.drain else 0),)))
            effects += self._publish(self._draining(record, record.newest), None)
        if now - self._manifest_at >= self.settings.resend_s:
            effects += self._write_manifest(now)
        return effects

    def _publish(self, record: Record, now: float | None) -> list[Effect]:
        """Store the next record, then tell everyone. `now` where `cand` may have changed."""
        before = self.record.cand if self.record else None
        self.record = replace(record, dseq=record.dseq + 1)
        if self.record.cand != before:
            assert now is not None
            self._begin_copying(now)
        return [self.stored(), Broadcast(self.record)]

    def stored(self) -> WriteCoordinator:
        """Write down what was decided."""
        return WriteCoordinator(
            CoordinatorRecord(self.epoch.epoch, self.epoch.inc, self.restore, self.record)
        )
