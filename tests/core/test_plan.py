"""Plans: which role comes from which, what is cast, dropped or refused, and numbers past 32 bits."""

import itertools

import numpy as np
import pytest

from ckptkit.core.catalog import ROLES, Catalog, Entries, File
from ckptkit.core.copies import copies_into
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.layouts import Layout
from ckptkit.core.plan import Cast, make_plan, resolve
from ckptkit.core.schema import StoredNames, Tensor
from ckptkit.core.shards import shards
from ckptkit.errors import CoverageError, LayoutError

F32, BF16, U8 = (dtype_named(name) for name in ("float32", "bfloat16", "uint8"))


def stored(
    shapes: dict[str, tuple[int, ...]], held: dict, layout: str = "tp=1", where: str = "here"
) -> Catalog:
    """A checkpoint of plain tensors in a layout that needs no model."""
    tensors = {
        name: Tensor(name, tuple(f"a{d}" for d in range(len(shape))), shape) for name, shape in shapes.items()
    }
    found = shards(StoredNames(tensors), Layout.parse(layout), held, tensors, where=where)
    ends = np.zeros(len(found.files), np.int64)
    for entry in range(len(found.entries)):
        file = found.entries.file[entry]
        found.entries.offset[entry] = ends[file]
        ends[file] += found.entries.nbytes[entry]
    return found


@pytest.mark.parametrize(
    ("source", "wanted", "origin"),
    [
        ({"param": BF16, "master": F32}, {"param": BF16}, "param"),
        ({"param": BF16, "master": F32}, {"param": F32}, "master"),
        ({"param": BF16}, {"param": F32}, "param"),
        ({"master": F32}, {"param": BF16}, "master"),
        ({"param": BF16, "master": F32}, {"master": F32}, "master"),
        ({"param": F32}, {"master": F32}, "param"),
        ({"param": BF16, "exp_avg": F32}, {"exp_avg": F32}, "exp_avg"),
    ],
)
def test_roles_resolve_by_rule(source: dict, wanted: dict, origin: str) -> None:
    """A parameter from itself, else its master copy, which also serves where more bits are wanted; a master copy from
    itself, else an fp32 parameter."""
    held = {("w", role): dtype for role, dtype in source.items()}

    found = resolve(held, {("w", role): dtype for role, dtype in wanted.items()})

    assert found == {("w", role): ("w", origin) for role in wanted}


def test_a_master_copy_is_made_from_a_short_parameter_only_when_asked() -> None:
    """The bits that bfloat16 dropped do not come back; the message names the flag."""
    with pytest.raises(CoverageError, match=r"no master of w; .*--master-from-param") as caught:
        resolve({("w", "param"): BF16}, {("w", "master"): F32})
    assert caught.value.tensor == "w"

    assert resolve({("w", "param"): BF16}, {("w", "master"): F32}, master_from_param=True)


def test_missing_tensors_are_counted() -> None:
    """The first is named, all are in the error's facts; moments have no stand-in."""
    with pytest.raises(CoverageError, match=r"the source has no exp_avg of v \(and 1 more\)") as caught:
        resolve({("v", "param"): F32}, {("v", "param"): F32, ("v", "exp_avg"): F32, ("x", "param"): F32})

    assert caught.value.missing == [("v", "exp_avg"), ("x", "param")]


def test_changes_of_dtype_and_role_are_listed() -> None:
    """A param from its fp32 master loses bits; a master from an fp32 param does not."""
    source = stored({"v": (4,), "w": (4,)}, {("v", "master"): F32, ("w", "param"): F32})
    wanted = {("v", "param"): BF16, ("w", "master"): F32, ("w", "param"): F32}

    plan = make_plan(source, stored({"v": (4,), "w": (4,)}, wanted))

    assert plan.casts == [Cast("v", "param", "master", F32, BF16), Cast("w", "master", "param", F32, F32)]
    assert [cast.lossless for cast in plan.casts] == [False, True]
    assert not plan.lossless
    copies = copies_into(plan)
    assert sorted(zip(copies.src_run.tolist(), copies.dst_run.tolist(), strict=True)) == [
        (16, 8),
        (16, 16),
        (16, 16),
    ]


def test_what_nobody_asks_for_is_dropped_by_name() -> None:
    """Optimizer state left behind is in the list, with its bytes."""
    source = stored({"w": (4, 2)}, {("w", "param"): BF16, ("w", "exp_avg"): F32})

    plan = make_plan(source, stored({"w": (4, 2)}, {("w", "param"): BF16}))

    assert [(d.tensor, d.role, d.nbytes, d.why) for d in plan.drops] == [
        ("w", "exp_avg", 32, "not asked for")
    ]


