"""`ckptkit doctor`: what of this machine matters for saving."""

import click

from ckptkit.cli.common import common, print_json


@click.command(short_help="Look at what of this machine matters for saving.")
@click.argument("url", required=False, metavar="[URL]")
@common
def doctor(url: str | None, as_json: bool) -> int:
    """Look at torch and its runtime, devices and their settings, memory and its limits, and measure the copy to the host; each line is ok or says what
    follows. With the URL of a run, try whether it can be written.

    Exits 4 where something cannot work (the URL, above all), 0 otherwise.
    """
    from ckptkit.hooks import doctoring

    found = doctoring.examine(url)
    if as_json:
        print_json("Doctor", {"findings": doctoring.as_dict(found)})
    else:
        for finding in found:
            click.echo(finding.line())
    return 4 if any(finding.state == "fault" for finding in found) else 0
