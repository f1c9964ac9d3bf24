"""`ckptkit diff`: what differs, largest first, and where it lies."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.helpers import TINY_LLAMA, invoke, invoke_json, settings


def change(folder: Path, rank: int, bit: int) -> None:
    """Flip one bit of the first element of the last float32 entry of a rank's file."""
    file = folder / f"rank-{rank:05d}.safetensors"
    raw = bytearray(file.read_bytes())
    (size,) = struct.unpack_from("<Q", raw)
    entries = {
        n: e for n, e in json.loads(raw[8 : 8 + size]).items() if n[:2] != "__" and e["dtype"] == "F32"
    }
    at = 8 + size + max(entry["data_offsets"][0] for entry in entries.values())
    raw[at + bit // 8] ^= 1 << bit % 8
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
    change(other, 5, bit=30)

    done = invoke("diff", other, made / "native", "--by", "rank")

    assert done.exit_code == 1, done.output
    assert "rank 5" in done.stdout.splitlines()[-1]


def test_by_rank_counts(copy_of: Callable[[str], Path], made: Path) -> None:
    other = copy_of("native")
    change(other, 5, bit=30)

    code, found = invoke_json("diff", other, made / "native", "--by", "rank")

    assert code == 1
    assert found["by_rank"] == {"5": 1}
    assert found["tensors_differing"] == len(found["tensors"]) == 1


def test_a_tolerance_makes_near_values_equal(copy_of: Callable[[str], Path], made: Path) -> None:
    """The lowest bit of a float32 differs: a relative difference of about 1e-7."""
    other = copy_of("native")
    change(other, 5, bit=0)

    assert invoke("diff", other, made / "native").exit_code == 1
    assert invoke("diff", other, made / "native", "--rtol", "1e-9").exit_code == 1
    assert invoke("diff", other, made / "native", "--rtol", "1e-5").exit_code == 0


def test_extras_that_differ_are_named_in_the_verdict(tmp_path: Path) -> None:
    for step in (1, 2):
        options = ("--model", "llama", *settings(TINY_LLAMA), "--optimizer", "none", "--step", step)
        assert invoke("synth", tmp_path / str(step), *options).exit_code == 0

    done = invoke("diff", tmp_path / "1", tmp_path / "2")

    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1].startswith("different: extras; ")


@pytest.mark.parametrize("option", ["--rtol", "--atol"])
def test_a_negative_tolerance_is_wrong_use(option: str, made: Path) -> None:
    assert invoke("diff", made / "hf", made / "hf", option, "-1").exit_code == 2
