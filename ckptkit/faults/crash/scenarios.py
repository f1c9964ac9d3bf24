"""ckptkit's own operations on a run folder, as scenarios.

The watched folder holds `run/`, with an older step that was committed long ago. Whatever a crash does: that step stays; the newest whole
step is the older or the new one, and the new one once it was promised; a step that counts as whole is equal to what should be there, byte
for byte; and the operation, run again, ends with the same bytes and leaves nothing behind.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from typing import Any

import xxhash

from ckptkit import ops
from ckptkit.errors import InterruptedRunError
from ckptkit.faults.crash.explore import Mark, Scenario
from ckptkit.faults.interpose import Call, Interposer, Proceed
from ckptkit.ops.runs import step_folders

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "head_dim": 4,
    "moe_intermediate_size": 8,
    "num_experts": 2,
    "router_hidden_size": 8,
    "vocab_size": 20,
}
"""A model of 30 kB: its files have several sectors, and that is all that a crash cares for."""

OLD, NEW = "step-00000001", "step-00000002"


def contents(folder: str) -> dict[str, str]:
    """Files below a folder with digests of their bytes."""
    found = {}
    for path, _, names in os.walk(folder):
        for name in names:
            where = os.path.join(path, name)
            with open(where, "rb") as file:
                found[os.path.relpath(where, folder)] = xxhash.xxh3_128_hexdigest(file.read())
    return found


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


class Reshard(Scenario):
    """A step is written beside an older one: `reshard` into a format.

    Args:
        to: Format.
        layout: Of the new step, where the format has ranks.
        overwrite: Whether there is a step of that name already, of other content, that may be replaced.
        stopped: Whether a run that stopped half-way left its work, which this one continues.
        lost: Pattern of files that an earlier crash took from that work.
        parents: Whether the run folder does not exist yet.
    """

    def __init__(
        self, name: str, about: str, *, to: str = "native", layout: str | None = "ep=2,dp=2", overwrite: bool = False,
        stopped: bool = False, lost: str = "", parents: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self.name, self.about = name, about
        self._options: dict[str, Any] = {"to": to, "threads": 1, "overwrite": overwrite, **options}
        if layout is not None:
            self._options["layout"] = layout
        if to == "native":
            self._options["fingerprint"] = True  # else it depends on where the folder lies
        self._replaces, self._stopped, self._lost, self._parents = overwrite, stopped, lost, parents
        self._run = os.path.join("deep", "er", "run") if parents else "run"

    def prepare(self, outside: str, root: str) -> None:
        """Source and expectation outside, older steps inside."""
        os.mkdir(outside)
        self._source = os.path.join(outside, "source")
        common: dict[str, Any] = {"model": "zaya-tiny", "settings": TINY, "optimizer": "none", "threads": 1}
        ops.synth(self._source, seed=2, step=2, **common)
        reference = os.path.join(outside, "reference")
        ops.reshard(self._source, reference, **{**self._options, "overwrite": False, "restart": False})
        self._new = contents(reference)
        self._old: dict[str, str] = {}
        self._replaced: dict[str, str] = {}
        if not self._parents:
            run = os.path.join(root, self._run)
            os.mkdir(run)
            ops.synth(os.path.join(run, OLD), seed=1, step=1, layout="tp=1", **common)
            self._old = contents(os.path.join(run, OLD))
            if self._replaces:
                ops.synth(os.path.join(run, NEW), seed=3, step=2, layout="tp=1", **common)
                self._replaced = contents(os.path.join(run, NEW))
            if self._stopped:
                self._stop_midway(root)
                for path in glob(os.path.join(run, ".*", self._lost)) if self._lost else ():
                    os.unlink(path)

    def _stop_midway(self, root: str) -> None:
        """Run until all tensors are durable, and stop before the small files."""

        def stop(call: Call, proceed: Proceed) -> Any:
            if call.kind == "open" and os.path.basename(call.path) in ("index.npz", "manifest.json"):
                raise KeyboardInterrupt
            return proceed(call)

        with Interposer(root, stop):
            try:
                self.operate(root, lambda text: None)
            except InterruptedRunError:
                return
        raise AssertionError("the run was not stopped")

    def operate(self, root: str, mark: Mark) -> None:
        self._reshard(root)
        mark(NEW)

    def _reshard(self, root: str, **options: Any) -> None:
        ops.reshard(self._source, os.path.join(root, self._run, NEW), **{**self._options, **options})

    def problems(self, root: str, passed: Sequence[str], again: bool) -> Iterator[str]:
        run = os.path.join(root, self._run)
        promised = NEW in passed
        if not os.path.isdir(run):
            if promised or self._old:
                yield "the run folder is gone"
        else:
            yield from self._steps(run, promised)
        if again:
            # Where the new step is there, an operation without --overwrite refuses, as it should.
            if self._replaces or not os.path.exists(os.path.join(run, NEW)):
                self._reshard(root, restart=False)
            for name, wanted in ((OLD, self._old), (NEW, self._new)):
                wrong = _differing(contents(os.path.join(run, name)), wanted) if wanted else []
                if wrong:
                    yield f"run again, {name} is not what it should be: {', '.join(wrong)}"
            if sorted(os.listdir(run)) != sorted([OLD, NEW] if self._old else [NEW]):
                yield "run again, something is left behind"

    def _steps(self, run: str, promised: bool) -> Iterator[str]:
        if self._old and contents(os.path.join(run, OLD)) != self._old:
            yield "the older step changed"
        there = contents(os.path.join(run, NEW)) if os.path.isdir(os.path.join(run, NEW)) else None
        if promised and there != self._new:
            yield "the new step was promised, and is not there as it should be"
        if self._replaces and there not in (self._replaced, self._new):
            yield "the step to be replaced is neither the old one nor the new one"
        names = step_folders(run)
        if not names:
            if self._old:
                yield "no step is left"
            return
        newest = ops.newest(run)
        if newest.step is None:
            if self._old or promised:
                yield "no step counts as whole"
            return
        if newest.step.name == NEW and there not in (self._replaced or self._new, self._new):
            yield "a step counts as whole and is not what should be there"


def _reshards() -> list[Scenario]:
    hf: dict[str, Any] = {"to": "hf", "layout": None, "drop_extras": True}
    return [
        Reshard("reshard", "a step is written beside an older one, native"),
        Reshard("reshard-new-run", "the same where the run folder does not exist yet", parents=True),
        Reshard("reshard-hf", "a step in safetensors files", **hf),
        Reshard("reshard-dcp", "a step in PyTorch's distributed format", to="dcp"),
        Reshard("overwrite", "a step is replaced by another", overwrite=True),
        Reshard("resume", "a run that was stopped half-way is continued", stopped=True),
        Reshard(
            "resume-after-loss",
            "the same, where a crash took a file and left the journal",
            stopped=True,
            lost="rank-00001.s*",
        ),
        Reshard("restart", "a run that was stopped half-way is started over", stopped=True, restart=True),
    ]


SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in _reshards()}
"""Every scenario by name; each makes its files when it is explored."""
