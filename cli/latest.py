"""`ckptkit latest`: the path of the newest whole step, for scripts."""

import click

from ckptkit.cli.common import common, notes, print_report
from ckptkit.cli.progress import Progress
from ckptkit.cli.values import PLACE


@click.command(short_help="Print the path of a run's newest whole step.")
@click.argument("run", type=PLACE, metavar="RUN")
@click.option("--quick", is_flag=True, help="Trust markers, sizes and headers; read no tensor bytes.")
@common
def latest(run: str, quick: bool, as_json: bool) -> int:
    """Print the path of the newest step of RUN that is whole, and say on standard error why newer ones are not.

    Without --quick the step's bytes are read and compared with their digests, where it has any.

    Exits 1 when there are steps but none is whole, 3 when there is no step at all.
    """
    from ckptkit import ops

    with Progress("checking the newest step") as progress:
        found = ops.newest(run, quick=quick, progress=progress)
    if as_json:
        print_report(found)
    elif found.path is not None:
        click.echo(found.path)
    notes(
        f"passed over {step.name}: {step.state}{', ' if step.why else ''}{step.why}"
        for step in found.passed_over
    )
    if found.path is None:
        notes([f"no step of {found.run} is whole"])
    return found.exit_code
