"""`ckptkit cache get`: a version out of the cache into a folder."""

import click

from ckptkit.cli import show
from ckptkit.cli.cache_asking import asking, daemon
from ckptkit.cli.common import print_json
from ckptkit.cli.values import DESTINATION


@click.command(short_help="Copy a version out of the cache into a folder.")
@click.argument("step", type=click.IntRange(min=0))
@click.argument("folder", type=DESTINATION, metavar="DST")
@click.option(
    "--epoch", type=click.IntRange(min=0), help="Where several epochs have the step. [default: the newest]"
)
@asking
def get(step: int, folder: str, epoch: int | None, job: str, socket: str | None, as_json: bool) -> None:
    """Write STEP as a native checkpoint to DST, from whichever nodes and storage have its shards. Every leaf is checked."""
    from ckptkit.cache.export import export
    from ckptkit.cache.store import LocatedStore

    with daemon(job, socket) as client:
        located = client.find(step, epoch)
        with LocatedStore(client, located) as store:
            nbytes = export(store, folder)
            sources = dict(store.bytes_from)
    if as_json:
        print_json(
            "CacheGet",
            {
                "step": located.step,
                "epoch": located.epoch,
                "path": folder,
                "bytes": nbytes,
                "sources": sources,
            },
        )
        return
    where = ", ".join(f"{show.nbytes(count)} from {kind}" for kind, count in sorted(sources.items()))
    show.say(f"step {located.step} of epoch {located.epoch}, {show.nbytes(nbytes)} ({where}) is at {folder}")
