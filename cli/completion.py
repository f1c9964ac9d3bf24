"""`ckptkit completion`: the script that lets a shell complete commands, options and their values."""

import sys
from typing import Any, cast

import click

from ckptkit.cli.common import common, notes, print_json

HOW = {
    "bash": 'add to ~/.bashrc:  eval "$(ckptkit completion bash)"',
    "zsh": 'add to ~/.zshrc:  eval "$(ckptkit completion zsh)"',
    "fish": "run once:  ckptkit completion fish > ~/.config/fish/completions/ckptkit.fish",
}
"""How each shell is told of its script."""


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(list(HOW)))
@common
def completion(shell: str, as_json: bool) -> None:
    """Print the script that completes ckptkit's commands, options and values in SHELL.

    \b
    bash:  eval "$(ckptkit completion bash)"                            in ~/.bashrc
    zsh:   eval "$(ckptkit completion zsh)"                             in ~/.zshrc
    fish:  ckptkit completion fish > ~/.config/fish/completions/ckptkit.fish
    """
    from click.shell_completion import get_completion_class

    from ckptkit.cli.main import cli

    made = cast(Any, get_completion_class(shell))
    script = made(cli, {}, "ckptkit", "_CKPTKIT_COMPLETE").source()
    if as_json:
        print_json("Completion", {"shell": shell, "script": script, "how": HOW[shell]})
        return
    click.echo(script)
    if sys.stdout.isatty():
        notes([HOW[shell]])
