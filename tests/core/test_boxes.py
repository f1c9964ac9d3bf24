"""Boxes, intervals and strided arrays, against loops over every element."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.boxes import (
    MAX_ELEMENTS,
    Box,
    check_shape,
    elements_below,
    interval_boxes,
    ranges,
    row_major_strides,
)
from ckptkit.errors import LayoutError

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int64)


@given(SHAPES, st.data())
def test_an_interval_of_an_array_is_its_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    """The boxes of an interval hold its elements once each, row-major between and within boxes, and are few."""
    bound = st.integers(0, prod(shape))
    runs = data.draw(st.lists(st.tuples(bound, bound).map(sorted), max_size=4))
    first, last = (ints(*(run[side] for run in runs)) for side in (0, 1))

    owner, lo, hi = interval_boxes(shape, first, last)

    for run, (a, b) in enumerate(runs):
        mine = np.flatnonzero(owner == run)
        indices = [
            index
            for box in mine
            for index in product(*(range(x, y) for x, y in zip(lo[box], hi[box], strict=True)))
        ]
        assert indices == [
            tuple(map(int, np.unravel_index(flat, shape))) if shape else () for flat in range(a, b)
        ]
        assert len(mine) <= max(1, 2 * len(shape) - 1)
    assert np.all(lo < hi)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=4), st.integers(-5, 5), st.data())
def test_elements_below_counts_addresses(
    levels: list[tuple[int, int]], offset: int, data: st.DataObject
) -> None:
    """In a nested strided array the count below a limit is that of a loop over all addresses."""
    shape: list[int] = []
    strides: list[int] = []
    step = 1
    for size, gap in reversed(levels):  # from the innermost axis: each stride leaves room for the axes within
        shape.insert(0, size)
        strides.insert(0, step * gap)
        step = step * gap * max(size, 1)
    limits = data.draw(st.lists(st.integers(offset - 3, offset + step + 3), max_size=5))
    addresses = [
        offset + sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)
    ]

    found = elements_below(tuple(shape), tuple(strides), offset, ints(*limits))

    assert found.tolist() == [sum(address < limit for address in addresses) for limit in limits]


def test_addresses_past_32_bits_are_counted_exactly() -> None:
    """Strides and limits above 2^32, as tensors of 10^10 elements have."""
    shape, strides = (3, 1 << 20, 4), (1 << 40, 1 << 18, 1 << 10)

    found = elements_below(shape, strides, 5, ints((2 << 40) + 5, (2 << 40) + 6, (1 << 40) + (7 << 18) + 6))

    assert found.tolist() == [2 << 22, (2 << 22) + 1, (1 << 22) + 7 * 4 + 1]


def test_intervals_past_32_bits_are_cut_exactly() -> None:
    """A run in the middle of an array of 2^43 elements."""
    shape = (1 << 11, 1 << 32)
    start = (5 << 32) + 7

    _, lo, hi = interval_boxes(shape, ints(start), ints(start + (2 << 32)))

    assert lo.tolist() == [[5, 7], [6, 0], [7, 0]]
    assert hi.tolist() == [[6, 1 << 32], [7, 1 << 32], [8, 7]]


@given(st.lists(st.tuples(st.integers(-3, 9), st.integers(0, 4))))
def test_ranges_are_concatenated(stretches: list[tuple[int, int]]) -> None:
    """`ranges` lists every number of every range, with the range it is of."""
    begin, count = (ints(*(s[side] for s in stretches)) for side in (0, 1))

    owner, number = ranges(begin, count)

    expected = [(k, value) for k, (b, n) in enumerate(stretches) for value in range(b, b + n)]
    assert list(zip(owner.tolist(), number.tolist(), strict=True)) == expected


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple))
def test_row_major_strides_are_numpys(shape: tuple[int, ...]) -> None:
    """Strides of a contiguous array; those of an empty one are never used."""
    array = np.empty([max(size, 1) for size in shape], np.uint8)

    if 0 not in shape:
        assert row_major_strides(shape) == array.strides


def test_boxes_print_as_errors_show_them() -> None:
    """An axis of one element shows its index."""
    assert str(Box((0, 5, 0), (2, 6, 8))) == "[0:2, 5, 0:8]"
    assert str(Box((), ())) == "[]"


def test_overlap_is_the_common_region() -> None:
    """None where the boxes only touch."""
    assert Box((0, 2), (4, 6)).overlap(Box((3, 0), (9, 3))) == Box((3, 2), (4, 3))
    assert Box((0,), (4,)).overlap(Box((4,), (5,))) is None
    assert Box((), ()).overlap(Box((), ())) == Box((), ())


@pytest.mark.parametrize(
    ("start", "stop", "message"),
    [
        ((0,), (1, 2), "1 starts but 2 stops"),
        ((-1,), (1,), "axis 0 is -1:1"),
        ((0, 3), (1, 2), "axis 1 is 3:2"),
    ],
)
def test_impossible_boxes_are_refused(start: tuple[int, ...], stop: tuple[int, ...], message: str) -> None:
    """A box says which bound is wrong."""
    with pytest.raises(LayoutError, match=message):
        Box(start, stop)


@pytest.mark.parametrize(
    "shape", [(-1,), (1 << 59,), (1 << 30, 1 << 30), (0, 1 << 62), (0, 1 << 40, 1 << 40)]
)
def test_shapes_that_leave_64_bits_are_refused(shape: tuple[int, ...]) -> None:
    """Products are checked without an overflow, in empty tensors too, since strides ignore the empty axis."""
    with pytest.raises(LayoutError, match=r"w cannot have shape"):
        check_shape(shape, "w")
    check_shape((MAX_ELEMENTS,), "w")
    check_shape((0, 5), "w")
