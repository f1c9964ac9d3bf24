"""`ckptkit diff`: what differs, largest first, and where it lies."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.helpers import TINY_LLAMA, invoke, invoke_json, settings


def change(folder: Path, rank: int) -> None:
    """Flip a high bit of one float32 of a rank's file."""
    file = folder / f"rank-{rank:05d}.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-4000] ^= 0x10
    file.write_bytes(raw)


def test_equal_checkpoints_of_two_layouts_are_equal(made: Path, tmp_path: Path) -> None:
    assert (
        invoke("reshard", made / "native", tmp_path / "other", "--layout", "tp=1,pp=2,dp=3,zero=1").exit_code
        == 0
    )

    done = invoke("diff", made / "native", tmp_path / "other")

    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("equal: ")


def test_a_difference_is_exit_code_1_and_says_where_it_lies(
    copy_of: Callable[[str], Path], made: Path
) -> None:
    other = copy_of("native")
    change(other, 5)

    done = invoke("diff", other, made / "native", "--by", "rank")

    assert done.exit_code == 1, done.output
    assert "rank 5" in done.stdout.splitlines()[-1]


def test_by_rank_counts(copy_of: Callable[[str], Path], made: Path) -> None:
    other = copy_of("native")
    change(other, 5)

    code, found = invoke_json("diff", other, made / "native", "--by", "rank")

    assert code == 1
    assert found["by_rank"] == {"5": 1}
    assert found["tensors_differing"] == len(found["tensors"]) == 1


def test_a_tolerance_makes_near_values_equal(tmp_path: Path) -> None:
    """Two seeds differ everywhere by less than 100, but not by less than 1e-9."""
    for seed in (0, 1):
        options = ("--model", "llama", *settings(TINY_LLAMA), "--optimizer", "none", "--seed", seed)
        assert invoke("synth", tmp_path / str(seed), *options).exit_code == 0

    assert invoke("diff", tmp_path / "0", tmp_path / "1", "--atol", "1e-9").exit_code == 1
    assert invoke("diff", tmp_path / "0", tmp_path / "1", "--atol", "100").exit_code == 0


@pytest.mark.parametrize("option", ["--rtol", "--atol"])
def test_a_negative_tolerance_is_wrong_use(option: str, made: Path) -> None:
    assert invoke("diff", made / "hf", made / "hf", option, "-1").exit_code == 2
