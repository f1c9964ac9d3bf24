"""What is counted and logged: the protocol's notes, votes, and one line for the life of each step."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptkit.cache.messages import Record, RestoreDecision, Version, Vote

if TYPE_CHECKING:
    from ckptkit.cache.daemon import Daemon

_MOST = 64
"""Steps whose life is remembered."""


@dataclass
class Life:
    """When what happened to one step on this node, in seconds since its first `begin`."""

    began: float
    nbytes: int = 0
    ranks: int = 0
    level: int = 0
    outcome: str = ""
    when: dict[str, float] = field(default_factory=dict)


class Notes:
    """Of one daemon."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self.lives: dict[Version, Life] = {}
        self.level2_at: float | None = None
        self.durable_at: float | None = None
        self.newest_at: float | None = None
        self.skipped_in_row: dict[int, int] = {}
        self.restored: dict[Version, int] = {}
        self._told: set[tuple[int, int]] = set()

    def begun(self, version: Version, nbytes: int) -> None:
        life = self.lives.get(version)
        if life is None:
            life = self.lives[version] = Life(self._daemon.now())
            while len(self.lives) > _MOST:
                self._end(next(iter(self.lives)), "forgotten")
        life.nbytes += nbytes
        life.ranks += 1

    def mark(self, version: Version, what: str) -> None:
        """Note the last time that something happened to a step."""
        life = self.lives.get(version)
        if life is not None:
            life.when[what] = round(self._daemon.now() - life.began, 4)

    def saw(self, record: Record) -> None:
        """Follow the coordinator's record: levels, ages, ends of lives."""
        daemon, now = self._daemon, self._daemon.now()
        for version, level, name in (
            (record.newest, 1, "committed"), (record.keep, 2, "replicated"), (record.durable, 3, "durable"),
        ):  # fmt: skip
            life = self.lives.get(version) if version is not None else None
            if version is None or life is None or life.level >= level:
                continue
            life.level = level
            self.mark(version, name)
            if level == 1:
                self.newest_at = now
            elif level == 2:
                self.level2_at = now
            else:
                self.durable_at = now
        for version in list(self.lives):
            if record.rejects(version) and not self.lives[version].level:
                self._end(version, "aborted")
            elif record.newest is not None and version < record.newest and record.supersedes(version):
                self._end(version, "superseded")
        for level, version in ((1, record.newest), (2, record.keep), (3, record.durable)):
            if version is not None:
                daemon.metrics.level_step.labels(str(level)).set(version.step)
        if record.newest is not None:
            daemon.metrics.committed_step.set(record.newest.step)
        if record.durable is not None:
            daemon.metrics.durable_step.set(record.durable.step)
        daemon.metrics.replica_degraded.set(1 if record.degraded else 0)

    def level(self, version: Version) -> tuple[int, bool]:
        """The highest level that a step is known to have had, and whether it was aborted."""
        record, life = self._daemon.node.record, self.lives.get(version)
        if life is not None:
            return life.level, life.outcome == "aborted"
        if record is None:
            return 0, False
        level = (
            3
            if record.durable == version
            else 2
            if record.keep == version
            else 1
            if record.newest == version
            else 0
        )
        return level, record.rejects(version) and not level

    def _end(self, version: Version, outcome: str) -> None:
        life = self.lives[version]
        if life.outcome:
            if outcome == "forgotten":
                del self.lives[version]
            return
        life.outcome = outcome
        self._daemon.log(
            "step",
            step=version.step,
            epoch=version.epoch,
            outcome=outcome,
            level=life.level,
            ranks=life.ranks,
            bytes=life.nbytes,
            **life.when,
        )
        if outcome == "forgotten":
            del self.lives[version]

    def restore(self, decision: RestoreDecision) -> None:
        """Follow what is restored, to notice a job that restores the same step again and again."""
        key = (decision.epoch, decision.attempt)
        if key in self._told:
            return
        self._told.add(key)
        daemon = self._daemon
        daemon.metrics.restore_attempts.inc()
        version = decision.version
        if version is not None:
            if decision.attempt == 1:
                self.restored[version] = self.restored.get(version, 0) + 1
            daemon.metrics.restore_loop.set(seen if (seen := self.restored.get(version, 0)) > 1 else 0)
        for reason in decision.passed_over:
            daemon.metrics.restore_rejected.labels("failed").inc()
            daemon.log("restore passes over", reason=reason)
        daemon.log(
            "restore decided", attempt=decision.attempt, epoch=decision.epoch, step=version.step if version else None,
            of_epoch=version.epoch if version else None, world=decision.world, error=decision.error or None,
        )  # fmt: skip

    def sending(self, message: object) -> None:
        if isinstance(message, Vote):
            self._daemon.metrics.votes.labels("no" if message.refusal else "yes").inc()

    def take(self, name: str, facts: dict[str, Any]) -> None:
        """A note of the state machines."""
        metrics = self._daemon.metrics
        metrics.events.labels(name).inc()
        match name:
            case "commit":
                metrics.commit.labels("commit").inc()
                metrics.commit_latency.observe(float(facts.get("seconds", 0)))
                return
            case "abort":
                metrics.commit.labels("abort").inc()
            case "hash_mismatch":
                if facts.get("where") != "seal":  # counted where it is found
                    metrics.hash_mismatch.labels(str(facts.get("where", "scrub"))).inc()
            case "drain_skipped":
                metrics.drain_skipped.inc()
        self._daemon.log(name.replace("_", " "), **facts)
