"""Real bytes for catalogs: entries placed in files, pieces and copies carried out one element at a time."""

from collections.abc import Mapping

import numpy as np

from ckptkit.core.catalog import ROLES, Catalog
from ckptkit.core.copies import Copies
from ckptkit.core.dtypes import TABLE

UNSET = 0xAB
"""What destination files hold before any copy, and padding holds after all of them."""

Truth = Mapping[tuple[str, str], np.ndarray]


def place(catalog: Catalog, gap: int = 8) -> list[np.ndarray]:
    """Give every entry an offset, with gaps between, and every file a data start; returns the files, unset."""
    entries = catalog.entries
    for number, file in enumerate(catalog.files):
        file.path = f"file-{number}"
        file.data_start = 16 * (number % 3)
        end = 0
        for entry in np.flatnonzero(entries.file == number):
            entries.offset[entry] = end
            end += int(entries.nbytes[entry]) + gap
        file.size = file.data_start + end
    return [np.full(file.size, UNSET, np.uint8) for file in catalog.files]


def entry_bytes(catalog: Catalog, files: list[np.ndarray], entry: int) -> np.ndarray:
    """The bytes of one entry, as a view of its file."""
    entries = catalog.entries
    file = int(entries.file[entry])
    start = catalog.files[file].data_start + int(entries.offset[entry])
    return files[file][start : start + int(entries.nbytes[entry])]


def by_pieces(catalog: Catalog, entry: int, truth: Truth) -> np.ndarray:
    """One entry's bytes as its pieces tell, each element put where the piece's map says; UNSET where none is."""
    entries, pieces, segments = catalog.entries, catalog.pieces, catalog.segments
    dtype = np.dtype(TABLE[entries.dtype[entry]].name)
    first, last = int(entries.first[entry]), int(entries.last[entry])
    found = np.full((last - first) * dtype.itemsize, UNSET, np.uint8).view(dtype)
    taken = np.zeros(last - first, bool)
    for piece in np.flatnonzero(pieces.entry == entry):
        segment = int(pieces.segment[piece])
        tensor = catalog.tensor_list[int(segments.tensor[segment])]
        axes = len(tensor.shape)
        lo, hi = pieces.lo[piece, :axes], pieces.hi[piece, :axes]
        assert np.all(pieces.lo[piece, axes:] == 0) and np.all(pieces.hi[piece, axes:] == 1)
        assert np.all(lo < hi) and np.all(hi <= tensor.shape) and np.all(lo >= 0)
        grid = np.indices(tuple(hi - lo)).reshape(axes, int(np.prod(hi - lo))).astype(np.int64) + lo[:, None]
        position = segments.base[segment] + segments.strides[segment, :axes] @ grid - first
        assert np.all((position >= 0) & (position < last - first)), "a piece leaves its entry"
        assert len(np.unique(position)) == position.size and not taken[position].any(), (
            "two elements in one place"
        )
        taken[position] = True
        found[position] = truth[tensor.name, ROLES[entries.role[entry]]][tuple(grid)]
    return found.view(np.uint8)


def carry_out(copies: Copies, source: list[np.ndarray], destination: list[np.ndarray]) -> list[np.ndarray]:
    """Do the copies run by run, and count how often each destination byte is written."""
    written = [np.zeros(len(file), np.uint8) for file in destination]
    for k in range(len(copies)):
        src, dst = source[copies.src_file[k]], destination[copies.dst_file[k]]
        reads, writes = [], []
        for index in np.ndindex(*copies.shape[k]):
            a = int(copies.src[k] + np.dot(index, copies.src_strides[k]))
            b = int(copies.dst[k] + np.dot(index, copies.dst_strides[k]))
            dst[b : b + copies.dst_run[k]] = src[a : a + copies.src_run[k]]
            written[copies.dst_file[k]][b : b + copies.dst_run[k]] += 1
            reads.append(a + int(copies.src_run[k]))
            writes.append(b + int(copies.dst_run[k]))
        assert (max(reads), max(writes)) == (copies.src_end[k], copies.dst_end[k])
    return written
