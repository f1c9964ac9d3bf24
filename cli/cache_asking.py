"""What the commands of `ckptkit cache` share: which daemon is asked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckptkit.errors import UsageError

if TYPE_CHECKING:
    from ckptkit.cache.client import CacheClient

F = TypeVar("F", bound=Callable[..., Any])


def _either(ctx: click.Context, parameter: click.Parameter, value: bool) -> bool:
    """`--json` may stand before the command's name, too."""
    return value or bool(ctx.parent and ctx.parent.params.get("as_json"))


def asking(command: F) -> F:
    """Options that say which daemon of this node is meant, `--json` and `--debug`."""
    for option in (
        click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when it fails."),
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            callback=_either,
            help="Print one JSON object and nothing else.",
        ),
        click.option("--socket", metavar="PATH", help="Socket of the daemon. [default: of the job]"),
        click.option(
            "--job",
            metavar="NAME",
            default="",
            help="Job of the daemon. [default: the only one of this user]",
        ),
    ):
        command = option(command)
    return command


def needs(*modules: str) -> None:
    """Raise UsageError where a library of the `cache` extra is not installed. Commands that only ask a daemon need none."""
    from importlib.util import find_spec

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} is not installed; the daemon needs it: pip install 'ckptkit[cache]'"
        )


@contextmanager
def daemon(job: str, socket: str | None) -> Iterator["CacheClient"]:
    """A connection to a daemon of this node. Raises UsageError where it is not clear which one, AwayError where none answers."""
    from ckptkit.cache.client import CacheClient

    path = socket or (None if job else _only())
    client = CacheClient.connect(path, job)
    try:
        yield client
    finally:
        client.close()


def _only() -> str:
    """The socket of the only daemon of this user."""
    import glob
    import os

    from ckptkit.cache.client import default_socket

    given = os.environ.get("CKPTKIT_CACHE_SOCKET")
    if given:
        return given
    found = sorted(glob.glob(default_socket("*")))
    if len(found) == 1:
        return found[0]
    jobs = ", ".join(os.path.basename(os.path.dirname(path)) for path in found)
    raise UsageError(
        f"say which job with --job: {jobs}"
        if found
        else "no daemon of yours runs here; give --socket if it runs elsewhere"
    )
