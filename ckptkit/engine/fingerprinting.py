"""Fingerprints of what is written, taken while its bytes are hot.

Which canonical boxes lie in which cell of a file is known before: the runs of every entry are cut at cells and then into boxes, all
at once. What is left for each cell is one sum a box (`ckptkit.core.fingerprints`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ckptkit.core.boxes import ranges
from ckptkit.core.catalog import ITEMSIZE, ROLES, Catalog
from ckptkit.core.fingerprints import MASK, axis_names, axis_words, sum_of, unsigned
from ckptkit.core.pieces import cut_entries
from ckptkit.core.replicas import shared_tensors
from ckptkit.engine.grids import Grid

Sums = dict[int, int]
"""By `tensor * len(ROLES) + role`, with the catalog's tensor numbers: parts of fingerprints."""


class Prints:
    """What cells of a grid add to the fingerprints of a catalog's tensors.

    Tensors of which elements may be stored twice are left out: their parts do not add up.

    Args:
        catalog: Laid out. Entries are aligned to their item size, and so are cells.
        grid: Of the catalog's files.
        wanted: By cell: whether `of` will be asked.
    """

    def __init__(self, catalog: Catalog, grid: Grid, wanted: npt.NDArray[np.bool_]) -> None:
        entries, segments = catalog.entries, catalog.segments
        self._catalog = catalog
        self._names = [axis_names(tensor.axes) for tensor in catalog.tensor_list]
        starts = np.asarray([file.data_start for file in catalog.files], np.int64)
        at = entries.offset + starts[entries.file]
        full = np.flatnonzero(entries.last > entries.first)
        file = entries.file[full]
        low, high = grid.cell(file, at[full]), grid.cell(file, at[full] + entries.nbytes[full] - 1)
        which, cell = ranges(low, high - low + 1)
        keep = wanted[cell]
        entry, cell = full[which[keep]], cell[keep]
        begin, end = grid.bounds(cell)
        item: npt.NDArray[np.int64] = ITEMSIZE[entries.dtype[entry]]
        skipped: npt.NDArray[np.int64] = np.maximum(begin - at[entry], 0)
        first = entries.first[entry] + skipped // item
        last = np.minimum(entries.first[entry] + -(-(end - at[entry]) // item), entries.last[entry])
        sizes = np.asarray([local.size for local in catalog.locals], np.int64)
        wide = np.int64 if any(max(t.shape, default=0) >= 1 << 31 for t in catalog.tensor_list) else np.int32
        boxes = cut_entries(segments, sizes, entries.local[entry], first, last, wide)
        tensor = segments.tensor[boxes.segment].astype(np.int64)
        once = ~shared_tensors(catalog)[tensor]
        boxes, tensor = boxes.take(once), tensor[once]
        row = boxes.entry  # a position in `entry` and `cell`
        strides = segments.strides[boxes.segment]
        place = segments.base[boxes.segment] + (boxes.lo * strides).sum(axis=1) - entries.first[entry[row]]
        order = np.argsort(cell[row], kind="stable")
        self._tensor, self._lo, self._hi = tensor[order], boxes.lo[order], boxes.hi[order]
        self._key = (tensor * len(ROLES) + entries.role[entry[row]])[order]
        self._item = item[row][order]
        self._strides = (strides * item[row][:, None])[order]
        self._at = (at[entry[row]] + place * item[row])[order]
        self._first = np.searchsorted(cell[row][order], np.arange(grid.cells + 1))

    def of(self, cell: int, start: int, data: memoryview) -> Sums:
        """The sums of one cell, whose bytes in the file are `data`, from `start` on."""
        first, last = int(self._first[cell]), int(self._first[cell + 1])
        found: Sums = defaultdict(int)
        if first == last:
            return found
        columns = (self._key, self._tensor, self._at, self._item, self._lo, self._hi, self._strides)
        for key, tensor, at, item, lo, hi, strides in zip(
            *(c[first:last].tolist() for c in columns), strict=True
        ):
            names = self._names[tensor]
            axes = len(names)
            shape = [b - a for a, b in zip(lo[:axes], hi[:axes], strict=True)]
            bits = np.ndarray(shape, unsigned(item), data, at - start, strides[:axes])
            words = [axis_words(n, a, b) for n, a, b in zip(names, lo, hi, strict=False)]
            found[key] = found[key] + sum_of(bits, words) & MASK
        return found


def total(parts: Sequence[Mapping[int, int]]) -> Sums:
    """Parts of fingerprints, added up."""
    found: Sums = defaultdict(int)
    for part in parts:
        for key, value in part.items():
            found[key] = found[key] + value & MASK
    return dict(found)


def named(catalog: Catalog, sums: Mapping[int, int]) -> dict[tuple[str, str], int]:
    """Sums by `(tensor, role)`."""
    found = {}
    for key, value in sums.items():
        tensor, role = divmod(key, len(ROLES))
        found[catalog.tensor_list[tensor].name, ROLES[role]] = value
    return found
