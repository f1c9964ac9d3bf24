"""Zips of `torch.save`: where the tensors of a `.pt` file, or of an item inside a `.distcp` file, lie.

`torch.save` stores every tensor's bytes uncompressed as a member `data/<key>`, and a pickle that tells their shapes. So
with the central directory and the pickle, both small, each tensor is a region of the file, and nothing else is read.

Source: PyTorch, `caffe2/serialize/inline_container.cc`; APPNOTE.TXT of PKWARE. Flags may announce data descriptors, so
sizes and checksums come from the central directory; the local header only tells where the payload starts.
"""

import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptkit.core.catalog import Checksum
from ckptkit.errors import CorruptionError, FormatError, UnsafeError
from ckptkit.formats import pickles
from ckptkit.formats.standins import StoredTensor
from ckptkit.stores.base import Reader, Store

LEGACY = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
"""How `torch.save` began before 1.6: a pickle of a magic number."""

MAX_DIRECTORY = 1 << 28
"""Bytes of a central directory; 2 million members need about 150 MB."""

_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")


@dataclass(frozen=True, slots=True)
class Member:
    """A member's payload: bytes `[start, start + size)` of the file, and the CRC-32 that its zip states.

    `header` is where its local header begins.
    """

    name: str
    start: int
    size: int
    crc: int
    header: int


class Window:
    """Ranges of a file, of which the first and last bytes were fetched ahead: a small zip costs one or two reads."""

    def __init__(self, reader: Reader, start: int, size: int, where: str, ahead: int = 4096) -> None:
        self.reader, self.start, self.size, self.where = reader, start, size, where
        if start < 0 or size < 0 or start + size > reader.size:
            raise CorruptionError(
                f"{where} should be at bytes {start}:{start + size}, but the file has {reader.size}. "
                "It is truncated; restore it from another copy"
            )
        if size <= 2 * ahead:
            self.parts = [(start, self._fetch(start, size))]
        else:
            self.parts = [
                (start, self._fetch(start, ahead)),
                (start + size - ahead, self._fetch(start + size - ahead, ahead)),
            ]

    def _fetch(self, offset: int, count: int) -> bytes:
        data = bytearray(count)
        self.reader.readinto(offset, memoryview(data))
        return bytes(data)

    def read(self, offset: int, count: int) -> bytes:
        """Bytes from an offset in the file. Raises FormatError when they are outside the window."""
        if offset < self.start or count < 0 or offset + count > self.start + self.size:
            raise FormatError(f"{self.where} points at bytes {offset}:{offset + count}, outside itself")
        for begin, data in self.parts:
            if begin <= offset and offset + count <= begin + len(data):
                return data[offset - begin : offset - begin + count]
        return self._fetch(offset, count)


SMALL = "data.pkl", "byteorder"
"""Members beside the tensors' that are read."""


@dataclass(frozen=True)
class Archive:
    """An opened zip.

    Attributes:
        value: What its pickle describes (`ckptkit.formats.pickles`).
        members: Payloads by name, without the root folder. Those of storages that no tensor uses may be missing.
    """

    where: str
    value: Any
    members: dict[str, Member]
    window: Window

    def place(self, tensor: StoredTensor) -> int:
        """Where a tensor's first element is in the file. Raises FormatError when its storage is absent or too small."""
        storage = tensor.storage
        member = self.members.get(f"data/{storage.key}")
        if member is None:
            raise FormatError(
                f"{self.where} has a tensor in storage {storage.key!r}, but no member data/{storage.key}"
            )
        if (
            storage.nbytes > member.size
            or (tensor.offset + tensor.span) * tensor.dtype.itemsize > member.size
        ):
            raise FormatError(
                f"{self.where}: storage {storage.key!r} should have {storage.nbytes} bytes, but its member has {member.size}"
            )
        return member.start + tensor.offset * tensor.dtype.itemsize

    def content(self, tensor: StoredTensor, limit: int = 1 << 26) -> bytes:
        """A small tensor's elements in row-major order. Raises FormatError for one of more than `limit` bytes."""
        item = tensor.dtype.itemsize
        if max(tensor.span, tensor.size) * item > limit:
            raise FormatError(
                f"{self.where}: state of {tensor.size * item} bytes is larger than the {limit} carried as extras"
            )
        data = self.window.read(self.place(tensor), tensor.span * item)
        if tensor.contiguous:
            return data
        steps = tuple(stride * item for stride in tensor.strides)
        return np.ndarray(tensor.shape, f"V{item}", data, 0, steps).tobytes()


