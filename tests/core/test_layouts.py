"""Layouts: text, rank order, stages, and what is refused."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.layouts import DEFAULT_ORDER, MAX_WORLD, Layout
from ckptkit.errors import LayoutError
from tests.core.drawing import layouts


@given(st.integers(0, 12), st.data())
def test_a_layout_reads_what_it_writes(layers: int, data: st.DataObject) -> None:
    """`str` and `parse` are inverse, and `as_dict` builds the same layout from plain values."""
    layout = data.draw(layouts(layers))

    assert Layout.parse(str(layout)) == layout
    assert Layout(**layout.as_dict()) == layout  # type: ignore[arg-type]


def test_text_may_come_in_any_order_and_leaves_out_defaults() -> None:
    """What `--layout` takes and `inspect` prints."""
    layout = Layout.parse(" zero=1:whole, dp=4 ep=4,pp=4:6/7/7/7,tp=2 ")

    assert layout == Layout(tp=2, pp=4, ep=4, dp=4, zero=1, rule="whole", stages=(6, 7, 7, 7))
    assert str(layout) == "tp=2,pp=4:6/7/7/7,ep=4,dp=4,zero=1:whole"
    assert (str(Layout()), Layout.parse("")) == ("tp=1", Layout())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", r"'tp' is not NAME=VALUE with one of tp, pp, vpp, ep, etp, cp, dp, zero, order"),
        ("tpp=2", "'tpp=2' is not NAME=VALUE"),
        ("tp=2,tp=4", "'tp=4' is given twice"),
        ("tp=", "'tp=' needs a whole number"),
        ("tp=-1", "needs a whole number"),
        ("tp=²", "needs a whole number"),
        ("tp=1.5", "needs a whole number"),
        ("tp=" + "9" * 5000, "needs a whole number"),
        ("tp=0", "a degree is at least 1"),
        ("tp=2:4", "takes nothing after ':'"),
        ("pp=2:a/b", "stage sizes look like pp=4:6/7/7/7"),
        ("pp=2:", "stage sizes look like pp=4:6/7/7/7"),
        ("pp=2:3/³", "stage sizes look like pp=4:6/7/7/7"),
        ("pp=2:1/2/3", "pp=2 needs 2 stage sizes, has 3"),
        ("pp=2:1/2,vpp=2", "stage sizes and vpp cannot be combined"),
        ("zero=4", "ZeRO stages are 0, 1, 2 and 3"),
        ("zero=1:best", "known rules are even, megatron, deepspeed, whole"),
        ("zero=1:", "known rules are even"),
        ("dp=4194305", "more than 4194304 are not supported"),
        ("ep=3,dp=4", r"etp\*ep = 3 must divide tp\*cp\*dp = 4"),
        ("order=tp-dp", "must be tp, cp, ep, dp, pp in some order"),
        (
            "tp=2,pp=2,order=tp-pp-cp-ep-dp",
            "puts dense and expert tensors of one rank on different pipeline stages",
        ),
    ],
)
def test_wrong_text_is_refused_with_a_reason(text: str, message: str) -> None:
    """Each message names the part that is wrong."""
    with pytest.raises(LayoutError, match=message):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 2.0}, "tp=2.0: must be a whole number"),
        ({"tp": True}, "tp=True: must be a whole number"),
        ({"zero": None}, "zero=None: must be a whole number"),
        ({"pp": 2, "stages": [1, "2"]}, "must be whole numbers, one a stage"),
        ({"pp": 2, "stages": [-1, 2]}, "must be whole numbers, one a stage"),
        ({"order": 5}, "must be tp, cp, ep, dp, pp in some order"),
        ({"dp": 1 << 62}, f"more than {MAX_WORLD}"),
    ],
)
def test_values_of_a_file_are_checked_like_text(values: dict[str, object], message: str) -> None:
    """Layouts are built from other people's JSON, too."""
    with pytest.raises(LayoutError, match=message):
        Layout(**values)  # type: ignore[arg-type]


