"""`ckptkit train`: the embedded ZAYA1 training loop."""

from typing import Any

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, print_json
from ckptkit.cli.values import LAYOUT, SETTING


@click.command(short_help="Train ZAYA1 in any layout; saves and goes on by itself.")
@click.option(
    "--config",
    required=True,
    metavar="TOML",
    help="A file, or one that comes along: zaya1-tiny.toml, zaya1-100m.toml, zaya1-8b.toml.",
)
@click.option(
    "--layout",
    type=LAYOUT,
    default="tp=1",
    show_default=True,
    metavar="L",
    help="Like tp=2,pp=2,ep=2,dp=2,zero=1.",
)
@click.option(
    "--root", metavar="URL", help="The run's folder: steps are saved to it, the newest is gone on from."
)
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Steps of the whole run.")
@click.option("--every", type=click.IntRange(min=1), metavar="N", help="Steps between saves.")
@click.option("--init", metavar="URL", help="Start from the weights of this checkpoint, of any format.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Of the ranks.",
)
@click.option(
    "--set",
    "settings",
    type=SETTING,
    multiple=True,
    metavar="T.F=VALUE",
    help="A field, like optimizer.clip=0.5. May be repeated.",
)
@click.option("--jsonl", metavar="FILE", help="Append one JSON object a step.")
@click.option("--tensorboard", metavar="DIR", help="Write TensorBoard's log.")
@click.option("--profile", metavar="FILE", default="", help="Write a trace of three steps of rank 0.")
@click.option("--fresh", is_flag=True, help="Start at step 0 although the run holds steps.")
@click.option("--quiet", is_flag=True, help="Print no steps.")
@common
def train(
    config: str,
    layout: str,
    settings: tuple[tuple[str, Any], ...],
    device: str,
    profile: str,
    fresh: bool,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Train until the configured number of steps, on processes of this machine or under torchrun.

    Started again with the same --root it goes on after the newest step there, also in another layout. Ctrl-C saves and
    ends with exit code 5; a loss that is no number ends with 6.
    """
    from ckptkit.train import launch
    from ckptkit.train.config import Config, override
    from ckptkit.train.loop import Options
    from ckptkit.train.runs import train as run

    read = Config.load(config)
    short = {
        "root": "checkpoint.root", "every": "checkpoint.every", "init": "checkpoint.init", "steps": "train.steps",
        "jsonl": "log.jsonl", "tensorboard": "log.tensorboard",
    }  # fmt: skip
    override(read, {short[name]: value for name, value in given.items() if value is not None})
    override(read, dict(settings))
    summary = run(read, layout, device, Options(quiet=quiet or as_json, profile=profile, fresh=fresh))
    if (launch.under_torchrun() or (0,))[0]:
        return  # rank 0 tells it
    last = summary.losses[-1] if summary.losses else None
    if as_json:
        print_json(
            "Trained", {"first_step": summary.first, "losses": summary.losses, "seconds": summary.seconds}
        )
    elif last is not None:
        show.say(
            f"trained from step {summary.first} to {summary.first + len(summary.losses)}: loss {last:.4f}, {summary.seconds:.1f} s"
        )
    else:
        show.say(f"the run already has {summary.first} steps; nothing to do")
