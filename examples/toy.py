"""What the examples train: a small classifier on data of its own. Nothing here knows about checkpoints, but for the loader's two methods."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS, BATCH, FEATURES, CLASSES, SAMPLES = 60, 16, 32, 10, 240


def join() -> torch.device:
    """Join the processes that torchrun has started, if it has; gives the device of this one."""
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if gpu else "gloo")
    return device


def world() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Block(nn.Module):
    """A residual layer of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Three layers and a head."""

    def __init__(self, width: int = FEATURES) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """All data: points, and the class of each by a rule that can be learned."""
    seeded = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=seeded)
    return x, (x @ torch.randn(FEATURES, CLASSES, generator=seeded)).argmax(1)


class Loader:
    """Batches in an order that is new in each epoch; every rank takes its share of each.

    Its state is a place in the whole data, the same on all ranks, so that any number of them goes on from there.
    """

    def __init__(self, share: int, shares: int, device: torch.device) -> None:
        self._x, self._y = samples()
        self._share, self._shares, self._device = share, shares, device
        self.batches = 0

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        epoch, place = divmod(self.batches, SAMPLES // BATCH)
        self.batches += 1
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        mine = order[place * BATCH : (place + 1) * BATCH].chunk(self._shares)[self._share]
        return self._x[mine].to(self._device), self._y[mine].to(self._device)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def report(step: int, loss: torch.Tensor) -> None:
    """Print a step and its loss, the mean of all ranks' (with enough digits to tell float32 values apart)."""
    rank, ranks = world()
    whole = loss.detach().double() / ranks
    if ranks > 1:
        dist.all_reduce(whole)
    if rank == 0:
        print(step, f"{float(whole):.12g}", flush=True)
