"""Resharding: what arrives, what is left behind and says so, and what is refused."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptkit import ops
from ckptkit.core.catalog import Extras
from ckptkit.core.dtypes import dtype_named
from ckptkit.errors import (
    CkptError,
    CorruptionError,
    CoverageError,
    InterruptedRunError,
    LayoutError,
    StoreError,
    UsageError,
)
from ckptkit.formats import reference
from ckptkit.formats.native import NativeFormat
from ckptkit.formats.registry import FORMATS, by_name
from tests.ops.making import TRAINED, ZAYA, contents, flip, make, values

CHAIN = (
    "tp=1,pp=3,ep=2,dp=6,zero=1",
    "dp=5,zero=3",
    "tp=4,ep=2,dp=2,etp=2,zero=1:whole",
    "pp=3:0/1/2,tp=2,ep=4,dp=2,zero=1:megatron",
    "cp=2,dp=2,zero=2:deepspeed,order=tp-dp-cp-ep-pp",
    "tp=1",
    TRAINED,
)
"""Uneven stages, every ZeRO rule, expert-tensor and context parallelism, another rank order, and more heads than keys."""


@pytest.mark.parametrize("optimizer", ["muon+adamw", "adamw"])
def test_optimizer_state_survives_a_chain_of_layouts(tmp_path: Path, optimizer: str) -> None:
    """From each layout to the next and back to the first: every tensor equal in every role, and the first's files again."""
    first = made = make(tmp_path / "0", layout=TRAINED, optimizer=optimizer)
    truth = values(first)

    for number, layout in enumerate(CHAIN, 1):
        done = ops.reshard(made, str(tmp_path / str(number)), layout=layout)
        assert done.checked
        made = done.url
        reference.same(truth, values(made))

    ours, theirs = contents(first), contents(made)
    data = [name for name in ours if name.endswith(".safetensors")]
    assert [ours[name] for name in data] == [theirs[name] for name in data]


def test_weights_come_back_through_every_format(tmp_path: Path, weights: str) -> None:
    """hf, two native layouts, hub, hf: the files are those of the start."""
    a = ops.reshard(weights, str(tmp_path / "a"), to="native", layout="tp=2,pp=2,ep=4,dp=4,zero=1").url
    b = ops.reshard(a, str(tmp_path / "b"), layout="tp=1,pp=3,ep=2,dp=6,zero=1").url
    hub = ops.reshard(b, str(tmp_path / "hub"), to="hub").url
    back = ops.reshard(hub, str(tmp_path / "back"), to="hf").url

    assert contents(back) == contents(weights)


