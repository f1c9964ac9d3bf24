"""`ckptkit ls`: the steps of a run, and what is wrong with them."""

import shutil
from pathlib import Path

import pytest

from tests.cli.helpers import invoke, invoke_json


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A run with a whole step 10, and a step 20 that lacks its manifest and rank 3."""
    run = tmp_path / "run"
    for step in (10, 20):
        done = invoke("reshard", made / "native", run / f"step-{step:08d}.e0")
        assert done.exit_code == 0, done.output
    (run / "step-00000020.e0" / "manifest.json").unlink()
    next((run / "step-00000020.e0").glob("rank-00003.safetensors")).unlink()
    return run


def test_ls_lists_steps_oldest_first_with_their_state(run: Path) -> None:
    done = invoke("ls", run)

    assert done.exit_code == 0, done.output
    heading, first, second, why = done.stdout.splitlines()
    assert heading.split()[:4] == ["step", "age", "size", "files"]
    assert first.startswith("step-00000010.e0") and "whole" in first and "tp=2,pp=2,dp=2,zero=1" in first
    assert second.startswith("step-00000020.e0") and "unfinished" in second
    assert why.startswith("step-00000020.e0: ") and "rank 3" in why


def test_ls_ends_with_a_summary_line_on_standard_error(run: Path) -> None:
    assert invoke("ls", run).stderr.splitlines()[-1].startswith(f"2 steps in {run}, 1 whole, ")


def test_ls_in_json_holds_the_same(run: Path) -> None:
    code, found = invoke_json("ls", run)

    assert code == 0
    assert [(step["name"], step["state"]) for step in found["steps"]] == [
        ("step-00000010.e0", "whole"),
        ("step-00000020.e0", "unfinished"),
    ]


def test_an_empty_run_has_no_steps(tmp_path: Path) -> None:
    done = invoke("ls", tmp_path)

    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith("0 steps in ")


def test_ls_of_a_run_whose_folder_went_away_is_a_store_fault(run: Path) -> None:
    shutil.rmtree(run)

    assert invoke("ls", run).exit_code == 4
