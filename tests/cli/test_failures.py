"""How commands fail: one message, one exit code, a traceback only with --debug."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from ckptkit import errors
from ckptkit.cli import failures
from ckptkit.cli.main import LazyGroup

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("m"), 2),
        (errors.LayoutError("m"), 2),
        (errors.FormatError("m"), 3),
        (errors.ShardMissingError("m"), 3),
        (errors.CoverageError("m"), 3),
        (errors.CorruptionError("m"), 3),
        (errors.UnsafeError("m"), 3),
        (errors.StoreError("m"), 4),
        (errors.InterruptedRunError("m"), 5),
        (click.UsageError("m"), 2),
        (KeyboardInterrupt(), 5),
        (OSError(28, "No space left on device", "/x"), 4),
        (ZeroDivisionError("m"), 70),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: BaseException, code: int) -> None:
    assert failures.report(error, ["verify"]) == code


def test_an_error_prints_its_message_alone(capsys: pytest.CaptureFixture[str]) -> None:
    failures.report(errors.FormatError("a.safetensors: header ends early"), ["inspect", "x"])

    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: a.safetensors: header ends early\n")


def test_with_json_the_error_is_the_one_object_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    failures.report(
        errors.CorruptionError("leaf 3 changed", file="a", leaf=3, box=(1, 2)), ["verify", "--json", "x"]
    )

    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "schema": 1,
        "error": {
            "kind": "CorruptionError",
            "message": "leaf 3 changed",
            "facts": {"file": "a", "leaf": 3, "box": [1, 2]},
        },
    }
    assert err == "error: leaf 3 changed\n"


def test_a_fault_of_ours_is_one_line_that_asks_for_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    failures.report(KeyError("layers.0"), ["stats", "x"])

    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: internal error (KeyError: 'layers.0'); please report it, --debug shows where\n"


@pytest.mark.parametrize("error", [errors.FormatError("m"), KeyError("k")])
def test_a_traceback_needs_debug(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    failures.report(error, ["stats", "x", "--debug"])
    with_debug = capsys.readouterr().err
    failures.report(error, ["stats", "x"])
    without = capsys.readouterr().err

    assert "Traceback" not in without and with_debug != without
    assert f"{type(error).__name__}" in with_debug


@pytest.mark.parametrize(
    ("verb", "said"), [("reshard", "run the same command again to go on"), ("stats", "nothing was changed")]
)
def test_an_interrupt_says_what_to_do(verb: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    failures.report(KeyboardInterrupt(), [verb, "a", "b"])

    assert capsys.readouterr().err == f"interrupted: {said}\n"


SLOW = (
    "import click, time\n"
    "from ckptkit.cli.main import LazyGroup\n"
    "class Group(LazyGroup):\n"
    "    def list_commands(self, ctx): return ['reshard']\n"
    "    def get_command(self, ctx, name): return slow\n"
    "@click.command()\n"
    "def slow():\n"
    "    print('ready', flush=True)\n"
    "    time.sleep(60)\n"
    "Group(name='ckptkit')(['reshard'])\n"
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_with_exit_code_5_and_no_traceback(number: signal.Signals) -> None:
    """Schedulers send SIGTERM, people press Ctrl-C; both may run the same command again."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise

    assert process.returncode == 5
    assert err.strip() == "interrupted: run the same command again to go on"


def test_a_reader_that_goes_away_is_no_error() -> None:
    """`ckptkit … | head -1` ends quietly, with the code that a shell gives to SIGPIPE."""
    code = (
        "import click\n"
        "from ckptkit.cli.main import LazyGroup\n"
        "class Group(LazyGroup):\n"
        "    def list_commands(self, ctx): return ['ls']\n"
        "    def get_command(self, ctx, name): return much\n"
        "@click.command()\n"
        "def much():\n"
        "    for line in range(100000): click.echo(f'line {line}')\n"
        "Group(name='ckptkit')(['ls'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()

    process.stdout.close()
    err = process.stderr.read()
    process.wait(timeout=20)
    process.stderr.close()

    assert (process.returncode, err) == (141, b"")


def test_signals_are_as_before_after_a_command() -> None:
    """The group can be called inside another program, whose handlers stay."""

    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.raises(SystemExit):
            LazyGroup(name="ckptkit")(["--help"])

        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_json_cannot_hold_becomes_text() -> None:
    assert failures.plain({"a": float("nan"), "b": (1, {2}), "c": Path("x"), "d": time.struct_time}) == {
        "a": "nan",
        "b": [1, [2]],
        "c": "x",
        "d": str(time.struct_time),
    }
