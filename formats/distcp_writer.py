"""Writing `.distcp` files: items one after the other in their ranks' files, each noted in the index."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ckptkit.core.catalog import Entries, File
from ckptkit.core.destination import Fixup, Literal
from ckptkit.core.dtypes import DType
from ckptkit.formats.dcp_metadata import Chunk, Index, Item, Stored
from ckptkit.formats.plain import TensorValue
from ckptkit.formats.standins import Storage, StoredTensor
from ckptkit.formats.torch_zip_writer import ALIGN, Skeleton, skeleton

Path = tuple[str | int, ...]


class _File:
    """A `.distcp` file as it grows."""

    def __init__(self) -> None:
        self.size = 0
        self.literals: list[Literal] = []
        self.fixups: list[Fixup] = []


class ItemWriter:
    """Decides where every item goes.

    Attributes:
        index: What the metadata will say.
    """

    def __init__(self) -> None:
        self.index = Index()
        self._files: dict[int, _File] = {}
        self._order: list[int] = []  # entries, file by file
        self._offset: list[int] = []

    def object(self, rank: int, key: str, value: Any, path: Path | None = None) -> None:
        """Any value that a pickle of ours can hold."""
        self.index.objects[key] = self._add(rank, skeleton(value, start=self._place(rank)))
        if path is not None:
            self.index.paths[key] = path

    def scalar(self, rank: int, key: str, value: TensorValue, path: Path | None = None) -> None:
        """A tensor with its content."""
        item = self._add(rank, skeleton(value, start=self._place(rank)))
        start = (0,) * len(value.shape)
        self.index.tensors[key] = Stored(value.dtype, value.shape, [Chunk(start, value.shape, item)])
        if path is not None:
            self.index.paths[key] = path

    def box(
        self, rank: int, entry: int, key: str, dtype: DType, shape: Sequence[int], start: Sequence[int],
        sizes: Sequence[int], path: Path | None = None,
    ) -> None:  # fmt: skip
        """A box of a tensor of `shape`, whose bytes are those of an entry."""
        made = _tensor_zip(dtype, tuple(sizes)).moved(self._place(rank))
        stored = self.index.tensors.setdefault(key, Stored(dtype, tuple(shape), []))
        stored.chunks.append(Chunk(tuple(start), tuple(sizes), self._add(rank, made)))
        if path is not None:
            self.index.paths[key] = path
        self._order.append(entry)
        self._offset.append(made.data[0])

    def tie(self, key: str, original: str, path: Path | None = None) -> None:
        """A further key for a tensor, in the same items. Nothing where it has one already, or the original is not stored."""
        stored = self.index.tensors.get(original)
        if stored is not None and key not in self.index.tensors:
            self.index.tensors[key] = Stored(stored.dtype, stored.shape, list(stored.chunks))
            if path is not None:
                self.index.paths[key] = path

    @property
    def ranks(self) -> list[int]:
        """Ranks that have a file."""
        return sorted(self._files)

    def files(self, prefix: str = "") -> list[File]:
        return [File(prefix + path_of(rank), self._files[rank].size, 0, rank) for rank in self.ranks]

    def literals(self) -> dict[int, Sequence[Literal]]:
        return {k: self._files[rank].literals for k, rank in enumerate(self.ranks)}

    def fixups(self) -> dict[int, Sequence[Fixup]]:
        return {k: self._files[rank].fixups for k, rank in enumerate(self.ranks)}

    def placed(self, entries: Entries) -> Entries:
        """The entries that became boxes, with their places; `entries.file` are ranks."""
        number = np.zeros(max(self.ranks, default=0) + 1, np.uint32)
        number[self.ranks] = np.arange(len(self.ranks))
        found = entries.take(np.asarray(self._order, np.int64))
        found.file = number[found.file]
        found.offset = np.asarray(self._offset, np.int64)
        return found

    def _add(self, rank: int, made: Skeleton) -> Item:
        file = self._files[rank]
        start = self._place(rank)
        file.literals += made.literals
        file.fixups += made.fixups
        file.size = start + made.size
        return Item(path_of(rank), start, made.size)

    def _place(self, rank: int) -> int:
        """Where the next zip begins: aligned, so that payloads are."""
        return -(-self._files.setdefault(rank, _File()).size // ALIGN) * ALIGN


def path_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


@lru_cache(maxsize=1 << 16)
def _tensor_zip(dtype: DType, sizes: tuple[int, ...]) -> Skeleton:
    """The zip of one tensor, at the start of a file."""
    nbytes = prod(sizes) * dtype.itemsize
    return skeleton(StoredTensor(Storage("0", dtype, nbytes), dtype, 0, sizes, _strides(sizes)), [nbytes])


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides as torch states them: those of empty tensors as if sizes were one."""
    strides = [1] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(sizes[axis + 1], 1)
    return tuple(strides)
