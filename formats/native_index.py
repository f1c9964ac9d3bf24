"""`index.npz`: the columns of a native checkpoint, so that opening one takes two small files whatever the number of ranks.

A zip of uncompressed `.npy` arrays, all one-dimensional and little-endian, that numpy loads as it is. Equal layouts give equal
bytes: names in a fixed order, times of 1980, each array in the narrowest type of its kind that holds it. Its name in the manifest and in
every `.digests` is the xxh3-128 of the file.

    meta             UTF-8 JSON as u8: {version, tensors: [[name, axes, shape, {unusual flags}], ...], keys: [...]}
    shape, shape_of  sizes of all local tensors one after the other, and how many each has
    part_local, part_tensor, part_offset, part_start, part_stop, part_strides    segments; the last three have a number an axis
    file_rank, file_size, file_start
    entry_file, entry_local, entry_role, entry_dtype, entry_first, entry_last, entry_offset
"""

import io
import json
import zipfile
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.core.boxes import MAX_ELEMENTS
from ckptkit.core.catalog import ROLES, Entries
from ckptkit.core.dtypes import TABLE
from ckptkit.core.schema import Tensor
from ckptkit.errors import FormatError
from ckptkit.formats.native_columns import FLAGS, Columns, Parts
from ckptkit.formats.native_header import dumps

VERSION = 1
_Array = npt.NDArray[Any]
_ENTRY = ("file", "local", "role", "dtype", "first", "last", "offset")


