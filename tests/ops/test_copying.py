"""`copy`: the same files, checked on the way, in place whole or not at all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptkit import ops
from ckptkit.errors import CorruptionError, FormatError, StoreError, UsageError
from tests.ops.making import contents, flip, make


@pytest.mark.parametrize("to", ["native", "hf", "dcp", "megatron", "deepspeed", "zarr"])
def test_a_copy_has_the_same_files(trained: str, tmp_path: Path, to: str) -> None:
    layout = "dp=2,zero=1" if to == "deepspeed" else None
    ops.reshard(
        trained,
        str(tmp_path / "a"),
        to=to,
        layout=layout,
        drop_extras=True,
        drop_optimizer=to in ("hf", "zarr"),
    )

    result = ops.copy(str(tmp_path / "a"), str(tmp_path / "b"))

    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    assert result.files == len(contents(tmp_path / "a"))
    assert bool(result.not_checked) == (to == "hf")


def test_copies_go_to_stores_and_back(trained: str, tmp_path: Path) -> None:
    there = ops.copy(trained, "memory://copies/step-00001000.e0")
    back = ops.copy("memory://copies@1000", str(tmp_path / "b"))

    assert contents(tmp_path / "b") == contents(trained)
    assert there.files == back.files and there.leaves_checked == back.leaves_checked > 0


def test_every_leaf_of_the_source_is_compared(trained: str, tmp_path: Path) -> None:
    result = ops.copy(trained, str(tmp_path / "b"))

    leaves = ops.verify(trained).leaves
    assert result.leaves_checked == leaves > 0


@pytest.mark.parametrize(
    "file", ["rank-00003.safetensors", "rank-00003.extras", "rank-00003.digests", "index.npz"]
)
def test_a_damaged_source_is_not_copied_silently(trained: str, tmp_path: Path, file: str) -> None:
    """Data is refused before anything is in place; damage of small files is told at the latest when the copy is opened."""
    ops.copy(trained, str(tmp_path / "a"))
    flip(tmp_path / "a" / file, -1)

    with pytest.raises(CorruptionError, match=file.split(".")[0]):
        ops.copy(str(tmp_path / "a"), str(tmp_path / "b"))

    if file.endswith(".safetensors"):
        assert sorted(os.listdir(tmp_path)) == ["a"]


def test_an_unfinished_checkpoint_is_refused(trained: str, tmp_path: Path) -> None:
    ops.copy(trained, str(tmp_path / "a"))
    (tmp_path / "a" / "manifest.json").unlink()

    with pytest.raises(FormatError, match="not finished"):
        ops.copy(str(tmp_path / "a"), str(tmp_path / "b"))

    assert not (tmp_path / "b").exists()


def test_wrong_uses_write_nothing(trained: str, weights: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    single = tmp_path / "model.pt"
    ops.reshard(weights, str(tmp_path / "single"), to="torch")
    next((tmp_path / "single").glob("*.pt")).rename(single)

    with pytest.raises(StoreError, match="exists"):
        ops.copy(trained, str(tmp_path / "taken"))
    with pytest.raises(StoreError, match="no checkpoint"):
        ops.copy(trained, str(tmp_path / "taken"), overwrite=True)
    with pytest.raises(UsageError, match="both"):
        ops.copy(trained, trained)
    with pytest.raises(UsageError, match="one file"):
        ops.copy(str(single), str(tmp_path / "b"))
    with pytest.raises(StoreError, match="does not exist"):
        ops.copy(str(tmp_path / "nothing"), str(tmp_path / "b"))

    assert contents(tmp_path / "taken") == contents(tmp_path / "taken") and not (tmp_path / "b").exists()
    assert (tmp_path / "taken" / "notes.txt").read_text() == "mine"


_SLOWLY = """
import sys, time
from ckptkit import ops

ops.copy(sys.argv[1], sys.argv[2], threads=1, memory=16 << 20, progress=lambda done, total: time.sleep(0.02))
"""


def test_a_copy_that_is_killed_leaves_nothing_in_place_and_goes_on(tmp_path: Path) -> None:
    source = make(tmp_path / "a", settings={"hidden_size": 512, "num_hidden_layers": 4}, layout="dp=2,zero=1")
    for delay in (0.3, 0.6, 1.2):
        with subprocess.Popen([sys.executable, "-c", _SLOWLY, source, str(tmp_path / "b")]) as process:
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        if (tmp_path / "b").exists():
            break  # it was faster; then it is whole
        with pytest.raises(StoreError, match="does not exist"):
            ops.open(str(tmp_path / "b"))

    if not (tmp_path / "b").exists():
        ops.copy(source, str(tmp_path / "b"))

    assert contents(tmp_path / "b") == contents(source)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