def groups(coordinate: dict[str, np.ndarray], axis: str, names: tuple[str, ...]) -> list[list[int]]:
    """Ranks that differ in `axis` only, as Megatron lists its groups."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(len(coordinate[axis])):
        found.setdefault(tuple(int(coordinate[n][rank]) for n in names if n != axis), []).append(rank)
    return sorted(found.values())


def test_groups_of_16_ranks_are_those_that_megatron_documents() -> None:
    """The example in the docstring of `initialize_model_parallel` (Megatron-LM, parallel_state.py): tp=2, pp=4."""
    dense = Layout(tp=2, pp=4, dp=2).dense
    names = ("tp", "cp", "dp", "pp")

    assert groups(dense, "tp", names) == [[r, r + 1] for r in range(0, 16, 2)]
    assert groups(dense, "dp", names) == [
        [0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15],
    ]  # fmt: skip
    assert groups(dense, "pp", names) == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_groups_of_8_ranks_written_out() -> None:
    """tp=2, pp=2, dp=2, ep=2: experts take the place of tensor parallelism, and their replicas that of data."""
    layout = Layout(tp=2, pp=2, dp=2, ep=2)

    assert layout.dense["tp"].tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert layout.dense["dp"].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.dense["pp"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert layout.expert["ep"].tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert layout.expert["edp"].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.expert["etp"].tolist() == [0] * 8
    assert layout.coordinate(6) == {"tp": 0, "pp": 1, "cp": 0, "dp": 1}


def test_context_parallel_ranks_come_before_data_parallel_ones() -> None:
    """tp=1, cp=2, dp=2: shards of one tensor are counted cp first, as in Megatron's dp-cp groups."""
    assert Layout(cp=2, dp=2).dense["shard"].tolist() == [0, 1, 2, 3]
    assert Layout(cp=2, dp=2, order="tp-dp-ep-cp-pp").dense["cp"].tolist() == [0, 0, 1, 1]


@given(layouts(0))
def test_coordinates_follow_rank_generators_rule(layout: Layout) -> None:
    """Megatron's `RankGenerator`: nested loops, the last axis of the order outermost."""
    for mesh, sizes in (
        (layout.dense, {"tp": layout.tp, "cp": layout.cp, "ep": 1, "dp": layout.dp, "pp": layout.pp}),
        (layout.expert, {"tp": layout.etp, "cp": 1, "ep": layout.ep, "dp": layout.edp, "pp": layout.pp}),
    ):
        names = {"tp": "etp", "dp": "edp"} if mesh is layout.expert else {}
        axes = list(reversed(layout.order.split("-")))
        for rank, place in enumerate(product(*(range(sizes[axis]) for axis in axes))):
            for axis, value in zip(axes, place, strict=True):
                if names.get(axis, axis) in mesh:
                    assert mesh[names.get(axis, axis)][rank] == value


@given(st.permutations(DEFAULT_ORDER.split("-")), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))
def test_an_order_is_refused_exactly_when_the_meshes_disagree_on_stages(
    order: list[str], etp: int, ep: int
) -> None:
    """Brute force over all ranks: the stage by the dense mesh and by the expert mesh."""
    dense = {"tp": 2, "cp": 2, "ep": 1, "dp": 2, "pp": 3}
    expert = {"tp": etp, "cp": 1, "ep": ep, "dp": 8 // (etp * ep), "pp": 3}

    def stages(sizes: dict[str, int]) -> list[int]:
        slowest = list(reversed(order))
        return [place[slowest.index("pp")] for place in product(*(range(sizes[axis]) for axis in slowest))]

    def build() -> Layout:
        return Layout(tp=2, pp=3, ep=ep, etp=etp, cp=2, dp=2, order="-".join(order))

    if stages(dense) == stages(expert):
        assert build().dense["pp"].tolist() == stages(dense)
    else:
        with pytest.raises(LayoutError, match="pipeline stages"):
            build()


def test_chunks_of_virtual_stages_are_interleaved() -> None:
    """10 layers on 2 stages of 5 chunks: layer k on stage k mod 2 (Megatron-LM, transformer_layer offsets)."""
    assert Layout(pp=2, vpp=5).stage_of_layers(10).tolist() == [0, 1] * 5
    assert Layout(pp=2, vpp=1).stage_of_layers(10).tolist() == [0] * 5 + [1] * 5
    assert Layout(pp=2, vpp=2).stage_of_layers(8).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_uneven_stages_are_written_out() -> None:
    """Without stage sizes the first stages take one layer more; with them they must add up."""
    assert Layout(pp=4).with_stages(27).stages == (7, 7, 7, 6)
    assert Layout(pp=4).with_stages(28) == Layout(pp=4)
    assert Layout.parse("pp=3:0/4/1").stage_of_layers(5).tolist() == [1, 1, 1, 1, 2]
    with pytest.raises(LayoutError, match="stage sizes add up to 5, the model has 6 layers"):
        Layout.parse("pp=3:0/4/1").stage_of_layers(6)
    with pytest.raises(LayoutError, match=r"pp\*vpp = 4 must divide the model's 10 layers"):
        Layout(pp=2, vpp=2).stage_of_layers(10)


def test_layouts_are_compared_by_what_they_mean() -> None:
    """The rule of a ZeRO stage that has none is no difference."""
    assert Layout(zero=3, rule="whole") == Layout(zero=3)
    assert Layout(zero=0, rule="whole") == Layout()
    assert Layout(zero=1, rule="whole") != Layout(zero=1)
