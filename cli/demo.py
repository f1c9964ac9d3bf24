"""`ckptkit demo`: the whole tour on a ZAYA1 made on the spot."""

import tempfile
import time
from contextlib import nullcontext

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, print_json
from ckptkit.cli.values import PLACE


@click.command(short_help="Take the whole tour on a small model made on the spot.")
@click.argument("folder", type=PLACE, metavar="[FOLDER]", required=False)
@common
def demo(folder: str | None, as_json: bool) -> int:
    """Make a small ZAYA1, reshard it through layouts and formats, check it, break it, and find what broke.

    Every step is shown as the command that does the same. What is written stays in FOLDER (new or empty) when given; without
    one it is removed at the end. Takes less than a minute.
    """
    from ckptkit.ops.demo import demo as tour

    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if not as_json:
            for part in show.hang(line, show.terminal_width()):
                click.echo(show.style(part, "bold") if line.startswith("$ ") else part)

    start = time.monotonic()
    with nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="ckptkit-demo-") as place:
        assert place is not None
        code = tour(place, say)
    seconds = time.monotonic() - start
    if as_json:
        print_json("Demo", {"folder": folder, "lines": said, "seconds": seconds, "exit_code": code})
    else:
        good, bad = show.style("all as it should be", "green"), show.style("something is wrong", "red")
        kept = f", see {folder}" if folder else ""
        click.echo(f"{bad if code else good}: {show.duration(seconds)}{kept}")
    return code
