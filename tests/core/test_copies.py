"""Strided copies in normal form, against the moves of single elements."""

from itertools import pairwise, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.copies import normal_form


@st.composite
def loops(draw: st.DrawFn) -> "Loop":
    """A shape and two sets of strides, each that of an array whose axes lie in some order, with gaps."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    items = draw(st.sampled_from([(1, 1), (2, 2), (4, 4), (2, 4)]))
    both = []
    for item in items:
        strides, step = [0] * len(shape), item
        for axis in draw(st.permutations(range(len(shape)))):
            strides[axis] = step
            step *= shape[axis] * draw(st.sampled_from([1, 1, 2]))
        both.append(strides)
    return shape, both[0], both[1], items[0], items[1]


Loop = tuple[list[int], list[int], list[int], int, int]


def one_row(loop: Loop) -> Loop:
    """The normal form of one copy."""
    shape, src, dst = (np.asarray([values], np.int64).reshape(1, len(loop[0])) for values in loop[:3])
    found = normal_form(shape, src, dst, np.asarray([loop[3]]), np.asarray([loop[4]]))
    return tuple(column[0].tolist() for column in found)


def moves(shape: list[int], src: list[int], dst: list[int]) -> set[tuple[int, int]]:
    """Source and destination offsets of every step of the loops."""
    return {
        (
            sum(i * s for i, s in zip(index, src, strict=True)),
            sum(i * d for i, d in zip(index, dst, strict=True)),
        )
        for index in product(*map(range, shape))
    }


@given(loops())
def test_the_normal_form_moves_the_same_elements(
    loop: Loop,
) -> None:
    """Loops and runs of the normal form expand to the moves of the plain loops: each element to its place."""
    shape, src, dst, src_item, dst_item = loop

    n_shape, n_src, n_dst, src_run, dst_run = one_row(loop)

    count = src_run // src_item
    assert count * dst_item == dst_run
    outer = moves(n_shape, n_src, n_dst)
    assert {(s + k * src_item, d + k * dst_item) for s, d in outer for k in range(count)} == moves(
        shape, src, dst
    )


@given(loops())
def test_the_normal_form_is_as_short_as_it_can_be(
    loop: Loop,
) -> None:
    """Destination strides descend, loops have more than one step, and no neighbours could be one loop."""
    n_shape, n_src, n_dst, src_run, dst_run = one_row(loop)

    assert n_dst == sorted(n_dst, reverse=True)
    assert all(n > 1 for n in n_shape)
    inner = [*zip(n_shape, n_src, n_dst, strict=True), None]
    for (_, s, d), below in pairwise(inner):  # type: ignore[misc]
        within = (src_run, dst_run) if below is None else (below[0] * below[1], below[0] * below[2])
        assert (s, d) != within


def test_rows_of_one_table_have_their_own_loops() -> None:
    """A contiguous copy, a transposition and a strided one side by side; unused loops are one step of stride 0."""
    shape = np.asarray([[3, 4], [3, 4], [3, 4]])
    src = np.asarray([[4, 1], [1, 3], [9, 1]])
    dst = np.asarray([[4, 1], [4, 1], [4, 1]])
    one = np.ones(3, np.int64)

    n_shape, n_src, n_dst, src_run, dst_run = normal_form(shape, src, dst, one, one)

    assert src_run.tolist() == dst_run.tolist() == [12, 1, 4]
    assert n_shape.tolist() == [[1, 1], [3, 4], [3, 1]]
    assert n_src.tolist() == [[0, 0], [1, 3], [9, 0]]
    assert n_dst.tolist() == [[0, 0], [4, 1], [4, 0]]
