"""Drills: what is covered, what follows from what was observed, and that a drill can fail."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckptkit.cli.main import cli
from ckptkit.faults.cluster.nursery import Nursery
from ckptkit.faults.drills.base import CLASSES, DRILLS, MATRIX, Drill, chosen
from ckptkit.faults.drills.ledger import Ledger
from ckptkit.faults.drills.report import page
from ckptkit.faults.drills.runner import run_all, run_drill
from ckptkit.faults.drills.verdict import Event, Verdict
from tests.faults.drill_bugs import BUGS


def test_every_row_of_the_matrix_and_every_kind_of_fault_has_a_drill() -> None:
    every = chosen(())
    covered = {one for drill in every for one in drill.covers}

    assert set(MATRIX) <= covered
    assert set(CLASSES) <= covered
    assert len(every) >= 40
    assert sum(drill.kind == "light" for drill in every) >= 28
    assert sum(drill.kind == "zaya" for drill in every) >= 12
    assert {drill.kind for drill in chosen((), smoke=True)} == {"light", "zaya"}


def test_equal_seeds_give_equal_plans() -> None:
    for drill in chosen(()):
        plans = [drill.plan(seed).to_json() for seed in range(20)]
        assert plans == [drill.plan(seed).to_json() for seed in range(20)]
        assert len(set(plans)) == 20 or not drill.menu


@pytest.mark.parametrize(
    ("lost", "floor"),
    [([], 3), (["processes"], 3), (["node"], 2), (["node", "processes"], 2), (["memory"], 1)],
)
def test_what_a_fault_must_leave(lost: list[str], floor: int) -> None:
    """Death of processes spares what is committed, loss of a node what is copied, loss of all memory what is durable."""
    ledger = Ledger()
    for step, level in ((1, 3), (2, 2), (3, 1)):
        ledger.acknowledged(step, level)
    ledger.began(4)

    for what in lost:
        ledger.lost(what)

    assert ledger.floor == floor
    assert ledger.restored(floor) == 4 - floor
    assert ledger.trained == floor and ledger.spared == 1


def test_steps_that_cannot_be_restored_are_no_floor() -> None:
    ledger = Ledger()
    ledger.acknowledged(1, 1)
    ledger.acknowledged(2, 1)
    ledger.unusable.add(2)

    assert ledger.floor == 1


def test_after_a_recovery_memory_must_prove_itself_anew() -> None:
    """A step that was copied is only known to be somewhere; a durable one stays durable."""
    ledger = Ledger()
    ledger.acknowledged(1, 3)
    ledger.acknowledged(2, 2)
    ledger.restored(2)
    ledger.lost("node")

    assert ledger.floor == 1


def test_a_drill_replays_and_passes(tmp_path: Path) -> None:
    """The real thing, by the command: every byte compared, a page written."""
    report = tmp_path / "report.html"

    done = CliRunner().invoke(
        cli, ["drill", "run", "rank-killed-after-seal", "--seed", "7", "--json", "--report", str(report)]
    )

    assert done.exit_code == 0, done.output
    (verdict,) = json.loads(done.stdout.splitlines()[0])["verdicts"]
    assert verdict["state"] == "passed" and verdict["seed"] == 7 and verdict["findings"] == []
    assert verdict["bytes_verified"] > 1_000_000 and verdict["restores"] == 1
    assert [event["kind"] for event in verdict["timeline"]].count("fault") == 1
    text = report.read_text()
    assert "rank-killed-after-seal" in text
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://", text), (
        "the page needs nothing from elsewhere"
    )


def test_a_mistake_turns_a_drill_red() -> None:
    """Readers that compare no digests: the drill sees the wrong byte."""
    assert _with_bug("digests are not checked")


def _with_bug(name: str, seeds: int = 8) -> Verdict | None:
    """The first failed verdict of the drill that the mistake spoils."""
    try:
        for seed in range(seeds):
            Nursery.use("tests.faults.drill_bugs", name)
            verdict = run_drill(chosen([BUGS[name][1]])[0], seed)
            if verdict.state == "failed":
                return verdict
    finally:
        Nursery.fresh()
    return None


@pytest.mark.long
def test_every_mistake_turns_a_drill_red(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of mistakes and drills; those of single processes are found by crash exploration (`test_crash_scenarios`)."""
    found = {name: _with_bug(name) for name in BUGS}

    with capsys.disabled():
        print()
        for name, verdict in found.items():
            told = f"seed {verdict.seed}: {verdict.findings[0]}" if verdict else "not found"
            print(f"{name:40} {BUGS[name][1]:32} {told[:140]}")
    assert all(found.values())


def _fails(stage: object) -> None:
    raise RuntimeError("a drill's own fault")


def test_a_fault_of_the_drill_itself_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never a pass; the traceback is kept."""
    broken = Drill("broken", "Nothing.", ("processes",), "light", (), _fails)

    verdict = run_drill(broken, 0)

    assert verdict.state == "failed" and "a drill's own fault" in verdict.findings[0]
    assert "Traceback" in verdict.error


def test_a_page_keeps_what_it_is_told_as_data() -> None:
    """Texts with markup and losses that are no numbers do no harm."""
    verdict = Verdict(
        "node-lost", "light", 3, "seed 3\n</script><script>alert(1)</script>", findings=["<b>lost</b>"], steps_lost=2,
        timeline=[Event(0.1, "fault", "n0 </script>")], curve=[(1, float("nan"))], reference=[(1, 2.5)],
    )  # fmt: skip
    chosen(())

    text = page([verdict], "today <now>")

    assert text.count("</script>") == 1
    assert "today &lt;now&gt;" in text
    data = json.loads(re.search(r"const facts = (.*);\n", text)[1].replace("<\\/", "</"))  # type: ignore[index]
    (run,) = data["drills"][0]["runs"]
    assert run["state"] == "failed" and run["curve"] == [[1, None]]


def test_wrong_names_are_refused_with_a_hint() -> None:
    done = CliRunner().invoke(cli, ["drill", "run", "node-losst"])

    assert done.exit_code == 2
    assert "did you mean node-lost?" in done.output
    assert CliRunner().invoke(cli, ["drill", "run"]).exit_code == 2
    assert CliRunner().invoke(cli, ["drill", "all", "node-lost"]).exit_code == 2


def test_the_list_says_what_is_promised() -> None:
    done = CliRunner().invoke(cli, ["drill", "list", "--json"])

    found = json.loads(done.stdout)
    assert set(found["drills"]) == set(DRILLS)
    assert found["drills"]["node-lost"]["covers"] == [6, "nodes"]
    assert "drain" in found["scenarios"]


@pytest.mark.long
def test_drills_run_side_by_side() -> None:
    """In processes of their own; verdicts come in the order of the jobs."""
    jobs = [(one, seed) for one in chosen(["rank-killed-in-copy", "node-lost"]) for seed in (1, 2)]

    found = run_all(jobs, parallel=2)

    assert [(one.drill, one.seed) for one in found] == [(drill.name, seed) for drill, seed in jobs]
    assert all(one.passed for one in found), [one.findings for one in found]
