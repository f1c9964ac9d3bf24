"""Advice: how often to save in each tier, what goodput to expect, and what would change it.

Three tiers: `ram`, the node's own memory, survives the loss of processes; `replica`, other nodes' memory, that of nodes;
`durable`, storage, everything. Each tier exists for the failures that the tiers above it do not survive, so its interval is the
best one for the rate of those (`closed_forms.best_interval`), not shorter than its transfer takes, and a multiple of the interval
of the tier it is made from; a tier that should save more often than that one shares an interval with it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from ckptkit.errors import UsageError
from ckptkit.faults.goodput.closed_forms import best_interval, goodput
from ckptkit.faults.goodput.simulate import SEVERITIES, Job, Simulated, Tier, simulate
from ckptkit.ops.reports import Report, duration_text

TIERS = ("ram", "replica", "durable")


@dataclass(frozen=True)
class Rates:
    """What a machine moves, and how long people and programs take.

    Attributes:
        state_bytes: Of one checkpoint, all nodes together.
        nodes, gpus: In use; of one node.
        device: Bytes a second from one device to host memory and back.
        replica: Bytes a second between nodes, for each node; 0 for no tier of replicas.
        durable: Bytes a second to storage and back, for all nodes together.
        ram: Whether there is a tier in memory; without one a save to storage stalls training while it is written.
        stall_s: Stall of a save in memory where it was measured; else bytes over rate, without overlap.
        slowdown: Share of speed that training loses while a transfer runs.
        step_s: Time of a training step; intervals are whole steps. 0 for any interval.
    """

    state_bytes: float
    nodes: int
    gpus: int = 8
    device: float = 55e9
    replica: float = 10e9
    durable: float = 5e9
    ram: bool = True
    stall_s: float | None = None
    slowdown: float = 0.01
    step_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.state_bytes, self.nodes, self.gpus, self.device, self.durable) <= 0:
            raise UsageError("state size, nodes, GPUs and rates must be above 0")
        if min(self.replica, self.slowdown, self.step_s, self.stall_s or 0.0) < 0:
            raise UsageError("rates, times and shares cannot be negative")

    def tiers(self, corrupt: float = 0.0) -> list[Tier]:
        """The tiers that exist, with their costs; intervals are still to be chosen (1 s)."""
        per_node = self.state_bytes / self.nodes
        copy = per_node / self.gpus / self.device
        write = self.state_bytes / self.durable
        if not self.ram:
            return [
                Tier("durable", "clique", 1.0, stall_s=copy + write, read_s=write + copy, corrupt=corrupt)
            ]
        stall = copy if self.stall_s is None else self.stall_s
        found = [Tier("ram", "process", 1.0, stall_s=stall, read_s=copy, corrupt=corrupt)]
        if self.replica:
            move = per_node / self.replica
            found.append(Tier("replica", "node", 1.0, 0.0, move, self.slowdown, move + copy, corrupt))
        found.append(Tier("durable", "clique", 1.0, 0.0, write, self.slowdown, write + copy, corrupt))
        return found


@dataclass(frozen=True)
class TierAdvice:
    """One tier.

    Attributes:
        name: `ram`, `replica` or `durable`.
        interval_s: Advised.
        steps: The same in steps; 0 where no time of a step was given.
        optimum_s: Of the closed form alone.
        why: What set the interval: `optimum`, `transfer`, or `shared` with the tier beside it.
        stall_s, delay_s, read_s: Of one save.
        failures_per_day: That this tier is for.
    """

    name: str
    interval_s: float
    steps: int
    optimum_s: float
    why: str
    stall_s: float
    delay_s: float
    read_s: float
    failures_per_day: float


@dataclass
class Advice(Report):
    """What `ckptkit goodput` says.

    Attributes:
        mtbf_s: Of the job.
        tiers: Advised intervals.
        first_order: Goodput by the sum of first-order terms.
        simulated: Goodput of the simulation, with `half_width` of its 95% interval.
        parts: Shares of the time by the simulation: useful, lost, saving, restarting, idle.
        lost: Lost share of the time by the severity of the failure.
        what_if: Goodput in other cases, each with the intervals that are best there.
    """

    mtbf_s: float
    tiers: list[TierAdvice]
    first_order: float
    simulated: float
    half_width: float
    parts: dict[str, float] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    what_if: dict[str, float] = field(default_factory=dict)
    assumptions: dict[str, float] = field(default_factory=dict)

    def sentence(self) -> str:
        """The advice in one sentence."""
        every = [
            f"{t.name} every {duration_text(t.interval_s)}{f' ({t.steps:,} steps)' if t.steps else ''}"
            for t in self.tiers
        ]
        best = max(self.what_if.items(), key=lambda item: item[1], default=("", 0.0))
        more = f"; {best[0]} would give {best[1]:.1%}" if best[1] > self.simulated + self.half_width else ""
        return f"Save {', '.join(every)}: {self.simulated:.1%} of the time will be useful{more}."

    def summary(self) -> str:
        return self.sentence()


@dataclass
class _Group:
    """Neighbouring tiers that save together."""

    tiers: list[Tier]
    share: float

    def optimum(self, mtbf_s: float) -> float:
        cost = sum(tier.cost_s for tier in self.tiers)
        return best_interval(cost, mtbf_s / self.share) if self.share > 0 else 10 * mtbf_s

    def bound(self, mtbf_s: float) -> float:
        """The optimum, but no shorter than a transfer."""
        return max(self.optimum(mtbf_s), *(tier.delay_s for tier in self.tiers))


def with_intervals(job: Job, step_s: float = 0.0) -> tuple[Job, list[TierAdvice]]:
    """The job with the advised interval in each tier. Its tiers are in order of what they survive."""
    groups: list[_Group] = []
    shares = []
    reached = 0
    for tier in job.tiers:
        mine = SEVERITIES[reached : SEVERITIES.index(tier.survives) + 1]
        reached += len(mine)
        shares.append(sum(job.share(severity) for severity in mine))
        groups.append(_Group([tier], shares[-1]))
        # A tier is made from the one before it, so it cannot save more often; where it should, both save together.
        while len(groups) > 1 and groups[-1].bound(job.mtbf_s) <= groups[-2].bound(job.mtbf_s):
            last = groups.pop()
            groups[-1] = _Group(groups[-1].tiers + last.tiers, groups[-1].share + last.share)
    found: list[Tier] = []
    advice: list[TierAdvice] = []
    above = step_s
    for group in groups:
        optimum, bound = group.optimum(job.mtbf_s), group.bound(job.mtbf_s)
        interval, limited = bound, bound > optimum
        if above:
            # Up where it was bounded from below, else to the nearest.
            times = -int(-bound // above) if limited else round(bound / above)
            interval = max(1, times) * above
        interval = above = max(interval, 1e-3)
        steps = round(interval / step_s) if step_s else 0
        for tier in group.tiers:
            why = "transfer" if limited else "shared" if len(group.tiers) > 1 else "optimum"
            per_day = 86400 * shares[len(found)] / job.mtbf_s
            found.append(replace(tier, interval_s=interval))
            advice.append(
                TierAdvice(
                    tier.name, interval, steps, optimum, why, tier.stall_s, tier.delay_s, tier.read_s, per_day
                )
            )
    return replace(job, tiers=tuple(found)), advice


def first_order(job: Job) -> float:
    """Goodput by independent terms: exact for one tier without delay, good where all losses are small.

    Each severity loses half an interval and the delay of the first tier that survives it, and its restart; saves cost their share.
    """
    if len(job.tiers) == 1 and not job.tiers[0].delay_s:
        (tier,) = job.tiers
        return goodput(tier.interval_s, tier.cost_s, job.detect_s + job.restart_s + tier.read_s, job.mtbf_s)
    overhead = 1 + sum(tier.cost_s / tier.interval_s for tier in job.tiers)
    loss = 0.0
    for severity in SEVERITIES:
        worst = SEVERITIES.index(severity)
        for survivor in [t for t in job.tiers if SEVERITIES.index(t.survives) >= worst][:1]:
            down = job.detect_s + job.restart_s + survivor.read_s
            half = survivor.delay_s + survivor.interval_s * overhead / 2
            loss += job.share(severity) / job.mtbf_s * (down + half)
    return max(0.0, 1 - loss) / overhead


def advise(
    job: Job,
    rates: Rates,
    *,
    corrupt: float = 0.0,
    seeds: Sequence[int] = tuple(range(8)),
    what_if: bool = True,
) -> Advice:
    """Advised intervals, and the goodput that they give.

    Args:
        job: How the job fails and restarts; its tiers are made from `rates`.
        corrupt: Probability that a copy is bad when it is read.
        seeds: Of the simulation.
        what_if: Whether to simulate other cases as well.
    """

    def run(job: Job, rates: Rates, seeds: Sequence[int]) -> tuple[Job, list[TierAdvice], Simulated]:
        chosen, advice = with_intervals(replace(job, tiers=tuple(rates.tiers(corrupt))), rates.step_s)
        return chosen, advice, simulate(chosen, horizon(chosen), seeds)

    chosen, tiers, outcome = run(job, rates, seeds)
    cases: dict[str, tuple[Job, Rates]] = {
        "twice the time between failures": (replace(job, mtbf_s=2 * job.mtbf_s), rates),
        "half the time to detect and restart": (
            replace(job, detect_s=job.detect_s / 2, restart_s=job.restart_s / 2),
            rates,
        ),
        "storage of twice the rate": (job, replace(rates, durable=2 * rates.durable)),
    }
    if rates.ram:
        cases["no copies in memory"] = (job, replace(rates, ram=False))
        if rates.replica:
            cases["no replicas"] = (job, replace(rates, replica=0.0))
    else:
        cases["copies in memory"] = (job, replace(rates, ram=True))
    wall = sum(a.wall_s for a in outcome.accounts)
    return Advice(
        mtbf_s=job.mtbf_s,
        tiers=tiers,
        first_order=first_order(chosen),
        simulated=outcome.goodput,
        half_width=outcome.half_width,
        parts={part: outcome.share(part) for part in outcome.accounts[0].parts()},
        lost={severity: seconds / wall for severity, seconds in outcome.lost_s.items()},
        what_if={name: run(*case, seeds[:3])[2].goodput for name, case in cases.items()} if what_if else {},
        assumptions=_assumptions(job, rates, corrupt),
    )


def _assumptions(job: Job, rates: Rates, corrupt: float) -> dict[str, float]:
    """Every number that the advice rests on, so that a reader can replace what does not fit."""
    of_job = ("node_share", "clique_share", "detect_s", "restart_s", "shape", "spares", "repair_s")
    values = {name: float(getattr(job, name)) for name in of_job}
    values |= {name: float(value) for name, value in asdict(rates).items() if value is not None}
    return values | {"corrupt": corrupt}


def horizon(job: Job, failures: int = 100, saves: int = 10_000) -> float:
    """Seconds to simulate: so many failures, but no more saves than that."""
    shortest = min(tier.interval_s for tier in job.tiers)
    return max(min(failures * job.mtbf_s, saves * shortest), 5 * job.mtbf_s)
