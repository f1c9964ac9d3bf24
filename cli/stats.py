"""`ckptkit stats`: statistics of every tensor, to find a sick one."""

from typing import Any

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, notes, only_option, print_report, source_options, work_options
from ckptkit.cli.progress import Progress
from ckptkit.cli.values import PLACE


@click.command(short_help="Show min, max, mean, rms, NaN and zeros of every tensor.")
@click.argument("url", type=PLACE, metavar="URL")
@only_option
@click.option("--sick", is_flag=True, help="List only tensors with NaN, Inf or nothing but zeros.")
@source_options
@work_options
@common
def stats(url: str, sick: bool, as_json: bool, **options: Any) -> None:
    """Read every tensor at URL and show its range, mean, rms, NaN, Inf and share of zeros, to find a sick one.

    Statistics are over finite elements, in float64; padding and replicas do not count.
    """
    from ckptkit import ops

    with Progress("reading") as progress:
        report = ops.stats(url, progress=progress, **options)
    read = len(report.tensors)
    if sick:
        report.tensors = [row for row in report.tensors if f"{row.tensor}/{row.role}" in set(report.sick)]
    if as_json:
        print_report(report)
        return
    notes(report.notes)
    spare = {"min": 3, "max": 0, "mean": 4, "rms": 2}
    numbers = [show.Column(title, right=True, spare=order) for title, order in spare.items()]
    table = show.Table(
        (
            show.Column("tensor", cut=36),
            show.Column("role"),
            show.Column("dtype", spare=6),
            show.Column("elements", right=True, spare=5),
            *numbers,
            show.Column("NaN", right=True),
            show.Column("Inf", right=True),
            show.Column("zero", right=True, spare=1),
        )
    )
    ill = set(report.sick)
    for row in report.tensors:
        style = "red" if f"{row.tensor}/{row.role}" in ill else ""
        found = ("" if x is None else show.number(x, 3) for x in (row.min, row.max, row.mean, row.rms))
        table.add(
            (row.tensor, style),
            row.role,
            row.dtype,
            show.count(row.elements),
            *found,
            (show.count(row.nans), "red" if row.nans else ""),
            (show.count(row.infs), "red" if row.infs else ""),
            (show.share(row.zeros, row.elements), style if row.zeros == row.elements else ""),
        )
    if table.rows:
        table.echo()
    number = f"{show.plural(read, 'tensor')} in {show.duration(report.seconds)}"
    names = show.shorten(", ".join(report.sick), 300)
    notes(
        [
            f"{number}, {show.style(f'{len(report.sick)} sick', 'red')}: {names}"
            if ill
            else f"{number}, none sick"
        ]
    )
