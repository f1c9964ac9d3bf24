"""`ckptkit cache doctor`: what the daemon needs of this node."""

import click

from ckptkit.cli import show
from ckptkit.cli.cache_asking import needs
from ckptkit.cli.common import common, print_json
from ckptkit.cli.values import PLACE

_STYLE = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command(short_help="Check what the daemon needs of this node.")
@click.option(
    "--config", "path", required=True, type=PLACE, metavar="FILE", help="The daemon's configuration."
)
@common
def doctor(path: str, as_json: bool) -> None:
    """Check kernel, tmpfs, swap, huge pages, NUMA, memory, cgroup, address, certificates and storage; each with one line why.

    Exits 1 where something is an error. Run it on every node, as the user of the job.
    """
    needs("aiohttp", "cryptography")
    from ckptkit.cache.config import load_config
    from ckptkit.cache.doctor import examine

    found = examine(load_config(path))
    if as_json:
        print_json(
            "CacheChecks", {"checks": [{"level": f.level, "name": f.name, "text": f.text} for f in found]}
        )
    else:
        table = show.Table((show.Column(""), show.Column(""), show.Column("", cut=60)))
        for finding in found:
            table.add((finding.level, _STYLE[finding.level]), finding.name, finding.text)
        table.echo()
    if any(finding.level == "error" for finding in found):
        raise SystemExit(1)