@pytest.fixture(scope="module")
def in_format(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The same weights in any format, each made once."""
    folder = tmp_path_factory.mktemp("formats")
    return cache(lambda name: make(folder / name, to=name, optimizer="none", step=0))


@pytest.mark.parametrize(
    ("source", "target"), permutations([name for name in FORMATS if "base" in by_name(name).parts], 2)
)
def test_every_pair_of_formats_works(
    tmp_path: Path, in_format: Callable[[str], str], source: str, target: str
) -> None:
    """In both directions, without the trainer; what arrives is equal."""
    a = in_format(source)

    b = ops.reshard(a, str(tmp_path / "b"), to=target, drop_extras=True).url

    assert ops.open(b).catalog.format == target
    reference.same(values(a), values(b))


@pytest.mark.parametrize("name", [name for name in FORMATS if by_name(name).ranks])
@pytest.mark.parametrize("layout", ["tp=2,ep=2,dp=2,zero=1", "dp=3,zero=3"])
def test_training_state_survives_every_format_with_ranks(
    tmp_path: Path, trained: str, name: str, layout: str
) -> None:
    """Moments, momentum, masters, groups and step: there and back again, without expert parallelism where a format refuses it."""
    try:
        there = ops.reshard(trained, str(tmp_path / "there"), to=name, layout=layout, drop_extras=True).url
    except LayoutError as refused:
        assert name == "deepspeed" and "cannot hold ep=2" in str(refused)
        assert not list(tmp_path.iterdir())
        layout = layout.replace("ep=2,", "")
        there = ops.reshard(trained, str(tmp_path / "there"), to=name, layout=layout, drop_extras=True).url
    back = ops.reshard(there, str(tmp_path / "back"), to="native", layout=TRAINED).url

    report = ops.diff(trained, back)

    assert not report.tensors_differing and not report.only_a and not report.only_b
    assert not [line for line in report.extras if not line.startswith("per-rank")]


def test_any_family_of_names_can_be_cut_by(tmp_path: Path, trained: str) -> None:
    """Megatron's order and stages differ from ours: other files, the same tensors, also back."""
    a = ops.reshard(
        trained, str(tmp_path / "a"), names="megatron", layout="pp=3,tp=2,dp=2,ep=2,zero=1:megatron"
    ).url
    b = ops.reshard(a, str(tmp_path / "b"), layout=TRAINED).url

    assert ops.open(a).catalog.names == ops.open(b).catalog.names == "megatron"
    reference.same(values(trained), values(a))
    reference.same(values(trained), values(b))


def test_values_follow_their_expert(tmp_path: Path) -> None:
    """State of expert e is filled with 1000 e + index, its second moment with the negative, and moves with it."""
    truth = reference.random_truth(reference.tiny_zaya(), "canonical", state=True)
    for (name, role), array in truth.values.items():
        if ".experts." in name and array.itemsize == 4:
            index = np.arange(array[0].size, dtype=np.float32).reshape(array[0].shape)
            filled = np.stack([1000 * e + index for e in range(4)]) * (-1 if role == "master" else 1)
            array[...] = filled.astype(np.float32).view(np.uint32)
    reference.write(NativeFormat(), truth, tmp_path / "a", "ep=2,dp=2,zero=1")

    for number, layout in enumerate(("ep=4,dp=4,zero=1", "tp=1"), 1):
        made = ops.reshard(str(tmp_path / "a"), str(tmp_path / str(number)), layout=layout).url
        for e in range(4):
            found = ops.inspect(made).values(f"layers.1.experts.down/momentum[{e}]")
            assert found.reshape(-1).tolist() == [1000 * e + k for k in range(found.size)]


def test_a_vocabulary_is_padded_with_zeros_and_cut_again(tmp_path: Path, trained: str) -> None:
    """70 rows become 512 for four ranks, in weight and moments; elsewhere they are 70 again."""
    made = ops.reshard(trained, str(tmp_path / "a"), layout="tp=4").url
    shown = ops.inspect(made)

    shapes = {row.local_shape for rank in range(4) for row in shown.rank(rank) if row.key == "embed"}
    assert shapes == {(128, 32)} and shown.padding_nbytes == (4 * 128 - 70) * 32 * (2 + 3 * 4)
    for entry in (row for row in shown.rank(3) if row.key == "embed"):
        data = (Path(made) / entry.file).read_bytes()[entry.offset : entry.offset + entry.nbytes]
        assert not any(data)
    hf = ops.reshard(made, str(tmp_path / "hf"), to="hf", drop_optimizer=True).url
    assert ops.inspect(hf).values("embed").shape == (70, 32)


def test_a_layout_that_cannot_be_is_refused_before_anything_is_written(tmp_path: Path, trained: str) -> None:
    """Experts that do not divide, stages that do not add up, ranks in a format without any."""
    for layout, says in (
        ("ep=3,dp=3", "ep=3"),
        ("pp=2:1/1", "add up to 2"),
        ("tp=3", "tp=3"),
        ("pp=2,vpp=2", "vpp"),
    ):
        with pytest.raises(LayoutError, match=says):
            ops.reshard(trained, str(tmp_path / "x"), layout=layout)
    with pytest.raises(UsageError, match="hf holds no ranks"):
        ops.reshard(trained, str(tmp_path / "x"), to="hf", layout="tp=2", drop_optimizer=True)
    assert not list(tmp_path.iterdir())


def test_nothing_is_lost_silently(tmp_path: Path, trained: str, weights: str) -> None:
    """What hf cannot hold is listed and refused, and left behind with its flag; weights alone need none."""
    with pytest.raises(UsageError, match="would be lost") as caught:
        ops.reshard(trained, str(tmp_path / "x"), to="hf")

    assert caught.value.exit_code == 2 and not list(tmp_path.iterdir())
    for part in (
        "master of",
        "exp_avg of",
        "exp_avg_sq of",
        "momentum of",
        "extras: groups",
        "extras: step",
        "per-rank",
    ):
        assert part in str(caught.value)
    assert str(caught.value).count("--drop-optimizer") == 8  # a line each, and what to do at the end
    assert ops.reshard(trained, str(tmp_path / "x"), to="hf", drop_optimizer=True).plan.drops
    assert not ops.reshard(weights, str(tmp_path / "y"), to="hub").plan.drops


def test_extras_of_weights_alone_have_a_flag_of_their_own(tmp_path: Path) -> None:
    """A step without optimizer state is lost with --drop-extras only."""
    made = make(tmp_path / "a", optimizer="none", step=5)

    with pytest.raises(UsageError, match=r"extras: step.*--drop-extras"):
        ops.reshard(made, str(tmp_path / "x"), to="hf")
    assert ops.reshard(made, str(tmp_path / "x"), to="hf", drop_extras=True).checked


def test_the_optimizer_can_be_left_behind_where_it_could_stay(tmp_path: Path, trained: str) -> None:
    """State and groups go, listed; step and random states stay."""
    done = ops.reshard(trained, str(tmp_path / "a"), drop_optimizer=True)

    catalog = ops.open(done.url).catalog
    assert {role for _, role in catalog.held} == {"param", "buffer"}
    assert (
        catalog.step == 1000
        and "groups" not in catalog.extras.common
        and len(catalog.extras.by_coordinate) == 16
    )
    assert {row.what.split()[0] for row in done.plan.drops} == {
        "master",
        "exp_avg",
        "exp_avg_sq",
        "momentum",
        "extras:",
    }


def test_random_states_stay_where_the_mesh_is_the_same(tmp_path: Path, trained: str) -> None:
    """Another ZeRO rule and other expert ranks keep every coordinate; another mesh has none of them, and says so."""
    same = ops.reshard(trained, str(tmp_path / "a"), layout="tp=2,pp=2,ep=2,dp=4,zero=1:whole")
    other = ops.reshard(trained, str(tmp_path / "b"), layout="tp=2,pp=2,ep=2,dp=2")

    kept = ops.open(trained).catalog.extras.by_coordinate
    assert ops.open(same.url).catalog.extras.by_coordinate == kept and not same.plan.drops
    assert ops.open(other.url).catalog.extras.by_coordinate == {}
    (row,) = other.plan.drops
    assert (row.what, row.count, row.allowed) == (
        "extras: per-rank states",
        16,
        True,
    ) and "seeded anew" in row.why


def test_common_and_loader_extras_survive_every_layout(tmp_path: Path) -> None:
    """Plain values of any depth, with their types; loader states of each rank in order."""
    common = {"step": 7, "scheduler": {"last": [1, 2.5, None, True, {"a.b": "c"}]}, "groups": []}
    truth = reference.random_truth(reference.tiny_zaya(), "canonical")
    truth.extras = Extras(common=common, by_sample=[{"position": 7 * rank} for rank in range(4)])
    reference.write(NativeFormat(), truth, tmp_path / "a", "dp=4")

    made = ops.reshard(str(tmp_path / "a"), str(tmp_path / "b"), layout="tp=2,pp=3").url

    found = ops.open(made).catalog.extras
    assert found.common == common and list(found.by_sample) == truth.extras.by_sample


def test_balancing_biases_stay_float32(tmp_path: Path) -> None:
    """Values 6.817 + 0.001 i for 5 classes, which bfloat16 cannot tell apart; the rest is cast as ml_dtypes casts."""
    truth = reference.random_truth(reference.tiny_zaya(), "canonical", param="float32")
    rng = np.random.default_rng(0)
    for key, array in truth.values.items():
        truth.values[key] = rng.standard_normal(array.shape, np.float32).view(np.uint32)
    bias = (np.float32(6.817) + np.float32(0.001) * np.arange(5, dtype=np.float32)).view(np.uint32)
    truth.values["layers.1.router.balancing", "buffer"] = bias
    reference.write(NativeFormat(), truth, tmp_path / "a", "tp=2,ep=2")

    done = ops.reshard(str(tmp_path / "a"), str(tmp_path / "b"), to="hf", dtype="bfloat16")

    found = values(done.url)
    for key, array in truth.values.items():
        cast = array.view(np.float32)
        expected = cast if key[1] == "buffer" else cast.astype(ml_dtypes.bfloat16)
        assert found[key].tobytes() == expected.tobytes(), key
    assert all(
        row.lossy and (row.source, row.destination) == ("float32", "bfloat16") for row in done.plan.casts
    )
    assert sum(row.count for row in done.plan.casts) == sum(role == "param" for _, role in truth.held)
    assert (
        json.loads((Path(done.url) / "config.json").read_text()).get("torch_dtype", "bfloat16") == "bfloat16"
    )


def test_state_keeps_its_dtype(tmp_path: Path, trained: str) -> None:
    """--dtype is for weights."""
    held = ops.open(ops.reshard(trained, str(tmp_path / "a"), dtype="float32").url).catalog.held

    assert {(role, kind.name) for (_, role), kind in held.items()} == {
        (role, "float32") for role in ("param", "buffer", "master", "exp_avg", "exp_avg_sq", "momentum")
    }
    with pytest.raises(UsageError, match="weights are cast to"):
        ops.reshard(trained, str(tmp_path / "b"), dtype="int8")


def test_values_beyond_the_range_of_a_type_are_counted(tmp_path: Path) -> None:
    """float16 ends at 65,504: what lies above becomes infinite, and a user learns how many values did."""
    truth = reference.random_truth(reference.tiny_zaya(), "canonical", param="float32")
    weights = truth.values["layers.0.attn.q", "param"].view(np.float32)
    weights[...] = 1.0
    weights.flat[:3] = 1e30, -7e4, np.inf  # the last was infinite before
    truth.values["layers.0.attn.k", "param"].view(np.float32)[...] = 65_504.0
    for (name, role), array in truth.values.items():
        if role == "param" and name not in ("layers.0.attn.q", "layers.0.attn.k"):
            array.view(np.float32)[...] = 0.5
    reference.write(NativeFormat(), truth, tmp_path / "a", "tp=2")

    wide = ops.reshard(str(tmp_path / "a"), str(tmp_path / "b"), dtype="bfloat16")
    narrow = ops.reshard(str(tmp_path / "a"), str(tmp_path / "c"), dtype="float16")

    assert not [note for note in wide.notes if "became" in note]
    assert [note for note in narrow.notes if note.startswith("2 finite values lie beyond the range")]


def test_masters_are_made_from_parameters_only_when_asked(tmp_path: Path) -> None:
    """A master is in float32 what its parameter is in bfloat16; every trained tensor gets one."""
    made = make(tmp_path / "a", optimizer="none")

    found = values(ops.reshard(made, str(tmp_path / "b"), master_from_param=True).url)

    for (name, role), array in values(made).items():
        if role == "param":
            assert found[name, "master"].tobytes() == (array.astype(np.uint32) << 16).tobytes()
    assert not [key for key in values(ops.reshard(made, str(tmp_path / "c")).url) if key[1] == "master"]


def test_a_weight_that_exists_as_a_master_alone_is_exported(tmp_path: Path, trained: str) -> None:
    """A ZeRO folder without its parameters still is a whole model."""
    bare = ops.reshard(trained, str(tmp_path / "bare"), drop=["*/param"]).url

    hf = ops.reshard(bare, str(tmp_path / "hf"), to="hf", drop_optimizer=True, dtype="bfloat16").url

    weights = {key: array for key, array in values(trained).items() if key[1] in ("param", "buffer")}
    reference.same(values(hf), weights)


def test_a_part_is_marked_as_one(tmp_path: Path, trained: str) -> None:
    """--only takes globs; the destination says of what it is a part, and stays usable; groups list no other tensors."""
    done = ops.reshard(trained, str(tmp_path / "part"), only=["layers.0.attn.*", "norm/param"], layout="dp=2")

    catalog = ops.open(done.url).catalog
    assert {name for name, _ in catalog.held if name != "norm"} == {
        name for name in catalog.tensors if name.startswith("layers.0.attn.")
    }
    assert [key for key in catalog.held if key[0] == "norm"] == [("norm", "param")]
    listed = {name for group in catalog.extras.common["groups"] for name in group["tensors"]}
    assert listed <= {name for name, _ in catalog.held}
    assert catalog.facts["lineage"][0]["partial"]["only"] == ["layers.0.attn.*", "norm/param"]
    assert catalog.facts["lineage"][0]["source"] == "trained"
    assert ops.verify(done.url).exit_code == 0
    again = ops.reshard(done.url, str(tmp_path / "again"), layout="dp=3").url
    hf = ops.reshard(again, str(tmp_path / "hf"), to="hf", drop_optimizer=True).url
    back = ops.reshard(hf, str(tmp_path / "back"), to="native", layout="dp=2").url
    for url in (again, hf, back):
        assert ops.verify(url).exit_code == 0, url
    assert ops.open(hf).catalog.facts["partial"]["base"] == "trained"


def test_a_glob_that_matches_nothing_is_refused(tmp_path: Path, trained: str) -> None:
    """As is a choice that leaves nothing."""
    with pytest.raises(UsageError, match="matches no tensor"):
        ops.reshard(trained, str(tmp_path / "x"), only=["lora_*"])
    with pytest.raises(UsageError, match="nothing of"):
        ops.reshard(trained, str(tmp_path / "x"), drop=["*"])


def test_like_takes_format_layout_and_names(tmp_path: Path, trained: str, weights: str) -> None:
    """As another checkpoint is; what is given beside it counts more."""
    model = ops.reshard(weights, str(tmp_path / "m"), to="native", names="megatron", layout="pp=3,dp=2").url

    a = ops.open(ops.reshard(trained, str(tmp_path / "a"), like=model).url).catalog
    b = ops.open(ops.reshard(trained, str(tmp_path / "b"), like=model, layout="tp=2").url).catalog

    assert (a.format, str(a.layout), a.names) == ("native", "pp=3,dp=2", "megatron")
    assert (b.format, str(b.layout), b.names) == ("native", "tp=2", "megatron")


def test_lineage_tells_where_bytes_come_from(tmp_path: Path, weights: str) -> None:
    """The nearest source first; no path, host or time."""
    a = ops.reshard(weights, str(tmp_path / "a"), to="native", layout="dp=2").url
    b = ops.reshard(a, str(tmp_path / "b"), layout="tp=2").url

    lineage = ops.open(b).catalog.facts["lineage"]
    told = [(item["source"], item["format"], item["layout"]) for item in lineage]
    assert told == [("a", "native", "dp=2"), ("weights", "hf", "tp=1")]
    assert str(tmp_path) not in json.dumps(lineage)


def test_source_and_destination_must_lie_apart(tmp_path: Path, weights: str) -> None:
    """The same folder, one inside the other, and the same by another name."""
    made = Path(shutil.copytree(weights, tmp_path / "w"))
    (tmp_path / "link").symlink_to(made)

    for target in (made, made / "sub" / "x", tmp_path / "link", tmp_path):
        with pytest.raises(UsageError):
            ops.reshard(str(made), str(target), to="native", overwrite=True)
    assert contents(made) == contents(weights)


def test_a_step_of_a_run_may_become_another(tmp_path: Path) -> None:
    """The destination lies in the run, beside its source: that is no conflict."""
    make(tmp_path / "run" / "step-1", optimizer="none")

    assert ops.reshard(str(tmp_path / "run"), str(tmp_path / "run" / "step-2"), layout="dp=2").checked
    assert ops.latest(str(tmp_path / "run")).endswith("step-2")


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path, weights: str, trained: str) -> None:
    """Without --overwrite a StoreError; with it a checkpoint is replaced as a whole; an empty folder is no obstacle."""
    target = make(tmp_path / "old", to="hf", optimizer="none", seed=1)
    before = contents(target)

    with pytest.raises(StoreError, match="--overwrite"):
        ops.reshard(weights, target, to="native")
    assert contents(target) == before
    ops.reshard(weights, target, to="native", overwrite=True)
    reference.same(values(target), values(weights))
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    (tmp_path / "empty").mkdir()
    assert ops.reshard(weights, str(tmp_path / "empty"), to="native").checked


