"""Copies: what the engine moves into one destination file, as strided loops over bytes.

Each row is one overlap of a source piece with a destination piece: for every index of `shape`, `run` bytes (`width`
source bytes when values are cast) at `src + index . src_strides` go to `dst + index . dst_strides`. Loops are normal:
destination strides descend, axes of length one are gone, and axes that are contiguous on both sides are merged, so that
most rows have no loop at all.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.core.catalog import ITEMSIZE, Catalog
from ckptkit.core.pieces import Pieces
from ckptkit.core.plan import Plan

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copies:
    """Columns of strided copies, sorted by destination offset. All offsets and strides in bytes.

    Attributes:
        src_file, dst_file: File numbers in the source and destination catalogs.
        src, dst: Offset of the first element in its file.
        src_run, dst_run: Contiguous bytes per innermost step; they differ only where values are cast.
        shape, src_strides, dst_strides: Loops around the run, `[copies, loops]`, outermost first, unused loops 1 and 0.
        src_dtype, dst_dtype: Dtype codes; equal unless values are cast.
        src_entry, dst_entry: Entry numbers, for messages.
        src_end: One past the last source byte that the copy reads.
        dst_end: One past the last destination byte that it writes.
    """

    src_file: npt.NDArray[np.uint32]
    dst_file: npt.NDArray[np.uint32]
    src: I64
    dst: I64
    src_run: I64
    dst_run: I64
    shape: I64
    src_strides: I64
    dst_strides: I64
    src_dtype: npt.NDArray[np.uint8]
    dst_dtype: npt.NDArray[np.uint8]
    src_entry: npt.NDArray[np.uint32]
    dst_entry: npt.NDArray[np.uint32]
    src_end: I64
    dst_end: I64

    def __len__(self) -> int:
        return len(self.src)

    def take(self, index: npt.NDArray[np.integer] | slice) -> "Copies":
        return Copies(*(getattr(self, name)[index] for name in self.__slots__))


def copies_into(plan: Plan, files: npt.NDArray[np.integer] | None = None) -> Copies:
    """The copies that fill some destination files (all unless given), sorted by file and destination offset."""
    pairs = np.arange(len(plan.dst)) if files is None else plan.pairs_into(np.asarray(files, np.int64))
    destination = plan.destination
    s, d = plan.source_pieces.take(plan.src[pairs]), destination.pieces.take(plan.dst[pairs])
    return strided(plan.source, s, destination, d)


def replica_pairs(plan: Plan) -> Copies:
    """Replicas to compare, as copies from the kept piece (src) to the other (dst); both lie in the source."""
    kept, other = plan.replicas
    pieces = plan.source.pieces
    return strided(plan.source, pieces.take(kept), plan.source, pieces.take(other))


def strided(source: Catalog, s: Pieces, destination: Catalog, d: Pieces) -> Copies:
    """Row by row, the overlap of `s` with `d` as a strided copy."""
    width = max(s.lo.shape[1], d.lo.shape[1])
    s_lo, s_hi = _widen(s.lo, width, 0), _widen(s.hi, width, 1)
    d_lo, d_hi = _widen(d.lo, width, 0), _widen(d.hi, width, 1)
    lo = np.maximum(s_lo, d_lo)
    shape = np.minimum(s_hi, d_hi) - lo
    src, src_strides, src_item = _address(source, s, lo)
    dst, dst_strides, dst_item = _address(destination, d, lo)
    se, de = source.entries, destination.entries
    shape, src_strides, dst_strides, src_run, dst_run = normal_form(
        shape, src_strides, dst_strides, src_item, dst_item
    )
    src_end = src + src_run + ((shape - 1) * src_strides).sum(axis=1)
    dst_end = dst + dst_run + ((shape - 1) * dst_strides).sum(axis=1)
    found = Copies(
        se.file[s.entry], de.file[d.entry], src, dst, src_run, dst_run, shape, src_strides, dst_strides,
        se.dtype[s.entry], de.dtype[d.entry], s.entry, d.entry, src_end, dst_end,
    )  # fmt: skip
    return found.take(np.lexsort((found.dst, found.dst_file)))


def _address(catalog: Catalog, pieces: Pieces, lo: I64) -> tuple[I64, I64, I64]:
    """Byte offset of element `lo` in its file, byte strides, and item size, of each piece."""
    entries, segments = catalog.entries, catalog.segments
    item = ITEMSIZE[entries.dtype[pieces.entry]]
    strides = _widen(segments.strides[pieces.segment], lo.shape[1], 0)
    start = np.asarray([file.data_start for file in catalog.files], np.int64)[entries.file[pieces.entry]]
    position = segments.base[pieces.segment] + (lo * strides).sum(axis=1) - entries.first[pieces.entry]
    return start + entries.offset[pieces.entry] + position * item, strides * item[:, None], item


def _widen(columns: npt.NDArray[np.signedinteger], width: int, fill: int) -> I64:
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])), constant_values=fill).astype(np.int64)


def normal_form(
    shape: I64, src_strides: I64, dst_strides: I64, src_item: I64, dst_item: I64
) -> tuple[I64, I64, I64, I64, I64]:
    """Sort loops by destination stride, drop loops of one step, merge what is contiguous on both sides."""
    rows, width = shape.shape
    single = shape == 1
    src_strides = np.where(single, 0, src_strides)
    dst_strides = np.where(single, 0, dst_strides)
    order = np.argsort(np.where(single, np.iinfo(np.int64).max, -dst_strides), axis=1, kind="stable")
    shape, src_strides, dst_strides = (
        np.take_along_axis(x, order, 1) for x in (shape, src_strides, dst_strides)
    )
    src_run, dst_run = src_item.copy(), dst_item.copy()
    out_shape = np.ones_like(shape)
    out_src, out_dst = np.zeros_like(shape), np.zeros_like(shape)
    # Build from the innermost loop outwards: extend the run, else the loop built last, else open a new loop.
    depth = np.zeros(rows, np.int64)
    index = np.arange(rows)
    for axis in range(width - 1, -1, -1):
        n, s, d = shape[:, axis], src_strides[:, axis], dst_strides[:, axis]
        real = n > 1
        none = depth == 0
        into_run = real & none & (s == src_run) & (d == dst_run)
        src_run = np.where(into_run, src_run * n, src_run)
        dst_run = np.where(into_run, dst_run * n, dst_run)
        top = np.maximum(depth - 1, 0)
        extent = out_shape[index, top]
        into_loop = real & ~none & (s == extent * out_src[index, top]) & (d == extent * out_dst[index, top])
        out_shape[index, top] = np.where(into_loop, extent * n, extent)
        fresh = real & ~into_run & ~into_loop
        where = np.flatnonzero(fresh)
        out_shape[where, depth[where]] = n[where]
        out_src[where, depth[where]] = s[where]
        out_dst[where, depth[where]] = d[where]
        depth = depth + fresh
    used = max(int(depth.max()) if rows else 0, 0)
    # Loops were opened innermost first; turn them round, so that the outermost comes first.
    flip = np.where(
        np.arange(used)[None, :] < depth[:, None],
        depth[:, None] - 1 - np.arange(used)[None, :],
        np.arange(used),
    )
    return (
        np.take_along_axis(out_shape[:, :used], flip, 1),
        np.take_along_axis(out_src[:, :used], flip, 1),
        np.take_along_axis(out_dst[:, :used], flip, 1),
        src_run,
        dst_run,
    )
