"""`ckptkit plan` and `ckptkit reshard`: what is said before and after, and what needs a flag."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.helpers import ROOT, TINY_LLAMA, contents, invoke, invoke_json, settings


def test_a_reshard_ends_with_one_line_and_nothing_beside_the_destination(made: Path, tmp_path: Path) -> None:
    done = invoke("reshard", made / "native", tmp_path / "out", "--layout", "dp=3,zero=1")

    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) == 1
    assert done.stdout.startswith(f"done: {tmp_path / 'out'}, ")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_there_and_back_gives_the_same_files(made: Path, tmp_path: Path) -> None:
    """The same layout gives the same bytes, whatever lay in between."""
    assert invoke("reshard", made / "native", tmp_path / "a", "--layout", "dp=3,zero=1").exit_code == 0
    assert (
        invoke("reshard", tmp_path / "a", tmp_path / "b", "--layout", "tp=2,pp=2,dp=2,zero=1").exit_code == 0
    )

    before, after = contents(made / "native"), contents(tmp_path / "b")

    assert {n: d for n, d in before.items() if "safetensors" in n} == {
        n: d for n, d in after.items() if "safetensors" in n
    }


def test_optimizer_state_is_not_lost_silently(made: Path, tmp_path: Path) -> None:
    refused = invoke("reshard", made / "native", tmp_path / "hf", "--to", "hf")
    planned = invoke("plan", made / "native", tmp_path / "hf", "--to", "hf", "--no-probe")
    allowed = invoke("reshard", made / "native", tmp_path / "hf", "--to", "hf", "--drop-optimizer")

    assert refused.exit_code == 2 and "--drop-optimizer" in refused.stderr
    assert planned.exit_code == 0 and planned.stdout.splitlines()[-1].endswith("needs --drop-optimizer")
    assert allowed.exit_code == 0, allowed.output


def test_what_is_lost_without_a_flag_of_its_own_is_said(made: Path, tmp_path: Path) -> None:
    """Streams of ranks that a layout lacks, and bits that a cast takes, are listed by the command that loses them."""
    moved = invoke("reshard", made / "native", tmp_path / "a", "--layout", "tp=1")
    cast = invoke("reshard", made / "native", tmp_path / "b", "--dtype", "float16")
    asked = invoke("reshard", made / "native", tmp_path / "c", "--only", "*norm*/param")

    assert (moved.exit_code, cast.exit_code, asked.exit_code) == (0, 0, 0)
    assert moved.stderr.startswith(
        "left behind: extras: per-rank states: layout tp=1 has no such coordinates"
    )
    assert cast.stderr.startswith("cast: bfloat16 → float16, bits may be lost: param of ")
    assert asked.stderr == ""


def test_a_plan_writes_nothing(made: Path, tmp_path: Path) -> None:
    for command in (("plan",), ("reshard", "--dry-run")):
        done = invoke(command[0], made / "native", tmp_path / "out", "--layout", "dp=3,zero=1", *command[1:])

        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines()[-1].startswith("proven: ")
        assert list(tmp_path.iterdir()) == []


def test_plan_and_reshard_in_json(made: Path, tmp_path: Path) -> None:
    code, plan = invoke_json("plan", made / "native", tmp_path / "out", "--layout", "dp=3,zero=1")
    assert (code, plan["destination"]["world"], plan["fits"]) == (0, 3, True)

    code, result = invoke_json("reshard", made / "native", tmp_path / "out", "--layout", "dp=3,zero=1")
    assert (code, result["files"] == 3, result["checked"]) == (0, True, True)


@pytest.mark.parametrize(
    "options",
    [
        ("--layout", "tp=3"),  # does not divide the heads
        ("--layout", "tp=0"),
        ("--layout", "pp=4:1/1"),
        ("--to", "nothing"),
        ("--model", "nothing"),
        ("--memory", "lots"),
        ("--replicas", "maybe"),
        ("--threads", "0"),
        ("--dtype", "int8"),
        ("--only", "matches-nothing-*"),
    ],
)
def test_wrong_use_is_exit_code_2_before_anything_is_written(
    options: tuple[str, str], made: Path, tmp_path: Path
) -> None:
    done = invoke("reshard", made / "native", tmp_path / "out", *options)

    assert done.exit_code == 2, done.output
    assert list(tmp_path.iterdir()) == []


def test_synth_writes_the_same_values_in_any_layout(tmp_path: Path) -> None:
    for name, layout in (("a", "tp=1"), ("b", "tp=2,pp=2,dp=2,zero=1")):
        done = invoke(
            "synth",
            tmp_path / name,
            "--set",
            "num_hidden_layers=2",
            "--model",
            "zaya-tiny",
            "--layout",
            layout,
        )
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("done: ")

    assert invoke("diff", tmp_path / "a", tmp_path / "b").exit_code == 0


def test_an_interrupted_reshard_goes_on_with_the_same_command(tmp_path: Path) -> None:
    """SIGINT while it writes: exit code 5, no destination; then the same command ends it."""
    source, out = tmp_path / "source", tmp_path / "out"
    sizes = settings({**TINY_LLAMA, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 8192})
    assert invoke("synth", source, "--model", "llama", *sizes, "--optimizer", "adamw").exit_code == 0
    code = "from ckptkit.cli.main import cli; cli(prog_name='ckptkit')"
    command = [
        sys.executable,
        "-c",
        code,
        "reshard",
        str(source),
        str(out),
        "--layout",
        "dp=4,zero=3",
        "--threads",
        "1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.monotonic() + 60
    while process.poll() is None and not list(tmp_path.glob(".out.*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGINT)
    printed, said = process.communicate(timeout=60)

    assert process.returncode == 5, (printed, said)
    assert "un the same command" in said and "Traceback" not in said
    assert not out.exists()

    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    assert done.returncode == 0, done.stderr
    assert invoke("verify", out, "--against", source).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_parts_say_what_they_wait_for(made: Path, tmp_path: Path) -> None:
    first = invoke(
        "reshard",
        made / "native",
        tmp_path / "out",
        "--layout",
        "dp=4,zero=3",
        "--part",
        "1/2",
        "--drop-extras",
    )
    code, second = invoke_json(
        "reshard",
        made / "native",
        tmp_path / "out",
        "--layout",
        "dp=4,zero=3",
        "--part",
        "2/2",
        "--drop-extras",
    )

    assert first.exit_code == 0 and "parts 2 are done too" in first.output
    assert code == 0 and second["committed"] and second["part"] == "2/2"
    assert invoke("verify", tmp_path / "out", "--against", made / "native").exit_code == 0


def test_a_part_that_is_none_is_wrong_use(made: Path, tmp_path: Path) -> None:
    for text in ("0/2", "two", "slurm"):
        assert invoke("reshard", made / "native", tmp_path / "out", "--part", text).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_files_are_shared_with_a_base(made: Path, tmp_path: Path) -> None:
    assert invoke("copy", made / "native", tmp_path / "a").exit_code == 0

    done = invoke("reshard", made / "native", tmp_path / "b", "--base", tmp_path / "a")

    assert done.exit_code == 0 and "shared with the base" in done.output
    ranks = sorted(path.name for path in (tmp_path / "b").glob("*.safetensors"))
    assert all((tmp_path / "b" / name).samefile(tmp_path / "a" / name) for name in ranks)
    assert invoke("reshard", made / "native", tmp_path / "c", "--base", made / "hf").exit_code == 2


def test_rules_for_names_from_a_file(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    (tmp_path / "a").mkdir()
    save_file({"x.0.w": np.ones((2, 3), np.float32)}, tmp_path / "a" / "model.safetensors")
    (tmp_path / "rules.toml").write_text('[names]\n"x.{i}.w" = "y.{i}"\n')

    there = invoke("reshard", tmp_path / "a", tmp_path / "b", "--rename", tmp_path / "rules.toml")
    back = invoke("reshard", tmp_path / "b", tmp_path / "c", "--rename-back", tmp_path / "rules.toml")

    assert there.exit_code == back.exit_code == 0
    assert set(load_file(tmp_path / "b" / "model.safetensors")) == {"y.0"}
    assert set(load_file(tmp_path / "c" / "model.safetensors")) == {"x.0.w"}
    assert invoke("reshard", tmp_path / "a", tmp_path / "d", "--rename", tmp_path / "nothing").exit_code == 2
