"""`ckptkit cache status` and `ckptkit cache ls`."""

from collections.abc import Mapping
from typing import Any

import click

from ckptkit.cli import show
from ckptkit.cli.cache_asking import asking, daemon
from ckptkit.cli.common import print_json


@click.command(short_help="Say what is lost if something dies now, and how the cache is.")
@asking
def status(job: str, socket: str | None, as_json: bool) -> None:
    """Say what is left if a process, a node or a clique dies now, and how old the durable step is; then the rest.

    A clique is this node and those that keep copies for each other with it.
    """
    with daemon(job, socket) as client:
        found = client.status()["status"]
    if as_json:
        print_json("CacheStatus", found)
        return
    for line in exposure(found):
        show.say(line)
    click.echo()
    levels = [
        ("committed", found["committed"]), ("replicated", found["replicated"]), ("durable", found["durable"]),
        ("copying", found["copying"]), ("draining", found["draining"]), ("restored", found["restored"]),
    ]  # fmt: skip
    memory, drain = found["memory"], found["drain"]
    pairs = [
        ("job", f"{found['job']}, node {found['node']} at {found['address']}, {found['state']}"),
        ("epoch", f"{found['epoch']}, coordinated by {found['coordinator']}" if found["epoch"] else "none yet"),
        ("clique", f"{', '.join(found['clique']) or 'this node alone'}; {show.plural(found['copies'], 'copy', 'copies')} of each shard"),
        *((name, _step(step)) for name, step in levels if step),
        ("slots", f"{show.memory(found['slot_bytes'])} each"),
        *((f"  {lane}", ", ".join(f"{count} {state.lower()}" for state, count in sorted(states.items()))) for lane, states in sorted(found["slots"].items())),
        ("memory", f"{show.memory(memory['available'])} available, {show.memory(memory['reserve'])} are kept free"),
        ("drain", _drain(drain)),
    ]  # fmt: skip
    show.fields(pairs)
    for line in warnings(found):
        show.tell(click.style("warning:", fg="yellow", bold=True) + f" {line}")


def exposure(found: Mapping[str, Any]) -> list[str]:
    """What is left after each kind of loss, in words."""
    lost = found["exposure"]
    if not found["training"]:
        return ["No step of this epoch is committed yet: the restore has not ended."]
    lines = []
    for what, name in (("a process", "process"), ("this node", "node"), ("its whole clique", "clique")):
        step = lost[name]
        lines.append(
            f"If {what} dies now, {'step ' + str(step['step']) + ' is restored' if step else 'nothing is left to restore'}."
        )
    age = lost["durable_age_s"]
    if found["durable"] is None:
        lines.append("No step of this epoch is durable.")
    elif age is not None:
        lines.append(f"The durable step is {show.duration(age)} old.")
    return lines


def warnings(found: Mapping[str, Any]) -> list[str]:
    """What needs attention."""
    lines = []
    if found["degraded"]:
        lines.append("copies take too long: what is newer than the replicated step lies on one node")
    if found["memory"]["pressure"]:
        lines.append(
            "memory is short: copies for other nodes are refused"
            + (" and given back" if found["memory"]["pressure"] > 1 else "")
        )
    drain = found["drain"]
    if drain["last_s"] and drain["last_s"] > drain["grace_s"]:
        lines.append(
            f"the last drain took {show.duration(drain['last_s'])}, more than the grace of {show.duration(drain['grace_s'])}"
        )
    if not drain["url"]:
        lines.append("nothing is drained: no step outlives the loss of a whole clique")
    days = found["certificate_days_left"]
    if days is not None and days < 14:
        lines.append(f"this node's certificate is valid for {days:.0f} more days")
    return lines


def _step(step: Mapping[str, int]) -> str:
    return f"step {step['step']} of epoch {step['epoch']}"


def _drain(drain: Mapping[str, Any]) -> str:
    if not drain["url"]:
        return "to nowhere"
    last = (
        f"; the last took {show.duration(drain['last_s'])} for {show.nbytes(drain['last_bytes'])}"
        if drain["last_s"]
        else ""
    )
    return f"to {drain['url']}{last}"


@click.command(short_help="List the versions in memory and in durable storage.")
@asking
def ls(job: str, socket: str | None, as_json: bool) -> None:
    """List the versions of which this node's memory or durable storage holds something, newest first."""
    with daemon(job, socket) as client:
        rows = client.request("ls", deadline_s=60.0)["versions"]
    if as_json:
        print_json("CacheVersions", {"versions": rows})
        return
    table = show.Table(
        (
            show.Column("step", right=True),
            show.Column("epoch", right=True),
            show.Column("ranks here", cut=24),
            show.Column("size", right=True),
            show.Column("durable"),
            show.Column("is"),
        )
    )
    for row in rows:
        marks = [
            *row.get("marks", []),
            *(["banned"] if row["banned"] else []),
            *(["being written"] if row["writing"] else []),
        ]
        ranks = show.some([str(rank) for rank in sorted(row["ranks"])], 8) if row["ranks"] else "-"
        durable = "pinned" if row["pinned"] else "yes" if row["durable"] else "no"
        table.add(
            str(row["step"]),
            str(row["epoch"]),
            f"{ranks} of {row['world']}",
            show.nbytes(row["bytes"]),
            durable,
            ", ".join(marks),
        )
    if rows:
        table.echo()
    else:
        show.tell("no version is here")
