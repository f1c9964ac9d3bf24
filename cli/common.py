"""What commands share: groups of options, and how results and notes are printed."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckptkit.cli import show
from ckptkit.cli.failures import plain
from ckptkit.cli.values import DTYPE, FILE, FORMAT, LAYOUT, MODEL, NAMES, PLACE, SIZE

if TYPE_CHECKING:
    from ckptkit.ops.reports import Report

F = TypeVar("F", bound=Callable[..., Any])

SCHEMA = 1
"""Number of the form of `--json`. It grows when a key changes its meaning or goes; new keys do not count."""


def _apply(command: F, options: Iterable[Callable[[F], F]]) -> F:
    for option in reversed(list(options)):
        command = option(command)
    return command


def common(command: F) -> F:
    """Options that every command has. They come last in its help."""
    return _apply(
        command,
        (
            click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
            click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when it fails."),
        ),
    )


def source_options(command: F) -> F:
    """What a user may say about a source that it does not say itself. Named as `ckptkit.ops.open` names them."""
    return _apply(
        command,
        (
            click.option("--from", "format", metavar="FORMAT", type=FORMAT, help="Format of the source."),
            click.option("--source-layout", "layout", type=LAYOUT, metavar="L", help="Layout of the source."),
            click.option("--model", type=MODEL, metavar="M", help="Model of the source."),
            config_option,
        ),
    )


config_option = click.option(
    "--config",
    type=PLACE,
    metavar="DIR",
    help="Folder or file with the model's configuration, where the source has none.",
)
fingerprint_option = click.option(
    "--fingerprint/--no-fingerprint",
    default=None,
    help="Store 64 bits of every tensor's values, in native. [default: on disks, not in memory]",
)
only_option = click.option(
    "--only",
    multiple=True,
    metavar="GLOB",
    help="Take only these tensors: a name or name/role. May be repeated.",
)


def work_options(command: F) -> F:
    """How much of the machine a command may use."""
    return _apply(
        command,
        (
            click.option(
                "--threads", type=click.IntRange(min=1), metavar="N", help="Threads. [default: CPUs allowed]"
            ),
            click.option(
                "--memory",
                type=SIZE,
                default="256MiB",
                metavar="SIZE",
                show_default=True,
                help="Memory for buffers.",
            ),
        ),
    )


def reshard_options(command: F) -> F:
    """The options of `plan` and `reshard`, named as `ckptkit.ops.reshard` names them."""
    return _apply(
        command,
        (
            click.option("--to", type=FORMAT, metavar="FORMAT", help="Format of DST. [default: that of SRC]"),
            click.option(
                "--layout", type=LAYOUT, metavar="L", help="Layout of DST, like tp=2,pp=4,ep=8,dp=8,zero=1."
            ),
            click.option(
                "--like", type=PLACE, metavar="URL", help="Take format, layout and names of this checkpoint."
            ),
            click.option("--names", type=NAMES, metavar="N", help="Family of names in DST."),
            click.option(
                "--dtype", type=DTYPE, metavar="D", help="Cast weights, but those that must stay float32."
            ),
            only_option,
            click.option(
                "--drop", multiple=True, metavar="GLOB", help="Leave these tensors behind. May be repeated."
            ),
            click.option("--drop-optimizer", is_flag=True, help="Allow that optimizer state is left behind."),
            click.option(
                "--drop-extras", is_flag=True, help="Allow that extras DST cannot hold are left behind."
            ),
            click.option(
                "--master-from-param", is_flag=True, help="Make missing masters from lower precision."
            ),
            click.option(
                "--max-shard-size",
                type=SIZE,
                default="5GB",
                metavar="SIZE",
                show_default=True,
                help="Largest weight file, in formats without ranks.",
            ),
            click.option("--from", "from_format", type=FORMAT, metavar="FORMAT", help="Format of SRC."),
            click.option("--source-layout", type=LAYOUT, metavar="L", help="Layout of SRC."),
            click.option("--model", type=MODEL, metavar="M", help="Model of SRC."),
            config_option,
            click.option(
                "--replicas",
                type=click.Choice(["check", "first"]),
                default="check",
                show_default=True,
                help="Compare equal pieces of SRC, or take the first.",
            ),
            click.option(
                "--fill-missing",
                is_flag=True,
                help="Take chunks that a zarr array lacks as its fill value. A lost file looks the same.",
            ),
            work_options,
            click.option(
                "--rename",
                type=FILE,
                metavar="FILE",
                help="Rules for names of a model without a schema (TOML).",
            ),
            click.option(
                "--rename-back", type=FILE, metavar="FILE", help="The same rules, read from right to left."
            ),
            fingerprint_option,
            click.option(
                "--overwrite", is_flag=True, help="Replace DST, which goes only after the new one is whole."
            ),
        ),
    )


def print_report(report: "Report") -> None:
    """Print a report's one JSON object to standard output."""
    click.echo(report.to_json())


def print_json(kind: str, found: Mapping[str, Any]) -> None:
    """Print what is no report as one JSON object of the same form."""
    made = {"schema": SCHEMA, "report": kind, **plain(dict(found))}
    click.echo(json.dumps(made, allow_nan=False))


def notes(texts: Iterable[str]) -> None:
    """Tell the user what is no data: on standard error."""
    for text in texts:
        show.tell(text)
