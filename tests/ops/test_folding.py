"""Names folded by pattern."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.ops.folding import fold, fold_names


def test_names_that_differ_in_one_number_become_one_pattern() -> None:
    """Contiguous numbers are a range, others a list, a single one stays as it is."""
    names = [f"layers.{i}.q" for i in (0, 1, 2, 5)] + ["norm", "layers.7.k"]

    assert fold_names(names) == ["layers.{0..2,5}.q", "norm", "layers.7.k"]


def test_numbers_are_read_as_numbers() -> None:
    """Ten comes after nine, though not as a text."""
    assert fold_names(f"e.{i}" for i in range(12)) == ["e.{0..11}"]


def test_a_pattern_stands_for_all_combinations_of_its_numbers() -> None:
    """Names that are no full product are several patterns, so that none claims a tensor that is not there."""
    names = [f"l.{i}.e.{e}" for i, e in product(range(2), range(3))] + ["l.2.e.0"]

    assert fold_names(names) == ["l.{0..1}.e.{0..2}", "l.2.e.0"]


def test_names_of_different_values_stay_apart() -> None:
    """Tensors of one pattern share their shape."""
    found = fold([("l.0", (2, 3)), ("l.1", (2, 3)), ("l.2", (4,))])

    assert [(pattern, value) for pattern, value, _ in found] == [("l.{0..1}", (2, 3)), ("l.2", (4,))]


def test_leading_zeros_are_part_of_a_name() -> None:
    """007 and 7 are two names of one pattern."""
    assert fold([("x.007", 0), ("x.7", 0)]) == [("x.{7,007}", 0, ["x.7", "x.007"])]


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_patterns_list_every_name_once(pairs: set[tuple[int, int]]) -> None:
    """Whatever the numbers, each name is in one pattern's list."""
    names = [f"a.{i}.b{e}" for i, e in sorted(pairs)]

    listed = [name for _, _, members in fold((name, 0) for name in names) for name in members]

    assert sorted(listed) == sorted(names)
