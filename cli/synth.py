"""`ckptkit synth`: a random checkpoint of any size, to try storage and layouts."""

from typing import Any

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, fingerprint_option, notes, print_report, work_options
from ckptkit.cli.progress import Progress
from ckptkit.cli.reshard import done
from ckptkit.cli.values import DESTINATION, DTYPE, FORMAT, LAYOUT, PRESET, SETTING, SIZE


@click.command(short_help="Write a random checkpoint, to try storage and layouts.")
@click.argument("dst", type=DESTINATION, metavar="DST")
@click.option(
    "--model", type=PRESET, default="zaya", show_default=True, metavar="M", help="A model or a preset."
)
@click.option(
    "--set",
    "settings",
    type=SETTING,
    multiple=True,
    metavar="NAME=VALUE",
    help="A field of its configuration, like num_hidden_layers=8. May be repeated.",
)
@click.option(
    "--optimizer", default="muon+adamw", show_default=True, metavar="O", help="muon+adamw, adamw or none."
)
@click.option("--layout", type=LAYOUT, default="tp=1", show_default=True, metavar="L", help="Layout of DST.")
@click.option(
    "--dtype", type=DTYPE, default="bfloat16", show_default=True, metavar="D", help="Of the weights."
)
@click.option(
    "--to", type=FORMAT, default="native", show_default=True, metavar="FORMAT", help="Format of DST."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Another seed, other values."
)
@click.option(
    "--step", type=click.IntRange(min=0), default=1000, show_default=True, metavar="N", help="Its step."
)
@click.option(
    "--max-shard-size", type=SIZE, default="5GB", show_default=True, metavar="SIZE", help="As in reshard."
)
@work_options
@fingerprint_option
@click.option("--overwrite", is_flag=True, help="Replace DST.")
@click.option("--restart", is_flag=True, help="Start over, where an interrupted run would be continued.")
@common
def synth(dst: str, settings: tuple[tuple[str, Any], ...], as_json: bool, **options: Any) -> None:
    """Write a random checkpoint to DST: any model, size, layout and format, with optimizer state.

    A value depends on the seed, its tensor, role and position alone, so that two layouts of one seed are equal for
    `ckptkit diff`.
    """
    from ckptkit import ops

    with Progress("writing") as progress:
        result = ops.synth(dst, settings=dict(settings), progress=progress, **options)
    if as_json:
        print_report(result)
        return
    notes(result.notes)
    show.say(done(result))
