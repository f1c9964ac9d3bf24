"""`ckptkit verify`: its verdict, what it checked and what it did not."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cli.helpers import ROOT, TINY_LLAMA, invoke, invoke_json, settings


def test_a_good_checkpoint_has_no_fault(made: Path) -> None:
    done = invoke("verify", made / "native")

    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1].startswith(f"no fault in {made / 'native'}")


def test_a_changed_byte_is_a_fault_that_names_its_file(copy_of: Callable[[str], Path]) -> None:
    source = copy_of("native")
    file = source / "rank-00002.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1000] ^= 1
    file.write_bytes(raw)

    done = invoke("verify", source)

    assert done.exit_code == 1, done.output
    assert "rank-00002.safetensors" in done.stdout
    assert re.match(r"\d+ faults? in ", done.stdout.splitlines()[-1])


def test_a_fault_in_json_is_exit_code_1_and_a_report(copy_of: Callable[[str], Path]) -> None:
    source = copy_of("native")
    (source / "rank-00002.safetensors").write_bytes(b"")

    code, found = invoke_json("verify", source)

    assert code == 1
    assert found["report"] == "VerifyReport" and found["fault_count"] >= 1


def test_what_was_not_checked_is_said(made: Path) -> None:
    """hf has no digests; --quick reads no bytes."""
    assert "not checked" in invoke("verify", made / "hf").stdout
    assert "not checked" in invoke("verify", made / "native", "--quick").stdout


def test_against_compares_layouts(made: Path, tmp_path: Path) -> None:
    other_seed = tmp_path / "seed"
    assert invoke("reshard", made / "native", tmp_path / "other", "--layout", "dp=3,zero=3").exit_code == 0
    options = ("--model", "llama", *settings(TINY_LLAMA), "--optimizer", "adamw", "--seed", 7)
    assert invoke("synth", other_seed, *options).exit_code == 0

    assert invoke("verify", made / "native", "--against", tmp_path / "other").exit_code == 0
    assert invoke("verify", made / "native", "--against", made / "hf").exit_code == 0
    assert invoke("verify", made / "native", "--against", other_seed).exit_code == 1


def test_quick_and_sample_exclude_each_other(made: Path) -> None:
    assert invoke("verify", made / "native", "--quick", "--sample", "5%").exit_code == 2


def test_an_interrupted_verify_changed_nothing(made: Path) -> None:
    """Ctrl-C in a command that only reads: exit code 5, and no promise that it would go on."""
    code = (
        "import os, signal, threading\n"
        "from ckptkit.cli.main import cli\n"
        "threading.Timer(0.01, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        f"cli(['verify', {str(made / 'native')!r}], prog_name='ckptkit')\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)

    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1] == "interrupted: nothing was changed"
