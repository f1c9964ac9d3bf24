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
from ckptkit.hooks.buffers import HostBuffer
from ckptkit.hooks.device import DeviceStreams
from ckptkit.hooks.holdings import Holding
from ckptkit.hooks.moving import SHIFTED, Part, Snapshot, Streams

I64 = npt.NDArray[np.int64]

BATCH = 64 * LEAF
"""Bytes of whole leaves in the first batch; each one after it has twice as many, since a batch costs the host time of its own."""


@dataclass(frozen=True)
class Direct:
    """The copies of one source file that can go directly, and the rows that they are."""

    rows: I64
    parts: list[Part]


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
    flat = (copies.src_file == file) & (loops == 1) & (copies.src_dtype == copies.dst_dtype)
    kept = []
    for row in np.flatnonzero(flat).tolist():
        tensor = holdings[int(copies.dst_entry[row])].tensor
        assert tensor is not None
        if tensor.device != device or not tensor.is_contiguous():
            continue
        at = int(copies.dst[row]) - offsets[int(copies.dst_entry[row])]
        shift = (tensor.data_ptr() + at - (int(copies.src[row]) - start)) % 16
        if not shift or int(copies.src_run[row]) <= SHIFTED:
            kept.append(row)
    rows = np.asarray(kept, np.int64)
    whole = _stored(source, file, size)
    while len(rows):
        low, high = copies.src[rows] - start, copies.src_end[rows] - start
        covered = _per_leaf(low, high, size) == whole
        gaps = np.concatenate([[0], np.cumsum(~covered)])
        inside = gaps[-(-high // LEAF)] == gaps[low // LEAF]
        if inside.all():
            break
        rows = rows[inside]
    parts = []
    for row in rows.tolist():
        entry = int(copies.dst_entry[row])
        tensor = holdings[entry].tensor
        assert tensor is not None
        at, nbytes = int(copies.dst[row]) - offsets[entry], int(copies.src_run[row])
        raw = tensor.reshape(-1).view(torch.uint8)[at : at + nbytes]
        parts.append(Part(raw, int(copies.src[row]), nbytes, (nbytes,), False))
    return Direct(rows, sorted(parts, key=lambda part: part.offset))


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
) -> int:
    """Fill tensors from a mapped rank file, and check what arrived; gives the leaves that were compared.

    Raises CorruptionError for a leaf that is not what its digest says. The tensors hold its bytes then.
    """
    found = source.files[file]
    assert source.leaves is not None
    leaves = source.leaves(file)
    assert leaves is not None
    expected = torch.from_numpy(np.array(leaves.digests))
    streams: Streams = DeviceStreams(device, False) if device.type == "cuda" else Streams()
    streams.begin()
    begun: list[tuple[Snapshot, torch.Tensor]] = []
    for parts in _batches(direct.parts, found.data_start):
        with streams.making_tables():  # of a batch while the one before is copied
            snapshot = Snapshot(parts, device, found.data_start, found.size - found.data_start, packs=packs)
            wanted = snapshot.wanted(expected)
        with streams.packing():
            begun.append((snapshot, snapshot.load(buffer, wanted, streams)))
    streams.end()
    wrong = [
        int(leaf)
        for snapshot, good in begun
        for leaf in snapshot.device_leaves[~good.cpu().numpy().astype(bool)]
    ]
    if wrong:
        raise CorruptionError(
            f"leaf {wrong[0]} of {found.path} in {source.where} (and {len(wrong) - 1} more) arrived on {device} otherwise than its digest "
            "says",
            file=found.path,
            leaf=wrong[0],
        )
    return sum(len(snapshot.device_leaves) for snapshot, _ in begun)


def _batches(parts: Sequence[Part], start: int) -> Iterator[list[Part]]:
    """Parts of whole leaves in batches that grow, then all others, whose leaves several of them may share."""
    batch: list[Part] = []
    rest: list[Part] = []
    held, size = 0, BATCH
    for part in parts:
        if (part.offset - start) % LEAF or part.nbytes % LEAF:
            rest.append(part)
            continue
        batch.append(part)
        held += part.nbytes
        if held >= size:
            yield batch
            batch, held, size = [], 0, 2 * size
    for last in (batch, rest):
        if last:
            yield last
