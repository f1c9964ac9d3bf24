"""Shards of zarr arrays: files of several chunks with an index, as the codec `sharding_indexed` says.

The index has `(offset, nbytes)` of every inner chunk in C order, little-endian, all ones for one that is absent, and a CRC-32C after it.
"""

from dataclasses import dataclass

import numpy as np

ABSENT = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Sharding:
    """The codec `sharding_indexed`: shape of inner chunks, and whether the index is at the file's end."""

    inner: tuple[int, ...]
    at_end: bool
    index_crc: bool


def shard_index(chunks: int, held: int, nbytes: int) -> bytes:
    """The index at the end of a shard whose first `held` of `chunks` inner chunks, of `nbytes` each, lie one after the other."""
    table = np.full((chunks, 2), ABSENT, "<u8")
    table[:held, 0] = np.arange(held, dtype=np.uint64) * np.uint64(nbytes)
    table[:held, 1] = nbytes
    data = table.tobytes()
    return data + crc32c(data).to_bytes(4, "little")


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes | bytearray) -> int:
    """CRC-32C (Castagnoli), as indexes of shards have it.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
