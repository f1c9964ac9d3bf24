"""A run that changes its layout goes on as if nothing had happened, and its steps are checkpoints like any other."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptkit import ops
from ckptkit.train.launch import launch
from tests.train.layouts import continued, curves
from tests.train.zayas import config_of, copy_values, judge_of, logits_of, stage_of

LAYOUTS = [
    "tp=1",
    "dp=2,zero=1",
    "tp=2",
    "tp=4,zero=1:whole",
    "pp=3",
    "cp=4,ep=4",
    "ep=4,dp=4,zero=1",
    "tp=2,pp=2,ep=2,dp=2,zero=1",
    "tp=2,cp=2,dp=2,ep=4,zero=1:whole",
    "pp=2,cp=2,tp=2,zero=1",
    "pp=2:1/2,dp=4,ep=2,zero=1",
    "tp=8,ep=4",
]


def _assert_goes_on(records: list[dict[str, Any]], wanted: list[tuple[float, float]]) -> None:
    assert [record["step"] for record in records] == list(range(1, len(wanted) + 1))
    for record, (loss, norm) in zip(records, wanted, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-5), record["step"]
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-4), record["step"]


def test_a_run_goes_on_in_other_layouts_and_its_steps_are_whole(tmp_path: Path) -> None:
    """Three layouts in one run: tensor and data parallel with ZeRO, then pipeline and experts, then one process."""
    phases = [("tp=2,dp=2,zero=1", 2), ("pp=2,ep=2,dp=2,zero=1:whole", 4), ("tp=1", 6)]

    records = continued(tmp_path, phases, train__steps=6, balance__mode="pid")

    wanted = curves(tmp_path, ["tp=1"], steps=6, train__steps=6, balance__mode="pid")["tp=1"][0]
    _assert_goes_on(records, wanted)
    assert [step.step for step in ops.steps(str(tmp_path / "run")).steps] == [2, 4, 6]
    for step in (2, 4, 6):
        here = f"{tmp_path}/run@{step}"
        assert ops.verify(here).exit_code == 0
        other = f"{tmp_path}/other-{step}"
        ops.reshard(here, other, layout="tp=2,pp=3,ep=2,dp=2,zero=1")
        assert ops.verify(here, against=other).exit_code == 0


@pytest.mark.parametrize("layout", ["pp=2,dp=3,zero=1", "pp=2,dp=3"])
def test_both_stages_copies_of_the_embedding_stay_equal_bit_for_bit(tmp_path: Path, layout: str) -> None:
    """Its gradient is rounded alike on both, wherever it lies in their flat buffers: `verify` compares the copies."""
    continued(tmp_path, [(layout, 4)], train__steps=4, train__batch=6)

    assert ops.verify(f"{tmp_path}/run@4").exit_code == 0


def test_the_same_layout_goes_on_bit_for_bit(tmp_path: Path) -> None:
    layout = "dp=2,zero=1"

    records = continued(tmp_path, [(layout, 3), (layout, 6)], train__steps=6)

    wanted = curves(tmp_path, [layout], steps=6, train__steps=6)[layout][0]
    assert [(record["loss"], record["grad_norm"]) for record in records] == wanted


def test_bfloat16_weights_go_on_from_their_masters(tmp_path: Path) -> None:
    """Also in another layout, where sums differ in their last bits; weights are the roundings of masters in every step."""
    records = continued(tmp_path, [("dp=2,zero=1", 3), ("tp=1", 6)], train__steps=6, train__dtype="bfloat16")

    wanted = curves(tmp_path, ["tp=1"], steps=6, train__steps=6, train__dtype="bfloat16")["tp=1"][0]
    for record, (loss, _) in zip(records, wanted, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=5e-3), record["step"]
    for step in (3, 6):
        catalog = ops.open(f"{tmp_path}/run@{step}").catalog
        assert {role for name, role in catalog.held if name == "layers.0.attn.q"} == {
            "param",
            "master",
            "momentum",
        }
        assert ops.verify(f"{tmp_path}/run@{step}").exit_code == 0


def test_a_saved_step_holds_the_settings_of_the_optimizer(tmp_path: Path) -> None:
    """So that another trainer's format gets its groups."""
    continued(tmp_path, [("tp=1", 2)], train__steps=2)

    source = ops.open(f"{tmp_path}/run@2")
    groups = source.catalog.extras.common["groups"]
    assert [(g["kind"], g["step"], g["weight_decay"]) for g in groups] == [
        ("muon", 2, 0.1),
        ("adamw", 2, 0.1),
        ("adamw", 2, 0.0),
    ]
    assert {t for g in groups for t in g["tensors"]} == {
        name for name, tensor in source.catalog.tensors.items() if tensor.kind == "param"
    }


