"""Steps are removed: retention and garbage collection. And one is repaired."""

import os
import shutil
from collections.abc import Callable, Iterator

from ckptkit import ops
from ckptkit.cache.durable import DurableRun
from ckptkit.faults.crash.scenarios.base import RunScenario, contents, differing, synth

STEPS = ("step-00000001", "step-00000002", "step-00000003")


class RemoveSteps(RunScenario):
    """Of three steps the newest stays. What is left of the others never counts as whole, unless all of it is there.

    Args:
        remove: Removes them from a run, so that one stays; may be called again.
        format: Of the steps.
    """

    def __init__(self, name: str, about: str, remove: Callable[[str], None], to: str = "native") -> None:
        super().__init__(name, about)
        self._remove, self._to = remove, to

    def prepare(self, outside: str, root: str) -> None:
        self.begin()
        run = os.path.join(root, self.run)
        os.mkdir(run)
        for number, name in enumerate(STEPS, 1):
            synth(os.path.join(run, name), number, layout="tp=1", to=self._to)
            self.allowed[name] = [contents(os.path.join(run, name))]
        self.kept[STEPS[-1]] = self.final[STEPS[-1]] = self.allowed[STEPS[-1]][0]

    def act(self, root: str) -> None:
        self._remove(os.path.join(root, self.run))

    def again(self, root: str) -> None:
        self._remove(os.path.join(root, self.run))

    def broken(self, run: str, promised: bool) -> Iterator[str]:
        for name in STEPS[:-1]:
            path = os.path.join(run, name)
            if not os.path.isdir(path):
                continue
            if promised:
                yield f"{name} was removed, and is there again"
            there = contents(path)
            alone = ops.steps(run)
            state = next(row.state for row in alone.steps if row.name == name)
            if state == "whole" and there not in self.allowed[name]:
                yield f"{name} counts as whole, and only a part of it is there"
            if state == "corrupt":
                yield f"{name} counts as damaged, where its removal was interrupted"


def collect(run: str) -> None:
    ops.gc(run, keep_last=1, abandoned_s=0)


def retain(run: str) -> None:
    durable = DurableRun(run)
    try:
        durable.retain(keep_last=1, keep_every=0, epoch=0, restored=None)
        durable.sweep(1, 0.0)
    finally:
        durable.close()


class Repair(RunScenario):
    """A damaged step is repaired from another copy. Until then, and after a crash, it is passed over or whole."""

    def prepare(self, outside: str, root: str) -> None:
        self.begin()
        run = os.path.join(root, self.run)
        os.mkdir(run)
        for number, name in enumerate(STEPS[:2], 1):
            synth(os.path.join(run, name), number, layout="ep=2,dp=2")
        self._copy = os.path.join(outside, "copy")
        os.mkdir(outside)
        shutil.copytree(os.path.join(run, STEPS[1]), self._copy)
        for name in STEPS[:2]:
            whole = contents(os.path.join(run, name))
            self.allowed[name], self.final[name] = [whole], whole
        self.kept[STEPS[0]] = self.final[STEPS[0]]
        for file in ("rank-00000.safetensors", "rank-00001.digests"):
            with open(os.path.join(run, STEPS[1], file), "r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                last = opened.read(1)
                opened.seek(-1, os.SEEK_END)
                opened.write(bytes([last[0] ^ 1]))

    def act(self, root: str) -> None:
        ops.repair(os.path.join(root, self.run, STEPS[1]), source=self._copy, threads=1)

    def again(self, root: str) -> None:
        self.act(root)

    def broken(self, run: str, promised: bool) -> Iterator[str]:
        wrong = differing(contents(os.path.join(run, STEPS[1])), self.final[STEPS[1]])
        if promised and wrong:
            yield f"{STEPS[1]} was repaired, and is damaged again: {', '.join(wrong)}"
