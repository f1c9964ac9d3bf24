"""`ckptkit inspect`: what a checkpoint holds, and where each element lies."""

import json
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, notes, print_json, source_options
from ckptkit.cli.progress import Progress
from ckptkit.cli.values import PLACE
from ckptkit.errors import UsageError

if TYPE_CHECKING:
    from ckptkit.ops.inspecting import EntryRow, Inspection, PieceRow

_MOST_VALUES = 1 << 20
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@click.command(short_help="Show what a checkpoint holds, and where.")
@click.argument("url", type=PLACE, metavar="URL")
@click.option("--all", "everything", is_flag=True, help="One row a tensor; extras in full.")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="What rank R stores, in file order.")
@click.option(
    "--where", metavar="T[BOX]", help="Files and offsets that hold a box, like 'layers.0.attn.q[0:2]'."
)
@click.option("--values", metavar="T[BOX]", help="The values in a box, like 'layers.0.norm/exp_avg[0:8]'.")
@click.option("--extras", is_flag=True, help="Step, optimizer groups, files and whatever else is no tensor.")
@click.option("--fingerprint", is_flag=True, help="64 bits of every tensor's values, whatever the layout.")
@source_options
@common
def inspect(
    url: str,
    everything: bool,
    rank: int | None,
    where: str | None,
    values: str | None,
    extras: bool,
    fingerprint: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what the checkpoint at URL is and holds, from headers alone; no tensor is read but for --values, and
    for fingerprints that the format does not store.

    The layout is written exactly as --layout takes it. Tensors that differ only in numbers share a row. T is a canonical
    name, or name/role; a box has an index or a range for each axis, and may be left out.
    """
    from ckptkit import ops

    with Progress("reading for fingerprints") as progress:
        found = ops.inspect(url, everything=everything, fingerprint=fingerprint, progress=progress, **options)
    parts: dict[str, Any] = {
        "entries": found.rank(rank) if rank is not None else None,
        "pieces": found.where(where) if where is not None else None,
        "values": _values(found, values) if values is not None else None,
    }
    if as_json:
        _print_json(found, parts)
        return
    notes(found.notes)
    if parts["entries"] is not None:
        _print_entries(parts["entries"], rank)
    if parts["pieces"] is not None:
        _print_pieces(parts["pieces"])
    if parts["values"] is not None:
        _print_values(parts["values"])
    if extras:
        click.echo(
            json.dumps(
                {"common": found.extras, "facts": found.facts}, indent=2, ensure_ascii=False, default=str
            )
        )
    if fingerprint:
        _print_fingerprints(found)
    if not (extras or fingerprint) and all(part is None for part in parts.values()):
        _print_summary(found)


def _values(found: "Inspection", box: str) -> Any:
    array = found.values(box)
    if array.size > _MOST_VALUES:
        raise UsageError(
            f"{box} has {array.size:,} elements, more than {_MOST_VALUES:,} to print; take a smaller box"
        )
    return array


def _print_json(found: "Inspection", parts: dict[str, Any]) -> None:
    whole = found.as_dict()
    kind = whole.pop("report")
    whole.pop("schema")
    for name in ("entries", "pieces"):
        if parts[name] is not None:
            from ckptkit.ops.reports import plain

            whole[name] = [plain(row) for row in parts[name]]
    array = parts["values"]
    if array is not None:
        # ml_dtypes' numbers are no Python numbers; float32 holds each of them exactly.
        exact = array if array.dtype.kind in "biufc" else array.astype("float32")
        listed = exact.tolist() if array.dtype.kind != "c" else exact.astype(str).tolist()
        whole["values"] = {"dtype": str(array.dtype), "shape": list(array.shape), "data": listed}
    print_json(kind, whole)


def _print_summary(found: "Inspection") -> None:
    layout = (
        f"{found.layout}  ({show.plural(found.world, 'rank')})" if found.layout else "not told by the format"
    )
    epoch = f" (epoch {found.epoch})" if found.epoch else ""
    beside = [(found.padding_nbytes, "padding"), (found.replica_nbytes, "replicas")]
    more = "".join(f", {show.nbytes(size)} {what}" for size, what in beside if size)
    model = found.model or "unknown: each stored tensor is itself"
    show.fields(
        [
            ("format", f"{found.format}, {found.names} names"),
            ("model", f"{model}, {show.plural(found.parameters, 'parameter')}"),
            ("layout", layout),
            ("step", "" if found.step is None else f"{found.step}{epoch}"),
            ("size", f"{show.nbytes(found.nbytes)} in {show.plural(found.files, 'file')}"),
            ("tensors", f"{show.nbytes(found.data_nbytes)}{more}"),
            ("extras", ", ".join(_extra(name, value) for name, value in found.extras.items())),
        ]
    )
    roles = show.Table(
        (
            show.Column("role"),
            show.Column("dtype", cut=20, spare=1),
            show.Column("tensors", right=True, spare=3),
            show.Column("elements", right=True, spare=2),
            show.Column("size", right=True),
        )
    )
    for role in found.roles:
        dtypes = ", ".join(role.dtypes)
        roles.add(
            role.role, dtypes, show.count(role.tensors), show.count(role.elements), show.nbytes(role.nbytes)
        )
    tensors = show.Table(
        (
            show.Column("tensor", cut=36),
            show.Column("×", right=True),
            show.Column("shape", cut=20, spare=1),
            show.Column("roles", cut=20, spare=2),
            show.Column("size", right=True),
        )
    )
    wide = (show.terminal_width() or 120) >= 120  # room for the names of axes
    for row in found.tensors:
        shape = "×".join(map(str, row.shape)) or "scalar"
        if row.axes and wide:
            shape = " ".join(f"{axis}={size}" for axis, size in zip(row.axes, row.shape, strict=True))
        tensors.add(
            row.pattern,
            show.count(row.count) if row.count > 1 else "",
            shape,
            _roles(row.roles),
            show.nbytes(row.nbytes),
        )
    for table in (roles, tensors):
        if table.rows:
            click.echo()
            table.echo()
    notes([found.summary()])  # last, since the tables of a large model scroll the head away


def _extra(name: str, value: Any) -> str:
    if isinstance(value, (list, dict)):
        return f"{name} ({len(value)})"
    return f"{name} ({value})" if isinstance(value, str) and len(value) <= 24 else name


def _roles(roles: dict[str, str]) -> str:
    """`bf16 param, fp32 master exp_avg exp_avg_sq`."""
    by_dtype: dict[str, list[str]] = {}
    for role, dtype in roles.items():
        by_dtype.setdefault(_SHORT.get(dtype, dtype), []).append(role)
    return ", ".join(f"{dtype} {' '.join(names)}" for dtype, names in by_dtype.items())


def _print_entries(rows: "list[EntryRow]", rank: int | None) -> None:
    table = show.Table(
        (
            show.Column("key", cut=36),
            show.Column("role"),
            show.Column("dtype", spare=2),
            show.Column("local shape", spare=1),
            show.Column("elements", right=True),
            show.Column("file", cut=20),
            show.Column("offset", right=True),
            show.Column("size", right=True),
        )
    )
    files = sorted({row.file for row in rows})
    for row in rows:
        shape = "×".join(map(str, row.local_shape)) or "scalar"
        part = f"{row.first}:{row.last}"
        table.add(
            row.key,
            row.role,
            row.dtype,
            shape,
            part,
            row.file if len(files) > 1 else "",
            str(row.offset),
            show.nbytes(row.nbytes),
        )
    if len(files) == 1:
        click.echo(files[0])
    if table.rows:
        table.echo()
    size = show.nbytes(sum(row.nbytes for row in rows))
    notes([f"rank {rank} stores {show.plural(len(rows), 'entry', 'entries')}, {size}"])


def _print_pieces(rows: "list[PieceRow]") -> None:
    table = show.Table(
        (
            show.Column("tensor", cut=36),
            show.Column("box"),
            show.Column("rank", right=True, spare=2),
            show.Column("file", cut=20),
            show.Column("offset", right=True),
            show.Column("byte strides", spare=1),
            show.Column("dtype", spare=4),
            show.Column("size", right=True),
            show.Column("", spare=3),
        )
    )
    for row in rows:
        table.add(
            f"{row.tensor}/{row.role}",
            row.box,
            "" if row.rank < 0 else str(row.rank),
            row.file,
            str(row.offset),
            f"({', '.join(map(str, row.strides))})",
            row.dtype,
            show.nbytes(row.nbytes),
            ("replica", "dim") if row.replica else "",
        )
    if table.rows:
        table.echo()
    notes([show.plural(len(rows), "piece")])


def _print_fingerprints(found: "Inspection") -> None:
    for name, value in found.fingerprints.items():
        click.echo(f"{value}  {name}")
    made, every = found.fingerprints_computed, len(found.fingerprints)
    notes(
        [
            f"{show.plural(every, 'fingerprint')}, {show.count(every - made)} as stored, {show.count(made)} computed"
        ]
    )


def _print_values(array: Any) -> None:
    import numpy as np

    width = show.terminal_width()
    with np.printoptions(linewidth=width or 120, threshold=1000 if width else array.size + 1):
        click.echo(str(array))
    shape = "×".join(map(str, array.shape)) or "scalar"
    notes([f"{array.dtype}, {shape}"])
