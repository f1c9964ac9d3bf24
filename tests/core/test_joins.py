"""Overlap joins against every pair tried."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core import joins
from ckptkit.core.joins import BoxSet, overlaps, sweep_axes


def box_set(rows: list[tuple[int, list[int], list[int]]], width: int, box_type: type = np.int32) -> BoxSet:
    """Boxes as `(key, lo, hi)`."""
    return BoxSet(
        np.asarray([key for key, _, _ in rows], np.int64),
        np.asarray([lo for _, lo, _ in rows], box_type).reshape(len(rows), width),
        np.asarray([hi for _, _, hi in rows], box_type).reshape(len(rows), width),
    )


def every_pair(left: BoxSet, right: BoxSet) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i in range(len(left))
        for j in range(len(right))
        if left.key[i] == right.key[j]
        and np.all(left.lo[i] < right.hi[j])
        and np.all(right.lo[j] < left.hi[i])
    ]


def found(
    left: BoxSet, right: BoxSet, block: int = joins.BLOCK, many: int = joins.MANY
) -> list[tuple[int, int]]:
    blocks = overlaps(left, right, block, many)
    return sorted((int(i), int(j)) for a, b in blocks for i, j in zip(a, b, strict=True))


@st.composite
def sets(draw: st.DrawFn) -> tuple[BoxSet, BoxSet]:
    """Two sets of boxes on one small grid, with equal boxes and many keys; the grid may be wide or far away."""
    width = draw(st.integers(0, 3))
    scale, far = draw(
        st.sampled_from([(1, 0), (1, 0), (1 << 28, 0), (1, (1 << 31) - 7), (1 << 33, 0), (1, 1 << 57)])
    )
    edge = st.tuples(st.integers(0, 5), st.integers(1, 5)).map(
        lambda e: (e[0] * scale + far, min(e[0] + e[1], 6) * scale + far)
    )
    row = st.tuples(
        st.integers(0, draw(st.sampled_from([0, 2, 40]))), st.lists(edge, min_size=width, max_size=width)
    )
    sides = [
        [(key, [lo for lo, _ in box], [hi for _, hi in box]) for key, box in draw(st.lists(row, max_size=12))]
        for _ in range(2)
    ]
    box_type = np.int32 if 6 * scale + far < 1 << 31 else np.int64
    left, right = (box_set(side, width, box_type) for side in sides)
    return left, right


@settings(max_examples=300)
@given(sets(), st.sampled_from([1, 2, 7, joins.BLOCK]), st.sampled_from([0, 1, joins.MANY]))
def test_pairs_are_those_of_trying_all(both: tuple[BoxSet, BoxSet], block: int, many: int) -> None:
    """Each overlapping pair of one key comes once, whatever the block, the keys, the size of the axes, and slabs."""
    left, right = both

    assert found(left, right, block, many) == every_pair(left, right)
    assert found(left, left, block, many) == every_pair(left, left)


@given(sets(), st.sampled_from([1, 3, 50]))
def test_no_block_has_more_candidates_than_allowed(both: tuple[BoxSet, BoxSet], block: int) -> None:
    """Memory is bounded by the block, even where one box meets all others."""
    left, right = both

    assert all(len(i) <= block for i, _ in overlaps(left, right, block))


def test_the_last_element_of_a_31_bit_axis_is_found() -> None:
    """Bounds at 2^31 - 1 stay within the key, though a sweep asks for the element after a start."""
    top = (1 << 31) - 1
    left = box_set([(0, [top - 1], [top]), (5, [0], [1]), (5, [top - 1], [top])], 1)
    right = box_set([(5, [top - 1], [top]), (0, [0], [top])], 1)

    assert found(left, right) == [(0, 1), (2, 0)]


@pytest.mark.parametrize("swap", [False, True])
def test_each_key_is_swept_on_the_axis_with_fewest_candidates(swap: bool) -> None:
    """Key 0 is cut in rows on both sides, key 1 in columns, key 2 in 2 rows and 64 columns."""
    size = 64
    rows = [(0, [k, 0], [k + 1, size]) for k in range(size)]
    columns = [(1, [0, k], [size, k + 1]) for k in range(size)]
    cells = [(2, [32 * r, c], [32 * r + 32, c + 1]) for r in range(2) for c in range(size)]
    boxes = box_set([*rows, *columns, *cells], 2)
    other = boxes.take(np.random.default_rng(0).permutation(len(boxes)))
    left, right = (other, boxes) if swap else (boxes, other)

    assert sweep_axes(left, right)[0].tolist() == [0, 1, 1]


def test_inner_cuts_do_not_make_candidates_quadratic() -> None:
    """4,096 columns against 4,096 columns: as many candidates as pairs, so that one block of 8,192 holds them all."""
    count = 4096
    columns = box_set([(0, [0, k], [7, k + 1]) for k in range(count)], 2)

    blocks = list(overlaps(columns, columns, 2 * count))

    assert sum(len(i) for i, _ in blocks) == count
    assert len(blocks) == 1


def test_a_fine_grid_against_another_is_cut_into_slabs() -> None:
    """90,000 cells against 89,401: either axis alone has 600 candidates a cell, slabs bring them down to some 20."""

    def grid(cells: int) -> BoxSet:
        edges = np.linspace(0, 1 << 20, cells + 1).astype(np.int32)
        lo = np.stack(np.meshgrid(edges[:-1], edges[:-1], indexing="ij"), -1).reshape(-1, 2)
        hi = np.stack(np.meshgrid(edges[1:], edges[1:], indexing="ij"), -1).reshape(-1, 2)
        return BoxSet(np.zeros(len(lo), np.int64), lo, hi)

    left, right = grid(300), grid(299)
    per_axis = (
        300 + 299 - 1
    )  # cells of an axis that overlap, each inner edge of the one inside a cell of the other

    blocks = list(overlaps(left, right, block=1 << 16))

    assert sum(len(i) for i, _ in blocks) == per_axis**2
    assert len(blocks) < 100  # of 65,536 candidates; a sweep of one axis takes 800
    volume = np.zeros(len(right), np.int64)
    for i, j in blocks:
        edge = np.minimum(left.hi[i], right.hi[j]).astype(np.int64) - np.maximum(left.lo[i], right.lo[j])
        np.add.at(volume, j, edge.prod(axis=1))
    assert np.array_equal(volume, (right.hi - right.lo).astype(np.int64).prod(axis=1))
