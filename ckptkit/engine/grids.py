"""Grids: files cut into numbered cells of equal size.

Cells count from a file's data start, so that they are whole leaves where digests are; what lies before it (the
header) has cells of its own. The last cell of each part is short.
"""

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


class Grid:
    """Cells of many files, numbered through.

    Args:
        sizes, origins: Bytes of each file, and where its cells count from.
        cell: Bytes of a cell.
    """

    __slots__ = ("_first", "_head", "bytes", "cells", "origins", "sizes")

    def __init__(self, sizes: I64, origins: I64, cell: int) -> None:
        self.sizes, self.origins, self.bytes = sizes, np.minimum(origins, sizes), cell
        self._head = -(-self.origins // cell)
        count = self._head + -(-(sizes - self.origins) // cell)
        self._first = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        self.cells = int(self._first[-1])

    def cell(self, file: npt.NDArray[np.integer], offset: I64) -> I64:
        """The cell that holds each byte. Bytes past the end of a file have no meaningful answer."""
        origin = self.origins[file]
        inside = self._head[file] + (offset - origin) // self.bytes
        local: I64 = np.where(offset < origin, offset // self.bytes, inside)
        return self._first[file] + local

    def file(self, cell: I64) -> I64:
        """The file of each cell."""
        return np.searchsorted(self._first, cell, side="right") - 1

    def bounds(self, cell: I64) -> tuple[I64, I64]:
        """First byte of each cell in its file, and one past the last."""
        file = self.file(cell)
        local = cell - self._first[file]
        origin, head = self.origins[file], self._head[file]
        header = local < head
        start = np.where(header, local * self.bytes, origin + (local - head) * self.bytes)
        return start, np.minimum(start + self.bytes, np.where(header, origin, self.sizes[file]))

    def of_file(self, file: int) -> range:
        """The cells of one file, in order."""
        return range(int(self._first[file]), int(self._first[file + 1]))