def open_archive(reader: Reader, where: str, start: int = 0, size: int | None = None) -> Archive:
    """Open the zip at bytes `[start, start + size)` of a file.

    Args:
        where: File (and item) in messages.

    Raises:
        FormatError: it is no zip of `torch.save`, an old or foreign kind of one, or an inconsistent one.
        CorruptionError: the file ends before the zip does.
        UnsafeError: its pickle asks for something outside the table of stand-ins.
    """
    window, members = _members(reader, where, start, size)
    if "constants.pkl" in members:
        raise FormatError(
            f"{where} is a TorchScript program, not a checkpoint; save its state_dict() with torch.save"
        )
    _locate(window, members, [name for name in SMALL if name in members])
    if "byteorder" in members:
        order = window.read(members["byteorder"].start, min(members["byteorder"].size, 16))
        if order != b"little":
            raise FormatError(f"{where} is in {order!r} byte order; only little-endian files are read")
    pickle = members["data.pkl"]
    if pickle.size > pickles.LIMIT:
        raise FormatError(
            f"{where}: its pickle has {pickle.size} bytes, more than the {pickles.LIMIT} that are read"
        )
    value = pickles.loads(window.read(pickle.start, pickle.size), where)
    _locate(window, members, [name for name in members if name.startswith("data/")])
    return Archive(where, value, members, window)


def zip_checksums(
    reader: Reader, path: str, what: str, start: int = 0, size: int | None = None
) -> list[Checksum]:
    """CRC-32s that a zip of `torch.save` states of its members. Its pickle is not read.

    None where its writer was told to compute none: all are zero then. Arguments and errors are those of `open_archive`.
    """
    window, members = _members(reader, what, start, size)
    if members["data.pkl"].crc == 0:
        return []
    _locate(window, members, [name for name in members if name.startswith("data/") or name in SMALL])
    located = [m for m in members.values() if m.start >= 0 and m.size]
    return [Checksum(path, m.start, m.start + m.size, m.crc, f"{m.name} of {what}") for m in located]


def file_checksums(store: Store, paths: Iterable[str]) -> Iterator[Checksum]:
    """`zip_checksums` of files that are a zip each."""
    for path in paths:
        with store.open(path) as reader:
            yield from zip_checksums(reader, path, path)


def _members(reader: Reader, where: str, start: int, size: int | None) -> tuple[Window, dict[str, Member]]:
    window = Window(reader, start, reader.size - start if size is None else size, where)
    members = _directory(window)
    if "data.pkl" not in members:
        raise FormatError(f"{where} is a zip, but has no data.pkl: torch.save did not write it")
    return window, members


