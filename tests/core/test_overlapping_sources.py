"""Sources whose pieces overlap: a right, disjoint cover, whatever boxes there are."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.boxes import Box
from ckptkit.core.catalog import Catalog, Entries, File
from ckptkit.core.copies import copies_into, replica_pairs
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.local import LocalTensor, Segment
from ckptkit.core.plan import make_plan
from ckptkit.core.schema import Tensor
from ckptkit.errors import CoverageError
from tests.core.drawing import boxes
from tests.core.filling import by_pieces, carry_out, entry_bytes, place

I16 = dtype_named("int16")
Bounds = tuple[tuple[int, ...], tuple[int, ...]]


def of_boxes(shape: tuple[int, ...], chosen: list[Bounds], files: list[int]) -> Catalog:
    """A checkpoint of one tensor `w`, stored as contiguous boxes."""
    axes = len(shape)
    locals_ = [
        LocalTensor(
            f"box{number}",
            tuple(b - a for a, b in zip(lo, hi, strict=True)),
            (Segment("w", Box(lo, hi), tuple(range(axes)), (1,) * axes, (0,) * axes),),
        )
        for number, (lo, hi) in enumerate(chosen)
    ]
    count = len(locals_)
    sizes = [local.size for local in locals_]
    return Catalog(
        format="test",
        where="boxes",
        tensors={"w": Tensor("w", tuple(f"axis{d}" for d in range(axes)), shape)},
        locals=locals_,
        files=[File("", rank=number) for number in range(4)],
        entries=Entries(files, range(count), [0] * count, [I16.code] * count, [0] * count, sizes),
    )


def grid(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Bounds]:
    """A cut of the whole tensor along every axis."""
    edges = []
    for size in shape:
        inner = draw(st.lists(st.integers(1, size - 1), unique=True, max_size=2)) if size > 1 else []
        edges.append(sorted({0, size, *inner}))
    cells = product(*(pairwise(e) for e in edges))
    return [(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in cells]


@st.composite
def covers(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Bounds]:
    """Boxes in random order that cover the tensor, with partial overlaps and duplicates."""
    chosen = [*grid(draw, shape), *draw(st.lists(boxes(shape), max_size=6))]
    chosen += draw(st.lists(st.sampled_from(chosen), max_size=3))
    return list(draw(st.permutations(chosen)))


@settings(max_examples=150)
@given(st.data())
def test_overlapping_pieces_give_a_disjoint_cover(data: st.DataObject) -> None:
    """Every element comes from exactly one piece, the first that has it; all others are listed as its replicas."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    chosen, wanted = data.draw(covers(shape)), data.draw(covers(shape))
    files = data.draw(st.lists(st.integers(0, 3), min_size=len(chosen), max_size=len(chosen)))
    source = of_boxes(shape, chosen, files)
    destination = of_boxes(shape, wanted, [number % 4 for number in range(len(wanted))])
    values = {("w", "param"): np.arange(1, np.prod(shape, dtype=int) + 1, dtype=np.int16).reshape(shape)}
    given_, made, expected = place(source), place(destination), place(destination)
    for catalog, contents in ((source, given_), (destination, expected)):
        for entry in range(len(catalog.entries)):
            entry_bytes(catalog, contents, entry)[:] = by_pieces(catalog, entry, values)

    plan = make_plan(source, destination)

    owner = np.full(shape, -1)
    kept = plan.source_pieces
    for k in range(len(kept)):
        box = tuple(slice(a, b) for a, b in zip(kept.lo[k], kept.hi[k], strict=True))
        assert np.all(owner[box] == -1), "kept pieces are disjoint"
        owner[box] = kept.entry[k]
    first = np.full(shape, len(chosen))
    for number, (lo, hi) in reversed(list(enumerate(chosen))):
        first[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))] = number
    assert np.array_equal(owner, first), "the first piece wins"
    carry_out(copies_into(plan), given_, made)
    assert [file.tobytes() for file in made] == [file.tobytes() for file in expected]
    compared = [np.zeros(len(file), np.uint8) for file in given_]
    pairs = replica_pairs(plan)
    for k in range(len(pairs)):
        for index in np.ndindex(*pairs.shape[k]):
            a = int(pairs.src[k] + np.dot(index, pairs.src_strides[k]))
            b = int(pairs.dst[k] + np.dot(index, pairs.dst_strides[k]))
            run = int(pairs.src_run[k])
            compared[pairs.dst_file[k]][b : b + run] = 1
            assert np.array_equal(
                given_[pairs.src_file[k]][a : a + run], given_[pairs.dst_file[k]][b : b + run]
            )
    for number, (lo, hi) in enumerate(chosen):
        box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
        spare = (owner[box] != number).reshape(-1).repeat(I16.itemsize)
        assert np.all(entry_bytes(source, compared, number)[spare]), "a replica that nobody compares"


@given(st.data())
def test_overlapping_runs_of_one_stored_tensor_give_a_disjoint_cover(data: st.DataObject) -> None:
    """As above, where entries are runs of one local tensor that overlap or repeat."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    size = int(np.prod(shape))
    edges = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
    spare = data.draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size)), max_size=4))
    runs = data.draw(st.permutations([*pairwise(edges), *((min(r), max(r)) for r in spare)]))
    whole = ((0,) * len(shape), shape)
    source, destination = of_boxes(shape, [whole], [0]), of_boxes(shape, [whole], [0])
    count = len(runs)
    source.entries = Entries(
        [k % 4 for k in range(count)], [0] * count, [0] * count, [I16.code] * count,
        [first for first, _ in runs], [last for _, last in runs],
    )  # fmt: skip

    plan = make_plan(source, destination)

    owner = np.full(shape, -1)
    kept = plan.source_pieces
    for k in range(len(kept)):
        box = tuple(slice(a, b) for a, b in zip(kept.lo[k], kept.hi[k], strict=True))
        assert np.all(owner[box] == -1), "kept pieces are disjoint"
        owner[box] = kept.entry[k]
    expected = [next(k for k, (a, b) in enumerate(runs) if a <= element < b) for element in range(size)]
    assert owner.reshape(-1).tolist() == expected, "the first entry wins"
    assert plan.elements == size


def test_pieces_that_leave_elements_out_are_no_cover_however_many_they_are() -> None:
    """Coverage counts elements, not volumes: two copies of one half do not make a whole."""
    half = ((0, 0), (4, 2))
    source = of_boxes((4, 4), [half, half], [0, 1])
    destination = of_boxes((4, 4), [((0, 0), (4, 4))], [0])

    with pytest.raises(CoverageError, match=r"boxes holds 8 of the 16 elements of w \[0:4, 0:4\]"):
        make_plan(source, destination)


def test_a_destination_that_repeats_one_part_and_lacks_another_drops_the_other() -> None:
    """Two names of the same half are as many elements as the tensor, but not the tensor."""
    half = ((0, 0), (4, 2))
    source = of_boxes((4, 4), [((0, 0), (4, 4))], [0])
    destination = of_boxes((4, 4), [half, half], [0, 1])

    plan = make_plan(source, destination)

    assert [(d.tensor, d.role, d.nbytes) for d in plan.drops] == [("w", "param", 8 * I16.itemsize)]
    assert not plan.lossless
