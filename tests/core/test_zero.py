"""ZeRO rules: numbers taken from real frameworks, and what no rule may break."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core import zero
from ckptkit.core.layouts import ZERO_RULES
from ckptkit.errors import LayoutError

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6)
SAMPLE = [(7, 5), (7,), (30, 7), (9, 9), (9,)]
"""Module order of a small model saved by megatron-core 0.16.1 on two ranks: a.weight, a.bias, b.weight, c.weight, c.bias."""


def runs(cut: zero.Cut) -> list[tuple[int, int, int, int]]:
    """`(tensor, rank, first, last)`, sorted."""
    columns = (cut.tensor, cut.rank, cut.first, cut.last)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def test_one_bucket_lies_as_megatron_core_laid_it() -> None:
    """Reverse module order, starts aligned to 64, the end to lcm(ranks, 128) (param_and_grad_buffer.py)."""
    start, buckets = zero.megatron_buckets([prod(s) for s in SAMPLE], ranks=2)

    assert start.tolist() == [512, 448, 192, 64, 0]
    assert [(b.start, b.padded, b.unpadded) for b in buckets] == [(0, 640, 547)]


def test_buckets_of_100_elements_lie_as_megatron_core_laid_them() -> None:
    """A bucket ends with the tensor that fills it; the next begins at its padded end."""
    start, buckets = zero.megatron_buckets([prod(s) for s in SAMPLE], ranks=2, bucket_size=100)

    assert [(b.start, b.padded, b.unpadded) for b in buckets] == [
        (0, 256, 145),
        (256, 256, 210),
        (512, 128, 99),
    ]
    assert [b.tensors for b in buckets] == [(4, 3), (2,), (1, 0)]
    assert start.tolist() == [576, 512, 256, 64, 0]
    assert sum(b.unpadded for b in buckets) == 454


def test_ranks_of_megatron_own_equal_parts_of_every_bucket() -> None:
    """Two ranks and one bucket of 640: the border at 320 falls into b.weight, which begins at 192."""
    assert runs(zero.megatron(SAMPLE, 2)) == [
        (0, 1, 0, 35), (1, 1, 0, 7), (2, 0, 0, 128), (2, 1, 128, 210), (3, 0, 0, 81), (4, 0, 0, 9),
    ]  # fmt: skip
    assert runs(zero.megatron(SAMPLE, 2, bucket_size=100)) == [
        (0, 1, 0, 35), (1, 0, 0, 7), (2, 0, 0, 128), (2, 1, 128, 210), (3, 0, 0, 64), (3, 1, 64, 81),
        (4, 0, 0, 9),
    ]  # fmt: skip


def test_deepspeed_pads_to_twice_the_ranks() -> None:
    """Numbers of DeepSpeed 0.19.8 on two ranks: 56 elements stay 56, and the weight of 35 is 28 + 7; 21 become 24."""
    assert runs(zero.deepspeed([(7, 5), (21,)], 2)) == [(0, 0, 0, 28), (0, 1, 28, 35), (1, 1, 0, 21)]
    assert runs(zero.deepspeed([(7,), (7,), (7,)], 2)) == [
        (0, 0, 0, 7),
        (1, 0, 0, 5),
        (1, 1, 5, 7),
        (2, 1, 0, 7),
    ]
    assert runs(zero.even([(21,)], 2)) == [(0, 0, 0, 11), (0, 1, 11, 21)]


@pytest.mark.parametrize(
    ("rows", "ranks", "sizes"), [(7, 2, [4, 3]), (3, 2, [2, 1]), (2, 3, [1, 1, 0]), (8, 32, [1] * 8)]
)
def test_fsdp2_cuts_rows_as_torch_chunk(rows: int, ranks: int, sizes: list[int]) -> None:
    """The chunks of real FSDP2 checkpoints: equal but for the last, and later ranks may hold none."""
    first = 0
    expected = []
    for rank, size in enumerate(sizes):
        if size:
            expected.append((0, rank, first * 5, (first + size) * 5))
        first += size

    assert runs(zero.rows([(rows, 5)], ranks)) == expected


@given(st.integers(0, 40), st.integers(1, 40))
def test_fsdp2_rows_are_those_of_torch(rows: int, ranks: int) -> None:
    """`torch.chunk` itself, where torch is installed."""
    torch = pytest.importorskip("torch")
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)]

    cut = runs(zero.rows([(rows,)], ranks))

    assert cut == [(0, rank, c[0], c[-1] + 1) for rank, c in enumerate(chunks) if c]


def test_tensors_without_axes_stay_whole() -> None:
    """A scalar lies on the first rank; a tensor without rows on none."""
    assert runs(zero.rows([(), (0, 4), (2, 0)], 4)) == [(0, 0, 0, 1)]


def test_whole_tensors_are_dealt_largest_first() -> None:
    """Each to the rank with the least so far, ties to the first: 9 | 8, then 3 to the second, 2 to the first."""
    assert runs(zero.whole([(2,), (9,), (3,), (8,), (0,)], 2)) == [
        (0, 0, 0, 2), (1, 0, 0, 9), (2, 1, 0, 3), (3, 1, 0, 8),
    ]  # fmt: skip


@given(SHAPES, st.integers(1, 7), st.sampled_from([*ZERO_RULES, "rows"]))
def test_every_element_belongs_to_one_rank(shapes: list[tuple[int, ...]], ranks: int, rule: str) -> None:
    """Runs of a tensor tile it, whatever the rule; no run is empty."""
    cut = zero.rows(shapes, ranks) if rule == "rows" else zero.cut(rule, shapes, ranks)

    for tensor, shape in enumerate(shapes):
        mine = [(first, last) for t, _, first, last in runs(cut) if t == tensor]
        assert sorted(e for first, last in mine for e in range(first, last)) == list(range(prod(shape)))
        assert all(first < last for first, last in mine)
    assert all(0 <= rank < ranks for rank in cut.rank)


def test_an_empty_tensor_at_the_start_of_another_hides_nothing() -> None:
    """Megatron's reverse order gives an empty tensor the place of its neighbour."""
    assert runs(zero.megatron([(5,), (0,)], 1)) == [(0, 0, 0, 5)]


def test_unknown_rules_are_listed() -> None:
    """The message names the rules there are; a fault inside a rule is not taken for one."""
    with pytest.raises(LayoutError, match="unknown ZeRO rule 'odd'; known: even, megatron, deepspeed, whole"):
        zero.cut("odd", [(1,)], 1)


def test_buffers_past_32_bits_are_cut_exactly() -> None:
    """A group of 2^40 elements over 3 ranks."""
    cut = zero.even([(1 << 39,), (1 << 39,)], 3)
    share = -(-(1 << 40) // 3)

    assert np.array_equal(
        cut.last - cut.first, [share, (1 << 39) - share, 2 * share - (1 << 39), (1 << 40) - 2 * share]
    )
