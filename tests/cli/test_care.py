"""`ckptkit copy`, `repair` and `gc`: what they print, their JSON and their exit codes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.helpers import contents, invoke, invoke_json


def test_copy_says_what_it_did(made: Path, tmp_path: Path) -> None:
    done = invoke("copy", made / "native", tmp_path / "out")

    assert done.exit_code == 0 and "opened again and whole" in done.output
    assert contents(tmp_path / "out") == contents(made / "native")
    code, found = invoke_json("copy", made / "hf", tmp_path / "hf")
    assert code == 0 and found["not_checked"] == ["bytes against digests: hf has none"]


def test_copy_refuses_what_is_in_the_way(made: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")

    assert invoke("copy", made / "native", tmp_path / "out").exit_code == 4
    assert invoke("copy", made / "native", made / "native" / "below").exit_code == 2
    assert invoke("copy", tmp_path / "nothing", tmp_path / "b").exit_code == 4
    assert contents(tmp_path / "out").keys() == {"mine"}


def test_repair_mends_and_says_what_is_left(
    made: Path, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy_of("native")
    file = folder / "rank-00003.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1000] ^= 1
    file.write_bytes(raw)

    alone = invoke("repair", folder)
    code, found = invoke_json("repair", folder, "--from", made / "native")

    assert alone.exit_code == 1 and "--from" in alone.output
    assert code == 0 and found["repaired"] == ["rank-00003.safetensors: 1 leaf from the other copy"]
    assert contents(folder) == contents(made / "native")


def test_repair_of_a_lost_manifest_needs_its_flag(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("native")
    (folder / "manifest.json").unlink()

    refused = invoke("repair", folder)

    assert refused.exit_code == 3 and "--rebuild-manifest" in refused.output
    assert invoke("repair", folder, "--rebuild-manifest").exit_code == 0
    assert invoke("verify", folder).exit_code == 0


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        shutil.copytree(made / "native", tmp_path / "run" / f"step-{step:08d}.e0")
    return tmp_path / "run"


def test_gc_lists_what_goes_and_what_stays(run: Path) -> None:
    dry = invoke("gc", run, "--keep-last", 1, "--dry-run")
    assert len(list(run.iterdir())) == 3
    code, found = invoke_json("gc", run, "--keep-last", 1, "--pin", 10)

    assert dry.exit_code == 0 and dry.output.count("would remove step-") == 2
    assert code == 0 and [row["step"] for row in found["removed"]] == [20]
    assert sorted(path.name for path in run.iterdir()) == ["step-00000010.e0", "step-00000030.e0"]


def test_gc_with_wrong_numbers_removes_nothing(run: Path) -> None:
    for wrong in (("--keep-last", 0), ("--keep-last", 1, "--pin", 99), ()):
        assert invoke("gc", run, *wrong).exit_code == 2
    assert len(list(run.iterdir())) == 3
