"""Trainers in torchtitan's style: a manager with the calls of its `CheckpointManager`.

    self.checkpointer = TitanCheckpointer(
        url, dataloader=dataloader, model_parts=model_parts, optimizers=optimizers, lr_schedulers=lr_schedulers,
        states={"train_state": self}, every=50,
    )
    self.checkpointer.load()
    while self.step < steps:
        ...
        self.checkpointer.save(self.step, last_step=self.step == steps)
    self.checkpointer.close()

Model parts are pipeline chunks, whose parameters have the names of the whole model; optimizers and schedulers are torch's, or
containers of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckptkit.hooks.checkpointer import Checkpointer


class TitanCheckpointer:
    """Saves and restores what torchtitan's trainer is made of.

    Args:
        url: Of the run.
        optimizers, lr_schedulers: One, a list, or a container with an `optimizers` or `schedulers` attribute.
        states: Further objects with `state_dict` and `load_state_dict`, such as the trainer itself.
        options: As `Checkpointer` takes them.
    """

    def __init__(
        self, url: str, *, model_parts: Sequence[torch.nn.Module], optimizers: Any, lr_schedulers: Any = None, dataloader: Any = None,
        states: Mapping[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.checkpointer = Checkpointer(url, **options)
        extras = dict(states or {})
        for number, scheduler in enumerate(_members(lr_schedulers, "schedulers")):
            extras[f"lr_scheduler_{number}"] = scheduler
        self.checkpointer.register(
            model=list(model_parts),
            optimizer=_members(optimizers, "optimizers"),
            loader=dataloader,
            extras=extras,
        )
        self.step = 0

    def load(self, step: int = -1, **options: Any) -> bool:
        """Restore the newest step, or the one that is named; whether there was one. Options as `Checkpointer.restore` takes them."""
        source = None if step < 0 else f"{self.checkpointer.url}@{step}"
        self.step = self.checkpointer.restore(source, **options)
        return self.step > 0

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """At the end of every step. The last one is saved whatever the interval, and waited for."""
        started = self.checkpointer.on_step_end(curr_step)
        if last_step:
            if not started:
                self.checkpointer.save()
            self.checkpointer.wait()

    def maybe_wait_for_staging(self) -> None:
        """Before an optimizer that is none of torch's changes anything; torch's are waited for by themselves."""
        self.checkpointer.fence()

    def close(self) -> None:
        self.checkpointer.close()


def _members(thing: Any, name: str) -> list[Any]:
    if thing is None:
        return []
    found = getattr(thing, name, thing)
    return list(found) if isinstance(found, list | tuple) else [found]
