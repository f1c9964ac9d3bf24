"""`ckptkit verify`: is a checkpoint whole, and do its bytes say what they said when it was written."""

from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, notes, print_report, source_options, work_options
from ckptkit.cli.progress import Progress
from ckptkit.cli.values import PLACE, SHARE

if TYPE_CHECKING:
    from ckptkit.ops.verifying import Fault, VerifyReport


@click.command(short_help="Check a checkpoint's bytes, or compare it with another.")
@click.argument("url", type=PLACE, metavar="URL")
@click.option("--quick", is_flag=True, help="Structure only: headers, sizes, manifest, coverage.")
@click.option(
    "--sample", type=SHARE, metavar="SHARE", help="Read only a random share of the leaves, like 5%."
)
@click.option(
    "--against", type=PLACE, metavar="URL", help="Also compare every tensor with this checkpoint's."
)
@click.option(
    "--bitwise", is_flag=True, help="With --against: read both sides, also where fingerprints would do."
)
@source_options
@work_options
@common
def verify(url: str, as_json: bool, **options: Any) -> int:
    """Read the checkpoint at URL and compare it with its digests. Nothing is changed.

    Checks structure, that the pieces of every tensor cover it, every leaf of 1 MiB against its digest, replicas against
    each other, and parameters against their masters. What could not be checked is listed. --against takes a checkpoint of
    any layout and format; tensors whose fingerprints both sides store are compared by these, without moving bytes.

    Exits 0 when all is well, 1 when something is wrong.
    """
    from ckptkit import ops

    with Progress("verifying") as progress:
        report = ops.verify(url, progress=progress, **options)
    if as_json:
        print_report(report)
    else:
        _print(report)
    return report.exit_code


def _print(report: "VerifyReport") -> None:
    notes(report.notes)
    for fault in report.faults:
        _print_fault(fault)
    if report.fault_count > len(report.faults):
        click.echo(f"… and {show.count(report.fault_count - len(report.faults))} more")
    if report.faults:
        click.echo()
    show.fields([("checked", "\n".join(report.checked)), ("not checked", "\n".join(report.not_checked))])
    rate = show.rate(report.bytes_checked / report.seconds) if report.seconds > 0 else ""
    took = show.duration(report.seconds)
    pace = (
        f"{show.nbytes(report.bytes_checked)} in {took} ({rate})"
        if report.bytes_checked and rate
        else f"in {took}"
    )
    if report.fault_count:
        show.say(f"{show.style(show.plural(report.fault_count, 'fault'), 'red')} in {report.url}: {pace}")
    else:
        show.say(f"{show.style('no fault', 'green')} in {report.url}: {pace}")


def _print_fault(fault: "Fault") -> None:
    """Where on one line, what below it."""
    where = "  ".join(filter(None, (fault.file, f"{fault.tensor} {fault.box}".strip())))
    click.echo(f"{show.style(fault.kind, 'red')}  {where}".rstrip())
    for line in show.wrap(fault.what, (show.terminal_width() or 10**9) - 4):
        click.echo(f"    {line}")
