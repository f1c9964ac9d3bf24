"""What ranks do in the tests of distributed saves."""

from pathlib import Path
from typing import Any

import torch

from ckptkit.hooks import Checkpointer
from tests.hooks.models import make, whole


def train(
    rank: int,
    world: int,
    kind: str,
    url: str,
    upto: int,
    every: int | None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Restore, train up to a number of steps, save; gives the losses, the first step, and the whole state."""
    net, opt, step = make(kind, rank, world, seed=rank if kind == "tp" and False else 0)
    ckpt = Checkpointer(url, cache="off", every=every, busy="wait", timeout_s=30, **(options or {}))
    ckpt.register(model=net, optimizer=opt)
    first = ckpt.restore()
    restored = whole(net, opt) if first else {}
    losses = []
    for number in range(first, upto):
        losses.append(step(number))
        ckpt.on_step_end(number + 1)
    ckpt.close()
    state = whole(net, opt)
    return {
        "first": first,
        "losses": losses,
        "restored": restored if rank == 0 else {},
        "state": state if rank == 0 else {},
    }


def steps_in(url: str) -> list[str]:
    return sorted(path.name for path in Path(url).glob("step-*") if (path / "manifest.json").exists())


def quiet() -> None:
    torch.set_num_threads(1)
