"""xxh3-128 of leaves: 16 bytes, canonical (big-endian).

The functions of `xxhash` hold Python's lock. Calling the same C functions through ctypes without it was tried: with two
threads the additional hand-overs of the lock cost more (6 % of a reshard in memory) than digesting at the same time gains.
"""

import xxhash

digest = xxhash.xxh3_128_digest
Hasher = xxhash.xxh3_128
