"""Boxes as users write them, `layers.0.attn.q/param[0:2, 5, :]`, and the pieces that hold them."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from ckptkit.core.boxes import Box
from ckptkit.core.catalog import ROLE_CODE, ROLES, Catalog
from ckptkit.core.dtypes import TABLE
from ckptkit.core.schema import Tensor
from ckptkit.errors import UsageError

_BOX = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<box>[^\[\]]*)\])?")
_INDEX = re.compile(r"(-?\d+)")
_SLICE = re.compile(r"(-?\d+)?\s*:\s*(-?\d+)?")


@dataclass(frozen=True)
class Selection:
    """A box of one tensor in one role; `single` are the axes that were given by an index, not by a range."""

    tensor: Tensor
    role: str
    box: Box
    single: tuple[int, ...]


@dataclass(frozen=True)
class PieceRow:
    """A piece of a box: `box` of `tensor/role` lies in `file` from byte `offset` on.

    Attributes:
        strides: Bytes from one element to the next, for each axis of the tensor.
        replica: Whether another piece before it holds the same elements.
    """

    tensor: str
    role: str
    box: str
    file: str
    rank: int
    key: str
    offset: int
    strides: tuple[int, ...]
    dtype: str
    nbytes: int
    replica: bool


def parse_box(text: str, catalog: Catalog) -> Selection:
    """Read a box as numpy slices are read: negative numbers count from the end, axes left out are whole.

    Without a role, the parameter or buffer is meant, else the only role there is.

    Raises:
        UsageError: no such tensor, role or element; says what there is.
    """
    match = _BOX.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no box; write TENSOR[0:2, 5, :] or TENSOR/ROLE[...]")
    name, slash, role = match["name"].strip().rpartition("/")
    if not slash or role not in ROLES:
        name, role = match["name"].strip(), ""
    tensor = catalog.tensors.get(name)
    if tensor is None:
        near = get_close_matches(name, catalog.tensors, 3, 0.5)
        raise UsageError(
            f"there is no tensor {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")
        )
    held = [r for r in ROLES if (name, r) in catalog.held]
    if not role:
        plain = [r for r in ("param", "buffer") if r in held]
        if not plain and len(held) != 1:
            raise UsageError(f"{name} is held as {', '.join(held) or 'nothing'}; say which: {name}/ROLE")
        role = (plain or held)[0]
    elif role not in held:
        raise UsageError(f"there is no {role} of {name}; it is held as {', '.join(held) or 'nothing'}")
    box, single = _bounds(text, match["box"], tensor)
    return Selection(tensor, role, box, single)


def _bounds(text: str, inside: str | None, tensor: Tensor) -> tuple[Box, tuple[int, ...]]:
    parts = [part.strip() for part in inside.split(",")] if inside and inside.strip() else []
    shape = tensor.shape
    if "..." in parts:
        at = parts.index("...")
        parts[at : at + 1] = [":"] * (len(shape) - len(parts) + 1)
    if len(parts) > len(shape):
        axes = ", ".join(f"{axis}={size}" for axis, size in zip(tensor.axes, shape, strict=True)) or "none"
        raise UsageError(f"{text!r} has {len(parts)} axes; {tensor.name} has {len(shape)} ({axes})")
    start, stop, single = [], [], []
    for axis, size in enumerate(shape):
        part = parts[axis] if axis < len(parts) else ":"
        index, cut = _INDEX.fullmatch(part), _SLICE.fullmatch(part)
        if index:
            at = int(part) + (size if int(part) < 0 else 0)
            lo, hi = at, at + 1
            single.append(axis)
        elif cut:
            lo, hi, _ = slice(*(int(bound) if bound else None for bound in cut.groups())).indices(size)
            hi = max(lo, hi)
        else:
            raise UsageError(f"{text!r}: {part!r} is neither an index nor a range like 0:2")
        if not 0 <= lo <= hi <= size:
            raise UsageError(f"{text!r}: {part} is outside axis {axis} of {tensor.name}, which has {size}")
        start.append(lo)
        stop.append(hi)
    return Box(tuple(start), tuple(stop)), tuple(single)


def pieces_of(catalog: Catalog, wanted: Selection) -> list[PieceRow]:
    """The pieces that hold a selection, in the order of the catalog."""
    number = list(catalog.tensors).index(wanted.tensor.name)
    pieces, entries, segments = catalog.pieces, catalog.entries, catalog.segments
    mine = np.flatnonzero(catalog.piece_key == number * len(ROLES) + ROLE_CODE[wanted.role])
    axes = len(wanted.tensor.shape)
    rows: list[PieceRow] = []
    seen: list[Box] = []
    for k in mine.tolist():
        box = Box(tuple(pieces.lo[k][:axes].tolist()), tuple(pieces.hi[k][:axes].tolist())).overlap(
            wanted.box
        )
        if box is None:
            continue
        entry, segment = int(pieces.entry[k]), int(pieces.segment[k])
        file, dtype = catalog.files[int(entries.file[entry])], TABLE[entries.dtype[entry]]
        strides = segments.strides[segment][:axes]
        position = int(
            segments.base[segment] + (np.asarray(box.start, np.int64) * strides).sum() - entries.first[entry]
        )
        rows.append(
            PieceRow(
                tensor=wanted.tensor.name,
                role=wanted.role,
                box=str(box),
                file=file.path,
                rank=file.rank,
                key=catalog.locals[int(entries.local[entry])].key,
                offset=file.data_start + int(entries.offset[entry]) + position * dtype.itemsize,
                strides=tuple((strides * dtype.itemsize).tolist()),
                dtype=dtype.name,
                nbytes=box.size * dtype.itemsize,
                replica=any(box.overlap(other) is not None for other in seen),
            )
        )
        if not rows[-1].replica:
            seen.append(box)
    return rows
