"""Small models and trainers of every kind that the hooks know, and their whole state gathered for comparison."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH = 24


class Block(nn.Module):
    """A gated layer with a norm and a buffer that the forward pass changes."""

    calls: torch.Tensor

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls += 1
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks and a head of a size that no number of ranks divides."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, rank: int = 0, ranks: int = 1) -> torch.Tensor:
    """The data of a step, the same for every number of ranks; or one rank's share."""
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(step))
    return x.chunk(ranks)[rank]


Trainer = tuple[Any, torch.optim.Optimizer, Callable[[int], float]]
"""A `Net`, or what wraps one; its optimizer; one step."""


def make(kind: str, rank: int, world: int, optimizer: str = "adamw", seed: int = 0) -> Trainer:
    """A trainer of a kind (`plain`, `ddp`, `fsdp`, `hsdp`, `tp`, `zero`): model, optimizer, and one step that gives the loss."""
    torch.manual_seed(seed)
    net: Any = Net()
    data = world
    place = rank
    if kind == "ddp" or kind == "zero":
        net = DistributedDataParallel(net)
    elif kind in ("fsdp", "hsdp"):
        mesh = (
            init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
            if kind == "fsdp"
            else init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        )
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif kind == "tp":
        dp = 2 if world >= 4 else 1
        mesh = init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if dp > 1:
            for block in net.blocks:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(net, mesh=mesh["dp"])
        data, place = dp, rank // (world // dp)
    elif kind == "plain":
        data, place = 1, 0
    opt = _optimizer(optimizer, net, kind)

    def step(number: int) -> float:
        x = batch(number, place, data)
        loss = net(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        if kind == "tp" and data == 1:
            pass
        opt.step()
        total = loss.detach().clone()
        if data > 1:
            whole = total / world
            dist.all_reduce(whole)
            return float(whole)
        return float(total)

    return net, opt, step


def _optimizer(name: str, net: nn.Module, kind: str) -> torch.optim.Optimizer:
    params = list(net.parameters())
    if kind == "zero":
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-2)
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(params, lr=1e-2),
        "amsgrad": lambda: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
        "sgd": lambda: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.1),
        "nadam": lambda: torch.optim.NAdam(params, lr=1e-2),
        "adagrad": lambda: torch.optim.Adagrad(params, lr=1e-2),
        "rmsprop": lambda: torch.optim.RMSprop(params, lr=1e-3, centered=True, momentum=0.5),
        "adadelta": lambda: torch.optim.Adadelta(params),
        "adamax": lambda: torch.optim.Adamax(params),
        "asgd": lambda: torch.optim.ASGD(params),
        "rprop": lambda: torch.optim.Rprop(params),
        "radam": lambda: torch.optim.RAdam(params),
        "adafactor": lambda: torch.optim.Adafactor(params),
    }
    return makers[name]()


def whole(net: nn.Module, opt: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters, buffers and optimizer state of the run by name, gathered. Every rank calls it."""
    found: dict[str, torch.Tensor] = {}
    inner: Any = getattr(opt, "optim", opt)
    for name, param in net.named_parameters():
        name = name.removeprefix("module.")
        found[name] = _full(param)
        for key, value in inner.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}"] = _full(value)
    for name, buffer in net.named_buffers():
        found[name.removeprefix("module.")] = _full(buffer)
    if inner is not opt:  # each rank has the state of some parameters
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, found)
        found = {name: tensor for part in parts for name, tensor in part.items()}
    return found


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names that are not in both, or not equal bit for bit."""
    return sorted(n for n in {*a, *b} if n not in a or n not in b or not torch.equal(a[n], b[n]))
