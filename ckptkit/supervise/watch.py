"""What the pulses of a node's ranks say: who hangs, who is slow, which losses and digests are wrong."""

import json
import math
import os
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.hooks.pulse import beats_file
from ckptkit.supervise.policy import IGNORE, Policy

__all__ = ["Finding", "Watch"]

_DURATIONS = 64
_READ = 1 << 20
_SCALE = 1.4826
"""The median absolute deviation of a normal distribution, in standard deviations, is one over this."""


@dataclass(frozen=True)
class Finding:
    """Something wrong.

    Attributes:
        kind: `hang`, `nan`, `spike`, `corruption`, `slow`.
        action: What the policy says to do: `restart`, `rollback`, `stop`; `ignore` is only told.
        rank: The global rank that shows it, or None where no single one does.
        step: Completed steps there.
        detail: For a person.
    """

    kind: str
    action: str
    rank: int | None
    step: int
    detail: str


@dataclass
class _Rank:
    """What is known of one rank."""

    fd: int = -1
    rest: bytes = b""
    step: int = -1
    at: float | None = None
    closing: bool = False
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=_DURATIONS))


class Watch:
    """Follows the pulses of some ranks from now on.

    Args:
        folder: Where they are.
        ranks: Global ranks on this node.
        policy: Limits.
        now: The monotonic clock, in seconds; as every `now` here.
    """

    def __init__(self, folder: str, ranks: list[int], policy: Policy, now: float) -> None:
        self._folder, self._policy, self._began = folder, policy, now
        self._ranks = {rank: _Rank() for rank in ranks}
        self._losses: deque[float] = deque(maxlen=max(policy.loss.window, 2))
        self._high = 0
        self._slow: set[int] = set()
        self._found: deque[Finding] = deque()
        self.saved = -1
        """The highest step that was told to be durable."""

    @property
    def step(self) -> int:
        """The highest step that every rank has completed, or -1."""
        return min((one.step for one in self._ranks.values()), default=-1)

    def look(self, now: float) -> list[Finding]:
        """Read what is new, and tell what is wrong: each thing once."""
        for rank, one in self._ranks.items():
            for line in self._lines(rank, one):
                self._take(rank, one, line)
        found = list(self._found)
        self._found.clear()
        found += self._slower()
        hang = self._hang(now)
        return [*found, hang] if hang is not None else found

    def close(self) -> None:
        for one in self._ranks.values():
            if one.fd >= 0:
                os.close(one.fd)
                one.fd = -1

    def _lines(self, rank: int, one: _Rank) -> list[dict[str, Any]]:
        if one.fd < 0:
            try:
                one.fd = os.open(beats_file(self._folder, rank), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return []
        lines = []
        while part := os.read(one.fd, _READ):
            *whole, one.rest = (one.rest + part).split(b"\n")
            lines += whole
        found = []
        for line in lines:
            try:
                value = json.loads(line)
            except ValueError:
                continue  # a rank that was killed while it wrote
            if isinstance(value, dict) and isinstance(value.get("at"), int | float):
                found.append(value)
        return found

    def _take(self, rank: int, one: _Rank, line: Mapping[str, Any]) -> None:
        what, step = line.get("what"), line.get("step")
        number = step if isinstance(step, int) else one.step
        if what == "beat":
            if one.at is not None and number > one.step >= 0:
                one.durations.append((line["at"] - one.at) / (number - one.step))
            one.at, one.step = line["at"], number
            if rank == min(self._ranks) and line.get("loss") is not None:
                self._loss(rank, number, line["loss"])
            return
        one.at = line["at"]  # every word is a sign of life
        if what == "closing":
            one.closing = True
        elif what == "saved" and line.get("level") == 3:
            self.saved = max(self.saved, number)
        elif what == "corruption":
            action = self._policy.corruption.action
            named = line.get("rank")
            self._found.append(
                Finding(
                    "corruption",
                    action,
                    named if isinstance(named, int) else rank,
                    number,
                    f"replicas differ: {line.get('detail', 'no detail')}",
                )
            )

    def _loss(self, rank: int, step: int, loss: Any) -> None:
        policy = self._policy.loss
        if not isinstance(loss, int | float) or not math.isfinite(loss):
            if policy.nan != IGNORE:
                self._found.append(
                    Finding("nan", policy.nan, rank, step, f"the loss of step {step} is {loss}")
                )
            return
        known = self._losses
        if policy.spike != IGNORE and len(known) == known.maxlen:
            middle = statistics.median(known)
            spread = _SCALE * statistics.median(abs(value - middle) for value in known)
            limit = middle + policy.spike_sigma * max(spread, 1e-3 * abs(middle))
            self._high = self._high + 1 if loss > limit else 0
            if self._high:  # what is out of line does not become the usual
                if self._high == policy.spike_steps:
                    detail = f"{loss:.4g} is above {limit:.4g} for {self._high} steps (median {middle:.4g})"
                    self._found.append(Finding("spike", policy.spike, rank, step, detail))
                return
        known.append(float(loss))

    def _slower(self) -> list[Finding]:
        """Ranks whose own part of a step is long. Ranks that meet in every step all look alike: this sees those that do not."""
        usual = {rank: statistics.median(one.durations) for rank, one in self._ranks.items() if one.durations}
        if len(usual) < 2:
            return []
        middle = statistics.median(usual.values())
        found = []
        for rank, value in usual.items():
            full = len(self._ranks[rank].durations) >= 8
            if full and rank not in self._slow and value > self._policy.hang.slow_factor * middle > 0:
                self._slow.add(rank)
                detail = f"{value:.3g} s a step; the others need {middle:.3g} s"
                found.append(Finding("slow", IGNORE, rank, self._ranks[rank].step, detail))
        return found

    def _hang(self, now: float) -> Finding | None:
        policy = self._policy.hang
        for one in self._ranks.values():
            # Some save or load something at the start and the end, for as long as the start may take.
            if one.at is None or one.step < 0 or one.closing:
                since, limit = one.at or self._began, policy.startup_s
            else:
                usual = statistics.median(one.durations) if one.durations else 0.0
                since, limit = one.at, max(policy.after_s, policy.factor * usual)
            if now - max(since, self._began) > limit:
                return self._blame(now, limit)
        return None

    def _blame(self, now: float, limit: float) -> Finding:
        """The rank that is furthest behind, where one is."""
        steps = {rank: one.step for rank, one in self._ranks.items()}
        low = min(steps.values())
        behind = [rank for rank, step in steps.items() if step == low]
        alone = behind[0] if len(behind) == 1 and len(steps) > 1 else None
        where = "before the first step" if low < 0 else f"after step {low}"
        who = (
            f"rank {alone} stands" if alone is not None else f"ranks {', '.join(map(str, behind[:8]))} stand"
        )
        return Finding(
            "hang", "restart", alone, max(low, 0), f"{who} still {where} since more than {limit:.3g} s"
        )
