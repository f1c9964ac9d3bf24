"""What all scenarios of a run folder share: a tiny model, steps made of it, and what must hold after any crash."""

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import xxhash

from ckptkit import ops
from ckptkit.faults.crash.explore import Mark, Scenario
from ckptkit.ops.runs import step_folders
from ckptkit.stores.shared import TEMPORARY

_TINY: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "head_dim": 4,
    "moe_intermediate_size": 8,
    "num_experts": 2,
    "router_hidden_size": 8,
    "vocab_size": 20,
}
"""A model of 30 kB: its files have several sectors, and that is all that a crash cares for."""

Contents = Mapping[str, str]
"""Files of a folder, by path, with digests of their bytes."""

RUN = "run"


def synth(path: str, step: int, **options: Any) -> None:
    """A step with values of its own."""
    given = {"model": "zaya-tiny", "settings": _TINY, "optimizer": "none", "threads": 1, "seed": step}
    ops.synth(path, step=step, **{**given, **options})


def contents(folder: str) -> Contents:
    """What a folder holds; empty where there is none. Files that no reader takes for a part of it do not count."""
    found = {}
    for path, _, names in os.walk(folder):
        for name in names:
            if TEMPORARY.fullmatch(name):
                continue
            where = os.path.join(path, name)
            with open(where, "rb") as file:
                found[os.path.relpath(where, folder)] = xxhash.xxh3_128_hexdigest(file.read())
    return found


def differing(one: Contents, other: Contents) -> list[str]:
    """Files that differ, or that only one side has."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


class RunScenario(Scenario):
    """An operation on a run folder.

    After a crash: steps of `kept` are there, byte for byte; what was promised is there (or gone); a step that counts as whole is
    one of the contents that `allowed` names for it; the newest whole step is not older than the newest of `kept`. The operation, run
    again, ends with exactly the steps of `final`, and leaves nothing beside them.
    """

    run = RUN
    """Path of the run folder in the watched folder."""

    def __init__(self, name: str, about: str) -> None:
        self.name, self.about = name, about
        self.begin()

    def begin(self) -> None:
        """Forget what an earlier exploration prepared."""
        self.kept: dict[str, Contents] = {}
        self.allowed: dict[str, list[Contents]] = {}
        self.final: dict[str, Contents] = {}

    @abstractmethod
    def again(self, root: str) -> None:
        """Run the operation again, as its user would after a crash; it may be complete already."""

    @abstractmethod
    def broken(self, run: str, promised: bool) -> Iterator[str]:
        """What is wrong with the promise."""

    def operate(self, root: str, mark: Mark) -> None:
        self.act(root)
        mark("done")

    @abstractmethod
    def act(self, root: str) -> None: ...

    def problems(self, root: str, passed: Sequence[str], again: bool) -> Iterator[str]:
        run = os.path.join(root, self.run)
        if os.path.isdir(run):
            yield from self._steps(run)
        elif self.kept or "done" in passed:
            yield "the run folder is gone"
        yield from self.broken(run, "done" in passed)
        if again:
            self.again(root)
            yield from self._finished(run)

    def _steps(self, run: str) -> Iterator[str]:
        for name, wanted in self.kept.items():
            wrong = differing(contents(os.path.join(run, name)), wanted)
            if wrong:
                yield f"{name} changed: {', '.join(wrong)}"
        names = step_folders(run)
        if not names:
            if self.kept:
                yield "no step is left"
            return
        newest = ops.newest(run)
        if newest.step is None:
            if self.kept:
                yield "no step counts as whole"
            return
        oldest_allowed = max(self.kept, default="")
        if newest.step.name < oldest_allowed:
            yield f"the newest whole step is {newest.step.name}, older than {oldest_allowed}"
        # Bytes of the newest were compared by `newest`; those of the others need not be whole to be passed over.
        name = newest.step.name
        there = contents(newest.step.path)
        if there not in self.allowed[name]:
            nearest = min((differing(there, allowed) for allowed in self.allowed[name]), key=len)
            yield f"{name} counts as whole and is not what should be there: {', '.join(nearest)}"

    def _finished(self, run: str) -> Iterator[str]:
        for name, wanted in self.final.items():
            wrong = differing(contents(os.path.join(run, name)), wanted)
            if wrong:
                yield f"run again, {name} is not what it should be: {', '.join(wrong)}"
        left = [name for _, _, names in os.walk(run) for name in names if TEMPORARY.fullmatch(name)]
        if left or set(os.listdir(run)) - self.final.keys():
            yield "run again, something is left behind"
