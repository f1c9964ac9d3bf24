"""Crash exploration of ckptkit's own operations: nothing is lost; and with a mistake put in, each is found."""

import pytest

from ckptkit.faults.crash.explore import Explored, explore
from ckptkit.faults.crash.scenarios import SCENARIOS
from tests.faults.bugs import BUGS

QUICK = (
    "save",
    "save-new-run",
    "overwrite",
    "resume-after-loss",
    "drain",
    "hook-save",
    "gc",
    "retention",
    "repair",
)


@pytest.mark.parametrize("name", QUICK)
def test_no_crash_loses_anything(name: str) -> None:
    """A few states of each crash point, recovered; a tenth of them run to the end again."""
    found = explore(SCENARIOS[name], limit=8, most=60, rerun_every=10)

    assert found.findings == [], found.summary()
    assert found.states > 10 and found.reruns > 0


@pytest.mark.parametrize("bug", BUGS)
def test_every_mistake_is_found(bug: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    patch, name = BUGS[bug]
    patch(monkeypatch)

    found = explore(SCENARIOS[name], limit=12, rerun_every=2, stop_at_first=True, models=("posix",))

    assert found.findings, f"{bug} was not found in {found.states} states"
    assert len(found.findings[0].lost) <= 6
    with capsys.disabled():
        print(f"\n{bug}: found after {found.states} states\n{found.findings[0].text()}")


@pytest.mark.long
def test_ten_thousand_states(capsys) -> None:
    """Every scenario, both models, every combination where there are at most 300: more than 10,000 distinct states, no loss."""
    every: list[Explored] = []
    for scenario in SCENARIOS.values():
        every.append(explore(scenario, limit=300, most=6000, rerun_every=10))
        with capsys.disabled():
            print(f"\n{every[-1].summary()}", end="")

    assert [found.findings for found in every] == [[]] * len(every)
    assert sum(found.states for found in every) >= 10_000
