"""Runs: which steps there are, which are whole, and which is the newest."""

import os
import shutil
import time
from pathlib import Path

import pytest

from ckptkit import ops
from ckptkit.errors import FormatError, ShardMissingError, StoreError
from ckptkit.ops import runs
from tests.ops.making import TRAINED, contents, flip, make


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights on two ranks."""
    return make(tmp_path_factory.mktemp("made") / "small", optimizer="none", layout="dp=2")


def copy(small: str, *targets: Path) -> None:
    for target in targets:
        shutil.copytree(small, target)


def test_the_newest_step_with_a_commit_record_is_taken(tmp_path: Path, small: str) -> None:
    """Steps 10 and 20 are whole, 30 has weights but no record: 20 is the newest, and why not 30 is said."""
    copy(small, *(tmp_path / f"step-{n}" for n in (10, 20, 30)))
    (tmp_path / "step-30" / "manifest.json").unlink()

    found = ops.newest(str(tmp_path))

    assert found.path == str(tmp_path / "step-20") and found.exit_code == 0
    assert [(step.name, step.state) for step in found.passed_over] == [("step-30", "unfinished")]
    assert "manifest.json is missing" in found.passed_over[0].why
    assert ops.latest(str(tmp_path)) == found.path


def test_another_rank_s_file_alone_is_no_whole_model(tmp_path: Path, small: str) -> None:
    """Nodes write their ranks at their own pace: without rank 0, one safetensors file looked like a folder of Transformers'."""
    copy(small, *(tmp_path / f"step-{n}" for n in (10, 20)))
    for file in (tmp_path / "step-20").iterdir():
        if file.name not in ("rank-00001.safetensors", "index.npz"):
            file.unlink()

    found = ops.newest(str(tmp_path))

    assert found.path == str(tmp_path / "step-10")
    assert [(step.state, step.format) for step in found.passed_over] == [("unfinished", "native")]


def test_names_are_read_whole_and_as_numbers(tmp_path: Path, small: str) -> None:
    """200 comes after 100 and 9 before 10; what only resembles a step is none."""
    names = ["step-9", "step-10", "step-100", "step-0200"]
    junk = [
        "step-100.tmp",
        "step-100-backup",
        "step-1e3",
        "xstep-300",
        "step-",
        "step-٣",
        "step--5",
        "old step-999",
    ]
    copy(small, *(tmp_path / name for name in names + junk))

    assert [step.name for step in ops.steps(str(tmp_path)).steps] == names
    assert ops.newest(str(tmp_path)).path == str(tmp_path / "step-0200")


