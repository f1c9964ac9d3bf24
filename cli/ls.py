"""`ckptkit ls`: the steps of a run."""

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, notes, print_report
from ckptkit.cli.values import PLACE

STATE_STYLE = {"whole": "green", "unfinished": "yellow", "corrupt": "red"}


@click.command(short_help="List a run's steps: age, size, layout, state.")
@click.argument("run", type=PLACE, metavar="RUN")
@common
def ls(run: str, as_json: bool) -> None:
    """List the steps of RUN, oldest first: age, size, format, layout and state.

    A step is whole, unfinished (with the ranks that are missing) or corrupt, judged by names, sizes and headers; `ckptkit
    verify` reads the bytes.
    """
    from ckptkit import ops

    found = ops.steps(run)
    if as_json:
        print_report(found)
        return
    table = show.Table(
        (
            show.Column("step", cut=20),
            show.Column("age", right=True),
            show.Column("size", right=True),
            show.Column("files", right=True, spare=3),
            show.Column("format", spare=2),
            show.Column("layout", cut=40, spare=1),
            show.Column("state"),
        )
    )
    for step in found.steps:
        table.add(
            (step.name, "dim") if step.temporary else step.name,
            show.age(step.age_s),
            show.nbytes(step.nbytes),
            show.count(step.files),
            step.format,
            step.layout,
            (step.state, STATE_STYLE.get(step.state, "")),
        )
    if table.rows:
        table.echo()
    for step in found.steps:
        if step.why:
            click.echo(f"{step.name}: {step.why}")
    notes(found.warnings)
    whole = sum(step.state == "whole" for step in found.steps)
    size = show.nbytes(sum(step.nbytes for step in found.steps))
    notes([f"{show.plural(len(found.steps), 'step')} in {found.run}, {whole} whole, {size}"])
