"""A probe of what no metadata can tell: that a run's fp32 weights are those of its parameters.

State in flat buffers has no names, and megatron-core 0.16.1 writes shifted state where a buffer has several buckets. Both would be
read without an error, and train to nonsense. So a few elements of the largest tensors are compared: each parameter is
its fp32 weight, rounded.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.core.catalog import ITEMSIZE, ROLE_CODE, Catalog
from ckptkit.core.dtypes import TABLE
from ckptkit.errors import FormatError
from ckptkit.stores.base import Store

TENSORS = 32
ELEMENTS = 3


def check_masters(store: Store, catalog: Catalog) -> None:
    """Compare some elements of parameters with their fp32 weights, in a handful of small reads.

    Raises:
        FormatError: they differ; names the first tensor.
    """
    held = catalog.held
    both = [
        name
        for name, role in held
        if role == "master"
        and held[name, role].name == "float32"
        and held.get((name, "param")) is not None
        and held[name, "param"].name in ("bfloat16", "float16", "float32")
    ]
    size = {name: int(np.prod(catalog.tensors[name].shape)) for name in both}
    some = sorted(both, key=lambda name: (-size[name], name))[:TENSORS]
    if not some:
        return
    number = {tensor.name: k for k, tensor in enumerate(catalog.tensor_list)}
    tensor_of = catalog.segments.tensor[catalog.pieces.segment]
    role_of = catalog.entries.role[catalog.pieces.entry]
    for name in some:
        mine = tensor_of == number[name]
        masters = np.flatnonzero(mine & (role_of == ROLE_CODE["master"]))
        params = np.flatnonzero(mine & (role_of == ROLE_CODE["param"]))
        for piece in _spread(masters):
            axes = len(catalog.tensors[name].shape)
            point = catalog.pieces.hi[piece, :axes].astype(np.int64) - 1
            inside = [
                p
                for p in params.tolist()
                if np.all(catalog.pieces.lo[p, :axes] <= point)
                and np.all(point < catalog.pieces.hi[p, :axes])
            ]
            if inside and not _rounded(
                _element(store, catalog, piece, point), _element(store, catalog, inside[0], point)
            ):
                raise FormatError(
                    f"{catalog.where}: the optimizer's fp32 weights are not those of {name} ({catalog.describe_piece(piece)}). "
                    "Either its buffers were laid out for another model, layout or order of modules (give --config and "
                    "--source-layout), or megatron-core 0.16 shifted them, as it does where a buffer has several buckets. "
                    "For the weights alone, save it again with Megatron-LM's --no-save-optim",
                    tensor=name,
                )


def _spread(pieces: npt.NDArray[Any]) -> Sequence[int]:
    """A few pieces, from the first to the last."""
    return sorted(
        {int(pieces[k * (len(pieces) - 1) // max(1, ELEMENTS - 1)]) for k in range(ELEMENTS)}
        if len(pieces)
        else ()
    )


def _element(store: Store, catalog: Catalog, piece: int, point: npt.NDArray[np.int64]) -> tuple[str, bytes]:
    """The element type and bytes of one canonical element."""
    pieces, segments, entries = catalog.pieces, catalog.segments, catalog.entries
    s, e = int(pieces.segment[piece]), int(pieces.entry[piece])
    at = (
        int(segments.base[s]) + int((point * segments.strides[s, : len(point)]).sum()) - int(entries.first[e])
    )
    file, item = catalog.files[int(entries.file[e])], int(ITEMSIZE[entries.dtype[e]])
    return TABLE[entries.dtype[e]].name, store.read(
        file.path, file.data_start + int(entries.offset[e]) + at * item, item
    )


def _rounded(master: tuple[str, bytes], param: tuple[str, bytes]) -> bool:
    """Whether a parameter is its fp32 weight, rounded to nearest even."""
    kind, data = param
    value = np.frombuffer(master[1], "<f4")[0]
    if np.isnan(value):
        return True
    if kind == "float32":
        return data == master[1]
    if kind == "float16":
        with np.errstate(over="ignore"):
            return data == np.asarray(value, "<f2").tobytes()
    bits = int.from_bytes(master[1], "little")
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return int.from_bytes(data, "little") == rounded & 0xFFFF
