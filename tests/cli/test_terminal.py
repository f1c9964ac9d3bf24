"""On a real terminal: colours unless NO_COLOR, nothing wider than the window, progress that goes away."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.cli.helpers import ROOT

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def on_a_terminal(columns: int, *arguments: object, **environment: str) -> tuple[int, str]:
    """Exit code and everything that `ckptkit` shows in a window so wide."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "CI")}
    code = "from ckptkit.cli.main import cli; cli(prog_name='ckptkit')"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=follower, stdout=follower, stderr=follower, cwd=ROOT,
        env={**variables, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the last writer has gone
            break
        if not part:
            break
        shown += part
    os.close(leader)
    return process.wait(timeout=60), shown.decode()


@pytest.mark.parametrize("columns", [40, 80, 140])
@pytest.mark.parametrize("command", ["inspect", "stats", "plan"])
def test_no_line_is_wider_than_the_window(command: str, columns: int, made: Path, tmp_path: Path) -> None:
    """But for words that cannot be broken, such as a path."""
    where = [made / "native", *([tmp_path / "out", "--layout", "dp=3,zero=1"] if command == "plan" else [])]

    code, shown = on_a_terminal(columns, command, *where)

    assert code == 0, shown
    lines = [COLOUR.sub("", line).rstrip() for line in shown.replace("\r", "\n").split("\n")]
    table = [line for line in lines if "/" not in line and "\x1b" not in line]
    assert table and max(map(len, table)) <= columns


def test_colours_are_shown_unless_the_user_asked_for_none(made: Path) -> None:
    _, coloured = on_a_terminal(80, "verify", made / "native")
    _, plain = on_a_terminal(80, "verify", made / "native", NO_COLOR="1")

    assert COLOUR.search(coloured)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", plain)
    assert "no fault" in plain


def test_an_error_is_plain_text_without_colours(tmp_path: Path) -> None:
    code, shown = on_a_terminal(80, "inspect", tmp_path / "absent", NO_COLOR="1")

    assert code == 4
    assert "\x1b" not in shown and shown.split()[0] == "error:"  # a long path goes to a line of its own
