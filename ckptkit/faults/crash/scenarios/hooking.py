"""A trainer saves through the hooks, straight to a folder: no daemon between."""

import logging
import os
from collections.abc import Iterator, Sequence

from ckptkit import ops
from ckptkit.faults.crash.explore import Mark, Scenario
from ckptkit.faults.crash.scenarios.base import RUN, Contents, contents, differing
from ckptkit.ops.runs import step_folders


def _tensors(folder: str) -> Contents:
    """Rank files alone: they hold no step and no incarnation, so equal tensors give equal bytes."""
    return {name: value for name, value in contents(folder).items() if name.endswith(".safetensors")}


class HookSave(Scenario):
    """One process of a run that was started again restores step 1, trains, and saves step 2.

    Incarnations are claimed anew at each start, so small files differ from run to run; tensors are compared.
    """

    def __init__(self, name: str, about: str) -> None:
        self.name, self.about = name, about

    def prepare(self, outside: str, root: str) -> None:
        reference = os.path.join(outside, "reference")
        os.makedirs(reference)
        os.mkdir(os.path.join(root, RUN))
        self._train(os.path.join(root, RUN), 1)
        (self._first,) = self._steps(os.path.join(root, RUN)).values()
        self._train(reference, 1)
        self._train(reference, 2)
        self._second = self._steps(reference)[2]

    def _train(self, run: str, step: int) -> None:
        """A start of the job: whatever is there is restored; then one step, and its save."""
        import torch

        from ckptkit.hooks import Checkpointer

        torch.manual_seed(0)
        model = torch.nn.Linear(24, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)  # which steps a restore passes over is no news here
        ckpt = Checkpointer(run, cache="off", every=1)
        try:
            ckpt.register(model=model, optimizer=optimizer)
            done = ckpt.restore(fresh=step == 1)
            assert done >= step - 1, f"restored step {done}"
            if done < step:
                model(torch.ones(2, 24)).sum().backward()
                optimizer.step()
                ckpt.on_step_end(step)
                assert ckpt.wait(), "the save did not become durable"
        finally:
            ckpt.close()
            logging.disable(before)

    def _steps(self, run: str) -> dict[int, Contents]:
        return {step: _tensors(os.path.join(run, name)) for _, step, name in step_folders(run)}

    def operate(self, root: str, mark: Mark) -> None:
        self._train(os.path.join(root, RUN), 2)
        mark("done")

    def problems(self, root: str, passed: Sequence[str], again: bool) -> Iterator[str]:
        run = os.path.join(root, RUN)
        yield from self._newest(run, "done" in passed)
        if again:
            self._train(run, 2)
            yield from self._newest(run, True)

    def _newest(self, run: str, promised: bool) -> Iterator[str]:
        newest = ops.newest(run).step
        if newest is None:
            yield "no step counts as whole"
        elif promised and newest.step != 2:
            yield "step 2 was promised, and is not whole"
        else:
            wrong = differing(_tensors(newest.path), self._second if newest.step == 2 else self._first)
            if wrong:
                yield f"{newest.name} counts as whole and is not what should be there: {', '.join(wrong)}"
