"""Bit flips: in files (slots on tmpfs, shards on a disk) and in arrays, drawn from a seed. Each says where it happened."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.errors import UsageError


@dataclass(frozen=True)
class Flip:
    """One flipped bit."""

    where: str
    offset: int
    bit: int

    def text(self) -> str:
        return f"bit {self.bit} of byte {self.offset} of {self.where}"


def flip_file(path: str, offset: int, bit: int = 0) -> Flip:
    """Flip a bit of a file in place; a mapping of it sees the change. An offset below zero counts from the end.

    Raises UsageError where the file has no such byte.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        at = offset + size if offset < 0 else offset
        if not (0 <= at < size and 0 <= bit < 8):
            raise UsageError(f"{path} has {size} bytes of 8 bits, so no bit {bit} of byte {offset}")
        (value,) = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([value ^ 1 << bit]), at)
    finally:
        os.close(fd)
    return Flip(path, at, bit)


def flip_array(array: npt.NDArray[np.generic], rng: random.Random, where: str = "array") -> Flip:
    """Flip a drawn bit of a contiguous, writable array in place (a host buffer, a tensor's `numpy()`)."""
    if not (array.nbytes and array.flags.c_contiguous and array.flags.writeable):
        raise UsageError(
            f"{where} is empty, not contiguous or read-only; its bits cannot be flipped in place"
        )
    plain = array.reshape(-1).view(np.uint8)
    at, bit = rng.randrange(plain.size), rng.randrange(8)
    plain[at] ^= np.uint8(1 << bit)
    return Flip(where, at, bit)


def draw_flips(paths: Sequence[str], count: int, seed: int) -> list[Flip]:
    """Places for flips, spread over all bytes of the files; none is carried out (`flip_file` does that)."""
    rng = random.Random(f"flips {seed}")
    sizes = [os.path.getsize(path) for path in paths]
    if not sum(sizes):
        raise UsageError("there is no byte to flip a bit of")
    found = []
    for _ in range(count):
        (path, size), *_ = rng.choices(list(zip(paths, sizes, strict=True)), sizes)
        found.append(Flip(path, rng.randrange(size), rng.randrange(8)))
    return found
