"""A step is written: reshard into several formats, copy, and the drain of a cache."""

import os
from collections.abc import Iterator
from glob import glob
from typing import Any

from ckptkit import ops
from ckptkit.errors import InterruptedRunError
from ckptkit.faults.crash.scenarios.base import RunScenario, contents, differing, synth
from ckptkit.faults.interpose import Call, Interposer, Proceed

OLD, NEW = "step-00000001", "step-00000002"


class WriteStep(RunScenario):
    """A step is written beside an older one, or in place of one.

    Args:
        overwrite: Whether there is a step of that name already, of other content, that may be replaced.
        stopped: Whether a run that stopped half-way left its work, which this one continues.
        lost: Pattern of files that an earlier crash took from that work.
        parents: Whether the run folder and those above it do not exist yet.
        options: Of `ops.reshard`.
    """

    new = NEW
    """Name of the step's folder."""

    def __init__(
        self, name: str, about: str, *, overwrite: bool = False, stopped: bool = False, lost: str = "",
        parents: bool = False, restart: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(name, about)
        self._overwrite, self._stopped, self._lost, self._restart = overwrite, stopped, lost, restart
        self._parents = parents
        if parents:
            self.run = os.path.join("deep", "er", "run")
        # Whether fingerprints are taken depends on where the folder lies, unless told.
        native = {"to": "native", "layout": "ep=2,dp=2", "fingerprint": True}
        self._options: dict[str, Any] = options or native

    def prepare(self, outside: str, root: str) -> None:
        self.begin()
        os.mkdir(outside)
        self._source = os.path.join(outside, "source")
        self.make_source(self._source)
        reference = os.path.join(outside, "reference", self.new)
        self.write(reference)
        new = contents(reference)
        self.allowed[self.new] = [new]
        self.final[self.new] = new
        if self._parents:
            return
        run = os.path.join(root, self.run)
        os.mkdir(run)
        synth(os.path.join(run, OLD), 1, layout="tp=1")
        old = contents(os.path.join(run, OLD))
        self.kept[OLD] = self.final[OLD] = old
        self.allowed[OLD] = [old]
        if self._overwrite:
            synth(os.path.join(run, self.new), 3, layout="tp=1")
            self.allowed[self.new].append(contents(os.path.join(run, self.new)))
        if self._stopped:
            self._stop_midway(root)
            for path in glob(os.path.join(run, ".*", self._lost)) if self._lost else ():
                os.unlink(path)

    def make_source(self, path: str) -> None:
        synth(path, 2)

    def write(self, target: str, **options: Any) -> None:
        """Write the new step."""
        ops.reshard(self._source, target, threads=1, **{**self._options, **options})

    def act(self, root: str) -> None:
        target = os.path.join(root, self.run, self.new)
        self.write(target, **self._given(self._restart))

    def again(self, root: str) -> None:
        # Where the new step is there, an operation without --overwrite refuses, as it should.
        target = os.path.join(root, self.run, self.new)
        if self._overwrite or not os.path.exists(target):
            self.write(target, **self._given(False))

    def _given(self, restart: bool) -> dict[str, bool]:
        return {key: True for key, value in (("overwrite", self._overwrite), ("restart", restart)) if value}

    def broken(self, run: str, promised: bool) -> Iterator[str]:
        there = contents(os.path.join(run, self.new))
        wrong = differing(there, self.final[self.new])
        if promised and wrong:
            yield f"{self.new} was promised, and is not there as it should be: {', '.join(wrong)}"
        if self._overwrite and there not in self.allowed[self.new]:
            yield f"{self.new}, to be replaced, is neither the old one nor the new one"

    def _stop_midway(self, root: str) -> None:
        """Run until all tensors are durable, and stop before the small files."""

        def stop(call: Call, proceed: Proceed) -> Any:
            if call.kind == "open" and os.path.basename(call.path) in ("index.npz", "manifest.json"):
                raise KeyboardInterrupt
            return proceed(call)

        with Interposer(root, stop):
            try:
                self.write(os.path.join(root, self.run, self.new))
            except InterruptedRunError:
                return
        raise AssertionError("the run was not stopped")


class Copy(WriteStep):
    """A native checkpoint is copied as it is."""

    def make_source(self, path: str) -> None:
        synth(path, 2, layout="ep=2,dp=2")

    def write(self, target: str, **options: Any) -> None:
        ops.copy(self._source, target, threads=1, **options)