def test_overwrite_never_replaces_what_is_no_checkpoint(tmp_path: Path, weights: str) -> None:
    """A mistyped path must not cost a folder of something else."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")

    with pytest.raises(StoreError, match="is no checkpoint, so --overwrite does not replace it"):
        ops.reshard(weights, str(tmp_path / "thesis"), to="native", overwrite=True)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"


def test_a_dry_run_plans_and_writes_nothing(tmp_path: Path, trained: str) -> None:
    """Not even a folder; what would be refused is listed."""
    done = ops.reshard(trained, str(tmp_path / "x"), to="hf", dry_run=True)

    assert done.dry_run and not done.checked and any(not row.allowed for row in done.plan.drops)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_goes_on_with_the_same_call(tmp_path: Path, trained: str) -> None:
    """Stopped by the user half-way: nothing is in place; the same call finishes it as if in one go."""
    whole = ops.reshard(trained, str(tmp_path / "whole"), layout="dp=2").url

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError) as caught:
        ops.reshard(trained, str(tmp_path / "x"), layout="dp=2", progress=stop)
    assert caught.value.exit_code == 5 and not (tmp_path / "x").exists()
    made = ops.reshard(trained, str(tmp_path / "x"), layout="dp=2").url

    assert contents(made) == contents(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole", "x"]


def test_a_damaged_source_is_refused(tmp_path: Path, trained: str) -> None:
    """Its digests are checked on the way; nothing is put in place and nothing stays."""
    damaged = Path(shutil.copytree(trained, tmp_path / "damaged"))
    flip(damaged / "rank-00005.safetensors", -7)

    with pytest.raises(Exception, match=r"rank-00005\.safetensors") as caught:
        ops.reshard(str(damaged), str(tmp_path / "x"), layout="dp=2")
    assert getattr(caught.value, "exit_code", None) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """A model without one of its tensors is no model, unless it was asked for as a part."""
    truth = reference.random_truth(reference.tiny_zaya(), "canonical")
    del truth.held["layers.1.experts.down", "param"]
    reference.write(NativeFormat(), truth, tmp_path / "a")

    with pytest.raises(CoverageError, match=r"layers\.1\.experts\.down"):
        ops.reshard(str(tmp_path / "a"), str(tmp_path / "b"), layout="dp=2")


def test_state_that_some_tensors_of_a_group_lack_is_refused(tmp_path: Path) -> None:
    """Moments of all but one tensor: going on from there would train that one otherwise."""
    truth = reference.random_truth(reference.tiny_zaya(), "canonical", state=True)
    del truth.held["norm", "exp_avg"]
    tensors = [name for name, role in truth.held if role == "exp_avg_sq"]
    truth.extras = Extras(common={"step": 1, "groups": [{"kind": "adamw", "step": 1, "tensors": tensors}]})
    reference.write(NativeFormat(), truth, tmp_path / "a")

    with pytest.raises(CoverageError, match="exp_avg of norm is missing"):
        ops.reshard(str(tmp_path / "a"), str(tmp_path / "b"), layout="dp=2")


def test_an_unknown_model_can_be_gathered_and_cut_on_its_rows(tmp_path: Path) -> None:
    """Without a schema data parallel and zero=3 still work, and other layouts say why not."""
    f32 = dtype_named("float32")
    truth = reference.stored_truth(
        {"a.w": ((7, 5), f32), "a.b": ((3,), f32), "s": ((), f32), "none": ((0, 4), f32)}
    )
    reference.write(NativeFormat(), truth, tmp_path / "a", "dp=2,zero=3")

    made = ops.reshard(str(tmp_path / "a"), str(tmp_path / "b"), layout="dp=5,zero=3").url
    hf = ops.reshard(made, str(tmp_path / "hf"), to="hf").url

    for url in (made, hf):
        reference.same(values(url), truth.values)
    with pytest.raises(LayoutError, match="--model"):
        ops.reshard(made, str(tmp_path / "x"), layout="tp=2")
    with pytest.raises(UsageError, match="give --model"):
        ops.reshard(hf, str(tmp_path / "x"), to="hub")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"to": "zip"}, "unknown format 'zip'"),
        ({"names": "keras"}, "keras"),
        ({"to": "hf", "names": "hub", "drop_optimizer": True}, "always has the names transformers"),
        ({"replicas": "any"}, "choose check"),
        ({"memory": 1000}, "at least 16 MiB"),
        ({"threads": 0}, "at least one"),
        ({"max_shard_size": 1}, "64 KiB"),
        ({"model": "gpt"}, "unknown model 'gpt'"),
        ({"from_format": "hf"}, "safetensors"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, trained: str, options, says: str) -> None:
    """Before anything is written, with what is possible instead."""
    with pytest.raises(Exception, match=says) as caught:
        ops.reshard(trained, str(tmp_path / "x"), **options)
    assert getattr(caught.value, "exit_code", 0) in (2, 3)
    assert not list(tmp_path.iterdir())


def test_memory_and_threads_do_not_change_the_result(tmp_path: Path, trained: str) -> None:
    """The bytes are those of the plan, however it is run."""
    a = ops.reshard(trained, str(tmp_path / "a"), layout="tp=2", threads=1, memory=16 << 20).url
    b = ops.reshard(trained, str(tmp_path / "b"), layout="tp=2", threads=5).url

    assert contents(a) == contents(b)


def test_large_shards_are_split(tmp_path: Path, trained: str) -> None:
    """Files of weights stay below what was asked for, and the index names each."""
    settings = {**ZAYA, "hidden_size": 64}
    made = make(tmp_path / "a", settings=settings, to="hf", optimizer="none", max_shard_size=65_536)

    files = list(Path(made).glob("*.safetensors"))
    assert len(files) > 2 and ops.verify(made).exit_code == 0


def test_tensors_with_fewer_rows_than_ranks_survive(tmp_path: Path) -> None:
    """Three rows, a scalar and one element over 8 ranks, 5, 1 and 8 again; in every kind of dtype."""
    shapes = {
        name: (
            (3, 2) if name.startswith("f") else (1,) if name.startswith("i") else (),
            dtype_named(name),
        )
        for name in (
            "float32",
            "int64",
            "int8",
            "uint8",
            "bool",
            "float8_e4m3fn",
            "bfloat16",
            "complex64",
            "uint16",
        )
    }
    truth = reference.stored_truth(shapes)
    truth.values["bool", "param"][...] &= 1
    reference.write(NativeFormat(), truth, tmp_path / "0", "dp=8,zero=3")
    made = str(tmp_path / "0")

    steps: list[dict[str, Any]] = [
        {"layout": "dp=5,zero=3"},
        {"to": "hf"},
        {"to": "native", "layout": "dp=8,zero=3"},
    ]
    for number, options in enumerate(steps, 1):
        made = ops.reshard(made, str(tmp_path / str(number)), **options).url
        reference.same(values(made), truth.values)


def test_virtual_stages_keep_every_layer(tmp_path: Path) -> None:
    """Ten layers over two stages, in one chunk, five chunks each, and one stage: layer k stays layer k."""
    made = make(
        tmp_path / "0",
        model="llama-tiny",
        settings={"num_hidden_layers": 10},
        layout="pp=2",
        optimizer="adamw",
    )
    truth = values(made)

    for number, layout in enumerate(("pp=2,vpp=5", "tp=1", "pp=5,vpp=2,dp=2,zero=1"), 1):
        made = ops.reshard(made, str(tmp_path / str(number)), layout=layout).url
        reference.same(truth, values(made))


def test_a_configuration_that_cannot_be_said_is_found_before_anything_is_written(
    tmp_path: Path, weights: str
) -> None:
    """Without rotary parameters the original layout's configuration would be useless: refused, and no folder appears."""
    bare = Path(shutil.copytree(weights, tmp_path / "bare"))
    config = json.loads((bare / "config.json").read_text())
    del config["rope_parameters"]
    (bare / "config.json").write_text(json.dumps(config))

    with pytest.raises(CkptError, match="rope"):
        ops.reshard(str(bare), str(tmp_path / "hub"), to="hub")
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


