"""`ckptkit latest`: one path on standard output, the reasons on standard error."""

from pathlib import Path

import pytest

from tests.cli.helpers import invoke, invoke_json


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A run with whole steps 10 and 20."""
    for step in (10, 20):
        done = invoke("reshard", made / "native", tmp_path / "run" / f"step-{step:08d}.e0")
        assert done.exit_code == 0, done.output
    return tmp_path / "run"


def test_latest_prints_one_path(run: Path) -> None:
    done = invoke("latest", run)

    assert (done.exit_code, done.stdout) == (0, f"{run / 'step-00000020.e0'}\n")


def test_latest_says_why_a_newer_step_was_passed_over(run: Path) -> None:
    (run / "step-00000020.e0" / "manifest.json").unlink()

    done = invoke("latest", run, "--quick")

    assert (done.exit_code, done.stdout) == (0, f"{run / 'step-00000010.e0'}\n")
    assert done.stderr.startswith("passed over step-00000020.e0: unfinished")


def test_without_quick_a_changed_byte_is_seen(run: Path) -> None:
    """Structure is still sound, so that --quick takes the step."""
    file = run / "step-00000020.e0" / "rank-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1000] ^= 1
    file.write_bytes(raw)

    assert invoke("latest", run, "--quick").stdout.strip().endswith("step-00000020.e0")
    assert invoke("latest", run).stdout.strip().endswith("step-00000010.e0")


def test_no_whole_step_is_exit_code_1_and_prints_no_path(run: Path) -> None:
    for step in run.iterdir():
        (step / "manifest.json").unlink()

    done = invoke("latest", run)

    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.count("passed over") == 2


def test_no_step_at_all_is_exit_code_3(tmp_path: Path) -> None:
    done = invoke("latest", tmp_path)

    assert (done.exit_code, done.stdout) == (3, "")


def test_latest_in_json(run: Path) -> None:
    code, found = invoke_json("latest", run, "--quick")

    assert (code, found["path"]) == (0, str(run / "step-00000020.e0"))
