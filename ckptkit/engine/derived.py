"""Derived regions: values that need several inputs, made while they are read.

A block-scaled weight (`value[.., i, j] = weight[.., i, j] · scale[.., i // rows, j // columns]`) is a virtual file of row-major float32 beside
the real ones; everything else takes it for any other file. It is read-only, and costs the memory of a few rows.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from ckptkit.core.catalog import ITEMSIZE, Derived, Scaled
from ckptkit.core.dtypes import BY_NAME
from ckptkit.engine.convert import convert
from ckptkit.errors import FormatError
from ckptkit.stores.base import Reader, Store, Virtual

_FLOAT32 = BY_NAME["float32"].code
_AT_ONCE = 1 << 18  # elements that are made at a time


class DerivedStore(Store):
    """A store with virtual files beside its own.

    Args:
        store: Holds the inputs.
        derived: By path of the virtual file.
    """

    def __init__(self, store: Store, derived: Mapping[str, Derived]) -> None:
        self._store, self._derived = store, dict(derived)
        self.url, self.parallel = store.url, store.parallel

    def files(self) -> Sequence[str]:
        """The real files alone: virtual ones are no part of the checkpoint."""
        return self._store.files()

    def exists(self, path: str) -> bool:
        return path in self._derived or self._store.exists(path)

    def size(self, path: str) -> int:
        found = self._derived.get(path)
        return self._store.size(path) if found is None else found.nbytes

    def identity(self, path: str) -> str:
        found = self._derived.get(path)
        return self._store.identity(path) if found is None else found.identity(self._store.identity)

    def open(self, path: str) -> Reader:
        found = self._derived.get(path)
        if isinstance(found, Scaled):
            return _ScaledReader(self._store, path, found)
        return found.open(self._store, path) if isinstance(found, Virtual) else self._store.open(path)

    def local_path(self, path: str) -> str | None:
        return None if path in self._derived else self._store.local_path(path)


class _ScaledReader(Reader):
    """A block-scaled weight as float32. Scales are read when it is opened."""

    def __init__(self, store: Store, path: str, scaled: Scaled) -> None:
        self.size = scaled.nbytes
        self._path, self._scaled = path, scaled
        self._columns = scaled.shape[-1]
        blocks = scaled.scale_shape
        count = prod(blocks)
        data = store.read(*scaled.scale, count * int(ITEMSIZE[scaled.scale_dtype]))
        self._scales = _float32(np.frombuffer(data, np.uint8), scaled.scale_dtype).reshape(-1, blocks[-1])
        self._scale_rows = blocks[-2]  # of each matrix of a stack
        self._weights = store.open(scaled.weight[0])

    def close(self) -> None:
        self._weights.close()

    def readinto(self, offset: int, buffer: memoryview) -> None:
        nbytes = buffer.nbytes
        if offset < 0 or offset + nbytes > self.size:
            raise FormatError(
                f"{self._path} ends at byte {self.size}, not {offset + nbytes}", file=self._path
            )
        out = np.frombuffer(buffer, np.uint8)
        first, last = offset // 4, -(-(offset + nbytes) // 4)
        while first < last:
            count = min(last - first, _AT_ONCE)
            made = self._make(first, count).view(np.uint8)
            skip = max(offset - first * 4, 0)
            at = max(first * 4 - offset, 0)
            part = made[skip : skip + nbytes - at]
            out[at : at + len(part)] = part
            first += count

    def _make(self, first: int, count: int) -> npt.NDArray[np.float32]:
        """Elements `[first, first + count)`, row-major."""
        scaled, columns = self._scaled, self._columns
        item = int(ITEMSIZE[scaled.dtype])
        raw = bytearray(count * item)
        self._weights.readinto(scaled.weight[1] + first * item, memoryview(raw))
        values = _float32(np.frombuffer(raw, np.uint8), scaled.dtype)
        at = np.arange(first, first + count)
        row, column = np.divmod(at, columns)
        matrix, row = np.divmod(row, scaled.shape[-2])
        block = matrix * self._scale_rows + row // scaled.block[0]
        with np.errstate(all="ignore"):  # NaN and infinity are values as any other
            found: npt.NDArray[np.float32] = values * self._scales[block, column // scaled.block[1]]
        return found


def _float32(data: npt.NDArray[np.uint8], dtype: int) -> npt.NDArray[np.float32]:
    bits = np.ascontiguousarray(data).view(f"V{ITEMSIZE[dtype]}")
    return np.ascontiguousarray(convert(bits, dtype, _FLOAT32)).view(np.float32)
