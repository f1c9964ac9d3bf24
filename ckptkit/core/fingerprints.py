"""Fingerprints: 64 bits of a tensor's values, whatever its layout, cut or format.

    F = sum over elements c of  bits(c) * product over axes a of word(a, c[a])      (mod 2^64)

`word` gives odd words of SplitMix64, seeded by the axis's name. The sum may be taken box by box, in any order; and since the
words of an element are a product, a box costs one word a row and one a column. A change of a single element changes F always,
since odd words have an inverse; an exchange of elements, a transposition or any other accident does but with a probability
of about 2^-48 for 16-bit elements (2^-32 for wider ones). It is no protection against someone who means to deceive.

`bits(c)` is the stored element as an unsigned little-endian integer. Eight-byte elements are folded, `b ^ (b >> 32)`, so that their
signs lie where a difference of two words cannot cancel them; sixteen-byte elements are two of these, along an axis of their own.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ckptkit.core.boxes import Ints, interval_boxes

U64 = npt.NDArray[np.uint64]
MASK = (1 << 64) - 1

_GAMMA = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_KEPT = 1 << 20  # words of an axis that are kept; those of longer ones are made when needed
_MERGED = 1 << 12  # elements of inner axes that are taken as one axis
_HALVES = "\0half"  # the axis of sixteen-byte elements; no schema can name it


def sum_of(bits: npt.NDArray[np.generic], words: Sequence[U64]) -> int:
    """The part of a fingerprint that one box adds.

    Args:
        bits: The box's elements as unsigned integers of 1, 2, 4 or 8 bytes, or as `V16`; any strides.
        words: For each axis of `bits`, the words of its indices.
    """
    if bits.dtype.itemsize == 16:
        halves = np.ascontiguousarray(bits).view(np.dtype("<u8")).reshape(*bits.shape, 2)
        return sum_of(halves, [*words, axis_words(_HALVES, 0, 2)])
    values = _folded(bits) if bits.dtype.itemsize == 8 else bits
    values, axes = _merged(values, list(words))
    if values.size == 0:
        return 0
    while axes:
        # From the axis of the smallest stride outwards: the first pass is the one that sees every element.
        values = np.einsum("...c,c->...", values, axes.pop(), dtype=np.uint64, casting="unsafe")
    return int(values) & MASK


def sum_of_run(
    bits: npt.NDArray[np.generic], names: Sequence[str], shape: tuple[int, ...], first: int
) -> int:
    """As `sum_of`, of consecutive elements of a tensor in row-major order, from flat position `first` on."""
    start: Ints = np.asarray([first])
    _, low, high = interval_boxes(shape, start, start + len(bits))
    total = position = 0
    for lo, hi in zip(low.tolist(), high.tolist(), strict=True):
        sizes = [b - a for a, b in zip(lo, hi, strict=True)]
        count = int(np.prod(sizes, dtype=np.int64))
        part = bits[position : position + count].reshape(sizes)
        total += sum_of(part, [axis_words(n, a, b) for n, a, b in zip(names, lo, hi, strict=True)])
        position += count
    return total & MASK


def unsigned(itemsize: int) -> np.dtype:
    """The type in which `sum_of` takes elements of this many bytes."""
    return np.dtype("V16") if itemsize == 16 else np.dtype(f"<u{itemsize}")


def axis_names(axes: Sequence[str]) -> tuple[str, ...]:
    """The names that seed the words of a tensor's axes. An axis named twice counts its repeats, so that a transposition shows."""
    return tuple(
        f"{name}#{axes[:k].count(name)}" if name in axes[:k] else name for k, name in enumerate(axes)
    )


def axis_words(name: str, start: int, stop: int) -> U64:
    """Odd words of the indices `[start, stop)` of an axis."""
    if stop <= _KEPT:
        size = 1 << 10
        while size < stop:
            size *= 4
        return _table(name, size)[start:stop]
    return _make(name, start, stop)


@lru_cache(maxsize=256)
def _table(name: str, size: int) -> U64:
    return _make(name, 0, size)


@lru_cache(maxsize=4096)
def _seed(name: str) -> int:
    seed = 0
    for byte in name.encode():
        seed = _mix((seed ^ byte) + _GAMMA & MASK)
    return seed


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * _M1 & MASK
    z = (z ^ z >> 27) * _M2 & MASK
    return z ^ z >> 31


def _make(name: str, start: int, stop: int) -> U64:
    """`_mix(seed + (i + 1) * gamma) | 1` for every index."""
    z: U64 = np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(_seed(name))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_M1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_M2)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def _folded(bits: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    found: npt.NDArray[np.generic] = bits ^ (bits >> np.uint64(32))  # type: ignore[operator]
    return found


def _merged(values: npt.NDArray[np.generic], words: list[U64]) -> tuple[npt.NDArray[np.generic], list[U64]]:
    """Axes by descending stride, without those of one element, and short inner ones joined where they lie side by side."""
    one = np.ones(1, np.uint64)
    scale = one
    keep = []
    for axis, size in enumerate(values.shape):
        if size == 1:
            scale = scale * words[axis]
        else:
            keep.append(axis)
    values = values.reshape([values.shape[axis] for axis in keep]) if len(keep) < values.ndim else values
    words = [words[axis] for axis in keep]
    order = sorted(range(values.ndim), key=lambda axis: -abs(values.strides[axis]))
    values, words = values.transpose(order), [words[axis] for axis in order]
    while len(words) > 1:
        rows, columns = values.shape[-2:]
        if rows * columns > _MERGED or values.strides[-2] != columns * values.strides[-1]:
            break
        words[-2:] = [(words[-2][:, None] * words[-1][None, :]).reshape(-1)]
        values = values.reshape([*values.shape[:-2], rows * columns])
    if words:
        words[0] = words[0] * scale
        return values, words
    return values.reshape(1), [scale]