def test_other_trainers_step_folders_count(tmp_path: Path, weights: str) -> None:
    """Transformers, Megatron-LM and DeepSpeed each name steps their own way."""
    names = ["step_1", "checkpoint-2", "iter_0000003", "global_step4", "step-5", "step-00000001.e1"]
    copy(weights, *(tmp_path / name for name in names))

    assert [(step.step, step.epoch) for step in ops.steps(str(tmp_path)).steps] == [
        (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (1, 1),
    ]  # fmt: skip


def test_an_epoch_outweighs_a_step(tmp_path: Path, small: str) -> None:
    """A run that went back and goes on is newer than what it left behind."""
    copy(small, tmp_path / "step-00000900.e0", tmp_path / "step-00000500.e1")

    assert ops.latest(str(tmp_path)).endswith("step-00000500.e1")


def test_temporaries_never_count(tmp_path: Path, small: str) -> None:
    """A folder that is complete but not renamed is listed as unfinished, and not taken."""
    copy(small, tmp_path / "step-10", tmp_path / ".step-20.0123456789ab.unfinished")

    found = ops.newest(str(tmp_path))
    listed = ops.steps(str(tmp_path)).steps

    assert found.path == str(tmp_path / "step-10") and not found.passed_over
    assert [(step.step, step.state, step.temporary) for step in listed] == [
        (10, "whole", False),
        (20, "unfinished", True),
    ]


def test_times_do_not_matter(tmp_path: Path, small: str) -> None:
    """Clocks differ and copies change times: 30 is the newest, though it looks a day older than 10; a warning says so."""
    copy(small, tmp_path / "step-30", tmp_path / "step-10")
    now = time.time()
    os.utime(tmp_path / "step-30", (now - 86400, now - 86400))
    os.utime(tmp_path / "step-10", (now + 86400, now + 86400))

    assert ops.latest(str(tmp_path)).endswith("step-30")
    warnings = ops.steps(str(tmp_path)).warnings
    assert any("step-10 was changed" in text and "future" in text for text in warnings)
    assert any("step-30 is older than step-10" in text for text in warnings)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    """An unfinished step says which ranks have not written, by what the others recorded."""
    step = tmp_path / "step-7"
    make(step, layout=TRAINED)
    (step / "manifest.json").unlink()
    (step / "rank-00015.safetensors").unlink()
    (step / "rank-00003.digests").unlink()

    (row,) = ops.steps(str(tmp_path)).steps

    assert row.state == "unfinished" and row.why.endswith("are ranks 3, 15")


def test_a_missing_or_short_file_behind_a_record_is_corrupt(tmp_path: Path, small: str) -> None:
    """The commit record came last, so that files were lost after it."""
    copy(small, tmp_path / "step-1", tmp_path / "step-2")
    (tmp_path / "step-1" / "rank-00001.safetensors").unlink()
    with open(tmp_path / "step-2" / "rank-00000.safetensors", "r+b") as file:
        file.truncate(100)

    rows = ops.steps(str(tmp_path)).steps

    assert [row.state for row in rows] == ["corrupt", "corrupt"]
    assert "rank-00001.safetensors is missing" in rows[0].why and "has 100 bytes" in rows[1].why


def test_a_flipped_bit_is_found_unless_quick(tmp_path: Path, small: str) -> None:
    """By default bytes are compared with digests, and the step before is taken; quick trusts structure."""
    copy(small, tmp_path / "step-1", tmp_path / "step-2")
    flip(tmp_path / "step-2" / "rank-00001.safetensors", -9)

    found = ops.newest(str(tmp_path))

    assert found.path == str(tmp_path / "step-1")
    assert found.passed_over[0].state == "corrupt" and "rank-00001.safetensors" in found.passed_over[0].why
    assert ops.newest(str(tmp_path), quick=True).path == str(tmp_path / "step-2")


def test_a_plain_copy_is_as_good_as_the_original(tmp_path: Path, small: str) -> None:
    """The commit record is part of the folder: a copy elsewhere is listed, whole, and unchanged by looking."""
    copy(small, tmp_path / "a" / "step-1")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    before = contents(tmp_path / "b")

    assert [row.state for row in ops.steps(str(tmp_path / "b")).steps] == ["whole"]
    assert ops.latest(str(tmp_path / "b")) == str(tmp_path / "b" / "step-1")
    assert contents(tmp_path / "b") == before


def test_no_whole_step_is_a_finding_and_no_step_an_error(tmp_path: Path, small: str) -> None:
    """Two uncommitted folders are listed (exit 1); an empty folder holds no step at all (exit 3); none is exit 4."""
    (tmp_path / "empty").mkdir()
    copy(small, *(tmp_path / "run" / f"step-{n}" for n in (1, 2)))
    for n in (1, 2):
        (tmp_path / "run" / f"step-{n}" / "manifest.json").unlink()

    found = ops.newest(str(tmp_path / "run"))

    assert found.path is None and found.exit_code == 1
    assert [step.name for step in found.passed_over] == ["step-2", "step-1"]
    with pytest.raises(FormatError, match="step-2 was passed over") as caught:
        ops.latest(str(tmp_path / "run"))
    assert caught.value.exit_code == 3
    with pytest.raises(FormatError, match="holds no step") as caught:
        ops.newest(str(tmp_path / "empty"))
    assert caught.value.exit_code == 3
    with pytest.raises(StoreError):
        ops.newest(str(tmp_path / "absent"))


def test_a_row_tells_what_a_step_is(tmp_path: Path) -> None:
    """Format, layout as --layout takes it (three layers on two stages written out), size and number of files."""
    step = tmp_path / "step-00001000.e0"
    make(step, layout=TRAINED)

    (row,) = ops.steps(str(tmp_path)).steps

    assert (row.format, row.layout, row.state, row.step, row.epoch) == (
        "native", "tp=2,pp=2:2/1,ep=4,dp=4,zero=1", "whole", 1000, 0,
    )  # fmt: skip
    assert row.nbytes == sum(file.stat().st_size for file in step.iterdir())
    assert row.files == len(list(step.iterdir())) and 0 <= row.age_s < 600


def test_a_checkpoint_given_as_a_run_is_told_apart(small: str) -> None:
    """Whoever names a step instead of its run learns so, and not that nothing was ever saved."""
    with pytest.raises(FormatError, match="it is a native checkpoint itself; its run is the folder above"):
        ops.newest(small)

    assert ops.steps(small).warnings == [
        f"{small} holds no step, but it is a native checkpoint itself; its run is the folder above it"
    ]


def test_a_step_that_goes_while_it_is_looked_at_is_no_error(tmp_path: Path, small: str, monkeypatch) -> None:
    """Retention removes steps while others list them: one that is gone is not there, one that changes is unfinished."""
    for name in ("step-00000001.e1", "step-00000002.e1", "step-00000003.e1"):
        shutil.copytree(small, tmp_path / name)
    whole = runs._measure

    def measure(run: str, name: str, epoch: int, step: int):
        if step == 3:
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        if step == 2:
            raise ShardMissingError("rank-00000.safetensors is gone")
        return whole(run, name, epoch, step)

    monkeypatch.setattr(runs, "_measure", measure)

    assert [(row.step, row.state) for row in runs.steps(str(tmp_path)).steps] == [
        (1, "whole"),
        (2, "unfinished"),
    ]
    found = runs.newest(str(tmp_path), quick=True)
    assert found.step is not None and found.step.step == 1
