"""Megatron's legacy checkpoints: the suite, local numbers, torch as reader, and what is refused."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit import models
from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.layouts import Layout
from ckptkit.errors import FormatError, LayoutError, ShardMissingError, UnsafeError
from ckptkit.formats.base import ReadOptions
from ckptkit.formats.megatron_legacy import MegatronLegacyFormat
from ckptkit.formats.megatron_parts import parts_of
from ckptkit.formats.reference import Truth, gather, json_bytes, random_truth, same, write
from ckptkit.formats.suite import FormatSuite
from ckptkit.ops import runs
from ckptkit.stores.local import LocalStore

CONFIG: dict[str, Any] = {
    "model_type": "mixtral", "num_hidden_layers": 8, "hidden_size": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 10, "num_local_experts": 4, "intermediate_size": 6,
    "torch_dtype": "bfloat16",
}  # fmt: skip


class TestMegatronLegacy(FormatSuite):
    make = MegatronLegacyFormat


def mixtral(state: bool = True, family: str = "megatron") -> Truth:
    made = random_truth(models.named("mixtral").bind(CONFIG), family, state=state)
    made.extras = Extras({"step": 3}, files={"config.json": json_bytes(CONFIG)})
    return made


def read(root: Path, layout: str = "") -> Catalog:
    return MegatronLegacyFormat().read(
        LocalStore(root), ReadOptions(layout=Layout.parse(layout) if layout else None)
    )


def load(path: Path) -> Any:
    from argparse import Namespace

    with torch.serialization.safe_globals([Namespace]):
        return torch.load(path, weights_only=True)


def bits(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_folders_are_named_as_megatron_names_them() -> None:
    """Two numbers are stages, or expert ranks on one stage; ranks that save nothing have no folder."""
    named = {
        text: [part.folder for part in parts_of(Layout.parse(text))] for text in ("tp=2", "pp=2", "ep=2,dp=2")
    }

    assert named == {
        "tp=2": ["mp_rank_00", "mp_rank_01"],
        "pp=2": ["mp_rank_00_000", "mp_rank_00_001"],
        "ep=2,dp=2": ["mp_rank_00_000", "mp_rank_00_001"],
    }
    assert [p.folder for p in parts_of(Layout.parse("tp=2,pp=2,ep=2,dp=1"))] == [
        "mp_rank_00_000_000", "mp_rank_00_001_000", "mp_rank_01_000_001", "mp_rank_01_001_001",
    ]  # fmt: skip
    with pytest.raises(LayoutError, match="etp"):
        parts_of(Layout.parse("etp=2,dp=2"))


def test_layers_and_experts_count_from_zero_on_every_rank(tmp_path: Path) -> None:
    """Stage 1, virtual stage 1 of pp=2, vpp=2 holds layers 6 and 7 as 0 and 1; expert rank 1 holds experts 2 and 3 as 0 and 1."""
    truth = mixtral(state=False)
    write(MegatronLegacyFormat(), truth, tmp_path / "run", "pp=2,vpp=2,ep=2,dp=2")

    state = load(tmp_path / "run" / "iter_0000003" / "mp_rank_00_001_001" / "model_optim_rng.pt")

    assert sorted(k for k in state if k.startswith("model")) == ["model0", "model1"]
    last = state["model1"]
    assert {key.split(".")[2] for key in last if ".layers." in key} == {"0", "1"}
    found = last["decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"]
    assert bits(found) == truth.values["layers.7.experts.down", "param"][3].tobytes()
    assert (
        "decoder.final_layernorm.weight" in last and "decoder.final_layernorm.weight" not in state["model0"]
    )
    assert (state["iteration"], state["args"].pipeline_model_parallel_size) == (3, 2)


def test_every_rank_has_its_gate_rows_and_then_its_up_rows(tmp_path: Path) -> None:
    """With etp=2 a rank's first matrix is half of the gate and half of the up rows; the vocabulary is padded to 128 × tp."""
    truth = mixtral(state=False)
    write(MegatronLegacyFormat(), truth, tmp_path / "run", "tp=2,etp=2")

    state = load(tmp_path / "run" / "iter_0000003" / "mp_rank_01" / "model_optim_rng.pt")["model"]

    gate_up = truth.values["layers.0.experts.gate_up", "param"][2]
    want = np.concatenate([gate_up[0, 3:], gate_up[1, 3:]])
    assert bits(state["decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight"]) == want.tobytes()
    assert state["embedding.word_embeddings.weight"].shape == (128, 4)
    assert not state["embedding.word_embeddings.weight"].any()  # rows 128 to 255: padding only


def test_flat_state_lies_where_megatron_puts_it(tmp_path: Path) -> None:
    """Reverse module order, every parameter at a multiple of 64; the last parameter is first."""
    truth = mixtral()
    write(MegatronLegacyFormat(), truth, tmp_path / "run", "dp=2,zero=1")

    flat = load(tmp_path / "run" / "iter_0000003" / "mp_rank_00" / "distrib_optim.pt")
    tensors = flat[0][torch.bfloat16, torch.float32]

    head = truth.values["lm_head", "exp_avg"]
    norm = truth.values["norm", "exp_avg"]
    assert bits(tensors["exp_avg"][:40]) == head.tobytes()  # 10 real rows of 128
    assert not tensors["exp_avg"][40:512].any()
    assert bits(tensors["exp_avg"][512:516]) == norm.tobytes()
    assert tensors["numel_unpadded"] == len(tensors["param"]) and flat["buckets_coalesced"] is True


