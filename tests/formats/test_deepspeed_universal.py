"""DeepSpeed's universal checkpoints: the suite, and files as its converter leaves them; real ones are tried in tests/peers."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.core.catalog import Catalog
from ckptkit.core.dtypes import dtype_named
from ckptkit.errors import FormatError, ShardMissingError, UnsafeError
from ckptkit.formats.deepspeed_universal import DeepSpeedUniversalFormat
from ckptkit.formats.plain import TensorValue
from ckptkit.formats.reference import ZAYA_CONFIG, gather, json_bytes, random_truth, tiny_zaya, write
from ckptkit.formats.standins import Ordered, Size
from ckptkit.formats.suite import FormatSuite
from ckptkit.formats.torch_zip_writer import zip_bytes
from ckptkit.stores.local import LocalStore

W, SEEN = np.arange(6.0, dtype="<f4").reshape(2, 3), np.arange(4.0, dtype="<f4")


class TestDeepSpeedUniversal(FormatSuite):
    make = DeepSpeedUniversalFormat


def t(values: Any) -> TensorValue:
    array = np.asarray(values, "<f4")
    return TensorValue(dtype_named("float32"), array.shape, array.tobytes())


def put(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zip_bytes(value))


def read(root: Path) -> Catalog:
    return DeepSpeedUniversalFormat().read(LocalStore(root))


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """A parameter with state, and a buffer of which the converter left an fp32 copy."""
    run = tmp_path / "run"
    put(
        run / "mp_rank_00_model_states.pt",
        {
            "module": Ordered({"w": t(W), "seen": t(SEEN)}), "buffer_names": ["seen"], "global_steps": 5,
            "param_shapes": [Ordered({"w": Size((2, 3))})], "mp_world_size": 1, "dp_world_size": 2,
        },
    )  # fmt: skip
    put(run / "zero/optimizer_state.pt", {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}]})
    for slot, value in (("fp32", W), ("exp_avg", 2 * W), ("exp_avg_sq", -2 * W)):
        put(run / f"zero/w/{slot}.pt", {"param": t(value), "cat_dim": 0})
    put(run / "zero/w/step.pt", t(5.0))
    put(run / "zero/seen/fp32.pt", {"param": t(SEEN)})
    (tmp_path / "latest_universal").write_text("run")
    return tmp_path


def test_what_the_converter_leaves_is_read(converted: Path) -> None:
    """State by role, the buffer once, and canonical groups."""
    catalog = read(converted)
    found = gather(converted, catalog)

    assert {key: array.view("<f4").ravel().tolist() for key, array in found.items()} == {
        ("w", "param"): W.ravel().tolist(),
        ("w", "master"): W.ravel().tolist(),
        ("w", "exp_avg"): (2 * W).ravel().tolist(),
        ("w", "exp_avg_sq"): (-2 * W).ravel().tolist(),
        ("seen", "buffer"): SEEN.tolist(),
    }
    assert catalog.extras.common["groups"] == [
        {"kind": "adamw", "step": 5, "tensors": ["w"], "lr": 0.1, "betas": [0.9, 0.95]}
    ]


def test_flat_tensors_of_stage_3_get_their_shape(converted: Path) -> None:
    """Converted from stage 3, files hold bare flat tensors, and the step is common to all."""
    folder = converted / "run/zero"
    for slot, value in (("fp32", W), ("exp_avg", 2 * W), ("exp_avg_sq", -2 * W)):
        put(folder / f"w/{slot}.pt", t(value.ravel()))
    (folder / "w/step.pt").unlink()
    inner = {"state": {0: {"step": t(7.0)}}, "param_groups": []}
    put(
        folder / "optimizer_state.pt",
        {"param_groups": [{"lr": 0.1, "params": [0]}], "optimizer_state_dict": inner},
    )

    catalog = read(converted)

    assert np.array_equal(gather(converted, catalog)["w", "exp_avg"].view("<f4"), 2 * W)
    assert catalog.extras.common["groups"][0]["step"] == 7


def test_a_slot_that_others_of_the_group_have_is_missing(converted: Path) -> None:
    """A file that was lost is named, not read as a parameter without moments."""
    put(
        converted / "run/mp_rank_00_model_states.pt",
        {"module": Ordered({"w": t(W)}), "param_shapes": [Ordered({"w": Size((2, 3)), "b": Size((1,))})]},
    )
    for slot in ("fp32", "exp_avg", "step"):
        put(converted / f"run/zero/b/{slot}.pt", t(5.0) if slot == "step" else {"param": t([1.0])})

    with pytest.raises(ShardMissingError, match=r"lacks zero/b/exp_avg_sq\.pt"):
        read(converted)


def test_shapes_that_contradict_each_other_are_refused(converted: Path) -> None:
    """A moment of another shape is an error that names the file."""
    put(converted / "run/zero/w/exp_avg.pt", {"param": t(W.T)})

    with pytest.raises(FormatError, match=r"zero/w/exp_avg\.pt has shape \(3, 2\)"):
        read(converted)


@pytest.mark.parametrize("tag", ["..", "../run", "/etc"])
def test_a_tracker_that_leaves_the_run_is_refused(tag: str, converted: Path) -> None:
    """The tag is one folder of the run."""
    (converted / "latest_universal").write_text(tag)

    with pytest.raises(UnsafeError, match="no folder of it"):
        read(converted)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("name", ["zero/optimizer_state.pt", "zero/w/exp_avg.pt", "zero/w/step.pt"])
def test_code_in_a_pickle_is_refused(name: str, converted: Path) -> None:
    """A call of os.system in any file: refused by name, nothing runs."""
    torch.save({"param": [{"x": Evil(f"touch {converted}/ran")}]}, converted / "run" / name)

    with pytest.raises(UnsafeError, match=r"(posix|nt)\.system"):
        read(converted)

    assert not (converted / "ran").exists()


def test_tensor_parallel_engines_are_told_how_to_cut(tmp_path: Path) -> None:
    """The dimension that holds heads, two halves of a gated projection, and a vocabulary that may be padded."""
    truth = random_truth(tiny_zaya(), "transformers", state=True)
    truth.extras.files = {"config.json": json_bytes(ZAYA_CONFIG)}
    write(DeepSpeedUniversalFormat(), truth, tmp_path / "c")

    def told(name: str) -> dict[str, Any]:
        path = tmp_path / f"c/global_step0_universal/zero/model.{name}/fp32.pt"
        return {k: v for k, v in torch.load(path, weights_only=True).items() if k != "param"}

    assert told("embed_tokens.weight") == {"cat_dim": 0, "vocab_tensor": True}
    assert told("layers.0.self_attn.o_proj.weight") == {"cat_dim": 1}
    assert told("norm.weight") == {"cat_dim": 0}