def test_shapes_that_differ_are_refused() -> None:
    """With both shapes and both places."""
    source = stored({"w": (4, 2)}, {("w", "param"): F32}, where="old")
    destination = stored({"w": (2, 4)}, {("w", "param"): F32}, where="new")

    with pytest.raises(LayoutError, match=r"w has shape \(4, 2\) in old and \(2, 4\) in new"):
        make_plan(source, destination)


def test_a_gap_names_tensor_box_and_file() -> None:
    """Rank 1 of 3 is missing: rows 2 to 4 of 5."""
    source = stored({"w": (5, 2)}, {("w", "param"): F32}, "dp=3,zero=3", where="run")
    source.entries = source.entries.take(np.flatnonzero(source.entries.file != 1))
    destination = stored({"w": (5, 2)}, {("w", "param"): F32})
    destination.files[0].path = "model.safetensors"

    with pytest.raises(
        CoverageError, match=r"run holds 6 of the 10 elements of w \[0:5, 0:2\].*model.safetensors"
    ) as caught:
        make_plan(source, destination)

    assert (caught.value.tensor, caught.value.box) == ("w", "[0:5, 0:2]")


def test_uneven_and_empty_shards_go_round() -> None:
    """8 rows over 32 ranks (24 empty), 13 rows over 2, 3 and 5, to and from each other: all elements, once."""
    shapes = {"w": (8, 128), "v": (13, 3), "scalar": (), "none": (0, 4)}
    held = {(name, role): F32 for name in shapes for role in ("param", "exp_avg")}
    layouts = [*(f"dp={ranks},zero=3" for ranks in (32, 8, 5, 3, 2)), "dp=4,zero=1:whole", "tp=1"]

    for a, b in itertools.permutations(layouts, 2):
        plan = make_plan(stored(shapes, held, a), stored(shapes, held, b))

        copies = copies_into(plan)
        assert plan.elements == 2 * (8 * 128 + 13 * 3 + 1)
        assert int((copies.dst_run * copies.shape.prod(axis=1)).sum()) == 4 * plan.elements


def test_axes_and_offsets_past_32_bits_are_exact() -> None:
    """An axis of 2^33 elements from 3 ranks to 2: boxes, offsets and strides need 64 bits."""
    size = 1 << 33
    held = {("w", "param"): F32, ("v", "param"): U8}
    shapes = {"w": (size, 2), "v": ((1 << 31) + 1,)}
    third, half = -(-size // 3), size // 2

    plan = make_plan(stored(shapes, held, "dp=3,zero=3"), stored(shapes, held, "dp=2,zero=3"))

    copies = copies_into(plan)
    rows = [
        (s, d, src, dst, run)
        for s, d, src, dst, run in zip(
            *(x.tolist() for x in (copies.src_file, copies.dst_file, copies.src, copies.dst, copies.src_run)),
            strict=True,
        )
        if run > 1 << 31
    ]
    assert rows == [
        (0, 0, 0, 0, third * 8),
        (1, 0, 0, third * 8, (half - third) * 8),
        (1, 1, (half - third) * 8, 0, (2 * third - half) * 8),
        (2, 1, 0, (2 * third - half) * 8, (size - 2 * third) * 8),
    ]
    assert plan.elements == size * 2 + (1 << 31) + 1


def test_the_last_element_of_the_longest_32_bit_axis_is_copied() -> None:
    """2^31 - 1 elements: boxes still have 32 bits, and their upper bound is the largest such number."""
    size = (1 << 31) - 1
    source = stored({"w": (size,)}, {("w", "param"): U8}, "dp=2,zero=3")
    destination = stored({"w": (size,)}, {("w", "param"): U8}, "dp=4,zero=3")

    plan = make_plan(source, destination)

    assert destination.pieces.hi.dtype == np.int32
    assert destination.pieces.hi.max() == size
    assert plan.elements == size and len(plan.src) == 4


def test_tensors_of_one_checkpoint_need_not_have_the_same_axes_as_those_of_the_other() -> None:
    """A source with a wider tensor that nobody asks for."""
    source = stored({"w": (4,), "wide": (1, 2, 3)}, {("w", "param"): F32, ("wide", "param"): F32})
    destination = stored({"w": (4,)}, {("w", "param"): F32})

    assert make_plan(source, destination).elements == 4
    with pytest.raises(CoverageError, match="no param of wide"):
        make_plan(destination, source)


def test_an_empty_checkpoint_plans_to_nothing() -> None:
    """No tensor, no entry, no copy."""
    nothing = Catalog(
        format="", where="", tensors={}, locals=[], files=[File("f")], entries=Entries.concat([])
    )

    plan = make_plan(nothing, nothing)

    assert len(copies_into(plan)) == len(copies_into(plan, np.asarray([0]))) == 0
    assert plan.lossless and plan.elements == 0
    assert set(ROLES) >= {role for _, role in nothing.held}
