"""Exploring one operation: record it, put every state that a crash may leave on a disk, and let the recovery prove itself."""

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptkit.faults.crash.describe import describe, touching
from ckptkit.faults.crash.model import MODELS
from ckptkit.faults.crash.operations import Op, Tree
from ckptkit.faults.crash.record import Recorder
from ckptkit.faults.crash.states import Choice, Moment, moments
from ckptkit.ops.reports import Report, count_text

Mark = Callable[[str], None]
"""Called by an operation at the moment when it has promised something to its caller."""


class Scenario(ABC):
    """An operation, and what must hold after a crash in the middle of it.

    Attributes:
        name: As users name it.
        about: One line.
    """

    name: str
    about: str

    @abstractmethod
    def prepare(self, outside: str, root: str) -> None:
        """Make what the operation starts from: inputs in `outside`, which no crash touches, and the watched folder's content."""

    @abstractmethod
    def operate(self, root: str, mark: Mark) -> None:
        """The real operation, on the watched folder at `root` (the same content may lie at another path)."""

    @abstractmethod
    def problems(self, root: str, passed: Sequence[str], again: bool) -> Iterator[str]:
        """What is wrong in the folder that a crash left.

        Args:
            passed: Promises that were made before the crash.
            again: Whether to run the operation again as well; it must succeed and give the right result.
        """


@dataclass(frozen=True)
class Finding:
    """A crash after which something is wrong.

    Attributes:
        model: In which it may happen.
        problem: What is wrong.
        lost: Operations that a crash must lose or tear for it, as few as possible.
        sequence: What the operation had done to the same files and folders, up to the crash, with these marked.
    """

    scenario: str
    model: str
    problem: str
    lost: list[str]
    sequence: list[str]

    def text(self) -> str:
        return "\n".join(
            [f"{self.scenario} ({self.model}): {self.problem}", *(f"    {line}" for line in self.sequence)]
        )


@dataclass
class Explored(Report):
    """What was explored.

    Attributes:
        operations: Recorded.
        moments: Of a crash, over all models.
        complete: Moments of which every combination was tried.
        tried: Combinations of fates.
        states: Different contents of the folder, with the promises made before: each was checked.
        reruns: States after which the operation was run again.
        findings: At most one for each kind of problem and model.
    """

    scenario: str
    operations: int = 0
    moments: int = 0
    complete: int = 0
    tried: int = 0
    states: int = 0
    reruns: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 1 if self.findings else 0

    def summary(self) -> str:
        head = (
            f"{self.scenario}: {count_text(self.operations, 'operation')}, {count_text(self.moments, 'crash point')} "
            f"({self.complete:,} with every combination), {count_text(self.states, 'distinct state')}, "
            f"{count_text(self.reruns, 'rerun')}, {count_text(len(self.findings), 'finding')}"
        )
        return "\n".join([head, *(finding.text() for finding in self.findings)])


