"""`ckptkit plan`: what a reshard would do, before it does it."""

from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, notes, print_report, reshard_options
from ckptkit.cli.values import DESTINATION, PLACE

if TYPE_CHECKING:
    from ckptkit.ops.planning import PlanReport


@click.command(short_help="Say what a reshard would do. Nothing is written.")
@click.argument("src", type=PLACE, metavar="SRC")
@click.argument("dst", type=DESTINATION, metavar="DST")
@reshard_options
@click.option(
    "--no-probe", "probe", is_flag=True, default=True, flag_value=False, help="Do not time the stores."
)
@common
def plan(src: str, dst: str, as_json: bool, **options: Any) -> None:
    """Plan `ckptkit reshard SRC DST` with the same options, prove that nothing is missing, and say what it would do.

    Both layouts, bytes in and out, casts, drops, ties, padding, what cannot be verified on the way, memory, free space and
    time. The time comes from a short probe of both stores, which writes and removes one small file beside DST.
    """
    from ckptkit import ops

    report = ops.plan(src, dst, **options)
    if as_json:
        print_report(report)
        return
    notes(report.notes)
    print_plan(report)


def print_plan(report: "PlanReport") -> None:
    """Print a plan for people, the verdict last."""
    show.fields(_fields(report))
    missing = sorted({drop.flag for drop in report.drops if not drop.allowed and drop.flag})
    if missing:
        show.say(f"{show.style('not allowed', 'red')}: what is left behind needs {' and '.join(missing)}")
    elif not report.fits:
        click.echo(
            f"{show.style('does not fit', 'red')}: {show.nbytes(report.bytes_out)} to write, too little is free"
        )
    else:
        lossless = not any(cast.lossy for cast in report.casts) and not report.drops
        what = "every bit is kept" if lossless else "see casts and drops for what is not kept"
        show.say(f"{show.style('proven', 'green')}: {show.nbytes(report.bytes_out)} to write, {what}")


def what_is_lost(report: "PlanReport") -> list[str]:
    """A line for all that a reshard changes or leaves behind without being told to by an option of its own."""
    dropped = [f"left behind: {_drop(drop)}" for drop in report.drops if not drop.flag]
    return dropped + [f"cast: {_cast(cast)}" for cast in report.casts if cast.lossy]


def _fields(report: "PlanReport") -> list[tuple[str, str]]:
    balance = ""
    if report.mean_rank and (report.destination.get("world") or 1) > 1:
        share = report.largest_rank / report.mean_rank
        balance = f", the largest rank {show.nbytes(report.largest_rank)} ({share:.2f}× the mean)"
    over = f" ({report.over_read:.2f}× what is needed)" if report.over_read > 1.005 else ""
    proof = (
        f"{show.plural(report.elements, 'element')} of {show.plural(report.pieces_out, 'piece')} covered once, by "
        f"{show.plural(report.pairs, 'copy', 'copies')} from {show.plural(report.pieces_in, 'piece')}"
    )
    replicas = ""
    if report.replicas:
        how = "compared" if report.replicas_checked else "not compared (--replicas first)"
        replicas = f"{show.plural(report.replicas, 'piece')} held twice, {how}"
    padding = ""
    if report.padding_in or report.padding_out:
        padding = f"{show.nbytes(report.padding_in)} in, {show.nbytes(report.padding_out)} out"
    space = ""
    if report.free is not None:
        space = f"{show.nbytes(report.free)} free" + (
            "" if report.fits else show.style(", too little", "red")
        )
    time = ""
    if report.seconds is not None:
        time = "under a second" if report.seconds < 1 else f"about {show.duration(report.seconds)}"
        rates = [(report.read_rate, "read"), (report.write_rate, "write")]
        pace = ", ".join(f"{what} {show.rate(rate)}" for rate, what in rates if rate)
        time += f" ({pace})" if pace else ""
    return [
        ("from", _side(report.source)),
        ("to", _side(report.destination)),
        ("read", show.nbytes(report.bytes_in) + over),
        ("write", show.nbytes(report.bytes_out) + balance),
        ("proof", proof),
        ("replicas", replicas),
        ("casts", "\n".join(_cast(cast) for cast in report.casts)),
        ("drops", "\n".join(_drop(drop) for drop in report.drops)),
        ("ties", "\n".join(report.ties)),
        ("padding", padding),
        ("unverified", "\n".join(report.unverified)),
        ("memory", show.memory(report.memory) + " at most"),
        ("space", space),
        ("time", time),
    ]


def _side(side: dict[str, Any]) -> str:
    """`native tp=2,dp=4,zero=1 (8 ranks), 25 files, 8.41 GB: URL`."""
    world = side.get("world") or 1
    layout = side.get("layout") or ""
    what = f"{side['format']} {layout} ({show.plural(world, 'rank')})" if layout else str(side["format"])
    size = f", {show.plural(side['files'], 'file')}, {show.nbytes(side['nbytes'])}"
    return f"{what}{size}\n{side['url']}"


def _cast(cast: Any) -> str:
    lossy = show.style("bits may be lost", "yellow") if cast.lossy else "lossless"
    return f"{cast.source} → {cast.destination}, {lossy}: {_many(cast)}"


def _drop(drop: Any) -> str:
    needs = "" if drop.allowed else show.style(f", needs {drop.flag}", "red")
    return f"{_many(drop, drop.nbytes)}: {drop.why}{needs}"


def _many(row: Any, size: int = 0) -> str:
    """What a row stands for, with the number of tensors and their bytes where there is more to say."""
    tensors = row.count > 1 and not row.what.startswith("extras")
    facts = [show.plural(row.count, "tensor")] if tensors else []
    facts += [show.nbytes(size)] if size else []
    return f"{row.what} ({', '.join(facts)})" if facts else row.what
