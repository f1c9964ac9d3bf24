"""`ckptkit copy`: a checkpoint as it is, somewhere else."""

from typing import Any

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, notes, print_report, work_options
from ckptkit.cli.progress import Progress
from ckptkit.cli.values import DESTINATION, FORMAT, PLACE


@click.command(short_help="Copy a checkpoint as it is, its bytes checked.")
@click.argument("src", type=PLACE, metavar="SRC")
@click.argument("dst", type=DESTINATION, metavar="DST")
@click.option("--from", "format", metavar="FORMAT", type=FORMAT, help="Format of SRC.")
@work_options
@click.option("--overwrite", is_flag=True, help="Replace DST, which goes only after the new one is whole.")
@click.option("--restart", is_flag=True, help="Start over, where an interrupted run would be continued.")
@common
def copy(src: str, dst: str, as_json: bool, **options: Any) -> None:
    """Write the checkpoint at SRC to DST: same format, same layout, same bytes.

    Every byte is compared with SRC's digests as it passes, where the format has any. DST appears whole or not at all. An
    interrupted run goes on with the same command. Files are cloned where the file system can.
    """
    from ckptkit import ops

    with Progress("copying") as progress:
        result = ops.copy(src, dst, progress=progress, **options)
    if as_json:
        print_report(result)
        return
    notes([*result.notes, *(f"not checked: {text}" for text in result.not_checked)])
    written = result.bytes_written
    beside = [(result.bytes_cloned, "cloned"), (result.bytes_reused, "there before")]
    more = "".join(f", {show.nbytes(size)} {what}" for size, what in beside if size)
    show.say(
        f"{show.style('done', 'green')}: {result.url}, {show.plural(result.files, 'file')}, {show.nbytes(written)} written{more}, "
        f"in {show.duration(result.seconds)}, opened again and whole"
    )