def explore(
    scenario: Scenario,
    *,
    models: Sequence[str] = MODELS,
    limit: int = 128,
    most: int | None = None,
    rerun_every: int = 1,
    seed: int = 0,
    stop_at_first: bool = False,
    folder: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Explored:
    """Record an operation and check every state that a crash in it may leave.

    Args:
        models: Of `crash.model`.
        limit: Combinations that are tried at one moment; those with more are sampled (`crash.states` says how).
        most: Stop after so many distinct states, taken evenly from all moments; None for all.
        rerun_every: The operation is run again after each so many-th state.
        seed: Of the sample.
        stop_at_first: End with the first finding; crashes at the end, where promises were made, are tried first.
        folder: To work in; a temporary one, in memory for the states where there is one.
        progress: Told how many moments are done, of how many.
    """
    with _folders(folder) as (disk, memory):
        watched = os.path.join(disk, "watched")
        os.mkdir(watched)
        scenario.prepare(os.path.join(disk, "outside"), watched)
        with Recorder(watched) as recorder:
            scenario.operate(watched, recorder.mark)
        return check(
            scenario, recorder.start, recorder.ops, memory, models, limit, most, rerun_every, seed,
            stop_at_first, progress,
        )  # fmt: skip


def check(
    scenario: Scenario,
    start: Tree,
    ops: Sequence[Op],
    memory: str,
    models: Sequence[str] = MODELS,
    limit: int = 128,
    most: int | None = None,
    rerun_every: int = 1,
    seed: int = 0,
    stop_at_first: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Explored:
    """Check a recorded operation; `memory` is a folder to put states in."""
    result = Explored(scenario.name, len(ops))
    bench = _Bench(scenario, memory)
    seen: set[tuple[str, tuple[str, ...]]] = set()
    known: set[tuple[str, str]] = set()
    every = [moment for model in models for moment in moments(start, ops, model, limit, seed)]
    result.moments, result.complete = len(every), sum(moment.complete for moment in every)
    if stop_at_first:
        every.reverse()
    quota = None if most is None else max(1, -(-most // len(every)))
    for number, moment in enumerate(every):
        progress(number, len(every))
        if stop_at_first and result.findings:
            break
        fresh = 0
        for choice in moment.choices():
            result.tried += 1
            tree = moment.tree(choice)
            key = (tree.content(), moment.passed)
            if key in seen:
                continue
            if quota is not None and fresh >= quota:
                break
            seen.add(key)
            fresh += 1
            again = len(seen) % rerun_every == 0
            result.reruns += again
            problem = bench.problem(tree, moment.passed, again)
            if problem is not None and (moment.model, _kind(problem)) not in known:
                known.add((moment.model, _kind(problem)))
                result.findings.append(_minimal(bench, scenario, moment, choice, problem, again))
    result.states = len(seen)
    return result


class _Bench:
    """Puts trees on a disk and asks the scenario about them."""

    def __init__(self, scenario: Scenario, memory: str) -> None:
        self._scenario, self._memory = scenario, memory

    def problem(self, tree: Tree, passed: Sequence[str], again: bool) -> str | None:
        """The first problem, in words that are equal for equal problems."""
        root = os.path.join(self._memory, "state")
        shutil.rmtree(root, ignore_errors=True)
        os.mkdir(root)
        tree.put_at(root)
        try:
            return next(iter(self._scenario.problems(root, passed, again)), None)
        except Exception as error:  # noqa: BLE001 (a recovery that fails is a finding, whatever it raised)
            text = str(error).replace(root, "ROOT").splitlines()
            return f"recovery raised {type(error).__name__}: {text[0] if text else ''}"


def _minimal(
    bench: _Bench, scenario: Scenario, moment: Moment, choice: Choice, problem: str, again: bool
) -> Finding:
    """The finding with as few lost operations as do it still (delta debugging)."""

    def fails(numbers: Sequence[int]) -> bool:
        tree = moment.tree({n: choice[n] for n in numbers})
        found = bench.problem(tree, moment.passed, again)
        return found is not None and _kind(found) == _kind(problem)

    # In the ext4 model only the last operations of the journal can be lost, so losses there are no free choice.
    numbers = minimize(sorted(choice), fails) if moment.model == "posix" else sorted(choice)
    lines = describe(moment.ops, {n: choice[n] for n in numbers})
    lost = [lines[n] for n in numbers]
    sequence = [lines[n] for n in touching(moment.ops, numbers)]
    return Finding(scenario.name, moment.model, problem, lost, [*sequence, "crash"])


def _kind(problem: str) -> str:
    """A problem without its particulars, which come after a colon."""
    return problem.partition(":")[0]


def minimize(numbers: Sequence[int], fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """A subset for which `fails` holds still, and for none that lacks one more (ddmin of Zeller and Hildebrandt, 2002)."""
    current, parts = list(numbers), 2
    if not fails(current):
        return current
    if fails([]):
        return []
    while len(current) >= 2:
        size = -(-len(current) // parts)
        chunks = [current[at : at + size] for at in range(0, len(current), size)]
        for chunk in chunks:
            rest = [n for n in current if n not in chunk]
            if len(chunk) < len(current) and fails(chunk):
                current, parts = chunk, 2
                break
            if rest and len(chunks) > 2 and fails(rest):
                current, parts = rest, max(parts - 1, 2)
                break
        else:
            if parts >= len(current):
                break
            parts = min(len(current), 2 * parts)
    return current


@contextmanager
def _folders(folder: str | None) -> Iterator[tuple[str, str]]:
    """A folder on a disk to record in, and one in memory for the states."""
    shm = "/dev/shm" if folder is None and os.access("/dev/shm", os.W_OK) else folder
    with tempfile.TemporaryDirectory(dir=folder) as disk, tempfile.TemporaryDirectory(dir=shm) as memory:
        yield disk, memory
