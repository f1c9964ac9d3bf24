"""`.digests`: the digests of one rank file, and what they belong to.

Little-endian; 160 bytes, then 16 bytes (xxh3-128, canonical, big-endian) for each leaf of 1 MiB from the data's start on.

    offset  bytes
         0      8  magic "CKPTDIGS"
         8      4  version, 1
        12      4  leaf size in bytes, 1048576
        16      8  data start: bytes of the header, length field and padding included
        24      8  data size
        32     16  header digest: xxh3-128 of the file's first `data start` bytes
        48     16  content digest: xxh3-128 of header digest, leaf digests, data size as u64
        64     16  extras digest: xxh3-128 of the rank's `.extras`
        80     16  index hash: xxh3-128 of `index.npz`
        96      4  world
       100      4  rank
       104      8  step; 2**64 - 1 where there is none
       112      8  epoch
       120     16  incarnation; zeros where there is none
       136      8  leaves
       144     16  checksum: xxh3-128 of this file with these 16 bytes zero
"""

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.core.catalog import LEAF, Leaves
from ckptkit.errors import CorruptionError, FormatError

_STRUCT = struct.Struct("<8sIIQQ16s16s16s16sIIQQ16sQ16s")
_MAGIC = b"CKPTDIGS"
_NO_STEP = (1 << 64) - 1
VERSION = 1
SIZE = _STRUCT.size
assert SIZE == 160


@dataclass(frozen=True, slots=True)
class RankDigests:
    """The content of a `.digests` file (module docstring). Digests are 16 bytes; `leaves` is `[leaves, 16]` of u8."""

    data_start: int
    data_size: int
    header: bytes
    extras: bytes
    index: bytes
    world: int
    rank: int
    step: int | None
    epoch: int
    incarnation: bytes
    leaves: npt.NDArray[np.uint8]

    @property
    def content(self) -> bytes:
        """The digest of the whole rank file."""
        return content_digest(self.header, self.leaves, self.data_size)

    def as_leaves(self) -> Leaves:
        return Leaves(self.data_start, self.data_size, self.leaves)

    def to_bytes(self) -> bytes:
        step = _NO_STEP if self.step is None else self.step
        head = _STRUCT.pack(
            _MAGIC, VERSION, LEAF, self.data_start, self.data_size, self.header, self.content, self.extras, self.index,
            self.world, self.rank, step, self.epoch, self.incarnation, len(self.leaves), bytes(16),
        )  # fmt: skip
        whole = head + self.leaves.tobytes()
        return head[:144] + xxhash.xxh3_128_digest(whole) + whole[SIZE:]

    @classmethod
    def parse(cls, path: str, data: bytes) -> "RankDigests":
        """Read a `.digests` file.

        Raises:
            CorruptionError: its checksum, or the content digest it states, is wrong.
            FormatError: it is no such file, or of an unknown version.
        """
        if len(data) < SIZE or data[:8] != _MAGIC:
            raise FormatError(
                f"{path} is no digest file ({len(data)} bytes); `ckptkit verify` says what is left", file=path
            )
        (
            _,
            version,
            leaf,
            start,
            size,
            header,
            content,
            extras,
            index,
            world,
            rank,
            step,
            epoch,
            incarnation,
            count,
            check,
        ) = _STRUCT.unpack_from(data)
        if version != VERSION:
            raise FormatError(
                f"{path} has version {version}; this ckptkit reads {VERSION}. Update ckptkit", file=path
            )
        if xxhash.xxh3_128_digest(data[:144] + bytes(16) + data[SIZE:]) != check:
            raise CorruptionError(
                f"{path} does not match its own checksum: it was damaged after it was written", file=path
            )
        if leaf != LEAF or count != leaf_count(size) or len(data) != SIZE + 16 * count:
            raise FormatError(
                f"{path}: {count} leaves of {leaf} bytes do not make {size} bytes of data", file=path
            )
        leaves = np.frombuffer(data, np.uint8, 16 * count, SIZE).reshape(count, 16)
        found = cls(
            start,
            size,
            header,
            extras,
            index,
            world,
            rank,
            None if step == _NO_STEP else step,
            epoch,
            incarnation,
            leaves,
        )
        if found.content != content:
            raise CorruptionError(f"{path}: the content digest is not that of its leaves", file=path)
        return found


def leaf_count(size: int) -> int:
    """Leaves of `size` bytes of data."""
    return -(-size // LEAF)


def content_digest(header: bytes, leaves: npt.NDArray[np.uint8], size: int) -> bytes:
    """One digest for a rank file, from those of its parts."""
    return xxhash.xxh3_128_digest(header + leaves.tobytes() + size.to_bytes(8, "little"))
