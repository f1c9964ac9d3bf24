"""`ckptkit repair`: mend a native checkpoint."""

from typing import Any

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, config_option, notes, print_report, work_options
from ckptkit.cli.progress import Progress
from ckptkit.cli.values import MODEL, PLACE


@click.command(short_help="Mend a native checkpoint, from another copy if need be.")
@click.argument("path", type=PLACE, metavar="PATH")
@click.option(
    "--from",
    "source",
    type=PLACE,
    metavar="URL",
    help="Another copy of the same values, in any format and layout.",
)
@click.option(
    "--rebuild-manifest", is_flag=True, help="Make a lost manifest, where all ranks' digest files agree."
)
@click.option("--model", type=MODEL, metavar="M", help="Model of the other copy.")
@config_option
@work_options
@click.option("--dry-run", is_flag=True, help="Read everything and say what is wrong.")
@common
def repair(path: str, as_json: bool, **options: Any) -> int:
    """Read every byte of the native checkpoint at PATH (a local folder) and mend what is not as it was written.

    Index, digest files and headers are made of each other; data comes from the copy given with --from, of which only the damaged
    leaves are read. A file takes its place only when it is exactly the one that was written.

    Exits 0 when the checkpoint is whole now, 1 when something is left.
    """
    from ckptkit import ops

    with Progress("reading") as progress:
        report = ops.repair(path, progress=progress, **options)
    if as_json:
        print_report(report)
        return report.exit_code
    notes(report.notes)
    parts = [("found", report.found), ("repaired", report.repaired), ("left", report.left)]
    show.fields([(title, "\n".join(texts)) for title, texts in parts])
    if report.exit_code:
        show.say(f"{show.style('not whole', 'red')}: {report.url}")
    else:
        show.say(
            f"{show.style('whole', 'green')}: {report.url}, {show.plural(report.leaves_checked, 'leaf', 'leaves')} read"
        )
    return report.exit_code
