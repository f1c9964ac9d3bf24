"""Fingerprints: equal to the sum that defines them, whatever the box, cut or order; and what changes them."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.fingerprints import MASK, axis_names, axis_words, sum_of, sum_of_run, unsigned

_NAMES = ("expert", "head", "hidden")


def word(name: str, index: int) -> int:
    """SplitMix64 as published (Steele, Lea, Flood 2014), in Python's integers; seeded byte by byte."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    seed = 0
    for byte in name.encode():
        seed = mix(((seed ^ byte) + 0x9E3779B97F4A7C15) % 2**64)
    return mix((seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64) | 1


def brute(bits: np.ndarray, names: tuple[str, ...] = _NAMES) -> int:
    """The definition, element by element."""
    total = 0
    for index in np.ndindex(bits.shape):
        value = int.from_bytes(bits[index].tobytes(), "little")
        weight = 1
        for name, i in zip(names, index, strict=False):
            weight *= word(name, i)
        if bits.itemsize == 8:
            value ^= value >> 32
        if bits.itemsize == 16:
            low, high = value % 2**64, value >> 64
            value = (low ^ low >> 32) * word("\0half", 0) + (high ^ high >> 32) * word("\0half", 1)
        total += value * weight
    return total % 2**64


def draw(shape: tuple[int, ...], itemsize: int, seed: int = 0) -> np.ndarray:
    count = int(np.prod(shape, dtype=int)) * itemsize
    data = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return data.view(unsigned(itemsize)).reshape(shape)


def whole(bits: np.ndarray, names: tuple[str, ...] = _NAMES) -> int:
    return sum_of(bits, [axis_words(n, 0, s) for n, s in zip(names, bits.shape, strict=False)])


@given(
    st.lists(st.integers(1, 7), min_size=0, max_size=3),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 1 << 30),
)
def test_it_is_the_sum_that_defines_it(shape: list[int], itemsize: int, seed: int) -> None:
    bits = draw(tuple(shape), itemsize, seed)

    assert whole(bits) == brute(bits)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.permutations([0, 1, 2]),
    st.data(),
)
def test_boxes_in_any_order_of_axes_add_up(
    shape: list[int], itemsize: int, order: list[int], data: st.DataObject
) -> None:
    """A box may lie in memory in any order of its axes: transposed weights, interleaved heads."""
    bits = draw(tuple(shape), itemsize)
    axis = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[axis]))
    perm = [a for a in order if a < len(shape)]

    total = 0
    for low, high in ((0, cut), (cut, shape[axis])):
        box = bits[tuple(slice(low, high) if a == axis else slice(None) for a in range(len(shape)))]
        stored = np.ascontiguousarray(box.transpose(perm))
        words = [
            axis_words(_NAMES[a], low, high) if a == axis else axis_words(_NAMES[a], 0, shape[a])
            for a in range(len(shape))
        ]
        total += sum_of(stored.transpose(np.argsort(perm)), words)

    assert total & MASK == brute(bits)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.lists(st.integers(0, 250), max_size=6))
def test_row_major_runs_add_up(shape: list[int], cuts: list[int]) -> None:
    bits = draw(tuple(shape), 2)
    edges = sorted({0, bits.size, *(cut for cut in cuts if cut < bits.size)})

    flat = bits.reshape(-1)
    parts = [sum_of_run(flat[a:b], _NAMES[: len(shape)], tuple(shape), a) for a, b in pairwise(edges)]

    assert sum(parts) & MASK == brute(bits)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_every_changed_bit_shows(itemsize: int) -> None:
    """Always, not just probably: odd words have an inverse."""
    bits = draw((5, 7), itemsize)
    before = whole(bits)

    for index in np.ndindex(bits.shape):
        for bit in range(8 * itemsize):
            changed = bits.copy()
            changed[index] ^= bits.dtype.type(1 << bit)
            assert whole(changed) != before, (index, bit)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_exchanged_elements_rows_and_axes_show(itemsize: int) -> None:
    bits = draw((6, 6), itemsize)
    before = whole(bits)
    flat = [tuple(index) for index in np.ndindex(bits.shape)]

    for a in flat:
        for b in flat:
            if a < b and bits[a].tobytes() != bits[b].tobytes():
                swapped = bits.copy()
                swapped[a], swapped[b] = bits[b], bits[a]
                assert whole(swapped) != before, (a, b)
    assert whole(np.ascontiguousarray(bits.T)) != before
    assert whole(bits[::-1].copy()) != before
    assert whole(bits[:, ::-1].copy()) != before
    assert whole(np.roll(bits, 1, 0)) != before


def test_a_value_and_its_negative_exchanged_show_in_float64() -> None:
    """Only the highest bit differs, which an even difference of words would cancel; so it is folded down."""
    values = np.asarray([1.0, -1.0, 3.0, -3.0])

    swapped = values[[1, 0, 2, 3]].view(np.uint64)

    assert whole(values.view(np.uint64)) != whole(swapped)


def test_an_axis_named_twice_counts_its_repeats() -> None:
    assert axis_names(("hidden", "head", "hidden")) == ("hidden", "head", "hidden#1")

    bits = draw((4, 4), 2)
    names = axis_names(("hidden", "hidden"))
    assert whole(bits, names) != whole(np.ascontiguousarray(bits.T), names)


def test_words_of_a_long_axis_are_the_same_ones() -> None:
    """They are made when needed, instead of being kept."""
    start = (1 << 20) - 2

    assert axis_words("vocab", start, start + 4).tolist() == [word("vocab", start + k) for k in range(4)]
