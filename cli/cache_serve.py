"""`ckptkit cache serve`: the daemon."""

import asyncio

import click

from ckptkit.cli.cache_asking import needs
from ckptkit.cli.values import PLACE


@click.command(short_help="Run the daemon of this node and job.")
@click.option(
    "--config",
    "path",
    required=True,
    type=PLACE,
    metavar="FILE",
    help="TOML file, see docs/cache/configuration.md.",
)
@click.option("--discard", is_flag=True, help="Throw away what an unknown version left in memory.")
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when it fails.")
def serve(path: str, discard: bool) -> None:
    """Run the daemon in the foreground until SIGTERM, which drains the newest committed step first.

    The log goes to standard error, a JSON object a line.
    """
    needs("aiohttp", "cryptography", "prometheus_client")
    from ckptkit.cache.config import load_config
    from ckptkit.cache.daemon import Daemon

    daemon = Daemon(load_config(path), discard=discard)
    asyncio.run(daemon.run())
    if daemon.stopping == "fault":
        raise SystemExit(70)
