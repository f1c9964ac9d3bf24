"""What a drill observed, and the verdict that follows from it."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any


class NotHereError(Exception):
    """A drill needs what this machine does not have."""


@dataclass(frozen=True)
class Event:
    """Something on the timeline.

    Attributes:
        at_s: Seconds since the drill began.
        kind: `fault`, `restart`, `restored`, `saved`, `note`.
        text: For people.
    """

    at_s: float
    kind: str
    text: str


@dataclass
class Verdict:
    """The end of one drill with one seed.

    Attributes:
        findings: What was promised and does not hold; a drill passes where there are none.
        skipped: Why it could not be run here; then it neither passes nor fails.
        steps_lost: The most save intervals that a recovery had to do again.
        recover_s: The longest time from a fault to the next committed save, or to the next step trained.
        bytes_verified: Compared with what was saved, byte for byte.
        restores: Recoveries that were compared.
        plan: The faults, as drawn.
        curve, reference: `(step, loss)` of this run, every attempt, and of the undisturbed one; zaya drills only.
    """

    drill: str
    kind: str
    seed: int
    plan: str = ""
    findings: list[str] = field(default_factory=list)
    skipped: str = ""
    steps_lost: int = 0
    recover_s: float | None = None
    bytes_verified: int = 0
    restores: int = 0
    seconds: float = 0.0
    timeline: list[Event] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    reference: list[tuple[int, float]] = field(default_factory=list)
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.findings and not self.skipped

    @property
    def state(self) -> str:
        """`passed`, `failed` or `skipped`."""
        return "failed" if self.findings else "skipped" if self.skipped else "passed"

    def as_dict(self) -> dict[str, Any]:
        return {"state": self.state, **asdict(self)}

    def text(self) -> str:
        """One line for people, and one for each finding."""
        recover = "" if self.recover_s is None else f", recovered in {self.recover_s:.1f} s"
        lost = f"{self.steps_lost} interval{'' if self.steps_lost == 1 else 's'} redone"
        what = (
            self.skipped
            or f"{lost}{recover}, {self.bytes_verified:,} bytes verified in {self.restores} restores"
        )
        return "\n".join(
            [
                f"{self.drill} seed {self.seed}: {self.state} in {self.seconds:.0f} s: {what}",
                *(f"    {line}" for line in self.findings),
            ]
        )


class Clock:
    """Writes a verdict's timeline, and measures recoveries."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self._began, self._began_wall = time.monotonic(), time.time()
        self._fault: float | None = None

    def note(self, kind: str, text: str) -> None:
        """An event now. The time of a fault counts until `recovered`."""
        now = time.monotonic()
        self.verdict.timeline.append(Event(now - self._began, kind, text))
        if kind == "fault" and self._fault is None:
            self._fault = now

    def note_past(self, wall: float, kind: str, text: str) -> None:
        """An event that is learned of afterwards, by the time that a log gives it."""
        events = self.verdict.timeline
        events.append(Event(max(wall - self._began_wall, 0.0), kind, text))
        events.sort(key=lambda event: event.at_s)

    @property
    def open(self) -> bool:
        """Whether there was a fault after which the run was not yet seen to go on."""
        return self._fault is not None

    def recovered(self) -> None:
        """The run is where it was before: time to recover is up to here."""
        if self._fault is not None:
            took = time.monotonic() - self._fault
            self.verdict.recover_s = max(took, self.verdict.recover_s or 0.0)
            self._fault = None

    def end(self) -> None:
        self.verdict.seconds = time.monotonic() - self._began
