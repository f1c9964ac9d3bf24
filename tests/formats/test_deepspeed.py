"""DeepSpeed's checkpoints: the suite, and files made by hand from its rules; real files are tried in tests/peers."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.core.catalog import Catalog
from ckptkit.core.dtypes import dtype_named
from ckptkit.core.schema import StoredNames
from ckptkit.errors import CkptError, CoverageError, FormatError, LayoutError, ShardMissingError, UnsafeError
from ckptkit.formats.deepspeed import DeepSpeedFormat
from ckptkit.formats.deepspeed_folder import StateFile
from ckptkit.formats.plain import TensorValue
from ckptkit.formats.reference import Truth, gather, random_truth, same, stored_truth, toy, write
from ckptkit.formats.standins import Global, Opaque, Ordered, Size
from ckptkit.formats.suite import FormatSuite
from ckptkit.formats.torch_zip_writer import zip_bytes
from ckptkit.stores.local import LocalStore

F32 = dtype_named("float32")


class TestDeepSpeed(FormatSuite):
    make = DeepSpeedFormat
    layouts = (
        "tp=1",
        "dp=2,zero=1:deepspeed",
        "tp=2,dp=3,zero=2:deepspeed",
        "tp=4,cp=2,dp=1,zero=1:deepspeed",
        "tp=2,dp=2",
        "dp=3,zero=3",
        "tp=2,dp=2,zero=3",
    )


def t(values: Any) -> TensorValue:
    array = np.asarray(values, "<f4")
    return TensorValue(F32, array.shape, array.tobytes())


def at(numel: int, start: int) -> Opaque:
    """A `fragment_address`, as DeepSpeed pickles it."""
    cls = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    return Opaque(cls, state={"numel": numel, "start": start}, new=True)


def put(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zip_bytes(value))


def read(root: Path) -> Catalog:
    return DeepSpeedFormat().read(LocalStore(root))


def states(
    root: Path,
    module: dict[str, Any] | None,
    shapes: Sequence[dict[str, tuple[int, ...]]],
    dp: int,
    **more: Any,
) -> None:
    """The model states of stages 0 to 2, and the tracker."""
    (root / "run").mkdir(parents=True, exist_ok=True)
    (root / "latest").write_text("run")
    put(
        root / "run/mp_rank_00_model_states.pt",
        {
            "module": Ordered((k, t(v)) for k, v in module.items()) if module is not None else None, "buffer_names": [], "optimizer": None,
            "param_shapes": [Ordered((k, Size(s)) for k, s in group.items()) for group in shapes], "global_steps": 5,
            "dp_world_size": dp, "mp_world_size": 1, **more,
        },
    )  # fmt: skip


def partition(
    root: Path, rank: int, master: Any, moment: Any, places: dict[str, Opaque] | None, *, padding: int = 0,
    group: dict[str, Any] | None = None, aligned: bool = False, **more: Any,
) -> None:  # fmt: skip
    """One rank's file of stages 1 and 2, with one group whose second moment is the first, negated."""
    state = {
        "base_optimizer_state": {
            "state": {0: {"step": t(5.0), "exp_avg": t(moment), "exp_avg_sq": t(-np.asarray(moment))}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), **(group or {}), "params": [0]}],
        },
        "single_partition_of_fp32_groups": [t(master)],
        "zero_stage": 1,
        "group_paddings": [padding],
        "param_alignment_paddings": [[int(aligned), 0]],
        **({"param_slice_mappings": [Ordered(places)]} if places is not None else {}),
    }
    put(root / f"run/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state, **more})


W, B = np.arange(35.0, dtype="<f4").reshape(7, 5), 100 + np.arange(18.0, dtype="<f4").reshape(3, 6)


def two_ranks(root: Path, mapped: bool = True) -> Path:
    """35 and 18 elements over two ranks: 53, padded to 56; the last rank's fp32 part is 3 shorter than its moments."""
    flat = np.concatenate([W.ravel(), B.ravel(), [7, 7, 7]])
    states(root, {"w": W, "b": B}, [{"w": (7, 5), "b": (3, 6)}], 2)
    partition(root, 0, flat[:28], 2 * flat[:28], {"w": at(28, 0)} if mapped else None)
    places = {"w": at(7, 0), "b": at(18, 7)}
    partition(root, 1, flat[28:53], 2 * flat[28:], places if mapped else None, padding=3)
    return root


def check(root: Path) -> None:
    """Whatever the order in files: `w` and `b`, and moments of twice the values."""
    found = gather(root, read(root))
    for name, value in (("w", W), ("b", B)):
        for role, factor in (("param", 1), ("master", 1), ("exp_avg", 2), ("exp_avg_sq", -2)):
            assert np.array_equal(found[name, role].view("<f4"), factor * value), (name, role)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_parameter_straddles_ranks(mapped: bool, tmp_path: Path) -> None:
    """Parts follow each other in the order of ranks, told by the mappings or (older files) by the order of shapes."""
    check(two_ranks(tmp_path, mapped))


def test_extras_are_canonical(tmp_path: Path) -> None:
    """Step, groups and the client's state come back as every format has them."""
    two_ranks(tmp_path)
    states(tmp_path, {"w": W, "b": B}, [{"w": (7, 5), "b": (3, 6)}], 2, epoch=3, lr_scheduler={"last": 4})

    found = read(tmp_path)

    assert found.extras.common["step"] == 5
    assert found.extras.common["groups"] == [
        {"kind": "adamw", "step": 5, "tensors": ["w", "b"], "lr": 0.1, "betas": [0.9, 0.95]}
    ]
    assert found.extras.common["deepspeed"]["model"] == {"epoch": 3, "lr_scheduler": {"last": 4}}
    assert str(found.layout) == "dp=2,zero=1:deepspeed"


def test_gaps_of_alignment(tmp_path: Path) -> None:
    """Parameters that start at multiples of four elements: the gaps between them are nobody's."""
    flat = np.concatenate([W.ravel(), [9], B.ravel(), [9, 9]])  # 35 + 1, 18, and 2 at the end
    states(tmp_path, {"w": W, "b": B}, [{"w": (7, 5), "b": (3, 6)}], 2)
    partition(tmp_path, 0, flat[:28], 2 * flat[:28], {"w": at(28, 0)})
    partition(tmp_path, 1, flat[28:], 2 * flat[28:], {"w": at(7, 0), "b": at(18, 8)})

    check(tmp_path)


@pytest.mark.parametrize("aligned", [False, True])
def test_round_robin_gradients(aligned: bool, tmp_path: Path) -> None:
    """The order is that of the shapes, not of the mappings, which DeepSpeed fills as if parameters were in module order; where
    parameters are aligned the mappings are right."""
    flat = np.concatenate([B.ravel(), W.ravel(), [7, 7, 7]])
    config: dict[str, Any] = {"ds_config": {"zero_optimization": {"round_robin_gradients": True}}}
    states(tmp_path, {"w": W, "b": B}, [{"b": (3, 6), "w": (7, 5)}], 2)
    wrong = {"w": at(28, 0)}, {"w": at(7, 0), "b": at(18, 7)}
    right = {"b": at(18, 0), "w": at(10, 18)}, {"w": at(25, 0)}
    for rank, places in enumerate(right if aligned else wrong):
        part = flat[28 * rank : 28 * rank + 28]
        partition(tmp_path, rank, part, 2 * part, places, aligned=aligned, **config)

    check(tmp_path)


def test_elastic_files(tmp_path: Path) -> None:
    """The old elastic form has a list of states, without padding, and the step beside."""
    two_ranks(tmp_path)
    flat = np.concatenate([W.ravel(), B.ravel()])
    for rank, places in enumerate(({"w": at(28, 0)}, {"w": at(7, 0), "b": at(18, 7)})):
        part = flat[28 * rank : 28 * rank + 28]
        state = {
            "base_optimizer_state": [{"exp_avg": t(2 * part), "exp_avg_sq": t(-2 * part)}], "base_optimizer_state_step": 5,
            "single_partition_of_fp32_groups": [t(part)], "param_slice_mappings": [Ordered(places)],
        }  # fmt: skip
        put(tmp_path / f"run/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})

    check(tmp_path)


def test_stage_3_cuts_every_parameter_alone(tmp_path: Path) -> None:
    """35 elements are 18 + 17 and 18 are 9 + 9; sub-groups follow each other, and behind the end of a parameter is garbage."""
    (tmp_path / "latest").write_text("run")
    frozen = np.arange(3.0, dtype="<f4")
    runs = [(W.ravel()[:18], B.ravel()[:9]), ([*W.ravel()[18:], 4.8e7], B.ravel()[9:])]
    for rank, (w, b) in enumerate(runs):
        w, b = np.asarray(w), np.asarray(b)
        put(
            tmp_path / f"run/zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
            {
                "module": Ordered((n, t([])) for n in ("w", "b", "f")), "buffer_names": [], "dp_world_size": 2,
                "param_shapes": [Ordered({"w": Size((7, 5)), "b": Size((3, 6))})], "frozen_param_shapes": Ordered({"f": Size((3,))}),
                "frozen_param_fragments": Ordered({"f": t([[0, 1], [2, 1e9]][rank])}), "mp_world_size": 1, "global_steps": 5,
            },
        )  # fmt: skip
        state = {
            "zero_stage": Opaque(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (3,)),
            "fp32_flat_groups": [t(w), t(b)],
            "optimizer_state_dict": {
                "state": {
                    k: {"step": t(5.0), "exp_avg": t(2 * x), "exp_avg_sq": t(-2 * x)}
                    for k, x in enumerate((w, b))
                },
                "param_groups": [{"lr": 0.1, "params": [0, 1]}],
            },
        }
        put(tmp_path / f"run/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})

    catalog = read(tmp_path)
    found = gather(tmp_path, catalog)

    for name, value in (("w", W), ("b", B)):
        for role, factor in (("master", 1), ("exp_avg", 2), ("exp_avg_sq", -2)):
            assert np.array_equal(found[name, role].view("<f4"), factor * value), (name, role)
    assert np.array_equal(found["f", "param"].view("<f4"), frozen)
    assert ("w", "param") not in found
    assert str(catalog.layout) == "dp=2,zero=3"
    assert catalog.extras.common["groups"][0]["tensors"] == ["w", "b"]


def test_experts_get_their_numbers_in_the_whole_model(tmp_path: Path) -> None:
    """Two ranks with two experts each: what both call expert 0 and 1 are experts 0 to 3."""
    name = "moe.deepspeed_moe.experts.deepspeed_experts.{}.weight"
    states(tmp_path, {"w": W}, [{name.format(0): (2, 2), name.format(1): (2, 2)}], 2)
    experts = {e: np.full((2, 2), 10.0 * e) + np.arange(4.0).reshape(2, 2) for e in range(4)}
    for e, value in experts.items():
        path = tmp_path / f"run/layer_0_expert_{e}_mp_rank_00_model_states.pt"
        put(path, {name.format(e): t(value)})
    for rank in range(2):
        flat = np.concatenate([experts[2 * rank].ravel(), experts[2 * rank + 1].ravel()])
        places = {name.format(0): at(4, 0), name.format(1): at(4, 4)}
        group = {"moe": True, "name": "ep_size_2"}
        partition(tmp_path, rank, flat, 2 * flat, places, group=group)

    catalog = read(tmp_path)
    found = gather(tmp_path, catalog)
    names = StoredNames(catalog.tensors)
    truth = Truth(names, catalog.tensors, catalog.held, found, catalog.extras)
    write(DeepSpeedFormat(), truth, tmp_path / "again", "dp=2,zero=1:deepspeed")

    # Written again every rank has all experts, each with a file of its own.
    same(gather(tmp_path / "again", read(tmp_path / "again")), found)
    assert (tmp_path / "again/global_step5/layer_0_expert_3_mp_rank_00_model_states.pt").exists()
    for e, value in experts.items():
        assert np.array_equal(found[name.format(e), "param"].view("<f4"), value)
        assert np.array_equal(found[name.format(e), "exp_avg"].view("<f4"), 2 * value)


def test_layers_of_a_pipeline_module(tmp_path: Path) -> None:
    """Layers are numbered files; their parameters are named by the layer."""
    states(tmp_path, None, [{"0.w": (7, 5), "1.b": (3, 6)}], 1)
    put(tmp_path / "run/layer_00-model_00-model_states.pt", {"w": t(W)})
    put(tmp_path / "run/layer_01-model_00-model_states.pt", {"b": t(B)})
    flat = np.concatenate([W.ravel(), B.ravel()])
    partition(tmp_path, 0, flat, 2 * flat, {"0.w": at(35, 0), "1.b": at(18, 35)})

    found = gather(tmp_path, read(tmp_path))

    assert np.array_equal(found["0.w", "param"].view("<f4"), W)
    assert np.array_equal(found["1.b", "exp_avg"].view("<f4"), 2 * B)


def test_places_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Parts that overlap, leave their flat tensor, are missing or no numbers, each with an error that names the parameter or file."""
    two_ranks(tmp_path)
    flat = np.arange(28.0)

    def first(places: dict[str, Any], kind: type[CkptError], text: str) -> None:
        partition(tmp_path, 0, flat, flat, places)
        with pytest.raises(kind, match=text):
            read(tmp_path)

    first({"w": at(28, 1)}, FormatError, "come to 29")
    first({"w": at(20, 0)}, CoverageError, "master of w has 27 of 35")
    first({"w": at(28, 0), "b": at(1, 27)}, FormatError, "overlap at element 27")
    first({"w": at(-1, 0)}, FormatError, "is none")
    first({"w": at(1 << 80, 0)}, FormatError, "come to")
    first({"w": Opaque(Global("torch", "device"), ("cpu",))}, FormatError, "is none")
    first({"stranger": at(28, 0)}, FormatError, "no parameter of the model states")


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """A rank that is missing, two precisions, two stages: never merged in silence."""
    root = two_ranks(tmp_path)
    one = root / "run/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    held = one.read_bytes()

    one.unlink()
    with pytest.raises(ShardMissingError, match=r"1 of 2 partitions.*rank 1"):
        read(root)
    one.write_bytes(held)
    (root / "run/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(held)
    with pytest.raises(FormatError, match="two saves"):
        read(root)
    (root / "run/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    (root / "run/zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(held)
    with pytest.raises(FormatError, match="two ZeRO stages"):
        read(root)


@pytest.mark.parametrize("tag", ["../elsewhere", "/etc", "..", "a/b", "run\nrun"])
def test_a_tracker_that_leaves_the_run_is_refused(tag: str, tmp_path: Path) -> None:
    """The tag is one folder of the run."""
    two_ranks(tmp_path)
    (tmp_path / "latest").write_text(tag)

    with pytest.raises(UnsafeError, match="no folder of it"):
        read(tmp_path)


def test_a_tracker_to_nowhere_is_an_error(tmp_path: Path) -> None:
    """A tag without its folder, and no tracker at all, name what to do."""
    two_ranks(tmp_path)
    (tmp_path / "latest").write_text("global_step9")

    with pytest.raises(ShardMissingError, match="global_step9, which is not there"):
        read(tmp_path)
    (tmp_path / "latest").unlink()
    with pytest.raises(ShardMissingError, match="Give the folder of one step"):
        read(tmp_path)
    check_step(tmp_path / "run")


def check_step(root: Path) -> None:
    assert np.array_equal(gather(root, read(root))["w", "param"].view("<f4"), W)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("where", ["loss_scaler", "base_optimizer_state", "module"])
def test_code_in_a_pickle_is_refused(where: str, tmp_path: Path) -> None:
    """A call of os.system in the loss scaler, deep in the optimizer's state or among weights: refused by name, nothing runs."""
    root = two_ranks(tmp_path)
    name = "mp_rank_00_model_states.pt" if where == "module" else "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    inside = {where: {"state": {0: [Evil(f"touch {tmp_path}/ran")]}}}
    torch.save(inside if where == "module" else {"optimizer_state_dict": inside}, root / "run" / name)

    with pytest.raises(UnsafeError, match=r"(posix|nt)\.system"):
        read(root)

    assert not (tmp_path / "ran").exists()


def test_without_zero_states_are_numbered(tmp_path: Path) -> None:
    """Stage 0 keeps torch's own state, whose numbers follow the module."""
    (tmp_path / "latest").write_text("run")
    states(tmp_path, {"w": W, "b": B}, [], 1, param_shapes=None, optimizer={
        "state": {
            k: {"step": t(5.0), "exp_avg": t(2 * x), "exp_avg_sq": t(-2 * x)} for k, x in enumerate((W, B))
        },
        "param_groups": [{"lr": 0.1, "params": [0, 1]}],
    })  # fmt: skip

    catalog = read(tmp_path)
    found = gather(tmp_path, catalog)

    assert np.array_equal(found["b", "exp_avg"].view("<f4"), 2 * B)
    assert catalog.extras.common["groups"][0]["step"] == 5


def test_layouts_that_it_cannot_hold_are_refused(tmp_path: Path) -> None:
    """Pipelines, spread experts and foreign ZeRO rules are errors that say what to write instead."""
    truth = random_truth(toy(), "transformers", state=True)
    for layout, text in (
        ("pp=3", "pp=3"), ("ep=2,dp=2", "ep=2"), ("tp=2,etp=2", "etp=2"), ("dp=2,zero=1:whole", "zero=1:deepspeed"),
    ):  # fmt: skip
        with pytest.raises(LayoutError, match=text):
            write(DeepSpeedFormat(), truth, tmp_path / "c", layout)


def test_model_parallel_ranks_need_a_model(tmp_path: Path) -> None:
    """Nothing in the files tells which axis was cut."""
    write(DeepSpeedFormat(), random_truth(toy(), "transformers"), tmp_path / "c", "tp=2")

    with pytest.raises(LayoutError, match=r"2 model-parallel ranks.*--config"):
        read(tmp_path / "c")


def test_stage_1_files_follow_the_rule_of_the_flat_tensor(tmp_path: Path) -> None:
    """21 elements over 2 ranks are padded to 24: each rank has 12 of the moments, the last 9 of the masters."""
    shapes = {"w": ((7, 2), F32), "b": ((7,), F32)}
    truth = stored_truth(shapes)
    held = {(name, role): F32 for name in shapes for role in ("param", "master", "exp_avg", "exp_avg_sq")}
    full = Truth(truth.names, truth.tensors, held, {k: truth.values[k[0], "param"] for k in held})
    root = tmp_path / "c"

    write(DeepSpeedFormat(), full, root, "dp=2,zero=1:deepspeed")

    lengths = []
    for rank in range(2):
        path = f"global_step0/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = StateFile(LocalStore(root), path).value["optimizer_state_dict"]
        (master,) = state["single_partition_of_fp32_groups"]
        lengths.append((master.shape, state["base_optimizer_state"]["state"][0]["exp_avg"].shape))
        assert state["group_paddings"] == [3 * rank]
    assert lengths == [((12,), (12,)), ((9,), (12,))]
    model = torch.load(root / "global_step0/mp_rank_00_model_states.pt", weights_only=True)
    assert model["module"]["w"].numpy().tobytes() == truth.values["w", "param"].tobytes()
    assert model["dp_world_size"] == 2
    same(gather(root, read(root)), full.values)
