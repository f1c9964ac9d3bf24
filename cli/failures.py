"""How a command fails: one message, one exit code, a traceback only with `--debug`.

Exit codes of `ckptkit.errors`; besides them 70 for a fault of ours and 141 for a reader that closed the pipe, as
for any program that SIGPIPE ends.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from math import isfinite
from typing import Any

import click

from ckptkit.cli import show
from ckptkit.errors import CkptError, InterruptedRunError

INTERNAL = 70
"""Exit code of an error that is our fault (EX_SOFTWARE of sysexits.h)."""
BROKEN_PIPE = 141

RESUMES = ("reshard", "synth")
"""Commands that write, for which running again goes on from what was durable."""


class ClosedPipe(Exception):
    """Whoever read our output closed it."""


def report(error: BaseException, args: Sequence[str]) -> int:
    """Print what `error` means to a user and return the exit code.

    Args:
        error: Whatever ended the command.
        args: The command line. `--json` and `--debug` are looked for in it, since parsing may have failed.
    """
    as_json, debug = "--json" in args, "--debug" in args
    if isinstance(error, (BrokenPipeError, ClosedPipe)):
        return _closed_pipe()
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    usage: click.UsageError | None = error if isinstance(error, click.UsageError) else None
    kind, message, facts, code = _describe(error, args)
    try:
        if usage is not None and usage.ctx is not None:
            click.echo(usage.ctx.get_usage(), err=True)
            click.echo(f"Try '{usage.ctx.command_path} --help' for help.\n", err=True)
        label = "interrupted:" if code == InterruptedRunError.exit_code else "error:"
        message = message.removeprefix("interrupted; ")
        show.tell(f"{click.style(label, fg='red', bold=True)} {message}")
        if as_json:
            found = {"schema": 1, "error": {"kind": kind, "message": message, "facts": facts}}
            click.echo(json.dumps(found))
            sys.stdout.flush()
    except BrokenPipeError:
        _closed_pipe()
    return code


def _describe(error: BaseException, args: Sequence[str]) -> tuple[str, str, dict[str, Any], int]:
    """Kind, message, facts and exit code of any exception."""
    if isinstance(error, CkptError):
        facts = {name: plain(value) for name, value in error.facts.items()}
        return type(error).__name__, str(error), facts, error.exit_code
    if isinstance(error, click.ClickException):
        return "UsageError", error.format_message(), {}, 2
    if isinstance(error, (KeyboardInterrupt, EOFError, click.Abort)):
        command = next((word for word in args if not word.startswith("-")), "")
        message = "run the same command again to go on" if command in RESUMES else "nothing was changed"
        return InterruptedRunError.__name__, message, {}, InterruptedRunError.exit_code
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return "StoreError", f"{where}{error.strerror}", {"file": error.filename, "errno": error.errno}, 4
    where = _where(error)
    what = f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]
    return (
        "InternalError",
        f"internal error ({what}); please report it, --debug shows where",
        {"at": where},
        INTERNAL,
    )


def _where(error: BaseException) -> str:
    """The innermost frame as `module.py:line`."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers, texts, lists and objects; whatever else as its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "item") and not getattr(value, "shape", ()):  # a number of numpy's
        return plain(value.item())
    return str(value)


def _closed_pipe() -> int:
    """Make further output go nowhere, so that the interpreter ends quietly too."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null, stream.fileno())
            except (OSError, ValueError):  # a stream without a descriptor
                pass
            finally:
                os.close(null)
    return BROKEN_PIPE
