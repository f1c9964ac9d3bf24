"""`ckptkit drill`: faults put into the real program, and the proof that nothing is lost."""

from typing import TYPE_CHECKING

import click

from ckptkit.cli import show
from ckptkit.cli.common import common, print_json
from ckptkit.cli.failures import plain
from ckptkit.cli.progress import Progress
from ckptkit.errors import UsageError

if TYPE_CHECKING:
    from ckptkit.faults.drills.base import Drill
    from ckptkit.faults.drills.verdict import Verdict


MANY = 5
"""Faults in a drill from which on it takes minutes."""


@click.command(short_help="Put faults into the program, and check that nothing is lost.")
@click.argument("action", type=click.Choice(["list", "run", "all", "explore"]))
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="The first seed: of plans, or of what is sampled.",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    metavar="K",
    help="So many seeds of each drill.  [default: 1 for run; for all 20 light, 3 zaya, 1 of what takes minutes]",
)
@click.option(
    "--smoke", is_flag=True, help="A small set of drills, with one seed each unless --seeds says more."
)
@click.option("--kind", type=click.Choice(["light", "zaya"]), help="Only drills of this kind.")
@click.option(
    "--report", type=click.Path(dir_okay=False), metavar="HTML", help="Write a page with all results."
)
@click.option(
    "--parallel",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="Zaya drills at a time; of light ones half as many again.",
)
@click.option(
    "--model", "model", type=click.Choice(["posix", "ext4", "both"]), default="both", show_default=True,
    help="explore: what a crash may do.",
)  # fmt: skip
@click.option(
    "--limit", type=click.IntRange(min=1), default=32, show_default=True, metavar="N",
    help="explore: combinations tried at one crash point.",
)  # fmt: skip
@click.option(
    "--rerun-every", type=click.IntRange(min=1), default=5, show_default=True, metavar="N",
    help="explore: run the operation again after each so many-th state.",
)  # fmt: skip
@common
def drill(
    action: str, names: tuple[str, ...], seed: int, seeds: int | None, smoke: bool, kind: str | None, report: str | None, parallel: int,
    model: str, limit: int, rerun_every: int, as_json: bool,
) -> int:  # fmt: skip
    """Runs of real daemons and trainers under faults drawn from seeds; each ends with a verdict.

    `list` names drills and crash scenarios. `run` runs the drills that are named, `all` every one. `explore` records an operation of each crash
    scenario, and checks the recovery from every state that a crash in it may leave on a disk.

    `ckptkit drill run NAME --seed N` replays a plan: the faults are the same, the moments as near as processes allow.

    Exits 1 when a drill fails, or a crash could lose something.
    """
    if action == "explore":
        return _explore(names, model, limit, rerun_every, seed, as_json)
    if action == "list":
        return _list(names, as_json)
    if action == "run" and not names:
        raise UsageError("say which drills to run, or `ckptkit drill all`")
    if action == "all" and names:
        raise UsageError("`all` takes no names; `ckptkit drill run NAME...` runs some")
    from ckptkit.faults.drills.base import chosen

    found = [one for one in chosen(names, smoke=smoke) if kind in (None, one.kind)]

    def count(of: "Drill") -> int:
        if seeds is not None:
            return seeds
        if smoke or action == "run" or of.faults >= MANY:
            return 1
        return {"light": 20, "zaya": 3}[of.kind]

    jobs = [(one, number) for one in found for number in range(seed, seed + count(one))]
    return _run(jobs, parallel, report, as_json)


def _run(jobs: "list[tuple[Drill, int]]", parallel: int, report: str | None, as_json: bool) -> int:
    import datetime

    from ckptkit.faults.drills.report import write_report
    from ckptkit.faults.drills.runner import run_all

    began = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    with Progress("drills", unit="runs") as progress:
        done = 0

        def tell(verdict: "Verdict") -> None:
            nonlocal done
            done += 1
            progress(done, len(jobs))
            if not as_json:
                show.say(verdict.text())

        verdicts = run_all(jobs, parallel=parallel, tell=tell)
    if report:
        write_report(report, verdicts, began)
        show.tell(f"the report is {report}")
    failed = [verdict for verdict in verdicts if verdict.state == "failed"]
    skipped = sum(verdict.state == "skipped" for verdict in verdicts)
    if as_json:
        print_json(
            "Drills",
            {
                "runs": len(verdicts),
                "failed": len(failed),
                "skipped": skipped,
                "verdicts": [plain(v.as_dict()) for v in verdicts],
            },
        )
    else:
        show.say(
            f"{show.plural(len(verdicts), 'run')}, {len(failed)} failed"
            + (f", {skipped} not run here" if skipped else "")
        )
    return 1 if failed else 0


def _list(names: tuple[str, ...], as_json: bool) -> int:
    from ckptkit.faults.crash.scenarios import SCENARIOS
    from ckptkit.faults.drills.base import chosen

    if as_json:
        drills = {
            one.name: {
                "kind": one.kind,
                "promise": one.promise,
                "covers": list(one.covers),
                "smoke": one.smoke,
            }
            for one in chosen(())
            if not names or one.name in names
        }
        scenarios = {one.name: one.about for one in SCENARIOS.values() if not names or one.name in names}
        print_json("DrillList", {"drills": drills, "scenarios": scenarios})
        return 0
    for kind, title in (
        ("light", "Drills with ranks that have no model:"),
        ("zaya", "Drills with the ZAYA1 training loop:"),
    ):
        show.say(title)
        show.fields((one.name, one.promise) for one in chosen(()) if one.kind == kind)
    show.say("Crash scenarios, for `ckptkit drill explore`:")
    show.fields((one.name, one.about) for one in SCENARIOS.values())
    return 0


def _explore(
    names: tuple[str, ...], model: str, limit: int, rerun_every: int, seed: int, as_json: bool
) -> int:
    from ckptkit.faults.crash.explore import explore
    from ckptkit.faults.crash.model import MODELS
    from ckptkit.faults.crash.scenarios import SCENARIOS

    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise UsageError(f"there is no scenario {unknown[0]!r}; `ckptkit drill list` names them all")
    chosen = [SCENARIOS[name] for name in names or SCENARIOS]
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