def test_a_step_loads_in_transformers_and_weights_of_transformers_start_a_run(tmp_path: Path) -> None:
    """Both ways through `hf`: the logits are the same, and a run starts from any checkpoint's weights."""
    from transformers import ZayaForCausalLM

    config = config_of()
    judge = judge_of(config)
    judge.save_pretrained(tmp_path / "start")

    continued(
        tmp_path, [("tp=1", 1)], train__steps=1, checkpoint__init=str(tmp_path / "start"), optimizer__warmup=0
    )
    ops.reshard(f"{tmp_path}/run@1", str(tmp_path / "hf"), to="hf", drop_optimizer=True)

    twin = stage_of(config)
    copy_values(judge, twin)
    first = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])["loss"]
    assert first == pytest.approx(_first_loss(config, twin), rel=1e-6), (
        "the first step began from the given weights"
    )
    back = ZayaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    stage = stage_of(config)
    copy_values(back, stage)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert stored.keys() == {name for name, _ in stage.state_dict().items()}
    tokens = torch.randint(1, 256, (2, 16), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(back(input_ids=tokens).logits, logits_of(stage, tokens), rtol=1e-5, atol=1e-5)
    start = stage_of(config)
    copy_values(judge, start)
    moved = (logits_of(stage, tokens) - logits_of(start, tokens)).abs().max()
    assert moved > 1e-3, "the step has changed the model"


def test_a_run_starts_from_bfloat16_weights_of_the_original_layout(tmp_path: Path) -> None:
    """As published checkpoints are: half-layers, experts one by one, every tensor in bfloat16."""
    config = config_of()
    judge = judge_of(config)
    with torch.no_grad():
        for value in [*judge.parameters(), *(b for name, b in judge.named_buffers() if "balancing" in name)]:
            value.copy_(value.bfloat16())
    twin = stage_of(config)
    copy_values(judge, twin)
    judge.to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    ops.reshard(str(tmp_path / "hf"), str(tmp_path / "hub"), to="hub")

    records = continued(tmp_path, [("tp=1", 1)], train__steps=1, checkpoint__init=str(tmp_path / "hub"))

    assert records[0]["loss"] == pytest.approx(_first_loss(config, twin), rel=1e-6)


def _first_loss(config: Any, stage: Any) -> float:
    from ckptkit.train import data

    t = config.train
    loader = data.Loader(data.sources(config.data), t.seq_len, t.batch, config.data.seed)
    tokens, targets = loader.next(0, 1, stage.context.positions)
    with torch.no_grad():
        return float(stage.loss(stage(tokens), targets)) / targets.numel()


@pytest.mark.long
@pytest.mark.parametrize("number", range(4))
def test_drawn_chains_of_layouts_go_on(tmp_path: Path, number: int) -> None:
    """Each chain goes through six of the layouts, over 1 to 8 processes, in a drawn order."""
    draw = random.Random(number)
    order = draw.sample(LAYOUTS, len(LAYOUTS))[:6]
    phases = [(text, 3 * (k + 1)) for k, text in enumerate(order)]
    settings = {"train__steps": 18, "train__batch": 8, "train__seq_len": 32, "model__num_attention_heads": 8}

    records = continued(tmp_path, phases, **settings)

    _assert_goes_on(records, curves(tmp_path, ["dp=1"], steps=18, **settings)["dp=1"][0])
    for _, step in phases:
        assert ops.verify(f"{tmp_path}/run@{step}").exit_code == 0


def test_a_rank_that_is_killed_ends_the_run_with_a_word() -> None:
    from ckptkit.errors import StoreError

    with pytest.raises(StoreError, match="rank 1 ended without a word"):
        launch(_die, 2)


def _die(rank: int, address: str, device: str) -> None:
    import os
    import signal
    import time

    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
