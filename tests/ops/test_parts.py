"""`reshard --part`: the checkpoint is the same as that of one process, and a part that comes too late is done."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ckptkit import ops
from ckptkit.errors import StoreError, UsageError
from tests.ops.making import contents


@pytest.mark.parametrize("to", ["native", "dcp", "hf", "megatron"])
def test_parts_make_the_checkpoint_of_one_process(trained: str, tmp_path: Path, to: str) -> None:
    """In formats of many files, with checksums that are computed, and of a single file."""
    options: dict[str, Any] = {"to": to, "drop_extras": True, "drop_optimizer": to == "hf"}
    alone = ops.reshard(trained, str(tmp_path / "alone"), **options)

    results = [ops.reshard(trained, str(tmp_path / "b"), part=f"{k}/3", **options) for k in (2, 3, 1)]

    assert contents(tmp_path / "b") == contents(tmp_path / "alone")
    assert [r.committed for r in results] == [r.checked for r in results] == [False, False, True]
    assert results[0].waiting_for == [1, 3]
    assert {path: text for r in results for path, text in r.digests.items()} == alone.digests
    assert sum(r.files for r in results) == alone.files


def test_a_part_that_comes_when_all_is_in_place_is_done(trained: str, tmp_path: Path) -> None:
    """As when a scheduler starts a task again. Something else that is there is in the way."""
    for k in (1, 2):
        ops.reshard(trained, str(tmp_path / "b"), layout="dp=2,zero=1", part=f"{k}/2")

    late = ops.reshard(trained, str(tmp_path / "b"), layout="dp=2,zero=1", part="1/2")

    assert late.committed and late.files == 0 and any("there already" in note for note in late.notes)
    with pytest.raises(StoreError, match="exists"):
        ops.reshard(trained, str(tmp_path / "b"), layout="tp=1", part="1/2")
    with pytest.raises(StoreError, match="exists"):
        ops.reshard(trained, str(tmp_path / "b"), layout="dp=2,zero=1")


def test_wrong_uses_write_nothing(trained: str, tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"part": "3/2"},
        {"part": "x"},
        {"part": "1/2", "overwrite": True},
        {"engine": "spark"},
    ]
    for options in wrong:
        with pytest.raises(UsageError):
            ops.reshard(trained, str(tmp_path / "b"), layout="tp=1", **options)
    with pytest.raises(UsageError, match="local path"):
        ops.reshard(trained, "memory://parts", layout="tp=1", part="1/2")

    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_its_engine_says_how_to_get_it(trained: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pip install 'ckptkit\[ray\]'"):
        ops.reshard(trained, str(tmp_path / "b"), layout="tp=1", engine="ray")

    assert not list(tmp_path.iterdir())