def index_bytes(columns: Columns) -> bytes:
    """The index file of laid-out columns."""
    parts, entries = columns.parts, columns.entries
    tensors = [
        [
            t.name,
            t.axes,
            t.shape,
            {name: getattr(t, name) for name, usual in FLAGS.items() if getattr(t, name) != usual},
        ]
        for t in columns.tensors
    ]
    axes = (
        np.asarray([len(t.shape) for t in columns.tensors], np.int64)[parts.tensor]
        if len(parts.tensor)
        else np.zeros(0)
    )
    used = np.arange(parts.start.shape[1])[None, :] < axes[:, None]
    arrays: dict[str, _Array] = {
        "meta": np.frombuffer(
            dumps({"version": VERSION, "tensors": tensors, "keys": columns.keys}).encode(), np.uint8
        ),
        "shape": np.asarray([n for shape in columns.shapes for n in shape], np.int64),
        "shape_of": np.asarray([len(shape) for shape in columns.shapes], np.int64),
        "part_local": parts.local,
        "part_tensor": parts.tensor,
        "part_offset": parts.offset,
        "part_start": parts.start[used],
        "part_stop": parts.stop[used],
        "part_strides": parts.strides[used],
        "file_rank": columns.ranks,
        "file_size": columns.sizes,
        "file_start": columns.data_starts,
        **{f"entry_{name}": getattr(entries, name) for name in _ENTRY},
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            member.create_system, member.external_attr = 3, 0o644 << 16
            archive.writestr(member, _npy(array))
    return out.getvalue()


def _npy(array: _Array) -> bytes:
    """An array as `.npy` version 1.0, in the narrowest type. Written here, since numpy's padding of the header changes."""
    if len(array) and array.min() < 0:
        array = array.astype("<i8")
    else:
        top = int(array.max(initial=0))
        array = array.astype(
            "<u1" if top < 1 << 8 else "<u2" if top < 1 << 16 else "<u4" if top < 1 << 32 else "<i8"
        )
    head = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': ({len(array)},), }}"
    head += " " * (-(10 + len(head) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + array.tobytes()


def parse_index(path: str, data: bytes) -> Columns:
    """The columns of an index file whose hash was checked. Raises FormatError where it does not make sense."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ValueError("it is compressed, which no writer does")
        with np.load(io.BytesIO(data), allow_pickle=False) as loaded:
            arrays = {name: _flat(loaded[name]) for name in loaded.files}
        meta = json.loads(arrays["meta"].tobytes())
        if meta["version"] != VERSION:
            raise FormatError(
                f"{path} has version {meta['version']}; this ckptkit reads {VERSION}. Update ckptkit",
                file=path,
            )
        return _columns(meta, arrays)
    except FormatError:
        raise
    except (
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        OSError,
        EOFError,
        zipfile.BadZipFile,
        NotImplementedError,
    ) as error:
        raise FormatError(
            f"{path} is no index that makes sense ({error}); delete it to read the ranks' headers", file=path
        ) from None


def _flat(array: _Array) -> _Array:
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise ValueError(f"an array of {array.dtype} {array.shape}")
    return array


def _columns(meta: Mapping[str, Any], arrays: Mapping[str, _Array]) -> Columns:
    tensors = [
        Tensor(name, tuple(axes), tuple(shape), **flags) for name, axes, shape, flags in meta["tensors"]
    ]
    part_tensor = arrays["part_tensor"].astype(np.uint32)
    axes = (
        np.asarray([len(t.shape) for t in tensors], np.int64)[part_tensor]
        if len(part_tensor)
        else np.zeros(0, np.int64)
    )
    width = max((len(t.shape) for t in tensors), default=0)
    used = np.arange(width)[None, :] < axes[:, None]

    def spread(name: str, fill: int) -> npt.NDArray[np.int64]:
        wide = np.full(used.shape, fill, np.int64)
        wide[used] = arrays[name]
        return wide

    sizes, ends = arrays["shape"].tolist(), np.cumsum(arrays["shape_of"]).tolist()
    shapes = [tuple(sizes[end - n : end]) for end, n in zip(ends, arrays["shape_of"].tolist(), strict=True)]
    parts = Parts(
        arrays["part_local"].astype(np.uint32), part_tensor, arrays["part_offset"].astype(np.int64),
        spread("part_start", 0), spread("part_stop", 1), spread("part_strides", 0),
    )  # fmt: skip
    columns = Columns(
        tensors,
        meta["keys"],
        shapes,
        parts,
        arrays["file_rank"].astype(np.int64),
        arrays["file_size"].astype(np.int64),
        arrays["file_start"].astype(np.int64),
        Entries(**{name: arrays[f"entry_{name}"] for name in _ENTRY}),
    )
    check(columns)
    return columns


def check(columns: Columns) -> None:
    """Raise ValueError where numbers point to nothing, or boxes and entries leave what holds them."""
    parts, entries = columns.parts, columns.entries
    plain_sizes = [prod(shape) for shape in columns.shapes]
    for holds, what in (
        (len(columns.keys) == len(columns.shapes), "local tensors"),
        (all(isinstance(key, str) for key in columns.keys), "names"),
        (all(n >= 0 for shape in columns.shapes for n in shape), "shapes"),
        (max(plain_sizes, default=0) <= MAX_ELEMENTS, "shapes"),
        (_below(parts.local, len(columns.keys)) and _sorted(parts.local), "segments"),
        (_below(parts.tensor, len(columns.tensors)), "segments"),
        (_below(entries.local, len(columns.keys)) and _below(entries.file, len(columns.ranks)), "entries"),
        (_below(entries.role, len(ROLES)) and _below(entries.dtype, len(TABLE)), "roles or dtypes"),
        (_sorted(entries.file), "order of entries"),
        (bool(np.all((columns.data_starts >= 8) & (columns.data_starts <= columns.sizes))), "sizes of files"),
    ):
        if not holds:
            raise ValueError(f"{what} out of range or order")
    sizes = np.asarray(plain_sizes, np.int64)
    width = parts.stop.shape[1]
    table = np.asarray([(*t.shape, *(1,) * (width - len(t.shape))) for t in columns.tensors], np.int64)
    shapes = table.reshape(len(columns.tensors), width)[parts.tensor]
    inside = (parts.start >= 0) & (parts.start <= parts.stop) & (parts.stop <= shapes)
    # In floating point, too, where products cannot wrap round.
    steps = np.maximum(parts.stop - parts.start - 1, 0)
    last = parts.offset + (steps * parts.strides).sum(axis=1)
    about = parts.offset + (steps.astype(np.float64) * parts.strides).sum(axis=1)
    empty = np.any(parts.stop == parts.start, axis=1)
    fits = (parts.offset >= 0) & (last < sizes[parts.local]) & (about <= MAX_ELEMENTS)
    if not (inside.all() and (parts.strides >= 0).all() and (fits | empty).all()):
        raise ValueError("a segment leaves its tensor")
    if not np.all(
        (entries.first >= 0) & (entries.first <= entries.last) & (entries.last <= sizes[entries.local])
    ):
        raise ValueError("an entry leaves its local tensor")
    room = (columns.sizes - columns.data_starts)[entries.file]
    if not np.all(
        (entries.offset >= 0) & (entries.offset <= room) & (entries.nbytes <= room - entries.offset)
    ):
        raise ValueError("an entry leaves its file")


def _sorted(column: _Array) -> bool:
    return bool(np.all(np.diff(column.astype(np.int64)) >= 0))


def _below(column: _Array, limit: int) -> bool:
    return not len(column) or int(column.max()) < limit
