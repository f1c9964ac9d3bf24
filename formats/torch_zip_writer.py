"""Skeletons of `torch.save` zips: every byte but the tensors', decided before any data moves.

The layout is that of `torch.save`: `data.pkl` first, payloads at multiples of 64 bytes, nothing compressed. Checksums of
payloads are fix-ups, filled in as the data passes. As in torch's own files they follow the payload, in a data descriptor, and
are in the directory: everything that depends on data comes after it, so that a file can be written from first byte to
last. Works without torch.

Source: PyTorch, `caffe2/serialize/inline_container.cc`; APPNOTE.TXT of PKWARE.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.destination import Fixup, Literal
from ckptkit.formats.pickling import dumps

ALIGN = 64
_FULL = 0xFFFFFFFF
_DESCRIPTOR = 8  # flag: checksum and sizes follow the payload


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A zip without its tensors.

    Attributes:
        size: Bytes of the whole zip.
        literals, fixups: With offsets in the file that the zip lies in.
        data: Where each storage's bytes go, in the order asked for.
    """

    size: int
    literals: tuple[Literal, ...]
    fixups: tuple[Fixup, ...]
    data: tuple[int, ...]

    def moved(self, by: int) -> "Skeleton":
        """The same zip, `by` bytes further into its file."""
        return Skeleton(
            self.size,
            tuple(Literal(one.offset + by, one.data) for one in self.literals),
            tuple(
                Fixup(f.kind, f.start + by, f.stop + by, tuple(at + by for at in f.offsets))
                for f in self.fixups
            ),
            tuple(at + by for at in self.data),
        )


def skeleton(value: Any, storages: Sequence[int] = (), start: int = 0, root: str = "archive") -> Skeleton:
    """Lay out the zip of a value whose `StoredTensor`s lie in storages `"0"`, `"1"`, ...

    Args:
        value: Anything that `ckptkit.formats.pickling.dumps` takes.
        storages: Bytes of each storage that the engine will fill.
        start: Where the zip begins in its file.
        root: The zip's folder.
    """
    pickled = dumps(value, 2, len(storages))
    members: list[tuple[str, bytes | int]] = [
        ("data.pkl", pickled.data), (".format_version", b"1"), (".storage_alignment", str(ALIGN).encode()),
        ("byteorder", b"little"),
    ]  # fmt: skip
    members += [(f"data/{key}", nbytes) for key, nbytes in enumerate(storages)]
    members += [(f"data/{key}", content) for key, content in pickled.contents.items()]
    members.append(("version", b"3\n"))
    literals, fixups, data = [], [], []
    directory = bytearray()
    open_crcs: list[
        tuple[int, int, int, int]
    ] = []  # payload start and stop, offset in the data descriptor and in the directory
    at = 0
    for name, content in members:
        encoded = f"{root}/{name}".encode()
        size = content if isinstance(content, int) else len(content)
        crc = 0 if isinstance(content, int) else zlib.crc32(content)
        wide = struct.pack("<HHQQ", 1, 16, size, size) if size >= _FULL else b""
        before = at + 30 + len(encoded) + len(wide)
        pad = -before % ALIGN
        pad += ALIGN if 0 < pad < 4 else 0
        extra = wide + (b"FB" + struct.pack("<H", pad - 4) + b"Z" * (pad - 4) if pad else b"")
        narrow = min(size, _FULL)
        later = isinstance(content, int)
        flags, told = (_DESCRIPTOR, 0 if narrow < _FULL else _FULL) if later else (0, narrow)
        head = struct.pack(
            "<4sHHHHHIIIHH", b"PK\x03\x04", 45, flags, 0, 0, 0x21, crc, told, told, len(encoded), len(extra)
        )
        payload = at + len(head) + len(encoded) + len(extra)
        held = b"" if isinstance(content, int) else content
        literals.append(Literal(start + at, head + encoded + extra + held))
        full = ([size, size] if size >= _FULL else []) + ([at] if at >= _FULL else [])
        more = struct.pack(f"<HH{len(full)}Q", 1, 8 * len(full), *full) if full else b""
        trailer = b""
        if isinstance(content, int):
            data.append(start + payload)
            trailer = struct.pack("<4sIQQ" if wide else "<4sIII", b"PK\x07\x08", 0, size, size)
            literals.append(Literal(start + payload + size, trailer))
            if size:
                open_crcs.append((payload, payload + size, payload + size + 4, len(directory) + 16))
        directory += struct.pack(
            "<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 45, 45, flags, 0, 0, 0x21, crc, narrow, narrow, len(encoded), len(more),
            0, 0, 0, 0, min(at, _FULL),
        ) + encoded + more  # fmt: skip
        at = payload + size + len(trailer)
    ends = directory + _end(len(members), len(directory), at)
    literals.append(Literal(start + at, bytes(ends)))
    for begin, stop, descriptor, central in open_crcs:
        fixups.append(Fixup("crc32", start + begin, start + stop, (start + descriptor, start + at + central)))
    return Skeleton(at + len(ends), tuple(_joined(literals)), tuple(fixups), tuple(data))


def _joined(literals: list[Literal]) -> list[Literal]:
    """Literals that touch made one: an item of one tensor has two, before and after its data."""
    found: list[Literal] = []
    for one in literals:
        if found and found[-1].offset + len(found[-1].data) == one.offset:
            found[-1] = Literal(found[-1].offset, found[-1].data + one.data)
        else:
            found.append(one)
    return found


def _end(count: int, length: int, offset: int) -> bytes:
    """The end of a zip; the zip64 form where a field would be full."""
    wide = b""
    if count >= 0xFFFF or length >= _FULL or offset >= _FULL:
        wide = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, offset)
        wide += struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + length, 1)
    short = min(count, 0xFFFF)
    return wide + struct.pack(
        "<4sHHHHIIH", b"PK\x05\x06", 0, 0, short, short, min(length, _FULL), min(offset, _FULL), 0
    )


def zip_bytes(value: Any, root: str = "archive") -> bytes:
    """The whole zip of a value whose tensors all have their content (`TensorValue`)."""
    made = skeleton(value, root=root)
    data = bytearray(made.size)
    for literal in made.literals:
        data[literal.offset : literal.offset + len(literal.data)] = literal.data
    return bytes(data)
