"""The hooks in frameworks themselves: megatron-core, DeepSpeed, Hugging Face's Trainer."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit

pytestmark = pytest.mark.peers

JOBS = Path(__file__).with_name("hooks_jobs.py")


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def run(job: dict[str, Any], root: Path, world: int) -> None:
    """Do a job on some ranks. Fails with what the first rank that failed printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {**job, "port": free.getsockname()[1]}
    number = len(list(root.glob("*.log")))
    meeting = root / f"meeting-{number}"
    ranks, logs = [], []
    for rank in range(world):
        logs.append(root / f"{number}-{rank}.log")
        with logs[-1].open("wb") as out:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", str(JOBS), str(rank), str(world), str(meeting), json.dumps(job)],
                    stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
                    cwd=root, start_new_session=True,
                )
            )  # fmt: skip
    try:
        codes = [rank.wait(timeout=300) for rank in ranks]
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for code, log in zip(codes, logs, strict=True):
        text = log.read_text()
        assert code == 0 and "Traceback" not in text, text[-3000:]


@needs("megatron")
@pytest.mark.parametrize(
    ("before", "after"),
    [({"tp": 2}, {"pp": 2}), ({}, {"tp": 2}), ({"model": "moe", "ep": 2}, {"model": "moe"})],
    ids=["tp-to-pp", "dp-to-tp", "experts"],
)
def test_megatron_models_and_distributed_optimizers(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    """Saved in one layout and restored in another: every parameter, master and moment bit for bit, and the groups."""
    job = {"do": "megatron", "model": "dense", "url": str(tmp_path / "run")}

    run({**job, **before, "save": True}, tmp_path, 2)
    run({**job, **after, "save": False}, tmp_path, 2)

    assert ckptkit.verify(str(tmp_path / "run" / "step-00000007.e1")).exit_code == 0


@needs("deepspeed")
@pytest.mark.parametrize(("stage", "ranks"), [(1, (2, 1)), (2, (2, 2)), (1, (1, 2))])
def test_deepspeed_goes_on_on_any_number_of_ranks(stage: int, ranks: tuple[int, int], tmp_path: Path) -> None:
    """Two steps, then a new engine for two more: masters and moments equal those of four steps in one go."""
    job = {"do": "deepspeed", "stage": stage, "bf16": True, "seed": 0, "first": 0}

    run(
        {**job, "url": str(tmp_path / "whole"), "upto": 4, "out": str(tmp_path / "whole.pt")},
        tmp_path,
        ranks[1],
    )
    run({**job, "url": str(tmp_path / "run"), "upto": 2, "out": str(tmp_path / "a.pt")}, tmp_path, ranks[0])
    run(
        {
            **job,
            "url": str(tmp_path / "run"),
            "upto": 4,
            "out": str(tmp_path / "b.pt"),
            "seed": 7,
            "first": 2,
        },
        tmp_path,
        ranks[1],
    )

    whole, again = (torch.load(tmp_path / f"{name}.pt", weights_only=False) for name in ("whole", "b"))
    assert whole.keys() == again.keys()
    differing = [key for key in whole if not torch.equal(whole[key], again[key])]
    assert differing == []


@needs("accelerate")
def test_the_trainer_goes_on_where_it_was(tmp_path: Path) -> None:
    """Stopped after seven of fifteen steps, in the middle of an epoch: data, schedule, losses and weights go on bit for bit."""
    job = {"do": "trainer", "folder": str(tmp_path / "out"), "every": 7}

    run({**job, "url": "", "upto": 15, "out": str(tmp_path / "whole.pt")}, tmp_path, 1)
    run({**job, "url": str(tmp_path / "run"), "upto": 7, "out": str(tmp_path / "a.pt")}, tmp_path, 1)
    run({**job, "url": str(tmp_path / "run"), "upto": 15, "out": str(tmp_path / "b.pt")}, tmp_path, 1)

    whole, first, second = (
        torch.load(tmp_path / f"{name}.pt", weights_only=False) for name in ("whole", "a", "b")
    )
    assert {**first["losses"], **second["losses"]} == whole["losses"]
    assert all(torch.equal(whole["state"][name], second["state"][name]) for name in whole["state"])
