"""A store of random tensors that exist only while they are read.

Every byte is a function of (seed, tensor, role, position): a tile of normal values is read from a place, and XORed with
a word, that a hash of the block gives. So a value costs one pass over memory, blocks differ, values stay finite and
keep their distribution (exponents are never touched), and `param` is `master` rounded, bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.core.dtypes import DType
from ckptkit.errors import ShardMissingError
from ckptkit.stores.base import Reader, Store

BLOCK = 1 << 16
"""Elements that share a place in the tile and a word."""
TILE = 1 << 20
"""Elements of the tile; it is extended by one block, so that a block never wraps."""

U32 = npt.NDArray[np.uint32]

_FLIPPED: dict[bool, int] = {True: 0x807F0000, False: 0x007F0000}
"""Bits that blocks may flip, signed or not: sign and the upper 7 bits of the mantissa. The lower 16 bits stay, so that
rounding to bfloat16 goes the same way in every block and can be kept with the tile."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A distribution: `mean + std * normal`, squared for second moments."""

    mean: float
    std: float
    squared: bool = False

    @property
    def signed(self) -> bool:
        return self.mean == 0 and not self.squared


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A virtual file: `size` elements of `dtype`. `stream` names the random stream (param and master share one)."""

    stream: str
    kind: Kind
    dtype: DType
    size: int


@dataclass(frozen=True, slots=True)
class _Tile:
    """Float32 values as words, their upper halves, and 1 where the lower half rounds up to bfloat16."""

    words: U32
    upper: npt.NDArray[np.uint16]
    round_up: npt.NDArray[np.uint16]


@lru_cache(maxsize=8)
def _tile(seed: int, kind: Kind) -> _Tile:
    rng = np.random.Generator(np.random.PCG64([seed, 0xC4B7]))
    values = rng.standard_normal(TILE, np.float32) * np.float32(kind.std) + np.float32(kind.mean)
    if kind.squared:
        values *= values
    if not kind.signed:
        np.abs(values, out=values)
    words = np.concatenate([values, values[:BLOCK]]).view(np.uint32)
    # A lower half of exactly 0x8000 would round by the parity of the flipped upper half: avoid that tie.
    words |= ((words & 0xFFFF) == 0x8000).astype(np.uint32)
    return _Tile(words, (words >> 16).astype(np.uint16), ((words & 0xFFFF) > 0x8000).astype(np.uint16))


class RandomStore(Store):
    """Virtual files of random tensors.

    Args:
        seed: Any whole number.
        tensors: Path to what lies there.
    """

    def __init__(self, seed: int, tensors: Mapping[str, RandomTensor]) -> None:
        self.url = f"random:{seed}"
        self.seed = seed
        self.tensors = dict(tensors)

    def files(self) -> Sequence[str]:
        return sorted(self.tensors)

    def exists(self, path: str) -> bool:
        return path in self.tensors

    def size(self, path: str) -> int:
        tensor = self._at(path)
        return tensor.size * tensor.dtype.itemsize

    def identity(self, path: str) -> str:
        tensor = self._at(path)
        return f"random:{self.seed}:{tensor.stream}:{tensor.kind}:{tensor.dtype}:{tensor.size}"

    def open(self, path: str) -> Reader:
        return _RandomReader(self.seed, self._at(path))

    def _at(self, path: str) -> RandomTensor:
        try:
            return self.tensors[path]
        except KeyError:
            raise ShardMissingError(f"{self.url} has no file {path}", file=path) from None


class _RandomReader(Reader):
    def __init__(self, seed: int, tensor: RandomTensor) -> None:
        self.size = tensor.size * tensor.dtype.itemsize
        self._tensor = tensor
        self._tile = _tile(seed, tensor.kind)
        self._key = xxhash.xxh3_64_intdigest(tensor.stream.encode(), seed=seed & 0xFFFF_FFFF_FFFF_FFFF)
        self._mask = _FLIPPED[tensor.kind.signed]

    def close(self) -> None:
        pass

    def readinto(self, offset: int, buffer: memoryview) -> None:
        out = np.frombuffer(buffer, np.uint8)
        item = self._tensor.dtype.itemsize
        if offset < 0 or offset + len(out) > self.size:
            raise ShardMissingError(f"{self._tensor.stream} ends at {self.size}, not {offset + len(out)}")
        first, last = offset // item, -(-(offset + len(out)) // item)
        if offset % item or len(out) % item:
            whole = np.empty((last - first) * item, np.uint8)
            self._fill(first, last, whole)
            out[:] = whole[offset - first * item :][: len(out)]
        else:
            self._fill(first, last, out)

    def _fill(self, first: int, last: int, out: npt.NDArray[np.uint8]) -> None:
        item = self._tensor.dtype.itemsize
        done = 0
        while first < last:
            block, inside = divmod(first, BLOCK)
            count = min(BLOCK - inside, last - first)
            mixed = _mix(self._key + block)
            at = mixed % TILE + inside
            # The place within a block may pass the end of the tile by less than a block.
            self._block(at, count, (mixed >> 32) & self._mask, out[done : done + count * item])
            first += count
            done += count * item

    def _block(self, at: int, count: int, flip: int, out: npt.NDArray[np.uint8]) -> None:
        tile, name = self._tile, self._tensor.dtype.name
        if name == "float32":
            np.bitwise_xor(tile.words[at : at + count], np.uint32(flip), out=_view(out, np.uint32))
        elif name == "bfloat16":
            upper = _view(out, np.uint16)
            np.bitwise_xor(tile.upper[at : at + count], np.uint16(flip >> 16), out=upper)
            np.add(upper, tile.round_up[at : at + count], out=upper)
        else:
            exact = (tile.words[at : at + count] ^ np.uint32(flip)).view(np.float32)
            out[:] = exact.astype(numpy_type(name)).view(np.uint8)


def _view(out: npt.NDArray[np.uint8], kind: Any) -> npt.NDArray[Any]:
    return out.view(kind)


def _mix(word: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): 64 well mixed bits."""
    word = (word * 0x9E3779B97F4A7C15) & 0xFFFF_FFFF_FFFF_FFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFF_FFFF_FFFF_FFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFF_FFFF_FFFF_FFFF
    return word ^ (word >> 31)


@cache
def numpy_type(name: str) -> np.dtype[Any]:
    """The numpy (or ml_dtypes) type of a dtype's name. Raises KeyError where there is none."""
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(ml_dtypes, name))
