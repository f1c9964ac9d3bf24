"""`ckptkit diff`: what differs between two checkpoints, and where it lies."""

from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, config_option, notes, only_option, print_report, work_options
from ckptkit.cli.progress import Progress
from ckptkit.cli.values import MODEL, PLACE

if TYPE_CHECKING:
    from ckptkit.ops.comparing import DiffReport


@click.command(short_help="Show what differs between two checkpoints, and where.")
@click.argument("a", type=PLACE, metavar="A")
@click.argument("b", type=PLACE, metavar="B")
@click.option(
    "--by", type=click.Choice(["rank"]), help="Also count what differs by the rank of A that holds it."
)
@click.option(
    "--top", type=click.IntRange(min=0), default=20, show_default=True, metavar="N", help="Rows; 0 for all."
)
@click.option(
    "--rtol", type=click.FloatRange(min=0), default=0.0, metavar="X", help="Relative tolerance. [default: 0]"
)
@click.option(
    "--atol", type=click.FloatRange(min=0), default=0.0, metavar="X", help="Absolute tolerance. [default: 0]"
)
@only_option
@click.option("--model", type=MODEL, metavar="M", help="Model of both.")
@config_option
@work_options
@common
def diff(a: str, b: str, by: str | None, as_json: bool, **options: Any) -> int:
    """Compare checkpoints A and B, of any layout and format, tensor by tensor; the largest difference comes first.

    Elements are equal where |a - b| <= atol + rtol * |b|; without tolerances, where their bits are. Shapes, dtypes,
    extras and configuration are compared too.

    Exits 0 when all is equal, 1 when something differs.
    """
    from ckptkit import ops

    with Progress("comparing") as progress:
        report = ops.diff(a, b, by_rank=by == "rank", progress=progress, **options)
    if as_json:
        print_report(report)
    else:
        _print(report)
    return report.exit_code


def _print(report: "DiffReport") -> None:
    notes(report.notes)
    table = show.Table(
        (
            show.Column("tensor", cut=36),
            show.Column("role"),
            show.Column("differ", right=True),
            show.Column("of", right=True, spare=2),
            show.Column("max |a-b|", right=True),
            show.Column("relative", right=True, spare=1),
            show.Column("at", spare=3),
            show.Column("where", cut=20),
        )
    )
    for row in report.tensors:
        table.add(
            row.tensor,
            row.role,
            show.count(row.differing),
            show.count(row.elements),
            (show.number(row.max_abs), "red"),
            show.number(row.max_rel),
            f"[{', '.join(map(str, row.at))}]",
            row.where,
        )
    if table.rows:
        table.echo()
        hidden = report.tensors_differing - len(report.tensors)
        if hidden > 0:
            click.echo(f"… and {show.plural(hidden, 'more tensor', 'more tensors')} (--top 0 lists all)")
        click.echo()
    if report.by_rank:
        ranks = show.Table((show.Column("rank of A", right=True), show.Column("differ", right=True)))
        for rank, number in sorted(report.by_rank.items(), key=lambda item: (-item[1], item[0])):
            ranks.add(show.count(rank), show.count(number))
        ranks.echo()
        click.echo()
    show.fields(
        [
            ("only in A", show.some(report.only_a)),
            ("only in B", show.some(report.only_b)),
            ("shapes", show.some(report.shapes)),
            ("dtypes", show.some(report.dtypes)),
            ("extras", show.some(report.extras)),
            ("config", show.some(report.config)),
        ]
    )
    show.say(_verdict(report))


def _verdict(report: "DiffReport") -> str:
    compared = f"{show.plural(report.tensors_compared, 'tensor')} compared in {show.duration(report.seconds)}"
    if report.exit_code == 0:
        return f"{show.style('equal', 'green')}: {compared}"
    kinds = {
        "names": report.only_a or report.only_b,
        "shapes": report.shapes,
        "dtypes": report.dtypes,
        "extras": report.extras,
        "config": report.config,
    }
    found = [show.plural(report.tensors_differing, "tensor")] if report.tensors_differing else []
    found += [kind for kind, rows in kinds.items() if rows]
    where = f", {report.where}" if report.where else ""
    return f"{show.style('different', 'red')}: {', '.join(found)}{where}; {compared}"
