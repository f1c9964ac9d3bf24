"""`ckptkit cache pin | unpin | drain | evict | ban`."""

import time

import click

from ckptkit.cli import show
from ckptkit.cli.cache_asking import asking, daemon
from ckptkit.cli.common import print_json
from ckptkit.errors import StoreError

_STEP = click.argument("step", type=click.IntRange(min=0))
_EPOCH = click.option(
    "--epoch", type=click.IntRange(min=0), help="Where several epochs have the step. [default: the newest]"
)


@click.command(short_help="Keep a durable step whatever retention says.")
@_STEP
@_EPOCH
@asking
def pin(step: int, epoch: int | None, job: str, socket: str | None, as_json: bool) -> None:
    """Keep STEP in durable storage until it is unpinned. It may be pinned before it is durable."""
    with daemon(job, socket) as client:
        client.request("pin", step=step, epoch=epoch, deadline_s=60.0)
    _done(as_json, "pin", f"step {step} is kept", step=step)


@click.command(short_help="Leave a pinned step to retention again.")
@_STEP
@_EPOCH
@asking
def unpin(step: int, epoch: int | None, job: str, socket: str | None, as_json: bool) -> None:
    """Leave STEP to retention again."""
    with daemon(job, socket) as client:
        client.request("unpin", step=step, epoch=epoch, deadline_s=60.0)
    _done(as_json, "unpin", f"step {step} is left to retention", step=step)


@click.command(short_help="Write the newest committed step to durable storage now.")
@click.option("--wait", is_flag=True, help="Wait until the step is whole there.")
@click.option(
    "--timeout",
    type=float,
    default=3600.0,
    show_default=True,
    metavar="S",
    help="With --wait: give up after so many seconds.",
)
@asking
def drain(wait: bool, timeout: float, job: str, socket: str | None, as_json: bool) -> None:
    """Have all nodes write the newest committed step to durable storage, whatever the interval is."""
    with daemon(job, socket) as client:
        step = client.request("drain")["step"]
        until = time.monotonic() + timeout
        while wait and step is not None:
            durable = client.status()["status"]["durable"]
            if durable is not None and durable["step"] >= step:
                break
            if time.monotonic() > until:
                raise StoreError(
                    f"step {step} is not durable after {timeout:g} s; `ckptkit cache status` and the daemons' logs say why"
                )
            time.sleep(0.5)
    text = (
        "no step is committed yet"
        if step is None
        else f"step {step} is {'durable' if wait else 'being drained'}"
    )
    _done(as_json, "drain", text, step=step)


@click.command(short_help="Give memory of copies for other nodes back to the system.")
@click.argument("slots", type=click.IntRange(min=1))
@asking
def evict(slots: int, job: str, socket: str | None, as_json: bool) -> None:
    """Give the memory of up to SLOTS slots for copies back for ten minutes: free ones first. Slots of this node's ranks stay.

    Steps whose copies go are less safe until they are copied again.
    """
    with daemon(job, socket) as client:
        released = client.request("evict", slots=slots)["released"]
    _done(as_json, "evict", f"{show.plural(released, 'slot')} given back", released=released)


@click.command(short_help="Never restore a version, or all newer ones.")
@_STEP
@click.option("--epoch", type=click.IntRange(min=0), required=True, help="Epoch of the version.")
@click.option(
    "--newer", is_flag=True, help="Ban all versions that are newer than this one, and not this one."
)
@asking
def ban(step: int, epoch: int, newer: bool, job: str, socket: str | None, as_json: bool) -> None:
    """Never restore STEP of an epoch, on no node; for a deliberate way back. A ban cannot be lifted, it outlives restarts."""
    with daemon(job, socket) as client:
        client.request("ban", step=step, epoch=epoch, newer=newer)
    what = f"everything newer than step {step} of epoch {epoch}" if newer else f"step {step} of epoch {epoch}"
    _done(as_json, "ban", f"{what} is never restored", step=step, epoch=epoch, newer=newer)


def _done(as_json: bool, kind: str, text: str, **facts: object) -> None:
    if as_json:
        print_json("CacheDone", {"did": kind, **facts})
    else:
        show.say(text)
