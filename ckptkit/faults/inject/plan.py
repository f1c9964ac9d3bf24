"""Fault plans: what happens, when, and to whom. A plan is drawn from a seed, can be printed, and replayed from what was printed.

`when` counts in whatever the drill counts in: steps of training or seconds. Carrying out is not done here.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.errors import UsageError

Value = int | float | str | bool


@dataclass(frozen=True, order=True)
class Fault:
    """One fault.

    Attributes:
        when: Step or second.
        target: Of a drill's own names: `rank 3`, `node 1`, `daemon 0`, `link 0-1`, `slot 2`.
        kind: Of a drill's menu: `kill`, `hang`, `enospc`, …
        values: Its parameters, as the module that carries it out names them.
    """

    when: float
    target: str
    kind: str
    values: Mapping[str, Value] = field(default_factory=dict, compare=False)

    def text(self) -> str:
        """`12 rank 3 kill`, with `name=value` behind it."""
        more = "".join(f" {name}={json.dumps(value)}" for name, value in sorted(self.values.items()))
        return f"{self.when:g} {self.target}: {self.kind}{more}"


@dataclass(frozen=True)
class Choice:
    """A row of a menu: a kind of fault, whom it may meet, and ranges or lists of its values.

    Attributes:
        weight: How often it is drawn, against the others.
        values: Name → one value; a pair `(low, high)` of numbers, drawn evenly; or a list, of which one is drawn.
    """

    kind: str
    targets: Sequence[str]
    weight: float = 1.0
    values: Mapping[str, Value | tuple[float, float] | Sequence[Value]] = field(default_factory=dict)


@dataclass(frozen=True)
class FaultPlan:
    """Faults in order of time, and the seed that they were drawn from (None where they were written by hand)."""

    faults: tuple[Fault, ...]
    seed: int | None = None

    def __post_init__(self) -> None:
        if any(before.when > after.when for before, after in zip(self.faults, self.faults[1:], strict=False)):
            raise UsageError("a plan's faults must be in order of time")

    @classmethod
    def of(cls, *faults: Fault) -> "FaultPlan":
        """A plan written by hand, in any order."""
        return cls(tuple(sorted(faults)))

    @classmethod
    def draw(
        cls,
        seed: int,
        menu: Sequence[Choice],
        count: int,
        first: float,
        last: float,
        *,
        whole: bool = True,
        apart: float = 0.0,
    ) -> "FaultPlan":
        """`count` faults of a menu between `first` and `last`. Equal arguments give equal plans.

        Args:
            whole: Whether times are whole numbers (steps).
            apart: Least distance between two faults.

        Raises UsageError where so many do not fit.
        """
        if not menu or count < 0 or first > last:
            raise UsageError("a plan needs a menu, a count that is not negative, and first <= last")
        rng = random.Random(f"faults {seed}")
        span = last - first - apart * max(count - 1, 0)
        if span < 0:
            raise UsageError(f"{count} faults {apart:g} apart do not fit between {first:g} and {last:g}")
        moments = sorted(rng.uniform(0, span) for _ in range(count))
        weights = [choice.weight for choice in menu]
        faults = []
        for number, moment in enumerate(moments):
            choice = rng.choices(menu, weights)[0]
            when = first + moment + apart * number
            values = {name: _draw(rng, value) for name, value in sorted(choice.values.items())}
            faults.append(
                Fault(float(round(when)) if whole else when, rng.choice(choice.targets), choice.kind, values)
            )
        return cls(tuple(faults), seed)

    def text(self) -> str:
        """A line for each fault, for people."""
        head = [] if self.seed is None else [f"seed {self.seed}"]
        return "\n".join([*head, *(fault.text() for fault in self.faults)])

    def to_json(self) -> str:
        """One line that `parse` takes."""
        rows = [[fault.when, fault.target, fault.kind, dict(fault.values)] for fault in self.faults]
        return json.dumps({"seed": self.seed, "faults": rows})

    @classmethod
    def parse(cls, text: str) -> "FaultPlan":
        """A plan from its JSON. Raises UsageError where it is none."""
        try:
            plain: Any = json.loads(text)
            faults = [
                Fault(float(when), str(target), str(kind), dict(values))
                for when, target, kind, values in plain["faults"]
            ]
            return cls(tuple(faults), plain["seed"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"this is no fault plan ({error}): {text[:200]}") from None

    def without(self, number: int) -> "FaultPlan":
        """The plan without one fault: for cutting a failing plan down."""
        return FaultPlan((*self.faults[:number], *self.faults[number + 1 :]), self.seed)


class Schedule:
    """A plan being carried out: gives each fault once, when its time has come."""

    def __init__(self, plan: FaultPlan) -> None:
        self._left = list(plan.faults)

    def due(self, now: float) -> Iterator[Fault]:
        """Faults whose time is now or was before."""
        while self._left and self._left[0].when <= now:
            yield self._left.pop(0)

    @property
    def over(self) -> bool:
        return not self._left


def _draw(rng: random.Random, value: Any) -> Value:
    if isinstance(value, tuple):
        low, high = value
        whole = isinstance(low, int) and isinstance(high, int)
        return rng.randint(low, high) if whole else rng.uniform(low, high)
    if isinstance(value, list):
        drawn: Value = rng.choice(value)
        return drawn
    single: Value = value
    return single
