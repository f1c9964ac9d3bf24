"""xxh3-128 of leaves: 16 bytes, canonical (big-endian); and CRC-32 as zip files have it.

The functions of `xxhash` hold Python's lock. Calling the same C functions through ctypes without it was tried: with two
threads the additional hand-overs of the lock cost more (6 % of a reshard in memory) than digesting at the same time gains.
"""

import xxhash

try:
    from isal.isal_zlib import crc32  # the CPU's carry-less multiplication: over three times as fast as zlib
except ImportError:
    from zlib import crc32

__all__ = ["Hasher", "crc32", "digest"]

digest = xxhash.xxh3_128_digest
Hasher = xxhash.xxh3_128
