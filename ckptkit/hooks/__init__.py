"""Hooks: trainers save and restore with three lines.

    ckpt = ckptkit.Checkpointer("s3://runs/zaya1", every=50, durable_every=1000)
    ckpt.register(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    step = ckpt.restore()
    for step in range(step, total):
        ...
        ckpt.on_step_end(step + 1)
    ckpt.close()

What is here is loaded at first use; nothing imports torch before that.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptkit.hooks.checkpointer import Checkpointer
    from ckptkit.hooks.placement import Held, SchemaPlacement

_WHERE = {"Checkpointer": "checkpointer", "Held": "placement", "SchemaPlacement": "placement"}

__all__ = ["Checkpointer", "Held", "SchemaPlacement"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"ckptkit.hooks.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
