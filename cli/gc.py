"""`ckptkit gc`: remove old steps of a run, and what killed writers left."""

from typing import Any

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, notes, print_report
from ckptkit.cli.progress import Progress
from ckptkit.cli.values import PLACE


@click.command(short_help="Remove a run's old steps, and what killed writers left.")
@click.argument("run", type=PLACE, metavar="RUN")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="Keep the N newest whole steps.",
)
@click.option(
    "--keep-every",
    type=click.IntRange(min=1),
    metavar="M",
    help="Also keep whole steps that are multiples of M.",
)
@click.option(
    "--pin",
    "pins",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="STEP",
    help="Keep this step. May be repeated.",
)
@click.option(
    "--abandoned-after",
    "abandoned_h",
    type=click.FloatRange(min=0),
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="Remove unfinished folders that no writer holds and nothing changed in for so long.",
)
@click.option("--quick", is_flag=True, help="Trust the newest step's structure; do not read its bytes first.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed.")
@common
def gc(run: str, abandoned_h: float, as_json: bool, **options: Any) -> None:
    """Remove steps of RUN that are neither among the newest nor asked to be kept, and unfinished folders left by killed writers.

    Never removed: the newest whole step and anything newer, steps of an earlier start of the run beyond where the present one is,
    and what a writer holds. The newest step's bytes are compared with their digests before anything is removed.
    """
    from ckptkit import ops

    with Progress("checking the newest step") as progress:
        report = ops.gc(run, abandoned_s=abandoned_h * 3600, progress=progress, **options)
    if as_json:
        print_report(report)
        return
    notes(report.notes)
    verb = "would remove" if report.dry_run else "removed"
    for row in report.removed:
        click.echo(f"{verb} {row.name}  {show.nbytes(row.nbytes)}  {row.why}")
    for row in report.kept:
        click.echo(f"kept {row.name}  {show.nbytes(row.nbytes)}  {row.why}")
    show.say(f"{verb} {show.plural(len(report.removed), 'folder')}, {show.nbytes(report.freed)}")
