"""The command `ckptkit`: a group that loads each command when it is used, and the one place where errors become exit codes.

`ckptkit --help` imports neither torch nor numpy: names and short helps of the commands are written here, their modules
are imported when one is called.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import click

from ckptkit.cli import failures

COMMANDS: dict[str, dict[str, str]] = {
    "Look": {
        "ls": "List a run's steps: age, size, layout, state.",
        "latest": "Print the path of a run's newest whole step.",
        "inspect": "Show what a checkpoint holds, and where.",
        "stats": "Show min, max, mean, rms, NaN and zeros of every tensor.",
    },
    "Check": {
        "verify": "Check a checkpoint's bytes, or compare it with another.",
        "diff": "Show what differs between two checkpoints, and where.",
    },
    "Write": {
        "plan": "Say what a reshard would do. Nothing is written.",
        "reshard": "Write a checkpoint in another layout or format.",
        "copy": "Copy a checkpoint as it is, its bytes checked.",
        "synth": "Write a random checkpoint, to try storage and layouts.",
    },
    "Look after": {
        "repair": "Mend a native checkpoint, from another copy if need be.",
        "gc": "Remove a run's old steps, and what killed writers left.",
    },
    "Keep in memory": {
        "cache": "Keep the latest checkpoint in every node's memory.",
    },
    "Plan for faults": {
        "supervise": "Run a trainer, watch it, and restart it where that helps.",
        "goodput": "Advise how often to save, and account for a run's time.",
        "drill": "Put faults into the program, and check that nothing is lost.",
    },
    "Train": {
        "train": "Train ZAYA1 in any layout; saves and goes on by itself.",
    },
    "More": {
        "doctor": "Look at what of this machine matters for saving.",
        "selftest": "Check kernels and the copies of snapshots, here.",
        "demo": "Take the whole tour on a small model made on the spot.",
        "completion": "Print the completion script of a shell.",
    },
}
"""Every command with its short help, by what it is for."""


class LazyGroup(click.Group):
    """A group whose commands are modules `ckptkit.cli.<name>`, imported when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for section in COMMANDS.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        return getattr(import_module(f"ckptkit.cli.{cmd_name}"), cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and name not in self.list_commands(ctx):
            from difflib import get_close_matches

            near = get_close_matches(name, self.list_commands(ctx), n=1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"commands are {', '.join(self.list_commands(ctx))}."
            )
            ctx.fail(f"there is no command {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click's, but by section and without importing a command."""
        width = max(len(name) for name in self.list_commands(ctx))
        for section, commands in COMMANDS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """As click's, but without importing a command."""
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=text)
            for section in COMMANDS.values()
            for name, text in section.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        """As click's, which would end a closed pipe with exit code 1: that of differences found."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise failures.ClosedPipe from error

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run one command line. Ends the process with its exit code, whatever happens; errors print one message."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        given = list(sys.argv[1:] if args is None else args)
        code: int
        with _terminated_is_interrupted():
            try:
                code = int(
                    super().main(given, prog_name or "ckptkit", complete_var, standalone_mode=False, **extra)
                    or 0
                )
                sys.stdout.flush()
            except SystemExit:
                raise
            except BaseException as error:  # noqa: BLE001 (whatever ends a command becomes one message and a code)
                code = failures.report(error, given)
        sys.exit(code)


@contextmanager
def _terminated_is_interrupted() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does: buffers are dropped, the journal is kept, the exit code is 5."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread: whoever embeds the group handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from ckptkit import __version__

    click.echo(f"ckptkit {__version__}")
    ctx.exit()


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Open, plan, reshard, verify and compare checkpoints of any layout and format.

    A checkpoint is a folder, by path or file:// URL; a step of a run is RUN@1200 or RUN@latest.
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)
