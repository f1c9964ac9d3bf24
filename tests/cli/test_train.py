"""`ckptkit train`: what it prints, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptkit import ops
from tests.cli.helpers import ROOT, invoke, invoke_json

SMALL = [
    word
    for setting in (
        "model.hidden_size=32",
        "model.num_hidden_layers=2",
        "model.moe_intermediate_size=16",
        "train.seq_len=16",
        "train.batch=4",
        "data.synthetic_bytes=20000",
    )
    for word in ("--set", setting)
]


def train(*arguments: object) -> tuple:
    return ("train", "--config", "zaya1-tiny.toml", "--device", "cpu", *SMALL, *arguments)


def test_a_run_tells_its_steps_saves_and_has_nothing_to_do_the_second_time(tmp_path: Path) -> None:
    """Losses fall; the JSON lines hold what the console says."""
    lines = tmp_path / "log.jsonl"
    arguments = train("--steps", 20, "--root", tmp_path / "run", "--every", 8, "--jsonl", lines)

    done = invoke(*arguments)
    again = invoke(*arguments)

    assert done.exit_code == 0, done.output
    assert "trained from step 0 to 20: loss" in done.stdout
    assert "step 20/20  loss" in done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 21))
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert sum(records[0]["load"][0]) == pytest.approx(1.0)
    assert [step.step for step in ops.steps(str(tmp_path / "run")).steps] == [8, 16, 20]
    assert again.exit_code == 0
    assert "the run already has 20 steps" in again.stdout


def test_json_is_one_object() -> None:
    code, found = invoke_json(*train("--steps", 2))

    assert code == 0
    assert (found["first_step"], len(found["losses"])) == (0, 2)


def test_a_loss_that_is_no_number_ends_the_run_with_the_step_before_saved(tmp_path: Path) -> None:
    done = invoke(*train("--steps", 9, "--root", tmp_path / "run", "--set", "optimizer.adamw_lr=1e30"))

    assert done.exit_code == 6
    assert "the loss is" in done.stderr
    (step,) = ops.steps(str(tmp_path / "run")).steps
    assert f"Weights are still those of step {step.step}" in done.stderr
    assert ops.verify(f"{tmp_path}/run@{step.step}").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--layout", "tp=3"), "does not divide"),
        (("--layout", "dp=8"), "does not divide into dp=8 shares"),
        (("--layout", "dp=2,zero=3"), "training takes zero=0, zero=1"),
        (("--set", 'data.files=["/nowhere/*.txt"]'), "there is no file /nowhere"),
        (("--set", "train.stesp=3"), "did you mean steps"),
    ],
)
def test_what_cannot_be_is_told_at_once(arguments: tuple[str, ...], told: str) -> None:
    done = invoke(*train(*arguments))

    assert done.exit_code == 2
    assert told in done.stderr
    assert "Traceback" not in done.output


def test_an_unknown_configuration_lists_those_that_come_along() -> None:
    done = invoke("train", "--config", "zaya2.toml")

    assert done.exit_code == 2
    assert "zaya1-tiny.toml" in done.stderr


@pytest.mark.parametrize(
    ("layout", "number"), [("tp=1", signal.SIGINT), ("dp=2", signal.SIGINT), ("dp=2", signal.SIGTERM)]
)
def test_a_signal_saves_and_the_same_command_goes_on(
    tmp_path: Path, layout: str, number: signal.Signals
) -> None:
    """To the launching process alone, as `kill` does; its workers follow it."""
    root, lines = tmp_path / "run", tmp_path / "log.jsonl"
    words = train(
        "--steps",
        100_000,
        "--root",
        root,
        "--every",
        100_000,
        "--jsonl",
        lines,
        "--layout",
        layout,
        "--quiet",
    )
    command = [sys.executable, "-c", "from ckptkit.cli.main import cli; cli()", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not (lines.exists() and len(lines.read_text().splitlines()) >= 3):
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        _, told = process.communicate()

    steps = len(lines.read_text().splitlines())
    assert process.returncode == 5, told
    assert f"interrupted: stopped after step {steps}: saved to {root}" in told
    again = invoke(*train("--steps", steps + 1, "--root", root, "--layout", "tp=1"))
    assert f"trained from step {steps} to {steps + 1}" in again.stdout, again.output


@pytest.mark.long
def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    """One summary for the run; another number of processes than the layout has is told."""
    base = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "ckptkit",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(layout: str) -> subprocess.CompletedProcess[str]:
        words = map(str, train("--steps", 2, "--layout", layout, "--root", tmp_path / "run"))
        return subprocess.run(
            [*base, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    good, bad = run("dp=2,zero=1"), run("tp=4")

    assert good.returncode == 0, good.stderr
    assert good.stdout.count("trained from step 0 to 2") == 1
    assert [step.step for step in ops.steps(str(tmp_path / "run")).steps] == [2]
    assert bad.returncode != 0
    assert "layout tp=4 has 4 ranks, torchrun started 2" in bad.stderr
