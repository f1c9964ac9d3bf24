"""`ckptkit drill`: faults put into the real program, and the proof that nothing is lost."""

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, print_json
from ckptkit.cli.failures import plain
from ckptkit.cli.progress import Progress
from ckptkit.errors import UsageError


@click.command(short_help="Put faults into the program, and check that nothing is lost.")
@click.argument("action", type=click.Choice(["list", "explore"]))
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--model", "model", type=click.Choice(["posix", "ext4", "both"]), default="both", show_default=True,
    help="What a crash may do.",
)  # fmt: skip
@click.option(
    "--limit", type=click.IntRange(min=1), default=32, show_default=True, metavar="N",
    help="Combinations tried at one crash point.",
)  # fmt: skip
@click.option(
    "--rerun-every", type=click.IntRange(min=1), default=5, show_default=True, metavar="N",
    help="Run the operation again after each so many-th state.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of what is sampled.")
@common
def drill(
    action: str, names: tuple[str, ...], model: str, limit: int, rerun_every: int, seed: int, as_json: bool
) -> int:
    """`list` names the scenarios. `explore` records an operation of each, and checks the recovery from every state that a crash
    in it may leave on a disk; all scenarios unless some are named.

    Exits 1 when a crash could lose something.
    """
    from ckptkit.faults.crash.explore import explore
    from ckptkit.faults.crash.model import MODELS
    from ckptkit.faults.crash.scenarios import SCENARIOS

    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise UsageError(f"there is no scenario {unknown[0]!r}; `ckptkit drill list` names them all")
    chosen = [SCENARIOS[name] for name in names or SCENARIOS]
    if action == "list":
        if as_json:
            print_json("Scenarios", {"scenarios": {one.name: one.about for one in chosen}})
        else:
            show.fields((one.name, one.about) for one in chosen)
        return 0
    found = []
    for scenario in chosen:
        with Progress(f"exploring {scenario.name}", unit="crash points") as progress:
            found.append(
                explore(
                    scenario, models=MODELS if model == "both" else (model,), limit=limit, rerun_every=rerun_every,
                    seed=seed, progress=progress,
                )
            )  # fmt: skip
        if not as_json:
            show.say(found[-1].summary())
    states = sum(one.states for one in found)
    findings = sum(len(one.findings) for one in found)
    if as_json:
        print_json(
            "Explorations",
            {"states": states, "findings": findings, "scenarios": [plain(one.as_dict()) for one in found]},
        )
    else:
        show.say(f"{show.plural(states, 'distinct state')}, {show.plural(findings, 'finding')}")
    return 1 if findings else 0