def test_files_beside_a_given_configuration_are_carried(tmp_path: Path, trained: str, weights: str) -> None:
    """A training checkpoint has no tokenizer; the folder that has the configuration often does."""
    config = tmp_path / "config"
    config.mkdir()
    shutil.copy(Path(weights) / "config.json", config)
    (config / "tokenizer.json").write_text("{}")
    (config / "model.safetensors").write_bytes(b"not carried")

    made = ops.reshard(trained, str(tmp_path / "hf"), to="hf", drop_optimizer=True, config=str(config)).url

    assert (Path(made) / "tokenizer.json").read_text() == "{}"
    assert contents(made)["model.safetensors"] == contents(weights)["model.safetensors"]
    assert contents(made)["config.json"] == contents(weights)["config.json"]


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_a_changed_byte_that_the_source_has_a_checksum_of_is_not_copied(
    trained: str, tmp_path: Path, to: str
) -> None:
    """Zips state a CRC-32 of every member: what differs is refused, since the copy would get digests as if it were sound."""
    source = make_from(trained, tmp_path / "source", to)
    catalog = ops.open(source).catalog
    entries = catalog.entries
    widest = int(entries.nbytes.argmax())
    file = catalog.files[int(entries.file[widest])]
    at = file.data_start + int(entries.offset[widest]) + int(entries.nbytes[widest]) // 2
    assert ops.plan(source, str(tmp_path / "out"), to="native", probe=False).unverified == []
    flip(Path(source) / file.path, at)

    with pytest.raises(CorruptionError, match="CRC-32") as caught:
        ops.reshard(source, str(tmp_path / "out"), to="native")

    assert caught.value.file == file.path
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def make_from(source: str, path: Path, to: str) -> str:
    """The same checkpoint in another format."""
    return ops.reshard(source, str(path), to=to, drop_extras=True).url
