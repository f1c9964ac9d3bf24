"""What a native checkpoint says about itself, as columns: the common ground of rank headers and index.

Tensors, local tensors and their segments are numbered as the catalog lists those that are stored. A segment is
`(tensor, start, stop, offset, strides)`: its first element lies at flat position `offset` of the local tensor, and element `c`
`sum((c - start) * strides)` further on. The form is unique, so that equal layouts give equal bytes: strides of axes that do not
move are 0, unless the whole segment is *plain* (row-major from the start of the local tensor), when they are the row-major ones.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ckptkit.core.boxes import Box, row_major_strides
from ckptkit.core.catalog import I64, U32, Catalog, Entries, Extras, File, Leaves
from ckptkit.core.layouts import Layout
from ckptkit.core.schema import Model, Tensor
from ckptkit.core.views import LocalTensor, Segment

FLAGS = {"kind": "param", "optimizer": "adamw", "decay": True, "keep_fp32": False}
"""Attributes of a tensor that are written only where they differ from these."""


RANK_FILE = re.compile(r"rank-[0-9]{5,}\.safetensors")


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Parts:
    """Segments as columns, `[segments]` and `[segments, widest tensor]`; unused axes are 0:1 with stride 0."""

    local: U32
    tensor: U32
    offset: I64
    start: I64
    stop: I64
    strides: I64


@dataclass(frozen=True)
class Columns:
    """All of a native checkpoint but its bytes.

    Attributes:
        tensors: Stored tensors, in module order.
        keys, shapes: Of each local tensor.
        parts: Segments, sorted by local tensor.
        ranks, sizes, data_starts: Of each file.
        entries: Sorted by file and offset; `local` counts in `keys`.
    """

    tensors: list[Tensor]
    keys: list[str]
    shapes: list[tuple[int, ...]]
    parts: Parts
    ranks: I64
    sizes: I64
    data_starts: I64
    entries: Entries

    @classmethod
    def of(cls, catalog: Catalog) -> "Columns":
        """The columns of a laid-out catalog, without the tensors and local tensors that no entry uses."""
        entries = catalog.entries
        used = np.zeros(len(catalog.locals), bool)
        used[entries.local] = True
        segments = catalog.segments
        keep = np.flatnonzero(used[segments.local]) if len(segments) else np.zeros(0, np.int64)
        needed = np.zeros(len(catalog.tensors), bool)
        needed[segments.tensor[keep]] = True
        local_number, tensor_number = np.cumsum(used) - 1, np.cumsum(needed) - 1
        start, stop, strides = segments.start[keep], segments.stop[keep], segments.strides[keep]
        parts = unique_form(
            Parts(
                local_number[segments.local[keep]].astype(np.uint32),
                tensor_number[segments.tensor[keep]].astype(np.uint32),
                segments.base[keep] + (start * strides).sum(axis=1),
                start,
                stop,
                strides,
            )
        )
        numbered = Entries(
            entries.file, local_number[entries.local] if len(entries) else entries.local, entries.role, entries.dtype,
            entries.first, entries.last, entries.offset,
        )  # fmt: skip
        locals_ = [catalog.locals[k] for k in np.flatnonzero(used)]
        return cls(
            [catalog.tensor_list[k] for k in np.flatnonzero(needed)],
            [item.key for item in locals_],
            [item.shape for item in locals_],
            parts,
            np.asarray([file.rank for file in catalog.files], np.int64),
            np.asarray([file.size for file in catalog.files], np.int64),
            np.asarray([file.data_start for file in catalog.files], np.int64),
            numbered.take(np.lexsort((entries.offset, entries.file))),
        )

    @cached_property
    def plain(self) -> np.ndarray:
        """Whether each segment is plain (module docstring)."""
        parts = self.parts
        # Axes that do not move say nothing: those past a tensor's own have no stride in an index.
        moves = parts.stop - parts.start > 1
        return (parts.offset == 0) & np.all((parts.strides == _row_major(parts)) | ~moves, axis=1)

    @cached_property
    def parts_of_local(self) -> I64:
        """Local tensor `k` has the segments `parts_of_local[k]` up to `parts_of_local[k + 1]`."""
        return np.searchsorted(self.parts.local, np.arange(len(self.keys) + 1)).astype(np.int64)

    def locals(self) -> list[LocalTensor]:
        """The local tensors with their segments."""
        parts = self.parts
        rows = zip(
            parts.tensor.tolist(), parts.start.tolist(), parts.stop.tolist(), parts.offset.tolist(),
            parts.strides.tolist(), strict=True,
        )  # fmt: skip
        built = []
        for local, (tensor, start, stop, offset, strides) in zip(parts.local.tolist(), rows, strict=True):
            item = self.tensors[tensor]
            axes = len(item.shape)
            built.append(
                segment(item.name, start[:axes], stop[:axes], offset, strides[:axes], self.shapes[local])
            )
        edges = self.parts_of_local.tolist()
        return [
            LocalTensor(key, shape, tuple(built[a:b]))
            for key, shape, a, b in zip(self.keys, self.shapes, edges, edges[1:], strict=False)
        ]

    def catalog(
        self,
        *,
        where: str,
        layout: Layout,
        model: Model | None,
        names: str,
        extras: Callable[[], Extras],
        facts: Mapping[str, Any],
        leaves: Callable[[int], Leaves | None] | None,
        identities: Mapping[str, str],
    ) -> Catalog:
        """The catalog that these columns describe."""
        return Catalog(
            format="native",
            where=where,
            tensors={tensor.name: tensor for tensor in self.tensors},
            locals=self.locals(),
            files=[
                File(file_name(rank), size, start, rank)
                for rank, size, start in zip(
                    self.ranks.tolist(), self.sizes.tolist(), self.data_starts.tolist(), strict=True
                )
            ],
            entries=self.entries,
            layout=layout,
            model=model,
            names=names,
            extras=extras,
            facts=facts,
            leaves=leaves,
            identities=identities,
        )


def segment(
    tensor: str,
    start: Sequence[int],
    stop: Sequence[int],
    offset: int,
    strides: Sequence[int],
    shape: tuple[int, ...],
) -> Segment:
    """A segment from its flat form. Its affine map runs along the last axis of the local tensor, where steps are 1."""
    box = Box(tuple(start), tuple(stop))
    if not shape:
        return Segment(tensor, box, (-1,) * len(start), (0,) * len(start), ())
    last = len(shape) - 1
    return Segment(tensor, box, (last,) * len(start), tuple(strides), (*(0,) * last, offset))


def plain_strides(start: Sequence[int], stop: Sequence[int]) -> tuple[int, ...]:
    """Strides of a plain segment."""
    return row_major_strides(tuple(hi - lo for lo, hi in zip(start, stop, strict=True)))


def _row_major(parts: Parts) -> I64:
    """Row-major strides of each segment's box."""
    sizes = parts.stop - parts.start
    strides = np.ones_like(sizes)
    for axis in range(sizes.shape[1] - 2, -1, -1):
        strides[:, axis] = strides[:, axis + 1] * sizes[:, axis + 1]
    return strides


def unique_form(parts: Parts) -> Parts:
    """The same segments in the one form that is written."""
    sizes = parts.stop - parts.start
    natural = _row_major(parts)
    moves = sizes > 1
    empty = np.any(sizes == 0, axis=1)
    plain = empty | ((parts.offset == 0) & np.all((parts.strides == natural) | ~moves, axis=1))
    strides = np.where(plain[:, None], natural, np.where(moves, parts.strides, 0))
    return Parts(
        parts.local, parts.tensor, np.where(empty, 0, parts.offset), parts.start, parts.stop, strides
    )
