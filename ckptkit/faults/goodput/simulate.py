"""A discrete-event simulation of a training job with checkpoints in several tiers. Needs SimPy (extra `goodput`).

Failures arrive for the whole job, at random (exponential or Weibull gaps) or from a trace, and each has a severity: how much
memory it takes along. After one, the newest copy that survived and had arrived is read; failures strike during saves, restarts
and waits too. Stretches between saves are single events, so a run of a thousand failures takes seconds.

Simplified: a tier's transfers slow training by a fixed share, charged when the transfer starts; all nodes fail alike.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gamma, inf, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from ckptkit.errors import UsageError
from ckptkit.faults.goodput.accounting import Account

if TYPE_CHECKING:
    import simpy

SEVERITIES = ("process", "node", "clique")
"""What a failure takes: processes only (memory of nodes stays); the memory of a node; that of all copies of some shard."""

_KEPT = 3  # copies of a tier


@dataclass(frozen=True)
class Tier:
    """One kind of copy.

    Attributes:
        survives: The worst severity that a copy survives.
        interval_s: Useful work between saves.
        stall_s: Training stands still for each save.
        delay_s: From there until the copy has arrived; the next save of this tier waits for it.
        slowdown: Share of the delay that training loses to the transfer.
        read_s: To restore from this tier.
        corrupt: Probability that a copy turns out to be bad when it is read; then the next older one is taken.
    """

    name: str
    survives: str
    interval_s: float
    stall_s: float = 0.0
    delay_s: float = 0.0
    slowdown: float = 0.0
    read_s: float = 0.0
    corrupt: float = 0.0

    def __post_init__(self) -> None:
        if self.survives not in SEVERITIES:
            raise UsageError(f"tier {self.name}: {self.survives!r} is none of {', '.join(SEVERITIES)}")
        if not (self.interval_s > 0 and min(self.stall_s, self.delay_s, self.read_s) >= 0):
            raise UsageError(f"tier {self.name}: its interval must be above 0, its times not below")
        if not (0 <= self.slowdown <= 1 and 0 <= self.corrupt <= 1):
            raise UsageError(f"tier {self.name}: slowdown and corrupt are shares, from 0 to 1")

    @property
    def cost_s(self) -> float:
        """Training time that a save takes."""
        return self.stall_s + self.slowdown * self.delay_s


@dataclass(frozen=True)
class Job:
    """A job and how it fails.

    Attributes:
        mtbf_s: Mean time between failures of the whole job.
        tiers: Any number, in any order.
        node_share, clique_share: Shares of failures with that severity; the rest are of processes.
        detect_s, restart_s: Until a failure is noticed, and from there until reading begins.
        shape: Of the Weibull distribution of gaps; 1 is the exponential one, below 1 failures come in bursts.
        trace: Times of failures instead, in seconds from the start.
        nodes, spares: In use, and standing by. A lost node comes back after `repair_s`.
        shrink: Whether to go on with fewer nodes where no spare is left; else the job waits.
    """

    mtbf_s: float
    tiers: Sequence[Tier]
    node_share: float = 0.0
    clique_share: float = 0.0
    detect_s: float = 0.0
    restart_s: float = 0.0
    shape: float = 1.0
    trace: Sequence[float] | None = None
    nodes: int = 1
    spares: int = 1_000_000
    repair_s: float = 0.0
    shrink: bool = False

    def __post_init__(self) -> None:
        if not (self.mtbf_s > 0 and self.shape > 0 and self.nodes > 0 and self.spares >= 0):
            raise UsageError("MTBF, shape and nodes must be above 0, spares not below")
        if min(self.node_share, self.clique_share) < 0 or self.node_share + self.clique_share > 1:
            raise UsageError("the shares of node and clique failures lie in 0 to 1, and so does their sum")
        if min(self.detect_s, self.restart_s, self.repair_s) < 0:
            raise UsageError("times to detect, restart and repair cannot be negative")

    def share(self, severity: str) -> float:
        """Share of failures with that severity."""
        others = {"node": self.node_share, "clique": self.clique_share}
        return others.get(severity, 1 - self.node_share - self.clique_share)


@dataclass
class Simulated:
    """Outcome of several seeds.

    Attributes:
        accounts: One for each seed.
        lost_s: Lost work by severity of the failure, over all seeds.
    """

    accounts: list[Account]
    lost_s: dict[str, float] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        """Useful share of all time."""
        return sum(a.useful_s for a in self.accounts) / sum(a.wall_s for a in self.accounts)

    @property
    def half_width(self) -> float:
        """Half of the 95% confidence interval of `goodput`, from the spread of seeds; infinite for one seed."""
        shares = [a.goodput for a in self.accounts]
        return 1.96 * stdev(shares) / sqrt(len(shares)) if len(shares) > 1 else inf

    def share(self, part: str) -> float:
        """Mean share of the time that went to a part of the account."""
        return fmean(a.parts()[part] / a.wall_s for a in self.accounts)


def simulate(job: Job, horizon_s: float, seeds: Sequence[int]) -> Simulated:
    """Run the job for `horizon_s` once for each seed. Equal arguments give equal results.

    Raises UsageError where SimPy is not installed.
    """
    try:
        import simpy
    except ImportError:
        raise UsageError("the simulation needs SimPy: pip install 'ckptkit[goodput]'") from None
    runs = []
    for seed in seeds:
        run = _Run(simpy, job, seed)
        run.env.run(until=horizon_s)
        runs.append(run)
    lost = {name: sum(run.lost[name] for run in runs) for name in SEVERITIES}
    return Simulated([run.account() for run in runs], lost)


@dataclass(frozen=True)
class _Copy:
    position: float
    ready_at: float


class _Run:
    """One seed. Positions and work are in seconds of useful work at full speed."""

    def __init__(self, library: Any, job: Job, seed: int) -> None:
        self.job = job
        # Two streams, so that equal seeds meet equal failures whatever the tiers are.
        self.rng, self.luck = random.Random(seed), random.Random(f"copies {seed}")
        self.env: simpy.Environment = library.Environment()
        self._interrupted = library.Interrupt
        self.copies: dict[str, list[_Copy]] = {tier.name: [] for tier in job.tiers}
        self.position = 0.0
        self.spent = dict.fromkeys(("work", "saving", "restarting", "idle"), 0.0)
        self.lost = dict.fromkeys(SEVERITIES, 0.0)
        self.failures = self.missing = 0
        self.severity: str | None = None  # of the failure that is being recovered from
        self._activity, self._since, self._speed = "idle", 0.0, 1.0
        self._trainer = self.env.process(self._train())
        self.env.process(self._fail())

    def account(self) -> Account:
        self._turn("idle")
        lost = sum(self.lost.values())
        spent = self.spent
        return Account(
            spent["work"] - lost, lost, spent["saving"], spent["restarting"], spent["idle"], self.env.now,
            self.failures,
        )  # fmt: skip

    def _turn(self, activity: str) -> None:
        """Book the time since the last turn, and begin something else."""
        seconds = self.env.now - self._since
        if self._activity == "work":
            self.spent["work"] += seconds * self._speed
            self.spent["idle"] += seconds * (1 - self._speed)
            self.position += seconds * self._speed
        else:
            self.spent[self._activity] += seconds
        self._activity, self._since = activity, self.env.now

    def _fail(self) -> Iterator[Any]:
        for gap in self._gaps():
            yield self.env.timeout(gap)
            draw = self.rng.random()
            clique, node = self.job.clique_share, self.job.node_share
            severity = "clique" if draw < clique else "node" if draw < clique + node else "process"
            self._trainer.interrupt(severity)

    def _gaps(self) -> Iterator[float]:
        job = self.job
        if job.trace is not None:
            before = 0.0
            for moment in sorted(job.trace):
                yield moment - before
                before = moment
            return
        scale = job.mtbf_s / gamma(1 + 1 / job.shape)
        while True:
            yield self.rng.weibullvariate(scale, job.shape)

    def _train(self) -> Iterator[Any]:
        while True:
            try:
                if self.severity is not None:
                    yield from self._recover()
                yield from self._work()
            except self._interrupted as failure:
                self._lose(str(failure.cause))

    def _work(self) -> Iterator[Any]:
        """Until the next save is due, and that save."""
        due = min((self._due(tier) for tier in self.job.tiers), default=inf)
        self._speed = min(1.0, (self.job.nodes + self.job.spares - self.missing) / self.job.nodes)
        self._turn("work")
        yield self.env.timeout(max(due - self.position, 0.0) / self._speed if due < inf else 1e18)
        self._turn("saving")
        now = [tier for tier in self.job.tiers if self._due(tier) <= self.position * (1 + 1e-12)]
        cost = sum(tier.cost_s for tier in now)
        if cost:
            yield self.env.timeout(cost)
        for tier in now:
            kept = self.copies[tier.name]
            kept.append(_Copy(self.position, self.env.now + tier.delay_s * (1 - tier.slowdown)))
            del kept[:-_KEPT]
        self._turn("idle")

    def _due(self, tier: Tier) -> float:
        """Position at which a tier saves next: after its interval, and when its last copy has arrived."""
        kept = self.copies[tier.name]
        if not kept:
            return tier.interval_s
        busy = kept[-1].ready_at - self.env.now
        return max(kept[-1].position + tier.interval_s, self.position + busy if busy > 0 else 0.0)

    def _lose(self, severity: str) -> None:
        """A failure: what it takes along, and where the job stands after it."""
        self._turn("idle")
        self.failures += 1
        worst = SEVERITIES.index(severity)
        for tier in self.job.tiers:
            kept = self.copies[tier.name]
            gone = SEVERITIES.index(tier.survives) < worst
            kept[:] = [] if gone else [copy for copy in kept if copy.ready_at <= self.env.now]
        if worst:
            self.missing += 1
            self.env.process(self._repair())
        self.severity = severity

    def _repair(self) -> Iterator[Any]:
        yield self.env.timeout(self.job.repair_s)
        self.missing -= 1

    def _recover(self) -> Iterator[Any]:
        severity = self.severity
        assert severity is not None
        job = self.job
        # At least one node has to be there, even where the job may shrink.
        needed = 1 if job.shrink else job.nodes
        while job.nodes + job.spares - self.missing < needed:
            self._turn("idle")
            yield self.env.timeout(max(job.repair_s / 64, 1.0))
        self._turn("restarting")
        yield self.env.timeout(job.detect_s + job.restart_s)
        while True:
            found = [(c[-1].position, -t.read_s, t.name) for t in job.tiers if (c := self.copies[t.name])]
            if not found:
                position = 0.0
                break
            tier = next(t for t in job.tiers if t.name == max(found)[2])
            yield self.env.timeout(tier.read_s)
            position = self.copies[tier.name][-1].position
            if self.luck.random() >= tier.corrupt:
                break
            self.copies[tier.name].pop()
        self._turn("idle")
        for kept in self.copies.values():
            kept[:] = [copy for copy in kept if copy.position <= position]
        self.lost[severity] += self.position - position
        self.position = position
        self.severity = None
