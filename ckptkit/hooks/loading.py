"""Loading straight from registered memory: the copy engine fills the tensors, and the device digests what arrived.

For leaves of a rank file that lie in a slot of this node and go to this rank's device as they are: a restart in the same layout. All other
leaves are read and checked by the host (`ckptkit.engine.fill`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ckptkit.core.catalog import LEAF, Catalog
from ckptkit.core.copies import Copies
from ckptkit.errors import CorruptionError
from ckptkit.hooks.buffers import HostBuffer, segments
from ckptkit.hooks.device import DeviceStreams
from ckptkit.hooks.holdings import Holding
from ckptkit.hooks.moving import SHIFTED, Ring, Snapshot, Streams, ring_nbytes
from ckptkit.hooks.parts import Part
from ckptkit.kernels.digest import as_bytes

I64 = npt.NDArray[np.int64]

BATCH = 64 * LEAF
"""Bytes of the first batch; each one after it has twice as many, since a batch costs the host time of its own."""


@dataclass(frozen=True)
class Direct:
    """The copies of one source file that can go directly, in order of their bytes in it, and the rows that they are.

    Attributes:
        tensors: Which each fills; `at`: from which of its bytes on.
        low, high: Bytes of the file.
    """

    rows: I64
    tensors: list[torch.Tensor]
    at: I64
    low: I64
    high: I64

    @property
    def nbytes(self) -> int:
        return int((self.high - self.low).sum())

    def parts(self, start: int, stop: int) -> list[Part]:
        """What lies in `[start, stop)` of the file, cut at its edges and those of registrations."""
        first, last = np.searchsorted(self.high, start, side="right"), np.searchsorted(self.low, stop)
        mine = slice(int(first), int(last))
        low, high = np.maximum(self.low[mine], start), np.minimum(self.high[mine], stop)
        at = self.at[mine] + low - self.low[mine]
        found = []
        for tensor, a, b, begin in zip(
            self.tensors[mine], low.tolist(), high.tolist(), at.tolist(), strict=True
        ):
            raw = as_bytes(tensor)
            for offset, nbytes in segments(a, b - a):
                shift = begin + offset - a
                found.append(Part(raw if nbytes == raw.numel() else raw[shift : shift + nbytes], offset))
        return found


def direct_rows(
    copies: Copies,
    source: Catalog,
    file: int,
    offsets: Sequence[int],
    holdings: Sequence[Holding],
    device: torch.device,
) -> Direct:
    """Which copies out of a file fill whole leaves' worth of tensors on a device, byte for byte.

    Args:
        offsets: Of each holding in the destination's file.
    """
    start = source.files[file].data_start
    size = source.files[file].size - start
    loops = np.prod(copies.shape, axis=1) if copies.shape.shape[1] else np.ones(len(copies), np.int64)
    rows = np.flatnonzero((copies.src_file == file) & (loops == 1) & (copies.src_dtype == copies.dst_dtype))
    entry = copies.dst_entry[rows]
    address = np.array([_address(h.tensor, device) for h in holdings], np.int64)[entry]
    at = copies.dst[rows] - np.asarray(offsets, np.int64)[entry]
    shifted = (address + at - (copies.src[rows] - start)) % 16 != 0
    rows = rows[(address >= 0) & ~(shifted & (copies.src_run[rows] > SHIFTED))]
    whole = _stored(source, file, size)
    while len(rows):
        low, high = copies.src[rows] - start, copies.src_end[rows] - start
        covered = _per_leaf(low, high, size) == whole
        gaps = np.concatenate([[0], np.cumsum(~covered)])
        inside = gaps[-(-high // LEAF)] == gaps[low // LEAF]
        if inside.all():
            break
        rows = rows[inside]
    rows = rows[np.argsort(copies.src[rows], kind="stable")]
    entry, low = copies.dst_entry[rows], copies.src[rows]
    tensors = [tensor for k in entry.tolist() if (tensor := holdings[k].tensor) is not None]
    at = copies.dst[rows] - np.asarray(offsets, np.int64)[entry]
    return Direct(rows, tensors, at, low, low + copies.src_run[rows])


def _address(tensor: torch.Tensor | None, device: torch.device) -> int:
    """Of a tensor that can be filled byte by byte on a device; else -1."""
    fits = tensor is not None and tensor.device == device and tensor.is_contiguous()
    return tensor.data_ptr() if tensor is not None and fits else -1


def _stored(source: Catalog, file: int, size: int) -> I64:
    """Bytes of entries in each leaf of a file; the rest is padding."""
    entries = source.entries
    mine = entries.file == file
    low = entries.offset[mine]
    return _per_leaf(low, low + entries.nbytes[mine], size)


def _per_leaf(low: I64, high: I64, size: int) -> I64:
    """How many bytes of some disjoint ranges lie in each leaf."""
    count = -(-size // LEAF)
    if not len(low):
        return np.zeros(count, np.int64)
    edges = np.arange(count + 1, dtype=np.int64) * LEAF
    order = np.argsort(low, kind="stable")
    low, high = low[order], high[order]
    total = np.concatenate([[0], np.cumsum(high - low)])
    # Bytes of all ranges below each edge.
    which = np.searchsorted(low, edges, side="right")
    reach = np.where(
        which > 0, np.minimum(high[np.maximum(which - 1, 0)], edges) - low[np.maximum(which - 1, 0)], 0
    )
    below = np.where(which > 0, total[np.maximum(which - 1, 0)] + np.maximum(reach, 0), 0)
    return np.diff(below).astype(np.int64)


def load(
    direct: Direct,
    buffer: HostBuffer,
    source: Catalog,
    file: int,
    device: torch.device,
    *,
    packs: bool | None = None,
    batch: int = BATCH,
) -> int:
    """Fill tensors from a mapped rank file, and check what arrived; gives the leaves that were compared.

    A batch's copies begin before its tables are made, and it is digested while the next one is copied; the host waits only at the end.

    Raises CorruptionError for a leaf that is not what its digest says. The tensors hold its bytes then.
    """
    if not len(direct.rows):
        return 0
    found = source.files[file]
    assert source.leaves is not None
    leaves = source.leaves(file)
    assert leaves is not None
    size = found.size - found.data_start
    streams: Streams = DeviceStreams(device, False) if device.type == "cuda" else Streams()
    compared: list[tuple[I64, torch.Tensor]] = []
    streams.begin()
    with streams.packing():
        ring = Ring(device, ring_nbytes(size))  # before anything that its memory could have been of
        for low, high in batches(size, batch):
            parts = direct.parts(found.data_start + low, found.data_start + high)
            snapshot = Snapshot(parts, device, found.data_start, size, packs=packs, ring=ring)
            compared.append((snapshot.device_leaves, snapshot.load(buffer, leaves.digests, streams)))
    streams.end()
    wrong = [int(leaf) for which, good in compared for leaf in which[~good.cpu().numpy()]]
    if wrong:
        raise CorruptionError(
            f"leaf {wrong[0]} of {found.path} in {source.where} (and {len(wrong) - 1} more) arrived on {device} otherwise than its digest "
            "says",
            file=found.path,
            leaf=wrong[0],
        )
    return sum(len(which) for which, _ in compared)


def batches(size: int, first: int = BATCH) -> Iterator[tuple[int, int]]:
    """The leaves of a file in batches that grow, as bytes `[low, high)` of its data."""
    low, step = 0, first
    while low < size:
        yield low, min(low + step, size)
        low, step = low + step, 2 * step
