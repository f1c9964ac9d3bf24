"""`ckptkit reshard`: write a checkpoint in another layout, format or family of names."""

from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, notes, print_report, reshard_options
from ckptkit.cli.plan import print_plan, what_is_lost
from ckptkit.cli.progress import Progress
from ckptkit.cli.values import DESTINATION, PLACE

if TYPE_CHECKING:
    from ckptkit.ops.resharding import ReshardResult


@click.command(short_help="Write a checkpoint in another layout or format.")
@click.argument("src", type=PLACE, metavar="SRC")
@click.argument("dst", type=DESTINATION, metavar="DST")
@reshard_options
@click.option("--restart", is_flag=True, help="Start over, where an interrupted run would be continued.")
@click.option(
    "--base",
    type=PLACE,
    metavar="STEP",
    help="Share the files of this native checkpoint that are equal, by hard links.",
)
@click.option(
    "--part",
    metavar="K/N",
    help="Write only part K of N, beside processes that write the others; or slurm.",
)
@click.option(
    "--engine",
    type=click.Choice(["threads", "ray"]),
    default="threads",
    show_default=True,
    help="Threads of this process, or parts as Ray tasks.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    metavar="N",
    help="Parts, with --engine ray.",
)
@click.option("--dry-run", is_flag=True, help="Plan and prove, write nothing.")
@common
def reshard(src: str, dst: str, as_json: bool, **options: Any) -> None:
    """Write the checkpoint at SRC to DST, in another layout, format or family of names.

    Everything is detected from SRC but what is given. DST appears whole or not at all. An interrupted run goes on with the
    same command. What DST cannot hold is listed and needs its flag (--drop-optimizer, --drop-extras, --drop): nothing is
    lost silently.
    """
    from ckptkit import ops

    with Progress("resharding") as progress:
        result = ops.reshard(src, dst, progress=progress, **options)
    if as_json:
        print_report(result)
        return
    notes(result.notes)
    if result.dry_run:
        print_plan(result.plan)
        return
    notes(what_is_lost(result.plan))
    show.say(done(result))


def done(result: "ReshardResult") -> str:
    """The one line that says what was written."""
    total = result.bytes_written + result.bytes_reused + result.bytes_shared
    if not result.committed:
        waits = ", ".join(map(str, result.waiting_for))
        return (
            f"{show.style('done', 'green')}: part {result.part} of {result.url}, {show.plural(result.files, 'file')}, "
            f"{show.nbytes(total)}, in {show.duration(result.seconds)}; it is put in place when parts {waits} are done too"
        )
    reused = f", {show.nbytes(result.bytes_reused)} of it there before" if result.bytes_reused else ""
    rate = f" ({show.rate(result.bytes_written / result.seconds)})" if result.seconds > 0 else ""
    shared = f", {show.nbytes(result.bytes_shared)} shared with the base" if result.bytes_shared else ""
    whole = ", opened again and whole" if result.checked else ""
    return (
        f"{show.style('done', 'green')}: {result.url}, {show.plural(result.files, 'file')}, {show.nbytes(total)}{reused}{shared}, "
        f"in {show.duration(result.seconds)}{rate}{whole}"
    )