def test_numbered_state_is_written_with_its_groups(tmp_path: Path) -> None:
    """Without ZeRO: parameters numbered through the groups, with fp32 weights beside."""
    truth = mixtral()
    write(MegatronLegacyFormat(), truth, tmp_path / "run", "tp=1")

    optimizer = load(tmp_path / "run" / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt")["optimizer"]

    groups, state = optimizer["optimizer"]["param_groups"], optimizer["optimizer"]["state"]
    numbers = [n for group in groups for n in group["params"]]
    assert numbers == list(range(len(state)))
    assert [g["wd_mult"] for g in groups] == [1.0, 0.0]
    assert [len(m) for m in optimizer["fp32_from_fp16_params"]] == [len(g["params"]) for g in groups]
    assert all(float(s["step"]) == 3 for s in state.values())
    same(gather(tmp_path / "run", read(tmp_path / "run")), truth.values)


def test_grouped_experts_and_norms_of_their_own_are_read(tmp_path: Path) -> None:
    """`linear_fc1.weight<e>` of grouped layers, and `input_layernorm` where norms are modules."""
    truth = mixtral(state=False, family="megatron_grouped")
    write(MegatronLegacyFormat(), truth, tmp_path / "run")
    path = tmp_path / "run" / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    state = load(path)
    model = state["model"]
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight3" in model
    state["model"] = {
        key.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"): tensor
        for key, tensor in model.items()
    }
    state["model"]["decoder.layers.0.self_attention.linear_proj._extra_state"] = None
    torch.save(state, path)

    found = read(tmp_path / "run")

    assert found.names == "megatron_grouped"
    same(gather(tmp_path / "run", found), truth.values)


def test_another_padding_of_the_vocabulary_is_read(tmp_path: Path) -> None:
    """A run that pads to other multiples has more or fewer rows; those past the vocabulary are padding."""
    truth = mixtral(state=False)
    write(MegatronLegacyFormat(), truth, tmp_path / "run", "tp=2")
    for rank in range(2):
        path = tmp_path / "run" / "iter_0000003" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        state = load(path)
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensor = "embed" if key.startswith("embed") else "lm_head"
            rows = torch.from_numpy(truth.values[tensor, "param"].view(np.int16)).view(torch.bfloat16)
            whole = torch.cat([rows, torch.full((2, 4), float("nan"), dtype=torch.bfloat16)])
            state["model"][key] = whole[6 * rank : 6 * rank + 6].clone()  # 12 rows, 6 a rank
        torch.save(state, path)

    same(gather(tmp_path / "run", read(tmp_path / "run")), truth.values)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write(MegatronLegacyFormat(), mixtral(), tmp_path / "run", "tp=2,ep=2,zero=1")
    return tmp_path / "run"


def test_a_missing_rank_is_named(saved: Path) -> None:
    """A folder or a file of optimizer state that a rank should have."""
    folder = saved / "iter_0000003"
    (folder / "mp_rank_01_001" / "distrib_optim.pt").unlink()
    with pytest.raises(ShardMissingError, match=r"mp_rank_01_001/distrib_optim\.pt"):
        read(saved)
    shutil.rmtree(folder / "mp_rank_01_001")
    with pytest.raises(ShardMissingError, match="mp_rank_01_001"):
        read(saved)


def test_another_layout_than_the_files_is_refused(saved: Path) -> None:
    """A layout with other folders, and one with equal folders but other shares."""
    with pytest.raises(ShardMissingError, match="mp_rank_00/"):
        read(saved, "tp=2")
    with pytest.raises(FormatError):
        read(saved, "tp=2,pp=1,ep=2,etp=2,dp=2")


def test_old_forms_say_what_to_do(tmp_path: Path) -> None:
    """Models of before megatron-core and optimizer state of before 2024 are refused with the way out."""
    write(MegatronLegacyFormat(), mixtral(), tmp_path / "run", "dp=2,zero=1")
    folder = tmp_path / "run" / "iter_0000003" / "mp_rank_00"
    flat = load(folder / "distrib_optim.pt")
    del flat["buckets_coalesced"]
    torch.save(flat, folder / "distrib_optim.pt")
    with pytest.raises(FormatError, match="February 2024"):
        read(tmp_path / "run")
    state = load(folder / "model_optim_rng.pt")
    torch.save({**state, "model": {"language_model": {"encoder": {}}}}, folder / "model_optim_rng.pt")
    with pytest.raises(FormatError, match="before megatron-core"):
        read(tmp_path / "run")


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("where", ["args", "optimizer"])
def test_hostile_pickles_are_refused(where: str, saved: Path, tmp_path: Path) -> None:
    """os.system in the arguments, or nested in optimizer state: named, and not run."""
    path = saved / "iter_0000003" / "mp_rank_00_000" / "model_optim_rng.pt"
    state = load(path)
    evil = _Evil(tmp_path / "ran")
    state[where] = evil if where == "args" else [{"optimizer": {"state": {0: {"exp_avg": [evil]}}}}]
    torch.save(state, path)

    with pytest.raises(UnsafeError, match="system"):
        read(saved)

    assert not (tmp_path / "ran").exists()


def test_an_iteration_above_the_tracker_is_unfinished(saved: Path) -> None:
    """The tracker is written last: what is newer is still being saved."""
    shutil.copytree(saved / "iter_0000003", saved / "iter_0000009")

    found = runs.newest(str(saved), quick=True)

    assert found.step is not None and found.step.name == "iter_0000003"
    assert [step.name for step in found.passed_over] == ["iter_0000009"]
    assert "says 3" in found.passed_over[0].why
