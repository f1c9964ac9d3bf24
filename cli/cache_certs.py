"""`ckptkit cache certs`: the job's CA, and a certificate for each node."""

import click

from ckptkit.cli import show
from ckptkit.cli.cache_asking import needs
from ckptkit.cli.common import common, print_json
from ckptkit.cli.values import PLACE


@click.group(short_help="Make the certificates of a job's nodes.")
def certs() -> None:
    """Make a CA of the job's own, and one certificate for each node.

    Copy to each node `ca.pem` and its own `.pem` and `.key`. Keep `ca.key` away from the nodes. A certificate with the name `admin` may ban, drain
    and scrub over HTTP.
    """


@certs.command(short_help="Make the CA.")
@click.argument("folder", type=PLACE)
@click.option("--job", required=True, metavar="NAME", help="Job; nodes let in only its certificates.")
@click.option(
    "--days",
    type=click.FloatRange(min=0, min_open=True),
    default=365.0,
    show_default=True,
    help="How long it is valid.",
)
@common
def ca(folder: str, job: str, days: float, as_json: bool) -> None:
    """Write ca.pem and ca.key to FOLDER, which only you can read."""
    needs("cryptography")
    from ckptkit.cache.certs import make_ca

    make_ca(folder, job, days=days)
    _made(as_json, f"{folder}/ca.pem", f"{folder}/ca.key")


@certs.command(short_help="Make a node's certificate.")
@click.argument("folder", type=PLACE)
@click.argument("node")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="Name or address under which peers reach it; may be repeated. [default: NODE]",
)
@click.option(
    "--days",
    type=click.FloatRange(min=0, min_open=True),
    default=90.0,
    show_default=True,
    help="How long it is valid.",
)
@common
def node(folder: str, node: str, hosts: tuple[str, ...], days: float, as_json: bool) -> None:
    """Write NODE.pem and NODE.key, signed by the CA in FOLDER."""
    needs("cryptography")
    from ckptkit.cache.certs import make_cert
    from ckptkit.cache.config import NODE
    from ckptkit.errors import UsageError

    if not NODE.fullmatch(node):
        raise UsageError(f"{node!r} is no name of a node; use letters, digits, . _ and -")
    cert, key = make_cert(folder, node, hosts, days=days)
    _made(as_json, cert, key)


def _made(as_json: bool, cert: str, key: str) -> None:
    if as_json:
        print_json("CacheDone", {"did": "certs", "cert": cert, "key": key})
    else:
        show.say(f"{cert} and {key} are made")
