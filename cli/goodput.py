"""`ckptkit goodput`: how often to save in each tier, and how much of the time will be useful."""

from typing import Any

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, print_report
from ckptkit.cli.values import DURATION, RATE, SHARE, SIZE
from ckptkit.errors import UsageError


def _duration(name: str, default: str | None, text: str) -> Any:
    return click.option(name, type=DURATION, default=default, show_default=True, metavar="TIME", help=text)


def _rate(name: str, default: str, text: str) -> Any:
    return click.option(name, type=RATE, default=default, show_default=True, metavar="RATE", help=text)


@click.command(short_help="Advise how often to save, and account for a run's time.")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Nodes of the job.")
@click.option("--state-size", type=SIZE, metavar="SIZE", help="Bytes of one checkpoint, all nodes together.")
@_duration("--mtbf", None, "Mean time between failures of the whole job.")
@_duration("--node-mtbf", None, "The same of one node, instead.")
@click.option(
    "--failure-rate", type=click.FloatRange(min=0, min_open=True), metavar="X",
    help="Failures per 1000 node-days, instead.",
)  # fmt: skip
@click.option(
    "--gpus", type=click.IntRange(min=1), default=8, show_default=True, metavar="N", help="Of a node."
)
@_duration("--step-time", None, "Time of a training step; intervals become whole steps.")
@_rate("--device-rate", "55GB/s", "From one device to host memory.")
@_rate("--replica-rate", "10GB/s", "Between nodes, for each node.")
@_rate("--durable-rate", "5GB/s", "To storage, all nodes together.")
@_duration("--stall", None, "Stall of a save in memory, where measured. [default: bytes over --device-rate]")
@click.option(
    "--slowdown", type=SHARE, default="1%", show_default=True, metavar="P", help="Speed lost to a transfer."
)
@click.option("--no-ram", is_flag=True, help="No copies in memory: saves go straight to storage.")
@click.option("--no-replica", is_flag=True, help="No copies in other nodes' memory.")
@_duration("--detect", "60s", "Until a failure is noticed.")
@_duration("--restart", "5min", "From there until reading begins.")
@click.option(
    "--node-loss", type=click.FloatRange(0, 1), default=0.5, show_default=True, metavar="P",
    help="Share of failures that take a node's memory.",
)  # fmt: skip
@click.option(
    "--clique-loss", type=click.FloatRange(0, 1), default=0.02, show_default=True, metavar="P",
    help="Share that take all copies in memory.",
)  # fmt: skip
@click.option(
    "--corrupt", type=click.FloatRange(0, 1), default=0.0, show_default=True, metavar="P",
    help="Probability that a copy is bad when read.",
)  # fmt: skip
@click.option(
    "--weibull", type=click.FloatRange(min=0.2), default=1.0, show_default=True, metavar="K",
    help="Shape of the gaps between failures; below 1 they come in bursts.",
)  # fmt: skip
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    default=1_000_000,
    metavar="N",
    help="Nodes standing by. [default: enough]",
)
@_duration("--repair", "4h", "Until a lost node comes back.")
@click.option("--shrink", is_flag=True, help="Go on with fewer nodes where no spare is left.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of the simulation.")
@click.option(
    "--log",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Account for this run's log instead.",
)
@common
def goodput(as_json: bool, log: str | None, **options: Any) -> None:
    """Advise how often to save in each tier of memory and storage, and say what share of the time will be useful.

    Needs --nodes, --state-size and one of --mtbf, --node-mtbf, --failure-rate. With --log FILE it says instead where the time
    of a run went.
    """
    if log is not None:
        _account(log, as_json)
        return
    advice = _advise(**options)
    if as_json:
        print_report(advice)
        return
    heads = ("tier", "save every", "set by", "stall", "arrives after", "for failures a day")
    table = show.Table([show.Column(head, right=number > 2) for number, head in enumerate(heads)])
    for tier in advice.tiers:
        table.add(
            tier.name,
            show.duration(tier.interval_s) + (f" ({show.count(tier.steps)} steps)" if tier.steps else ""),
            tier.why,
            show.duration(tier.stall_s) if tier.stall_s >= 5e-3 else f"{1000 * tier.stall_s:.1f} ms",
            show.duration(tier.delay_s),
            show.number(tier.failures_per_day, 3),
        )
    table.echo()
    parts = ", ".join(f"{name} {100 * share:.2f}%" for name, share in advice.parts.items())
    click.echo(
        f"\nsimulated: {parts} (±{100 * advice.half_width:.2f}%); first-order formula: {100 * advice.first_order:.2f}% useful"
    )
    click.echo("\n".join(f"  with {name}: {100 * value:.2f}%" for name, value in advice.what_if.items()))
    click.echo(f"\n{advice.sentence()}")


def _advise(
    nodes: int | None, state_size: int | None, mtbf: float | None, node_mtbf: float | None, failure_rate: float | None,
    seed: int, **o: Any,
) -> Any:  # fmt: skip
    from ckptkit.faults.goodput.advice import Rates, advise
    from ckptkit.faults.goodput.closed_forms import mtbf_of_rate
    from ckptkit.faults.goodput.simulate import Job

    given = [value for value in (mtbf, node_mtbf, failure_rate) if value is not None]
    if nodes is None or state_size is None or len(given) != 1:
        raise UsageError(
            "give --nodes, --state-size and one of --mtbf, --node-mtbf and --failure-rate (or --log FILE), for example "
            "ckptkit goodput --mtbf 3.1h --nodes 128 --state-size 150GB"
        )
    if mtbf is None:
        mtbf = node_mtbf / nodes if node_mtbf is not None else mtbf_of_rate(failure_rate or 0.0, nodes)
    job = Job(
        mtbf, (), node_share=o["node_loss"], clique_share=o["clique_loss"], detect_s=o["detect"],
        restart_s=o["restart"], shape=o["weibull"], nodes=nodes, spares=o["spares"], repair_s=o["repair"],
        shrink=o["shrink"],
    )  # fmt: skip
    rates = Rates(
        state_size, nodes, o["gpus"], o["device_rate"], 0.0 if o["no_replica"] else o["replica_rate"],
        o["durable_rate"], not o["no_ram"], o["stall"], o["slowdown"], o["step_time"] or 0.0,
    )  # fmt: skip
    return advise(job, rates, corrupt=o["corrupt"], seeds=range(8 * seed, 8 * seed + 8))


def _account(log: str, as_json: bool) -> None:
    from ckptkit.cli.common import print_json
    from ckptkit.faults.goodput.accounting import account

    with open(log, encoding="utf-8", errors="replace") as lines:
        found = account(lines, log)
    if as_json:
        print_json(
            "Account",
            {**found.parts(), "wall": found.wall_s, "failures": found.failures, "goodput": found.goodput},
        )
        return
    table = show.Table([show.Column(""), show.Column("time", right=True), show.Column("share", right=True)])
    for name, seconds in found.parts().items():
        table.add(name, show.duration(seconds), show.share(seconds, found.wall_s))
    table.add("in all", show.duration(found.wall_s), "")
    table.echo()
    click.echo(f"{show.plural(found.failures, 'failure')}; {100 * found.goodput:.2f}% of the time was useful")
