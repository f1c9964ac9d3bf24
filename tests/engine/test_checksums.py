"""CRC-32 in parts: the parts' sums give the sum of the whole, in any order."""

import random
import zlib
from itertools import pairwise

import pytest

from ckptkit.engine.checksums import combine, total


@pytest.mark.parametrize("seed", range(5))
def test_parts_in_any_order_give_the_sum_of_the_whole(seed) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(5000)
    cuts = sorted({0, 5000, *(rng.randrange(5000) for _ in range(rng.randrange(8)))})
    parts = [(a + 100, b + 100, zlib.crc32(data[a:b])) for a, b in pairwise(cuts)]
    rng.shuffle(parts)

    assert total(100, 5100, parts) == zlib.crc32(data)


def test_an_empty_range_has_the_sum_of_nothing() -> None:
    assert total(7, 7, []) == zlib.crc32(b"") == 0
    assert combine(zlib.crc32(b"abc"), 0, 0) == zlib.crc32(b"abc")


def test_long_parts_need_no_long_loop() -> None:
    """Zeros after data: their own sum is known, and 2^40 of them are combined at once."""
    small = combine(zlib.crc32(b"x"), zlib.crc32(bytes(1000)), 1000)
    assert small == zlib.crc32(b"x" + bytes(1000))
    assert 0 <= combine(1, 1, 1 << 40) < 1 << 32
