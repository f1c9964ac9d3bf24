"""`ckptkit cache`: the node cache's daemon, and what an operator asks of it."""

from importlib import import_module

import click

from ckptkit.cli.common import common

_COMMANDS = {
    "serve": "Run the daemon of this node and job.",
    "status": "Say what is lost if something dies now, and how the cache is.",
    "ls": "List the versions in memory and in durable storage.",
    "get": "Copy a version out of the cache into a folder.",
    "pin": "Keep a durable step whatever retention says.",
    "unpin": "Leave a pinned step to retention again.",
    "drain": "Write the newest committed step to durable storage now.",
    "evict": "Give memory of copies for other nodes back to the system.",
    "ban": "Never restore a version, or all newer ones.",
    "doctor": "Check what the daemon needs of this node.",
    "certs": "Make the certificates of a job's nodes.",
}


class CacheGroup(click.Group):
    """Commands in `ckptkit.cli.cache_<module>`, imported when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = {
            "serve": "serve",
            "doctor": "doctor",
            "certs": "certs",
            "status": "show",
            "ls": "show",
            "get": "get",
        }
        found = import_module(f"ckptkit.cli.cache_{module.get(cmd_name, 'operate')}")
        command: click.Command = getattr(found, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=CacheGroup, short_help="Keep the latest checkpoint in every node's memory.")
@common
def cache(as_json: bool) -> None:
    """Keep the latest checkpoint in every node's memory.

    `serve` runs the daemon, one for each node and job; the other commands talk to the one of this node.
    """
