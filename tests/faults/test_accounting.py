"""Accounting: where the time of a run went, by its log; it adds up or is refused."""

import json
from typing import Any

import pytest

from ckptkit.errors import FormatError
from ckptkit.faults.goodput.accounting import Account, account


def log(*rows: tuple[float, str] | tuple[float, str, dict[str, Any]]) -> list[str]:
    return [json.dumps({"time": row[0], "event": row[1], **(row[2] if len(row) > 2 else {})}) for row in rows]


def step(time: float, number: int, stall: float = 0.0) -> tuple[float, str, dict[str, Any]]:
    return time, "step", {"step": number, "stall_s": stall}


def test_two_incarnations_by_hand() -> None:
    """Step 3 was done twice and a fourth was cut short; the failure was noticed at 150, and 180 is the next launch."""
    lines = log(
        (100, "launch"),
        (110, "resume", {"step": 0}),
        step(120, 1), step(131, 2, 1), step(141, 3),
        (150, "end"),
        (180, "launch"),
        (200, "resume", {"step": 2}),
        step(210, 3), step(221, 4, 1),
        (224, "end", {"completed": True}),
    )  # fmt: skip

    found = account(lines)

    assert found.parts() == {"useful": 40, "lost": 19, "saving": 5, "restarting": 30, "idle": 30}
    assert (found.wall_s, found.failures) == (124, 1)
    assert found.goodput == pytest.approx(40 / 124)


def test_a_death_that_nobody_noticed_is_lost_time() -> None:
    """Without an `end` the time until the next launch belongs to the step that was cut short."""
    lines = log(
        (0, "launch"),
        (1, "resume", {"step": 0}),
        step(2, 1),
        (50, "launch"),
        (60, "resume", {"step": 1}),
        step(61, 2),
    )

    found = account(lines)

    assert found.parts() == {"useful": 2, "lost": 48, "saving": 0, "restarting": 11, "idle": 0}


def test_the_log_of_the_training_loop_is_enough() -> None:
    """Steps 1 to 4, a failure, 3 and 4 again from 30 s later: those are lost once, and the gap is a restart."""
    rows = [(10, 1), (20, 2), (30, 3), (40, 4), (80, 3), (90, 4)]
    lines = [json.dumps({"time": t, "step": n, "seconds": 10, "stall_s": 1, "loss": 2.5}) for t, n in rows]

    found = account(lines)

    assert found.parts() == {"useful": 36, "lost": 18, "saving": 6, "restarting": 30, "idle": 0}
    assert (found.wall_s, found.failures) == (90, 1)


def test_a_restart_that_goes_on_with_the_next_step_is_told_by_its_gap() -> None:
    lines = [json.dumps({"time": t, "step": n, "seconds": 2}) for t, n in ((2, 1), (4.5, 2), (60, 3))]

    found = account(lines)

    assert found.parts() == {"useful": 6.5, "lost": 0, "saving": 0, "restarting": 53.5, "idle": 0}


def test_torn_lines_and_other_events_are_passed_over() -> None:
    lines = log((0, "launch"), (1, "resume", {"step": 0}), step(2, 1), (3, "loss"), step(4, 2))

    found = account([*lines[:3], '{"time": 2.5, "eve', "", "[1]", *lines[3:]])

    assert found.parts() == {"useful": 3, "lost": 0, "saving": 0, "restarting": 1, "idle": 0}


def test_a_stall_is_no_longer_than_its_step() -> None:
    found = account(log((0, "launch"), (0, "resume", {"step": 0}), step(2, 1, 100)))

    assert found.parts()["saving"] == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no event"),
        (["nonsense"], "holds no event"),
        (log((5, "launch"), (4, "resume", {"step": 0})), "line 2: time 4.0 is before 5.0"),
        (log((5, "launch"), (6, "resume")), "line 2: the event 'resume' lacks a key"),
        (
            ['{"event": "launch", "time": "noon"}'],
            "line 1: the event 'launch' lacks a key, or one is no number",
        ),
    ],
)
def test_a_log_that_cannot_be_accounted_for_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        account(lines)


def test_an_account_that_does_not_add_up_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="does not add up"):
        Account(1, 1, 1, 1, 1, 6)
    with pytest.raises(ValueError, match="does not add up"):
        Account(-1, 1, 1, 1, 1, 3)
    assert Account(0, 0, 0, 0, 0, 0).goodput == 0
