"""The items of `.distcp` files: where the tensor inside each zip lies, and what its objects are.

A large checkpoint has 10^5 items of a few shapes. Zips of equal shape, written by one program, begin with the same bytes, so
that one is read in full and the others are compared with it up to their payload.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ckptkit.core.catalog import Checksum
from ckptkit.core.dtypes import DType
from ckptkit.errors import FormatError
from ckptkit.formats.dcp_metadata import Index, Item, items_by_file
from ckptkit.formats.plain import to_plain
from ckptkit.formats.standins import StoredTensor
from ckptkit.formats.torch_zip import open_archive, zip_checksums
from ckptkit.stores.base import Reader, Store


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor item, and what the metadata says is in it."""

    key: str
    item: Item
    dtype: DType
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Where a tensor's first element is in its file, and its strides where they are not row-major."""

    offset: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Likeness:
    """A zip's bytes up to its payload, but for a checksum that tells the contents apart."""

    head: bytes
    crc: int

    def same(self, head: bytes) -> bool:
        return head[: self.crc] == self.head[: self.crc] and head[self.crc + 4 :] == self.head[self.crc + 4 :]


def locate(store: Store, wanted: Sequence[Wanted]) -> list[Found]:
    """Where each tensor lies, in the order asked for. Files are read in parallel.

    Raises:
        FormatError: an item holds no tensor, or another than the metadata says.
    """
    by_file: dict[str, list[int]] = {}
    for number, one in enumerate(wanted):
        by_file.setdefault(one.item.path, []).append(number)
    found: list[Found] = [Found(0)] * len(wanted)
    known: dict[tuple[DType, tuple[int, ...], int], _Likeness] = {}

    def of_file(path: str) -> None:
        with store.open(path) as reader:
            for number in by_file[path]:
                found[number] = _locate(reader, wanted[number], known)

    with ThreadPoolExecutor(max(1, min(store.parallel, len(by_file)))) as pool:
        list(pool.map(of_file, by_file))
    return found


def _locate(reader: Reader, one: Wanted, known: dict[tuple[DType, tuple[int, ...], int], _Likeness]) -> Found:
    item = one.item
    kind = one.dtype, one.sizes, item.length
    like = known.get(kind)
    if like is not None and item.offset + item.length <= reader.size:
        head = bytearray(len(like.head))
        reader.readinto(item.offset, memoryview(head))
        if like.same(bytes(head)):
            return Found(item.offset + len(head))
    where = f"{one.key!r} in {item.path}"
    archive = open_archive(reader, where, item.offset, item.length)
    tensor = archive.value
    if not isinstance(tensor, StoredTensor):
        raise FormatError(
            f"{where} should be a tensor, but is a {type(tensor).__name__}", file=item.path, tensor=one.key
        )
    if tensor.dtype is not one.dtype or tensor.shape != one.sizes:
        raise FormatError(
            f"{where} is {tensor.dtype} {tensor.shape}, but the metadata says {one.dtype} {one.sizes}",
            file=item.path,
            tensor=one.key,
        )
    offset = archive.place(tensor)
    if not tensor.contiguous:
        return Found(offset, tensor.strides)
    member = archive.members[f"data/{tensor.storage.key}"]
    if tensor.offset == 0:
        head_ = archive.window.read(item.offset, member.start - item.offset)
        known[kind] = _Likeness(head_, member.header + 14 - item.offset)
    return Found(offset)


def load_objects(store: Store, items: Mapping[str, Item]) -> dict[str, Any]:
    """Objects as plain JSON (`ckptkit.formats.plain`), by key.

    Raises:
        UnsafeError: a pickle asks for something outside the table.
        FormatError: an item is damaged, or an object is too large or deep to be carried.
    """
    by_file: dict[str, list[str]] = {}
    for key, item in items.items():
        by_file.setdefault(item.path, []).append(key)
    found: dict[str, Any] = {}
    for path, keys in by_file.items():
        with store.open(path) as reader:
            for key in keys:
                item = items[key]
                archive = open_archive(reader, f"{key!r} in {path}", item.offset, item.length)
                found[key] = to_plain(archive.value, archive.content)
    return {key: found[key] for key in items}


def item_checksums(store: Store, index: Index, prefix: str = "") -> Iterator[Checksum]:
    """What the zip of every item states of its members; `prefix` goes before paths."""
    for path, items in items_by_file(index).items():
        with store.open(path) as reader:
            for key, item in items:
                yield from zip_checksums(
                    reader, prefix + path, f"{key!r} in {path}", item.offset, item.length
                )
