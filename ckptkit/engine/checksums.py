"""CRC-32 of a range whose parts were seen in any order.

`crc(A + B) = crc(A) * x^(8 * len(B)) + crc(B)` over GF(2) modulo the polynomial of zlib, as `crc32_combine` of zlib
does it.
"""

from collections.abc import Iterable
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials modulo zlib's; the highest bit is x^0."""
    product = 0
    bit = 1 << 31
    while True:
        if a & bit:
            product ^= b
            if not a & (bit - 1):
                return product
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        if not bit:
            return product


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """x^(8 * nbytes) modulo the polynomial."""
    power, result = 1 << 23, 1 << 31  # x^8, and 1
    while nbytes:
        if nbytes & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        nbytes >>= 1
    return result


def combine(first: int, second: int, second_nbytes: int) -> int:
    """The CRC-32 of two ranges, one after the other."""
    return _multiply(_shift(second_nbytes), first) ^ second


def total(start: int, stop: int, parts: Iterable[tuple[int, int, int]]) -> int:
    """The CRC-32 of bytes `[start, stop)` from `(start, stop, crc)` of parts that tile it, in any order."""
    crc, position = 0, start
    for low, high, part in sorted(parts):
        assert low == position, f"checksum parts leave a gap at {position}:{low}"
        crc, position = combine(crc, part, high - low), high
    assert position == stop, f"checksum parts end at {position}, not at {stop}"
    return crc
