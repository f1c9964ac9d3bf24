"""Where a run's time went: useful, lost, saving, restarting, idle. It adds up, or there is no account.

The log is a text of JSON lines. Each has `time` (seconds since the epoch, or any clock that all lines share) and `event`:

| event | further keys | meaning |
|---|---|---|
| `launch` | | processes of a new incarnation start |
| `resume` | `step` | training goes on after `step` completed steps |
| `step` | `step`, `stall_s` (0) | that step has ended; its time included so much standing still for a save |
| `end` | `completed` (false) | the incarnation has ended: by itself, when training is complete, or its death was noticed |

The log of `ckptkit train` (`[log] jsonl`) has no events, but `time`, `step`, `seconds` and `stall_s`, which is enough: a step that does
not follow the one above it, or begins later than its own length behind it, is a new incarnation's first, and the time between is
restarting (what was lost of a step cannot be told apart).

Other events are ignored. Steps that a later incarnation does again are lost, and so is the step that a failure cut short.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.errors import FormatError

_SLACK_S = 0.1
"""Lines may be that much out of order: a step's beginning is computed from its rounded length."""


@dataclass(frozen=True)
class Account:
    """Seconds of a run by what they were spent on. The parts add up to `wall_s`, or it cannot be built.

    Attributes:
        useful_s: Steps that were kept.
        lost_s: Steps that were done again, or cut short.
        saving_s: Training stood still for a save.
        restarting_s: From a failure until training goes on, as far as something was done about it.
        idle_s: Nothing ran: waiting for a node, for notice of a failure, or a share of the nodes missing.
        wall_s: From the first line to the last.
        failures: Incarnations that ended before the last one.
    """

    useful_s: float
    lost_s: float
    saving_s: float
    restarting_s: float
    idle_s: float
    wall_s: float
    failures: int = 0

    def __post_init__(self) -> None:
        parts = (self.useful_s, self.lost_s, self.saving_s, self.restarting_s, self.idle_s)
        slack = 1e-6 * max(self.wall_s, 1.0)
        if min(parts) < -slack or abs(sum(parts) - self.wall_s) > slack:
            raise ValueError(f"an account that does not add up: {parts} against {self.wall_s} s")

    @property
    def goodput(self) -> float:
        """Useful share of the time; 0 for an empty run."""
        return self.useful_s / self.wall_s if self.wall_s > 0 else 0.0

    def parts(self) -> dict[str, float]:
        """Seconds by name, in the order of printing."""
        return {
            "useful": self.useful_s,
            "lost": self.lost_s,
            "saving": self.saving_s,
            "restarting": self.restarting_s,
            "idle": self.idle_s,
        }


@dataclass
class _Ledger:
    """Running sums; steps stay open until it is known whether they are done again."""

    open_steps: dict[int, float] = field(default_factory=dict)
    lost: float = 0.0
    saving: float = 0.0
    restarting: float = 0.0
    idle: float = 0.0
    state: str = "down"  # down, starting, training

    def spend(self, seconds: float, event: str, row: Mapping[str, Any]) -> None:
        """Account for the time since the last line, which ended with this event."""
        if self.state == "training":
            if event == "step":
                stall = min(max(float(row.get("stall_s", 0.0)), 0.0), seconds)
                self.saving += stall
                step = int(row["step"])
                self.lost += self.open_steps.pop(step, 0.0)
                self.open_steps[step] = seconds - stall
            elif event == "end" and row.get("completed") is True:
                self.saving += seconds  # the last save, and closing
            else:
                self.lost += seconds
        elif self.state == "starting":
            self.restarting += seconds
        else:
            self.idle += seconds

    def turn(self, event: str, row: Mapping[str, Any]) -> None:
        if event == "launch":
            self.state = "starting"
        elif event == "resume":
            first = int(row["step"])
            for step in [step for step in self.open_steps if step > first]:
                self.lost += self.open_steps.pop(step)
            self.state = "training"
        elif event == "end":
            self.state = "down"


def account(lines: Iterable[str], where: str = "the log") -> Account:
    """The account of a run's log. A line torn at the end of an incarnation is passed over.

    Raises FormatError for a log without events, times that run backwards, or an event without its keys; names the line.
    """
    ledger = _Ledger()
    first = last = None
    launches = 0
    for number, now, event, row in _events(lines, where):
        if last is not None and now < last - _SLACK_S:
            raise FormatError(
                f"{where}, line {number}: time {now} is before {last} of the line above. Lines of several ranks, or "
                "clocks that jumped, cannot be accounted for; give the log of one rank, with a monotonic clock",
                file=where,
            )
        now = now if last is None else max(now, last)
        first = now if first is None else first
        ledger.spend(now - last if last is not None else 0.0, event, row)
        ledger.turn(event, row)
        launches += event == "launch"
        last = now
    if first is None or last is None:
        raise FormatError(f"{where} holds no event (launch, resume, step, end)", file=where)
    return Account(
        useful_s=sum(ledger.open_steps.values()),
        lost_s=ledger.lost,
        saving_s=ledger.saving,
        restarting_s=ledger.restarting,
        idle_s=ledger.idle,
        wall_s=last - first,
        failures=max(launches - 1, 0),
    )


def _events(lines: Iterable[str], where: str) -> Iterator[tuple[int, float, str, Mapping[str, Any]]]:
    """`(line number, time, event, values)` of a log of either kind, with numbers checked."""
    before: tuple[float, int] | None = None  # time and number of the last step of a log without events
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        event = row.get("event", "step" if {"time", "step", "seconds"} <= row.keys() else None)
        if event not in ("launch", "resume", "step", "end"):
            continue
        try:
            now = float(row["time"])
            if event in ("resume", "step"):
                row = {**row, "step": int(row["step"]), "stall_s": float(row.get("stall_s", 0.0))}
            if "event" not in row:
                seconds = float(row["seconds"])
                begun = now - seconds
                if before is None or row["step"] != before[1] + 1 or begun - before[0] > seconds:
                    yield number, begun if before is None else before[0], "launch", row
                    yield number, begun, "resume", {"step": row["step"] - 1}
                before = now, row["step"]
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{where}, line {number}: the event {event!r} lacks a key, or one is no number ({error!r})",
                file=where,
            ) from None
        yield number, now, event, row
