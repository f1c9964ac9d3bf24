"""Catalogs of other people's files: every reference and bound is checked before it is used."""

from typing import Any

import numpy as np
import pytest

from ckptkit.core.boxes import Box
from ckptkit.core.catalog import Catalog, Entries, File
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.local import LocalTensor, Segment
from ckptkit.core.schema import Tensor
from ckptkit.errors import CkptError, FormatError, LayoutError

F32, I8 = dtype_named("float32").code, dtype_named("int8").code


def catalog(
    segment: dict[str, Any] | None = None,
    entry: dict[str, Any] | None = None,
    shape: tuple[int, ...] = (2, 3),
) -> Catalog:
    """Tensor `w` [4, 3], of which rows 2 to 4 are stored; some of its columns replaced."""
    parts = {
        "tensor": "w",
        "box": Box((2, 0), (4, 3)),
        "dim": (0, 1),
        "step": (1, 1),
        "origin": (0, 0),
        **(segment or {}),
    }
    columns = {
        "file": [0],
        "local": [0],
        "role": [0],
        "dtype": [F32],
        "first": [0],
        "last": [6],
        **(entry or {}),
    }
    return Catalog(
        format="test",
        where="run",
        tensors={"w": Tensor("w", ("a", "b"), (4, 3))},
        locals=[LocalTensor("w.rank1", shape, (Segment(**parts),))],
        files=[File("rank-1")],
        entries=Entries(**columns),
    )


def test_a_sound_catalog_has_its_pieces() -> None:
    """One piece: rows 2 to 4."""
    found = catalog()

    assert (found.pieces.lo.tolist(), found.pieces.hi.tolist()) == ([[2, 0]], [[4, 3]])
    assert found.held == {("w", "param"): dtype_named("float32")}
    assert found.describe_piece(0) == "w [2:4, 0:3], 'w.rank1' (param) in rank-1"


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        ({"tensor": "v"}, "'w.rank1' holds .* of v, which is no tensor of it"),
        ({"box": Box((2,), (4,)), "dim": (0,), "step": (1,)}, "which is a tensor of 2 axes"),
        ({"box": Box((3, 0), (5, 3))}, r"cannot hold \[3:5, 0:3\] of w \(4, 3\)"),
        ({"box": Box((1, 0), (4, 3))}, r"'w.rank1' \(2, 3\) cannot hold \[1:4, 0:3\] of w"),
        ({"origin": (1, 0)}, "cannot hold"),
        ({"origin": (-1, 0)}, "cannot hold"),
        ({"step": (2, 1)}, "cannot hold"),
        ({"step": (-1, 1)}, "cannot hold"),
    ],
)
def test_segments_that_leave_their_tensors_are_refused(segment: dict[str, Any], message: str) -> None:
    """Boxes come from headers: one past the tensor, or past the bytes that are stored, is no piece."""
    with pytest.raises(FormatError, match=f"run: .*{message}"):
        _ = catalog(segment).pieces


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"local": [1]}, "entry 0 of its index refers to nothing there is"),
        ({"file": [1]}, "refers to nothing"),
        ({"role": [200]}, "refers to nothing"),
        ({"dtype": [200]}, "refers to nothing"),
        ({"last": [7]}, r"'w.rank1' \(param\) elements 0:7 in rank-1 leaves its tensor of 6 elements"),
        ({"first": [-1]}, "leaves its tensor"),
        ({"first": [4], "last": [3]}, "leaves its tensor"),
    ],
)
def test_entries_that_refer_to_nothing_are_refused(entry: dict[str, Any], message: str) -> None:
    """Numbers of an index are checked before they index anything."""
    with pytest.raises(FormatError, match=message):
        _ = catalog(entry=entry).pieces


def test_one_tensor_in_two_dtypes_is_refused() -> None:
    """A plan could not say what it reads."""
    both = {
        "file": [0, 0],
        "local": [0, 0],
        "role": [0, 0],
        "dtype": [F32, I8],
        "first": [0, 3],
        "last": [3, 6],
    }

    with pytest.raises(
        FormatError, match=r"w \(param\) is stored as float32 in one place and int8 in another"
    ):
        _ = catalog(entry=both).held


def test_shapes_that_overflow_are_refused_when_built() -> None:
    """Before any stride is computed."""
    with pytest.raises(CkptError, match="cannot have shape"):
        catalog(shape=(1 << 40, 1 << 40))


@pytest.mark.parametrize(
    "wrong", [{"dim": (0, 2)}, {"dim": (-2, 0)}, {"dim": (0,)}, {"step": (1,)}, {"origin": (0,)}]
)
def test_maps_of_the_wrong_length_are_refused_when_built(wrong: dict[str, Any]) -> None:
    """Dimensions, steps and origin of a header's map fit the box and the shape."""
    with pytest.raises(LayoutError, match=r"w.rank1 \(2, 3\) cannot hold \[2:4, 0:3\] of w: .* do not fit"):
        catalog(wrong)


def test_runs_of_several_roles_have_equal_pieces() -> None:
    """Elements 1 to 5 of a [2, 3] block at row 2: the end of one row and the start of the next, for each role."""
    columns = {
        "file": [0, 0],
        "local": [0, 0],
        "role": [2, 3],
        "dtype": [F32, F32],
        "first": [1, 1],
        "last": [5, 5],
    }

    pieces = catalog(entry=columns).pieces

    assert pieces.entry.tolist() == [0, 0, 1, 1]
    assert pieces.lo.tolist() == [[2, 1], [3, 0]] * 2
    assert pieces.hi.tolist() == [[3, 3], [4, 2]] * 2
    assert pieces.volume.tolist() == [2, 2] * 2


def test_entries_keep_their_columns_together() -> None:
    """`take` and `concat` move whole rows."""
    entries = Entries([0, 1, 2], [5, 6, 7], [0, 1, 2], [F32, I8, I8], [0, 0, 0], [4, 5, 6], [9, 8, 7])

    twice = Entries.concat([entries.take(np.asarray([2, 0])), entries.take(np.asarray([1]))])

    assert [getattr(twice, c).tolist() for c in ("file", "local", "last", "offset")] == [
        [2, 0, 1],
        [7, 5, 6],
        [6, 4, 5],
        [7, 9, 8],
    ]
    assert twice.nbytes.tolist() == [6, 16, 5]
    assert len(Entries.concat([])) == 0


def test_runs_of_arrays_whose_axes_do_not_nest_are_refused() -> None:
    """Rows that lie within each other have no run of their own; stored whole, they are read like any strides."""
    crossed = {"step": (1, 1), "dim": (0, 0), "origin": (0,)}

    assert len(catalog(crossed, shape=(6,)).pieces) == 1
    with pytest.raises(LayoutError, match="its axes do not nest"):
        _ = catalog(crossed, {"last": [2]}, shape=(6,)).pieces
