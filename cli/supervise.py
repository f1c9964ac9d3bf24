"""`ckptkit supervise`: run a command on every rank, and keep it running."""

import os
import socket

import click

from ckptkit.cli.common import common, print_json
from ckptkit.errors import UsageError


@click.command(
    short_help="Run a trainer, watch it, and restart it where that helps.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option(
    "--policy", "policy_file", type=click.Path(), metavar="FILE", help="Limits and actions, in TOML."
)
@click.option("--run", "run_url", metavar="RUN", help="Where the run's steps are; wins over the policy's.")
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Ranks on this node.",
)
@click.option("--nodes", default="1", show_default=True, metavar="N|MIN:MAX", help="Nodes of the run.")
@click.option("--meet", default="", metavar="HOST:PORT", help="Where nodes meet; the same on all.")
@click.option("--id", "run_id", default="", metavar="ID", help="The run's id; the same on all nodes.")
@click.option(
    "--node", default=None, metavar="NAME", help="This node's name in the log.  [default: host name]"
)
@click.option(
    "--log", default="incidents", show_default=True, metavar="FOLDER", help="Where the incident log goes."
)
@click.option("--output", default="", metavar="FOLDER", help="Where the ranks' output goes, instead of here.")
@click.option("--grace", type=click.FloatRange(min=1), default=120.0, show_default=True, metavar="S", help="Seconds to save in, after SIGTERM.")  # fmt: skip
@click.option("--join", type=click.FloatRange(min=1), default=600.0, show_default=True, metavar="S", help="Seconds to wait for the least number of nodes.")  # fmt: skip
@click.option("--last-call", type=click.FloatRange(min=1), default=30.0, show_default=True, metavar="S", help="Seconds to wait for more nodes than the least.")  # fmt: skip
@common
def supervise(
    command: tuple[str, ...],
    policy_file: str | None,
    run_url: str | None,
    nproc: int,
    nodes: str,
    meet: str,
    run_id: str,
    node: str | None,
    log: str,
    output: str,
    grace: float,
    join: float,
    last_call: float,
    as_json: bool,
) -> int:
    """Run COMMAND on every rank, as torchrun does, and keep it running.

    It restarts what crashed, hangs, or computes nonsense: on the nodes that are left, with the layout that the policy has for
    their number, from the newest whole step; and writes an incident log that a person can read. It never starts a run
    anew that has lost its steps.

    Heartbeats come from ckptkit's hook API, or from `ckptkit.hooks.pulse.Pulse` in any trainer. A command that gives none
    is watched for crashes only: set hang.startup_s to how long that is right.

    Exits 0 when the command ended well, 1 when it was given up or this node left, 5 when it was interrupted.
    """
    import dataclasses

    from ckptkit.supervise.agent import Job
    from ckptkit.supervise.agent import supervise as run
    from ckptkit.supervise.incidents import IncidentLog
    from ckptkit.supervise.policy import Policy, load_policy

    policy = load_policy(policy_file) if policy_file else Policy()
    if run_url:
        policy = dataclasses.replace(policy, run=run_url)
    least, most = _range(nodes)
    if most > 1 and not (meet and run_id):
        raise UsageError("a run of several nodes needs --meet HOST:PORT and --id, the same on all of them")
    job = Job(
        command=command, ranks=nproc, nodes=(least, most), endpoint=meet, run_id=run_id,
        node=node or socket.gethostname(), grace_s=grace, output=output, join_s=join, last_call_s=last_call,
    )  # fmt: skip
    records = IncidentLog(log, job.node)
    try:
        code = run(job, policy, records)
    finally:
        records.close()
    if as_json:
        incidents = [dataclasses.asdict(entry) for entry in records.entries]
        print_json("Supervised", {"exit_code": code, "incidents": incidents})
    else:
        for entry in records.entries:
            click.echo(entry.text(), err=True)
        click.echo(f"the incident log is {os.path.join(log, 'incidents.log')}", err=True)
    return code


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        found = int(least), int(most or least)
    except ValueError:
        raise UsageError(f"--nodes {text}: a number, or MIN:MAX") from None
    if not 1 <= found[0] <= found[1]:
        raise UsageError(f"--nodes {text}: at least 1, and MIN no more than MAX")
    return found