def _directory(window: Window) -> dict[str, Member]:
    """Members by name, their payloads not yet located."""
    where, start, end = window.where, window.start, window.start + window.size
    head = window.read(start, min(16, window.size))
    if not head.startswith(b"PK"):
        if head.startswith(LEGACY):
            raise FormatError(
                f"{where} is in the format that torch.save wrote before version 1.6. Load it with torch.load(..., "
                "weights_only=True) and save it again with torch.save"
            )
        raise FormatError(f"{where} is no file of torch.save: it does not begin as a zip does")
    tail = window.read(end - min(window.size, 4096), min(window.size, 4096))
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise CorruptionError(f"{where} has no end of a zip: it is truncated. Restore it from another copy")
    _, disk, disk_start, _, count, length, offset, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != len(tail):
        raise CorruptionError(
            f"{where} goes on after the end of its zip. Something was appended to it; restore it from another copy"
        )
    if disk or disk_start:
        raise FormatError(f"{where} is one part of a zip of several")
    end_at = end - len(tail) + at
    if at >= _LOCATOR.size and tail[at - _LOCATOR.size : at - _LOCATOR.size + 4] == b"PK\x06\x07":
        end64 = start + _LOCATOR.unpack_from(tail, at - _LOCATOR.size)[2]
        signature, *_, count, length, offset = _END64.unpack(window.read(end64, _END64.size))
        if signature != b"PK\x06\x06":
            raise FormatError(f"{where}: its zip64 end is not where it should be")
        end_at = end64
    if length > MAX_DIRECTORY or start + offset + length > end_at:
        raise FormatError(f"{where}: its zip directory of {length} bytes at {offset} does not fit into it")
    directory = window.read(start + offset, length)
    members: dict[str, Member] = {}
    at = 0
    root = None
    for _ in range(count):
        if at + _CENTRAL.size > length:
            raise FormatError(f"{where}: its zip directory lists {count} members, but ends before the last")
        fields = _CENTRAL.unpack_from(directory, at)
        signature, flags, method, crc, packed, plain = fields[0], fields[3], fields[4], *fields[7:10]
        name_size, extra_size, comment_size, header = *fields[10:13], fields[16]
        if signature != b"PK\x01\x02":
            raise FormatError(f"{where}: its zip directory is damaged at member {len(members)}")
        name = directory[at + 46 : at + 46 + name_size].decode("utf-8", "replace")
        extra = directory[at + 46 + name_size : at + 46 + name_size + extra_size]
        plain, packed, header = _zip64(extra, plain, packed, header)
        at += 46 + name_size + extra_size + comment_size
        if method or packed != plain or flags & 1:
            raise FormatError(
                f"{where}: member {name!r} is compressed or encrypted; torch.save stores members as they are"
            )
        folder, slash, rest = name.partition("/")
        if not slash or (root is not None and folder != root) or ".." in rest.split("/"):
            raise UnsafeError(f"{where}: member {name!r} is outside the folder that the others are in")
        root = folder
        if rest in members:
            raise FormatError(f"{where}: two members are called {name!r}")
        if header + _LOCAL.size + plain > offset:
            raise FormatError(
                f"{where}: member {name!r} of {plain} bytes at {header} reaches past the zip's data"
            )
        members[rest] = Member(name, -1, plain, crc, start + header)
    ordered = sorted(members.values(), key=lambda member: member.header)
    for member, other in itertools.pairwise(ordered):
        if member.header + _LOCAL.size + len(member.name.encode()) + member.size > other.header:
            raise FormatError(f"{where}: members {member.name!r} and {other.name!r} overlap")
    return members


def _zip64(extra: bytes, plain: int, packed: int, header: int) -> tuple[int, int, int]:
    """The true sizes and offset of a member whose 32-bit fields are full."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = (
                list(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
                if at + 4 + size <= len(extra)
                else []
            )
            numbers = [
                n if n != 0xFFFFFFFF else values.pop(0) if values else n for n in (plain, packed, header)
            ]
            return numbers[0], numbers[1], numbers[2]
        at += 4 + size
    return plain, packed, header


def _locate(window: Window, members: dict[str, Member], names: Sequence[str]) -> None:
    """Fill in where payloads start, from local headers. Far ones are read in parallel."""

    def start_of(name: str) -> int:
        member = members[name]
        here = member.header
        encoded = member.name.encode()
        local = window.read(here, _LOCAL.size + len(encoded))
        fields = _LOCAL.unpack_from(local)
        if (
            fields[0] != b"PK\x03\x04"
            or fields[9] != len(encoded)
            or local[_LOCAL.size :] != encoded
            or fields[3]
        ):
            raise FormatError(
                f"{window.where}: the header of member {member.name!r} is not where the directory says"
            )
        payload: int = here + _LOCAL.size + fields[9] + fields[10]
        return payload

    if len(names) > 64:
        with ThreadPoolExecutor(16) as pool:
            starts = list(pool.map(start_of, names))
    else:
        starts = [start_of(name) for name in names]
    for name, start in zip(names, starts, strict=True):
        member = members[name]
        if start + member.size > window.start + window.size:
            raise FormatError(f"{window.where}: member {member.name!r} reaches past the end of its zip")
        members[name] = replace(member, start=start)


def tensors_of(value: Any) -> Iterator[tuple[tuple[Any, ...], StoredTensor]]:
    """Every tensor inside nested dictionaries, lists and tuples, with its path. Deeper than 100 levels raises FormatError."""
    todo: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    seen = 0
    while todo:
        path, item = todo.pop()
        seen += 1
        if len(path) > 100 or seen > 20_000_000:
            raise FormatError("a value is nested too deeply, or shares too much, to be a checkpoint")
        if isinstance(item, StoredTensor):
            yield path, item
        elif isinstance(item, dict):
            todo.extend(((*path, key), inner) for key, inner in reversed(item.items()))
        elif isinstance(item, list | tuple):
            todo.extend(((*path, index), item[index]) for index in reversed(range(len(item))))
